"""The follower's trajectory: unroll it, choose an iterate, sweep back along it.

States are s_0, …, s_K and iterates y_k = point(s_k). The chosen index k̄ runs from 1 to K, or to the step at which the
follower is solved, where a tolerance is given.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from bilax.follower.dynamics import Dynamics
from bilax.problem.problem import Follower
from bilax.problem.terms import brought_inside


class Last(eqx.Module):
    """Choose y_K."""


class ArgMax(eqx.Module):
    """Choose y_k̄ with k̄ the first k in 1..K that maximises `score(follower, y_k)`."""

    score: Callable[[Follower, PyTree], Any]


class EveryStep(eqx.Module):
    """The leader's value is Σ_k w_k F(x, y_k), each w_k being 1/K if none are given; y_K is what is reported."""

    weights: tuple[float, ...] | None = None


def pessimistic() -> ArgMax:
    """Pessimistic trajectory truncation (Algorithm 1): k̄ = argmax over k of F(x, y_k)."""
    return ArgMax(_upper)


def _upper(follower: Follower, y: PyTree) -> Any:
    return follower.upper(y)


class Unrolling(NamedTuple):
    """How a method runs its follower: start and step as pure functions, and which iterate counts."""

    begin: Callable[[PyTree, PyTree], PyTree]
    """begin(params, z) -> s_0"""
    step: Callable[[Any, PyTree, PyTree], PyTree]
    """step(k, params, state) -> state"""
    score: Callable[[PyTree, PyTree], Any] | None
    """score(params, state) -> scalar; None chooses the last state"""
    length: int
    solved: "Solved | None" = None
    """when to stop before `length`"""


class Solved(NamedTuple):
    """A stopping rule."""

    reference: Callable[[PyTree, PyTree], PyTree]
    """(params, s_0) -> what later states are compared with"""
    test: Callable[[PyTree, PyTree, PyTree], Any]
    """(params, s_k, reference) -> whether the follower is solved"""
    every: int
    """how many steps lie between two tests"""


class Trajectory(NamedTuple):
    """What is kept of one run of the follower."""

    chosen: PyTree
    """s_k̄"""
    last: PyTree
    """s_K"""
    k_bar: Any
    """k̄; a Python int where it is K always"""
    taken: Any
    """how many steps were taken"""
    kept: PyTree
    """s_0, s_m, s_2m, … with m the first of the spacings, stacked; None where nothing was kept"""
    spacings: tuple[int, ...]
    """of the states that are kept here, and of those that are kept on the way back between two of these, and so on"""


def begin(dynamics: Dynamics, y: PyTree, follower: Follower) -> PyTree:
    """The state that starts at y, or at the point of Y nearest to it.

    A start may come from another leader's Y, and outside of this one's f can be lower than anywhere inside.
    """
    if hasattr(dynamics, "within"):
        dynamics = dynamics.within(follower)  # pyright: ignore[reportAttributeAccessIssue]
    return dynamics.init(brought_inside(follower.y_set, y))


Keep = int | None | Callable[[PyTree], tuple[int, ...]]
"""Which states are kept: every m-th, none, or a function of the first one that gives `Trajectory.spacings`."""


class Checkpoints(NamedTuple):
    """Which of K states are kept for the way back, the others being computed anew: in r levels about r K^(1/r) at once.

    Between two states that are kept, c^(r-1) steps apart, c more are kept on the way back, c^(r-2) steps apart, and so
    on down to every one (Griewank and Walther, Evaluating Derivatives, 2008, chapter 12).
    """

    steps: int
    """K"""
    state_bytes: int
    levels: int

    @property
    def spacings(self) -> tuple[int, ...]:
        """How many steps lie between two states that are kept, level by level; the last is 1."""
        each = next(c for c in range(1, self.steps + 1) if c**self.levels >= self.steps)
        return tuple(each**power for power in reversed(range(self.levels)))

    @property
    def states(self) -> int:
        """How many are kept at once."""
        between = (above // below for above, below in itertools.pairwise(self.spacings))
        return -(-self.steps // self.spacings[0]) + sum(between)

    @property
    def bytes(self) -> int:
        """That all of them take."""
        return self.states * self.state_bytes

    def __str__(self) -> str:
        again = {0: "no step", 1: "each step once"}.get(self.levels - 1, f"each step up to {self.levels - 1} times")
        return (
            f"{self.steps:,} steps, {self.states:,} states of {_amount(self.state_bytes)} kept at once "
            f"({_amount(self.bytes)}), {again} computed again"
        )


def _amount(size: int) -> str:
    unit = next(i for i in range(5) if size < 1024 ** (i + 1) or i == 4)
    return f"{size / 1024**unit:.3g} {('bytes', 'KB', 'MB', 'GB', 'TB')[unit]}"


def checkpoints_within(steps: int, state: PyTree, room: int) -> Checkpoints:
    """The fewest levels whose states take no more than `room` bytes."""
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(lambda: state)))
    plans = [Checkpoints(steps, size, levels) for levels in range(1, max(2, (steps - 1).bit_length() + 1))]
    fitting = next((plan for plan in plans if plan.bytes <= room), None)
    if fitting is None:
        least = min(plans, key=lambda plan: plan.bytes)
        raise ValueError(
            f"Reverse(checkpoint={room}): so many bytes are too few for a follower of {_amount(size)} and {steps} "
            f"steps; at least {least.bytes} are needed."
        )
    return fitting


def unroll(run: Unrolling, params: PyTree, z: PyTree, keep: Keep = None) -> Trajectory:
    """Runs K steps from z, keeping some states on the way (none by default)."""
    state = run.begin(params, z)
    spacings = keep(state) if callable(keep) else {None: (), 1: (1,)}.get(keep, (keep, 1))
    count, every = run.length, spacings[0] if spacings else None
    if run.solved is not None:
        return _unroll_until_solved(run, run.solved, params, state, every)._replace(spacings=spacings)
    if every == 1:
        return _unroll_all(run, params, state)

    def body(k, carry):
        return _step_and_choose(run, params, k, *carry)

    carry, kept = (state, _none_chosen(run, params, state)), None
    if every is None:
        carry = jax.lax.fori_loop(0, count, body, carry)
    else:

        def segment(carry, start):
            end = jnp.minimum(start + every, count)
            return jax.lax.fori_loop(start, end, body, carry), carry[0]

        carry, kept = jax.lax.scan(segment, carry, jnp.arange(0, count, every))
    last, best = carry
    chosen, k_bar = (last, count) if best is None else (best[0], best[2])
    return Trajectory(chosen, last, k_bar, count, kept, spacings)


def _none_chosen(run: Unrolling, params: PyTree, state: PyTree) -> PyTree:
    if run.score is None:
        return None
    return state, jnp.zeros_like(run.score(params, state)), jnp.zeros((), int)


def _step_and_choose(run: Unrolling, params: PyTree, k: Any, state: PyTree, best: PyTree) -> tuple[PyTree, PyTree]:
    """One step, and the best state so far with its score and index."""
    state = run.step(k, params, state)
    if run.score is None:
        return state, best
    chosen, top, k_bar = best
    score = run.score(params, state)
    # A NaN must win, as it does in argmax, so that it is seen and not skipped.
    better = ~(score <= top) & ~jnp.isnan(top) | (k == 0)
    chosen = jax.tree.map(lambda new, old: jnp.where(better, new, old), state, chosen)
    return state, (chosen, jnp.where(better, score, top), jnp.where(better, k + 1, k_bar))


def _unroll_until_solved(
    run: Unrolling, solved: Solved, params: PyTree, state: PyTree, every: int | None
) -> Trajectory:
    """As `unroll`, but no further than to where the follower is solved."""
    reference = solved.reference(params, state)
    rows = 0 if every is None else -(-run.length // every)
    kept = None if every is None else jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape), leaf.dtype), state)

    def body(carry):
        k, state, best, kept, _ = carry
        if every is not None:
            row, first = k // every, k % every == 0
            kept = jax.tree.map(lambda room, leaf: room.at[row].set(jnp.where(first, leaf, room[row])), kept, state)
        state, best = _step_and_choose(run, params, k, state, best)
        return k + 1, state, best, kept, _is_solved(solved, k + 1, params, state, reference)

    carry = jnp.zeros((), int), state, _none_chosen(run, params, state), kept, jnp.asarray(False)
    taken, last, best, kept, _ = jax.lax.while_loop(lambda carry: ~carry[-1] & (carry[0] < run.length), body, carry)
    chosen, k_bar = (last, taken) if best is None else (best[0], best[2])
    return Trajectory(chosen, last, k_bar, taken, kept, ())


def _is_solved(solved: Solved, k: Any, params: PyTree, state: PyTree, reference: PyTree) -> Any:
    """The test, at the steps where there is one."""
    if solved.every == 1:
        return solved.test(params, state, reference)
    test = k % solved.every == 0
    return jax.lax.cond(test, lambda: solved.test(params, state, reference), lambda: jnp.asarray(False))


def _unroll_all(run: Unrolling, params: PyTree, state: PyTree) -> Trajectory:
    def body(state, k):
        after = run.step(k, params, state)
        return after, (state, None if run.score is None else run.score(params, after))

    last, (kept, scores) = jax.lax.scan(body, state, jnp.arange(run.length))
    if scores is None:
        return Trajectory(last, last, run.length, run.length, kept, (1,))
    k_bar = jnp.argmax(scores) + 1
    chosen = jax.tree.map(
        lambda kept, end: jnp.where(k_bar == run.length, end, kept[jnp.minimum(k_bar, run.length - 1)]), kept, last
    )
    return Trajectory(chosen, last, k_bar, run.length, kept, (1,))


def replay(run: Unrolling, params: PyTree, z: PyTree, k_bar: Any) -> PyTree:
    """s_k̄ from z for a given k̄, keeping nothing."""
    return jax.lax.fori_loop(0, k_bar, lambda k, s: run.step(k, params, s), run.begin(params, z))


def sweep(
    run: Unrolling, params: PyTree, trajectory: Trajectory, state_bar: PyTree, stop: Any
) -> tuple[PyTree, PyTree]:
    """Pulls a cotangent of s_k̄ back to step `stop`: returns those of `params` and of s_stop.

    The loop's trip count is k̄ − stop, known only when it runs, so truncation saves real time. `params` is
    the differentiated part of the parameters; `run.step` holds the rest.
    """
    end = trajectory.k_bar

    def step_back(k, state, bars):
        params_bar, state_bar = bars
        moving, rest = eqx.partition(state, eqx.is_inexact_array)

        def step(params, moving):
            return eqx.filter(run.step(k, params, eqx.combine(moving, rest)), eqx.is_inexact_array)

        params_add, state_bar = jax.vjp(step, params, moving)[1](state_bar)
        return jax.tree.map(jnp.add, params_bar, params_add), state_bar

    def back(start, high, kept, spacings, bars):
        """From step `high` to `start`, or to `stop`; `kept` has the states from `start` on, spacings[0] apart."""
        every, *below = spacings
        first, last = jnp.maximum(stop - start, 0) // every, (high - 1 - start) // every

        def segment(i, bars):
            j = first + last - i
            begin, state = start + j * every, _index(kept, j)
            if not below:
                return step_back(begin, state, bars)
            until = jnp.minimum(begin + every, high)
            between = _keep(run, params, state, begin, until, every // below[0], below[0])
            return back(begin, until, between, below, bars)

        return jax.lax.fori_loop(first, last + 1, segment, bars)

    bars = jax.tree.map(jnp.zeros_like, params), state_bar
    return back(0, end, trajectory.kept, trajectory.spacings, bars)


def _keep(run: Unrolling, params: PyTree, state: PyTree, begin: Any, until: Any, count: int, every: int) -> PyTree:
    """`count` states from step `begin` on, `every` steps apart; those past `until` are not computed."""

    def move(state, i):
        start = jnp.minimum(begin + i * every, until)
        end = jnp.minimum(start + every, until)
        return jax.lax.fori_loop(start, end, lambda k, state: run.step(k, params, state), state), state

    return jax.lax.scan(move, state, jnp.arange(count))[1]


def _index(tree: PyTree, k: Any) -> PyTree:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, k, keepdims=False), tree)
