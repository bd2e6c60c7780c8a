"""Certificates of end points: is the follower's answer a global minimiser, stationary only, or neither?

Everything here runs in double precision, whatever the caller's setting, and reports plain numbers.
"""

import enum
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from bilax.follower.trajectory import ArgMax
from bilax.gradient.phi import approximate
from bilax.methods.recipes import Method
from bilax.problem.checks import check_inside, check_objectives, check_point
from bilax.problem.precision import double_precision, in_double
from bilax.problem.problem import Problem
from bilax.problem.quick_jit import quick_jit
from bilax.trust.diagnosis import lanczos
from bilax.trust.flat_problem import FlatProblem, flatten
from bilax.trust.follower_minima import NEWTON_LIMIT, follower_minima, gap_tolerance, low_discrepancy, typical
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

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The numbers with their names."""
        return [
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
    with double_precision():
        x, y = in_double(check_point("x", solution.x, may_be_empty=True)), in_double(check_point("y", solution.y))
        x, y = check_objectives(problem, check_inside("x", x, problem.x_set), check_inside("y", y, problem.y_set), data)
        n, m = ravel_pytree(x)[0].size, ravel_pytree(y)[0].size
        units = low_discrepancy(4096, m, 11), low_discrepancy(256, n + m, 12)
        inspection = jax.device_get(_inspect(problem, x, y, data, units))
        allowed = float(inspection.tolerance) if tolerance is None else tolerance
        bound = lower_bound(problem, x, y, data, float(inspection.lowest), allowed) if proof else None
        slope, phi = None, None
        if method is not None:
            z = in_double(getattr(solution, "z", solution.y))
            slope, phi = (float(v) for v in _phi_slope(problem, method, x, z, data))
        _, unravel = ravel_pytree(y)
        lowest = unravel(jnp.asarray(inspection.point))
    gap, drop = float(inspection.gap), float(inspection.drop)
    stationary = Verdict.stationary_only if drop <= allowed else Verdict.not_stationary
    return Certificate(
        verdict=Verdict.global_follower if gap <= allowed else stationary,
        gap=gap,
        lowest=float(inspection.lowest),
        y_lowest=jax.device_get(lowest),
        tolerance=allowed,
        bound=bound,
        residual=float(inspection.residual),
        drop=drop,
        slope=slope,
        phi=phi if method is not None and isinstance(method.select, ArgMax) else None,
        stationary_upper=float(np.nanmin(inspection.uppers[inspection.drops <= allowed], initial=np.inf)),
    )


class _Inspection(NamedTuple):
    gap: Array
    lowest: Array
    point: Array
    """where f(x, ·) is lowest"""
    tolerance: Array
    residual: Array
    drop: Array
    uppers: Array
    """F at the ends of the descents"""
    drops: Array
    """what one step more would gain there"""


@quick_jit
def _inspect(problem: Problem, x: PyTree, y: PyTree, data: Any, units: tuple[Array, Array]) -> _Inspection:
    flat = flatten(problem, x, y, data)
    x_flat, y_flat = flat.ravel(x), flat.ravel(y)
    value = flat.lower(x_flat, y_flat)
    minima = follower_minima(flat, x_flat, y_flat, units[0], keep=48, rounds=3)
    elsewhere = (
        flat.x_range.spread(units[1][:, : x_flat.size], 0.01),
        flat.y_range.spread(units[1][:, x_flat.size :], 0.01),
    )
    size = typical(jax.vmap(flat.lower)(*elsewhere))
    lowest = jnp.minimum(minima.values[0], value)
    point = jnp.where(minima.values[0] < value, minima.points[0], y_flat)

    residual, drop = _one_step(flat, x_flat, y_flat)
    _, drops = jax.lax.map(lambda y: _one_step(flat, x_flat, y), minima.points)
    return _Inspection(
        gap=value - lowest,
        lowest=lowest,
        point=point,
        tolerance=gap_tolerance(lowest, minima.spread, size, 1e-6, 1e-4),
        residual=residual,
        drop=drop,
        uppers=jax.vmap(lambda y: flat.upper(x_flat, y))(minima.points),
        drops=drops,
    )


def _one_step(flat: FlatProblem, x: Array, y: Array) -> tuple[Array, Array]:
    """The residual ‖R_α(x, y)‖ / α with α = 1/L, and what one descent step would gain."""
    slope = jax.grad(flat.lower, 1)(x, y)
    if y.size <= NEWTON_LIMIT:
        largest = jnp.linalg.norm(jax.hessian(flat.lower, 1)(x, y))
    else:
        largest = jnp.max(jnp.abs(lanczos(lambda v: flat.hessian_product(x, y, v), y.size)))
    # A follower without curvature still has a scale: its slope over the width of Y.
    steepness = jnp.maximum(largest, jnp.linalg.norm(slope) / jnp.mean(flat.y_range.width)) + 1e-12
    residual = steepness * jnp.linalg.norm(y - flat.project_y(y - slope / steepness))
    return residual, residual**2 / (2 * steepness)


@quick_jit
def _phi_slope(problem: Problem, method: Method, x: PyTree, z: PyTree, data: Any) -> tuple[Array, Array]:
    (value, _), (gx, gz) = jax.value_and_grad(approximate(problem, method), (0, 1), has_aux=True)(x, z, *data)
    moved_x = problem.x_set.project(jax.tree.map(jnp.subtract, x, gx))
    moved_z = problem.y_set.project(jax.tree.map(jnp.subtract, z, gz))
    if not method.derivative.has_z_gradient(method.inner_steps):
        moved_z = z
    return optax.tree.norm(jax.tree.map(jnp.subtract, (x, z), (moved_x, moved_z))), value
