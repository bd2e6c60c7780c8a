"""Problems on mini-batches: their judges are right, and the commands that run and compare methods on them."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from bilax.app import cli
from bilax.experiments.peers import stochastic as bench
from bilax.experiments.stochastic import compare, curves, problems
from bilax.experiments.stochastic.objectives import matrices, quadratic_mean
from bilax.experiments.stochastic.settings import METHODS, SETTINGS, samples_per_step, setting

ROOT = Path(__file__).parent.parent
SMALL = ["--count", "96", "--leaders", "64", "--dim-y", "4", "--dim-x", "3", "--batch", "16"]


small_quadratic = functools.partial(problems.quadratic, 96, 64, 4, 3)


def differences(value, x, h=1e-5):
    return np.array([(value(x + h * e) - value(x - h * e)) / (2 * h) for e in np.eye(len(x))])


def test_the_quadratics_judge_is_the_gradient_of_its_value_function():
    task = small_quadratic()
    in_double = [np.asarray(leaf, np.float64) for leaf in (*task.lower, *task.upper)]
    lower, upper = (type(task.lower)(*part) for part in (in_double[:6], in_double[6:]))

    def answer(x):
        found = scipy.optimize.minimize(
            lambda y: float(quadratic_mean(x, y, lower)),
            np.zeros(4),
            jac=lambda y: np.asarray(jax.grad(quadratic_mean, 1)(x, y, lower)),
            tol=1e-13,
        )
        return found.x

    x = np.array([0.3, -1.0, 2.0])
    slope = differences(lambda x: float(quadratic_mean(x, answer(x), upper)), x, 1e-3)
    found = task.judge(x, answer(x) + np.array([0.1, 0, 0, 0]))
    assert found["‖∇Φ‖²"] == pytest.approx(slope @ slope, rel=1e-5)
    assert found["‖y − y*‖²"] == pytest.approx(0.01, rel=1e-4)


def test_the_quadratics_examples_are_the_same_by_factors_and_by_matrices():
    task, x, y = small_quadratic(), jnp.arange(3.0), jnp.arange(4.0) - 1
    np.testing.assert_allclose(quadratic_mean(x, y, matrices(task.lower)), quadratic_mean(x, y, task.lower), rtol=1e-5)


def test_the_logistic_judge_is_the_gradient_of_its_value_function(monkeypatch):
    monkeypatch.setattr(problems, "find", lambda *_: None)
    problems.logistic.cache_clear()
    task = problems.logistic()
    problems.logistic.cache_clear()
    assert "breast cancer" in task.said
    assert task.counts == (284, 285)
    lower, upper = (
        problems.Signed(*(np.asarray(leaf, np.float64) for leaf in part)) for part in (task.lower, task.upper)
    )
    x = np.asarray(task.x0, np.float64)
    y, _ = problems.solved_logistic(x, lower)
    slope = jax.grad(task.problem.lower, 1)(x, jnp.asarray(y), upper, lower)
    assert np.linalg.norm(slope) < 1e-10
    value, gradient = problems.value_function(x, lower, upper)
    assert value == pytest.approx(float(task.problem.upper(x, y, upper, lower)), rel=1e-12)
    np.testing.assert_allclose(
        gradient, differences(lambda x: problems.value_function(x, lower, upper)[0], x, 1e-3), atol=3e-8
    )
    assert task.judge(x, y)["Φ"] == pytest.approx(value)


def test_cleaning_weighs_each_row_with_its_own_variable():
    task = problems.cleaning(0.5, "digits", (200, 100))
    assert task.x0.shape == (200,)
    assert task.counts == (100, 200)
    slope = jax.grad(task.problem.lower)(task.x0, task.y0 + 0.1, task.upper, jax.tree.map(lambda a: a[7:9], task.lower))
    assert set(np.flatnonzero(slope)) == {7, 8}
    # A network that sees the right labels answers better than one that answers at random.
    scores = np.linalg.lstsq(task.upper.inputs, task.upper.targets, rcond=1e-2)[0]
    assert task.judge(task.x0, scores)["validation error"] < 0.05
    assert task.judge(task.x0, task.y0)["test error"] > 0.8
    assert task.judge(task.x0, task.y0 + np.nan)["test error"] == 1


def test_looks_are_where_runs_of_fewer_steps_end():
    task = small_quadratic()
    where = task.problem, METHODS["soba"](setting("quadratic", "soba"), 10.0), task.x0, task.y0, task.minibatches(16)
    with jax.enable_x64(False):
        whole, half = curves.run(*where, 5, 4, 0), curves.run(*where, 5, 2, 0)
        ten = curves.run(*where, 5, 4, 0, seeds=3)
    np.testing.assert_allclose(whole.x[0, 1], half.x[0, -1], rtol=1e-6)
    np.testing.assert_allclose(whole.y[0, 1], half.y[0, -1], rtol=1e-6)
    assert ten.x.shape == (3, 4, 3)
    assert len({float(x) for x in ten.x[:, -1, 0]}) == 3


def test_run_quadratic_goes_on_as_if_it_had_not_been_broken_off(tmp_path, capsys):
    def run(out, steps, *more):
        arguments = [
            "run",
            "quadratic",
            *SMALL,
            "--every",
            "20",
            "--outer-steps",
            str(steps),
            "--out",
            str(tmp_path / out),
        ]
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments, "--json", *more])
        assert ended.value.code == 0
        return json.loads(capsys.readouterr().out)["0"]

    whole = run("whole", 80)
    run("parts", 40)
    parts = run("parts", 80, "--resume")
    assert parts["measures"] == whole["measures"]
    assert parts["recorded"] == [20, 40, 60, 80]
    assert whole["measures"]["samples seen"] == 2 * 16 * 80
    curve = whole["curves"]["‖∇Φ‖²"]
    assert curve[-1] < curve[0]
    cli.main(["report", str(tmp_path / "whole"), "--out", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--method", "sob"], "did you mean|soba"),
        (["--outer-steps", "30", "--every", "20"], "multiple of --every 20, got 30"),
        (["--rate", "-1"], "--rate must be positive"),
        (["--count", "8"], "--count must be at least a batch of 16"),
    ],
)
def test_wrong_options_are_refused(options, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "quadratic", *SMALL, *options, "--out", str(tmp_path / "out")])
    text = f"{ended.value.code} {capsys.readouterr().err}"
    assert any(part in text for part in said.split("|")), text


def test_compare_cleaning_takes_up_where_it_was(tmp_path, capsys):
    def compared(*methods):
        with jax.enable_x64(False):
            compare.CompareCleaning(methods=methods, seconds=0.02, dataset="digits", batch=16, out=tmp_path).main()
        return json.loads((tmp_path / "compare-cleaning.json").read_text())["results"]["methods"]

    first = compared("soba")["soba"]
    assert compared("soba", "v-pbgd") == {"soba": first, "v-pbgd": compared("v-pbgd")["v-pbgd"]}
    assert first["times"] == sorted(first["times"])
    assert set(first["values"][-1]) == {"test error", "held-out error", "1 − F1"}
    with pytest.raises(SystemExit):
        compared("sobar")


def test_compare_draws_all_methods(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare.problems, "quadratic", small_quadratic)
    monkeypatch.setattr(compare, "METHODS", {"soba": METHODS["soba"]})
    monkeypatch.setattr(compare, "LOOKS", 4)
    with jax.enable_x64(False):
        compare.CompareQuadratic(samples=2000, batch=16, out=tmp_path).main()
    assert "soba" in capsys.readouterr().out
    record = json.loads((tmp_path / "compare-quadratic.json").read_text())
    assert record["results"]["methods"]["soba"]["samples"] == 2048
    assert "| soba | **" in compare.which_method({"quadratic": record})
    assert (tmp_path / "compare-quadratic.png").stat().st_size > 10_000


def test_the_docs_have_the_table_that_the_stored_comparison_makes():
    stored = {name: json.loads((ROOT / "results" / f"compare-{name}.json").read_text()) for name in compare.SHOWN}
    table = compare.which_method(stored)
    assert table in (ROOT / "docs" / "methods.md").read_text(), table


def test_settings_are_for_methods_that_are_there():
    # A name that no method has would silently leave a problem at the default.
    assert {method for steps in SETTINGS.values() for method in steps} <= set(METHODS)
    assert {case.settings for case in bench.CASES.values()} <= set(SETTINGS)
    for problem in SETTINGS:
        for name, make in METHODS.items():
            steps = setting(problem, name)
            assert samples_per_step(name, make(steps, 30.0), steps, 64) >= 128


def one_run(seconds, values, seeds=1):
    return {"steps": 1000, "seconds": seconds, "wall": seconds[-1] / 2, "values": [[value] * seeds for value in values]}


LINE = {
    "peer": [one_run([1.0, 2.0], [8.0, 4.0]), one_run([1.0, 2.0], [9.0, 5.0])],
    "bilax": [one_run([0.5, 1.0], [6.0, 3.0])],
    "ten": [one_run([5.0, 10.0], [6.0, 3.0], 10)],
}


def test_results_are_compared_at_the_peers_times():
    assert bench.per_thousand(LINE, "peer") == 2000
    assert bench.per_thousand(LINE, "peer", "wall") == 1000
    assert bench.ratio(LINE, "bilax") == 2
    assert bench.ratio(LINE, "ten") == 2
    assert [list(one) for one in bench.at_budgets(LINE, "bilax")] == [[3.0], [3.0]]
    assert bench.as_good(LINE)
    slow = {**LINE, "bilax": [one_run([1.5, 3.0], [6.0, 3.0])]}
    assert [list(one) for one in bench.at_budgets(slow, "bilax")] == [[np.inf], [6.0]]
    assert not bench.as_good(slow)


def test_bench_stochastic_measures_bilax_alone_and_keeps_what_it_has(tmp_path, monkeypatch, capsys):
    case = bench.CASES["quadratic 1024"]._replace(make=small_quadratic)
    monkeypatch.setattr(bench, "CASES", {"quadratic 1024": case})
    monkeypatch.setattr(bench, "BATCH", 16)
    target = bench.Stochastic(out=tmp_path, quick=True, method="soba")
    target.main()
    said = capsys.readouterr().out
    assert "git clone" in said
    assert "quadratic 1024" in said
    stored = (tmp_path / "benchmarks" / "stochastic-quick.json").read_text()
    target.main()  # from what is stored
    assert (
        json.loads(stored)["results"]
        == json.loads((tmp_path / "benchmarks" / "stochastic-quick.json").read_text())["results"]
    )
