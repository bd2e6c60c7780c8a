"""Problems that several tests share, each with a point away from kinks."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bilax


class Case(NamedTuple):
    problem: bilax.Problem
    x: Any
    z: Any
    step_size: float
    data: tuple[Any, ...] = ()


def toy(x=5.0, z=1.0, step_size=5e-3) -> Case:
    """The paper's numerical example."""
    problem = bilax.Problem(
        lambda x, y: x + x * y, lambda x, y: -jnp.sin(x * y), bilax.Box(1.0, 10.0), bilax.Box(-2.0, 2.0)
    )
    return Case(problem, jnp.asarray(x), jnp.asarray(z), step_size)


def quadratic(n=3, m=4, seed=0) -> tuple[Case, Any]:
    """f = ½ yᵀA y − yᵀB x, F = ½‖y − c‖² + ½‖x‖², with the gradient of F(x, A⁻¹B x) as a function of x."""
    rng = np.random.default_rng(seed)
    half = rng.normal(size=(m, m))
    A, B, c = (
        jnp.asarray(half @ half.T / m + np.eye(m)),
        jnp.asarray(rng.normal(size=(m, n))),
        jnp.asarray(rng.normal(size=m)),
    )
    problem = bilax.Problem(
        lambda x, y, A, B, c: 0.5 * jnp.sum((y - c) ** 2) + 0.5 * jnp.sum(x**2),
        lambda x, y, A, B, c: 0.5 * y @ A @ y - y @ B @ x,
    )

    def hypergradient(x):
        response = jnp.linalg.solve(A, B)
        return x + response.T @ (response @ x - c)

    point = Case(problem, jnp.asarray(rng.normal(size=n)), jnp.asarray(rng.normal(size=m)), 0.2, (A, B, c))
    return point, hypergradient


def neural(seed=0) -> Case:
    """A two-layer network whose training loss is weighted by x: dict parameters, data, a context."""
    keys = jax.random.split(jax.random.key(seed), 5)
    inputs, targets = jax.random.normal(keys[0], (6, 3)), jax.random.normal(keys[1], (6,))
    valid, answers = jax.random.normal(keys[2], (5, 3)), jax.random.normal(keys[3], (5,))

    def predict(y, u):
        return jnp.tanh(u @ y["first"]["w"] + y["first"]["b"]) @ y["second"]

    def upper(weights, y, inputs, targets, valid, answers):
        return jnp.mean((predict(y, valid) - answers) ** 2) + 0.1 * jnp.sum(weights["rate"] ** 2)

    def lower(weights, y, inputs, targets, valid, answers):
        ridge = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(y))
        return jnp.mean(weights["each"] * (predict(y, inputs) - targets) ** 2) + weights["rate"] ** 2 * ridge

    def context(x, *_):
        return {"each": jax.nn.sigmoid(x["logits"]), "rate": x["rate"]}

    key = jax.random.split(keys[4], 4)
    x = {"logits": jax.random.normal(key[0], (6,)), "rate": jnp.asarray(0.3)}
    y = {
        "first": {"w": jax.random.normal(key[1], (3, 2)), "b": jnp.zeros(2)},
        "second": jax.random.normal(key[2], (2,)),
    }
    return Case(bilax.Problem(upper, lower, context=context), x, y, 0.1, (inputs, targets, valid, answers))


def batched(seed=0) -> Case:
    """`neural` whose follower sees two of the six examples at a time, other ones at each step."""
    case = neural(seed)

    def lower_at(k, weights, y, inputs, targets, valid, answers):
        rows = (2 * k + jnp.arange(2)) % 6
        seen = {"each": weights["each"][rows], "rate": weights["rate"]}
        return case.problem.lower(seen, y, inputs[rows], targets[rows], valid, answers)

    return case._replace(problem=dataclasses.replace(case.problem, lower_at=lower_at))


def directions(tree: Any, seed: int) -> Any:
    """A random direction like `tree`."""
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(structure, [rng.normal(size=leaf.shape) for leaf in leaves])


def central_difference(function: Any, point: Any, direction: Any, h: float = 1e-5) -> Any:
    """A fourth-order central difference of `function` along `direction`."""

    def at(t):
        return function(jax.tree.map(lambda a, b: a + t * b, point, direction))

    return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)


def one_sided_difference(function: Any, point: Any, direction: Any, h: float = 1e-5) -> Any:
    """A third-order difference of `function` along `direction`, which looks ahead alone."""

    def at(t):
        return function(jax.tree.map(lambda a, b: a + t * b, point, direction))

    return (-11 * at(0.0) + 18 * at(h) - 9 * at(2 * h) + 2 * at(3 * h)) / (6 * h)
