"""`bilax compare quadratic`, `logistic` and `cleaning`: stochastic methods on one problem, over time and samples."""

import abc
import dataclasses
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import numpy as np
import optax

import bilax
from bilax.app.data_command import data_arg
from bilax.app.errors import nearest, refuse
from bilax.app.show import Arg, console, plt, save_json, show_table, steps, stored_results, to_plain
from bilax.experiments.stochastic import curves, problems
from bilax.experiments.stochastic.settings import (
    METHODS,
    PAPER_RATES,
    hyper_cleaning_methods,
    samples_per_step,
    setting,
)

LOOKS = 32
"""points of a curve"""


@dataclasses.dataclass
class Comparison(abc.ABC):
    """All stochastic methods on one problem: a table, and curves. Every method is stored as it is made, and one that is
    stored with the same settings is not made again: the command can be broken off."""

    batch: Annotated[int, Arg(help="examples in a batch")] = 64
    seed: Annotated[int, Arg(help="seed of the batches")] = 0
    methods: Annotated[tuple[str, ...], Arg(help="these alone")] = ()
    out: Annotated[Path, Arg(help="folder for the numbers and the figure")] = Path("runs")

    name: ClassVar[str]

    @abc.abstractmethod
    def task(self) -> problems.Task:
        """What is to be solved."""

    @abc.abstractmethod
    def known(self) -> list[str]:
        """The methods' names."""

    @abc.abstractmethod
    def measured(self, task: problems.Task, name: str) -> "Measured":
        """One method's run."""

    def main(self) -> None:
        """Runs, prints, draws."""
        known = self.known()
        for name in self.methods:
            if name not in known:
                refuse(f"bilax compare {self.name}: method '{name}' is unknown: {nearest(name, known)}")
        if self.batch < 1:
            refuse(f"bilax compare {self.name}: --batch must be at least 1, got {self.batch}.")
        task, numbers = self.task(), self.out / f"compare-{self.name}.json"
        if task.said:
            console.print(task.said, style="dim")
        found = (stored_results(numbers, self, ("methods",)) or {"methods": {}})["methods"]
        wanted = [name for name in self.methods or known if name not in found]
        with steps(len(wanted), self.name) as advance:
            for name in wanted:
                advance(f"{self.name} with {name}")
                found[name] = to_plain(self.measured(task, name)._asdict())
                save_json(numbers, self, {"methods": {name: found[name] for name in known if name in found}})
        measured = {name: Measured(**found[name]) for name in known if name in found}
        quantities = list(next(iter(measured.values())).values[-1])
        rows = [
            [name, *(f"{one.values[-1][quantity]:.3g}" for quantity in quantities), one.steps, f"{one.seconds:.2f}"]
            for name, one in measured.items()
        ]
        title = f"{self.name}, batches of {self.batch}; seconds of the processor"
        show_table(title, ["method", *quantities, "steps", "seconds"], rows)
        for path in (numbers, self._draw(measured, quantities)):
            console.print(f"wrote {path}", soft_wrap=True)

    def _draw(self, measured: dict[str, "Measured"], quantities: list[str]) -> Path:
        pyplot = plt()
        figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True)
        quantity = quantities[0]
        for i, (name, one) in enumerate(measured.items()):
            values, style = [found[quantity] for found in one.values], ("-", "--", ":")[i // 7]
            part = np.asarray(one.times) / one.seconds if one.times else np.arange(1, LOOKS + 1) / LOOKS
            axes[0].plot(part * one.seconds, values, label=name, ls=style)
            axes[1].plot(part * one.samples, values, ls=style)
        axes[0].set(xlabel="seconds of the processor", xscale="log", ylabel=quantity, yscale="log", title="over time")
        axes[1].set(xlabel="samples seen", title="over samples")
        figure.legend(loc="outside right center")
        path = self.out / f"compare-{self.name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        return path


@dataclasses.dataclass
class CompareStochastic(Comparison):
    """All stochastic methods with the settings that suit the problem, until they have seen so many samples."""

    samples: Annotated[int, Arg(help="examples that each method sees, of both levels")] = 2_000_000

    def known(self) -> list[str]:
        if self.samples < 1:
            refuse(f"bilax compare {self.name}: --samples must be at least 1, got {self.samples}.")
        return list(METHODS)

    def measured(self, task: problems.Task, name: str) -> "Measured":
        """One method until it has seen the samples; the first run is for its compilation."""
        chosen = setting(self.name, name)
        method = METHODS[name](chosen, task.batches(self.batch))
        each = samples_per_step(name, method, chosen, self.batch)
        every = max(1, round(self.samples / each / LOOKS))
        where = task.problem, method, task.x0, task.y0, task.minibatches(self.batch)
        curve = [curves.run(*where, every, LOOKS, self.seed) for _ in range(2)][-1]
        values = [task.judge(x, y) for x, y in zip(curve.x[0], curve.y[0], strict=True)]
        return Measured(curve.computed, LOOKS * every, round(each * LOOKS * every), values)


class Measured(NamedTuple):
    """A method's run."""

    seconds: float
    steps: int
    samples: int
    values: list[dict[str, float]]
    """at each look"""
    times: list[float] = []  # noqa: RUF012
    """the processor's seconds at each look; evenly spaced if empty"""
    rate: float | None = None
    """the follower's step, where several were tried and the one with the best held-out examples was taken"""


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


@dataclasses.dataclass
class CompareCleaning(Comparison):
    """The paper's hyper-cleaning by mini-batches: all methods for the same time of the processor.

    The follower's step is 0.03 or 0.1, whichever has fewer errors on held-out examples at the end; x is moved by Adam
    with the paper's 0.01.
    """

    seconds: Annotated[float, Arg(help="of the processor for each method and step length")] = 30.0
    dataset: Annotated[str, data_arg("data set", "examples")] = "mnist"
    folder: Annotated[Path | None, Arg(help="look for the data here before BILAX_DATA and the cache")] = None
    name: ClassVar[str] = "cleaning"

    def task(self) -> problems.Task:
        return problems.hyper_cleaning(self.dataset, self.folder, self.seed)

    def known(self) -> list[str]:
        if not self.seconds > 0:
            refuse(f"bilax compare cleaning: --seconds must be positive, got {self.seconds}.")
        return list(hyper_cleaning_methods(PAPER_RATES[0]))

    def measured(self, task: problems.Task, name: str) -> "Measured":
        runs = [self._run(task, name, rate) for rate in PAPER_RATES]
        return min(runs, key=lambda run: run.values[-1]["held-out error"])

    def _run(self, task: problems.Task, name: str, rate: float) -> "Measured":
        method = hyper_cleaning_methods(rate)[name]
        watch = curves.Watch(task.judge, self.seconds, LOOKS)
        adam: Any = {"optimizer": optax.adam(0.01)} if isinstance(method, bilax.Method) else {}
        adam |= {"z_optimizer": optax.adam(1e-3)} if name == "iaptt-gm" else {}
        options: Any = {"data": task.minibatches(self.batch), "key": jax.random.key(self.seed), **adam}
        options |= {"steps": 10**7 * watch.every, "record_every": watch.every, "callbacks": [watch]}
        bilax.solve(task.problem, method, task.x0, task.y0, **options)
        draws = getattr(method, "draws", (1, 1))
        samples = self.batch * sum(draws) * watch.steps[-1]
        return Measured(watch.spent, watch.steps[-1], samples, watch.values, watch.times, rate)


SHOWN = {"quadratic": ("‖∇Φ‖²",), "logistic": ("Φ",), "cleaning": ("test error", "1 − F1")}
"""what the table for the docs has of each problem"""


def which_method(stored: dict[str, dict[str, Any]]) -> str:
    """A table for the docs from what `bilax compare` stored, by problem: what each method reached, best ones bold.

    Where there are held-out examples, what was reached when these were answered best.
    """
    columns = [(problem, quantity) for problem in stored for quantity in SHOWN[problem]]
    runs = {problem: record["results"]["methods"] for problem, record in stored.items()}

    def reached(method, problem, quantity):
        values = runs[problem][method]["values"]
        return min(values[::-1], key=lambda look: look.get("held-out error", 0.0))[quantity]

    def cell(method, problem, quantity):
        if method not in runs[problem]:
            return "–"
        value, one = reached(method, problem, quantity), runs[problem][method]
        best = min(reached(other, problem, quantity) for other in runs[problem])
        bold = "**" if value <= 1.1 * best else ""
        time = f" ({1e6 * one['seconds'] / one['steps']:.0f} µs)" if quantity == SHOWN[problem][0] else ""
        return f"{bold}{value:.3g}{bold}{time}"

    methods = dict.fromkeys(method for run in runs.values() for method in run)
    rows = [[method, *(cell(method, *column) for column in columns)] for method in methods]
    heads = ["", *(f"{problem}: {quantity}" for problem, quantity in columns)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows]) + "\n"
