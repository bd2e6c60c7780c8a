"""Is the answer to be trusted? Gradient checks, a diagnosis of the follower, certificates of end points.

Everything here runs in double precision, whatever the caller's setting, and reports plain numbers.
"""

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree
from rich.table import Table

from bilax.follower.trajectory import ArgMax
from bilax.gradient.phi import approximate
from bilax.methods.recipes import Method, ia_gm_a, iaptt_gm, ls
from bilax.problem.checks import check_inside, check_objectives, check_point
from bilax.problem.problem import Problem
from bilax.problem.sets import Reals
from bilax.trust.follower_minima import (
    NEWTON_LIMIT,
    Flat,
    flatten,
    follower_minima,
    gap_tolerance,
    low_discrepancy,
    quick_jit,
    typical,
)
from bilax.trust.interval import lower_bound


class Verdict(enum.Enum):
    """What a certificate says of the follower."""

    global_follower = "global follower"
    stationary_only = "stationary only"
    not_stationary = "not stationary"


class Certificate(eqx.Module):
    """What is known of a pair (x, y); made by `certify`."""

    verdict: Verdict
    gap: float
    """f(x, y) − lowest"""
    lowest: float
    """the lowest value of f(x, ·) that was found: at least f*(x)"""
    y_lowest: PyTree
    """where it was found"""
    tolerance: float
    """the largest gap that counts as none"""
    bound: float | None
    """a proven lower bound of f*(x), by interval arithmetic; None where none could be had"""
    residual: float
    """‖R_α(x, y)‖ / α with α = 1/L"""
    drop: float
    """‖R_α(x, y)‖² / 2α: what one descent step would gain; below `tolerance`, y counts as stationary"""
    slope: float | None
    """‖(x, z) − Proj((x, z) − ∇φ)‖ for the given method; None without one"""
    phi: float | None
    """φ_K(x, z) of a pessimistic method: by Lemma 3.2 a lower bound of the best stationary value, provided
    that (x, z) minimises φ_K"""
    stationary_upper: float
    """the lowest F(x, ·) over the stationary followers found at this x; ∞ where none was found"""

    @property
    def rigorous(self) -> bool:
        """Whether the gap is proven, not only sampled: f(x, y) − bound is within the tolerance too."""
        return self.bound is not None and self.lowest + self.gap - self.bound <= self.tolerance

    @property
    def refuted(self) -> bool:
        """Whether Lemma 3.2 shows that (x, z) does not minimise φ_K: a stationary follower has a lower F."""
        return self.phi is not None and self.phi > self.stationary_upper + 1e-6 * (1 + abs(self.phi))

    @property
    def words(self) -> str:
        """The verdict in sentences."""
        says = {
            Verdict.global_follower: f"y minimises the follower globally (gap {self.gap:.2g}).",
            Verdict.stationary_only: (
                f"y is stationary, but another follower is lower by {self.gap:.2g}: the leader's value at (x, y) "
                "is not one that the follower grants. Use bilax.solve_global."
            ),
            Verdict.not_stationary: (
                f"the follower has not settled: it can still gain {self.gap:.2g}, and one step gains about "
                f"{self.drop:.2g}. Take more inner steps, or a step size nearer to 1/L."
            ),
        }[self.verdict]
        if self.verdict is Verdict.global_follower:
            says += " This is proven by interval bounds." if self.rigorous else " This rests on a search, not a proof."
        if self.refuted:
            says += (
                f" By Lemma 3.2 (x, z) does not minimise φ_K: F = {self.stationary_upper:.4g} at another "
                f"stationary follower, below φ_K = {self.phi:.4g}."
            )
        return says

    def __str__(self) -> str:
        return f"{self.verdict.value}: {self.words}"

    def __rich__(self) -> Table:
        rows = [
            ("verdict", self.verdict.value),
            ("follower's gap", f"{self.gap:.3g} (tolerance {self.tolerance:.1g})"),
            ("lowest f found", f"{self.lowest:.6g}"),
            ("proven bound of f*", "none" if self.bound is None else f"{self.bound:.6g}"),
            ("residual", f"{self.residual:.3g}"),
            ("slope of φ", "no method given" if self.slope is None else f"{self.slope:.3g}"),
            (
                "best stationary F here",
                f"{self.stationary_upper:.6g}" if self.stationary_upper < np.inf else "none found",
            ),
        ]
        return _table("certificate", rows, self.words)


def certify(
    problem: Problem,
    solution: Any,
    *,
    method: Method | None = None,
    data: tuple[Any, ...] = (),
    tolerance: float | None = None,
    proof: bool = True,
) -> Certificate:
    """Is `solution.y` a global minimiser of f(x, ·), a stationary point only, or neither?

    - `solution`: anything with fields x and y, as `solve` and `solve_global` return.
    - `method`: also report how stationary its φ is at (x, z), and what Lemma 3.2 says.
    - `tolerance`: the gap that counts as none. By default 1e-6 (1 + |f*|), or 1e-4 of how much f(x, ·) varies
      over Y where that is less, since near an indifferent follower every gap is small.
    - `proof`: bound f*(x) from below by interval arithmetic where the follower has one or two variables in a
      box and `lower` uses elementary operations only.
    """
    if np.ndim(getattr(solution, "steps", 0)):
        raise TypeError("certify takes one solution at a time: write certify(problem, batch[i]) or batch.best.")
    for name in ("x", "y"):
        if not hasattr(solution, name):
            raise TypeError(f"solution must have the fields x and y, got {type(solution)}.")
    with jax.enable_x64(True):
        x, y = _double(check_point("x", solution.x, may_be_empty=True)), _double(check_point("y", solution.y))
        x, y = check_objectives(problem, check_inside("x", x, problem.x_set), check_inside("y", y, problem.y_set), data)
        n, m = ravel_pytree(x)[0].size, ravel_pytree(y)[0].size
        units = low_discrepancy(4096, m, 11), low_discrepancy(256, n + m, 12)
        found = jax.device_get(_inspect(problem, x, y, data, units))
        allowed = float(found.tolerance) if tolerance is None else tolerance
        bound = lower_bound(problem, x, y, data, float(found.lowest), allowed) if proof else None
        slope, phi = None, None
        if method is not None:
            z = _double(getattr(solution, "z", solution.y))
            slope, phi = (float(v) for v in _phi_slope(problem, method, x, z, data))
        _, unravel = ravel_pytree(y)
        lowest = unravel(jnp.asarray(found.point))
    gap, drop = float(found.gap), float(found.drop)
    stationary = Verdict.stationary_only if drop <= allowed else Verdict.not_stationary
    return Certificate(
        verdict=Verdict.global_follower if gap <= allowed else stationary,
        gap=gap,
        lowest=float(found.lowest),
        y_lowest=jax.device_get(lowest),
        tolerance=allowed,
        bound=bound,
        residual=float(found.residual),
        drop=drop,
        slope=slope,
        phi=phi if method is not None and isinstance(method.select, ArgMax) else None,
        stationary_upper=float(np.nanmin(found.uppers[found.drops <= allowed], initial=np.inf)),
    )


class _Found(NamedTuple):
    gap: Array
    lowest: Array
    point: Array
    tolerance: Array
    residual: Array
    drop: Array
    uppers: Array
    """F at the ends of the descents"""
    drops: Array
    """what one step more would gain there"""


@quick_jit
def _inspect(problem: Problem, x: PyTree, y: PyTree, data: Any, units: tuple[Array, Array]) -> _Found:
    flat = flatten(problem, x, y, data)
    x_flat, y_flat = _ravel(x, flat), _ravel(y, flat)
    value = flat.lower(x_flat, y_flat)
    minima = follower_minima(flat, x_flat, y_flat, units[0], keep=48, rounds=3)
    elsewhere = (
        flat.x_range.spread(units[1][:, : x_flat.size], 0.01),
        flat.y_range.spread(units[1][:, x_flat.size :], 0.01),
    )
    size = typical(jax.vmap(flat.lower)(*elsewhere))
    lowest = jnp.minimum(minima.values[0], value)
    point = jnp.where(minima.values[0] < value, minima.points[0], y_flat)

    def settle(y):
        slope = jax.grad(flat.lower, 1)(x_flat, y)
        if y.size <= NEWTON_LIMIT:
            largest = jnp.linalg.norm(jax.hessian(flat.lower, 1)(x_flat, y))
        else:
            largest = jnp.max(jnp.abs(lanczos(lambda v: _hvp(flat, x_flat, y, v), y.size)))
        # A follower without curvature still has a scale: its slope over the width of Y.
        steepness = jnp.maximum(largest, jnp.linalg.norm(slope) / jnp.mean(flat.y_range.width)) + 1e-12
        residual = steepness * jnp.linalg.norm(y - flat.project_y(y - slope / steepness))
        return residual, residual**2 / (2 * steepness)

    residual, drop = settle(y_flat)
    _, drops = jax.lax.map(settle, minima.points)
    return _Found(
        gap=value - lowest,
        lowest=lowest,
        point=point,
        tolerance=gap_tolerance(lowest, minima.spread, size, 1e-6, 1e-4),
        residual=residual,
        drop=drop,
        uppers=jax.vmap(lambda y: flat.upper(x_flat, y))(minima.points),
        drops=drops,
    )


@quick_jit
def _phi_slope(problem: Problem, method: Method, x: PyTree, z: PyTree, data: Any) -> tuple[Array, Array]:
    (value, _), (gx, gz) = jax.value_and_grad(approximate(problem, method), (0, 1), has_aux=True)(x, z, *data)
    moved_x = problem.x_set.project(jax.tree.map(jnp.subtract, x, gx))
    moved_z = problem.y_set.project(jax.tree.map(jnp.subtract, z, gz))
    if not method.derivative.has_z_gradient(method.inner_steps):
        moved_z = z
    return optax.tree.norm(jax.tree.map(jnp.subtract, (x, z), (moved_x, moved_z))), value


# Diagnosis


class Diagnosis(eqx.Module):
    """What the follower looks like around a point, and what to do about it; made by `diagnose`."""

    curvature: tuple[float, float]
    """the least and greatest eigenvalue of ∂²f/∂y² that was met"""
    lipschitz: float
    """L_f, the greatest |eigenvalue| met"""
    residual: float
    """‖R_α(x, y)‖ / α at α = 1/L_f"""
    convexity: str
    """"strongly convex", "convex" or "non-convex", as far as was seen"""
    minima: int
    """distinct end points of the starts"""
    starts: int
    method: str
    """name of the recommended recipe"""
    inner_steps: int
    step_size: float
    reasons: tuple[str, ...]

    @property
    def recommended(self) -> Method:
        """The recommended method, ready for `solve`."""
        return _RECOMMENDED[self.method](self.inner_steps, self.step_size)

    def __str__(self) -> str:
        return (
            f"{self.convexity} follower, curvature {self.curvature[0]:.3g} to {self.curvature[1]:.3g}, "
            f"{self.minima} distinct minima: use {self.method}({self.inner_steps}, {self.step_size:.3g}). "
            + " ".join(self.reasons)
        )

    def __rich__(self) -> Table:
        rows = [
            ("follower", self.convexity),
            ("curvature", f"{self.curvature[0]:.4g} to {self.curvature[1]:.4g}"),
            ("L_f", f"{self.lipschitz:.4g}"),
            ("step sizes that descend", f"below {2 / self.lipschitz:.4g}"),
            ("residual", f"{self.residual:.3g}"),
            ("distinct minima", f"{self.minima} from {self.starts} starts"),
            ("recommended", f"{self.method}(inner_steps={self.inner_steps}, step_size={self.step_size:.3g})"),
        ]
        return _table("diagnosis", rows, " ".join(self.reasons))


_RECOMMENDED: dict[str, Callable[[int, float], Method]] = {"ls": ls, "ia_gm_a": ia_gm_a, "iaptt_gm": iaptt_gm}
_STARTS, _TRAIL = 16, 300


def diagnose(problem: Problem, x: PyTree, y: PyTree, *, data: tuple[Any, ...] = ()) -> Diagnosis:
    """Looks at the follower around its trajectory from y, and recommends a method, K and α.

    Curvature is measured without forming a matrix, by Lanczos on Hessian-vector products, at points of
    descents from y and from starts spread over Y (around y, where Y has no bounds). L_f is the greatest met,
    so it holds for this x and for where the follower goes, not for all of a space that it never visits.
    """
    with jax.enable_x64(True):
        x, y = _double(check_point("x", x, may_be_empty=True)), _double(check_point("y", y))
        x, y = check_objectives(problem, check_inside("x", x, problem.x_set), check_inside("y", y, problem.y_set), data)
        unit = low_discrepancy(_STARTS, ravel_pytree(y)[0].size, 5)
        seen = jax.device_get(_survey(problem, x, y, data, unit))
    least, greatest = float(seen.least), float(seen.greatest)
    lipschitz = max(abs(least), abs(greatest), 1e-12)
    convexity = "non-convex"
    if least >= -1e-6 * lipschitz:
        convexity = "strongly convex" if least >= 1e-4 * lipschitz else "convex"
    name, reasons = _recommend(convexity, least, lipschitz, int(seen.minima))
    return Diagnosis(
        curvature=(least, greatest),
        lipschitz=lipschitz,
        residual=float(seen.residual),
        convexity=convexity,
        minima=int(seen.minima),
        starts=_STARTS,
        method=name,
        inner_steps=int(np.clip(2 * int(seen.settled), 10, 500)),
        step_size=1 / lipschitz,
        reasons=reasons,
    )


def _recommend(convexity: str, least: float, lipschitz: float, minima: int) -> tuple[str, tuple[str, ...]]:
    step = f"α = 1/L_f = {1 / lipschitz:.3g}; anything below 2/L_f descends (Lemma 3.1)."
    if convexity == "strongly convex":
        why = (
            f"The curvature stays above {least:.3g}, so the follower's response is unique and implicit gradients hold."
        )
        return "ls", (why, step)
    if convexity == "convex":
        why = "The follower is convex but flat in places: accelerated steps with an optimised start (Theorem 3.3)."
        return "ia_gm_a", (why, step)
    why = f"Negative curvature ({least:.3g}) and {minima} distinct minima: the start decides where the follower ends."
    return "iaptt_gm", (why, step, "Certify what comes out; bilax.solve_global looks at all basins.")


class _Survey(NamedTuple):
    least: Array
    greatest: Array
    residual: Array
    minima: Array
    settled: Array


@quick_jit
def _survey(problem: Problem, x: PyTree, y: PyTree, data: Any, unit: Array) -> _Survey:
    flat = flatten(problem, x, y, data)
    x_flat, y_flat = _ravel(x, flat), _ravel(y, flat)
    # Without bounds, only the neighbourhood of y is of interest.
    bounded = jnp.isfinite(flat.y_range.lo) & jnp.isfinite(flat.y_range.hi)
    width = flat.y_range.width
    scale = jnp.where(bounded, 1.0, 0.1 * jnp.maximum(1.0, jnp.abs(y_flat)) / width)
    starts = jax.vmap(flat.project_y)(flat.y_range.spread(unit, scale)).at[0].set(y_flat)
    # Curvature is often greatest at the ends of a box.
    corners = jnp.where(bounded, jnp.stack([flat.y_range.lo, flat.y_range.hi]), starts[1:3])
    starts = starts.at[1:3].set(jax.vmap(flat.project_y)(corners))

    def extremes(point):
        ritz = lanczos(lambda v: _hvp(flat, x_flat, point, v), y_flat.size)
        return jnp.min(ritz), jnp.max(ritz)

    def trail(start, alpha):
        def step(point, _):
            slope = jax.grad(flat.lower, 1)(x_flat, point)
            after = flat.project_y(point - alpha * slope)
            return after, (point, jnp.linalg.norm(point - after) / alpha)

        return jax.lax.scan(step, start, length=_TRAIL)

    def attempt(_, carry):
        # How far a descent gets, and so what curvature it meets, depends on α = 1/L: go to where the two agree.
        lipschitz = carry[0]
        ends, (points, residuals) = jax.vmap(lambda start: trail(start, 1 / lipschitz))(starts)
        met = points[:, :: _TRAIL // 15].reshape(-1, y_flat.size)
        low, high = jax.vmap(extremes)(jnp.where(jnp.isfinite(met), met, y_flat))
        least, greatest = jnp.minimum(jnp.min(low), jnp.min(lows)), jnp.maximum(jnp.max(high), jnp.max(highs))
        return jnp.sqrt(lipschitz * _largest(least, greatest)), least, greatest, ends, residuals

    lows, highs = jax.vmap(extremes)(starts)
    lipschitz = _largest(jnp.min(lows), jnp.max(highs))
    carry = lipschitz, lipschitz, lipschitz, starts, jnp.zeros((_STARTS, _TRAIL))
    _, least, greatest, ends, residuals = jax.lax.fori_loop(0, 5, attempt, carry)
    reach = jnp.where(bounded, width, jnp.ptp(starts, axis=0) + 1e-12)
    near = jnp.max(jnp.abs(ends[:, None] - ends) / reach, axis=-1) < 0.02
    distinct = jnp.sum(~jnp.any(jnp.tril(near, -1), axis=1))
    still = residuals[0] <= 0.01 * residuals[0, 0]
    settled = jnp.where(jnp.any(still), jnp.argmax(still), _TRAIL)
    return _Survey(least, greatest, residuals[0, 0], distinct, settled)


def _largest(least: Array, greatest: Array) -> Array:
    return jnp.maximum(jnp.maximum(-least, greatest), 1e-12)


def lanczos(product: Callable[[Array], Array], size: int, steps: int = 30) -> Array:
    """Ritz values of a symmetric operator: its extreme eigenvalues, nearly, from `steps` products.

    Every new vector is made orthogonal to all before it, twice, so that no eigenvalue appears more often than
    it should; a subspace that closes early is continued with zeros, whose Ritz values repeat the first one.
    """
    steps = min(steps, size)
    start = jax.random.normal(jax.random.key(7), (size,), dtype=float)
    basis = jnp.zeros((steps, size)).at[0].set(start / jnp.linalg.norm(start))

    def body(k, carry):
        basis, main, side = carry
        image = product(basis[k])
        main = main.at[k].set(jnp.vdot(basis[k], image))
        for _ in range(2):
            image = image - basis.T @ (basis @ image)
        norm = jnp.linalg.norm(image)
        open_still = norm > 1e-10 * (jnp.abs(main[k]) + jnp.linalg.norm(side) + 1e-300)
        vector = jnp.where(open_still, image / jnp.where(norm > 0, norm, 1), 0)
        side = side.at[k].set(jnp.where(open_still, norm, 0))
        return basis.at[k + 1].set(vector, mode="drop"), main, side

    basis, main, side = jax.lax.fori_loop(0, steps, body, (basis, jnp.zeros(steps), jnp.zeros(steps)))
    used = jnp.any(basis != 0, axis=1)
    main = jnp.where(used, main, main[0])
    matrix = jnp.diag(main) + jnp.diag(side[:-1], 1) + jnp.diag(side[:-1], -1)
    return jnp.linalg.eigvalsh(jnp.where(jnp.isfinite(matrix), matrix, 0))


def _hvp(flat: Flat, x: Array, y: Array, v: Array) -> Array:
    return jax.jvp(lambda y: jax.grad(flat.lower, 1)(x, y), (y,), (v,))[1]


# The gradient check


class GradientCheck(eqx.Module):
    """How φ's gradient compares with finite differences; made by `check_hypergradient`."""

    ok: bool
    errors: dict[str, float]
    """worst relative error on each side: x, z and, if there is one, context"""
    wrong: tuple[str, ...]
    """what is to blame, of: x, z, context, projection, selection, swapped"""
    words: str
    probes: int
    """points at which φ is smooth enough to compare"""

    def __str__(self) -> str:
        return self.words

    def __rich__(self) -> Table:
        rows = [(f"error in {side}", f"{error:.2g}") for side, error in self.errors.items()]
        return _table("gradient check", rows, self.words)


_BLAME = {
    "x": "the x-gradient does not match finite differences",
    "z": "the z-gradient does not match finite differences",
    "context": "the pullback of `context` is wrong: differentiate it by itself, or look at its custom derivative",
    "projection": "it is wrong only where the follower touches its bounds: the derivative of Y's projection is missing",
    "selection": "it is wrong only where the chosen iterate is not the last: the derivative belongs to another k̄",
    "swapped": "the gradients of x and z are interchanged",
}


def check_hypergradient(
    problem: Problem,
    method: Method,
    x: PyTree,
    z: PyTree,
    *,
    data: tuple[Any, ...] = (),
    tolerance: float = 1e-4,
    probes: int = 24,
) -> GradientCheck:
    """Compares ∇φ with central differences along random directions, and says which side is wrong.

    Beside (x, z) it looks at `probes` points spread around it and over the sets, because some faults show only
    where a bound is active or where k̄ < K. Points at which φ has a kink are left out. Rules that approximate on
    purpose (a window, an unfinished linear solve, first order) are found wrong by as much as they are.
    """
    if not isinstance(method, Method):
        raise TypeError(f"method must be a bilax.Method such as bilax.iaptt_gm(40, 5e-4), got {method!r}.")
    if probes < 1 or not tolerance > 0:
        raise ValueError(f"probes must be at least 1 and tolerance positive, got {probes} and {tolerance}.")
    with jax.enable_x64(True):
        x, z = _double(check_point("x", x, may_be_empty=True)), _double(check_point("z", z))
        x, z = check_objectives(problem, check_inside("x", x, problem.x_set), check_inside("z", z, problem.y_set), data)
        size = ravel_pytree(x)[0].size + ravel_pytree(z)[0].size
        seen = jax.device_get(_compare(problem, method, x, z, data, low_discrepancy(probes, size, 3)))
        context_error = None
        if problem.context is not None:
            context_error = float(_context_error(problem, x, data))
            if context_error <= tolerance and _x_is_wrong(seen, tolerance):
                context_error = _blame_on_context(problem, method, x, z, data, tolerance)
    return _judge(seen, context_error, tolerance, method)


def _blame_on_context(problem: Problem, method: Method, x: PyTree, z: PyTree, data: Any, tolerance: float) -> float:
    """inf if φ is differentiated rightly once its context is given as plain numbers; else 0."""
    seen = problem.view(x, *data)
    plain = dataclasses.replace(problem, x_set=Reals(), context=None)
    size = ravel_pytree(seen)[0].size + ravel_pytree(z)[0].size
    without = jax.device_get(_compare(plain, method, seen, z, data, low_discrepancy(8, size, 4)))
    return 0.0 if _x_is_wrong(without, tolerance) else math.inf


def _x_is_wrong(seen: "_Comparison", tolerance: float) -> bool:
    return bool(np.any(np.asarray(seen.smooth) & (np.asarray(seen.error_x) > tolerance)))


class _Comparison(NamedTuple):
    error_x: Array
    error_z: Array
    error_swapped: Array
    smooth: Array
    clipped: Array
    early: Array


@quick_jit
def _compare(problem: Problem, method: Method, x: PyTree, z: PyTree, data: Any, unit: Array) -> _Comparison:
    flat = flatten(problem, x, z, data)
    phi = approximate(problem, method)
    x0, z0 = _ravel(x, flat), _ravel(z, flat)
    n = x0.size

    def value(v):
        return phi(flat.unravel_x(v[:n]), flat.unravel_y(v[n:]), *data)[0]

    def probe(i, unit):
        # Half of the probes lie near the given point, a quarter anywhere in the sets, a quarter near their bounds.
        near = jnp.where(i % 2 == 0, 0.02 * (i > 0), 1.0)
        unit = jnp.where(i % 4 == 1, 0.05 * unit + 0.95 * (unit > 0.5), unit)
        far_x, far_z = flat.x_range.spread(unit[:n], 0.01), flat.y_range.spread(unit[n:], 0.01)
        v = jnp.concatenate([flat.project_x(x0 + near * (far_x - x0)), flat.project_y(z0 + near * (far_z - z0))])
        gradient = jax.grad(value)(v)
        directions = jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (4, v.size), dtype=float)
        sides = jnp.stack([jnp.arange(v.size) < n, jnp.arange(v.size) >= n])
        spans = (sides[:, None] * directions).reshape(-1, v.size)
        coarse, fine = (jax.vmap(lambda d, h=h: _difference(value, v, d, h))(spans) for h in (1e-5, 2.5e-6))
        claimed = spans @ gradient
        size = jnp.abs(fine) + 1e-3 * jnp.linalg.norm(gradient) + 1e-6
        # Nothing can be compared where φ has a kink, or is not a number.
        comparable = jnp.isfinite(coarse + fine) & ~(jnp.abs(coarse - fine) > 1e-4 * size)
        error = jnp.abs(claimed - fine) / size
        error_x, error_z = jnp.max(error[:4], initial=0), jnp.max(error[4:], initial=0)
        info = phi(flat.unravel_x(v[:n]), flat.unravel_y(v[n:]), *data)[1]
        swapped = jnp.full((), jnp.inf)
        if 2 * n == v.size:
            # The part of the x-gradient that does not go through y cannot have been swapped.
            direct = jax.grad(flat.upper)(v[:n], _ravel(info.y, flat))
            other = jnp.concatenate([gradient[n:] + direct, gradient[:n] - direct])
            swapped = jnp.max(jnp.abs(spans @ other - fine) / size)
        last = jnp.concatenate([_ravel(info.y, flat), _ravel(info.y_last, flat)])
        bounds = jnp.tile(flat.y_range.lo, 2), jnp.tile(flat.y_range.hi, 2)
        clipped = jnp.any((last <= bounds[0]) | (last >= bounds[1]))
        return _Comparison(error_x, error_z, swapped, jnp.all(comparable), clipped, info.k_bar < method.inner_steps)

    return jax.lax.map(lambda args: probe(*args), (jnp.arange(unit.shape[0]), unit))


def _difference(value: Callable[[Array], Array], v: Array, direction: Array, h: float) -> Array:
    h = h * (1 + jnp.linalg.norm(v)) / (jnp.linalg.norm(direction) + 1e-300)
    return (value(v + h * direction) - value(v - h * direction)) / (2 * h)


@quick_jit
def _context_error(problem: Problem, x: PyTree, data: Any) -> Array:
    """The relative error of the context's pullback against central differences of the context itself."""
    v, unravel = ravel_pytree(x)

    def out(v):
        return ravel_pytree(eqx.filter(problem.view(unravel(v), *data), eqx.is_inexact_array))[0]

    direction = jax.random.normal(jax.random.key(1), v.shape, dtype=float)
    cotangent = jax.random.normal(jax.random.key(2), jax.eval_shape(out, v).shape, dtype=float)
    (pulled,) = jax.vjp(out, v)[1](cotangent)
    true = _difference(lambda v: jnp.vdot(out(v), cotangent), v, direction, 1e-6)
    return jnp.abs(jnp.vdot(pulled, direction) - true) / (jnp.abs(true) + 1e-9)


def _judge(seen: _Comparison, context_error: float | None, tolerance: float, method: Method) -> GradientCheck:
    smooth = np.asarray(seen.smooth)
    has_z = method.derivative.has_z_gradient(method.inner_steps)
    error_x = np.where(smooth, np.nan_to_num(seen.error_x, nan=np.inf), 0)
    error_z = np.where(smooth, np.nan_to_num(seen.error_z, nan=np.inf), 0) * has_z
    bad_x, bad_z = error_x > tolerance, error_z > tolerance
    bad = bad_x | bad_z
    wrong = []
    if context_error is not None and context_error > tolerance:
        wrong.append("context")
    elif bad.any() and np.all(np.asarray(seen.error_swapped)[smooth] <= tolerance):
        wrong.append("swapped")
    elif bad.any() and smooth[~seen.clipped].any() and not bad[~seen.clipped].any():
        wrong.append("projection")
    elif bad.any() and (smooth & ~seen.early).any() and not bad[~seen.early].any():
        wrong.append("selection")
    wrong += [side for side, found in (("x", bad_x.any()), ("z", bad_z.any())) if found]
    errors = {"x": float(error_x.max(initial=0)), "z": float(error_z.max(initial=0))}
    if context_error is not None:
        errors["context"] = context_error
    if not smooth.any():
        words = (
            "φ has a kink or is not finite at every probe: nothing can be compared. Give another point or more probes."
        )
    elif not wrong:
        worst = max(errors.values())
        words = f"∇φ agrees with finite differences at {smooth.sum()} points (largest relative error {worst:.1g})."
    else:
        words = f"∇φ is wrong at {bad.sum()} of {smooth.sum()} points: " + "; ".join(_BLAME[w] for w in wrong) + "."
    return GradientCheck(bool(smooth.any()) and not wrong, errors, tuple(wrong), words, int(smooth.sum()))


def _double(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree)


def _ravel(tree: PyTree, flat: Flat) -> Array:
    return jnp.asarray(ravel_pytree(tree)[0], flat.y_range.lo.dtype)


def _table(title: str, rows: list[tuple[str, str]], caption: str) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", show_header=False)
    for row in rows:
        table.add_row(*row)
    return table
