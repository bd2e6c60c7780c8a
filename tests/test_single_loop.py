"""SOBA and its kin: 50 steps as NumPy takes them, and convergence on a noisy quadratic."""

from typing import Any

import numpy as np
import pytest

import bilax
from tests.noisy_quadratic import X0, Y0, A, B, C, D, check, cross, draws_at, error, f_y, hess, upper_x, upper_y

RATE = 0.2


def falling(k):
    return RATE / (k + 1) ** 0.5


def slow(k):
    return 0.5 * falling(k)


METHODS = {
    "soba": bilax.soba(falling, slow),
    "ma_soba": bilax.ma_soba(falling, slow, theta=0.2),
    "saba": bilax.saba(0.1, 0.05),
    "srba": bilax.srba(0.1, 0.05, 7),
    "fsla": bilax.fsla(falling, slow, forgetting=lambda k: 0.8 / (k + 1) ** 0.5),
}


def directions(x, y, v, below, above):
    return f_y(x, y, below), hess(below) @ v + upper_y(x, y, above), cross(v) + upper_x(x, y, above)


def soba(batches, theta=1.0):
    x, y, v, h = X0, Y0, np.zeros(2), np.zeros(3)
    for k, ((above,), (below,)) in enumerate(batches):
        d_y, d_v, d_x = directions(x, y, v, below, above)
        h = (1 - theta) * h + theta * d_x
        x, y, v = x - slow(k) * h, y - falling(k) * d_y, v - falling(k) * d_v
        yield x, y


def ma_soba(batches):
    return soba(batches, 0.2)


def srba(batches):
    x, y, v = X0, Y0, np.zeros(2)
    old: Any = None
    d: Any = None
    for k, ((above,), (below,)) in enumerate(batches):
        if k % 7 == 0:
            d = directions(x, y, v, (A, B), (C, D))
        else:
            here, before = directions(x, y, v, below, above), directions(*old, below, above)
            d = [a + b - c for a, b, c in zip(d, here, before, strict=True)]
        old = x, y, v
        x, y, v = x - 0.05 * d[2], y - 0.1 * d[0], v - 0.1 * d[1]
        yield x, y


def blocks(rows, seed=0):
    """The blocks of four that stay the same: the rows in their shuffled order."""
    order = np.random.default_rng(seed).permutation(len(rows[1]))
    return [(rows[0][order[i : i + 4]], rows[1][order[i : i + 4]]) for i in range(0, len(order), 4)]


def saba(batches):
    def visited(level, k):
        return int(draws_at(METHODS["saba"], k).next_block(level))

    x, y, v = X0, Y0, np.zeros(2)
    below, above = blocks((A, B)), blocks((C, D))
    low = [[f_y(x, y, b) for b in below], [hess(b) @ v for b in below], [cross(v) for _ in below]]
    high = [[upper_y(x, y, b) for b in above], [upper_x(x, y, b) for b in above]]

    def saga(table, i, new):
        direction = new - table[i] + np.mean(table, 0)
        table[i] = new
        return direction

    for k in range(len(batches)):
        i, j = visited("lower", k), visited("upper", k)
        d_y = saga(low[0], i, f_y(x, y, below[i]))
        d_v = saga(low[1], i, hess(below[i]) @ v) + saga(high[0], j, upper_y(x, y, above[j]))
        d_x = saga(low[2], i, cross(v)) + saga(high[1], j, upper_x(x, y, above[j]))
        x, y, v = x - 0.05 * d_x, y - 0.1 * d_y, v - 0.1 * d_v
        yield x, y


def fsla(batches):
    """With v for +[∂²_yy f]⁻¹ ∂_y F, as the paper has it."""
    x, y, v, x_before, d = X0, Y0, np.zeros(2), X0, None
    for k, ((above_1, above_2), (below_1, below_2, _)) in enumerate(batches):
        y_next = y - falling(k) * f_y(x, y, below_1)
        v_next = v - falling(k) * (hess(below_2) @ v - upper_y(x, y_next, above_1))
        here = upper_x(x, y_next, above_2) - cross(v_next)
        before = upper_x(x_before, y, above_2) - cross(v)
        d = here if d is None else here + (1 - 0.8 / (k + 1) ** 0.5) * (d - before)
        x_before, x, y, v = x, x - slow(k) * d, y_next, v_next
        yield x, y


@pytest.mark.parametrize("name", METHODS)
def test_fifty_steps_are_those_of_numpy(name):
    check(METHODS[name], globals()[name])


@pytest.mark.parametrize("name", METHODS)
def test_it_converges_on_a_noisy_quadratic(name):
    # Those with reduced variance converge at constant rates, the others as their rates fall.
    assert error(METHODS[name], 20_000) < (1e-8 if name in ("saba", "srba") else 0.05)
