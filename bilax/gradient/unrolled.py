"""Derivatives of the steps that were taken: reverse and forward mode along the trajectory."""

import sys
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from bilax.follower.trajectory import Checkpoints, Keep, checkpoints_within, replay, sweep
from bilax.gradient.rule import Cotangents, FollowerRun, StatelessRule

if TYPE_CHECKING:
    from bilax.gradient.method import Method


class Reverse(eqx.Module):
    """Reverse mode along the trajectory, from k̄ down to k̄ − window (0 by default).

    Exact unless the window cuts it. A cut treats s_{k̄−window} as constant, so the z-gradient is then zero.
    `checkpoint=True` keeps about 2√K states at a time in place of K and computes each step once more; a whole number is
    how many bytes the states may take, and `plan` tells what that leads to.
    """

    window: int | None = None
    checkpoint: bool | int = False

    def keep(self, inner_steps: int) -> Keep:
        return lambda state: self._checkpoints(inner_steps, state).spacings

    def plan(self, method: "Method", y: PyTree) -> Checkpoints:
        """Which states of the follower are kept, and what they take; `print` it."""
        return self._checkpoints(method.inner_steps, jax.eval_shape(method.dynamics.init, y))

    def _checkpoints(self, inner_steps: int, state: PyTree) -> Checkpoints:
        everything = checkpoints_within(inner_steps, state, sys.maxsize)
        if isinstance(self.checkpoint, bool):
            return everything._replace(levels=2) if self.checkpoint else everything
        return checkpoints_within(inner_steps, state, self.checkpoint)

    def has_z_gradient(self, inner_steps: int) -> bool:
        return self.window is None or self.window >= inner_steps

    def check(self, method: "Method") -> None:
        if not isinstance(self.checkpoint, bool) and (not isinstance(self.checkpoint, int) or self.checkpoint < 1):
            raise ValueError(f"checkpoint must be True, False or a number of bytes, got {self.checkpoint!r}.")
        if self.window is None:
            return
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}.")
        if self.window > method.inner_steps:
            raise ValueError(
                f"window={self.window} exceeds inner_steps={method.inner_steps}: there are no more steps to go "
                "back over. Use a smaller window, or window=None for all steps."
            )

    def pullback(self, run: FollowerRun, v: PyTree) -> Cotangents:
        dynamics, trajectory = run.method.dynamics, run.trajectory
        moving, rest = eqx.partition(trajectory.chosen, eqx.is_inexact_array)
        (state_bar,) = jax.vjp(lambda s: dynamics.point(eqx.combine(s, rest)), moving)[1](v)
        cut = self.window is not None and self.window < run.method.inner_steps
        stop = jnp.maximum(trajectory.k_bar - self.window, 0) if cut else 0
        try:
            params_bar, state_bar = sweep(run.unrolling, run.params, trajectory, state_bar, stop)
        except ValueError as error:
            if "Reverse-mode differentiation does not work" not in str(error):
                raise
            raise ValueError(
                f"the steps of {dynamics} search along a line or loop until something holds, so that no derivative "
                "can go back over them. Use derivative=bilax.Implicit() with a follower_tolerance, or bilax.Forward()."
            ) from error
        at_start = jax.vjp(
            lambda *start: eqx.filter(run.unrolling.begin(*start), eqx.is_inexact_array), run.params, run.z
        )
        start_bars = at_start[1](state_bar)
        if cut:
            start_bars = jax.tree.map(lambda leaf: jnp.where(stop == 0, leaf, jnp.zeros_like(leaf)), start_bars)
        return Cotangents(jax.tree.map(jnp.add, params_bar, start_bars[0]), start_bars[1])


class Forward(StatelessRule):
    """Forward mode: one tangent of the trajectory per coordinate of the parameters and, if asked for, of z.

    Exact. Costs as many trajectories as there are coordinates, and keeps no states: for few unknowns and
    long trajectories.
    """

    def pullback(self, run: FollowerRun, v: PyTree) -> Cotangents:
        dynamics = run.method.dynamics
        moving, fixed = eqx.partition(run.z, run.z_wanted)
        point, unravel = ravel_pytree((run.params, moving))

        def response(flat):
            params, moving = unravel(flat)
            return dynamics.point(replay(run.unrolling, params, eqx.combine(moving, fixed), run.trajectory.k_bar))

        def along(direction):
            return optax.tree.vdot(v, jax.jvp(response, (point,), (direction,))[1])

        gradient = jnp.asarray(jax.vmap(along)(jnp.eye(point.size, dtype=point.dtype)))
        params_bar, moving_bar = unravel(gradient)
        return Cotangents(params_bar, eqx.combine(moving_bar, jax.tree.map(jnp.zeros_like, fixed)))
