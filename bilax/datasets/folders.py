"""Anyone's pictures, in one folder per class, as classes for few-shot tasks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bilax.datasets.classes import PARTS, Classes, Splits, classes, decode, disjoint_splits, random_splits
from bilax.files import DataError

SIZE = 84
SUFFIXES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".gif": "GIF", ".webp": "WEBP"}
FORMATS = tuple(dict.fromkeys(SUFFIXES.values()))


def load_folder(folder: Path, size: int = SIZE, channels: int = 3, seed: int = 0) -> Splits:
    """Anyone's pictures, one folder per class; the classes are in train/, val/ and test/, or split at random."""
    missing = [part for part in PARTS if not (folder / part).is_dir()]
    if not missing:
        return disjoint_splits(folder, [read_folder(folder / part, size, channels) for part in PARTS])
    if len(missing) == 1:
        raise DataError(f"{folder} lacks {missing[0]}/: give all of {', '.join(PARTS)}, or the classes alone.")
    return random_splits(read_folder(folder, size, channels), seed)


def read_folder(folder: Path, size: int = SIZE, channels: int = 3) -> Classes:
    """Pictures in one folder per class, scaled to `size` × `size`."""
    return read_files(list_folder(folder), size, channels)


def list_folder(folder: Path) -> dict[str, list[Path]]:
    """The files of pictures in one folder per class, by the folder's name; other files beside them are refused."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder.")
    groups = {}
    for inner in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        files = sorted(path for path in inner.iterdir() if not path.name.startswith("."))
        wrong = [path for path in files if path.suffix.lower() not in SUFFIXES]
        if wrong:
            raise DataError(f"{wrong[0]} is not a picture; each class folder may hold only {', '.join(SUFFIXES)}.")
        if not files:
            raise DataError(f"{inner} holds no pictures: remove it, or put some in.")
        groups[inner.name] = files
    if not groups:
        raise DataError(f"{folder} names no class: there must be one folder for each.")
    return groups


def read_files(groups: Mapping[str, Sequence[Path]], size: int, channels: int) -> Classes:
    """Pictures in files, by class, scaled to `size` × `size`."""

    def read(path: Path) -> np.ndarray:
        return decode(path, (size, size), channels, str(path), FORMATS)

    return classes(
        {name: np.stack([read(path) for path in paths]) for name, paths in groups.items()}, (size, size, channels)
    )
