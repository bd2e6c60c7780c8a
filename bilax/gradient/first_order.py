"""Derivatives that do without the follower's second derivatives, or take them by differences."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from bilax.follower.dynamics import GradientDescent, at, move
from bilax.gradient.rule import Cotangents, FollowerRun, StatelessRule

if TYPE_CHECKING:
    from bilax.gradient.method import Method


class FiniteDifference(StatelessRule):
    """DARTS: the one step's second derivatives by central differences of first ones.

    For `inner_steps=1` and gradient descent only. `epsilon` is divided by ‖v‖, as in DARTS (Liu et al. 2019).
    """

    epsilon: float = 0.01

    def check(self, method: "Method") -> None:
        if method.inner_steps != 1 or not isinstance(method.dynamics, GradientDescent):
            raise ValueError(
                "the finite-difference rule stands for one step of gradient descent: set inner_steps=1 and "
                f"dynamics=GradientDescent(...), got inner_steps={method.inner_steps}, dynamics={method.dynamics}."
            )
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon}.")

    def pullback(self, run: FollowerRun, v: PyTree) -> Cotangents:
        if jax.tree.leaves(run.params[2]):
            raise ValueError(
                "the finite-difference rule does not differentiate the step size: use derivative=bilax.Reverse()."
            )
        follower = run.follower(run.params, 0)
        alpha = at(run.method.dynamics.step_size, 0)  # pyright: ignore[reportAttributeAccessIssue]
        start, begin = jax.vjp(run.unrolling.begin, run.params, run.z)
        moved = move(start, jax.grad(follower.lower)(start), alpha)
        (v,) = jax.vjp(lambda m: follower.prox(m, alpha), moved)[1](v)
        norm = optax.tree.norm(v)
        size = self.epsilon / jnp.where(norm > 0, norm, 1)

        def gradient_at(sign):
            shifted = jax.tree.map(lambda a, b: a + sign * size * b, start, v)
            return jax.grad(lambda params, y: run.follower(params, 0).lower(y), (0, 1))(run.params, shifted)

        def minus_product(plus, minus):
            return -alpha * (plus - minus) / (2 * size)

        params_bar, curvature = jax.tree.map(minus_product, gradient_at(1.0), gradient_at(-1.0))
        start_bar, z_bar = begin(jax.tree.map(jnp.add, v, curvature))
        return Cotangents(jax.tree.map(jnp.add, params_bar, start_bar), z_bar)


class FirstOrder(StatelessRule):
    """Takes the response for a shift of z: dy/dx = 0 and dy/dz = I (FOMAML)."""

    def pullback(self, run: FollowerRun, v: PyTree) -> Cotangents:
        return Cotangents(jax.tree.map(jnp.zeros_like, run.params), v)


class Displacement(StatelessRule):
    """Reptile: z moves towards where the follower went; its "gradient" is z − y_k̄, whatever F says."""

    def pullback(self, run: FollowerRun, v: PyTree) -> Cotangents:
        return Cotangents(jax.tree.map(jnp.zeros_like, run.params), jax.tree.map(jnp.subtract, run.z, run.y))
