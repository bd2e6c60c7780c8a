"""`bilax.auto()`: a method that looks at the problem, chooses itself, and says what it chose."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from bilax.follower.dynamics import GradientDescent, Nesterov, cauchy_step, dtype_of
from bilax.follower.lbfgs import LBFGS
from bilax.follower.newton import Newton
from bilax.follower.several_starts import SeveralStarts
from bilax.follower.trajectory import begin
from bilax.gradient.implicit import DENSE, Implicit
from bilax.gradient.method import Method
from bilax.methods.hypergradient import Hypergradient
from bilax.methods.indifferent_follower import flat_where_it_matters, variation
from bilax.methods.solved_follower import SolvedFollower
from bilax.problem.problem import Problem
from bilax.problem.quick_jit import quick_jit
from bilax.problem.sets import Reals, bounds
from bilax.problem.terms import has_flat_faces, inside

SMALL = 50_000
"""variables up to which `auto` computes in double precision on the CPU"""
NEWTON = 100
"""follower variables up to which Newton's method is taken without asking"""
STARTS = 12
"""follower starts of a survey, and of a run whose follower has several minima"""
LANES = 24
"""leader starts where one costs little"""
FEW = 4
"""leader starts where one costs more"""
LOOKED = 5
"""tasks, the first ones, whose followers are surveyed and looked at again in the end"""
ROUNDS = 4
"""how often, where there are many, some coordinates of the best are drawn anew"""


class Chosen(NamedTuple):
    """What `auto` decided, as sentences; `print(solution.plan)` shows them."""

    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(f"- {reason}" for reason in self.reasons)

    def and_then(self, reason: str) -> "Chosen":
        """With one more."""
        return Chosen((*self.reasons, reason))


class Auto(eqx.Module):
    """What `auto` makes; `prepare` chooses an algorithm for a problem."""

    tolerance: float = 1e-4
    """of the leader: √(what a step may gain / what has been gained)"""

    def precise(self, x0: PyTree, y0: PyTree) -> bool:
        """Whether to compute in double precision inside: where it is small enough, on the CPU."""
        return jax.default_backend() == "cpu" and optax.tree.size((x0, y0)) <= SMALL

    def by_task(self, problem: Problem, x0: PyTree) -> bool:
        """Whether each task's follower is solved by itself; else all of them are one follower."""
        return _has_leader_in_flat_faces(problem, x0)

    def prepare(
        self,
        problem: Problem,
        x0: PyTree,
        y0: PyTree,
        data: tuple[Any, ...],
        steady: bool,
        alone: bool,
        tasks: bool = False,
        in_time: Callable[[], bool] = lambda: True,
    ) -> tuple[Any, Chosen]:
        """An algorithm for this problem, and why it. `steady`: the data stay the same; `alone`: no starts beside x0.

        `tasks`: y0 and the data have a leading axis, one entry per task, and the problem is that of one task. What may
        be left out is, once it is no longer `in_time`.
        """
        if not steady:
            return _for_samples(problem, x0, y0, data)
        together, looked = optax.tree.size(y0), looked_at((y0, data), tasks)
        y0, data = looked[0]
        size, reasons = optax.tree.size(y0), []
        solver, why = choose_solver(problem, x0, y0, data)
        reasons.append(f"Each of {together // size} tasks by itself: {why}" if tasks else why)
        tolerance = 1e-8 if dtype_of(y0) == jnp.float64 else 1e-4
        method = Method(
            300 if isinstance(solver, Newton) else 5000,
            solver,
            derivative=Implicit(1e-6 if tolerance < 1e-6 else 1e-3, min(size, 1000)),
            start="warm",
            follower_tolerance=tolerance,
        )
        count = _count(y0)
        others = None
        if size <= DENSE and in_time():
            others = max(survey_minima(problem, solver, x0, *one).others for one in looked)
        if others:
            starts = _spread(problem.set_of_y(problem.view(x0, *data)), y0, count, 1)
            method = eqx.tree_at(lambda m: m.dynamics, method, SeveralStarts(solver, starts))
            reasons.append(
                f"The follower has several minima ({others} of {count + 1} starts led to another than the lowest): it "
                "is solved from all these starts each time, and the lowest counts. Nothing proves that no lower one "
                "exists: see bilax.certify and bilax.solve_global."
            )
        elif others is not None:
            reasons.append(f"{count + 1} starts at {_PLACES} points x led to the same minimum: one start is enough.")
        else:
            reasons.append(
                f"{'The follower is large' if size > DENSE else 'The time was up'}: it is solved from y0 and goes on "
                "from its last answer as x moves; other minima are looked for at the end alone."
            )
        if not _has_leader_in_flat_faces(problem, x0):
            reasons.append("X is empty or has a curved boundary: the leader moves by Adam with rate 0.05.")
            return Hypergradient(method, optax.adam(0.05)), Chosen(tuple(reasons))
        lanes = (LANES if together <= NEWTON else FEW) if max(together, optax.tree.size(x0)) <= DENSE else 1
        lanes = 1 if alone or not in_time() else lanes
        more = _spread(problem.x_set, x0, lanes - 1, 2) if lanes > 1 else None
        lean = 0.0
        if lanes > 1:
            more, lean, why = _for_the_indifferent(problem, x0, y0, more, data)
            reasons += why
        rounds = ROUNDS if lanes > FEW and optax.tree.size(x0) > 1 else 0
        reasons.append(
            "The leader moves by L-BFGS with a line search on F at the solved follower"
            + (f", from x0 and {lanes - 1} other starts, of which the better go on" if lanes > 1 else "")
            + (f", and {rounds} times from around the best." if rounds else ".")
        )
        plan = Chosen(tuple(reasons))
        return SolvedFollower(method, more, rounds, self.tolerance, lean=lean, tasks=tasks), plan

    def review(
        self, problem: Problem, algorithm: Any, y0: PyTree, solution: Any, data: tuple[Any, ...], plan: Chosen
    ) -> tuple[Any, Chosen] | None:
        """Looks for a lower follower where the run ended; if there is one, what to run in its place."""
        if not isinstance(algorithm, SolvedFollower):
            return None
        x, y = jax.tree.map(jnp.asarray, eqx.filter((solution.x, solution.y), eqx.is_inexact_array))
        looked = looked_at((y, y0, data), algorithm.tasks)
        if optax.tree.size(looked[0][0]) > DENSE:
            return None
        if solution.ended.name == "linear_solve_failed" and not algorithm.lean:
            return _once_more_optimistic(problem, algorithm, x, looked[0][1], looked[0][2], plan)
        if solution.ended.failed:
            return None
        method, several = algorithm.method, isinstance(algorithm.method.dynamics, SeveralStarts)
        solver: Any = method.dynamics.dynamics if several else method.dynamics  # pyright: ignore
        if not algorithm.lean and any(bool(flat_where_it_matters(problem, x, *one)) for one in looked):
            return algorithm, plan.and_then(
                "At the end the follower has no curvature along a direction that F cares about: it is indifferent, or "
                "has no minimum, and goes on falling for ever. Bound y by y_set, or use bilax.solve_global."
            )
        gaps = [_gap(problem, solver, x, y, data) for y, _, data in looked]
        gap, (y, _, data) = max(gaps), looked[int(np.argmax(gaps))]
        if not gap:
            return None
        count, y_set = _count(y), problem.set_of_y(problem.view(x, *data))
        if several:
            return algorithm, plan.and_then(
                f"At the end a follower that is lower by {gap:.3g} was found, though {count + 1} starts were tried: "
                "do not trust this answer. Use bilax.solve_global."
            )
        plan = plan.and_then(
            f"At the end a follower that is lower by {gap:.3g} was found, so all was run again with {count + 1} starts "
            "of the follower, the lowest of which counts."
        )
        dynamics = SeveralStarts(solver, _spread(y_set, y, count, 1))
        return eqx.tree_at(lambda a: a.method.dynamics, algorithm, dynamics), plan


def auto() -> Auto:
    """A method that chooses itself: `bilax.solve(problem, bilax.auto(), x0, y0)` needs no step length and no optimiser.

    The follower is solved to a tolerance (Newton, L-BFGS, or accelerated proximal steps), from several starts where it
    has several minima; the leader follows the implicit derivative by L-BFGS with a line search within its bounds, from
    several starts where that costs little, and stops as converged where no step gains any more. Small problems are
    computed in double precision, whatever the caller's. Where the data change from step to step, both move by
    first-order steps. `print(solution.plan)` says what was chosen, and why.
    """
    return Auto()


_PLACES = 3
"""points x at which the follower is surveyed"""


def choose_solver(problem: Problem, x0: PyTree, y0: PyTree, data: tuple[Any, ...]) -> tuple[Any, str]:
    size = optax.tree.size(y0)
    y_set = problem.set_of_y(problem.view(x0, *data))
    flat = isinstance(y_set, Reals) or has_flat_faces(y_set)
    newton = f"{size} follower variables: Newton's method with the whole Hessian, and its implicit derivative."
    lbfgs = f"{size} follower variables: L-BFGS, and an implicit derivative."
    if size <= NEWTON or (size <= DENSE and not flat):
        return Newton(), newton
    if flat:
        if size <= DENSE:
            unsolved = float(_steps_alone(problem, LBFGS(), x0, y0, data))
            if not unsolved <= 1e-6:
                return Newton(), newton + f" (L-BFGS was tried and did not arrive in {_TRY} steps.)"
        return LBFGS(), lbfgs
    why = f"{size} follower variables under {type(y_set).__name__}: accelerated proximal steps, an implicit derivative."
    return Nesterov(None, "fista"), why


_TRY = 300
"""steps of L-BFGS after which a follower of medium size is taken for stiff"""


@quick_jit
def _steps_alone(problem: Problem, solver: Any, x: PyTree, y: PyTree, data: tuple[Any, ...]) -> Any:
    return solver.unsolved(_descend(problem, solver, x, y, data, _TRY))


def _descend(problem: Problem, solver: Any, x: PyTree, start: PyTree, data: tuple[Any, ...], most: int) -> Any:
    """The solver's state at the end of a descent of the follower."""
    follower = problem.follower(problem.view(x, *data), data)

    def unfinished(carry):
        return (carry[0] < most) & ~(solver.unsolved(carry[1]) <= 1e-6)

    def body(carry):
        return carry[0] + 1, solver.step(carry[0], carry[1], follower)

    return jax.lax.while_loop(unfinished, body, (jnp.asarray(0), begin(solver, start, follower)))[1]


def _for_samples(problem: Problem, x0: PyTree, y0: PyTree, data: tuple[Any, ...]) -> tuple[Hypergradient, Chosen]:
    follower = problem.follower(problem.view(x0, *data), data)
    rate = 0.5 * float(cauchy_step(follower, y0))
    method = Method(10, GradientDescent(rate), derivative=Implicit(None, 10), start="warm")
    reasons = (
        "The data change from step to step, so neither level can be solved: ten warm steps of the follower "
        f"(α = {rate:.3g}, half the inverse curvature along the first slope), ten of conjugate gradients, and Adam "
        "with rate 0.01 for the leader.",
    )
    return Hypergradient(method, optax.adam(0.01)), Chosen(reasons)


_LEANING = (
    "Ties go to the leader (the optimistic formulation): 10⁻⁸ F, in units of f, are added to f. See "
    "bilax.certify and bilax.solve_global."
)


def _for_the_indifferent(
    problem: Problem, x0: PyTree, y0: PyTree, more: PyTree, data: tuple[Any, ...]
) -> tuple[PyTree, float, tuple[str, ...]]:
    """The leader's other starts and the weight of F, should f not vary with y at x0 or at an end of X; and why."""
    low, high = bounds(problem.x_set, x0)
    ends = [
        inside(problem.x_set, jax.tree.map(lambda here, far: jnp.where(jnp.isfinite(far), far, here), x0, end))
        for end in (low, high)
    ]
    xs = jax.tree.map(lambda *three: jnp.stack(three), x0, *ends)
    starts = _spread(problem.set_of_y(problem.view(x0, *data)), y0, _count(y0), 1)
    found = variation(problem, xs, starts, data)
    if not found.nowhere.any() or not found.weight:
        return more, 0.0, ()
    at_ends = np.flatnonzero(found.nowhere[1:]) + 1
    if at_ends.size:
        more = jax.tree.map(lambda a, b: jnp.concatenate([a[: -at_ends.size], b[at_ends]]), more, xs)
    return (
        more,
        found.weight,
        (f"The follower is indifferent at x0 or at an end of X: f is the same there. {_LEANING}",),
    )


def _once_more_optimistic(
    problem: Problem, algorithm: SolvedFollower, x: PyTree, y0: PyTree, data: tuple[Any, ...], plan: Chosen
) -> tuple[Any, Chosen] | None:
    """For a run that ended, at x, where the follower has no single response."""
    starts = _spread(problem.set_of_y(problem.view(x, *data)), y0, _count(y0), 1)
    weight = variation(problem, jax.tree.map(lambda leaf: leaf[None], x), starts, data).weight
    if not weight:
        return None
    why = "The linear system had no solution, as where a follower is indifferent along a direction that F cares about."
    return dataclasses.replace(algorithm, lean=weight), plan.and_then(f"{why} All was run again. {_LEANING}")


def _spread(a_set: Any, point: PyTree, count: int, seed: int) -> PyTree:
    """Points over a bounded set, or around `point` at distances of its own size and more; along a leading axis.

    Every third one moves all coordinates alike, which is what penalties and prices want.
    """
    flat = ravel_pytree(point)[0]
    here, random = np.asarray(flat, float), np.random.default_rng(seed)
    lo, hi = (np.asarray(ravel_pytree(bound)[0], float) for bound in bounds(a_set, point))
    bounded = np.isfinite(lo) & np.isfinite(hi)
    unit = random.random((count, here.size))
    unit[::3] = (np.arange(len(unit[::3])) + 0.5)[:, None] / len(unit[::3])
    import scipy.special  # here, for every `solve` would wait for it

    normal = scipy.special.ndtri(np.clip(unit, 1e-3, 1 - 1e-3))
    around = here + np.resize([0.3, 1.0, 3.0], count)[:, None] * np.maximum(1.0, np.abs(here)) * normal
    between = np.where(bounded, lo, 0) + unit * np.where(bounded, hi - lo, 0)
    rows = jnp.asarray(np.where(bounded, between, around), flat.dtype)
    return _into(a_set, rows, point)


@quick_jit
def _into(a_set: Any, rows: Array, point: PyTree) -> PyTree:
    """Each row inside the set and a little towards the given point: on a boundary f may be infinite (y log y)."""
    unravel = ravel_pytree(point)[1]

    def one(row):
        return jax.tree.map(lambda a, b: 0.95 * a + 0.05 * b, inside(a_set, unravel(row)), point)

    return jax.vmap(one)(rows)


class Survey(NamedTuple):
    """What descents of the follower from several starts showed, at x0 and at other points of X."""

    others: int
    """how many starts led to another minimum than the lowest; the most met at one x"""
    solved: float
    """the share of the descents that arrived"""
    ends: np.ndarray
    """where those at x0 ended, as flat vectors, one row each; only those that arrived"""


def survey_minima(problem: Problem, solver: Any, x0: PyTree, y0: PyTree, data: tuple[Any, ...]) -> Survey:
    more = _spread(problem.x_set, x0, _PLACES - 1, 3)
    xs = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), x0, more)
    starts = _spread(problem.set_of_y(problem.view(x0, *data)), y0, _count(y0), 1)
    same = jax.tree.map(lambda leaf: jnp.stack([leaf] * _PLACES), starts)
    found = jax.device_get(_solve_from(problem, solver, xs, y0, same, data))
    spread = [np.ptp(row[np.isfinite(row)]) if np.isfinite(row).any() else 0.0 for row in found.before]
    # Beside the variation of f over the starts, and beside its rounding.
    floor = 1e-6 * np.asarray(spread)[:, None] + 1e-12 * np.abs(np.where(np.isfinite(found.totals), found.totals, 0))
    finite = np.where(np.isfinite(found.totals), found.totals, np.nan_to_num(np.min(found.totals), posinf=0.0))
    above = finite - np.min(finite, axis=1, keepdims=True)
    others = int(np.max(np.sum(found.solved & ((found.hills > floor) | (above > floor)), axis=1)))
    first = [np.asarray(leaf)[0].reshape(found.solved.shape[1], -1) for leaf in jax.tree.leaves(found.ends)]
    return Survey(others, float(np.mean(found.solved)), np.concatenate(first, axis=1)[found.solved[0]])


def _gap(problem: Problem, solver: Any, x: PyTree, y: PyTree, data: tuple[Any, ...]) -> float:
    """By how much the lowest of several descents ended below y; 0.0 where it is no more than rounding may do."""
    # In the shapes of the survey, so that nothing is compiled anew.
    starts = _spread(problem.set_of_y(problem.view(x, *data)), y, _PLACES * _count(y), 5)
    starts = jax.tree.map(lambda leaf: leaf.reshape(_PLACES, _count(y), *leaf.shape[1:]), starts)
    xs = jax.tree.map(lambda leaf: jnp.stack([leaf] * _PLACES), x)
    found = jax.device_get(_solve_from(problem, solver, xs, y, starts, data))
    here = float(found.before[0, 0])
    gap = here - float(np.min(found.totals))
    floor = 1e-6 * float(np.ptp(found.before[np.isfinite(found.before)])) + 1e-9 * abs(here)
    return gap if gap > floor else 0.0


def looked_at(trees: PyTree, tasks: bool) -> list[PyTree]:
    """Those of the first tasks, each by itself; without tasks the trees themselves."""
    if not tasks:
        return [trees]
    count = min(LOOKED, len(jax.tree.leaves(trees)[0]))
    return [jax.tree.map(lambda leaf, i=i: leaf[i], trees) for i in range(count)]


def _has_leader_in_flat_faces(problem: Problem, x0: PyTree) -> bool:
    """Whether there is a leader, and its X has flat faces: what a line search along them needs."""
    return bool(jax.tree.leaves(x0)) and has_flat_faces(problem.x_set)


def _count(y0: PyTree) -> int:
    """How many starts beside y0 a follower of this size is worth."""
    return STARTS if optax.tree.size(y0) <= NEWTON else 3


class _Ends(NamedTuple):
    ends: PyTree
    totals: Any
    """f (and its term) there"""
    solved: Any
    hills: Any
    """how much higher f is somewhere between an end and the lowest one"""
    before: Any
    """f at the starts"""


@quick_jit
def _solve_from(problem: Problem, solver: Any, xs: PyTree, y0: PyTree, starts: PyTree, data: tuple[Any, ...]) -> _Ends:
    """Descents of the follower from y0 and from other starts, at each of several x."""

    def at_one_x(place):
        x, starts = place
        follower = problem.follower(problem.view(x, *data), data)
        starts = jax.tree.map(lambda one, more: jnp.concatenate([one[None], more]), y0, starts)

        def descend(start):
            state = _descend(problem, solver, x, start, data, 60 if isinstance(solver, Newton) else _TRY)
            y = solver.point(state)
            return y, follower.total(y), solver.unsolved(state) <= 1e-6

        ends, totals, solved = jax.lax.map(descend, starts)
        totals = jnp.where(jnp.isfinite(totals), totals, jnp.inf)
        lowest = jax.tree.map(lambda leaf: leaf[jnp.argmin(totals)], ends)

        def hill(end, total):
            def height(t):
                return follower.total(jax.tree.map(lambda a, b: a + t * (b - a), end, lowest))

            return jnp.nanmax(jax.vmap(height)(jnp.asarray(_BETWEEN, totals.dtype))) - total

        return _Ends(ends, totals, solved, jax.vmap(hill)(ends, totals), jax.vmap(follower.total)(starts))

    return jax.lax.map(at_one_x, (xs, starts))


_BETWEEN = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)
"""where on the way from one end to another a hill is looked for: two minima have one between them, a valley has not"""
