"""A follower that is held near its leader."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from bilax.problem.problem import Problem


class _Near(eqx.Module):
    """f + weight/2 ‖y − x‖²."""

    function: Callable[..., Any]
    weight: Any
    first: int = 0
    """how many arguments come before (x, y)"""

    def __call__(self, *arguments: Any) -> Any:
        x, y = (eqx.filter(part, eqx.is_inexact_array) for part in arguments[self.first : self.first + 2])
        apart = jax.tree.leaves(jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), y, x))
        return self.function(*arguments) + self.weight / 2 * sum(apart)


def near_leader(problem: Problem, weight: float) -> Problem:
    """The problem whose follower also pays weight/2 ‖y − x‖², x being a tree like y (or its context one).

    For `bilax.imaml`, whose leader is the network that every task begins with and stays near to.
    """
    if isinstance(weight, bool) or not weight > 0:
        raise ValueError(f"weight must be positive, got {weight!r}.")
    at = None if problem.lower_at is None else _Near(problem.lower_at, weight, 1)
    return dataclasses.replace(problem, lower=_Near(problem.lower, weight), lower_at=at)
