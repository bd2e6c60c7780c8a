"""`bilax run`: one experiment with one method, in a run folder that `bilax report` reads.

An experiment says what is to be solved (`setup`) and what is to be measured; all else is here.
"""

import abc
import dataclasses
import datetime
import inspect
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn

import jax
import optax

import bilax
from bilax.app.errors import nearest, refuse
from bilax.app.run_folder import check_config, mark, write_config, write_result
from bilax.app.several_devices import is_first, mesh, says_lost, wait_for_all
from bilax.app.show import Arg, console, show_table

EXIT_CODES = {"interrupted": 130, "terminated": 143}


class Setup(NamedTuple):
    """All that `solve`, or `multistart` where seeds run together, needs beside a method."""

    problem: bilax.Problem
    x0: Any
    y0: Any
    data: Any = ()
    tasks: bool = False
    many: bool = False
    """whether x0 and y0 have a leading axis, one entry per seed"""
    data_axes: Any = None

    def solve(self, method: Any, **options: Any) -> bilax.Solution:
        """Runs the method."""
        problem, x0, y0, data, tasks, many, axes = self
        if many:
            return bilax.multistart(problem, method, x0, y0, data=data, data_axes=axes, **options)
        return bilax.solve(problem, method, x0, y0, data=data, tasks=tasks, **options)


class End(NamedTuple):
    """What there is to look at when a run has ended."""

    solution: bilax.Solution
    validation: bilax.EarlyStopping | None
    folder: Path
    seconds: float


@dataclasses.dataclass
class Run(abc.ABC):
    """One method on one experiment. Everything is written to a run folder that `bilax report` reads."""

    method: str = ""
    outer_steps: Annotated[int, Arg(help="T, outer steps")] = 500
    seed: Annotated[tuple[int, ...], Arg(help="one or several")] = (0,)
    out: Annotated[Path | None, Arg(help="run folder; runs/NAME-METHOD-TIME by default")] = None
    resume: Annotated[bool, Arg(help="go on with the run in --out")] = False
    save_every: Annotated[float, Arg(help="seconds between checkpoints")] = 30.0
    json: Annotated[bool, Arg(help="print the result as JSON and nothing else")] = False
    devices: Annotated[int | None, Arg(help="divide examples, tasks or seeds among so many devices")] = None
    distributed: Annotated[bool, Arg(help="one of several processes, on all their devices together; see the docs")] = (
        False
    )

    name: ClassVar[str]
    free: ClassVar[tuple[str, ...]] = ("out", "resume", "json", "save_every", "outer_steps", "devices", "distributed")
    """options that may change when a run goes on"""
    together: ClassVar[bool] = False
    """whether all seeds are one run, in one folder; else each has a folder of its own"""
    double: ClassVar[bool] = True
    """whether it computes in double precision where it does not say otherwise"""

    @abc.abstractmethod
    def setup(self, seed: int) -> Setup:
        """The problem and the start that a seed stands for; where seeds run together, of all of them."""

    def measures(self, end: "End") -> dict[str, Any]:
        """What to report beside the objectives; also writes what else belongs into the run folder."""
        return {}

    def details(self, end: "End") -> dict[str, Any]:
        """What result.json keeps besides, too long for a table."""
        return {}

    def data_tag(self) -> str | None:
        """What the data are known by, if the options do not say it all; a run goes on only with the same."""
        return None

    def facts(self) -> dict[str, Any]:
        """What config.json holds beside the options."""
        return {"experiment": self.name, "data_tag": self.data_tag()}

    def validation(self, seed: int) -> bilax.EarlyStopping | None:
        """What is measured on the way, and may end the run."""
        return None

    def time_limit(self) -> float | None:
        """Seconds of training at the most."""
        return None

    def check(self) -> None:
        """Refuses options that do not go together."""
        if self.resume and self.out is None:
            self.refuse("--resume needs --out, the folder of the run to go on with.")
        if self.devices is not None and (self.devices < 1 or self.distributed):
            self.refuse("--devices must be at least 1, and --distributed takes all devices without it.")
        if self.distributed and self.out is None:
            self.refuse("--distributed needs --out, a folder that all processes see.")
        if not self.seed:
            self.refuse("--seed needs at least one number.")
        if min(self.seed) < 0:
            self.refuse(f"--seed must not be negative, got {min(self.seed)}.")

    def refuse(self, message: Any) -> NoReturn:
        """Ends the program with what is wrong."""
        refuse(f"bilax run {self.name}: {message}")

    def main(self) -> None:
        """Runs every seed, prints a table and exits as a shell expects."""
        method = self.checked_method()
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        out = self.out or Path("runs") / f"{self.name}-{self.method}-{stamp}"
        seeds = self.seed[:1] if self.together else self.seed
        folders = {seed: out / f"seed-{seed}" if len(seeds) > 1 else out for seed in seeds}
        results: dict[int, dict[str, Any]] = {}
        for seed, folder in folders.items():
            results[seed] = self.run(method, seed, folder)
            if results[seed]["status"] in EXIT_CODES:
                break
        if not is_first():
            pass
        elif self.json:
            print(json.dumps({str(seed): {"folder": str(folders[seed]), **results[seed]} for seed in results}))
        else:
            self.show(results, out)
        statuses = [bilax.Status[result["status"]] for result in results.values()]
        sys.exit(max(EXIT_CODES.get(status.name, int(status.failed)) for status in statuses))

    def train(self) -> dict[str, Any]:
        """Runs the first seed (all, where they run together), going on where an earlier run in --out was broken off."""
        assert self.out is not None
        config = dataclasses.replace(self, resume=(self.out / "config.json").exists())
        return config.run(config.checked_method(), self.seed[0], self.out)

    def checked_method(self) -> Any:
        """The method, once all options are known to be right."""
        self.check()
        try:
            return self.make_method()
        except (ValueError, TypeError) as error:
            self.refuse(error)

    @abc.abstractmethod
    def make_method(self) -> Any:
        """The method that the options name; a ValueError or TypeError that says what is wrong with them."""

    def options(self) -> dict[str, Any]:
        """What else `solve` gets."""
        return {}

    def may_change(self) -> set[str]:
        """Options that may be others when a run goes on."""
        return set(self.free)

    def title(self) -> str:
        """What the table at the end is called."""
        return f"{self.name} with {self.method}"

    def run(self, method: Any, seed: int, folder: Path) -> dict[str, Any]:
        """One run in its folder, begun or gone on with; returns what result.json holds."""
        with jax.enable_x64(self.double):
            began, new = time.perf_counter(), not (folder / "config.json").exists()
            try:
                setup, validation = self.setup(seed), self.validation(seed)
                wait_for_all("bilax: the folder was looked at")
                if not (self.resume or new):
                    raise FileExistsError(f"{folder} already holds a run: add --resume, or choose another --out.")
                settings = dataclasses.asdict(self) | self.facts() | {"out": str(folder)}
                settings["seed"] = list(self.seed) if self.together else seed
                check_config(folder, settings, self.may_change())
                before = write_config(folder, settings) if is_first() else 0.0
                begun = mark(folder) if is_first() else None
                solution = self._solve(setup, method, seed, folder, before, validation)
            except (OSError, ValueError) as error:
                if says_lost(error):
                    raise
                if new and not any((folder / "checkpoints").glob("*")):
                    # Nothing has been done yet, and the corrected command should not find a run here.
                    (folder / "config.json").unlink(missing_ok=True)
                self.refuse(error)
            except RuntimeError as error:
                if not isinstance(error.__cause__, OSError | ValueError):
                    raise
                self.refuse(error.__cause__)
            if not is_first():
                return {"status": solution.ended.name}
            end = End(solution, validation, folder, before + time.perf_counter() - began)
            try:
                if mark(folder) != begun:
                    raise OSError("another run has taken the folder, so how this one ended is not written.")
                # Who breaks a run off does not wait for its test.
                broken_off = solution.ended.name in EXIT_CODES
                extra = {"seconds": end.seconds, **self.details(end)}
                extra["measures"] = {} if broken_off else self.measures(end)
                return write_result(folder, solution, extra)
            except (OSError, ValueError) as error:
                self.refuse(f"{error}\nWhat was saved of the training is in {folder}; --resume goes on from there.")

    def _solve(
        self,
        setup: Setup,
        method: Any,
        seed: int,
        folder: Path,
        before: float,
        validation: bilax.EarlyStopping | None,
    ) -> bilax.Solution:
        limit = self.time_limit()
        try:
            return setup.solve(
                method,
                steps=self.outer_steps,
                key=jax.random.key(seed),
                progress=not self.json,
                mesh=mesh(self.devices, self.distributed),
                callbacks=[] if validation is None else [validation],
                saving=bilax.Saving(folder / "checkpoints", every_seconds=self.save_every),
                resume=self.resume,
                time_limit=None if limit is None else max(0.0, limit - before),
                **self.options(),
            )
        except bilax.Interrupted as ended:
            return ended.solution

    def show(self, results: dict[int, dict[str, Any]], out: Path) -> None:
        """Prints how the runs ended."""
        names = ("steps", "upper", "lower", "residual", "k_bar")
        quantities = {name: [result[name] for result in results.values()] for name in names}
        for name in next(iter(results.values()))["measures"]:
            quantities[name] = [result["measures"].get(name, "–") for result in results.values()]
        quantities |= {name: [result[name] for result in results.values()] for name in ("seconds", "status")}
        columns = [f"seeds {' '.join(map(str, self.seed))}"] if self.together else [f"seed {seed}" for seed in results]
        show_table(
            self.title(),
            ["", *columns],
            [[name, *values] for name, values in quantities.items()],
        )
        for result in results.values():
            if result["status"] != "step_limit":
                console.print(result["message"])
        console.print(f"wrote {out}; look at it with: bilax report {out}", style="dim", soft_wrap=True)


@dataclasses.dataclass
class Experiment(Run):
    """A run by one of the recipes, K follower steps to an outer step."""

    method: Annotated[str, Arg(help="iaptt-gm, ia-gm, ia-gm-a, rhg, t-rhg, fhg, bda, ls, ns or one-step")] = "iaptt-gm"
    inner_steps: Annotated[int, Arg(help="K, follower steps per outer step")] = 40
    step_size: Annotated[float, Arg(help="α, the follower's step")] = 5e-4
    rate: Annotated[float, Arg(help="the outer step for x (and z)")] = 0.1
    z_rate: Annotated[float | None, Arg(help="the outer step for z, if another")] = None
    optimizer: Annotated[Literal["sgd", "adam"], Arg(help="of the outer loop")] = "sgd"
    schedule: Annotated[
        Literal["constant", "cosine"], Arg(help="of the outer step; cosine falls to zero at --outer-steps")
    ] = "constant"
    clip: Annotated[float | None, Arg(help="gradients of x, and of z, that are longer are cut to this length")] = None
    start: Annotated[
        Literal["fixed", "warm", "auxiliary"] | None, Arg(help="where the follower begins, if not as the method has it")
    ] = None
    window: Annotated[int | None, Arg(help="t-rhg: steps swept back over (K/2 by default)")] = None
    mu: Annotated[float, Arg(help="bda: weight of the leader's gradient")] = 0.4
    terms: Annotated[int | None, Arg(help="ns: terms of the series; ls: steps of the linear solve")] = None

    def check(self) -> None:
        super().check()
        if self.clip is not None and not self.clip > 0:
            self.refuse(f"--clip must be positive, got {self.clip}.")

    def may_change(self) -> set[str]:
        # The rate at each step depends on how many there are to be.
        return super().may_change() - ({"outer_steps"} if self.schedule != "constant" else set())

    def title(self) -> str:
        return f"{super().title()}, K = {self.inner_steps}, α = {self.step_size:g}"

    def options(self) -> dict[str, Any]:
        return self.optimizers()

    def optimizers(self) -> dict[str, optax.GradientTransformation]:
        """What moves x and, if it is another, z."""
        found = {"optimizer": self._optimizer(self.rate)}
        return found if self.z_rate is None else found | {"z_optimizer": self._optimizer(self.z_rate)}

    def defaults(self) -> dict[str, Any]:
        """`terms`, and the `start` of methods without an auxiliary, where the options do not say."""
        return {"terms": 40, "start": None}

    def make_method(self) -> bilax.Method:
        """The method that the options name; a ValueError or TypeError that says what is wrong with them."""
        known = [name.replace("_", "-") for name in bilax.RECIPES if name not in ("maml", "fomaml", "reptile")]
        if self.method not in known:
            raise ValueError(f"unknown method '{self.method}': {nearest(self.method, known)}")
        recipe = bilax.RECIPES[self.method.replace("-", "_")]
        terms = self.defaults()["terms"] if self.terms is None else self.terms
        offered: dict[str, Any] = {
            "inner_steps": self.inner_steps,
            "step_size": self.step_size,
            "window": max(1, self.inner_steps // 2) if self.window is None else self.window,
            "mu": self.mu,
            "terms": terms,
            "max_steps": terms,
            "tolerance": None,
        }
        wanted = inspect.signature(recipe).parameters
        chosen = {name: value for name, value in offered.items() if name in wanted}
        method = recipe(**chosen)
        start = self.start or (None if method.start == "auxiliary" else self.defaults()["start"])
        return method if start is None else dataclasses.replace(method, start=start)

    def _optimizer(self, rate: float) -> optax.GradientTransformation:
        falling = optax.cosine_decay_schedule(rate, self.outer_steps) if self.schedule == "cosine" else rate
        step = {"sgd": optax.sgd, "adam": optax.adam}[self.optimizer](falling)
        return step if self.clip is None else optax.chain(optax.clip_by_global_norm(self.clip), step)


def train_or_leave(config: Run) -> dict[str, Any]:
    """`config.train()`; a run that was broken off ends the program, and the same command goes on from there."""
    result = config.train()
    if result["status"] in EXIT_CODES:
        console.print("broken off; the same command goes on from here.")
        raise SystemExit(EXIT_CODES[result["status"]])
    return result
