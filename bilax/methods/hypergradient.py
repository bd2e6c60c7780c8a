"""The hypergradient methods as an algorithm: φ and its gradient, and an optimiser for x and for z."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from bilax.gradient.method import Method
from bilax.gradient.phi import approximate
from bilax.gradient.tasks import Tasks
from bilax.methods.algorithm import Evaluation, update
from bilax.problem.problem import Problem

SGD = optax.sgd(0.1)
"""the outer optimiser where none is given; one object, so that a second call compiles nothing"""


class Carry(NamedTuple):
    """What one outer step leaves to the next."""

    x: PyTree
    z: PyTree
    x_memory: PyTree
    z_memory: PyTree


class Hypergradient(eqx.Module):
    """Algorithm 1 of the paper with any `Method`: descends φ(x, z) in x and, for auxiliary starts, in z.

    `solve` makes it of the method and the optimisers that it is given.
    """

    method: Method
    optimizer: optax.GradientTransformation = SGD
    z_optimizer: optax.GradientTransformation | None = None
    """the same as for x if None"""
    tasks: bool = False
    mesh: Mesh | None = eqx.field(static=True, default=None)
    """the devices among which the tasks are divided"""

    def __check_init__(self):
        if self.tasks and self.method.start == "warm":
            raise ValueError(
                'start="warm" goes on from the last y_K, but with tasks=True there is one for each task. Use "fixed", '
                'or "auxiliary" to learn a common start.'
            )

    def init(self, problem: Problem, x0: PyTree, y0: PyTree, data: tuple[Any, ...]) -> Carry:
        return Carry(x0, y0, self.optimizer.init(x0), self._z_optimizer.init(y0))

    def step(self, problem: Problem, carry: Carry, data: tuple[Any, ...], key: Array) -> tuple[Carry, Evaluation]:
        phi = approximate(problem, self.method)
        phi = Tasks(phi, self.mesh) if self.tasks else phi
        x, z, x_memory, z_memory = carry
        both = (0, 1) if self.method.start == "auxiliary" else (0,)
        (value, info), (grad_x, *grad_z) = jax.value_and_grad(phi, both, has_aux=True)(x, z, *data)
        at_x = {"value": value, "grad": grad_x, "value_fn": lambda x: phi(x, z, *data)[0]}
        x_next, x_memory = update(self.optimizer, grad_x, x_memory, x, problem.x_set, **at_x)
        if self.method.start == "auxiliary":
            at_z = {"value": value, "grad": grad_z[0], "value_fn": lambda z: phi(x, z, *data)[0]}
            z, z_memory = update(self._z_optimizer, grad_z[0], z_memory, z, problem.y_set, **at_z)
        elif self.method.start == "warm":
            z = info.y_last
        found = Evaluation(
            info.y, value, info.lower, info.residual, info.k_bar, info.y_last, grad_x, grad_z, info.solved, info.steps
        )
        # Without a leader there is nothing to do once the follower is solved.
        arrived = not jax.tree.leaves(x) and self.method.follower_tolerance is not None
        return Carry(x_next, z, x_memory, z_memory), found._replace(converged=arrived, info=info)

    def point(self, carry: Carry) -> tuple[PyTree, PyTree]:
        return carry.x, carry.z

    @property
    def _z_optimizer(self) -> optax.GradientTransformation:
        return self.z_optimizer or self.optimizer
