"""The one outer loop, and all that may happen beside it."""
