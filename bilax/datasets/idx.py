"""The IDX format of MNIST: two zero bytes, a type, a number of axes, their sizes (big-endian), the values."""

import math
import struct
from pathlib import Path

import numpy as np

from bilax.datasets.examples import Examples, examples
from bilax.files import DataError, read_unpacked

UNSIGNED_BYTE = 0x08
PARTS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
"""the files of MNIST and of those made like it"""
CLASSES = 10


def load_idx(folder: Path) -> tuple[Examples, Examples]:
    """Training and test examples from a folder with the four files, each packed or not."""
    files = [packed_or_not(folder / part) for part in PARTS]
    train, test = (read_pair(images, labels, CLASSES) for images, labels in (files[:2], files[2:]))
    return examples(*train), examples(*test)


def packed_or_not(path: Path) -> Path:
    """`path`, or what gzip or bzip2 made of it if only that is there."""
    packed = (path.with_name(f"{path.name}.{ending}") for ending in ("gz", "bz2"))
    return path if path.exists() else next((file for file in packed if file.exists()), path)


def read_idx(path: Path, axes: int) -> np.ndarray:
    """An array of unsigned bytes with `axes` axes from an IDX file, packed or not."""
    return parse_idx(read_unpacked(path), axes, str(path))


def parse_idx(content: bytes, axes: int, where: str) -> np.ndarray:
    """As `read_idx`, from bytes in memory; `where` is what errors call them."""
    header = 4 + 4 * axes
    if len(content) < header:
        raise DataError(f"{where}: ends at byte {len(content)}, inside the header of {header} bytes.")
    zeros, kind, found = struct.unpack(">HBB", content[:4])
    if zeros or kind != UNSIGNED_BYTE or found != axes:
        raise DataError(
            f"{where}: bytes 0-3 are {content[:4].hex(' ')}, but an IDX file of unsigned bytes with {axes} axes "
            f"starts with 00 00 08 {axes:02x}."
        )
    shape = struct.unpack(f">{axes}I", content[4:header])
    expected = header + math.prod(shape)
    if len(content) != expected:
        problem = "is cut off" if len(content) < expected else "has bytes left over"
        raise DataError(
            f"{where}: {problem}: bytes 4-{header - 1} announce the shape {shape}, so the file should end at byte "
            f"{expected}, but it ends at byte {len(content)}."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_pair(images: Path, labels: Path, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, height, width) and labels (n,) of one IDX pair, checked against each other."""
    pictures, names = read_idx(images, 3), read_idx(labels, 1)
    if len(pictures) != len(names):
        raise DataError(f"{images} holds {len(pictures)} images, but {labels} holds {len(names)} labels.")
    if not len(names):
        raise DataError(f"{images}: holds no images.")
    wrong = np.flatnonzero(names >= classes)
    if wrong.size:
        i = int(wrong[0])
        raise DataError(f"{labels}: label {i} (byte {8 + i}) is {names[i]}, outside 0..{classes - 1}.")
    return pictures, names
