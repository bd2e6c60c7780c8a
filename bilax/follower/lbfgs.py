"""L-BFGS for followers of any size; bounds, the simplex and terms such as `L1` by working on the active face."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from bilax.follower.dynamics import cauchy_step
from bilax.follower.line_search import Trial, wolfe_search
from bilax.problem.problem import Follower
from bilax.problem.sets import Reals
from bilax.problem.terms import tangent, term_value
from bilax.problem.trees import choose


class Pairs(NamedTuple):
    """The last differences of points and of slopes, newest last; what is not filled yet is zero."""

    steps: Array
    changes: Array
    weights: Array
    """1 / ⟨step, change⟩, or 0"""


class LBFGSState(NamedTuple):
    """Where it is, and what it needs to go on."""

    y: PyTree
    value: Array
    slope: Array
    """of f, without the term"""
    pairs: Pairs
    face: Array
    """what the face makes of a fixed vector: changes when the face does"""
    alpha: Array
    """the length of a proximal step; 0 before the first one"""
    gained: Array
    unsolved: Array


class LBFGS(eqx.Module):
    """Limited-memory BFGS (Nocedal 1980) with a line search that looks at slopes; one evaluation a step, mostly.

    Under constraints and terms one proximal gradient step tells which face is active; the quasi-Newton step is taken
    along that face, from the proximal point where the face has changed, and what was remembered of another face is
    dropped. For sets with curved boundaries use `Newton`, or `Nesterov(sequence="fista")`.

    `unsolved` is √(gain still to be had / gain so far), as for `Newton`, by the quasi-Newton model.
    """

    memory: int = 10

    def __check_init__(self):
        if isinstance(self.memory, bool) or not isinstance(self.memory, int) or self.memory < 1:
            raise ValueError(f"memory must be a whole number of at least 1, got {self.memory!r}.")

    def init(self, y: PyTree) -> LBFGSState:
        flat = ravel_pytree(y)[0]
        zero, rows = jnp.zeros((), flat.dtype), jnp.zeros((self.memory, flat.size), flat.dtype)
        pairs = Pairs(rows, rows, jnp.zeros(self.memory, flat.dtype))
        return LBFGSState(y, zero, jnp.zeros_like(flat), pairs, jnp.zeros_like(flat), zero, zero, zero + jnp.inf)

    def step(self, k: Any, state: LBFGSState, follower: Follower) -> LBFGSState:
        y, unravel = ravel_pytree(state.y)

        def value_and_slope(v):
            value, slope = jax.value_and_grad(follower.lower)(unravel(v))
            return value, ravel_pytree(slope)[0]

        def begin():
            value, slope = value_and_slope(y)
            return value, slope, cauchy_step(follower, state.y).astype(y.dtype)

        value, slope, alpha = jax.lax.cond(state.alpha == 0, begin, lambda: (state.value, state.slope, state.alpha))
        base = _to_face(follower, unravel, value_and_slope, y, value, slope, alpha)
        free, pairs = base.free, choose(jnp.all(base.face == state.face), state.pairs, forget(state.pairs))

        def term(v):
            return jnp.asarray(term_value(follower.y_set, unravel(v)), v.dtype)

        def along_face(v, slope):
            return free(slope + jax.grad(term)(v))

        slope_here, here = along_face(base.y, base.slope), base.value + term(base.y)
        direction = free(quasi_newton(pairs, -slope_here, base.alpha))
        # Rounding, or a change of the face, can spoil the model: then the slope itself.
        downhill = direction @ slope_here < 0
        direction = jnp.where(downhill, direction, -base.alpha * slope_here)
        rounding = 8 * jnp.finfo(y.dtype).eps * jnp.abs(here)

        def try_step(length):
            point = base.finish(base.y + length * direction)
            value, slope = value_and_slope(point)
            return Trial(value + term(point), along_face(point, slope) @ direction, (point, value, slope))

        promise = direction @ slope_here
        start = Trial(here, promise, (base.y, base.value, base.slope))
        length, best, _ = wolfe_search(try_step, start, 1.0, 20, rounding / 4)
        point, value_after, slope_after = best.found
        change = along_face(point, slope_after) - slope_here
        # What the step to the face gained counts as well: the face that was left may have had nothing more to give.
        gain = -promise / 2 + jnp.maximum(value + term(y) - here, 0)
        gained = state.gained + jnp.maximum(value + term(y) - best.value, 0)
        small = (gain <= rounding / 4) | (length == 0) & (gain <= 1e4 * rounding)
        unsolved = jnp.where(small, 0.0, jnp.sqrt(gain / (gain + gained)))
        pairs = remember(pairs, free(point - base.y), change)
        # A search that found nothing begins anew with a shorter proximal step.
        alpha = jnp.where(length == 0, base.alpha / 16, spectral(point - base.y, change, base.alpha))
        pairs = choose(length == 0, forget(pairs), pairs)
        control = jax.lax.stop_gradient((gained, unsolved))
        numbers = (jnp.asarray(number, y.dtype) for number in control)
        return LBFGSState(unravel(point), value_after, slope_after, pairs, base.face, alpha, *numbers)

    def point(self, state: LBFGSState) -> PyTree:
        return state.y

    def unsolved(self, state: LBFGSState) -> Array:
        return state.unsolved

    def residual_step(self, k: Any) -> Any:
        return 1.0


class _Base(NamedTuple):
    """Where the step along the face begins."""

    y: Array
    value: Array
    slope: Array
    alpha: Array
    face: Array
    free: Any
    """the projector onto the face"""
    finish: Any
    """how a point of the line is put into Y"""


def _to_face(follower: Follower, unravel: Any, value_and_slope: Any, y, value, slope, alpha) -> _Base:
    """The face that a proximal gradient step finds, and a point on it: y itself where it lies there already."""
    if isinstance(follower.y_set, Reals):
        return _Base(y, value, slope, alpha, jnp.zeros_like(y), lambda u: u, lambda v: v)

    def prox(v, alpha):
        return ravel_pytree(follower.prox(unravel(v), alpha))[0]

    def total(v):
        return follower.total(unravel(v))

    def too_long(alpha):
        near = prox(y - alpha * slope, alpha)
        gone = near - y
        bound = value + slope @ gone + gone @ gone / (2 * alpha)
        slack = 8 * jnp.finfo(y.dtype).eps * jnp.abs(value)
        return ~(follower.lower(unravel(near)) <= bound + slack) & (alpha > jnp.finfo(y.dtype).tiny)

    def projector(alpha):
        free = tangent(follower.y_set, unravel(y - alpha * slope), alpha)
        if free is None:
            raise ValueError(
                f"LBFGS works along flat faces, which {follower.y_set} does not have: use bilax.Newton(), or "
                'bilax.Nesterov(sequence="fista").'
            )
        return lambda u: ravel_pytree(free(unravel(u)))[0]

    def away(alpha):
        gone = prox(y - alpha * slope, alpha) - y
        return jnp.max(jnp.abs(gone - projector(alpha)(gone))) > 0

    def step():
        shorter = jax.lax.while_loop(too_long, lambda alpha: alpha / 2, alpha)
        near = prox(y - shorter * slope, shorter)
        return near, *value_and_slope(near), shorter

    near, value, slope_there, alpha = jax.lax.cond(away(alpha), step, lambda: (y, value, slope, alpha))
    free = projector(alpha)
    project = hasattr(follower.y_set, "project")
    finish = (lambda v: prox(v, alpha)) if project else (lambda v: v)
    return _Base(near, value, slope_there, alpha, free(jnp.sin(1.0 + jnp.arange(y.size, dtype=y.dtype))), free, finish)


def quasi_newton(pairs: Pairs, slope: Array, alpha: Array) -> Array:
    """The two-loop recursion: the inverse Hessian's model times a vector; `alpha` where nothing is known."""

    def back(i, carry):
        vector, factors = carry
        i = pairs.weights.size - 1 - i
        factor = pairs.weights[i] * (pairs.steps[i] @ vector)
        return vector - factor * pairs.changes[i], factors.at[i].set(factor)

    vector, factors = jax.lax.fori_loop(0, pairs.weights.size, back, (slope, jnp.zeros_like(pairs.weights)))
    vector = _scale(pairs, alpha) * vector

    def forth(i, vector):
        return vector + (factors[i] - pairs.weights[i] * (pairs.changes[i] @ vector)) * pairs.steps[i]

    return jax.lax.fori_loop(0, pairs.weights.size, forth, vector)


def _scale(pairs: Pairs, alpha: Array) -> Array:
    squares, weight = pairs.changes[-1] @ pairs.changes[-1], pairs.weights[-1]
    known = (weight > 0) & (squares > 0)
    return jnp.where(known, 1 / jnp.where(known, weight * squares, 1), alpha)


def remember(pairs: Pairs, step: Array, change: Array) -> Pairs:
    """With one pair more, if it has curvature, and the oldest dropped."""
    product = step @ change
    # Li and Fukushima's caution: pairs without curvature would make the model indefinite.
    sizes = jnp.sqrt((step @ step) * (change @ change))
    good = product > 1e-10 * sizes
    new = Pairs(step, change, jnp.where(good, 1 / jnp.where(good, product, 1), 0))
    shifted = jax.tree.map(lambda old, one: jnp.roll(old, -1, axis=0).at[-1].set(one), pairs, new)
    return choose(good, shifted, pairs)


def forget(pairs: Pairs) -> Pairs:
    """Without any."""
    return jax.tree.map(jnp.zeros_like, pairs)


def spectral(step: Array, change: Array, alpha: Array) -> Array:
    """Barzilai and Borwein's length ⟨s, s⟩ / ⟨s, c⟩, or what there was."""
    product, squares = step @ change, step @ step
    good = (product > 0) & (squares > 0)
    return jnp.where(good, squares / jnp.where(good, product, 1), alpha)
