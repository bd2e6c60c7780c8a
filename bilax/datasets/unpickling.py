"""Reads pickles of arrays, numbers, text and plain containers; whatever else a pickle asks for is refused.

A pickle is a program, and to load one is to run it. Here the only names a pickle may use are those that numpy's
arrays are made of, and they do not reach numpy: they stand for the small functions and classes of this module, which
check what they get.
"""

import collections
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from bilax.datasets.idx import DataError

KINDS = "biufSU"
"""booleans, numbers, bytes and text"""


def read_pickle(path: Path) -> Any:
    """The content of a pickle, also one that Python 2 wrote."""
    if not path.exists():
        raise DataError(f"{path} does not exist.")
    try:
        with path.open("rb") as file:
            # Python 2 stored arrays' bytes as text; latin1 gives each byte back unchanged.
            return _plain(_Unpickler(file, encoding="latin1").load(), {})
    except _RefusedError as error:
        raise DataError(f"{path}: refused: {error} Only arrays and plain containers are read from a pickle.") from error
    except Exception as error:  # a damaged pickle can fail in any operation
        raise DataError(f"{path}: cannot be read as a pickle; it is damaged or cut off ({error!r}).") from error


class _RefusedError(Exception):
    """What the pickle asks for is not admitted."""


class _Dtype:
    """Stands for numpy.dtype while the pickle is read."""

    def __init__(self, name: Any, align: Any = False, copy: Any = True):
        text = name.decode("latin1") if isinstance(name, bytes) else name
        if not isinstance(text, str) or text[:1] not in KINDS or not text[1:].isdigit():
            raise _RefusedError(f"an array of type {text!r}.")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: Any) -> None:
        order, inner, names, fields = state[1:5]
        if inner is not None or names is not None or fields is not None:
            raise _RefusedError("an array with fields.")
        self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """Stands for numpy.ndarray while the pickle is read."""

    value = np.zeros(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        self.value = _array(raw, dtype, shape, "F" if fortran else "C")


def _array(raw: Any, dtype: Any, shape: Any, order: Any = "C") -> np.ndarray:
    if not isinstance(dtype, _Dtype) or not isinstance(shape, tuple) or order not in ("C", "F"):
        raise _RefusedError("an array that is put together strangely.")
    if not all(type(n) is int and n >= 0 for n in shape):
        raise _RefusedError(f"an array of shape {shape}.")
    content = raw.encode("latin1") if isinstance(raw, str) else raw
    if not isinstance(content, bytes | bytearray) or len(content) != math.prod(shape) * dtype.dtype.itemsize:
        raise _RefusedError(f"an array whose content does not fill its shape {shape}.")
    return np.frombuffer(content, dtype.dtype).reshape(shape, order=order)


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    if kind is not _Array:
        raise _RefusedError("an array of an unknown class.")
    return _Array()


def _scalar(dtype: Any, raw: Any) -> Any:
    return _array(raw, dtype, (1,))[0]


def _encode(text: Any, encoding: Any) -> bytes:
    # Python 3 writes bytes this way in the pickle protocols of Python 2.
    if not isinstance(text, str) or encoding != "latin1":
        raise _RefusedError(f"text in the encoding {encoding!r}.")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    # The same protocols write b"" as bytes(); bytes(n) would let a few characters ask for any amount of memory.
    return b""


def _set(items: list[Any]) -> set[Any]:
    return set(items)


_NUMPY = {"_reconstruct": _reconstruct, "scalar": _scalar}
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{(builtins, "bytes"): _no_bytes for builtins in ("builtins", "__builtin__")},
    **{(builtins, "set"): _set for builtins in ("builtins", "__builtin__")},
    **{(f"numpy.{core}.multiarray", name): one for core in ("core", "_core") for name, one in _NUMPY.items()},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _array for core in ("core", "_core")},
}


class _Unpickler(pickle._Unpickler):  # pyright: ignore[reportAttributeAccessIssue]
    # The one in Python, for the one in C makes room for as many entries as ten bytes can ask for.
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise _RefusedError(f"the name {module}.{name}.") from None

    def persistent_load(self, pid: Any) -> Any:
        raise _RefusedError("a reference to something outside the file.")


def _plain(value: Any, seen: dict[int, Any]) -> Any:
    """`value` with arrays in place of what stood for them; `seen` maps what was met before to its plain form."""
    if isinstance(value, _Array):
        return value.value
    if not isinstance(value, dict | list | tuple | set | frozenset):
        if not isinstance(value, str | bytes | bytearray | int | float | complex | None | np.generic | np.ndarray):
            raise _RefusedError(f"a {type(value).__name__.strip('_')}.")
        return value
    if id(value) in seen:
        if seen[id(value)] is _Unfinished:
            raise _RefusedError("a container that holds itself.")
        return seen[id(value)]
    seen[id(value)] = _Unfinished
    if isinstance(value, dict):
        plain = {_plain(key, seen): _plain(item, seen) for key, item in value.items()}
    else:
        plain = type(value)(_plain(item, seen) for item in value)
    seen[id(value)] = plain
    return plain


class _Unfinished:
    """Marks a container whose content is being looked at."""
