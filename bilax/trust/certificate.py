"""Certificates of end points: is the follower's answer a global minimiser, stationary only, or neither?

Everything here runs in double precision, whatever the caller's setting, and reports plain numbers.
"""

import enum
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from bilax.follower.newton import Newton
from bilax.follower.trajectory import ArgMax
from bilax.gradient.implicit import DENSE
from bilax.gradient.phi import approximate
from bilax.methods.recipes import Method
from bilax.problem.checks import check_inside, check_objectives, check_point
from bilax.problem.joined_tasks import all_tasks
from bilax.problem.precision import double_precision, in_double
from bilax.problem.problem import Follower, Problem
from bilax.problem.quick_jit import quick_jit
from bilax.problem.sets import Ball, Box, Each, NonNegative, Product, Reals, Set, Simplex
from bilax.problem.terms import inside
from bilax.trust import interval
from bilax.trust.branch_and_bound import Domain
from bilax.trust.flat_problem import FlatProblem, check_differentiable, flatten, with_plain_set
from bilax.trust.follower_minima import low_discrepancy
from bilax.trust.interval import Interval
from bilax.trust.interval_rules import NotSupportedError, Traced
from bilax.trust.linear_rows import Rows, rows_of
from bilax.trust.proof import Evidence, examine, prove_convex, prove_convex_over_rows
from bilax.trust.wide_search import WideSearch

_SAMPLED = 4_000_000
"""about how many numbers the sampled points of Y may hold"""


class Verdict(enum.Enum):
    """What a certificate says of the follower."""

    global_follower = "global follower"
    """proven: no point of Y is lower by more than the tolerance"""
    stationary_only = "stationary only"
    """refuted: y is stationary, but a better point is known"""
    not_stationary = "not stationary"
    """refuted: a descent from y itself leads to a better point; the follower's method has not converged yet"""
    not_excluded = "none found, none excluded"
    """no better point was found, and there is no proof that there is none"""


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
    left_out: tuple[str, ...] = ()
    """what was not looked at, and why there is no proof"""

    @property
    def rigorous(self) -> bool:
        """Whether the verdict "global follower" was given, which it never is without a proof."""
        return self.verdict is Verdict.global_follower

    @property
    def refuted(self) -> bool:
        """Whether Lemma 3.2 shows that (x, z) does not minimise φ_K: a stationary follower has a lower F."""
        return self.phi is not None and self.phi > self.stationary_upper + 1e-6 * (1 + abs(self.phi))

    @property
    def _open(self) -> str:
        if self.bound is None or not np.isfinite(self.bound):
            return "nothing excludes one"
        return f"all that is proven is that none is lower by more than {self.lowest + self.gap - self.bound:.2g}"

    @property
    def words(self) -> str:
        """The verdict in sentences."""
        says = {
            Verdict.global_follower: (
                f"y minimises the follower globally, up to {self.tolerance:.2g} in f: interval bounds prove it."
            ),
            Verdict.stationary_only: (
                f"y is stationary, but another follower is lower by {self.gap:.2g}: the leader's value at (x, y) "
                "is not one that the follower grants. Use bilax.solve_global."
            ),
            Verdict.not_stationary: (
                f"the follower has not settled: a descent from y gains {self.gap:.2g} or more, and one step about "
                f"{self.drop:.2g}. Take more inner steps, or a step size nearer to 1/L."
            ),
            Verdict.not_excluded: f"no better follower was found, but {self._open}.",
        }[self.verdict]
        if self.gap > 1e100:
            says += " The follower seems to be unbounded below."
        if self.left_out:
            says += "".join(f" {part[0].upper()}{part[1:]}." for part in self.left_out)
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
    tasks: bool = False,
    tolerance: float | None = None,
    proof: bool = True,
    time_limit: float = 10.0,
) -> Certificate:
    """Is `solution.y` a global minimiser of f(x, ·), a stationary point only, or neither?

    - `solution`: anything with fields x and y, as `solve` and `solve_global` return.
    - `method`: also report how stationary its φ is at (x, z), and what Lemma 3.2 says.
    - `tasks`: the solution is of `solve(..., tasks=True)`, with a follower for each task; all are judged together.
    - `tolerance`: the gap that counts as none. By default a millionth of how much f(x, ·) varies over Y at this x, or
      what rounding can make of f there if that is more.
    - `proof`: bound f*(x) from below by interval arithmetic: for followers of up to six variables by branch and bound,
      for separable ones part by part, for those proven convex by a tangent, also over sets of linear rows such as
      `Polyhedron`. Without it nothing is called global.
    - `time_limit`: seconds, besides what JAX takes to compile. Cheap parts come first; the certificate says what was
      left out.
    """
    if np.ndim(getattr(solution, "steps", 0)):
        raise TypeError("certify takes one solution at a time: write certify(problem, batch[i]) or batch.best.")
    for name in ("x", "y"):
        if not hasattr(solution, name):
            raise TypeError(f"solution must have the fields x and y, got {type(solution)}.")
    if tasks and method is not None:
        raise ValueError("certify(method=...) looks at one follower: leave out method, or tasks=True.")
    problem = all_tasks(problem) if tasks else problem
    with double_precision():
        x = _inside("x", in_double(check_point("x", solution.x, may_be_empty=True)), problem.x_set)
        y = in_double(check_point("y", solution.y))
        check_objectives(problem, x, y, data)
        plain = with_plain_set(problem, x, data)
        y = _inside("y", y, plain.y_set)
        flat = flatten(plain, x, y, data)
        findings = _look(
            plain, flat, flat.ravel(x), np.asarray(flat.ravel(y)), tolerance, proof, time.monotonic() + time_limit,
            thorough=method is not None,
        )  # fmt: skip
        slope, phi, stationary = None, None, np.inf
        if method is not None:
            z = in_double(getattr(solution, "z", solution.y))
            slope, phi = (float(v) for v in _phi_slope(problem, method, x, z, data))
            stationary = _stationary_upper(flat, flat.ravel(x), findings)
        y_lowest = jax.device_get(flat.unravel_y(jnp.asarray(findings.point)))
    return Certificate(
        verdict=findings.verdict,
        gap=findings.gap,
        lowest=findings.lowest,
        y_lowest=y_lowest,
        tolerance=findings.tolerance,
        bound=findings.bound,
        residual=findings.residual,
        drop=findings.drop,
        slope=slope,
        phi=phi if method is not None and isinstance(method.select, ArgMax) else None,
        stationary_upper=stationary,
        left_out=findings.left_out,
    )


def _inside(name: str, point: PyTree, a_set: Any) -> PyTree:
    """The point projected onto its set; in silence where it lies outside by single precision's rounding only."""
    try:
        projected = a_set.project(point)
        pairs = zip(jax.tree.leaves(point), jax.tree.leaves(projected), strict=True)
        if all(np.max(np.abs(a - b), initial=0) <= 1e-6 * max(1, np.max(np.abs(a), initial=0)) for a, b in pairs):
            return projected
    except (TypeError, ValueError):
        pass  # said in words below
    return check_inside(name, point, a_set)


class _Findings(NamedTuple):
    verdict: Verdict
    gap: float
    lowest: float
    point: np.ndarray
    tolerance: float
    bound: float | None
    residual: float
    drop: float
    ends: np.ndarray
    """where descents ended"""
    left_out: tuple[str, ...]


def is_box(a_set: Any) -> bool:
    """Whether the set is what its bounds say: a box, perhaps without ends, or a product of such."""
    if isinstance(a_set, Product | Each):
        parts = [a_set.each] if isinstance(a_set, Each) else jax.tree.leaves(a_set.sets, is_leaf=_is_set)
        return all(is_box(part) for part in parts)
    return type(a_set) in (Reals, Box, NonNegative)


def _is_set(node: Any) -> bool:
    return isinstance(node, Set)


def domain_of(a_set: Any, flat: FlatProblem) -> Domain | None:
    """The set as branch and bound knows it; None for sets of other kinds."""
    lo, hi = np.asarray(flat.y_range.lo)[None], np.asarray(flat.y_range.hi)[None]
    if is_box(a_set):
        return Domain(lo, hi)
    if type(a_set) is Simplex:
        return Domain(lo, hi, total=float(a_set.total))
    return Domain(lo, hi, radius=float(a_set.radius), centre=lo / 2 + hi / 2) if type(a_set) is Ball else None


def _look(
    problem: Problem,
    flat: FlatProblem,
    x: Array,
    y: np.ndarray,
    tolerance: float | None,
    proof: bool,
    deadline: float,
    thorough: bool,
) -> _Findings:
    """Intervals first, which decide most followers of few variables; else a search, and a proof if f is convex."""
    domain = domain_of(problem.y_set, flat)
    prover = None
    if proof:
        traced = Traced(lambda v: flat.lower(x, v), y.size, without_constant=True)
        prover = _Prover(traced, domain, _outline(problem.y_set, flat, y) if domain is None else None, problem.y_set)
    if prover is not None and domain is not None:
        try:
            samples = _samples(flat, domain, y.size)
            found = examine(prover.traced, domain, y, samples, tolerance, deadline, thorough)
            if found is not None:
                return _from_bounds(found, _offset(flat, x, y, found))
        except NotSupportedError as error:
            prover.failed = f"no proof: the follower uses {error}"
    return _from_search(flat, x, y, domain, prover, tolerance, deadline)


def _outline(a_set: Any, flat: FlatProblem, y: np.ndarray) -> Rows:
    return rows_of(a_set, flat.unravel_y(jnp.asarray(y)))


class _Prover:
    """The proof for convex followers, or in words why there is none."""

    def __init__(self, traced: Traced, domain: Domain | None, rows: Rows | None, y_set: Any):
        self.traced, self.domain, self.rows, self.name = traced, domain, rows, type(y_set).__name__
        self.bound: float | None = None
        """of f without what it adds to all that depends on y"""
        self.failed = ""

    def settles(self, point: np.ndarray) -> bool:
        """Whether f is convex, so that its tangent at the point bounds it."""
        if self.failed:
            return False
        try:
            if self.rows is not None:
                found = prove_convex_over_rows(self.traced, self.rows, point)
            else:
                found = prove_convex(self.traced, self.domain, point) if self.domain is not None else None
        except NotSupportedError as error:
            self.failed = f"no proof: the follower uses {error}"
            return False
        if found is None:
            self.failed = self._not_convex
            return False
        self.bound = found[0]
        return True

    @property
    def _not_convex(self) -> str:
        if self.rows is None:
            return "no proof: the follower has many variables and is not seen to be separable or convex"
        return f"no proof: over {self.name} only convex followers can be proven, and this one is not seen to be convex"

    @property
    def too_weak(self) -> str:
        """What to do where the bound does not reach y."""
        if self.rows is None:
            return ""
        if self.rows.G.size + self.rows.A.size:
            return (
                f"no proof: f is convex, but the multipliers that were found for the rows of {self.name} bound it too "
                "low; a y nearer to the minimum helps"
            )
        if np.isfinite([self.rows.lo, self.rows.hi]).any():
            return (
                f"no proof: f is convex, but a proof knows no more of {self.name} than the box of {self.name}.bounds, "
                "and there f may be lower; where linear rows make the set, give it as bilax.Polyhedron(G, h, A, b)"
            )
        return f"no proof: {self.name} tells no bounds; give it a method bounds(v) that returns (lower, upper)"


def _samples(flat: FlatProblem, domain: Domain, size: int) -> np.ndarray:
    unit = low_discrepancy(int(np.clip(_SAMPLED // size, 8, 512)), size, 11)
    scales = np.asarray([1.0, 0.1, 0.01])[np.arange(len(unit)) % 3][:, None]
    return domain.project(flat.y_range.spread_known(unit, scales))


def _offset(flat: FlatProblem, x: Array, y: np.ndarray, found: Evidence) -> Interval:
    """What f adds to all that depends on y, and what was therefore left out of the search."""
    with np.errstate(all="ignore"):
        full = Traced(lambda v: flat.lower(x, v), y.size).bounds(interval.point(y[None]), 0).value
        return interval.sub(Interval(full.lo[0], full.hi[0]), found.value)


def _from_bounds(found: Evidence, offset: Interval) -> _Findings:
    """`offset`: what f adds to the function that was looked at."""
    left_out: tuple[str, ...] = ()
    with np.errstate(invalid="ignore"):
        higher = found.value.middle - found.local > found.tolerance
    unsettled = found.drop > found.tolerance or (higher and not found.bowed)
    if found.refuted:
        verdict = Verdict.not_stationary if unsettled else Verdict.stationary_only
    elif found.proven:
        verdict = Verdict.global_follower
    else:
        verdict = Verdict.not_excluded
        left_out = (
            ()
            if found.finished
            else ("not looked at: cells of Y for which there was no time; give a larger time_limit",)
        )
    with np.errstate(invalid="ignore"):
        gap = float(found.value.middle - found.lowest.middle)
        lowest = float(found.lowest.middle + offset.middle)
        bound = found.bound + float(offset.lo)
        bound = np.nextafter(bound, -np.inf) if offset.lo else bound
    return _Findings(
        verdict, gap, lowest, found.point, float(found.tolerance), float(bound), found.residual, found.drop, found.ends,
        left_out,
    )  # fmt: skip


def _from_search(
    flat: FlatProblem,
    x: Array,
    y: np.ndarray,
    domain: Domain | None,
    prover: _Prover | None,
    tolerance: float | None,
    deadline: float,
) -> _Findings:
    check_differentiable(flat, x, y)
    search = WideSearch(flat, x, y, domain is not None and domain.is_box)
    found = search.run(deadline, tolerance, lambda point: prover is not None and prover.settles(point))
    allowed, bound, proven = found.tolerance, None, False
    if prover is not None and prover.bound is not None:
        # Both are of f without what it adds to all that depends on y.
        at_y = prover.traced.bounds(interval.point(y[None]), 0).value
        proven = bool(prover.bound >= at_y.hi[0] - allowed)
        bound = prover.bound - float(at_y.hi[0]) + found.value
    if found.lowest < found.value - allowed:
        unsettled = found.drop > allowed or found.value - found.local > allowed
        verdict = Verdict.not_stationary if unsettled else Verdict.stationary_only
    else:
        verdict = Verdict.global_follower if proven else Verdict.not_excluded
    # A convex follower has no other basins.
    convex = prover is not None and prover.bound is not None
    left_out = () if proven else (*_without_proof(prover), *(() if convex else found.left_out))
    return _Findings(
        verdict, found.value - found.lowest, found.lowest, found.point, allowed, bound, found.residual, found.drop,
        found.ends, left_out,
    )  # fmt: skip


def _without_proof(prover: _Prover | None) -> tuple[str, ...]:
    said = "no proof: it was not asked for" if prover is None else prover.failed or prover.too_weak
    return (said,) if said else ()


def _stationary_upper(flat: FlatProblem, x: Array, findings: _Findings) -> float:
    """The lowest F at stationary followers: where Newton's method arrives from the ends of the descents.

    Those ends themselves will not do: where f is stiff, a step gains next to nothing far from any stationary point.
    """
    if not len(findings.ends) or findings.point.size > DENSE:
        return np.inf
    follower = Follower(lambda y: flat.upper(x, y), lambda y: flat.lower(x, y), _Projected(flat.project_y))
    newton = Newton()

    def arrive(end):
        state = jax.lax.fori_loop(0, 30, lambda k, state: newton.step(k, state, follower), newton.init(end))
        return follower.upper(state.y), state.unsolved

    uppers, unsolved = jax.jit(lambda ends: jax.lax.map(arrive, ends))(jnp.asarray(findings.ends))
    return float(np.nanmin(np.where(unsolved <= 1e-8, uppers, np.inf), initial=np.inf))


class _Projected(eqx.Module):
    """A set of flat vectors, by its projection."""

    project: Callable[[Array], Array]


@quick_jit
def _phi_slope(problem: Problem, method: Method, x: PyTree, z: PyTree, data: Any) -> tuple[Array, Array]:
    (value, _), (gx, gz) = jax.value_and_grad(approximate(problem, method), (0, 1), has_aux=True)(x, z, *data)
    moved_x = problem.x_set.project(jax.tree.map(jnp.subtract, x, gx))
    moved_z = inside(problem.y_set, jax.tree.map(jnp.subtract, z, gz))
    if not method.derivative.has_z_gradient(method.inner_steps):
        moved_z = z
    return optax.tree.norm(jax.tree.map(jnp.subtract, (x, z), (moved_x, moved_z))), value
