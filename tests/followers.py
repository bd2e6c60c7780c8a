"""Followers of many kinds, each with what a leader of two numbers changes in it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bilax

RNG = np.random.default_rng(11)
ROWS, TARGETS = RNG.normal(size=(12, 6)), RNG.normal(size=12)
LABELS = np.sign(ROWS @ RNG.normal(size=6) + RNG.normal(size=12))
COST, SHIFT = RNG.normal(size=6), RNG.normal(size=6)
EQUATIONS, INEQUALITIES = RNG.normal(size=(2, 6)), RNG.normal(size=(5, 6))
STIFF = np.linalg.qr(RNG.normal(size=(6, 6)))[0]
STIFF = (STIFF * np.logspace(0, 6, 6)) @ STIFF.T
X = jnp.asarray([0.2, -0.4])


class FollowerCase(NamedTuple):
    """f, Y (a function of x) and a start."""

    lower: Callable[[Any, Any], Any]
    y_set: Callable[[Any], Any] = lambda x: bilax.Reals()
    start: Any = np.full(6, 0.1)
    flat: bool = True
    """whether `LBFGS` can follow the faces"""

    @property
    def problem(self) -> bilax.Problem:
        return bilax.Problem(upper, self.lower, y_set=self.y_set)


def upper(x, y):
    """Looks at every coordinate, and at x."""
    flat = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(y)])
    weights = jnp.cos(jnp.arange(flat.size, dtype=flat.dtype))
    return jnp.sum(weights * flat) + 0.5 * jnp.sum(flat**2) + 0.1 * jnp.sum(x**2)


def constants(y, *arrays):
    """In y's precision."""
    return tuple(jnp.asarray(array, y.dtype) for array in arrays)


def least_squares(x, y):
    rows, targets, shift = constants(y, ROWS, TARGETS, SHIFT)
    return 0.5 * jnp.mean((rows @ (y - x[0] * shift) - targets) ** 2) + 0.05 * jnp.exp(x[1]) * jnp.sum(y**2)


def logistic(x, y):
    rows, labels = constants(y, ROWS, LABELS)
    return jnp.mean(jax.nn.softplus(-labels * (rows @ y))) + 0.05 * jnp.exp(x[0]) * jnp.sum((y - x[1]) ** 2)


def entropy(x, y):
    (cost,) = constants(y, COST)
    return y @ (cost + x[0] * cost**2) + 0.5 * jnp.exp(x[1]) * jnp.sum(y * jnp.log(y))


def stiff(x, y):
    matrix, cost = constants(y, STIFF, COST)
    return 0.5 * y @ matrix @ y - x[0] * cost @ y - jnp.exp(x[1]) * jnp.sum(y)


def rosenbrock(x, y):
    return jnp.sum(100 * (y[1:] - jnp.exp(x[1]) * y[:-1] ** 2) ** 2 + (1 + 0 * x[0] - y[:-1]) ** 2)


def of_parts(x, y):
    flat = jnp.concatenate([y["w"], y["rest"][0][None], y["rest"][1].ravel()])
    return logistic(x, flat)


def group(x, y):
    return least_squares(x, y.ravel())


def strong(x, y):
    """Least squares whose minimum lies far away from 0, so that every set holds it."""
    return least_squares(x, y) - 0.4 * jnp.sum(y * constants(y, SHIFT)[0])


PARTS = {"w": np.full(3, 0.1), "rest": (np.asarray(0.1), np.full((2, 1), 0.1))}
FOLLOWERS = {
    "logistic": FollowerCase(logistic),
    "logistic, in parts": FollowerCase(of_parts, start=PARTS),
    "stiff": FollowerCase(stiff),
    "rosenbrock": FollowerCase(rosenbrock, start=np.full(3, -0.5)),
    "non-negative": FollowerCase(least_squares, lambda x: bilax.NonNegative()),
    "box": FollowerCase(strong, lambda x: bilax.Box(-0.2, 0.3)),
    "box of x": FollowerCase(strong, lambda x: bilax.Box(-jnp.exp(x[1]) / 3, x[0] + 0.1)),
    "simplex": FollowerCase(strong, lambda x: bilax.Simplex(), np.full(6, 1 / 6)),
    "simplex of x": FollowerCase(strong, lambda x: bilax.Simplex(jnp.exp(x[0])), np.full(6, 1 / 6)),
    "entropy": FollowerCase(entropy, lambda x: bilax.Simplex(), np.full(6, 1 / 6)),
    "lasso": FollowerCase(least_squares, lambda x: bilax.L1(0.2 * jnp.exp(x[1]))),
    "lasso, a weight each": FollowerCase(
        least_squares, lambda x: bilax.L1(0.2 * jnp.exp(x[1] * jnp.arange(6.0, dtype=x.dtype)))
    ),
    "elastic net": FollowerCase(
        least_squares, lambda x: bilax.ElasticNet(0.2 * jnp.exp(x[1]), 0.3 * jnp.exp(x[0])), flat=True
    ),
    "group lasso": FollowerCase(group, lambda x: bilax.GroupL1(0.35 * jnp.exp(x[1])), np.full((3, 2), 0.1), flat=False),
    "lq": FollowerCase(least_squares, lambda x: bilax.Lq(0.1 * jnp.exp(x[1])), np.full(6, 1.0), flat=False),
    "ball of x": FollowerCase(strong, lambda x: bilax.Ball(0.6 * jnp.exp(x[1]), x[0]), flat=False),
    "l1 ball of x": FollowerCase(strong, lambda x: bilax.L1Ball(jnp.exp(x[0]))),
    "half-space of x": FollowerCase(strong, lambda x: bilax.Halfspace(COST + x[0], x[1])),
    "hyperplane of x": FollowerCase(strong, lambda x: bilax.Hyperplane(COST + x[0], x[1])),
    "affine, of x": FollowerCase(strong, lambda x: bilax.Affine(EQUATIONS * (1 + x[0]), x)),
    "polyhedron of x": FollowerCase(
        strong, lambda x: bilax.Polyhedron(INEQUALITIES, 0.2 * jnp.exp(x[0]), EQUATIONS[:1], x[1:] / 8)
    ),
    "cone": FollowerCase(strong, lambda x: bilax.SecondOrderCone(), flat=False),
    "product of x": FollowerCase(
        of_parts,
        lambda x: bilax.Product({"w": bilax.Simplex(jnp.exp(x[0])), "rest": (bilax.Reals(), bilax.Ball(0.2))}),
        PARTS,
        flat=False,
    ),
}
