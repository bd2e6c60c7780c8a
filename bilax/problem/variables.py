"""What of x0 and y0 is varied: their floating arrays. A module's other leaves stay as they are."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import PyTree

from bilax.problem.problem import Problem
from bilax.problem.sets import Set
from bilax.problem.terms import Term


class Fixed(NamedTuple):
    """The leaves of x0 and y0 that are not varied, such as a network's activation functions; None elsewhere."""

    x: PyTree = None
    y: PyTree = None

    def join_x(self, x: PyTree) -> PyTree:
        """x as the user wrote it."""
        return x if self.x is None else eqx.combine(x, self.x)

    def join_y(self, y: PyTree) -> PyTree:
        """y (or z) as the user wrote it."""
        return y if self.y is None else eqx.combine(y, self.y)


class _Joined(eqx.Module):
    """An objective of the variables alone."""

    function: Callable[..., Any]
    fixed: Fixed
    first: int = 0
    """how many arguments come before (x, y)"""
    sees_context: bool = False

    def __call__(self, *arguments: Any) -> Any:
        before, (x, y, *data) = arguments[: self.first], arguments[self.first :]
        x = x if self.sees_context else self.fixed.join_x(x)
        return self.function(*before, x, self.fixed.join_y(y), *data)


class _JoinedLeader(eqx.Module):
    """A context, or a set, of the variables of x alone."""

    function: Callable[..., Any]
    fixed: Fixed

    def __call__(self, x: PyTree, *data: Any) -> PyTree:
        return self.function(self.fixed.join_x(x), *data)


def take_variables(problem: Problem, x0: PyTree, y0: PyTree) -> tuple[Problem, PyTree, PyTree, Fixed]:
    """The problem over variables alone, and x0 and y0 without what is fixed.

    In an equinox module the floating arrays are variables and all else is fixed, numbers such as a dropout rate too;
    elsewhere every leaf is a variable.
    """
    (x, x_fixed), (y, y_fixed) = _split(x0), _split(y0)
    fixed = Fixed(x_fixed, y_fixed)
    if not jax.tree.leaves(fixed):
        return problem, x, y, Fixed()
    sees = problem.context is not None
    joined = dataclasses.replace(
        problem,
        upper=_Joined(problem.upper, fixed, 0, sees),
        lower=_Joined(problem.lower, fixed, 0, sees),
        y_set=problem.y_set if sees or isinstance(problem.y_set, Set | Term) else _JoinedLeader(problem.y_set, fixed),
        context=None if problem.context is None else _JoinedLeader(problem.context, fixed),
        lower_at=None if problem.lower_at is None else _Joined(problem.lower_at, fixed, 1, sees),
    )
    return joined, x, y, fixed


def joined_start(start: Callable[..., PyTree], fixed: Fixed) -> Callable[..., PyTree]:
    """A start (x, *data) -> y of the variables alone."""
    if not jax.tree.leaves(fixed):
        return start
    return lambda x, *data: _split(start(fixed.join_x(x), *data))[0]


def _split(point: PyTree) -> tuple[PyTree, PyTree]:
    def take(node, inverse):
        if isinstance(node, eqx.Module):
            return eqx.filter(node, eqx.is_inexact_array, inverse=inverse)
        return None if inverse else node

    def over(inverse):
        return jax.tree.map(lambda node: take(node, inverse), point, is_leaf=lambda node: isinstance(node, eqx.Module))

    return over(False), over(True)
