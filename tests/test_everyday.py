"""The everyday problems: their judges against closed forms, scikit-learn and the JAX objectives; the bench."""

import ast
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize
from sklearn.linear_model import LogisticRegression, Ridge

from bilax.app import cli
from bilax.experiments.everyday import bench, best, data, judges
from bilax.experiments.everyday.judges import ravel, unravel
from bilax.experiments.everyday.problems import PROBLEMS
from bilax.problem.terms import inside
from tests.test_cli import run_cli

STORED = Path(__file__).parent.parent / "results" / "everyday-best.json"
IN_SINGLE = {"tolls-entropy", "tolls-squares", "ridge-one", "example-weights", "unscaled", "softmax", "svm-dual"}
"""whose users keep their arrays in float32"""


def moved(point, rng, size):
    vector = ravel(point)
    return unravel(vector + size * rng.normal(size=vector.shape), point)


@pytest.mark.parametrize("name", PROBLEMS)
def test_objectives_are_the_judges_and_the_refit_is_stationary(name):
    problem, x0, y0, judge, given = PROBLEMS[name]()
    rng = np.random.default_rng(0)
    x = moved(x0, rng, 0.3)
    y = moved(judge.refit(x), rng, 0.0)
    tolerance = 1e-6 if name in IN_SINGLE else 1e-12
    for point in (jax.tree.map(np.abs, moved(y0, rng, 0.1)), y):
        np.testing.assert_allclose(problem.upper(x, point, *given), judge.upper(x, point), tolerance)
        np.testing.assert_allclose(problem.lower(x, point, *given), judge.lower(x, point), tolerance)
    gradient = jax.grad(lambda y: problem.lower(x, y, *given))(jax.tree.map(jnp.asarray, y))
    step = inside(problem.y_set, jax.tree.map(lambda a, b: a - 1e-3 * b, y, gradient))
    residual = (ravel(step) - ravel(y)) / 1e-3
    np.testing.assert_allclose(residual, 0, atol=2e-5)


@pytest.mark.parametrize(("name", "x"), [("wells", 0.5), ("tanh-network", -8.0)])
def test_the_refit_is_the_lowest_of_many_descents(name, x):
    _, _, y0, judge, _ = PROBLEMS[name]()
    rng = np.random.default_rng(1)
    ends = [
        optimize.minimize(lambda y: judge.lower(x, unravel(y, y0)), 2 * rng.normal(size=ravel(y0).shape)).fun
        for _ in range(20)
    ]
    assert max(ends) > min(ends) + 0.01, "one basin only"
    np.testing.assert_allclose(judge.lower(x, judge.refit(x)), min(ends), 1e-6)


def test_known_optima():
    found = {name: best.search(PROBLEMS[name]().judge, PROBLEMS[name]().x0) for name in ("tolls-entropy", "duopoly")}
    squares = PROBLEMS["tolls-squares"]()
    np.testing.assert_allclose(found["tolls-entropy"].best, -2.00853, atol=5e-6)
    np.testing.assert_allclose(best.search(squares.judge, squares.x0).best, -2.29167, atol=5e-6)
    # Two firms answer: the leader earns x (85 − x) / 3.
    np.testing.assert_allclose(found["duopoly"].best, -(42.5**2) / 3)

    A, B, c, wanted = data.stiff()
    stacked = np.concatenate([np.linalg.pinv(A) @ B, np.sqrt(0.02) * np.eye(5)])
    target = np.concatenate([wanted - np.linalg.pinv(A) @ c, np.zeros(5)])
    stiff = best.search(judges.stiff(), np.zeros(5))
    np.testing.assert_allclose(stiff.best, 0.5 * np.linalg.lstsq(stacked, target)[1][0], 1e-6)


def test_the_best_portfolio_is_that_of_the_leader_who_invests_himself():
    judge, sums_to_one = judges.portfolio(), {"type": "eq", "fun": lambda y: y.sum() - 1}
    own = optimize.minimize(
        lambda y: judge.upper(None, y), np.full(8, 1 / 8), bounds=[(0, 1)] * 8, constraints=[sums_to_one], tol=1e-12
    )
    stored = json.loads(STORED.read_text())["results"]["portfolio"]
    np.testing.assert_allclose(stored["best"], own.fun, 1e-5)


def test_refits_are_scikit_learns():
    train, target = data.diabetes_products()[:2]
    ridge = Ridge(alpha=np.exp(1.5), fit_intercept=False).fit(train, target)
    np.testing.assert_allclose(judges.ridge_one().refit(1.5), ridge.coef_, 1e-8)

    options = {"tol": 1e-10, "max_iter": 10_000}
    train, target = data.tumours().standardised()[:2]
    logistic = LogisticRegression(C=0.5 / len(target) / np.exp(-4), **options).fit(train, target)
    fitted = judges.penalties().refit(np.full(30, -4.0))
    np.testing.assert_allclose(fitted["w"], logistic.coef_[0], atol=1e-5)
    np.testing.assert_allclose(fitted["b"], logistic.intercept_[0], atol=1e-5)

    train, target = data.digits()[:2]
    softmax = LogisticRegression(C=0.5 / len(target) / np.exp(-3), **options).fit(train, target)
    fitted = judges.softmax().refit(np.full(5, -3.0))
    np.testing.assert_allclose(fitted["W"].T, softmax.coef_, atol=1e-5)


@pytest.mark.parametrize("name", ["penalties", "unscaled", "example-weights"])
def test_slopes_are_differences(name):
    _, x0, _, judge, _ = PROBLEMS[name]()
    x = moved(x0, np.random.default_rng(2), 0.5)
    assert judge.slope is not None
    slope = [(judge.value(x + h) - judge.value(x - h)) / 2e-5 for h in 1e-5 * np.eye(len(x))]
    np.testing.assert_allclose(judge.slope(x), slope, atol=1e-9)


def test_judges_use_neither_jax_nor_bilax():
    for module in (judges, data, best):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {n for n in names if n.split(".")[0] in ("jax", "bilax") and ".everyday" not in n}


@pytest.mark.parametrize("name", PROBLEMS)
def test_stored_best_values_are_of_these_problems(name):
    stored = json.loads(STORED.read_text())["results"][name]
    _, x0, _, judge, _ = PROBLEMS[name]()
    np.testing.assert_allclose(judge.value(unravel(ravel(x0), x0)), stored["start"], 1e-6)
    np.testing.assert_allclose(judge.value(unravel(np.asarray(stored["x"]), x0)), stored["best"], 1e-5)
    assert stored["best"] <= stored["local"] < stored["start"]


def test_scores_tell_good_ends_from_bad_ones():
    everyday = PROBLEMS["tolls-entropy"]()
    record = {"start": everyday.judge.value(everyday.x0), "best": -2.0085283}

    def score(x, upper):
        return bench.judge(everyday, record, {"x": x, "upper": upper})

    good = score([2.5093, 2.5086, 2.5089], -2.0085)
    assert good["progress"] > 0.9999
    assert good["off"] < 1e-4
    assert score([1.0, 1.0, 1.0], -1.1)["progress"] == 0
    np.testing.assert_allclose(score([1.0, 1.0, 1.0], -1.1)["off"], 1.1 / 0.987962 - 1, 1e-4)
    assert score([2.5, 2.5, 5 + 1e-6], -2)["progress"] > 0.5
    assert score([2.5, 2.5, 5.1], -2)["progress"] < 0, "outside the bounds"
    assert score([2.5, np.nan, 2.5], -2)["progress"] == 0
    assert score([0.0, 0.0, 0.0], -0.1)["off"] > 1, "F is zero without tolls"


def test_a_call_runs_in_a_process_of_its_own_within_its_time():
    end = bench.in_new_process("duopoly", "advice", 100.0)
    assert end["status"] == "step_limit"
    assert bench.judge(PROBLEMS["duopoly"](), {"start": -250.0, "best": -602.0833}, end)["progress"] > 0.9
    assert float(np.float32(end["upper"])) == end["upper"], "computed in single precision"
    assert bench.in_new_process("duopoly", "advice", -20.0)["status"] == "out of time"


def test_the_bench_stores_and_shows_what_it_found(tmp_path, monkeypatch, capsys):
    end = {"x": [-0.373], "upper": 0.0601, "seconds": 30.0, "status": "converged", "plan": "newton"}
    monkeypatch.setattr(bench, "in_new_process", lambda name, call, limit: end)
    cli.main(["bench", "everyday", "--only", "wells", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert out.count("1 of 1") == 2
    assert "0 of 1; not wells" in out, "too slow"
    record = json.loads((tmp_path / "everyday-wells.json").read_text())["results"]["wells"]
    assert record["default"]["progress"] > 0.9999
    assert (tmp_path / "everyday-best.json").exists()
    assert run_cli("bench", "everyday", "--only", "well", "--out", tmp_path) == 2
    assert "did you mean wells?" in capsys.readouterr().err
