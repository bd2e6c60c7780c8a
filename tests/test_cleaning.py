"""Data hyper-cleaning: the network computed the cheap way, the data, the loop, the commands."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilax
from bilax.app.report import Report
from bilax.app.run_folder import read_run
from bilax.datasets import Examples, find, load
from bilax.experiments.cleaning import problem as cleaning
from bilax.experiments.cleaning.problem import Batch, Split
from bilax.experiments.cleaning.run import Cleaning
from bilax.experiments.cleaning.table_3 import (
    Figure3Right,
    Table3,
    Table3Relu,
    at_chosen,
    at_end,
    steps_to,
    train_plainly,
)
from bilax.experiments.speed.roofline import roofline


def blobs(seeds: int = 1, n: int = 90, classes: int = 3) -> Split:
    """Three well separated clouds of points in the plane, half of the training labels wrong."""
    draw = np.random.default_rng(0)
    centres = 2.0 * np.array([[0, 1], [1, -1], [-1, -1]])
    labels = draw.integers(0, classes, 4 * n).astype(np.int32)
    inputs = centres[labels] + 0.4 * draw.normal(size=(4 * n, 2))
    pool = Examples(inputs, labels, (2,))
    return cleaning.split(pool, (n, n, n, n), seeds=range(seeds))


def networks(seeds: int = 1, hidden: int = 4):
    keys = jax.random.split(jax.random.key(0), seeds)
    return jax.vmap(lambda key: cleaning.network(key, 2, 3, hidden))(keys)


def whole(parts: Split, seed: int = 0) -> Batch:
    return Batch(
        jnp.asarray(parts.train.inputs),
        cleaning.targets(jnp.asarray(parts.noisy[seed]), 3),
        jnp.asarray(parts.validation.inputs),
        cleaning.targets(jnp.asarray(parts.validation.labels), 3),
    )


# the network


def test_two_layers_without_activation_are_computed_as_one():
    y = cleaning.network(jax.random.key(1), 7, 3, hidden=5)
    inputs = jax.random.normal(jax.random.key(2), (11, 7))

    def layer_by_layer(y):
        (w1, b1), (w2, b2) = y
        return ((inputs @ w1.T + b1) @ w2.T + b2).T

    np.testing.assert_allclose(cleaning.logits(y, inputs), layer_by_layer(y), rtol=1e-12)

    def slope(f):
        return jax.grad(lambda y: jnp.sum(jnp.sin(f(y))))(y)

    ours, other = slope(lambda y: cleaning.logits(y, inputs)), slope(layer_by_layer)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), ours, other)


def test_relu_and_single_layer():
    y = cleaning.network(jax.random.key(1), 7, 3, hidden=5)
    inputs = jax.random.normal(jax.random.key(2), (11, 7))
    (w1, b1), (w2, b2) = y
    expected = np.maximum(inputs @ w1.T + b1, 0) @ w2.T + b2
    np.testing.assert_allclose(cleaning.logits(y, inputs, "relu").T, expected, rtol=1e-12)
    ((w, b),) = single = cleaning.network(jax.random.key(1), 7, 3, hidden=0)
    np.testing.assert_allclose(cleaning.logits(single, inputs).T, inputs @ w.T + b, rtol=1e-12)


def test_cross_entropy_is_that_of_optax():
    scores, labels = jax.random.normal(jax.random.key(0), (3, 8)), jnp.arange(8) % 3
    expected = optax.losses.softmax_cross_entropy_with_integer_labels(scores.T, labels)
    np.testing.assert_allclose(cleaning.cross_entropy(scores, cleaning.targets(labels, 3)), expected, rtol=1e-12)


# the data


def test_corruption_always_draws_a_wrong_label():
    labels = np.arange(1000).astype(np.int32) % 10
    noisy = cleaning.corrupt(labels, 0.5, 10, seed=3)
    assert (noisy != labels).sum() == 500
    assert set(noisy) == set(range(10))
    assert 430 <= (cleaning.corrupt(labels, 0.5, 10, seed=3, may_keep=True) != labels).sum() <= 470
    with pytest.raises(ValueError, match=r"corrupted must be a share in \[0, 1\), got 1.5"):
        cleaning.corrupt(labels, 1.5, 10, seed=0)


def test_split_is_disjoint_and_shared_by_the_seeds():
    pool = Examples(np.arange(100.0)[:, None], np.arange(100).astype(np.int32) % 10, (1,))
    parts = cleaning.split(pool, (40, 30, 20, 10), seeds=(0, 1, 2))
    ids = np.concatenate([part.inputs[:, 0] for part in parts[:4]])
    assert sorted(ids) == list(range(100))
    assert parts.noisy.shape == (3, 40)
    assert (parts.noisy[0] != parts.noisy[1]).any()
    np.testing.assert_array_equal((parts.noisy != parts.train.labels).sum(axis=1), 20)
    with pytest.raises(ValueError, match="ask for 110 examples, but there are 100"):
        cleaning.split(pool, (60, 30, 10, 10))


def test_precision_recall_and_f1():
    x = jnp.array([1.0, 2.0, 0.0, -1.0, -2.0])  # σ(0) = 0.5 counts as clean
    right = jnp.array([True, False, True, True, False])
    np.testing.assert_allclose(cleaning.detected(x, right), (2 / 3, 2 / 3, 2 / 3), rtol=1e-6)
    np.testing.assert_allclose(cleaning.detected(-jnp.ones(5), right), (0, 0, 0))


# the loop

# The same settings everywhere, so that the tests compile as little as possible.
STEPS = 60
X_OPTIMIZER, Z_OPTIMIZER = optax.adam(0.1), cleaning.z_optimizer(STEPS, 0.05, 0.1)
METHODS = {
    name: Cleaning(method=name, inner_steps=5, step_size=0.5).make_method()
    for name in ("iaptt-gm", "ia-gm-a", "rhg", "t-rhg", "bda", "ls", "ns")
}


def train(name, parts, y0s, activation: Any = "none", batch=None, **options):
    """The solution, and what was measured every 25 outer steps."""
    setup = cleaning.setup(parts, y0s, activation, batch)
    measured = cleaning.measuring(METHODS[name], parts, activation)
    options = {"steps": STEPS, "optimizer": X_OPTIMIZER, "z_optimizer": Z_OPTIMIZER, **options}
    return setup.solve(METHODS[name], callbacks=[measured], **options), measured


@pytest.mark.parametrize("name", ["iaptt-gm", "rhg"])
def test_the_seeds_are_a_multistart_of_the_same_solve(name):
    parts, y0s = blobs(), networks()
    run, measured = train(name, parts, y0s)
    assert measured.steps == [25, 50]
    solution = bilax.solve(
        cleaning.problem(),
        METHODS[name],
        jnp.zeros(90),
        jax.tree.map(lambda leaf: leaf[0], y0s),
        steps=STEPS,
        optimizer=X_OPTIMIZER,
        z_optimizer=Z_OPTIMIZER,
        data=(whole(parts),),
    )
    np.testing.assert_allclose(run.x[0], solution.x, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(run.z[0][0][0], solution.z[0][0], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(run.upper[0], solution.upper, rtol=1e-6)
    assert measured.measures[-1]["f1"][0] > 0.9


def test_a_run_goes_on_where_it_broke_off_with_its_measures(tmp_path):
    parts, y0s, saving = blobs(2), networks(2), bilax.Saving(tmp_path)
    whole_run, all_measured = train("iaptt-gm", parts, y0s)

    class Stop:
        every = 35

        def __call__(self, state, history):
            raise ZeroDivisionError

    setup = cleaning.setup(parts, y0s)
    measured = cleaning.measuring(METHODS["iaptt-gm"], parts)
    options: Any = {"steps": STEPS, "optimizer": X_OPTIMIZER, "z_optimizer": Z_OPTIMIZER, "saving": saving}
    with pytest.raises(ZeroDivisionError):
        setup.solve(METHODS["iaptt-gm"], callbacks=[measured, Stop()], **options)
    run, measured = train("iaptt-gm", parts, y0s, saving=saving, resume=True)
    assert measured.steps == all_measured.steps
    np.testing.assert_array_equal(run.x, whole_run.x)
    np.testing.assert_array_equal(measured.measures[0]["f1"], all_measured.measures[0]["f1"])
    fewer = parts._replace(validation=parts.validation.take(np.arange(4)))
    with pytest.raises(bilax.ConfigurationError, match="data: saved"):
        train("iaptt-gm", fewer, y0s, saving=saving, resume=True)


def test_seeds_run_together_as_they_run_alone():
    parts, y0s = blobs(2), networks(2)
    together, _ = train("iaptt-gm", parts, y0s)
    alone, _ = train("iaptt-gm", parts._replace(noisy=parts.noisy[1:]), jax.tree.map(lambda leaf: leaf[1:], y0s))
    np.testing.assert_allclose(together.x[1], alone.x[0], rtol=1e-6, atol=1e-8)
    assert np.abs(together.x[0] - together.x[1]).max() > 1e-3


def test_a_batch_of_all_is_the_full_batch():
    parts, y0s = blobs(), networks()
    full, drawn = (train("iaptt-gm", parts, y0s, batch=batch)[0].x for batch in (None, 1000))
    np.testing.assert_allclose(drawn, full, rtol=1e-5, atol=1e-7)


def test_a_batch_holds_each_example_once_with_its_weight():
    batch = cleaning.draw_training(whole(blobs()), 20, jax.random.key(0))
    assert batch.rows is not None
    assert len(set(batch.rows.tolist())) == 20
    np.testing.assert_array_equal(batch.train_inputs, blobs().train.inputs[batch.rows])
    np.testing.assert_array_equal(batch.train_targets.argmax(axis=0), blobs().noisy[0][batch.rows])
    assert cleaning.draw_validation(batch, 20, jax.random.key(0)).val_inputs.shape == (20, 2)
    x = jnp.zeros(90).at[batch.rows].set(-jnp.inf)  # all examples of the batch have weight zero
    assert cleaning.problem().lower(x, cleaning.network(jax.random.key(0), 2, 3), batch) == 0


def test_each_step_of_the_follower_draws_its_own_examples():
    batch = whole(blobs())._replace(key=jax.random.key(3))
    y = cleaning.network(jax.random.key(0), 2, 3)

    def weighed(k):
        """Which examples step k's slope in x is about."""
        at = cleaning.problem("none", 10).lower_at
        assert at is not None
        return set(np.flatnonzero(jax.grad(lambda x: at(k, x, y, batch))(jnp.zeros(90))).tolist())

    drawn = [weighed(k) for k in range(6)]
    assert all(len(each) == 10 for each in drawn)
    assert len(set().union(*drawn)) > 30


@pytest.mark.parametrize("name", ["ls", "ns", "t-rhg", "bda", "ia-gm-a"])
def test_the_other_methods_learn_which_labels_are_right(name):
    _, measured = train(name, blobs(), networks())
    assert measured.measures[-1]["f1"][0] > 0.9
    assert measured.measures[-1]["test_y"][0] > 0.9


def test_relu_is_measured_with_relu():
    parts, y0s = blobs(), networks(hidden=8)
    setup = cleaning.setup(parts, y0s, "relu")
    state = bilax.Snapshot(setup.x0, y0s, 0, None)  # pyright: ignore[reportArgumentType]
    _, measures = cleaning.measuring(METHODS["rhg"], parts, "relu").validate(state)
    phi = bilax.approximate(cleaning.problem("relu"), METHODS["rhg"])
    y = phi(setup.x0[0], jax.tree.map(lambda leaf: leaf[0], y0s), whole(parts))[1].y_last
    scores = cleaning.logits(y, jnp.asarray(parts.test.inputs), "relu")
    assert measures["test_y"][0] == pytest.approx((scores.argmax(axis=0) == parts.test.labels).mean())


def test_divergence_is_a_status():
    setup = cleaning.setup(blobs(2), networks(2))
    solution = setup.solve(bilax.rhg(30, 1e6), steps=5)
    assert [bilax.Status(status).failed for status in solution.status] == [True, True]
    with pytest.raises(bilax.BilevelError, match=r"after \d+ outer steps"):
        setup.solve(bilax.rhg(30, 1e6), steps=5, throw=True)


def test_training_plainly_on_wrong_labels_is_worse():
    parts = blobs()
    clean = parts.validation.labels[None]
    noisy = cleaning.train_plainly(parts.train.inputs, parts.noisy, parts, networks(), steps=400, rate=0.05)
    right = cleaning.train_plainly(parts.validation.inputs, clean, parts, networks(), steps=400, rate=0.05)
    assert right["test"].shape == (16, 1)
    assert right["test"][-1] > 0.97
    assert noisy["test"][-1] < right["test"][-1]


def test_implicit_gradient_of_a_large_follower_in_single_precision():
    n = 200_000
    target = jnp.linspace(-1, 1, n, dtype=jnp.float32)
    problem = bilax.Problem(
        upper=lambda x, y: 0.5 * jnp.sum((y - target) ** 2), lower=lambda x, y: 0.1 * jnp.sum((y - x) ** 2)
    )
    phi = bilax.approximate(problem, bilax.ls(1, 1.0, tolerance=1e-4))
    x, y = jnp.zeros((), jnp.float32), jnp.zeros(n, jnp.float32)
    (_, info), slope = jax.value_and_grad(phi, has_aux=True)(x + 1, y + 1)
    assert info.solved
    np.testing.assert_allclose(slope, jnp.sum(1 - target), rtol=1e-3)


# commands and targets

SMALL: dict[str, Any] = {
    "sizes": (60, 50, 40, 30),
    "inner_steps": 3,
    "outer_steps": 4,
    "every": 2,
    "hidden": 8,
    "seed": (0, 1),
}


@pytest.fixture(scope="module")
def tiny_digits():
    return cleaning.split(load("digits")[0], (300, 200, 100, 100))


def test_a_run_has_a_folder_that_is_gone_on_with_and_reported(tmp_path, capsys):
    config = Cleaning(**SMALL, out=tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        config.main()
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "accuracy at y_K" in out
    assert "seeds 0 1" in out
    record = read_run(tmp_path / "run")
    assert record.config["config"]["seed"] == [0, 1]
    assert record.history["upper"].shape == (2, 4)
    assert record.result is not None
    assert record.result["recorded"] == [2, 4]
    assert np.shape(record.result["curves"]["f1"]) == (2, 2)
    Report((tmp_path / "run",), tmp_path / "report.html").main()
    page = (tmp_path / "report.html").read_text()
    assert "accuracy at z" in page
    assert "extremes" not in page
    with pytest.raises(SystemExit):
        config.main()
    assert "already holds a run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        dataclasses.replace(config, outer_steps=6, resume=True).main()
    assert "outer_steps: begun with 4, now 6" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        dataclasses.replace(config, method="sgd").main()
    assert "unknown method 'sgd'" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "stem"), [(Table3, "iaptt-gm-none"), (Table3Relu, "iaptt-gm-relu-batch-250")])
def test_a_cell_of_table_3_is_stored_and_read_again_only_with_the_same_settings(
    kind, stem, tmp_path, capsys, monkeypatch
):
    full = Table3.config

    def config(self, *words):
        return dataclasses.replace(full(self, *words), **{**SMALL, "seed": (self.seed,)})

    monkeypatch.setattr(Table3, "config", config)
    monkeypatch.setattr("bilax.experiments.cleaning.table_3.PLAIN", ())
    table = kind(out=tmp_path / "out", runs=tmp_path / "runs", dataset=("digits",), methods=("IAPTT-GM",))
    results = table.compute()["digits"]["IAPTT-GM"]
    path = tmp_path / "out" / table.name / f"digits-{stem}.json"
    before = path.read_bytes()
    record = json.loads(before)
    assert record["config"]["method"] == "iaptt-gm"
    for setting in ("activation", "batch", "z_rate"):
        assert record["config"][setting] == getattr(table, setting)
    assert str(tmp_path) not in json.dumps(record)
    assert {"bilax", "date", "jax"} <= set(record)
    again = table.compute()["digits"]["IAPTT-GM"]
    assert again["curves"] == results["curves"]
    with pytest.raises(SystemExit):
        dataclasses.replace(table, seed=1).compute()
    assert "complete run of other settings" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_cell_of_table_3_is_the_same_however_its_method_is_spelt():
    table = Table3()
    assert table.config("mnist", "iaptt-gm") == table.config("mnist", "IAPTT-GM")
    assert Table3(methods=("iaptt-gm", "ia-gm-a")).methods == ("IAPTT-GM", "IA-GM(A)")
    assert table.config("mnist", "rhg").patience == 500
    assert {table.config("mnist", name).patience for name in ("IA-GM", "IAPTT-GM")} == {None}


def test_the_stored_cells_of_table_3_are_those_of_the_present_settings():
    table = Table3(out=Path(__file__).parent.parent / "results", redraw=True)
    cells = table.stored()
    assert all("missing" not in cell for row in cells.values() for cell in row.values())


@pytest.mark.parametrize("name", ["every", "batch", "patience"])
def test_counts_are_at_least_one(name, capsys):
    with pytest.raises(SystemExit):
        dataclasses.replace(Cleaning(), **{name: 0}).check()
    assert f"--{name} must be at least 1, got 0" in capsys.readouterr().err


def test_a_class_that_validation_lacks_is_counted():
    parts = blobs()
    lacking = parts._replace(validation=parts.validation.take(parts.validation.labels < 2))
    assert lacking.classes == parts.classes == 3


def test_plain_baselines_of_other_settings_are_not_replaced(tmp_path, capsys):
    table = Table3(out=tmp_path, dataset=("digits",), methods=(), seeds=1)
    first = table.compute()["digits"]
    kept = {path: path.read_bytes() for path in (tmp_path / "table-3").iterdir()}
    assert len(kept) == 3
    assert table.compute()["digits"] == dataclasses.replace(table, redraw=True).stored()["digits"]
    assert {path: path.read_bytes() for path in kept} == kept
    with pytest.raises(SystemExit):
        dataclasses.replace(table, seeds=2).compute()
    assert "complete run of other settings" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in kept} == kept
    assert set(first) == set(dataclasses.replace(table, redraw=True).stored()["digits"])


def test_plain_training_leaves_out_what_has_no_label():
    parts, y0s = blobs(2), networks(2)
    half = np.arange(len(parts.train.labels)) % 2 == 0
    masked = cleaning.train_plainly(parts.train.inputs, np.where(half, parts.noisy, -1), parts, y0s, steps=50)
    fewer = cleaning.train_plainly(parts.train.inputs[half], parts.noisy[:, half], parts, y0s, steps=50)
    np.testing.assert_allclose(masked["test"], fewer["test"], atol=0.02)


def test_knowing_the_wrong_labels_is_worth_something():
    config = Cleaning(seed=(0, 1))
    noisy, ceiling = (train_plainly(config, label)["test"][-1].mean() for label in ("noisy data", "validation + clean"))
    assert ceiling > noisy + 0.1


def test_table_3_says_which_cells_have_not_been_run(tmp_path, capsys):
    table = Table3(out=tmp_path, redraw=True)
    results = table.stored()
    assert table.show(results) == []
    assert table.claims(results) == []
    assert capsys.readouterr().out.count("not run") == 20


def test_measures_at_the_end_and_at_the_held_out_choice():
    curves = {"held_y": [[0.5, 0.9], [0.7, 0.8]], "f1": [[0.1, 0.2], [0.3, 0.5]], "upper": [[3.0, 1.0], [1.0, 1.0]]}
    results = {"curves": curves, "steps": [10, 20]}
    assert at_end(results, "f1") == pytest.approx((40.0, 20 / np.sqrt(2)))
    assert at_chosen(results, "f1") == pytest.approx((25.0, 10 / np.sqrt(2)))
    assert [steps_to(results, goal) for goal in (2.0, 1.5, 0.5)] == [10, 20, 21]


def test_ours_is_said_to_be_best_only_where_it_is():
    def run(z: float, y: float, f1: float):
        return {"curves": {"test_z": [[z, z]], "test_y": [[y, y]], "held_y": [[y, y]], "f1": [[f1, f1]]}}

    runs = {
        "IAPTT-GM": run(0.91, 0.90, 0.95),
        "IA-GM": run(0.86, 0.92, 0.95),
        "LS": run(0.8, 0.8, 0.8),
        "noisy data": {},
    }
    claims = {claim.paper: claim for claim in Table3().claims({"mnist": runs})}
    held = {text: claim.held for text, claim in claims.items()}
    assert held == {
        "mnist: IAPTT-GM has accuracy at z 90.88": True,
        "mnist: IAPTT-GM has F1 91.57": True,
        "mnist: IAPTT-GM is best in accuracy at z": True,
        "mnist: IAPTT-GM is best in accuracy at y_K": False,
        "mnist: IAPTT-GM is best in accuracy at y_K, held-out choice": False,
        "mnist: IAPTT-GM is best in F1": None,
        "mnist: IAPTT-GM is best in F1, held-out choice": None,
    }
    assert "the best other, IA-GM, 92.00" in claims["mnist: IAPTT-GM is best in accuracy at y_K"].here


def test_table_3_in_small(tmp_path, capsys, monkeypatch):
    full = Table3.config
    monkeypatch.setattr(Table3, "config", lambda *arguments: dataclasses.replace(full(*arguments), **SMALL))
    target = Table3(out=tmp_path, quick=True, dataset=("digits",), methods=("IAPTT-GM", "IA-GM"))
    target.main()
    out = capsys.readouterr().out
    assert "IAPTT-GM is best in F1" in out
    assert "validation alone" in out
    assert "validation + clean" in out
    names = sorted(path.name for path in tmp_path.iterdir())
    figures = [f"table-3-digits-{what}-quick.png" for what in ("curves", "trade-off", "weights")]
    assert names == [*figures, "table-3-quick.json"]
    for name in figures:
        (tmp_path / name).unlink()
    dataclasses.replace(target, redraw=True).main()
    again = capsys.readouterr().out
    assert again.split("wrote")[0] in out  # which says besides what is being run
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_figure_3_right_in_small(tmp_path, capsys):
    small = Figure3Right(out=tmp_path, quick=True, dataset="digits", settings=((5, 0.03),))
    small.main()
    assert "IA-GM(A) performs better than IA-GM" in capsys.readouterr().out.replace("\n", " ")
    figure = tmp_path / "figure-3-right-quick.png"
    figure.unlink()
    # What is stored is drawn again only for the settings that it was made with.
    dataclasses.replace(small, redraw=True).main()
    assert figure.exists()
    with pytest.raises(SystemExit):
        dataclasses.replace(small, redraw=True, dataset="mnist").main()
    assert "was made with dataset = digits, not mnist" in capsys.readouterr().err


def test_roofline_measures_all_three_rates():
    measured = roofline(examples=100, inner_steps=2, repeats=1)
    rate = measured["matrix product, GFLOP/s"]
    for name in ("forward", "forward and backward"):
        assert 0 < measured[f"{name}, share"] < 1.5  # above 1 the count of operations would be wrong
        assert measured[f"{name}, share"] == pytest.approx(measured[f"{name}, GFLOP/s"] / rate)


def test_real_pictures_are_cleaned(tmp_path):
    if not os.environ.get("BILAX_DATA") or find("mnist") is None:
        pytest.skip("BILAX_DATA does not name a folder with mnist")
    results = Cleaning(
        dataset="mnist", sizes=(300, 300, 100, 500), inner_steps=5, step_size=0.1, outer_steps=40, every=40, seed=(0,),
        rate=0.05, z_rate=5e-3, hidden=30, out=tmp_path,
    ).train()  # fmt: skip
    assert results["curves"]["f1"][-1][0] > 0.8
    assert results["curves"]["test_z"][-1][0] > 0.65
