"""Closed convex sets, each with two verbs: `project` and `bounds`.

Any object with a `project(v)` method that returns a tree like `v` is a set. One that also has `bounds(v)`, the
lower and the upper bound of every coordinate as trees like `v`, is searched within them; another counts as
unbounded. A number given for a bound holds for every coordinate of every leaf.

On the boundary. A projection has no derivative there, so one is chosen: for `Box`, `NonNegative` and
`Ball` a point of the closed set counts as inside, so the derivative is the identity up to and including
the boundary and that of the projection only strictly outside. (`jnp.clip` would pass half of it.) For
`Simplex` a coordinate whose projection is zero counts as active and passes nothing.
"""

from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, PyTree


@runtime_checkable
class Set(Protocol):
    """What a set must offer."""

    def project(self, v: PyTree) -> PyTree:
        """The point of the set nearest to `v`, as a tree of the same structure."""
        ...


class Reals(eqx.Module):
    """The whole space: `project` is the identity."""

    flat = True

    def project(self, v: PyTree) -> PyTree:
        """Returns `v`."""
        return v

    def bounds(self, v: PyTree) -> tuple[PyTree, PyTree]:
        """−∞ and ∞."""
        return _everywhere(-np.inf, v), _everywhere(np.inf, v)


class Box(eqx.Module):
    """All v with lo ≤ v ≤ hi, coordinate by coordinate.

    `lo` and `hi` are numbers, or trees (of arrays that broadcast) of the same structure as `v`.
    """

    lo: PyTree
    hi: PyTree
    flat = True

    def __check_init__(self):
        lo, hi = jax.tree.leaves(self.lo), jax.tree.leaves(self.hi)
        # One bound may be a number and the other a tree.
        pairs = zip(lo * (len(hi) if len(lo) == 1 else 1), hi * (len(lo) if len(hi) == 1 else 1), strict=False)
        known = [pair for pair in pairs if not any(isinstance(bound, Tracer) for bound in pair)]
        # Else a comparison inside jit would be traced, though both numbers are known.
        with jax.ensure_compile_time_eval():
            ordered = all(bool(jnp.all(low <= high)) for low, high in known)
        if not ordered:
            raise ValueError(
                f"Box(lo, hi): lo must not exceed hi anywhere, nor be NaN, got lo={self.lo}, hi={self.hi}."
            )

    def project(self, v: PyTree) -> PyTree:
        """Cuts every coordinate to its interval."""
        lo, hi = _broadcast("lo", self.lo, v), _broadcast("hi", self.hi, v)
        return jax.tree.map(_cut, v, lo, hi)

    def bounds(self, v: PyTree) -> tuple[PyTree, PyTree]:
        """lo and hi."""
        lo, hi = _broadcast("lo", self.lo, v), _broadcast("hi", self.hi, v)
        return jax.tree.map(_fill, lo, v), jax.tree.map(_fill, hi, v)


class NonNegative(eqx.Module):
    """All v ≥ 0."""

    flat = True

    def project(self, v: PyTree) -> PyTree:
        """Sets negative coordinates to zero."""
        return jax.tree.map(lambda leaf: jnp.where(leaf < 0, jnp.zeros_like(leaf), leaf), v)

    def bounds(self, v: PyTree) -> tuple[PyTree, PyTree]:
        """0 and ∞."""
        return _everywhere(0.0, v), _everywhere(np.inf, v)


class Ball(eqx.Module):
    """All v whose Euclidean norm, over all leaves together, is at most `radius`."""

    radius: float

    def __check_init__(self):
        if not isinstance(self.radius, Tracer) and not self.radius > 0:
            raise ValueError(f"Ball(radius): radius must be positive, got {self.radius}.")

    def project(self, v: PyTree) -> PyTree:
        """Shrinks `v` to the sphere where it lies outside."""
        squares = optax.tree.norm(v, squared=True)
        outside = squares > self.radius**2
        scale = jnp.where(outside, self.radius / jnp.sqrt(jnp.where(outside, squares, 1)), 1)
        return jax.tree.map(lambda leaf: (scale * leaf).astype(leaf.dtype), v)

    def bounds(self, v: PyTree) -> tuple[PyTree, PyTree]:
        """−radius and radius."""
        return _everywhere(-self.radius, v), _everywhere(self.radius, v)


class Simplex(eqx.Module):
    """All v ≥ 0 whose coordinates, over all leaves together, sum to one."""

    flat = True

    def project(self, v: PyTree) -> PyTree:
        """The Euclidean projection, by sorting."""
        return optax.projections.projection_simplex(v)

    def bounds(self, v: PyTree) -> tuple[PyTree, PyTree]:
        """0 and 1."""
        return _everywhere(0.0, v), _everywhere(1.0, v)


class Each(eqx.Module):
    """The same set for each entry of a leading axis, or a set of its own for each."""

    each: Any
    own: bool = False

    @property
    def flat(self) -> bool:
        return is_flat(self.each)

    def project(self, v: PyTree) -> PyTree:
        """Projects every entry."""
        if not jax.tree.leaves(v):
            return v
        return jax.vmap(lambda one, v: one.project(v), (0 if self.own else None, 0))(self.each, v)


def is_flat(a_set: Any) -> bool:
    """Whether the projection's derivative is an orthogonal projector wherever it exists."""
    return getattr(a_set, "flat", False)


def bounds(a_set: Any, v: PyTree) -> tuple[PyTree, PyTree]:
    """Lower and upper bound of every coordinate of a point like `v`; ∓∞ where the set does not tell them."""
    return a_set.bounds(v) if callable(getattr(a_set, "bounds", None)) else Reals().bounds(v)


def _everywhere(bound: Any, v: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: _fill(bound, leaf), v)


def _fill(bound: Any, leaf: Any) -> Any:
    """`bound` in the leaf's shape and dtype; as a NumPy array if it is known, so that it stays known inside jit."""
    module = jnp if isinstance(bound, Tracer) else np
    return module.broadcast_to(module.asarray(bound, jnp.result_type(leaf)), jnp.shape(leaf))


def _cut(v: Array, lo: Any, hi: Any) -> Array:
    lo, hi = jnp.asarray(lo, v.dtype), jnp.asarray(hi, v.dtype)
    return jnp.where(v < lo, lo, jnp.where(v > hi, hi, v))


def _broadcast(name: str, bound: PyTree, v: PyTree) -> PyTree:
    if jax.tree.structure(bound) == jax.tree.structure(0.0):
        return jax.tree.map(lambda _: bound, v)
    if jax.tree.structure(bound) != jax.tree.structure(v):
        raise ValueError(
            f"Box({name}=...): the bound has structure {jax.tree.structure(bound)}, the point "
            f"{jax.tree.structure(v)}. Give a number, or a tree of the point's structure."
        )
    return bound
