"""Ordinary bilevel problems, written as users write them: NumPy or JAX arrays, numbers, dictionaries, data.

Each comes with a judge that knows the follower's exact answer without bilax or JAX.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.nn import softplus

import bilax
from bilax.experiments.everyday import data, judges


class Everyday(NamedTuple):
    """A problem with its start, as it goes to `solve`, and its judge."""

    problem: bilax.Problem
    x0: Any
    y0: Any
    judge: judges.Judge
    data: tuple[Any, ...] = ()


def penalties() -> Everyday:
    """A log-penalty for each of 30 features of a logistic regression; closes over NumPy arrays."""
    train, target, held_out, held_out_target = data.tumours().standardised()

    def upper(x, y):
        return softplus(-held_out_target * (held_out @ y["w"] + y["b"])).mean()

    def lower(x, y):
        return softplus(-target * (train @ y["w"] + y["b"])).mean() + jnp.sum(jnp.exp(x) * y["w"] ** 2)

    problem = bilax.Problem(upper, lower, bilax.Box(-12.0, 8.0))
    return Everyday(problem, np.full(30, -4.0), {"w": np.zeros(30), "b": 0.0}, judges.penalties())


def unscaled() -> Everyday:
    """Ten log-penalties of a logistic regression on features as they are measured, from 1e-2 to 1e3."""
    train, target, held_out, held_out_target = (jnp.asarray(part, jnp.float32) for part in data.tumours())
    train, held_out = train[:, :10], held_out[:, :10]

    def upper(x, y):
        return jnp.mean(softplus(-held_out_target * (held_out @ y["w"] + y["b"])))

    def lower(x, y):
        return jnp.mean(softplus(-target * (train @ y["w"] + y["b"]))) + jnp.sum(jnp.exp(x) * y["w"] ** 2)

    problem = bilax.Problem(upper, lower, bilax.Box(-20.0, 5.0))
    return Everyday(problem, jnp.full(10, -3.0), {"w": jnp.zeros(10), "b": jnp.zeros(())}, judges.unscaled())


def _tolls(charge: Callable[[Any], Any], judge: judges.Judge) -> Everyday:
    costs = jnp.asarray([1.0, 1.5, 2.0, 4.0], jnp.float32)

    def upper(t, y):
        return -jnp.sum(t * y[:3])

    def lower(t, y):
        return jnp.sum((costs + jnp.append(t, 0.0)) * y) + charge(y)

    problem = bilax.Problem(upper, lower, bilax.Box(0.0, 5.0), bilax.Simplex())
    return Everyday(problem, np.ones(3), np.full(4, 0.25), judge)


def tolls_entropy() -> Everyday:
    """Tolls on three of four roads; travellers minimise cost and ½ Σ y log y, which has no slope at zero."""
    return _tolls(lambda y: 0.5 * jnp.sum(y * jnp.log(y)), judges.tolls_entropy())


def tolls_squares() -> Everyday:
    """The same with ½‖y‖²: roads may be empty."""
    return _tolls(lambda y: 0.5 * jnp.sum(y**2), judges.tolls_squares())


PROBLEMS: dict[str, Callable[[], Everyday]] = {
    "penalties": penalties,
    "unscaled": unscaled,
    "tolls-entropy": tolls_entropy,
    "tolls-squares": tolls_squares,
}
"""each is made when it is called, for some read data sets"""
