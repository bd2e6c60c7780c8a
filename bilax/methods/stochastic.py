"""What the stochastic methods share: derivatives of both objectives on a batch, optimisers, and what they refuse."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from bilax.problem.problem import Problem
from bilax.problem.sets import Reals

Rate = float | Callable[[Any], Any] | optax.GradientTransformation
"""a step length, an optax schedule k -> length (k counts the steps from 0), or any optax transformation"""


def optimizer_of(name: str, rate: Rate) -> optax.GradientTransformation:
    """The transformation that a rate stands for: plain gradient steps, unless it is one already."""
    if isinstance(rate, optax.GradientTransformation):
        return rate
    if callable(rate):
        return optax.sgd(rate)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
        raise ValueError(
            f"{name} must be a positive number, an optax schedule or an optax transformation, got {rate!r}."
        )
    return optax.sgd(rate)


def moved(optimizer: optax.GradientTransformation, slope: PyTree, memory: PyTree, point: PyTree) -> tuple[Any, Any]:
    """One step of an optimiser without a set: the next point and the next memory."""
    updates, memory = optimizer.update(slope, memory, point)
    return optax.apply_updates(point, updates), memory


def refuse_sets_of_y(name: str, problem: Problem) -> None:
    """For methods whose linear system is that of a follower on the whole space."""
    if not isinstance(problem.y_set, Reals):
        raise ValueError(
            f"{name} solves ∂²_yy f v = −∂_y F, which is the response of a follower without bounds, but y_set is "
            f"{problem.y_set}. Use bilax.f2sa, bilax.meha, or a recipe such as bilax.iaptt_gm."
        )


def upper_slopes(problem: Problem, x: PyTree, y: PyTree, data: tuple[Any, ...]) -> tuple[Array, PyTree, PyTree]:
    """F, ∂_x F and ∂_y F on one batch."""
    value, slopes = jax.value_and_grad(lambda x, y: upper(problem, x, y, data), (0, 1))(x, y)
    return value, *slopes


def lower_slopes(problem: Problem, x: PyTree, y: PyTree, data: tuple[Any, ...]) -> tuple[Array, PyTree, PyTree]:
    """f, ∂_x f and ∂_y f on one batch."""
    value, slopes = jax.value_and_grad(lambda x, y: lower(problem, x, y, data), (0, 1))(x, y)
    return value, *slopes


def lower_products(
    problem: Problem, x: PyTree, y: PyTree, v: PyTree, data: tuple[Any, ...]
) -> tuple[Array, PyTree, PyTree, PyTree]:
    """f, ∂_y f, ∂²_xy f v and ∂²_yy f v on one batch, the last three from one sweep back through ∂_y f."""

    def slope(x, y):
        value, slope = jax.value_and_grad(lambda y: lower(problem, x, y, data))(y)
        return slope, value

    slope_y, pull, value = jax.vjp(slope, x, y, has_aux=True)
    cross, curved = pull(v)
    return value, slope_y, cross, curved


def upper(problem: Problem, x: PyTree, y: PyTree, data: tuple[Any, ...]) -> Array:
    """F as a function of x and y, through a context."""
    return problem.upper(problem.view(x, *data), y, *data)


def lower(problem: Problem, x: PyTree, y: PyTree, data: tuple[Any, ...]) -> Array:
    """f as a function of x and y, through a context."""
    return problem.lower(problem.view(x, *data), y, *data)


def add(*trees: PyTree) -> PyTree:
    """The sum of trees."""
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *trees)


def zeros(tree: PyTree) -> PyTree:
    """A tree like it of zeros."""
    return jax.tree.map(jnp.zeros_like, tree)
