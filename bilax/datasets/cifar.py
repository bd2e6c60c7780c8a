"""CIFAR-FS: CIFAR-100's hundred classes, 600 colour pictures of each, in Bertinetto's split (2019).

train/, val/ and test/ hold the classes, each as one PNG with the pictures below each other, or as a folder of pictures.
"""

from pathlib import Path

import numpy as np

from bilax.datasets.classes import PARTS, Classes, Splits, classes, decode, disjoint_splits
from bilax.datasets.folders import read_folder
from bilax.files import DataError

SIDE = 32


def load_cifar_fs(folder: Path) -> Splits:
    """The classes of the three parts."""
    return disjoint_splits(folder, [_read_part(folder / part) for part in PARTS])


def _read_part(folder: Path) -> Classes:
    strips = sorted(path for path in folder.glob("*.png") if not path.name.startswith("."))
    if not strips:
        return read_folder(folder, SIDE)
    return classes({path.stem: read_strip(path) for path in strips}, (SIDE, SIDE, 3))


def read_strip(path: Path) -> np.ndarray:
    """Pictures that lie below each other in one PNG."""
    column = decode(path, None, 3, str(path), ("PNG",))
    height, width, _ = column.shape
    if width != SIDE or height % SIDE:
        raise DataError(
            f"{path}: is {width} wide and {height} high, but pictures of {SIDE} × {SIDE} below each other are {SIDE} "
            f"wide and a multiple of {SIDE} high."
        )
    return column.reshape(-1, SIDE, SIDE, 3)
