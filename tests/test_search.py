"""`solve_global` on known problems, on others like them, and the value-function methods and bounds beside it."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilax
from bilax.experiments.suite.problems import PROBLEMS, Known
from bilax.problem.terms import inside
from bilax.trust.flat_problem import flatten
from bilax.trust.follower_minima import follower_minima, low_discrepancy


def wells(y):
    return 16 * y**4 + 2 * y**3 - 8 * y**2 - 1.5 * y + 0.5


OTHERS = {
    # No leader, six follower variables, 200 basins in each: only scans along coordinates can do it.
    "rastrigin": Known(
        bilax.Problem(
            lambda x, y: jnp.sum((y - 1) ** 2),
            lambda x, y: jnp.sum((y - 0.3) ** 2 + 3 * (1 - jnp.cos(2 * jnp.pi * (y - 0.3)))),
            y_set=bilax.Box(-100.0, 100.0),
        ),
        (),
        jnp.zeros(6),
        6 * 0.49,
    ),
    # Indifferent on the line x₀ + x₁ = 1/3, which no grid contains; x and y are trees.
    "indifferent on a line": Known(
        bilax.Problem(
            lambda x, y: y["v"] + 0.1 * (x[0] - x[1]) ** 2,
            lambda x, y: (x[0] + x[1] - 1 / 3) * wells(y["v"]),
            bilax.Box(-1.0, 1.0),
            bilax.Box(-0.8, 1.0),
        ),
        (jnp.asarray(0.0), jnp.asarray(0.0)),
        {"v": jnp.asarray(0.0)},
        -0.8,
    ),
    # No bounds; the wells change places at x = 0, beyond which the leader wants to go.
    "no bounds": Known(
        bilax.Problem(lambda x, y: (x - 0.5) ** 2 + (y - 3) ** 2, lambda x, y: (y**2 - 4) ** 2 / 16 + 0.5 * x * y),
        jnp.asarray(0.0),
        jnp.asarray(0.0),
        1.25,
    ),
}


def search(known, **options):
    """Without the bound from below, which `test_leader_bound.py` has."""
    return bilax.solve_global(known.problem, known.x0, known.y0, bound_seconds=0.0, **options)


def judge(known, found):
    """Right value, and a follower that a brute search cannot beat."""
    assert found.upper == pytest.approx(known.best, abs=0.01)
    assert found.certificate.verdict is bilax.Verdict.global_follower
    assert found.status is bilax.Status.converged
    with jax.enable_x64(True):
        x, y = jax.tree.map(jnp.asarray, (found.x, found.y))
        assert float(known.problem.upper(x, y)) == pytest.approx(found.upper, abs=1e-9)
        value = float(known.problem.lower(x, y))
        assert value == pytest.approx(found.lower, abs=1e-9)
        if isinstance(known.problem.y_set, bilax.Box) and np.size(known.y0) == 1 and not isinstance(y, dict):
            grid = jnp.linspace(known.problem.y_set.lo, known.problem.y_set.hi, 100_001)
            assert value - float(jax.vmap(lambda v: known.problem.lower(x, v))(grid).min()) < 1e-7
    uppers = [candidate.upper for candidate in found.candidates]
    assert uppers == sorted(uppers)


def test_a_follower_indifferent_at_an_isolated_x():
    """The hardest of the twelve; `bilax bench suite` runs them all."""
    known = PROBLEMS["mb_2007_11"]
    judge(known, search(known))


@pytest.mark.parametrize("name", OTHERS)
def test_other_problems(name):
    known = OTHERS[name]
    judge(known, search(known))


def test_no_leader_is_deterministic_and_heeds_its_key():
    known = PROBLEMS["mb_2007_05"]
    first, second = search(known), search(known)
    judge(known, first)
    assert first.upper == second.upper
    other = search(known, key=jax.random.key(3))
    judge(known, other)
    assert other.y != first.y


def test_the_suite_lists_twelve_problems_with_solutions_inside():
    assert len(PROBLEMS) == 12
    for known in PROBLEMS.values():
        assert jnp.all(inside(known.problem.y_set, known.y0) == known.y0)


def test_wrong_arguments_are_named():
    known = PROBLEMS["mb_2007_05"]
    with pytest.raises(TypeError, match="y0 has dtype int"):
        bilax.solve_global(known.problem, (), jnp.asarray(1))
    with pytest.raises(TypeError, match="data"):
        bilax.solve_global(known.problem, (), jnp.asarray(1.0), data=[1.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="inner_steps"):
        bilax.penalty(0, 0.1)
    with pytest.raises(ValueError, match="step_size"):
        bilax.bvfim(1, -0.1)


# The value function


def test_narrow_basins_in_many_dimensions_are_seen():
    """Ten separable followers with basins a hundredth of their range wide: a sample never meets the right one."""
    problem = bilax.Problem(
        lambda x, y: jnp.sum((y - 1) ** 2), lambda x, y: jnp.sum((y - x) ** 2 + jnp.sin(3 * (y - x)) ** 2),
        bilax.Box(-100.0, 100.0), bilax.Box(-100.0, 100.0),
    )  # fmt: skip
    x = np.linspace(-1, 2, 10)
    stuck = x + np.where(np.arange(10) < 2, -0.9348, 0.0)
    assert bilax.certify(problem, _Point(x, x)).verdict is bilax.Verdict.global_follower
    assert bilax.certify(problem, _Point(x, stuck)).verdict is not bilax.Verdict.global_follower


class _Point(NamedTuple):
    x: Any
    y: Any


def test_follower_minima_finds_every_basin():
    with jax.enable_x64(True):
        problem = bilax.Problem(lambda x, y: y, lambda x, y: jnp.sin(3 * y) + 0.01 * y**2, y_set=bilax.Box(-6.0, 6.0))
        flat = flatten(problem, (), jnp.asarray(0.0))
        middle, unit = jnp.zeros(1), low_discrepancy(512, 1, 0)
        found = jax.jit(lambda unit: follower_minima(flat, jnp.zeros(0), middle, unit, keep=24))(unit)
        found = jax.device_get(found)
    distinct = np.sort(found.points[: int(found.distinct), 0])
    curvature = np.sign(np.sin(3 * distinct) + 0.01 * distinct**2)
    # Five interior minima near (4k − 1) π/6, and the two ends, of which f falls towards one only.
    expected = [k for k in (np.arange(-4, 4) * 4 - 1) * np.pi / 6 if abs(k) < 6]
    for place in expected:
        assert np.abs(distinct - place).min() < 0.05
    assert (curvature < 0).sum() >= len(expected)
    assert found.values[0] == found.values.min()


@pytest.mark.parametrize("method", [bilax.penalty, bilax.bvfim])
def test_value_function_methods_solve_a_convex_problem(method):
    known = PROBLEMS["b_1998_02"]
    found = bilax.solve(known.problem, method(20, 0.2), known.x0, known.y0, steps=400, optimizer=optax.adam(0.02))
    assert found.x == pytest.approx([0.8, 0.2], abs=0.01)
    assert float(found.upper) == pytest.approx(0, abs=1e-3)
    assert found.status is bilax.Status.step_limit
    assert len(found.history.upper) == 400


def test_a_diverging_value_method_keeps_its_last_finite_point():
    problem = bilax.Problem(lambda x, y: x**2 + y**2, lambda x, y: y**4 - x * y)
    found = bilax.solve(problem, bilax.penalty(10, 1.0), 1.0, 5.0, steps=20)
    assert found.status is bilax.Status.diverged
    assert np.isfinite(found.x)
    assert np.isfinite(found.y)
    assert found.steps < 20


@pytest.mark.parametrize("method", [bilax.penalty, bilax.bvfim])
@pytest.mark.parametrize("steps", [1, 2, 20])
def test_a_value_method_never_ends_where_the_leader_is_not_finite(method, steps):
    problem = bilax.Problem(lambda x, y: jnp.log(x) + y**2, lambda x, y: (y - x) ** 2)
    found = bilax.solve(problem, method(5, 0.1), 0.5, 0.5, steps=steps)
    assert found.x > 0
    assert np.isfinite(found.upper)
    assert found.status is (bilax.Status.step_limit if steps == 1 else bilax.Status.non_finite)


def test_tasks_are_searched_as_one_follower():
    """Each task's left well is its lower one for x > 0, its right one for x < 0; F wants the left ones."""
    problem = bilax.Problem(
        lambda x, y, tilt: (x - 0.3) ** 2 + (y + 1) ** 2,
        lambda x, y, tilt: (y**2 - 1) ** 2 + tilt * x * y,
        bilax.Box(-1.0, 1.0),
        bilax.Box(-2.0, 2.0),
    )
    tilts = np.asarray([0.3, 0.6])
    found = bilax.solve_global(problem, -0.2, 1.0, data=(tilts,), tasks=True, bound_seconds=0.0)
    wells = [np.min(np.roots([4.0, 0.0, -4.0, tilt * float(found.x)]).real) for tilt in tilts]
    np.testing.assert_allclose(found.y, wells, atol=1e-6)

    def value(x):
        return np.mean([(x - 0.3) ** 2 + (np.min(np.roots([4.0, 0.0, -4.0, t * x]).real) + 1) ** 2 for t in tilts])

    best = min(value(x) for x in np.linspace(1e-6, 1, 2001))
    np.testing.assert_allclose(found.upper, best, atol=1e-5)


def test_a_search_that_would_take_too_long_is_made_short_and_says_so():
    """A slow projection: the whole search would take an hour."""

    class Slow:
        def project(self, v):
            turned = jax.lax.fori_loop(0, 1_000, lambda i, v: v + 1e-30 * jnp.sin(v), v)
            return jnp.clip(turned, -1.0, 1.0)

        def bounds(self, v):
            return -1.0, 1.0

    target = np.linspace(-0.5, 0.5, 3)
    problem = bilax.Problem(
        lambda x, y: jnp.sum((y - target) ** 2) + jnp.sum(x**2), lambda x, y: jnp.sum((y - x) ** 2),
        bilax.Box(-1.0, 1.0), Slow(),
    )  # fmt: skip
    begin = time.monotonic()
    found = bilax.solve_global(problem, np.zeros(3), np.zeros(3), time_limit=10.0)
    assert time.monotonic() - begin < 200  # with all that is compiled, on a busy machine
    assert found.status is bilax.Status.time_limit
    assert "time_limit" in found.cut_short
    assert "not searched as a whole" in repr(found)
    assert found.upper < np.sum(target**2)  # as it was at the start
    assert found.certificate.rigorous
    with pytest.raises(ValueError, match="time_limit"):
        bilax.solve_global(problem, np.zeros(3), np.zeros(3), time_limit=0.0)


def test_many_follower_variables_get_a_warning_at_the_call():
    problem = bilax.Problem(
        lambda x, y: jnp.sum(y), lambda x, y: jnp.sum((y - x) ** 2), bilax.Box(0.0, 1.0), bilax.Box(0.0, 1.0)
    )
    with pytest.warns(UserWarning, match="7 variables.*far from the global"):
        found = bilax.solve_global(problem, np.asarray(0.5), np.full(7, 0.5))
    assert found.status is bilax.Status.converged
    assert found.cut_short == ""
