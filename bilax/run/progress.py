"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from bilax.run.solution import History

Show = Callable[[int, History], None]
"""(outer steps taken, what the last ones recorded)"""


@contextlib.contextmanager
def display(progress: bool, steps: int, done: int, all_taken: bool = True) -> Iterator[Show]:
    """Shows progress with rich on a terminal, as plain lines elsewhere, or not at all.

    Of runs that end when they have converged (`all_taken=False`) nobody knows the time that is left.
    """
    if not progress:
        yield lambda step, history: None
    elif not sys.stderr.isatty():
        yield _Lines(steps, done, all_taken)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn() if all_taken else TextColumn("at most so many steps"),
        )
        with Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=steps, completed=done, text="compiling", rate="")
            clock = _Rate(done)

            def show(step: int, history: History) -> None:
                bar.update(task, completed=step, text=_words(history), rate=f"{clock(step):.3g}/s")

            yield show


def tell(what: str) -> None:
    """A line on what takes its time now."""
    print(f"bilax: {what} ...", file=sys.stderr, flush=True)


class _Lines:
    """One plain line now and then, for logs."""

    def __init__(self, steps: int, done: int, all_taken: bool):
        self.steps, self.clock, self.last, self.all_taken = steps, _Rate(done), time.monotonic() - 1e9, all_taken

    def __call__(self, step: int, history: History) -> None:
        rate = self.clock(step)
        if step < self.steps and time.monotonic() - self.last < 5:
            return
        self.last = time.monotonic()
        left = f"{(self.steps - step) / rate:.0f} s left  " if rate and self.all_taken else ""
        pace = f"{rate:.3g}/s  {left}" if rate else ""
        count = f"{step}/{self.steps}" if self.all_taken else f"{step} of at most {self.steps}"
        print(f"step {count}  {pace}{_words(history)}", file=sys.stderr, flush=True)


class _Rate:
    """Outer steps per second since the first call, so that compilation does not count."""

    def __init__(self, done: int):
        self.begin, self.first = None, done

    def __call__(self, step: int) -> float:
        if self.begin is None:
            self.begin, self.first = time.monotonic(), step
        return (step - self.first) / max(time.monotonic() - self.begin, 1e-9)


def latest(history: History) -> dict[str, float]:
    """The last entry of each quantity, as plain numbers; of many starts the mean of those that still run."""
    fields = {name: values for name, values in history._asdict().items() if name != "record"}
    last = {name: values[..., -1] for name, values in fields.items() if values.shape[-1]}
    return {name: float(np.mean(v[np.isfinite(v)])) if np.ndim(v) else float(v) for name, v in last.items()}


def _words(history: History) -> str:
    now = latest(history)
    if not now:
        return ""
    chosen = f"  k̄ {now['k_bar']:.0f}" if now["k_bar"] else ""
    return f"upper {now['upper']:.5g}  lower {now['lower']:.5g}  residual {now['residual']:.2g}{chosen}"
