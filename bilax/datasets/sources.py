"""Where MNIST, FashionMNIST and the digits are: looked for on disk in a fixed order, else fetched."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bilax.datasets.arrays import Examples, examples
from bilax.datasets.idx import DataError, digest, read_pair

PARTS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CLASSES = 10


class Source(NamedTuple):
    """A data set of four IDX files."""

    name: str
    mirrors: tuple[str, ...]
    """addresses of a folder that holds the four files, packed with gzip"""
    sha256: tuple[str, ...]
    """of the unpacked files, in the order of `PARTS`"""
    installed: tuple[Path, ...] = ()
    """folders where a system's package puts it"""
    licence: str = ""


SOURCES = {
    source.name: source
    for source in (
        Source(
            "mnist",
            (
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
            ),
            (
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
            licence="CC BY-SA 3.0",
        ),
        Source(
            "fashion-mnist",
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            ),
            (
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
            installed=(Path("/usr/share/datasets/fashion-mnist"),),
            licence="MIT",
        ),
    )
}


def source(name: str) -> Source:
    """The data set of this name."""
    if name not in SOURCES:
        hint = "they are part of scikit-learn" if name == "digits" else f"choose one of {', '.join(SOURCES)}"
        raise DataError(f"there are no files of {name!r}: {hint}.")
    return SOURCES[name]


def cache_folder() -> Path:
    """This user's folder for data that can be fetched again."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "bilax"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bilax"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "bilax" / "cache"
    return Path.home() / ".cache" / "bilax"


def candidates(name: str, folder: Path | None = None) -> list[Path]:
    """Folders to look in, in order: the user's, $BILAX_DATA, the cache, where a package installs it.

    The first two may hold the files themselves or a folder named after the data set.
    """
    given = [folder] if folder else []
    if os.environ.get("BILAX_DATA"):
        given.append(Path(os.environ["BILAX_DATA"]))
    folders = [place for root in given for place in (root / name, root)]
    return [*folders, cache_folder() / name, *source(name).installed]


def find(name: str, folder: Path | None = None) -> list[Path] | None:
    """The four files of a data set in the first folder that has them all, or None."""
    for place in candidates(name, folder):
        files = [_existing(place, part) for part in PARTS]
        if all(files):
            return [file for file in files if file]
    return None


def check(name: str, files: list[Path]) -> None:
    """Refuses files whose content is not that of the data set."""
    for file, expected in zip(files, source(name).sha256, strict=True):
        found = digest(file)
        if found != expected:
            raise DataError(f"{file}: its unpacked content has SHA-256 {found}, but that of {name} has {expected}.")


def load(name: str, folder: Path | None = None) -> tuple[Examples, Examples]:
    """The training and the test examples of a data set; fetched if it is nowhere on this machine.

    `digits` (1,797 pictures of 8 × 8, part of scikit-learn) needs no file; its test part is every fourth.
    """
    if name == "digits":
        return _digits()
    files = find(name, folder)
    if files is None:
        from bilax.datasets.fetching import fetch

        files = fetch(name)
    train, test = (read_pair(images, labels, CLASSES) for images, labels in (files[:2], files[2:]))
    return examples(*train), examples(*test)


def _digits() -> tuple[Examples, Examples]:
    from sklearn.datasets import load_digits

    inputs, labels = load_digits(return_X_y=True)
    data = examples((inputs / 16).reshape(-1, 8, 8), labels)
    test = np.arange(len(data.labels)) % 4 == 0
    return data.take(np.flatnonzero(~test)), data.take(np.flatnonzero(test))


def _existing(folder: Path, part: str) -> Path | None:
    for file in (folder / part, folder / f"{part}.gz"):
        if file.is_file():
            return file
    return None
