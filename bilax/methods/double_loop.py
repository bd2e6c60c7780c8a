"""Double-loop stochastic methods: some steps of the follower, a linear system, one step of the leader; and TTSA,
SUSTAIN and MRBO, which take one step of the follower but solve the system anew each time.

All use fresh batches of the follower's examples for every product with ∂²_yy f and one batch of the leader's per step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from bilax.methods.algorithm import Evaluation, update
from bilax.methods.stochastic import (
    Rate,
    add,
    check_count,
    check_rate,
    corrected,
    lower_products,
    lower_slope,
    moved,
    optimizer_of,
    refuse_sets_of_y,
    schedule_of,
    upper_slopes,
    zeros,
)
from bilax.problem.minibatches import Draws
from bilax.problem.problem import Problem

Product = Callable[[Any, PyTree], PyTree]
"""(i, u) -> ∂²_yy f u on the i-th batch"""


class Summed(eqx.Module):
    """v = −η Σ_{q=0}^Q r_q with r_q = (I − η ∂²_yy f) r_{q−1}, r_0 = ∂_y F: a Neumann series of Q + 1 terms."""

    terms: int
    rate: float

    def solve(self, product: Product, slope: PyTree, v: PyTree, key: Array) -> PyTree:
        def body(q, carry):
            r, total = carry
            r = optax.tree.add_scale(r, -self.rate, product(q, r))
            return r, add(total, r)

        total = jax.lax.fori_loop(0, self.terms, body, (slope, slope))[1]
        return optax.tree.scale(-self.rate, total)


class Sampled(eqx.Module):
    """v = −Q η Π_{q ≤ p} (I − η ∂²_yy f_q) ∂_y F, p drawn from 0, …, Q − 1: in the mean a Neumann series of Q terms."""

    terms: int
    rate: float

    def solve(self, product: Product, slope: PyTree, v: PyTree, key: Array) -> PyTree:
        p = jax.random.randint(key, (), 0, self.terms)

        def body(q, r):
            return optax.tree.add_scale(r, -self.rate, product(q, r))

        return optax.tree.scale(-self.rate * self.terms, jax.lax.fori_loop(0, p, body, slope))


class Continued(eqx.Module):
    """Q steps v − η (∂²_yy f v + ∂_y F) from the last step's v."""

    terms: int
    rate: float

    def solve(self, product: Product, slope: PyTree, v: PyTree, key: Array) -> PyTree:
        def body(q, v):
            return optax.tree.add_scale(v, -self.rate, add(product(q, v), slope))

        return jax.lax.fori_loop(0, self.terms, body, v)


class Carry(NamedTuple):
    """The variables, and what the optimisers for x and for y remember."""

    x: PyTree
    y: PyTree
    v: PyTree
    memory: tuple[PyTree, PyTree]


class DoubleLoop(eqx.Module):
    """`inner_steps` of y, then v from `system`, then x along ∂_x F + ∂²_xy f v; see `stocbio`."""

    inner_steps: int
    system: Summed | Sampled | Continued
    optimizer: optax.GradientTransformation
    y_optimizer: optax.GradientTransformation

    def __check_init__(self):
        check_count("inner_steps", self.inner_steps)
        check_count("terms", self.system.terms)
        check_rate("v_rate", self.system.rate)

    @property
    def draws(self) -> tuple[int, int]:
        return 1, self.inner_steps + self.system.terms + 1

    def init(self, problem: Problem, x0: PyTree, y0: PyTree, data: Draws) -> Carry:
        refuse_sets_of_y(problem)
        return Carry(x0, y0, zeros(y0), (self.optimizer.init(x0), self.y_optimizer.init(y0)))

    def step(self, problem: Problem, carry: Carry, data: Draws, key: Array) -> tuple[Carry, Evaluation]:
        x, y, v, (x_memory, y_memory) = carry

        def follow(i, carry):
            slope, taken = lower_slope(problem, x, carry[0], data.lower(i)), data.step * self.inner_steps + i
            return moved(self.y_optimizer, slope, carry[1], carry[0], taken)

        y, y_memory = jax.lax.fori_loop(0, self.inner_steps, follow, (y, y_memory))
        (found,), (v,) = hypergradients(problem, self.system, ((x, y),), (v,), data, key, self.inner_steps)
        x, x_memory = update(self.optimizer, found.grad_x, x_memory, x, problem.x_set, step=data.step)
        return Carry(x, y, v, (x_memory, y_memory)), found

    def point(self, carry: Carry) -> tuple[PyTree, PyTree]:
        return carry.x, carry.y


def hypergradients(
    problem: Problem, system: Any, points: tuple[Any, ...], vs: PyTree, data: Draws, key: Array, first: int
) -> tuple[list[Evaluation], PyTree]:
    """What is found at each (x, y), with ∂_x F + ∂²_xy f v as the gradient, and v; on batches from `first` on.

    All points have the same batches, each of which is fetched once for all of them.
    """
    leader, last = data.upper(), data.lower(first + system.terms)
    upper = [upper_slopes(problem, x, y, leader) for x, y in points]

    def product(i, u):
        batch = data.lower(first + i)
        return tuple(lower_products(problem, x, y, of, batch)[3] for (x, y), of in zip(points, u, strict=True))

    vs = system.solve(product, tuple(upper_y for _, _, upper_y in upper), vs, key)
    found = []
    for (x, y), v, (value, upper_x, _) in zip(points, vs, upper, strict=True):
        f, slope, cross, _ = lower_products(problem, x, y, v, last)
        found.append(Evaluation(y, value, f, optax.tree.norm(slope), grad_x=add(upper_x, cross)))
    return found, vs


class StormCarry(NamedTuple):
    """The variables now and before, the two estimates, and what the optimisers remember."""

    x: PyTree
    y: PyTree
    before: tuple[PyTree, PyTree]
    slopes: tuple[PyTree, PyTree]
    memory: tuple[PyTree, PyTree]


class Storm(eqx.Module):
    """x and y step along d = D + (1 − η)(d − D before), D the hypergradient and ∂_y f; see `sustain` and `mrbo`."""

    system: Summed | Sampled
    optimizer: optax.GradientTransformation
    y_optimizer: optax.GradientTransformation
    forgetting: Callable[[Any], Any]

    def __check_init__(self):
        check_count("terms", self.system.terms)
        check_rate("v_rate", self.system.rate)

    @property
    def draws(self) -> tuple[int, int]:
        return 1, self.system.terms + 2

    def init(self, problem: Problem, x0: PyTree, y0: PyTree, data: Draws) -> StormCarry:
        refuse_sets_of_y(problem)
        return StormCarry(
            x0, y0, (x0, y0), (zeros(x0), zeros(y0)), (self.optimizer.init(x0), self.y_optimizer.init(y0))
        )

    def step(self, problem: Problem, carry: StormCarry, data: Draws, key: Array) -> tuple[StormCarry, Evaluation]:
        x, y, before, slopes, (x_memory, y_memory) = carry

        points, batch = ((x, y), before), data.lower()
        (found, earlier), _ = hypergradients(problem, self.system, points, (), data, key, 1)
        slope, slope_before = (lower_slope(problem, *point, batch) for point in points)
        # Before the first step there is nothing to correct.
        share = jnp.where(data.step == 0, 1.0, self.forgetting(data.step))
        slopes = corrected((found.grad_x, slope), (earlier.grad_x, slope_before), slopes, share)
        x_next, x_memory = update(self.optimizer, slopes[0], x_memory, x, problem.x_set, step=data.step)
        y_next, y_memory = moved(self.y_optimizer, slopes[1], y_memory, y, data.step)
        after = StormCarry(x_next, y_next, (x, y), slopes, (x_memory, y_memory))
        return after, found._replace(grad_x=slopes[0])

    def point(self, carry: StormCarry) -> tuple[PyTree, PyTree]:
        return carry.x, carry.y


def stocbio(inner_steps: int, terms: int, y_rate: Rate, x_rate: Rate, v_rate: float) -> DoubleLoop:
    """stocBiO (Ji, Yang and Liang 2021): y by `inner_steps` steps, v by a Neumann series of `terms` products.

    η = `v_rate` must be below 1/L, L the curvature of f in y. v is not kept from one outer step to the next.
    """
    return DoubleLoop(inner_steps, Summed(terms, v_rate), *_optimizers(y_rate, x_rate))


def amigo(inner_steps: int, terms: int, y_rate: Rate, x_rate: Rate, v_rate: float) -> DoubleLoop:
    """AmIGO (Arbel and Mairal 2022): as `stocbio`, but v goes on from where it was by `terms` stochastic steps."""
    return DoubleLoop(inner_steps, Continued(terms, v_rate), *_optimizers(y_rate, x_rate))


def bsa(inner_steps: int, terms: int, y_rate: Rate, x_rate: Rate, v_rate: float) -> DoubleLoop:
    """BSA (Ghadimi and Wang 2018): as `stocbio`, but of the Neumann series one random term stands for all `terms`."""
    return DoubleLoop(inner_steps, Sampled(terms, v_rate), *_optimizers(y_rate, x_rate))


def ttsa(terms: int, y_rate: Rate, x_rate: Rate, v_rate: float) -> DoubleLoop:
    """TTSA (Hong, Wai, Wang and Yang 2023): BSA with one step of y per outer step, on a faster time scale than x's.

    The paper's rates fall as (k + 1)^(−2/5) for y and (k + 1)^(−3/5) for x, which it projects onto its set.
    """
    return bsa(1, terms, y_rate, x_rate, v_rate)


def sustain(
    terms: int, y_rate: Rate, x_rate: Rate, v_rate: float, forgetting: float | Callable[[Any], Any] = 0.1
) -> Storm:
    """SUSTAIN (Khanduri et al. 2021): STORM on both levels, the hypergradient by a random term of a Neumann series.

    The paper's rates fall as (k + 1)^(−1/3) and `forgetting` (η) as (k + 1)^(−2/3).
    """
    return Storm(Sampled(terms, v_rate), *_optimizers(y_rate, x_rate), schedule_of("forgetting", forgetting))


def mrbo(
    terms: int, y_rate: Rate, x_rate: Rate, v_rate: float, forgetting: float | Callable[[Any], Any] = 0.1
) -> Storm:
    """MRBO (Yang, Ji and Liang 2021): as `sustain`, with the whole Neumann series."""
    return Storm(Summed(terms, v_rate), *_optimizers(y_rate, x_rate), schedule_of("forgetting", forgetting))


def _optimizers(y_rate: Rate, x_rate: Rate) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    return optimizer_of("x_rate", x_rate), optimizer_of("y_rate", y_rate)
