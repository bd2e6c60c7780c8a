"""`bilax.clean_labels`: the bilevel problem against NumPy, wrong labels found, and what is said of doubtful data."""

import collections
import csv
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import bilax
from bilax.cleaning import mixture
from bilax.cleaning.baselines import confident_classes, judge, weighted_auc
from bilax.cleaning.fitting import fit, make_models, unseen_logits
from bilax.cleaning.labels import better_flips
from bilax.cleaning.networks import Linear, convnet, linear, mlp
from bilax.cleaning.pooling import believed_transition, estimate_transition, one_rate, pool, posterior
from bilax.datasets.labelled import Labelled
from bilax.experiments.cleaning import bench
from bilax.experiments.cleaning.clean import Clean
from bilax.experiments.cleaning.page import page
from bilax.files import read_arrays

COMPILED = "/jax/core/compile/backend_compile_duration"
events: collections.Counter[str] = collections.Counter()
jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: events.update([event]))


def blobs(n=150, m=12, share=0.3, classes=3, seed=0):
    """Clouds in the plane: noisy rows, their truth, and trusted rows."""
    random = np.random.default_rng(seed)
    truth = random.integers(0, classes, n + m)
    truth[:classes] = range(classes)
    angle = 2 * np.pi * truth / classes
    inputs = 2 * np.stack([np.cos(angle), np.sin(angle)], 1) + 0.6 * random.normal(size=(n + m, 2))
    labels = np.where(random.random(n + m) < share, (truth + 1) % classes, truth)
    return inputs[m:], labels[m:], truth[m:], (inputs[:m], truth[:m])


@pytest.fixture(scope="module")
def cleaned():
    inputs, labels, truth, trusted = blobs()
    return bilax.clean_labels(inputs, labels, trusted), labels, truth


def some_rows(folds=3, length=4, c=3):
    random = np.random.default_rng(0)
    inputs, labels = random.normal(size=(folds, length, 2)), random.integers(0, c, (folds, length))
    trusted, counted = random.random((folds, length)) < 0.4, np.ones((folds, length))
    counted[-1, -1] = 0
    return mixture.Rows(*map(jnp.asarray, (inputs, labels, trusted, counted, True)))


def test_empty_places_change_nothing():
    rows = some_rows()
    padded = rows.each(lambda leaf: jnp.concatenate([leaf, jnp.ones_like(leaf)], axis=1))
    padded = padded._replace(counted=jnp.concatenate([rows.counted, jnp.zeros_like(rows.counted)], axis=1))
    x = mixture.first_guess(np.full((3, 3), 0.1) + 0.7 * np.eye(3))
    models = jax.tree.map(lambda leaf: leaf + 0.3, make_models(linear, jax.random.key(0), (2,), 3, 3))
    few, many = ((mixture.lower(x, models, r) * r.labels.size, mixture.upper(x, models, r)) for r in (rows, padded))
    np.testing.assert_allclose(few, many, rtol=1e-6)
    np.testing.assert_allclose(better_flips(x, models, rows), better_flips(x, models, padded), rtol=1e-6)
    nets = make_models(mlp, jax.random.key(0), (2,), 3, 3)
    few, many = (fit(x, nets, r, jax.random.key(1), 1, 8) for r in (rows, padded))
    for one, other in zip(*(jax.tree.leaves(eqx.filter(n, eqx.is_array)) for n in (few, many)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_data_of_nearly_the_same_size_compile_nothing(cleaned):
    inputs, labels, _, trusted = blobs(n=147, m=14, seed=1)
    before = events[COMPILED]
    bilax.clean_labels(inputs, labels, trusted)
    assert events[COMPILED] == before


def test_frequencies_of_mistakes_begin_where_the_leader_likes_them_best():
    rows = some_rows(length=30)
    models = jax.tree.map(lambda leaf: leaf + 0.3 * jnp.arange(3), make_models(linear, jax.random.key(0), (2,), 3, 3))
    x = mixture.first_guess(np.full((3, 3), 0.1) + 0.7 * np.eye(3))
    found = x._replace(flips=better_flips(x, models, rows))
    slope = jax.grad(lambda flips: mixture.upper(found._replace(flips=flips), models, rows))(found.flips)
    assert jnp.abs(slope).max() < 0.1 * jnp.abs(jax.grad(mixture.upper)(x, models, rows).flips).max()
    assert mixture.upper(found, models, rows) < mixture.upper(x, models, rows)


def test_the_lower_objective_is_the_likelihood_of_what_other_folds_show():
    random = np.random.default_rng(0)
    folds, length, c = 3, 4, 3
    inputs, labels = random.normal(size=(folds, length, 2)), random.integers(0, c, (folds, length))
    trusted, counted = random.random((folds, length)) < 0.4, np.ones((folds, length))
    counted[2, 3] = 0
    x = mixture.Leader(jnp.asarray(0.3), jnp.asarray(-0.2), jnp.asarray(random.normal(size=(c, c))))
    weights, biases = random.normal(size=(folds, 2, c)), random.normal(size=(folds, c))
    models = eqx.tree_at(lambda m: (m.weight, m.bias), Linear(2, c), (jnp.asarray(weights), jnp.asarray(biases)))
    t = np.exp(x.flips) / np.exp(x.flips).sum(1, keepdims=True)
    marginal = t.mean(0)
    informs = np.mean(np.sum(t * np.log(t / marginal), 1)) / np.log(c)

    def probability(k, u):
        scores = np.exp(u @ weights[k] + biases[k])
        return scores / scores.sum()

    for held in (True, False):
        rows = mixture.Rows(*map(jnp.asarray, (inputs, labels, trusted, counted, held)))
        total = sum(0.5 * np.exp(-0.2) * np.sum(weights[k] ** 2) for k in range(folds))
        for k in range(folds):
            for j in range(folds):
                for i in range(length):
                    if (j == k and (held or not trusted[j, i])) or not counted[j, i]:
                        continue
                    p, v = probability(k, inputs[j, i]), labels[j, i]
                    if trusted[j, i]:
                        total -= np.log(p[v])
                    else:
                        total -= np.exp(0.3) * informs * np.log(p @ t[:, v])
        np.testing.assert_allclose(mixture.lower(x, models, rows), total / (folds * length), rtol=1e-6)


def test_a_leader_that_cannot_be_tuned_is_told(monkeypatch):
    """As on pictures, for which conjugate gradients once had too few steps: the leader stayed where it was."""
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(2, 20, 120)), rng.integers(0, 2, (2, 20))
    rows = mixture.Rows(
        jnp.asarray(inputs, np.float32),
        jnp.asarray(labels),
        jnp.asarray(labels > 0),
        jnp.ones((2, 20), np.float32),
        jnp.asarray(True),
    )
    poor = dataclasses.replace(mixture.SOLVED, inner_steps=5, derivative=bilax.Implicit(1e-9, 1))
    monkeypatch.setattr(mixture, "SOLVED", poor)
    models = make_models(linear, jax.random.key(0), (120,), 2, 2)
    with pytest.warns(UserWarning, match="tuned for 0 of 1 steps.*linear_solve_failed"):
        mixture.tune(mixture.first_guess(np.full((2, 2), 0.5)), models, rows, 1)


def test_wrong_labels_are_found_and_named(cleaned):
    found, labels, truth = cleaned
    wrong = labels != truth
    assert roc_auc_score(wrong, found.probability) > 0.97
    assert (found.suggested == truth).mean() > 0.95
    flagged = found.flag()
    assert abs(found.expected_precision(flagged) - wrong[flagged].mean()) < 0.12
    assert f"CleanedLabels({flagged.sum()} of {len(labels)} labels flagged, of which" in repr(found)
    # The noise of the data: three in ten of each class get the next label.
    np.testing.assert_allclose(found.transition, 0.7 * np.eye(3) + 0.3 * np.roll(np.eye(3), 1, axis=1), atol=0.15)


def test_a_threshold_by_precision_or_share(cleaned):
    found = cleaned[0]
    sure = found.flag(precision=0.99)
    assert found.expected_precision(sure) >= 0.99
    assert 0 < sure.sum() <= found.flag(precision=0.8).sum()
    assert found.flag(share=0.1).sum() == 15
    with pytest.raises(ValueError, match=r"precision must be in \(0, 1\], got 2.0"):
        found.flag(precision=2.0)


def test_bayes_rule_and_the_frequencies_of_mistakes():
    random = np.random.default_rng(1)
    t = np.array([[0.8, 0.2], [0.1, 0.9]])
    truth = random.integers(0, 2, 20_000)
    labels = (random.random(20_000) < t[truth, 1]).astype(int)
    sure = np.eye(2)[truth]
    np.testing.assert_allclose(estimate_transition(sure, labels), t, atol=0.02)
    np.testing.assert_allclose(posterior(np.array([[0.5, 0.5]]), t, np.array([1]))[0], [0.2 / 1.1, 0.9 / 1.1])


def test_one_rate_is_believed_unless_pairs_of_classes_tell_much_more():
    random = np.random.default_rng(1)
    for kind in bench.NOISE:
        t = bench.transition(kind, 0.3, 4)
        likely, unlikely = random.integers(0, 4, (2, 4000))
        truth = np.where(random.random(4000) < 0.8, likely, unlikely)
        labels = np.sum(random.random(4000)[:, None] > np.cumsum(t, axis=1)[truth], axis=1)
        known = 0.8 * np.eye(4)[likely] + 0.05
        pairs, simple = estimate_transition(known, labels), one_rate(known, labels)
        np.testing.assert_allclose(np.diag(simple), np.full(4, 0.7), atol=0.03)
        found = believed_transition(known, labels, pairs)
        np.testing.assert_array_equal(found, simple if kind == "uniform" else pairs)


def test_a_pool_follows_the_candidate_that_sees():
    random = np.random.default_rng(0)
    truth = random.integers(0, 3, 420)
    labels = np.where(random.random(420) < 0.3, (truth + 1) % 3, truth)
    sees, blind = 0.7 * np.eye(3)[truth] + 0.1, random.dirichlet([1, 1, 1], 420)
    both = np.stack([sees, blind])
    t = 0.7 * np.eye(3) + 0.3 * np.roll(np.eye(3), 1, axis=1)
    sure, rest, found = pool(both[:, :20], both[:, 20:], truth[:20], labels[20:], t)
    np.testing.assert_allclose(found, t, atol=0.07)
    assert (rest.argmax(1) == truth[20:]).mean() > 0.99
    np.testing.assert_allclose(sure.sum(1), 1)

    # By hand: the negative log likelihood at the pool is less than at either candidate.
    def cost(p, q):
        return -np.sum(np.log(p[np.arange(20), truth[:20]])) - np.sum(
            np.log(np.sum(q * found[:, labels[20:]].T, axis=1))
        )

    assert cost(sure, rest) < min(cost(part[:20], part[20:]) for part in both)


def test_a_few_trusted_rows_do_not_outweigh_all_others():
    """Two candidates, of which the better happens to be wrong about the three trusted rows."""
    random = np.random.default_rng(1)
    truth = random.integers(0, 3, 603)
    labels = np.where(random.random(603) < 0.3, (truth + 1) % 3, truth)
    named = [np.where(random.random(603) < right, truth, (truth + 2) % 3) for right in (0.5, 0.9)]
    named[0][:3], named[1][:3] = truth[:3], (truth[:3] + 2) % 3
    both = np.stack([0.8 * np.eye(3)[one] + 0.2 / 3 for one in named])
    t = 0.7 * np.eye(3) + 0.3 * np.roll(np.eye(3), 1, axis=1)
    found = pool(both[:, :3], both[:, 3:], truth[:3], labels[3:], t)[1]
    assert (found.argmax(1) == truth[3:]).mean() > 0.85


def test_confident_learning_counts_a_row_where_its_probability_is_above_the_mean():
    # Means of the own label: (0.9 + 0.2) / 2 for 0, (0.6 + 0.4) / 2 for 1.
    p = np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [0.6, 0.4]])
    np.testing.assert_array_equal(confident_classes(p, np.array([0, 0, 1, 1])), [0, 1, 1, 0])


def test_weighted_auc_is_that_of_scikit_learn():
    random = np.random.default_rng(2)
    score, positive, weights = random.integers(0, 9, 60) / 9, random.random(60) < 0.4, random.random(60)
    expected = roc_auc_score(positive, score, sample_weight=weights)
    np.testing.assert_allclose(weighted_auc(score, positive, weights), expected, rtol=1e-12)


def test_a_candidate_that_is_clearly_better_is_recommended_over_ours():
    random = np.random.default_rng(0)
    truth = random.integers(0, 2, 80)
    t = np.array([[0.7, 0.3], [0.3, 0.7]])
    blind, sees = random.dirichlet([1, 1], 80), 0.9 * np.eye(2)[truth] + 0.05
    found = judge({"trusted alone": (sees, t), "bilevel": (blind, t)}, "bilevel", truth, t, 0)
    assert found["trusted alone"][0] > 0.99
    assert found["trusted alone"][2] < -1
    again = judge({"trusted alone": (blind, t), "bilevel": (sees, t)}, "bilevel", truth, t, 0)
    assert again["trusted alone"][2] > 1


def test_what_there_is_to_know_about_trusted_rows_is_said():
    inputs, labels, _, (known, truth) = blobs()
    some = truth != 2
    # Rows of the other classes in place of those that lack, so that nothing is compiled anew.
    known, truth = np.resize(known[some], (12, 2)), np.resize(truth[some], 12)
    notes = " ".join(bilax.clean_labels(inputs, labels, (known, truth)).notes)
    assert f"lack 2: what is said of the {np.sum(labels == 2)} rows so labelled rests on noisy labels alone" in notes
    inputs, labels, _, (known, truth) = blobs(share=0.05)
    notes = " ".join(bilax.clean_labels(inputs, labels, (known, (truth + 1) % 3)).notes)
    assert "The trusted labels contradict the rest" in notes


def test_no_trusted_rows_cost_something_and_that_is_said():
    inputs, labels, truth, trusted = blobs(share=0.2)
    inputs, labels = np.concatenate([inputs, trusted[0]]), np.concatenate([labels, trusted[1]])
    found = bilax.clean_labels(inputs, labels)
    assert found.recommended == "bilevel"
    assert "No trusted rows" in found.notes[0]
    assert np.isnan(found.table["bilevel"].auc)
    assert roc_auc_score(labels[:150] != truth, found.probability[:150]) > 0.9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": [0] * 6}, "all labels are 0"),
        ({"labels": [0, 1, 2, 3, 4, 5]}, "labels must be classes, not measurements"),
        ({"labels": [0, 1] * 2}, "inputs has 6 rows, but labels 4"),
        ({"labels": ["a", None, "b", "a", "b", "a"]}, r"labels\[1\] is missing"),
        ({"inputs": np.full((6, 2), np.nan)}, r"inputs\[0, 0\] is missing or not finite"),
        ({"inputs": np.array([["a"]] * 6)}, "inputs must be numbers of shape"),
        ({"trusted": (np.zeros((2, 3)), [0, 1])}, r"trusted inputs have shape \(3,\), but the others \(2,\)"),
        ({"trusted": (np.zeros((2, 2)), ["a", "b"])}, "give both the same kind"),
        ({"model": "forest"}, "model must be one of linear, mlp, convnet"),
        ({"folds": 1}, "folds must be a whole number of at least 2"),
    ],
)
def test_wrong_arguments_are_named(change, said):
    arguments = {"inputs": np.zeros((6, 2)), "labels": [0, 1, 0, 1, 0, 1], **change}
    with pytest.raises(ValueError, match=said):
        bilax.clean_labels(**arguments)


def test_networks_are_trained_on_mini_batches_of_both_kinds():
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, (3, 40))
    inputs = random.normal(size=(3, 40, 5, 5)) * 0.3
    inputs[..., 2, 2] += 2 * labels - 1
    trusted = np.arange(40) < 5
    noisy = np.where((random.random((3, 40)) < 0.2) & ~trusted, 1 - labels, labels)
    rows = mixture.Rows(
        *map(jnp.asarray, (inputs.astype(np.float32), noisy, np.tile(trusted, (3, 1)), np.ones((3, 40)), True))
    )
    x = mixture.first_guess(np.array([[0.8, 0.2], [0.2, 0.8]]))
    models = make_models(convnet, jax.random.key(0), (5, 5), 2, 3)
    fitted = fit(x, models, rows, jax.random.key(1), epochs=1, batch=32)
    assert np.mean(unseen_logits(fitted, rows).argmax(-1) == labels) > 0.9


@pytest.fixture
def table(tmp_path):
    """A table with labels as text, and one of trusted rows; of the shape of `blobs()`."""
    inputs, labels, truth, (known, right) = blobs()
    names = np.array(["ash", "birch", "cedar"])
    for name, rows, own in (("mine", inputs, labels), ("checked", known, right)):
        lines = "".join(f"{u:.5f},{names[v]},{w:.5f}\n" for (u, w), v in zip(rows, own, strict=True))
        (tmp_path / f"{name}.csv").write_text(f"height,tree,width\n{lines}")
    return tmp_path / "mine.csv", tmp_path / "checked.csv", names[truth]


def test_the_command_writes_a_table_a_copy_a_model_and_a_page(table, tmp_path, capsys, monkeypatch):
    mine, checked, truth = table
    command = Clean(mine, checked, label="tree", out=tmp_path / "out")
    command.main()
    rows = list(csv.DictReader((tmp_path / "out" / "labels.csv").open()))
    flagged = np.array([row["flagged"] == "1" for row in rows])
    wrong = np.array([row["label"] for row in rows]) != truth
    assert (flagged == wrong).mean() > 0.93
    kept = list(csv.DictReader((tmp_path / "out" / "cleaned.csv").open()))
    assert [row["tree"] for row in kept] == [row["label"] for row in rows if row["flagged"] == "0"]
    said, report = " ".join(capsys.readouterr().out.split()), (tmp_path / "out" / "report.html").read_text()
    assert f"{flagged.sum()} of 150 labels are flagged" in said
    for part in ("Labels of mine.csv", "birch", "confident learning", "Labels against suggestions", "height"):
        assert part in report
    assert read_arrays(tmp_path / "out" / "model.npz")["classes"].tolist() == ["ash", "birch", "cedar"]
    with pytest.raises(SystemExit, match="is not empty: choose another --out"):
        command.main()
    before = (tmp_path / "out" / "labels.csv").read_bytes()
    # What is stored is not computed again, and another threshold needs no more.
    monkeypatch.setattr("bilax.cleaning.labels.tune", None)
    dataclasses.replace(command, resume=True, share=0.1, fix="relabel").main()
    again = list(csv.DictReader((tmp_path / "out" / "labels.csv").open()))
    assert sum(row["flagged"] == "1" for row in again) == 15
    assert [row["probability"] for row in again] == [row["probability"] for row in rows]
    assert len(list(csv.DictReader((tmp_path / "out" / "cleaned.csv").open()))) == 150
    assert before != (tmp_path / "out" / "labels.csv").read_bytes()


def test_the_command_refuses_before_it_writes(table, tmp_path):
    mine, checked, _ = table
    for options, said in (
        ({"label": "sort"}, "has no column 'sort'"),
        ({"label": "tree", "model": "nowhere:make"}, "--model nowhere:make"),
        ({"label": "tree", "embeddings": mine}, "go together"),
        ({"label": "tree", "size": 0}, "--size must be at least 1"),
        ({"label": "tree", "out": mine}, "must be a folder"),
    ):
        with pytest.raises(SystemExit, match=said):
            Clean(mine, checked, **{"out": tmp_path / "new", **options}).main()
        assert not (tmp_path / "new").exists()


def test_pictures_are_on_the_page(cleaned):
    found, labels, _ = cleaned
    pictures = np.random.default_rng(0).random((150, 4, 4))
    text = page("A <page>", Labelled(pictures, labels, {}), found, found.flag(), {"cleanlab": 7})
    assert text.count("<img") == 60
    assert "A &lt;page&gt;" in text
    assert "cleanlab" in text


def test_the_benchmark_makes_the_noise_that_it_says():
    random = np.random.default_rng(0)
    truth = random.integers(0, 4, 8000)
    made = bench.trial(random.normal(size=(8000, 2)), truth, "by class", 0.3, 0.05, seed=1)
    found = np.stack([np.bincount(made.labels[made.truth == c], minlength=4) for c in range(4)])
    expected = bench.transition("by class", 0.3, 4)
    np.testing.assert_allclose(found / found.sum(1, keepdims=True), expected, atol=0.04)
    np.testing.assert_allclose(expected.sum(1), 1)
    np.testing.assert_allclose(1 - np.diag(bench.transition("uniform", 0.3, 4)), 0.3)
    assert len(made.test[1]) == 1600
    assert abs(len(made.trusted[1]) - 320) <= 4


def test_the_benchmark_says_where_ours_is_behind():
    def trials(ours, other):
        return [{"bilax": {"f1": a}, "cleanlab": {"f1": b}} for a, b in zip(ours, other, strict=True)]

    assert bench.behind(trials([0.8, 0.9, 0.7], [0.9, 0.98, 0.81]), "f1") == pytest.approx(0.0967, abs=1e-3)
    assert bench.behind(trials([0.8, 0.9, 0.7], [0.9, 0.85, 0.7]), "f1") == 0  # within a standard error
    assert bench.behind(trials([0.9], [0.8]), "f1") == 0
    named = {
        f"wine | uniform | 0.3 | 0.05 | {seed}": {"bilax": {"f1": 0.5}, "cleanlab": {"f1": 0.9}} for seed in (0, 1)
    }
    claim = bench._claim(bench.gathered(named), "f1", "F1")
    assert not claim.held
    assert "0 of 1; furthest behind by 0.400: wine, uniform, 0.3, 0.05" in claim.here
