"""Wrong input: an error at the call that names the argument and the remedy."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest

import bilax
from tests.problems import toy


@pytest.fixture(autouse=True)
def as_a_user_has_it(monkeypatch):
    """Without the run-time type checker, which would otherwise speak first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


PROBLEM = toy().problem
METHOD = bilax.iaptt_gm(5, 1e-2)


def test_objectives_must_be_scalar_and_floating():
    vector = bilax.Problem(lambda x, y: x * jnp.ones(3), lambda x, y: y**2)
    with pytest.raises(ValueError, match=r"upper\(x, y, \*data\) must return a scalar.*mean or a sum"):
        bilax.solve(vector, METHOD, 1.0, 1.0)
    pair = bilax.Problem(lambda x, y: y, lambda x, y: (y**2, y))
    with pytest.raises(ValueError, match=r"lower\(x, y, \*data\) must return a scalar"):
        bilax.approximate(pair, METHOD)(1.0, 1.0)
    batch = bilax.Problem(lambda x, y: y, lambda x, y: y**2, lower_at=lambda k, x, y: y * jnp.ones(2))
    with pytest.raises(ValueError, match=r"lower_at\(k, x, y, \*data\) must return a scalar"):
        bilax.approximate(batch, METHOD)(1.0, 1.0)
    with pytest.raises(TypeError, match=r"lower_at.*function \(k, x, y, \*data\)"):
        bilax.Problem(lambda x, y: y, lambda x, y: y**2, lower_at=3)  # pyright: ignore[reportArgumentType]
    whole = bilax.Problem(lambda x, y: jnp.asarray(1), lambda x, y: y**2)
    with pytest.raises(TypeError, match=r"upper.*floating"):
        bilax.solve(whole, METHOD, 1.0, 1.0)


def test_points_must_hold_floating_arrays():
    with pytest.raises(TypeError, match=r"x0 has dtype int.*1\.0"):
        bilax.solve(PROBLEM, METHOD, 1, 1.0)
    with pytest.raises(TypeError, match=r"y0\['a'\] has dtype int"):
        bilax.solve(PROBLEM, METHOD, 1.0, {"a": np.arange(3)})
    with pytest.raises(ValueError, match="y0 is empty"):
        bilax.solve(PROBLEM, METHOD, 1.0, jnp.zeros((0,)))
    with pytest.raises(ValueError, match="y0 holds no arrays"):
        bilax.solve(PROBLEM, METHOD, 1.0, ())
    with pytest.raises(TypeError, match=r"x0.*not an array"):
        bilax.solve(PROBLEM, METHOD, "one", 1.0)
    with pytest.raises(ValueError, match="common leading axis"):
        bilax.multistart(PROBLEM, METHOD, jnp.ones(3), jnp.ones(4))
    with pytest.raises(ValueError, match="single start"):
        bilax.multistart(PROBLEM, METHOD, 1.0, 2.0)


def test_structures_must_match():
    boxed = bilax.Problem(PROBLEM.upper, PROBLEM.lower, bilax.Box({"a": 0.0}, {"a": 1.0}), bilax.Reals())
    with pytest.raises(ValueError, match="x0 does not fit its set"):
        bilax.solve(boxed, METHOD, 1.0, 1.0)

    class Squash:
        def project(self, v):
            return jnp.zeros(3)

    with pytest.raises(ValueError, match=r"project\(y0\).*must be the same"):
        bilax.solve(bilax.Problem(PROBLEM.upper, PROBLEM.lower, y_set=Squash()), METHOD, 1.0, 1.0)
    with pytest.raises(ValueError, match="lo must not exceed hi"):
        bilax.Box(1.0, 0.0)
    with pytest.raises(ValueError, match="radius must be positive"):
        bilax.Ball(0.0)
    with pytest.raises(TypeError, match=r"x_set.*project"):
        bilax.Problem(PROBLEM.upper, PROBLEM.lower, x_set=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"upper.*expected a function"):
        bilax.Problem(1.0, PROBLEM.lower)  # pyright: ignore[reportArgumentType]


def test_a_start_outside_its_set_is_projected_with_a_warning():
    with pytest.warns(UserWarning, match="x0 lies outside its set.*projected"):
        solution = bilax.solve(PROBLEM, METHOD, 11.0, 1.0, steps=1)
    assert float(solution.history.upper[0]) == pytest.approx(float(bilax.approximate(PROBLEM, METHOD)(10.0, 1.0)[0]))
    with pytest.warns(UserWarning, match="y0s lies outside its set"):
        bilax.multistart(PROBLEM, METHOD, jnp.ones(2), jnp.asarray([3.0, 0.0]), steps=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bilax.rhg(0, 0.1), "inner_steps must be a whole number of at least 1, got 0"),
        (lambda: bilax.rhg(2.5, 0.1), "inner_steps must be a whole number"),  # pyright: ignore[reportArgumentType]
        (lambda: bilax.t_rhg(5, 0.1, window=6), "window=6 exceeds inner_steps=5"),
        (lambda: bilax.t_rhg(5, 0.1, window=0), "window must be at least 1"),
        (lambda: bilax.rhg(5, 0.0), "step_size must be positive"),
        (lambda: bilax.rhg(5, -1.0), "step_size must be positive"),
        (lambda: bilax.rhg(5, float("nan")), "step_size must be positive and finite"),
        (lambda: bilax.rhg(5, [0.1, 0.1]), "step_size has 2 entries for inner_steps=5"),
        (lambda: bilax.rhg(2, [0.1, -0.1]), "step_size must be positive"),
        (lambda: bilax.rhg(5, lambda k: 0.1 - 0.05 * k), "step_size must be positive"),
        (lambda: bilax.bda(5, 0.1, mu=1.0), "mu must lie strictly between 0 and 1"),
        (lambda: bilax.bda(2, 0.1, mu=[0.4, 3.0]), "mu must lie strictly between 0 and 1, got 3"),
        (lambda: bilax.bda(5, 0.1, mu=[0.4, 0.4]), "mu has 2 entries for inner_steps=5"),
        (lambda: bilax.bda(5, 0.1, mu=lambda k: 2.0), "mu must lie strictly between 0 and 1"),
        (
            lambda: bilax.ns(5, 0.1, dynamics=bilax.FromOptax(optax.sgd(0.1))),
            "optax optimiser or a line search does not tell.*Implicit",
        ),
        (lambda: bilax.Box(float("nan"), 1.0), "nor be NaN"),
        (lambda: bilax.Box(5.0, {"a": 1.0}), "lo must not exceed hi"),
        (lambda: bilax.Box({"a": 1.0, "b": 3.0}, 2.0), "lo must not exceed hi"),
        (lambda: bilax.ns(5, 0.1, terms=0), "terms must be at least 1"),
        (lambda: bilax.ls(5, 0.1, tolerance=0.0), "tolerance of the linear solve must be positive"),
        (lambda: bilax.ls(5, 0.1, max_steps=0), "max_steps of the linear solve"),
        (lambda: bilax.ls(5, 0.1, start="auxiliary"), 'start="auxiliary" optimises z.*has no z-gradient.*start="warm"'),
        (lambda: bilax.t_rhg(5, 0.1, window=3, start="auxiliary"), "has no z-gradient"),
        (lambda: bilax.rhg(5, 0.1, derivative=bilax.FiniteDifference()), "inner_steps=1"),
        (lambda: bilax.one_step(0.1, epsilon=-1.0), "epsilon must be positive"),
        (lambda: bilax.rhg(5, 0.1, start="hot"), 'must be "fixed", "warm"'),  # pyright: ignore[reportArgumentType]
        (lambda: bilax.Nesterov(0.1, "fast"), 'expected "paper" or "fista"'),  # pyright: ignore[reportArgumentType]
    ],
)
def test_methods_refuse_wrong_settings(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_solve_refuses_wrong_settings():
    with pytest.raises(ValueError, match="steps must be a whole number"):
        bilax.solve(PROBLEM, METHOD, 1.0, 1.0, steps=0)
    with pytest.raises(ValueError, match="tolerance must be positive"):
        bilax.solve(PROBLEM, METHOD, 1.0, 1.0, tolerance=-1.0)
    with pytest.raises(TypeError, match=r"data must be a tuple.*data=\(batch,\)"):
        bilax.solve(PROBLEM, METHOD, 1.0, 1.0, data=jnp.ones(3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="optimizer must be an optax"):
        bilax.solve(PROBLEM, METHOD, 1.0, 1.0, optimizer=0.1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"key must be a random key such as jax\.random\.key\(0\), got 0"):
        bilax.solve(PROBLEM, METHOD, 1.0, 1.0, key=0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"saving must be bilax\.Saving\(folder\), got 'here'"):
        bilax.solve(PROBLEM, METHOD, 1.0, 1.0, saving="here")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="callbacks must be a list"):
        bilax.solve(PROBLEM, METHOD, 1.0, 1.0, callbacks=print)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"method must be a bilax\.Method"):
        bilax.solve(PROBLEM, bilax.iaptt_gm, 1.0, 1.0)  # pyright: ignore[reportArgumentType]


METHODS = {"iaptt": bilax.iaptt_gm(4, 0.1), "rhg": bilax.rhg(4, 0.1), "ls": bilax.ls(4, 0.1, tolerance=None)}


def blow_up(where):
    """An objective that turns NaN at outer step `where`, through its data."""
    problem = bilax.Problem(lambda x, y, bad: (x - y) ** 2 + bad, lambda x, y, bad: 0.5 * (y - 2 * x) ** 2 + 0.1 * y**4)
    return problem, lambda step, key: (jnp.where(step == where, jnp.nan, 0.0),)


@pytest.mark.parametrize("where", [0, 7, 19, 20])
@pytest.mark.parametrize(
    "method", [bilax.iaptt_gm(4, 0.1), bilax.rhg(4, 0.1), bilax.ls(4, 0.1, tolerance=None)], ids=["iaptt", "rhg", "ls"]
)
def test_nan_ends_in_a_status_and_the_best_solved_point(method, where):
    problem, data = blow_up(where)
    healthy = bilax.solve(problem, method, 1.0, 0.5, steps=20, data=blow_up(99)[1])
    solution = bilax.solve(problem, method, 1.0, 0.5, steps=20, data=data)
    assert solution.status is bilax.Status.non_finite
    assert "NaN" in solution.status.message
    assert solution.steps == min(where, 20)
    assert len(solution.history.upper) == solution.steps
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((solution.x, solution.y, solution.z)))
    np.testing.assert_array_equal(solution.history.upper, healthy.history.upper[: solution.steps])
    if where:
        seen = healthy.history
        best = int(np.argmin(np.abs(seen.upper[:where] - solution.upper)))
        assert float(solution.upper) == float(seen.upper[best])
        # No point before is lower at a follower as near to stationary.
        assert not np.any((seen.upper[:where] < solution.upper) & (seen.residual[:where] <= seen.residual[best]))
    with pytest.raises(bilax.BilevelError, match=f"non_finite after {solution.steps} outer steps") as caught:
        bilax.solve(problem, method, 1.0, 0.5, steps=20, data=data, throw=True)
    assert caught.value.solution.steps == solution.steps


def test_a_follower_that_diverges_is_told_from_a_bad_objective():
    problem = bilax.Problem(lambda x, y: jnp.sum(jnp.tanh(y) * x), lambda x, y: jnp.sum((y - x) ** 4))
    solution = bilax.solve(problem, bilax.iaptt_gm(50, 10.0), 1.0, 3.0, steps=5)
    assert solution.status is bilax.Status.diverged
    assert "step_size smaller" in solution.status.message
    assert np.isfinite(solution.x)
    assert np.isfinite(solution.y)


def test_a_leader_that_runs_away_is_caught():
    problem = bilax.Problem(lambda x, y: -(x**4) + y, lambda x, y: 0.5 * (y - x) ** 2)
    solution = bilax.solve(problem, bilax.rhg(3, 0.1), 1.0, 0.0, steps=200, optimizer=optax.sgd(1.0))
    assert solution.status is bilax.Status.diverged
    assert abs(solution.x) < 1e6
    assert np.isfinite(solution.upper)


def test_one_bad_start_leaves_the_others_alone():
    problem = bilax.Problem(lambda x, y: -(x**3) + y, lambda x, y: 0.5 * (y - x) ** 2)
    batch = bilax.multistart(problem, bilax.rhg(3, 0.1), jnp.asarray([-1.0, 5.0]), jnp.zeros(2), steps=50)
    assert bilax.Status(int(batch.status[0])) is bilax.Status.step_limit
    assert bilax.Status(int(batch.status[1])) is bilax.Status.diverged
    assert batch.best.status is bilax.Status.step_limit
    assert len(batch[1].history.upper) == batch[1].steps < 50
    assert np.isnan(batch.history.upper[1, batch[1].steps :]).all()
    assert not batch.history.k_bar[1, batch[1].steps :].any()
    none = bilax.multistart(
        bilax.Problem(lambda x, y: jnp.log(x), lambda x, y: y**2), bilax.rhg(3, 0.1), -jnp.ones(2), jnp.ones(2), steps=5
    )
    assert "best upper=nan" in repr(none)
    assert none.best.status is bilax.Status.non_finite
