"""LIBSVM's text format: one example a line, its label, then `index:value` of the features that are not zero."""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from bilax.datasets.examples import Examples
from bilax.datasets.idx import packed_or_not
from bilax.files import UNPACKED, DataError, check_size, read_unpacked

IJCNN1 = ("ijcnn1.trn", "ijcnn1.tst"), ("ijcnn1", "ijcnn1.t")
"""training and test file of IJCNN 2001's first challenge, under their own names and under LIBSVM's"""
IJCNN1_FEATURES = 22


def load_ijcnn1(folder: Path) -> tuple[Examples, Examples]:
    """Training and test examples; the label −1 is class 0, +1 is class 1."""
    groups = ([packed_or_not(folder / name) for name in group] for group in IJCNN1)
    files = next((files for files in groups if all(file.exists() for file in files)), None)
    if files is None:
        raise DataError(f"{folder}: holds neither {' nor '.join(' and '.join(group) for group in IJCNN1)}.")
    train, test = (read_libsvm(file, IJCNN1_FEATURES) for file in files)
    return train, test


def read_libsvm(path: Path, features: int) -> Examples:
    """Examples of two classes, labelled ±1, from LIBSVM text, packed or not; features are counted from 1."""
    lines = read_unpacked(path).splitlines()
    # Lines without features are short, and each would become a row of zeros.
    check_size(path, 4 * features * len(lines), max(UNPACKED, 4 * sum(map(len, lines))), "becomes")
    try:
        inputs, labels = _parse(lines, features)
    except (ValueError, OverflowError):
        number, error = _first_wrong(lines, features)
        raise DataError(f"{path}: line {number + 1} cannot be read ({error}).") from None
    if not len(labels):
        raise DataError(f"{path}: holds no examples.")
    return Examples(inputs, (labels > 0).astype(np.int32), (features,))


def _parse(lines: list[bytes], features: int) -> tuple[Float[np.ndarray, "n d"], Float[np.ndarray, " n"]]:
    from sklearn.datasets import load_svmlight_file  # takes a second to import

    content = io.BytesIO(b"\n".join(lines))
    with warnings.catch_warnings(), np.errstate(over="ignore"):
        warnings.simplefilter("ignore")
        options: Any = {"n_features": features, "dtype": np.float32, "zero_based": False}
        sparse, labels, *_ = load_svmlight_file(content, **options)
    inputs = sparse.toarray()
    if not np.isin(labels, (-1, 1)).all():
        raise ValueError("its label is neither -1 nor 1")
    if not np.isfinite(inputs).all():
        raise ValueError("a value is not finite")
    return inputs, labels


def _first_wrong(lines: list[bytes], features: int) -> tuple[int, Exception]:
    """Which line is the first that cannot be read, and why: halves that can be are left behind."""
    begin, end, error = 0, len(lines), Exception()
    while end > begin:
        middle = (begin + end) // 2
        try:
            _parse(lines[begin : middle + 1], features)
            begin = middle + 1
        except (ValueError, OverflowError) as found:
            end, error = middle, found
    return begin, error
