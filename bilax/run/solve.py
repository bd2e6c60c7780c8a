"""The outer loop: optax on (x, z), compiled whole."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from bilax.gradient.phi import Info, Phi, Tasks, approximate
from bilax.methods.recipes import Method
from bilax.problem.checks import check_inside, check_point
from bilax.problem.problem import Problem
from bilax.run.checkpoint import Saving
from bilax.run.solution import BilevelError, History, Solution, Status

Data = tuple[Any, ...] | Callable[[Any, Any], tuple[Any, ...]] | Iterable[tuple[Any, ...]]
"""What both objectives get after (x, y): a tuple; a function (step, key) -> tuple, which is traced; or an
iterable of tuples, one for each outer step, which is read ahead while the device computes."""

Record = Callable[[PyTree, PyTree, Info], PyTree]
"""(x, z, info) -> a tree of small arrays, taken at each outer step"""

_SGD = optax.sgd(0.1)


def _record_nothing(x: PyTree, z: PyTree, info: Info) -> PyTree:
    return ()


class Batches(NamedTuple):
    """An iterable of batches, its first one taken out to know the shapes."""

    first: tuple[Any, ...]
    source: Iterable[tuple[Any, ...]]


class Loop(NamedTuple):
    """What stays the same from one outer step to the next."""

    phi: Phi | Tasks
    optimizer: optax.GradientTransformation
    z_optimizer: optax.GradientTransformation
    data: Data
    tolerance: float | None
    record: Record


class Point(NamedTuple):
    """A point that was evaluated and found finite."""

    x: PyTree
    z: PyTree
    y: PyTree
    upper: Any
    lower: Any
    residual: Any
    k_bar: Any


class State(NamedTuple):
    """All that the next outer step needs."""

    x: PyTree
    z: PyTree
    memory: PyTree
    """both optimisers' states"""
    key: Array
    step: Array
    status: Array
    good: Point


def solve(
    problem: Problem,
    method: Method,
    x0: PyTree,
    y0: PyTree,
    *,
    steps: int = 500,
    optimizer: optax.GradientTransformation = _SGD,
    z_optimizer: optax.GradientTransformation | None = None,
    data: Data = (),
    tasks: bool = False,
    key: Array | None = None,
    tolerance: float | None = None,
    record: Record = _record_nothing,
    throw: bool = False,
    progress: bool = False,
    callbacks: Sequence[Callable[[Any, History], Any]] = (),
    strict_callbacks: bool = False,
    saving: Saving | None = None,
    resume: bool = False,
    time_limit: float | None = None,
) -> Solution:
    """Minimises φ(x, z) over x in X and, for auxiliary starts, z in Y, from (x0, y0): Algorithm 1.

    - `optimizer`, `z_optimizer`: any optax transformation for x and for z (the same one if not given);
      x is projected onto X and z onto Y after each update.
    - `data`: a tuple that the objectives get after (x, y); a traced function (step, key) -> such a tuple; or an
      iterable of such tuples, one per outer step.
    - `tasks`: the leaves of the data have a leading axis, one entry per task; φ is the mean over tasks, each with a
      follower of its own that starts from the shared z (`bilax.Tasks`).
    - `key`: makes a run with random data repeatable.
    - `tolerance`: end as converged once the residual and the relative outer step are below it.
    - `record`: a function (x, z, info) of each outer step whose values come back in `history.record`.
    - `throw`: raise `BilevelError` where a run breaks off; otherwise look at `solution.status`.
    - `progress`: show steps, rate, time left and the latest values.
    - `callbacks`: functions (state, history) called about twice a second; one that returns True ends the run,
      one that fails gives a warning (or, with `strict_callbacks`, ends the run with its exception).
    - `saving`, `resume`: where and how often to save; go on from the newest whole checkpoint there. A resumed run
      equals an uninterrupted one bit for bit. An iterable of data is skipped forward to where the run was, by
      its method `starting_at(step)` if it has one.
    - `time_limit`: end after so many seconds.

    Without progress, callbacks, saving, an iterable and a time limit the whole run is one compiled call; with
    them it is a few, each about half a second long. Whatever happens, the solution is the last point at which φ
    was finite. A second call with the same problem, method and optimiser objects and the same
    shapes compiles nothing.
    """
    loop, x0, y0 = _prepare(problem, method, x0, y0, steps, optimizer, z_optimizer, data, tolerance, record, tasks)
    if saving is not None and not isinstance(saving, Saving):
        raise TypeError(f"saving must be bilax.Saving(folder), got {saving!r}.")
    if not isinstance(callbacks, Sequence) or not all(callable(callback) for callback in callbacks):
        raise TypeError(f"callbacks must be a list of functions (state, history), got {callbacks!r}.")
    if resume and saving is None:
        raise ValueError("resume=True needs saving=bilax.Saving(folder), where the run was saved.")
    if progress or callbacks or saving or time_limit is not None or isinstance(loop.data, Batches):
        from bilax.run.chunks import Watch, drive

        watch = Watch(progress, callbacks, strict_callbacks, saving, resume, time_limit)
        solution = drive(loop, x0, y0, _key(key), steps, watch)
    else:
        solution = jax.device_get(_run(loop, x0, y0, _key(key), steps)).trimmed()
    if throw and solution.status.failed:
        raise BilevelError(solution)
    return solution


def multistart(
    problem: Problem,
    method: Method,
    x0s: PyTree,
    y0s: PyTree,
    *,
    steps: int = 500,
    optimizer: optax.GradientTransformation = _SGD,
    z_optimizer: optax.GradientTransformation | None = None,
    data: Data = (),
    key: Array | None = None,
    tolerance: float | None = None,
    record: Record = _record_nothing,
) -> Solution:
    """`solve` from many starts at once: every leaf of x0s and y0s has a leading axis, one entry per start.

    The fields of the result have that axis too; `result.best` and `result[i]` are single solutions. Entries
    of the history past a run's own end are NaN (0 for k_bar).
    """
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves((x0s, y0s))}
    if len(counts) != 1 or () in counts or (0,) in counts:
        raise ValueError(
            f"x0s and y0s need one common leading axis, the starts; the first axes are {sorted(counts)}. "
            "For a single start use bilax.solve."
        )
    x0s, y0s = check_point("x0s", x0s, may_be_empty=True), check_point("y0s", y0s)
    x0s, y0s = check_inside("x0s", x0s, _Each(problem.x_set)), check_inside("y0s", y0s, _Each(problem.y_set))
    x0, y0 = jax.tree.map(lambda leaf: leaf[0], (x0s, y0s))
    loop, _, _ = _prepare(problem, method, x0, y0, steps, optimizer, z_optimizer, data, tolerance, record)
    if isinstance(loop.data, Batches):
        raise TypeError("multistart takes data as a tuple or as a function (step, key) -> tuple, not as an iterable.")
    return jax.device_get(_run_many(loop, x0s, y0s, _key(key), steps))


class _Each(NamedTuple):
    """A set for each entry of a leading axis."""

    each: Any

    def project(self, v: PyTree) -> PyTree:
        return jax.vmap(self.each.project)(v) if jax.tree.leaves(v) else v

    def __repr__(self) -> str:
        return repr(self.each)


def _prepare(
    problem: Problem,
    method: Method,
    x0: PyTree,
    y0: PyTree,
    steps: int,
    optimizer: optax.GradientTransformation,
    z_optimizer: optax.GradientTransformation | None,
    data: Data,
    tolerance: float | None,
    record: Record,
    tasks: bool = False,
) -> tuple[Loop, PyTree, PyTree]:
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a bilax.Problem, got {problem!r}.")
    if not isinstance(method, Method):
        raise TypeError(f"method must be a bilax.Method such as bilax.iaptt_gm(40, 5e-4), got {method!r}.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}.")
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"tolerance must be positive or None, got {tolerance}.")
    for name, one in (("optimizer", optimizer), ("z_optimizer", z_optimizer or optimizer)):
        if not hasattr(one, "init") or not hasattr(one, "update"):
            raise TypeError(f"{name} must be an optax transformation such as optax.adam(1e-3), got {one!r}.")
    x0, y0 = check_point("x0", x0, may_be_empty=True), check_point("y0", y0)
    x0, y0 = check_inside("x0", x0, problem.x_set), check_inside("y0", y0, problem.y_set)
    # φ itself checks the objectives, once for each shape, when it is traced.
    phi, data = approximate(problem, method), _check_data(data)
    if tasks and method.start == "warm":
        raise ValueError(
            'start="warm" goes on from the last y_K, but with tasks=True there is one for each task. Use "fixed", or '
            '"auxiliary" to learn a common start.'
        )
    phi = Tasks(phi) if tasks else phi
    return Loop(phi, optimizer, z_optimizer or optimizer, data, tolerance, record), x0, y0


def _check_data(data: Any) -> Any:
    """The data in the loop's form."""
    what = "data must be a tuple (write data=(batch,) for one value), a function (step, key) -> tuple or an iterable"
    if isinstance(data, tuple):
        return data
    if callable(data):
        example = jax.eval_shape(data, 0, jax.random.key(0))
        if not isinstance(example, tuple):
            raise TypeError(f"data(step, key) must return a tuple, got {type(example)}.")
        return data
    if isinstance(data, jax.Array | np.ndarray | dict | str) or not isinstance(data, Iterable):
        raise TypeError(f"{what} of tuples, got {type(data)}.")
    iterator = iter(data)
    try:
        first = next(iterator)
    except StopIteration:
        raise ValueError("data is an iterable without a single batch.") from None
    if not isinstance(first, tuple):
        raise TypeError(f"{what} of tuples; the first item is {type(first)}.")
    # An iterator can be read only once: hand back what was taken from it.
    source = itertools.chain([first], iterator) if iterator is data else data
    return Batches(first, source)


def _key(key: Array | None) -> Array:
    if key is None:
        return jax.random.key(0)
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.shape == (2,):
        return jax.random.wrap_key_data(key)  # as jax.random.PRNGKey makes them
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape:
        raise TypeError(f"key must be a random key such as jax.random.key(0), got {key!r}.")
    return key


@eqx.filter_jit
def _run(loop: Loop, x0: PyTree, y0: PyTree, key: Array, steps: int) -> Solution:
    state, history = advance(loop, begin(loop, x0, y0, key), jnp.asarray(steps), steps)
    point, status = finish(loop, state, Status.step_limit)
    return Solution(**point._asdict(), status=status, steps=state.step, history=history)


@eqx.filter_jit
def _run_many(loop: Loop, x0s: PyTree, y0s: PyTree, key: Array, steps: int) -> Solution:
    return jax.vmap(lambda x0, y0: _run(loop, x0, y0, key, steps))(x0s, y0s)


def begin(loop: Loop, x0: PyTree, y0: PyTree, key: Array, batch: Any = None) -> State:
    """The state before the first outer step; `batch` is an example of data that come from an iterable."""
    memory = loop.optimizer.init(x0), loop.z_optimizer.init(y0)
    data = _data(loop, jnp.zeros((), int), key) if batch is None else batch
    shape = jax.eval_shape(lambda: _evaluate(loop, x0, y0, data)[0])
    unknown = jax.tree.map(lambda leaf: _nothing(leaf.shape, leaf.dtype), shape)
    y = jax.tree.map(lambda leaf, like: jnp.broadcast_to(leaf, like.shape), y0, unknown.y)
    good = unknown._replace(x=x0, z=y0, y=y)
    return State(x0, y0, memory, key, jnp.zeros((), int), jnp.asarray(Status.running), good)


def advance(loop: Loop, state: State, count: Array, capacity: int, batches: PyTree = None) -> tuple[State, History]:
    """Takes up to `count` ≤ `capacity` outer steps; a state whose status is not running stays as it is.

    `batches` holds one batch per step along a leading axis, for data that come from an iterable.
    """

    def outer_step(i, state):
        data = _data(loop, state.step, state.key) if batches is None else jax.tree.map(lambda leaf: leaf[i], batches)
        return _outer_step(loop, state, data)

    entry = jax.eval_shape(lambda: outer_step(0, state)[1])
    history = jax.tree.map(lambda leaf: _nothing((capacity, *leaf.shape), leaf.dtype), entry)

    def skip(i, state):
        return state, jax.tree.map(lambda leaf: _nothing(leaf.shape, leaf.dtype), entry)

    def body(i, carry):
        state, history = carry
        state, entry = jax.lax.cond(state.status == Status.running, outer_step, skip, i, state)
        return state, jax.tree.map(lambda leaf, value: leaf.at[i].set(value), history, entry)

    return jax.lax.fori_loop(0, count, body, (state, history))


def finish(loop: Loop, state: State, ended: Any, batch: Any = None) -> tuple[Point, Array]:
    """The point where the run ended and its status; the last finite point if the end is not finite.

    `ended` is the status of a run that was stopped while still running.
    """
    point, info = _evaluate(loop, state.x, state.z, _data(loop, state.step, state.key) if batch is None else batch)
    health = _health(point, info, ())
    ended = jnp.where(state.status == Status.running, ended, state.status)
    failed = jnp.isin(ended, jnp.asarray([status for status in Status if status.failed]))
    keep = (health == Status.running) & ~failed
    status = jnp.where(keep | failed, ended, health)
    return choose(keep, point, state.good), status


def _outer_step(loop: Loop, state: State, data: tuple[Any, ...]) -> tuple[State, History]:
    problem, start = loop.phi.problem, loop.phi.method.start
    x, z = state.x, state.z

    def value(x, z):
        point, info = _evaluate(loop, x, z, data)
        return point.upper, (point, info)

    if start == "auxiliary":
        (_, (point, info)), (grad_x, grad_z) = jax.value_and_grad(value, (0, 1), has_aux=True)(x, z)
    else:
        (_, (point, info)), grad_x = jax.value_and_grad(value, has_aux=True)(x, z)
        grad_z = jax.tree.map(jnp.zeros_like, z)

    x_memory, z_memory = state.memory
    x_next, x_memory = _update(loop.optimizer, grad_x, x_memory, x, problem.x_set)
    z_next = z
    if start == "auxiliary":
        z_next, z_memory = _update(loop.z_optimizer, grad_z, z_memory, z, problem.y_set)
    elif start == "warm":
        z_next = info.y_last

    status = _health(point, info, (grad_x, grad_z, x_next, z_next))
    ok = status == Status.running
    if loop.tolerance is not None:
        moved = optax.tree.norm(jax.tree.map(jnp.subtract, (x_next, z_next), (x, z)))
        still = (moved <= loop.tolerance * (1 + optax.tree.norm((x, z)))) & (info.residual <= loop.tolerance)
        status = jnp.where(ok & still, Status.converged, status)

    norms = optax.tree.norm(grad_x), optax.tree.norm(grad_z)
    entry = History(point.upper, info.lower, info.residual, info.k_bar, *norms, loop.record(x, z, info))
    entry = jax.tree.map(jnp.asarray, entry)
    # A point counts as good where φ is finite, even if its gradient is not.
    good = choose(all_finite(point), point, state.good)
    after = State(x_next, z_next, (x_memory, z_memory), state.key, state.step + 1, status, good)
    stay = state._replace(status=status, good=good)
    # A step that was not taken leaves no entry.
    entry = jax.tree.map(lambda leaf: jnp.where(ok, leaf, _nothing(leaf.shape, leaf.dtype)), entry)
    return choose(ok, after, stay), entry


def _data(loop: Loop, step: Array, key: Array) -> tuple[Any, ...]:
    return loop.data(step, jax.random.fold_in(key, step)) if callable(loop.data) else loop.data  # pyright: ignore


def _evaluate(loop: Loop, x: PyTree, z: PyTree, data: tuple[Any, ...]) -> tuple[Point, Info]:
    value, info = loop.phi(x, z, *data)
    return Point(x, z, info.y, value, info.lower, info.residual, info.k_bar), info


def _update(optimizer, gradient, memory, point, a_set):
    updates, memory = optimizer.update(gradient, memory, point)
    return a_set.project(optax.apply_updates(point, updates)), memory


def _health(point: Point, info: Info, others: Any) -> Array:
    follower_ok = all_finite((info.y, info.y_last))
    rest_ok = all_finite((point.upper, point.lower, point.residual, others))
    status = jnp.where(rest_ok, Status.running, Status.non_finite)
    status = jnp.where(jnp.all(info.solved), status, Status.linear_solve_failed)
    return jnp.where(follower_ok, status, Status.diverged)


def all_finite(tree: PyTree) -> Array:
    """Whether every float in the tree is finite."""
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))]
    return jnp.all(jnp.stack(leaves)) if leaves else jnp.asarray(True)


def choose(flag: Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` where the flag is set, else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), new, old)


def _nothing(shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.full(shape, np.nan if jnp.issubdtype(dtype, jnp.floating) else 0, dtype)
