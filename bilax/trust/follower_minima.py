"""The follower's value function f*(x) = min over y in Y of f(x, y).

f* is found by many descents at once: starts spread over Y, sweeps along single coordinates (which cross the
barriers between basins), then damped Newton steps. Everything is a vmap, so a hundred starts cost little more
than one.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.stats import qmc

from bilax.trust.flat_problem import FlatProblem, Range

NEWTON_LIMIT = 32
"""Above this many follower variables the Hessian is not formed and descents use the gradient alone."""


class Minima(NamedTuple):
    """Where descents of the follower ended: distinct end points first, lowest first; then the repetitions."""

    points: Float[Array, "starts m"]
    values: Float[Array, " starts"]
    spread: Float[Array, ""]
    """how much f varies over the sampled Y: the scale against which a gap is small or not"""
    distinct: Any
    """how many distinct points there are"""


def follower_minima(
    flat: FlatProblem, x: Array, y: Array, unit: Array, keep: int, rounds: int = 2, steps: int = 20
) -> Minima:
    """Minimises f(x, ·) over Y from points spread over it and from `y`; `unit` are N points of [0, 1]ᵐ.

    The `keep` most promising of them descend by damped Newton steps, `rounds` times, each time joined by copies
    of the best four that were first scanned along every coordinate; the lowest `keep` distinct ones stay. With
    many variables no sample comes near a point that is in question, so that point itself is among the starts.
    """

    def f(y):
        return flat.lower(x, y)

    scales = jnp.asarray([1.0, 0.1, 0.01])[jnp.arange(unit.shape[0]) % 3][:, None]
    points = jax.vmap(flat.project_y)(flat.y_range.spread(unit, scales))
    values = jax.vmap(f)(points)
    values = jnp.where(jnp.isfinite(values), values, jnp.inf)
    # The lowest tenth: where Y has no bounds f may grow without bound over the sample, too.
    spread = jnp.sort(values)[values.size // 10] - jnp.min(values)
    spread = jnp.where(jnp.isfinite(spread), spread, 0)
    points = jnp.concatenate([y[None], points[_promising(points, values, keep - 1)]])

    def improve(r, points):
        def scan(y):
            return scan_coordinates(f, flat.project_y, flat.y_range, y, r / rounds, size=1024)

        scanned = jax.vmap(scan)(points[:4])
        ends = jax.vmap(lambda y: descend(f, flat.project_y, y, steps))(jnp.concatenate([points, scanned]))
        ends, _ = _distinct_first(ends, jax.vmap(f)(ends), flat.y_range.width)
        return ends[:keep]

    points = jax.lax.fori_loop(0, rounds, improve, points)
    values = jax.vmap(f)(points)
    points, repeated = _distinct_first(points, values, flat.y_range.width)
    return Minima(points, jax.vmap(f)(points), spread, jnp.sum(~repeated))


def _distinct_first(points: Array, values: Array, width: Array) -> tuple[Array, Array]:
    """The points by value, those within 1e-4 of the width of a lower one last; and which those are."""
    points = points[jnp.argsort(jnp.where(jnp.isnan(values), jnp.inf, values))]
    near = jnp.max(jnp.abs(points[:, None] - points) / width, axis=-1) < 1e-4
    repeated = jnp.any(jnp.tril(near, -1), axis=1)
    order = jnp.argsort(repeated, stable=True)
    return points[order], repeated[order]


def gap_tolerance(lowest: Array, spread: Array, relative: float) -> Array:
    """The largest gap that counts as none: a share of f's spread over Y at this x, and what rounding can do there.

    Near an indifferent follower every gap is small, so a small gap alone says nothing.
    """
    return jnp.maximum(rounding(lowest), relative * spread)


def typical(values: Array) -> Array:
    """The geometric mean of the finite values' sizes, which a few huge ones do not move; 1 if they are all 0."""
    sizes = jnp.where(jnp.isfinite(values), jnp.abs(values), 0)
    logs = jnp.where(sizes > 0, jnp.log(jnp.where(sizes > 0, sizes, 1)), 0)
    count = jnp.sum(sizes > 0)
    return jnp.where(count > 0, jnp.exp(jnp.sum(logs) / jnp.maximum(count, 1)), 1.0)


def rounding(size: Array) -> Array:
    """What differences of values of this size can be by rounding alone."""
    return 64 * jnp.finfo(size.dtype).eps * jnp.abs(size)


def low_discrepancy(count: int, dimension: int, seed: int) -> np.ndarray:
    """The first `count` Sobol points of [0, 1)ᵈ, moved by a random shift; random points where d is too large."""
    random = np.random.default_rng(seed)
    if dimension > qmc.Sobol.MAXDIM:
        return random.random((count, dimension))
    shift = random.random(dimension)
    if dimension == 0:
        return np.zeros((count, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about counts that are no power of two, which only lose some balance
        return (qmc.Sobol(dimension, scramble=False).random(count) + shift) % 1


def _promising(points: Array, values: Array, keep: int) -> Array:
    # On a line every dip of the sampled values is a basin; elsewhere half are the lowest and half are spread.
    if points.shape[1] == 1:
        order = jnp.argsort(points[:, 0])
        along = values[order]
        left = jnp.concatenate([jnp.full(1, jnp.inf), along[:-1]])
        right = jnp.concatenate([along[1:], jnp.full(1, jnp.inf)])
        dip = jnp.zeros(values.shape, bool).at[order].set((along <= left) & (along <= right))
        return jnp.lexsort((values, ~dip))[:keep]
    lowest = jnp.argsort(values)[: keep - keep // 2]
    rest = jnp.ones(values.shape, bool).at[lowest].set(False)
    return jnp.concatenate([lowest, jnp.argsort(~rest, stable=True)[: keep // 2]])


def scan_coordinates(
    f: Callable[[Array], Array],
    project: Callable[[Array], Array],
    search: Range,
    y: Array,
    offset: Any,
    size: int | None = None,
) -> Array:
    """One sweep over the coordinates, each set to its best value of a grid while the others stay.

    It crosses barriers that stop a descent, and solves separable followers as long as the grid of `size` points
    tells their basins apart.
    """
    size = 2 * max(16, 64 // y.size) if size is None else size
    even = jnp.clip((jnp.arange(size) + offset) / (size - 1), 0, 1)
    # Steps of every magnitude to both sides: a follower may have basins far narrower than the even grid.
    bounded = 10.0 ** (jnp.linspace(-4, 0, size // 2) - offset * 4 / (size // 2))
    free = 10.0 ** (jnp.linspace(-2, 2.3, size // 2) - offset * 4.3 / (size // 2))

    def improve(i, y):
        wide = search.hi[i] - search.lo[i]
        everywhere, jumps = search.lo[i] + wide * even, bounded * wide
        if not search.bounded:
            finite = jnp.isfinite(wide)
            everywhere = jnp.where(finite, everywhere, y[i])
            jumps = jnp.where(finite, jumps, free * jnp.maximum(1.0, jnp.abs(search.centre[i])))
        grid = jnp.concatenate([everywhere, y[i] + jumps, y[i] - jumps])
        trials = jax.vmap(lambda v: project(y.at[i].set(v)))(jnp.concatenate([grid, y[i][None]]))
        values = jax.vmap(f)(trials)
        return trials[jnp.argmin(jnp.where(jnp.isnan(values), jnp.inf, values))]

    return jax.lax.fori_loop(0, y.size, improve, y)


def descend(
    f: Callable[[Array], Array], project: Callable[[Array], Array], y: Array, steps: int, newton: bool | None = None
) -> Array:
    """Damped Newton steps, projected, each taken only if it lowers f.

    The eigenvalues of the Hessian enter by absolute value, so that saddles repel; coordinates held by a bound
    are left out. With many variables (by default more than NEWTON_LIMIT) the Hessian is left out, and this is
    projected gradient descent that finds its own step.
    """
    newton = y.size <= NEWTON_LIMIT if newton is None else newton
    slope = jax.grad(f)

    def curvature(y):
        return jax.hessian(f)(y) if newton else jnp.zeros((1, 1), y.dtype)

    def direction(y, damping):
        g = slope(y)
        nudged = project(y - 1e-9 * (1 + jnp.abs(y)) * jnp.sign(g))
        free = (nudged != y) | (g == 0)
        g = jnp.where(free, g, 0)
        if not newton:
            return -g / damping
        h = jnp.where(free[:, None] & free[None, :], curvature(y), jnp.diag((~free).astype(y.dtype)))
        if y.size == 1:
            return -g / (jnp.abs(h[0]) + damping)
        values, vectors = jnp.linalg.eigh(jnp.where(jnp.isfinite(h), h, 0))
        return -vectors @ ((vectors.T @ g) / (jnp.abs(values) + damping))

    def body(_, state):
        y, value, damping = state
        trial = project(y + direction(y, damping))
        after = f(trial)
        better = after < value
        damping = jnp.clip(jnp.where(better, damping * 0.2, damping * 8), 1e-14, 1e14)
        return jnp.where(better, trial, y), jnp.where(better, after, value), damping

    damping = 1e-2 * jnp.linalg.norm(slope(y))
    damping = jnp.where(jnp.isfinite(damping), jnp.maximum(damping, 1e-12), 1.0)
    return jax.lax.fori_loop(0, steps, body, (y, f(y), damping))[0]
