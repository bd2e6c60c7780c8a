"""Follower dynamics: how one state of the follower becomes the next.

A dynamics is any object with

    init(y) -> state                     the state that starts at y
    step(k, state, follower) -> state    from step k to step k + 1; k may be traced
    point(state) -> y                    the iterate that the state stands for
    residual_step(k) -> α                the step length at which the residual R_α is reported

`follower` offers `upper(y)`, `lower(y)` and `project(y)`. Nothing here knows how derivatives are taken:
a state is a pytree and a step is a function, which is all the derivative rules need.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, PyTree

from bilax.problem.problem import Follower

Steps = float | Array | Sequence[float] | Callable[[Any], Any]
"""A constant, a sequence α_0, α_1, …, or a function k -> α_k. An array, of no or one axis, can be differentiated."""


@runtime_checkable
class Dynamics(Protocol):
    """What a dynamics must offer; see the module's docstring."""

    def init(self, y: PyTree) -> PyTree: ...
    def step(self, k: Any, state: PyTree, follower: Follower) -> PyTree: ...
    def point(self, state: PyTree) -> PyTree: ...
    def residual_step(self, k: Any) -> Any: ...


class GradientDescent(eqx.Module):
    """Projected gradient descent, Eq. (yk_def): y_{k+1} = Proj_Y(y_k − α_k ∇_y f(x, y_k))."""

    step_size: Steps

    def __check_init__(self):
        check_steps("step_size", self.step_size)

    def init(self, y: PyTree) -> PyTree:
        return y

    def step(self, k: Any, state: PyTree, follower: Follower) -> PyTree:
        return follower.project(_move(state, jax.grad(follower.lower)(state), at(self.step_size, k)))

    def point(self, state: PyTree) -> PyTree:
        return state

    def residual_step(self, k: Any) -> Any:
        return at(self.step_size, k)


class Nesterov(eqx.Module):
    """Nesterov's accelerated dynamics, Eq. (yk_def2), with state (y, u, t).

    `sequence="paper"` is t_{k+1} = (1 + √(1 + t_k²))/2, exactly as the paper prints it. It lacks the
    factor 4 of FISTA (Beck and Teboulle 2009): its t tends to 4/3 and its momentum to 1/4, so the O(1/K²)
    of Theorem 3.4 is not to be had from it. `sequence="fista"` is t_{k+1} = (1 + √(1 + 4 t_k²))/2, whose
    momentum tends to 1.
    """

    step_size: Steps
    sequence: Literal["paper", "fista"] = "paper"

    def __check_init__(self):
        check_steps("step_size", self.step_size)
        if self.sequence not in ("paper", "fista"):
            raise ValueError(f'Nesterov(sequence=...): expected "paper" or "fista", got {self.sequence!r}.')

    def init(self, y: PyTree) -> PyTree:
        return y, y, jnp.ones(())

    def step(self, k: Any, state: PyTree, follower: Follower) -> PyTree:
        y, u, t = state
        y_next = follower.project(_move(u, jax.grad(follower.lower)(u), at(self.step_size, k)))
        t_next = (1 + jnp.sqrt(1 + (4 if self.sequence == "fista" else 1) * t**2)) / 2
        u_next = jax.tree.map(lambda new, old: (new + (t - 1) / t_next * (new - old)).astype(new.dtype), y_next, y)
        return y_next, u_next, t_next

    def point(self, state: PyTree) -> PyTree:
        return state[0]

    def residual_step(self, k: Any) -> Any:
        return at(self.step_size, k)


class Aggregated(eqx.Module):
    """BDA's dynamics: descend along μ_k ∇_y F + (1 − μ_k) ∇_y f.

    `mu` is a number in (0, 1) as in the paper's appendix, a sequence, or a function k -> μ_k; BDA's own theory (Liu et
    al. 2020) asks for μ_k → 0, such as `lambda k: 0.4 / (k + 1)`.
    """

    step_size: Steps
    mu: Steps = 0.4

    def __check_init__(self):
        check_steps("step_size", self.step_size)
        check_steps("mu", self.mu, below=1.0)

    def init(self, y: PyTree) -> PyTree:
        return y

    def step(self, k: Any, state: PyTree, follower: Follower) -> PyTree:
        mu = at(self.mu, k)
        slope = jax.grad(lambda y: mu * follower.upper(y) + (1 - mu) * follower.lower(y))(state)
        return follower.project(_move(state, slope, at(self.step_size, k)))

    def point(self, state: PyTree) -> PyTree:
        return state

    def residual_step(self, k: Any) -> Any:
        return at(self.step_size, k)


class FromOptax(eqx.Module):
    """Any optax optimiser as the follower's dynamics, projected after each update.

    Differentiating through an optimiser that divides by √v (Adam and its kin) wants `eps_root > 0`, for √v
    has no derivative where the gradient vanishes. The residual is reported for α = 1.
    """

    optimizer: optax.GradientTransformation

    def init(self, y: PyTree) -> PyTree:
        return y, self.optimizer.init(y)

    def step(self, k: Any, state: PyTree, follower: Follower) -> PyTree:
        y, memory = state
        updates, memory = self.optimizer.update(jax.grad(follower.lower)(y), memory, y)
        return follower.project(optax.apply_updates(y, updates)), memory

    def point(self, state: PyTree) -> PyTree:
        return state[0]

    def residual_step(self, k: Any) -> Any:
        return 1.0


def residual(follower: Follower, y: PyTree, alpha: Any) -> Array:
    """‖R_α(x, y)‖ with R_α(x, y) = y − Proj_Y(y − α ∇_y f(x, y)): zero where y is stationary."""
    moved = follower.project(_move(y, jax.grad(follower.lower)(y), alpha))
    return optax.tree.norm(jax.tree.map(jnp.subtract, y, moved))


def at(steps: Steps, k: Any) -> Any:
    """α_k of a constant, a sequence or a function."""
    if callable(steps):
        return steps(k)
    return jnp.asarray(steps)[k] if isinstance(steps, Sequence) or np.ndim(steps) else steps


def check_steps(name: str, steps: Steps, count: int | None = None, below: float = math.inf) -> None:
    """Refuses step lengths (or weights) that are not strictly between 0 and `below`, and sequences under `count`."""
    if callable(steps):
        values = [] if count is None else [steps(k) for k in np.unique(np.linspace(0, count - 1, 16).astype(int))]
    elif (isinstance(steps, Sequence) and not isinstance(steps, str)) or np.ndim(steps):
        values = [steps] * len(steps) if isinstance(steps, Tracer) else list(steps)  # pyright: ignore
        if count is not None and len(values) < count:
            raise ValueError(f"{name} has {len(values)} entries for inner_steps={count}: give one for each step.")
    else:
        values = [steps]
    for value in values:
        if isinstance(value, Tracer):
            continue
        try:
            good = 0 < float(value) < below
        except (TypeError, ValueError):
            raise TypeError(
                f"{name} must be a positive number, a sequence of them or a function of k, got {value!r}."
            ) from None
        if not good:
            what = "be positive and finite" if below == math.inf else f"lie strictly between 0 and {below:g}"
            raise ValueError(f"{name} must {what}, got {float(value)}.")


def _move(y: PyTree, slope: PyTree, alpha: Any) -> PyTree:
    return jax.tree.map(lambda a, g: (a - alpha * g).astype(a.dtype), y, slope)
