"""PZOBO: the response of the follower by random differences, for followers without derivatives in x."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from bilax.methods.algorithm import Evaluation, update
from bilax.methods.first_order import Carry
from bilax.methods.stochastic import (
    Mover,
    Rate,
    add_scaled,
    check_count,
    check_rate,
    lower_slope,
    lower_slopes,
    optimizer_of,
    upper_slopes,
)
from bilax.problem.minibatches import Draws
from bilax.problem.problem import Problem


class Differences(eqx.Module):
    """Followers at x and at points around it, all from the same y; see `pzobo`."""

    inner_steps: int
    directions: int
    radius: float
    optimizer: optax.GradientTransformation
    y_mover: Mover

    @property
    def draws(self) -> tuple[int, int]:
        return 1, self.inner_steps + 1

    def init(self, problem: Problem, x0: PyTree, y0: PyTree, data: Draws) -> Carry:
        return Carry(x0, y0, (), (self.optimizer.init(x0), (), ()))

    def step(self, problem: Problem, carry: Carry, data: Draws, key: Array) -> tuple[Carry, Evaluation]:
        x = carry.x

        def answer(x):
            def follow(i, carry):
                y, memory = carry
                slope = lower_slope(problem, x, y, data.lower(i))
                return self.y_mover(slope, memory, y, problem.set_of_y(problem.view(x, *data.lower(i))), i)

            return jax.lax.fori_loop(0, self.inner_steps, follow, (carry.y, self.y_mover.init(carry.y)))[0]

        y = answer(x)
        value, upper_x, upper_y = upper_slopes(problem, x, y, data.upper())

        def along(key):
            u = optax.tree.random_like(key, x, jax.random.normal)
            change = jax.tree.map(jnp.subtract, answer(add_scaled(x, self.radius, u)), y)
            return optax.tree.scale(optax.tree.vdot(change, upper_y) / self.radius, u)

        spread = jax.vmap(along)(jax.random.split(key, self.directions))
        grad_x = jax.tree.map(lambda a, b: a + b.mean(0), upper_x, spread)
        x_next, memory = update(self.optimizer, grad_x, carry.memory[0], x, problem.x_set, step=data.step)
        f, _, slope = lower_slopes(problem, x, y, data.lower(self.inner_steps))
        after = problem.follower(problem.view(x, *data.lower()), ()).prox(jax.tree.map(jnp.subtract, y, slope), 1.0)
        residual = optax.tree.norm(jax.tree.map(jnp.subtract, y, after))
        return Carry(x_next, y, (), (memory, (), ())), Evaluation(y, value, f, residual, grad_x=grad_x)

    def point(self, carry: Carry) -> tuple[PyTree, PyTree]:
        return carry.x, carry.y


def pzobo(inner_steps: int, y_rate: Rate, x_rate: Rate, directions: int = 1, radius: float = 1e-2) -> Differences:
    """PZOBO (Sow, Ji and Liang 2022): ∂_x F + (1/Q) Σ_j ⟨(y(x + μ u_j) − y(x))/μ, ∂_y F⟩ u_j with normal u_j.

    y(·) is `inner_steps` steps of the follower from where it was, on the same batches for all; Q = `directions`,
    μ = `radius`. f is never differentiated in x. benchmark_bilevel's PZOBO has the same estimate; the authors' code
    (github.com/sowmaster/esjacobians) also knows directions of length 1, times the number of variables.
    """
    check_count("inner_steps", inner_steps)
    check_count("directions", directions)
    check_rate("radius", radius)
    return Differences(inner_steps, directions, radius, optimizer_of("x_rate", x_rate), Mover.of("y_rate", y_rate))
