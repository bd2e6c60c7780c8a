"""The paper's experiments, and more, built on the public API only."""
