"""The outer loop: steps of any algorithm, their health, the last good point and the history. All of it is traced."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from bilax.methods.algorithm import Algorithm, Evaluation, unsettled
from bilax.problem.compiled import compiled
from bilax.problem.minibatches import Draws
from bilax.problem.problem import Problem
from bilax.problem.trees import all_finite, choose
from bilax.run.solution import History, Status

Record = Callable[[PyTree, PyTree, Any], PyTree]
"""(x, z, info) -> a tree of small arrays, taken at each outer step"""


class Loop(NamedTuple):
    """What stays the same from one outer step to the next."""

    problem: Problem
    algorithm: Algorithm
    data: Any
    """a tuple, `Minibatches`, or a traced function (step, key) -> tuple; not used where batches are handed in"""
    tolerance: float | None
    record: Record
    many: bool = False
    """whether every leaf of the state has a leading axis, one entry per start"""
    data_axes: Any = None
    """which leaves of the data have that axis too, as `in_axes` of jax.vmap"""
    every: int = 1
    """outer steps for one entry of the history, one evaluation and one look at the health"""
    divided: bool = False
    """whether the starts are divided among several devices"""


class Point(NamedTuple):
    """A point that was evaluated and found finite."""

    x: PyTree
    z: PyTree
    y: PyTree
    """`()` where it is z, so that a large follower is kept once"""
    upper: Any
    lower: Any
    residual: Any
    k_bar: Any

    def whole(self) -> "Point":
        """The same with y as it is."""
        return self if jax.tree.leaves(self.y) else self._replace(y=self.z)


class State(NamedTuple):
    """All that the next outer step needs."""

    carry: PyTree
    """the algorithm's"""
    key: Array
    step: Array
    status: Array
    good: Point
    """the best solved point: the lowest F among those whose follower is about as near to stationary as any was"""
    scale: Any
    """how large F with f, and y, were where the run began"""


def begin(loop: Loop, x0: PyTree, y0: PyTree, key: Array, batch: Any = None) -> State:
    """The state before the first outer step; `batch` is an example of data that come from outside."""

    def one(draws, x0, y0):
        carry = loop.algorithm.init(loop.problem, x0, y0, _data(loop, draws))
        state = State(carry, key, jnp.zeros((), int), jnp.asarray(Status.running), None, None)  # pyright: ignore
        found = jax.eval_shape(lambda: _evaluated(loop, state, draws)[1])
        scale = nothing((2,), found.upper.dtype)
        unknown = jax.tree.map(lambda leaf: nothing(leaf.shape, leaf.dtype), found)
        if jax.tree.leaves(unknown.y):
            y = jax.tree.map(lambda leaf, like: jnp.broadcast_to(leaf, like.shape).astype(like.dtype), y0, unknown.y)
            unknown = unknown._replace(y=y)
        return state._replace(good=unknown._replace(x=x0, z=y0), scale=scale)

    return _for_each_start(loop, one, _draws(loop, jnp.zeros((), int), key, batch), x0, y0)


def advance(
    loop: Loop, state: State, count: Any, capacity: int, batches: PyTree = None, end: Any = False
) -> tuple[State, History]:
    """Takes up to `count` ≤ `capacity` outer steps; a state whose status is not running stays as it is.

    `batches` holds one batch per step along a leading axis, for data that come from outside. An algorithm that
    `prepares` has a turn before the first step, of which nothing is recorded. With `end` a turn more evaluates where
    the steps led, for `finish`: by the program that the steps are made of, which is large and so is compiled once.
    """
    prepares = getattr(loop.algorithm, "prepares", False)

    def outer_step(i, state):
        batch = None if batches is None else jax.tree.map(lambda leaf: leaf[i], batches)
        turn = _Turn(jnp.asarray(i >= 0), jnp.asarray(i == count))
        step = functools.partial(_outer_step_if_running if loop.many else _outer_step, loop, turn)
        return _for_each_start(loop, step, _draws_of(loop, state, batch), state)

    starts = 1 if loop.many else 0
    entry = jax.eval_shape(lambda: outer_step(0, state)[1])
    columns = _Columns.of(entry, starts)
    empty = jax.eval_shape(columns.joined, entry)

    def room(leaf):
        return nothing((*leaf.shape[:starts], capacity, *leaf.shape[starts:]), leaf.dtype)

    def take(i, state):
        state, entry = outer_step(i, state)
        return state, columns.joined(entry)

    def skip(i, state):
        return state, jax.tree.map(_nothing_like, empty)

    def body(i, carry):
        state, history = carry
        running = state.status == Status.running
        due = (jnp.any(running) if loop.many else running) | (i == count)
        state, entry = jax.lax.cond(due, take, skip, i, state)
        place = (slice(None),) * starts + (jnp.where(i < 0, capacity, i) if prepares else i,)
        mode = "drop" if prepares else None
        return state, jax.tree.map(lambda leaf, value: leaf.at[place].set(value, mode=mode), history, entry)

    first = -jnp.asarray(jnp.all(state.step == 0), int) if prepares else 0
    last = count + jnp.asarray(end & (not prepares), int)
    state, history = jax.lax.fori_loop(first, last, body, (state, jax.tree.map(room, empty)))
    return state, columns.apart(history)


class _Turn(NamedTuple):
    """What a turn of the loop is for."""

    recorded: Array
    """whether it is a step, and not what an algorithm prepares"""
    last: Array
    """whether it only evaluates where the steps led"""


class _Columns(NamedTuple):
    """Numbers of one dtype side by side in one array: a step that takes microseconds writes one row, not seven."""

    structure: Any
    kinds: tuple[str | None, ...]
    """the dtypes of the numbers; None in the places of larger leaves, which stay as they are"""

    @classmethod
    def of(cls, entry: History, starts: int) -> "_Columns":
        leaves, structure = jax.tree.flatten(entry)
        return cls(structure, tuple(str(leaf.dtype) if leaf.ndim == starts else None for leaf in leaves))

    def joined(self, entry: History) -> tuple[dict[str, Array], list[Array]]:
        leaves = list(zip(self.kinds, jax.tree.leaves(entry), strict=True))
        rows = {kind: jnp.stack([leaf for of, leaf in leaves if of == kind], -1) for kind in self.kinds if kind}
        return rows, [leaf for kind, leaf in leaves if kind is None]

    def apart(self, joined: tuple[dict[str, Array], list[Array]]) -> History:
        rows, larger = joined
        columns = {kind: iter(jnp.moveaxis(one, -1, 0)) for kind, one in rows.items()} | {None: iter(larger)}
        return jax.tree.unflatten(self.structure, [next(columns[kind]) for kind in self.kinds])


def finish(loop: Loop, state: State, ended: Any, y0: PyTree, batch: Any = None) -> tuple[Point, Array]:
    """The point where the run ended and its status, of a state that `advance` left at its `end`.

    `ended` is the status of a run that was stopped while still running. One that has converged though its follower is
    far from solved, for a follower that began at y0, is doubtful.
    """

    def one(draws, state, y0):
        found = eqx.filter_eval_shape(lambda: _evaluated(loop, state, draws)[2])
        if getattr(loop.algorithm, "prepares", False):
            # It knows where it is: the compiler drops all of this step but what is read off its carry.
            point, evaluated = _evaluated(loop, state, draws)[1:]
            status, keep = _at_end(state, point, evaluated)
            state = state._replace(status=status, good=choose(keep, point, state.good))
        point, status = state.good.whole(), jnp.where(state.status == Status.running, ended, state.status)
        # Batches of their own for each step tell nothing of the follower that all of them together have.
        may_converge = loop.tolerance is not None or found.converged is not False
        if may_converge and not hasattr(loop.algorithm, "draws"):
            doubtful = jax.lax.cond(
                status == Status.converged, lambda: _unsettled(loop, point, y0, draws), lambda: jnp.asarray(False)
            )
            status = jnp.where(doubtful, Status.doubtful, status)
        return point, status

    return _for_each_start(loop, one, _draws_of(loop, state, batch), state, y0)


def _at_end(state: State, point: Point, found: Evaluation) -> tuple[Array, Array]:
    """The status of a run that ended at this point, and whether the point is its result: finite, and no failure."""
    health = _health(found._replace(solved=True, y=point.whole().y), ())
    failed = functools.reduce(jnp.logical_or, [state.status == each for each in Status if each.failed])
    keep = (health == Status.running) & ~failed
    return jnp.where(keep | failed, state.status, health), keep


def _unsettled(loop: Loop, point: Point, y0: PyTree, draws: Draws) -> Array:
    data = _data(loop, draws)
    if not getattr(loop.algorithm, "tasks", False):
        return unsettled(loop.problem, point.x, point.y, y0, data)
    # Tasks with a follower each, which may all begin at the same y0.
    y0 = jax.tree.map(lambda one, like: jnp.broadcast_to(one, like.shape), y0, point.y)
    return jnp.any(jax.vmap(lambda y, y0, *task: unsettled(loop.problem, point.x, y, y0, task))(point.y, y0, *data))


def _outer_step_if_running(loop: Loop, turn: _Turn, draws: Draws, state: State) -> tuple[State, History]:
    """One of many starts: those that have ended stay as they are."""
    running = state.status == Status.running
    after, entry = _outer_step(loop, turn, draws, state)
    return choose(running | turn.last, after, state), choose(running, entry, jax.tree.map(_nothing_like, entry))


def _outer_step(loop: Loop, turn: _Turn, draws: Draws, state: State) -> tuple[State, History]:
    after, point, found = _evaluated(loop, state, draws)
    if loop.every > 1:
        after = _further(loop, state, after, draws, jnp.where(turn.last, 1, loop.every))
    x, z = loop.algorithm.point(state.carry)
    x_next, z_next = loop.algorithm.point(after)
    # Norms tell whether gradients are finite: fewer operations, where there are many leaves.
    norms = optax.tree.norm(found.grad_x), optax.tree.norm(found.grad_z)
    status = _health(found._replace(y=point.whole().y), (norms, x_next, z_next))
    scale = choose(state.step == 0, _sizes(point), state.scale)
    status = jnp.where((status == Status.running) & _astray(point, scale), Status.diverged, status)
    ok = status == Status.running
    if loop.tolerance is not None:
        moved = optax.tree.norm(jax.tree.map(jnp.subtract, (x_next, z_next), (x, z)))
        still = (moved <= loop.tolerance * (1 + optax.tree.norm((x, z)))) & (found.residual <= loop.tolerance)
        status = jnp.where(ok & still, Status.converged, status)
    arrived = jnp.where(jnp.asarray(found.doubtful), Status.doubtful, Status.converged)
    status = jnp.where(ok & jnp.asarray(found.converged), arrived, status)
    numbers = point.upper, point.lower, point.residual, point.k_bar
    entry = History(*numbers, *norms, found.follower_steps, loop.record(x, z, found.info))
    entry = jax.tree.map(jnp.asarray, entry)
    # A point may be good where it is finite, even if its gradient is not: x and z are, or the run had ended.
    keep = all_finite(point._replace(x=(), z=())) & (status != Status.diverged) & _better(point, state.good)
    prepares = getattr(loop.algorithm, "prepares", False)
    if not prepares:
        at_end = _at_end(state, point, found)
        status, keep = choose(turn.last, at_end, (status, keep))
        ok = ok & ~turn.last
    stay = state._replace(status=status, good=choose(keep, point, state.good), scale=scale)
    on = stay._replace(carry=after, step=state.step + loop.every)
    # A step that was not taken leaves no entry.
    state_after = choose(ok, on, stay)
    if prepares:
        state_after = choose(turn.recorded, state_after, state._replace(carry=after))
    return state_after, choose(ok, entry, jax.tree.map(_nothing_like, entry))


def _evaluated(loop: Loop, state: State, draws: Draws) -> tuple[PyTree, Point, Evaluation]:
    def step(state, draws):
        return _stepped(loop, state, state.carry, draws, 0)

    after, found = (_one_start_at_a_time(loop, step) if loop.every > 1 else step)(state._replace(good=None), draws)
    numbers = (jnp.asarray(v) for v in (found.upper, found.lower, found.residual, found.k_bar))
    return after, Point(*loop.algorithm.point(state.carry), found.y, *numbers), found


def _further(loop: Loop, state: State, carry: PyTree, draws: Draws, count: Array) -> PyTree:
    """The steps up to the next look, of `count` in all."""

    def steps(state, carry, draws, count):
        draws = draws.ahead(loop.every)
        return jax.lax.fori_loop(1, count, lambda i, carry: _stepped(loop, state, carry, draws, i)[0], carry)

    return _one_start_at_a_time(loop, steps)(state._replace(good=None), carry, draws, count)  # pyright: ignore


def _one_start_at_a_time(loop: Loop, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of many starts on a CPU computed for one after the other.

    There a step of ten starts side by side takes half as long again as ten steps do: XLA computes batches of small
    products one by one anyway, and what a start works on stays in the cache.
    """
    # Divided among devices, each would have to go through all starts.
    if not loop.many or loop.divided or jax.default_backend() != "cpu":
        return function

    def in_turn(*trees):
        arrays, rest = eqx.partition(trees, eqx.is_array)
        others = []

        def of_arrays(arrays):
            found, other = eqx.partition(function(*eqx.combine(arrays, rest)), eqx.is_array)
            others.append(other)
            return found

        found = jax.custom_batching.sequential_vmap(of_arrays)(arrays)
        return eqx.combine(found, others[-1])

    return in_turn


def _stepped(loop: Loop, state: State, carry: PyTree, draws: Draws, i: Any) -> tuple[PyTree, Evaluation]:
    """The step that comes i steps after the state."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(state.key, state.step + i), 1), draws.start)
    return _traced_once(loop.algorithm, loop.problem, carry, _data(loop, draws.later(i)), key)


@compiled
def _traced_once(algorithm: Algorithm, problem: Problem, carry: PyTree, data: Any, key: Array) -> Any:
    """The algorithm's step; the loop meets it four times, and JAX remembers what it traced."""
    return algorithm.step(problem, carry, data, key)


def _draws_of(loop: Loop, state: State, batch: Any) -> Draws:
    """The data of the next step; its number is that of the starts that still run, where there are many."""
    return _draws(loop, jnp.max(state.step), state.key[0] if loop.many else state.key, batch)


def _draws(loop: Loop, step: Array, key: Array, batch: Any) -> Draws:
    counts = getattr(loop.algorithm, "draws", (1, 1))
    return Draws(
        loop.data if batch is None else batch, step, key, counts, axes=loop.data_axes, streamed=batch is not None
    )


def _data(loop: Loop, draws: Draws) -> Any:
    """What the algorithm gets: all draws if it asks for them, else one batch."""
    return draws if hasattr(loop.algorithm, "draws") else draws.upper()


def _for_each_start(loop: Loop, function: Callable[..., Any], draws: Draws, *trees: PyTree) -> Any:
    """function(draws, *trees); where there are many starts for each, with its part of a tuple of data."""
    if not loop.many:
        return function(draws, *trees)
    starts = jnp.arange(jax.tree.leaves(trees)[0].shape[0])
    if not isinstance(draws.source, tuple):
        return jax.vmap(lambda start, *trees: function(draws.of(start, draws.source), *trees))(starts, *trees)
    each = jax.vmap(
        lambda start, data, *trees: function(draws.of(start, data), *trees), (0, loop.data_axes, *(0,) * len(trees))
    )
    return each(starts, draws.source, *trees)


def _health(found: Evaluation, others: Any) -> Array:
    rest_ok = all_finite((found.upper, found.lower, found.residual, others))
    status = jnp.where(rest_ok, Status.running, Status.non_finite)
    status = jnp.where(jnp.all(jnp.asarray(found.solved)), status, Status.linear_solve_failed)
    return jnp.where(all_finite((found.y, found.y_last)), status, Status.diverged)


GROWTH = 1e6
"""by how much F may rise above where it began, and y grow, before a run counts as astray"""


def _sizes(point: Point) -> Float[Array, "2"]:
    """How large F (with f) and y are; at least 1, so that a start at zero does not count as small."""
    value, size = jnp.abs(point.upper) + jnp.abs(point.lower), optax.tree.norm(point.whole().y)
    return jnp.maximum(jnp.stack([value, size.astype(value.dtype)]), 1)


def _astray(point: Point, scale: Float[Array, "2"]) -> Array:
    return (point.upper > GROWTH * scale[0]) | (optax.tree.norm(point.whole().y) > GROWTH * scale[1])


def _better(new: Point, old: Point) -> Array:
    """A follower ten times nearer to stationary beats any F; else the lower F does, unless ten times farther."""
    nearer = 10 * new.residual < old.residual
    as_near = new.residual <= 10 * old.residual
    return ~jnp.isfinite(old.upper) | nearer | as_near & (new.upper <= old.upper)


def _nothing_like(leaf: Array | jax.ShapeDtypeStruct) -> Array:
    return nothing(leaf.shape, leaf.dtype)


def nothing(shape: tuple[int, ...], dtype: Any) -> Array:
    """What stands where there is no value: NaN, or 0 for whole numbers."""
    return jnp.full(shape, np.nan if jnp.issubdtype(dtype, jnp.floating) else 0, dtype)
