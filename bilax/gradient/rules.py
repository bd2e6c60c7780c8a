"""Derivative rules: how the derivative of the chosen iterate y_k̄(x, z) is pulled back to x and z.

A rule is any object with

    keep(K) -> int | None       how densely the forward pass stores states (1: all, None: none)
    has_z_gradient(K) -> bool   whether its z-gradient means anything
    check(method)               raises if the method's other parts do not fit
    pullback(scene, v) -> Pull  cotangents of the parameters and of z for the cotangent v of y_k̄

The `scene` holds the problem as the rule may see it. `params` are exactly the leaves that are being
differentiated, so a rule never pays for a gradient that nobody asked for.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from bilax.follower.dynamics import FromOptax, GradientDescent, at
from bilax.follower.trajectory import Trajectory, Unrolling, replay, segment_length, sweep
from bilax.problem.problem import Follower, Problem
from bilax.problem.sets import is_flat

if TYPE_CHECKING:
    from bilax.methods.recipes import Method


class Scene(NamedTuple):
    """All that a rule may look at."""

    problem: Problem
    method: "Method"
    run: Unrolling
    params: PyTree
    """the differentiated leaves of (view of x, data)"""
    follower: Any
    """follower(params, k=None) -> Follower, as step k sees it if k is given"""
    z: PyTree
    asked: PyTree
    """which leaves of z are differentiated"""
    trajectory: Trajectory

    @property
    def y(self) -> PyTree:
        """The chosen iterate."""
        return self.method.dynamics.point(self.trajectory.chosen)


class Pull(NamedTuple):
    """Cotangents, and how well the linear solve behind them went (0 where there is none)."""

    params: PyTree
    z: PyTree
    solve_error: Any = 0.0
    """‖v − A w‖ / ‖v‖"""
    solved: Any = True


@runtime_checkable
class Derivative(Protocol):
    """What a rule must offer; see the module's docstring."""

    def keep(self, inner_steps: int) -> int | None: ...
    def has_z_gradient(self, inner_steps: int) -> bool: ...
    def check(self, method: "Method") -> None: ...
    def pullback(self, scene: Scene, v: PyTree) -> Pull: ...


class Reverse(eqx.Module):
    """Reverse mode along the trajectory, from k̄ down to k̄ − window (0 by default).

    Exact unless the window cuts it. A cut treats s_{k̄−window} as constant, so the z-gradient is then zero.
    `checkpoint=True` stores √K states in place of K and computes the others again.
    """

    window: int | None = None
    checkpoint: bool = False

    def keep(self, inner_steps: int) -> int | None:
        return segment_length(inner_steps) if self.checkpoint else 1

    def has_z_gradient(self, inner_steps: int) -> bool:
        return self.window is None or self.window >= inner_steps

    def check(self, method: "Method") -> None:
        if self.window is None:
            return
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}.")
        if self.window > method.inner_steps:
            raise ValueError(
                f"window={self.window} exceeds inner_steps={method.inner_steps}: there are no more steps to go "
                "back over. Use a smaller window, or window=None for all steps."
            )

    def pullback(self, scene: Scene, v: PyTree) -> Pull:
        dynamics, trajectory = scene.method.dynamics, scene.trajectory
        moving, rest = eqx.partition(trajectory.chosen, eqx.is_inexact_array)
        (state_bar,) = jax.vjp(lambda s: dynamics.point(eqx.combine(s, rest)), moving)[1](v)
        cut = self.window is not None and self.window < scene.method.inner_steps
        stop = jnp.maximum(trajectory.k_bar - self.window, 0) if cut else 0
        params_bar, state_bar = sweep(scene.run, scene.params, trajectory, state_bar, stop)
        (z_bar,) = jax.vjp(lambda z: eqx.filter(dynamics.init(z), eqx.is_inexact_array), scene.z)[1](state_bar)
        if cut:
            z_bar = jax.tree.map(lambda leaf: jnp.where(stop == 0, leaf, jnp.zeros_like(leaf)), z_bar)
        return Pull(params_bar, z_bar)


class Forward(eqx.Module):
    """Forward mode: one tangent of the trajectory per coordinate of the parameters and, if asked for, of z.

    Exact. Costs as many trajectories as there are coordinates, and keeps no states: for few unknowns and
    long trajectories.
    """

    def keep(self, inner_steps: int) -> int | None:
        return None

    def has_z_gradient(self, inner_steps: int) -> bool:
        return True

    def check(self, method: "Method") -> None:
        return None

    def pullback(self, scene: Scene, v: PyTree) -> Pull:
        dynamics = scene.method.dynamics
        moving, fixed = eqx.partition(scene.z, scene.asked)
        point, unravel = ravel_pytree((scene.params, moving))

        def response(flat):
            params, moving = unravel(flat)
            start = dynamics.init(eqx.combine(moving, fixed))
            return dynamics.point(replay(scene.run, params, start, scene.trajectory.k_bar))

        def along(direction):
            return optax.tree.vdot(v, jax.jvp(response, (point,), (direction,))[1])

        gradient = jnp.asarray(jax.vmap(along)(jnp.eye(point.size, dtype=point.dtype)))
        params_bar, moving_bar = unravel(gradient)
        return Pull(params_bar, eqx.combine(moving_bar, jax.tree.map(jnp.zeros_like, fixed)))


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

    def pullback(self, scene: Scene, v: PyTree) -> Pull:
        y, follower = scene.y, scene.follower(scene.params)
        alpha = scene.method.dynamics.residual_step(scene.method.inner_steps - 1)
        slope = jax.grad(follower.lower)
        moved = jax.tree.map(lambda a, g: (a - alpha * g).astype(a.dtype), y, slope(y))
        tangent = jax.vjp(follower.project, moved)[1]

        def to_tangent(u):
            return tangent(u)[0]

        def hessian(u):
            return jax.jvp(slope, (y,), (u,))[1]

        if is_flat(scene.problem.y_set):
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
            return jax.grad(scene.follower(params).lower)(y)

        (params_bar,) = jax.vjp(slope_of, scene.params)[1](jax.tree.map(jnp.negative, w))
        solved = jnp.isfinite(error) if self.tolerance is None else error <= 2 * self.tolerance
        return Pull(params_bar, jax.tree.map(jnp.zeros_like, scene.z), error, solved)

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

    def pullback(self, scene: Scene, v: PyTree) -> Pull:
        y = scene.y
        alpha = scene.method.dynamics.residual_step(scene.method.inner_steps - 1)

        def descend(params, y):
            follower: Follower = scene.follower(params)
            return GradientDescent(alpha).step(0, y, follower)

        pull = jax.vjp(descend, scene.params, y)[1]

        def add_term(_, carry):
            total, power = carry
            power = pull(power)[1]
            return jax.tree.map(jnp.add, total, power), power

        total, power = jax.lax.fori_loop(1, self.terms, add_term, (v, v))
        error = optax.tree.norm(pull(power)[1]) / (optax.tree.norm(v) + jnp.finfo(optax.tree.norm(v).dtype).tiny)
        return Pull(pull(total)[0], jax.tree.map(jnp.zeros_like, scene.z), error, jnp.isfinite(error))


class FiniteDifference(eqx.Module):
    """DARTS: the one step's second derivatives by central differences of first ones.

    For `inner_steps=1` and gradient descent only. `epsilon` is divided by ‖v‖, as in DARTS (Liu et al. 2019).
    """

    epsilon: float = 0.01

    def keep(self, inner_steps: int) -> int | None:
        return None

    def has_z_gradient(self, inner_steps: int) -> bool:
        return True

    def check(self, method: "Method") -> None:
        if method.inner_steps != 1 or not isinstance(method.dynamics, GradientDescent):
            raise ValueError(
                "the finite-difference rule stands for one step of gradient descent: set inner_steps=1 and "
                f"dynamics=GradientDescent(...), got inner_steps={method.inner_steps}, dynamics={method.dynamics}."
            )
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon}.")

    def pullback(self, scene: Scene, v: PyTree) -> Pull:
        follower = scene.follower(scene.params, 0)
        alpha = at(scene.method.dynamics.step_size, 0)  # pyright: ignore[reportAttributeAccessIssue]
        slope = jax.grad(follower.lower)(scene.z)
        moved = jax.tree.map(lambda a, g: (a - alpha * g).astype(a.dtype), scene.z, slope)
        (v,) = jax.vjp(follower.project, moved)[1](v)
        norm = optax.tree.norm(v)
        size = self.epsilon / jnp.where(norm > 0, norm, 1)

        def gradient_at(sign):
            shifted = jax.tree.map(lambda a, b: a + sign * size * b, scene.z, v)
            return jax.grad(lambda params, y: scene.follower(params, 0).lower(y), (0, 1))(scene.params, shifted)

        def minus_product(plus, minus):
            return -alpha * (plus - minus) / (2 * size)

        params_bar, curvature = jax.tree.map(minus_product, gradient_at(1.0), gradient_at(-1.0))
        return Pull(params_bar, jax.tree.map(jnp.add, v, curvature))


class FirstOrder(eqx.Module):
    """Takes the response for a shift of z: dy/dx = 0 and dy/dz = I (FOMAML)."""

    def keep(self, inner_steps: int) -> int | None:
        return None

    def has_z_gradient(self, inner_steps: int) -> bool:
        return True

    def check(self, method: "Method") -> None:
        return None

    def pullback(self, scene: Scene, v: PyTree) -> Pull:
        return Pull(jax.tree.map(jnp.zeros_like, scene.params), v)


class Displacement(eqx.Module):
    """Reptile: z moves towards where the follower went; its "gradient" is z − y_k̄, whatever F says."""

    def keep(self, inner_steps: int) -> int | None:
        return None

    def has_z_gradient(self, inner_steps: int) -> bool:
        return True

    def check(self, method: "Method") -> None:
        return None

    def pullback(self, scene: Scene, v: PyTree) -> Pull:
        return Pull(jax.tree.map(jnp.zeros_like, scene.params), jax.tree.map(jnp.subtract, scene.z, scene.y))


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
