"""A proven lower bound of the leader's value over all x, by branch and bound over leader and follower together.

The optimistic problem asks for the least F(x, y) with f(x, y) ≤ f(x, w) for every w in Y. A cell of X × Y is done with
where F is bounded from below well enough, and holds no follower's answer where, all over it,

- f rises or falls along a coordinate of y that the cell does not bound Y in, so that no y in it is even stationary; or
- one *witness* w is better: f(x, y) − f(x, w) > 0. The difference is bounded as a whole, so that what x alone does to
  f cancels. (Mitsos, Lemonidis and Barton, Global solution of bilevel programs with a nonconvex inner program, 2008.)

What is left is cut in two. All bounds are by interval arithmetic, so that the result holds whenever the search ends.
"""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilax.trust import interval as iv
from bilax.trust.branch_and_bound import everything_where, mean_value, second_order
from bilax.trust.flat_problem import FlatProblem
from bilax.trust.follower_minima import descend, low_discrepancy
from bilax.trust.interval import Interval
from bilax.trust.interval_rules import Bounds, Traced

MOST_VARIABLES = 4
"""of leader and follower together: each one more asks for many times the cells"""
_BATCH, _MOST_CELLS = 256, 200_000
_SAMPLES, _STEPS = 64, 4
"""points of Y among which a cell's witness is looked for, and Newton steps from the best of them"""
_MARGIN = 1e-3
"""how far beyond a cell, in its widths, slopes are looked at: a kink may lie on its very edge"""


class _Cells(NamedTuple):
    box: Interval
    """(cells, n + m)"""
    bounds: np.ndarray
    """of F"""
    witnesses: np.ndarray
    """(cells, m)"""

    def take(self, chosen: np.ndarray) -> "_Cells":
        return _Cells(_rows(self.box, chosen), self.bounds[chosen], self.witnesses[chosen])


class LeaderBound:
    """Branch and bound for F over the pairs (x, y) with y a global minimiser of f(x, ·), over bounded boxes X and Y."""

    def __init__(self, flat: FlatProblem, y: np.ndarray):
        """`y`: a first witness."""
        self.flat, self.m = flat, y.size
        ranges = [tuple(np.asarray(end) for end in part[:2]) for part in (flat.x_range, flat.y_range)]
        self.lo, self.hi = (np.concatenate([one, two]) for one, two in zip(*ranges, strict=True))
        n, m = self.n, self.m = self.lo.size - y.size, y.size
        self.upper = Traced(lambda v: flat.upper(v[:n], v[n:]), n + m)
        self.lower = Traced(lambda v: flat.lower(v[:n], v[n:]), n + m)
        self.behind = Traced(lambda v: flat.lower(v[:n], v[n : n + m]) - flat.lower(v[:n], v[n + m :]), n + 2 * m)
        self.cells = _Cells(Interval(self.lo[None], self.hi[None]), np.full(1, -np.inf), y[None])
        self.settled, self.rounds = np.inf, 0
        samples = flat.y_range.spread_known(low_discrepancy(_SAMPLES, m, 5))
        self.better = jax.jit(jax.vmap(lambda x, w: _better(flat, jnp.asarray(samples), x, w)))

    def run(self, target: float, deadline: float, rounds: int = 1 << 60) -> float:
        """The least that F may be: at least `target` where the search ends in time."""
        last = self.rounds + rounds
        with np.errstate(all="ignore"):
            while 0 < len(self.cells.bounds) < _MOST_CELLS and time.monotonic() < deadline and self.rounds < last:
                self._round(target)
        return float(min(self.settled, self.cells.bounds.min(initial=np.inf)))

    def _round(self, target: float) -> None:
        order = np.argsort(self.cells.bounds, kind="stable")
        rest, cells = self.cells.take(order[_BATCH:]), self.cells.take(order[:_BATCH])
        self.rounds += 1
        cells = self._may_be_stationary(cells)
        if len(cells.bounds):
            cells = self._may_be_low(cells, target)
        if len(cells.bounds):
            cells = _halves(self._without_better(cells), self.hi - self.lo)
        self.cells = jax.tree.map(lambda *parts: np.concatenate(parts), rest, cells)

    def _may_be_stationary(self, cells: _Cells) -> _Cells:
        """The cells where no slope rules out a minimiser, cut to the face of Y that it must lie on."""
        lo, hi, n = *cells.box, self.n
        margin = np.where(np.arange(len(self.lo)) < n, 0.0, _MARGIN * (hi - lo) + 1e-9 * (self.hi - self.lo))
        wider = Interval(np.maximum(lo - margin, self.lo), np.minimum(hi + margin, self.hi))
        over = _trusted(self.lower.bounds(wider, 1))
        slope = over.slope
        rises, falls = slope.lo[:, n:] > 0, slope.hi[:, n:] < 0
        first, last = lo[:, n:] <= self.lo[n:], hi[:, n:] >= self.hi[n:]
        # Where f is nowhere defined, its lower bound is infinite.
        possible = ~np.any((rises & ~first) | (falls & ~last), 1) & (over.value.lo < np.inf)
        lo, hi = lo.copy(), hi.copy()
        lo[:, n:], hi[:, n:] = np.where(falls, hi[:, n:], lo[:, n:]), np.where(rises, lo[:, n:], hi[:, n:])
        return cells._replace(box=Interval(lo, hi)).take(possible)

    def _may_be_low(self, cells: _Cells, target: float) -> _Cells:
        """The cells where F is not bounded well enough."""
        bounds = np.fmax(cells.bounds, _below(self.upper, cells.box, target))
        done = bounds >= target
        self.settled = min(self.settled, bounds[done].min(initial=np.inf))
        return cells._replace(bounds=bounds).take(~done)

    def _without_better(self, cells: _Cells) -> _Cells:
        """The cells for which no witness is better than all y in them."""
        count, n = len(cells.bounds), self.n
        middle = cells.box.middle[:, :n]
        padded = [np.resize(part, (_BATCH, part.shape[1])) for part in (middle, cells.witnesses)]
        found = np.asarray(self.better(*padded))[:count]
        fine = np.isfinite(found).all(1) & np.all((found >= self.lo[n:]) & (found <= self.hi[n:]), 1)
        cells = cells._replace(witnesses=np.where(fine[:, None], found, cells.witnesses))
        box = Interval(*(np.concatenate([end, cells.witnesses], 1) for end in cells.box))
        beaten = _below(self.behind, box, np.nextafter(0.0, 1.0)) > 0
        if np.any(beaten):
            # A witness tells nothing of an x where f is undefined at it.
            there = Interval(*(np.concatenate([end[beaten, :n], end[beaten, -self.m :]], 1) for end in box))
            beaten[beaten] = self.lower.is_defined(there)
        return cells.take(~beaten)


def _better(flat: FlatProblem, samples: Array, x: Array, w: Array) -> Array:
    """The lowest of f(x, ·) that a few steps from the best sample and from w lead to."""

    def f(y):
        return flat.lower(x, y)

    lowest = samples[jnp.argmin(jnp.nan_to_num(jax.vmap(f)(samples), nan=jnp.inf))]
    ends = jax.vmap(lambda y: descend(f, flat.project_y, y, _STEPS))(jnp.stack([w, lowest]))
    ends = jnp.concatenate([ends, w[None], lowest[None]])
    return ends[jnp.argmin(jnp.nan_to_num(jax.vmap(f)(ends), nan=jnp.inf))]


def _below(traced: Traced, cells: Interval, target: float) -> np.ndarray:
    """Lower bounds of a function over cells; the second derivatives are asked only for what is below the target."""
    centres = np.clip(cells.middle, *cells)
    at, over = traced.bounds(iv.point(centres), 1), _trusted(traced.bounds(cells, 1))
    out = np.fmax(over.value.lo, mean_value(cells, centres, at.value, over.slope))
    still = out < target
    if np.any(still):
        some = _rows(cells, still)
        bend = _trusted(traced.bounds(some, 2)).bend
        values, slopes = (Interval(*(end[still] for end in part)) for part in (at.value, at.slope))
        out[still] = np.fmax(out[still], second_order(some, centres[still], values, slopes, bend))
    return out


def _trusted(over: Bounds) -> Bounds:
    """What is not bounded over a cell may have a pole there, across which no slope tells anything."""
    pole = ~(np.isfinite(over.value.lo) & np.isfinite(over.value.hi))
    slope, bend = everything_where(pole[:, None], over.slope), everything_where(pole[:, None, None], over.bend)
    return Bounds(over.value, slope, bend)


def _halves(cells: _Cells, widths: np.ndarray) -> _Cells:
    """Each cell cut across its side that is longest for its kind; one that cannot be cut stays as it is."""
    lo, hi = cells.box
    row = np.arange(len(lo))
    side = np.argmax((hi - lo) / np.where(widths > 0, widths, 1), 1)
    middle = lo[row, side] / 2 + hi[row, side] / 2
    left, right = hi.copy(), lo.copy()
    left[row, side], right[row, side] = middle, middle
    box = Interval(np.concatenate([lo, right]), np.concatenate([left, hi]))
    return _Cells(box, np.tile(cells.bounds, 2), np.tile(cells.witnesses, (2, 1)))


def _rows(cells: Interval, chosen: np.ndarray) -> Interval:
    return Interval(cells.lo[chosen], cells.hi[chosen])
