"""Several tasks as one problem, for algorithms that keep a follower for each of them from step to step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from bilax.problem.problem import Problem
from bilax.problem.sets import Each, Reals, Set
from bilax.problem.terms import EachTerm, Term


class _Over(eqx.Module):
    """An objective over all tasks at once."""

    function: Callable[..., Any]
    total: Callable[[Any], Any]
    shared: bool
    """whether all tasks see the same of the leader"""
    first: int = 0

    def __call__(self, *arguments: Any) -> Any:
        view = None if self.shared else 0
        rest = [0] * (len(arguments) - self.first - 1)
        return self.total(jax.vmap(self.function, in_axes=[None] * self.first + [view, *rest])(*arguments))


class _Contexts(eqx.Module):
    function: Callable[..., Any]

    def __call__(self, x: PyTree, *data: Any) -> PyTree:
        return jax.vmap(self.function, in_axes=[None] + [0] * len(data))(x, *data)


class _SetOfTasks(eqx.Module):
    """A set or term that depends on the leader, for all tasks at once."""

    function: Callable[..., Any]
    shared: bool

    def __call__(self, view: PyTree) -> Any:
        return _each(self.function(view)) if self.shared else _each(jax.vmap(self.function)(view), own=True)


def _each(one: Any, own: bool = False) -> Any:
    if isinstance(one, Reals):
        return one
    return Each(one, own) if isinstance(one, Set) else EachTerm(one, own)


def _mean(values: Any) -> Any:
    return values.mean()


def _sum(values: Any) -> Any:
    return values.sum()


def all_tasks(problem: Problem) -> Problem:
    """The problem of all tasks together: y and the leaves of the data have a leading axis, one entry per task.

    F is the mean over tasks and f their sum, so that each follower descends by its own gradient.
    """
    shared = problem.context is None
    return dataclasses.replace(
        problem,
        upper=_Over(problem.upper, _mean, shared),
        lower=_Over(problem.lower, _sum, shared),
        y_set=_each(problem.y_set) if isinstance(problem.y_set, Set | Term) else _SetOfTasks(problem.y_set, shared),
        context=None if problem.context is None else _Contexts(problem.context),
        lower_at=None if problem.lower_at is None else _Over(problem.lower_at, _sum, shared, 1),
    )
