"""A person's own labelled data, from whatever file it lies in, and a copy of it without some rows."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Num

from bilax.datasets.classes import decode
from bilax.datasets.folders import FORMATS, list_folder
from bilax.datasets.tables import Columns, Encoder, Texts, csv_lines, encoder, parquet_table, read_columns
from bilax.files import NPY, DataError, opened, read_arrays, write_arrays, write_whole

KINDS = (".npz", ".csv", ".parquet")


class Labelled(NamedTuple):
    """Inputs with labels of any kind, and what a person would want to see of them."""

    inputs: Num[np.ndarray, "n ..."]
    labels: np.ndarray
    columns: Columns
    """of a table, without the label; empty for arrays and pictures"""
    encoder: Encoder | None = None
    files: tuple[Path, ...] = ()
    """of pictures"""
    label: str = ""
    """the column that held the labels"""

    @property
    def is_picture(self) -> bool:
        """Whether inputs are (height, width), or have one, three or four channels last."""
        shape = self.inputs.shape[1:]
        return len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4))


def read_labelled(
    path: Path, label: str | None = None, drop: Sequence[str] = (), like: Labelled | None = None, size: int = 32
) -> Labelled:
    """Labelled data from an .npz file (x, y), a table (.csv, .parquet) or a folder of pictures, one folder per class.

    `like` is the data that these belong to: categories are encoded as there.
    """
    if path.is_dir():
        return _read_pictures(path, size)
    suffix = path.suffix.lower()
    if suffix not in KINDS:
        raise DataError(f"{path}: is no folder, nor does it end in {', '.join(KINDS)}.")
    if suffix == ".npz":
        return _read_arrays(path)
    found, columns = read_columns(path, label)
    labels = columns.pop(found)
    assert isinstance(labels, Texts)
    for name in drop:
        if name not in columns:
            raise DataError(f"{path}: has no column {name!r} to leave out; there are {', '.join(list(columns)[:12])}.")
    columns = {name: column for name, column in columns.items() if name not in drop}
    encode = encoder(path, columns) if like is None or like.encoder is None else like.encoder
    inputs = encode(path, columns)
    return Labelled(inputs, labels.values, encode.viewed(columns, inputs), encode, label=found)


def _read_arrays(path: Path) -> Labelled:
    arrays = read_arrays(path)
    for name in ("x", "y"):
        if name not in arrays:
            held = sorted(arrays)[:12]
            raise DataError(
                f"{path}: lacks the array {name!r}; it holds {held}. Save it with np.savez(path, x=x, y=y)."
            )
    return Labelled(arrays["x"], arrays["y"], {})


def _read_pictures(folder: Path, size: int) -> Labelled:
    groups = list_folder(folder)
    files = [path for paths in groups.values() for path in paths]
    labels = np.repeat(list(groups), [len(paths) for paths in groups.values()])
    inputs = np.empty((len(files), size, size, 3), np.uint8)
    for i, path in enumerate(files):
        inputs[i] = decode(path, (size, size), 3, str(path), FORMATS)
    return Labelled(inputs, labels, {}, files=tuple(files))


def read_embeddings(path: Path, rows: int) -> Num[np.ndarray, "n d"]:
    """Numbers for each row that somebody else's network made: an .npz file with an array `x`, or an .npy file."""
    with opened(path) as file:
        single = file.read(len(NPY)) == NPY
        file.seek(0)
        arrays = {"x": _read_npy(path, file)} if single else read_arrays(path)
    if "x" not in arrays:
        raise DataError(f"{path}: lacks the array 'x'; it holds {sorted(arrays)[:12]}.")
    found = arrays["x"]
    if found.ndim != 2 or len(found) != rows:
        raise DataError(f"{path}: holds numbers of shape {found.shape}, but there are {rows} rows.")
    return found


def _read_npy(path: Path, file: Any) -> np.ndarray:
    try:
        return np.load(file, allow_pickle=False)
    except Exception as error:  # a damaged header can fail in many ways
        raise DataError(f"{path}: cannot be read as an array ({str(error)[:200]}).") from None


def write_cleaned(source: Path, out: Path, data: Labelled, keep: Bool[np.ndarray, " n"], labels: np.ndarray) -> Path:
    """A copy of the data with only the rows `keep`, and with these labels; for pictures a list of their files."""
    path = out / ("cleaned.csv" if data.files else f"cleaned{source.suffix.lower()}")
    if data.files:
        rows = [(str(file), name) for file, name, kept in zip(data.files, labels, keep, strict=True) if kept]
        write_whole(path, csv_bytes([("file", "label"), *rows]))
    elif source.suffix.lower() == ".npz":
        write_arrays(path, {"x": data.inputs[keep], "y": labels[keep]})
    elif source.suffix.lower() == ".csv":
        write_whole(path, _copied_csv(source, data.label, keep, labels))
    else:
        write_whole(path, _copied_parquet(source, data.label, keep, labels))
    return path


def csv_bytes(rows: Sequence[Sequence[Any]]) -> bytes:
    """Rows as CSV."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def _copied_csv(source: Path, label: str, keep: np.ndarray, labels: np.ndarray) -> bytes:
    with opened(source) as file:
        lines = csv_lines(source, io.TextIOWrapper(file, "utf-8-sig", newline=""))
        names = next(lines)[1]
        place, rows = names.index(label), [names]
        for number, row in lines:
            if keep[number - 1]:
                rows.append([*row[:place], labels[number - 1], *row[place + 1 :]])
    return csv_bytes(rows)


def _copied_parquet(source: Path, label: str, keep: np.ndarray, labels: np.ndarray) -> bytes:
    import pyarrow
    import pyarrow.parquet as parquet

    table = parquet_table(source)
    place = table.column_names.index(label)
    table = table.set_column(place, label, pyarrow.array([str(value) for value in labels]))
    stream = io.BytesIO()
    parquet.write_table(table.filter(pyarrow.array(keep)), stream)
    return stream.getvalue()


def shown_row(data: Labelled, i: int, most: int = 8) -> list[tuple[str, str]]:
    """The first columns of a row as text, or its first numbers."""
    if data.columns:
        names = list(data.columns)[:most]
        columns = [(name, data.columns[name]) for name in names]
        return [
            (name, column.names[column.codes[i]] if isinstance(column, Texts) else f"{column[i]:.4g}")
            for name, column in columns
        ]
    return [(str(j), f"{value:.4g}") for j, value in enumerate(data.inputs[i].ravel()[:most].astype(float))]
