"""First-order methods on mini-batches: how far the follower is from optimal as a penalty, no second derivatives of f.

    F²SA, F³SA      F + λ (f − f*), with one follower for f + F/λ and one for f*; `penalty` is F²SA on all data
    V-PBGD, BOME    F + λ (f − f*), (x, y) stepping together, f* by a few steps down f
    G-PBGD          F + λ ‖∂_y f‖², which does take products with second derivatives
    MEHA            F/c + f − (Moreau envelope of f)

`bvfim`, in `value_function.py`, is of this family too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from bilax.methods.algorithm import Evaluation, update, view_once
from bilax.methods.hypergradient import SGD
from bilax.methods.stochastic import (
    Mover,
    Rate,
    add,
    add_scaled,
    check_count,
    check_rate,
    corrected,
    lower_products,
    lower_slope,
    lower_slopes,
    optimizer_of,
    refuse_moving_sets,
    refuse_sets_of_y,
    refuse_terms,
    schedule_of,
    upper_slopes,
)
from bilax.problem.minibatches import Draws
from bilax.problem.problem import Problem
from bilax.problem.terms import proximal, term_value

Schedule = float | Callable[[Any], Any]


class Carry(NamedTuple):
    """x, the follower y, a second follower z, what optimisers remember, and what a method adds."""

    x: PyTree
    y: PyTree
    z: PyTree
    memory: tuple[PyTree, PyTree, PyTree]
    more: PyTree = ()


class TwoFollowers(eqx.Module):
    """F²SA: y steps on λ f + F and z on f, then x on F + λ (f(·, y) − f(·, z)); see `f2sa` and `penalty`."""

    inner_steps: int
    optimizer: optax.GradientTransformation
    y_mover: Mover
    z_mover: Mover
    weight: Callable[[Any], Any]
    fresh: bool = True
    """whether every step of a follower has batches of its own; else an outer step has one for all, its context is
    computed once, and z, which knows nothing of F, is what the solution tells"""
    residual_step: float = 1.0

    @property
    def draws(self) -> tuple[int, int]:
        return (self.inner_steps + 1, 2 * self.inner_steps + 2) if self.fresh else (1, 1)

    def init(self, problem: Problem, x0: PyTree, y0: PyTree, data: Draws) -> Carry:
        refuse_moving_sets(problem)
        return Carry(x0, y0, y0, (self.optimizer.init(x0), self.y_mover.init(y0), self.z_mover.init(y0)))

    def step(self, problem: Problem, carry: Carry, data: Draws, key: Array) -> tuple[Carry, Evaluation]:
        steps, weight, k = self.inner_steps, self.weight(data.step), data.step
        seen, x, back = (problem, carry.x, _same) if self.fresh else view_once(problem, carry.x, data.upper())

        def upper(i):
            return data.upper(i if self.fresh else 0)

        def lower(i):
            return data.lower(i if self.fresh else 0)

        def follow(i, carry):
            (y, y_memory), (z, z_memory) = carry
            slope = lower_slope(seen, x, y, lower(i))
            slope = add_scaled(upper_slopes(seen, x, y, upper(i))[2], weight, slope)
            z_slope = lower_slope(seen, x, z, lower(steps + i))
            y = self.y_mover(slope, y_memory, y, problem.y_set, k, weight)
            return y, self.z_mover(z_slope, z_memory, z, problem.y_set, k)

        began = (carry.y, carry.memory[1]), (carry.z, carry.memory[2])
        (y, y_memory), (z, z_memory) = jax.lax.fori_loop(0, steps, follow, began)
        value, upper_x, _ = upper_slopes(seen, x, y, upper(steps))
        f, lower_x, slope = lower_slopes(seen, x, y, lower(2 * steps))
        below = lower_slopes(seen, x, z, lower(2 * steps + 1))[1]
        grad_x = back(add_scaled(upper_x, weight, jax.tree.map(jnp.subtract, lower_x, below)))
        x_next, x_memory = update(self.optimizer, grad_x, carry.memory[0], carry.x, problem.x_set, step=data.step)
        total, residual = f + term_value(problem.y_set, y), _residual(problem, slope, y, self.residual_step)
        found = Evaluation(y, value, total, residual, grad_x=grad_x)
        return Carry(x_next, y, z, (x_memory, y_memory, z_memory)), found

    def point(self, carry: Carry) -> tuple[PyTree, PyTree]:
        return carry.x, carry.y if self.fresh else carry.z


def _same(slope: PyTree) -> PyTree:
    return slope


class TwoFollowersWithMomentum(eqx.Module):
    """F³SA: `TwoFollowers` with one step each and STORM on every derivative; see `f3sa`."""

    optimizer: optax.GradientTransformation
    y_mover: Mover
    z_mover: Mover
    weight: Callable[[Any], Any]
    forgetting: Callable[[Any], Any]
    draws = (2, 4)

    def init(self, problem: Problem, x0: PyTree, y0: PyTree, data: Draws) -> Carry:
        refuse_moving_sets(problem)
        point, memory = (x0, y0, y0), (self.optimizer.init(x0), self.y_mover.init(y0), self.z_mover.init(y0))
        more = point, _slopes_of_y(problem, point, data), point, _slopes_of_x(problem, point, data)[0]
        return Carry(x0, y0, y0, memory, more)

    def step(self, problem: Problem, carry: Carry, data: Draws, key: Array) -> tuple[Carry, Evaluation]:
        x, y, z, memory, (before, of_y, before_x, of_x) = carry
        # On the first step the estimates are those of this very batch, and nothing is corrected.
        share = jnp.where(data.step == 0, 1.0, self.forgetting(data.step))
        weight, k = self.weight(data.step), data.step
        of_y = corrected(_slopes_of_y(problem, (x, y, z), data), _slopes_of_y(problem, before, data), of_y, share)
        upper_y, lower_y, lower_z = of_y
        slope = add_scaled(upper_y, weight, lower_y)
        y_next, y_memory = self.y_mover(slope, memory[1], y, problem.y_set, k, weight)
        z_next, z_memory = self.z_mover(lower_z, memory[2], z, problem.y_set, k)
        here, (value, f, slope) = _slopes_of_x(problem, (x, y_next, z_next), data)
        of_x = corrected(here, _slopes_of_x(problem, before_x, data)[0], of_x, share)
        grad_x = add_scaled(of_x[0], weight, jax.tree.map(jnp.subtract, of_x[1], of_x[2]))
        x_next, x_memory = update(self.optimizer, grad_x, memory[0], x, problem.x_set, step=data.step)
        more = (x, y, z), of_y, (x, y_next, z_next), of_x
        found = Evaluation(y_next, value, f, _residual(problem, slope, y_next), grad_x=grad_x)
        return Carry(x_next, y_next, z_next, (x_memory, y_memory, z_memory), more), found

    def point(self, carry: Carry) -> tuple[PyTree, PyTree]:
        return carry.x, carry.y


def _slopes_of_y(problem: Problem, point: tuple[PyTree, ...], data: Draws) -> tuple[PyTree, PyTree, PyTree]:
    """∂_y F and ∂_y f at y, ∂_y f at z."""
    x, y, z = point
    below = lower_slope(problem, x, z, data.lower(1))
    return upper_slopes(problem, x, y, data.upper(0))[2], lower_slope(problem, x, y, data.lower(0)), below


def _slopes_of_x(problem: Problem, point: tuple[PyTree, ...], data: Draws) -> tuple[Any, Any]:
    """∂_x F and ∂_x f at y, ∂_x f at z; and F, f and ∂_y f at y."""
    x, y, z = point
    value, upper_x, _ = upper_slopes(problem, x, y, data.upper(1))
    f, lower_x, slope = lower_slopes(problem, x, y, data.lower(2))
    return (upper_x, lower_x, lower_slopes(problem, x, z, data.lower(3))[1]), (value, f, slope)


class Together(eqx.Module):
    """x and y step together down F + λ q, q a measure of how far y is from optimal; see `bome` and `v_pbgd`."""

    measure: Callable[..., Any]
    """(method, problem, x, y, z, data) -> q, ∂_x q, ∂_y q, f, ∂_y f, and the z that was found"""
    multiplier: Callable[..., Any]
    """(k, F's slopes, q, q's slopes) -> λ"""
    inner_steps: int
    inner_mover: Mover
    optimizer: optax.GradientTransformation
    y_mover: Mover
    constrained: bool = False
    carried: bool = False
    """whether z goes on from where it was"""
    draws = (1, 1)

    def init(self, problem: Problem, x0: PyTree, y0: PyTree, data: Draws) -> Carry:
        refuse_terms(problem) if self.constrained else refuse_sets_of_y(problem)
        return Carry(x0, y0, y0 if self.carried else (), (self.optimizer.init(x0), self.y_mover.init(y0), ()))

    def step(self, problem: Problem, carry: Carry, data: Draws, key: Array) -> tuple[Carry, Evaluation]:
        x, y = carry.x, carry.y
        value, *slopes = upper_slopes(problem, x, y, data.upper())
        q, q_x, q_y, f, slope, z = self.measure(self, problem, x, y, carry.z if self.carried else y, data)
        weight = self.multiplier(data.step, tuple(slopes), q, (q_x, q_y))
        grad_x, grad_y = add_scaled(slopes[0], weight, q_x), add_scaled(slopes[1], weight, q_y)
        x_next, x_memory = update(self.optimizer, grad_x, carry.memory[0], x, problem.x_set, step=data.step)
        y_next, y_memory = self.y_mover(grad_y, carry.memory[1], y, problem.y_set, data.step)
        found = Evaluation((), value, f, _residual(problem, slope, y), grad_x=grad_x)
        return Carry(x_next, y_next, z if self.carried else (), (x_memory, y_memory, ())), found

    def point(self, carry: Carry) -> tuple[PyTree, PyTree]:
        return carry.x, carry.y


def _value_gap(method: Together, problem: Problem, x: PyTree, y: PyTree, z: PyTree, data: Draws) -> tuple[Any, ...]:
    """q = f(x, y) − f(x, z), z some steps further down f and held fixed."""
    batch, move = data.lower(), method.inner_mover

    def follow(i, carry):
        z, memory = carry
        return move(lower_slope(problem, x, z, batch), memory, z, problem.y_set, i)

    f, lower_x, slope = lower_slopes(problem, x, y, batch)
    # From y the first slope is known.
    begun = (z, move.init(z)) if method.carried else move(slope, move.init(y), y, problem.y_set, 0)
    z = jax.lax.fori_loop(0 if method.carried else 1, method.inner_steps, follow, begun)[0]
    lowest, below, _ = lower_slopes(problem, x, z, batch)
    return f - lowest, jax.tree.map(jnp.subtract, lower_x, below), slope, f, slope, z


def _squared_slope(method: Together, problem: Problem, x: PyTree, y: PyTree, z: PyTree, data: Draws) -> tuple[Any, ...]:
    """q = ‖∂_y f‖²."""
    slope = lower_slope(problem, x, y, data.lower())
    f, _, cross, curved = lower_products(problem, x, y, slope, data.lower())
    q = optax.tree.norm(slope, squared=True)
    return q, optax.tree.scale(2.0, cross), optax.tree.scale(2.0, curved), f, slope, z


class BarrierMultiplier(eqx.Module):
    """BOME's λ = max(η ‖∇q‖² − ⟨∇F, ∇q⟩, 0) / ‖∇q‖², or with η q in place of η ‖∇q‖²."""

    eta: float
    by_value: bool

    def __call__(self, k: Any, slopes: PyTree, q: Array, q_slopes: PyTree) -> Array:
        size = jnp.asarray(optax.tree.norm(q_slopes, squared=True))
        wanted = self.eta * (q if self.by_value else size)
        safe = jnp.where(size > 0, size, 1)
        return jnp.where(size > 0, jnp.maximum(wanted - optax.tree.vdot(slopes, q_slopes), 0) / safe, 0)


class Weight(eqx.Module):
    """A λ that hangs on the step alone."""

    schedule: Callable[[Any], Any]

    def __call__(self, k: Any, slopes: PyTree, q: Array, q_slopes: PyTree) -> Any:
        return self.schedule(k)


class Envelope(eqx.Module):
    """θ steps towards the proximal point of f at y, then x, then y, down F/c + f − envelope; see `meha`."""

    optimizer: optax.GradientTransformation
    y_mover: Mover
    theta_mover: Mover
    gamma: float
    weight: Callable[[Any], Any]
    draws = (1, 1)

    def init(self, problem: Problem, x0: PyTree, y0: PyTree, data: Draws) -> Carry:
        refuse_moving_sets(problem)
        return Carry(x0, y0, y0, (self.optimizer.init(x0), self.y_mover.init(y0), self.theta_mover.init(y0)))

    def step(self, problem: Problem, carry: Carry, data: Draws, key: Array) -> tuple[Carry, Evaluation]:
        (x, y, theta), k, share = carry[:3], data.step, 1 / self.weight(data.step)
        pull = jax.tree.map(lambda a, b: (a - b) / self.gamma, theta, y)
        slope = add(lower_slope(problem, x, theta, data.lower()), pull)
        theta, theta_memory = self.theta_mover(slope, carry.memory[2], theta, problem.y_set, k)
        value, upper_x, _ = upper_slopes(problem, x, y, data.upper())
        f, lower_x, lower_y = lower_slopes(problem, x, y, data.lower())
        gap = jax.tree.map(jnp.subtract, lower_x, lower_slopes(problem, x, theta, data.lower())[1])
        grad_x = add_scaled(gap, share, upper_x)
        x_next, x_memory = update(self.optimizer, grad_x, carry.memory[0], x, problem.x_set, step=data.step)
        apart = jax.tree.map(lambda a, b: (a - b) / self.gamma, theta, y)
        slope = add(lower_slope(problem, x_next, y, data.lower()), apart)
        slope = add_scaled(slope, share, upper_slopes(problem, x_next, y, data.upper())[2])
        y_next, y_memory = self.y_mover(slope, carry.memory[1], y, problem.y_set, k)
        found = Evaluation((), value, f, _residual(problem, lower_y, y), grad_x=grad_x)
        return Carry(x_next, y_next, theta, (x_memory, y_memory, theta_memory)), found

    def point(self, carry: Carry) -> tuple[PyTree, PyTree]:
        return carry.x, carry.y


def _residual(problem: Problem, slope: PyTree, y: PyTree, step: float = 1.0) -> Array:
    """‖R_α(x, y)‖ for α = `step` from a slope that is known."""
    after = proximal(problem.y_set, add_scaled(y, -step, slope), step)
    return optax.tree.norm(jax.tree.map(jnp.subtract, y, after))


def _rising(k: Any) -> Any:
    return 1.0 + 0.1 * k


def f2sa(
    inner_steps: int, y_rate: Rate, x_rate: Rate, z_rate: Rate | None = None, weight: Schedule = _rising
) -> TwoFollowers:
    """F²SA (Kwon, Kwon, Wright and Nowak 2023): stochastic, first derivatives only.

    Per outer step k, `inner_steps` times with fresh batches, y −= α_k (λ_k ∂_y f(x, y) + ∂_y F(x, y)) and
    z −= γ_k ∂_y f(x, z); then x −= ξ_k (∂_x F(x, y) + λ_k (∂_x f(x, y) − ∂_x f(x, z))). Numbers and schedules of y and
    z count outer steps, optax transformations their own steps. `weight` is k -> λ_k; α_k must fall as 1/λ_k rises.
    The paper has λ_k ~ k^(1/7) where data are noisy; benchmark_bilevel's λ grows as k^(6/7). With terms in
    place of a set, the rates of y and z must be numbers or schedules. `penalty` is the same on all data.
    """
    check_count("inner_steps", inner_steps)
    movers = Mover.of("y_rate", y_rate), Mover.of("z_rate", y_rate if z_rate is None else z_rate)
    return TwoFollowers(inner_steps, optimizer_of("x_rate", x_rate), *movers, schedule_of("weight", weight))


def penalty(inner_steps: int, step_size: float, weight: Callable[[Any], Any] = _rising) -> TwoFollowers:
    """F²SA (Kwon, Kwon, Wright and Nowak 2023) on all data: descends F + λ_t (f − f*) with first derivatives only.

    Per outer step z takes `inner_steps` steps on f and y as many on f + F/λ_t; x then follows
    ∇_x F(x, y) + λ_t (∇_x f(x, y) − ∇_x f(x, z)). `weight` is t -> λ_t, rising. y and z go on from where they
    were, from y0 at first, so f* is only as good as the basin that y0 lies in: see `solve_global`. `f2sa` is for
    mini-batches; here an outer step has one for all it does.
    """
    check_count("inner_steps", inner_steps)
    check_rate("step_size", step_size)
    y_mover, z_mover = Mover(Divided(step_size, weight)), Mover.of("step_size", step_size)
    return TwoFollowers(inner_steps, SGD, y_mover, z_mover, weight, fresh=False, residual_step=step_size)


class Divided(eqx.Module):
    """A step length over a weight: a step of y on f + F/λ, written for λ f + F."""

    step_size: float
    weight: Callable[[Any], Any]

    def __call__(self, k: Any) -> Any:
        return self.step_size / self.weight(k)


def f3sa(
    y_rate: Rate, x_rate: Rate, z_rate: Rate | None = None, weight: Schedule = _rising, forgetting: Schedule = 0.1
) -> TwoFollowersWithMomentum:
    """F³SA (Kwon, Kwon, Wright and Nowak 2023): F²SA with one step of y and z and STORM on all six derivatives.

    Each estimate is d = D + (1 − η)(d − D before), with the same batch here and at the point before; λ_k weighs the
    estimates. `forgetting` is η. As in the source of arXiv 2301.10945, "Main Results for Algorithm 2": y's and z's
    are taken at (x_k, y_k, z_k) against (x_{k−1}, y_{k−1}, z_{k−1}). That x's come after the followers have moved is
    our choice.
    """
    movers = Mover.of("y_rate", y_rate), Mover.of("z_rate", y_rate if z_rate is None else z_rate)
    schedules = schedule_of("weight", weight), schedule_of("forgetting", forgetting)
    return TwoFollowersWithMomentum(optimizer_of("x_rate", x_rate), *movers, *schedules)


def bome(
    inner_steps: int, inner_rate: Rate, y_rate: Rate, x_rate: Rate, eta: float = 0.5, by_value: bool = False
) -> Together:
    """BOME (Ye, Liu, Wright, Stone and Liu 2022): (x, y) −= ∇F + λ ∇q with q = f(x, y) − f(x, z).

    z is `inner_steps` steps down f from y; λ = max(η ‖∇q‖² − ⟨∇F, ∇q⟩, 0) / ‖∇q‖², so that q falls at the rate η at
    least; `by_value` has η q for η ‖∇q‖². The paper's method is deterministic: give it all data. On mini-batches a step
    uses one of each level, and what it converges to is biased.
    """
    check_rate("eta", eta)
    parts = _value_gap, BarrierMultiplier(eta, by_value)
    return _together(*parts, inner_steps, inner_rate, y_rate, x_rate, constrained=False)


def v_pbgd(
    inner_steps: int,
    inner_rate: Rate,
    y_rate: Rate,
    x_rate: Rate,
    weight: Schedule = _rising,
    carried: bool = False,
) -> Together:
    """V-PBGD (Shen and Chen 2023): projected steps of (x, y) down F + γ_k (f(x, y) − f(x, z)).

    z is `inner_steps` steps down f, from y, or with `carried` from where it was, as in the authors' code
    (github.com/hanshen95/penalized-bilevel-gradient-descent), which also shortens the steps of x and y by
    min(1/γ_k, 1): here that is for the rates to say.
    """
    parts = _value_gap, Weight(schedule_of("weight", weight))
    return _together(*parts, inner_steps, inner_rate, y_rate, x_rate, constrained=True, carried=carried)


def g_pbgd(y_rate: Rate, x_rate: Rate, weight: Schedule = _rising) -> Together:
    """G-PBGD (Shen and Chen 2023): steps of (x, y) down F + γ_k ‖∂_y f‖²; products with second derivatives of f.

    The authors' code has γ_k/2 here.
    """
    parts = _squared_slope, Weight(schedule_of("weight", weight))
    return _together(*parts, 1, y_rate, y_rate, x_rate, constrained=False)


def _together(
    measure: Any,
    multiplier: Any,
    steps: int,
    inner: Rate,
    y: Rate,
    x: Rate,
    *,
    constrained: bool,
    carried: bool = False,
) -> Together:
    check_count("inner_steps", steps)
    movers = Mover.of("inner_rate", inner), optimizer_of("x_rate", x), Mover.of("y_rate", y)
    return Together(measure, multiplier, steps, *movers, constrained, carried)


def _slowly(k: Any) -> Any:
    return (k + 1.0) ** 0.25


def meha(
    y_rate: Rate, x_rate: Rate, theta_rate: Rate | None = None, gamma: float = 1.0, weight: Schedule = _slowly
) -> Envelope:
    """MEHA (Liu, Liu, Yao, Zeng and Zhang 2024): single loop, first derivatives, followers that need not be convex.

    θ −= η (∂_y f(x, θ) + (θ − y)/γ), x −= α (∂_x F/c_k + ∂_x f(x, y) − ∂_x f(x, θ)), then, at the new x,
    y −= β (∂_y F/c_k + ∂_y f(x, y) − (y − θ)/γ), all with proximal maps or projections. `weight` is k -> c_k, in the
    paper c (k + 1)^p with 0 < p < 1/2; γ below 1/(2ρ) for a ρ-weakly convex f. The paper's method is deterministic; on
    mini-batches a step uses one of each level. The order θ, x, y and the signs are those of the authors' code
    (github.com/LiuZhu-CV/MEHA, non_convex_1dim.py); BOAT's MESM moves y before x.
    """
    check_rate("gamma", gamma)
    movers = Mover.of("y_rate", y_rate), Mover.of("theta_rate", y_rate if theta_rate is None else theta_rate)
    return Envelope(optimizer_of("x_rate", x_rate), *movers, gamma, schedule_of("weight", weight))
