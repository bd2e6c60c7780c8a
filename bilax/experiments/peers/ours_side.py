"""bilax's side of `bilax bench peers`: `python -m bilax.experiments.peers.ours_side`, orders by stdin."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilax
from bilax.experiments.peers import orders
from bilax.experiments.toy import figures as toy

STEP = 1e-5
"""of the central differences, relative to the start"""


class Ours:
    """A case as a `Problem`, a `Method` and what `solve` is called with."""

    def __init__(self, order: dict[str, Any], given: orders.Given):
        self.problem, trees, self.data, self.tasks = KINDS[order["kind"]](given)
        leaves = ([jnp.asarray(leaf) for leaf in part] for part in (given.x, given.z))
        self.x, self.z = (jax.tree.unflatten(tree, part) for tree, part in zip(trees, leaves, strict=True))
        recipe = bilax.iaptt_gm if order["worst"] else bilax.ia_gm
        self.method = recipe(order["inner_steps"], order["step_size"])
        name, rate = order["optimizer"]
        self.optimizer = {"sgd": optax.sgd, "adam": optax.adam}[name](rate)
        self.last: Any = None

    def phi(self) -> Any:
        phi = bilax.approximate(self.problem, self.method)
        return bilax.Tasks(phi) if self.tasks else phi

    def gradient(self) -> tuple[np.ndarray, np.ndarray]:
        slopes, _ = jax.jit(jax.grad(self.phi(), (0, 1), has_aux=True))(self.x, self.z, *self.data)
        x, z = (orders.flat(jax.tree.leaves(part)) for part in slopes)
        return x, z

    def run(self, steps: int) -> float:
        return orders.seconds(lambda: jax.block_until_ready(self._solve(steps).x))

    def end(self) -> tuple[np.ndarray, np.ndarray]:
        x, z = (orders.flat(jax.tree.leaves(part)) for part in (self.last.x, self.last.z))
        return x, z

    def differences(self, order: dict[str, Any]) -> dict[str, float]:
        """How far the derivative along one direction is from central differences, relative; and k̄."""
        value = jax.jit(self.phi())
        draw = np.random.default_rng(0)
        start = (self.x, self.z)
        along = jax.tree.map(lambda leaf: jnp.asarray(draw.standard_normal(leaf.shape), leaf.dtype), start)
        size = STEP / max(1.0, float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(along)))))

        def at(by):
            return value(*jax.tree.map(lambda leaf, d: leaf + by * d, start, along), *self.data)[0]

        found = float(orders.flat(jax.tree.leaves(along)) @ np.concatenate(self.gradient()))
        differences = float(at(size) - at(-size)) / (2 * size)
        k_bar = float(value(*start, *self.data)[1].k_bar)
        return {"differences": abs(found - differences) / abs(differences), "k_bar": k_bar}

    def _solve(self, steps: int) -> bilax.Solution:
        options: Any = {"steps": steps, "optimizer": self.optimizer, "data": self.data, "tasks": self.tasks}
        self.last = bilax.solve(self.problem, self.method, self.x, self.z, **options)
        return self.last


def _toy(given: orders.Given) -> tuple[Any, ...]:
    one = jax.tree.structure(0.0)
    return toy.PROBLEM, (one, one), (), False


KINDS = {"toy": _toy}

if __name__ == "__main__":
    orders.serve(
        Ours,
        lambda: {"bilax": bilax.__version__, "jax": jax.__version__},
        differences=lambda order, work: work.differences(order),
    )
