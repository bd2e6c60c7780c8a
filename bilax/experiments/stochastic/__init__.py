"""Problems on mini-batches, as benchopt's benchmark_bilevel has them, and the stochastic methods on them."""
