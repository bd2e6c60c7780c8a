"""Single-loop methods: one stochastic step for the follower y, the linear system's v and the leader x at a time.

They carry (x, y, v), where v follows v*(x) = −[∂²_yy f]⁻¹ ∂_y F, so that ∂_x F + ∂²_xy f v* is the hypergradient. On a
batch B of the follower's examples and C of the leader's the three directions are

    D_y = ∂_y f_B        D_v = ∂²_yy f_B v + ∂_y F_C        D_x = ∂²_xy f_B v + ∂_x F_C .
"""

from typing import NamedTuple

import equinox as eqx
import optax
from jaxtyping import Array, PyTree

from bilax.methods.algorithm import Evaluation, update
from bilax.methods.stochastic import (
    Rate,
    add,
    lower_products,
    moved,
    optimizer_of,
    refuse_sets_of_y,
    upper_slopes,
    zeros,
)
from bilax.problem.minibatches import Draws
from bilax.problem.problem import Problem


class Carry(NamedTuple):
    """x, y and v, and what the three optimisers remember."""

    x: PyTree
    y: PyTree
    v: PyTree
    memory: tuple[PyTree, PyTree, PyTree]


class Soba(eqx.Module):
    """Moves y, v and x at once along directions at the point where the step began; made by `soba` and `ma_soba`."""

    optimizer: optax.GradientTransformation
    y_optimizer: optax.GradientTransformation
    v_optimizer: optax.GradientTransformation
    draws = (1, 1)

    def init(self, problem: Problem, x0: PyTree, y0: PyTree, data: Draws) -> Carry:
        refuse_sets_of_y("SOBA", problem)
        memory = self.y_optimizer.init(y0), self.v_optimizer.init(y0), self.optimizer.init(x0)
        return Carry(x0, y0, zeros(y0), memory)

    def step(self, problem: Problem, carry: Carry, data: Draws, key: Array) -> tuple[Carry, Evaluation]:
        (x, y, v), memory = carry[:3], carry.memory
        f, slope, cross, curved = lower_products(problem, x, y, v, data.lower())
        F, upper_x, upper_y = upper_slopes(problem, x, y, data.upper())
        grad_x = add(cross, upper_x)
        y_next, y_memory = moved(self.y_optimizer, slope, memory[0], y)
        v_next, v_memory = moved(self.v_optimizer, add(curved, upper_y), memory[1], v)
        x_next, x_memory = update(self.optimizer, grad_x, memory[2], x, problem.x_set)
        found = Evaluation(y, F, f, optax.tree.norm(slope), grad_x=grad_x)
        return Carry(x_next, y_next, v_next, (y_memory, v_memory, x_memory)), found

    def point(self, carry: Carry) -> tuple[PyTree, PyTree]:
        return carry.x, carry.y


def soba(y_rate: Rate, x_rate: Rate, v_rate: Rate | None = None) -> Soba:
    """SOBA (Dagréou, Ablin, Vaiter and Moreau 2022): y, v and x step along −D_y, −D_v and −D_x on one batch each.

    Rates are numbers, optax schedules or transformations; v's is y's if not given. The paper's theory wants
    (k + 1)^(−1/2) for all: `lambda k: 0.1 / (k + 1) ** 0.5`. x is projected onto its set, which that theory does not
    cover.
    """
    rates = ("x_rate", x_rate), ("y_rate", y_rate), ("v_rate", y_rate if v_rate is None else v_rate)
    return Soba(*(optimizer_of(name, rate) for name, rate in rates))
