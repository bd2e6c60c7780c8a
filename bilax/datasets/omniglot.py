"""Omniglot: 20 drawings of each character of many alphabets, as zip files of 105 × 105 PNG pictures.

The archives are read in memory and nothing of them is written to disk. Ink is 255 and paper 0.
"""

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bilax.datasets.classes import PARTS, Classes, Splits, classes, decode
from bilax.datasets.episodes import Episode
from bilax.files import DataError, archive, check_size, read_text

FULL = ("images_background.zip", "images_evaluation.zip")
SMALL = ("images_background_small1.zip", "images_background_small2.zip")
MEMBER_BYTES = 1 << 20
"""of one unpacked drawing at the most; real ones have a few hundred"""
PIXELS = 1 << 16
"""of one drawing at the most; real ones have 105 × 105"""
DRAWING = re.compile(r"(?:images_\w+/)?(?P<alphabet>[^/]+)/(?P<character>character\d+)/(?P<file>[^/]+\.png)")

RUNS = "all_runs.zip"
"""the official one-shot test: 20 runs of 20-way classification"""
RUN_LABELS = "class_labels.txt"
RUN_LINE = re.compile(r"run(\d\d)/test/(item\d\d\.png) run\1/training/(class\d\d\.png)")

VALIDATION_FULL = ("Alphabet_of_the_Magi", "Anglo-Saxon_Futhorc", "Arcadian", "Armenian", "Asomtavruli_(Georgian)")
"""alphabets of the background set that serve as validation, where the whole of Omniglot is there"""
VALIDATION_SMALL, TEST_SMALL = ("Early_Aramaic",), ("Greek", "Tagalog")
"""alphabets of the two small sets that are held out"""


VINYALS = "splits-vinyals"
"""folder of the lists train.txt, val.txt and test.txt, as published with Prototypical Networks (Snell et al. 2017)"""
TURNED = re.compile(r"(?P<name>[^/]+/character\d+)/rot(?P<angle>000|090|180|270)")


def load_omniglot(folder: Path, size: int = 28, rotations: bool = False, split: str = "alphabets") -> Splits:
    """Omniglot split by alphabet, or, with `split="vinyals"`, by the lists in `VINYALS` (see `vinyals_splits`).

    With the whole of it (images_background.zip and images_evaluation.zip) the test alphabets are the official
    evaluation set; with the two small background sets they are `TEST_SMALL`. With `rotations`, each quarter turn
    of a training character is a class of its own; validation and test keep the characters as they are.
    """
    if split == "vinyals":
        if rotations:
            raise DataError(
                "Vinyals' lists have the quarter turns as classes of their own already: leave rotations out."
            )
        return vinyals_splits(folder, size)
    if all((folder / name).exists() for name in FULL):
        background = read_omniglot([folder / FULL[0]], size)
        test = read_omniglot([folder / FULL[1]], size)
        both = sorted(set(background.groups()) & set(test.groups()))
        if both:
            raise DataError(f"{folder}: {both[0]} is in {FULL[0]} and in {FULL[1]}; a test alphabet must be new.")
        validation = background.of(VALIDATION_FULL)
        train = background.of(set(background.groups()) - set(VALIDATION_FULL))
    else:
        everything = read_omniglot([folder / name for name in SMALL], size)
        validation, test = everything.of(VALIDATION_SMALL), everything.of(TEST_SMALL)
        train = everything.of(set(everything.groups()) - set(VALIDATION_SMALL) - set(TEST_SMALL))
    return Splits(train.rotated() if rotations else train, validation, test)


def vinyals_splits(folder: Path, size: int = 28) -> Splits:
    """The split of Vinyals et al. (2016): 1,028 characters to train, 172 to validate and 423 to test, times 4 turns."""
    missing = [name for name in FULL if not (folder / name).exists()]
    if missing:
        raise DataError(f"{folder} lacks {' and '.join(missing)}: Vinyals' split is of the whole of Omniglot.")
    everything = read_omniglot([folder / name for name in FULL], size)
    pictures = dict(zip(everything.names, everything.pictures, strict=True))
    return Splits(*(_listed(folder / VINYALS / f"{part}.txt", pictures, size) for part in PARTS))


def _listed(path: Path, pictures: dict[str, Any], size: int) -> Classes:
    found = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        match = TURNED.fullmatch(line.strip())
        if match is not None and match["name"] in pictures:
            turned = np.rot90(np.asarray(pictures[match["name"]]), int(match["angle"]) // 90, (1, 2))
            found[line.strip()] = turned
        elif line.strip():
            raise DataError(f"{path}: line {number}, {line!r}, names no character such as Greek/character01/rot090.")
    if not found:
        raise DataError(f"{path}: is empty: it must name classes such as Greek/character01/rot090.")
    return classes(found, (size, size, 1))


def read_omniglot_runs(path: Path, size: int = 28) -> list[Episode]:
    """One task of one example per class for each run in the archive, in order, without an axis for tasks."""
    with archive(path) as content:
        parts: dict[str, list[str]] = {}
        for name in content.namelist():
            folder, _, file = name.rpartition("/")
            parts.setdefault(folder, []).extend([file] if file else [])
        runs = sorted(folder for folder, files in parts.items() if folder.count("/") == 0 and RUN_LABELS in files)
        tasks = [_read_run(path, content, run, parts, size) for run in runs]
    if not tasks:
        raise DataError(f"{path}: no run such as run01/{RUN_LABELS} is in there.")
    return tasks


def _read_run(path: Path, content: zipfile.ZipFile, run: str, parts: dict[str, list[str]], size: int) -> Episode:
    file = f"{run}/{RUN_LABELS}"
    pairs = []
    for line in _unpacked(path, content, content.getinfo(file)).decode("ascii", "replace").split("\n"):
        match = RUN_LINE.fullmatch(line.strip())
        if match is not None and f"run{match[1]}" == run:
            pairs.append((match[2], match[3]))
        elif line.strip():
            raise DataError(f"{path}: {file}: {line!r} does not pair a test item with a class.")
    if not pairs:
        raise DataError(f"{path}: {file} is empty: it must pair each test item with a class.")
    for part, listed in zip(("test", "training"), zip(*pairs, strict=True), strict=True):
        if sorted(listed) != sorted(parts.get(f"{run}/{part}", [])):
            raise DataError(f"{path}: {file} does not name each picture of {run}/{part} once.")

    def picture(part: str, name: str) -> np.ndarray:
        entry = f"{run}/{part}/{name}"
        ink = 255 - _drawing(_unpacked(path, content, content.getinfo(entry)), size, f"{path}: {entry}")
        return np.asarray(ink, np.float32) / np.float32(255)

    places = {known: i for i, known in enumerate(sorted(known for _, known in pairs))}
    support = np.stack([picture("training", name) for name in places])
    query = np.stack([picture("test", item) for item, _ in pairs])
    targets = np.array([places[known] for _, known in pairs], np.int32)
    return Episode(support, np.arange(len(places), dtype=np.int32), query, targets)


def read_omniglot(paths: list[Path], size: int = 28) -> Classes:
    """All characters of one or several archives as classes named alphabet/character; doubles count once."""
    drawings: dict[str, dict[str, np.ndarray]] = {}
    for path in paths:
        for alphabet, character, file, content in _drawings(path):
            where = f"{path}: {alphabet}/{character}/{file}"
            picture = 255 - _drawing(content, size, where)
            drawings.setdefault(f"{alphabet}/{character}", {})[file] = picture
    if not drawings:
        raise DataError(f"{', '.join(map(str, paths))}: no drawing such as Greek/character01/0394_01.png is in there.")
    stacked = {name: np.stack([files[file] for file in sorted(files)]) for name, files in drawings.items()}
    return classes(stacked, (size, size, 1))


def _drawings(path: Path) -> Iterator[tuple[str, str, str, bytes]]:
    with archive(path) as content:
        for entry in content.infolist():
            if entry.is_dir():
                continue
            match = DRAWING.fullmatch(entry.filename)
            if match is None or ".." in entry.filename.split("/"):
                raise DataError(
                    f"{path}: the entry {entry.filename!r} is not a drawing such as Greek/character01/0394_01.png."
                )
            yield match["alphabet"], match["character"], match["file"], _unpacked(path, content, entry)


def _drawing(content: bytes, size: int, where: str) -> np.ndarray:
    return decode(content, (size, size), 1, where, ("PNG",), PIXELS)


def _unpacked(path: Path, content: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    check_size(f"{path}: {entry.filename}", entry.file_size, MEMBER_BYTES)
    return content.read(entry)
