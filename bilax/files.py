"""Files that are written whole or not at all, and arrays in them. Imports nothing of bilax, so that all may use it."""

import io
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Writes arrays by name as an `.npz` file, whole or not at all."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_whole(path, buffer.getvalue())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file, pickled objects refused; a ValueError that names a file which cannot be read."""
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            raise ValueError("it holds a single array, as np.save writes")
        with content:
            return {name: content[name] for name in content.files}
    except Exception as error:  # a damaged file can fail in many ways inside zipfile, zlib and numpy
        raise ValueError(f"{path}: cannot be read as an .npz file without pickled objects ({error}).") from error


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
