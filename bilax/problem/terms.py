"""Terms that are added to the follower's objective and known by their proximal map, such as λ‖y‖₁.

A term is any object with

    prox(v, step) -> y     the minimiser of value(y) + ‖y − v‖² / (2 step), as a tree like `v`
    value(v) -> number     the term itself

It stands where a set would (`Problem(y_set=bilax.L1(0.1))`), for a set is a term that is 0 inside and ∞ outside. The
weight may be learned: `y_set=lambda x: bilax.L1(jnp.exp(x))`.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from bilax.problem.sets import Reals, Set, is_flat
from bilax.problem.trees import choose


@runtime_checkable
class Term(Protocol):
    """What a term must offer; see the module's docstring."""

    def prox(self, v: PyTree, step: Any) -> PyTree: ...
    def value(self, v: PyTree) -> Any: ...


class L1(eqx.Module):
    """Σ weight |v_i|: the lasso's term. `weight` is a number, or a tree like v (a weight for each coordinate)."""

    weight: PyTree
    flat = True

    def prox(self, v: PyTree, step: Any) -> PyTree:
        """Shrinks every coordinate by step · weight, to zero at the most."""
        return jax.tree.map(lambda leaf, weight: _shrink(leaf, step * weight), v, _each(self.weight, v))

    def value(self, v: PyTree) -> Array:
        """Σ weight |v_i|."""
        return _total(lambda leaf, weight: jnp.sum(weight * jnp.abs(leaf)), v, _each(self.weight, v))

    def tangent(self, v: PyTree, step: Any) -> PyTree:
        """1 for the coordinates that are not shrunk to zero, else 0."""
        return jax.tree.map(lambda a, w: (jnp.abs(a) > step * w).astype(a.dtype), v, _each(self.weight, v))


class ElasticNet(eqx.Module):
    """Σ l1 |v_i| + ½ Σ l2 v_i²."""

    l1: PyTree
    l2: PyTree

    def prox(self, v: PyTree, step: Any) -> PyTree:
        """Shrinks as `L1` does, then divides by 1 + step · l2."""
        shrunk = L1(self.l1).prox(v, step)
        return jax.tree.map(lambda leaf, l2: leaf / (1 + step * l2), shrunk, _each(self.l2, v))

    def value(self, v: PyTree) -> Array:
        """Σ l1 |v_i| + ½ Σ l2 v_i²."""
        return L1(self.l1).value(v) + _total(lambda a, l2: 0.5 * jnp.sum(l2 * a**2), v, _each(self.l2, v))

    def tangent(self, v: PyTree, step: Any) -> PyTree:
        """As for `L1`."""
        return L1(self.l1).tangent(v, step)


class GroupL1(eqx.Module):
    """Σ weight ‖v_g‖₂ over groups g: the rows (first axis) of every leaf, or whole leaves if `rows` is False."""

    weight: PyTree
    rows: bool = True

    def prox(self, v: PyTree, step: Any) -> PyTree:
        """Shortens every group by step · weight, to zero at the most."""

        def shorten(leaf, weight):
            norms = self._norms(leaf)
            positive = jnp.where(norms > 0, norms, 1)
            scale = jnp.where(norms > step * weight, 1 - step * weight / positive, 0)
            return leaf * (scale.reshape(scale.shape + (1,) * (leaf.ndim - scale.ndim)))

        return jax.tree.map(shorten, v, _each(self.weight, v))

    def value(self, v: PyTree) -> Array:
        """Σ weight ‖v_g‖₂."""
        return _total(lambda leaf, weight: jnp.sum(weight * self._norms(leaf)), v, _each(self.weight, v))

    def _norms(self, leaf: Array) -> Array:
        squares = jnp.sum(leaf**2, axis=tuple(range(1 if self.rows and leaf.ndim else 0, leaf.ndim)))
        return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)


class Lq(eqx.Module):
    """Σ weight |v_i|^q with 0 < q < 1, which is not convex: the paper's ℓ_q, without its smoothing.

    The map is found by Newton's method on each coordinate, and is 0 below the threshold at which 0 is as good.
    """

    weight: PyTree
    q: float = 0.5

    def __check_init__(self):
        if not 0 < self.q < 1:
            raise ValueError(f"Lq(q=...): q must lie strictly between 0 and 1, got {self.q}. For q = 1 use bilax.L1.")

    def prox(self, v: PyTree, step: Any) -> PyTree:
        """The larger solution of y + step · weight · q y^(q−1) = |v|, with v's sign, or 0."""
        return jax.tree.map(lambda leaf, weight: self._one(leaf, step * weight), v, _each(self.weight, v))

    def value(self, v: PyTree) -> Array:
        """Σ weight |v_i|^q."""

        def power(leaf, weight):
            sizes = jnp.abs(leaf)
            return jnp.sum(weight * jnp.where(sizes > 0, jnp.where(sizes > 0, sizes, 1) ** self.q, 0))

        return _total(power, v, _each(self.weight, v))

    def _one(self, v: Array, weight: Any) -> Array:
        # Where 0 and the larger solution y are equally good, y = (2 weight (1 − q))^(1/(2 − q)); Marjanovic and Solo
        # 2012.
        least = jax.lax.stop_gradient(jnp.asarray(2 * weight * (1 - self.q))) ** (1 / (2 - self.q))
        threshold = least * (1 + self.q / (2 * (1 - self.q)))
        sizes = jnp.abs(v)
        kept = sizes > threshold
        size = jnp.where(kept, sizes, 2 * threshold + 1)

        def newton(y):
            slope = 1 + weight * self.q * (self.q - 1) * y ** (self.q - 2)
            return jnp.maximum(y - (y + weight * self.q * y ** (self.q - 1) - size) / slope, least)

        y = size
        for _ in range(8):  # from above it converges quadratically, and few steps can be differentiated
            y = newton(y)
        return jnp.where(kept, jnp.sign(v) * y, 0).astype(v.dtype)


class EachTerm(eqx.Module):
    """The same term for each entry of a leading axis, or a term of its own for each."""

    each: Any
    own: bool = False

    def prox(self, v: PyTree, step: Any) -> PyTree:
        """The map of every entry."""
        return jax.vmap(lambda one, v: one.prox(v, step), (0 if self.own else None, 0))(self.each, v)

    def value(self, v: PyTree) -> Array:
        """The sum over the entries."""
        return jnp.sum(jax.vmap(lambda one, v: one.value(v), (0 if self.own else None, 0))(self.each, v))


def proximal(a_set: Any, v: PyTree, step: Any) -> PyTree:
    """The proximal map of a term, or the projection onto a set."""
    return a_set.prox(v, step) if is_term(a_set) else a_set.project(v)


def inside(a_set: Any, v: PyTree) -> PyTree:
    """v projected onto a set; v itself, where a term, or a set that depends on x, leaves it to the follower's steps."""
    return a_set.project(v) if isinstance(a_set, Set) else v


def brought_inside(a_set: Any, v: PyTree) -> PyTree:
    """v itself up to rounding where it lies in the set, with its own derivative on the boundary too; else as `inside`.

    Terms take any v.
    """
    if not isinstance(a_set, Set) or isinstance(a_set, Reals):
        return v
    nearest = a_set.project(v)
    flat, near = ravel_pytree(v)[0], ravel_pytree(nearest)[0]
    outside = jnp.max(jnp.abs(flat - near)) > 64 * jnp.finfo(flat.dtype).eps * jnp.max(jnp.abs(flat))
    return choose(outside, nearest, v)


def term_value(a_set: Any, v: PyTree) -> Any:
    """The value of a term; 0 for a set, of points inside."""
    return a_set.value(v) if is_term(a_set) else 0.0


def tangent(a_set: Any, v: PyTree, step: Any) -> Callable[[PyTree], PyTree] | None:
    """The orthogonal projector onto the face that `proximal(a_set, v, step)` lies on; None where faces are curved.

    A set or term may tell the coordinates that are free by a method `tangent(v, step)`; of a flat set it is the
    derivative of the projection.
    """
    if not has_flat_faces(a_set):
        return None
    if hasattr(a_set, "tangent"):
        free = a_set.tangent(v, step)
        return lambda u: jax.tree.map(jnp.multiply, free, u)
    pull = jax.vjp(a_set.project, v)[1]
    return lambda u: pull(u)[0]


def has_flat_faces(a_set: Any) -> bool:
    """Whether `tangent` knows the faces of this set or term."""
    return hasattr(a_set, "tangent") or (isinstance(a_set, Set) and is_flat(a_set))


def is_term(a_set: Any) -> bool:
    """Whether it is a term and not a set."""
    return isinstance(a_set, Term) and not isinstance(a_set, Set)


def _shrink(v: Array, by: Any) -> Array:
    # Not sign(v) · max(|v| − by, 0): where |v| = by exactly, that passes half a derivative.
    return jnp.where(v > by, v - by, jnp.where(v < -by, v + by, jnp.zeros_like(v)))


def _each(weight: PyTree, v: PyTree) -> PyTree:
    if jax.tree.structure(weight) == jax.tree.structure(v):
        return weight
    return jax.tree.map(lambda _: weight, v)


def _total(function: Any, *trees: PyTree) -> Any:
    return optax.tree.sum(jax.tree.map(function, *trees))
