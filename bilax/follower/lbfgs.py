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


class Pairs(NamedTuple):
    """The last differences of points and of slopes, scaled so that ⟨step, change⟩ = 1, in no order.

    The newest takes the oldest's row. What is not filled, or was forgotten, has zeros in the small matrices and so
    counts nothing.
    """

    steps: Array
    changes: Array
    products: Array
    """of all steps and changes, in this order, with each other"""
    inverse: Array
    """that of the matrix ⟨step i, change j⟩ for i not newer than j, else 0"""
    newest: Array

    @property
    def known(self) -> Array:
        """Which rows count."""
        return jnp.diag(self.inverse) > 0


class LBFGSState(NamedTuple):
    """Where it is, and what it needs to go on."""

    y: PyTree
    value: Array
    slope: Array
    """of f, without the term"""
    pairs: Pairs
    alpha: Array
    """the length of a proximal step; 0 before the first one"""
    gained: Array
    unsolved: Array


class LBFGS(eqx.Module):
    """Limited-memory BFGS (Nocedal 1980) with a line search that looks at slopes; one evaluation a step, mostly.

    Under constraints and terms one proximal gradient step tells which face is active; the quasi-Newton step is taken
    along that face, from the proximal point where the face has changed, with the model of the whole space restricted to
    the face (as Byrd, Lu, Nocedal and Zhu 1995 for bounds). For sets with curved boundaries use `Newton`, or
    `Nesterov(sequence="fista")`.

    `unsolved` is √(gain still to be had / gain so far), as for `Newton`, by the quasi-Newton model.
    """

    memory: int = 10

    def __check_init__(self):
        if isinstance(self.memory, bool) or not isinstance(self.memory, int) or self.memory < 1:
            raise ValueError(f"memory must be a whole number of at least 1, got {self.memory!r}.")

    def init(self, y: PyTree) -> LBFGSState:
        flat = ravel_pytree(y)[0]
        zero = jnp.zeros((), flat.dtype)
        return LBFGSState(y, zero, jnp.zeros_like(flat), no_pairs(self.memory, flat), zero, zero, zero + jnp.inf)

    def step(self, k: Any, state: LBFGSState, follower: Follower) -> LBFGSState:
        y, unravel = ravel_pytree(state.y)

        def value_and_slope(v):
            value, slope = jax.value_and_grad(follower.lower)(unravel(v))
            # Data in double precision make f a double, whatever y is.
            return value.astype(v.dtype), ravel_pytree(slope)[0]

        def begin():
            value, slope = value_and_slope(y)
            return value, slope, cauchy_step(follower, state.y).astype(y.dtype)

        value, slope, alpha = jax.lax.cond(state.alpha == 0, begin, lambda: (state.value, state.slope, state.alpha))
        base = _to_face(follower, unravel, value_and_slope, y, value, slope, alpha)
        free, pairs = base.free, state.pairs

        def term(v):
            return jnp.asarray(term_value(follower.y_set, unravel(v)), v.dtype)

        def along_face(v, slope):
            return free(slope + jax.grad(term)(v))

        slope_here, here = along_face(base.y, base.slope), base.value + term(base.y)
        plain = isinstance(follower.y_set, Reals)
        direction = quasi_newton(pairs, -slope_here, base.alpha, None if plain else free)
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
        bend = free(jax.grad(term)(point) - jax.grad(term)(base.y))
        gone, change = point - base.y, slope_after - base.slope + bend
        # What the step to the face gained counts as well: the face that was left may have had nothing more to give.
        gain = -promise / 2 + jnp.maximum(value + term(y) - here, 0)
        gained = state.gained + jnp.maximum(value + term(y) - best.value, 0)
        left = jnp.where(gain > 0, jnp.sqrt(gain / jnp.where(gain > 0, gain + gained, 1)), 0.0)
        # Below f's rounding the slope still tells how far it is, as long as it falls.
        done = (gain <= rounding / 4) & (left >= state.unsolved) | (length == 0) & (gain <= 1e4 * rounding)
        unsolved = jnp.where(done, 0.0, left)
        pairs = remember(pairs, gone, change, length > 0)
        # A search that found nothing begins anew with a shorter proximal step.
        longest = jnp.minimum(spectral(gone, change, base.alpha), 2 * base.alpha)
        if not plain and hasattr(follower.y_set, "project"):
            # Not with a term, whose kinks count as curvature in the pairs.
            longest = jnp.minimum(longest, inverse_curvature(pairs, base.alpha))
        alpha = jnp.where(length == 0, base.alpha / 16, longest)
        control = jax.lax.stop_gradient((gained, unsolved))
        numbers = (jnp.asarray(number, y.dtype) for number in control)
        return LBFGSState(unravel(point), value_after, slope_after, pairs, alpha, *numbers)

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
    free: Any
    """the projector onto the face"""
    finish: Any
    """how a point of the line is put into Y"""


def _to_face(follower: Follower, unravel: Any, value_and_slope: Any, y, value, slope, alpha) -> _Base:
    """The face that a proximal gradient step finds, and a point on it: y itself where it lies there already."""
    if isinstance(follower.y_set, Reals):
        return _Base(y, value, slope, alpha, lambda u: u, lambda v: v)

    def prox(v, alpha):
        return ravel_pytree(follower.prox(unravel(v), alpha))[0]

    def shorter(carry):
        alpha = carry[-2] / 2
        near = prox(y - alpha * slope, alpha)
        value_there, slope_there = value_and_slope(near)
        gone = near - y
        slack = 8 * jnp.finfo(y.dtype).eps * jnp.abs(value)
        good = value_there <= value + slope @ gone + gone @ gone / (2 * alpha) + slack
        return near, value_there, slope_there, alpha, good | ~(alpha > jnp.finfo(y.dtype).tiny)

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
        longer = (y, value, slope, 2 * alpha, jnp.asarray(False))
        return jax.lax.while_loop(lambda carry: ~carry[-1], shorter, longer)[:-1]

    near, value, slope_there, alpha = jax.lax.cond(away(alpha), step, lambda: (y, value, slope, alpha))
    free = projector(alpha)
    project = hasattr(follower.y_set, "project")
    finish = (lambda v: prox(v, alpha)) if project else (lambda v: v)
    return _Base(near, value, slope_there, alpha, free, finish)


def no_pairs(memory: int, like: Array) -> Pairs:
    """Room for so many."""
    rows = jnp.zeros((memory, like.size), like.dtype)
    small = jnp.zeros((memory, memory), like.dtype)
    return Pairs(rows, rows, jnp.zeros((2 * memory, 2 * memory), like.dtype), small, jnp.zeros((), int))


def quasi_newton(pairs: Pairs, vector: Array, alpha: Array, free: Any = None) -> Array:
    """The inverse of the Hessian's model times a vector, by its compact form; `alpha` where nothing is known.

    With a projector `free` onto a face that the vector lies in, the inverse of the model's restriction to that face.
    Byrd, Nocedal and Schnabel 1994, equations 3.1 and 2.17.
    """
    scale, count = _scale(pairs, alpha), pairs.inverse.shape[0]
    if free is None:
        first = pairs.inverse @ (pairs.steps @ vector)
        inner = first + scale * (pairs.products[count:, count:] @ first - pairs.changes @ vector)
        return scale * vector + (inner @ pairs.inverse) @ pairs.steps - scale * (first @ pairs.changes)
    root, known = jnp.sqrt(scale), pairs.known.astype(vector.dtype)
    rows = jnp.concatenate([root * pairs.changes, pairs.steps / root]) * jnp.tile(known, 2)[:, None]
    rows = jax.vmap(free)(rows)
    age = (pairs.newest - jnp.arange(count)) % count
    mixed = jnp.where(age[:, None] < age, pairs.products[:count, count:], 0)
    middle = jnp.block(
        [[-jnp.eye(count, dtype=vector.dtype), mixed.T], [mixed, pairs.products[:count, :count] / scale]]
    )
    middle = middle - rows @ rows.T + jnp.diag(jnp.concatenate([jnp.zeros_like(known), 1 - known]))
    return scale * (vector + jnp.linalg.solve(middle, rows @ vector) @ rows)


def _scale(pairs: Pairs, alpha: Array) -> Array:
    """⟨step, change⟩ / ⟨change, change⟩ of the newest."""
    count = pairs.inverse.shape[0]
    squares = jnp.diag(pairs.products)[count + pairs.newest]
    known = (squares > 0) & pairs.known[pairs.newest]
    return jnp.where(known, 1 / jnp.where(known, squares, 1), alpha)


def remember(pairs: Pairs, step: Array, change: Array, keep: Any = True) -> Pairs:
    """With one pair more, if it has curvature, and the oldest dropped; with none at all if not `keep`."""
    product, count = step @ change, pairs.inverse.shape[0]
    # Li and Fukushima's caution: pairs without curvature would make the model indefinite. Such a pair becomes zero.
    good = keep & (product > 1e-10 * jnp.sqrt((step @ step) * (change @ change)))
    root, row = jnp.sqrt(jnp.where(good, product, 1)), (pairs.newest + 1) % count
    step, change = jnp.where(good, step / root, 0), jnp.where(good, change / root, 0)
    # Nothing reads the old rows, so that they can be written in place.
    steps, changes = pairs.steps.at[row].set(step), pairs.changes.at[row].set(change)
    here = jnp.arange(count) == row
    known, nowhere = jnp.tile(pairs.known | here, 2), jnp.zeros_like(here)
    # One product with a matrix for each: with both vectors at once XLA's CPU code is four times slower.
    with_step, with_change = (jnp.where(known, jnp.concatenate([steps @ v, changes @ v]), 0) for v in (step, change))
    products = _with_line(pairs.products, jnp.concatenate([here, nowhere]), with_step)
    products = _with_line(products, jnp.concatenate([nowhere, here]), with_change)
    inverse = jnp.where(here[:, None] | here, 0, pairs.inverse)
    inverse = jnp.where(here, jnp.where(here, good, -inverse @ with_change[:count])[:, None], inverse)
    products, inverse = (jnp.where(keep, small, 0) for small in (products, inverse))
    return Pairs(steps, changes, products, inverse, jnp.where(good, row, pairs.newest))


def _with_line(matrix: Array, here: Array, line: Array) -> Array:
    """With the row and the column that are `here` replaced."""
    return jnp.where(here, line[:, None], jnp.where(here[:, None], line, matrix))


def forget(pairs: Pairs) -> Pairs:
    """Without any."""
    return pairs._replace(products=jnp.zeros_like(pairs.products), inverse=jnp.zeros_like(pairs.inverse))


def inverse_curvature(pairs: Pairs, alpha: Array) -> Array:
    """The least ⟨step, change⟩ / ⟨change, change⟩ of all, or what there was: a proximal step of this length descends.

    Barzilai and Borwein's of the newest alone may be many times as long, and then names faces that are far away.
    """
    count = pairs.inverse.shape[0]
    most = jnp.max(jnp.where(pairs.known, jnp.diag(pairs.products)[count:], 0))
    return jnp.where(most > 0, 1 / jnp.where(most > 0, most, 1), alpha)


def spectral(step: Array, change: Array, alpha: Array) -> Array:
    """Barzilai and Borwein's length ⟨s, s⟩ / ⟨s, c⟩, or what there was."""
    product, squares = step @ change, step @ step
    good = (product > 0) & (squares > 0)
    return jnp.where(good, squares / jnp.where(good, product, 1), alpha)
