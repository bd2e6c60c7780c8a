"""The implicit rule against differences of solved followers, for every set and term, in float64 where not said."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
import pytest

import bilax
from tests.followers import FOLLOWERS, X

H = 1e-4
REST = bilax.GradientDescent(1e-13)
"""stays where it is put"""


def solved(case):
    """y(x) as Newton's method finds it, compiled once for all x."""
    phi = bilax.approximate(case.problem, bilax.Method(40, bilax.Newton(), follower_tolerance=1e-12))
    start = jax.tree.map(jnp.asarray, case.start)
    return lambda x: phi(x, start)


def differences(value, x):
    """Fourth-order central differences in every coordinate."""
    unit = np.eye(x.size) * H
    return np.asarray(
        [(8 * (value(x + e) - value(x - e)) - (value(x + 2 * e) - value(x - 2 * e))) / (12 * H) for e in unit]
    )


def gradient_at(problem, rule, x, y):
    """The rule where y is given: one step that does not move it."""
    phi = bilax.approximate(problem, bilax.Method(1, REST, derivative=rule))
    (_, info), gradient = jax.jit(jax.value_and_grad(phi, has_aux=True))(x, y)
    return gradient, info


@pytest.mark.parametrize("name", list(FOLLOWERS))
def test_agrees_with_differences_of_the_solved_follower(name):
    """Densely and by iterations, at the solution, whatever way led there."""
    case = FOLLOWERS[name]
    solve = solved(case)
    y = solve(X)[1].y
    expected = differences(lambda x: float(solve(x)[0]), X)
    for rule in (bilax.Implicit(1e-9), bilax.Implicit(1e-9, 300, dense=0)):
        gradient, info = gradient_at(case.problem, rule, X, y)
        assert bool(info.solved)
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-7 if name == "stiff" else 2e-9)
    # The leader must matter through y: else the test would see nothing of the rule.
    through_y = expected - 0.2 * np.asarray(X)
    assert np.abs(through_y).min() > (1e-3 if name != "rosenbrock" else -1)


def test_active_constraints_are_found_at_the_point_itself():
    """f = 50 (y − x)², F = (y − .9)², Y = [0, 1], by plain steps of 1/1000: the bound is not active at x = 0.5."""
    problem = bilax.Problem(lambda x, y: (y - 0.9) ** 2, lambda x, y: 50 * (y - x) ** 2, y_set=bilax.Box(0.0, 1.0))
    method = bilax.Method(200, bilax.FromOptax(optax.sgd(1e-3)), derivative=bilax.Implicit())
    slope = jax.jit(jax.value_and_grad(bilax.approximate(problem, method), has_aux=True))
    for x, expected in ((0.5, -0.8), (0.01, -1.78), (0.99, 0.18), (1.5, 0.0), (-0.5, 0.0)):
        (_, info), gradient = slope(x, 0.3)
        assert bool(info.solved)
        np.testing.assert_allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_simplex_with_hessian_one_gives_no_nan_however_long(dtype):
    """f = ½‖y − x‖²: conjugate gradients have nothing left to do after a step or two."""
    goal = jnp.asarray([0.5, 0.3, 0.2, 0.0], dtype)
    problem = bilax.Problem(
        lambda x, y: jnp.sum((y - goal) ** 2), lambda x, y: 0.5 * jnp.sum((y - x) ** 2), y_set=bilax.Simplex()
    )
    x0 = jnp.asarray([0.3, 0.1, 0.2, 0.15], dtype)
    for rule in (bilax.Implicit(), bilax.Implicit(dense=0), bilax.Implicit(None, 5)):
        method = bilax.Method(5, bilax.GradientDescent(0.5), derivative=rule, start="warm")
        solution = bilax.solve(problem, method, x0, np.full(4, 0.25, dtype), steps=60, optimizer=optax.sgd(0.3))
        assert solution.status.name in ("step_limit", "converged")
        assert np.isfinite(solution.history.upper).all()
        np.testing.assert_allclose(solution.y, goal, atol=2e-2)


def test_flat_directions_that_the_leader_does_not_see():
    """f = ½ (y₁ + y₂ − x)² has a line of solutions; F sees y₁ + y₂ alone, so its gradient is known."""
    for sees, expected, is_solved in ((lambda y: (y[0] + y[1]) ** 2, 1.4, True), (lambda y: y[0] - y[1], 0.0, False)):
        problem = bilax.Problem(lambda x, y, sees=sees: sees(y), lambda x, y: 0.5 * (y[0] + y[1] - x) ** 2)
        for rule in (bilax.Implicit(), bilax.Implicit(dense=0)):
            gradient, info = gradient_at(problem, rule, jnp.asarray(0.7), jnp.asarray([0.5, 0.2]))
            assert np.isfinite(gradient)
            # What flat directions would do to F is not known, and it is said so.
            assert bool(info.solved) == is_solved
            if is_solved:
                np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_a_solver_of_ones_own():
    case = FOLLOWERS["ball of x"]
    y = solved(case)(X)[1].y
    expected, _ = gradient_at(case.problem, bilax.Implicit(), X, y)
    gradient, info = gradient_at(case.problem, bilax.Implicit(solver=lx.BiCGStab(1e-10, 1e-10)), X, y)
    assert bool(info.solved)
    np.testing.assert_allclose(gradient, expected, rtol=1e-7)
