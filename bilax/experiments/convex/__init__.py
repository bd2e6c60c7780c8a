"""The paper's convex numerical example."""
