"""Compiled programs that equal arguments share, and that are freed when others have taken their place.

`eqx.filter_jit` keeps every function that it was ever given, and the program with it: a process that makes a new
objective or optimiser for each call of `solve` runs out of memory maps after some 500.
"""

import collections
import contextlib
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

KEPT = 32
"""programs that one function keeps, the last ones used; a small one takes 6 MB and 130 memory maps"""
OURS = ("bilax", "optax")
"""packages whose functions do the same if their code and what they close over is the same; a user's function may read
a global variable that has changed since, so it equals itself alone"""


def compiled(
    function: Callable[..., Any], nan_is_meant: bool = False, donated: int | None = None, jit: Any = jax.jit
) -> Callable[..., Any]:
    """`jit`, traced in the arrays among the leaves of the arguments and static in all others.

    With `nan_is_meant` a NaN in what it returns is no error, also where `jax_debug_nans` is set. The memory of the
    argument number `donated` is used for what it returns, and that argument is gone.
    """
    programs: collections.OrderedDict[Any, Callable[..., Any]] = collections.OrderedDict()
    lock = threading.Lock()

    @functools.wraps(function)
    def call(*args, **kwargs):
        leaves, structure = jax.tree.flatten((args, kwargs))
        arrays = [leaf if eqx.is_array(leaf) else None for leaf in leaves]
        others = [None if eqx.is_array(leaf) else leaf for leaf in leaves]
        key = structure, tuple(map(_meaning, others))
        with lock:
            program = programs.pop(key, None) or _program(function, structure, others, jit)
            programs[key] = program  # the last one used comes last
            while len(programs) > KEPT:
                programs.popitem(last=False)
        with jax.debug_nans(False) if nan_is_meant else contextlib.nullcontext():
            found, rest = program(*_apart(arrays, args, donated))
        return eqx.combine(found, rest.value)

    return call


class _Rest(eqx.Module):
    """What of a result is no array."""

    value: Any = eqx.field(static=True)


def _program(function: Callable[..., Any], structure: Any, others: list[Any], jit: Any) -> Callable[..., Any]:
    """A jitted function that nobody else holds: JAX frees what it knows of it when it is dropped."""

    def run(given, arrays):
        arrays = [one if other is None else other for one, other in zip(given, arrays, strict=True)]
        leaves = [other if array is None else array for array, other in zip(arrays, others, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        found, rest = eqx.partition(function(*args, **kwargs), eqx.is_array)
        return found, _Rest(rest)

    run.__name__, run.__qualname__ = function.__name__, function.__qualname__
    return jit(run, donate_argnums=0)


def _apart(arrays: list[Any], args: tuple[Any, ...], donated: int | None) -> tuple[list[Any], list[Any]]:
    """The arrays of the donated argument, and the others; None in the places of the rest."""
    if donated is None:
        return [None] * len(arrays), arrays
    first = len(jax.tree.leaves(args[:donated]))
    last = first + len(jax.tree.leaves(args[donated]))
    given = [array if first <= i < last else None for i, array in enumerate(arrays)]
    return given, [None if first <= i < last else array for i, array in enumerate(arrays)]


def _meaning(value: Any, above: tuple[Any, ...] = ()) -> Any:
    """What can be hashed and equals that of another value where both do the same."""
    if isinstance(value, functools.partial):
        return functools.partial, _meaning_of_all((value.func, value.args, value.keywords), above)
    if isinstance(value, types.FunctionType) and (value.__module__ or "").partition(".")[0] in OURS:
        if value in above:  # it closes over itself
            return value.__code__
        closed = [_content(cell) for cell in value.__closure__ or ()]
        return value.__code__, _meaning_of_all((value.__defaults__, value.__kwdefaults__, closed), (*above, value))
    if isinstance(value, float):
        return float, value.hex()  # which tells -0.0 from 0.0, and finds nan equal to nan
    try:
        hash(value)
    except TypeError:
        return _Itself(value)
    return type(value), value


def _meaning_of_all(tree: Any, above: tuple[Any, ...]) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(_meaning(leaf, above) for leaf in leaves)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return cell


class _Itself:
    """Equal to the same object alone."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
