"""Omniglot: 20 drawings of each character of many alphabets, as zip files of 105 × 105 PNG pictures.

The archives are read in memory and nothing of them is written to disk. Ink is 255 and paper 0.
"""

import contextlib
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bilax.datasets.classes import Classes, Splits, classes, decode
from bilax.datasets.episodes import Episode
from bilax.datasets.errors import DataError

FULL = ("images_background.zip", "images_evaluation.zip")
SMALL = ("images_background_small1.zip", "images_background_small2.zip")
MEMBER_BYTES = 1 << 20
"""of one unpacked drawing at the most; real ones have a few hundred"""
MEMBERS = 200_000
"""entries of one archive at the most; the largest real one has about 20,000"""
DRAWING = re.compile(r"(?:images_\w+/)?(?P<alphabet>[^/]+)/(?P<character>character\d+)/(?P<file>[^/]+\.png)")

RUNS = "all_runs.zip"
"""the official one-shot test: 20 runs of 20-way classification"""
RUN_LINE = re.compile(r"run(\d\d)/test/(item\d\d\.png) run\1/training/(class\d\d\.png)")

VALIDATION_FULL = ("Alphabet_of_the_Magi", "Anglo-Saxon_Futhorc", "Arcadian", "Armenian", "Asomtavruli_(Georgian)")
"""alphabets of the background set that serve as validation, where the whole of Omniglot is there"""
VALIDATION_SMALL, TEST_SMALL = ("Early_Aramaic",), ("Greek", "Tagalog")
"""alphabets of the two small sets that are held out"""


def load_omniglot(folder: Path, size: int = 28, rotations: bool = False) -> Splits:
    """Omniglot split by alphabet.

    With the whole of it (images_background.zip and images_evaluation.zip) the test alphabets are the official
    evaluation set; with the two small background sets they are `TEST_SMALL`. With `rotations`, each quarter turn
    of a training character is a class of its own; validation and test keep the characters as they are.
    """
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


def read_omniglot_runs(path: Path, size: int = 28) -> list[Episode]:
    """One task of one example per class for each run in the archive, in order, without an axis for tasks."""
    tasks = []
    with _archive(path) as archive:
        for label_file in sorted(name for name in archive.namelist() if name.endswith("/class_labels.txt")):
            run = label_file.split("/")[0]
            pairs = []
            for line in _content(path, archive, archive.getinfo(label_file)).decode("ascii", "replace").split("\n"):
                match = RUN_LINE.fullmatch(line.strip())
                if match is not None and f"run{match[1]}" == run:
                    pairs.append((match[2], match[3]))
                elif line.strip():
                    raise DataError(f"{path}: {label_file}: {line!r} does not pair a test item with a class.")
            if not pairs:
                raise DataError(f"{path}: {label_file} is empty: it must pair each test item with a class.")
            for part, listed in zip(("test", "training"), zip(*pairs, strict=True), strict=True):
                there = [name.split("/")[-1] for name in archive.namelist() if name.startswith(f"{run}/{part}/")]
                if sorted(listed) != sorted(filter(None, there)):
                    raise DataError(f"{path}: {label_file} does not name each picture of {run}/{part} once.")
            names = sorted(known for _, known in pairs)

            def picture(part: str, name: str, run: str = run) -> np.ndarray:
                entry = f"{run}/{part}/{name}"
                content = _content(path, archive, archive.getinfo(entry))
                ink = 255 - decode(content, (size, size), 1, f"{path}: {entry}", ("PNG",))
                return np.asarray(ink, np.float32) / np.float32(255)

            support = np.stack([picture("training", name) for name in names])
            query = np.stack([picture("test", item) for item, _ in pairs])
            targets = np.array([names.index(known) for _, known in pairs], np.int32)
            tasks.append(Episode(support, np.arange(len(names), dtype=np.int32), query, targets))
    if not tasks:
        raise DataError(f"{path}: no run such as run01/class_labels.txt is in there.")
    return tasks


def read_omniglot(paths: list[Path], size: int = 28) -> Classes:
    """All characters of one or several archives as classes named alphabet/character; doubles count once."""
    drawings: dict[str, dict[str, np.ndarray]] = {}
    for path in paths:
        for alphabet, character, file, content in _drawings(path):
            where = f"{path}: {alphabet}/{character}/{file}"
            picture = 255 - decode(content, (size, size), 1, where, ("PNG",))
            drawings.setdefault(f"{alphabet}/{character}", {})[file] = picture
    if not drawings:
        raise DataError(f"{', '.join(map(str, paths))}: no drawing such as Greek/character01/0394_01.png is in there.")
    stacked = {name: np.stack([files[file] for file in sorted(files)]) for name, files in drawings.items()}
    return classes(stacked, (size, size, 1))


def _drawings(path: Path) -> Iterator[tuple[str, str, str, bytes]]:
    with _archive(path) as archive:
        for entry in archive.infolist():
            if entry.is_dir():
                continue
            match = DRAWING.fullmatch(entry.filename)
            if match is None or ".." in entry.filename.split("/"):
                raise DataError(
                    f"{path}: the entry {entry.filename!r} is not a drawing such as Greek/character01/0394_01.png."
                )
            yield match["alphabet"], match["character"], match["file"], _content(path, archive, entry)


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    if not path.exists():
        raise DataError(f"{path} does not exist.")
    try:
        with zipfile.ZipFile(path) as archive:
            if len(archive.infolist()) > MEMBERS:
                raise DataError(f"{path}: {len(archive.infolist())} entries are more than Omniglot can have.")
            yield archive
    except DataError:
        raise
    except Exception as error:  # a damaged archive can fail in many ways inside zipfile and zlib
        raise DataError(f"{path}: cannot be read as a zip archive; it is damaged or cut off ({error}).") from error


def _content(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    # An archive may lie about sizes, so what is read is bounded whatever it announces.
    with archive.open(entry) as file:
        content = file.read(MEMBER_BYTES + 1)
    if len(content) > MEMBER_BYTES:
        raise DataError(f"{path}: {entry.filename} unpacks to more than {MEMBER_BYTES} bytes.")
    return content
