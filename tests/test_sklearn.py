"""Estimators for scikit-learn: all of its checks, and the tuned penalties against SciPy and bilax itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import KFold, ShuffleSplit
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import bilax
from bilax.sklearn import LabelCleaner, TunedLogisticRegression, TunedRidge
from bilax.sklearn.linear import ridge_error
from tests.test_clean_labels import blobs


def arrays(load: Any) -> Any:
    return load(return_X_y=True)


@parametrize_with_checks([TunedRidge(), TunedLogisticRegression()])  # pyright: ignore
def test_all_of_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("shape", [(30, 4), (10, 25)], ids=["tall", "wide"])
def test_the_error_of_a_ridge_regression_and_its_derivative(shape):
    random = np.random.default_rng(0)
    X, held = random.normal(size=shape), random.normal(size=(7, shape[1]))
    y, held_y, x = random.normal(size=shape[0]), random.normal(size=7), random.normal(size=shape[1])
    value, slope = ridge_error(np.exp(x), X, y, held, held_y)
    # scikit-learn's: one penalty for all, on features divided by the roots of the penalties
    each = np.exp(x / 2)
    fitted = Ridge(alpha=len(y) / 2, tol=1e-12).fit(X / each, y)
    assert value == pytest.approx(np.mean((fitted.predict(held / each) - held_y) ** 2), rel=1e-8)
    found: Any = scipy.optimize.approx_fprime(x, lambda x: ridge_error(np.exp(x), X, y, held, held_y)[0], 1e-6)
    np.testing.assert_allclose(np.exp(x) * slope, found, rtol=1e-4, atol=1e-6)


def test_tuned_penalties_are_stationary_for_bilax_too():
    X, y = arrays(load_diabetes)
    X, y = X[:120, :4], y[:120] / 50
    split = ShuffleSplit(1, test_size=0.3, random_state=1)
    tuned = TunedRidge(spread=None, cv=split).fit(X, y)
    X = StandardScaler().fit_transform(X)
    ((rows, held),) = split.split(X)

    def upper(x, w):
        return jnp.mean((X[held] @ w[:4] + w[4] - y[held]) ** 2)

    def lower(x, w):
        return jnp.mean((X[rows] @ w[:4] + w[4] - y[rows]) ** 2) + 0.5 * jnp.sum(jnp.exp(x) * w[:4] ** 2)

    method = bilax.Method(50, bilax.Newton(), derivative=bilax.Implicit(), follower_tolerance=1e-9)
    phi = bilax.approximate(bilax.Problem(upper, lower), method)
    x = np.log(tuned.penalty_)
    (value, _), slope = jax.value_and_grad(phi, has_aux=True)(x, np.zeros(5))
    assert tuned.cv_error_ == pytest.approx(float(value), rel=1e-8)
    downhill = np.clip(x - slope, -12, 6) - x  # within the bounds
    np.testing.assert_allclose(downhill, 0, atol=1e-4)


@pytest.mark.parametrize("load", [load_breast_cancer, load_wine])
def test_logistic_regression_ends_at_the_optimum_of_its_own_penalties(load):
    X, y = arrays(load)
    X, y = X[::3, :6], y[::3]
    groups = [0, 0, 1, 1, 2, 2]
    tuned = TunedLogisticRegression(groups=groups).fit(X, y)
    assert len(set(tuned.penalty_)) == 3
    assert tuned.cv_error_ <= TunedLogisticRegression(groups=np.zeros(6)).fit(X, y).cv_error_ + 1e-9
    # scikit-learn's: one penalty for all, on features divided by the roots of the penalties; C counts a sum of losses
    scale = X.std(axis=0) * np.sqrt(tuned.penalty_)
    other = LogisticRegression(C=1 / len(y), tol=1e-10, max_iter=10_000).fit((X - X.mean(axis=0)) / scale, y)
    np.testing.assert_allclose(
        tuned.predict_proba(X), other.predict_proba((X - X.mean(axis=0)) / scale), rtol=1e-3, atol=1e-5
    )


def test_useless_features_get_large_penalties_and_new_examples_are_predicted_better():
    random = np.random.default_rng(0)
    X = random.normal(size=(400, 40))
    y = X[:, :3] @ [2.0, -1.0, 1.0] + random.normal(size=400)
    train, test = slice(0, 80), slice(80, None)
    tuned, common = TunedRidge(spread=2.0).fit(X[train], y[train]), TunedRidge(groups=np.zeros(40))
    common.fit(X[train], y[train])
    assert np.median(tuned.penalty_[3:]) > 5 * np.max(tuned.penalty_[:3])
    errors = [np.mean((model.predict(X[test]) - y[test]) ** 2) for model in (tuned, common)]
    assert errors[0] < 0.85 * errors[1]


def test_a_splitter_of_scikit_learn_is_taken():
    X, y = arrays(load_diabetes)
    by_number, by_splitter = TunedRidge(cv=4), TunedRidge(cv=KFold(4, shuffle=True, random_state=0))
    assert by_number.fit(X, y).cv_error_ == by_splitter.fit(X, y).cv_error_


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"groups": [0, 1]}, "each of 10 features, got 2"), ({"cv": 1}, "at least 2 folds"), ({"spread": 0}, "positive")],
)
def test_wrong_settings_are_told(settings, said):
    with pytest.raises(ValueError, match=said):
        TunedRidge(**settings).fit(*arrays(load_diabetes))


def test_a_cleaner_finds_wrong_labels_and_predicts_right_ones():
    # Of the size of those of `test_clean_labels.py`, for which all is compiled.
    inputs, labels, right, (known_inputs, known_labels) = blobs()
    X, names = np.concatenate([inputs, known_inputs]), np.array(["a", "b", "c"])
    noisy, truth = names[np.append(labels, known_labels)], names[np.append(right, known_labels)]
    trusted, wrong = np.arange(162) >= 150, noisy != truth
    cleaner = LabelCleaner().fit(X, noisy, trusted=trusted)
    assert (cleaner.probability_[trusted] == 0).all()
    assert (cleaner.probability_[wrong] > 0.5).mean() > 0.9
    assert (cleaner.probability_[~wrong] > 0.5).mean() < 0.1
    assert (cleaner.suggested_ == truth).mean() > 0.93
    assert cleaner.score(X, truth) > 0.93
    with pytest.raises(ValueError, match="each of 162 rows"):
        cleaner.fit(X, noisy, trusted=[True])
