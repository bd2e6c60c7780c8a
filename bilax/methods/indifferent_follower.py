"""Followers that do not mind: f(x, ·) is the same wherever y is, or along some direction.

Then the leader may choose (the optimistic formulation). A little of F, added to f, makes the follower choose for it:
its minimisers tend to those of f that F likes best as the weight tends to zero (Molodtsov 1976).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from bilax.problem.problem import Problem
from bilax.problem.quick_jit import quick_jit
from bilax.problem.sets import is_flat
from bilax.problem.terms import brought_inside, tangent

SHARE = 1e-8
"""how much F's variation counts beside f's where ties go to the leader"""
FLAT = 1e-9
"""curvature, beside what there is elsewhere, below which there is none"""
SAME = 1e-12
"""variation of f, beside f itself, below which there is none"""


class _Leaning(eqx.Module):
    """f + weight F."""

    lower: Callable[..., Any]
    upper: Callable[..., Any]
    weight: float

    def __call__(self, x: PyTree, y: PyTree, *data: Any) -> Any:
        return self.lower(x, y, *data) + self.weight * self.upper(x, y, *data)


def optimistic(problem: Problem, weight: float) -> Problem:
    """The problem whose follower minimises f + weight F."""
    if not weight:
        return problem
    return dataclasses.replace(problem, lower=_Leaning(problem.lower, problem.upper, weight), lower_at=None)


class Variation(NamedTuple):
    """How much f and F vary with y at some points x."""

    nowhere: np.ndarray
    """for each x, whether f does not vary there beyond its rounding, though it does at another"""
    weight: float
    """of F in an optimistic follower"""


def variation(problem: Problem, xs: PyTree, ys: PyTree, data: tuple[Any, ...]) -> Variation:
    """From values at the points ys, at each of xs; both along a leading axis.

    f at one x is not compared with f at another: exp(x) (y - 1)² at x = -8 varies, however much it does at x = 25. F
    counts beside where f varies least, so that it decides nothing but ties.
    """
    lower, upper = (np.asarray(values) for values in _values(problem, xs, ys, data))
    f, F = (np.asarray([_range(row) for row in values]) for values in (lower, upper))
    size = np.max(np.abs(np.where(np.isfinite(lower), lower, 0)), axis=1)
    nowhere = f <= SAME * size
    least_f, largest_F = min(f[f > SAME * size], default=0.0), max(F[np.isfinite(F)], default=0.0)
    return Variation(nowhere & bool(least_f), float(SHARE * least_f / largest_F) if largest_F > 0 else 0.0)


def _range(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.ptp(finite)) if finite.size > 1 else np.nan


@quick_jit
def _values(problem: Problem, xs: PyTree, ys: PyTree, data: tuple[Any, ...]) -> tuple[Array, Array]:
    def at_one_x(x):
        follower = problem.follower(problem.view(x, *data), data)
        inside = jax.vmap(lambda y: brought_inside(follower.y_set, y))(ys)
        return jax.vmap(follower.total)(inside), jax.vmap(follower.upper)(inside)

    return jax.lax.map(at_one_x, xs)


@quick_jit
def flat_where_it_matters(problem: Problem, x: PyTree, y: PyTree, y0: PyTree, data: tuple[Any, ...]) -> Array:
    """Whether f has no curvature at y along a direction that no constraint holds and that F cares about.

    Each variable is measured by its own curvature, so that units do not matter; there, or what was met on the way from
    y0: a follower that has no minimum but goes on falling for ever has less and less.
    """
    follower = problem.follower(problem.view(x, *data), data)
    flat, unravel = ravel_pytree(y)
    lower = jax.grad(lambda v: follower.lower(unravel(v)))
    slope, hessian = lower(flat), jax.jacfwd(lower)(flat)
    size = jnp.max(jnp.sum(jnp.abs(hessian), axis=1))
    alpha = 1 / jnp.where(size > 0, size, 1)
    face = tangent(follower.y_set, unravel(flat - alpha * slope), alpha) if is_flat(follower.y_set) else None
    if face is None:
        return jnp.asarray(False)
    identity = jnp.eye(flat.size, dtype=flat.dtype)
    free = jax.vmap(lambda v: ravel_pytree(face(unravel(v)))[0])
    start = ravel_pytree(brought_inside(follower.y_set, y0))[0]
    moved = flat != start
    met = jnp.where(moved, jnp.abs(slope - lower(start)) / jnp.where(moved, jnp.abs(flat - start), 1), 0)
    own = jnp.maximum(met, jnp.abs(jnp.diag(hessian)))
    unit = 1 / jnp.sqrt(jnp.where(own > 0, own, 1))
    scaled = unit[:, None] * free(free(hessian).T) * unit
    curvatures, directions = jnp.linalg.eigh(scaled + identity - free(identity))
    wanted = unit * free(ravel_pytree(jax.grad(follower.upper)(y))[0][None])[0]
    along = jnp.where(jnp.abs(curvatures) <= FLAT, wanted @ directions, 0)
    return jnp.linalg.norm(along) > 1e-6 * jnp.linalg.norm(wanted)
