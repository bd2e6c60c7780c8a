"""Derivatives of the follower's optimality conditions at the point that was reached, whatever way led there.

At a solution y = T(y) with T(y) = prox_α(y − α ∇f(y)) for every α > 0, constraints and terms included. So the response
to the leader is dy = (I − ∂_y T)⁻¹ ∂_x T, which does not depend on α; T's own derivative in x has that of sets and
weights that depend on x. With D the derivative of the proximal map and H the Hessian, ∂_y T = D (I − αH), and a
cotangent v of y becomes

    u = (I − (I − αH) D)⁻¹ v,    then    (∂_x T)ᵀ u.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from bilax.follower.dynamics import FromOptax, GradientDescent, measures_itself, move
from bilax.gradient.rule import Cotangents, FollowerRun
from bilax.problem.problem import Follower
from bilax.problem.sets import Reals
from bilax.problem.terms import tangent
from bilax.problem.trees import all_finite, choose

if TYPE_CHECKING:
    from bilax.gradient.method import Method

DENSE = 400
"""up to so many follower variables the Hessian is formed and factorised"""
_POWERS = 4
"""products with the Hessian that tell its norm, where a step length is needed to see which constraints are active"""


class Implicit(eqx.Module):
    """The implicit function theorem at y_k̄.

    Where Y is the whole space this is ∇_x φ = ∂_x F − ∂²_xy f (∂²_yy f)⁻¹ ∂_y F. Active constraints, and the
    coordinates that a term such as `L1` holds at zero, are found at y itself, with a step of the inverse curvature
    there.

    Up to `dense` follower variables the system is formed and solved directly. Beyond, conjugate gradients on the face
    that is active (GMRES, where faces are curved) must reach `tolerance`, relative to the right-hand side, within
    `max_steps`; else the run ends with the status `linear_solve_failed`. `tolerance=None` takes whatever `max_steps`
    steps give, at any size. `solver` may be a lineax solver such as `lx.BiCGStab(1e-6, 1e-6)` in place of both.
    """

    tolerance: float | None = 1e-6
    max_steps: int = 100
    solver: Any = None
    dense: int = DENSE

    def keep(self, inner_steps: int) -> int | None:
        return None

    def has_z_gradient(self, inner_steps: int) -> bool:
        return False

    def check(self, method: "Method") -> None:
        if self.max_steps < 1:
            raise ValueError(f"max_steps of the linear solve must be at least 1, got {self.max_steps}.")
        if self.tolerance is not None and not self.tolerance > 0:
            raise ValueError(f"tolerance of the linear solve must be positive or None, got {self.tolerance}.")
        if self.solver is not None and not isinstance(self.solver, lx.AbstractLinearSolver):
            raise TypeError(f"solver must be a lineax solver such as lineax.CG(1e-6, 1e-6), got {self.solver!r}.")

    def pullback(self, run: FollowerRun, v: PyTree) -> Cotangents:
        y = run.y
        params_bar, error = self.cotangent(run.follower, run.params, y, v)
        solved = jnp.isfinite(error) if self.tolerance is None else error <= 2 * self.tolerance
        return Cotangents(params_bar, jax.tree.map(jnp.zeros_like, run.z), error, solved)

    def cotangent(
        self, follower: Callable[[PyTree], Follower], params: PyTree, y: PyTree, v: PyTree
    ) -> tuple[PyTree, Array]:
        """What a cotangent v of the solution y means for the parameters, and the relative error of the linear solve."""
        direct = self.solver is None and self.tolerance is not None and optax.tree.size(y) <= self.dense
        response = self._dense if direct else self._iterated
        alpha, u, error = response(follower(params), y, v)

        def proximal_step(params):
            one = follower(params)
            return one.prox(move(y, jax.grad(one.lower)(y), alpha), alpha)

        return jax.vjp(proximal_step, params)[1](u)[0], error

    def _dense(self, follower: Follower, y: PyTree, v: PyTree) -> tuple[Array, PyTree, Array]:
        """α, u and the relative error, with the Hessian and the proximal map's derivative as matrices."""
        flat, unravel = ravel_pytree(y)
        right = ravel_pytree(v)[0]
        lower = jax.grad(lambda w: follower.lower(unravel(w)))
        slope, hessian = lower(flat), jax.jacfwd(lower)(flat)
        size = jnp.max(jnp.sum(jnp.abs(hessian), axis=1))
        alpha = 1 / jnp.where(size > 0, size, 1)
        if isinstance(follower.y_set, Reals):
            u, error = _solve_dense(alpha * hessian, right, self.tolerance, symmetric=True)
            return alpha, unravel(u), error
        moved, identity = flat - alpha * slope, jnp.eye(flat.size, dtype=flat.dtype)
        face = tangent(follower.y_set, unravel(moved), alpha)
        if face is None:
            derivative = jax.jacfwd(lambda w: ravel_pytree(follower.prox(unravel(w), alpha))[0])(moved)
            u, error = _solve_dense(identity - (identity - alpha * hessian) @ derivative.T, right, self.tolerance)
            return alpha, unravel(u), error
        free = jax.vmap(lambda w: ravel_pytree(face(unravel(w)))[0])
        bend = ravel_pytree(_bend(follower, unravel(moved), alpha))[0]
        kept = free(identity)
        matrix = identity - kept + alpha * free(free(hessian).T) + alpha * jnp.diag(bend)
        w, error = _solve_dense(matrix, kept @ right, self.tolerance, symmetric=True)
        return alpha, unravel(right + w - alpha * (hessian @ w)), error

    def _iterated(self, follower: Follower, y: PyTree, v: PyTree) -> tuple[Array, PyTree, Array]:
        slope = jax.grad(follower.lower)
        moved_by, hessian = jax.linearize(slope, y)
        alpha = 1.0 if isinstance(follower.y_set, Reals) else 1 / _norm(hessian, y)
        moved = move(y, moved_by, alpha)
        face = tangent(follower.y_set, moved, alpha)
        if face is not None and self.solver is None:
            bend = _bend(follower, moved, alpha)

            def on_face(u):
                kept = face(u)
                return jax.tree.map(lambda a, b, c: a + b * c, face(hessian(kept)), bend, kept)

            right = face(v)
            w = self._conjugate_gradients(on_face, right)
            image = hessian(w)
            off = jax.tree.map(lambda a, b, c, d: a - b - c * d, right, face(image), bend, w)
            norm = optax.tree.norm(right)
            error = optax.tree.norm(off) / jnp.where(norm > 0, norm, 1)
            if isinstance(follower.y_set, Reals):
                return jnp.asarray(alpha), w, error
            # From D u = w / α: what the constraints hold answers to v − H w.
            u = jax.tree.map(lambda a, b, c: a + b / alpha - c, v, w, image)
            return jnp.asarray(alpha), u, error
        pull = jax.vjp(lambda m: follower.prox(m, alpha), moved)[1]

        def equation(u):
            kept = pull(u)[0]
            return jax.tree.map(lambda a, b, c: a - b + alpha * c, u, kept, hessian(kept))

        stop = self._stop(v)
        solver = self.solver or lx.GMRES(0.0, stop, max_steps=self.max_steps, norm=optax.tree.norm)
        return jnp.asarray(alpha), *_lineax(equation, v, solver)

    def _conjugate_gradients(self, operator: Any, right: PyTree) -> PyTree:
        norm = optax.tree.norm(right)
        scale = jnp.where(norm > 0, norm, 1)
        unit = jax.tree.map(lambda a: a / scale, right)
        w, _ = jax.scipy.sparse.linalg.cg(operator, unit, tol=0.0, atol=self._stop(right), maxiter=self.max_steps)
        # Along a direction without curvature conjugate gradients divide by zero: no answer, and the error says so.
        w = choose(all_finite(w), w, jax.tree.map(jnp.zeros_like, w))
        return jax.tree.map(lambda a: scale * a, w)

    def _stop(self, v: PyTree) -> Any:
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
        if measures_itself(method.dynamics) or isinstance(method.dynamics, FromOptax):
            raise ValueError(
                "the Neumann series needs the step length of a descent, which an optax optimiser or a line search "
                "does not tell. Use dynamics=GradientDescent(...), or derivative=bilax.Implicit()."
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


def _solve_dense(matrix: Array, right: Array, tolerance: Any, symmetric: bool = False) -> tuple[Array, Array]:
    """By a factorisation and a step of refinement; where that fails, the shortest of the least-squares solutions.

    It fails where neither 10⁻⁶ nor the tolerance is reached, and single precision hardly reaches the former.
    """
    norm, enough = jnp.linalg.norm(right), jnp.maximum(tolerance, 1e-6)
    unit = right / jnp.where(norm > 0, norm, 1)

    def error_of(solution):
        return jnp.linalg.norm(unit - matrix @ solution)

    def refined(solve):
        first = solve(unit)
        return first + solve(unit - matrix @ first)

    def eliminated():
        factors = jax.scipy.linalg.lu_factor(matrix)
        solution = refined(lambda b: jax.scipy.linalg.lu_solve(factors, b))
        # Flat directions of the follower that the leader does not care about do not respond.
        good = error_of(solution) <= enough
        return jax.lax.cond(good, lambda: solution, lambda: jnp.linalg.lstsq(matrix, unit, rcond=1e-10)[0])

    if not symmetric:
        solution = eliminated()
        return norm * solution, error_of(solution)
    # Definite, where the follower is strongly convex; else there is no such factor and its place is taken by NaN.
    factor = jax.scipy.linalg.cho_factor(matrix, lower=True)
    solution = refined(lambda b: jax.scipy.linalg.cho_solve(factor, b))
    solution = jax.lax.cond(error_of(solution) <= enough, lambda: solution, eliminated)
    return norm * solution, error_of(solution)


def _norm(hessian: Callable[[PyTree], PyTree], like: PyTree) -> Array:
    """The Hessian's norm by power iterations, a little less than it is; 1 for no curvature."""
    start = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape), like)

    def body(_, carry):
        vector, _ = carry
        image = hessian(vector)
        norm = optax.tree.norm(image)
        return jax.tree.map(lambda a: a / jnp.where(norm > 0, norm, 1), image), norm

    norm = jax.lax.fori_loop(0, _POWERS, body, (start, optax.tree.norm(start)))[1]
    return jnp.where(norm > 0, norm, 1)


def _bend(follower: Follower, moved: PyTree, alpha: Any) -> PyTree:
    """The curvature of the term itself, coordinate by coordinate, along the face: an elastic net's l2, else 0.

    The derivative of the proximal map of a term that tells its free coordinates is 1 / (1 + α · curvature) for them.
    """
    if hasattr(follower.y_set, "project") or getattr(follower.y_set, "flat", False):
        return jax.tree.map(jnp.zeros_like, moved)
    ones = jax.tree.map(jnp.ones_like, moved)
    diagonal = jax.vjp(lambda m: follower.prox(m, alpha), moved)[1](ones)[0]
    return jax.tree.map(lambda d: jnp.where(d > 0, (1 / jnp.where(d > 0, d, 1) - 1) / alpha, 0), diagonal)


def _lineax(operator: Any, right: PyTree, solver: Any) -> tuple[PyTree, Array]:
    norm = optax.tree.norm(right)
    scale = jnp.where(norm > 0, norm, 1)
    # lineax scales a relative tolerance coordinate by coordinate, which a zero makes unreachable; the right-hand side
    # is scaled to length one instead and the tolerance is absolute.
    unit = jax.tree.map(lambda a: a / scale, right)
    linear = lx.FunctionLinearOperator(operator, jax.eval_shape(lambda: unit))
    u = lx.linear_solve(linear, unit, solver, throw=False).value
    error = optax.tree.norm(jax.tree.map(jnp.subtract, unit, operator(u)))
    return jax.tree.map(lambda a: scale * a, u), error
