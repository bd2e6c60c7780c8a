"""Where each outer step's data come from: a tuple, a traced function, or an iterable that is read while steps run."""

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from bilax.problem.checks import as_arrays
from bilax.problem.minibatches import Minibatches

Data = tuple[Any, ...] | Minibatches | Callable[[Any, Any], tuple[Any, ...]] | Iterable[tuple[Any, ...] | list[Any]]
"""What both objectives get after (x, y): a tuple; a function (step, key) -> tuple, which is traced; or an
iterable of tuples of the same shapes and types, one for each outer step.

An iterable is read in a thread of its own, the next few batches while the device computes, and never more than the run
has steps. It must not be read elsewhere meanwhile. A generator that served a run which ended early has given away what
was read ahead; one that can be read from the start, such as a list, has not."""

BATCH_BYTES = 16 << 20
"""of data that are on the device ahead of time"""


class Batches(NamedTuple):
    """An iterable of batches, its first one taken out to know the shapes."""

    first: tuple[Any, ...]
    source: Iterable[Any]

    def capacity(self, steps: int) -> int:
        """How many batches one chunk holds at the most."""
        size = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(self.first))
        return int(np.clip(BATCH_BYTES // max(size, 1), 1, min(steps, 256)))


def check_data(data: Any) -> Any:
    """The data in the loop's form: a tuple, `Minibatches`, a function, or `Batches`."""
    what = (
        "data must be a tuple (write data=(batch,) for one value), bilax.Minibatches, a function (step, key) -> tuple "
        "or an iterable"
    )
    if isinstance(data, tuple):
        return as_arrays("data", data)
    if isinstance(data, Minibatches):
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
    first = _item(first)
    if not isinstance(first, tuple):
        raise TypeError(f"{what} of tuples; the first item is {type(first)}.")
    # An iterator can be read only once: hand back what was taken from it.
    source = itertools.chain([first], iterator) if iterator is data else data
    return Batches(first, source)


def _item(item: Any) -> Any:
    """One step's data as a tuple of arrays; PyTorch's DataLoader gives lists of tensors."""
    return as_arrays("data", tuple(item)) if isinstance(item, list | tuple) else item


def _check_alike(number: int, batch: Any, first: Any) -> None:
    shapes, expected = jax.tree.map(np.shape, batch), jax.tree.map(np.shape, first)
    if shapes != expected:
        raise ValueError(
            f"batch {number} has the shapes {shapes}, those before it {expected}. All must be alike: leave out a last "
            "batch that is shorter."
        )
    for new, old in zip(jax.tree.leaves(batch), jax.tree.leaves(first), strict=True):
        kind, room = np.asarray(new).dtype, np.asarray(old).dtype
        # Floats are rounded to what JAX computes in, whole numbers would wrap around.
        if not (np.issubdtype(kind, np.floating) and np.issubdtype(room, np.floating)) and not np.can_cast(kind, room):
            raise ValueError(f"batch {number} holds {kind}, those before it {room}, which is too small for it.")


class Reader:
    """Reads batches in a thread, never more than `wanted` in all, and stacks them for one chunk."""

    def __init__(self, batches: Batches, skip: int, wanted: int, capacity: int, given_up: Callable[[], bool]):
        self.capacity, self.given_up = capacity, given_up
        self.queue: queue.Queue[Any] = queue.Queue(maxsize=capacity)
        self.ended, self.failure, self.closing = False, None, False
        self.thread = threading.Thread(target=self._read, args=(batches.source, skip, wanted), daemon=True)
        self.thread.start()

    def _read(self, source: Iterable[Any], skip: int, wanted: int) -> None:
        try:
            starting_at = getattr(source, "starting_at", None)
            batches = starting_at(skip) if starting_at else itertools.islice(source, skip, None)
            first = None
            for number, batch in enumerate(itertools.islice(batches, wanted), skip):
                batch = _item(batch)
                first = batch if first is None else first
                _check_alike(number, batch, first)
                if not self._put(batch):
                    return
        except BaseException as error:
            self.failure = error
        self._put(None)

    def _put(self, batch: Any) -> bool:
        while not self.closing:
            with contextlib.suppress(queue.Full):
                self.queue.put(batch, timeout=0.1)
                return True
        return False

    def take(self, count: int) -> tuple[int, PyTree]:
        """Up to `count` batches, stacked in front of room for the capacity, so that the shape never changes.

        Fewer where the data end, or where the run is given up while a batch is waited for.
        """
        taken = []
        while len(taken) < count and not self.ended:
            try:
                batch = self.queue.get(timeout=0.1)
            except queue.Empty:
                if self.given_up():
                    break
                continue
            if batch is None:
                self.ended = True
            else:
                taken.append(batch)
        if self.failure is not None and not taken:
            raise RuntimeError(f"reading the data failed: {self.failure!r}") from self.failure
        return len(taken), jax.tree.map(self.stack, *taken) if taken else None

    def stack(self, *leaves: Any) -> np.ndarray:
        """Entries in front of room for the capacity."""
        first = np.asarray(leaves[0])
        room = np.empty((self.capacity, *first.shape), first.dtype)
        np.stack(leaves, out=room[: len(leaves)])
        return room

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: Any) -> None:
        self.closing = True
        # A source that blocks cannot be ended from here; its thread dies with the process.
        self.thread.join(timeout=1.0)
