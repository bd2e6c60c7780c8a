"""Global search over leader and follower together: many starts, a value-function penalty, then restoration.

The optimistic problem is min F(x, y) such that f(x, y) ≤ f*(x). Three stages, each one vmap and one jit:

1. `_explore`. A swarm of pairs (x, y) follows Adam on F + ρ (f − f*), with ρ growing; f*(x) is the lowest of a
   few *witnesses*, follower points that each pair carries along, and its gradient comes from Danskin's theorem.
   Pairs differ in their rate and in their last ρ, so that no scale has to be chosen.
2. `_settle`. The end points violate the constraint a little, and a little is too much: where the follower
   turns indifferent at an isolated x, any slack admits points that are too good to be true. So x descends along
   the follower's solution y(x), and then Newton's method on h(x) = f(x, y) − f(x, w), with w the follower's
   global minimiser, moves it to where the violation vanishes.
3. The same against other follower points, with x at rest unless they reveal a gap; then `certify`.
"""

import time
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from bilax.gradient.tasks import count_tasks
from bilax.methods.auto import auto
from bilax.problem.checks import check_inside, check_objectives, check_point
from bilax.problem.joined_tasks import all_tasks
from bilax.problem.precision import double_precision, in_double
from bilax.problem.problem import Problem
from bilax.problem.quick_jit import quick_jit
from bilax.problem.sets import Set
from bilax.problem.terms import Term
from bilax.run.solution import Status
from bilax.run.solve import solve
from bilax.trust.certificate import Certificate, Verdict, certify, domain_of, is_box
from bilax.trust.flat_problem import FlatProblem, Range, check_differentiable, flatten, with_plain_set
from bilax.trust.follower_minima import (
    NEWTON_LIMIT,
    descend,
    follower_minima,
    gap_tolerance,
    low_discrepancy,
    rounding,
    scan_coordinates,
    typical,
)
from bilax.trust.interval_rules import NotSupportedError
from bilax.trust.leader_bound import MOST_VARIABLES, LeaderBound
from bilax.trust.polish import Reduced, polish

ROUNDS, STEPS = 20, 40
PAIRS, WITNESSES = 256, 8
CHOSEN, RIVALS, SAMPLES, DESCENT, NEWTON = 16, 6, 2048, 120, 40


class Pair(NamedTuple):
    """One member of the swarm."""

    x: Array
    y: Array
    witnesses: Array
    steps: Array
    """step length of each witness's descent"""
    mean: Array
    square: Array
    """Adam's memory"""
    pace: Array
    """1, 0.1 or 0.01: this pair's share of the largest rate"""
    last_rho: Array


class Scales(NamedTuple):
    """Typical differences of F and f over the starts."""

    upper: Array
    lower: Array


@quick_jit
def _explore(problem: Problem, x0: PyTree, y0: PyTree, data: Any, unit: Array, fresh: Array):
    """The swarm's end points (x, y), their F and their gap to the witnesses.

    `unit`: pairs × (n + m) points of the unit cube; `fresh`: rounds × witnesses × m.
    """
    flat = flatten(problem, x0, y0, data)
    pairs, scales = _swarm(flat, unit, fresh.shape[1])

    def jump(pairs, r):
        # Every other pair, so that not all end in the same few places.
        jumped = jax.vmap(lambda pair: _jump(flat, scales, pair, r))(jax.tree.map(lambda leaf: leaf[1::2], pairs))
        return jax.tree.map(lambda old, new: old.at[1::2].set(new), pairs, jumped)

    def one_round(r, pairs):
        pairs = jax.lax.cond(r < 0.7 * ROUNDS, jump, lambda pairs, _: pairs, pairs, r)
        pairs = jax.vmap(lambda pair: _renew(flat, pair, fresh[r], r))(pairs)
        step = jax.vmap(lambda t, pair: _follow_penalty(flat, scales, pair, t), (None, 0))
        return jax.lax.fori_loop(r * STEPS, (r + 1) * STEPS, step, pairs)

    pairs = jax.lax.fori_loop(0, ROUNDS, one_round, pairs)
    lower = jax.vmap(flat.lower)
    rivals = jax.vmap(lambda x, ws: jnp.min(jax.vmap(lambda w: flat.lower(x, w))(ws)))(pairs.x, pairs.witnesses)
    return pairs.x, pairs.y, jax.vmap(flat.upper)(pairs.x, pairs.y), lower(pairs.x, pairs.y) - rivals, scales


def _swarm(flat: FlatProblem, unit: Array, witnesses: int) -> tuple[Pair, Scales]:
    n, m, count = flat.x_range.lo.size, flat.y_range.lo.size, unit.shape[0]
    index = jnp.arange(count)
    pace = jnp.asarray([1.0, 0.1, 0.01])[index % 3]
    last_rho = 10.0 ** jnp.asarray([3.0, 5.0, 7.0])[(index // 3) % 3]
    x = jax.vmap(flat.project_x)(flat.x_range.spread(unit[:, :n], pace[:, None]))
    y = jax.vmap(flat.project_y)(flat.y_range.spread(unit[:, n:], pace[:, None]))
    lower = jax.vmap(flat.lower)(x, y)
    upper = jax.vmap(flat.upper)(x, y)
    differences = upper - jnp.roll(upper, 1), lower - jnp.roll(lower, 1)
    scales = Scales(typical(differences[0]), typical(differences[1]))
    memory = jnp.zeros((count, n + m))
    ws = jnp.repeat(y[:, None], witnesses, 1)
    return Pair(x, y, ws, jnp.ones((count, witnesses)), memory, memory, pace, last_rho), scales


def _renew(flat: FlatProblem, pair: Pair, unit: Array, r: Array) -> Pair:
    """Adds new witnesses (spread over Y, and scans along the coordinates) and keeps the lowest."""

    def f(y):
        return flat.lower(pair.x, y)

    lowest = pair.witnesses[jnp.argmin(jax.vmap(f)(pair.witnesses))]
    scan = jax.vmap(lambda y: scan_coordinates(f, flat.project_y, flat.y_range, y, r / ROUNDS))
    spread = jax.vmap(flat.project_y)(flat.y_range.spread(unit, pair.pace))
    new = jnp.concatenate([scan(jnp.stack([lowest, pair.y])), spread[2:]])
    new = jax.vmap(lambda y: descend(f, flat.project_y, y, 5, newton=y.size <= 2))(new)
    ws = jnp.concatenate([pair.witnesses, new])
    ws = ws[jnp.argsort(jax.vmap(f)(ws))[: unit.shape[0]]]
    slopes = jax.vmap(lambda w: jnp.linalg.norm(jax.grad(f)(w)))(ws)
    return pair._replace(witnesses=ws, steps=1e-3 * jnp.mean(flat.y_range.width) / (slopes + 1e-12))


def _jump(flat: FlatProblem, scales: Scales, pair: Pair, r: Array) -> Pair:
    """Scans F + ρ (f − f*) along every coordinate of (x, y), with the witnesses as they are."""
    n = pair.x.size
    rho = pair.last_rho ** ((r + 1) / ROUNDS)

    def penalised(v):
        x, y = v[:n], v[n:]
        lowest = jnp.min(jax.vmap(lambda w: flat.lower(x, w))(pair.witnesses))
        return flat.upper(x, y) / scales.upper + rho / scales.lower * jnp.maximum(flat.lower(x, y) - lowest, 0)

    def project(v):
        return jnp.concatenate([flat.project_x(v[:n]), flat.project_y(v[n:])])

    lo, hi, centre = (jnp.concatenate(parts) for parts in zip(flat.x_range[:3], flat.y_range[:3], strict=True))
    search = Range(lo, hi, centre, flat.x_range.bounded and flat.y_range.bounded)
    v = scan_coordinates(penalised, project, search, jnp.concatenate([pair.x, pair.y]), r / ROUNDS)
    return pair._replace(x=v[:n], y=v[n:])


def _follow_penalty(flat: FlatProblem, scales: Scales, pair: Pair, t: Array) -> Pair:
    """One descent step of each witness, then one Adam step of (x, y) on F + ρ (f − f*)."""
    total, n = ROUNDS * STEPS, pair.x.size

    def f(y):
        return flat.lower(pair.x, y)

    values, slopes = jax.vmap(jax.value_and_grad(f))(pair.witnesses)
    trials = jax.vmap(flat.project_y)(pair.witnesses - pair.steps[:, None] * slopes)
    after = jax.vmap(f)(trials)
    better = after < values
    ws = jnp.where(better[:, None], trials, pair.witnesses)
    values = jnp.where(better, after, values)
    steps = jnp.clip(jnp.where(better, pair.steps * 1.5, pair.steps * 0.3), 1e-14, 1e14)

    rival = ws[jnp.argmin(values)]
    behind = f(pair.y) > jnp.min(values)
    rho = pair.last_rho ** ((t + 1) / total)

    def penalised(x, y):
        gap = jnp.where(behind, flat.lower(x, y) - flat.lower(x, rival), 0)
        return flat.upper(x, y) / scales.upper + rho / scales.lower * gap

    width = jnp.concatenate([flat.x_range.width, flat.y_range.width])
    slope = jnp.concatenate(jax.grad(penalised, (0, 1))(pair.x, pair.y)) * width
    slope = jnp.where(jnp.isfinite(slope), slope, 0)
    step, (mean, square) = _adam((pair.mean, pair.square), slope, t)
    rate = pair.pace * 0.03 * 10 ** (-5 * t / total)
    moved = jnp.concatenate([pair.x, pair.y]) - rate * width * step
    x, y = flat.project_x(moved[:n]), flat.project_y(moved[n:])
    return pair._replace(x=x, y=y, witnesses=ws, steps=steps, mean=mean, square=square)


class Checked(NamedTuple):
    """A pair whose follower is a global minimiser, as far as a thorough search can tell."""

    x: Array
    y: Array
    upper: Array
    lower: Array
    lowest: Array
    """f*(x)"""
    tolerance: Array
    """the largest gap f − f* that was let pass"""


@quick_jit
def _settle(
    problem: Problem,
    x0: PyTree,
    y0: PyTree,
    data: Any,
    xs: Array,
    ys: Array,
    modes: Array,
    unit: Array,
    passes: Array,
    descent: Array,
) -> Checked:
    """Moves each pair to where its follower is a global minimiser.

    `modes`: 0 leaves y where it is and moves x alone; 1 follows the minimum that y is in, as x descends
    F(x, y(x)); 2 does the same but takes the best global minimiser at every pass. `descent`: how many steps x
    descends in each pass.
    """
    flat = flatten(problem, x0, y0, data)

    def one(x, y, mode):
        def body(i, carry):
            x, y, rivals, _ = carry
            # The first pass only finds the rivals.
            x, y = _close_gap(flat, x, y, rivals, mode > 0, jnp.where(i == 0, 0, 0.1 ** (i - 1)), descent)
            minima = follower_minima(flat, x, y, unit, keep=16)
            checked = _take_best(flat, x, y, minima)
            return x, jnp.where(mode == 2, checked.y, y), minima.points[:RIVALS], checked

        nothing = jnp.zeros(())
        checked = Checked(x, y, nothing, nothing, nothing, nothing)
        return jax.lax.fori_loop(0, passes, body, (x, y, jnp.repeat(y[None], RIVALS, 0), checked))[3]

    return jax.vmap(one)(xs, ys, modes)


def _close_gap(
    flat: FlatProblem, x: Array, y: Array, rivals: Array, moving: Array, pace: Any, descent: Array
) -> tuple[Array, Array]:
    """Descends F(x, y(x)) while no rival is lower, then closes what gap is left by Newton's method in x."""
    width, n = flat.x_range.width, x.size

    def f(x, y):
        return flat.lower(x, y)

    def body(t, carry):
        x, y, rivals, adam = carry
        followed = jax.vmap(lambda v: descend(lambda v: f(x, v), flat.project_y, v, 1))(
            jnp.concatenate([y[None], rivals])
        )
        y, rivals = jnp.where(moving, followed[0], y), followed[1:]
        gaps, slopes = jax.vmap(lambda w: jax.value_and_grad(lambda x: f(x, y) - f(x, w))(x))(rivals)
        slopes = slopes * width
        same = jnp.max(jnp.abs(rivals - y) / flat.y_range.width, axis=1) < 1e-4
        gaps = jnp.where((gaps <= rounding(f(x, y))) | (moving & same), 0, gaps)
        sizes = jnp.linalg.norm(slopes, axis=1)

        leader = _reduced_gradient(flat, x, y) * width
        # A multiple of the leader's slope outweighs any multiplier that the constraint can have.
        push = 4 * jnp.linalg.norm(leader) * jnp.sum(jnp.where(gaps > 0, 1 / (sizes + 1e-300), 0)[:, None] * slopes, 0)
        step, adam = _adam(adam, leader + push, t)
        downhill = 0.01 * pace * 10 ** (-4 * t / (descent + 1)) * step

        worst = jnp.argmax(gaps)
        slope = slopes[worst]
        slope = jnp.where(flat.project_x(x - 1e-9 * width * jnp.sign(slope)) == x, 0, slope)
        size = jnp.sum(slope**2)
        newton = jnp.where((gaps[worst] > 0) & (size > 0), gaps[worst] / jnp.where(size > 0, size, 1), 0) * slope
        newton = newton * jnp.minimum(1, 0.1 / (jnp.linalg.norm(newton) + 1e-300))
        x = flat.project_x(x - width * jnp.where(moving & (t < descent), downhill, newton))
        return x, y, rivals, adam

    adam = jnp.zeros(n), jnp.zeros(n)
    return jax.lax.fori_loop(0, descent + NEWTON, body, (x, y, rivals, adam))[:2]


def _reduced_gradient(flat: FlatProblem, x: Array, y: Array) -> Array:
    """∇ of F(x, y(x)) by the implicit function theorem, over the coordinates of y that no bound holds."""
    slope_x, slope_y = jax.grad(flat.upper, (0, 1))(x, y)
    g = jax.grad(flat.lower, 1)(x, y)
    free = (flat.project_y(y - 1e-9 * (1 + jnp.abs(y)) * jnp.sign(g)) != y) | (g == 0)
    hessian = jnp.where(free[:, None] & free, jax.hessian(flat.lower, 1)(x, y), jnp.eye(y.size))
    # Directions in which the follower is flat do not respond.
    inverse = 1 / jnp.where(hessian == 0, jnp.inf, hessian)
    if y.size > 1:
        inverse = jnp.linalg.pinv(hessian, rtol=1e-9, hermitian=True)
    response = inverse @ jnp.where(free, slope_y, 0)
    cross = jax.grad(lambda x: jnp.vdot(jax.grad(flat.lower, 1)(x, y), response))(x)
    total = slope_x - cross
    return jnp.where(jnp.isfinite(total), total, 0)


def _adam(memory: tuple[Array, Array], slope: Array, t: Array) -> tuple[Array, tuple[Array, Array]]:
    mean, square = 0.9 * memory[0] + 0.1 * slope, 0.99 * memory[1] + 0.01 * slope**2
    step = mean / (1 - 0.9 ** (t + 1)) / (jnp.sqrt(square / (1 - 0.99 ** (t + 1))) + 1e-30)
    return step, (mean, square)


def _take_best(flat: FlatProblem, x, y, minima) -> Checked:
    ys = jnp.concatenate([y[None], minima.points])
    lower = jax.vmap(lambda y: flat.lower(x, y))(ys)
    upper = jax.vmap(lambda y: flat.upper(x, y))(ys)
    lowest = jnp.min(lower)
    tolerance = gap_tolerance(lowest, minima.spread, 1e-8)
    good = (lower - lowest <= tolerance) & jnp.isfinite(upper)
    best = jnp.argmin(jnp.where(good, upper, jnp.inf))
    return Checked(x, ys[best], upper[best], lower[best], lowest, tolerance)


class Candidate(NamedTuple):
    """A pair (x, y) with a follower that passed the search's own test."""

    x: PyTree
    y: PyTree
    upper: float
    lower: float
    gap: float


class GlobalSolution(eqx.Module):
    """What `solve_global` returns: the best certified pair, and the others.

    What is known of it is told apart: `certificate` of the follower at x, `leader_slope` of the leader near x, `bound`
    and `within` of the leader everywhere.
    """

    x: PyTree
    y: PyTree
    upper: float
    lower: float
    status: Status
    certificate: Certificate
    candidates: tuple[Candidate, ...]
    """all distinct pairs that passed, best first"""
    leader_slope: float | None = None
    """the scale-free slope of F(x, y(x)) where it ended: small where the leader is locally optimal; None where the
    leader was not polished"""
    bound: float | None = None
    """proven: F is nowhere lower, for any x in X and any global minimiser y of f(x, ·); None where nothing is known"""
    no_bound: str = eqx.field(static=True, default="")
    """why there is no such bound"""
    cut_short: str = eqx.field(static=True, default="")
    """why X and Y were not searched as a whole, and what was done instead; empty where they were"""

    @property
    def within(self) -> float | None:
        """The ε within which (x, y) is globally optimal, follower and leader both proven; None where they are not."""
        if self.bound is None or not self.certificate.rigorous:
            return None
        return max(0.0, self.upper - self.bound)

    def __repr__(self) -> str:
        words = f"{self.certificate.verdict.value}, {self._leader()}"
        if self.cut_short:
            words += ", not searched as a whole"
        return (
            f"GlobalSolution(upper={self.upper:.6g}, lower={self.lower:.6g}, {words}, "
            f"{len(self.candidates)} candidates)"
        )

    def _leader(self) -> str:
        """What is known of the leader everywhere."""
        if self.bound is None:
            return f"no bound of F: {self.no_bound}"
        if self.upper - self.bound > _USEFUL * (1 + abs(self.upper)):
            return f"F nowhere below {self.bound:.4g}, which is far: give more bound_seconds, or tighter boxes"
        if self.within is None:
            return f"F nowhere below {self.bound:.6g}"
        return f"globally optimal within {self.within:.2g}"


def solve_global(
    problem: Problem,
    x0: PyTree,
    y0: PyTree,
    *,
    key: Array | None = None,
    data: tuple[Any, ...] = (),
    tasks: bool = False,
    bound_seconds: float = 5.0,
    time_limit: float = 60.0,
) -> GlobalSolution:
    """Looks for the global optimistic solution: the best F(x, y) with y a *global* minimiser of f(x, ·).

    x0 and y0 give the structure; starts are spread over the sets, and around x0 and y0 (at distances up to about
    a hundred times their size) where a set has no bounds. `key` moves the starts; without one, two calls agree.

    Meant for up to a few dozen variables. It computes in double precision inside, whether or not JAX was told
    to (`jax.enable_x64`), because near an indifferent follower single precision cannot tell a gap from none; x
    and y come back as NumPy arrays of doubles.

    Of all pairs that pass, the best that is certified "global follower" is returned, else the best of which no better
    follower is known; if there is none, the status is `step_limit` and the certificate says what is wrong with the best
    there is. At the end F descends along the follower's solution; `leader_slope` tells how far that came. Where X and Y
    are bounded boxes of up to four variables together, branch and bound over all of them then bounds F from below, for
    at most `bound_seconds`: `within` is the ε within which the answer is proven to be the global one; `no_bound` says
    why there is none.

    The search has a fixed number of evaluations, which grows with the variables. Where f and the projection onto Y are
    so slow that it would take longer than about `time_limit` seconds, it is not begun: `bilax.auto()` descends from its
    starts for that time instead, its answer is certified, the status is `time_limit` and `cut_short` says so. What JAX
    takes to compile comes on top. Beyond six follower variables a warning says that the answer may be far from global.

    With `tasks` the leaves of the data have a leading axis, one entry per task, and so has the y that is found. All
    tasks are searched as one follower, F their mean and f their sum: few and small ones.
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a bilax.Problem, got {problem!r}.")
    if not isinstance(data, tuple):
        raise TypeError(f"data must be a tuple (write data=(batch,) for one value), got {type(data)}.")
    if not bound_seconds >= 0:
        raise ValueError(f"bound_seconds must not be negative, got {bound_seconds}.")
    if not time_limit > 0:
        raise ValueError(f"time_limit must be positive, in seconds, got {time_limit}.")
    seed = 0 if key is None else int(np.asarray(jax.random.key_data(key), np.uint64).sum() % (1 << 31)) + 1
    with double_precision():
        x0, y0 = check_point("x0", x0, may_be_empty=True), check_point("y0", y0)
        x0, y0 = in_double((x0, y0))
        if tasks:
            count = count_tasks(data)
            problem = all_tasks(problem)
            y0 = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), y0)
        if not isinstance(problem.y_set, Set | Term):
            raise NotImplementedError(
                "solve_global does not know sets and terms that depend on x: use bilax.auto(), and certify its answer."
            )
        _warn_of_many(sum(leaf.size for leaf in jax.tree.leaves(y0)))
        given, problem = problem, with_plain_set(problem, x0, data)
        x0, y0 = check_inside("x0", x0, problem.x_set), check_inside("y0", y0, problem.y_set)
        check_objectives(problem, x0, y0, data)
        flat = flatten(problem, x0, y0, data)
        check_differentiable(flat, flat.ravel(x0), flat.ravel(y0))
        seconds = _expected_seconds(flat, flat.ravel(x0), flat.ravel(y0))
        cut_short = _why_short(seconds, time_limit) if seconds > time_limit else ""
        if cut_short:
            candidates = (_by_descents(given, flat, x0, y0, data, key, time_limit),)
        else:
            candidates = _candidates(_search((problem, x0, y0, data), seed), flat)
        best, certificate = _best_certified(problem, candidates, data)
        best, certificate, slope = _polished(problem, best, certificate, data)
        bound, no_bound = _leader_bound(problem, best, data, bound_seconds)
    status = Status.converged if certificate.verdict in _PASSING else Status.step_limit
    status = Status.time_limit if cut_short else status
    if not np.isfinite(best.upper):
        status = Status.non_finite
    best, candidates = jax.device_get((best, candidates))
    found = best.x, best.y, best.upper, best.lower, status, certificate, candidates, slope, bound, no_bound, cut_short
    return GlobalSolution(*found)


_FEW = 6
"""follower variables whose range the starts and scans can be said to cover"""


def _warn_of_many(size: int) -> None:
    if size > _FEW:
        warnings.warn(
            f"solve_global: the follower has {size} variables. Beyond {_FEW} its starts are few for the space, and "
            "what it finds may be far from the global solution; the certificate tells what is proven of the follower.",
            stacklevel=3,
        )


def _expected_seconds(flat: FlatProblem, x: Array, y: Array) -> float:
    """About how long `_search` would take: its evaluations of f at projected points, times what one takes now."""
    points = jnp.asarray(flat.y_range.spread_known(low_discrepancy(_PROBED, y.size, 5)))
    many = jax.jit(jax.vmap(lambda point: flat.lower(x, flat.project_y(point))))
    many(points).block_until_ready()  # which compiles it
    times = []
    for _ in range(3):
        begin = time.monotonic()
        many(points).block_until_ready()
        times.append(time.monotonic() - begin)
    return _evaluations(x.size, y.size) * min(times) / _PROBED


_PROBED = 256
"""points that are evaluated at once to measure how long one takes"""


def _evaluations(n: int, m: int) -> int:
    """How often `_search` evaluates f at a projected point, scans and samples only: by far the most."""

    def scan(size):
        return size * (4 * max(16, 64 // size) + 1)

    explored = PAIRS * ROUNDS * (2 * scan(m) + scan(n + m) // 3 + STEPS * WITNESSES)
    settled = 6 * 3 * CHOSEN * (SAMPLES + 2 * 4 * m * 2049)
    return 2 * (explored + settled)  # descents and derivatives take about as much again


def _why_short(expected: float, time_limit: float) -> str:
    return (
        f"a search of all of X and Y would take about {expected:.2g} s here, more than time_limit={time_limit:.3g}; "
        "this is the best that bilax.auto() found in that time, by descents from several starts"
    )


def _by_descents(
    problem: Problem,
    flat: FlatProblem,
    x0: PyTree,
    y0: PyTree,
    data: tuple[Any, ...],
    key: Array | None,
    seconds: float,
) -> Candidate:
    """What `auto` finds within the time; without a leader, what `certify` finds."""
    if flat.x_range.lo.size:
        solution = solve(problem, auto(), x0, y0, data=data, key=key, time_limit=seconds)
        x, y = solution.x, solution.y
    else:
        start = Candidate(x0, y0, 0.0, 0.0, 0.0)
        x, y = x0, certify(problem, start, data=data, time_limit=seconds).y_lowest
    x, y = flat.ravel(x), flat.ravel(y)
    return Candidate(flat.unravel_x(x), flat.unravel_y(y), float(flat.upper(x, y)), float(flat.lower(x, y)), 0.0)


def _candidates(checked: Checked, flat: FlatProblem) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(flat.unravel_x(c.x), flat.unravel_y(c.y), float(c.upper), float(c.lower), float(c.lower - c.lowest))
        for c in _rows(checked)
    )


def _search(arguments: tuple[Problem, PyTree, PyTree, Any], seed: int) -> Checked:
    """All stages; distinct pairs, best first. `arguments`: problem, x0, y0 and data, as every stage takes them."""
    _, x0, y0, _ = arguments
    n, m = ravel_pytree(x0)[0].size, ravel_pytree(y0)[0].size
    fresh = low_discrepancy(ROUNDS * WITNESSES, m, seed + 1).reshape(ROUNDS, WITNESSES, m)
    x, y, upper, gap, scales = jax.device_get(_explore(*arguments, low_discrepancy(PAIRS, n + m, seed), fresh))
    upper, gap = np.nan_to_num(upper / scales.upper, nan=np.inf), np.nan_to_num(gap / scales.lower, nan=np.inf)
    flat = flatten(*arguments)
    width = np.concatenate([flat.x_range.width, flat.y_range.width])
    # From lenient to strict: what a lenient merit prefers may lie next to a solution that strictness misses.
    merits = [upper + weight * np.maximum(gap, 0) for weight in (1e1, 1e3, 1e5, 1e7)]
    chosen = np.resize(_distinct(np.concatenate([x, y], 1), merits, CHOSEN, width), CHOSEN)
    chosen, modes = np.tile(chosen, 3), np.repeat(np.arange(3), CHOSEN)
    first = _settle(
        *arguments,
        x[chosen],
        y[chosen],
        modes,
        low_discrepancy(SAMPLES, m, seed + 2),
        jnp.asarray(4),
        jnp.asarray(DESCENT),
    )
    # Again, against other follower points and with x at rest unless they reveal a gap: what looked too good may go.
    again = _settle(
        *arguments,
        first.x,
        first.y,
        0 * modes,
        low_discrepancy(SAMPLES, m, seed + 3),
        jnp.asarray(2),
        jnp.asarray(0),
    )
    checked = jax.device_get(again)
    order = _distinct(
        np.concatenate([checked.x, checked.y], 1), [np.nan_to_num(checked.upper, nan=np.inf)], len(modes), width
    )
    return jax.tree.map(lambda leaf: leaf[order], checked)


def _distinct(points: np.ndarray, merits: list[np.ndarray], count: int, width: np.ndarray) -> np.ndarray:
    """Up to `count` indices: the lowest of each merit in turn, no two within a thousandth of the width."""
    chosen: list[int] = []
    orders = [list(np.argsort(merit)) for merit in merits]
    while len(chosen) < count and any(orders):
        for order in orders:
            while order:
                i = order.pop(0)
                if all(np.max(np.abs(points[i] - points[j]) / width) > 1e-3 for j in chosen):
                    chosen.append(i)
                    break
    return np.asarray(chosen[:count])


def _rows(checked: Checked) -> list[Checked]:
    return [Checked(*row) for row in zip(*checked, strict=True)]


_PASSING = (Verdict.global_follower, Verdict.not_excluded)
_SECONDS = 4.0
"""for each certificate"""


def _best_certified(
    problem: Problem, candidates: tuple[Candidate, ...], data: tuple[Any, ...]
) -> tuple[Candidate, Certificate]:
    """The best candidate with a proof; else the best that no better follower is known of; else the best."""
    tried = []
    for candidate in candidates[:8]:
        certificate = certify(problem, candidate, data=data, time_limit=_SECONDS)
        if certificate.verdict is Verdict.global_follower:
            return candidate, certificate
        tried.append((candidate, certificate))
    return next((pair for pair in tried if pair[1].verdict in _PASSING), tried[0])


def _polished(
    problem: Problem, best: Candidate, certificate: Certificate, data: tuple[Any, ...]
) -> tuple[Candidate, Certificate, float | None]:
    """The pair after a last descent of F along y(x), as far as the follower stays as certified as it was."""
    flat = flatten(problem, best.x, best.y, data)
    domain = domain_of(problem.y_set, flat)
    x, y = (np.asarray(flat.ravel(v)) for v in (best.x, best.y))
    polishable = is_box(problem.x_set) and domain is not None and domain.radius == np.inf
    if domain is None or not polishable or not x.size or certificate.verdict not in _PASSING or y.size > NEWTON_LIMIT:
        return best, certificate, None
    try:
        reduced = Reduced(flat, domain, x.size, y.size)
        end = polish(reduced, x, y, np.asarray(flat.x_range.lo), np.asarray(flat.x_range.hi))
        for share in (1.0, 0.5, 0.1):
            # Farther along another follower may become the better one.
            point = x + share * (end.x - x)
            point, followed = jnp.asarray(point), jnp.asarray(reduced.follow(point, end.y))
            upper = float(flat.upper(point, followed))
            if not upper < best.upper - 1e-12 * (1 + abs(best.upper)):
                break
            pair = Candidate(
                flat.unravel_x(point), flat.unravel_y(followed), upper, float(flat.lower(point, followed)), 0.0
            )
            again = certify(problem, pair, data=data, time_limit=_SECONDS)
            if again.verdict is certificate.verdict:
                return pair._replace(gap=again.gap), again, end.slope if share == 1.0 else None
        _, slope = reduced.value_and_slope(x, y)
    except NotSupportedError:
        return best, certificate, None
    moved = np.clip(x - slope, flat.x_range.lo, flat.x_range.hi) - x
    return best, certificate, float(np.max(np.abs(moved))) / (1 + abs(best.upper))


_WITHIN, _USEFUL = 1e-4, 0.1
"""how near F's bound is to come to F, and how far from it a bound is still of use, in units of 1 + |F|"""


def _leader_bound(problem: Problem, best: Candidate, data: tuple[Any, ...], seconds: float) -> tuple[float | None, str]:
    """F's bound, or None and the reason."""
    flat = flatten(problem, best.x, best.y, data)
    ends = np.concatenate([flat.x_range.lo, flat.x_range.hi, flat.y_range.lo, flat.y_range.hi])
    if not ((is_box(problem.x_set) or not flat.x_range.lo.size) and is_box(problem.y_set)):
        return None, "X and Y must be boxes for one"
    if ends.size > 2 * MOST_VARIABLES:
        return None, f"there are {ends.size // 2} variables, and {MOST_VARIABLES} are the most for one"
    if not np.isfinite([*ends, best.upper]).all():
        return None, "all variables must have bounds, and F a value, for one"
    try:
        search = LeaderBound(flat, np.asarray(flat.ravel(best.y)))
        bound = search.run(best.upper - _WITHIN * (1 + abs(best.upper)), time.monotonic() + seconds)
    except NotSupportedError as error:
        return None, str(error)
    return (bound, "") if np.isfinite(bound) else (None, "the time was too short")
