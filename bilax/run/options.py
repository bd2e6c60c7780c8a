"""What may happen beside a run: what `solve` and `multistart` take in common and hand on."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypedDict

from jax.sharding import Mesh

from bilax.run.checkpoint import Saving


class Watching(TypedDict, total=False):
    """Options that only watch a run; see `RunOptions`."""

    progress: bool
    callbacks: Sequence[Any]
    saving: Saving | None
    resume: bool
    time_limit: float | None
    throw: bool
    record_every: int
    mesh: Mesh | None


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What is to happen beside the run itself.

    - `progress`: show steps, rate, time left and the latest values.
    - `callbacks`: functions (state, history); see `bilax.EarlyStopping` and its neighbours.
    - `saving`, `resume`: where and how often to save; go on from the newest whole checkpoint there. A resumed run
      equals an uninterrupted one bit for bit.
    - `time_limit`: end after so many seconds. It is looked at between chunks, and by `bilax.auto` between its phases;
      what is being compiled then is finished.
    - `record_every`: outer steps to one entry of the history. The run is evaluated and looked after (health, tolerance,
      best point) once in so many steps, so that steps of a few microseconds are not outweighed; where something goes
      wrong between, the run goes back to the last look.
    - `mesh`: the devices to compute on, such as `jax.make_mesh((4,), ("data",))`, with one axis. The arrays of the data
      are cut at their first axis (examples or tasks) where its length is a multiple of the devices, and so are
      variables that have as many rows, such as weights of examples; `multistart` cuts the starts, if their number is
      such a multiple. All else is on every device. Arrays that lie on several devices already stay as they are.
    - `throw`: raise `BilevelError` where a run breaks off; otherwise look at `solution.status`.
    """

    progress: bool = False
    callbacks: Sequence[Any] = ()
    saving: Saving | None = None
    resume: bool = False
    time_limit: float | None = None
    throw: bool = False
    record_every: int = 1
    mesh: Mesh | None = None

    def __post_init__(self):
        if self.saving is not None and not isinstance(self.saving, Saving):
            raise TypeError(f"saving must be bilax.Saving(folder), got {self.saving!r}.")
        if not isinstance(self.callbacks, Sequence) or not all(callable(callback) for callback in self.callbacks):
            raise TypeError(f"callbacks must be a list of functions (state, history), got {self.callbacks!r}.")
        for callback in self.callbacks:
            every = getattr(callback, "every", None)
            if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
                raise ValueError(f"{callback}.every must be None or a whole number of at least 1, got {every!r}.")
        n = self.record_every
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"record_every must be a whole number of at least 1, got {n!r}.")
        for name, every in self._intervals().items():
            if every is not None and every % n:
                raise ValueError(f"{name} is {every}, which is no multiple of record_every={n}: make it one.")
        if self.resume and self.saving is None:
            raise ValueError("resume=True needs saving=bilax.Saving(folder), where the run was saved.")

    def _intervals(self) -> dict[str, int | None]:
        own = {f"{callback}.every": getattr(callback, "every", None) for callback in self.callbacks}
        return own if self.saving is None else {**own, "Saving(every_steps=...)": self.saving.every_steps}

    @property
    def in_chunks(self) -> bool:
        """Whether the run has to come back to Python on its way."""
        return bool(self.progress or self.callbacks or self.saving or self.time_limit is not None)
