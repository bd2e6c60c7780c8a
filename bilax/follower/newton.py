"""Newton's method for followers of up to some hundred variables, on any set and with any proximal term."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from bilax.follower.dynamics import dtype_of
from bilax.problem.problem import Follower
from bilax.problem.sets import Reals
from bilax.problem.terms import term_value


class NewtonState(NamedTuple):
    """Where it is, and what it needs to go on."""

    y: PyTree
    damping: Array
    """what is added to the Hessian's diagonal, in units of its norm"""
    gained: Array
    """by how much the objective has fallen since the start"""
    unsolved: Array


class Newton(eqx.Module):
    """Damped semismooth Newton steps on y = prox(y − α ∇f(y)), with the whole Hessian: quadratic at the end.

    On the whole space these are Newton's own steps; at active constraints and for terms such as `L1` they move to the
    face that one proximal step finds and along it. A step must descend, else it is halved, and in the end, or where
    that is better, a proximal gradient step is taken; the damping grows where the model was wrong (negative curvature)
    and shrinks where not.

    `unsolved` is √(gain still to be had / gain so far), both in f, which has no scale: y may be stretched, f
    multiplied. What a step could gain below f's rounding counts as nothing.
    """

    def init(self, y: PyTree) -> NewtonState:
        zero = jnp.zeros((), dtype_of(y))
        return NewtonState(y, zero, zero, zero + jnp.inf)

    def step(self, k: Any, state: NewtonState, follower: Follower) -> NewtonState:
        y, unravel = ravel_pytree(state.y)

        def lower(v):
            return follower.lower(unravel(v))

        def total(v):
            return follower.total(unravel(v))

        def term(v):
            return jnp.asarray(term_value(follower.y_set, unravel(v)), v.dtype)

        slope, hessian = jax.grad(lower)(y), jax.hessian(lower)(y)
        size = jnp.max(jnp.sum(jnp.abs(hessian), axis=1)) + jnp.finfo(y.dtype).tiny
        damped = hessian + state.damping * size * jnp.eye(y.size, dtype=y.dtype)
        direction, fallback, finish = _direction(follower, unravel, y, slope, damped, size)
        here = total(y)
        # Of f, and of where a projection puts y, which costs the slope times as much where constraints are active.
        rounding = 8 * jnp.finfo(y.dtype).eps * (jnp.abs(here) + jnp.abs(slope) @ jnp.abs(y))

        def step_to(length):
            return finish(y + length * direction)

        def promised(point):
            return slope @ (point - y) + term(point) - term(y)

        def too_far(carry):
            length, halvings = carry
            point = step_to(length)
            promise = promised(point)
            good = (total(point) <= here + 1e-4 * promise + rounding) & (promise <= rounding)
            return ~good & (halvings < 12)

        fixed = jax.lax.stop_gradient((jnp.ones((), y.dtype), jnp.zeros((), int)))
        _, halvings = jax.lax.while_loop(too_far, lambda carry: (carry[0] / 2, carry[1] + 1), fixed)
        moved = step_to(0.5 ** halvings.astype(y.dtype))
        # Where the Hessian is indefinite a Newton step may lead out of Y and be put back to where it began.
        failed = (halvings >= 12) | (total(fallback) < total(moved) - rounding)
        after = jnp.where(failed, fallback, moved)
        after = jnp.where(total(after) <= here + rounding, after, y)

        def model_gain(point):
            return -(promised(point) + 0.5 * (point - y) @ hessian @ (point - y))

        # What either step would gain: the proximal one gains wherever y is not stationary.
        gain = jnp.maximum(model_gain(step_to(jnp.ones((), y.dtype))), model_gain(fallback))
        # A model that promises a loss has not been understood yet.
        gain = jnp.where(failed | ~(gain >= -rounding) | ~jnp.isfinite(gain), jnp.inf, jnp.maximum(gain, 0))
        gained = state.gained + jnp.maximum(here - total(after), 0)
        unsolved = jnp.where(gain <= rounding / 2, 0.0, jnp.sqrt(gain / (gain + gained)))
        unsolved = jnp.where(jnp.isinf(gain), jnp.where(jnp.max(jnp.abs(fallback - y)) == 0, 0.0, 1.0), unsolved)
        damping = jnp.where(
            failed, jnp.maximum(8 * state.damping, 1e-4), jnp.where(halvings > 0, 1, 0.1) * state.damping
        )
        damping = jnp.where(damping < 1e-9, 0.0, damping)
        # What decides where to stop and how to go on carries no derivative.
        control = jax.lax.stop_gradient((damping, gained, unsolved))
        return NewtonState(unravel(after), *(jnp.asarray(number, y.dtype) for number in control))

    def point(self, state: NewtonState) -> PyTree:
        return state.y

    def unsolved(self, state: NewtonState) -> Array:
        return state.unsolved

    def residual_step(self, k: Any) -> Any:
        return 1.0


def _direction(follower: Follower, unravel: Any, y: Array, slope: Array, hessian: Array, size: Array) -> Any:
    """The Newton direction, the point of a proximal gradient step, and how a point of the line is put into Y."""
    if isinstance(follower.y_set, Reals):
        return jnp.linalg.solve(hessian, -slope), y - slope / size, lambda point: point
    alpha = 1 / jnp.max(jnp.sum(jnp.abs(hessian), axis=1))

    def prox(v):
        return ravel_pytree(follower.prox(unravel(v), alpha))[0]

    moved = y - alpha * slope
    near, derivative = prox(moved), jax.jacfwd(prox)(moved)
    identity = jnp.eye(y.size, dtype=y.dtype)
    direction = jnp.linalg.solve(identity - derivative @ (identity - alpha * hessian), near - y)
    # Where the proximal map does not move with its argument, its value is meant exactly: a bound, or zero.
    held = jnp.all(derivative == 0, axis=1)

    def finish(point):
        point = jnp.where(held, near, point)
        return ravel_pytree(follower.project(unravel(point)))[0] if hasattr(follower.y_set, "project") else point

    return direction, near, finish
