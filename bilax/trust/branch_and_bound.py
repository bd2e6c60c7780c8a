"""The lowest value of a function over a box, a simplex or a ball, from both sides: bounds and search together.

Cells of the set whose bound is too low are cut in two. The centres of open cells are points of the search, and descents
start from the lowest of them, so a cell that cannot be excluded is also where a better point is looked for.
"""

import time
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from bilax.trust import interval as iv
from bilax.trust.interval import Interval
from bilax.trust.interval_rules import Bounds, Traced

LIMIT = 6
"""The most variables that cells are cut in: each one more asks for many times the cells."""
_BATCH, _MOST_CELLS = 512, 300_000
_STARTS, _STEPS = 16, 30
_DESCENTS_AFTER = (16, 32, 64, 128, 512)
"""the rounds in which descents start from the lowest centres"""
_IDLE = 5
"""steps without gain after which descents end"""
_LAST_ROUNDS = 12
"""rounds that are still made once a proof is ruled out"""
_FAR = 1e9
"""how far out, in units of the point's size, unbounded cells are cut"""

_Left = tuple[Interval, np.ndarray, np.ndarray]
"""cells, their bounds and their parts"""


class Domain(NamedTuple):
    """Where the variables of each part live: a box, and perhaps only its points on a simplex or in a ball."""

    lo: np.ndarray
    """(parts, k), or (n, k) for n cells"""
    hi: np.ndarray
    total: float | None = None
    """what the coordinates of a simplex sum to; None for another set"""
    radius: float = np.inf
    centre: Any = 0.0
    """of the ball"""

    @property
    def simplex(self) -> bool:
        return self.total is not None

    @property
    def is_box(self) -> bool:
        return self.total is None and self.radius == np.inf

    def of(self, which: np.ndarray) -> "Domain":
        """The same, with a row for each of the parts `which`."""
        return self._replace(lo=self.lo[which], hi=self.hi[which])

    def project(self, points: np.ndarray) -> np.ndarray:
        """The nearest points of the set."""
        if self.total is not None:
            ordered = -np.sort(-points, axis=1)
            excess = (np.cumsum(ordered, 1) - self.total) / np.arange(1, points.shape[1] + 1)
            last = np.sum(ordered > excess, 1) - 1
            return np.maximum(points - excess[np.arange(len(points)), last][:, None], 0)
        points = np.clip(points, self.lo, self.hi)
        if self.radius == np.inf:
            return points
        away = points - self.centre
        norms = np.linalg.norm(away, axis=1, keepdims=True)
        return np.where(norms > self.radius, self.centre + away * (self.radius / np.where(norms > 0, norms, 1)), points)

    def cut(self, cells: Interval) -> tuple[Interval, np.ndarray]:
        """The cells without some of what lies outside the set, and which of them are not all outside."""
        lo, hi = cells
        if self.total is not None:
            rest_lo, rest_hi = lo.sum(1, keepdims=True) - lo, hi.sum(1, keepdims=True) - hi
            room = 1e-12 * self.total
            lo, hi = np.maximum(lo, self.total - rest_hi - room), np.minimum(hi, self.total - rest_lo + room)
            return Interval(np.minimum(lo, hi), hi), np.all(cells.lo <= hi, 1) & np.all(lo <= cells.hi, 1)
        nearest = np.linalg.norm(np.clip(self.centre, lo, hi) - self.centre, axis=1)
        return cells, nearest <= self.radius * (1 + 1e-12) + self._room

    def centres(self, cells: Interval, reference: np.ndarray) -> np.ndarray:
        """A point of each cell; of an unbounded one its end, or the reference."""
        lo, hi = cells
        middle = np.clip(lo / 2 + hi / 2, lo, hi)
        middle = np.where(np.isfinite(lo) & np.isinf(hi), lo, np.where(np.isinf(lo) & np.isfinite(hi), hi, middle))
        middle = np.where(np.isinf(lo) & np.isinf(hi), reference, middle)
        if self.total is not None:
            room = (hi - lo).sum(1, keepdims=True)
            share = np.clip((self.total - lo.sum(1, keepdims=True)) / np.where(room > 0, room, 1), 0, 1)
            middle = np.clip(lo + share * (hi - lo), lo, hi)
        return middle

    def holds(self, points: np.ndarray) -> np.ndarray:
        """Which points belong to the set, up to rounding where it is no box."""
        inside = np.all((points >= self.lo) & (points <= self.hi), 1)
        if self.total is not None:
            inside &= np.abs(points.sum(1) - self.total) <= 1e-14 * points.shape[1] * self.total
        return inside & (np.linalg.norm(points - self.centre, axis=1) <= self.radius * (1 + 1e-14) + self._room)

    @property
    def _room(self) -> float:
        """For the rounding of a point about the ball's centre."""
        return 1e-15 * float(np.linalg.norm(self.centre))


@runtime_checkable
class Parts(Protocol):
    """A function that is a sum of parts with variables of their own; most functions have one part, themselves."""

    @property
    def count(self) -> int: ...

    def bounds(self, which: np.ndarray, boxes: Interval, order: int) -> Bounds:
        """Enclosures of the parts `which` (n,) over boxes (n, k)."""
        ...


class One(NamedTuple):
    """A function as its only part."""

    traced: Traced
    count: int = 1  # pyright: ignore[reportIncompatibleMethodOverride]

    def bounds(self, which: np.ndarray, boxes: Interval, order: int) -> Bounds:
        return self.traced.bounds(boxes, order)


class Outcome(NamedTuple):
    """What a search found, for every part."""

    bound: np.ndarray
    """proven lower bounds"""
    y: np.ndarray
    """the lowest points found"""
    lowest: Interval
    """the values there"""
    closed: bool
    """whether no cell was left open"""
    cells: int
    """how many were looked at"""


def descend(
    parts: Parts, domain: Domain, which: np.ndarray, points: np.ndarray, deadline: float
) -> tuple[np.ndarray, Interval]:
    """The ends of damped Newton steps of the parts `which` from points (n, k), each taken only if it goes down.

    Eigenvalues of the Hessian enter by absolute value, so that saddles repel. Also f at the ends.
    """
    with np.errstate(all="ignore"):
        return _descend(parts, domain.of(which), which, domain.of(which).project(points), deadline)


def _descend(
    parts: Parts, domain: Domain, which: np.ndarray, points: np.ndarray, deadline: float
) -> tuple[np.ndarray, Interval]:
    found = parts.bounds(which, iv.point(points), 2)
    damping = np.maximum(1e-2 * np.linalg.norm(np.nan_to_num(found.slope.middle), axis=1), 1e-300)
    idle = 0
    for _ in range(_STEPS):
        if time.monotonic() > deadline or idle > _IDLE:
            break
        trials = domain.project(points + _newton(domain, points, found, damping))
        if np.array_equal(trials, points):
            break
        after = parts.bounds(which, iv.point(trials), 2)
        better = after.value.middle < found.value.middle
        gained = np.max((found.value.middle - after.value.middle)[better], initial=0.0)
        idle = idle + 1 if gained <= 1e-13 * np.max(np.abs(found.value.middle[better]), initial=0.0) else 0
        points = np.where(better[:, None], trials, points)
        found = Bounds(*(_where_rows(better, new, old) for new, old in zip(after, found, strict=True)))
        damping = np.clip(np.where(better, damping * 0.2, damping * 8), 1e-300, 1e300)
    return points, found.value


def feel_about(parts: Parts, domain: Domain, point: np.ndarray, rounds: int = 55) -> np.ndarray:
    """A point of the first part from which no step along a coordinate leads lower: for kinks, where slopes mislead."""
    sides = np.where(np.isfinite(domain.hi - domain.lo)[0], (domain.hi - domain.lo)[0], np.maximum(1, np.abs(point)))
    size = len(point)
    directions = np.concatenate([np.eye(size), -np.eye(size)])
    height, length = np.inf, 0.1
    for _ in range(rounds):
        trials = domain.project(np.concatenate([point[None], point + length * sides * directions]))
        values = parts.bounds(np.zeros(len(trials), int), iv.point(trials), 0).value.middle
        i = int(np.argmin(np.where(np.isnan(values), np.inf, values)))
        if values[i] < height:
            point, height = trials[i], values[i]
            if i:
                continue
        length *= 0.4
    return point


def _where_rows(rows: np.ndarray, new: Interval, old: Interval) -> Interval:
    return iv.where(rows.reshape(-1, *[1] * (new.lo.ndim - 1)), new, old)


def _newton(domain: Domain, points: np.ndarray, found: Bounds, damping: np.ndarray) -> np.ndarray:
    slope, bend = (np.nan_to_num(part.middle, nan=0.0, posinf=0.0, neginf=0.0) for part in (found.slope, found.bend))
    if domain.total is not None:
        held = (points <= 0) & (slope > np.sum(points * slope, 1, keepdims=True) / domain.total)
    else:
        held = ((points <= domain.lo) & (slope > 0)) | ((points >= domain.hi) & (slope < 0))
    free = (~held).astype(float)
    onto = free[:, :, None] * np.eye(points.shape[1])
    if domain.simplex:
        onto = onto - free[:, :, None] * free[:, None, :] / np.maximum(free.sum(1), 1)[:, None, None]
    slope = np.einsum("nij,nj->ni", onto, slope)
    values, vectors = np.linalg.eigh(onto @ bend @ onto)
    parts = np.einsum("nji,nj->ni", vectors, slope) / (np.abs(values) + damping[:, None])
    return -np.einsum("nij,nj->ni", vectors, parts)


class Search:
    """Branch and bound for the parts of f over their domains, until nothing is left below a target, or time is up."""

    def __init__(self, parts: Parts, domain: Domain, best: np.ndarray, lowest: Interval):
        """`best`: a point (k,) of each part, `lowest`: the values there."""
        self.parts, self.domain, self.best, self.lowest = (
            parts,
            domain,
            best.copy(),
            Interval(*(v.copy() for v in lowest)),
        )
        self.reference = best
        self.cells = Interval(domain.lo.astype(float), domain.hi.astype(float))
        self.which = np.arange(parts.count)
        self.bounds = np.full(parts.count, -np.inf)
        self.settled = np.full(parts.count, np.inf)
        self.rounds, self.seen, self.hopeless = 0, 0, 0

    def run(self, target: np.ndarray, refute: float, deadline: float, rounds: int = 1 << 60) -> Outcome:
        """`target`: what each part's bounds are to reach; a sum of values below `refute` ends the search."""
        self.deadline = deadline
        last = self.rounds + rounds
        with np.errstate(all="ignore"):
            while len(self.bounds) and self.lowest.hi.sum() >= refute and self.rounds < last:
                if time.monotonic() > deadline:
                    break
                # A cell that cannot be cut and stays below rules out a proof; a better point may still be found.
                self.hopeless += bool(np.any(self.settled < target))
                if len(self.bounds) > _MOST_CELLS or self.hopeless > _LAST_ROUNDS:
                    break
                self._round(target)
        bound = self.settled.copy()
        np.minimum.at(bound, self.which, self.bounds)
        return Outcome(bound, self.best, self.lowest, not len(self.bounds), self.seen)

    def _round(self, target: np.ndarray) -> None:
        behind = self.bounds - target[self.which]
        most = _BATCH * max(1, self.parts.count)
        order = np.argpartition(behind, most - 1)[:most] if len(behind) > most else np.arange(len(behind))
        rest = np.ones(len(self.bounds), bool)
        rest[order] = False
        cells, inside = self.domain.cut(_rows(self.cells, order))
        cells, before, which = _rows(cells, inside), self.bounds[order][inside], self.which[order][inside]
        new = cells, before, which
        if len(before):
            self.seen += len(before)
            new = self._examine(cells, before, which, target)
        self.cells = Interval(
            *(np.concatenate([old[rest], added]) for old, added in zip(self.cells, new[0], strict=True))
        )
        self.bounds = np.concatenate([self.bounds[rest], new[1]])
        self.which = np.concatenate([self.which[rest], new[2]])
        self.rounds += 1

    def _examine(self, cells: Interval, before: np.ndarray, which: np.ndarray, target: np.ndarray) -> _Left:
        """Bounds the cells; returns what of them is left to look at, with their bounds and parts."""
        centres = self._centres(cells, which)
        at = self.parts.bounds(which, iv.point(centres), 1)
        self._try(centres, which, at.value)
        over = self.parts.bounds(which, cells, 1)
        # What is not bounded over a bounded cell may have a pole there, across which no slope tells anything.
        bounded = np.isfinite(cells.lo).all(1) & np.isfinite(cells.hi).all(1)
        pole = bounded & ~(np.isfinite(over.value.lo) & np.isfinite(over.value.hi))
        over = over._replace(slope=everything_where(pole[:, None], over.slope))
        bounds = np.fmax(before, np.fmax(over.value.lo, self._by_slope(cells, centres, at, over.slope)))
        still = bounds < target[which]
        bend = None
        if np.any(still):
            bend = self.parts.bounds(which[still], _rows(cells, still), 2).bend
            bend = everything_where(pole[still][:, None, None], bend)
            second = self._by_bend(_rows(cells, still), centres[still], _take(at, still), bend)
            bounds[still] = np.fmax(bounds[still], second)
        done = bounds >= target[which]
        np.minimum.at(self.settled, which[done], bounds[done])
        if np.all(done) or bend is None:
            return _rows(cells, ~done), bounds[~done], which[~done]
        bend = Interval(*(end[~done[still]] for end in bend))
        slope = Interval(*(end[~done] for end in over.slope))
        return self._divide(_rows(cells, ~done), bounds[~done], which[~done], slope, bend)

    def _centres(self, cells: Interval, which: np.ndarray) -> np.ndarray:
        """The best point for the cell that holds it: where f is lowest its tangent bounds best."""
        centres = self.domain.centres(cells, self.reference[which])
        for point in (self.reference[which], self.best[which]):
            holding = np.all((cells.lo <= point) & (point <= cells.hi), 1)
            centres = np.where(holding[:, None], point, centres)
        return centres

    def _try(self, centres: np.ndarray, which: np.ndarray, values: Interval) -> None:
        self.improve(centres, which, values)
        # Only now and then: what a few bounds decide needs no descents.
        if self.rounds in _DESCENTS_AFTER:
            heights = np.where(np.isfinite(values.hi), values.hi, np.inf)
            starts = _first_of_each(which, heights, _STARTS)
            ends, values = descend(self.parts, self.domain, which[starts], centres[starts], self.deadline)
            self.improve(ends, which[starts], values)

    def improve(self, points: np.ndarray, which: np.ndarray, values: Interval) -> None:
        """Takes the points that lie below the best of their parts."""
        heights = np.where(self.domain.of(which).holds(points) & np.isfinite(values.hi), values.hi, np.inf)
        first = _first_of_each(which, heights, 1)
        first = first[heights[first] < self.lowest.hi[which[first]]]
        self.best[which[first]] = points[first]
        self.lowest.lo[which[first]], self.lowest.hi[which[first]] = values.lo[first], values.hi[first]

    def _shift(self, slope: Interval, weights: np.ndarray) -> Interval:
        """On the simplex steps sum to zero, so a constant may be taken from all slopes."""
        if self.domain.total is None:
            return slope
        middle = np.nan_to_num(slope.middle, nan=0.0, posinf=0.0, neginf=0.0)
        # A minimiser's slopes are equal where it is positive, so they count by the point's coordinates.
        middle = np.sum(weights * middle, 1, keepdims=True) / self.domain.total
        return iv.sub(slope, iv.point(np.broadcast_to(middle, slope.lo.shape)))

    def _by_slope(self, cells: Interval, centres: np.ndarray, at: Bounds, slope: Interval) -> np.ndarray:
        return mean_value(cells, centres, at.value, self._shift(slope, centres), self._slack(slope))

    def _by_bend(self, cells: Interval, centres: np.ndarray, at: Bounds, bend: Interval) -> np.ndarray:
        slope = self._shift(at.slope, centres)
        return second_order(cells, centres, at.value, slope, bend, self._slack(at.slope))

    def _slack(self, slope: Interval) -> np.ndarray:
        # Points of the simplex are only known to sum to its total up to rounding.
        if self.domain.total is None:
            return np.zeros(len(slope.lo))
        size = np.maximum(np.abs(slope.lo), np.abs(slope.hi)).max(1)
        return 1e-13 * self.domain.total * np.where(np.isfinite(size), size, 0)

    def _divide(self, cells: Interval, bounds: np.ndarray, which: np.ndarray, slope: Interval, bend: Interval) -> _Left:
        lo, hi = cells
        kept = np.zeros(len(lo), bool)
        if self.domain.is_box:
            # Where f only rises along a side, it is lowest at that side's beginning.
            rises, falls = (slope.lo >= 0) & np.isfinite(lo), (slope.hi <= 0) & np.isfinite(hi)
            kept = np.any((rises | falls) & (lo < hi), 1)
            lo, hi = np.where(falls & ~rises, hi, lo), np.where(rises, lo, hi)
        cut = ~kept
        side, faces = self._sides(
            lo[cut], hi[cut], Interval(*(e[cut] for e in slope)), Interval(*(e[cut] for e in bend))
        )
        rows = np.flatnonzero(cut)
        low, high = lo[rows, side], hi[rows, side]
        middle = _middle(low, high, self.reference[which[rows], side])
        left_hi, right_lo = hi[rows], lo[rows]
        left_hi[np.arange(len(rows)), side] = np.where(faces, low, middle)
        right_lo[np.arange(len(rows)), side] = np.where(faces, high, middle)
        far = np.isinf(lo[rows] + hi[rows]).any(1) & (
            np.abs(middle) > _FAR * (1 + np.abs(self.reference[which[rows]]).max(1))
        )
        stuck = ~(((low < middle) & (middle < high)) | faces) | far
        np.minimum.at(self.settled, which[rows][stuck], bounds[rows][stuck])
        on = rows[~stuck]
        new_lo = np.concatenate([lo[kept], lo[on], right_lo[~stuck]])
        new_hi = np.concatenate([hi[kept], left_hi[~stuck], hi[on]])
        again = np.concatenate([np.flatnonzero(kept), on, on])
        return Interval(new_lo, new_hi), bounds[again], which[again]

    def _sides(self, lo: np.ndarray, hi: np.ndarray, slope: Interval, bend: Interval) -> tuple[np.ndarray, np.ndarray]:
        """Which side of each cell to cut: the one along which f may vary most; and whether its ends are enough."""
        widths = hi - lo
        effect = widths * (slope.hi - slope.lo)
        known = np.isfinite(effect).all(1, keepdims=True)
        side = np.argmax(np.where(known, effect, widths), 1)
        if not self.domain.is_box:
            return side, np.zeros(len(lo), bool)
        # Where f bends downwards along a side, it is lowest at one of that side's ends.
        k = np.arange(lo.shape[1])
        hollow = (bend.hi[:, k, k] < 0) & (lo < hi) & np.isfinite(lo) & np.isfinite(hi)
        return np.where(hollow.any(1), np.argmax(hollow, 1), side), hollow.any(1)


def everything_where(chosen: np.ndarray, a: Interval) -> Interval:
    """a, and everything where chosen."""
    return Interval(np.where(chosen, -np.inf, a.lo), np.where(chosen, np.inf, a.hi))


def mean_value(
    cells: Interval, centres: np.ndarray, value: Interval, slope: Interval, slack: np.ndarray | float = 0.0
) -> np.ndarray:
    """f(c) + ∇f · d at its lowest, with f's value at the centres and its slopes all over the cells."""
    terms = iv.mul(slope, iv.sub(cells, iv.point(centres)))
    return _least_sum(value.lo, terms.lo, slack)


def second_order(
    cells: Interval,
    centres: np.ndarray,
    value: Interval,
    slope: Interval,
    bend: Interval,
    slack: np.ndarray | float = 0.0,
) -> np.ndarray:
    """f(c) + ∇f(c)·d + λ‖d‖²/2 at its lowest, with λ below every eigenvalue of the Hessian over the cell.

    Steps are counted in half widths, so that long and short sides weigh alike.
    """
    half = (cells.hi - cells.lo) / 2
    half = np.where(np.isfinite(half) & (half > 0), half, 1.0)
    curvature = least_eigenvalue(bend, half)
    steps = iv.div(iv.sub(cells, iv.point(centres)), iv.point(half))
    slope = iv.mul(slope, iv.point(half))
    lowest = np.minimum(*(lowest_parabola(end, curvature[:, None], steps) for end in slope))
    return _least_sum(value.lo, lowest, slack)


def _first_of_each(which: np.ndarray, heights: np.ndarray, count: int) -> np.ndarray:
    """The indices of the `count` lowest heights of every part."""
    order = np.lexsort((heights, which))
    ordered = which[order]
    starts = np.searchsorted(ordered, ordered, side="left")
    return order[np.arange(len(order)) - starts < count]


def _rows(cells: Interval, chosen: Any) -> Interval:
    return Interval(cells.lo[chosen], cells.hi[chosen])


def _take(at: Bounds, chosen: np.ndarray) -> Bounds:
    return Bounds(*(Interval(*(end[chosen] for end in part)) for part in at))


def _middle(lo: np.ndarray, hi: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Where to cut a side: an unbounded one at lengths that grow geometrically."""
    far = 4 * np.maximum(1, np.abs(np.where(np.isfinite(lo), lo, hi)))
    middle = np.where(np.isinf(hi), lo + far, np.where(np.isinf(lo), hi - far, lo / 2 + hi / 2))
    return np.where(np.isinf(lo) & np.isinf(hi), reference, middle)


def _least_sum(start: np.ndarray, terms: np.ndarray, slack: np.ndarray | float) -> np.ndarray:
    """start + Σ terms, rounded downwards; −∞ where it is no number."""
    total = start + terms.sum(1)
    size = np.abs(start) + np.abs(terms).sum(1)
    out = total - 4e-16 * (terms.shape[1] + 2) * size - slack - 1e-320
    return np.where(np.isnan(out), -np.inf, out)


def lowest_parabola(slope: np.ndarray, curvature: np.ndarray, steps: Interval) -> np.ndarray:
    """The least of slope · t + curvature · t² / 2 over t in the steps, rounded downwards."""

    def height(t):
        line = np.where((t == 0) | (slope == 0), 0.0, slope * t)
        bow = np.where((t == 0) | (curvature == 0), 0.0, curvature * t * t / 2)
        return line + bow - 1e-15 * (np.abs(line) + np.abs(bow))

    rising = curvature > 0
    turn = np.clip(-slope / np.where(rising, curvature, 1), steps.lo, steps.hi)
    # At the turning point the value is −slope²/2·curvature; a turn that is slightly off would lie above it.
    vertex = -(slope**2) / np.where(rising, 2 * curvature, 1) * (1 + 1e-15)
    inner = (turn > steps.lo) & (turn < steps.hi)
    at_turn = np.where(inner, vertex, height(turn))
    return np.where(rising, at_turn, np.minimum(height(steps.lo), height(steps.hi)))


def least_eigenvalue(bend: Interval, half: np.ndarray) -> np.ndarray:
    """A number below every eigenvalue of every symmetric matrix in the interval, scaled by `half` on both sides.

    Raising a diagonal entry never lowers an eigenvalue, so diagonals count by their lower ends. The others go by their
    middles and, by Weyl's inequality, at most the largest row sum of their radii away. The computed eigenvalues are
    exact for a matrix within a small multiple of ε‖M‖ (LAPACK's backward error), for which far more is allowed.
    """
    scale = half[:, :, None] * half[:, None, :]
    size = half.shape[1]
    diagonal = np.eye(size, dtype=bool)
    middle = np.where(diagonal, bend.lo, bend.middle) * scale
    radius = np.where(diagonal, 0.0, bend.hi / 2 - bend.lo / 2) * scale
    fine = np.isfinite(middle).all((1, 2)) & np.isfinite(radius).all((1, 2))
    matrix = np.where(fine[:, None, None], (middle + np.swapaxes(middle, 1, 2)) / 2, 0.0)
    values = np.linalg.eigvalsh(matrix)[:, 0] if len(matrix) else np.zeros(0)
    error = (radius.sum(2).max(1) if size else 0.0) * (1 + 1e-12) + 1e-13 * size * np.linalg.norm(matrix, axis=(1, 2))
    return np.where(fine, values - error, -np.inf)
