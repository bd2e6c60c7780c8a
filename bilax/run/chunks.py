"""A run in chunks: compiled steps, and between them progress, callbacks, saving and signals."""

import contextlib
import ctypes
import functools
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from bilax.problem.compiled import compiled
from bilax.problem.fitted_jit import fitted_jit
from bilax.problem.trees import from_named, named_leaves, rounded_up
from bilax.problem.variables import Fixed
from bilax.run import checkpoint
from bilax.run.callbacks import Snapshot
from bilax.run.checkpoint import Checkpoints, Saved, Saving
from bilax.run.data import Batches, Reader
from bilax.run.devices import Devices, put, put_own_part
from bilax.run.loop import Loop, Point, State, advance, begin, finish
from bilax.run.options import RunOptions
from bilax.run.processes import agreed, is_first, largest, running_on, together, whole
from bilax.run.progress import display
from bilax.run.solution import History, Interrupted, Solution, Status

CHUNK_SECONDS = 0.5
"""how often a person sees something"""
CAPACITY = 1 << 16
"""outer steps in one chunk at the most: bounds the buffers that hold its history"""


def _begin_typed(*arguments: Any) -> State:
    """With types that are those of what was saved, so that a run that goes on needs no program of its own.

    Copied, for JAX hands on what a program returns as it got it: x0 itself would be in the state, and in two places.
    """
    return jax.tree.map(lambda leaf: jnp.copy(jax.lax.convert_element_type(leaf, leaf.dtype)), begin(*arguments))


# There is NaN where nothing has been recorded. A chunk's end takes the memory of its beginning: a large state is held
# once.
_begin, _finish = (compiled(part, nan_is_meant=True) for part in (_begin_typed, finish))
_advance = compiled(advance, nan_is_meant=True, donated=1, jit=fitted_jit)


def _copied(tree: PyTree) -> PyTree:
    """With memory of its own, which may be given away."""
    with jax.debug_nans(False):
        return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree)


class Plan(NamedTuple):
    """What is to be run, and where it starts."""

    loop: Loop
    x0: PyTree
    y0: PyTree
    key: Array
    steps: int
    fixed: Fixed
    """what of x and y is no variable"""
    devices: Devices | None = None
    """where the arrays lie; None for the one device that JAX chooses"""
    given: Loop | None = None
    """the loop before its arrays were put there, if they were: a saved run is known by it on any devices"""


def drive(plan: Plan, options: RunOptions) -> Solution:
    """Runs all outer steps in chunks and returns to Python only between them."""
    _keep_memory()
    with running_on(None if plan.devices is None else plan.devices.mesh):
        return _Drive(plan, options).run()


@functools.cache
def _keep_memory() -> None:
    """Has glibc keep large buffers for the next chunk in place of giving them back to the system.

    Each chunk allocates the same ones again, and the system clears every page anew: that cost hyper-cleaning a fifth
    of its time. It holds for the whole process, on Linux with CPU alone.
    """
    if jax.default_backend() == "cpu":
        with contextlib.suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            mmap_max, trim_threshold = -4, -1
            mallopt(mmap_max, 0)
            mallopt(trim_threshold, 2**31 - 1)


class _Drive:
    """One run in chunks: its state, and what has been recorded."""

    def __init__(self, plan: Plan, options: RunOptions):
        self.began = time.monotonic()
        self.plan, self.options, self.loop = plan, options, plan.loop
        self.batches, self.batch = None, None
        if isinstance(self.loop.data, Batches):
            self.batches, self.batch, self.loop = self.loop.data, self.loop.data.first, self.loop._replace(data=())
        entries = rounded_up(plan.steps // self.loop.every)
        self.capacity = min(entries, CAPACITY) if self.batches is None else self.batches.capacity(entries)
        self.state: State = _begin(self.loop, plan.x0, plan.y0, plan.key, self._placed(self.batch))
        self.parts: list[History] = []
        self.fresh: list[History] = []
        """what was recorded since the last checkpoint"""
        self.received: list[int] = []
        self.batch_is_last = True
        """whether `batch` is that of the last step taken"""

    def run(self) -> Solution:
        """From the start, or from where it was saved, to the end."""
        options, steps = self.options, self.plan.steps
        with contextlib.ExitStack() as stack:
            saver = None
            ending = (signal.SIGINT,) if options.saving is None else (signal.SIGINT, signal.SIGTERM)
            stack.enter_context(_signals(ending, self.received))
            if options.saving is not None:
                checkpoints = stack.enter_context(checkpoint.opened(options.saving, resume=options.resume))
                saver = _Saver(options.saving, checkpoints, self._configuration())
            stored = saver.checkpoints.restore(_size(self.state)) if saver is not None and options.resume else None
            if saver is not None and stored is not None:
                self._take_up(stored, saver.configuration)
            # An algorithm with a tolerance of its own ends by itself, as `auto`'s does.
            all_taken = self.loop.tolerance is None and not hasattr(self.loop.algorithm, "tolerance")
            show = stack.enter_context(display(options.progress and is_first(), steps, self.done, all_taken))
            reader = stack.enter_context(self._reader()) if self.batches is not None else None
            # Data that have become shorter are told as such, not as another configuration.
            if stored is not None and self.batch_is_last:
                assert options.saving is not None
                rough = 10 * float(np.sqrt(jnp.finfo(self.state.good.upper.dtype).eps))
                checkpoint.check_next_step(stored, self._next_step(), rough, options.saving)
            had_ended = stored is not None and any(c.stops() for c in options.callbacks if hasattr(c, "stops"))
            ended = Status.stopped_by_callback if had_ended else self._go_on(saver, reader, show)
            self._save_before_leaving(saver)
            # The turn after the last step; data that were read are those of that step.
            self.state, _ = _advance(self.loop, self.state, *self._chunk(0, self._room(self.batch), end=True))
        point, status = whole(
            _finish(self.loop, self.state, jnp.asarray(ended), self.plan.y0, self._placed(self.batch))
        )
        solution = finished(point, status, whole(self.state.step), self._history(), self.plan)
        # In the second case it came after the last step.
        if ended in (Status.interrupted, Status.terminated) or self.received:
            raise Interrupted(solution)
        return solution

    @property
    def done(self) -> int:
        """Outer steps taken; of many starts by the one that took most."""
        return int(np.max(whole(self.state.step)))

    def _go_on(self, saver: "_Saver | None", reader: Reader | None, show: Any) -> Status:
        pace, steps = _Pace(self.capacity), self.plan.steps
        while self.done < steps and np.any(whole(self.state.status) == Status.running):
            # Clocks differ between processes, and all must take the same steps.
            (pace.count,), batches = agreed(pace.count), None
            count = self._until_due(saver, min(pace.count, (steps - self.done) // self.loop.every))
            if reader is not None:
                try:
                    count, batches = reader.take(count)
                except Exception:
                    self._save_before_leaving(saver)
                    raise
                count = -largest(-count)  # the least: some processes' data may have ended
                if count == 0:
                    return self._why_stop() or Status.data_ended
            before = self.done
            with pace.timing(count):
                self.state, part = _advance(self.loop, self.state, *self._chunk(count, batches))
                taken = (self.done - before) // self.loop.every
            if batches is not None and taken:
                self.batch = _entry(batches, taken - 1)
            self._record(whole(part), taken)
            show(self.done, self.parts[-1])
            # Callbacks first: the state is saved after a signal, and they would never see this step again.
            try:
                stop = self._any_callback_stops()
            except BaseException:
                self._save_before_leaving(saver)
                raise
            stop = self._why_stop() or (Status.stopped_by_callback if stop else None)
            if stop is not None:
                return stop
            # After the callbacks, so that none misses a step of a run that was killed.
            if saver is not None and agreed(saver.due(self.done)) == (True,):
                saver.save(self)
        return Status.step_limit

    def _chunk(self, count: int, batches: PyTree, end: bool = False) -> tuple[Array, int, PyTree, Array]:
        return jnp.asarray(count), self.capacity, self._placed(batches, 1), jnp.asarray(end)

    def _placed(self, batch: PyTree, before: int = 0) -> PyTree:
        """Data that were read, where the devices want them; with `before=1` a chunk's."""
        if batch is None or self.plan.devices is None:
            return batch
        return self.plan.devices.data(batch, self.loop.data_axes, put_own_part, before)

    def _until_due(self, saver: "_Saver | None", count: int) -> int:
        """At most `count` entries of the history, so that nothing that is due at a step is passed by."""
        every = [getattr(callback, "every", None) for callback in self.options.callbacks]
        every += [saver.saving.every_steps] if saver is not None else []
        return min([count, *((n - self.done % n) // self.loop.every for n in every if n)])

    def _why_stop(self) -> Status | None:
        return Status(why) if (why := largest(self._own_reason() or 0)) else None

    def _own_reason(self) -> Status | None:
        """Why this process would stop."""
        if self.received:
            return Status.interrupted if self.received[0] == signal.SIGINT else Status.terminated
        limit = self.options.time_limit
        if limit is not None and time.monotonic() - self.began >= limit:
            return Status.time_limit
        return None

    def _any_callback_stops(self) -> bool:
        due = [c for c in self.options.callbacks if self.done % (getattr(c, "every", None) or 1) == 0]
        if not due:
            return False
        history, state = self._history(), self.snapshot()
        answers = [np.asarray(callback(state, history)) for callback in due]
        return any(answer.dtype == bool and bool(answer) for answer in answers)

    def _save_before_leaving(self, saver: "_Saver | None") -> None:
        if saver is not None and self.done:
            saver.save(self)

    def _record(self, part: History, taken: int) -> None:
        part = jax.tree.map(lambda leaf: np.array(leaf[:, :taken] if self.loop.many else leaf[:taken]), part)
        self.parts.append(part)
        if self.options.saving is not None:
            self.fresh.append(part)

    def _history(self) -> History:
        self.parts = [self._join(self.parts)]
        return self.parts[0]

    def _join(self, parts: list[History]) -> History:
        if not parts:
            shape = eqx.filter_eval_shape(advance, self.loop, self.state, *self._chunk(0, self._room(self.batch)))[1]
            empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shape)
            return jax.tree.map(lambda leaf: leaf[:, :0] if self.loop.many else leaf[:0], empty)
        axis = 1 if self.loop.many else 0
        return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves, axis), *parts)

    def _room(self, batch: Any) -> PyTree:
        """One batch in front of room for a chunk's."""
        if batch is None:
            return None
        return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (self.capacity, *np.shape(leaf))), batch)

    def snapshot(self) -> Snapshot:
        """The state as callbacks see it."""
        x, z, good = _copied((*self.loop.algorithm.point(self.state.carry), self.state.good))
        if together():  # a callback computes by itself
            x, z, good = whole((x, z, good))
        fixed = self.plan.fixed
        return Snapshot(fixed.join_x(x), fixed.join_y(z), self.done, _as_written(good.whole(), fixed))

    def saved(self, configuration: dict[str, str]) -> Saved:
        """All that a checkpoint holds of this moment."""
        arrays = named_leaves(self.state, "state")
        for i, callback in enumerate(self.options.callbacks):
            if hasattr(callback, "saved"):
                arrays |= {f"callback {i} {name}": np.asarray(value) for name, value in callback.saved().items()}
        fresh = named_leaves(self._join(self.fresh)) if self.fresh else {}
        return Saved(self.done, arrays, configuration, self._next_step(), fresh)

    def _take_up(self, stored: Saved, configuration: dict[str, str]) -> None:
        """Goes on from what was saved."""
        assert self.options.saving is not None
        checkpoint.check_configuration(stored, configuration, self.options.saving)
        try:
            found = from_named(stored.arrays, self.state, "state")
            # Where they lie now, on however many devices they were saved.
            devices = self.plan.devices
            places = jax.tree.map(lambda leaf: leaf.sharding, self.state)
            self.state = found if devices is None else jax.tree.map(put, found, places)
            self.parts = [from_named(stored.history, self._join([]))]
        except KeyError as error:
            raise checkpoint.ConfigurationError(
                f"the run in {self.options.saving.folder} was saved by another version of bilax or of its method: it "
                f"lacks {error}. Go on with that version, or choose another folder."
            ) from None
        state = self.snapshot()
        for i, callback in enumerate(self.options.callbacks):
            if hasattr(callback, "restore"):
                prefix = f"callback {i} "
                own = {name.removeprefix(prefix): v for name, v in stored.arrays.items() if name.startswith(prefix)}
                callback.restore(own, state)

    def _reader(self) -> Reader:
        assert self.batches is not None
        # The batch of the last step taken comes first: the end point is evaluated on it.
        skip = max(self.done - 1, 0)
        reader = Reader(
            self.batches, skip, self.plan.steps - skip, self.capacity, lambda: self._own_reason() is not None
        )
        if self.done:
            taken, batches = reader.take(1)
            self.batch_is_last = bool(taken)
            self.batch = _entry(batches, 0) if taken else self.batch
        return reader

    def _configuration(self) -> dict[str, str]:
        """What can be named of all that must be the same for a run to go on; `_next_step` is for the rest."""
        loop = self.plan.given or self.plan.loop
        data, algorithm = loop.data, loop.algorithm
        read = callable(data) or self.batches is not None
        apart = any(not leaf.is_fully_addressable for leaf in jax.tree.leaves(data) if isinstance(leaf, jax.Array))
        known = "read while running" if read else checkpoint.NOT_COMPARED
        return {
            # Not the optimisers, whose text is that of closures.
            "method": _text(getattr(algorithm, "method", algorithm)),
            "sets": _text((loop.problem.x_set, loop.problem.y_set)),
            "arrays in the problem or method": checkpoint.fingerprint(
                eqx.filter((loop.problem, algorithm), eqx.is_array)
            ),
            "x0": checkpoint.fingerprint(self.plan.x0),
            "y0": checkpoint.fingerprint(self.plan.y0),
            "record_every": str(loop.every),
            "key": checkpoint.fingerprint(self.plan.key),
            "data": known if read or apart else checkpoint.fingerprint(eqx.filter(data, eqx.is_array)),
        }

    def _next_step(self) -> dict[str, float]:
        """What the next outer step gives, computed and not taken."""
        after, entry = _advance(self.loop, _copied(self.state), *self._chunk(1, self._room(self.batch)))
        point = self.loop.algorithm.point
        moves = zip(point(after.carry), point(self.state.carry), strict=True)
        x, z = (_distance(*whole(pair)) for pair in moves)
        entry, good = whole((entry, after.good))
        # A run that has ended leaves no entry.
        found = zip((entry.upper, entry.lower), (good.upper, good.lower), strict=True)
        upper, lower = (float(np.mean(np.where(np.isnan(one[..., 0]), good, one[..., 0]))) for one, good in found)
        return {"upper": upper, "lower": lower, "move of x": x, "move of z": z}


def _distance(new: PyTree, old: PyTree) -> float:
    squares = jax.tree.map(lambda a, b: np.sum((np.asarray(a) - np.asarray(b)).astype(float) ** 2), new, old)
    return float(np.sqrt(sum(jax.tree.leaves(squares))))


def _size(tree: PyTree) -> int:
    return sum(leaf.nbytes for leaf in named_leaves(tree).values())


def _entry(batches: PyTree, i: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[i], batches)


def finished(good: Point, status: Any, steps: Any, history: History, plan: Plan) -> Solution:
    """What a run returns."""
    found, every = _as_written(good, plan.fixed)._asdict(), plan.loop.every
    solution = Solution(**found, status=status, steps=steps, history=history, record_every=every)
    return solution if np.ndim(steps) else solution.trimmed()


def _as_written(point: Point, fixed: Fixed) -> Point:
    """A point whose x, z and y are as the user wrote them."""
    return point._replace(x=fixed.join_x(point.x), z=fixed.join_y(point.z), y=fixed.join_y(point.y))


def _text(thing: Any) -> str:
    return re.sub(r"\s+|0x[0-9a-f]+", " ", str(thing))


class _Pace:
    """Chooses the number of steps per chunk from how long the last ones took, compilation left out."""

    def __init__(self, capacity: int):
        self.capacity, self.count, self.compiled = capacity, 1, False

    @contextlib.contextmanager
    def timing(self, count: int) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        if not self.compiled:
            self.compiled = True
            return
        # A short chunk takes longer per step, so this errs on the short side.
        self.count = int(np.clip(count * CHUNK_SECONDS / max(seconds, 1e-6), 1, self.capacity))


class _Saver:
    """When to save."""

    def __init__(self, saving: Saving, checkpoints: Checkpoints, configuration: dict[str, str]):
        self.saving, self.checkpoints, self.configuration = saving, checkpoints, configuration
        self.last = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether it is time for a checkpoint."""
        every, seconds = self.saving.every_steps, self.saving.every_seconds
        by_steps = every is not None and step % every == 0
        return by_steps or (seconds is not None and time.monotonic() - self.last >= seconds)

    def save(self, run: _Drive) -> None:
        """Saves where the run is, unless that is saved already; what could not be written is written next time."""
        if run.done == self.checkpoints.recorded:
            return  # before the next step is computed for it
        last = run.parts[-1].upper[..., -1]
        # Of a start that has ended there is no entry.
        score = float(np.mean(np.where(np.isnan(last), whole(run.state.good.upper), last)))
        if self.checkpoints.save(run.saved(self.configuration), score):
            run.fresh = []
        self.last = time.monotonic()


@contextlib.contextmanager
def _signals(ending: tuple[signal.Signals, ...], received: list[int]) -> Iterator[None]:
    """Collects these so that a run ends, and is saved, between chunks; a second Ctrl-C breaks off at once.

    A KeyboardInterrupt that Python raises wherever it is would be lost where that is a finalizer or a callback of the
    garbage collector, of which JAX has one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
