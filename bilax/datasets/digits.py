"""scikit-learn's digits, 1,797 pictures of 8 × 8, which need no file: a stand-in for larger data sets."""

import numpy as np

from bilax.datasets.classes import Classes, Splits
from bilax.datasets.examples import Examples, examples


def load_digit_examples() -> tuple[Examples, Examples]:
    """Training and test examples; every fourth is for the test."""
    from sklearn.datasets import load_digits

    inputs, labels = map(np.asarray, load_digits(return_X_y=True))
    data = examples((inputs / 16).reshape(-1, 8, 8), labels)
    test = np.arange(len(data.labels)) % 4 == 0
    return data.take(np.flatnonzero(~test)), data.take(np.flatnonzero(test))


def load_digit_tasks() -> Splits:
    """Classes for few-shot tasks: trained on 0–4 and their quarter turns, tested on 5–9.

    Every other picture of 5–9 is left to validation, which turns it by a quarter. This is no benchmark.
    """
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    pictures = np.round(pictures * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    digits = Classes(tuple("0123456789"), tuple(pictures[labels == i] for i in range(10)), (8, 8, 1))
    known, new = digits.take(range(5)), digits.take(range(5, 10))
    held, test = (new._replace(pictures=tuple(np.asarray(p)[i::2] for p in new.pictures)) for i in (0, 1))
    return Splits(known.rotated((0, 1)), held.rotated((1,)), test)
