"""The best F of each everyday problem, by a search in SciPy over the judge's value(x)."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import optimize
from scipy.stats import qmc

from bilax.experiments.everyday.judges import Judge, ravel, unravel

GRID, STARTS, HOPS, FEW = 121, 16, 96, 5


class Best(NamedTuple):
    """What the search found."""

    start: float
    """value(x0)"""
    local: float
    """L-BFGS-B from x0 alone"""
    best: float
    x: list[float]
    how: str
    seconds: float


class _Search(NamedTuple):
    value: Callable[[np.ndarray], float]
    slope: Any
    """the gradient of value, or how to take differences"""
    start: Float[np.ndarray, " n"]
    limits: list[tuple[float, float]]
    """that x must keep"""
    lo: Float[np.ndarray, " n"]
    hi: Float[np.ndarray, " n"]
    """between which to look"""


def search(judge: Judge, x0: Any) -> Best:
    """A dense grid for one variable, differential evolution for a few, many starts and hops for more."""
    began = time.perf_counter()
    start = ravel(x0)
    lo, hi = (np.broadcast_to(end, start.shape) for end in judge.within or judge.bounds)
    limits = [np.broadcast_to(end, start.shape).tolist() for end in judge.bounds]
    task = _Search(
        lambda v: judge.value(unravel(v, x0)), judge.slope or "3-point", start, list(zip(*limits, strict=True)), lo, hi
    )
    first = _descend(task, start)
    look = _grid if len(start) == 1 else _evolution if len(start) <= FEW else _many_starts
    found, how = look(task, first.x)
    best = min((first, found), key=lambda end: end.fun)
    seconds = time.perf_counter() - began
    return Best(task.value(start), float(first.fun), float(best.fun), best.x.tolist(), how, seconds)


def _descend(task: _Search, start: Float[np.ndarray, " n"]) -> Any:
    """L-BFGS-B, begun anew where it stops as long as that helps, for value(x) may have kinks."""
    options = {"maxiter": 300, "maxfun": 10**6, "ftol": 1e-13, "gtol": 1e-9}
    last = np.inf
    while True:
        end = optimize.minimize(
            task.value, start, jac=task.slope, method="L-BFGS-B", bounds=task.limits, options=options
        )
        if not end.fun < last - 1e-6 * abs(end.fun):
            return end
        start, last = end.x, end.fun


def _grid(task: _Search, x: Float[np.ndarray, " 1"]) -> tuple[Any, str]:
    places = np.linspace(task.lo[0], task.hi[0], GRID)
    k = int(np.argmin([task.value(np.array([place])) for place in places]))
    ends = places[max(k - 1, 0)], places[min(k + 1, GRID - 1)]
    end: Any = optimize.minimize_scalar(
        lambda v: task.value(np.array([v])), bounds=ends, method="bounded", options={"xatol": 1e-9}
    )
    end.x = np.array([end.x])
    return end, f"a grid of {GRID} points and Brent's method around the best"


def _evolution(task: _Search, x: Float[np.ndarray, " n"]) -> tuple[Any, str]:
    limits = list(zip(task.lo, task.hi, strict=True))
    end = optimize.differential_evolution(task.value, limits, x0=x, maxiter=60, tol=1e-10, rng=0, polish=False)
    options = {"xatol": 1e-9, "fatol": 1e-13, "maxiter": 2000}
    end = optimize.minimize(task.value, end.x, method="Nelder-Mead", bounds=task.limits, options=options)
    return end, "differential evolution, then Nelder and Mead's simplex"


def _many_starts(task: _Search, x: Float[np.ndarray, " n"]) -> tuple[Any, str]:
    """L-BFGS-B from anywhere and from around x0, then again and again from the best with a few variables drawn anew."""
    rng, width = np.random.default_rng(0), task.hi - task.lo
    anywhere = task.lo + qmc.Sobol(len(x), rng=rng).random(STARTS) * width
    around = np.clip(task.start + 0.1 * width * rng.normal(size=(STARTS, len(x))), task.lo, task.hi)
    best = min((_descend(task, start) for start in (x, *anywhere, *around)), key=lambda end: end.fun)
    for _ in range(HOPS):
        start, drawn = best.x.copy(), rng.choice(len(x), rng.integers(1, 6), replace=False)
        start[drawn] = rng.uniform(task.lo[drawn], task.hi[drawn])
        best = min(best, _descend(task, start), key=lambda end: end.fun)
    return best, f"L-BFGS-B from {2 * STARTS} more starts and {HOPS} hops from the best"
