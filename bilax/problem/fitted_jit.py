"""`jax.jit`, with XLA told how to compile by what the program computes."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax

_PLAINLY = {"xla_cpu_use_fusion_emitters": False}
"""XLA's fusion emitters make vector code of what is elementwise, at a third to half of the time and memory that a
compilation takes; without them large arrays take 2 to 20 times as long, and small ones and products as long"""
SMALL = 64
"""values in an array for which there is no difference (measured with jaxlib 0.10)"""
ENOUGH = 50
"""operations in matrix products for one on an element, that what is elementwise does not matter"""
_TURNS = 10
"""of a loop that ends by a condition"""
_MOVES = re.compile("broadcast_in_dim|concatenate|copy|.*slice|iota|pad|reshape|rev|squeeze|transpose")
"""what computes nothing"""


def fitted_jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` with `options`, compiled plainly where that is as fast."""
    vectors = jax.jit(function, **options)
    if not (plain := known(**_PLAINLY)):
        return vectors
    plainly = jax.jit(function, **options, **plain)
    chosen: dict[Any, Callable[..., Any]] = {}

    def call(*arguments):
        types = tuple(map(jax.typeof, jax.tree.leaves(arguments)))
        if types not in chosen:
            elements, products = arithmetic(vectors.trace(*arguments).jaxpr)
            chosen[types] = plainly if ENOUGH * elements <= products else vectors
        return chosen[types](*arguments)

    return call


def known(**options: Any) -> dict[str, Any]:
    """The options of XLA as an argument of `jax.jit`; none, if this backend or release does not know them."""
    return _known(tuple(options.items()))


@functools.cache
def _known(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    try:
        jax.jit(lambda v: v + 1, compiler_options=dict(options)).lower(0.0).compile()
    except Exception:
        return {}
    return {"compiler_options": dict(options)}


def arithmetic(jaxpr: Any) -> tuple[float, float]:
    """Operations on the elements of arrays that are not small, and those in products of matrices and convolutions."""
    elements, products = 0.0, 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if parts := parts_of(equation):
            turns = params["length"] if name == "scan" else _TURNS if name == "while" else 1
            for part in map(arithmetic, parts):
                elements, products = elements + turns * part[0], products + turns * part[1]
        elif name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            products += 2 * equation.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
        elif name == "conv_general_dilated":
            kernel, numbers = equation.invars[1].aval, params["dimension_numbers"]
            products += 2 * equation.outvars[0].aval.size * kernel.size / kernel.shape[numbers.rhs_spec[0]]
        elif not _MOVES.fullmatch(name):
            # What scatters into an array writes as much as it is given.
            written = equation.invars[2:3] if name.startswith("scatter") else equation.outvars
            sizes = [value.aval.size for value in written]
            elements += sum(size for size in sizes if size > SMALL)
    return elements, products


def parts_of(equation: Any) -> list[Any]:
    """The programs that an operation runs: a loop's body, branches."""
    params = jax.tree.leaves(equation.params, is_leaf=lambda param: hasattr(param, "eqns") or hasattr(param, "jaxpr"))
    return [part for part in (getattr(param, "jaxpr", param) for param in params) if hasattr(part, "eqns")]
