"""φ: the bilevel problem as a plain function of (x, z), with the method's own derivative rule."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from bilax.follower.dynamics import cauchy_step, measures_itself, residual
from bilax.follower.trajectory import ArgMax, EveryStep, Solved, Trajectory, Unrolling, begin, unroll
from bilax.gradient.method import Method
from bilax.gradient.rule import FollowerRun
from bilax.problem.checks import check_objectives
from bilax.problem.compiled import compiled
from bilax.problem.problem import Problem


class Info(NamedTuple):
    """What a person may want to look at beside φ's value. Nothing here carries a derivative."""

    y: PyTree
    """y_k̄, where the leader's objective is taken"""
    y_last: PyTree
    """y_K"""
    k_bar: Int[Array, ""] | Float[Array, ""]
    lower: Float[Array, ""]
    """f(x, y_k̄)"""
    residual: Float[Array, ""]
    """‖R_α(x, y_k̄)‖ at the last step's α"""
    solve_error: Float[Array, ""]
    """relative error of the linear solve behind the gradient; 0 without one, or without a gradient"""
    solved: Bool[Array, ""]
    steps: Int[Array, ""] | Float[Array, ""]
    """how many steps the follower took"""


class Phi(eqx.Module):
    """φ(x, z, *data) -> (value, info); made by `approximate`."""

    problem: Problem
    method: Method

    def __hash__(self) -> int:
        # For `jax.jit`, also where a problem holds what cannot be hashed, such as bounds that are arrays.
        try:
            return super().__hash__()
        except TypeError:
            return id(self)

    @compiled
    def __call__(self, x: PyTree, z: PyTree, *data: Any) -> tuple[Float[Array, ""], Info]:
        z = self.method.start(x, *data) if callable(self.method.start) else z
        x, z = check_objectives(self.problem, x, z, data)
        phi = _summed if isinstance(self.method.select, EveryStep) else _phi
        value, info = phi((self.problem.view(x, *data), data, self.method, z), self.problem)
        return value, jax.lax.stop_gradient(info)


def approximate(problem: Problem, method: Method) -> Phi:
    """φ(x, z, *data) -> (value, info): K follower steps from z, one iterate chosen, F evaluated there.

    `jax.grad`, `jax.vmap` and `jax.jit` all work on it; its derivative is the method's rule. Any float leaf
    of x, z and data can be differentiated, and only those asked for cost anything. The linear solve of the
    implicit rules runs with the gradient, so `info.solve_error` is known only then.

        phi = bilax.approximate(problem, bilax.iaptt_gm(40, 5e-4))
        (value, info), (gx, gz) = jax.value_and_grad(phi, (0, 1), has_aux=True)(x, z)
    """
    return Phi(problem, method)


def _summed(inputs: PyTree, problem: Problem) -> tuple[Array, Info]:
    """Σ_k w_k F(x, y_k), to be differentiated as it is written: every step has a cotangent of its own."""
    view, data, method, z = inputs
    count, unrolling = method.inner_steps, _unrolling(problem, method, lambda params: params)

    def step(state, each):
        k, weight = each
        state = unrolling.step(k, (view, data, method), state)
        value = problem.upper(view, method.dynamics.point(state), *data)
        return state, (weight * value).astype(value.dtype)

    weights = method.select.weights or (1 / count,) * count
    step = jax.checkpoint(step) if method.derivative.checkpoint else step
    first = unrolling.begin((view, data, method), z)
    last, values = jax.lax.scan(step, first, (jnp.arange(count), jnp.asarray(weights)))
    reached = Trajectory(last, last, count, count, None, ())
    return jnp.sum(values), _info(problem, method, view, data, reached)


@eqx.filter_custom_vjp
def _phi(inputs: PyTree, problem: Problem) -> tuple[Array, Info]:
    view, data, method, z = inputs
    unrolling = _unrolling(problem, method, lambda params: params)
    trajectory = unroll(unrolling, (view, data, method), z)
    y = method.dynamics.point(trajectory.chosen)
    return problem.upper(view, y, *data), _info(problem, method, view, data, trajectory)


@_phi.def_fwd
def _phi_forward(perturbed: PyTree, inputs: PyTree, problem: Problem):
    # φ is a scalar, so its whole gradient is computed here and the backward pass only scales it. This lets
    # `info` tell how the linear solve went.
    view, data, method, z = inputs
    params, rest = eqx.partition((view, data, method), perturbed[:3])

    def combine(params):
        return eqx.combine(params, rest)

    def follower(params, k=None):
        return problem.follower(*combine(params)[:2], k=k)

    unrolling = _unrolling(problem, method, combine)
    trajectory = unroll(unrolling, params, z, method.derivative.keep(method.inner_steps))
    run = FollowerRun(problem, method, unrolling, params, follower, z, perturbed[3], trajectory)

    def upper(params, y):
        return follower(params).upper(y)

    value, (direct, v) = jax.value_and_grad(upper, (0, 1))(params, run.y)
    pulled = method.derivative.pullback(run, v)
    params_bar = jax.tree.map(jnp.add, direct, pulled.params)
    info = _info(problem, method, view, data, trajectory)
    error = jnp.asarray(pulled.solve_error, info.solve_error.dtype)
    return (value, info._replace(solve_error=error, solved=jnp.asarray(pulled.solved))), (*params_bar, pulled.z)


@_phi.def_bwd
def _phi_backward(gradients, cotangent, perturbed, inputs, problem):
    return scaled(gradients, cotangent[0], inputs)


def scaled(gradients: PyTree, scale: Array | None, inputs: PyTree) -> PyTree:
    """The gradients of the inputs times the cotangent of a scalar, if there is one."""
    if scale is None:
        return jax.tree.map(lambda _: None, eqx.filter(inputs, eqx.is_inexact_array))
    return jax.tree.map(lambda slope: scale * slope, gradients)


def _unrolling(problem: Problem, method: Method, combine: Callable[[PyTree], PyTree]) -> Unrolling:
    def start(params, z):
        view, data, method = combine(params)
        return begin(method.dynamics, z, problem.follower(view, data))

    def step(k, params, state):
        view, data, method = combine(params)
        return method.dynamics.step(k, state, problem.follower(view, data, k=k))

    def score(params, state):
        view, data, method = combine(params)
        return method.select.score(problem.follower(view, data), method.dynamics.point(state))

    return Unrolling(
        start,
        step,
        score if isinstance(method.select, ArgMax) else None,
        method.inner_steps,
        None if method.follower_tolerance is None else _stopping_rule(problem, method, combine),
    )


CHECK_EVERY = 10
"""A test costs a gradient, as a step does, where the dynamics does not measure itself."""


def _stopping_rule(problem: Problem, method: Method, combine: Callable[[PyTree], PyTree]) -> Solved:
    """Stops where the slope has fallen to the tolerance of what it was, or of what the curvature makes of y.

    Both grow with f and shrink with the unit of y as the slope does, so neither's scale matters. The slope is
    ‖y − prox(y − α∇f)‖ / α, with α the inverse of the curvature along the first slope.
    """
    if measures_itself(method.dynamics):

        def measured(params, state, _):
            return method.dynamics.unsolved(state) <= method.follower_tolerance  # pyright: ignore

        return Solved(lambda *_: (), measured, 1)

    def slope(params, y, alpha):
        view, data, _ = combine(params)
        return residual(problem.follower(view, data), y, alpha) / alpha

    def reference(params, state):
        view, data, _ = combine(params)
        follower, y = problem.follower(view, data), method.dynamics.point(state)
        alpha = cauchy_step(follower, y)
        curved = jax.jvp(jax.grad(follower.lower), (y,), (y,))[1]
        return alpha, jnp.maximum(slope(params, y, alpha), optax.tree.norm(curved))

    def test(params, state, reference):
        alpha, size = reference
        return slope(params, method.dynamics.point(state), alpha) <= method.follower_tolerance * size

    return Solved(reference, test, CHECK_EVERY)


def _info(problem: Problem, method: Method, view: PyTree, data: tuple[Any, ...], trajectory: Any) -> Info:
    follower = problem.follower(view, data)
    y = method.dynamics.point(trajectory.chosen)
    lower = follower.total(y)
    return Info(
        y=y,
        y_last=method.dynamics.point(trajectory.last),
        k_bar=jnp.asarray(trajectory.k_bar),
        lower=lower,
        residual=residual(follower, y, method.dynamics.residual_step(method.inner_steps - 1)),
        solve_error=jnp.zeros_like(lower),
        solved=jnp.asarray(True),
        steps=jnp.asarray(trajectory.taken),
    )
