"""Closed convex sets, each with two verbs: `project` and `bounds`.

Any object with a `project(v)` method that returns a tree like `v` is a set. One that also has `bounds(v)`, the
lower and the upper bound of every coordinate as trees like `v`, is searched within them; another counts as
unbounded. A number given for a bound holds for every coordinate of every leaf. Where faces are flat, so that the
projection's derivative is an orthogonal projector wherever it exists, a set says `flat = True`.

What a set is made of (bounds, radii, centres) may depend on the leader, `y_set=lambda x: bilax.Ball(jnp.exp(x))`:
projections are differentiated in it too. Sets that linear equations and inequalities make are in `polyhedra.py`.

On the boundary. A projection has no derivative there, so one is chosen: a point of the closed set counts as inside, so
the derivative is the identity up to and including the boundary and that of the projection only strictly outside.
(`jnp.clip` would pass half of it.) For `Simplex` a coordinate whose projection is zero counts as active and passes
nothing.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

_SHORT = 40
"""the most characters of a set in a message"""


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
        if not all(may_hold(lambda low, high: low <= high, *pair) for pair in pairs):
            raise ValueError(
                f"Box(lo, hi): lo must not exceed hi anywhere, nor be NaN, got lo={self.lo}, hi={self.hi}."
            )

    def project(self, v: PyTree) -> PyTree:
        """Cuts every coordinate to its interval."""
        lo, hi = broadcast("Box(lo=...)", self.lo, v), broadcast("Box(hi=...)", self.hi, v)
        return jax.tree.map(_cut, v, lo, hi)

    def bounds(self, v: PyTree) -> tuple[PyTree, PyTree]:
        """lo and hi."""
        lo, hi = broadcast("Box(lo=...)", self.lo, v), broadcast("Box(hi=...)", self.hi, v)
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
    """All v whose Euclidean distance from `centre`, over all leaves together, is at most `radius`: a trust region.

    `centre` is a number, or a tree (of arrays that broadcast) of the same structure as `v`.
    """

    radius: Any
    centre: PyTree = 0.0

    def __check_init__(self):
        _check_positive("Ball(radius)", "radius", self.radius)

    def project(self, v: PyTree) -> PyTree:
        """Moves `v` straight to the sphere where it lies outside."""
        centre = broadcast("Ball(centre=...)", self.centre, v)
        away = jax.tree.map(jnp.subtract, v, centre)
        squares = optax.tree.norm(away, squared=True)
        outside = squares > self.radius**2
        scale = jnp.where(outside, self.radius / jnp.sqrt(jnp.where(outside, squares, 1)), 1)

        def leaf_of(leaf, centre, away):
            # Inside, v itself and not centre + (v − centre), which rounds.
            return jnp.where(outside, centre + scale * away, leaf).astype(leaf.dtype)

        return jax.tree.map(leaf_of, v, centre, away)

    def bounds(self, v: PyTree) -> tuple[PyTree, PyTree]:
        """centre − radius and centre + radius."""
        centre = broadcast("Ball(centre=...)", self.centre, v)

        def side(radius):
            return jax.tree.map(lambda one, leaf: _fill(one + radius, leaf), centre, v)

        return side(-self.radius), side(self.radius)


class L1Ball(eqx.Module):
    """All v with Σ|v_i| ≤ `radius`, over all leaves together: sparse weights within a budget."""

    radius: Any
    flat = True

    def __check_init__(self):
        _check_positive("L1Ball(radius)", "radius", self.radius)

    def project(self, v: PyTree) -> PyTree:
        """Shrinks every coordinate by the same amount, to zero at the most, where `v` lies outside."""

        def one(flat, radius):
            sphere = jnp.sign(flat) * _onto_simplex(jnp.abs(flat), radius)
            return jnp.where(jnp.sum(jnp.abs(flat)) <= radius, flat, sphere)

        return on_vector(one, v, self.radius)

    def bounds(self, v: PyTree) -> tuple[PyTree, PyTree]:
        """−radius and radius."""
        return _everywhere(-self.radius, v), _everywhere(self.radius, v)


class Simplex(eqx.Module):
    """All v ≥ 0 whose coordinates, over all leaves together, sum to `total`: shares, probabilities, a budget spent."""

    total: Any = 1.0
    flat = True

    def __check_init__(self):
        _check_positive("Simplex(total)", "total", self.total)

    def project(self, v: PyTree) -> PyTree:
        """The Euclidean projection, by sorting."""
        return on_vector(_onto_simplex, v, self.total)

    def bounds(self, v: PyTree) -> tuple[PyTree, PyTree]:
        """0 and total."""
        return _everywhere(0.0, v), _everywhere(self.total, v)


class SecondOrderCone(eqx.Module):
    """All v = (t, u) with ‖u‖₂ ≤ t; t is the first coordinate (of the first leaf) and u all others."""

    def project(self, v: PyTree) -> PyTree:
        """v inside, the cone's tip where v lies in the polar cone, else the nearest point of the mantle."""

        def one(flat):
            t, u = flat[0], flat[1:]
            squares = jnp.sum(u**2)
            norm = jnp.sqrt(jnp.where(squares > 0, squares, 1)) * (squares > 0)
            mantle = (t + norm) / 2 * jnp.concatenate([jnp.ones(1, flat.dtype), u / jnp.where(norm > 0, norm, 1)])
            return jnp.where(norm <= t, flat, jnp.where(norm <= -t, jnp.zeros_like(flat), mantle))

        return on_vector(one, v)

    def bounds(self, v: PyTree) -> tuple[PyTree, PyTree]:
        """0 for t and −∞ for the others; ∞."""
        leaves, structure = jax.tree.flatten(v)
        lower = [np.full(jnp.shape(leaf), -np.inf, jnp.result_type(leaf)) for leaf in leaves]
        lower[0].flat[0] = 0
        return jax.tree.unflatten(structure, lower), _everywhere(np.inf, v)


class Product(eqx.Module):
    """A set for each part of v: `Product({"weights": bilax.Simplex(), "offset": bilax.Reals()})`.

    `sets` is a tree of sets that v's tree goes on from: below each set, v may have leaves or trees of any kind.
    """

    sets: PyTree

    def __check_init__(self):
        for one in self._flatten()[0]:
            if not isinstance(one, Set):
                raise TypeError(
                    f"Product(sets): expected a tree of sets such as bilax.Box(0, 1), got {one!r} in it. A term with a "
                    "proximal map takes a tree of weights instead, 0 for what it leaves alone."
                )

    @property
    def flat(self) -> bool:
        return all(is_flat(one) for one in self._flatten()[0])

    def project(self, v: PyTree) -> PyTree:
        """Projects each part onto its set."""
        sets, parts, structure = self._split(v)
        return structure.unflatten([one.project(part) for one, part in zip(sets, parts, strict=True)])

    def bounds(self, v: PyTree) -> tuple[PyTree, PyTree]:
        """Those of each part's set."""
        sets, parts, structure = self._split(v)
        pairs = [bounds(one, part) for one, part in zip(sets, parts, strict=True)]
        return structure.unflatten([lo for lo, _ in pairs]), structure.unflatten([hi for _, hi in pairs])

    def _flatten(self) -> tuple[list[Any], Any]:
        return jax.tree.flatten(self.sets, is_leaf=lambda node: isinstance(node, Set))

    def _split(self, v: PyTree) -> tuple[list[Any], list[PyTree], Any]:
        sets, structure = self._flatten()
        try:
            return sets, structure.flatten_up_to(v), structure
        except ValueError as error:
            raise ValueError(
                f"Product(sets): the sets have the structure {structure}, which the point {jax.tree.structure(v)} does "
                "not go on from. Give one set for each part of it."
            ) from error


class Each(eqx.Module):
    """The same set for each entry of a leading axis: `Each(bilax.Simplex())` makes every row of a matrix sum to one.

    With `own`, a set of its own for each: what the set is made of has the leading axis too.
    """

    each: Any
    own: bool = False

    def __check_init__(self):
        if not isinstance(self.each, Set):
            raise TypeError(f"Each(each): expected a set such as bilax.Simplex(), got {self.each!r}.")

    @property
    def flat(self) -> bool:
        return is_flat(self.each)

    def project(self, v: PyTree) -> PyTree:
        """Projects every entry."""
        if not jax.tree.leaves(v):
            return v
        return jax.vmap(lambda one, v: one.project(v), (0 if self.own else None, 0))(self.each, v)

    def bounds(self, v: PyTree) -> tuple[PyTree, PyTree]:
        """Those of every entry's set."""
        if self.own:
            return jax.vmap(bounds)(self.each, v)
        lo, hi = bounds(self.each, jax.tree.map(lambda leaf: leaf[0], v))
        return jax.tree.map(_fill, lo, v), jax.tree.map(_fill, hi, v)


def _onto_simplex(v: Array, total: Array) -> Array:
    """Held, Wolfe and Crowder (1974). optax's has no derivative in single precision where double is switched on."""
    v = v - jax.lax.stop_gradient(jnp.max(v))  # which changes nothing but the rounding of large numbers
    ordered, ranks = jax.lax.stop_gradient(-jnp.sort(-v)), jnp.arange(1, v.size + 1, dtype=v.dtype)
    surplus = (jnp.cumsum(ordered) - jax.lax.stop_gradient(total)) / ranks
    # Not by comparing v with its own sorted copy: the compiler may round the two differently. Near the threshold it
    # does not matter which side a coordinate falls on.
    support = v > surplus[jnp.sum(ordered > surplus) - 1]
    share = (total - jnp.sum(jnp.where(support, v, 0))) / jnp.sum(support, dtype=v.dtype)
    projected = jnp.where(support, v + share, 0)
    return jnp.where(projected > 0, projected, 0)


def is_flat(a_set: Any) -> bool:
    """Whether the projection's derivative is an orthogonal projector wherever it exists."""
    return getattr(a_set, "flat", False)


def bounds(a_set: Any, v: PyTree) -> tuple[PyTree, PyTree]:
    """Lower and upper bound of every coordinate of a point like `v`; ∓∞ where the set does not tell them."""
    if not callable(getattr(a_set, "bounds", None)):
        return Reals().bounds(v)
    lo, hi = a_set.bounds(v)
    return _like(lo, v), _like(hi, v)


def name_of(a_set: Any) -> str:
    """What messages call a set: as it is written where that is short, else its class; arrays would fill the screen."""
    name, written = type(a_set).__name__, str(a_set)
    return written if written.startswith(name) and len(written) <= _SHORT and "[" not in written else name


def _like(bound: PyTree, v: PyTree) -> PyTree:
    """Numbers for all coordinates of v or of a leaf, and arrays in its precision; other shapes stay, to be refused."""
    if jax.tree.structure(bound) == jax.tree.structure(0.0) and not jnp.ndim(bound):
        return _everywhere(bound, v)
    if jax.tree.structure(bound) != jax.tree.structure(v):
        return bound

    def fit(one, leaf):
        return _fill(one, leaf) if jnp.shape(one) in ((), jnp.shape(leaf)) else one

    return jax.tree.map(fit, bound, v)


def _everywhere(bound: Any, v: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: _fill(bound, leaf), v)


def _fill(bound: Any, leaf: Any) -> Any:
    """`bound` in the leaf's shape and dtype; as a NumPy array if it is known, so that it stays known inside jit."""
    module = jnp if isinstance(bound, Tracer) else np
    return module.broadcast_to(module.asarray(bound, jnp.result_type(leaf)), jnp.shape(leaf))


def _cut(v: Array, lo: Any, hi: Any) -> Array:
    lo, hi = jnp.asarray(lo, v.dtype), jnp.asarray(hi, v.dtype)
    return jnp.where(v < lo, lo, jnp.where(v > hi, hi, v))


def broadcast(name: str, bound: PyTree, v: PyTree) -> PyTree:
    """A number for each leaf of v, or a tree like v as it is."""
    if jax.tree.structure(bound) == jax.tree.structure(0.0):
        return jax.tree.map(lambda _: bound, v)
    if jax.tree.structure(bound) != jax.tree.structure(v):
        raise ValueError(
            f"{name}: what was given has structure {jax.tree.structure(bound)}, the point {jax.tree.structure(v)}. "
            "Give a number, or a tree of the point's structure."
        )
    return bound


def on_vector(function: Callable[..., Array], v: PyTree, *parameters: Any) -> PyTree:
    """A function of a vector, of all leaves of v together; the parameters in the vector's precision."""
    flat, unravel = ravel_pytree(v)
    return unravel(function(flat, *(jnp.asarray(one, flat.dtype) for one in parameters)))


def may_hold(condition: Callable[..., Any], *values: Any) -> bool:
    """Whether a condition holds everywhere, or its values are traced and nobody knows yet."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(values)):
        return True
    # Else a comparison inside jit would be traced, though the numbers are known.
    with jax.ensure_compile_time_eval():
        return bool(jnp.all(condition(*values)))


def _check_positive(call: str, name: str, value: Any) -> None:
    if not may_hold(lambda value: (value > 0) & (value < np.inf), value):
        raise ValueError(f"{call}: {name} must be positive and finite, got {value}.")
