"""Runs that are looked at a few times: whole programs, so that looking costs nothing."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bilax


class Curve(NamedTuple):
    """Where a run was, at evenly spaced moments of it."""

    seconds: float
    """that the whole run took"""
    computed: float
    """seconds of the processor, which others on the same machine hardly change"""
    x: np.ndarray
    """with an axis for the seeds, then one for the looks"""
    y: np.ndarray


def run(
    problem: bilax.Problem, method: Any, x0: Any, y0: Any, data: Any, every: int, looks: int, seed: int, seeds: int = 1
) -> Curve:
    """`looks` times `every` steps from the start by one seed, or by several together with batches of their own.

    The first run with new settings takes the time of compilation besides.
    """
    options: Any = {"data": data, "steps": looks * every, "record_every": every, "record": _point}
    options["key"] = jax.random.key(seed)
    began, computed = time.perf_counter(), time.process_time()
    if seeds == 1:
        found = bilax.solve(problem, method, x0, y0, **options)
    else:
        starts = (jnp.broadcast_to(part, (seeds, *np.shape(part))) for part in (x0, y0))
        found = bilax.multistart(problem, method, *starts, **options)
    spent = time.perf_counter() - began, time.process_time() - computed
    x_path, y_path = found.history.record
    return Curve(*spent, _joined(x_path, found.x, seeds, looks), _joined(y_path, found.z, seeds, looks))


class Watch:
    """A callback that looks at a run a few times, not counting what that takes, and ends it when its time is up.

    The clock starts after the first `every` steps, which contain the compilation.
    """

    every = 32

    def __init__(self, judge: Callable[[Any, Any], dict[str, float]], seconds: float, looks: int):
        self.judge, self.seconds, self.looks = judge, seconds, looks
        self.spent, self.since = 0.0, 0.0
        self.steps: list[int] = []
        self.times: list[float] = []
        self.values: list[dict[str, float]] = []

    def __call__(self, state: bilax.Snapshot, history: bilax.History) -> bool:
        if self.since:
            self.spent += time.process_time() - self.since
        done = self.spent >= self.seconds
        if done or self.spent >= self.seconds * (len(self.times) + 1) / self.looks:
            self.steps.append(int(state.step))
            self.times.append(self.spent)
            self.values.append(self.judge(np.asarray(state.x), state.z))
        self.since = time.process_time()
        return done


def _point(x: Any, z: Any, info: Any) -> Any:
    return x, z


def _joined(path: Any, end: Any, seeds: int, looks: int) -> np.ndarray:
    """The looks after the start: what was recorded before each part of the run but the first, and the end.

    A run that failed stays where it failed.
    """
    end = np.asarray(end) if seeds > 1 else np.asarray(end)[None]
    full = np.full((seeds, looks, *end.shape[1:]), np.nan, end.dtype)
    path = np.asarray(path) if seeds > 1 else np.asarray(path)[None]
    full[:, : path.shape[1]] = path
    return np.concatenate([full[:, 1:], end[:, None]], 1)
