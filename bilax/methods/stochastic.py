"""What the stochastic methods share: derivatives of both objectives on a batch, optimisers, and what they refuse."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from bilax.methods.algorithm import update
from bilax.problem.problem import Problem
from bilax.problem.sets import Reals, Set
from bilax.problem.terms import Term, is_term, proximal

Rate = float | Callable[[Any], Any] | optax.GradientTransformation
"""a step length, an optax schedule k -> length (k counts the steps from 0), or any optax transformation"""


def optimizer_of(name: str, rate: Rate) -> optax.GradientTransformation:
    """The transformation that a rate stands for: plain gradient steps, unless it is one already."""
    if isinstance(rate, optax.GradientTransformation):
        return rate
    if callable(rate):
        return _by_step(rate)
    check_rate(name, rate)
    return optax.sgd(rate)


def _by_step(schedule: Callable[[Any], Any]) -> optax.GradientTransformation:
    """Gradient steps of the length schedule(k), k being the `step` that `update` and `moved` hand on.

    `optax.sgd` would count for each variable by itself, which took an eighth of a step of SOBA with 22 variables.
    """

    def update(updates: PyTree, state: PyTree, params: Any = None, *, step: Any, **more: Any) -> Any:
        length = schedule(step)
        return jax.tree.map(lambda slope: (-length * slope).astype(slope.dtype), updates), state

    return optax.GradientTransformationExtraArgs(_remembers_nothing, update)  # pyright: ignore[reportArgumentType]


def _remembers_nothing(params: PyTree) -> optax.EmptyState:
    return optax.EmptyState()


def moved(
    optimizer: optax.GradientTransformation, slope: PyTree, memory: PyTree, point: PyTree, step: Any
) -> tuple[Any, Any]:
    """One step of an optimiser without a set: the next point and the next memory."""
    return update(optimizer, slope, memory, point, Reals(), step=step)


class Mover(eqx.Module):
    """Steps of a follower that may have a set or a term: a length for each outer step, or an optax transformation."""

    length: Callable[[Any], Any] | None
    optimizer: optax.GradientTransformation | None = None

    @classmethod
    def of(cls, name: str, rate: Rate) -> "Mover":
        """What a rate stands for."""
        if isinstance(rate, optax.GradientTransformation):
            return cls(None, rate)
        return cls(schedule_of(name, rate))

    def init(self, y: PyTree) -> PyTree:
        """What is remembered before the first step."""
        return () if self.optimizer is None else self.optimizer.init(y)

    def __call__(
        self, slope: PyTree, memory: PyTree, y: PyTree, a_set: Any, k: Any, scale: Any = 1.0
    ) -> tuple[PyTree, PyTree]:
        """The next point and memory; `scale` is the weight of a term in what is descended."""
        if self.optimizer is not None:
            if is_term(a_set):
                raise ValueError(f"{a_set} needs a step length: give a number or a schedule, not an optimiser.")
            return update(self.optimizer, slope, memory, y, a_set)
        assert self.length is not None
        length = self.length(k)
        return proximal(a_set, add_scaled(y, -length, slope), length * scale), memory


def schedule_of(name: str, value: float | Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A number as the schedule that has it at every step."""
    if callable(value):
        return value
    check_rate(name, value)
    return optax.constant_schedule(value)


def check_rate(name: str, value: Any) -> None:
    """Refuses what is no positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}.")


def check_count(name: str, value: Any) -> None:
    """Refuses what does not count."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")


def refuse_sets_of_y(problem: Problem) -> None:
    """For methods whose equations are those of a follower on the whole space, ∂_y f = 0."""
    if not isinstance(problem.y_set, Reals):
        raise ValueError(
            "this method is for a follower without bounds, whose answer solves ∂_y f = 0, but y_set is "
            f"{problem.y_set}. Use bilax.f2sa, v_pbgd or meha, or a recipe such as bilax.iaptt_gm."
        )


def refuse_terms(problem: Problem) -> None:
    """For methods that project onto a fixed set."""
    if not isinstance(problem.y_set, Set):
        raise ValueError(
            f"this method projects y onto a set that stays the same, but y_set is {problem.y_set}. Use bilax.f2sa or "
            "meha for a term, a recipe such as bilax.iaptt_gm where it depends on x."
        )


def refuse_moving_sets(problem: Problem) -> None:
    """For methods that take ∂_x f at the solution for the derivative of f*, which a set that depends on x changes."""
    if not isinstance(problem.y_set, Set | Term):
        raise ValueError(
            "this method takes ∂_x f at the follower's solution for the derivative of f*(x), which does not hold where "
            "y_set depends on x. Use a recipe such as bilax.iaptt_gm."
        )


def upper_slopes(problem: Problem, x: PyTree, y: PyTree, data: tuple[Any, ...]) -> tuple[Array, PyTree, PyTree]:
    """F, ∂_x F and ∂_y F on one batch."""
    value, slopes = jax.value_and_grad(lambda x, y: upper(problem, x, y, data), (0, 1))(x, y)
    return value, *slopes


def lower_slopes(problem: Problem, x: PyTree, y: PyTree, data: tuple[Any, ...]) -> tuple[Array, PyTree, PyTree]:
    """f, ∂_x f and ∂_y f on one batch."""
    value, slopes = jax.value_and_grad(lambda x, y: lower(problem, x, y, data), (0, 1))(x, y)
    return value, *slopes


def lower_slope(problem: Problem, x: PyTree, y: PyTree, data: tuple[Any, ...]) -> PyTree:
    """∂_y f on one batch; f need not have a derivative in x."""
    return jax.grad(lambda y: lower(problem, x, y, data))(y)


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


def add_scaled(tree: PyTree, scale: Any, other: PyTree) -> PyTree:
    """tree + scale · other, in the tree's dtypes."""
    return jax.tree.map(lambda a, b: (a + scale * b).astype(a.dtype), tree, other)


def corrected(here: PyTree, before: PyTree, last: PyTree, share: Any) -> PyTree:
    """STORM's estimate: here + (1 − share)(last − before), both on the same batch (Cutkosky and Orabona 2019)."""
    return jax.tree.map(lambda a, b, c: (a + (1 - share) * (c - b)).astype(a.dtype), here, before, last)


def zeros(tree: PyTree) -> PyTree:
    """A tree like it of zeros."""
    return jax.tree.map(jnp.zeros_like, tree)
