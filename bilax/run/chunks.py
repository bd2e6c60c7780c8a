"""Long runs: chunks of outer steps with progress, callbacks, saving, signals and data that are read ahead."""

import contextlib
import itertools
import queue
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import Array, PyTree

from bilax.run import checkpoint
from bilax.run.callbacks import latest
from bilax.run.checkpoint import Saving
from bilax.run.solution import History, Solution, Status
from bilax.run.solve import Batches, Loop, State, advance, begin, finish

CHUNK_SECONDS = 0.5
"""how often a person sees something"""
CAPACITY = 1 << 16
"""outer steps in one chunk at the most: bounds the buffers that hold its history"""
BATCH_BYTES = 16 << 20
"""of data that are on the device ahead of time"""


class Watch(NamedTuple):
    """What is to happen beside the run itself; see `solve`."""

    progress: bool
    callbacks: Sequence[Callable[[Any, History], Any]]
    strict_callbacks: bool
    saving: Saving | None
    resume: bool
    time_limit: float | None


_begin, _advance, _finish = eqx.filter_jit(begin), eqx.filter_jit(advance), eqx.filter_jit(finish)


def drive(loop: Loop, x0: PyTree, y0: PyTree, key: Array, steps: int, watch: Watch) -> Solution:
    """Runs `steps` outer steps in chunks and returns to Python only between them."""
    began = time.monotonic()
    source, batch = None, None
    if isinstance(loop.data, Batches):
        source, batch, loop = loop.data.source, loop.data.first, loop._replace(data=())
    state = _begin(loop, x0, y0, key, batch)
    capacity = min(steps, CAPACITY) if batch is None else _batch_capacity(batch, steps)
    history, saver = [], None
    with contextlib.ExitStack() as stack:
        if watch.saving is not None:
            saver = _Saver(watch.saving, _configuration(loop, state, batch))
            stack.enter_context(checkpoint.opened(watch.saving, resume=watch.resume))
            if watch.resume:
                state, history = saver.restore(state, _empty_history(loop, state, batch))
        ended, pace, done = Status.step_limit, _Pace(capacity), int(state.step)
        received = stack.enter_context(_signals())
        display = stack.enter_context(_display(watch.progress, steps, done))
        reader = None
        if source is not None:
            # The batch of the last step taken comes first: the end point is evaluated on it.
            reader = stack.enter_context(_Reader(source, max(done - 1, 0), capacity))
            if done and (last := reader.take(1))[0]:
                batch = _entry(last[1], 0)
        while done < steps and int(state.status) == Status.running:
            count = min(pace.count, steps - done)
            if saver is not None:
                count = saver.until_next(done, count)
            batches = None
            if reader is not None:
                try:
                    count, batches = reader.take(count)
                except Exception:
                    if saver is not None and done:
                        saver.save(state, history)
                    raise
                if count == 0:
                    ended = Status.data_ended
                    break
            with pace.timing(count):
                state, part = _advance(loop, state, jnp.asarray(count), capacity, batches)
                taken, done = int(state.step) - done, int(state.step)
            if batches is not None and taken:
                batch = _entry(batches, taken - 1)
            history.append(jax.tree.map(lambda leaf, n=taken: np.array(leaf[:n]), jax.device_get(part)))
            display(done, history)
            stop = _stop(watch, state, history, received, began)
            if stop is not None:
                ended = stop
                break
            # After the callbacks, so that none misses a step of a run that was killed.
            if saver is not None and saver.due(done):
                saver.save(state, history)
        if saver is not None and done:
            saver.save(state, history)
    point, status = jax.device_get(_finish(loop, state, jnp.asarray(ended), batch))
    whole = _join(history) if history else _empty_history(loop, state, batch)
    return Solution(**point._asdict(), status=status, steps=done, history=whole).trimmed()


def _entry(batches: PyTree, i: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[i], batches)


def _stop(watch: Watch, state: State, history: list[History], received: list[int], began: float) -> Status | None:
    """Why the run should end here, if it should."""
    # Callbacks first: the state is saved after a signal, and they would never see this step again.
    by_callback = bool(watch.callbacks) and _any_callback_stops(watch, state, history)
    if received:
        return Status.interrupted if received[0] == signal.SIGINT else Status.terminated
    if by_callback:
        return Status.stopped_by_callback
    if watch.time_limit is not None and time.monotonic() - began >= watch.time_limit:
        return Status.time_limit
    return None


def _any_callback_stops(watch: Watch, state: State, history: list[History]) -> bool:
    history[:] = [_join(history)]
    stop = False
    for callback in watch.callbacks:
        try:
            answer = np.asarray(callback(state, history[0]))
            stop |= answer.dtype == bool and bool(answer)
        except Exception as error:
            if watch.strict_callbacks:
                raise
            warnings.warn(f"the callback {callback} failed and was passed over: {error!r}", stacklevel=2)
    return stop


def _join(parts: list[History]) -> History:
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _empty_history(loop: Loop, state: State, batch: Any) -> History:
    batches = None if batch is None else jax.tree.map(lambda leaf: np.asarray(leaf)[None], batch)
    shape = eqx.filter_eval_shape(advance, loop, state, jnp.asarray(0), 1, batches)[1]
    return jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape[1:]), leaf.dtype), shape)


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
    """When to save, and what."""

    def __init__(self, saving: Saving, configuration: dict[str, str]):
        self.saving, self.configuration, self.last = saving, configuration, time.monotonic()

    def restore(self, state: State, empty: History) -> tuple[State, list[History]]:
        stored = checkpoint.restore(self.saving, (state, empty), self.configuration)
        return (state, []) if stored is None else (stored[0], [stored[1]])

    def until_next(self, step: int, count: int) -> int:
        every = self.saving.every_steps
        return count if every is None else min(count, every - step % every)

    def due(self, step: int) -> bool:
        every, seconds = self.saving.every_steps, self.saving.every_seconds
        by_steps = every is not None and step % every == 0
        return by_steps or (seconds is not None and time.monotonic() - self.last >= seconds)

    def save(self, state: State, history: list[History]) -> None:
        history[:] = [_join(history)]
        score = float(state.good.upper)
        checkpoint.save(self.saving, int(state.step), (state, history[0]), self.configuration, score)
        self.last = time.monotonic()


def _configuration(loop: Loop, state: State, batch: Any) -> dict[str, str]:
    """What must be the same for a run to go on: named where there is a name, the traced program for the rest."""
    batches = None if batch is None else jax.tree.map(lambda leaf: np.asarray(leaf)[None], batch)
    program = eqx.filter_make_jaxpr(advance)(loop, state, jnp.asarray(0), 1, batches)[0]
    text = re.sub(r"0x[0-9a-f]+", "", str(program.jaxpr))
    # What objectives, sets and step sizes hold as arrays is no part of the text.
    arrays = [jax.tree.leaves(eqx.filter(loop._replace(data=()), eqx.is_array)), _constants(program)]
    return {
        "method": re.sub(r"\s+|0x[0-9a-f]+", " ", str(loop.phi.method)),
        "x0": checkpoint.fingerprint(state.x),
        "y0": checkpoint.fingerprint(state.z),
        "key": checkpoint.fingerprint(state.key),
        "data": "read while running" if callable(loop.data) or batch is not None else checkpoint.fingerprint(loop.data),
        "program (objectives, optimisers, sets, record)": checkpoint.fingerprint(
            [np.frombuffer(text.encode(), np.uint8), arrays]
        ),
    }


def _constants(program: core.ClosedJaxpr) -> list[Any]:
    """The arrays that a traced program holds, in whatever depth."""
    found = list(program.consts)
    for eqn in program.jaxpr.eqns:
        found += [atom.val for atom in eqn.invars if isinstance(atom, core.Literal) and np.ndim(atom.val)]
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_program):
            if isinstance(inner, core.Jaxpr):
                inner = core.ClosedJaxpr(inner, ())
            if isinstance(inner, core.ClosedJaxpr):
                found += _constants(inner)
    return found


def _is_program(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)


class _Reader:
    """Reads batches ahead in a thread and stacks them for one chunk."""

    def __init__(self, source: Iterable[tuple[Any, ...]], skip: int, capacity: int):
        self.capacity = capacity
        self.queue: queue.Queue[Any] = queue.Queue(maxsize=2 * capacity)
        self.ended, self.failure, self.closing = False, None, False
        self.thread = threading.Thread(target=self._read, args=(source, skip), daemon=True)
        self.thread.start()

    def _read(self, source: Iterable[tuple[Any, ...]], skip: int) -> None:
        try:
            starting_at = getattr(source, "starting_at", None)
            batches = starting_at(skip) if starting_at else itertools.islice(source, skip, None)
            shapes = None
            for number, batch in enumerate(batches, skip):
                found = jax.tree.map(np.shape, batch)
                shapes = shapes or found
                if found != shapes:
                    raise ValueError(
                        f"batch {number} has the shapes {found}, those before it {shapes}. All must be alike: leave "
                        "out a last batch that is shorter."
                    )
                while not self.closing:
                    with contextlib.suppress(queue.Full):
                        self.queue.put(batch, timeout=0.2)
                        break
                if self.closing:
                    return
        except BaseException as error:
            self.failure = error
        self.queue.put(None)

    def take(self, count: int) -> tuple[int, PyTree]:
        """Up to `count` batches, stacked in front of room for the capacity, so that the shape never changes."""
        taken = []
        while len(taken) < count and not self.ended:
            batch = self.queue.get()
            if batch is None:
                self.ended = True
            else:
                taken.append(batch)
        if self.failure is not None and not taken:
            raise RuntimeError(f"reading the data failed: {self.failure!r}") from self.failure
        if not taken:
            return 0, None
        return len(taken), jax.tree.map(self._stack, *taken)

    def _stack(self, *leaves: Any) -> np.ndarray:
        first = np.asarray(leaves[0])
        room = np.empty((self.capacity, *first.shape), first.dtype)
        np.stack(leaves, out=room[: len(leaves)])
        return room

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: Any) -> None:
        self.closing = True


def _batch_capacity(batch: tuple[Any, ...], steps: int) -> int:
    size = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(batch))
    return int(np.clip(BATCH_BYTES // max(size, 1), 1, min(steps, 256)))


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM so that a run ends between chunks; a second Ctrl-C breaks off at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _display(progress: bool, steps: int, done: int) -> Iterator[Callable[[int, list[History]], None]]:
    """Shows progress with rich on a terminal, as plain lines elsewhere, or not at all."""
    if not progress:
        yield lambda step, history: None
    elif not sys.stderr.isatty():
        yield _Lines(steps, done)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=steps, completed=done, text="compiling", rate="")
            clock = _Rate(done)

            def show(step: int, history: list[History]) -> None:
                bar.update(task, completed=step, text=_words(history), rate=f"{clock(step):.3g}/s")

            yield show


class _Lines:
    """One plain line now and then, for logs."""

    def __init__(self, steps: int, done: int):
        self.steps, self.clock, self.last = steps, _Rate(done), time.monotonic() - 1e9

    def __call__(self, step: int, history: list[History]) -> None:
        rate = self.clock(step)
        if step < self.steps and time.monotonic() - self.last < 5:
            return
        self.last = time.monotonic()
        left = (self.steps - step) / rate if rate else float("nan")
        print(
            f"step {step}/{self.steps}  {rate:.3g}/s  {left:.0f} s left  {_words(history)}", file=sys.stderr, flush=True
        )


class _Rate:
    """Outer steps per second since the first call, so that compilation does not count."""

    def __init__(self, done: int):
        self.begin, self.first = None, done

    def __call__(self, step: int) -> float:
        if self.begin is None:
            self.begin, self.first = time.monotonic(), step
        return (step - self.first) / max(time.monotonic() - self.begin, 1e-9)


def _words(history: list[History]) -> str:
    if not history or not len(history[-1].upper):
        return ""
    now = latest(history[-1])
    return f"upper {now['upper']:.5g}  lower {now['lower']:.5g}  residual {now['residual']:.2g}  k̄ {now['k_bar']:.0f}"
