"""What `auto` says of the end of a run."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

import bilax
from bilax.methods.auto_remarks import nudged, on_bounds, solved_anew
from bilax.methods.solved_follower import SolvedFollower


def ended_at(x, slope=1.0):
    """A run that gained 1, and what slope F had at its end."""
    history = SimpleNamespace(upper=np.asarray([2.0, 1.0]), grad_x_norm=np.asarray([3.0, slope]))
    return SimpleNamespace(x=x, history=history)


def test_leader_variables_on_their_bounds_are_named():
    boxes = {"a": bilax.Box(0.0, 2.0), "b": bilax.Box(-1.0, 1.0)}
    problem = bilax.Problem(lambda x, y: y, lambda x, y: y**2, bilax.Product(boxes))
    said = on_bounds(problem, ended_at({"a": np.asarray([1.0, 2.0]), "b": np.asarray(-1.0)}))
    assert said is not None
    assert said.startswith("2 of 3 leader variables")
    assert "x['a'][1] = 2, x['b'] = -1." in said
    assert said.endswith("widen it.")
    assert on_bounds(problem, ended_at({"a": np.asarray([1.0, 1.9]), "b": np.asarray(0.0)})) is None
    assert on_bounds(bilax.Problem(lambda x, y: y, lambda x, y: y**2), ended_at(np.asarray(3.0))) is None


def test_a_bound_beyond_which_nothing_is_to_be_had_is_not_to_be_widened():
    problem = bilax.Problem(lambda x, y: y, lambda x, y: y**2, bilax.Box(0.0, 1.0))
    said = on_bounds(problem, ended_at(np.asarray(1.0), slope=1e-7))
    assert said is not None
    assert "F hardly changes there (its slope is 1.0e-07)" in said


def test_a_zero_of_a_simplex_is_not_a_bound_to_widen():
    shares = bilax.Product((bilax.Each(bilax.Simplex()), bilax.NonNegative()))
    problem = bilax.Problem(lambda x, y: y, lambda x, y: y**2, shares)
    rows = np.asarray([[0.0, 1.0], [0.5, 0.5]])
    assert on_bounds(problem, ended_at((rows, np.asarray([1.0, 2.0])))) is None
    said = on_bounds(problem, ended_at((rows, np.asarray([1.0, 0.0]))))
    assert said is not None
    assert said.startswith("1 of 6 leader variables ended on a bound of X: x[1][1] = 0.")


def test_a_follower_that_ends_elsewhere_when_solved_anew_is_told():
    """The wells of (y² − 1)² + x y lie near ±1; F wants the left one, and y0 is in the right one."""
    problem = bilax.Problem(lambda x, y: (y + 1.0) ** 2, lambda x, y: (y**2 - 1.0) ** 2 + x * y)
    method = bilax.Method(50, bilax.Newton(), derivative=bilax.Implicit(), start="warm", follower_tolerance=1e-9)
    algorithm = SolvedFollower(method, None)
    wells = np.sort(np.roots([4.0, 0.0, -4.0, 0.1]).real)  # f' = 4y³ − 4y + x at x = 0.1
    history = bilax.History(*[np.asarray([3.0])] * 6)
    solution = bilax.Solution(
        x=np.asarray(0.1), y=wells[0], z=wells[0], upper=(wells[0] + 1) ** 2, lower=0.0, residual=0.0, k_bar=0,
        status=bilax.Status.converged, steps=1, history=history,
    )  # fmt: skip
    said = solved_anew(problem, algorithm, solution, jnp.asarray(0.9), ())
    assert said is not None
    assert f"F = {(wells[2] + 1) ** 2:.6g}" in said.words
    assert not said.too_good  # f is higher there
    assert solved_anew(problem, algorithm, solution, jnp.asarray(-0.9), ()) is None


def test_an_answer_that_the_lower_minimum_does_not_grant_is_too_good():
    """As above, but the run ended in the right well, which F likes better and which is the higher one in f."""
    problem = bilax.Problem(lambda x, y: (y - 1.0) ** 2, lambda x, y: (y**2 - 1.0) ** 2 + x * y)
    method = bilax.Method(50, bilax.Newton(), derivative=bilax.Implicit(), start="warm", follower_tolerance=1e-9)
    well = float(np.max(np.roots([4.0, 0.0, -4.0, 0.1]).real))
    solution = bilax.Solution(
        x=np.asarray(0.1), y=well, z=well, upper=(well - 1) ** 2, lower=(well**2 - 1) ** 2 + 0.1 * well, residual=0.0,
        k_bar=0, status=bilax.Status.converged, steps=1, history=bilax.History(*[np.asarray([3.0])] * 6),
    )  # fmt: skip
    said = solved_anew(problem, SolvedFollower(method, None), solution, jnp.asarray(-0.9), ())
    assert said is not None
    assert said.too_good
    assert "lower one in f" in said.words


def ended_with(y, upper, lower):
    history = bilax.History(*[np.asarray([3.0])] * 6)
    return bilax.Solution(
        x=np.asarray(0.1), y=y, z=y, upper=upper, lower=lower, residual=0.0, k_bar=0,
        status=bilax.Status.converged, steps=1, history=history,
    )  # fmt: skip


def test_a_follower_that_rests_on_a_saddle_falls_when_it_is_nudged():
    """f = (a − 1)² + (b² − 1)² has a saddle at (1, 0) and minima at (1, ±1); F likes the saddle."""
    problem = bilax.Problem(lambda x, y: 1 + y[1] ** 2, lambda x, y: (y[0] - 1) ** 2 + (y[1] ** 2 - 1) ** 2)
    method = bilax.Method(200, bilax.LBFGS(), derivative=bilax.Implicit(), start="warm", follower_tolerance=1e-9)
    algorithm = SolvedFollower(method, None)
    said = nudged(problem, algorithm, ended_with(np.asarray([1.0, 0.0]), 1.0, 1.0), ())
    assert said is not None
    assert said.too_good
    assert "is a saddle of f" in said.words
    assert "F = 2 and" in said.words
    assert "(here F = 1, f = 1)" in said.words
    assert nudged(problem, algorithm, ended_with(np.asarray([1.0, 1.0]), 2.0, 0.0), ()) is None
