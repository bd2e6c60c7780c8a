"""What `solve` runs: anything with `init`, `step` and `point`."""
