"""The work of `bilax bench implicit`: its reference is right, and bilax's side comes to it."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
import scipy.optimize

from bilax.experiments.peers import implicit, implicit_by_bilax, work


@pytest.mark.parametrize("name", ["elastic net", "svm box", "svm simplex"])
def test_the_reference_is_what_differences_give_and_lbfgs_comes_to_it(name, tmp_path):
    with jax.enable_x64(True):
        given = work.make(name, 50, 0)
        work.store(given, tmp_path, "float64")
        exact = implicit_by_bilax.reference({"work": name, "folder": str(tmp_path)})
        assert exact["differences"] < 1e-6
        assert exact["residual"] < 1e-12
        run = implicit_by_bilax.hypergradient({"work": name, "variant": "LBFGS + cg", "most": 2000})
        slope, _ = jax.jit(run)((1e-8, 1e-9), given.x, given.y0, *given.data)
        assert float(slope) == pytest.approx(exact["slope"], rel=1e-6)


def test_the_non_negative_follower_is_scipys(tmp_path):
    given = work.make("nnls", 30, 0)
    train, target, held_out, held_out_target = given.data

    def validation(x):
        rows = np.concatenate([train / np.sqrt(len(train)), np.sqrt(np.exp(x)) * np.eye(30)])
        w = scipy.optimize.nnls(rows, np.concatenate([target / np.sqrt(len(train)), np.zeros(30)]))[0]
        return np.mean((held_out @ w - held_out_target) ** 2)

    with jax.enable_x64(True):
        work.store(given, tmp_path, "float64")
        exact = implicit_by_bilax.reference({"work": "nnls", "folder": str(tmp_path)})["slope"]
    differences = (validation(given.x + 1e-4) - validation(given.x - 1e-4)) / 2e-4
    assert exact == pytest.approx(differences, rel=1e-5)


def test_the_search_takes_the_loosest_that_reaches_the_level():
    class Answers(implicit.Side):
        def __init__(self, steps):
            self.steps, self.asked = steps, []

        def ask(self, **order):
            tolerance, linear = order["tolerance"], order["linear"]
            self.asked.append(tolerance)
            seconds = 1 / tolerance + 0.1 / linear
            return {"slope": 1 + 0.1 * tolerance + 0.01 * linear, "steps": self.steps, "seconds": seconds}

    found = implicit.loosest(Answers(steps=1), "any", 1e-3, 1.0, 1e-9, np.inf, most=100)
    assert found["reached"]
    assert found["tolerance"] == pytest.approx(10**-2.5)
    assert found["linear"] > 1e-2
    stuck = Answers(steps=100)
    assert not implicit.loosest(stuck, "any", 1e-3, 1.0, 1e-9, np.inf, most=100)["reached"]
    assert stuck.asked == [1.0]


def test_a_process_answers_orders_by_lines(tmp_path):
    work.store(work.make("ridge", 10, 0), tmp_path, "float32")
    orders = [
        {"do": "compile", "work": "ridge", "folder": str(tmp_path), "variant": "LBFGS + cg", "most": 100},
        {"do": "run", "tolerance": 1e-3, "linear": 1e-3},
        {"do": "peak"},
    ]
    command = [sys.executable, "-m", "bilax.experiments.peers.implicit_by_bilax"]
    lines = "".join(json.dumps(order) + "\n" for order in orders)
    out = subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout.splitlines()
    compiled, run, peak = map(json.loads, out)
    assert compiled["seconds"] > 0
    assert np.isfinite(run["slope"])
    assert run["steps"] > 0
    assert peak["megabytes"] > 50
