"""A follower with several minima: solved from several starts at once, the lowest counts."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from bilax.follower.dynamics import Dynamics
from bilax.problem.problem import Follower
from bilax.problem.terms import brought_inside


class SeveralState(NamedTuple):
    """The state of each start, and which of them is lowest."""

    each: PyTree
    best: Array


class SeveralStarts(eqx.Module):
    """Any dynamics, from y and from each of `starts` (a leading axis in every leaf): y is where the lowest of them is.

    Of those that are equally low, the one that the leader likes best (the optimistic formulation).
    """

    dynamics: Dynamics
    starts: PyTree

    def within(self, follower: Follower) -> "SeveralStarts":
        """With each of its starts in this follower's Y."""
        return SeveralStarts(self.dynamics, jax.vmap(lambda one: brought_inside(follower.y_set, one))(self.starts))

    def init(self, y: PyTree) -> SeveralState:
        all_starts = jax.tree.map(
            lambda one, more: jnp.concatenate([one[None], more.astype(one.dtype)]), y, self.starts
        )
        return SeveralState(jax.vmap(self.dynamics.init)(all_starts), jnp.zeros((), int))

    def step(self, k: Any, state: SeveralState, follower: Follower) -> SeveralState:
        each = jax.vmap(lambda one: self.dynamics.step(k, one, follower))(state.each)
        points = jax.vmap(self.dynamics.point)(each)
        totals, uppers = jax.vmap(follower.total)(points), jax.vmap(follower.upper)(points)
        totals = jnp.where(jnp.isfinite(totals), totals, jnp.inf)
        lowest = jnp.min(totals)
        spread = jnp.max(jnp.where(jnp.isfinite(totals), totals, lowest)) - lowest
        # Equally low: within rounding of f, or a millionth of how much the starts' ends differ.
        tie = totals <= lowest + 1e-6 * spread + 64 * jnp.finfo(totals.dtype).eps * jnp.abs(lowest)
        best = jnp.argmin(jnp.where(tie, uppers, jnp.inf))
        return SeveralState(each, jax.lax.stop_gradient(best))

    def point(self, state: SeveralState) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[state.best], jax.vmap(self.dynamics.point)(state.each))

    def unsolved(self, state: SeveralState) -> Array:
        """That of the worst start, so that none wins before it has arrived."""
        return jnp.max(jax.vmap(self.dynamics.unsolved)(state.each))  # pyright: ignore[reportAttributeAccessIssue]

    def residual_step(self, k: Any) -> Any:
        return self.dynamics.residual_step(k)
