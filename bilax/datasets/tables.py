"""Tables of a person's own, from CSV, Parquet or pandas: numbers as they are, texts as categories, nothing missing."""

import csv
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from bilax.files import DataError, check_size, may_unpack, opened

MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}
CATEGORIES = 200
"""different texts of a column that is not the label, at the most"""
COLUMNS = 100_000
CHUNK = 2000
"""rows that are held as text at a time"""
LABELS = ("label", "labels", "target", "class", "y")


class Texts(NamedTuple):
    """A column of text: each row's place in `names`."""

    names: tuple[str, ...]
    codes: Int[np.ndarray, " n"]

    @property
    def values(self) -> np.ndarray:
        """The texts, row by row."""
        return np.array(self.names)[self.codes]


Column = Float[np.ndarray, " n"] | Texts
Columns = dict[str, Column]


class Encoder(NamedTuple):
    """How the columns of one table become numbers, so that another one can become such numbers, too."""

    categories: dict[str, tuple[str, ...] | None]
    """for each column its texts, or None if it holds numbers"""

    def __call__(self, where: Any, columns: Columns) -> Float[np.ndarray, "n d"]:
        """One number for each column of numbers, and one for each text of the others, 1 where it is that text."""
        missing, more = (sorted(a - b) for a, b in self._both(columns))
        if missing or more:
            raise DataError(f"{where}: lacks the columns {missing} and has {more} besides; they must be the same.")
        first = next(iter(columns.values()))
        rows = len(first.codes if isinstance(first, Texts) else first)
        found = np.empty((rows, self.slices()[-1].stop), np.float32)
        for name, place in zip(self.categories, self.slices(), strict=True):
            found[:, place] = _encoded(where, name, columns[name], self.categories[name])
        return found

    def slices(self) -> list[slice]:
        """Where each column's numbers are."""
        ends = np.cumsum([1 if texts is None else len(texts) for texts in self.categories.values()]).tolist()
        return [slice(*pair) for pair in itertools.pairwise([0, *ends])]

    def viewed(self, columns: Columns, encoded: Float[np.ndarray, "n d"]) -> Columns:
        """The columns, those of numbers as views of what they were encoded to, so that they are in memory once."""
        return {
            name: encoded[:, place.start] if texts is None else columns[name]
            for (name, texts), place in zip(self.categories.items(), self.slices(), strict=True)
        }

    def _both(self, columns: Columns) -> tuple[tuple[set[str], set[str]], tuple[set[str], set[str]]]:
        mine, other = set(self.categories), set(columns)
        return (mine, other), (other, mine)


def encoder(where: Any, columns: Columns) -> Encoder:
    """An encoder for these columns and others like them."""
    if not columns:
        raise DataError(f"{where}: has no column beside the label.")
    for name, column in columns.items():
        if isinstance(column, Texts) and len(column.names) > CATEGORIES:
            raise DataError(
                f"{where}: column {name!r} holds {len(column.names):,} different texts, more than the {CATEGORIES} "
                "that can be categories: leave it out by --drop, or turn it into numbers."
            )
    return Encoder({name: column.names if isinstance(column, Texts) else None for name, column in columns.items()})


def _encoded(where: Any, name: str, column: Column, texts: tuple[str, ...] | None) -> Float[np.ndarray, "n _"]:
    if texts is None:
        if isinstance(column, Texts):
            text = column.names[0][:40]
            raise DataError(f"{where}: column {name!r} has text such as {text!r} where numbers belong.")
        return column[:, None].astype(np.float32)
    found = column.values if isinstance(column, Texts) else np.array([f"{value:g}" for value in column])
    return (found[:, None] == np.array(texts)).astype(np.float32)


def read_columns(path: Path, label: str | None = None) -> tuple[str, Columns]:
    """Which column of a .csv or .parquet file holds the labels, and all columns; that one is text whatever it holds."""
    return (read_parquet if path.suffix.lower() == ".parquet" else read_csv)(path, label)


def find_label(where: Any, names: Sequence[str], label: str | None) -> str:
    """The column `label`, or the first that is named as labels are."""
    found = label if label else next((name for name in names if name.lower() in LABELS), None)
    if found is None or found not in names:
        known = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        said = f"has no column {label!r}" if label else f"has no column named {', '.join(LABELS)}"
        raise DataError(f"{where}: {said}: say by --label which one holds the labels; there are {known}.")
    return found


def read_csv(path: Path, label: str | None = None) -> tuple[str, Columns]:
    """The label's name and the columns of a CSV file with a line of names; one holds numbers if all its cells do."""
    with opened(path) as file:
        names = _names(path, next(csv_lines(path, _text(file)), (0, []))[1])
    found = find_label(path, names, label)
    known = {found}
    while True:
        try:
            return found, _read_csv(path, known)
        except _IsTextError as more:
            known |= more.columns


class _IsTextError(Exception):
    """Columns were taken for numbers and are not."""

    def __init__(self, columns: set[str]):
        super().__init__()
        self.columns = columns


def _read_csv(path: Path, texts: set[str]) -> Columns:
    codes: dict[str, dict[str, int]] = {}
    parts: dict[str, list[np.ndarray]] = {}
    with opened(path) as file:
        lines = csv_lines(path, _text(file))
        names = _names(path, next(lines, (0, []))[1])
        codes, parts = {name: {} for name in names}, {name: [] for name in names}
        for first, rows in _chunks(lines):
            wrong = next((i for i, row in enumerate(rows) if len(row) != len(names)), None)
            if wrong is not None:
                raise DataError(
                    f"{path}: row {first + wrong} has {len(rows[wrong])} cells, but there are {len(names)} columns."
                )
            columns = dict(zip(names, zip(*rows, strict=True), strict=True))
            _check_missing(path, first, columns)
            found = {name: _numbers(values) for name, values in columns.items() if name not in texts}
            if new := {name for name, values in found.items() if values is None}:
                raise _IsTextError(new)
            for name, values in columns.items():
                numbers = found.get(name)
                parts[name].append(_coded(values, codes[name]) if numbers is None else numbers)
    if not parts[names[0]]:
        raise DataError(f"{path}: holds no rows below the line of names.")
    return {name: _joined(name in texts, parts[name], codes[name]) for name in names}


def _text(file: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(file, "utf-8-sig", newline="")


def csv_lines(path: Path, text: io.TextIOWrapper) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file, numbered, the line of names as 0; empty lines are left out."""
    try:
        yield from enumerate(row for row in csv.reader(text) if row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as CSV in UTF-8 ({error}).") from None


def _names(path: Path, names: list[str]) -> list[str]:
    if not names:
        raise DataError(f"{path}: is empty; the first line must name the columns.")
    if len(names) > COLUMNS:
        raise DataError(f"{path}: has {len(names):,} columns, more than the {COLUMNS:,} that are read.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path}: two columns are named {twice[:80]!r}; the first line must name each column once.")
    return names


def _chunks(lines: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, list[list[str]]]]:
    first, rows = 1, []
    for number, row in lines:
        rows.append(row)
        if len(rows) == CHUNK:
            yield first, rows
            first, rows = number + 1, []
    if rows:
        yield first, rows


def _check_missing(path: Any, first: int, columns: Mapping[str, Sequence[str]]) -> None:
    for name, values in columns.items():
        if not MISSING.isdisjoint(map(str.lower, map(str.strip, set(values)))):
            row = first + next(i for i, value in enumerate(values) if value.strip().lower() in MISSING)
            _refuse_missing(path, row, name)


def _refuse_missing(where: Any, row: int, name: str) -> None:
    raise DataError(
        f"{where}: row {row}, column {name[:80]!r}: the value is missing. Fill it in, leave out such rows, or leave "
        "out the column by --drop."
    )


def _numbers(values: Sequence[str]) -> np.ndarray | None:
    """The texts as numbers, or None if one is not a finite number."""
    try:
        found = np.array(values, np.float64)
    except ValueError:
        return None
    with np.errstate(over="ignore"):
        found = found.astype(np.float32)
    return found if np.isfinite(found).all() else None


def _coded(values: Sequence[str], codes: dict[str, int]) -> np.ndarray:
    return np.array([codes.setdefault(value.strip(), len(codes)) for value in values], np.int32)


def _joined(is_text: bool, parts: list[np.ndarray], codes: dict[str, int]) -> Column:
    joined = np.concatenate(parts)
    return Texts(tuple(codes), joined) if is_text else joined


def read_parquet(path: Path, label: str | None = None) -> tuple[str, Columns]:
    """The label's name and the columns of a Parquet file; needs pyarrow (`pip install bilax[parquet]`)."""
    table = parquet_table(path)
    found = find_label(path, table.column_names, label)
    return found, columns_of(path, {name: table[name].to_pylist() for name in table.column_names}, found)


def parquet_table(path: Path) -> Any:
    """A Parquet file as pyarrow has it."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"{path}: to read Parquet needs pyarrow: pip install 'bilax[parquet]'.") from None
    with opened(path) as file:
        content = file.read()
    try:
        stored = parquet.ParquetFile(io.BytesIO(content))
        about = stored.metadata
        size = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
        check_size(path, max(size, about.num_rows), may_unpack(len(content)))
        table = stored.read(use_threads=False)
    except DataError:
        raise
    except Exception as error:  # a damaged file can fail in many ways inside pyarrow
        raise DataError(f"{path}: cannot be read as Parquet ({str(error)[:200]}).") from None
    _names(path, list(table.column_names))
    return table


def columns_of(where: Any, columns: Any, label: str | None = None) -> Columns:
    """Columns given as sequences of numbers or texts, such as those of a pandas DataFrame; `label` is read as text."""
    return {str(name): _column(where, str(name), values, name == label) for name, values in columns.items()}


def _column(where: Any, name: str, values: Any, as_text: bool) -> Column:
    array = np.asarray(values, object if as_text else None)
    if array.ndim != 1 or not len(array):
        raise DataError(f"{where}: column {name[:80]!r} must hold one value in each row, got shape {array.shape}.")
    if array.dtype.kind in "fiub":
        with np.errstate(over="ignore"):
            numbers = array.astype(np.float32)
        wrong = np.flatnonzero(~np.isfinite(numbers))
        if wrong.size:
            _refuse_missing(where, int(wrong[0]) + 1, name)
        return numbers
    for i, value in enumerate(array.tolist()):
        if value is None or value != value or (isinstance(value, str) and value.strip().lower() in MISSING):
            _refuse_missing(where, i + 1, name)
        if not isinstance(value, str | bool | int | float):
            raise DataError(
                f"{where}: row {i + 1}, column {name[:80]!r} holds {type(value).__name__}, not text or a number."
            )
    codes: dict[str, int] = {}
    coded = _coded([str(value) for value in array.tolist()], codes)
    return Texts(tuple(codes), coded)
