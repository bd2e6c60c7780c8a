"""Bounds of the leader's value over all x, against known answers and dense grids."""

import dataclasses
import time

import jax.numpy as jnp
import numpy as np
import pytest

import bilax
from bilax.experiments.suite.problems import PROBLEMS
from bilax.problem.precision import double_precision, in_double
from bilax.trust.flat_problem import flatten
from bilax.trust.global_search import Candidate, _leader_bound
from bilax.trust.leader_bound import LeaderBound


def bound_of(problem, x0, y0, target, rounds=10_000):
    with double_precision():
        x0, y0 = in_double((jnp.asarray(x0) if not isinstance(x0, tuple) else x0, jnp.asarray(y0)))
        flat = flatten(problem, x0, y0)
        return LeaderBound(flat, np.asarray(flat.ravel(y0))).run(target, time.monotonic() + 20.0, rounds)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_gap_is_closed_from_below(name):
    known = PROBLEMS[name]
    best = float(known.best)
    bound = bound_of(known.problem, known.x0, known.y0, best - 1e-3 * (1 + abs(best)))
    # Some answers are known to three digits only.
    assert best - 1.1e-3 * (1 + abs(best)) <= bound <= best + 5e-4


def followers(rng):
    """f and F with waves, kinks and jumps, written for NumPy and JAX."""
    a, w, p, c = rng.normal(size=4), rng.uniform(1, 5, 4), rng.uniform(0, 6, 4), rng.normal(size=3)
    kind = rng.integers(4)

    def lower(xp, x, y):
        smooth = a[0] * xp.cos(w[0] * y + w[1] * x + p[0]) + a[1] * x * xp.sin(w[2] * y + p[1]) + 0.3 * (y - x) ** 2
        rough = (
            lambda: 0.0 * y,
            lambda: a[2] * xp.abs(y - 0.5 * x) - a[3] * xp.maximum(y, 0.3 * x),
            lambda: a[2] * xp.where(y > 0.4 * x, 0.5, -0.2),
            lambda: xp.minimum(a[2] * y, a[3] * y) + 10.0 * x,
        )[kind]()
        return smooth + rough

    def upper(xp, x, y):
        return c[0] * x + c[1] * y + xp.sin(3 * x * y) + c[2] * y**2

    return upper, lower


def grid_answer(upper, lower):
    """The least F over 201 values of x, each with its follower's minimum refined on ever finer grids."""
    x = np.linspace(-1, 1, 201)[:, None]
    best, y = np.zeros((201, 1)), np.linspace(-1, 1, 4001)[None]
    for width in 1e-3 / 40.0 ** np.arange(5):
        best = np.take_along_axis(y + 0 * x, np.argmin(lower(np, x, y), 1)[:, None], 1)
        y = np.clip(best + width * np.linspace(-1, 1, 201), -1, 1)
    return float(np.min(upper(np, x, best)))


@pytest.mark.parametrize("seed", range(4))
def test_no_bound_lies_above_what_a_grid_finds(seed):
    upper, lower = followers(np.random.default_rng(seed))
    problem = bilax.Problem(
        lambda x, y: upper(jnp, x, y), lambda x, y: lower(jnp, x, y), bilax.Box(-1.0, 1.0), bilax.Box(-1.0, 1.0)
    )
    found = grid_answer(upper, lower)
    # Asked for more than there is, so that every cell is looked at as long as that may be.
    assert bound_of(problem, 0.0, 0.0, found + 100.0, rounds=12) <= found + 1e-5


def test_a_kink_where_cells_meet_is_not_lost():
    """The follower sits at 0, where the first cut goes through; F is lowest there."""
    box = bilax.Box(-1.0, 1.0)
    for kink in (jnp.abs, lambda v: jnp.maximum(-v, v)):
        problem = bilax.Problem(lambda x, y: x**2 - jnp.cos(y), lambda x, y, kink=kink: kink(y) * (1 + x**2), box, box)
        assert -1.001 <= bound_of(problem, 0.3, 0.2, -1.001) <= -1.0
    # The same at an end of Y, which the follower never leaves.
    problem = bilax.Problem(lambda x, y: x + y, lambda x, y: jnp.maximum(-y, y), box, bilax.Box(0.0, 1.0))
    assert -1.001 <= bound_of(problem, 0.3, 0.2, -1.001) <= -1.0


def test_a_witness_where_the_follower_is_undefined_tells_nothing():
    box = bilax.Box(0.0, 1.0)
    # y = 1/2 for x ≤ 0.9; only beyond is f defined at lower y, where it is less.
    problem = bilax.Problem(
        lambda x, y: 1000 * (x - 0.885) ** 2 - y,
        lambda x, y: (y - 0.5) ** 2 + jnp.where(y < 0.1, jnp.sqrt(x - 0.9) - 1, 0.0),
        box,
        box,
    )
    assert bound_of(problem, 0.5, 0.05, -0.4, rounds=25) <= -0.5


def test_the_answer_tells_what_is_proven_of_the_leader():
    known = PROBLEMS["mb_2007_15"]
    found = bilax.solve_global(known.problem, known.x0, known.y0)
    assert found.within is not None
    assert found.within <= 2e-4
    assert "globally optimal within" in repr(found)
    far = dataclasses.replace(found, bound=found.upper - 100.0)
    assert "which is far: give more bound_seconds" in repr(far)


def test_no_bound_has_a_reason():
    box, free = bilax.Box(0.0, 1.0), bilax.Box(0.0, np.inf)
    cases = {
        "5 variables, and 4 are the most": (box, box, 4),
        "must have bounds": (box, free, 1),
        "must be boxes": (box, bilax.Ball(1.0), 2),
    }
    for reason, (x_set, y_set, size) in cases.items():
        problem = bilax.Problem(lambda x, y: x, lambda x, y: jnp.sum(y**2), x_set, y_set)
        best = Candidate(np.asarray(0.5), np.full(size, 0.1), 0.5, 0.1, 0.0)
        bound, why = _leader_bound(problem, best, (), 1.0)
        assert bound is None
        assert reason in why
