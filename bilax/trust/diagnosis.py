"""A diagnosis of the follower: its curvature, its minima, and which method suits it.

Everything here runs in double precision, whatever the caller's setting, and reports plain numbers.
"""

import functools
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

from bilax.gradient.implicit import DENSE, Implicit
from bilax.gradient.tasks import first_task
from bilax.methods.auto import choose_solver, looked_at, survey_minima
from bilax.methods.recipes import Method, ia_gm_a, iaptt_gm, ls
from bilax.problem.checks import check_inside, check_objectives, check_point
from bilax.problem.precision import double_precision, in_double
from bilax.problem.problem import Problem
from bilax.problem.quick_jit import quick_jit
from bilax.run.solve import solve
from bilax.trust.flat_problem import FlatProblem, Range, flatten
from bilax.trust.follower_minima import low_discrepancy


class Diagnosis(eqx.Module):
    """What the follower looks like around a point, and what to do about it; made by `diagnose`."""

    curvature: tuple[float, float]
    """the least and greatest eigenvalue of ∂²f/∂y² that was met"""
    lipschitz: float
    """L_f, the greatest |eigenvalue| met"""
    residual: float
    """‖R_α(x, y)‖ / α at α = 1/L_f"""
    convexity: str
    """"strongly convex", "convex" or "non-convex", as far as was seen; "unconverged" where hardly a descent arrived"""
    minima: int
    """distinct end points of the starts"""
    starts: int
    method: str
    """name of the recipe that suits this follower, if its steps are to be counted"""
    inner_steps: int
    step_size: float
    recommended: Method
    """what to hand to `solve` with an optimiser: solves the follower where it can be, else takes the recipe's steps"""
    tried: tuple[float, float]
    """F where the leader is, and after a few steps with `recommended`"""
    reasons: tuple[str, ...]

    @property
    def recipe(self) -> Method:
        """The recipe with its step length and number of steps."""
        return _RECIPES[self.method](self.inner_steps, self.step_size)

    @property
    def words(self) -> str:
        """The reasons in sentences."""
        return " ".join(self.reasons)

    def __str__(self) -> str:
        return (
            f"{self.convexity} follower, curvature {self.curvature[0]:.3g} to {self.curvature[1]:.3g}, "
            f"{self.minima} distinct minima: use bilax.auto(), or {self.method}({self.inner_steps}, "
            f"{self.step_size:.3g}). {self.words}"
        )

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The numbers with their names."""
        return [
            ("follower", self.convexity),
            ("curvature", f"{self.curvature[0]:.4g} to {self.curvature[1]:.4g}"),
            ("L_f", f"{self.lipschitz:.4g}"),
            ("step sizes that descend", f"below {2 / self.lipschitz:.4g}"),
            ("residual", f"{self.residual:.3g}"),
            ("distinct minima", f"{self.minima} from {self.starts} starts"),
            ("recommended", "bilax.auto()"),
            ("as a recipe", f"{self.method}(inner_steps={self.inner_steps}, step_size={self.step_size:.3g})"),
            ("tried", f"F from {self.tried[0]:.6g} to {self.tried[1]:.6g} in {_TRIED} steps"),
        ]


_RECIPES: dict[str, Callable[[int, float], Method]] = {"ls": ls, "ia_gm_a": ia_gm_a, "iaptt_gm": iaptt_gm}
_DESCENT_STEPS = 300
_LARGE = 2_000
"""follower variables beyond which less is looked at"""


class _Effort(NamedTuple):
    """How much a survey looks at: an evaluation, and a vector kept, cost as much as the follower has variables."""

    starts: int = 16
    rounds: int = 5
    """of descents with the step length that the curvature met so far allows"""
    looks: int = 15
    """at the curvature along each descent"""
    products: int = 30
    """of the Hessian with a vector, for one look"""

    @classmethod
    def for_size(cls, size: int) -> "_Effort":
        return cls() if size <= _LARGE else cls(starts=4, rounds=2, looks=5, products=15)


_TRIED = 10
"""leader steps with which a recommendation is tried"""
_KEPT = 1 << 24
"""numbers that looks at the curvature side by side may keep"""
_ABSURD = 1e6
"""a greatest curvature that exceeds that at the follower's minimum by so much is no guide to a step length"""


def diagnose(problem: Problem, x: PyTree, y: PyTree, *, data: tuple[Any, ...] = (), tasks: bool = False) -> Diagnosis:
    """Looks at the follower around its trajectory from y, and recommends a method, K and α.

    Curvature is measured without forming a matrix, by Lanczos on Hessian-vector products, at points of
    descents from y and from starts spread over Y (around y, where Y has no bounds). L_f is the greatest met,
    so it holds for this x and for where the follower goes, not for all of a space that it never visits.

    With `tasks` the leaves of the data have a leading axis, one entry per task, as for `solve(..., tasks=True)`: the
    first few tasks are looked at, each by itself, and the diagnosis is of the worst met.
    """
    one = first_task(data) if tasks else data
    with double_precision():
        x, y = in_double(check_point("x", x, may_be_empty=True)), in_double(check_point("y", y))
        x, y = check_objectives(problem, check_inside("x", x, problem.x_set), check_inside("y", y, problem.y_set), one)
        effort, (solver, _) = _Effort.for_size(ravel_pytree(y)[0].size), choose_solver(problem, x, y, one)
        looks = [_look(problem, solver, x, y, one, effort) for one in looked_at(data, tasks)]
        least, greatest = min(look.least for look in looks), max(look.greatest for look in looks)
        minima, solved = max(look.minima for look in looks), min(look.solved for look in looks)
        lipschitz = max(abs(least), abs(greatest), 1e-12)
        several = minima > 1 or least < -1e-6 * lipschitz
        convexity = "non-convex" if several else "strongly convex" if least >= 1e-4 * lipschitz else "convex"
        convexity = convexity if several or solved >= 0.5 else "unconverged"
        name, reasons = _recommend(convexity, least, lipschitz, minima)
        steps = int(np.clip(2 * max(look.settled for look in looks), 10, 500))
        start = "fixed" if tasks else "warm"  # a recipe's tasks share their start
        solving = Method(5000, solver, derivative=Implicit(), start=start, follower_tolerance=1e-8)
        recommended = solving if minima == 1 and solved >= 0.5 else _RECIPES[name](steps, 1 / lipschitz)
        trial = solve(problem, recommended, x, y, data=data, tasks=tasks, steps=_TRIED, optimizer=optax.adam(0.05))
        tried = float(trial.history.upper[0]) if trial.steps else math.nan, float(trial.upper)
    if trial.ended.failed:
        reasons = (*reasons, f"Tried for {_TRIED} steps, it failed: {trial.ended.message}")
    return Diagnosis(
        curvature=(least, greatest),
        lipschitz=lipschitz,
        residual=max(look.residual for look in looks),
        convexity=convexity,
        minima=minima,
        starts=effort.starts,
        method=name,
        inner_steps=steps,
        step_size=1 / lipschitz,
        recommended=recommended,
        tried=tried,
        reasons=reasons,
    )


class _Look(NamedTuple):
    """What was seen of one follower: `_Survey` and the descents of a solver, as numbers."""

    least: float
    greatest: float
    minima: int
    solved: float
    """the share of the descents that arrived"""
    residual: float
    settled: int


def _look(problem: Problem, solver: Any, x: PyTree, y: PyTree, data: tuple[Any, ...], effort: _Effort) -> _Look:
    unit = low_discrepancy(effort.starts, ravel_pytree(y)[0].size, 5)
    survey = jax.device_get(_survey(problem, x, y, data, unit, effort))
    least, greatest, minima, solved = float(survey.least), float(survey.greatest), int(survey.minima), 1.0
    if ravel_pytree(y)[0].size <= DENSE:
        descents = survey_minima(problem, solver, x, y, data)
        solved = descents.solved
        minima = 1
        if len(descents.ends):
            ends = jnp.asarray(descents.ends)
            minima = int(_count_distinct(ends, jnp.ptp(ends, axis=0) + 1e-12)) if descents.others else 1
            at_minima = jax.device_get(_curvatures(problem, x, y, data, ends))
            usual = float(np.max(np.abs(np.nan_to_num(at_minima, posinf=0, neginf=0))))
            if usual > 0 and max(abs(least), abs(greatest)) > _ABSURD * usual:
                least, greatest = float(np.min(at_minima)), float(np.max(at_minima))
    return _Look(least, greatest, minima, solved, float(survey.residual), int(survey.settled))


@quick_jit
def _curvatures(problem: Problem, x: PyTree, y: PyTree, data: Any, points: Array) -> Array:
    flat = flatten(problem, x, y, data)
    return jnp.stack(jax.vmap(lambda point: _extreme_curvature(flat, flat.ravel(x), point))(points))


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
    if convexity == "unconverged":
        why = "Fewer than half of the descents arrived at a minimum: f may be unbounded below, or not smooth."
        return "iaptt_gm", (why, step)
    why = f"Negative curvature ({least:.3g}) and {minima} distinct minima: the start decides where the follower ends."
    return "iaptt_gm", (why, step, "Certify what comes out; bilax.solve_global looks at all basins.")


class _Survey(NamedTuple):
    least: Array
    greatest: Array
    """the extreme eigenvalues of ∂²f/∂y² that were met"""
    residual: Array
    """at the given point"""
    minima: Array
    """how many of the descents' end points are distinct"""
    settled: Array
    """after how many steps from the given point the residual is a hundredth of what it was"""


@quick_jit
def _survey(problem: Problem, x: PyTree, y: PyTree, data: Any, unit: Array, effort: _Effort) -> _Survey:
    flat = flatten(problem, x, y, data)
    x_flat, y_flat = flat.ravel(x), flat.ravel(y)
    starts = _spread_starts(flat, y_flat, unit)

    def extremes(points):
        # Side by side as long as what they keep is small.
        side_by_side = max(1, _KEPT // (effort.products * y_flat.size))
        look = functools.partial(_extreme_curvature, flat, x_flat, products=effort.products)
        return jax.lax.map(look, points, batch_size=min(side_by_side, len(points)))

    lows, highs = extremes(starts)

    def attempt(_, carry):
        # How far a descent gets, and so what curvature it meets, depends on α = 1/L: go to where the two agree.
        lipschitz = carry[0]
        descend = functools.partial(_descent, flat, x_flat, alpha=1 / lipschitz, looks=effort.looks)
        ends, (points, residuals) = jax.vmap(descend)(starts)
        met = points.reshape(-1, y_flat.size)
        low, high = extremes(jnp.where(jnp.isfinite(met), met, y_flat))
        least, greatest = jnp.minimum(jnp.min(low), jnp.min(lows)), jnp.maximum(jnp.max(high), jnp.max(highs))
        return jnp.sqrt(lipschitz * _largest(least, greatest)), least, greatest, ends, residuals

    lipschitz = _largest(jnp.min(lows), jnp.max(highs))
    carry = lipschitz, lipschitz, lipschitz, starts, jnp.zeros((len(unit), _DESCENT_STEPS))
    _, least, greatest, ends, residuals = jax.lax.fori_loop(0, effort.rounds, attempt, carry)
    reach = jnp.where(_bounded(flat.y_range), flat.y_range.width, jnp.ptp(starts, axis=0) + 1e-12)
    small = residuals[0] <= 0.01 * residuals[0, 0]
    settled = jnp.where(jnp.any(small), jnp.argmax(small), _DESCENT_STEPS)
    return _Survey(least, greatest, residuals[0, 0], _count_distinct(ends, reach), settled)


def _spread_starts(flat: FlatProblem, y: Array, unit: Array) -> Array:
    """y itself, two corners of Y, and points spread over Y; without bounds only around y, which is of interest."""
    search = flat.y_range
    bounded = _bounded(search)
    scale = jnp.where(bounded, 1.0, 0.1 * jnp.maximum(1.0, jnp.abs(y)) / search.width)
    starts = jax.vmap(flat.project_y)(search.spread(unit, scale)).at[0].set(y)
    # Curvature is often greatest at the ends of a box.
    corners = jnp.where(bounded, jnp.stack([search.lo, search.hi]), starts[1:3])
    return starts.at[1:3].set(jax.vmap(flat.project_y)(corners))


def _bounded(search: Range) -> Array:
    return jnp.isfinite(search.lo) & jnp.isfinite(search.hi)


def _extreme_curvature(flat: FlatProblem, x: Array, y: Array, products: int = 30) -> tuple[Array, Array]:
    ritz = lanczos(lambda v: flat.hessian_product(x, y, v), y.size, products)
    return jnp.min(ritz), jnp.max(ritz)


def _descent(flat: FlatProblem, x: Array, start: Array, alpha: Array, looks: int) -> tuple[Array, tuple[Array, Array]]:
    """The end of a projected descent, `looks` points on the way, and the residual at every step."""

    def step(point, _):
        slope = jax.grad(flat.lower, 1)(x, point)
        after = flat.project_y(point - alpha * slope)
        return after, jnp.linalg.norm(point - after) / alpha

    def part(point, _):
        after, residuals = jax.lax.scan(step, point, length=_DESCENT_STEPS // looks)
        return after, (point, residuals)

    end, (points, residuals) = jax.lax.scan(part, start, length=looks)
    return end, (points, residuals.reshape(-1))


def _count_distinct(points: Array, reach: Array) -> Array:
    """How many of the points are farther than a fiftieth of the reach from all before them."""
    near = jnp.max(jnp.abs(points[:, None] - points) / reach, axis=-1) < 0.02
    return jnp.sum(~jnp.any(jnp.tril(near, -1), axis=1))


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
