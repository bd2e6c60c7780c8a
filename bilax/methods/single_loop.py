"""Single-loop methods: one stochastic step for the follower y, the linear system's v and the leader x at a time.

They carry (x, y, v), where v follows v*(x) = −[∂²_yy f]⁻¹ ∂_y F, so that ∂_x F + ∂²_xy f v* is the hypergradient. On a
batch B of the follower's examples and C of the leader's the three directions are

    D_y = ∂_y f_B        D_v = ∂²_yy f_B v + ∂_y F_C        D_x = ∂²_xy f_B v + ∂_x F_C .

SOBA takes these, SABA and SRBA reduce their variance, FSLA the last one's. Papers that solve for −v have the same
iterates.
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
    corrected,
    lower,
    lower_products,
    moved,
    optimizer_of,
    refuse_sets_of_y,
    schedule_of,
    upper,
    upper_slopes,
    zeros,
)
from bilax.problem.minibatches import Draws
from bilax.problem.problem import Problem


class Point(NamedTuple):
    """The three variables."""

    x: PyTree
    y: PyTree
    v: PyTree


class Directions(NamedTuple):
    """Along which x, y and v go down, with what was found on the way."""

    x: PyTree
    y: PyTree
    v: PyTree
    values: tuple[Array, Array]
    """F and f"""


def on_batch(problem: Problem, point: Point, data: Draws) -> Directions:
    """D_x, D_y and D_v on one batch of each level."""
    batch = data.upper()
    f, slope, cross, curved = lower_products(problem, *point, batch)
    value, upper_x, upper_y = upper_slopes(problem, point.x, point.y, batch)
    return Directions(add(cross, upper_x), slope, add(curved, upper_y), (value, f))


class Plain(eqx.Module):
    """SOBA's estimate: a batch."""

    def init(self, problem: Problem, point: Point, data: Draws) -> PyTree:
        return ()

    def __call__(self, problem: Problem, point: Point, memory: PyTree, data: Draws) -> tuple[Directions, PyTree]:
        return on_batch(problem, point, data), ()


class Tables(eqx.Module):
    """SABA's estimate: SAGA on ∂_y f, ∂²_xy f v and ∂²_yy f v (a row per block of the follower's examples) and on ∂_x F
    and ∂_y F (a row per block of the leader's)."""

    filled: bool

    def init(self, problem: Problem, point: Point, data: Draws) -> PyTree:
        def table(slopes, rows):
            def row(i):
                return slopes(problem, point, data.block(rows, i))[1:]

            count = data.blocks(rows)
            if self.filled:
                full = jax.lax.map(row, jnp.arange(count))
            else:
                empty = jax.eval_shape(row, jax.ShapeDtypeStruct((), int))
                full = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), empty)
            return full, jax.tree.map(lambda leaf: leaf.mean(0), full)

        return table(_lower_row, "lower"), table(_upper_row, "upper")

    def __call__(self, problem: Problem, point: Point, memory: PyTree, data: Draws) -> tuple[Directions, PyTree]:
        found = []
        for slopes, rows, (table, mean) in ((_lower_row, "lower", memory[0]), (_upper_row, "upper", memory[1])):
            i = data.next_block(rows)
            value, *new = slopes(problem, point, data.block(rows, i))
            new, count = tuple(new), data.blocks(rows)
            row = _read(table, i, data.step)
            change = jax.tree.map(jnp.subtract, new, row)
            direction = add(change, mean)
            table = jax.tree.map(
                lambda t, r, i=i: jax.lax.dynamic_update_index_in_dim(t, r, i, 0), table, add(row, change)
            )
            found.append((value, direction, (table, jax.tree.map(lambda m, c, n=count: m + c / n, mean, change))))
        (f, (slope, cross, curved), below), (upper, (upper_x, upper_y), above) = found
        return Directions(add(cross, upper_x), slope, add(curved, upper_y), (upper, f)), (below, above)


def _read(table: PyTree, i: Array, step: Array) -> PyTree:
    """Row i, read by itself before another is written there.

    XLA would have everything that needs the row read the table, and, as nothing then says that this comes before the
    writing, copy all tables in each step. It does not look into a branch, though this one is always taken.
    """

    def rows():
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False), table)

    return jax.lax.cond(step >= 0, rows, lambda: zeros(jax.eval_shape(rows)))


def _lower_row(problem: Problem, point: Point, data: tuple[Any, ...]) -> tuple[Any, ...]:
    return lower_products(problem, *point, data)


def _upper_row(problem: Problem, point: Point, data: tuple[Any, ...]) -> tuple[Any, ...]:
    return upper_slopes(problem, point.x, point.y, data)


class Recursive(eqx.Module):
    """SRBA's estimate: D on all data every `period` steps, else D + D_BC(here) − D_BC(before) on the same batches."""

    period: int

    def init(self, problem: Problem, point: Point, data: Draws) -> PyTree:
        return point, zeros(jax.eval_shape(lambda: on_batch(problem, point, data)[:3]))

    def __call__(self, problem: Problem, point: Point, memory: PyTree, data: Draws) -> tuple[Directions, PyTree]:
        before, last = memory

        def of(point, data):
            return on_batch(problem, point, data)[:3]

        def recurse():
            return add(last, jax.tree.map(jnp.subtract, of(point, data), of(before, data)))

        # The number of the step is common to all starts, so only one of the two is computed.
        every = data.step % self.period == 0
        x, y, v = directions = jax.lax.cond(every, lambda: of(point, data.whole()), recurse)
        # F and f apart: between two looks at the run nothing asks for them, and then they are not computed.
        batch = data.upper()
        values = upper(problem, point.x, point.y, batch), lower(problem, point.x, point.y, batch)
        return Directions(x, y, v, values), (point, directions)


class Carry(NamedTuple):
    """x, y and v, what the three optimisers remember, and what the estimate does."""

    point: Point
    memory: tuple[PyTree, PyTree, PyTree]
    estimate: PyTree


class SingleLoop(eqx.Module):
    """Moves x, y and v at once along an estimate of D at the point where the step began; see `soba`."""

    estimate: Any
    optimizer: optax.GradientTransformation
    y_optimizer: optax.GradientTransformation
    v_optimizer: optax.GradientTransformation
    draws = (1, 1)

    @property
    def passes_over_all(self) -> bool:
        """Whether steps take all rows again and again, so that `start` keeps these apart."""
        return isinstance(self.estimate, Recursive)

    def init(self, problem: Problem, x0: PyTree, y0: PyTree, data: Draws) -> Carry:
        refuse_sets_of_y(problem)
        point = Point(x0, y0, zeros(y0))
        memory = self.optimizer.init(x0), self.y_optimizer.init(y0), self.v_optimizer.init(y0)
        return Carry(point, memory, self.estimate.init(problem, point, data))

    def step(self, problem: Problem, carry: Carry, data: Draws, key: Array) -> tuple[Carry, Evaluation]:
        (x, y, v), memory = carry.point, carry.memory
        found, estimate = self.estimate(problem, carry.point, carry.estimate, data)
        x_next, x_memory = update(self.optimizer, found.x, memory[0], x, problem.x_set, step=data.step)
        y_next, y_memory = moved(self.y_optimizer, found.y, memory[1], y, data.step)
        v_next, v_memory = moved(self.v_optimizer, found.v, memory[2], v, data.step)
        after = Carry(Point(x_next, y_next, v_next), (x_memory, y_memory, v_memory), estimate)
        value, f = found.values
        return after, Evaluation((), value, f, optax.tree.norm(found.y), grad_x=found.x)

    def point(self, carry: Carry) -> tuple[PyTree, PyTree]:
        return carry.point[:2]


class Fsla(eqx.Module):
    """Moves y, then v, then x along a STORM estimate of D_x; see `fsla`."""

    optimizer: optax.GradientTransformation
    y_optimizer: optax.GradientTransformation
    v_optimizer: optax.GradientTransformation
    forgetting: Callable[[Any], Any]
    draws = (2, 3)

    def init(self, problem: Problem, x0: PyTree, y0: PyTree, data: Draws) -> Carry:
        refuse_sets_of_y(problem)
        point = Point(x0, y0, zeros(y0))
        memory = self.optimizer.init(x0), self.y_optimizer.init(y0), self.v_optimizer.init(y0)
        return Carry(point, memory, (x0, _slope_of_x(problem, point, data)))

    def step(self, problem: Problem, carry: Carry, data: Draws, key: Array) -> tuple[Carry, Evaluation]:
        (x, y, v), memory, (x_before, slope_x) = carry
        slope = lower_products(problem, x, y, v, data.lower(0))[1]
        y_next, y_memory = moved(self.y_optimizer, slope, memory[1], y, data.step)
        f, slope, _, curved = lower_products(problem, x, y_next, v, data.lower(1))
        value, _, upper_y = upper_slopes(problem, x, y_next, data.upper(0))
        v_next, v_memory = moved(self.v_optimizer, add(curved, upper_y), memory[2], v, data.step)
        here = _slope_of_x(problem, Point(x, y_next, v_next), data)
        before = _slope_of_x(problem, Point(x_before, y, v), data)
        slope_x = corrected(here, before, slope_x, self.forgetting(data.step))
        x_next, x_memory = update(self.optimizer, slope_x, memory[0], x, problem.x_set, step=data.step)
        after = Carry(Point(x_next, y_next, v_next), (x_memory, y_memory, v_memory), (x, slope_x))
        return after, Evaluation(y_next, value, f, optax.tree.norm(slope), grad_x=slope_x)

    def point(self, carry: Carry) -> tuple[PyTree, PyTree]:
        return carry.point[:2]


def _slope_of_x(problem: Problem, point: Point, data: Draws) -> PyTree:
    """D_x on the last batch of each level."""
    cross = lower_products(problem, *point, data.lower(2))[2]
    return add(cross, upper_slopes(problem, point.x, point.y, data.upper(1))[1])


def soba(y_rate: Rate, x_rate: Rate, v_rate: Rate | None = None) -> SingleLoop:
    """SOBA (Dagréou, Ablin, Vaiter and Moreau 2022): x, y and v step along −D_x, −D_y and −D_v, a batch of each level.

    Rates are numbers, optax schedules or transformations; v's is y's if not given. The paper's theory wants them to
    fall as (k + 1)^(−1/2): `lambda k: 0.1 / (k + 1) ** 0.5`. Here, as in all methods of this family, x is projected
    onto its set, which the theory does not cover.
    """
    return SingleLoop(Plain(), *_optimizers(y_rate, x_rate, v_rate))


def ma_soba(y_rate: Rate, x_rate: Rate, v_rate: Rate | None = None, theta: float = 0.1) -> SingleLoop:
    """MA-SOBA (Chen, Xiao and Balasubramanian 2023): SOBA whose x follows the average h = (1 − θ) h + θ D_x.

    That is `optax.ema` before x's optimiser. The paper's rates and θ are all of the order K^(−1/2) for K steps.
    """
    if not 0 < theta <= 1:
        raise ValueError(f"theta must lie in (0, 1], got {theta}.")
    averaged = optax.chain(optax.ema(1 - theta, debias=False), optimizer_of("x_rate", x_rate))
    return SingleLoop(Plain(), *_optimizers(y_rate, averaged, v_rate))


def saba(y_rate: Rate, x_rate: Rate, v_rate: Rate | None = None, filled: bool = True) -> SingleLoop:
    """SABA (Dagréou, Ablin, Vaiter and Moreau 2022): SOBA with SAGA's tables for D, so that constant rates converge.

    The tables have a row for each block of `bilax.Minibatches`, (n/b)(2 dim y + dim x) + (m/b)(dim y + dim x) numbers;
    the n mod b rows beyond the last whole block are not used. They are filled at (x0, y0) first; `filled=False` begins
    with zeros, as benchmark_bilevel does.
    """
    return SingleLoop(Tables(filled), *_optimizers(y_rate, x_rate, v_rate))


def srba(y_rate: Rate, x_rate: Rate, period: int, v_rate: Rate | None = None) -> SingleLoop:
    """SRBA (Dagréou, Moreau, Vaiter and Ablin 2024): SOBA with a recursive estimate of D, as SPIDER's.

    Every `period` steps D is computed on all data, otherwise what it changed on a batch since the step before is added.
    The paper also keeps v in a ball, which its experiments leave out, as this does.
    """
    check_count("period", period)
    return SingleLoop(Recursive(period), *_optimizers(y_rate, x_rate, v_rate))


def fsla(
    y_rate: Rate, x_rate: Rate, v_rate: Rate | None = None, forgetting: float | Callable[[Any], Any] = 0.1
) -> Fsla:
    """FSLA (Li, Gu and Huang 2022): y, then v, then x, the last along d = D_x + (1 − η)(d − D_x before).

    `forgetting` is η, a number or a schedule. Each of the three steps has batches of its own. d begins as D_x;
    benchmark_bilevel begins with d = 0 and compares with x = 0.
    """
    of_x, of_y, of_v = _optimizers(y_rate, x_rate, v_rate)
    return Fsla(of_x, of_y, of_v, schedule_of("forgetting", forgetting))


def _optimizers(y_rate: Rate, x_rate: Rate, v_rate: Rate | None) -> list[optax.GradientTransformation]:
    rates = ("x_rate", x_rate), ("y_rate", y_rate), ("v_rate", y_rate if v_rate is None else v_rate)
    return [optimizer_of(name, rate) for name, rate in rates]
