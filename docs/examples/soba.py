"""SOBA (Dagréou, Ablin, Vaiter, Moreau 2022) as a user would add it: one stochastic step for y, v and x at a time."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import bilax


class Soba(eqx.Module):
    """Carries (x, y, v); v follows −[∂²_yy f]⁻¹ ∂_y F, the solution of the implicit gradient's linear system."""

    x_rate: float
    y_rate: float

    def init(self, problem, x0, y0, data):
        return x0, y0, jax.tree.map(jnp.zeros_like, y0)

    def step(self, problem, carry, data, key):
        x, y, v = carry

        def upper(x, y):
            return problem.upper(problem.view(x, *data), y, *data)

        def lower_slope(x, y):
            return jax.grad(lambda y: problem.lower(problem.view(x, *data), y, *data))(y)

        slope, pull = jax.vjp(lower_slope, x, y)
        cross, curved = pull(v)  # ∂²_xy f v and ∂²_yy f v
        upper_x, upper_y = jax.grad(upper, (0, 1))(x, y)
        grad_x = jax.tree.map(jnp.add, upper_x, cross)
        x_next = problem.x_set.project(optax.tree.add_scale(x, -self.x_rate, grad_x))
        y_next = problem.y_set.project(optax.tree.add_scale(y, -self.y_rate, slope))
        v_next = jax.tree.map(lambda a, b, c: a - self.y_rate * (b + c), v, curved, upper_y)
        return (x_next, y_next, v_next), bilax.evaluate(problem, x, y, data, self.y_rate, grad_x=grad_x)

    def point(self, carry):
        return carry[0], carry[1]
