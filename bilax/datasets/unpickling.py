"""Reads pickles of arrays, numbers, text and plain containers; whatever else a pickle asks for is refused.

A pickle is a program, and to load one is to run it. Here the only names a pickle may use are those that numpy's
arrays are made of, and they do not reach numpy: they stand for the small functions and classes of this module, which
check what they get. Nor may a small pickle ask for much memory or time: what it announces and what it makes are held
against its size, and nothing is hashed or written into a message before it is known to be small.
"""

import math
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bilax.files import DataError, opened

KINDS = "biufSU"
"""booleans, numbers, bytes and text"""
DIMENSIONS, LENGTH = 32, 1 << 48
"""of an array at the most"""
KEY, NUMBER = 1000, 1 << 60
"""the longest text and the largest whole number that may be a key: others take long to hash, or all hash alike"""

_SINGLE = (str, bytes, int, float, type(None), np.generic)
_MANY = (dict, list, tuple, set, frozenset)
_CONTENT = (str, bytes, list)


def read_pickle(path: Path) -> Any:
    """The content of a pickle, also one that Python 2 wrote."""
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            # To read makes room for all that is asked for, so no more is asked for than there can be.
            bounded = SimpleNamespace(read=lambda n: file.read(n if n < size else size), readline=file.readline)
            return _plain(_Unpickler(bounded, size).load(), {})
    except DataError:
        raise
    except _RefusedError as error:
        raise DataError(f"{path}: refused: {error} Only arrays and plain containers are read from a pickle.") from error
    except Exception as error:  # a damaged pickle can fail in any operation
        reason = f"{type(error).__name__}: {error}"[:200]
        raise DataError(f"{path}: cannot be read as a pickle; it is damaged or cut off ({reason}).") from error


class _RefusedError(Exception):
    """What the pickle asks for is not admitted."""


class _Dtype:
    """Stands for numpy.dtype while the pickle is read."""

    def __init__(self, name: Any, align: Any = False, copy: Any = True):
        text = name.decode("latin1") if isinstance(name, bytes) else name
        if not isinstance(text, str):
            raise _RefusedError(f"an array whose type is named by {_kind(text)}.")
        if text[:1] not in KINDS or not text[1:].isdigit():
            raise _RefusedError(f"an array of type {text[:80]!r}.")
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
    if len(shape) > DIMENSIONS or not all(type(n) is int and 0 <= n < LENGTH for n in shape):
        raise _RefusedError("an array whose shape is not a few whole numbers.")
    content = raw.encode("latin1") if isinstance(raw, str) else raw
    if not isinstance(content, bytes) or len(content) != math.prod(shape) * dtype.dtype.itemsize:
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
    if not isinstance(text, str) or not isinstance(encoding, str) or encoding != "latin1":
        raise _RefusedError("bytes that are not written as text in latin1.")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    # The same protocols write b"" as bytes(); bytes(n) would let a few characters ask for any amount of memory.
    return b""


def _set(items: Any) -> set[Any]:
    return set(_keys(_list(items)))


def _ordered(pairs: Any = None) -> dict[Any, Any]:
    # Python 2 gives all entries at once, Python 3 none, and adds them later.
    return {} if pairs is None else _dict([each for key, value in _list(pairs) for each in (key, value)])


def _dict(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(_keys(items[::2]), items[1::2], strict=True))


def _keys(items: list[Any]) -> list[Any]:
    # A tuple of tuples can be one value many times over, and to hash it takes as many steps.
    for item in items:
        if not isinstance(item, _SINGLE):
            raise _RefusedError(f"{_kind(item)} as a key or in a set.")
        if (isinstance(item, str | bytes) and len(item) > KEY) or (isinstance(item, int) and abs(item) > NUMBER):
            raise _RefusedError("a key, or an item of a set, that is too large to be meant.")
    return items


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _RefusedError(f"{_kind(value)} in place of a list.")
    return value


def _kind(value: Any) -> str:
    return f"a {type(value).__name__.strip('_')}"


_NUMPY = {"_reconstruct": _reconstruct, "scalar": _scalar}
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): _ordered,
    **{(builtins, "bytes"): _no_bytes for builtins in ("builtins", "__builtin__")},
    **{(builtins, "set"): _set for builtins in ("builtins", "__builtin__")},
    **{(f"numpy.{core}.multiarray", name): one for core in ("core", "_core") for name, one in _NUMPY.items()},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _array for core in ("core", "_core")},
}


# The one in Python, for the one in C makes room for as many entries as ten bytes can ask for.
_InPython: Any = pickle._Unpickler  # pyright: ignore[reportAttributeAccessIssue]


class _Unpickler(_InPython):
    def __init__(self, file: SimpleNamespace, size: int):
        # Python 2 stored arrays' bytes as text; latin1 gives each byte back unchanged.
        super().__init__(file, encoding="latin1")
        self.left = 2 * size  # the content of an array may be given twice: as text, and as bytes made from it

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise _RefusedError(f"the name {f'{module}.{name}'[:80]}.") from None

    def persistent_load(self, pid: Any) -> Any:
        raise _RefusedError("a reference to something outside the file.")

    def load_reduce(self) -> None:
        self._spend()
        super().load_reduce()

    def load_build(self) -> None:
        if not isinstance(self.stack[-2], _Array | _Dtype):
            raise _RefusedError(f"a state for {_kind(self.stack[-2])}.")
        self._spend()
        super().load_build()

    def _spend(self) -> None:
        """Counts what is given to a function: given again and again, one text would fill the memory with copies."""
        given = self.stack[-1]
        if not isinstance(given, tuple):
            raise _RefusedError(f"{_kind(given)} in place of arguments.")
        self.left -= sum([len(each) for each in given if isinstance(each, _CONTENT)])
        if self.left < 0:
            raise _RefusedError("the same content again and again.")

    def load_dict(self) -> None:
        items = _dict(self.pop_mark())
        self.append(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._enter([key, value])

    def load_setitems(self) -> None:
        self._enter(self.pop_mark())

    def _enter(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise _RefusedError(f"entries in {_kind(self.stack[-1])}.")
        self.stack[-1].update(_dict(items))

    def load_additems(self) -> None:
        items = _set(self.pop_mark())
        set.update(self.stack[-1], items)

    def load_frozenset(self) -> None:
        items = _set(self.pop_mark())
        self.append(frozenset(items))

    def load_object(self) -> None:
        raise _RefusedError("an object of a class.")

    dispatch = _InPython.dispatch | {
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.DICT[0]: load_dict,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.ADDITEMS[0]: load_additems,
        pickle.FROZENSET[0]: load_frozenset,
        # As bytes, for a bytearray is made, and filled with zeros, before it is read.
        pickle.BYTEARRAY8[0]: _InPython.load_binbytes8,
        **dict.fromkeys(b"".join((pickle.INST, pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX)), load_object),
        **dict.fromkeys(b"".join((pickle.EXT1, pickle.EXT2, pickle.EXT4)), load_object),
    }


def _plain(value: Any, seen: dict[int, Any]) -> Any:
    """`value` with arrays in place of what stood for them; `seen` maps what was met before to its plain form."""
    if isinstance(value, _Array):
        return value.value
    if not isinstance(value, _MANY):
        if not isinstance(value, (*_SINGLE, np.ndarray)):
            raise _RefusedError(f"{_kind(value)}.")
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
