"""What candidates say together, and which labels go with which classes."""

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import minimize
from scipy.special import logsumexp

LEAST = 1e-6
"""a probability that a model may give at the least, so that one of them alone cannot rule a class out"""
SPREAD = 2.0
"""standard deviation of the prior of the exponents"""
MOST = 3.0
"""an exponent at the most"""
ROUNDS = 4
"""of exponents and frequencies in turn; a round more changes neither by a hundredth"""
EXPLAINED = 0.25
"""the share of what a wrong label leaves open (which of the other classes it names) that frequencies of their own for
each pair of classes must tell, for these to be believed in place of one rate. Models that are too simple mix classes
up, which looks like such frequencies: on data with one rate they told up to 0.17, on data with pairs at least 0.5"""


def pool(
    trusted: Float[np.ndarray, "k m c"],
    noisy: Float[np.ndarray, "k n c"],
    truth: Int[np.ndarray, " m"],
    labels: Int[np.ndarray, " n"],
    start: Float[np.ndarray, "c c"],
) -> tuple[Float[np.ndarray, "m c"], Float[np.ndarray, "n c"], Float[np.ndarray, "c c"]]:
    """The logarithmic pool of k candidates, p(c) ∝ Π_k p_k(c)^w_k, and T.

    The exponents w make all rows most likely: the sum of −log p over trusted rows and of −log Σ_c p(c) T[c, label] over
    noisy ones, all by models that have not seen them, with T as `estimate_transition` finds it. Each row counts once,
    not each mean as for the leader: a dozen trusted rows would then decide by chance. The last candidate is where they
    begin.
    """
    logs = [np.log(np.maximum(part, LEAST)) for part in (trusted, noisy)]
    first = np.eye(len(noisy))[-1]
    exponents, transition = first, start
    rows = np.arange(len(truth))
    for _ in range(ROUNDS):
        transition = estimate_transition(np.exp(_pooled(exponents, logs[1])), labels, transition)
        evidence = np.log(np.maximum(transition, 1e-30)).T[labels]

        def loss(w, evidence=evidence):
            told = np.sum(_pooled(w, logs[0])[rows, truth])
            seen = np.sum(np.asarray(logsumexp(_pooled(w, logs[1]) + evidence, axis=1)))
            return (np.sum((w - first) ** 2) / (2 * SPREAD**2) - told - seen) / (len(truth) + len(labels))

        exponents = minimize(loss, exponents, method="L-BFGS-B", bounds=[(0, MOST)] * len(noisy)).x
    pools = [np.exp(_pooled(exponents, part)) for part in logs]
    return pools[0], pools[1], believed_transition(pools[1], labels, transition)


def _pooled(exponents: Float[np.ndarray, " k"], logs: Float[np.ndarray, "k n c"]) -> Float[np.ndarray, "n c"]:
    found = np.tensordot(exponents, logs, axes=1)
    return found - logsumexp(found, axis=1, keepdims=True)


def posterior(
    probabilities: Float[np.ndarray, "n c"], transition: Float[np.ndarray, "c c"], labels: Int[np.ndarray, " n"]
) -> Float[np.ndarray, "n c"]:
    """P(true class | input, label) by Bayes' rule."""
    joint = probabilities * transition[:, labels].T
    return joint / np.maximum(joint.sum(axis=1, keepdims=True), 1e-30)


def estimate_transition(
    probabilities: Float[np.ndarray, "n c"],
    labels: Int[np.ndarray, " n"],
    start: Float[np.ndarray, "c c"] | None = None,
    rounds: int = 50,
) -> Float[np.ndarray, "c c"]:
    """T[true class, label] of most likelihood given p(c | u) of rows by models that have not seen them (EM)."""
    c = probabilities.shape[1]
    found = np.full((c, c), 0.3 / c) + 0.7 * np.eye(c) if start is None else start
    for _ in range(rounds):
        shares = posterior(probabilities, found, labels)
        counts = 1 / c + np.stack([np.bincount(labels, column, minlength=c) for column in shares.T])
        found = counts / counts.sum(axis=1, keepdims=True)
    return found


def one_rate(
    probabilities: Float[np.ndarray, "n c"], labels: Int[np.ndarray, " n"], rounds: int = 200
) -> Float[np.ndarray, "c c"]:
    """T where labels are wrong at one rate and name each other class as often, the rate of most likelihood (EM)."""
    c, rate = probabilities.shape[1], 0.2
    own = probabilities[np.arange(len(labels)), labels]
    for _ in range(rounds):
        right, wrong = (1 - rate) * own, rate / (c - 1) * (1 - own)
        rate = float(np.mean(wrong / np.maximum(right + wrong, 1e-30)))
    return np.full((c, c), rate / (c - 1)) * (1 - np.eye(c)) + (1 - rate) * np.eye(c)


def believed_transition(
    probabilities: Float[np.ndarray, "n c"], labels: Int[np.ndarray, " n"], pairs: Float[np.ndarray, "c c"]
) -> Float[np.ndarray, "c c"]:
    """T by `pairs` of classes, or by one rate where pairs do not tell enough more (`EXPLAINED`).

    Of two classes a wrong label leaves nothing open; there both rates are kept."""
    simple = one_rate(probabilities, labels)
    told = _log_likelihood(probabilities, pairs, labels) - _log_likelihood(probabilities, simple, labels)
    open_before = (1 - simple[0, 0]) * np.log(len(pairs) - 1)
    return pairs if told >= EXPLAINED * open_before else simple


def _log_likelihood(
    probabilities: Float[np.ndarray, "n c"], transition: Float[np.ndarray, "c c"], labels: Int[np.ndarray, " n"]
) -> float:
    return float(np.mean(np.log(np.maximum(np.sum(probabilities * transition[:, labels].T, axis=1), 1e-30))))
