"""What the everyday problems are worth, by NumPy, SciPy and scikit-learn in double precision alone.

Each judge has both objectives, written a second time, and the follower's exact answer to any x.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import optimize, special
from sklearn.linear_model import ElasticNet

from bilax.experiments.everyday import data

Range = tuple[Any, Any]
EVERYWHERE = (-np.inf, np.inf)


class Judge(NamedTuple):
    """Both objectives, and the follower's answer."""

    upper: Callable[[Any, Any], float]
    lower: Callable[[Any, Any], float]
    refit: Callable[[Any], Any]
    """x ↦ y, the follower's global minimiser"""
    bounds: Range = EVERYWHERE
    """of the leader's variables in the order of `ravel`; numbers hold for all"""
    within: Range | None = None
    """where to look for the best x, if `bounds` are too wide for that"""

    def value(self, x: Any) -> float:
        """F once the follower has answered."""
        return float(self.upper(x, self.refit(x)))


def ravel(x: Any) -> Float[np.ndarray, " n"]:
    """The numbers of x as one vector; of a dictionary in the order of its sorted keys."""
    leaves = [x[key] for key in sorted(x)] if isinstance(x, dict) else [x]
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in leaves])


def unravel(vector: Float[np.ndarray, " n"], like: Any) -> Any:
    """The inverse of `ravel`."""
    if not isinstance(like, dict):
        return np.reshape(vector, np.shape(like))
    ends = np.cumsum([np.size(like[key]) for key in sorted(like)])
    parts = np.split(vector, ends[:-1])
    return {key: np.reshape(part, np.shape(like[key])) for key, part in zip(sorted(like), parts, strict=True)}


def minimise(
    terms: Callable[[np.ndarray], tuple[float, np.ndarray, np.ndarray]], y: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """Newton's method with backtracking on a convex function; `terms` are its value, gradient and Hessian."""
    for _ in range(200):
        value, gradient, hessian = terms(y)
        step = np.linalg.solve(hessian, gradient)
        decrease = gradient @ step
        if decrease <= 1e-12 * abs(value):
            break
        while not terms(y - step)[0] <= value - 1e-4 * decrease:
            step, decrease = step / 2, decrease / 2
        y = y - step
    # From here values no longer tell points apart, and whole steps gain the last digits.
    return y - step - np.linalg.solve(hessian, terms(y - step)[1])


def log_loss(margin: np.ndarray) -> np.ndarray:
    """log(1 + exp(−margin))."""
    return np.logaddexp(0, -margin)


def _with_ones(inputs: np.ndarray) -> np.ndarray:
    return np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)


def _fit_logistic(inputs: np.ndarray, signs: np.ndarray, weights: np.ndarray, penalty: np.ndarray) -> np.ndarray:
    """Coefficients v that minimise Σ weights · log_loss + Σ penalty · v²."""

    def terms(v: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        margin = signs * (inputs @ v)
        p = special.expit(-margin)
        value = weights @ log_loss(margin) + penalty @ v**2
        gradient = -inputs.T @ (weights * signs * p) + 2 * penalty * v
        return value, gradient, (inputs.T * (weights * p * (1 - p))) @ inputs + 2 * np.diag(penalty)

    # Columns on one scale, so that the system is well solved whatever units the features have.
    scale = np.sqrt((inputs**2).mean(0))
    inputs, penalty = inputs / scale, penalty / scale**2
    return minimise(terms, np.zeros(inputs.shape[1])) / scale


def _logistic(split: data.Split, bounds: Range) -> Judge:
    """A log-penalty for each feature; the intercept has none."""
    train, target, held_out, held_out_target = split
    n = len(target)

    def upper(x, y):
        return log_loss(held_out_target * (held_out @ y["w"] + y["b"])).mean()

    def lower(x, y):
        return log_loss(target * (train @ y["w"] + y["b"])).mean() + np.exp(x) @ y["w"] ** 2

    def refit(x):
        v = _fit_logistic(_with_ones(train), target, np.full(n, 1 / n), np.append(np.exp(x), 0.0))
        return {"w": v[:-1], "b": v[-1]}

    return Judge(upper, lower, refit, bounds)


def penalties() -> Judge:
    """30 log-penalties of a logistic regression."""
    return _logistic(data.tumours().standardised(), (-12.0, 8.0))


def unscaled() -> Judge:
    """The same for ten features as they are measured, from 1e-2 to 1e3."""
    split = data.tumours()
    return _logistic(split._replace(train=split.train[:, :10], held_out=split.held_out[:, :10]), (-20.0, 5.0))


COSTS = np.array([1.0, 1.5, 2.0, 4.0])


def _tolls(charge: Callable[[np.ndarray], float], refit: Callable[[np.ndarray], np.ndarray]) -> Judge:
    def cost(x):
        return COSTS + np.append(x, 0.0)

    return Judge(
        upper=lambda x, y: -x @ y[:3],
        lower=lambda x, y: cost(x) @ y + charge(y),
        refit=lambda x: refit(cost(x)),
        bounds=(0.0, 5.0),
    )


def tolls_entropy() -> Judge:
    """Travellers spread by a softmax of twice the cost."""
    return _tolls(lambda y: 0.5 * special.xlogy(y, y).sum(), lambda cost: special.softmax(-2 * cost))


def tolls_squares() -> Judge:
    """Travellers spread by the projection of −cost onto the simplex."""
    return _tolls(lambda y: 0.5 * y @ y, lambda cost: project_simplex(-cost))


def project_simplex(v: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """The nearest point whose coordinates are not negative and sum to one."""
    falling = np.sort(v)[::-1]
    thresholds = (np.cumsum(falling) - 1) / np.arange(1, len(v) + 1)
    return np.maximum(v - thresholds[falling > thresholds][-1], 0)
