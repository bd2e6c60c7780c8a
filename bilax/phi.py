"""φ: the bilevel problem as a plain function of (x, z), with the method's own derivative rule."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from bilax.checks import check_objectives
from bilax.derivatives import Scene
from bilax.dynamics import residual
from bilax.methods import Method
from bilax.problem import Problem
from bilax.trajectory import ArgMax, Unrolling, unroll


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


class Phi(eqx.Module):
    """φ(x, z, *data) -> (value, info); made by `approximate`."""

    problem: Problem
    method: Method

    @eqx.filter_jit
    def __call__(self, x: PyTree, z: PyTree, *data: Any) -> tuple[Float[Array, ""], Info]:
        x, z = check_objectives(self.problem, x, z, data)
        value, info = _phi((self.problem.view(x, *data), data, z), self.problem, self.method)
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


class Tasks(eqx.Module):
    """The mean of φ over tasks: leaves of `data` have a leading axis, one entry per task; x and z are shared.

    Each task has a follower of its own, and its own k̄. Of what `info` holds, y and y_last keep the axis, solved
    tells of all tasks, and the numbers are means.
    """

    phi: Phi

    @property
    def problem(self) -> Problem:
        return self.phi.problem

    @property
    def method(self) -> Method:
        return self.phi.method

    def __call__(self, x: PyTree, z: PyTree, *data: Any) -> tuple[Float[Array, ""], Info]:
        counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(data)}
        if len(counts) != 1 or () in counts or (0,) in counts:
            raise ValueError(
                "tasks need data whose leaves have one common leading axis, the tasks; the first axes are "
                f"{sorted(counts)}."
            )
        values, each = jax.vmap(lambda *task: self.phi(x, z, *task))(*data)
        numbers = {name: jnp.mean(getattr(each, name)) for name in ("k_bar", "lower", "residual", "solve_error")}
        return jnp.mean(values), each._replace(**numbers, solved=jnp.all(each.solved))


@eqx.filter_custom_vjp
def _phi(inputs: PyTree, problem: Problem, method: Method) -> tuple[Array, Info]:
    seen, data, z = inputs
    run = _unrolling(problem, method, lambda params: params)
    trajectory = unroll(run, (seen, data), method.dynamics.init(z))
    y = method.dynamics.point(trajectory.chosen)
    return problem.upper(seen, y, *data), _info(problem, method, seen, data, trajectory)


@_phi.def_fwd
def _phi_forward(perturbed: PyTree, inputs: PyTree, problem: Problem, method: Method):
    # φ is a scalar, so its whole gradient is computed here and the backward pass only scales it. This lets
    # `info` tell how the linear solve went.
    seen, data, z = inputs
    params, rest = eqx.partition((seen, data), perturbed[:2])

    def combine(params):
        return eqx.combine(params, rest)

    run = _unrolling(problem, method, combine)
    trajectory = unroll(run, params, method.dynamics.init(z), method.derivative.keep(method.inner_steps))
    scene = Scene(problem, method, run, params, lambda params: problem.follower(*combine(params)), z, trajectory)

    def upper(params, y):
        return scene.follower(params).upper(y)

    value, (direct, v) = jax.value_and_grad(upper, (0, 1))(params, scene.y)
    pull = method.derivative.pullback(scene, v)
    params_bar = jax.tree.map(jnp.add, direct, pull.params)
    info = _info(problem, method, seen, data, trajectory)
    error = jnp.asarray(pull.solve_error, info.solve_error.dtype)
    return (value, info._replace(solve_error=error, solved=jnp.asarray(pull.solved))), (params_bar, pull.z)


@_phi.def_bwd
def _phi_backward(gradients, cotangent, perturbed, inputs, problem, method):
    scale = cotangent[0]
    if scale is None:
        return jax.tree.map(lambda _: None, eqx.filter(inputs, eqx.is_inexact_array))
    (seen_bar, data_bar), z_bar = gradients
    return jax.tree.map(lambda g: scale * g, (seen_bar, data_bar, z_bar))


def _unrolling(problem: Problem, method: Method, combine: Callable[[PyTree], PyTree]) -> Unrolling:
    dynamics, select = method.dynamics, method.select

    def step(k, params, state):
        return dynamics.step(k, state, problem.follower(*combine(params)))

    def score(params, state):
        assert isinstance(select, ArgMax)
        return select.score(problem.follower(*combine(params)), dynamics.point(state))

    return Unrolling(step, score if isinstance(select, ArgMax) else None, method.inner_steps)


def _info(problem: Problem, method: Method, seen: PyTree, data: tuple[Any, ...], trajectory: Any) -> Info:
    follower = problem.follower(seen, data)
    y = method.dynamics.point(trajectory.chosen)
    lower = follower.lower(y)
    return Info(
        y=y,
        y_last=method.dynamics.point(trajectory.last),
        k_bar=jnp.asarray(trajectory.k_bar),
        lower=lower,
        residual=residual(follower, y, method.dynamics.residual_step(method.inner_steps - 1)),
        solve_error=jnp.zeros_like(lower),
        solved=jnp.asarray(True),
    )
