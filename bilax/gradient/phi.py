"""φ: the bilevel problem as a plain function of (x, z), with the method's own derivative rule."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from bilax.follower.dynamics import residual
from bilax.follower.trajectory import ArgMax, Unrolling, unroll
from bilax.gradient.rules import Scene
from bilax.methods.recipes import Method
from bilax.problem.checks import check_objectives
from bilax.problem.problem import Problem

AT_ONCE_BYTES = 16 << 10
"""of data that tasks computed side by side on CPU have together at the most"""


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
        value, each = _mean((x, z, data), self.phi)
        each = jax.lax.stop_gradient(each)
        numbers = {name: jnp.mean(getattr(each, name)) for name in ("k_bar", "lower", "residual", "solve_error")}
        return value, each._replace(**numbers, solved=jnp.all(each.solved))


def tasks_at_once(data: PyTree) -> int:
    """How many tasks are best computed side by side: all on an accelerator, on CPU so few that they stay in cache."""
    leaves = jax.tree.leaves(data)
    count, size = len(leaves[0]), sum(leaf.nbytes for leaf in leaves)
    return count if jax.default_backend() != "cpu" else most_within(AT_ONCE_BYTES, count, size // count)


def most_within(limit: int, count: int, size: int) -> int:
    """The largest divisor of `count` that keeps so many things of `size` bytes within `limit`, or 1."""
    return max(d for d in range(1, count + 1) if count % d == 0 and (d == 1 or d * size <= limit))


@eqx.filter_custom_vjp
def _mean(inputs: PyTree, phi: Phi) -> tuple[Array, Info]:
    x, z, data = inputs
    values, each = jax.lax.map(lambda task: phi(x, z, *task), data, batch_size=tasks_at_once(data))
    return jnp.mean(values), each


@_mean.def_fwd
def _mean_forward(perturbed: PyTree, inputs: PyTree, phi: Phi):
    # As with φ itself, the gradient is computed here: forward and back through few tasks before the next ones begin,
    # which takes the memory of few.
    common, fixed = eqx.partition(inputs[:2], perturbed[:2])
    own, given = eqx.partition(inputs[2], perturbed[2])
    count, few = len(jax.tree.leaves(inputs[2])[0]), tasks_at_once(inputs[2])

    def share(common, own, given):
        x, z = eqx.combine(common, fixed)
        values, each = jax.vmap(lambda *task: phi(x, z, *eqx.combine(*task)))(own, given)
        return jnp.sum(values) / count, each

    def add(total, part):
        (value, each), (common_bar, own_bar) = jax.value_and_grad(share, (0, 1), has_aux=True)(common, *part)
        return jax.tree.map(jnp.add, total, common_bar), (value, each, own_bar)

    parts = jax.tree.map(lambda leaf: leaf.reshape(-1, few, *leaf.shape[1:]), (own, given))
    common_bar, (values, *found) = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, common), parts)
    each, own_bar = jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), found)
    return (jnp.sum(values), each), (*common_bar, own_bar)


@_mean.def_bwd
def _mean_backward(gradients, cotangent, perturbed, inputs, phi):
    return _scaled(gradients, cotangent[0], inputs)


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

    def follower(params, k=None):
        return problem.follower(*combine(params), k=k)

    run = _unrolling(problem, method, combine)
    trajectory = unroll(run, params, method.dynamics.init(z), method.derivative.keep(method.inner_steps))
    scene = Scene(problem, method, run, params, follower, z, perturbed[2], trajectory)

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
    (seen_bar, data_bar), z_bar = gradients
    return _scaled((seen_bar, data_bar, z_bar), cotangent[0], inputs)


def _scaled(gradients: PyTree, scale: Array | None, inputs: PyTree) -> PyTree:
    if scale is None:
        return jax.tree.map(lambda _: None, eqx.filter(inputs, eqx.is_inexact_array))
    return jax.tree.map(lambda slope: scale * slope, gradients)


def _unrolling(problem: Problem, method: Method, combine: Callable[[PyTree], PyTree]) -> Unrolling:
    dynamics, select = method.dynamics, method.select

    def step(k, params, state):
        return dynamics.step(k, state, problem.follower(*combine(params), k=k))

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
