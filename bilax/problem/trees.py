"""Helpers on trees and sizes that several rooms use."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree


def all_finite(tree: PyTree) -> Array:
    """Whether every float in the tree is finite."""
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))]
    return jnp.all(jnp.stack(leaves)) if leaves else jnp.asarray(True)


FEW = 8
"""leaves; see `choose`"""


def choose(flag: Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` where the flag is set, else `old`."""
    if len(jax.tree.leaves(new)) > FEW:
        # XLA writes what a flag comes from into each choice anew, as it does with all that is cheap; a root is not. A
        # step of a network was two and a half times as long, and a third of its compilation.
        flag = jnp.sqrt(flag.astype(float)) > 0.5
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), new, old)


def most_within(limit: int, count: int, size: int) -> int:
    """The largest divisor of `count` that keeps so many things of `size` bytes within `limit`, or 1."""
    return max(d for d in range(1, count + 1) if count % d == 0 and (d == 1 or d * size <= limit))


def rounded_up(count: int) -> int:
    """The next power of two, so that sizes that differ a little share a program."""
    return 1 << (count - 1).bit_length()


def named_leaves(tree: PyTree, prefix: str = "") -> dict[str, Any]:
    """The leaves of a tree by their paths; random keys as their numbers."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {prefix + jax.tree_util.keystr(path): _plain(leaf) for path, leaf in leaves}


def from_named(saved: Mapping[str, Any], like: PyTree, prefix: str = "") -> PyTree:
    """A tree like `like` of the leaves that `named_leaves` gave; a KeyError where one is missing."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(
        structure, [_like(saved[prefix + jax.tree_util.keystr(path)], leaf) for path, leaf in leaves]
    )


def _plain(leaf: Any) -> Any:
    if not is_key(leaf):
        return leaf
    return np.asarray(jax.random.key_data(leaf)) if leaf.is_fully_addressable else jax.random.key_data(leaf)


def _like(stored: Any, leaf: Any) -> Any:
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(stored), impl=jax.random.key_impl(leaf))
    return jnp.asarray(stored, jnp.result_type(leaf)) if isinstance(leaf, jax.Array) else np.asarray(stored)


def is_key(leaf: Any) -> bool:
    """Whether it is an array of random keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
