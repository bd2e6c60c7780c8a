"""A check of φ's gradient against finite differences, that says which part of it is wrong.

Everything here runs in double precision, whatever the caller's setting, and reports plain numbers.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from bilax.gradient.phi import approximate
from bilax.gradient.tasks import Tasks, first_task
from bilax.methods.recipes import Method
from bilax.problem.checks import check_inside, check_objectives, check_point
from bilax.problem.precision import double_precision, in_double
from bilax.problem.problem import Problem
from bilax.problem.quick_jit import quick_jit
from bilax.problem.sets import Reals
from bilax.trust.flat_problem import FlatProblem, flatten
from bilax.trust.follower_minima import low_discrepancy


class GradientCheck(eqx.Module):
    """How φ's gradient compares with finite differences; made by `check_hypergradient`."""

    ok: bool
    errors: dict[str, float]
    """worst relative error on each side: x, z and, if there is one, context"""
    wrong: tuple[str, ...]
    """what is to blame, of: x, z, context, projection, selection, swapped"""
    words: str
    probes: int
    """points at which φ is smooth enough to compare"""

    def __str__(self) -> str:
        return self.words

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The numbers with their names."""
        return [(f"error in {side}", f"{error:.2g}") for side, error in self.errors.items()]


_FAULTS = {
    "x": "the x-gradient does not match finite differences",
    "z": "the z-gradient does not match finite differences",
    "context": "the pullback of `context` is wrong: differentiate it by itself, or look at its custom derivative",
    "projection": "it is wrong only where the follower touches its bounds: the derivative of Y's projection is missing",
    "selection": "it is wrong only where the chosen iterate is not the last: the derivative belongs to another k̄",
    "swapped": "the gradients of x and z are interchanged",
}

_SPANS = 4
"""directions in x, and in z, along which a probe compares"""


def check_hypergradient(
    problem: Problem,
    method: Method,
    x: PyTree,
    z: PyTree,
    *,
    data: tuple[Any, ...] = (),
    tasks: bool = False,
    tolerance: float = 1e-4,
    probes: int = 24,
) -> GradientCheck:
    """Compares ∇φ with central differences along random directions, and says which side is wrong.

    Beside (x, z) it looks at `probes` points spread around it and over the sets, because some faults show only
    where a bound is active or where k̄ < K. Points at which φ has a kink are left out. Rules that approximate on
    purpose (a window, an unfinished linear solve, first order) are found wrong by as much as they are.

    With `tasks` the leaves of the data have a leading axis, one entry per task, and φ is the mean over them
    (`bilax.Tasks`), as for `solve(..., tasks=True)`.
    """
    if not isinstance(method, Method):
        raise TypeError(f"method must be a bilax.Method such as bilax.iaptt_gm(40, 5e-4), got {method!r}.")
    if probes < 1 or not tolerance > 0:
        raise ValueError(f"probes must be at least 1 and tolerance positive, got {probes} and {tolerance}.")
    one = first_task(data) if tasks else data
    with double_precision():
        x, z = in_double(check_point("x", x, may_be_empty=True)), in_double(check_point("z", z))
        x, z = check_objectives(problem, check_inside("x", x, problem.x_set), check_inside("z", z, problem.y_set), one)
        size = ravel_pytree(x)[0].size + ravel_pytree(z)[0].size
        comparison = jax.device_get(_compare(problem, method, x, z, data, low_discrepancy(probes, size, 3), tasks))
        context_error = None
        if problem.context is not None:
            context_error = float(_context_error(problem, x, one))
            if context_error <= tolerance and _x_is_wrong(comparison, tolerance):
                context_error = _blame_on_context(problem, method, x, z, one, tolerance)
    return _judge(comparison, context_error, tolerance, method)


def _blame_on_context(problem: Problem, method: Method, x: PyTree, z: PyTree, data: Any, tolerance: float) -> float:
    """inf if φ is differentiated rightly once its context is given as plain numbers; else 0."""
    view = problem.view(x, *data)
    plain = dataclasses.replace(problem, x_set=Reals(), context=None)
    size = ravel_pytree(view)[0].size + ravel_pytree(z)[0].size
    without = jax.device_get(_compare(plain, method, view, z, data, low_discrepancy(8, size, 4), False))
    return 0.0 if _x_is_wrong(without, tolerance) else math.inf


def _x_is_wrong(comparison: "_Comparison", tolerance: float) -> bool:
    return bool(np.any(np.asarray(comparison.smooth) & (np.asarray(comparison.error_x) > tolerance)))


class _Comparison(NamedTuple):
    """Claimed gradient and finite differences at one probe; an array of each for all."""

    error_x: Array
    error_z: Array
    error_swapped: Array
    """what the error would be with the gradients of x and z interchanged"""
    smooth: Array
    """whether φ is smooth enough here to compare"""
    clipped: Array
    """whether the follower touches its bounds"""
    early: Array
    """whether k̄ < K"""


@quick_jit
def _compare(
    problem: Problem, method: Method, x: PyTree, z: PyTree, data: Any, unit: Array, tasks: bool
) -> _Comparison:
    flat = flatten(problem, x, z, first_task(data) if tasks else data)
    phi = approximate(problem, method)
    phi, flat_ys = (Tasks(phi), jax.vmap(flat.ravel)) if tasks else (phi, flat.ravel)
    x0, z0 = flat.ravel(x), flat.ravel(z)
    n = x0.size

    def phi_and_info(v):
        return phi(flat.unravel_x(v[:n]), flat.unravel_y(v[n:]), *data)

    def value(v):
        return phi_and_info(v)[0]

    def probe(i, unit):
        v = _probe_point(flat, x0, z0, i, unit)
        gradient = jax.grad(value)(v)
        spans = _directions(i, n, v.size)
        coarse, fine = (jax.vmap(lambda d, h=h: _difference(value, v, d, h))(spans) for h in (1e-5, 2.5e-6))
        size = jnp.abs(fine) + 1e-3 * jnp.linalg.norm(gradient) + 1e-6
        # Nothing can be compared where φ has a kink, or is not a number.
        comparable = jnp.isfinite(coarse + fine) & ~(jnp.abs(coarse - fine) > 1e-4 * size)
        error = jnp.abs(spans @ gradient - fine) / size
        error_x, error_z = jnp.max(error[:_SPANS], initial=0), jnp.max(error[_SPANS:], initial=0)
        info = phi_and_info(v)[1]
        swapped = jnp.full((), jnp.inf)
        if 2 * n == v.size and not tasks:
            # The part of the x-gradient that does not go through y cannot have been swapped.
            direct = jax.grad(flat.upper)(v[:n], flat.ravel(info.y))
            other = jnp.concatenate([gradient[n:] + direct, gradient[:n] - direct])
            swapped = jnp.max(jnp.abs(spans @ other - fine) / size)
        ends = jnp.stack([flat_ys(info.y), flat_ys(info.y_last)])
        clipped = jnp.any((ends <= flat.y_range.lo) | (ends >= flat.y_range.hi))
        return _Comparison(error_x, error_z, swapped, jnp.all(comparable), clipped, info.k_bar < method.inner_steps)

    return jax.lax.map(lambda args: probe(*args), (jnp.arange(unit.shape[0]), unit))


def _probe_point(flat: FlatProblem, x: Array, z: Array, i: Array, unit: Array) -> Array:
    """Half of the probes lie near the given point, a quarter anywhere in the sets, a quarter near their bounds."""
    n = x.size
    near = jnp.where(i % 2 == 0, 0.02 * (i > 0), 1.0)
    unit = jnp.where(i % 4 == 1, 0.05 * unit + 0.95 * (unit > 0.5), unit)
    far_x, far_z = flat.x_range.spread(unit[:n], 0.01), flat.y_range.spread(unit[n:], 0.01)
    return jnp.concatenate([flat.project_x(x + near * (far_x - x)), flat.project_y(z + near * (far_z - z))])


def _directions(i: Array, n: int, size: int) -> Array:
    """Random directions of probe `i`: _SPANS in x, the first n coordinates, then as many in z."""
    directions = jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (_SPANS, size), dtype=float)
    sides = jnp.stack([jnp.arange(size) < n, jnp.arange(size) >= n])
    return (sides[:, None] * directions).reshape(-1, size)


def _difference(value: Callable[[Array], Array], v: Array, direction: Array, h: float) -> Array:
    h = h * (1 + jnp.linalg.norm(v)) / (jnp.linalg.norm(direction) + 1e-300)
    return (value(v + h * direction) - value(v - h * direction)) / (2 * h)


@quick_jit
def _context_error(problem: Problem, x: PyTree, data: Any) -> Array:
    """The relative error of the context's pullback against central differences of the context itself."""
    v, unravel = ravel_pytree(x)

    def out(v):
        return ravel_pytree(eqx.filter(problem.view(unravel(v), *data), eqx.is_inexact_array))[0]

    direction = jax.random.normal(jax.random.key(1), v.shape, dtype=float)
    cotangent = jax.random.normal(jax.random.key(2), jax.eval_shape(out, v).shape, dtype=float)
    (pulled,) = jax.vjp(out, v)[1](cotangent)
    true = _difference(lambda v: jnp.vdot(out(v), cotangent), v, direction, 1e-6)
    return jnp.abs(jnp.vdot(pulled, direction) - true) / (jnp.abs(true) + 1e-9)


def _judge(comparison: _Comparison, context_error: float | None, tolerance: float, method: Method) -> GradientCheck:
    smooth = np.asarray(comparison.smooth)
    has_z = method.derivative.has_z_gradient(method.inner_steps)
    error_x = np.where(smooth, np.nan_to_num(comparison.error_x, nan=np.inf), 0)
    error_z = np.where(smooth, np.nan_to_num(comparison.error_z, nan=np.inf), 0) * has_z
    bad_x, bad_z = error_x > tolerance, error_z > tolerance
    bad = bad_x | bad_z
    context_is_wrong = context_error is not None and context_error > tolerance
    wrong = ["context"] if context_is_wrong else _common_cause(comparison, bad, tolerance)
    wrong += [side for side, bad_side in (("x", bad_x), ("z", bad_z)) if bad_side.any()]
    errors = {"x": float(error_x.max(initial=0)), "z": float(error_z.max(initial=0))}
    if context_error is not None:
        errors["context"] = context_error
    words = _in_words(errors, wrong, int(bad.sum()), int(smooth.sum()))
    return GradientCheck(bool(smooth.any()) and not wrong, errors, tuple(wrong), words, int(smooth.sum()))


def _common_cause(comparison: _Comparison, bad: np.ndarray, tolerance: float) -> list[str]:
    """What the bad probes have in common, if anything."""
    smooth = np.asarray(comparison.smooth)
    if not bad.any():
        return []
    if np.all(np.asarray(comparison.error_swapped)[smooth] <= tolerance):
        return ["swapped"]
    for cause, present in (("projection", comparison.clipped), ("selection", comparison.early)):
        absent = ~np.asarray(present)
        if smooth[absent].any() and not bad[absent].any():
            return [cause]
    return []


def _in_words(errors: dict[str, float], wrong: list[str], bad: int, smooth: int) -> str:
    if not smooth:
        return (
            "φ has a kink or is not finite at every probe: nothing can be compared. Give another point or more probes."
        )
    if not wrong:
        worst = max(errors.values())
        return f"∇φ agrees with finite differences at {smooth} points (largest relative error {worst:.1g})."
    return f"∇φ is wrong at {bad} of {smooth} points: " + "; ".join(_FAULTS[cause] for cause in wrong) + "."
