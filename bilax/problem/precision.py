"""Double precision inside a call, whatever precision the caller computes in.

JAX (0.9 to 0.10 at least) remembers the array that a closed-over NumPy array became when it was first traced, by the
array alone: where `jax.enable_x64` was switched since, a float64 array is met again as float32, or the other way round
("lax.sub requires arguments to have the same dtypes", or a wrong number of bits without a word). `double_precision`
makes JAX tell the two apart before it switches.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Computes in double precision; leaves nothing behind that single precision could trip over."""
    switches = not jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    forget = switches and not _told_apart()
    if forget:
        jax.clear_caches()
    try:
        with jax.enable_x64(True):
            yield
    finally:
        if forget:
            jax.clear_caches()


def in_double(tree: PyTree) -> PyTree:
    """The tree's leaves as arrays of doubles; wants `double_precision`."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree)


@functools.cache
def _told_apart() -> bool:
    """Whether JAX keeps the two precisions of a NumPy array apart, by itself or by our doing."""
    if _mixes():
        with contextlib.suppress(Exception):  # other releases may keep this elsewhere
            from jax._src import dtypes, literals

            dtypes.canonicalize_value_handlers[np.ndarray] = _Canonical(
                dtypes.canonicalize_dtype, literals.TypedNdArray
            )
    return not _mixes()


def _mixes() -> bool:
    array = np.arange(3.0)
    subtract, programs = jax.jit(lambda v: v - array), []
    try:
        for double in (False, True):
            with jax.enable_x64(double):
                programs.append(subtract.lower(np.zeros(3, np.float64 if double else np.float32)))
    except Exception:
        return True
    return False


class _Canonical:
    """What JAX makes of a NumPy array: the same object as long as it lives, one for each precision."""

    def __init__(self, canonical_dtype: Any, typed: Any):
        self.canonical_dtype, self.typed = canonical_dtype, typed
        self.known: dict[Any, tuple[Any, Any]] = {}
        """(id, dtype) -> weak references to the array and to what it became"""

    def __call__(self, array: np.ndarray) -> Any:
        dtype = self.canonical_dtype(array.dtype)
        key = (id(array), dtype)
        source, found = (reference() for reference in self.known.get(key, (_nothing, _nothing)))
        # Another array may have the address of one that is gone.
        if found is None or source is not array:
            found = self.typed(np.asarray(array, dtype))
            self.known[key] = weakref.ref(array), weakref.ref(found, lambda _: self.known.pop(key, None))
        return found


def _nothing() -> None:
    return None
