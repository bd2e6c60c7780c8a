"""The paper's non-convex numerical example."""
