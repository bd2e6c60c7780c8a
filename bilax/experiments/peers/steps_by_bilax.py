"""bilax's side of `bilax bench peers`: `python -m bilax.experiments.peers.steps_by_bilax`, orders by stdin."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import bilax
from bilax.experiments.peers import orders

STEPS = (1e-5, 1e-6, 1e-7, 1e-8, 1e-11)
"""Lengths of the central differences. Where the follower has a kink φ jumps, so the best of them counts; over 1,000
steps of a wide ReLU network it jumps everywhere but within the shortest."""


class Ours:
    """A case as a `Problem`, a `Method` and what `solve` is called with."""

    def __init__(self, order: dict[str, Any], given: orders.Given):
        self.problem, trees, self.data, self.tasks = KINDS[order["kind"]](given, order)
        leaves = jax.device_put((given.x, given.z))
        self.x, self.z = (jax.tree.unflatten(tree, part) for tree, part in zip(trees, leaves, strict=True))
        recipe, rule = bilax.iaptt_gm if order["worst"] else bilax.ia_gm, bilax.Reverse(checkpoint=order["checkpoint"])
        self.method = recipe(order["inner_steps"], order["step_size"], derivative=rule)
        name, rate = order["optimizer"]
        self.optimizer = {"sgd": optax.sgd, "adam": optax.adam}[name](rate)
        self.last = self.x, self.z

    def phi(self) -> Any:
        phi = bilax.approximate(self.problem, self.method)
        return bilax.Tasks(phi) if self.tasks else phi

    def gradient(self) -> tuple[np.ndarray, np.ndarray]:
        slopes, _ = jax.jit(jax.grad(self.phi(), (0, 1), has_aux=True))(self.x, self.z, *self.data)
        x, z = (orders.flat(jax.tree.leaves(part)) for part in slopes)
        return x, z

    def run(self, steps: int) -> orders.Seconds:
        return orders.seconds(lambda: jax.block_until_ready(self._solve(steps)))

    def end(self) -> tuple[np.ndarray, np.ndarray]:
        x, z = (orders.flat(jax.tree.leaves(part)) for part in self.last)
        return x, z

    def differences(self, order: dict[str, Any]) -> dict[str, float]:
        """How far the derivative along one direction is from central differences, relative; and k̄."""
        value, draw = jax.jit(self.phi()), np.random.default_rng(0)
        start, unravel = ravel_pytree((self.x, self.z))
        slope, noise = np.concatenate(self.gradient()), draw.standard_normal(start.size)
        # Partly along the slope: a random direction alone hardly meets it where there are many variables.
        along = slope / np.linalg.norm(slope) + noise / np.linalg.norm(noise)

        def at(by):
            return float(value(*unravel(start + by * along), *self.data)[0])

        found = float(along @ slope)
        errors = [abs((at(size) - at(-size)) / (2 * size) / found - 1) for size in STEPS]
        return {"differences": min(errors), "k_bar": float(value(*unravel(start), *self.data)[1].k_bar)}

    def _solve(self, steps: int) -> Any:
        options: Any = {"steps": steps, "optimizer": self.optimizer, "data": self.data, "tasks": self.tasks}
        found = bilax.solve(self.problem, self.method, self.x, self.z, **options)
        self.last = found.x, found.z
        return self.last


# What a kind needs is imported with it: what others do would count as what this one takes to start.


def _toy(given: orders.Given, order: dict[str, Any]) -> tuple[Any, ...]:
    sets = bilax.Box(1.0, 10.0), bilax.Box(-2.0, 2.0)
    problem = bilax.Problem(lambda x, y: x + x * y, lambda x, y: -jnp.sin(x * y), *sets)
    one = jax.tree.structure(0.0)
    return problem, (one, one), (), False


def _cleaning(given: orders.Given, order: dict[str, Any]) -> tuple[Any, ...]:
    from bilax.experiments.cleaning import problem as cleaning

    train, labels, validation, validation_labels = map(jnp.asarray, given.data)
    targets = [cleaning.targets(part, 10).astype(train.dtype) for part in (labels, validation_labels)]
    batch = cleaning.Batch(train, targets[0], validation, targets[1])
    network = jax.tree.structure(((0, 0), (0, 0)))
    return cleaning.problem("relu"), (jax.tree.structure(0.0), network), (batch,), False


def _few_shot(given: orders.Given, order: dict[str, Any]) -> tuple[Any, ...]:
    from bilax import models
    from bilax.datasets.episodes import Episode
    from bilax.experiments.few_shot import learners
    from bilax.models.faster_convolutions import faster_convolutions

    faster_convolutions()  # as `bilax run few-shot` does; nothing was computed yet
    episode = Episode(*jax.device_put(given.data))
    leaves = given.x or given.z[:-2]
    channels, filters = leaves[0].shape[-2:]
    like = eqx.filter_eval_shape(getattr(models, order["network"]), channels, filters, jax.random.key(0))
    network = jax.tree.unflatten(jax.tree.structure(like), jax.device_put(leaves))
    make = learners.heads if order["kind"] == "heads" else learners.networks
    learner = make(network, given.data[0][0], given.z[-1].shape[0])
    trees = jax.tree.structure(learner.x0), jax.tree.structure(learner.y0)
    return learner.problem, trees, (episode,), True


KINDS = {"toy": _toy, "cleaning": _cleaning, "heads": _few_shot, "networks": _few_shot}

if __name__ == "__main__":
    orders.serve(
        Ours,
        lambda: {"bilax": bilax.__version__, "jax": jax.__version__},
        differences=lambda order, work: work.differences(order),
    )
