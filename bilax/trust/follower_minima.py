"""The follower's value function f*(x) = min over y in Y of f(x, y), and methods built on it.

f* is found by many descents at once: starts spread over Y, sweeps along single coordinates (which cross the
barriers between basins), then damped Newton steps. Everything is a vmap, so a hundred starts cost little more
than one.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree
from scipy.stats import qmc

from bilax.follower.dynamics import residual
from bilax.problem.checks import check_inside, check_objectives, check_point
from bilax.problem.problem import Problem
from bilax.problem.sets import Ball, Box, NonNegative, Set, Simplex
from bilax.run.solution import History, Solution, Status
from bilax.run.solve import all_finite, choose

_SGD = optax.sgd(0.1)

NEWTON_LIMIT = 32
"""Above this many follower variables the Hessian is not formed and descents use the gradient alone."""

_REACH = 100.0
"""How far starts go from the given point where a set has no bound, in units of max(1, |coordinate|)."""


_QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 1}


@functools.cache
def _quick_options() -> dict[str, Any]:
    try:
        jax.jit(lambda v: v + 1, compiler_options=_QUICK).lower(0.0).compile()
    except Exception:  # a backend or a release that does not know them
        return {}
    return {"compiler_options": _QUICK}


def quick_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`eqx.filter_jit` for programs that run once or twice: half the compile time, for somewhat slower code."""

    @functools.cache
    def compiled():
        return eqx.filter_jit(function, **_quick_options())

    @functools.wraps(function)
    def call(*args):
        return compiled()(*args)

    return call


class Range(NamedTuple):
    """Where to look in each coordinate of a flat vector: bounds (perhaps infinite) and a centre."""

    lo: Array
    hi: Array
    centre: Array
    bounded: bool = False
    """whether all bounds are known to be finite when the search is compiled, which makes it simpler"""

    @property
    def width(self) -> Array:
        """The interval's length, or 2·_REACH around the centre where it is unbounded."""
        reach = _REACH * jnp.maximum(1.0, jnp.abs(self.centre))
        return jnp.where(jnp.isfinite(self.lo) & jnp.isfinite(self.hi), self.hi - self.lo, 2 * reach)

    def spread(self, unit: Array, scale: Any = 1.0) -> Array:
        """Points of [0, 1]ᵈ as points of the range; `scale` shrinks the spread in unbounded coordinates."""
        if self.bounded:
            return self.lo + unit * (self.hi - self.lo)
        deviation = jax.scipy.special.ndtri(jnp.clip(unit, 1e-6, 1 - 1e-6))
        far = self.centre + scale * self.width / 4 * deviation
        # A half line is covered from its end outwards.
        above = self.lo + scale * self.width / 4 * jnp.abs(deviation)
        below = self.hi - scale * self.width / 4 * jnp.abs(deviation)
        bounded_below, bounded_above = jnp.isfinite(self.lo), jnp.isfinite(self.hi)
        open_ended = jnp.where(bounded_below, above, jnp.where(bounded_above, below, far))
        return jnp.where(bounded_below & bounded_above, self.lo + unit * (self.hi - self.lo), open_ended)


class Flat(NamedTuple):
    """A problem over flat vectors: what the searches work on."""

    upper: Callable[[Array, Array], Array]
    lower: Callable[[Array, Array], Array]
    project_x: Callable[[Array], Array]
    project_y: Callable[[Array], Array]
    x_range: Range
    y_range: Range
    unravel_x: Callable[[Array], PyTree]
    unravel_y: Callable[[Array], PyTree]


def flatten(problem: Problem, x: PyTree, y: PyTree, data: tuple[Any, ...] = ()) -> Flat:
    """The problem with its variables as flat vectors; x and y give the structure and the centre of the search."""
    x_flat, unravel_x = ravel_pytree(x)
    y_flat, unravel_y = ravel_pytree(y)
    x_flat = jnp.asarray(x_flat, y_flat.dtype)

    def objective(which):
        @jax.jit  # traced once, however often the searches call it
        def value(x, y):
            seen = problem.view(unravel_x(x), *data)
            return jnp.asarray(which(seen, unravel_y(y), *data), y.dtype)

        return value

    return Flat(
        upper=objective(problem.upper),
        lower=objective(problem.lower),
        project_x=lambda v: jnp.asarray(ravel_pytree(problem.x_set.project(unravel_x(v)))[0], v.dtype),
        project_y=lambda v: ravel_pytree(problem.y_set.project(unravel_y(v)))[0],
        x_range=_range(problem.x_set, x, x_flat),
        y_range=_range(problem.y_set, y, y_flat),
        unravel_x=unravel_x,
        unravel_y=unravel_y,
    )


def _range(a_set: Set, point: PyTree, flat: Array) -> Range:
    lo, hi, bounded = -np.inf, np.inf, isinstance(a_set, Ball | Simplex)
    if isinstance(a_set, Box):
        leaves = jax.tree.leaves((a_set.lo, a_set.hi))
        bounded = all(not isinstance(leaf, Tracer) and bool(np.all(np.isfinite(leaf))) for leaf in leaves)
        lo, hi = (_fill(bound, point, flat) for bound in (a_set.lo, a_set.hi))
    elif isinstance(a_set, NonNegative):
        lo = 0.0
    elif isinstance(a_set, Ball):
        lo, hi = -a_set.radius, a_set.radius
    elif isinstance(a_set, Simplex):
        lo, hi = 0.0, 1.0
    return Range(jnp.full_like(flat, lo), jnp.full_like(flat, hi), flat, bounded)


def _fill(bound: PyTree, point: PyTree, flat: Array) -> Array:
    if jax.tree.structure(bound) == jax.tree.structure(0.0):
        bound = jax.tree.map(lambda _: bound, point)
    full = jax.tree.map(lambda b, p: jnp.broadcast_to(jnp.asarray(b, flat.dtype), jnp.shape(p)), bound, point)
    return ravel_pytree(full)[0].astype(flat.dtype)


class Minima(NamedTuple):
    """Where descents of the follower ended: distinct end points first, lowest first; then the repetitions."""

    points: Float[Array, "starts m"]
    values: Float[Array, " starts"]
    spread: Float[Array, ""]
    """how much f varies over the sampled Y: the scale against which a gap is small or not"""
    distinct: Any
    """how many distinct points there are"""


def follower_minima(flat: Flat, x: Array, y: Array, unit: Array, keep: int, rounds: int = 2, steps: int = 20) -> Minima:
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
    spread = jnp.max(jnp.where(jnp.isfinite(values), values, -jnp.inf)) - jnp.min(values)
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


def gap_tolerance(lowest: Array, spread: Array, size: Array, absolute: float, relative: float) -> Array:
    """The largest gap that counts as none: `absolute` (1 + |f*|), or `relative` of f's spread if that is less.

    Near an indifferent follower every gap is small, so a small gap alone says nothing there. Rounding errors of
    f, whose typical size is `size`, are let pass.
    """
    return jnp.maximum(rounding(size), jnp.minimum(absolute * (1 + jnp.abs(lowest)), relative * spread))


def typical(values: Array) -> Array:
    """The geometric mean of the finite values' sizes, which a few huge ones do not move; 1 if they are all 0."""
    sizes = jnp.where(jnp.isfinite(values), jnp.abs(values), 0)
    logs = jnp.where(sizes > 0, jnp.log(jnp.where(sizes > 0, sizes, 1)), 0)
    count = jnp.sum(sizes > 0)
    return jnp.where(count > 0, jnp.exp(jnp.sum(logs) / jnp.maximum(count, 1)), 1.0)


def rounding(size: Array) -> Array:
    """What differences of values of this size can be by rounding alone."""
    return 64 * jnp.finfo(size.dtype).eps * size


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


# Methods on the value function


def _rising(t: Array) -> Array:
    return 1.0 + 0.1 * t


def _falling(t: Array) -> Array:
    return 0.5 / jnp.sqrt(1.0 + t)


class _Penalty(eqx.Module):
    problem: Problem
    data: tuple[Any, ...]
    inner_steps: int
    step_size: float
    weight: Callable[[Array], Array]

    def follow(self, lam: Array, x: PyTree, y: PyTree, z: PyTree) -> tuple[PyTree, PyTree]:
        upper, lower, _ = self.problem.follower(x, self.data)
        y = _run_down(self, lambda y: lower(y) + upper(y) / lam, y)
        return y, _run_down(self, lower, z)

    def penalised(self, lam: Array, x: PyTree, y: PyTree, z: PyTree) -> Array:
        upper, lower, _ = self.problem.follower(x, self.data)
        return upper(y) + lam * (lower(y) - lower(z))


class _Barrier(eqx.Module):
    problem: Problem
    data: tuple[Any, ...]
    inner_steps: int
    step_size: float
    weight: Callable[[Array], Array]

    def follow(self, eps: Array, x: PyTree, y: PyTree, z: PyTree) -> tuple[PyTree, PyTree]:
        z = _run_down(self, lambda z: self.regularised(eps, x, z), z)
        inside = lambda y: self.room(eps, x, y, z) > 0  # noqa: E731
        return _run_down(self, lambda y: self.penalised(eps, x, y, z), z, inside), z

    def penalised(self, eps: Array, x: PyTree, y: PyTree, z: PyTree) -> Array:
        upper = self.problem.upper(x, y, *self.data) + eps / 2 * optax.tree.norm(y, squared=True)
        room = self.room(eps, x, y, z)
        return upper - eps * jnp.log(jnp.maximum(room, jnp.finfo(room.dtype).tiny))

    def room(self, eps: Array, x: PyTree, y: PyTree, z: PyTree) -> Array:
        return self.regularised(eps, x, z) + eps - self.problem.lower(x, y, *self.data)

    def regularised(self, eps: Array, x: PyTree, z: PyTree) -> Array:
        return self.problem.lower(x, z, *self.data) + eps / 2 * optax.tree.norm(z, squared=True)


def penalty(
    problem: Problem,
    x0: PyTree,
    y0: PyTree,
    *,
    inner_steps: int,
    step_size: float,
    steps: int = 500,
    optimizer: optax.GradientTransformation = _SGD,
    weight: Callable[[Array], Array] = _rising,
    data: tuple[Any, ...] = (),
) -> Solution:
    """F²SA (Kwon, Kwon, Wright and Nowak 2023): descends F + λ_t (f − f*) with first derivatives only.

    Per outer step z takes `inner_steps` steps on f and y as many on f + F/λ_t; x then follows
    ∇_x F(x, y) + λ_t (∇_x f(x, y) − ∇_x f(x, z)). `weight` is t -> λ_t, rising. y and z go on from where they
    were, from y0 at first, so f* is only as good as the basin that y0 lies in: see `solve_global`.
    """
    return _solve_value(_Penalty(problem, data, inner_steps, step_size, weight), x0, y0, steps, optimizer)


def bvfim(
    problem: Problem,
    x0: PyTree,
    y0: PyTree,
    *,
    inner_steps: int,
    step_size: float,
    steps: int = 500,
    optimizer: optax.GradientTransformation = _SGD,
    weight: Callable[[Array], Array] = _falling,
    data: tuple[Any, ...] = (),
) -> Solution:
    """BVFIM (Liu, Liu, Yuan, Zeng and Zhang 2021): an interior-point method on f(x, y) ≤ f*(x) + ε.

    Per outer step z takes `inner_steps` steps on f + ε/2 ‖z‖², which gives f*_ε(x); y, begun at z, takes as many
    on F + ε/2 ‖y‖² − ε log(f*_ε(x) + ε − f(x, y)), none of which may leave the interior; x follows the same
    function's x-gradient. `weight` is t -> ε_t, falling to zero; one number serves as the method's regulariser,
    barrier and slack.
    """
    return _solve_value(_Barrier(problem, data, inner_steps, step_size, weight), x0, y0, steps, optimizer)


def _run_down(
    method: _Penalty | _Barrier,
    f: Callable[[PyTree], Array],
    y: PyTree,
    allowed: Callable[[PyTree], Array] = lambda y: jnp.asarray(True),
) -> PyTree:
    """Projected descent; a step to where `allowed` is false is not taken, and the next ones are half as long."""

    def body(_, carry):
        y, alpha = carry
        moved = jax.tree.map(lambda a, g: (a - alpha * g).astype(a.dtype), y, jax.grad(f)(y))
        trial = method.problem.y_set.project(moved)
        good = allowed(trial)
        return jax.tree.map(lambda new, old: jnp.where(good, new, old), trial, y), jnp.where(good, alpha, alpha / 2)

    return jax.lax.fori_loop(0, method.inner_steps, body, (y, jnp.asarray(method.step_size, float)))[0]


def _solve_value(
    method: _Penalty | _Barrier, x0: PyTree, y0: PyTree, steps: int, optimizer: optax.GradientTransformation
) -> Solution:
    problem = method.problem
    for name, count in (("inner_steps", method.inner_steps), ("steps", steps)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}.")
    if not method.step_size > 0:
        raise ValueError(f"step_size must be positive, got {method.step_size}.")
    if not isinstance(method.data, tuple):
        raise TypeError(f"data must be a tuple (write data=(batch,) for one value), got {type(method.data)}.")
    if problem.context is not None:
        raise ValueError("value-function methods differentiate f in x directly: give a problem without `context`.")
    x0, y0 = check_point("x0", x0, may_be_empty=True), check_point("y0", y0)
    x0, y0 = check_inside("x0", x0, problem.x_set), check_inside("y0", y0, problem.y_set)
    check_objectives(problem, x0, y0, method.data)
    return jax.device_get(_run_value(method, x0, y0, steps, optimizer)).trimmed()


@eqx.filter_jit
def _run_value(
    method: _Penalty | _Barrier, x0: PyTree, y0: PyTree, steps: int, optimizer: optax.GradientTransformation
) -> Solution:
    problem = method.problem

    def outer(carry, t):
        (x, y, z, memory), good, alive = carry
        weight = method.weight(t)
        y_new, z_new = method.follow(weight, x, y, z)
        slope = jax.grad(method.penalised, 1)(weight, x, y_new, z_new)
        updates, memory_new = optimizer.update(slope, memory, x)
        x_new = problem.x_set.project(optax.apply_updates(x, updates))
        found = report(x, y_new)
        good = choose(alive & all_finite((y_new, z_new, found)), (x, y_new, z_new), good)
        entry = History(*found, jnp.asarray(0), optax.tree.norm(slope), jnp.zeros(()))
        new = x_new, y_new, z_new, memory_new
        alive = alive & all_finite((new, entry))
        return (choose(alive, new, (x, y, z, memory)), good, alive), (entry, alive)

    def report(x, y):
        follower = problem.follower(x, method.data)
        return follower.upper(y), follower.lower(y), residual(follower, y, method.step_size)

    start = (x0, y0, y0, optimizer.init(x0)), (x0, y0, y0), jnp.asarray(True)
    ((*end, _), good, alive), (history, lives) = jax.lax.scan(outer, start, jnp.arange(steps, dtype=float))
    fine = alive & all_finite(report(*end[:2]))
    x, y, z = choose(fine, tuple(end), good)
    status = jnp.where(fine, Status.step_limit, Status.non_finite)
    return Solution(x, y, z, *report(x, y), jnp.asarray(0), status, jnp.sum(lives), history)
