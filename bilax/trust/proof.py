"""Whether a point minimises f globally over a set: proven, refuted by a better point, or neither, with a bound.

f is bounded on intervals (`interval_rules`). Followers of a few variables are searched by branch and bound; separable
ones part by part; where f is proven convex, its tangent at the point bounds it everywhere.
"""

import time
from typing import NamedTuple

import numpy as np

from bilax.trust import interval as iv
from bilax.trust.branch_and_bound import (
    LIMIT,
    Domain,
    One,
    Parts,
    Search,
    descend,
    feel_about,
    least_eigenvalue,
    lowest_parabola,
)
from bilax.trust.interval import Interval
from bilax.trust.interval_rules import Traced
from bilax.trust.linear_rows import Rows
from bilax.trust.structure import Convexity, Separable, convexity, separate
from bilax.trust.wide_search import RELATIVE

_DENSE = 48
"""the most variables whose interval Hessian is formed as a whole"""
_FIRST_ROUNDS = 12
"""rounds of branch and bound before descents from all over the set"""
_AT_ONCE = 200_000
"""about how many numbers the descents may hold"""


class Evidence(NamedTuple):
    """What intervals tell of f at a point y and over the set."""

    value: Interval
    """f(y), as numbers"""
    tolerance: float
    residual: float
    drop: float
    local: float
    """f where the descent from y alone ended"""
    bowed: bool
    """whether f bends downwards at y in some direction"""
    point: np.ndarray
    lowest: Interval
    bound: float
    ends: np.ndarray
    """where descents ended"""
    finished: bool
    """whether the search ended before its time was up"""

    @property
    def proven(self) -> bool:
        return bool(np.isfinite(self.value.hi) and self.bound >= self.value.hi - self.tolerance)

    @property
    def refuted(self) -> bool:
        return bool(self.lowest.hi < self.value.lo - self.tolerance)


def examine(
    traced: Traced,
    domain: Domain,
    y: np.ndarray,
    samples: np.ndarray,
    tolerance: float | None,
    deadline: float,
    thorough: bool = False,
) -> Evidence | None:
    """Bounds and search together, for followers of few variables and for separable ones; None for others.

    `thorough`: descents from all over the set, also where the first bound has decided.

    Raises `NotSupportedError` where f has an operation without an interval rule.
    """
    parts: Parts | None = One(traced) if traced.size <= LIMIT else None
    if parts is None or (traced.size > 1 and domain.is_box):
        parts = (separate(traced, y) if domain.is_box else None) or parts
    if parts is None:
        return None
    with np.errstate(all="ignore"):
        return _examine(traced, domain, parts, y, samples, tolerance, deadline, thorough)


def _examine(
    traced: Traced,
    domain: Domain,
    parts: Parts,
    y: np.ndarray,
    samples: np.ndarray,
    tolerance: float | None,
    deadline: float,
    thorough: bool,
) -> Evidence:
    begin = time.monotonic()
    split = parts if isinstance(parts, Separable) else None
    rows = split.spread(y) if split else y[None]
    cells = domain._replace(lo=split.spread(domain.lo[0]), hi=split.spread(domain.hi[0])) if split else domain
    every = np.arange(parts.count)
    value = _at(traced, y)
    heights = traced.bounds(iv.point(samples), 0).value.middle
    residual, drop, bowed = _one_step(parts, cells, rows)
    local_rows, local_values = descend(parts, cells, every, rows, begin + 0.3 * (deadline - begin))
    local = split.gather(local_rows) if split else local_rows[0]
    if tolerance is None:
        tolerance = _tolerance(heights, value, parts.count)
    own = parts.bounds(every, iv.point(rows), 0).value
    target = own.hi - 0.9 * tolerance / parts.count
    constant = split.constant if split else iv.point(0.0)
    refute = float(value.lo - tolerance - constant.hi)
    search = Search(parts, cells, rows, own)
    search.improve(local_rows, every, local_values)
    outcome, ends = search.run(target, refute, deadline, rounds=_FIRST_ROUNDS), [local]
    decided = outcome.closed or outcome.lowest.hi.sum() < refute
    tangent = None
    if thorough or not decided:
        ends += _spread_descents(search, split, samples, heights, tolerance, begin + 0.5 * (deadline - begin))
        tangent = prove_convex(traced, domain, y) if not decided else None
        decided = decided or (tangent is not None and tangent[0] >= value.hi - tolerance)
        outcome = search.run(target, refute, deadline, 0 if decided else 1 << 60)
    if outcome.lowest.hi.sum() < refute:
        # The better point may only be the centre of a cell.
        search.improve(*_from(parts, cells, every, outcome.y, deadline))
        outcome = search.run(target, refute, deadline, 0)
    point = split.gather(outcome.y) if split else outcome.y[0]
    bound = float(constant.lo) + float(np.sum(outcome.bound))
    slack = 2.0**-52 * (parts.count + 2) * (abs(float(constant.lo)) + float(np.sum(np.abs(outcome.bound))))
    if tangent is not None:
        bound, slack = (tangent[0], 0.0) if tangent[0] > bound - slack else (bound, slack)
    return Evidence(
        value, tolerance, residual, drop, float(_at(traced, local).middle), bowed, point, _at(traced, point),
        bound - slack if np.isfinite(bound) else -np.inf, np.stack(ends), time.monotonic() < deadline,
    )  # fmt: skip


def _from(
    parts: Parts, cells: Domain, which: np.ndarray, points: np.ndarray, deadline: float
) -> tuple[np.ndarray, np.ndarray, Interval]:
    ends, values = descend(parts, cells, which, points, deadline)
    return ends, which, values


def _spread_descents(
    search: Search,
    split: Separable | None,
    samples: np.ndarray,
    heights: np.ndarray,
    tolerance: float,
    deadline: float,
) -> list[np.ndarray]:
    """Descents from points spread over the set, whose best the search takes over; where they ended."""
    parts, cells = search.parts, search.domain
    starts = _starts(samples, heights, int(np.clip(_AT_ONCE // samples.shape[1], 1, 31)))
    tables = np.concatenate([split.spread(samples[i]) if split else samples[i][None] for i in starts])
    which = np.tile(np.arange(parts.count), len(starts))
    found, values = descend(parts, cells, which, tables, deadline)
    search.improve(found, which, values)
    if split is None and _one_step(parts, cells, search.best)[1] > tolerance:
        # A slope that is left where descents ended tells of a kink.
        felt = feel_about(parts, cells, search.best[0])[None]
        search.improve(felt, np.zeros(1, int), parts.bounds(np.zeros(1, int), iv.point(felt), 0).value)
    if split is None:
        return list(found)
    return [split.gather(part) for part in found.reshape(len(starts), parts.count, -1)]


def _at(traced: Traced, point: np.ndarray) -> Interval:
    return _scalar(traced.bounds(iv.point(point[None]), 0).value)


def _scalar(value: Interval) -> Interval:
    return Interval(*(np.asarray(end).reshape(-1)[0] for end in value))


def _starts(samples: np.ndarray, heights: np.ndarray, count: int) -> np.ndarray:
    """The lowest half, and others that are only far apart; on a line every dip of the samples."""
    heights = np.where(np.isnan(heights), np.inf, heights)
    if samples.shape[1] == 1:
        order = np.argsort(samples[:, 0])
        along = np.concatenate([[np.inf], heights[order], [np.inf]])
        dips = order[(along[1:-1] <= along[:-2]) & (along[1:-1] <= along[2:])]
        return dips[np.argsort(heights[dips])][:count]
    lowest = np.argsort(heights)[: count // 2]
    return np.unique(np.concatenate([lowest, np.arange(min(count - count // 2, len(heights)))]))


def _tolerance(heights: np.ndarray, value: Interval, parts: int) -> float:
    """The largest gap that counts as none: a share of how much f varies over Y at this x, and what rounding can do.

    Of the samples a quarter lie below the height that counts, so that a few huge values far off do not. Of a sum of
    parts it is the share of one part: one part in a wrong place is no small matter, however many there are.
    """
    finite = heights[np.isfinite(heights)]
    lowest = float(np.minimum(value.middle, finite.min(initial=np.inf)))
    variation = float(np.quantile(finite, 0.25)) - lowest if finite.size else 0.0
    out = max(RELATIVE * variation / parts, 4 * float(value.width))
    return out if np.isfinite(out) else 0.0


def _one_step(parts: Parts, cells: Domain, rows: np.ndarray) -> tuple[float, float, bool]:
    """The residual ‖R_α(x, y)‖ / α with α = 1/L, what one step would gain, and whether f bends downwards."""
    at = parts.bounds(np.arange(parts.count), iv.point(rows), 2)
    slope, bend = (np.nan_to_num(part.middle, nan=0.0, posinf=0.0, neginf=0.0) for part in (at.slope, at.bend))
    widths = np.where(np.isfinite(cells.hi - cells.lo), cells.hi - cells.lo, 2 * np.maximum(1, np.abs(rows)))
    size = float(np.linalg.norm(slope))
    largest = max(float(np.linalg.norm(bend, axis=(1, 2)).max()), size / max(float(widths.mean()), 1e-300), 1e-300)
    residual = largest * float(np.linalg.norm(rows - cells.project(rows - slope / largest)))
    least = float(np.linalg.eigvalsh(bend)[:, 0].min())
    return residual, residual**2 / (2 * largest), least < -1e-8 * largest


def prove_convex(traced: Traced, domain: Domain, y: np.ndarray) -> tuple[float, Interval] | None:
    """A lower bound of f over the set from its tangent at y, and f(y), where f is proven convex; else None."""
    lo, hi = domain.lo[0], domain.hi[0]
    with np.errstate(all="ignore"):
        found = _convexity(traced, lo, hi, y)
        if found is None:
            return None
        slope, slack = found.slope, 0.0
        if domain.total is not None:
            # Steps on the simplex sum to zero, so a constant may be taken from all slopes.
            shift = float(np.sum(y * slope.middle)) / domain.total
            slope = iv.sub(slope, iv.point(np.full(y.shape, shift)))
            slack = 1e-13 * (1 + y.size) * abs(shift) * domain.total
        return _tangent(found, slope, lo, hi, y) - slack, _scalar(found.value)


def prove_convex_over_rows(traced: Traced, rows: Rows, y: np.ndarray) -> tuple[float, Interval] | None:
    """As `prove_convex`, over linear rows: multipliers take from the slope what the rows hold."""
    with np.errstate(all="ignore"):
        found = _convexity(traced, rows.lo, rows.hi, y)
        if found is None:
            return None
        best = -np.inf
        for by in rows.multipliers(np.nan_to_num(found.slope.middle), y):
            least = _tangent(found, rows.rest(found.slope, by), rows.lo, rows.hi, y)
            best = max(best, float(np.nextafter(least - rows.paid(by, y), -np.inf)))
        return best, _scalar(found.value)


def _convexity(traced: Traced, lo: np.ndarray, hi: np.ndarray, y: np.ndarray) -> Convexity | None:
    return convexity(traced, lo, hi, y) or (_dense_convexity(traced, lo, hi, y) if y.size <= _DENSE else None)


def _tangent(found: Convexity, slope: Interval, lo: np.ndarray, hi: np.ndarray, y: np.ndarray) -> float:
    """The least of f(y) + slope·(v − y) and the curvature's parabolas over v in the box, rounded downwards."""
    steps = iv.sub(Interval(lo, hi), iv.point(y))
    terms = np.minimum(*(lowest_parabola(end, found.curvature, steps) for end in slope))
    value = _scalar(found.value)
    size = float(abs(value.lo) + np.sum(np.abs(terms)))
    bound = float(value.lo + np.sum(terms)) - 4e-16 * (y.size + 2) * size
    return bound if np.isfinite(bound) else -np.inf


def _dense_convexity(traced: Traced, lo: np.ndarray, hi: np.ndarray, y: np.ndarray) -> Convexity | None:
    bend = traced.bounds(Interval(lo[None], hi[None]), 2).bend
    least = least_eigenvalue(bend, np.ones((1, y.size)))[0]
    if not least >= 0:
        return None
    at = traced.bounds(iv.point(y[None]), 1)
    return Convexity(at.value, Interval(*(end[0] for end in at.slope)), np.full(y.shape, least))
