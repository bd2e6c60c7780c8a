"""`bilax compare quadratic` and `logistic`: all stochastic methods on one problem, over time and over samples seen."""

import abc
import dataclasses
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np

from bilax.app.errors import refuse
from bilax.app.show import Arg, console, plt, save_json, show_table, steps
from bilax.experiments.stochastic import curves, problems
from bilax.experiments.stochastic.settings import METHODS, samples_per_step, setting

LOOKS = 32
"""points of a curve"""


@dataclasses.dataclass
class CompareStochastic(abc.ABC):
    """All stochastic methods with the settings that suit the problem: a table, and curves over time and samples."""

    samples: Annotated[int, Arg(help="examples that each method sees, of both levels")] = 2_000_000
    batch: Annotated[int, Arg(help="examples in a batch")] = 64
    seed: Annotated[int, Arg(help="seed of the batches")] = 0
    out: Annotated[Path, Arg(help="folder for the figure")] = Path("runs")

    name: ClassVar[str]

    @abc.abstractmethod
    def task(self) -> problems.Task:
        """What is to be solved."""

    def main(self) -> None:
        """Runs, prints, draws."""
        for name in ("samples", "batch"):
            if getattr(self, name) < 1:
                refuse(f"bilax compare {self.name}: --{name} must be at least 1, got {getattr(self, name)}.")
        task = self.task()
        if task.said:
            console.print(task.said, style="dim")
        found = {}
        with steps(len(METHODS), self.name) as advance:
            for name in METHODS:
                advance(f"{self.name} with {name}")
                found[name] = self._measured(task, name)
        quantities = list(next(iter(found.values())).values[-1])
        rows = [
            [name, *(f"{one.values[-1][quantity]:.3g}" for quantity in quantities), one.steps, f"{one.seconds:.2f}"]
            for name, one in found.items()
        ]
        title = f"{self.name}, {self.samples:,} samples in batches of {self.batch}; seconds of the processor"
        show_table(title, ["method", *quantities, "steps", "seconds"], rows)
        numbers = self.out / f"compare-{self.name}.json"
        save_json(numbers, self, {"methods": {name: one._asdict() for name, one in found.items()}})
        for path in (numbers, self._draw(found, quantities)):
            console.print(f"wrote {path}", soft_wrap=True)

    def _measured(self, task: problems.Task, name: str) -> "Measured":
        """One method until it has seen the samples; the first run is for its compilation."""
        chosen = setting(self.name, name)
        method = METHODS[name](chosen, task.batches(self.batch))
        each = samples_per_step(name, method, chosen, self.batch)
        every = max(1, round(self.samples / each / LOOKS))
        where = task.problem, method, task.x0, task.y0, task.minibatches(self.batch)
        curve = [curves.run(*where, every, LOOKS, self.seed) for _ in range(2)][-1]
        values = [task.judge(x, y) for x, y in zip(curve.x[0], curve.y[0], strict=True)]
        return Measured(curve.computed, LOOKS * every, round(each * LOOKS * every), values)

    def _draw(self, measured: dict[str, "Measured"], quantities: list[str]) -> Path:
        pyplot = plt()
        figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True)
        quantity, part = quantities[0], np.arange(1, LOOKS + 1) / LOOKS
        for i, (name, one) in enumerate(measured.items()):
            values, style = [found[quantity] for found in one.values], ("-", "--", ":")[i // 7]
            axes[0].plot(part * one.seconds, values, label=name, ls=style)
            axes[1].plot(part * one.samples, values, ls=style)
        axes[0].set(xlabel="seconds of the processor", xscale="log", ylabel=quantity, yscale="log", title="over time")
        axes[1].set(xlabel="samples seen", title="over samples")
        figure.legend(loc="outside right center")
        path = self.out / f"compare-{self.name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        return path


class Measured(NamedTuple):
    """A method's run."""

    seconds: float
    steps: int
    samples: int
    values: list[dict[str, float]]
    """at each look"""


@dataclasses.dataclass
class CompareQuadratic(CompareStochastic):
    """All stochastic methods on the simulated quadratic, ‖∇Φ‖² exact: curves over time and over samples seen."""

    name: ClassVar[str] = "quadratic"

    def task(self) -> problems.Task:
        return problems.quadratic()


@dataclasses.dataclass
class CompareLogistic(CompareStochastic):
    """All stochastic methods on the penalties of a logistic regression (ijcnn1): curves over time and samples seen."""

    folder: Annotated[Path | None, Arg(help="look for the data here before BILAX_DATA and the cache")] = None
    name: ClassVar[str] = "logistic"

    def task(self) -> problems.Task:
        return problems.logistic(self.folder)


def which_method(stored: dict[str, dict[str, Any]]) -> str:
    """A table for the docs from what `bilax compare` stored, by problem: what each method reached, best ones bold."""
    reached, quantities = {}, {}
    for problem, record in stored.items():
        for method, one in record["results"]["methods"].items():
            last = one["values"][-1]
            quantities[problem] = next(iter(last))
            reached[method, problem] = last[quantities[problem]], 1e6 * one["seconds"] / one["steps"]
    best = {problem: min(value for (_, one), (value, _) in reached.items() if one == problem) for problem in stored}

    def cell(method, problem):
        value, microseconds = reached[method, problem]
        bold = "**" if value <= 1.1 * best[problem] else ""
        return f"{bold}{value:.3g}{bold} ({microseconds:.0f} µs)"

    methods = dict.fromkeys(method for method, _ in reached)
    rows = [[method, *(cell(method, problem) for problem in stored)] for method in methods]
    heads = ["", *(f"{problem}: {quantities[problem]}" for problem in stored)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows]) + "\n"
