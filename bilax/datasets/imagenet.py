"""miniImageNet and tieredImageNet, as classes for few-shot tasks."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bilax.datasets.classes import PARTS, Classes, Splits, classes, decode, disjoint_splits
from bilax.datasets.folders import SIZE, read_files
from bilax.datasets.unpickling import read_pickle
from bilax.files import DataError, read_text

MINI_PACKED = tuple(f"mini-imagenet-cache-{part}.pkl" for part in PARTS)
MINI_TABLES = tuple(f"{part}.csv" for part in PARTS)
"""beside the folder images/: the other form in which miniImageNet is handed on"""
TIERED = tuple(f"{part}_{kind}.pkl" for part in PARTS for kind in ("images_png", "labels"))
PIXELS = 1 << 16
"""of one picture at the most; tieredImageNet's have 84 × 84, and all have the size of the first"""
PNG_BEGINS, PNG_ENDS = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"


def load_mini_imagenet(folder: Path) -> Splits:
    """miniImageNet with its official classes: three pickles, or images/ with train.csv, val.csv and test.csv."""
    packed = [folder / name for name in MINI_PACKED]
    if all(path.exists() for path in packed):
        return disjoint_splits(folder, [read_mini_imagenet(path) for path in packed])
    seen: set[str] = set()
    return disjoint_splits(folder, [read_listed(folder / name, folder / "images", seen) for name in MINI_TABLES])


def load_tiered_imagenet(folder: Path) -> Splits:
    """tieredImageNet with its official classes, from {train,val,test}_images_png.pkl and ..._labels.pkl."""
    files = [folder / name for name in TIERED]
    parts = [read_tiered(*pair) for pair in zip(files[::2], files[1::2], strict=True)]
    return disjoint_splits(folder, parts, numbered=True)


def read_mini_imagenet(path: Path) -> Classes:
    """One mini-imagenet-cache-*.pkl: {"image_data": bytes (n, 84, 84, 3), "class_dict": {class: indices}}."""
    content = read_pickle(path)
    images, members = _entries(path, content, ("image_data", "class_dict"))
    if (
        not isinstance(images, np.ndarray)
        or images.dtype != np.uint8
        or images.ndim != 4
        or images.shape[3] != 3
        or not images.size
    ):
        raise DataError(f"{path}: image_data must be bytes of shape (n, height, width, 3), got {_kind(images)}.")
    if not isinstance(members, dict) or not members:
        raise DataError(f"{path}: class_dict must name the pictures of each class, got {_kind(members)}.")
    groups = {str(name): _indices(path, name, rows, len(images)) for name, rows in members.items()}
    _check_counted_once(path, groups, len(images))
    height, width = images.shape[1:3]
    return classes({name: images[rows] for name, rows in groups.items()}, (height, width, 3))


def read_tiered(images: Path, labels: Path) -> Classes:
    """One pair of tieredImageNet's pickles: a list of PNG files, and {"label_specific": (n,), ...}."""
    files = read_pickle(images)
    (given,) = _entries(labels, read_pickle(labels), ("label_specific",))
    if not isinstance(files, list) or not files or not all(_is_bytes(file) for file in files):
        raise DataError(f"{images}: expected a list of PNG files as arrays of bytes, got {_kind(files)}.")
    numbers = _whole_numbers(given)
    if len(numbers) != len(files):
        raise DataError(f"{labels}: {len(files)} pictures need as many whole numbers, got {_kind(given)}.")
    if len({id(file) for file in files}) < len(files):
        raise DataError(f"{images}: refused: the same picture again and again.")  # of which each would be a copy
    for i, file in enumerate(files):
        files[i] = file.tobytes()  # in place, so that no two copies of all are held
        if not (files[i].startswith(PNG_BEGINS) and files[i].endswith(PNG_ENDS)):
            raise DataError(f"{images}: picture {i} is not a whole PNG file.")
    shape = decode(files[0], None, 3, f"{images}: picture 0", ("PNG",), PIXELS).shape
    groups = {f"{number:04d}": np.flatnonzero(numbers == number) for number in np.unique(numbers)}
    return classes(
        {name: Packed([files[i] for i in rows], f"{images}: class {name}", shape) for name, rows in groups.items()},
        (shape[0], shape[1], 3),
    )


class Packed:
    """Pictures kept as PNG files and unpacked when asked for: tieredImageNet's 779,165 would take 16.5 GB."""

    def __init__(self, files: Sequence[bytes], where: str, shape: tuple[int, ...]):
        self.files, self.where, self.shape = files, where, shape

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        size = self.shape[0], self.shape[1]
        return np.stack([decode(self.files[i], size, 3, f"{self.where}, picture {i}", ("PNG",), PIXELS) for i in rows])


def read_listed(table: Path, images: Path, seen: set[str], size: int = SIZE) -> Classes:
    """The pictures that a table with columns filename, label names, in the folder `images`; `seen` are known names."""
    try:
        rows = list(csv.reader(io.StringIO(read_text(table), newline="")))
    except csv.Error as error:
        raise DataError(f"{table}: cannot be read as a table ({error}).") from error
    if not rows or [name.strip() for name in rows[0][:2]] != ["filename", "label"]:
        raise DataError(f"{table}: the first line must be filename,label.")
    groups: dict[str, list[Path]] = {}
    for number, row in enumerate(rows[1:], 2):
        if len(row) < 2 or Path(row[0]).name != row[0] or not (images / row[0]).is_file():
            raise DataError(f"{table}: line {number} names no file in {images}: {','.join(row)!r}.")
        if row[0] in seen:
            raise DataError(f"{table}: line {number} names {row[0]} a second time.")
        seen.add(row[0])
        label = row[1].strip()
        if not label:
            raise DataError(f"{table}: line {number} gives no label to {row[0]}.")
        groups.setdefault(label, []).append(images / row[0])
    if not groups:
        raise DataError(f"{table} names no picture.")
    return read_files(groups, size, 3)


def _entries(path: Path, content: Any, names: Sequence[str]) -> list[Any]:
    if not isinstance(content, dict) or not all(name in content for name in names):
        found = sorted(map(str, content)) if isinstance(content, dict) else _kind(content)
        raise DataError(f"{path}: expected a dictionary with {' and '.join(names)}, got {found}.")
    return [content[name] for name in names]


def _indices(path: Path, name: Any, rows: Any, count: int) -> np.ndarray:
    indices = _whole_numbers(rows)
    if not indices.size:
        raise DataError(f"{path}: class_dict[{name!r}] must list the numbers of pictures, got {_kind(rows)}.")
    wrong = indices[(indices < 0) | (indices >= count)]
    if wrong.size:
        raise DataError(f"{path}: class_dict[{name!r}] names picture {wrong[0]} of {count}; they count from 0.")
    found, times = np.unique(indices, return_counts=True)
    if times.max() > 1:
        raise DataError(f"{path}: class_dict[{name!r}] lists picture {found[times.argmax()]} twice.")
    return indices.astype(np.int64)


def _whole_numbers(value: Any) -> np.ndarray:
    """A row of whole numbers as an array; an empty one if `value` is none."""
    # Looked at one by one, for a few lists that hold each other many times over would make an array without end.
    if isinstance(value, list | tuple) and all(isinstance(each, int | np.integer) for each in value):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.ndim == 1 and np.issubdtype(value.dtype, np.integer):
        return value
    return np.zeros(0, np.int64)


def _check_counted_once(path: Path, groups: Mapping[str, np.ndarray], count: int) -> None:
    times = np.bincount(np.concatenate(list(groups.values())), minlength=count)
    if times.max() > 1:
        raise DataError(f"{path}: picture {int(times.argmax())} is given to two classes.")


def _is_bytes(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8


def _kind(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
