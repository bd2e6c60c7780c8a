"""Pictures grouped by class, from which few-shot tasks are drawn, and the decoding of single pictures."""

import contextlib
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from bilax.files import DataError, opened

PARTS = ("train", "val", "test")
"""the names that data sets give to the parts of `Splits`"""
PIXELS = 1 << 24
"""of one picture at the most: a small file can announce a picture that fills the memory"""


@runtime_checkable
class Pictures(Protocol):
    """The pictures of one class: an array of bytes (n, height, width, channels), or what can stand for one."""

    def __len__(self) -> int: ...
    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray: ...


class Classes(NamedTuple):
    """Pictures by class, in a fixed order."""

    names: tuple[str, ...]
    pictures: tuple[Pictures, ...]
    shape: tuple[int, int, int]
    """(height, width, channels) of every picture"""

    def take(self, indices: Iterable[int]) -> "Classes":
        """The classes with these indices."""
        indices = list(indices)
        return self._replace(
            names=tuple(self.names[i] for i in indices), pictures=tuple(self.pictures[i] for i in indices)
        )

    def groups(self) -> tuple[str, ...]:
        """The first parts of names such as Greek/character01: Omniglot's alphabets."""
        return tuple(sorted({_group(name) for name in self.names}))

    def of(self, groups: Iterable[str]) -> "Classes":
        """The classes of these groups."""
        wanted = set(groups)
        missing = sorted(wanted - set(self.groups()))
        if missing:
            raise DataError(f"there is no {', '.join(missing)}; known are {', '.join(self.groups())}.")
        return self.take(i for i, name in enumerate(self.names) if _group(name) in wanted)

    def rotated(self, quarter_turns: Sequence[int] = (0, 1, 2, 3)) -> "Classes":
        """Each class once for each number of quarter turns; only for pictures held as arrays."""
        pairs = [
            (name, np.asarray(p), k) for name, p in zip(self.names, self.pictures, strict=True) for k in quarter_turns
        ]
        return self._replace(
            names=tuple(f"{name}/{90 * k}" if k else name for name, _, k in pairs),
            pictures=tuple(np.rot90(p, k, (1, 2)) for _, p, k in pairs),
        )


class Splits(NamedTuple):
    """Classes to train on, to choose settings by and to report on; no class is in two of them."""

    train: Classes
    validation: Classes
    test: Classes

    def tag(self) -> str:
        """A short text that differs where a class, its part or a picture of it differs."""
        digest = hashlib.sha256()
        for part in self:
            digest.update(f"{part.shape}{part.names}".encode())
            for pictures in part.pictures:
                for piece in getattr(pictures, "files", None) or (np.asarray(pictures).tobytes(),):
                    digest.update(piece)
        return digest.hexdigest()[:16]


def classes(pictures: Mapping[str, Pictures], shape: tuple[int, int, int]) -> Classes:
    """Classes in the order of their names."""
    names = tuple(sorted(pictures))
    return Classes(names, tuple(pictures[name] for name in names), shape)


def random_splits(everything: Classes, seed: int = 0, shares: tuple[float, float] = (0.6, 0.2)) -> Splits:
    """`shares` of the classes for training and validation, the others for the test; at least one class each."""
    count = len(everything.names)
    if count < 3:
        raise DataError(f"{count} classes cannot be split into training, validation and test: give at least 3.")
    order = np.random.default_rng(seed).permutation(count)
    first = int(np.clip(round(shares[0] * count), 1, count - 2))
    second = int(np.clip(first + round(shares[1] * count), first + 1, count - 1))
    train, validation, test = (everything.take(sorted(part.tolist())) for part in np.split(order, (first, second)))
    return Splits(train, validation, test)


def disjoint_splits(folder: Path, parts: Sequence[Classes], numbered: bool = False) -> Splits:
    """The three parts, refused if a class name, a shape or pictures show that they do not belong together.

    With `numbered`, a number says nothing: tieredImageNet counts its classes from 0 in each file.
    """
    named = [{name for name in part.names if not (numbered and name.isdigit())} for part in parts]
    both = sorted((named[0] & named[1]) | (named[0] & named[2]) | (named[1] & named[2]))
    if both:
        raise DataError(f"{folder}: the class {both[0]} is in two of {', '.join(PARTS)}; a test class must be new.")
    if len({part.shape for part in parts}) > 1:
        raise DataError(f"{folder}: pictures have different shapes: {', '.join(str(part.shape) for part in parts)}.")
    _check_new_pictures(folder, parts)
    return Splits(*parts)


def decode(
    content: bytes | Path,
    size: tuple[int, int] | None,
    channels: int,
    where: str,
    formats: Sequence[str],
    most: int = PIXELS,
) -> UInt8[np.ndarray, "height width channels"]:
    """One picture in grey (`channels=1`) or colour (3), scaled to `size` = (height, width) unless that is None.

    What is transparent is seen on white, and a photo that says which way is up is turned. One of more than `most`
    pixels is refused.
    """
    source = contextlib.nullcontext(io.BytesIO(content)) if isinstance(content, bytes) else opened(content)
    try:
        with source as file, Image.open(file, formats=tuple(formats)) as picture:
            if picture.width * picture.height > most:
                raise DataError(f"{where}: a picture of {picture.width} × {picture.height} is too large to be meant.")
            picture = _on_white(ImageOps.exif_transpose(picture)).convert("L" if channels == 1 else "RGB")
            if size is not None and (picture.height, picture.width) != size:
                picture = picture.resize((size[1], size[0]), Image.Resampling.LANCZOS)
            return np.asarray(picture).reshape(picture.height, picture.width, channels)
    except DataError:
        raise
    except Exception as error:  # a damaged file can fail in many ways inside Pillow
        raise DataError(f"{where}: cannot be read as {' or '.join(formats)} ({error}).") from error


def _check_new_pictures(folder: Path, parts: Sequence[Classes]) -> None:
    """Refuses a class whose pictures are in an earlier part: a name is soon changed, and tieredImageNet has none.

    A tenth of them is let pass, for ImageNet itself has some pictures under two names.
    """
    known: dict[bytes, str] = {}
    for where, part in zip(PARTS, parts, strict=True):
        marks = {f"{where}: class {name}": _marks(pictures) for name, pictures in zip(*part[:2], strict=True)}
        for name, own in marks.items():
            again = [i for i, mark in enumerate(own) if mark in known]
            if 10 * len(again) > len(own):
                raise DataError(
                    f"{folder}: {name}: {len(again)} of {len(own)} pictures, picture {again[0]} for one, are in "
                    f"{known[own[again[0]]]} too; a test class must be new."
                )
        known |= {mark: name for name, own in marks.items() for mark in own}


def _marks(pictures: Pictures) -> list[bytes]:
    """What tells each picture from another."""
    if packed := getattr(pictures, "files", None):
        return list(packed)
    return [hashlib.blake2b(picture).digest() for picture in np.ascontiguousarray(pictures)]


def _on_white(picture: Image.Image) -> Image.Image:
    """`picture` without transparency and with 8 bits a channel: Pillow's convert drops the one and cuts the other."""
    if picture.mode.startswith("I"):  # grey of 16 bits
        return Image.fromarray(((np.asarray(picture).astype(np.int64) + 128) // 257).astype(np.uint8))
    if "A" not in picture.getbands() and "transparency" not in picture.info:
        return picture
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)


def _group(name: str) -> str:
    return name.split("/")[0]
