"""`bilax data list | check | fetch`."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from bilax.datasets.fetching import fetch
from bilax.datasets.idx import DataError, read_pair
from bilax.datasets.sources import CLASSES, SOURCES, candidates, check, find, source

console = Console(highlight=False)

Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(help="mnist or fashion-mnist")]
Folder = Annotated[Path | None, tyro.conf.arg(help="look here before BILAX_DATA and the cache")]


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """What is wrong with data, options or places to write ends the program with a message in place of a traceback."""
    try:
        yield
    except (ValueError, FloatingPointError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


@dataclasses.dataclass
class DataList:
    """Lists the data sets, and where they are on this machine."""

    folder: Folder = None

    def main(self) -> None:
        """Prints one line for each data set."""
        table = Table(header_style="bold")
        for column in ("data set", "licence", "where"):
            table.add_column(column, overflow="fold")
        table.add_row("digits", "BSD 3-Clause", "part of scikit-learn")
        for name, known in SOURCES.items():
            files = find(name, self.folder)
            table.add_row(name, known.licence, str(files[0].parent) if files else f"not here: bilax data fetch {name}")
        console.print(table)


@dataclasses.dataclass
class DataCheck:
    """Reads a data set found on this machine and compares it with its known SHA-256."""

    name: Name
    folder: Folder = None

    def main(self) -> None:
        """Says that the files are right, or what is wrong and where."""
        with plain_errors():
            source(self.name)
            files = find(self.name, self.folder)
            if files is None:
                places = "\n".join(f"  {place}" for place in candidates(self.name, self.folder))
                raise DataError(f"{self.name} is in none of\n{places}\nFetch it with: bilax data fetch {self.name}")
            for pair in (files[:2], files[2:]):
                images, _ = read_pair(pair[0], pair[1], CLASSES)
                console.print(
                    f"{pair[0]}: {len(images)} images of {images.shape[1]} × {images.shape[2]}", soft_wrap=True
                )
            check(self.name, files)
            console.print(f"{self.name} is complete and unchanged.")


@dataclasses.dataclass
class DataFetch:
    """Fetches a data set into the user's cache, or goes on where an earlier attempt broke off."""

    name: Name
    into: Annotated[Path | None, tyro.conf.arg(help="folder in place of the user's cache")] = None
    mirror: Annotated[str | None, tyro.conf.arg(help="address of a folder with the four packed files")] = None

    def main(self) -> None:
        """Fetches what is missing and says where it is."""
        with plain_errors():
            files = fetch(self.name, self.into, (self.mirror,) if self.mirror else ())
            console.print(f"{self.name} is in {files[0].parent}", soft_wrap=True)
