"""Derivatives of the follower's optimality conditions, whatever way led there."""

from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optax
from jaxtyping import Array, PyTree

from bilax.follower.dynamics import FromOptax, GradientDescent
from bilax.gradient.rule import Cotangents, FollowerRun
from bilax.problem.problem import Follower
from bilax.problem.sets import is_flat

if TYPE_CHECKING:
    from bilax.gradient.method import Method


class Implicit(eqx.Module):
    """The implicit function theorem at y_k̄, its linear system solved by conjugate gradients.

    Where Y is the whole space this is ∇_x φ = ∂_x F − ∂²_xy f (∂²_yy f)⁻¹ ∂_y F. At an active constraint the
    system is restricted to the tangent space of the projection (for curved sets such as `Ball`, which a
    symmetric system does not describe, GMRES solves the fixed-point equation instead).

    `tolerance` is what the solve must reach, relative to the right-hand side, within `max_steps`; else the
    run ends with the status `linear_solve_failed`. `tolerance=None` takes whatever `max_steps` steps give.
    """

    tolerance: float | None = 1e-6
    max_steps: int = 100

    def keep(self, inner_steps: int) -> int | None:
        return None

    def has_z_gradient(self, inner_steps: int) -> bool:
        return False

    def check(self, method: "Method") -> None:
        if self.max_steps < 1:
            raise ValueError(f"max_steps of the linear solve must be at least 1, got {self.max_steps}.")
        if self.tolerance is not None and not self.tolerance > 0:
            raise ValueError(f"tolerance of the linear solve must be positive or None, got {self.tolerance}.")

    def pullback(self, run: FollowerRun, v: PyTree) -> Cotangents:
        y, follower = run.y, run.follower(run.params)
        alpha = run.method.dynamics.residual_step(run.method.inner_steps - 1)
        slope = jax.grad(follower.lower)
        moved = jax.tree.map(lambda a, g: (a - alpha * g).astype(a.dtype), y, slope(y))
        tangent = jax.vjp(follower.project, moved)[1]

        def to_tangent(u):
            return tangent(u)[0]

        def hessian(u):
            return jax.jvp(slope, (y,), (u,))[1]

        if is_flat(run.problem.y_set):
            solver = lx.CG(0.0, self._stop(v), max_steps=self.max_steps, norm=optax.tree.norm)
            operator, tags = lambda u: to_tangent(hessian(to_tangent(u))), lx.positive_semidefinite_tag
            w, error = _solve(operator, to_tangent(v), solver, tags)
        else:
            # u solves (I − (I − αH)D) u = v, the transposed derivative of y = Proj(y − α∇f), and w = αDu.
            def fixed_point(u):
                flat = to_tangent(u)
                return jax.tree.map(lambda a, b, c: a - b + alpha * c, u, flat, hessian(flat))

            solver = lx.GMRES(0.0, self._stop(v), max_steps=self.max_steps, norm=optax.tree.norm)
            u, error = _solve(fixed_point, v, solver, ())
            w = jax.tree.map(lambda a: alpha * a, to_tangent(u))

        def slope_of(params):
            return jax.grad(run.follower(params).lower)(y)

        (params_bar,) = jax.vjp(slope_of, run.params)[1](jax.tree.map(jnp.negative, w))
        solved = jnp.isfinite(error) if self.tolerance is None else error <= 2 * self.tolerance
        return Cotangents(params_bar, jax.tree.map(jnp.zeros_like, run.z), error, solved)

    def _stop(self, v: PyTree) -> float:
        # lineax scales a relative tolerance coordinate by coordinate, which a zero makes unreachable; the
        # right-hand side is scaled to length one instead and the tolerance is absolute.
        return float(jnp.finfo(optax.tree.norm(v).dtype).eps) if self.tolerance is None else self.tolerance


class Neumann(eqx.Module):
    """The implicit function theorem with its inverse as a series: Σ_{j<terms} (∂T/∂y)ʲ, T one descent step.

    Converges to `Implicit` where the follower's descent converges, constraints included.
    """

    terms: int = 40

    def keep(self, inner_steps: int) -> int | None:
        return None

    def has_z_gradient(self, inner_steps: int) -> bool:
        return False

    def check(self, method: "Method") -> None:
        if self.terms < 1:
            raise ValueError(f"terms must be at least 1, got {self.terms}.")
        if isinstance(method.dynamics, FromOptax):
            raise ValueError(
                "the Neumann series needs the step length of a descent, which an optax optimiser does not tell. Use "
                "dynamics=GradientDescent(...), or derivative=bilax.Implicit()."
            )

    def pullback(self, run: FollowerRun, v: PyTree) -> Cotangents:
        y = run.y
        alpha = run.method.dynamics.residual_step(run.method.inner_steps - 1)

        def descend(params, y):
            follower: Follower = run.follower(params)
            return GradientDescent(alpha).step(0, y, follower)

        pull = jax.vjp(descend, run.params, y)[1]

        def add_term(_, carry):
            total, power = carry
            power = pull(power)[1]
            return jax.tree.map(jnp.add, total, power), power

        total, power = jax.lax.fori_loop(1, self.terms, add_term, (v, v))
        error = optax.tree.norm(pull(power)[1]) / (optax.tree.norm(v) + jnp.finfo(optax.tree.norm(v).dtype).tiny)
        return Cotangents(pull(total)[0], jax.tree.map(jnp.zeros_like, run.z), error, jnp.isfinite(error))


def _solve(operator: Any, right: PyTree, solver: Any, tags: Any) -> tuple[PyTree, Array]:
    norm = optax.tree.norm(right)
    scale = jnp.where(norm > 0, norm, 1)
    unit = jax.tree.map(lambda a: a / scale, right)
    # lineax's CG takes any curvature below 100 · size · eps for zero and returns NaN; in float32 that is every
    # curvature of a follower with 10⁵ variables. Stretching the operator lowers the bar to 10⁻⁶.
    stretch = max(1.0, 1e8 * optax.tree.size(unit) * float(jnp.finfo(norm.dtype).eps))

    def stretched(u):
        return jax.tree.map(lambda a: stretch * a, operator(u))

    linear = lx.FunctionLinearOperator(stretched, jax.eval_shape(lambda: unit), tags)
    w = jax.tree.map(lambda a: stretch * a, lx.linear_solve(linear, unit, solver, throw=False).value)
    error = optax.tree.norm(jax.tree.map(jnp.subtract, unit, operator(w)))
    return jax.tree.map(lambda a: scale * a, w), error
