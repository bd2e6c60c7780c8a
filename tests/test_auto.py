"""`bilax.auto()`: the default call gets the right answer, says what it did, and takes arrays as people have them."""

import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix
import pytest
import scipy.optimize

import bilax
from bilax.methods.indifferent_follower import flat_where_it_matters, variation
from bilax.methods.solved_follower import Search, SolvedFollower

COSTS = np.asarray([1.0, 1.5, 2.0, 4.0])


def tolls(term):
    return bilax.Problem(
        lambda t, y: -jnp.vdot(t, y[:3]),
        lambda t, y: jnp.vdot(COSTS + jnp.append(t, 0.0), y) + term(y),
        bilax.Box(0.0, 5.0),
        bilax.Simplex(),
    )


@pytest.mark.parametrize(
    ("term", "best"),
    [(lambda y: 0.5 * jnp.sum(y * jnp.log(y)), -2.00853), (lambda y: 0.5 * jnp.sum(y**2), -2.29167)],
    ids=["entropy", "squares"],
)
def test_tolls_on_the_simplex(term, best):
    solution = bilax.solve(tolls(term), bilax.auto(), np.ones(3), np.full(4, 0.25))
    assert solution.status is bilax.Status.converged
    np.testing.assert_allclose(solution.upper, best, atol=2e-5)
    np.testing.assert_allclose(solution.upper, -solution.x @ solution.y[:3], rtol=1e-5)
    assert "Newton" in str(solution.plan)
    assert "led to the same minimum" in str(solution.plan)


def ridge():
    rng = np.random.default_rng(0)
    inputs, valid = rng.normal(size=(30, 6)), rng.normal(size=(20, 6))
    truth = np.asarray([1.0, -2.0, 0, 0, 0.5, 0])
    answers, goals = inputs @ truth + rng.normal(size=30), valid @ truth + rng.normal(size=20)
    problem = bilax.Problem(
        lambda x, y: jnp.mean((valid @ y - goals) ** 2),
        lambda x, y: jnp.mean((inputs @ y - answers) ** 2) + jnp.sum(jnp.exp(x) * y**2),
        bilax.Box(-8.0, 4.0),
    )

    def value(x):
        y = np.linalg.solve(inputs.T @ inputs / 30 + np.diag(np.exp(x)), inputs.T @ answers / 30)
        return float(np.mean((valid @ y - goals) ** 2))

    return problem, value


def test_penalties_of_a_ridge_regression_against_scipy():
    problem, value = ridge()
    solution = bilax.solve(problem, bilax.auto(), np.full(6, -1.0), np.zeros(6))
    rng = np.random.default_rng(1)
    starts = [np.full(6, -1.0), *rng.uniform(-8, 4, (10, 6))]
    best = min(scipy.optimize.minimize(value, x, bounds=[(-8, 4)] * 6, tol=1e-12).fun for x in starts)
    progress = (value(np.full(6, -1.0)) - value(solution.x)) / (value(np.full(6, -1.0)) - best)
    assert progress > 0.99
    np.testing.assert_allclose(solution.upper, value(solution.x), rtol=1e-6)
    assert solution.history.follower_steps[0] > 0


def folds():
    """Ridge regression with three folds, a penalty for each of two groups of features; the closed form as judge."""
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(24, 4))
    answers = inputs @ np.asarray([1.0, -2.0, 0.1, 0.0]) + rng.normal(size=24)
    held = (np.arange(24) % 3 == np.arange(3)[:, None]).astype(float)
    group = np.asarray([0, 0, 1, 1])
    problem = bilax.Problem(
        lambda x, y, rest, held: jnp.vdot(held, (inputs @ y - answers) ** 2) / jnp.sum(held),
        lambda x, y, rest, held: jnp.vdot(rest, (inputs @ y - answers) ** 2) + jnp.sum(jnp.exp(x)[group] * y**2),
        bilax.Box(-8.0, 6.0),
    )

    def judge(x):
        """The error of cross-validation, its gradient, and the weights of each fold."""
        values, slopes, weights = [], [], []
        for out in held.astype(bool):
            A, penalties = inputs[~out], np.exp(x)[group]
            system = A.T @ A + np.diag(penalties)
            w = np.linalg.solve(system, A.T @ answers[~out])
            errors = inputs[out] @ w - answers[out]
            pulled = np.linalg.solve(system, 2 * inputs[out].T @ errors / out.sum())
            values.append(np.mean(errors**2))
            slopes.append(np.bincount(group, -penalties * w * pulled))
            weights.append(w)
        return np.mean(values), np.mean(slopes, axis=0), np.asarray(weights)

    return problem, (1 - held, held), judge


def test_each_fold_of_a_cross_validation_is_solved_by_itself():
    problem, data, judge = folds()
    solution = bilax.solve(
        problem, bilax.auto(), np.full(2, -2.0), np.zeros(4), data=data, tasks=True,
        record=lambda x, z, info: (x, info.slope),
    )  # fmt: skip
    best = scipy.optimize.minimize(lambda x: judge(x)[:2], solution.x, jac=True, bounds=[(-8, 6)] * 2, tol=1e-12)
    assert solution.status is bilax.Status.converged
    assert "Each of 3 tasks by itself: 4 follower variables: Newton" in str(solution.plan)
    value, _, weights = judge(np.asarray(solution.x, float))
    np.testing.assert_allclose(value, best.fun, rtol=1e-8)
    np.testing.assert_allclose(solution.upper, value, rtol=1e-6)
    np.testing.assert_allclose(solution.y, weights, rtol=1e-5, atol=1e-6)
    lower = [problem.lower(solution.x, w, *fold) for w, fold in zip(weights, zip(*data, strict=True), strict=True)]
    np.testing.assert_allclose(solution.lower, np.mean(lower), rtol=1e-6)
    slopes = np.asarray([judge(np.asarray(x, float))[1] for x in solution.history.record[0]])
    assert np.linalg.norm(slopes[0]) > 0.01
    np.testing.assert_allclose(solution.history.record[1], slopes, rtol=1e-5, atol=1e-7)


def test_several_minima_of_a_later_task_are_seen():
    # Of the second task alone the follower is a double well, whose left side is lower and whose right side y0 is in.
    problem = bilax.Problem(
        lambda x, y, depth: (x - y) ** 2, lambda x, y, depth: depth * (y**2 - 1) ** 2 + (y + 0.1) ** 2
    )
    solution = bilax.solve(problem, bilax.auto(), 0.0, 0.9, data=(np.asarray([0.0, 4.0]),), tasks=True)
    assert "several minima" in str(solution.plan)
    right: Any = scipy.optimize.minimize_scalar(
        lambda y: 4 * (y**2 - 1) ** 2 + (y + 0.1) ** 2, bounds=(-2, 0), method="bounded", options={"xatol": 1e-9}
    )
    np.testing.assert_allclose(solution.y, [-0.1, right.x], atol=1e-4)
    np.testing.assert_allclose(solution.x, np.mean(solution.y), atol=1e-4)


def test_a_curved_leader_set_takes_all_tasks_as_one_follower():
    problem = bilax.Problem(
        lambda x, y, mean: jnp.sum((y - 3) ** 2), lambda x, y, mean: jnp.sum((y - x - mean) ** 2), bilax.Ball(1.0)
    )
    data = (np.asarray([0.0, 0.5]),)
    solution = bilax.solve(problem, bilax.auto(), np.zeros(2), np.zeros(2), data=data, tasks=True, steps=200)
    np.testing.assert_allclose(solution.x, np.full(2, np.sqrt(0.5)), atol=1e-3)
    np.testing.assert_allclose(solution.y, solution.x + data[0][:, None], atol=1e-4)


TWO_WELLS = bilax.Problem(
    lambda x, y: (x - 0.8) ** 2,
    lambda x, y: (y**2 - 1) ** 2 + 0.3 * x * y,
    bilax.Box(-1.0, 1.0),
    bilax.Box(-2.0, 2.0),
)


def test_several_minima_are_seen_and_the_lowest_counts():
    """The follower's left well is the lower one for x > 0; y0 lies in the right one."""
    solution = bilax.solve(TWO_WELLS, bilax.auto(), 0.2, 1.0)
    assert "several minima" in str(solution.plan)
    grid = np.linspace(-2, 2, 400001)
    lowest = grid[np.argmin((grid**2 - 1) ** 2 + 0.3 * float(solution.x) * grid)]
    np.testing.assert_allclose(solution.y, lowest, atol=2e-5)
    assert solution.y < 0


def test_a_minimum_that_the_survey_misses_is_found_at_the_end(monkeypatch):
    from bilax.methods import auto

    monkeypatch.setattr(auto, "survey_minima", lambda *_: auto.Survey(0, 1.0, np.zeros((0, 1))))
    # The right well is as low for x < 0 and higher for x > 0, where the leader goes; y0 lies in it.
    solution = bilax.solve(TWO_WELLS, bilax.auto(), -0.5, 1.0)
    assert "run again with" in str(solution.plan)
    assert solution.y < 0


def test_auto_looks_at_the_clock_between_its_phases(monkeypatch):
    from bilax.methods import auto
    from bilax.run import solve_auto

    problem = bilax.Problem(lambda x, y: (y - 1) ** 2, lambda x, y: (y - 2 * x) ** 2)
    with monkeypatch.context() as patch:
        patch.setattr(auto, "survey_minima", None)
        solution = bilax.solve(problem, bilax.auto(), 0.3, 0.0, time_limit=0.0)
    assert solution.status is bilax.Status.time_limit
    assert "The time was up" in str(solution.plan)
    np.testing.assert_allclose((solution.y, solution.upper), (2 * solution.x, (2 * solution.x - 1) ** 2), rtol=1e-5)
    assert solution.steps <= 1
    # The time is up when the run has ended.
    ended, start = [], solve_auto.start
    monkeypatch.setattr(solve_auto, "start", lambda *plan: ended.append(0) or start(*plan))
    monkeypatch.setattr(solve_auto.time, "monotonic", lambda: 100.0 * len(ended))
    solution = bilax.solve(problem, bilax.auto(), 0.3, 0.0, time_limit=50.0)
    assert solution.status is bilax.Status.time_limit
    assert "no time to look for a lower follower" in str(solution.plan)
    np.testing.assert_allclose(solution.x, 0.5, atol=1e-5)


def test_an_answer_whose_follower_can_be_beaten_is_doubtful(monkeypatch):
    from bilax.methods import auto

    # Two wells; every start but those of the last look lies in the right one, which is the higher for x > 0.
    def spread(a_set, point, count, seed):
        return jnp.full((count, *jnp.shape(point)), 1.0 if seed != 5 else -1.0)

    monkeypatch.setattr(auto, "_spread", spread)
    solution = bilax.solve(TWO_WELLS, bilax.auto(), 0.5, 1.0)
    assert solution.y > 0
    assert solution.status is bilax.Status.doubtful
    assert "do not trust this answer" in str(solution.plan)


def test_where_the_follower_is_indifferent_the_leader_chooses():
    """f = (x − 1) y, from BASBLib: at x = 1 any y will do; F is 0 there and at least 1/2 elsewhere."""
    problem = bilax.Problem(
        lambda x, y: 0.5 * (1 - x) + x * y, lambda x, y: (x - 1) * y, bilax.Box(0.0, 1.0), bilax.Box(0.0, 1.0)
    )
    solution = bilax.solve(problem, bilax.auto(), 0.5, 0.5)
    np.testing.assert_allclose([solution.x, solution.y, solution.upper], [1, 0, 0], atol=1e-6)
    assert "optimistic" in str(solution.plan)


def test_a_direction_that_the_follower_does_not_mind_is_the_leaders():
    problem = bilax.Problem(
        lambda x, y: (y[0] - 1) ** 2 + (y[1] - 2) ** 2 + x**2, lambda x, y: (y[0] - x) ** 2, y_set=bilax.Box(-5.0, 5.0)
    )
    solution = bilax.solve(problem, bilax.auto(), 0.1, np.zeros(2))
    np.testing.assert_allclose([solution.x, *solution.y], [0.5, 0.5, 2], atol=1e-3)
    np.testing.assert_allclose(solution.lower, 0, atol=1e-12)


def test_a_follower_without_a_minimum_is_no_confident_answer():
    problem = bilax.Problem(
        lambda x, y: (x - 1) ** 2 + 0.01 * y, lambda x, y: jnp.exp(-y) * (1 + x**2), bilax.Box(-3.0, 3.0)
    )
    solution = bilax.solve(problem, bilax.auto(), 0.5, 0.0)
    assert solution.status is bilax.Status.doubtful
    assert "goes on falling" in str(solution.plan)


def test_large_followers_and_terms():
    rng = np.random.default_rng(0)
    inputs, valid = rng.normal(size=(60, 500)) / 8, rng.normal(size=(40, 500)) / 8
    truth = np.concatenate([3 * np.ones(5), np.zeros(495)])
    answers, goals = inputs @ truth, valid @ truth
    problem = bilax.Problem(
        lambda x, y: jnp.mean((valid @ y - goals) ** 2),
        lambda x, y: 0.5 * jnp.sum((inputs @ y - answers) ** 2),
        bilax.Box(-6.0, 2.0),
        lambda x: bilax.L1(jnp.exp(x)),
    )
    solution = bilax.solve(problem, bilax.auto(), -1.0, np.zeros(500))
    assert "L-BFGS" in str(solution.plan)
    assert np.sum(solution.y == 0) > 300
    # The follower's own optimality: no slope beyond the weight, and exactly the weight on the support.
    slope, weight = inputs.T @ (inputs @ solution.y - answers), np.exp(float(solution.x))
    assert np.max(np.abs(slope)) < weight * (1 + 1e-4)
    on = solution.y != 0
    np.testing.assert_allclose(slope[on], -weight * np.sign(solution.y[on]), rtol=1e-3)


def test_data_that_change_are_followed_by_first_order_steps():
    problem = bilax.Problem(
        lambda x, y, c: jnp.sum((y - 1) ** 2), lambda x, y, c: jnp.sum((y - x - 0.1 * c) ** 2), bilax.Box(-3.0, 3.0)
    )
    solution = bilax.solve(
        problem, bilax.auto(), 0.0, 0.0, data=lambda step, key: (jax.random.normal(key),), steps=1500
    )
    assert "data change" in str(solution.plan)
    np.testing.assert_allclose(solution.x, 1, atol=0.1)
    with pytest.raises(TypeError, match="chooses its optimiser"):
        bilax.solve(problem, bilax.auto(), 0.0, 0.0, data=(0.0,), optimizer=optax.sgd(0.1))


def test_a_follower_without_a_minimum_is_not_called_solved():
    problem = bilax.Problem(lambda x, y: y**2, lambda x, y: x * y, bilax.Box(1.0, 2.0))
    solution = bilax.solve(problem, bilax.auto(), 1.5, 0.0, steps=50)
    assert solution.status.failed


def test_a_run_that_goes_astray_says_so_and_ends_at_a_solved_point():
    """The leader makes the curvature grow past what the fixed step length allows."""
    problem = bilax.Problem(lambda x, y: (y - 1) ** 2 - 3 * x, lambda x, y: jnp.exp(x) * (y - 0.5) ** 2)
    solution = bilax.solve(problem, bilax.ls(30, 0.1), 0.0, 0.0, steps=500, optimizer=optax.sgd(0.05))
    assert solution.status is bilax.Status.diverged
    assert abs(solution.y - 0.5) < 0.1
    assert abs(solution.upper) < 20
    steady = bilax.solve(problem, bilax.ls(30, None), 0.0, 0.0, steps=60, optimizer=optax.sgd(0.05))
    assert steady.status is bilax.Status.step_limit
    np.testing.assert_allclose(steady.y, 0.5, atol=1e-3)


def test_optax_s_own_lbfgs_may_move_the_leader():
    problem, value = ridge()
    problem = bilax.Problem(problem.upper, problem.lower)
    method = bilax.Method(50, bilax.Newton(), derivative=bilax.Implicit(), follower_tolerance=1e-8)
    solution = bilax.solve(problem, method, jnp.full(6, -1.0), jnp.zeros(6), steps=20, optimizer=optax.lbfgs())
    assert solution.upper < value(np.full(6, -1.0))
    np.testing.assert_allclose(solution.upper, value(solution.x), rtol=1e-6)


def test_optimistix_s_minimisers_may_move_the_follower():
    problem, value = ridge()
    dynamics = bilax.FromOptimistix(optimistix.BFGS(1e-9, 1e-9))
    method = bilax.Method(300, dynamics, derivative=bilax.Implicit(), follower_tolerance=1e-6)
    (found, info), slope = jax.value_and_grad(bilax.approximate(problem, method), has_aux=True)(
        jnp.full(6, -1.0), jnp.zeros(6)
    )
    x = np.full(6, -1.0)
    np.testing.assert_allclose(found, value(x), rtol=1e-7)
    np.testing.assert_allclose(slope, scipy.optimize.approx_fprime(x, value, 1e-6), rtol=1e-4, atol=1e-7)
    assert 5 < int(info.steps) < 300
    bounded = bilax.Problem(problem.upper, problem.lower, y_set=bilax.NonNegative())
    with pytest.raises(ValueError, match="know no constraints"):
        bilax.approximate(bounded, method)(jnp.full(6, -1.0), jnp.zeros(6))


def test_frames_tensors_and_lists_are_taken_as_data():
    class Tensor:
        """As much of a PyTorch tensor as matters here."""

        def __init__(self, values):
            self.values = values

        def __array__(self, dtype=None, copy=None):
            return np.asarray(self.values, dtype)

    problem = bilax.Problem(lambda x, y, c: (y - 1) ** 2, lambda x, y, c: jnp.sum((y - x * c) ** 2))
    method = bilax.rhg(5, 0.1)
    plain = bilax.solve(problem, method, 1.0, 0.5, data=(np.ones(3),), steps=4)
    tensor = bilax.solve(problem, method, 1.0, 0.5, data=(Tensor([1.0, 1.0, 1.0]),), steps=4)
    loader = bilax.solve(problem, method, 1.0, 0.5, data=[[Tensor([1.0, 1.0, 1.0])]] * 6, steps=4)
    assert plain.upper == tensor.upper == pytest.approx(float(loader.upper))
    with pytest.raises(TypeError, match=r"data\[0\] is a Tensor whose columns are not all numbers"):
        bilax.solve(problem, method, 1.0, 0.5, data=(Tensor(np.asarray(["a", 1.0], object)),), steps=4)
    with pytest.raises(TypeError, match=r"data\[0\] is 'text', not an array"):
        bilax.solve(problem, method, 1.0, 0.5, data=("text",), steps=4)


# Arrays as people have them

PAIRS = """
    import os
    import numpy as np, jax, jax.numpy as jnp
    import bilax

    rng = np.random.default_rng(0)
    A, b = rng.normal(size=(3, 1)), rng.normal(size=3)
    problem = bilax.Problem(
        lambda x, y: jnp.mean((A @ y - b) ** 2) + 0.1 * x**2,
        lambda x, y: jnp.sum((A @ y - b) ** 2) + jnp.exp(x) * jnp.sum(y**2),
        bilax.Box(-3.0, 3.0), bilax.Box(-4.0, 4.0),
    )
    x, y = jnp.zeros(()), jnp.zeros(1)
    method = bilax.ls(20, 0.02)
    own = jax.jit(lambda y: jnp.sum((A @ y - b) ** 2))
    solution = bilax.evaluate(problem, x, y, ())
    point = type("Point", (), {"x": x, "y": y})()
    calls = {
        "solve": lambda: bilax.solve(problem, method, x, y, steps=3).upper,
        "auto": lambda: bilax.solve(problem, bilax.auto(), x, y).upper,
        "diagnose": lambda: bilax.diagnose(problem, x, y).lipschitz,
        "certify": lambda: bilax.certify(problem, point).gap,
        "check": lambda: bilax.check_hypergradient(problem, method, x, y, probes=2).errors["x"],
        "search": lambda: bilax.solve_global(problem, x, y, bound_seconds=0.1).upper,
        "own": lambda: own(y) + jax.jit(lambda y: own(y))(y),
    }
    # `auto` and `check` switch to double precision as `search` and `certify` do.
    for name in () if os.environ.get("BILAX_THOROUGH") else ("auto", "check"):
        del calls[name]
    # A walk that takes every ordered pair of calls once.
    order, left = ["solve"], {a: list(calls) for a in calls}
    def walk(a):
        while left[a]:
            walk(left[a].pop())
        order.append(a)
    order = []
    walk("solve")
    assert len(order) == len(calls) ** 2 + 1
    first = {}
    for name in order:
        value = np.asarray(calls[name]())
        assert np.isfinite(value), name
        assert abs(first.setdefault(name, value) - value) <= 1e-6 * (1 + abs(value)), name
    assert own(y).dtype == jnp.float32
    print("fine")
"""


DOUBLES = """
    import warnings
    import numpy as np, jax.numpy as jnp
    import bilax

    problem = bilax.Problem(lambda x, y: (y - 1) ** 2, lambda x, y: (y - x) ** 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = bilax.solve(problem, bilax.auto(), np.float64(0.3), np.zeros((), np.float32), steps=3)
        assert (found.x.dtype, found.y.dtype) == (np.float64, np.float32)
        masked = bilax.Problem(lambda x, y, mask: (y - 1) ** 2, lambda x, y, mask: jnp.sum(mask * (y - x) ** 2))
        bilax.solve(masked, bilax.rhg(2, 0.1), 0.3, 0.0, data=(np.asarray([0.0, 1.0, np.nan]),), steps=1)
        assert not caught, caught[0]
        bilax.solve(masked, bilax.rhg(2, 0.1), 0.3, 0.0, data=(np.asarray([0.1]),), steps=1)
        assert "data holds numbers" in str(caught.pop().message)
        for _ in range(2):
            bilax.solve(problem, bilax.rhg(2, 0.1), np.asarray(0.3), 0.0, steps=1)
    assert len(caught) == 1 and "jax_enable_x64" in str(caught[0].message), caught
    print("fine")
"""


def test_double_precision_that_would_be_rounded_is_told_once():
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(DOUBLES)], capture_output=True, text=True, check=False)
    assert out.stdout.strip() == "fine", out.stderr[-3000:]


def test_every_call_may_follow_every_other_with_closed_over_numpy_arrays():
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PAIRS)], capture_output=True, text=True, timeout=600, check=False
    )
    assert out.stdout.strip() == "fine", out.stdout + out.stderr[-3000:]


@pytest.mark.parametrize(
    ("lower", "nowhere"),
    [
        (lambda x, y: (y - 1.0) ** 2 + jnp.exp(x) * y**2, [False, False]),
        (lambda x, y: jnp.exp(x) * (y - 1.0) ** 2, [False, False]),
        (lambda x, y: (x + 8.0) * y + 3.0, [True, False]),
    ],
    ids=["a penalty", "all of f grows", "none at the end"],
)
def test_a_wide_range_of_penalties_does_not_make_the_follower_indifferent(lower, nowhere):
    """Of e²⁵ y² beside (y − 1)² a part in 10¹¹ is left at x = −8: it is all that the follower minds there."""
    problem = bilax.Problem(lambda x, y: y**2, lower)
    found = variation(problem, jnp.asarray([-8.0, 25.0]), jnp.linspace(-1.0, 2.0, 7), ())
    assert list(found.nowhere) == nowhere
    # F varies by 4: beside the least variation of f it counts for a hundred-millionth.
    values = [np.ptp([float(lower(x, y)) for y in np.linspace(-1.0, 2.0, 7)]) for x in (-8.0, 25.0)]
    assert found.weight == pytest.approx(1e-8 * min(v for v in values if v) / 4)


def test_units_of_the_follower_do_not_make_it_indifferent():
    units = jnp.asarray([1e-3, 1.0, 1e3])
    y, y0 = jnp.ones(3) / units, jnp.zeros(3)

    def flat(lower):
        problem = bilax.Problem(lambda x, y: jnp.asarray([1.0, 2.0, 3.0]) @ (units * y), lower)
        return bool(flat_where_it_matters(problem, jnp.ones(3), y, y0, ()))

    assert not flat(lambda x, y: jnp.sum((units * y - x) ** 2))
    assert flat(lambda x, y: jnp.sum((units * y - x)[1:] ** 2))
    assert flat(lambda x, y: jnp.sum(units * y - x) ** 2)


def test_a_problem_without_a_leader_is_a_follower_to_be_solved():
    problem = bilax.Problem(lambda x, y: jnp.sum(y), lambda x, y: jnp.sum((y - 2.0) ** 2), y_set=bilax.Box(-1.0, 1.0))
    solution = bilax.solve(problem, bilax.auto(), (), jnp.zeros(2))
    np.testing.assert_allclose(solution.y, 1.0)


SLOPING = bilax.Problem(lambda x, y: jnp.sum((y - 1.0) ** 4), lambda x, y: jnp.sum((y - x) ** 2))


def test_a_coarser_tolerance_ends_sooner():
    fine, coarse = (bilax.solve(SLOPING, bilax.auto(), np.full(2, 3.0), np.zeros(2), tolerance=t) for t in (1e-4, 0.3))
    assert coarse.status is fine.status is bilax.Status.converged
    assert coarse.steps < fine.steps
    assert fine.upper < coarse.upper < 32.0


@pytest.mark.parametrize(("mark", "ended"), [(1.0, True), (0.0, False)], ids=["nothing gained", "all gained"])
def test_a_leader_ends_where_a_hundred_evaluations_brought_nothing(mark, ended):
    method = bilax.Method(50, bilax.Newton(), derivative=bilax.Implicit(), start="warm", follower_tolerance=1e-9)
    algorithm, x, y = SolvedFollower(method, None), jnp.full(2, 3.0), jnp.zeros(2)
    here = algorithm.evaluate(SLOPING, x, y, ())
    search = algorithm._unknown(here, x, y)._replace(here=here, alpha=jnp.asarray(0.1), gained=jnp.asarray(1.0))
    search = search._replace(evaluations=jnp.asarray(100), mark=jnp.asarray(mark))
    after = algorithm._new_line(SLOPING, search)
    assert bool(after.done) is ended
    assert (float(after.mark), int(after.marked)) == (1.0, 100)
    # A little before it is not looked at.
    assert not bool(algorithm._new_line(SLOPING, search._replace(evaluations=jnp.asarray(99))).done)


def test_a_follower_that_took_all_its_steps_goes_on_before_the_leader_gives_up():
    # y0 is where F wants y, far from where a solved follower is: F at the start is better than all around it.
    stiffness = jnp.asarray([1.0, 1e-4])
    problem = bilax.Problem(lambda x, y: (y[1] - 3.0) ** 2, lambda x, y: 0.5 * jnp.sum(stiffness * (y - x) ** 2))
    solver: Any = {"dynamics": bilax.GradientDescent(0.9), "derivative": bilax.Implicit(1e-6, 10), "start": "warm"}
    method = bilax.Method(10_000, follower_tolerance=1e-8, **solver)
    solution = bilax.solve(problem, SolvedFollower(method, None), 0.0, jnp.asarray([0.0, 3.0]), steps=200)
    assert solution.status is bilax.Status.converged
    assert solution.upper < 1e-5
    np.testing.assert_allclose(solution.x, 3.0, atol=2e-3)


def test_a_leader_that_no_step_helps_though_its_slope_says_so_is_doubtful():
    @jax.custom_jvp
    def turned(x):
        return x

    turned.defjvp(lambda primals, tangents: (primals[0], -tangents[0]))
    problem = bilax.Problem(lambda x, y: (turned(x) - 3.0) ** 2 + 0.0 * y, lambda x, y: (y - x) ** 2)
    solution = bilax.solve(problem, bilax.auto(), 0.0, 0.0)
    assert solution.status is bilax.Status.doubtful
    assert "no step lowers F" in str(solution.plan)


@pytest.mark.parametrize(("gained", "varied", "stuck"), [(0.0, 1e-2, False), (0.0, 1e-3, True), (1e-2, 0.0, False)])
def test_a_run_that_begins_at_the_answer_is_not_doubtful(gained, varied, stuck):
    """It gains nothing, and its slope is not quite zero: what that promises is measured by what F varies by."""
    numbers = {"failures": 3, "promised": 6e-7, "gained": gained, "varied": varied}
    nothing: Any = [jnp.zeros(())] * len(Search._fields)
    unknown = Search(*nothing)
    method = bilax.Method(10, bilax.LBFGS(), derivative=bilax.Implicit(), start="warm")
    search = unknown._replace(**{name: jnp.asarray(number) for name, number in numbers.items()})
    assert SolvedFollower(method, None)._stuck(search) == stuck
