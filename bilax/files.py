"""Every file is read and written here: regular files alone, no more than is meant, written whole or not at all.

Files may come from strangers. What is no regular file could block for ever or never end, and a small file can unpack
to any size: so the kind is asked before a file is read, and the size before memory is taken. Imports nothing of bilax,
so that all may use it.
"""

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import math
import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

UNPACKED, FOLD = 1 << 26, 16
"""bytes that any file may unpack to, and how many times its own size a larger one may"""
TEXT_BYTES = 1 << 24
"""of a file of settings, results or names at the most"""
MEMBERS = 40_000
"""of an archive at the most; the largest real one, of Omniglot, has about 20,000"""
BLOCK = 1 << 20
GZIP, BZIP2, NPY = b"\x1f\x8b", b"BZh", b"\x93NUMPY"


class DataError(ValueError):
    """Data that cannot be used; the message names the file and the place in it."""


@contextlib.contextmanager
def opened(path: Path, most: int | None = None) -> Iterator[BinaryIO]:
    """A regular file for reading; refused if it is none, or larger than `most` bytes."""
    try:
        # Without O_NONBLOCK to open a pipe would wait for somebody to write into it.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be opened ({getattr(error, 'strerror', None) or error}).") from error
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode):
        os.close(handle)
        raise DataError(f"{path} is not a regular file.")
    with os.fdopen(handle, "rb") as file:
        if most is not None:
            check_size(path, about.st_size, most, "holds")
        yield file


def check_size(where: Path | str, size: int, most: int, what: str = "unpacks to") -> None:
    """Refuses `size` bytes where no more than `most` can be meant."""
    if size > most:
        raise DataError(f"{where}: {what} {size:,} bytes, more than the {most:,} that are read of it.")


def may_unpack(packed: int) -> int:
    """How many bytes a packed file of so many may unpack to."""
    return max(UNPACKED, FOLD * packed)


def read_whole(path: Path, most: int) -> bytes:
    """The content of a file."""
    with opened(path, most) as file:
        content = file.read(most + 1)
    check_size(path, len(content), most, "holds more than")  # it may grow while it is read
    return content


def read_text(path: Path, most: int = TEXT_BYTES) -> str:
    """The text of a file."""
    try:
        return read_whole(path, most).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not text in UTF-8 ({error}).") from None


def read_json(path: Path) -> dict[str, Any]:
    """The dictionary that a JSON file holds."""
    try:
        content = json.loads(read_text(path))
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON ({error}).") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: must hold a dictionary, got {type(content).__name__}.")
    return content


def read_unpacked(path: Path) -> bytes:
    """The content of a file, unpacked if it is gzip or bzip2 (known by its first bytes, not by its name)."""
    return b"".join(_blocks(path))


def digest(path: Path) -> str:
    """SHA-256 of the unpacked content."""
    found = hashlib.sha256()
    for block in _blocks(path):
        found.update(block)
    return found.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with opened(path) as file:
        packed = os.fstat(file.fileno()).st_size
        first = file.read(3)
        file.seek(0)
        size, stream, kind = 0, file, "plain"
        if first.startswith(GZIP):
            stream, kind = gzip.GzipFile(fileobj=file), "gzip"
        elif first == BZIP2:
            stream, kind = bz2.BZ2File(file), "bzip2"
        try:
            while block := stream.read(BLOCK):
                size += len(block)
                check_size(path, size, may_unpack(packed), "unpacks to more than")
                yield block
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: the {kind} stream of {packed} bytes is damaged or cut off ({error}).") from error


@contextlib.contextmanager
def archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """A zip archive, refused if it holds too much, or a name twice; what is wrong inside is told as damage of it."""
    with opened(path) as file:
        try:
            with zipfile.ZipFile(file) as content:
                _check_members(path, content, os.fstat(file.fileno()).st_size)
                yield content
        except DataError:
            raise
        except Exception as error:  # a damaged archive can fail in many ways inside zipfile and zlib
            raise DataError(f"{path}: cannot be read as a zip archive; it is damaged or cut off ({error}).") from error


def _check_members(path: Path, content: zipfile.ZipFile, packed: int) -> None:
    members = content.infolist()
    if len(members) > MEMBERS:
        raise DataError(f"{path}: {len(members)} entries are more than the {MEMBERS} that are read of an archive.")
    if len({member.filename for member in members}) < len(members):
        raise DataError(f"{path}: an entry is there twice.")
    check_size(path, sum(member.file_size for member in members), may_unpack(packed))
    if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
        raise DataError(f"{path}: is packed in another way than by deflate.")


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays by name as an `.npz` file, whole or not at all."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    if sum(np.asarray(array).nbytes for array in arrays.values()) > may_unpack(buffer.tell()) // 2:
        buffer = io.BytesIO()  # packed so well that nobody would read it
        np.savez(buffer, **arrays)
    write_whole(path, buffer.getvalue())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file, pickled objects refused; a DataError that names a file which cannot be read."""
    with opened(path) as file:
        if file.read(len(NPY)) == NPY:
            raise DataError(f"{path}: holds a single array, as np.save writes; np.savez writes several, by name.")
    with archive(path) as content:
        return {
            member.filename.removesuffix(".npy"): _read_array(f"{path}: {member.filename[:80]!r}", content, member)
            for member in content.infolist()
        }


def _read_array(where: str, content: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """One array; numpy would take the memory that it announces before it looks how much there is."""
    headers = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    with content.open(member) as file:
        if not member.filename.endswith(".npy") or member.file_size < len(NPY):
            raise DataError(f"{where} is no array.")
        version = np.lib.format.read_magic(file)[0]
        shape, by_columns, dtype = headers[min(version, 2)](file)
        if dtype.hasobject or dtype.names is not None:
            raise DataError(f"{where} holds Python objects or records, which are not read.")
        if math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
            raise DataError(f"{where} does not fill the shape {shape} that it announces.")
        raw = bytearray()
        while block := file.read(BLOCK):
            raw += block
    return np.ndarray(shape, dtype, raw, order="F" if by_columns else "C")


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
