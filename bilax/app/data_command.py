"""`bilax data list | check | fetch`, and options that name a data set."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from bilax.app.errors import plain_errors
from bilax.app.show import Arg, console
from bilax.datasets import registry
from bilax.datasets.registry import DATA_SETS, KINDS, DataSet, Kind, entry, find, names
from bilax.files import DataError


def data_arg(help: str, *kinds: Kind, several: bool = False, own: bool = True) -> Any:
    """An option that takes one of the data sets of these kinds, or `several`; `own` lets the user's own be one.

    They are looked up when the command is given, so that it knows those that were added after it was defined.
    """

    def choices() -> Any:
        choice = Literal[tuple(name for name in names(*kinds) if own or not entry(name).needs_folder)]
        return tuple[choice, ...] if several else choice

    def hint(default: str) -> str:
        return "(default: " + re.sub(r"[][',]", "", default) + ")"  # which tyro would show as a list

    return Arg(help=help, constructor_factory=choices, help_behavior_hint=hint)


Name = Annotated[tyro.conf.Positional[str], data_arg("the data set")]
Folder = Annotated[Path | None, Arg(help="look here before BILAX_DATA and the cache")]


@dataclasses.dataclass
class DataList:
    """Lists the data sets, what they are for, and where they are on this machine."""

    folder: Folder = None

    def main(self) -> None:
        """Prints one line for each data set."""
        table = Table(header_style="bold")
        for column in ("data set", "for", "licence", "where"):
            table.add_column(column, overflow="fold", no_wrap=column == "data set")
        for name, known in DATA_SETS.items():
            uses = ", ".join(KINDS[kind] for kind in known.kinds())
            table.add_row(name, uses, known.licence, _where(name, known, self.folder))
        console.print(table)


@dataclasses.dataclass
class DataCheck:
    """Reads a data set found on this machine, and compares it with its SHA-256 where that is known."""

    name: Name
    folder: Folder = None

    def main(self) -> None:
        """Says what there is and that it is right, or what is wrong and where."""
        with plain_errors():
            known = entry(self.name)
            if not known.files:
                raise DataError(f"there are no files of {self.name!r}: {known.origin}.")
            files = registry.require(self.name, self.folder)
            console.print(f"{files[0].parent}:", soft_wrap=True)
            for line in _content(self.name, known, self.folder):
                console.print(f"  {line}")
            if known.sha256:
                registry.check(self.name, files)
                console.print(f"{self.name} is complete and unchanged.")


@dataclasses.dataclass
class DataFetch:
    """Fetches a data set into the user's cache, or goes on where an earlier attempt broke off."""

    name: Name
    into: Annotated[Path | None, Arg(help="folder in place of the user's cache")] = None
    mirror: Annotated[str | None, Arg(help="address of a folder with the packed files")] = None

    def main(self) -> None:
        """Fetches what is missing and says where it is."""
        with plain_errors():
            files = registry.fetch(self.name, self.into, (self.mirror,) if self.mirror else ())
            console.print(f"{self.name} is in {files[0].parent}", soft_wrap=True)


def _where(name: str, known: DataSet, folder: Path | None) -> str:
    if not known.files:
        return known.origin
    if files := find(name, folder):
        return str(files[0].parent)
    if known.sha256:
        return f"not here: bilax data fetch {name}"
    return f"not here: get it from {known.origin} and name its folder with --folder or BILAX_DATA"


def _content(name: str, known: DataSet, folder: Path | None) -> Iterator[str]:
    if known.examples:
        for part, data in zip(("training", "test"), registry.load(name, folder), strict=True):
            yield f"{part}: {len(data.labels)} examples of {_size(data.shape)}"
    if known.classes:
        for part, classes in registry.load_classes(name, folder)._asdict().items():
            pictures = sum(map(len, classes.pictures))
            yield f"{part}: {len(classes.names)} classes, {pictures} pictures of {_size(classes.shape)}"


def _size(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
