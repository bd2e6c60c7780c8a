"""Several processes under `jax.distributed`: what they must agree on, and what one of them does for all.

Every process runs the same program on its part of the arrays. What one finds by itself (a clock, a signal) it may
follow only when all do.
"""

import jax
import numpy as np
from jaxtyping import PyTree


def is_first() -> bool:
    """Whether this process writes and prints for all."""
    return jax.process_index() == 0


def agreed(*numbers: int) -> tuple[int, ...]:
    """The first process's, in all of them."""
    if jax.process_count() == 1:
        return numbers
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return tuple(int(number) for number in broadcast_one_to_all(np.asarray(numbers)))


def largest(number: int) -> int:
    """Of all processes."""
    if jax.process_count() == 1:
        return number
    from jax.experimental.multihost_utils import process_allgather

    return int(np.max(process_allgather(np.asarray(number))))


def wait_for_all(what: str) -> None:
    """Until every process is here."""
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import sync_global_devices

        sync_global_devices(what)


def whole(tree: PyTree) -> PyTree:
    """The tree with NumPy arrays, put together of all processes' parts."""

    def read(leaf):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return jax.device_get(leaf)
        from jax.experimental.multihost_utils import process_allgather

        return np.asarray(process_allgather(leaf, tiled=True))

    return jax.tree.map(read, tree)
