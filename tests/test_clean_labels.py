"""`bilax.clean_labels`: the bilevel problem against NumPy, wrong labels found, and what is said of doubtful data."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import bilax
from bilax.cleaning import mixture
from bilax.cleaning.baselines import confident_classes, weighted_auc
from bilax.cleaning.labels import estimate_transition, posterior
from bilax.cleaning.networks import Linear


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


def test_wrong_labels_are_found_and_named(cleaned):
    found, labels, truth = cleaned
    wrong = labels != truth
    assert roc_auc_score(wrong, found.probability) > 0.97
    assert (found.suggested == truth).mean() > 0.95
    flagged = found.flag()
    assert abs(found.expected_precision(flagged) - wrong[flagged].mean()) < 0.12
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


def test_confident_learning_counts_a_row_where_its_probability_is_above_the_mean():
    # Means of the own label: (0.9 + 0.2) / 2 for 0, (0.6 + 0.4) / 2 for 1.
    p = np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [0.6, 0.4]])
    np.testing.assert_array_equal(confident_classes(p, np.array([0, 0, 1, 1])), [0, 1, 1, 0])


def test_weighted_auc_is_that_of_scikit_learn():
    random = np.random.default_rng(2)
    score, positive, weights = random.integers(0, 9, 60) / 9, random.random(60) < 0.4, random.random(60)
    expected = roc_auc_score(positive, score, sample_weight=weights)
    np.testing.assert_allclose(weighted_auc(score, positive, weights), expected, rtol=1e-12)
