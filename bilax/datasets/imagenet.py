"""miniImageNet, tieredImageNet and anyone's folder of pictures, as classes for few-shot tasks."""

import csv
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bilax.datasets.classes import Classes, Pictures, Splits, classes, decode, random_splits
from bilax.datasets.idx import DataError
from bilax.datasets.unpickling import read_pickle

SIZE = 84
PARTS = ("train", "val", "test")
PNG_BEGINS, PNG_ENDS = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"
SUFFIXES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".gif": "GIF", ".webp": "WEBP"}
FORMATS = tuple(dict.fromkeys(SUFFIXES.values()))


def load_mini_imagenet(folder: Path) -> Splits:
    """miniImageNet with its official classes: three pickles, or images/ with train.csv, val.csv and test.csv."""
    packed = [folder / f"mini-imagenet-cache-{part}.pkl" for part in PARTS]
    listed = [folder / f"{part}.csv" for part in PARTS]
    if all(path.is_file() for path in packed):
        return _disjoint(folder, [read_mini_imagenet(path) for path in packed])
    if all(path.is_file() for path in listed):
        seen: set[str] = set()
        return _disjoint(folder, [read_listed(path, folder / "images", seen) for path in listed])
    raise DataError(
        f"{folder} holds neither {', '.join(path.name for path in packed)} nor images/ with "
        f"{', '.join(path.name for path in listed)}."
    )


def load_tiered_imagenet(folder: Path) -> Splits:
    """tieredImageNet with its official classes, from {train,val,test}_images_png.pkl and ..._labels.pkl."""
    pairs = [(folder / f"{part}_images_png.pkl", folder / f"{part}_labels.pkl") for part in PARTS]
    return _disjoint(folder, [read_tiered(*pair) for pair in pairs], numbered=True)


def load_folder(folder: Path, size: int = SIZE, channels: int = 3, seed: int = 0) -> Splits:
    """Anyone's pictures, one folder per class; the classes are in train/, val/ and test/, or split at random."""
    missing = [part for part in PARTS if not (folder / part).is_dir()]
    if not missing:
        return _disjoint(folder, [read_folder(folder / part, size, channels) for part in PARTS])
    if len(missing) == 1:
        raise DataError(f"{folder} lacks {missing[0]}/: give all of {', '.join(PARTS)}, or the classes alone.")
    return random_splits(read_folder(folder, size, channels), seed)


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
    shape = decode(files[0], None, 3, f"{images}: picture 0", ("PNG",)).shape
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
        return np.stack([decode(self.files[i], size, 3, f"{self.where}, picture {i}", ("PNG",)) for i in rows])


def read_listed(table: Path, images: Path, seen: set[str], size: int = SIZE) -> Classes:
    """The pictures that a table with columns filename, label names, in the folder `images`; `seen` are known names."""
    try:
        with table.open(newline="") as file:
            rows = list(csv.reader(file))
    except (csv.Error, UnicodeDecodeError) as error:
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
    return _read_files(groups, size, 3)


def read_folder(folder: Path, size: int = SIZE, channels: int = 3) -> Classes:
    """Pictures in one folder per class, scaled to `size` × `size`."""
    return _read_files(list_folder(folder), size, channels)


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


def _read_files(groups: Mapping[str, Sequence[Path]], size: int, channels: int) -> Classes:
    def read(path: Path) -> np.ndarray:
        return decode(path, (size, size), channels, str(path), FORMATS)

    return classes(
        {name: np.stack([read(path) for path in paths]) for name, paths in groups.items()}, (size, size, channels)
    )


def _disjoint(folder: Path, parts: Sequence[Classes], numbered: bool = False) -> Splits:
    """The three parts, refused if a class name, a shape or pictures show that they do not belong together.

    With `numbered`, a number says nothing: tieredImageNet counts its classes from 0 in each file.
    """
    named = [{name for name in part.names if not (numbered and name.isdigit())} for part in parts]
    both = sorted((named[0] & named[1]) | (named[0] & named[2]) | (named[1] & named[2]))
    if both:
        raise DataError(f"{folder}: the class {both[0]} is in two of {', '.join(PARTS)}; a test class must be new.")
    if len({part.shape for part in parts}) > 1:
        raise DataError(f"{folder}: pictures have different shapes: {', '.join(str(part.shape) for part in parts)}.")
    _check_new_pictures(folder, parts)
    return Splits(*parts)


def _check_new_pictures(folder: Path, parts: Sequence[Classes]) -> None:
    """Refuses a class whose pictures are in an earlier part: a name is soon changed, and tieredImageNet has none.

    A tenth of them is let pass, for ImageNet itself has some pictures under two names.
    """
    known: dict[bytes, str] = {}
    for where, part in zip(PARTS, parts, strict=True):
        marks = {f"{where}: class {name}": _marks(pictures) for name, pictures in zip(*part[:2], strict=True)}
        for name, own in marks.items():
            again = [i for i, mark in enumerate(own) if mark in known]
            if 10 * len(again) > len(own):
                raise DataError(
                    f"{folder}: {name}: {len(again)} of {len(own)} pictures, picture {again[0]} for one, are in "
                    f"{known[own[again[0]]]} too; a test class must be new."
                )
        known |= {mark: name for name, own in marks.items() for mark in own}


def _marks(pictures: Pictures) -> list[bytes]:
    """What tells each picture from another."""
    if isinstance(pictures, Packed):
        return list(pictures.files)
    return [hashlib.blake2b(picture).digest() for picture in np.ascontiguousarray(pictures)]


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
