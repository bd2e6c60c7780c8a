"""What `auto` adds to its plan at the end of a run: which bounds hold the leader, and a large follower solved anew."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from bilax.methods.solved_follower import SolvedFollower
from bilax.problem.problem import Problem
from bilax.problem.quick_jit import quick_jit
from bilax.problem.sets import Box, Each, NonNegative, Product, Reals, Set, bounds

FLAT = 1e-4
"""slope at a bound, beside all that the run gained, below which more room is worth nothing"""
NUDGE = 1e-3
"""how far the follower is moved from where a run ended, beside its size"""
NAMED = 3
"""leader variables that are named; of more the number is told"""


def on_bounds(problem: Problem, solution: Any) -> str | None:
    """Which leader variables ended on a bound, and whether F would fall beyond it; None if none did."""
    x = jax.tree.map(np.asarray, eqx.filter(solution.x, eqx.is_inexact_array))
    leaves = [jax.tree.leaves(tree) for tree in (x, *bounds(_one_by_one(problem.x_set), x))]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(x)]
    held, count = [], 0
    for path, value, low, high in zip(paths, *leaves, strict=True):
        count += value.size
        at_bound = (value <= low) | (value >= high)
        for place in np.argwhere(np.broadcast_to(at_bound, value.shape)):
            index = f"[{', '.join(map(str, place))}]" if place.size else ""
            held.append(f"x{path}{index} = {float(value[tuple(place)]):.4g}")
    if not held:
        return None
    names = ", ".join(held[:NAMED]) + (", ..." if len(held) > NAMED else "")
    # Along free variables F has no slope at the end: what is left is that along those that are held.
    slopes, values = solution.history.grad_x_norm, solution.history.upper
    slope, gained = (float(slopes[-1]), float(values[0] - values[-1])) if len(values) else (np.inf, 0.0)
    advice = "If such a bound was a guess, widen it."
    if slope <= FLAT * gained:
        advice = f"F hardly changes there (its slope is {slope:.1e}), so a wider X would gain little."
    return f"{len(held)} of {count} leader variables ended on a bound of X: {names}. {advice}"


def _one_by_one(x_set: Any) -> Any:
    """X without what bounds coordinates together: a zero of a simplex is an answer, and nothing to widen."""
    if isinstance(x_set, Product):
        return Product(jax.tree.map(_one_by_one, x_set.sets, is_leaf=lambda node: isinstance(node, Set)))
    if isinstance(x_set, Each):
        return Each(_one_by_one(x_set.each), x_set.own)
    return x_set if isinstance(x_set, Box | NonNegative) else Reals()


class Anew(NamedTuple):
    """What the follower, solved at the final x from the caller's y0, came to."""

    words: str
    too_good: bool
    """whether f is lower there and F higher: an F that the follower's best answer does not grant was claimed"""


def solved_anew(
    problem: Problem, algorithm: SolvedFollower, solution: Any, y0: PyTree, data: tuple[Any, ...]
) -> Anew | None:
    """Whether the follower, solved at the final x from the caller's y0, gives another F; None where it does not.

    A run follows one minimum from x to x. With several, solving again from y0 may well end in another.
    """
    found = _elsewhere(problem, algorithm, solution, y0, data)
    if found is None:
        return None
    too_good = found.upper > float(solution.upper) and found.lower
    meant = (
        "That minimum is the lower one in f, so the F claimed here is better than the follower's best answer grants. "
        if too_good
        else ""
    )
    return Anew(
        f"Solved anew from y0 at the final x, the follower ends in another minimum, with {found.words}. {meant}F is "
        "that of solution.y: take solution.y as it is, for solving or training again with this x may end at a worse F.",
        bool(too_good),
    )


def nudged(problem: Problem, algorithm: SolvedFollower, solution: Any, data: tuple[Any, ...]) -> Anew | None:
    """Whether the follower falls to another F once it is moved a little; None where it does not.

    A leader that gains by it drives the follower to where its minimum ends, and a solver may rest on the saddle there.
    """
    y = jax.tree.map(jnp.asarray, eqx.filter(solution.y, eqx.is_inexact_array))
    draw, size = np.random.default_rng(0), optax.tree.norm(y) / np.sqrt(optax.tree.size(y))
    start = jax.tree.map(lambda leaf: leaf + (NUDGE * size * draw.standard_normal(leaf.shape)).astype(leaf.dtype), y)
    found = _elsewhere(problem, algorithm, solution, start, data)
    if found is None or not found.lower:
        return None
    return Anew(
        "Moved by a thousandth of its size from where the run ended and solved again, the follower falls, to "
        f"{found.words}: solution.y is a saddle of f, or hardly a minimum, to which the leader was drawn because F is "
        "better there than a follower grants. Going on from there, with y0 = solution.y, often leads further; where "
        "x will be used with followers that are solved anew, let each outer step do so: start='fixed' in a "
        "bilax.Method of your own.",
        found.upper > float(solution.upper),
    )


class _Elsewhere(NamedTuple):
    words: str
    upper: float
    lower: bool
    """whether f is lower there"""


def _elsewhere(
    problem: Problem, algorithm: SolvedFollower, solution: Any, start: PyTree, data: tuple[Any, ...]
) -> _Elsewhere | None:
    """Where the follower ends from this start at the final x; None if F is the same there."""
    x = jax.tree.map(jnp.asarray, eqx.filter(solution.x, eqx.is_inexact_array))
    upper, lower = (float(number) for number in _solve(problem, algorithm, x, start, data))
    gained = float(solution.history.upper[0]) - float(solution.upper) if len(solution.history.upper) else 0.0
    if abs(upper - float(solution.upper)) <= 0.01 * abs(gained) + 1e-6 * abs(upper):
        return None
    here = f"F = {float(solution.upper):.6g}, f = {float(solution.lower):.6g}"
    return _Elsewhere(
        f"F = {upper:.6g} and f = {lower:.6g} (here {here})", upper, lower < float(solution.lower) - 1e-6 * abs(lower)
    )


@quick_jit
def _solve(problem: Problem, algorithm: SolvedFollower, x: PyTree, y0: PyTree, data: tuple[Any, ...]) -> Any:
    found = algorithm.evaluate(problem, x, y0, data)
    return found.value, found.lower
