"""Data as the experiments take it, whether it comes from a file of a person's own or from a data set."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from bilax.files import DataError, read_arrays


class Examples(NamedTuple):
    """Inputs, flattened, with their labels."""

    inputs: Float[np.ndarray, "n d"]
    labels: Int[np.ndarray, " n"]
    shape: tuple[int, ...]
    """of one input before flattening; (height, width) for pictures"""

    def take(self, rows: np.ndarray) -> "Examples":
        """The examples with these indices."""
        return self._replace(inputs=self.inputs[rows], labels=self.labels[rows])

    def join(self, other: "Examples") -> "Examples":
        """These examples, then the other ones."""
        inputs, labels = np.concatenate([self.inputs, other.inputs]), np.concatenate([self.labels, other.labels])
        return Examples(inputs, labels, self.shape)


def examples(inputs: np.ndarray, labels: np.ndarray) -> Examples:
    """Bytes become numbers in [0, 1]; other inputs keep their values."""
    flat = inputs.reshape(len(inputs), -1)
    scaled = flat.astype(np.float32) / np.float32(255 if inputs.dtype == np.uint8 else 1)
    return Examples(scaled, labels.astype(np.int32), inputs.shape[1:])


def read_npz(path: Path) -> Examples:
    """Examples from an `.npz` file with arrays `x` (n, ...) and `y` (n,), as np.savez(path, x=..., y=...) writes."""
    arrays = read_arrays(path)
    for name in ("x", "y"):
        if name not in arrays:
            raise DataError(
                f"{path}: lacks the array {name!r}; it holds {sorted(arrays)}. Save it with np.savez(path, x=x, y=y)."
            )
    return _checked(arrays["x"], arrays["y"], path)


def _checked(x: np.ndarray, y: np.ndarray, path: Path) -> Examples:
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"{path}: y must hold whole numbers in one axis, got {y.dtype} of shape {y.shape}.")
    numeric = np.issubdtype(x.dtype, np.floating) or np.issubdtype(x.dtype, np.integer)
    if x.ndim < 2 or not numeric:
        raise DataError(f"{path}: x must hold numbers of shape (n, ...), got {x.dtype} of shape {x.shape}.")
    if len(x) != len(y) or not len(x):
        raise DataError(f"{path}: x holds {len(x)} examples and y {len(y)} labels; they must match and not be empty.")
    if not x[0].size:
        raise DataError(f"{path}: x has shape {x.shape}, so an example holds nothing.")
    with np.errstate(over="ignore"):
        wrong = np.argwhere(~np.isfinite(x.astype(np.float32)))
    if wrong.size:
        place, value = ", ".join(map(str, wrong[0])), x[tuple(wrong[0])]
        raise DataError(
            f"{path}: x[{place}] is {value}; inputs must be finite in single precision ({len(wrong)} are not)."
        )
    for i, said in ((int(np.argmin(y)), "labels count from 0"), (int(np.argmax(y)), "that is too large for a class")):
        if not 0 <= y[i] <= np.iinfo(np.int32).max:
            raise DataError(f"{path}: label y[{i}] is {y[i]}; {said}.")
    return examples(x, y)
