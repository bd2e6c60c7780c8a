"""`bilax run` and `bilax compare`: one experiment with one method or with all, in a run folder."""

import abc
import dataclasses
import datetime
import inspect
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilax
from bilax.app.cli import nearest, refuse
from bilax.app.run_folder import HistoryFile, check_config, write_config, write_result
from bilax.app.show import Arg, console, plt, show_table
from bilax.experiments.convex import figures as convex
from bilax.experiments.toy import figures as toy

EXIT_CODES = {bilax.Status.interrupted: 130, bilax.Status.terminated: 143}


class Setup(NamedTuple):
    """All that `solve` needs for one seed."""

    problem: bilax.Problem
    x0: Any
    y0: Any
    data: Any = ()
    tasks: bool = False


@dataclasses.dataclass
class Run(abc.ABC):
    """One method on one experiment. Everything is written to a run folder that `bilax report` reads."""

    method: Annotated[str, Arg(help="iaptt-gm, ia-gm, ia-gm-a, rhg, t-rhg, fhg, bda, ls, ns or one-step")] = "iaptt-gm"
    inner_steps: Annotated[int, Arg(help="K, follower steps per outer step")] = 40
    step_size: Annotated[float, Arg(help="α, the follower's step")] = 5e-4
    outer_steps: Annotated[int, Arg(help="T, outer steps")] = 500
    rate: Annotated[float, Arg(help="the outer step for x (and z)")] = 0.1
    z_rate: Annotated[float | None, Arg(help="the outer step for z, if another")] = None
    optimizer: Annotated[Literal["sgd", "adam"], Arg(help="of the outer loop")] = "sgd"
    clip: Annotated[float | None, Arg(help="gradients of x, and of z, that are longer are cut to this length")] = None
    start: Annotated[
        Literal["fixed", "warm", "auxiliary"] | None, Arg(help="where the follower begins, if not as the method has it")
    ] = None
    window: Annotated[int | None, Arg(help="t-rhg: steps swept back over (K/2 by default)")] = None
    mu: Annotated[float, Arg(help="bda: weight of the leader's gradient")] = 0.4
    terms: Annotated[int, Arg(help="ns: terms of the series; ls: steps of the linear solve")] = 40
    seed: Annotated[tuple[int, ...], Arg(help="one or several; each gets a folder of its own")] = (0,)
    out: Annotated[Path | None, Arg(help="run folder; runs/NAME-METHOD-TIME by default")] = None
    resume: Annotated[bool, Arg(help="go on with the run in --out")] = False
    save_every: Annotated[float, Arg(help="seconds between checkpoints")] = 30.0
    json: Annotated[bool, Arg(help="print the result as JSON and nothing else")] = False

    name: ClassVar[str]
    free: ClassVar[tuple[str, ...]] = ("out", "resume", "json", "save_every", "outer_steps")
    """options that may change when a run goes on"""

    @abc.abstractmethod
    def setup(self, seed: int) -> Setup:
        """The problem and the start that a seed stands for."""

    def measures(self, solution: bilax.Solution, folder: Path) -> dict[str, Any]:
        """What to report beside the objectives."""
        return {}

    def data_tag(self) -> str | None:
        """What the data are known by, if the options do not say it all; a run goes on only with the same."""
        return None

    def facts(self) -> dict[str, Any]:
        """What config.json holds beside the options."""
        return {"experiment": self.name, "data_tag": self.data_tag()}

    def callbacks(self, seed: int, folder: Path) -> list[Any]:
        """What to do between chunks beside writing the history."""
        return []

    def saving(self, folder: Path) -> bilax.Saving:
        """When to save."""
        return bilax.Saving(folder, every_seconds=self.save_every)

    def time_limit(self) -> float | None:
        """Seconds of training at the most."""
        return None

    def main(self) -> None:
        """Runs every seed, prints a table and exits as a shell expects."""
        if self.resume and self.out is None:
            refuse(f"bilax run {self.name}: --resume needs --out, the folder of the run to go on with.")
        if not self.seed:
            refuse(f"bilax run {self.name}: --seed needs at least one number.")
        if min(self.seed) < 0:
            refuse(f"bilax run {self.name}: --seed must not be negative, got {min(self.seed)}.")
        if self.clip is not None and not self.clip > 0:
            refuse(f"bilax run {self.name}: --clip must be positive, got {self.clip}.")
        method = self.make_method()
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        out = self.out or Path("runs") / f"{self.name}-{self.method}-{stamp}"
        folders = {seed: out / f"seed-{seed}" if len(self.seed) > 1 else out for seed in self.seed}
        results, code = {}, 0
        with jax.enable_x64(True):
            for seed, folder in folders.items():
                solution, results[seed] = self._run_one(method, seed, folder)
                code = EXIT_CODES.get(solution.status, 1 if solution.status.failed else code)
                if solution.status in EXIT_CODES:
                    break
        if self.json:
            print(json.dumps({str(seed): {"folder": str(folders[seed]), **results[seed]} for seed in results}))
        else:
            self._show(results, out)
        sys.exit(code)

    def make_method(self) -> bilax.Method:
        """The method that the options name."""
        known = [name.replace("_", "-") for name in bilax.RECIPES if name not in ("maml", "fomaml", "reptile")]
        if self.method not in known:
            refuse(f"bilax run {self.name}: unknown method '{self.method}': {nearest(self.method, known)}")
        recipe = bilax.RECIPES[self.method.replace("-", "_")]
        offered: dict[str, Any] = {
            "inner_steps": self.inner_steps,
            "step_size": self.step_size,
            "window": max(1, self.inner_steps // 2) if self.window is None else self.window,
            "mu": self.mu,
            "terms": self.terms,
            "max_steps": self.terms,
            "tolerance": None,
        }
        wanted = inspect.signature(recipe).parameters
        chosen = {name: value for name, value in offered.items() if name in wanted}
        try:
            return recipe(**chosen, **({} if self.start is None else {"start": self.start}))
        except (ValueError, TypeError) as error:
            refuse(f"bilax run {self.name}: {error}")

    def _run_one(self, method: bilax.Method, seed: int, folder: Path) -> tuple[bilax.Solution, dict[str, Any]]:
        setup = self.setup(seed)
        settings = dataclasses.asdict(self) | self.facts() | {"seed": seed, "out": str(folder)}
        began, new = time.perf_counter(), not (folder / "config.json").exists()
        try:
            if not (self.resume or new):
                raise FileExistsError(f"{folder} already holds a run: add --resume, or choose another --out.")
            check_config(folder, settings, self.free)
            before = write_config(folder, settings)
            limit = self.time_limit()
            limit = None if limit is None else max(0.0, limit - before)
            solution = bilax.solve(
                setup.problem, method, setup.x0, setup.y0, steps=self.outer_steps, data=setup.data, tasks=setup.tasks,
                optimizer=self._optimizer(self.rate),
                z_optimizer=None if self.z_rate is None else self._optimizer(self.z_rate),
                key=jax.random.key(seed), progress=not self.json,
                callbacks=[HistoryFile(folder), *self.callbacks(seed, folder)],
                saving=self.saving(folder / "checkpoints"), resume=self.resume, time_limit=limit,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            if new and not any((folder / "checkpoints").glob("*")):
                # Nothing has been done yet, and the corrected command should not find a run here.
                (folder / "config.json").unlink(missing_ok=True)
            refuse(f"bilax run {self.name}: {error}")
        except RuntimeError as error:
            if not isinstance(error.__cause__, OSError | ValueError):
                raise
            refuse(f"bilax run {self.name}: {error.__cause__}")
        seconds = before + time.perf_counter() - began
        try:
            measures = self.measures(solution, folder)
        except (OSError, ValueError) as error:
            refuse(f"bilax run {self.name}: {error}\nThe training is kept in {folder}.")
        return solution, write_result(folder, solution, {"seconds": seconds, "measures": measures})

    def _optimizer(self, rate: float) -> optax.GradientTransformation:
        step = {"sgd": optax.sgd, "adam": optax.adam}[self.optimizer](rate)
        return step if self.clip is None else optax.chain(optax.clip_by_global_norm(self.clip), step)

    def _show(self, results: dict[int, dict[str, Any]], out: Path) -> None:
        quantities = {
            name: [r[name] for r in results.values()] for name in ("steps", "upper", "lower", "residual", "k_bar")
        }
        for name in next(iter(results.values()))["measures"]:
            quantities[name] = [r["measures"].get(name, "–") for r in results.values()]
        quantities |= {name: [r[name] for r in results.values()] for name in ("seconds", "status")}
        show_table(
            f"{self.name} with {self.method}, K = {self.inner_steps}, α = {self.step_size:g}",
            ["", *(f"seed {seed}" for seed in results)],
            [[name, *values] for name, values in quantities.items()],
        )
        for result in results.values():
            if result["status"] != "step_limit":
                console.print(result["message"])
        console.print(f"wrote {out}; look at it with: bilax report {out}", style="dim", soft_wrap=True)


@dataclasses.dataclass
class Toy(Run):
    """min x + x y such that y minimises −sin(x y): the paper's non-convex example.

    Seeds 0, 1 and 2 are the paper's starts (5, 1), (1, 2) and (7, −1); others are drawn at random.
    """

    at: Annotated[tuple[float, float] | None, Arg(help="the start (x0, y0) in place of the seed's")] = None
    name = "toy"

    def setup(self, seed: int) -> Setup:
        starts = [toy.STARTS[1], toy.STARTS[0], toy.STARTS[2]]
        rng = np.random.default_rng(seed)
        x0, y0 = self.at or (starts[seed] if 0 <= seed < 3 else (rng.uniform(1, 10), rng.uniform(-2, 2)))
        return Setup(toy.PROBLEM, float(x0), float(y0))

    def measures(self, solution: bilax.Solution, folder: Path) -> dict[str, Any]:
        return {
            "x": float(solution.x),
            "y": float(solution.y),
            "|x − x*| / x*": abs(float(solution.x) - toy.X_STAR) / toy.X_STAR,
        }


@dataclasses.dataclass
class Convex(Run):
    """The paper's convex example in 50 + 100 dimensions, for IA-GM against IA-GM(A)."""

    method: Annotated[str, Arg(help="ia-gm, ia-gm-a or any other")] = "ia-gm-a"
    inner_steps: Annotated[int, Arg(help="K, follower steps per outer step")] = 20
    step_size: Annotated[float, Arg(help="α, the follower's step")] = 0.15
    outer_steps: Annotated[int, Arg(help="T, outer steps")] = 1000
    rate: Annotated[float, Arg(help="the outer step for x (and z)")] = 0.005
    reading: Annotated[Literal["sum", "norm"], Arg(help="‖v‖⁴ as Σ v⁴ or as the Euclidean norm's fourth power")] = "sum"
    name = "convex"

    def setup(self, seed: int) -> Setup:
        if seed == 0:
            return Setup(convex.problem(self.reading), *convex.start(convex.STARTS[self.reading]))
        vector = jnp.asarray(np.random.default_rng(seed).uniform(0, 1, convex.DIMENSION))
        return Setup(convex.problem(self.reading), vector, (vector, vector))

    def measures(self, solution: bilax.Solution, folder: Path) -> dict[str, Any]:
        distance = optax.tree.norm(jax.tree.map(lambda leaf: jnp.asarray(leaf) - 1, solution.y))
        return {"‖x − x*‖": float(np.linalg.norm(solution.x - 1)), "‖y − y*‖": float(distance)}


@dataclasses.dataclass
class CompareToy:
    """All methods on the paper's non-convex example from one start: a table, and a figure of their paths."""

    inner_steps: Annotated[int, Arg(help="K, follower steps per outer step")] = toy.INNER_STEPS
    step_size: Annotated[float, Arg(help="α, the follower's step")] = toy.STEP_SIZE
    outer_steps: Annotated[int, Arg(help="T, outer steps")] = toy.OUTER_STEPS
    at: Annotated[tuple[float, float], Arg(help="the start (x0, y0)")] = toy.STARTS[1]
    out: Annotated[Path, Arg(help="folder for the figure")] = Path("runs")

    def main(self) -> None:
        """Runs, prints, draws."""
        rows, paths = [], {}
        with jax.enable_x64(True), console.status("solving") as status:
            for name, method in toy.methods(self.inner_steps, self.step_size).items():
                status.update(f"solving with {name}")
                options: Any = {"steps": self.outer_steps, "optimizer": toy.OPTIMIZER, "record": _path}
                run = bilax.solve(toy.PROBLEM, method, *map(float, self.at), **options)
                began = time.perf_counter()
                bilax.solve(toy.PROBLEM, method, *map(float, self.at), **options)
                seconds = time.perf_counter() - began
                paths[name] = run.history.record
                hit = "yes" if toy.reached(run.x) else "no"
                rows.append([name, f"{run.x:.4f}", f"{run.y:.4f}", f"{run.upper:.4f}", hit, f"{1e3 * seconds:.1f}"])
        show_table(
            f"min x + xy, y minimises −sin(xy); from {self.at}; the solution is x* = 11π/4 = {toy.X_STAR:.4f}, "
            f"y* = −2, F* = {toy.F_STAR:.4f}",
            ["method", "x", "y", "F(x, y)", "within 2 % of x*", "time (ms)"],
            rows,
        )
        console.print(f"wrote {self._draw(paths)}", soft_wrap=True)

    def _draw(self, paths: dict[str, Any]) -> Path:
        pyplot = plt()
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2))
        xs, ys = np.meshgrid(np.linspace(1, 10, 300), np.linspace(-2, 2, 300))
        shown = left.contourf(xs, ys, xs + xs * ys, 30, cmap="Greys", alpha=0.75)
        figure.colorbar(shown, ax=left, label="F(x, y)")
        for k in range(-5, 5):
            curve = (2 * np.pi * k + np.pi / 2) / xs[0]
            curve[np.abs(curve) > 2] = np.nan
            left.plot(xs[0], curve, color="black", lw=0.9, ls=":", label="the follower's solutions" if k == 0 else None)
        for name, (x, y) in paths.items():
            left.plot(x, y, lw=2.4 if name == "IAPTT-GM" else 1.4, ls="--" if name == "IA-GM" else "-")
            right.semilogy(
                np.abs(x + x * y - toy.F_STAR) / abs(toy.F_STAR), label=name, ls="--" if name == "IA-GM" else "-"
            )
        left.plot(toy.X_STAR, -2, "k*", ms=12, clip_on=False, label="solution")
        left.plot(*self.at, "ko", ms=5, label="start")
        left.set(xlabel="x", ylabel="y", xlim=(1, 10), ylim=(-2, 2), title="where each method went")
        left.grid(visible=False)
        left.legend(loc="upper right", frameon=True, fontsize=7)
        right.set(xlabel="outer step", ylabel="$|F - F^*| / |F^*|$", title="error of the leader's objective")
        right.legend()
        path = self.out / "compare-toy.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        return path


def _path(x: Any, z: Any, info: bilax.Info) -> Any:
    return x, info.y
