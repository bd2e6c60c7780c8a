"""Callbacks: functions (state, history) that `solve` calls between chunks of outer steps.

`state` is a `Snapshot` of the run and `history` all that was recorded so far, as NumPy arrays. A callback that returns
True ends the run; one that raises ends it too, after a run that is being saved has been saved. Two things are optional:

- `every`: it is called after every so many outer steps, whatever the clock does; without it about twice a second.
- `saved()` -> dict of names and arrays, and `restore(saved, state)`: what it knows is saved with the run, so that a
  resumed run goes on as if nothing had happened; and `stops()`, which tells then whether it had ended the run.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from bilax.files import read_text, write_whole
from bilax.problem.trees import from_named, named_leaves
from bilax.run.loop import Point
from bilax.run.processes import is_first
from bilax.run.progress import latest
from bilax.run.solution import History

LINES_BYTES = 1 << 30
"""of a file of `JsonLines` at the most"""


class Snapshot(NamedTuple):
    """Where a run is."""

    x: PyTree
    z: PyTree
    step: int
    good: Point
    """the last point that was evaluated: (x, z) before the last step, with y, upper, lower, residual and k̄"""


class EarlyStopping:
    """Measures every so many outer steps, keeps the best point, and ends the run once nothing improves any more.

    - `validate(state)` returns a number, lower is better; or a dict of numbers, each of which counts (the first one
      decides which point is best); or a pair of one of these and a dict of arrays that are only kept.
    - `patience`: the run ends when the last so many outer steps have brought no number below its lowest before them
      by more than `gain`; None never ends it.
    - `every`: outer steps between measurements, a tenth of the patience by default.

    `steps`, `values` and `measures` are what was measured and when, `best` the lowest value, `best_step` and
    `best_point` (x, z) where it was seen.
    """

    def __init__(
        self,
        validate: Callable[[Snapshot], Any],
        patience: int | None = None,
        *,
        every: int | None = None,
        gain: float = 0.0,
    ):
        for name, value in (("patience", patience), ("every", every)):
            if value is not None and value < 1:
                raise ValueError(f"EarlyStopping({name}=...) must be at least 1, got {value}.")
        if patience is None and every is None:
            raise ValueError("EarlyStopping needs patience, or every: after how many outer steps to measure.")
        self.validate, self.patience, self.gain = validate, patience, gain
        self.every = every or max(1, (patience or 1) // 10)
        self.steps: list[int] = []
        self.values: list[dict[str, float]] = []
        self.measures: list[dict[str, np.ndarray]] = []
        self.best_point: tuple[PyTree, PyTree] | None = None

    @property
    def best(self) -> float:
        """The lowest value so far."""
        return min(self._series(), default=np.inf)

    @property
    def best_step(self) -> int:
        """Where it was seen first."""
        return self.steps[int(np.argmin(self._series()))] if self.steps else 0

    def __call__(self, state: Snapshot, history: History) -> bool:
        if state.step not in self.steps:
            found = self.validate(state)
            value, kept = found if isinstance(found, tuple) else (found, {})
            self.steps.append(state.step)
            self.values.append({k: float(v) for k, v in _named(value).items()})
            self.measures.append({k: np.asarray(v) for k, v in kept.items()})
            if self.best_step == state.step:
                self.best_point = state.x, state.z
        return self.stops()

    def stops(self) -> bool:
        """Whether the last `patience` outer steps brought nothing."""
        if self.patience is None or not self.steps:
            return False
        recent = np.asarray(self.steps) > self.steps[-1] - self.patience
        if recent.all():
            return False
        for name in self.values[0]:
            series = np.asarray([np.nan_to_num(value[name], nan=np.inf) for value in self.values])
            now, before = series[recent].min(), series[~recent].min()
            # What single precision cannot tell apart is no gain.
            if now < before and (np.isinf(before) or before - now > self.gain + 1e-6 * abs(before)):
                return False
        return True

    def saved(self) -> dict[str, Any]:
        """All of it, by name."""
        if not self.steps:
            return {}
        values = {f"value:{name}": [value[name] for value in self.values] for name in self.values[0]}
        kept = {f"measure:{name}": np.stack([m[name] for m in self.measures]) for name in self.measures[0]}
        return {"steps": list(self.steps), **values, **kept, **named_leaves(self.best_point, "best:")}

    def restore(self, saved: Mapping[str, Any], state: Snapshot) -> None:
        """Goes on from what was saved."""
        self.steps = [int(step) for step in saved.get("steps", ())]
        self.values, self.measures = (
            [
                {name.removeprefix(prefix): saved[name][i] for name in saved if name.startswith(prefix)}
                for i in range(len(self.steps))
            ]
            for prefix in ("value:", "measure:")
        )
        self.best_point = from_named(saved, (state.x, state.z), "best:") if self.steps else None

    def _series(self) -> list[float]:
        return [np.inf if np.isnan(v) else v for v in (next(iter(value.values())) for value in self.values)]


class JsonLines:
    """Appends one line to a file now and then: the step and the latest value of each recorded quantity."""

    def __init__(self, path: str | Path, every: int | None = None):
        self.path, self.every = Path(path), every

    def __call__(self, state: Snapshot, history: History) -> None:
        if not is_first():
            return
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.step, **latest(history)}) + "\n")
        except OSError as error:
            warnings.warn(f"JsonLines could not write {self.path}: {error}. The run goes on.", stacklevel=2)

    def saved(self) -> dict[str, Any]:
        """Nothing: the file has it."""
        return {}

    def restore(self, saved: Mapping[str, Any], state: Snapshot) -> None:
        """Drops the lines of steps that a killed run took after it was last saved, and that come again."""
        if self.path.exists() and is_first():
            lines = read_text(self.path, LINES_BYTES).splitlines(keepends=True)
            kept = "".join(line for line in lines if _step_of(line) <= state.step)
            write_whole(self.path, kept.encode())


class TensorBoard:
    """Writes every outer step's upper, lower, residual, k̄ and gradient norms for TensorBoard.

    Needs `pip install 'bilax[tensorboard]'`.
    """

    def __init__(self, folder: str | Path, every: int | None = None):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ImportError("TensorBoard(...) needs tensorboardX: pip install 'bilax[tensorboard]'.") from None
        self.writer, self.written, self.every = SummaryWriter(str(folder)), 0, every

    def __call__(self, state: Snapshot, history: History) -> None:
        if not is_first():
            return
        for name, values in history._asdict().items():
            if name != "record":
                for step in range(self.written, len(values)):
                    self.writer.add_scalar(f"bilax/{name}", float(values[step]), step)
        self.written = len(history.upper)
        self.writer.flush()

    def saved(self) -> dict[str, Any]:
        """How far it has written."""
        return {"written": self.written}

    def restore(self, saved: Mapping[str, Any], state: Snapshot) -> None:
        """Goes on from there."""
        self.written = int(saved["written"])


def _named(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"value": value}


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):  # the last of brackets without end
        return -np.inf
