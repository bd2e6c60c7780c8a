"""`bilax bench stochastic`: mini-batch methods beside benchmark_bilevel's own solver classes, in one run."""

import dataclasses
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import scipy.optimize

from bilax.app.errors import nearest, refuse
from bilax.app.show import Arg, Claim, Target, console, save_json, show_table, steps, stored_results
from bilax.experiments.peers.implicit import Side, environment, sides
from bilax.experiments.stochastic import problems
from bilax.experiments.stochastic.settings import PEERS, setting

PEER = ("benchopt==1.10.0", "jax[cpu]==0.10.2", "numpy==2.4.6")
"""what its repository needs, at versions that work together"""
HOW_TO_GET = (
    "benchmark_bilevel is not here, so bilax is measured alone. To have it beside: "
    "git clone https://github.com/benchopt/benchmark_bilevel SOMEWHERE, then add --repository SOMEWHERE"
)
LOOKS = 16
"""at how many points of a run its result is known"""
BUDGETS = (1, 4, 8, 16)
"""of these looks, the ones that are judged: 1/16, 1/4, 1/2 and all of the time that benchmark_bilevel took"""
SEEDS, TOGETHER = (1, 2, 3), 10
"""seeds of single runs, and how many run together on bilax's side"""
BATCH = 64


class Case(NamedTuple):
    """A problem of a size, and how its results are judged."""

    settings: str
    """whose tuned settings are taken"""
    make: Callable[[], problems.Task]
    quantity: str
    """what is compared, lower is better"""
    dense: bool = False
    """whether both sides get a quadratic's examples as matrices, as benchmark_bilevel stores them, or by their factors,
    which is the same at a hundredth of the work"""


CASES = {
    "quadratic 32768": Case("quadratic", functools.partial(problems.quadratic, 32_768, 1024, 100, 10), "‖∇Φ‖²"),
    "quadratic 1024": Case("quadratic", functools.partial(problems.quadratic, 1024, 1024, 100, 100), "‖∇Φ‖²"),
    "quadratic 1024 by matrices": Case(
        "quadratic", functools.partial(problems.quadratic, 1024, 1024, 100, 100), "‖∇Φ‖²", dense=True
    ),
    "ijcnn1": Case("logistic", problems.logistic, "Φ − Φ*"),
    "cleaning 0.5": Case("cleaning 0.5", functools.partial(problems.cleaning, 0.5), "test error"),
    "cleaning 0.9": Case("cleaning 0.9", functools.partial(problems.cleaning, 0.9), "test error"),
}
QUICK = {"quadratic 1024": ("soba",), "ijcnn1": ("soba", "saba"), "cleaning 0.5": ("soba",)}


@dataclasses.dataclass
class Stochastic(Target):
    """Time per 1,000 steps, and the result at equal times: same problems, batches and settings, in turn.

    Times are those of the processor, so that others who use the machine hardly matter; the wall clock's are stored too.
    Every line is stored as it is made, and one that is there is not made again: the command can be broken off.
    """

    repository: Annotated[Path | None, Arg(help="where benchmark_bilevel's repository was cloned to")] = None
    only: Annotated[str | None, Arg(help="one problem alone, such as ijcnn1")] = None
    method: Annotated[str | None, Arg(help="one method alone, such as soba")] = None
    again: Annotated[bool, Arg(help="make lines that are stored already once more")] = False
    seconds: Annotated[float, Arg(help="how long one run of benchmark_bilevel is to take")] = 1.0
    cache: Annotated[Path, Arg(help="folder for the peer's environment")] = (
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "bilax" / "peers"
    )

    name: ClassVar[str] = "benchmarks/stochastic"
    claimant: ClassVar[str] = "what is to hold"
    in_cells: ClassVar[bool] = True
    free: ClassVar[tuple[str, ...]] = ("redraw", "only", "method", "again", "seconds")

    def compute(self) -> dict[str, Any]:
        commands = {"bilax": [sys.executable, "-m", "bilax.experiments.peers.stochastic_side"]}
        if self.repository is None:
            console.print(HOW_TO_GET, style="dim")
        else:
            commands |= {"peer": self._peer()}
        results = stored_results(self.path, self, self.free) or {"versions": list(PEER), "lines": {}}
        wanted = [
            (case, method)
            for case, method in self._wanted()
            if self.again or f"{case}, {method}" not in results["lines"]
        ]
        with steps(len(wanted), "stochastic") as advance:
            for case in dict.fromkeys(case for case, _ in wanted):
                with tempfile.TemporaryDirectory() as folder, sides(commands, "float32") as running:
                    task = self._loaded(case, running, Path(folder))
                    if case == "ijcnn1" and "lowest" not in results:
                        results["lowest"] = lowest(task)
                        save_json(self.path, self, results)
                    known = {"reference": results["lowest"]} if case == "ijcnn1" else {}
                    for method in (method for one, method in wanted if one == case):
                        advance(f"{case}, {method}")
                        line = known | self._line(case, method, task, running, folder)
                        # Another process may have stored a line in the meantime.
                        lines = (stored_results(self.path, self, self.free) or results)["lines"]
                        results["lines"] = {**lines, f"{case}, {method}": line}
                        save_json(self.path, self, results)
        return results

    def _peer(self) -> list[str]:
        assert self.repository is not None
        if not (self.repository / "solvers" / "soba.py").is_file():
            refuse(f"{self.repository} holds no solvers/soba.py, so it is no clone of benchmark_bilevel.")
        side = Path(__file__).with_name("benchmark_side.py")
        return [str(environment(self.cache, PEER)), str(side), str(self.repository)]

    def _wanted(self) -> Iterator[tuple[str, str]]:
        for word, known in ((self.only, CASES), (self.method, PEERS)):
            if word is not None and word not in known:
                refuse(f"bilax bench stochastic: '{word}' is unknown: {nearest(word, list(known))}")
        for case in CASES if self.only is None else (self.only,):
            methods = QUICK.get(case, ()) if self.quick else PEERS
            yield from ((case, one) for one in (methods if self.method is None else (self.method,)))

    def _loaded(self, case: str, running: dict[str, Side], folder: Path) -> problems.Task:
        """The problem, handed to both sides."""
        task = CASES[case].make()
        for level in ("lower", "upper"):
            for i, leaf in enumerate(getattr(task, level)):
                np.save(folder / f"{level}-{i}.npy", leaf)
        np.save(folder / "x0.npy", task.x0)
        np.save(folder / "y0.npy", task.y0)
        kind = type(task.lower).__name__
        for side in running.values():
            side.ask(do="load", folder=str(folder), kind=kind, dense=CASES[case].dense, batch=BATCH)
        return task

    def _line(
        self, case: str, method: str, task: problems.Task, running: dict[str, Side], folder: str
    ) -> dict[str, Any]:
        chosen = setting(CASES[case].settings, method)
        order = {"method": method, "batch": BATCH, **chosen._asdict()}
        chunk = self._chunk(running, order, folder)
        for side in running.values():
            side.ask(do="begin", **order, chunk=chunk)
        found: dict[str, Any] = {name: [] for name in running}
        for seed in (0, *(SEEDS[:1] if self.quick else SEEDS)):  # the first one compiles
            for name, side in running.items():
                run = self._run(side, task, case, chunk, folder, seed, 1)
                found[name] += [run] if seed else []
        # So short a chunk that it is one look after the other would be another program.
        shorter = max(chunk // 4, min(chunk, 8))
        running["bilax"].ask(do="begin", **order, chunk=shorter)
        found["ten"] = [self._run(running["bilax"], task, case, shorter, folder, seed, TOGETHER) for seed in (0, 1)][1:]
        return {"tuned": chosen.tuned, "quantity": CASES[case].quantity, **found}

    @staticmethod
    def _run(
        side: Side, task: problems.Task, case: str, chunk: int, folder: str, seed: int, seeds: int
    ) -> dict[str, Any]:
        out = f"{folder}/points.npz"
        ran = side.ask(do="run", seed=seed, seeds=seeds, chunks=LOOKS, out=out)
        values = judged(task, CASES[case].quantity, out) if seed else []
        seconds = [ran["seconds"][budget - 1] for budget in BUDGETS]
        return {"steps": LOOKS * chunk, "seconds": seconds, "wall": ran["wall"], "values": values}

    def _chunk(self, running: dict[str, Side], order: dict[str, Any], folder: str) -> int:
        """How many steps of benchmark_bilevel (of bilax where it is alone) take a sixteenth of the time."""
        side, tried = running.get("peer", running["bilax"]), 32
        side.ask(do="begin", **order, chunk=tried)
        runs = [side.ask(do="run", seed=0, seeds=1, chunks=4, out=f"{folder}/points.npz") for _ in range(2)]
        per_step = runs[-1]["seconds"][-1] / (4 * tried)  # the first one compiles
        return max(1, round((0.2 if self.quick else self.seconds) / LOOKS / per_step))

    def show(self, results: dict[str, Any]) -> list[Path]:
        lines = results["lines"]
        rows = [[*name.split(", "), *_row(line)] for name, line in lines.items()]
        show_table(
            f"The processor's time for 1,000 steps (ms), batches of {BATCH}; of ten seeds together for each of them",
            ["problem", "method", "peer", "bilax", "ratio", "by the wall", "ten seeds", "ratio"],
            rows,
        )
        show_table(
            "The result after 1/16, 1/4, 1/2 and all of the peer's time (medians)",
            ["problem", "method", "quantity", "seconds", "peer", "bilax", "ten seeds"],
            [[*name.split(", "), line["quantity"], *_results(line)] for name, line in lines.items()],
        )
        return []

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        both = {name: line for name, line in results["lines"].items() if "peer" in line}
        if not both:
            return []
        kinds = [
            ("a step at least as fast as benchmark_bilevel's", lambda line: ratio(line, "bilax") >= 1),
            ("1.3 times as fast for each of ten seeds", lambda line: ratio(line, "ten") >= 1.3),
            ("as good at every budget of time", as_good),
        ]
        claims = []
        for text, holds in kinds:
            behind = [name for name, line in both.items() if not holds(line)]
            here = f"{len(both) - len(behind)} of {len(both)}" + (f"; not {'; '.join(behind)}" if behind else "")
            claims.append(Claim(text, here, not behind))
        return claims


def lowest(task: problems.Task) -> float:
    """The lowest Φ that SciPy's L-BFGS-B finds on the exact value function of the logistic problem."""
    lower, upper = (
        problems.Signed(*(np.asarray(leaf, np.float64) for leaf in part)) for part in (task.lower, task.upper)
    )
    options: Any = {"args": (lower, upper), "jac": True, "method": "L-BFGS-B", "bounds": [(-12, 12)] * len(task.x0)}
    found = scipy.optimize.minimize(problems.value_function, np.full(len(task.x0), -8.0), **options)
    return float(found.fun)


def judged(task: problems.Task, quantity: str, out: str) -> list[list[float]]:
    """What was reached at each look that counts: one number per seed."""
    points = np.load(out)
    shapes = task.x0.shape, task.y0.shape
    first = quantity.split(" −")[0]

    def value(seed, look):
        x, y = (points[one][seed, look].reshape(shape) for one, shape in zip("xy", shapes, strict=True))
        return task.judge(x, y)[first] if np.isfinite(x).all() else np.inf

    return [[value(seed, budget - 1) for seed in range(len(points["x"]))] for budget in BUDGETS]


def per_thousand(line: dict[str, Any], side: str, clock: str = "seconds") -> float:
    """Milliseconds of the processor (or by the "wall" clock) for 1,000 steps, for each seed that ran."""
    seeds = len(line[side][0]["values"][0])
    taken = [np.max(run[clock]) / run["steps"] for run in line[side]]
    return 1e6 * float(np.median(taken)) / seeds


def ratio(line: dict[str, Any], side: str, clock: str = "seconds") -> float:
    """What the peer takes over what bilax takes."""
    return per_thousand(line, "peer", clock) / per_thousand(line, side, clock)


def at_budgets(line: dict[str, Any], side: str) -> list[np.ndarray]:
    """What a side's seeds have reached when the peer has taken its looks; before its own first look nothing.

    A run that ended before stays where it ended. Seeds that run together are given that time for each of them.
    """
    budgets = np.median([run["seconds"] for run in line["peer" if "peer" in line else "bilax"]], axis=0)
    found = []
    for budget in budgets:
        reached = []
        for run in line[side]:
            seeds = len(run["values"][0])
            # A look a little late by the clock's noise is still this budget's.
            looks = [i for i, s in enumerate(run["seconds"]) if s / seeds <= 1.02 * budget]
            reached += run["values"][looks[-1]] if looks else [np.inf] * seeds
        found.append(np.asarray(reached, float) - line.get("reference", 0.0))
    return found


def as_good(line: dict[str, Any]) -> bool:
    """Whether bilax's median is within 5 % of the peer's, or not worse than the worst of its seeds, at each budget."""
    pairs = zip(at_budgets(line, "bilax"), at_budgets(line, "peer"), strict=True)
    return all(np.median(ours) <= max(1.05 * np.median(theirs), theirs.max()) for ours, theirs in pairs)


def _row(line: dict[str, Any]) -> list[str]:
    if "peer" not in line:
        return ["–", f"{per_thousand(line, 'bilax'):.3g}", "–", "–", f"{per_thousand(line, 'ten'):.3g}", "–"]
    times = [f"{per_thousand(line, side):.3g}" for side in ("peer", "bilax", "ten")]
    ratios = [f"{ratio(line, *what):.2f}" for what in (("bilax",), ("bilax", "wall"), ("ten",))]
    return [*times[:2], *ratios[:2], times[2], ratios[2]]


def _results(line: dict[str, Any]) -> list[str]:
    budgets = np.median([run["seconds"] for run in line["peer" if "peer" in line else "bilax"]], axis=0)
    medians = {side: [f"{np.median(one):.2g}" for one in at_budgets(line, side)] for side in SIDES if side in line}
    medians["ten"] = medians["ten"][:2]  # they run for a quarter of the steps
    return [" ".join(f"{one:.2g}" for one in budgets), *(" ".join(medians.get(side, ["–"])) for side in SIDES)]


SIDES = ("peer", "bilax", "ten")
