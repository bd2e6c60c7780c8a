"""The problems: objectives that are means over examples, their data, and an exact judge of the leader's point.

The objectives get a batch of the leader's and one of the follower's examples (`bilax.Minibatches`), or all of both. The
problems are those of benchopt's benchmark_bilevel (Dagréou, Ablin, Vaiter, Moreau), the formulas being theirs and the
code not. The judges compute in double precision with NumPy, so that they owe nothing to what they judge.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import bilax
from bilax.datasets import Examples, find, load
from bilax.datasets.registry import entry
from bilax.experiments.cleaning import problem as paper
from bilax.experiments.stochastic.objectives import (
    Labelled,
    Signed,
    Terms,
    cross_entropies,
    logistic_loss,
    penalty,
    quadratic_mean,
    weighted,
)

Judge = Callable[[np.ndarray, np.ndarray], dict[str, float]]
"""(x, y) -> numbers by name, the first of which is what the leader wants small"""


class Task(NamedTuple):
    """What is to be solved, from where, on which examples, and what is measured."""

    problem: bilax.Problem
    x0: Float[np.ndarray, " d"]
    y0: Any
    """an array, or a tree of them"""
    upper: Any
    """the leader's examples: a tree of arrays with one row for each"""
    lower: Any
    judge: Judge
    said: str = ""
    """what a person should know of the data"""

    def minibatches(self, size: int | None, seed: int = 0) -> bilax.Minibatches:
        """The examples in batches."""
        return bilax.Minibatches(self.upper, self.lower, size, seed)

    @property
    def counts(self) -> tuple[int, int]:
        """How many examples the leader and the follower have."""
        upper, lower = (len(jax.tree.leaves(part)[0]) for part in (self.upper, self.lower))
        return upper, lower

    def batches(self, size: int) -> float:
        """How many batches all examples of both levels are."""
        return sum(self.counts) / size


# ------------------------------------------------------------------------------------------------------ quadratic


def _mean_of_upper(x, y, upper, lower):
    return quadratic_mean(x, y, upper)


def _mean_of_lower(x, y, upper, lower):
    return quadratic_mean(x, y, lower)


QUADRATIC = bilax.Problem(_mean_of_upper, _mean_of_lower)


class Means(NamedTuple):
    """The mean of the examples: ½yᵀA y + ½xᵀB x + xᵀC y + c·y + d·x, in double precision."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    linear_y: np.ndarray
    linear_x: np.ndarray

    @classmethod
    def of(cls, terms: Terms) -> "Means":
        """Those of all examples."""
        a, b, u, w, c, d = (np.asarray(one, np.float64) for one in terms)
        count = len(a)
        return cls(a.T @ a / count, b.T @ b / count, u.T @ w / count, c.mean(0), d.mean(0))


@functools.lru_cache(maxsize=2)
def quadratic(count: int = 32_768, leaders: int = 1024, dim_y: int = 100, dim_x: int = 10, seed: int = 0) -> Task:
    """A simulated quadratic: `count` examples of the follower, `leaders` of the leader.

    The spectra of the mean of a aᵀ and of b bᵀ (one eigenvalue of which is 0) lie log-spaced in [0.1, 1], the singular
    values of the mean of u wᵀ are 0.1. Drawn again until the value function Φ(x) = F(x, y*(x)) is strongly convex.
    """
    for trial in range(20):
        random = np.random.default_rng([seed, trial])
        lower, upper = (_drawn(random, number, dim_y, dim_x) for number in (count, leaders))
        f, F = Means.of(lower), Means.of(upper)
        if np.linalg.eigvalsh(_curvature(f, F))[0] > 1e-12:
            break
    else:
        raise ValueError(f"seed {seed}: no draw of 20 has a strongly convex value function; take another.")
    ends = np.full(dim_x, -2.0, np.float32), np.zeros(dim_y, np.float32)
    return Task(QUADRATIC, *ends, upper, lower, functools.partial(_judge_quadratic, f, F))


def _drawn(random: np.random.Generator, count: int, dim_y: int, dim_x: int) -> Terms:
    def correlated(dim, values):
        basis = np.linalg.qr(random.standard_normal((dim, dim)))[0]
        return random.standard_normal((count, dim)) @ (basis * np.sqrt(values)) @ basis.T

    a = correlated(dim_y, np.geomspace(0.1, 1, dim_y))
    b = correlated(dim_x, np.append(0, np.geomspace(0.1, 1, dim_x - 1)))
    left, right = (np.linalg.qr(random.standard_normal((dim, dim)))[0] for dim in (dim_x, dim_y))
    both, rank = random.standard_normal((count, dim_y)), min(dim_x, dim_y)
    u, w = 0.1 * both[:, :rank] @ left[:, :rank].T, both @ right.T
    linear = random.standard_normal((count, dim_y)), random.standard_normal((count, dim_x))
    return Terms(*(one.astype(np.float32) for one in (a, b, u, w, *linear)))


def _curvature(f: Means, F: Means) -> np.ndarray:
    """The Hessian of Φ; y*(x) = y*(0) + response · x."""
    response = -np.linalg.solve(f.a, f.c.T)
    cross = F.c @ response
    return F.b + response.T @ F.a @ response + cross + cross.T


def _judge_quadratic(f: Means, F: Means, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """‖∇Φ(x)‖² and ‖y − y*(x)‖², in closed form."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    best = np.linalg.solve(f.a, -f.linear_y - f.c.T @ x)
    v = -np.linalg.solve(f.a, F.a @ best + F.c.T @ x + F.linear_y)
    slope = F.b @ x + F.c @ best + F.linear_x + f.c @ v
    return {"‖∇Φ‖²": float(slope @ slope), "‖y − y*‖²": float(np.sum((y - best) ** 2))}


# ------------------------------------------------------------------------------------------------------- logistic


def _logistic_upper(x, y, upper, lower):
    return logistic_loss(y, upper)


def _logistic_lower(x, y, upper, lower):
    return logistic_loss(y, lower) + penalty(x, y)


LOGISTIC = bilax.Problem(_logistic_upper, _logistic_lower)


@functools.lru_cache(maxsize=2)
def logistic(folder: Path | None = None, seed: int = 0) -> Task:
    """The leader sets a penalty exp(x_j) for each feature of a logistic regression, judged by ijcnn1's test file.

    Where ijcnn1 is not on this machine, scikit-learn's breast cancer data stand in, standardised and halved.
    """
    said = ""
    if find("ijcnn1", folder):
        train, test = load("ijcnn1", folder)
    else:
        said = "ijcnn1 is not on this machine (bilax data list): scikit-learn's breast cancer data stand in for it."
        train, test = _tumours()
    upper, lower = (Signed(part.inputs, (2.0 * part.labels - 1).astype(np.float32)) for part in (test, train))
    random, dim = np.random.default_rng(seed), train.inputs.shape[1]
    y0, x0 = random.standard_normal(dim), np.log(random.uniform(size=dim))
    judge = functools.partial(
        _judge_logistic, *(Signed(*(np.asarray(a, np.float64) for a in p)) for p in (lower, upper))
    )
    return Task(LOGISTIC, x0.astype(np.float32), y0.astype(np.float32), upper, lower, judge, said)


def _tumours() -> tuple[Examples, Examples]:
    from sklearn.datasets import load_breast_cancer

    inputs, labels = map(np.asarray, load_breast_cancer(return_X_y=True))
    inputs = ((inputs - inputs.mean(0)) / inputs.std(0)).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = (Examples(inputs[rows], labels[rows].astype(np.int32), (30,)) for rows in np.array_split(order, 2))
    return train, test


def _slope(y: np.ndarray, part: Signed) -> tuple[float, np.ndarray, np.ndarray]:
    """The loss, its gradient, and each example's curvature."""
    margins = part.labels * (part.inputs @ y)
    wrong = 0.5 * (1 - np.tanh(0.5 * margins))  # σ(−margin), without overflow
    return (
        float(np.logaddexp(0, -margins).mean()),
        -(part.labels * wrong) @ part.inputs / len(margins),
        wrong * (1 - wrong),
    )


def solved_logistic(x: np.ndarray, lower: Signed) -> tuple[np.ndarray, np.ndarray]:
    """y*(x) and ∂²_yy f there, by Newton's method with halving."""
    penalty, y = np.exp(x), np.zeros(len(x))

    def value(y):
        return np.logaddexp(0, -lower.labels * (lower.inputs @ y)).mean() + 0.5 * penalty @ y**2

    for _ in range(50):
        _, slope, curvature = _slope(y, lower)
        slope = slope + penalty * y
        hessian = (lower.inputs.T * curvature) @ lower.inputs / len(lower.labels) + np.diag(penalty)
        step = np.linalg.solve(hessian, slope)
        if slope @ step < 1e-22:
            return y, hessian
        length = 1.0
        while value(y - length * step) > value(y) - 1e-4 * length * (slope @ step) and length > 1e-3:
            length /= 2
        y = y - length * step
    raise ValueError(f"Newton's method did not solve the follower at x = {x}.")


def value_function(x: np.ndarray, lower: Signed, upper: Signed) -> tuple[float, np.ndarray]:
    """Φ(x) = F(y*(x)) of the logistic problem, and its gradient −exp(x) y* ∘ [∂²_yy f]⁻¹ ∇F."""
    y, hessian = solved_logistic(np.asarray(x, np.float64), lower)
    value, slope, _ = _slope(y, upper)
    return value, -np.exp(x) * y * np.linalg.solve(hessian, slope)


def _judge_logistic(lower: Signed, upper: Signed, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Φ(x) and ‖∇Φ(x)‖²."""
    value, slope = value_function(np.asarray(x, np.float64), lower, upper)
    return {"Φ": value, "‖∇Φ‖²": float(slope @ slope)}


# ------------------------------------------------------------------------------------------------------- cleaning


def _cleaning_upper(x, y, upper, lower):
    return jnp.mean(cross_entropies(y, upper))


def _cleaning_lower(x, y, upper, lower):
    return weighted(x[lower.row], y, lower)


CLEANING = bilax.Problem(_cleaning_upper, _cleaning_lower)


@functools.lru_cache(maxsize=2)
def cleaning(
    corrupted: float = 0.5,
    dataset: str = "mnist",
    sizes: tuple[int, int] = (20_000, 5000),
    folder: Path | None = None,
    seed: int = 0,
) -> Task:
    """Each training label is replaced, with probability `corrupted`, by one drawn from all classes; the leader weighs
    example i by σ(x_i) in the training of a linear softmax without bias, judged by clean validation examples."""
    train, test = load(dataset, folder)
    if sum(sizes) > len(train.labels):
        raise ValueError(f"sizes={sizes} ask for {sum(sizes)} examples, but {dataset} has {len(train.labels)}.")
    random = np.random.default_rng(seed)
    order, classes = random.permutation(len(train.labels)), int(train.labels.max()) + 1
    training, validation = (train.take(rows) for rows in np.split(order, np.cumsum(sizes))[:2])
    replaced = random.random(sizes[0]) < corrupted
    noisy = np.where(replaced, random.integers(0, classes, sizes[0]), training.labels)
    centre, scale = training.inputs.mean(0), training.inputs.std(0)

    def part(inputs, labels):
        scaled = (inputs - centre) / np.where(scale > 0, scale, 1)
        rows = np.arange(len(labels), dtype=np.int32)
        return Labelled(scaled.astype(np.float32), np.eye(classes, dtype=np.float32)[labels], rows)

    lower, upper, held = part(training.inputs, noisy), part(*validation[:2]), part(*test[:2])
    ends = np.full(sizes[0], -2.0, np.float32), np.zeros((lower.inputs.shape[1], classes), np.float32)
    judge = functools.partial(_judge_cleaning, held, upper, noisy == training.labels)
    return Task(CLEANING, *ends, upper, lower, judge)


def _judge_cleaning(
    held: Labelled, upper: Labelled, right: np.ndarray, x: np.ndarray, y: np.ndarray
) -> dict[str, float]:
    """Shares of wrong answers on test and validation examples, and F1 of "σ(x_i) ≥ the mean means label i is right"."""

    def error(part):
        scores = np.asarray(part.inputs) @ np.asarray(y)
        wrong = np.argmax(scores, axis=1) != np.argmax(part.targets, axis=1)
        # Where there are no numbers, all is wrong.
        return float(np.mean(wrong)) if np.isfinite(scores).all() else 1.0

    weights = 1 / (1 + np.exp(-np.asarray(x, np.float64)))
    said = weights >= weights.mean()
    f1 = 2 * float(np.sum(said & right)) / max(1, int(said.sum() + right.sum()))
    return {"test error": error(held), "validation error": error(upper), "F1": f1}


def _paper_upper(x, y, upper, lower):
    return jnp.mean(paper.cross_entropy(paper.logits(y, upper.inputs), upper.targets.T))


def _paper_lower(x, y, upper, lower):
    losses = paper.cross_entropy(paper.logits(y, lower.inputs), lower.targets.T)
    return jnp.mean(jax.nn.sigmoid(x[lower.row]) * losses)


HYPER_CLEANING = bilax.Problem(_paper_upper, _paper_lower)


@functools.lru_cache(maxsize=1)
def hyper_cleaning(dataset: str = "mnist", folder: Path | None = None, seed: int = 0) -> Task:
    """The paper's hyper-cleaning (`bilax run cleaning`) by mini-batches: two layers, half of the labels wrong."""
    train, test = load(dataset, folder)
    parts = paper.split(train.join(test), entry(dataset, "examples").sizes, seeds=(seed,))

    def labelled(part, labels):
        rows = np.arange(len(labels), dtype=np.int32)
        return Labelled(part.inputs, np.eye(parts.classes, dtype=np.float32)[labels], rows)

    network = paper.network(jax.random.split(jax.random.key(seed), 1)[0], parts.train.inputs.shape[1], parts.classes)
    ends = np.zeros(len(parts.noisy[0]), np.float32), jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), network)
    upper, lower = labelled(parts.validation, parts.validation.labels), labelled(parts.train, parts.noisy[0])
    return Task(HYPER_CLEANING, *ends, upper, lower, functools.partial(_judge_hyper_cleaning, parts))


def _judge_hyper_cleaning(parts: paper.Split, x: np.ndarray, y: Any) -> dict[str, float]:
    """Shares of wrong answers on the test and the held-out examples, and 1 − F1 of "x_i ≥ 0 means label i is right"."""

    def error(part):
        scores = np.asarray(paper.logits(y, jnp.asarray(part.inputs)))
        return float(np.mean(np.argmax(scores, axis=0) != part.labels)) if np.isfinite(scores).all() else 1.0

    f1 = float(paper.detected(jnp.asarray(x), jnp.asarray(parts.noisy[0] == parts.train.labels))[2])
    return {"test error": error(parts.test), "held-out error": error(parts.held_out), "1 − F1": 1 - f1}


PROBLEMS = {"Terms": QUADRATIC, "Signed": LOGISTIC, "Labelled": CLEANING}
"""by the kind of their examples"""
