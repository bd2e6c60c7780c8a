"""Callbacks: functions (state, history) that `solve` calls between chunks of outer steps.

`state` is the loop's state (`x`, `z`, `step`, `good` with the last evaluated point) and `history` all that was
recorded so far, as NumPy arrays. A callback that returns True ends the run.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bilax.run.solution import History


class EarlyStopping:
    """Ends the run once `validate(x, y)` has not fallen for `patience` outer steps.

    It is called between chunks, with the last evaluated point; `best` is the lowest value and `best_point` the
    (x, y, z) where it was seen.
    """

    def __init__(self, validate: Callable[[Any, Any], Any], patience: int):
        if patience < 1:
            raise ValueError(f"EarlyStopping(patience=...) must be at least 1, got {patience}.")
        self.validate, self.patience = validate, patience
        self.best, self.best_step, self.best_point = np.inf, 0, None

    def __call__(self, state: Any, history: History) -> bool:
        value, step = float(self.validate(state.good.x, state.good.y)), int(state.step)
        if value < self.best:
            self.best, self.best_step = value, step
            self.best_point = state.good.x, state.good.y, state.good.z
        return step - self.best_step >= self.patience


class JsonLines:
    """Appends one line per chunk to a file: the step and the latest value of each recorded quantity."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __call__(self, state: Any, history: History) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": int(state.step), **latest(history)}) + "\n")


class TensorBoard:
    """Writes every outer step's upper, lower, residual, k̄ and gradient norms for TensorBoard.

    Needs `pip install 'bilax[tensorboard]'`.
    """

    def __init__(self, folder: str | Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ImportError("TensorBoard(...) needs tensorboardX: pip install 'bilax[tensorboard]'.") from None
        self.writer, self.written = SummaryWriter(str(folder)), 0

    def __call__(self, state: Any, history: History) -> None:
        for name, values in history._asdict().items():
            if name != "record":
                for step in range(self.written, len(values)):
                    self.writer.add_scalar(f"bilax/{name}", float(values[step]), step)
        self.written = len(history.upper)
        self.writer.flush()


def latest(history: History) -> dict[str, float]:
    """The last entry of each quantity, as plain numbers."""
    fields = {name: values for name, values in history._asdict().items() if name != "record"}
    return {name: float(values[-1]) for name, values in fields.items() if len(values)}
