"""The measured rates, on smaller versions of `bilax reproduce theory`, and the pictures."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilax
from bilax.experiments.suite.problems import PROBLEMS
from bilax.experiments.theory.theorems import Theory, acceleration, fit_slope, infima, residual_rate


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


def test_residuals_stay_below_the_bound_and_fall_at_its_rate():
    for case in (found := residual_rate(400))["cases"].values():
        assert (np.asarray(case["residual"]) <= np.asarray(case["bound"])).all()
    assert found["cases"]["slow follower"]["slope"] == pytest.approx(-0.5, rel=0.15)


def test_acceleration_has_the_predicted_slopes_but_not_with_the_printed_sequence():
    slopes = {name: case["slope"] for name, case in acceleration(300)["cases"].items()}
    assert slopes["gradient descent"] == pytest.approx(-1, rel=0.15)
    assert slopes["Nesterov, FISTA's t_k"] == pytest.approx(-2, rel=0.15)
    assert slopes["Nesterov, the paper's t_k"] == pytest.approx(-1, rel=0.15)


def test_infima_rise_to_the_best_stationary_value():
    cases = infima([1, 64])["cases"]
    for case in cases.values():
        assert case["minimum"][0] <= case["minimum"][1] + 1e-9
        assert case["minimum"][1] <= case["stationary"] + 1e-6
    assert cases["toy"]["minimum"][1] == pytest.approx(cases["toy"]["best"], abs=0.01)
    assert cases["mb_2007_05"]["minimum"][1] < cases["mb_2007_05"]["best"] - 0.9


def test_slopes_are_those_of_powers():
    counts = np.arange(1, 500)
    assert fit_slope(counts, 3.0 * counts**-1.5) == pytest.approx(-1.5)


def test_the_stored_numbers_hold_the_claims_and_redraw(tmp_path):
    stored = Path(__file__).parent.parent / "results" / "theory.json"
    shutil.copy(stored, tmp_path)
    target = Theory(out=tmp_path, redraw=True)
    target.main()
    assert (tmp_path / "theory.png").stat().st_size > 10_000
    held = [claim.held for claim in target.claims(json.loads(stored.read_text())["results"])]
    # All but the printed momentum sequence, which does not accelerate.
    assert held == [True, True, True, True, False, True]


# Pictures


def test_the_path_is_the_one_that_solve_takes():
    known, method = PROBLEMS["toy"], bilax.iaptt_gm(10, 1e-3)
    x0, y0 = jnp.asarray(5.0), jnp.asarray(1.0)
    path = bilax.leader_path(known.problem, method, x0, y0, steps=7)
    end = bilax.solve(known.problem, method, x0, y0, steps=6)
    assert path["x"].shape == (7, 1)
    assert path["x"][-1, 0] == pytest.approx(float(end.x))
    assert path["z"][-1, 0] == pytest.approx(float(end.z))
    assert path["y"][-1, 0] == pytest.approx(float(end.y))


def test_the_landscape_shows_global_and_local_minima():
    known = PROBLEMS["mb_2007_20"]
    figure = bilax.landscape(known.problem, known.x0, known.y0, resolution=101)
    lines = {line.get_label(): line.get_xydata() for line in figure.axes[0].get_lines()}
    best, local = lines["follower's global minima"], lines["follower's local minima"]
    # y = −1 is the follower's minimum where |x| < 1/2, y = |x| elsewhere.
    assert best[np.abs(best[:, 0]) < 0.48, 1].max() < -0.99
    assert np.allclose(local[np.abs(local[:, 0]) < 0.48, 1], np.abs(local[np.abs(local[:, 0]) < 0.48, 0]), atol=0.02)
    with pytest.raises(ValueError, match="basin_map"):
        bilax.landscape(PROBLEMS["b_1998_02"].problem, PROBLEMS["b_1998_02"].x0, known.y0)
    free = bilax.Problem(known.problem.upper, known.problem.lower)
    with pytest.raises(ValueError, match="x_range"):
        bilax.landscape(free, known.x0, known.y0)


def test_the_basin_map_colours_by_where_starts_end():
    known, one, zero = PROBLEMS["mb_2007_05"], jnp.ones(()), jnp.zeros(())
    problem = bilax.Problem(
        lambda x, y: y + 0 * x, lambda x, y: known.problem.lower((), y), bilax.Box(-1, 1), bilax.Box(-1, 1)
    )
    figure = bilax.basin_map(
        problem,
        bilax.rhg(80, 0.01),
        zero,
        zero,
        ((one, zero), (zero, one)),
        extent=(-1, 1, -1, 1),
        resolution=8,
        steps=2,
    )
    values = np.asarray(figure.axes[0].collections[0].get_array()).reshape(8, 8)
    assert values[:3] == pytest.approx(-0.5, abs=0.01)
    assert values[-3:] == pytest.approx(0.5, abs=0.01)
