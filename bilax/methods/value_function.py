"""First-order methods on the follower's value function f*(x) = min over y in Y of f(x, y)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from bilax.follower.dynamics import check_steps
from bilax.methods.algorithm import Evaluation, evaluate, gradient_through_view, update
from bilax.methods.hypergradient import SGD
from bilax.problem.problem import Follower, Problem
from bilax.problem.trees import choose


class Carry(NamedTuple):
    """x, the two followers y and z, the optimiser's memory, and how many outer steps were taken."""

    x: PyTree
    y: PyTree
    z: PyTree
    memory: PyTree
    taken: Array


class ValueFunction(eqx.Module):
    """Two followers move, then the leader descends a function of both; made by `penalty` and `bvfim`."""

    follow: Callable[..., tuple[PyTree, PyTree]]
    """(method, weight, follower, y, z) -> the followers after their steps"""
    leader: Callable[..., Array]
    """(weight, follower, y, z) -> what the leader descends"""
    inner_steps: int
    step_size: float
    weight: Callable[[Array], Array]
    optimizer: optax.GradientTransformation = SGD

    def __check_init__(self):
        if isinstance(self.inner_steps, bool) or not isinstance(self.inner_steps, int) or self.inner_steps < 1:
            raise ValueError(f"inner_steps must be a whole number of at least 1, got {self.inner_steps!r}.")
        check_steps("step_size", self.step_size)

    def init(self, problem: Problem, x0: PyTree, y0: PyTree, data: tuple[Any, ...]) -> Carry:
        return Carry(x0, y0, y0, self.optimizer.init(x0), jnp.zeros(()))

    def step(self, problem: Problem, carry: Carry, data: tuple[Any, ...], key: Array) -> tuple[Carry, Evaluation]:
        x, weight = carry.x, self.weight(carry.taken)
        view, back = gradient_through_view(problem, x, data)
        y, z = self.follow(self, weight, problem.follower(view, data), carry.y, carry.z)

        def objective(view):
            return self.leader(weight, problem.follower(view, data), y, z)

        slope = back(eqx.filter_grad(objective)(view))
        x_next, memory = update(self.optimizer, slope, carry.memory, x, problem.x_set)
        found = evaluate(problem, x, y, data, self.step_size, grad_x=slope)
        return Carry(x_next, y, z, memory, carry.taken + 1), found

    def point(self, carry: Carry) -> tuple[PyTree, PyTree]:
        return carry.x, carry.z

    def descend(
        self,
        follower: Follower,
        f: Callable[[PyTree], Array],
        y: PyTree,
        allowed: Callable[[PyTree], Array] = lambda y: jnp.asarray(True),
    ) -> PyTree:
        """Projected descent on f; a step to where `allowed` is false is not taken, and the next are half as long."""

        def body(_, carry):
            y, alpha = carry
            moved = jax.tree.map(lambda a, g: (a - alpha * g).astype(a.dtype), y, jax.grad(f)(y))
            trial = follower.prox(moved, alpha)
            good = allowed(trial)
            return choose(good, trial, y), jnp.where(good, alpha, alpha / 2)

        return jax.lax.fori_loop(0, self.inner_steps, body, (y, jnp.asarray(self.step_size, float)))[0]


def _rising(t: Array) -> Array:
    return 1.0 + 0.1 * t


def _falling(t: Array) -> Array:
    return 0.5 / jnp.sqrt(1.0 + t)


def penalty(inner_steps: int, step_size: float, weight: Callable[[Array], Array] = _rising) -> ValueFunction:
    """F²SA (Kwon, Kwon, Wright and Nowak 2023): descends F + λ_t (f − f*) with first derivatives only.

    Per outer step z takes `inner_steps` steps on f and y as many on f + F/λ_t; x then follows
    ∇_x F(x, y) + λ_t (∇_x f(x, y) − ∇_x f(x, z)). `weight` is t -> λ_t, rising. y and z go on from where they
    were, from y0 at first, so f* is only as good as the basin that y0 lies in: see `solve_global`.
    """
    return ValueFunction(_follow_penalty, _penalised, inner_steps, step_size, weight)


def bvfim(inner_steps: int, step_size: float, weight: Callable[[Array], Array] = _falling) -> ValueFunction:
    """BVFIM (Liu, Liu, Yuan, Zeng and Zhang 2021): an interior-point method on f(x, y) ≤ f*(x) + ε.

    Per outer step z takes `inner_steps` steps on f + ε/2 ‖z‖², which gives f*_ε(x); y, begun at z, takes as many
    on F + ε/2 ‖y‖² − ε log(f*_ε(x) + ε − f(x, y)), none of which may leave the interior; x follows the same
    function's x-gradient. `weight` is t -> ε_t, falling to zero; one number serves as the method's regulariser,
    barrier and slack.
    """
    return ValueFunction(_follow_barrier, _barrier, inner_steps, step_size, weight)


def _follow_penalty(
    method: ValueFunction, weight: Array, follower: Follower, y: PyTree, z: PyTree
) -> tuple[PyTree, PyTree]:
    y = method.descend(follower, lambda y: follower.lower(y) + follower.upper(y) / weight, y)
    return y, method.descend(follower, follower.lower, z)


def _penalised(weight: Array, follower: Follower, y: PyTree, z: PyTree) -> Array:
    return follower.upper(y) + weight * (follower.lower(y) - follower.lower(z))


def _follow_barrier(
    method: ValueFunction, weight: Array, follower: Follower, y: PyTree, z: PyTree
) -> tuple[PyTree, PyTree]:
    z = method.descend(follower, lambda z: _regularised(weight, follower.lower, z), z)

    def inside(y):
        return _room(weight, follower, y, z) > 0

    return method.descend(follower, lambda y: _barrier(weight, follower, y, z), z, inside), z


def _barrier(weight: Array, follower: Follower, y: PyTree, z: PyTree) -> Array:
    room = _room(weight, follower, y, z)
    return _regularised(weight, follower.upper, y) - weight * jnp.log(jnp.maximum(room, jnp.finfo(room.dtype).tiny))


def _room(weight: Array, follower: Follower, y: PyTree, z: PyTree) -> Array:
    return _regularised(weight, follower.lower, z) + weight - follower.lower(y)


def _regularised(weight: Array, objective: Callable[[PyTree], Array], y: PyTree) -> Array:
    return objective(y) + weight / 2 * optax.tree.norm(y, squared=True)
