"""A search for a better follower that keeps to a time limit, for followers of any size.

Cheap parts first: a descent from the point in question, then descents from points spread over Y, then scans along
single coordinates, which cross the barriers that stop a descent. The clock is read between the pieces, and what was
left out is told.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.optimize
import scipy.sparse.linalg
from jaxtyping import Array

from bilax.trust.flat_problem import FlatProblem
from bilax.trust.follower_minima import low_discrepancy

_DESCENTS, _LONGEST, _GRID = 48, 400, 1024
_LEAST = 20
"""evaluations that every descent may make, however late it is: whether y is stationary is always looked at"""
RELATIVE = 1e-6
"""the share of f's variation over Y that counts as no gap"""
_AT_ONCE = 4_000_000
"""about how many numbers one call may hold"""


class Found(NamedTuple):
    """What a search saw of f(x, ·)."""

    value: float
    """f at the point in question"""
    tolerance: float
    residual: float
    drop: float
    """what one descent step would gain"""
    local: float
    """where the descent from the point in question ended"""
    point: np.ndarray
    lowest: float
    ends: np.ndarray
    """where the descents ended"""
    left_out: tuple[str, ...]


class _LateError(Exception):
    """The time is up."""


class WideSearch:
    """The pieces of the search, compiled once."""

    def __init__(self, flat: FlatProblem, x: Array, y: np.ndarray, is_box: bool):
        self.flat, self.x, self.y, self.is_box = flat, x, y, is_box
        self.lo, self.hi = np.asarray(flat.y_range.lo), np.asarray(flat.y_range.hi)
        self.many = jax.jit(jax.vmap(lambda v: flat.lower(x, v)))
        self.slope = jax.jit(jax.value_and_grad(lambda v: flat.lower(x, v)))
        self.project = jax.jit(jax.vmap(flat.project_y))
        self.chunk = int(np.clip(_AT_ONCE // y.size, 1, 512))

    def values(self, points: np.ndarray) -> np.ndarray:
        """f at points, in pieces of one size."""
        values = self._in_pieces(self.many, points)
        return np.where(np.isnan(values), np.inf, values)

    def _in_pieces(self, function: Callable[..., Any], points: np.ndarray) -> np.ndarray:
        padded = np.resize(points, (-(-len(points) // self.chunk) * self.chunk, points.shape[1]))
        parts = [np.asarray(function(part)) for part in padded.reshape(-1, self.chunk, points.shape[1])]
        return np.concatenate(parts)[: len(points)]

    def project_all(self, points: np.ndarray) -> np.ndarray:
        if self.is_box:
            return np.clip(points, self.lo, self.hi)
        return np.asarray(self.project(points)) if len(points) == 1 else self._in_pieces(self.project, points)

    def sample(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Points spread over Y, and f there."""
        unit = low_discrepancy(min(count, max(8, _AT_ONCE // self.y.size)), self.y.size, 11)
        scales = np.asarray([1.0, 0.1, 0.01])[np.arange(len(unit)) % 3][:, None]
        points = self.project_all(self.flat.y_range.spread_known(unit, scales))
        return points, self.values(points)

    def descend(self, start: np.ndarray, scale: float, deadline: float) -> np.ndarray:
        """The end of a descent: L-BFGS within bounds, or projected steps on other sets."""
        if not self.is_box:
            return self._projected(start, deadline)
        best, count = start, 0

        def value(point):
            nonlocal best, count
            count += 1
            if time.monotonic() > deadline and count > _LEAST:
                raise _LateError
            height, slope = self.slope(point)
            best = np.array(point)
            return float(height) / scale, np.nan_to_num(np.asarray(slope)) / scale

        bounds = (
            None if not np.any(np.isfinite(self.lo) | np.isfinite(self.hi)) else scipy.optimize.Bounds(self.lo, self.hi)  # pyright: ignore
        )
        options = {"maxiter": _LONGEST, "maxfun": 2 * _LONGEST, "ftol": 0.0, "gtol": 1e-11, "maxcor": 20}
        try:
            with np.errstate(all="ignore"):
                return scipy.optimize.minimize(
                    value, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options
                ).x
        except _LateError:
            return best

    def _projected(self, start: np.ndarray, deadline: float) -> np.ndarray:
        point = start
        height, slope = (np.asarray(v) for v in self.slope(point))
        step = 1.0 / (np.linalg.norm(slope) + 1e-300)
        for count in range(_LONGEST):
            if (time.monotonic() > deadline and count > _LEAST) or not np.isfinite(step):
                break
            trial = self.project_all((point - step * slope)[None])[0]
            after, slope_after = (np.asarray(v) for v in self.slope(trial))
            if after < height:
                moved, turned = trial - point, slope_after - slope
                # Barzilai and Borwein's length, where the curvature met is positive.
                bend = float(moved @ turned)
                step = float(moved @ moved) / bend if bend > 0 else 2 * step
                point, height, slope = trial, after, slope_after
            else:
                step *= 0.25
                if step * np.linalg.norm(slope) < 1e-14 * (1 + np.linalg.norm(point)):
                    break
        return point

    def one_step(self, point: np.ndarray) -> tuple[float, float]:
        """The residual ‖R_α(x, y)‖ / α with α = 1/L, and what one descent step would gain."""
        slope = np.nan_to_num(np.asarray(self.slope(point)[1]))
        size, width = np.linalg.norm(slope), float(np.mean(np.asarray(self.flat.y_range.width)))
        largest = max(self._curvature(point, slope), size / width if width > 0 else 0.0, 1e-300)
        moved = self.project_all((point - slope / largest)[None])[0]
        residual = largest * float(np.linalg.norm(point - moved))
        return float(residual), float(residual**2 / (2 * largest))

    def _curvature(self, point: np.ndarray, slope: np.ndarray) -> float:
        try:
            product = jax.jit(lambda point, v: self.flat.hessian_product(self.x, point, v))
            if point.size <= 8:
                return float(np.linalg.norm([np.asarray(product(point, row)) for row in np.eye(point.size)]))
            operator = scipy.sparse.linalg.LinearOperator(
                (point.size, point.size),
                lambda v: np.asarray(product(point, v.ravel())),
                dtype=float,  # pyright: ignore
            )
            start = np.random.default_rng(7).normal(size=point.size)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = scipy.sparse.linalg.eigsh(
                    operator,
                    1,
                    v0=start,
                    ncv=min(20, point.size),
                    maxiter=3,
                    tol=0.01,  # pyright: ignore
                    return_eigenvectors=False,
                )
            return float(np.abs(found).max(initial=0.0))
        except scipy.sparse.linalg.ArpackNoConvergence as error:
            return float(np.abs(error.eigenvalues).max(initial=0.0)) or self._by_differences(point, slope)
        except (TypeError, NotImplementedError, scipy.sparse.linalg.ArpackError):
            return self._by_differences(point, slope)

    def _by_differences(self, point: np.ndarray, slope: np.ndarray) -> float:
        # For derivative rules of the user's own that cannot be differentiated again.
        direction = slope / max(np.linalg.norm(slope), 1e-300)
        length = 1e-6 * (1 + np.linalg.norm(point))
        return float(np.linalg.norm(np.asarray(self.slope(point + length * direction)[1]) - slope) / length)

    def scan(self, point: np.ndarray, height: float, deadline: float) -> tuple[np.ndarray, float, int]:
        """Coordinates one after the other, each set to the best of many values; how many were come to."""
        order = np.random.default_rng(3).permutation(self.y.size)
        even = np.linspace(0, 1, _GRID)
        jumps = 10.0 ** np.linspace(-4, 0, _GRID // 2)
        centre, width = np.asarray(self.flat.y_range.centre), np.asarray(self.flat.y_range.width)
        for count, i in enumerate(order):
            if time.monotonic() > deadline:
                return point, height, count
            low = self.lo[i] if np.isfinite(self.lo[i]) else centre[i] - width[i] / 2
            grid = np.concatenate([low + width[i] * even, point[i] + width[i] * jumps, point[i] - width[i] * jumps])
            trials = np.tile(point, (len(grid), 1)) if self.y.size * len(grid) <= _AT_ONCE else None
            if trials is None:
                grid = grid[:: -(-self.y.size * len(grid) // _AT_ONCE)]
                trials = np.tile(point, (len(grid), 1))
            trials[:, i] = grid
            trials = self.project_all(trials)
            values = self.values(trials)
            if values.min() < height:
                point, height = trials[np.argmin(values)], float(values.min())
        return point, height, self.y.size

    def run(self, deadline: float, tolerance: float | None, settled: Callable[[np.ndarray], bool]) -> Found:
        """Everything, as far as time allows.

        `settled(point)`: whether a proof is at hand where the first descent ended. Then nothing more is looked at, nor
        where that descent leads lower than y.
        """
        start = time.monotonic()
        self.slope(self.y)
        value = float(self.values(self.y[None])[0])
        for count in (1, 2):
            self.project_all(np.tile(self.y, (count, 1)))
        residual, drop = self.one_step(self.y)
        # What compiling took does not count: the projection onto a polyhedron takes seconds.
        begin = time.monotonic()
        deadline += begin - start
        points, heights = self.sample(1024)
        finite = heights[np.isfinite(heights)]
        floor = float(np.minimum(value, finite.min(initial=np.inf)))
        variation = max(float(np.quantile(finite, 0.25)) - floor, 0.0) if finite.size else 0.0
        noise = 64 * np.finfo(float).eps * (abs(value) if np.isfinite(value) else 0.0)
        if tolerance is None:
            tolerance = max(RELATIVE * variation, noise)
        scale = max(variation, noise, 1e-300)
        end = self.descend(self.y, scale, begin + 0.5 * (deadline - begin))
        local = float(self.values(end[None])[0])
        best, lowest = (end, local) if local < value else (self.y, value)
        ends, left_out = [end], ["not looked at: other basins, since the descent from y settles the matter"]
        if not settled(best) and not lowest < value - tolerance:
            best, lowest, more, left_out = self._spread(points, heights, best, lowest, scale, deadline)
            ends += more
        return Found(value, tolerance, residual, drop, local, best, lowest, np.stack(ends), tuple(left_out))

    def _spread(self, points, heights, best, lowest, scale, deadline):
        """Descents from the most promising points and from some that are only far apart; then scans."""
        begin = time.monotonic()
        order = np.argsort(heights)
        starts = np.unique(np.concatenate([order[: _DESCENTS // 2], np.arange(min(_DESCENTS // 2, len(order)))]))
        ends, ended, scanned = [], 0, self.y.size
        for i in starts:
            if time.monotonic() > begin + 0.6 * (deadline - begin):
                break
            end = self.descend(points[i], scale, begin + 0.7 * (deadline - begin))
            height = float(self.values(end[None])[0])
            ends.append(end)
            ended += 1
            if height < lowest:
                best, lowest = end, height
        for _ in range(2):
            point, height, scanned = self.scan(best, lowest, begin + 0.95 * (deadline - begin))
            if height >= lowest:
                break
            end = self.descend(point, scale, deadline)
            after = float(self.values(end[None])[0])
            best, lowest = (end, after) if after < height else (point, height)
            ends.append(best)
        return best, lowest, ends, _no_time_for(ended, len(starts), scanned, self.y.size)


def _no_time_for(descents: int, of_descents: int, scans: int, of_scans: int) -> list[str]:
    """In words what the time did not suffice for."""
    more = "give certify a larger time_limit"
    if not descents and not scans:
        return [
            f"nothing was searched: the time was up after the descent from y, so that none of the searches from other "
            f"points of Y was made, neither downhill from {of_descents} points spread over Y nor along each of the "
            f"{of_scans} coordinates of y; {more}"
        ]
    missed = []
    if descents < of_descents:
        missed.append(f"{of_descents - descents} of {of_descents} descents, downhill from points spread over Y")
    if scans < of_scans:
        missed.append(
            f"{of_scans - scans} of {of_scans} coordinates of y, each varied over its range, the others at rest"
        )
    return [f"there was no time for {' and for '.join(missed)}; {more}"] if missed else []
