"""Steps that are part of the leader and learned with it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from bilax.problem.problem import Follower


class LearnedDescent(eqx.Module):
    """Projected steps whose form the leader knows: y_{k+1} = Proj_Y(y_k − direction(k, leader, ∇_y f(x, y_k))).

    `leader` is what the follower sees of x, so derivatives of the steps go to x: step lengths (`bilax.meta_sgd`), one
    for each step (`maml_pp`), or a preconditioner (`t_net`) are learned as any other part of it. The residual is
    reported for α = 1.
    """

    direction: Callable[[Any, PyTree, PyTree], PyTree]

    def init(self, y: PyTree) -> PyTree:
        return y

    def step(self, k: Any, state: PyTree, follower: Follower) -> PyTree:
        along = self.direction(k, follower.leader, jax.grad(follower.lower)(state))
        return follower.project(jax.tree.map(jnp.subtract, state, along))

    def point(self, state: PyTree) -> PyTree:
        return state

    def residual_step(self, k: Any) -> float:
        return 1.0
