"""Penalties tuned one by one beside scikit-learn's grids over one: errors on new examples, and time."""

import dataclasses
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.linear_model import LogisticRegressionCV, RidgeCV
from sklearn.metrics import log_loss, mean_squared_error
from sklearn.model_selection import ShuffleSplit, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from bilax.app.show import Target, show_table, steps
from bilax.sklearn import TunedLogisticRegression, TunedRidge


@dataclasses.dataclass
class LinearBench(Target):
    """TunedRidge and TunedLogisticRegression beside RidgeCV and LogisticRegressionCV, on halves of real data."""

    name: ClassVar[str] = "sklearn"

    def compute(self) -> dict[str, Any]:
        """For each data set and model the errors on the other half and the seconds of CPU that `fit` took."""
        names, splits = (["diabetes"], 2) if self.quick else (list(DATA), 4)
        results: dict[str, Any] = {}
        with steps(len(names) * splits, "sklearn") as advance, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # grids whose ends do not converge
            for name in names:
                X, y, regression = DATA[name]()
                models = (ridges if regression else logistics)(X.shape[1])
                results[name] = {model: {"error": [], "seconds": []} for model in models}
                for split in range(splits):
                    parts = train_test_split(X, y, test_size=0.5, random_state=split)
                    for model, estimator in models.items():
                        error, seconds = measure(estimator, regression, *parts)
                        results[name][model]["error"].append(error)
                        results[name][model]["seconds"].append(seconds)
                    advance(f"{name}, {split + 1}")
        return results

    def show(self, results: dict[str, Any]) -> list[Path]:
        """A table for each data set; the first fit's time, which has compilation in it, is not the median."""
        for name, models in results.items():
            rows = []
            for model, found in models.items():
                errors = np.asarray(found["error"])
                spread = errors.std(ddof=1) / np.sqrt(len(errors))
                rows.append((model, f"{errors.mean():.4g} ± {spread:.2g}", f"{np.median(found['seconds']):.2f}"))
            show_table(name, ("model", "error on new examples", "seconds"), rows)
        return []


def measure(model: Any, regression: bool, X: Any, new_X: Any, y: Any, new_y: Any) -> tuple[float, float]:
    """The error on new examples, squared or log-loss, and the seconds of CPU that fitting took."""
    began = time.process_time()
    model.fit(X, y)
    seconds = time.process_time() - began
    if regression:
        return float(mean_squared_error(new_y, model.predict(new_X))), seconds
    return float(log_loss(new_y, model.predict_proba(new_X))), seconds


def ridges(features: int) -> dict[str, Any]:
    """scikit-learn's, ours, and ours with what over-fits."""
    return {
        "RidgeCV, 33 penalties": make_pipeline(StandardScaler(), RidgeCV(alphas=np.logspace(-4, 4, 33), cv=5)),
        **_ours(TunedRidge, features),
    }


def logistics(features: int) -> dict[str, Any]:
    """The same for classes."""
    grid = LogisticRegressionCV(Cs=20, cv=5, scoring="neg_log_loss", max_iter=2000)
    return {"LogisticRegressionCV, 20 penalties": make_pipeline(StandardScaler(), grid)} | _ours(
        TunedLogisticRegression, features
    )


def _ours(make: Callable[..., Any], features: int) -> dict[str, Any]:
    return {
        "tuned, one for all": make(groups=np.zeros(features)),
        "tuned, each": make(),
        "tuned, each, spread=2": make(spread=2.0),
        "tuned, each, no spread": make(spread=None),
        "tuned, each, no spread, one validation set": make(
            spread=None, cv=ShuffleSplit(1, test_size=0.2, random_state=0)
        ),
    }


def _diabetes() -> Any:
    return *load_diabetes(return_X_y=True), True


def _diabetes_products() -> Any:
    X, y, regression = _diabetes()
    return PolynomialFeatures(2, include_bias=False).fit_transform(X), y, regression


DATA: dict[str, Callable[[], Any]] = {
    "diabetes": _diabetes,
    "diabetes, with products": _diabetes_products,
    "breast cancer": lambda: (*load_breast_cancer(return_X_y=True), False),
    "wine": lambda: (*load_wine(return_X_y=True), False),
}
