"""The follower's trajectory: unroll it, choose an iterate, sweep back along it.

States are s_0, …, s_K and iterates y_k = point(s_k). The chosen index k̄ runs from 1 to K, or to the step at which the
follower is solved, where a tolerance is given.
"""

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
    """s_0, s_m, s_2m, … with m = `every`, stacked; None where nothing was kept"""
    every: int | None


def begin(dynamics: Dynamics, y: PyTree, follower: Follower) -> PyTree:
    """The state that starts at y, or at the point of Y nearest to it.

    A start may come from another leader's Y, and outside of this one's f can be lower than anywhere inside.
    """
    if hasattr(dynamics, "within"):
        dynamics = dynamics.within(follower)  # pyright: ignore[reportAttributeAccessIssue]
    return dynamics.init(brought_inside(follower.y_set, y))


def unroll(run: Unrolling, params: PyTree, z: PyTree, every: int | None = None) -> Trajectory:
    """Runs K steps from z, keeping every `every`-th state (none by default)."""
    count, state = run.length, run.begin(params, z)
    if run.solved is not None:
        return _unroll_until_solved(run, run.solved, params, state, every)
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
    return Trajectory(chosen, last, k_bar, count, kept, every)


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
        test = (k + 1) % solved.every == 0
        done = jax.lax.cond(test, lambda: solved.test(params, state, reference), lambda: jnp.asarray(False))
        return k + 1, state, best, kept, done

    carry = jnp.zeros((), int), state, _none_chosen(run, params, state), kept, jnp.asarray(False)
    taken, last, best, kept, _ = jax.lax.while_loop(lambda carry: ~carry[-1] & (carry[0] < run.length), body, carry)
    chosen, k_bar = (last, taken) if best is None else (best[0], best[2])
    return Trajectory(chosen, last, k_bar, taken, kept, every)


def _unroll_all(run: Unrolling, params: PyTree, state: PyTree) -> Trajectory:
    def body(state, k):
        after = run.step(k, params, state)
        return after, (state, None if run.score is None else run.score(params, after))

    last, (kept, scores) = jax.lax.scan(body, state, jnp.arange(run.length))
    if scores is None:
        return Trajectory(last, last, run.length, run.length, kept, 1)
    k_bar = jnp.argmax(scores) + 1
    chosen = jax.tree.map(
        lambda kept, end: jnp.where(k_bar == run.length, end, kept[jnp.minimum(k_bar, run.length - 1)]), kept, last
    )
    return Trajectory(chosen, last, k_bar, run.length, kept, 1)


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
    params_bar = jax.tree.map(jnp.zeros_like, params)

    def sweep_between(low, high, state_at, bars):
        def body(i, bars):
            params_bar, state_bar = bars
            k = high - 1 - (i - low)
            moving, rest = eqx.partition(state_at(k), eqx.is_inexact_array)

            def step(params, moving):
                return eqx.filter(run.step(k, params, eqx.combine(moving, rest)), eqx.is_inexact_array)

            params_add, state_bar = jax.vjp(step, params, moving)[1](state_bar)
            return jax.tree.map(jnp.add, params_bar, params_add), state_bar

        return jax.lax.fori_loop(low, high, body, bars)

    every, kept = trajectory.every, trajectory.kept
    assert every is not None
    if every == 1:
        return sweep_between(stop, trajectory.k_bar, lambda k: _index(kept, k), (params_bar, state_bar))

    def segment(i, bars):
        j = first + last - i
        start = j * every

        def keep(state, k):
            # Steps past k̄ are computed for a fixed shape and never read.
            return run.step(k, params, state), state

        _, states = jax.lax.scan(keep, _index(kept, j), start + jnp.arange(every))
        low, high = jnp.maximum(start, stop), jnp.minimum(start + every, trajectory.k_bar)
        return sweep_between(low, high, lambda k: _index(states, k - start), bars)

    first, last = stop // every, (trajectory.k_bar - 1) // every
    return jax.lax.fori_loop(first, last + 1, segment, (params_bar, state_bar))


def segment_length(count: int) -> int:
    """√K, the spacing of checkpoints that keeps about 2√K states alive at once."""
    return max(1, math.isqrt(count - 1) + 1)


def _index(tree: PyTree, k: Any) -> PyTree:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, k, keepdims=False), tree)
