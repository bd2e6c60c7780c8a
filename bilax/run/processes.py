"""Several processes under `jax.distributed`: what they must agree on, and what one of them does for all.

Every process runs the same program on its part of the arrays. What one finds by itself (a clock, a signal) it may
follow only when all do. A run on devices of one process is that process's own: the others may be doing something else.
"""

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

STATUS = re.compile("(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): ")
"""how the message of an error begins that comes from XLA"""
_OWN: ContextVar[bool] = ContextVar("bilax: a run of this process alone", default=False)


@contextlib.contextmanager
def running_on(mesh: Mesh | None) -> Iterator[None]:
    """Who takes part in what is called inside: the processes of these devices; without any, this one alone."""
    token = _OWN.set(mesh is None or not mesh.is_multi_process)
    try:
        yield
    finally:
        _OWN.reset(token)


def together() -> bool:
    """Whether other processes take part."""
    return not _OWN.get() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this process writes and prints for all that take part."""
    return not together() or jax.process_index() == 0


def agreed(*numbers: int) -> tuple[int, ...]:
    """The first process's, in all of them."""
    if not together():
        return numbers
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return tuple(int(number) for number in broadcast_one_to_all(np.asarray(numbers)))


def largest(number: int) -> int:
    """Of all processes."""
    if not together():
        return number
    from jax.experimental.multihost_utils import process_allgather

    return int(np.max(process_allgather(np.asarray(number))))


def wait_for_all(what: str) -> None:
    """Until every process is here."""
    if together():
        from jax.experimental.multihost_utils import sync_global_devices

        sync_global_devices(what)


def says_lost(error: BaseException) -> bool:
    """Whether an error is one that JAX raises, in one of two types, where another process cannot be reached."""
    return together() and (isinstance(error, jax.errors.JaxRuntimeError) or STATUS.match(str(error)) is not None)


def whole(tree: PyTree) -> PyTree:
    """The tree with NumPy arrays, put together of all processes' parts."""

    def read(leaf):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return jax.device_get(leaf)
        from jax.experimental.multihost_utils import process_allgather

        return np.asarray(process_allgather(leaf, tiled=True))

    return jax.tree.map(read, tree)
