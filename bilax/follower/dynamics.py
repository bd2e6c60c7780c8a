"""Follower dynamics: how one state of the follower becomes the next.

A dynamics is any object with

    init(y) -> state                     the state that starts at y
    step(k, state, follower) -> state    from step k to step k + 1; k may be traced
    point(state) -> y                    the iterate that the state stands for
    residual_step(k) -> α                the step length at which the residual R_α is reported

`follower` offers `upper(y)`, `lower(y)`, `project(y)` and, for terms with a proximal map, `prox(y, α)`. Nothing here
knows how derivatives are taken: a state is a pytree and a step is a function, which is all the derivative rules need.

A follower solver is a dynamics that measures itself how far it is: `Newton` also has `unsolved(state)`, which is
compared with a method's `follower_tolerance`; for the others `gradient/phi.py` measures it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from bilax.problem.problem import Follower
from bilax.problem.sets import Reals

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
    """Projected (or proximal) gradient descent, Eq. (yk_def): y_{k+1} = Proj_Y(y_k − α_k ∇_y f(x, y_k)).

    `step_size=None` finds α by itself: it begins with what the curvature along the first slope allows, halves it until
    the step descends enough and lets it grow again. A leader that changes the curvature then does no harm.
    """

    step_size: Steps | None = None

    def __check_init__(self):
        if self.step_size is not None:
            check_steps("step_size", self.step_size)

    def init(self, y: PyTree) -> PyTree:
        return y if self.step_size is not None else (y, no_search(y))

    def step(self, k: Any, state: PyTree, follower: Follower) -> PyTree:
        if self.step_size is None:
            return searched_step(follower, *state)
        alpha = at(self.step_size, k)
        return follower.prox(move(state, jax.grad(follower.lower)(state), alpha), alpha)

    def point(self, state: PyTree) -> PyTree:
        return state if self.step_size is not None else state[0]

    def unsolved(self, state: PyTree) -> Array:
        return state[-1].unsolved

    def residual_step(self, k: Any) -> Any:
        return 1.0 if self.step_size is None else at(self.step_size, k)


class Nesterov(eqx.Module):
    """Nesterov's accelerated dynamics, Eq. (yk_def2), with state (y, u, t).

    `sequence="paper"` is t_{k+1} = (1 + √(1 + t_k²))/2, exactly as the paper prints it. It lacks the
    factor 4 of FISTA (Beck and Teboulle 2009): its t tends to 4/3 and its momentum to 1/4, so the O(1/K²)
    of Theorem 3.4 is not to be had from it. `sequence="fista"` is t_{k+1} = (1 + √(1 + 4 t_k²))/2, whose
    momentum tends to 1.
    """

    step_size: Steps | None = None
    """found as for `GradientDescent` if None"""
    sequence: Literal["paper", "fista"] = "paper"

    def __check_init__(self):
        if self.step_size is not None:
            check_steps("step_size", self.step_size)
        if self.sequence not in ("paper", "fista"):
            raise ValueError(f'Nesterov(sequence=...): expected "paper" or "fista", got {self.sequence!r}.')

    def init(self, y: PyTree) -> PyTree:
        return (y, y, jnp.ones(())) if self.step_size is not None else (y, y, jnp.ones(()), no_search(y))

    def step(self, k: Any, state: PyTree, follower: Follower) -> PyTree:
        y, u, t, *search = state
        if self.step_size is None:
            y_next, *search = searched_step(follower, u, *search)
        else:
            length = at(self.step_size, k)
            y_next = follower.prox(move(u, jax.grad(follower.lower)(u), length), length)
        t_next = (1 + jnp.sqrt(1 + (4 if self.sequence == "fista" else 1) * t**2)) / 2
        u_next = jax.tree.map(lambda new, old: (new + (t - 1) / t_next * (new - old)).astype(new.dtype), y_next, y)
        return y_next, u_next, t_next, *search

    def point(self, state: PyTree) -> PyTree:
        return state[0]

    def unsolved(self, state: PyTree) -> Array:
        return state[-1].unsolved

    def residual_step(self, k: Any) -> Any:
        return 1.0 if self.step_size is None else at(self.step_size, k)


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
        alpha = at(self.step_size, k)
        return follower.prox(move(state, slope, alpha), alpha)

    def point(self, state: PyTree) -> PyTree:
        return state

    def residual_step(self, k: Any) -> Any:
        return at(self.step_size, k)


class FromOptax(eqx.Module):
    """Any optax optimiser as the follower's dynamics, projected after each update.

    Differentiating through an optimiser that divides by √v (Adam and its kin) wants `eps_root > 0`, for √v
    has no derivative where the gradient vanishes. Those that search along a line (`optax.lbfgs()`) cannot be
    differentiated step by step: use the implicit rule. The residual is reported for α = 1.
    """

    optimizer: optax.GradientTransformation

    def init(self, y: PyTree) -> PyTree:
        return y, self.optimizer.init(y)

    def step(self, k: Any, state: PyTree, follower: Follower) -> PyTree:
        y, memory = state
        value, slope = jax.value_and_grad(follower.lower)(y)
        more = {"value": value, "grad": slope, "value_fn": follower.lower}
        updates, memory = optax.with_extra_args_support(self.optimizer).update(slope, memory, y, **more)
        return follower.project(optax.apply_updates(y, updates)), memory

    def point(self, state: PyTree) -> PyTree:
        return state[0]

    def residual_step(self, k: Any) -> Any:
        return 1.0


class FromOptimistix(eqx.Module):
    """Any optimistix minimiser, such as `optimistix.BFGS(1e-8, 1e-8)`, as the follower's dynamics, on the whole space.

    Its own test of convergence is what `follower_tolerance` asks for, whatever number that is. Use the implicit rule:
    these solvers cannot be differentiated step by step.
    """

    solver: Any

    def init(self, y: PyTree) -> PyTree:
        return y, eqx.filter(self._begin(y), eqx.is_array), jnp.asarray(False)

    def step(self, k: Any, state: PyTree, follower: Follower) -> PyTree:
        if not isinstance(follower.y_set, Reals):
            raise ValueError(
                f"optimistix's minimisers know no constraints, but the follower has {follower.y_set}: use "
                "bilax.Newton(), bilax.LBFGS(), or bilax.GradientDescent()."
            )
        y, arrays, _ = state
        rest = eqx.filter(self._begin(y), eqx.is_array, inverse=True)

        def objective(y, _):
            return follower.lower(y), None

        common = None, {}
        y, memory, _ = self.solver.step(objective, y, *common, eqx.combine(arrays, rest), frozenset())
        done, _ = self.solver.terminate(objective, y, *common, memory, frozenset())
        return y, eqx.filter(memory, eqx.is_array), done

    def point(self, state: PyTree) -> PyTree:
        return state[0]

    def unsolved(self, state: PyTree) -> Array:
        return jnp.where(state[2], 0.0, jnp.inf)

    def residual_step(self, k: Any) -> Any:
        return 1.0

    def _begin(self, y: PyTree) -> Any:
        # Of the objective optimistix asks here only what it returns.
        value = jax.ShapeDtypeStruct((), dtype_of(y))
        return self.solver.init(lambda y, _: (jnp.zeros((), dtype_of(y)), None), y, None, {}, value, None, frozenset())


def residual(follower: Follower, y: PyTree, alpha: Any) -> Array:
    """‖R_α(x, y)‖ with R_α(x, y) = y − Proj_Y(y − α ∇_y f(x, y)): zero where y is stationary."""
    moved = follower.prox(move(y, jax.grad(follower.lower)(y), alpha), alpha)
    return optax.tree.norm(jax.tree.map(jnp.subtract, y, moved))


def cauchy_step(follower: Follower, y: PyTree) -> Array:
    """gᵀg / |gᵀHg|, the inverse of the curvature along the slope; 1 where it has none.

    Where the slope is zero, 1 / ‖Hv‖ for a v with entries of mean square one: ‖Hv‖ is about ‖H‖_F, no less than the
    largest curvature (Hutchinson 1990), so that a step of that length contracts.
    """
    slope = jax.grad(follower.lower)(y)
    squares = jnp.asarray(optax.tree.vdot(slope, slope))
    along = jax.tree.map(lambda one, other: jnp.where(squares > 0, one, other), slope, _probe(y))
    curved = jax.jvp(jax.grad(follower.lower), (y,), (along,))[1]
    largest = jax.lax.stop_gradient(jnp.asarray(optax.tree.norm(curved)))  # a step along no slope depends on nothing
    curvature = jnp.where(squares > 0, jnp.abs(jnp.asarray(optax.tree.vdot(slope, curved))), largest)
    usable = (curvature > 0) & jnp.isfinite(curvature)
    return jnp.where(usable, jnp.where(squares > 0, squares, 1) / jnp.where(usable, curvature, 1), 1.0)


def _probe(y: PyTree) -> PyTree:
    """√2 cos(1), √2 cos(2), …: entries of mean square one, and no pattern that a Hessian could be blind to."""
    flat, unravel = ravel_pytree(y)
    return unravel((jnp.sqrt(2.0) * jnp.cos(jnp.arange(1.0, len(flat) + 1))).astype(flat.dtype))


class Search(NamedTuple):
    """What a dynamics that finds its step length knows of it."""

    alpha: Array
    """the last length; 0 before the first step"""
    size: Array
    """what the slope is compared with: what it was at the start, or what the curvature makes of y there"""
    unsolved: Array
    """the last slope, ‖u − y⁺‖ / α, over that"""


def no_search(y: PyTree) -> Search:
    """Before the first step."""
    zero = jnp.zeros((), dtype_of(y))
    return Search(zero, zero, zero + jnp.inf)


def measures_itself(dynamics: Dynamics) -> bool:
    """Whether a dynamics tells how far it is: those that find their step length do, with a length given they do not."""
    return hasattr(dynamics, "unsolved") and getattr(dynamics, "step_size", None) is None


GROWTH = 1 / 0.9
"""of the step length, from one step to the next: doubling it would mostly be in vain, for an evaluation of f each time.
As in Becker, Candès and Grant (2011)"""


def searched_step(follower: Follower, u: PyTree, search: Search) -> tuple[PyTree, Search]:
    """A proximal gradient step from u, and what is known of its length now.

    α is halved until f(y⁺) ≤ f(u) + ⟨g, y⁺ − u⟩ + ‖y⁺ − u‖² / 2α. Where that is a matter of f's rounding, slopes tell:
    ⟨g⁺ − g, y⁺ − u⟩ ≤ ‖y⁺ − u‖² / α, the same for a quadratic f (as Hager and Zhang 2005). How often is a whole number,
    so it is constant nearby and derivatives of the step are exact.
    """

    def begin():
        curved = jax.jvp(jax.grad(follower.lower), (u,), (u,))[1]
        return cauchy_step(follower, u).astype(search.alpha.dtype), _number(optax.tree.norm(curved), search)

    grown = jnp.where(search.unsolved > 0, GROWTH, 1.0)  # where nothing moves, nothing would stop a longer step
    longest, size = jax.lax.cond(search.alpha == 0, begin, lambda: (grown * search.alpha, search.size))
    value, slope = jax.value_and_grad(follower.lower)(u)

    def at_length(length):
        return follower.prox(move(u, slope, length), length)

    def too_long(carry):
        length, halvings = carry
        trial = at_length(length)
        gone = jax.tree.map(jnp.subtract, trial, u)
        room = optax.tree.norm(gone, squared=True) / (2 * length)

        def by_values():
            return follower.lower(trial) <= value + optax.tree.vdot(slope, gone) + room

        def by_slopes():
            turned = jax.tree.map(jnp.subtract, jax.grad(follower.lower)(trial), slope)
            return optax.tree.vdot(turned, gone) <= 2 * room

        rounded = room <= 1e3 * jnp.finfo(value.dtype).eps * jnp.abs(value)
        return ~jax.lax.cond(rounded, by_slopes, by_values) & (halvings < 60)

    fixed = jax.lax.stop_gradient((longest, jnp.zeros((), int)))
    _, halvings = jax.lax.while_loop(too_long, lambda carry: (carry[0] / 2, carry[1] + 1), fixed)
    length = longest * 0.5 ** halvings.astype(longest.dtype)
    y = at_length(length)
    left = optax.tree.norm(jax.lax.stop_gradient(jax.tree.map(jnp.subtract, y, u))) / jax.lax.stop_gradient(length)
    size = jnp.where(search.alpha == 0, jnp.maximum(size, left), size)
    unsolved = jnp.where(left > 0, left / jnp.where(left > 0, size, 1), 0)
    return y, Search(length, *(_number(jax.lax.stop_gradient(one), search) for one in (size, unsolved)))


def _number(value: Any, search: Search) -> Array:
    return jnp.asarray(value, search.alpha.dtype)


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


def dtype_of(y: PyTree) -> Any:
    """The common dtype of the leaves."""
    return jnp.result_type(*jax.tree.leaves(y))


def move(y: PyTree, slope: PyTree, alpha: Any) -> PyTree:
    """y − α slope."""
    return jax.tree.map(lambda a, g: (a - alpha * g).astype(a.dtype), y, slope)
