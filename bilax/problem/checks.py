"""Checks of what a user hands in: they run where the call is made and name the argument and the remedy."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from bilax.problem.problem import Problem
from bilax.problem.quick_jit import quick_jit
from bilax.problem.sets import Set, name_of


def as_arrays(name: str, tree: PyTree) -> PyTree:
    """The tree with pandas frames, PyTorch tensors and the like as NumPy arrays; refuses what is not numbers."""

    def convert(path, leaf):
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex | jax.ShapeDtypeStruct):
            return leaf
        where = name + jax.tree_util.keystr(path)
        if not hasattr(leaf, "__array__"):
            raise TypeError(f"{where} is {_short(leaf)}, not an array. Keep only arrays and numbers in {name}.")
        try:
            array = np.asarray(leaf)
        except Exception as error:
            raise TypeError(
                f"{where} is a {type(leaf).__name__} that cannot be read as an array ({error}). For a PyTorch tensor "
                "write tensor.detach().cpu().numpy()."
            ) from None
        if array.dtype == object:
            raise TypeError(
                f"{where} is a {type(leaf).__name__} whose columns are not all numbers. Encode or drop the others "
                "first, and write frame.to_numpy(float)."
            )
        return array

    return jax.tree_util.tree_map_with_path(convert, tree)


def holds_doubles(tree: PyTree) -> bool:
    """Whether some of the leaves are arrays of double precision."""
    return any(getattr(leaf, "dtype", None) == np.float64 for leaf in jax.tree.leaves(tree))


def warn_of_doubles(name: str, tree: PyTree, *, variables: bool) -> None:
    """Warns, once, where double precision is handed in and will be rounded; variables will be, whatever they are."""
    if jax.config.jax_enable_x64 or not holds_doubles(tree):  # pyright: ignore[reportAttributeAccessIssue]
        return
    if variables or any(_is_rounded(leaf) for leaf in jax.tree.leaves(tree) if holds_doubles(leaf)):
        _warn_once(name)


def _is_rounded(array: Any) -> bool:
    """Whether single precision holds other numbers; those of a mask it holds as they are."""
    with np.errstate(over="ignore"):
        return not np.array_equal(array, np.asarray(array, np.float32), equal_nan=True)


@functools.cache
def _warn_once(name: str) -> None:
    warnings.warn(
        f"{name} holds numbers in double precision, but JAX computes in single: they are rounded. For double precision "
        'write jax.config.update("jax_enable_x64", True) at the top of your program. (bilax.auto() uses double by '
        "itself where the problem is small.)",
        stacklevel=5,
    )


def _short(leaf: Any) -> str:
    text = repr(leaf)
    return text if len(text) <= 60 else f"{text[:60]}…"


def check_point(name: str, point: PyTree, *, may_be_empty: bool = False) -> PyTree:
    """`point` with its leaves as float arrays; refuses integers, empty arrays and empty trees."""
    point = as_arrays(name, point)
    leaves = jax.tree_util.tree_leaves_with_path(point)
    if not leaves and not may_be_empty:
        raise ValueError(f"{name} holds no arrays: the follower needs at least one variable.")
    for path, leaf in leaves:
        where, array = name + jax.tree_util.keystr(path), jnp.asarray(leaf)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"{where} has dtype {array.dtype}: derivatives need floating numbers. Write 1.0 for 1, or use "
                "jnp.asarray(v, float)."
            )
        if array.size == 0:
            raise ValueError(f"{where} is empty (shape {array.shape}). Leave it out of the tree.")
    # As dtypes that stay what they are: a Python number's would give way to those it meets.
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), point)


def check_inside(name: str, point: PyTree, a_set: Any) -> PyTree:
    """`point`, projected with a warning where it lies outside its set; terms and sets that depend on x take any."""
    if not isinstance(a_set, Set):
        return point
    try:
        projected = _projected(a_set, point)
    except Exception as error:
        raise ValueError(f"{name} does not fit its set {name_of(a_set)}: {error}") from error
    check_same(f"{type(a_set).__name__}.project({name})", projected, name, point)
    pairs = zip(jax.tree.leaves(point), jax.tree.leaves(projected), strict=True)
    if not all(np.allclose(a, b, rtol=1e-6, atol=1e-12) for a, b in pairs):
        warnings.warn(f"{name} lies outside its set {name_of(a_set)}; it was projected onto it.", stacklevel=3)
    return projected


@quick_jit
def _projected(a_set: Any, point: PyTree) -> PyTree:
    """In one program: operation by operation, a projection onto the simplex compiles some thirty."""
    return a_set.project(point)


def check_same(name: str, tree: PyTree, other_name: str, other: PyTree) -> None:
    """Refuses two trees that differ in structure, shape or dtype."""
    if jax.tree.structure(tree) != jax.tree.structure(other):
        raise ValueError(
            f"{name} has structure {jax.tree.structure(tree)}, but {other_name} has {jax.tree.structure(other)}. "
            "They must be the same."
        )
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(other), strict=True):
        if jnp.shape(a) != jnp.shape(b) or jnp.result_type(a) != jnp.result_type(b):
            where = jax.tree_util.keystr(path)
            raise ValueError(
                f"{name}{where} is {jnp.result_type(a)}{list(jnp.shape(a))}, but {other_name}{where} is "
                f"{jnp.result_type(b)}{list(jnp.shape(b))}. They must be the same."
            )


def check_objectives(problem: Problem, x: PyTree, y: PyTree, data: tuple[Any, ...]) -> tuple[PyTree, PyTree]:
    """x and y as arrays; refuses objectives that do not return one floating number, before anything runs."""
    x, y = check_point("x", x, may_be_empty=True), check_point("z", y)
    objectives = {"upper(x, y, *data)": problem.upper, "lower(x, y, *data)": problem.lower}
    if problem.lower_at is not None:
        objectives["lower_at(k, x, y, *data)"] = functools.partial(problem.lower_at, jnp.zeros((), int))
    for name, objective in objectives.items():

        def value(x, y, data, objective=objective):
            return objective(problem.view(x, *data), y, *data)

        out = jax.eval_shape(value, x, y, data)
        if not hasattr(out, "shape") or out.shape != ():
            shape = getattr(out, "shape", jax.tree.structure(out))
            raise ValueError(f"{name} must return a scalar, got {shape}. Take a mean or a sum over what it returns.")
        if not jnp.issubdtype(out.dtype, jnp.floating):
            raise TypeError(f"{name} must return a floating number, got {out.dtype}.")
    return x, y
