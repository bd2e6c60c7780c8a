"""Interval arithmetic on jaxprs, and with it a proven lower bound of the follower in low dimension.

An interval is a pair (lo, hi) of arrays. Each operation of the traced function is replaced by one on intervals
that contains every possible result, and its ends are pushed outwards by a few units in the last place.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from bilax.problem.problem import Problem
from bilax.problem.quick_jit import quick_jit
from bilax.problem.sets import Box
from bilax.trust.flat_problem import flatten

_CELLS, _BATCH, _PASSES = 16384, 512, 60


class Interval(NamedTuple):
    """All values between `lo` and `hi`, entry by entry."""

    lo: Array
    hi: Array


class NotSupportedError(NotImplementedError):
    """The function uses an operation that has no interval version here."""


def lower_bound(
    problem: Problem, x: PyTree, y: PyTree, data: tuple[Any, ...], lowest: float, tolerance: float
) -> float | None:
    """A number that f(x, ·) provably never falls below on Y, as near to `lowest` as `tolerance` if it can be.

    By branch and bound: cells of Y whose bound is too low are halved. None where Y is not a box of one or two
    dimensions, or where `lower` uses an operation that is not supported.
    """
    flat = flatten(problem, x, y, data)
    lo, hi = np.asarray(flat.y_range.lo), np.asarray(flat.y_range.hi)
    if lo.size > 2 or not np.all(np.isfinite([lo, hi])) or not isinstance(problem.y_set, Box):
        return None
    try:
        bound_of = functools.partial(_bound_cells, problem, x, y, data)
        cells, bounds, settled = np.stack([lo, hi])[None], np.zeros(0), np.inf
        for _ in range(_PASSES):
            bounds = _in_batches(bound_of, cells)
            done = bounds >= lowest - tolerance
            settled = min(settled, bounds[done].min(initial=np.inf))
            cells, bounds = cells[~done], bounds[~done]
            if not len(cells) or 2 * len(cells) > _CELLS:
                break
            cells = _halve(cells)
        return float(min(settled, bounds.min(initial=np.inf)))
    except NotSupportedError:
        return None


def _in_batches(bound_of: Callable[[Array], Array], cells: np.ndarray) -> np.ndarray:
    padded = np.resize(cells, (-(-len(cells) // _BATCH) * _BATCH, *cells.shape[1:]))
    parts = [np.asarray(bound_of(jnp.asarray(part))) for part in padded.reshape(-1, _BATCH, *cells.shape[1:])]
    return np.nan_to_num(np.concatenate(parts)[: len(cells)], nan=-np.inf)


def _halve(cells: np.ndarray) -> np.ndarray:
    widest = np.argmax(cells[:, 1] - cells[:, 0], axis=1)
    rows = np.arange(len(cells))
    middle = cells[rows, :, widest].mean(axis=1)
    left, right = cells.copy(), cells.copy()
    left[rows, 1, widest] = middle
    right[rows, 0, widest] = middle
    return np.concatenate([left, right])


@quick_jit
def _bound_cells(problem: Problem, x: PyTree, y: PyTree, data: Any, cells: Array) -> Array:
    """Lower bounds of f over cells (count, 2, m): the better of the plain and, if f is steady, the mean-value form."""
    flat = flatten(problem, x, y, data)
    x_flat = jnp.asarray(ravel_pytree(x)[0], cells.dtype)

    def f(y):
        return flat.lower(x_flat, y)

    def bound(cell):
        box = Interval(cell[0], cell[1])
        plain = on_intervals(f, box).lo
        slope = on_intervals(jax.grad(f), box)
        centre = (box.lo + box.hi) / 2
        offset = _outward(Interval(box.lo - centre, box.hi - centre))
        terms = _mul(slope, offset)
        try:
            at_centre = on_intervals(f, Interval(centre, centre), steady=True).lo
        except NotSupportedError:
            return plain
        mean_value = _outward(Interval(at_centre + jnp.sum(terms.lo), at_centre)).lo
        return jnp.maximum(plain, jnp.where(jnp.isnan(mean_value), -jnp.inf, mean_value))

    return jax.vmap(bound)(cells)


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def on_intervals(f: Callable[[Array], Array], box: Interval, *, steady: bool = False) -> Interval:
    """An interval that contains f(y) for every y in the box; `steady` refuses an f that jumps."""
    closed = jax.make_jaxpr(f)(jax.ShapeDtypeStruct(box.lo.shape, box.lo.dtype))
    (out,) = _evaluate(closed.jaxpr, closed.consts, [box], steady)
    return out if isinstance(out, Interval) else Interval(out, out)


def _evaluate(jaxpr: Any, consts: Any, args: Any, steady: bool) -> list[Any]:
    known: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        outs = _apply(eqn, [read(atom) for atom in eqn.invars], steady)
        known.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(eqn: Any, args: list[Any], steady: bool) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if name in ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call") and inner is not None:
        return _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), args, steady)

    def bind(*values):
        out = eqn.primitive.bind(*values, **params)
        return out if eqn.primitive.multiple_results else [out]

    if not any(isinstance(arg, Interval) for arg in args):
        return bind(*args)
    if steady and (name == "sign" or not _is_float(eqn.outvars[0].aval.dtype)):
        raise NotSupportedError(f"the slope of {name}")
    if name in ("gather", "dynamic_slice") and any(isinstance(arg, Interval) for arg in args[1:]):
        raise NotSupportedError(f"{name} at a place that varies")
    if name in _DOMAIN:
        # Rounding outwards may have left the domain by a little.
        args = [Interval(*(jnp.maximum(end, _DOMAIN[name]) for end in args[0]))]
    if name in _RISING:
        lo, hi = ([arg[i] if isinstance(arg, Interval) else arg for arg in args] for i in (0, 1))
        return [_outward(Interval(*ends)) for ends in zip(bind(*lo), bind(*hi), strict=True)]
    if name == "select_n" and not isinstance(args[0], Interval):
        lo, hi = (bind(args[0], *(_whole(arg)[i] for arg in args[1:]))[0] for i in (0, 1))
        return [Interval(lo, hi)]
    if name == "dot_general" and sum(isinstance(arg, Interval) for arg in args) == 1:
        return [_outward(_dot(bind, args))]
    if name not in _RULES:
        raise NotSupportedError(name)
    return [_outward(_RULES[name](*(_whole(arg) for arg in args), **_options(name, params)))]


def _options(name: str, params: dict[str, Any]) -> dict[str, Any]:
    return {"power": params["y"]} if name == "integer_pow" else {}


def _whole(value: Any) -> Interval:
    return value if isinstance(value, Interval) else Interval(jnp.asarray(value), jnp.asarray(value))


def _outward(v: Interval) -> Interval:
    if not _is_float(v.lo.dtype):
        return v
    info = jnp.finfo(v.lo.dtype)
    return Interval(v.lo - 8 * info.eps * jnp.abs(v.lo) - info.tiny, v.hi + 8 * info.eps * jnp.abs(v.hi) + info.tiny)


def _mul(a: Interval, b: Interval) -> Interval:
    ends = [_product(one, two) for one in a for two in b]
    return Interval(functools.reduce(jnp.minimum, ends), functools.reduce(jnp.maximum, ends))


def _product(one: Array, two: Array) -> Array:
    # 0 · ∞ is 0 here: the zero end is exact.
    return jnp.where((one == 0) | (two == 0), jnp.where(jnp.isnan(one + two), jnp.nan, 0), one * two)


def _div(a: Interval, b: Interval) -> Interval:
    through_zero = (b.lo <= 0) & (b.hi >= 0)
    safe = Interval(jnp.where(through_zero, 1, b.lo), jnp.where(through_zero, 1, b.hi))
    out = _mul(a, _outward(Interval(1 / safe.hi, 1 / safe.lo)))
    return Interval(jnp.where(through_zero, -jnp.inf, out.lo), jnp.where(through_zero, jnp.inf, out.hi))


def _abs(a: Interval) -> Interval:
    inside = (a.lo <= 0) & (a.hi >= 0)
    low, high = jnp.abs(a.lo), jnp.abs(a.hi)
    return Interval(jnp.where(inside, 0, jnp.minimum(low, high)), jnp.maximum(low, high))


def _power(a: Interval, power: int) -> Interval:
    if power < 0:
        return _div(_whole(jnp.ones_like(a.lo)), _outward(_power(a, -power)))
    base = _abs(a) if power % 2 == 0 else a
    return Interval(base.lo**power, base.hi**power)


def _sin(a: Interval) -> Interval:
    def crosses(angle):
        # A margin makes up for the rounding of the angle; it can only widen the result.
        turns = 2 * jnp.pi
        return jnp.floor((a.hi - angle) / turns + 1e-12) > jnp.floor((a.lo - angle) / turns - 1e-12)

    low, high = jnp.minimum(jnp.sin(a.lo), jnp.sin(a.hi)), jnp.maximum(jnp.sin(a.lo), jnp.sin(a.hi))
    return Interval(jnp.where(crosses(-jnp.pi / 2), -1, low), jnp.where(crosses(jnp.pi / 2), 1, high))


_RISING = {
    *("add", "max", "min", "exp", "expm1", "log", "log1p", "sqrt", "tanh", "logistic", "atan", "sign", "cbrt"),
    *("reshape", "squeeze", "slice", "broadcast_in_dim", "dynamic_slice", "gather", "concatenate", "transpose"),
    *("convert_element_type", "reduce_sum", "reduce_max", "reduce_min", "copy", "rev", "add_any", "pad", "split"),
}
"""Operations that never fall when an argument rises: each end maps to an end."""

_DOMAIN = {"log": 0.0, "log1p": -1.0, "sqrt": 0.0}
"""where the arguments of some of them begin"""

_RULES: dict[str, Callable[..., Interval]] = {
    "sub": lambda a, b: Interval(a.lo - b.hi, a.hi - b.lo),
    "neg": lambda a: Interval(-a.hi, -a.lo),
    "mul": _mul,
    "div": _div,
    "abs": _abs,
    "integer_pow": _power,
    "square": lambda a: _power(a, 2),
    "sin": _sin,
    "cos": lambda a: _sin(_outward(Interval(a.lo + jnp.pi / 2, a.hi + jnp.pi / 2))),
}


def _dot(bind: Callable[..., Any], args: list[Any]) -> Interval:
    left = isinstance(args[0], Interval)
    box, matrix = (args[0], args[1]) if left else (args[1], args[0])
    middle, radius = (box.lo + box.hi) / 2, (box.hi - box.lo) / 2
    centre, reach = (
        bind(value, weight)[0] if left else bind(weight, value)[0]
        for value, weight in ((middle, matrix), (radius, jnp.abs(matrix)))
    )
    slack = 1e-14 * (jnp.abs(centre) + reach) * matrix.size
    return Interval(centre - reach - slack, centre + reach + slack)
