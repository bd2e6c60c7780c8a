"""A search along a line for a step that descends enough and far enough (weak Wolfe conditions, by bisection).

Lewis and Overton (2013): it needs no smoothness beyond a slope at almost every point, so that quasi-Newton methods with
it also get through kinks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from bilax.problem.trees import choose


class Trial(NamedTuple):
    """What is known where a step of some length leads."""

    value: Array
    slope: Any
    """the derivative of the value along the line there"""
    found: PyTree
    """what the caller wants to know of the point"""


class _Search(NamedTuple):
    length: Array
    low: Array
    high: Array
    best: Trial
    taken: Array
    """the longest step so far that descends enough; 0 if there is none"""
    trials: Array
    done: Array


def wolfe_search(
    try_step: Callable[[Array], Trial], start: Trial, first: Any = 1.0, most: int = 20, slack: Any = 0.0
) -> tuple[Array, Trial, Array]:
    """The length of a step (0 if none descends), what was found there, and how many were tried.

    `start` is what is known at length 0. A step is accepted where value ≤ value₀ + 10⁻⁴ · length · slope₀ (+ `slack`,
    for rounding) and slope ≥ 0.9 slope₀; where only the first can be had in `most` trials, the longest such is taken.
    """
    kind = start.value.dtype

    def go_on(search):
        return ~search.done & (search.trials < most)

    def body(search):
        trial = try_step(search.length)
        enough = trial.value <= start.value + 1e-4 * search.length * start.slope + slack
        enough &= jnp.isfinite(trial.value)
        flat = trial.slope >= 0.9 * start.slope
        low = jnp.where(enough, search.length, search.low)
        high = jnp.where(enough, search.high, search.length)
        # What descends enough and is lower than all before is kept, should nothing better come.
        better = enough & ((search.taken == 0) | (trial.value <= search.best.value))
        length = jnp.where(jnp.isfinite(high), (low + high) / 2, 2 * low)
        return _Search(
            length,
            low,
            high,
            choose(better, trial, search.best),
            jnp.where(better, search.length, search.taken),
            search.trials + 1,
            enough & flat,
        )

    zero = jnp.zeros((), kind)
    search = _Search(
        jnp.asarray(first, kind), zero, zero + jnp.inf, start, zero, jnp.zeros((), int), jnp.asarray(False)
    )
    search = jax.lax.while_loop(go_on, body, search)
    return search.taken, search.best, search.trials
