"""BVFIM: an interior-point method on the follower's value function f*(x) = min over y in Y of f(x, y)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from bilax.follower.dynamics import move
from bilax.methods.algorithm import Evaluation, evaluate, update, view_once
from bilax.methods.hypergradient import SGD
from bilax.methods.stochastic import check_count, check_rate
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
    """z descends f, y the barrier function that z makes, then the leader the same; made by `bvfim`."""

    inner_steps: int
    step_size: float
    weight: Callable[[Array], Array]
    optimizer: optax.GradientTransformation = SGD

    def __check_init__(self):
        check_count("inner_steps", self.inner_steps)
        check_rate("step_size", self.step_size)

    def init(self, problem: Problem, x0: PyTree, y0: PyTree, data: tuple[Any, ...]) -> Carry:
        return Carry(x0, y0, y0, self.optimizer.init(x0), jnp.zeros(()))

    def step(self, problem: Problem, carry: Carry, data: tuple[Any, ...], key: Array) -> tuple[Carry, Evaluation]:
        weight = self.weight(carry.taken)
        seen, view, back = view_once(problem, carry.x, data)
        follower = seen.follower(view, data)
        z = self._descend(follower, lambda z: _regularised(weight, follower.lower, z), carry.z)
        inside = functools.partial(_is_inside, weight, follower, z)
        y = self._descend(follower, lambda y: _barrier(weight, follower, y, z), z, inside)
        slope = back(eqx.filter_grad(lambda view: _barrier(weight, seen.follower(view, data), y, z))(view))
        x_next, memory = update(self.optimizer, slope, carry.memory, carry.x, problem.x_set)
        found = evaluate(seen, view, y, data, self.step_size, grad_x=slope)
        return Carry(x_next, y, z, memory, carry.taken + 1), found

    def point(self, carry: Carry) -> tuple[PyTree, PyTree]:
        return carry.x, carry.z

    def _descend(
        self,
        follower: Follower,
        f: Callable[[PyTree], Array],
        y: PyTree,
        allowed: Callable[[PyTree], Array] = lambda y: jnp.asarray(True),
    ) -> PyTree:
        """Projected descent on f; a step to where `allowed` is false is not taken, and the next are half as long."""

        def body(_, carry):
            y, alpha = carry
            trial = follower.prox(move(y, jax.grad(f)(y), alpha), alpha)
            good = allowed(trial)
            return choose(good, trial, y), jnp.where(good, alpha, alpha / 2)

        return jax.lax.fori_loop(0, self.inner_steps, body, (y, jnp.asarray(self.step_size, float)))[0]


def _falling(t: Array) -> Array:
    return 0.5 / jnp.sqrt(1.0 + t)


def bvfim(inner_steps: int, step_size: float, weight: Callable[[Array], Array] = _falling) -> ValueFunction:
    """BVFIM (Liu, Liu, Yuan, Zeng and Zhang 2021): an interior-point method on f(x, y) ≤ f*(x) + ε.

    Per outer step z takes `inner_steps` steps on f + ε/2 ‖z‖², which gives f*_ε(x); y, begun at z, takes as many
    on F + ε/2 ‖y‖² − ε log(f*_ε(x) + ε − f(x, y)), none of which may leave the interior; x follows the same
    function's x-gradient. `weight` is t -> ε_t, falling to zero; one number serves as the method's regulariser,
    barrier and slack.
    """
    return ValueFunction(inner_steps, step_size, weight)


def _barrier(weight: Array, follower: Follower, y: PyTree, z: PyTree) -> Array:
    room = _room(weight, follower, y, z)
    return _regularised(weight, follower.upper, y) - weight * jnp.log(jnp.maximum(room, jnp.finfo(room.dtype).tiny))


def _is_inside(weight: Array, follower: Follower, z: PyTree, y: PyTree) -> Array:
    return _room(weight, follower, y, z) > 0


def _room(weight: Array, follower: Follower, y: PyTree, z: PyTree) -> Array:
    return _regularised(weight, follower.lower, z) + weight - follower.lower(y)


def _regularised(weight: Array, objective: Callable[[PyTree], Array], y: PyTree) -> Array:
    return objective(y) + weight / 2 * optax.tree.norm(y, squared=True)
