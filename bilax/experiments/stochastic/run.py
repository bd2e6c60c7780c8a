"""`bilax run quadratic`, `logistic` and `linear-cleaning`: problems on mini-batches by the stochastic methods."""

import abc
import dataclasses
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

import bilax
from bilax.app.data_command import data_arg
from bilax.app.errors import nearest
from bilax.app.show import Arg, console, to_plain
from bilax.experiments.runner import End, Run, Setup
from bilax.experiments.stochastic import problems
from bilax.experiments.stochastic.settings import METHODS, Setting, samples_per_step, setting


@dataclasses.dataclass
class OnBatches(Run):
    """A run on mini-batches: what is measured, and how long a step is, is the problem's unless you say."""

    method: Annotated[str, Arg(help=", ".join(METHODS))] = "soba"
    outer_steps: Annotated[int, Arg(help="T, outer steps")] = 20_000
    step_size: Annotated[float | None, Arg(help="the follower's step; what suits the problem by default")] = None
    rate: Annotated[float | None, Arg(help="the leader's step; what suits the problem by default")] = None
    batch: Annotated[int, Arg(help="examples in a batch, of the leader's and of the follower's")] = 64
    every: Annotated[int, Arg(help="outer steps between measurements")] = 1000

    double: ClassVar[bool] = False

    @abc.abstractmethod
    def task(self) -> problems.Task:
        """What is to be solved."""

    @property
    def settings(self) -> str:
        """Whose tuned settings are taken."""
        return self.name

    def check(self) -> None:
        super().check()
        for name in ("step_size", "rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                self.refuse(f"--{name.replace('_', '-')} must be positive, got {value}.")
        for name in ("every", "batch", "outer_steps"):
            if getattr(self, name) < 1:
                self.refuse(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}.")
        if self.outer_steps % self.every:
            self.refuse(f"--outer-steps must be a multiple of --every {self.every}, got {self.outer_steps}.")

    def chosen(self) -> Setting:
        """The steps: those that were given, else those that were found to suit the problem."""
        tuned = setting(self.settings, self.method)
        step = tuned.step_size if self.step_size is None else self.step_size
        rate = tuned.step_size / tuned.outer_ratio if self.rate is None else self.rate
        return tuned._replace(step_size=step, outer_ratio=step / rate)

    def make_method(self) -> Any:
        if self.method not in METHODS:
            raise ValueError(f"unknown method '{self.method}': {nearest(self.method, list(METHODS))}")
        return METHODS[self.method](self.chosen(), self.task().batches(self.batch))

    def options(self) -> dict[str, Any]:
        return {"record_every": self.every}

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"record_every": self.every}

    def setup(self, seed: int) -> Setup:
        task = self.task()
        if task.said and not self.json:
            console.print(task.said, style="dim")
        return Setup(task.problem, task.x0, task.y0, task.minibatches(self.batch))

    def validation(self, seed: int) -> bilax.EarlyStopping:
        judge = self.task().judge

        def validate(state: bilax.Snapshot) -> Any:
            found = judge(np.asarray(state.x), np.asarray(state.z))
            return next(iter(found.values())), found

        return bilax.EarlyStopping(validate, every=self.every)

    def measures(self, end: End) -> dict[str, Any]:
        assert end.validation is not None
        last = {name: float(value) for name, value in end.validation.measures[-1].items()}
        each = samples_per_step(self.method, self.make_method(), self.chosen(), self.batch)
        return last | {"samples seen": round(each * int(end.solution.steps))}

    def details(self, end: End) -> dict[str, Any]:
        assert end.validation is not None
        names = end.validation.measures[0] if end.validation.measures else ()
        curves = {name: to_plain([each[name] for each in end.validation.measures], 5) for name in names}
        return {"recorded": end.validation.steps, "curves": curves}

    def title(self) -> str:
        steps = self.chosen()
        return f"{super().title()}, steps of {steps.step_size:g} and {steps.step_size / steps.outer_ratio:g}"


@dataclasses.dataclass
class Quadratic(OnBatches):
    """A simulated quadratic whose value function Φ is known in closed form: ‖∇Φ(x)‖² is measured exactly."""

    count: Annotated[int, Arg(help="examples of the follower")] = 32_768
    leaders: Annotated[int, Arg(help="examples of the leader")] = 1024
    dim_y: Annotated[int, Arg(help="variables of the follower")] = 100
    dim_x: Annotated[int, Arg(help="variables of the leader")] = 10
    name: ClassVar[str] = "quadratic"

    def check(self) -> None:
        super().check()
        for name in ("count", "leaders"):
            if getattr(self, name) < self.batch:
                self.refuse(f"--{name} must be at least a batch of {self.batch}, got {getattr(self, name)}.")
        for name in ("dim_y", "dim_x"):
            if getattr(self, name) < 2:
                self.refuse(f"--{name.replace('_', '-')} must be at least 2, got {getattr(self, name)}.")

    def task(self) -> problems.Task:
        return problems.quadratic(self.count, self.leaders, self.dim_y, self.dim_x)


@dataclasses.dataclass
class Logistic(OnBatches):
    """A penalty for each feature of a logistic regression on ijcnn1: Φ and ‖∇Φ‖² by Newton's method on all examples."""

    folder: Annotated[Path | None, Arg(help="look for the data here before BILAX_DATA and the cache")] = None
    name: ClassVar[str] = "logistic"
    free: ClassVar[tuple[str, ...]] = (*Run.free, "folder")

    def task(self) -> problems.Task:
        return problems.logistic(self.folder)

    def data_tag(self) -> str:
        return f"{self.task().counts} examples"


@dataclasses.dataclass
class LinearCleaning(OnBatches):
    """Wrong labels, and a linear softmax that is trained on the weighted examples: the protocol of benchmark_bilevel.

    The paper's own hyper-cleaning is `bilax run cleaning`.
    """

    dataset: Annotated[str, data_arg("data set", "examples")] = "mnist"
    folder: Annotated[Path | None, Arg(help="look for the data here before BILAX_DATA and the cache")] = None
    corrupted: Annotated[float, Arg(help="probability that a training label is drawn anew")] = 0.5
    sizes: Annotated[tuple[int, int], Arg(help="training and validation examples")] = (20_000, 5000)
    name: ClassVar[str] = "linear-cleaning"
    free: ClassVar[tuple[str, ...]] = (*Run.free, "folder")

    @property
    def settings(self) -> str:
        return "cleaning 0.9" if self.corrupted >= 0.8 else "cleaning 0.5"

    def check(self) -> None:
        super().check()
        if not 0 <= self.corrupted < 1:
            self.refuse(f"--corrupted must be a share in [0, 1), got {self.corrupted}.")

    def task(self) -> problems.Task:
        return problems.cleaning(self.corrupted, self.dataset, self.sizes, self.folder)
