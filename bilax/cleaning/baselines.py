"""What others do about wrong labels, and a judgement of all candidates on held-out trusted rows."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

OTHERS = ("trusted alone", "confident learning")
"""candidates that know nothing of how often which class gets which label"""
RESAMPLED = 100
"""bootstrap samples behind a standard error"""


class Judgement(NamedTuple):
    """How well a candidate finds wrong labels among held-out trusted rows that were given some."""

    auc: float
    """that a wrong label is more suspicious than a right one; NaN without trusted rows"""
    error: float
    """standard error of `auc`"""
    behind: float
    """how much less than that of ours, in standard errors of the difference; negative where it is more"""
    flagged: int
    """labels of the data that it calls wrong"""


def confident_classes(probabilities: Float[np.ndarray, "n c"], labels: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """The class that confident learning counts a row in (Northcutt, Jiang and Chuang 2021): the most probable of those
    whose probability is at least its mean over the rows so labelled; the row's own label where there is none."""
    c = probabilities.shape[1]
    counts = np.bincount(labels, minlength=c)
    own = np.bincount(labels, probabilities[np.arange(len(labels)), labels], minlength=c)
    thresholds = np.where(counts > 0, own / np.maximum(counts, 1), np.inf)
    confident = np.where(probabilities >= thresholds, probabilities, -1.0)
    return np.where(confident.max(axis=1) >= 0, confident.argmax(axis=1), labels).astype(np.int32)


def suspicion(
    name: str,
    probabilities: Float[np.ndarray, "n c"],
    transition: Float[np.ndarray, "c c"],
    labels: Int[np.ndarray, " n"],
) -> Float[np.ndarray, " n"]:
    """How wrong each label looks to a candidate: 1 − p(label | u), for those that know T by Bayes' rule with it."""
    likely = probabilities[np.arange(len(labels)), labels]
    if name in OTHERS:
        return 1 - likely
    total = np.sum(probabilities * transition[:, labels].T, axis=1)
    return 1 - likely * transition[labels, labels] / np.maximum(total, 1e-30)


def flagged_by(
    name: str,
    probabilities: Float[np.ndarray, "n c"],
    transition: Float[np.ndarray, "c c"],
    labels: Int[np.ndarray, " n"],
) -> Bool[np.ndarray, " n"]:
    """The labels that a candidate calls wrong."""
    if name == "confident learning":
        return confident_classes(probabilities, labels) != labels
    if name in OTHERS:
        return probabilities.argmax(axis=1) != labels
    return suspicion(name, probabilities, transition, labels) > 0.5


def judge(
    candidates: dict[str, tuple[Float[np.ndarray, "m c"], Float[np.ndarray, "c c"]]],
    ours: str,
    truth: Int[np.ndarray, " m"],
    transition: Float[np.ndarray, "c c"],
    seed: int,
) -> dict[str, tuple[float, float, float]]:
    """AUC, its standard error, and the lead of `ours` in standard errors of the difference, for each candidate.

    Each trusted row gets every label there is, with the weight that `transition` gives it: no draw is needed, and all
    candidates are asked the same.
    """
    m, c = len(truth), len(transition)
    labels, rows = np.tile(np.arange(c), m), np.repeat(np.arange(m), c)
    weights, wrong = transition[truth].ravel(), labels != truth[rows]
    scores = {name: suspicion(name, p[rows], t, labels) for name, (p, t) in candidates.items()}
    draws = np.random.default_rng(seed).multinomial(m, np.full(m, 1 / m), RESAMPLED)
    aucs = {
        name: np.array([weighted_auc(score, wrong, weights * times[rows]) for times in (np.ones(m), *draws)])
        for name, score in scores.items()
    }
    found = {}
    for name, values in aucs.items():
        gap = aucs[ours] - values
        # A difference that no resampling changes is of rounding, or of a single row: it is nobody's lead.
        behind = gap[0] / np.nanstd(gap[1:]) if np.nanstd(gap[1:]) > 1e-12 else 0.0
        found[name] = float(values[0]), float(np.nanstd(values[1:])), float(behind)
    return found


def weighted_auc(
    score: Float[np.ndarray, " n"], positive: Bool[np.ndarray, " n"], weights: Float[np.ndarray, " n"]
) -> float:
    """P(score of a positive > score of a negative) + ½ P(equal), rows drawn by weight; NaN where a kind is missing."""
    _, place = np.unique(score, return_inverse=True)
    up = np.bincount(place, weights * positive)
    down = np.bincount(place, weights * ~positive)
    total = up.sum() * down.sum()
    return float(np.sum(up * (np.cumsum(down) - 0.5 * down)) / total) if total > 0 else float("nan")
