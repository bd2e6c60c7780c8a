"""What `solve` returns: the end point, how the run ended, and what happened on the way."""

import dataclasses
import enum
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

NEIGHBOURS, PASSED = 9, 0.1
"""a run is told to have passed its lowest F where it lost again this part of what it had gained, each the middle one of
so many neighbours"""


class Status(enum.IntEnum):
    """How a run ended; `message` says what to try next."""

    running = 0
    step_limit = 1
    converged = 2
    diverged = 3
    non_finite = 4
    linear_solve_failed = 5
    stopped_by_callback = 6
    time_limit = 7
    data_ended = 8
    interrupted = 9
    terminated = 10
    doubtful = 11

    def __str__(self) -> str:
        return self.name

    @property
    def message(self) -> str:
        """One sentence for a person."""
        return _MESSAGES[self]

    @property
    def failed(self) -> bool:
        """Whether the run broke off at a point it could not go on from."""
        return self in (Status.diverged, Status.non_finite, Status.linear_solve_failed)


_MESSAGES = {
    Status.running: "The run has not ended.",
    Status.step_limit: "All outer steps were taken; give more `steps`, or a `tolerance`, if it was still moving.",
    Status.converged: "The run has settled: the leader's next step and the follower's residual are within tolerance.",
    Status.diverged: (
        "The follower or F grew without bound, or left the finite numbers. Make step_size smaller (below 2/L, L the "
        "curvature of `lower` in y) or leave it out (step_size=None finds it); where x ran away, make the outer step "
        "smaller; bound x and y with x_set and y_set, or use bilax.auto()."
    ),
    Status.non_finite: (
        "An objective or a gradient became NaN or infinite while the follower stayed finite. Make the outer "
        "step smaller, or look for log, sqrt and division near zero in `upper` and `lower`."
    ),
    Status.linear_solve_failed: (
        "The linear system of the implicit gradient was not solved to its tolerance: the follower is not strongly "
        "convex there, as networks never are, or single precision does not reach so far. For a network accept a "
        "truncated solve, Implicit(tolerance=None); else use bilax.auto(), which computes in double precision, or set "
        "jax.config.update('jax_enable_x64', True); give Implicit more max_steps; where the follower is not convex, "
        "use iaptt_gm."
    ),
    Status.stopped_by_callback: "A callback ended the run.",
    Status.time_limit: (
        "The time limit was reached: give it more time, or begin again at solution.x; a run with `saving` can resume."
    ),
    Status.data_ended: "The data ended before the steps did; give an iterable that goes on, or fewer steps.",
    Status.interrupted: "Ctrl-C ended the run; resume=True goes on from here if it was being saved.",
    Status.doubtful: (
        "Where the run ended the follower is not at its minimum (a lower one was found, its residual is large, y lies "
        "outside of Y) or has no single one, so F there is not one that it grants. What `auto` found stands in "
        "`solution.plan`; with other methods give the follower more steps or a smaller follower_tolerance. With up to "
        "six variables bilax.solve_global finds the answer."
    ),
    Status.terminated: "SIGTERM ended the run after it was saved; resume=True goes on from here.",
}


def _how(solution: "Solution") -> str:
    return f"{solution.ended.name} after {np.max(solution.steps)} outer steps. {solution.ended.message}"


class BilevelError(RuntimeError):
    """Raised by `solve(throw=True)` where a run breaks off; `solution` is the last finite point."""

    def __init__(self, solution: "Solution"):
        super().__init__(_how(solution))
        self.solution = solution


class Interrupted(KeyboardInterrupt):
    """Raised where Ctrl-C ended a run, or SIGTERM one that is saved, once it is safe; `solution` is where it was."""

    def __init__(self, solution: "Solution"):
        super().__init__(_how(solution))
        self.solution = solution


class History(NamedTuple):
    """One entry per outer step, taken at the (x, z) that the step started from; with `solve(record_every=n)` per n."""

    upper: Any
    """φ(x, z) = F(x, y_k̄)"""
    lower: Any
    """f(x, y_k̄)"""
    residual: Any
    """‖R_α(x, y_k̄)‖"""
    k_bar: Any
    """0 for algorithms that do not choose an iterate"""
    grad_x_norm: Any
    grad_z_norm: Any
    """zero for starts that are not optimised"""
    follower_steps: Any = ()
    """how many steps the follower took; 0 where the method does not tell"""
    record: Any = ()
    """what `solve(record=...)` returned"""


class Solution(eqx.Module):
    """Where the run ended (where it failed: the best solved point before), and how it got there.

    - `x`, `y`: the leader's variables and the follower's answer to them, y_k̄(x, z); `z`: where the follower starts.
    - `upper`, `lower`, `residual`, `k_bar`: F and f at (x, y), how far y is from stationary, and the chosen step.
    - `status`: a `Status`, whose `message` says what to try next; from `multistart` an array of its values.
    - `steps`, `history`: outer steps taken, and what was recorded at each.
    - `plan`: what `bilax.auto()` chose, why, and what it noticed at the end.
    """

    x: PyTree
    y: PyTree
    """y_k̄(x, z)"""
    z: PyTree
    """where the follower starts"""
    upper: Any
    lower: Any
    residual: Any
    k_bar: Any
    status: Any
    """a `Status`; from `multistart` an array of its values"""
    steps: Any
    """outer steps taken"""
    history: History
    plan: Any = eqx.field(static=True, default=None)
    """what `bilax.auto()` chose, and why"""
    record_every: int = eqx.field(static=True, default=1)
    """outer steps to one entry of the history"""

    @property
    def ended(self) -> Status:
        """How the run ended; of several starts, how the one ended that is most to be worried about."""
        statuses = [Status(int(status)) for status in np.atleast_1d(self.status)]
        return max(statuses, key=lambda status: (status.failed, status))

    def __repr__(self) -> str:
        if np.ndim(self.steps):
            counts = {Status(int(s)).name: int(np.sum(self.status == s)) for s in np.unique(self.status)}
            return f"Solution({len(self.steps)} runs: {counts}, best upper={float(self.best.upper):.6g})"
        chosen = f", k_bar={float(self.k_bar):g}" if self.k_bar else ""  # 0: the method chooses no iterate
        return (
            f"Solution({self.status.name} after {self.steps} steps: upper={float(self.upper):.6g}, "
            f"lower={float(self.lower):.6g}, residual={float(self.residual):.3g}{chosen}{self._passed()})"
        )

    def _passed(self) -> str:
        """Where a single run passed an F clearly lower than its last, with a follower as well solved."""
        if np.ndim(self.steps) or len(self.history.upper) < 2 * NEIGHBOURS:
            return ""
        # Of a few neighbours the middle one, for batches of data make single values wander.
        upper, residual = (
            np.median(np.lib.stride_tricks.sliding_window_view(np.asarray(values, float), NEIGHBOURS), axis=1)
            for values in (self.history.upper, self.history.residual)
        )
        solved = np.where(residual <= 2.0 * residual[-1], upper, np.inf)
        lowest = int(np.argmin(solved))
        if not upper[-1] - upper[lowest] > PASSED * (upper[0] - upper[lowest]) > 0:
            return ""
        step = (lowest + NEIGHBOURS // 2) * self.record_every
        return f", but upper={upper[lowest]:.6g} near step {step}: make the outer step smaller, or end there"

    @property
    def best(self) -> "Solution":
        """Of several runs, the one that ended lowest in `upper` without failing; of one, itself.

        Lowest is not yet right: a follower stuck at a poor stationary point can make it look better than
        any solution is.
        """
        if not np.ndim(self.steps):
            return self
        bad = np.asarray([Status(int(s)).failed for s in self.status])
        score = np.nan_to_num(np.where(bad & ~bad.all(), np.inf, self.upper), nan=np.inf)
        return self[int(np.argmin(score))]

    def __getitem__(self, i: int) -> "Solution":
        """Run i of several."""
        if not np.ndim(self.steps):
            raise TypeError("this is a single solution; only what multistart returns can be indexed.")
        return jax.tree.map(lambda leaf: np.asarray(leaf)[i], self).trimmed()

    def trimmed(self) -> "Solution":
        """With plain numbers for status and steps, and a history as long as the run."""
        steps = int(self.steps)
        history = jax.tree.map(lambda leaf: np.asarray(leaf)[: steps // self.record_every], self.history)
        return dataclasses.replace(self, status=Status(int(self.status)), steps=steps, history=history)
