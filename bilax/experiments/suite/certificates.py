"""Thousands of random followers whose answers are known or found on dense grids, to catch a certificate that is wrong.

Every follower is written once and evaluated twice: by JAX for `bilax.certify`, and by NumPy for the judge.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

import bilax
from bilax.app.show import Arg, Claim, Target, save_json, show_table, steps, stored_results

NUMPY = SimpleNamespace(
    **{name: getattr(np, name) for name in dir(np) if not name.startswith("_")},
    erf=scipy.special.erf,
    logsumexp=scipy.special.logsumexp,
    rule=lambda v: v,
)


@jax.custom_jvp
def _lying(v):
    return v


_lying.defjvp(lambda primals, tangents: (primals[0], jnp.clip(tangents[0], -1e-3, 1e-3)))
JAX = SimpleNamespace(
    **{name: getattr(jnp, name) for name in dir(jnp) if not name.startswith("_")},
    erf=jax.scipy.special.erf,
    logsumexp=jax.scipy.special.logsumexp,
    rule=_lying,
)


class Case(NamedTuple):
    """One follower with points to certify."""

    function: Callable[[Any, Any], Any]
    """f(module, y) for y of shape (m,), or (m, points) with NumPy; without offset and factor"""
    lo: np.ndarray
    hi: np.ndarray
    least: float | None = None
    """the least value, where it is known; −∞ where there is none"""
    minimiser: np.ndarray | None = None
    factor: float = 1.0
    offset: float = 0.0
    y_set: Any = None
    """Y, where it is no box"""
    others: tuple[np.ndarray, ...] = ()
    """further points to certify"""


def _box(rng: np.random.Generator, size: int = 1) -> tuple[np.ndarray, np.ndarray]:
    lo = rng.uniform(-3, 1, size)
    return lo, lo + rng.uniform(0.5, 4, size)


def polynomials(rng: np.random.Generator) -> Case:
    lo, hi = _box(rng)
    coefficients = rng.normal(size=rng.integers(3, 9))
    return Case(lambda xp, y: sum(c * y[0] ** i for i, c in enumerate(coefficients)), lo, hi)


def waves(rng: np.random.Generator) -> Case:
    lo, hi = _box(rng)
    a, w, p = rng.normal(size=4), rng.uniform(1, 25, 4), rng.uniform(0, 6, 4)
    bowl = rng.uniform(0, 0.5)
    return Case(lambda xp, y: sum(a[i] * xp.cos(w[i] * y[0] + p[i]) for i in range(4)) + bowl * y[0] ** 2, lo, hi)


def waves_in_two(rng: np.random.Generator) -> Case:
    c, k, q = rng.uniform(-0.5, 0.5, 2), rng.uniform(3, 10, 2), rng.uniform(0.5, 2.5, 2)

    def f(xp, y):
        bowl = 0.1 * ((y[0] - c[0]) ** 2 + (y[1] - c[1]) ** 2)
        return bowl - xp.cos(k[0] * (y[0] + q[0] * y[1])) * xp.cos(k[1] * (y[0] - q[1] * y[1]))

    return Case(f, np.full(2, -1.0), np.full(2, 1.0))


def needles(rng: np.random.Generator) -> Case:
    centre, width, depth = rng.uniform(-0.9, 0.9), 10.0 ** rng.uniform(-8, -0.5), rng.uniform(0.5, 3)

    def f(xp, y):
        return 0.3 * y[0] ** 2 - depth * xp.exp(-(((y[0] - centre) / width) ** 2))

    return Case(f, np.full(1, -1.0), np.full(1, 1.0), others=(np.full(1, centre),))


def ties(rng: np.random.Generator) -> Case:
    tilt = rng.choice([0.0, 0.0, 10.0 ** rng.uniform(-9, -1)])
    places, turn = rng.integers(1, 4), rng.uniform(0.5, 1.5)

    def wells(xp, y):
        return (y[0] ** 2 - turn**2) ** 2 + tilt * y[0]

    def wave(xp, y):
        return xp.cos(2 * np.pi * places * y[0]) + tilt * y[0]

    return Case(wells if rng.random() < 0.5 else wave, np.full(1, -2.0), np.full(1, 2.0), others=(np.full(1, turn),))


def flats(rng: np.random.Generator) -> Case:
    centre, radius, power = rng.uniform(-1, 1), rng.uniform(0, 1), int(rng.integers(1, 4))
    drop = rng.choice([0.0, rng.uniform(0, 1)])

    def f(xp, y):
        plain = xp.maximum(xp.abs(y[0] - centre) - radius, 0.0) ** power
        return plain + drop * xp.where(y[0] > 1.5, xp.tanh(1.5 - y[0]), 0.0)

    return Case(f, np.full(1, -2.0), np.full(1, 2.0))


def poles(rng: np.random.Generator) -> Case:
    p, kind = rng.uniform(-0.9, 0.9), rng.integers(4)
    if kind == 0:
        return Case(lambda xp, y: 1 / (y[0] - p), np.full(1, -1.0), np.full(1, 1.0), -np.inf)
    if kind == 1:
        return Case(lambda xp, y: xp.log(xp.abs(y[0] - p)) + y[0] ** 2, np.full(1, -1.0), np.full(1, 1.0), -np.inf)
    if kind == 2:
        return Case(lambda xp, y: 1 / (y[0] - p) ** 2 + 3 * xp.sin(5 * y[0]), np.full(1, -1.0), np.full(1, 1.0))
    return Case(lambda xp, y: y[0] / ((y[0] - p) ** 2 + 1e-4) + y[0] ** 2, np.full(1, -1.0), np.full(1, 1.0))


def offsets_and_factors(rng: np.random.Generator) -> Case:
    base = (polynomials, waves, ties, flats)[rng.integers(4)](rng)
    return base._replace(factor=10.0 ** rng.uniform(-12, 12), offset=rng.normal() * 10.0 ** rng.uniform(-3, 12))


def kinks(rng: np.random.Generator) -> Case:
    a, b = rng.uniform(-1, 1, 4), rng.uniform(0.2, 3, 4)

    def f(xp, y):
        rough = b[0] * xp.abs(y[0] - a[0]) - b[1] * xp.abs(y[0] - a[1]) + xp.maximum(b[2] * (y[0] - a[2]), -y[0])
        return rough + xp.clip(b[3] * y[0], -0.5, a[3] + 1) * xp.sin(4 * y[0])

    return Case(f, np.full(1, -2.0), np.full(1, 2.0))


def jumps(rng: np.random.Generator) -> Case:
    a, b, kind = rng.uniform(-1, 1, 3), rng.uniform(0.3, 2, 3), rng.integers(4)

    def f(xp, y):
        smooth = xp.sin(b[0] * 3 * y[0]) + 0.2 * (y[0] - a[0]) ** 2
        step = (
            xp.where(y[0] > a[1], b[1], -b[1] * y[0]),
            xp.floor(b[1] * 2 * y[0]),
            b[1] * xp.sign(y[0] - a[1]),
            b[1] * (y[0] > a[1]).astype(float),
        )[kind]
        return smooth + 0.5 * step

    return Case(f, np.full(1, -2.0), np.full(1, 2.0))


def open_ended(rng: np.random.Generator) -> Case:
    a, tilt, kind = rng.uniform(0.5, 3), rng.normal(), rng.integers(4)
    if kind == 0:
        return Case(lambda xp, y: (y[0] ** 2 - a) ** 2 / 8 + tilt * y[0], np.full(1, -np.inf), np.full(1, np.inf))
    if kind == 1:
        return Case(lambda xp, y: (y[0] - a) ** 2 + xp.sin(5 * y[0]), np.full(1, -np.inf), np.full(1, np.inf))
    if kind == 2:
        return Case(lambda xp, y: xp.exp(-y[0]) + a * y[0], np.zeros(1), np.full(1, np.inf))
    # Falls for ever, or only towards a value that it never takes.
    falls = -np.inf if tilt > 0 else 0.0
    slope = max(tilt, 0.0)
    return Case(lambda xp, y: xp.exp(-y[0]) - slope * y[0], np.zeros(1), np.full(1, np.inf), falls)


def separable(rng: np.random.Generator) -> Case:
    size = int(rng.integers(3, 13))
    c, k, height = rng.uniform(-2, 2, size), rng.uniform(1, 4, size), rng.uniform(0, 3, size)
    shape = (size, 1)

    def f(xp, y):
        away = y - c.reshape(shape[: y.ndim])
        return (away**2 + height.reshape(shape[: y.ndim]) * (1 - xp.cos(k.reshape(shape[: y.ndim]) * away))).sum(0)

    return Case(f, np.full(size, -4.0), np.full(size, 4.0), 0.0, c)


def convex(rng: np.random.Generator) -> Case:
    size = int(rng.integers(2, 25))
    root, centre = rng.normal(size=(size + 2, size)), rng.uniform(-1, 1, size)
    bounds = np.full(size, -np.inf if rng.random() < 0.5 else -3.0)

    def f(xp, y):
        away = root @ (y - centre.reshape((size,) + (1,) * (y.ndim - 1)))
        return (away**2).sum(0) + 0.1 * ((y - centre.reshape((size,) + (1,) * (y.ndim - 1))) ** 2).sum(0)

    return Case(f, bounds, -bounds, 0.0, centre)


def hidden_minimum(rng: np.random.Generator) -> Case:
    size = int(rng.integers(2, 5))
    w, centre, k = rng.normal(size=(size + 1, size)), rng.uniform(-0.7, 0.7, size), rng.uniform(2, 5)

    def f(xp, y):
        away = w @ (y - centre.reshape((size,) + (1,) * (y.ndim - 1)))
        return (away**2 + 1 - xp.cos(k * away)).sum(0) + xp.tanh(away[0]) ** 2

    return Case(f, np.full(size, -1.0), np.full(size, 1.0), 0.0, centre)


def lying_rules(rng: np.random.Generator) -> Case:
    base = waves(rng)
    return base._replace(function=lambda xp, y: xp.rule(base.function(xp, y)) + xp.rule(0.1 * y[0]))


def on_the_simplex(rng: np.random.Generator) -> Case:
    size, total = int(rng.integers(3, 6)), float(rng.choice([1.0, 0.4, 3.0]))
    y_set, most = bilax.Simplex(total), np.full(size, total)
    if rng.random() < 0.5:
        centre = total * rng.dirichlet(np.ones(size))
        weights = rng.uniform(0.5, 2, size)

        def bowl(xp, y):
            shape = (size,) + (1,) * (y.ndim - 1)
            return (weights.reshape(shape) * (y - centre.reshape(shape)) ** 2).sum(0)

        return Case(bowl, np.zeros(size), most, 0.0, centre, y_set=y_set)
    slope, bend = rng.normal(size=size), rng.uniform(0.1, 1, size)
    corners = total * slope - total**2 * bend
    best = int(np.argmin(corners))

    def hill(xp, y):
        shape = (size,) + (1,) * (y.ndim - 1)
        return (slope.reshape(shape) * y - bend.reshape(shape) * y**2).sum(0)

    return Case(hill, np.zeros(size), most, float(corners[best]), total * np.eye(size)[best], y_set=y_set)


def in_a_ball(rng: np.random.Generator) -> Case:
    size, radius = int(rng.integers(1, 4)), 10.0 ** rng.uniform(-1, 1)
    centre, slope = rng.normal(size=size) * 10.0 ** rng.uniform(-1, 1), rng.normal(size=size)
    slope /= np.linalg.norm(slope)
    least = float(slope @ centre) - radius
    rising = (lambda xp, t: t, lambda xp, t: xp.arctan(t), lambda xp, t: t + 0.9 * xp.sin(t))[rng.integers(3)]

    def f(xp, y):
        return rising(xp, (slope.reshape((size,) + (1,) * (y.ndim - 1)) * y).sum(0))

    y_set = bilax.Ball(radius, centre)
    lowest = float(rising(np, least))
    return Case(f, centre - radius, centre + radius, lowest, centre - radius * slope, y_set=y_set)


def undefined_in_part(rng: np.random.Generator) -> Case:
    a, b, kind = rng.uniform(-0.5, 0.5), rng.normal(size=3), rng.integers(6)
    powers = np.array([2.0, 3.0])

    def f(xp, y):
        v = y[0]
        smooth = b[0] * v + xp.sin(3 * v + b[1])
        return (
            lambda: smooth + xp.sqrt(v - a),
            lambda: smooth + xp.log(v - a),
            lambda: xp.where(xp.isnan(xp.log(v - a)), b[2], smooth),
            lambda: xp.where(xp.sqrt(v - a) < 10, smooth, b[2]),
            lambda: smooth + xp.nan_to_num(xp.arcsin(v / (abs(a) + 0.3)), nan=b[2]),
            lambda: smooth + (xp.stack([v - a, v - a]) ** powers.reshape(2, *[1] * v.ndim)).sum(0),
        )[kind]()

    return Case(f, np.full(1, -1.0), np.full(1, 1.0), -np.inf if kind == 1 else None)


def whole_numbers(rng: np.random.Generator) -> Case:
    scale, b, kind = 10.0 ** rng.uniform(0, 4), rng.normal(size=2), rng.integers(4)

    def f(xp, y):
        v = y[0]
        steps = (
            lambda: (scale * v).astype(xp.int32) * xp.int32(40_000),
            lambda: (10 * v).astype(xp.int64) ** 3,
            lambda: xp.abs((scale * v).astype(xp.int32)) - (5 * v).astype(xp.int32),
            lambda: (v > b[0]).astype(xp.int32) + (v < b[1]).astype(xp.int32) * 2,
        )[kind]()
        return b[0] * v + 1e-3 * steps.astype(float) + xp.cos(4 * v)

    return Case(f, np.full(1, -1.0), np.full(1, 1.0))


def compositions(rng: np.random.Generator) -> Case:
    size = int(rng.integers(1, 3))
    tree = _grow(rng, size, int(rng.integers(2, 5)))
    return Case(tree, np.full(size, -1.5), np.full(size, 1.5))


_ONES: list[Callable[[Any, Any], Any]] = [
    lambda xp, u: xp.sin(3 * u),
    lambda xp, u: xp.cos(5 * u),
    lambda xp, u: xp.exp(xp.tanh(u)),
    lambda xp, u: xp.sqrt(1 + u * u),
    lambda xp, u: xp.log(1.1 + u**2),
    lambda xp, u: xp.log1p(u**2),
    lambda xp, u: xp.expm1(xp.tanh(u)),
    lambda xp, u: xp.abs(u - 0.2),
    lambda xp, u: xp.maximum(u, 0.1),
    lambda xp, u: xp.logaddexp(0.0, 2 * u),
    lambda xp, u: xp.erf(u),
    lambda xp, u: xp.arctan(2 * u),
    lambda xp, u: xp.cosh(xp.tanh(u)) * xp.sinh(xp.sin(u)),
    lambda xp, u: (u**2 + 0.1) ** 1.5,
    lambda xp, u: (u**2 + 0.2) ** -0.7,
    lambda xp, u: xp.cbrt(u + 0.3),
    lambda xp, u: xp.tan(xp.tanh(u)),
    lambda xp, u: xp.clip(u, -0.4, 0.7),
    lambda xp, u: xp.tanh(u) ** 5,
    lambda xp, u: xp.arcsinh(u) - xp.arcsin(0.9 * xp.tanh(u)),
    lambda xp, u: xp.where(u > 0.3, u, 0.6 - u),
    lambda xp, u: xp.floor(2 * u) / 4,
    lambda xp, u: xp.prod(xp.stack([u, 1 + u, u - 0.5]), axis=0) / 4,
    lambda xp, u: xp.logsumexp(xp.stack([u, -2 * u, 0.5 + 0 * u]), axis=0),
    lambda xp, u: xp.exp2(xp.sin(u)) * xp.square(u),
    lambda xp, u: xp.cumsum(xp.stack([u, u**2, xp.sin(u)]), axis=0)[2],
]
_TWOS: list[Callable[[Any, Any, Any], Any]] = [
    lambda xp, u, v: u + v,
    lambda xp, u, v: u - 0.7 * v,
    lambda xp, u, v: u * v,
    lambda xp, u, v: u / (1.5 + xp.tanh(v)),
    lambda xp, u, v: xp.maximum(u, v),
    lambda xp, u, v: xp.minimum(u, v),
    lambda xp, u, v: xp.hypot(u, v + 2),
    lambda xp, u, v: (1.2 + xp.tanh(u)) ** xp.sin(v),
    lambda xp, u, v: xp.stack([u, v, u + v]).max(0),
]


def _grow(rng: np.random.Generator, size: int, depth: int) -> Callable[[Any, Any], Any]:
    if depth == 0:
        i, a, b = int(rng.integers(size)), rng.uniform(-2, 2), rng.uniform(-1, 1)
        return lambda xp, y: a * y[i] + b
    if rng.random() < 0.55:
        one, inner = _ONES[rng.integers(len(_ONES))], _grow(rng, size, depth - 1)
        return lambda xp, y: one(xp, inner(xp, y))
    two, left, right = _TWOS[rng.integers(len(_TWOS))], _grow(rng, size, depth - 1), _grow(rng, size, depth - 1)
    return lambda xp, y: two(xp, left(xp, y), right(xp, y))


FAMILIES: dict[str, Callable[[np.random.Generator], Case]] = {
    function.__name__.replace("_", " "): function
    for function in (
        *(polynomials, waves, waves_in_two, needles, ties, flats, poles, offsets_and_factors, kinks, jumps),
        *(open_ended, separable, convex, hidden_minimum, lying_rules, on_the_simplex, compositions),
        *(in_a_ball, undefined_in_part, whole_numbers),
    )
}


def judge(case: Case, extra: list[np.ndarray]) -> tuple[float, np.ndarray | None]:
    """The least value that NumPy finds, on a dense grid that is refined around its lowest points, and where."""
    if case.least is not None and case.minimiser is None:
        return case.least, None
    finite_lo, finite_hi = np.where(np.isfinite(case.lo), case.lo, -30.0), np.where(np.isfinite(case.hi), case.hi, 30.0)
    points = [
        point[:, None] for point in (*extra, *case.others, *(() if case.minimiser is None else (case.minimiser,)))
    ]
    if case.least is None:
        side = 200_001 if case.lo.size == 1 else 501
        axes = [np.linspace(low, high, side) for low, high in zip(finite_lo, finite_hi, strict=True)]
        grid = np.stack([axis.ravel() for axis in np.meshgrid(*axes)])
        values = _values(case, grid)
        step = (finite_hi - finite_lo) / (side - 1)
        seeds = list(np.argsort(values)[:: max(1, 1)][:6])
        points += [_zoom(case, grid[:, i], step, finite_lo, finite_hi) for i in seeds]
    together = np.concatenate(points, 1)
    values = _values(case, together)
    best = int(np.argmin(values))
    least = values[best] if case.least is None else min(case.least, values[best])
    return float(least), together[:, best]


def _zoom(case: Case, centre: np.ndarray, step: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    for _ in range(14):
        offsets = np.linspace(-1, 1, 41 if centre.size == 1 else 21)
        axes = [np.clip(c + s * offsets, low, high) for c, s, low, high in zip(centre, step, lo, hi, strict=True)]
        grid = np.stack([axis.ravel() for axis in np.meshgrid(*axes)])
        centre, step = grid[:, np.argmin(_values(case, grid))], step / 8
    return centre[:, None]


def _values(case: Case, points: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        values = np.broadcast_to(np.asarray(case.function(NUMPY, points), float), points.shape[1:])
    return np.where(np.isnan(values), np.inf, values)


class Finding(NamedTuple):
    """What certify said of one point, and what the judge says of that."""

    verdict: str
    false: str
    """"" or what is wrong"""


def try_case(case: Case, rng: np.random.Generator, time_limit: float) -> Iterator[Finding]:
    """Certifies the best point that is known, and one where a descent may end or that is drawn at random."""
    y_set = bilax.Box(case.lo, case.hi) if case.y_set is None else case.y_set
    problem = bilax.Problem(
        lambda x, y: y.sum(), lambda x, y: case.factor * case.function(JAX, y) + case.offset, y_set=y_set
    )
    least, best = judge(case, [])
    low, high = np.maximum(case.lo, -5.0), np.minimum(case.hi, 5.0)
    random = rng.uniform(low, high) if case.y_set is None else _project(y_set, rng.uniform(case.lo, case.hi))
    candidates = [_local_end(case, random, low, high) if case.lo.size == 1 and case.y_set is None else random]
    candidates += [] if best is None else [best]
    for y in (*candidates, *case.others):
        y = np.clip(y, case.lo, case.hi)
        found = bilax.certify(problem, SimpleNamespace(x=(), y=y), time_limit=time_limit)
        yield Finding(found.verdict.name, _fault(case, y, found, least))


def _project(y_set: Any, y: np.ndarray) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(y_set.project(jnp.asarray(y)))


def _local_end(case: Case, y: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """The bottom of the basin that a point on a line lies in, by walking down a fine grid."""
    grid = np.linspace(lo, hi, 20_001).T
    values = _values(case, grid)
    i = int(np.argmin(np.abs(grid[0] - y[0])))
    while 0 < i < grid.shape[1] - 1 and min(values[i - 1], values[i + 1]) < values[i]:
        i += 1 if values[i + 1] < values[i - 1] else -1
    return _zoom(case, grid[:, i], (hi - lo) / 20_000, lo, hi)[:, 0]


def _fault(case: Case, y: np.ndarray, found: bilax.Certificate, least: float) -> str:
    """What is wrong with a certificate, if anything."""
    value = float(_values(case, y[:, None])[0])
    other = np.asarray(found.y_lowest)
    tolerance = found.tolerance / case.factor
    rounding = 1e-12 * (1 + abs(value)) if np.isfinite(value) else 0.0
    if found.verdict is bilax.Verdict.global_follower:
        lowest = min(least, float(_values(case, other[:, None])[0]))
        return "false proof" if value - lowest > tolerance * (1 + 1e-6) + rounding else ""
    if found.verdict is bilax.Verdict.not_excluded:
        return ""
    inside = np.all(other >= case.lo - 1e-15) and np.all(other <= case.hi + 1e-15)
    inside &= case.y_set is None or np.allclose(_project(case.y_set, other), other, rtol=0, atol=1e-11)
    better = float(_values(case, other[:, None])[0]) <= value - tolerance * (1 - 1e-6) + rounding
    # At a pole NumPy and JAX may round to either side.
    return "" if inside and (better or case.least == -np.inf) else "false refutation"


@dataclasses.dataclass
class Certificates(Target):
    """Random followers of many families, each certified at several points and judged on dense grids."""

    each: Annotated[int, Arg(help="followers of each family")] = 120
    time_limit: Annotated[float, Arg(help="seconds for each certificate")] = 5.0

    name: ClassVar[str] = "certificates"
    claimant: ClassVar[str] = "what is to hold"

    def compute(self) -> dict[str, Any]:
        """Family by family, each stored when it is done; a run of the same settings that was ended is gone on with."""
        each = 3 if self.quick else self.each
        results = stored_results(self.path, self, ("redraw",)) or {}
        if results.get("families", {}).keys() >= FAMILIES.keys():
            results = {}
        results = {"each": each, "families": {}} | results
        with steps(len(FAMILIES), "certificates") as advance:
            for name, make in FAMILIES.items():
                if name not in results["families"]:
                    results["families"][name] = self._family(make, each, name)
                    save_json(self.path, self, results)
                advance(name)
        return results

    def _family(self, make: Callable[[np.random.Generator], Case], each: int, name: str) -> dict[str, Any]:
        counts: dict[str, Any] = {verdict.name: 0 for verdict in bilax.Verdict}
        faults, start = [], time.perf_counter()
        for i in range(each):
            rng = np.random.default_rng([self.seed, i, *name.encode()])
            for finding in try_case(make(rng), rng, self.time_limit):
                counts[finding.verdict] += 1
                faults += [f"follower {i}: {finding.false}"] if finding.false else []
        return counts | {"faults": faults, "seconds": time.perf_counter() - start}

    def show(self, results: dict[str, Any]) -> list[Path]:
        names = [verdict.name for verdict in bilax.Verdict]
        rows = [
            [name, *(family[n] for n in names), *_false(family["faults"]), family["seconds"]]
            for name, family in results["families"].items()
        ]
        title = f"{results['each']} followers of each family, certified at one to three points"
        columns = ["family", *(n.replace("_", " ") for n in names), "falsely proven", "falsely refuted", "seconds"]
        show_table(title, columns, rows)
        return []

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        families = results["families"].values()
        faults = [fault for family in families for fault in family["faults"]]
        proofs, refutations = _false(faults)
        total = sum(family[verdict.name] for family in families for verdict in bilax.Verdict)
        undecided = sum(family["not_excluded"] for family in families)
        return [
            Claim("no certificate says proven of a point that is not the lowest", f"{proofs} of {total}", not proofs),
            Claim(
                "no certificate refutes a point without a better one",
                f"{refutations} of {total}",
                not refutations,
            ),
            Claim("at most one in twenty is left open", f"{undecided} of {total}", undecided <= total / 20),
        ]


def _false(faults: list[str]) -> tuple[int, int]:
    """How many false proofs and false refutations."""
    proofs = sum("proof" in fault for fault in faults)
    return proofs, len(faults) - proofs
