"""The numbers of the everyday problems, as NumPy arrays in double precision."""

import functools
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from sklearn import datasets


class Split(NamedTuple):
    """Examples for the follower, which trains, and for the leader, who validates."""

    train: Float[np.ndarray, "n d"]
    target: Float[np.ndarray, " n"] | Int[np.ndarray, " n"]
    held_out: Float[np.ndarray, "m d"]
    held_out_target: Float[np.ndarray, " m"] | Int[np.ndarray, " m"]

    def standardised(self) -> "Split":
        """Inputs with mean 0 and deviation 1 in training."""
        mean, scale = self.train.mean(0), self.train.std(0)
        scale = np.where(scale > 0, scale, 1)
        return self._replace(train=(self.train - mean) / scale, held_out=(self.held_out - mean) / scale)


def _split(inputs: Any, target: Any, train: int, held_out: int | None = None) -> Split:
    order = np.random.default_rng(0).permutation(len(target))
    a, b = order[:train], order[train : None if held_out is None else train + held_out]
    return Split(inputs[a], target[a], inputs[b], target[b])


@functools.cache
def tumours() -> Split:
    """Breast cancer: 30 features on scales from 1e-3 to 1e3; the answer is −1 or 1."""
    inputs, label = map(np.asarray, datasets.load_breast_cancer(return_X_y=True))
    return _split(inputs, 2.0 * label - 1, 285)


@functools.cache
def wrong_labels() -> Split:
    """Five features of 120 tumours, the labels of 30 of which are wrong; those held out are right."""
    inputs, label = map(np.asarray, datasets.load_breast_cancer(return_X_y=True))
    split = _split(inputs[:, [0, 1, 4, 7, 8]], 2.0 * label - 1, 120, 150).standardised()
    sign = np.where(np.arange(120) < 30, -1.0, 1.0)
    return split._replace(target=sign * split.target)


@functools.cache
def diabetes() -> Split:
    """Ten features, each scaled to norm 1 over all patients, and how far the illness went, from 25 to 346."""
    inputs, progression = map(np.asarray, datasets.load_diabetes(return_X_y=True))
    return _split(inputs, progression, 221)


@functools.cache
def diabetes_products() -> Split:
    """The features of 100 patients with all their products: 65 columns, so that a penalty is needed."""
    split = diabetes()
    first, second = np.triu_indices(10)

    def widen(inputs: np.ndarray) -> np.ndarray:
        return np.concatenate([inputs, inputs[:, first] * inputs[:, second]], axis=1)

    wide = Split(widen(split.train[:100]), split.target[:100], widen(split.held_out), split.held_out_target)
    centre = wide.target.mean()
    return wide.standardised()._replace(
        target=(wide.target - centre) / 100, held_out_target=(wide.held_out_target - centre) / 100
    )


@functools.cache
def digits() -> Split:
    """Pictures of five digits that are easily taken for each other, 64 grey values from 0 to 1."""
    inputs, label = map(np.asarray, datasets.load_digits(return_X_y=True))
    classes = [1, 3, 5, 8, 9]
    kept = np.isin(label, classes)
    return _split(inputs[kept] / 16, np.searchsorted(classes, label[kept]), 150, 300)


@functools.cache
def waves() -> Split:
    """A noisy sine with a slope, on a line."""
    rng = np.random.default_rng(1)
    inputs = rng.uniform(-3, 3, (120, 1))
    target = np.sin(2 * inputs[:, 0]) + 0.3 * inputs[:, 0] + 0.3 * rng.normal(size=120)
    return Split(inputs[:60], target[:60], inputs[60:], target[60:])


@functools.cache
def moons() -> Split:
    """Two crescents in the plane; the answer is −1 or 1."""
    inputs, label = map(np.asarray, datasets.make_moons(160, noise=0.3, random_state=0))
    return Split(inputs[:60], 2.0 * label[:60] - 1, inputs[60:], 2.0 * label[60:] - 1)


@functools.cache
def sparse() -> Split:
    """30 features of which five matter, 50 examples to train on."""
    rng = np.random.default_rng(2)
    inputs = rng.normal(size=(130, 30))
    target = inputs[:, :5] @ np.array([2.0, -1.5, 1.0, 1.0, -0.5]) + rng.normal(size=130)
    return Split(inputs[:50], target[:50], inputs[50:], target[50:])


class Sensors(NamedTuple):
    """Sums of eight non-negative amounts as 40 sensors measure them, ten of which are broken, and later true ones."""

    mixing: Float[np.ndarray, "40 8"]
    measured: Float[np.ndarray, " 40"]
    later_mixing: Float[np.ndarray, "25 8"]
    later: Float[np.ndarray, " 25"]


@functools.cache
def sensors() -> Sensors:
    """Three of the amounts are zero, so that bounds are active."""
    rng = np.random.default_rng(3)
    amounts = np.array([1.0, 0.0, 2.0, 0.5, 0.0, 1.5, 0.0, 0.8])
    mixing, later = rng.uniform(0, 1, (40, 8)), rng.uniform(0, 1, (25, 8))
    noise = np.where(np.arange(40) < 10, 2.0, 0.1) * rng.normal(size=40)
    return Sensors(mixing, mixing @ amounts + noise, later, later @ amounts + 0.1 * rng.normal(size=25))


class Market(NamedTuple):
    """Monthly returns of eight assets in per cent: mean and covariance so far, and the next four years."""

    mean: Float[np.ndarray, " 8"]
    covariance: Float[np.ndarray, "8 8"]
    later: Float[np.ndarray, "48 8"]


@functools.cache
def market() -> Market:
    """One common factor and noise of its own for each asset."""
    rng = np.random.default_rng(4)
    loading, own, mean = rng.uniform(0.5, 1.5, 8), rng.uniform(1, 4, 8), rng.uniform(0.2, 1.5, 8)
    months = mean + 3 * rng.normal(size=(108, 1)) * loading + own * rng.normal(size=(108, 8))
    return Market(months[:60].mean(0), np.cov(months[:60].T), months[60:])


class Stiff(NamedTuple):
    """A linear model A y ≈ B x + c whose least squares have condition number 1e6, and where y should be."""

    A: Float[np.ndarray, "40 20"]
    B: Float[np.ndarray, "40 5"]
    c: Float[np.ndarray, " 40"]
    wanted: Float[np.ndarray, " 20"]


@functools.cache
def stiff() -> Stiff:
    """Singular values from 1 to 1e-3."""
    rng = np.random.default_rng(5)
    left, right = np.linalg.qr(rng.normal(size=(40, 20)))[0], np.linalg.qr(rng.normal(size=(20, 20)))[0]
    A = left * np.logspace(0, -3, 20) @ right
    B, c = A @ rng.normal(size=(20, 5)) + 1e-3 * rng.normal(size=(40, 5)), left[:, 0]
    wanted = np.linalg.lstsq(A, B @ rng.normal(size=5) + c)[0]
    return Stiff(A, B, c, wanted + 0.1 * rng.normal(size=20))
