"""The data sets: what each is for, where its files are looked for and what reads them.

To add one, write its loader and an entry here: the experiments, their options and `bilax data` ask this table.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bilax.datasets import imagenet
from bilax.datasets.cifar import load_cifar_fs
from bilax.datasets.classes import Splits
from bilax.datasets.digits import load_digit_examples, load_digit_tasks
from bilax.datasets.episodes import Augment, Episode, Sinusoids, crop_and_flip, distort
from bilax.datasets.examples import Examples
from bilax.datasets.fetching import fetch_files
from bilax.datasets.folders import load_folder
from bilax.datasets.idx import PARTS, load_idx, packed_or_not
from bilax.datasets.libsvm import IJCNN1, load_ijcnn1
from bilax.datasets.omniglot import FULL, RUNS, SMALL, load_omniglot, read_omniglot_runs
from bilax.files import DataError, digest

Kind = Literal["examples", "classes", "functions"]
KINDS: dict[Kind, str] = {
    "examples": "labelled examples",
    "classes": "few-shot classes",
    "functions": "few-shot regression",
}
"""what a data set can be for: the field of its loader, and how people call it"""

Files = tuple[tuple[str, ...], ...]
"""names of files, in one tuple all that are needed; where there are several tuples, the first that is there serves"""
Sizes = tuple[int, int, int, int]
"""training, validation, held-out and test examples"""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One data set. What it is for is told by the loaders it has; they get the folder that holds its files."""

    licence: str
    origin: str
    """where it comes from, for who has to get it"""
    files: Files = ()
    """that must be there; none where nothing is read, or all that is in the folder"""
    needs_folder: bool = False
    """whether it is the user's own, so that there is nowhere else to look"""
    installed: tuple[Path, ...] = ()
    """folders where a system's package puts it"""
    mirrors: tuple[str, ...] = ()
    """addresses of a folder that holds the files, packed with gzip"""
    sha256: tuple[str, ...] = ()
    """of the unpacked files, in the order of `files[0]`; those that have it can be fetched"""

    examples: Callable[[Path], tuple[Examples, Examples]] | None = None
    """(folder) -> training and test examples"""
    sizes: Sizes = (5000, 5000, 10000, 10000)
    """of hyper-cleaning; those of the paper unless there are too few examples"""
    quick_sizes: Sizes | None = None
    """of hyper-cleaning with --quick, if others"""

    classes: Callable[..., Splits] | None = None
    """(folder, **options) -> classes to train, validate and test on"""
    options: tuple[str, ...] = ()
    """that `classes` knows"""
    augment: Augment = distort
    """what --distortions does to training pictures"""
    drawings: bool = False
    """whether strokes count as 1 and what they are drawn on as 0, whichever of the two is dark"""
    own_test: tuple[str, Callable[[Path, int], list[Episode]]] | None = None
    """a file with the tasks of its official test, and what reads them: (path, pixels a side)"""

    functions: Callable[[int, int, int, int], Sinusoids] | None = None
    """(shots, queries, tasks, seed) -> batches"""

    def kinds(self) -> tuple[Kind, ...]:
        """What it is for."""
        return tuple(kind for kind in KINDS if getattr(self, kind) is not None)


_IDX: dict[str, Any] = {"files": (PARTS,), "examples": load_idx, "quick_sizes": (1000, 1000, 1000, 2000)}

DATA_SETS = {
    "digits": DataSet(
        licence="BSD 3-Clause",
        origin="part of scikit-learn",
        examples=lambda _: load_digit_examples(),
        sizes=(600, 400, 300, 450),
        classes=lambda _: load_digit_tasks(),
        drawings=True,
    ),
    "mnist": DataSet(
        licence="CC BY-SA 3.0",
        origin="Y. LeCun, C. Cortes, C. Burges",
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        sha256=(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        **_IDX,
    ),
    "fashion-mnist": DataSet(
        licence="MIT",
        origin="Zalando Research",
        installed=(Path("/usr/share/datasets/fashion-mnist"),),
        mirrors=("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",),
        sha256=(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        **_IDX,
    ),
    "ijcnn1": DataSet(
        licence="none stated",
        origin="IJCNN 2001's challenge, on LIBSVM's page of binary data sets",
        files=IJCNN1,
        examples=load_ijcnn1,
        quick_sizes=(1000, 1000, 1000, 2000),
    ),
    "sinusoid": DataSet(licence="none needed", origin="drawn as it is needed", functions=Sinusoids),
    "omniglot": DataSet(
        licence="MIT",
        origin="github.com/brendenlake/omniglot",
        files=(FULL, SMALL),
        classes=load_omniglot,
        options=("rotations", "split"),
        drawings=True,
        own_test=(RUNS, read_omniglot_runs),
    ),
    "cifar-fs": DataSet(
        licence="none stated by A. Krizhevsky",
        origin="CIFAR-100 in the split of L. Bertinetto et al. 2019",
        files=(("train", "val", "test"),),
        classes=load_cifar_fs,
        augment=crop_and_flip,
    ),
    "mini-imagenet": DataSet(
        licence="ImageNet's terms",
        origin="github.com/renmengye/few-shot-ssl-public",
        files=(imagenet.MINI_PACKED, (*imagenet.MINI_TABLES, "images")),
        classes=imagenet.load_mini_imagenet,
        augment=crop_and_flip,
    ),
    "tiered-imagenet": DataSet(
        licence="ImageNet's terms",
        origin="github.com/renmengye/few-shot-ssl-public",
        files=(imagenet.TIERED,),
        classes=imagenet.load_tiered_imagenet,
        augment=crop_and_flip,
    ),
    "folder": DataSet(
        licence="your own",
        origin="your own pictures, one folder per class, where --folder says",
        needs_folder=True,
        classes=load_folder,
    ),
}


def names(*kinds: Kind) -> tuple[str, ...]:
    """The data sets for one of these kinds of use, or all of them."""
    return tuple(name for name, known in DATA_SETS.items() if not kinds or set(kinds) & set(known.kinds()))


def entry(name: str, *kinds: Kind) -> DataSet:
    """What is known of a data set, which must be for one of these kinds of use if any are given."""
    if name not in names(*kinds):
        use = f" with {' or '.join(KINDS[kind] for kind in kinds)}" if kinds else ""
        raise DataError(f"there is no data set {name!r}{use}: choose one of {', '.join(names(*kinds))}.")
    return DATA_SETS[name]


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
    return [*folders, cache_folder() / name, *entry(name).installed]


def find(name: str, folder: Path | None = None, wanted: Files = ()) -> list[Path] | None:
    """The files of a data set, or those `wanted` of it, in the first folder that has them all, or None."""
    for place in candidates(name, folder):
        for group in wanted or entry(name).files:
            files = [packed_or_not(place / file) for file in group]
            if all(file.exists() for file in files):
                return files
    return None


def require(name: str, folder: Path | None = None, wanted: Files = ()) -> list[Path]:
    """As `find`, but what is nowhere is an error that says where it was looked for and what to do."""
    files = find(name, folder, wanted)
    if files is not None:
        return files
    known = entry(name)
    places = "\n".join(f"  {place}" for place in candidates(name, folder))
    listed = "; or ".join(", ".join(group) for group in wanted or known.files)
    remedy = f"Put {listed} in a folder and name it with --folder or BILAX_DATA; they are from {known.origin}."
    if known.sha256 and not wanted:
        remedy = f"Fetch it with: bilax data fetch {name}"
    raise DataError(f"{name} is in none of\n{places}\n{remedy}")


def check(name: str, files: list[Path]) -> None:
    """Refuses files whose content is not that of the data set."""
    for file, expected in zip(files, entry(name).sha256, strict=True):
        found = digest(file)
        if found != expected:
            raise DataError(f"{file}: its unpacked content has SHA-256 {found}, but that of {name} has {expected}.")


def fetch(name: str, into: Path | None = None, mirrors: Sequence[str] = ()) -> list[Path]:
    """The files of a data set, in `into`/name (the user's cache by default); those already right are kept."""
    known = entry(name)
    if not known.sha256:
        raise DataError(f"{name} cannot be fetched; its origin is: {known.origin}.")
    hashes = dict(zip(known.files[0], known.sha256, strict=True))
    return fetch_files(name, hashes, (into or cache_folder()) / name, mirrors or known.mirrors)


def load(name: str, folder: Path | None = None) -> tuple[Examples, Examples]:
    """The training and the test examples of a data set; fetched if it is nowhere on this machine and can be."""
    read = entry(name, "examples").examples
    assert read is not None
    return read(_place(name, folder))


def load_classes(name: str, folder: Path | None = None, **options: Any) -> Splits:
    """The classes of a data set for few-shot tasks; `options` are those that its entry names."""
    read = entry(name, "classes").classes
    assert read is not None
    return read(_place(name, folder), **options)


def load_own_test(name: str, folder: Path | None = None, size: int = 28) -> list[Episode]:
    """The tasks of a data set's official test."""
    test = entry(name).own_test
    if test is None:
        having = ", ".join(other for other, known in DATA_SETS.items() if known.own_test)
        raise DataError(f"{name} has no official test; those that have are: {having}.")
    file, read = test
    (path,) = require(name, folder, ((file,),))
    return read(path, size)


def _place(name: str, folder: Path | None) -> Path:
    """The folder that a loader is to read."""
    known = entry(name)
    if known.needs_folder and folder is None:
        raise DataError(f"--dataset {name} needs --folder, where its pictures are.")
    if not known.files:
        return folder or Path()
    files = find(name, folder) or (fetch(name) if known.sha256 else require(name, folder))
    return files[0].parent
