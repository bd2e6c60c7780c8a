"""`bilax.clean_labels` as an estimator."""

from typing import Any

import numpy as np
from jaxtyping import Float
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

import bilax


class LabelCleaner(ClassifierMixin, BaseEstimator):
    """A classifier for data some of whose labels are wrong: it finds these, and learns what is right.

    - `model`: "linear", "mlp", or a function, as for `bilax.clean_labels`, which does the work.
    - `folds`: no row is judged by a model that has seen it; so many models are trained.
    - `random_state`: for folds and models.

    After `fit`: `probability_` that each label is wrong (0 for trusted rows), `suggested_` labels, and `found_`, the
    `CleanedLabels` with the table of candidates, notes and `flag`, for the rows that are not trusted.
    """

    def __init__(self, *, model: Any = "linear", folds: Any = 5, random_state: Any = 0):
        self.model = model
        self.folds = folds
        self.random_state = random_state

    def fit(self, X: Any, y: Any, trusted: Any = None) -> "LabelCleaner":
        """Finds the wrong ones among the labels y. `trusted` is True for rows whose labels are known to be right."""
        X, y = validate_data(self, X, y, ensure_min_samples=2)
        check_classification_targets(y)
        known = np.zeros(len(y), bool) if trusted is None else np.asarray(trusted, bool)
        if known.shape != y.shape:
            raise ValueError(f"trusted must say True or False for each of {len(y)} rows, got shape {known.shape}.")
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("LabelCleaner needs at least two classes; the labels have only 1 class.")
        pair = (X[known], labels[known]) if known.any() else None
        self.found_ = bilax.clean_labels(
            X[~known], labels[~known], pair, model=self.model, folds=self.folds, seed=self.random_state
        )
        self.probability_, suggested = np.zeros(len(y)), labels.copy()
        self.probability_[~known], suggested[~known] = self.found_.probability, self.found_.suggested
        self.suggested_ = self.classes_[suggested]
        return self

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n c"]:
        """Probabilities of the classes, in the order of `classes_`."""
        check_is_fitted(self)
        return self.found_.predict_proba(validate_data(self, X, reset=False))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable classes."""
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(axis=1)]
