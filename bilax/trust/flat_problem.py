"""A problem over flat vectors, with the range of each coordinate: what certificates, checks and searches work on."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from bilax.problem.checks import check_same
from bilax.problem.problem import Problem
from bilax.problem.sets import Reals, Set, bounds, name_of
from bilax.problem.terms import inside, term_value

_REACH = 100.0
"""How far starts go from the given point where a set has no bound, in units of max(1, |coordinate|)."""


class Range(NamedTuple):
    """Where to look in each coordinate of a flat vector: bounds (perhaps infinite) and a centre."""

    lo: Array
    hi: Array
    centre: Array
    bounded: bool = False
    """whether all bounds are known to be finite when the search is compiled, which makes it simpler"""

    @property
    def width(self) -> Array:
        """The interval's length, or 2·_REACH around the centre where it is unbounded; 1 where it is a point."""
        reach = _REACH * jnp.maximum(1.0, jnp.abs(self.centre))
        width = jnp.where(jnp.isfinite(self.lo) & jnp.isfinite(self.hi), self.hi - self.lo, 2 * reach)
        return jnp.where(width > 0, width, 1.0)

    def spread(self, unit: Array, scale: Any = 1.0) -> Array:
        """Points of [0, 1]ᵈ as points of the range; `scale` shrinks the spread in unbounded coordinates."""
        if self.bounded:
            return self.lo + unit * (self.hi - self.lo)
        return self._spread(jnp, jax.scipy.special.ndtri, unit, scale)

    def spread_known(self, unit: np.ndarray, scale: Any = 1.0) -> np.ndarray:
        """The same for known bounds, without compiling anything."""
        known = Range(*(np.asarray(part) for part in self[:3]))  # pyright: ignore[reportArgumentType]
        with np.errstate(invalid="ignore"):
            return known._spread(np, scipy.special.ndtri, unit, scale)

    def _spread(self, module: Any, quantile: Callable[..., Any], unit: Any, scale: Any) -> Any:
        deviation = quantile(module.clip(unit, 1e-6, 1 - 1e-6))
        bounded_below, bounded_above = module.isfinite(self.lo), module.isfinite(self.hi)
        width = 2 * _REACH * module.maximum(1.0, module.abs(self.centre))
        far = self.centre + scale * width / 4 * deviation
        # A half line is covered from its end outwards.
        above = self.lo + scale * width / 4 * module.abs(deviation)
        below = self.hi - scale * width / 4 * module.abs(deviation)
        open_ended = module.where(bounded_below, above, module.where(bounded_above, below, far))
        return module.where(bounded_below & bounded_above, self.lo + unit * (self.hi - self.lo), open_ended)


class FlatProblem(NamedTuple):
    """A problem over flat vectors; made by `flatten`."""

    upper: Callable[[Array, Array], Array]
    lower: Callable[[Array, Array], Array]
    project_x: Callable[[Array], Array]
    project_y: Callable[[Array], Array]
    x_range: Range
    y_range: Range
    unravel_x: Callable[[Array], PyTree]
    unravel_y: Callable[[Array], PyTree]

    def ravel(self, tree: PyTree) -> Array:
        """A point as a flat vector, in the precision of y."""
        return jnp.asarray(ravel_pytree(tree)[0], self.y_range.lo.dtype)

    def hessian_product(self, x: Array, y: Array, v: Array) -> Array:
        """∂²f/∂y² (x, y) times v, without forming the matrix."""
        return jax.jvp(lambda y: jax.grad(self.lower, 1)(x, y), (y,), (v,))[1]


class _WithTerm(eqx.Module):
    """f and the term that stands for Y, as one objective."""

    problem: Problem

    def __call__(self, view: PyTree, y: PyTree, *data: Any) -> Any:
        return self.problem.lower(view, y, *data) + term_value(self.problem.set_of_y(view), y)


def with_plain_set(problem: Problem, x: PyTree, data: tuple[Any, ...]) -> Problem:
    """The problem with Y a set: as it is at this x, and a term as part of f."""
    y_set = problem.set_of_y(problem.view(x, *data))
    if isinstance(y_set, Set):
        return dataclasses.replace(problem, y_set=y_set)
    return dataclasses.replace(problem, lower=_WithTerm(problem), y_set=Reals())


def flatten(problem: Problem, x: PyTree, y: PyTree, data: tuple[Any, ...] = ()) -> FlatProblem:
    """The problem with its variables as flat vectors; x and y give the structure and the centre of the search."""
    problem = with_plain_set(problem, x, data)
    x_flat, unravel_x = ravel_pytree(x)
    y_flat, unravel_y = ravel_pytree(y)
    x_flat = jnp.asarray(x_flat, y_flat.dtype)

    def objective(which):
        @jax.jit  # traced once, however often the searches call it
        def value(x, y):
            view = problem.view(unravel_x(x), *data)
            return jnp.asarray(which(view, unravel_y(y), *data), y.dtype)

        return value

    return FlatProblem(
        upper=objective(problem.upper),
        lower=objective(problem.lower),
        project_x=lambda v: jnp.asarray(ravel_pytree(problem.x_set.project(unravel_x(v)))[0], v.dtype),
        project_y=lambda v: ravel_pytree(inside(problem.y_set, unravel_y(v)))[0],
        x_range=_range(problem.x_set, x, x_flat),
        y_range=_range(problem.y_set, y, y_flat),
        unravel_x=unravel_x,
        unravel_y=unravel_y,
    )


def _range(a_set: Any, point: PyTree, centre: Array) -> Range:
    lo, hi = bounds(a_set, point)
    for name, bound in (("lower", lo), ("upper", hi)):
        check_same(f"the {name} bound of {name_of(a_set)}", bound, "the point", point)
    leaves = jax.tree.leaves((lo, hi))
    known = not any(isinstance(leaf, Tracer) for leaf in leaves)
    bounded = known and all(bool(np.all(np.isfinite(leaf))) for leaf in leaves)
    pairs = zip(jax.tree.leaves(lo), jax.tree.leaves(hi), strict=True)
    # Linear programs are solved up to rounding, so that the ends of a fixed coordinate may cross a little.
    if known and any(np.any(low > high + 1e-6 * (1 + np.abs(high))) for low, high in pairs):
        raise ValueError(
            f"{name_of(a_set)}.bounds(v) must return (lower, upper); a lower bound is above its upper one."
        )
    lo, hi = (ravel_pytree(bound)[0].astype(centre.dtype) for bound in (lo, hi))
    return Range(lo, hi, centre, bounded)


def check_differentiable(flat: FlatProblem, x: Array, y: Any) -> None:
    """Says in words that `lower` has no derivative that JAX can take, before anything is compiled."""
    try:
        jax.eval_shape(jax.grad(flat.lower, 1), x, y)
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise NotImplementedError(
            "lower cannot be differentiated by y, which this search needs. A while_loop has no derivative in JAX: "
            f"write a fori_loop with fixed bounds, or a scan. JAX says: {first}"
        ) from error
