"""`bilax bench implicit`: one hypergradient of a solved follower, beside jaxopt in an environment of its own."""

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

from bilax.app.show import Arg, Claim, Target, console, save_json, show_table, steps, stored_results
from bilax.experiments.peers import work

PEER = ("jaxopt==0.8.5", "jax[cpu]==0.10.2", "numpy==2.4.6")
"""the newest versions that work together"""
LEVELS = {"float32": 1e-3, "float64": 1e-6}
"""the relative error of the hypergradient that each side must reach"""
SIZES = (100, 1000, 10_000)
QUICK = {"logistic": (100, 1000), "lasso": (100,), "svm box": (100,)}
SMOOTH = ("LBFGS + cg", "LBFGS + normal_cg")
PROXIMAL = ("ProximalGradient + normal_cg", "ProximalGradient + bicgstab")
VARIANTS = {
    "lasso": PROXIMAL,
    "elastic net": PROXIMAL,
    "nnls": (*PROXIMAL, "LBFGSB + normal_cg"),
    "svm box": (*PROXIMAL, "LBFGSB + normal_cg"),
    "svm simplex": (*PROXIMAL, "BlockCoordinateDescent + normal_cg"),
}
"""what jaxopt's documentation offers for each; normal_cg is its default for the linear system. Its block coordinate
descent on a mean of squares divides by a Lipschitz constant that is too large by the number of examples, so that it
does not arrive."""


class Side:
    """A process that computes hypergradients by order."""

    def __init__(self, command: list[str], kind: str):
        x64 = {"JAX_ENABLE_X64": str(int(kind == "float64"))}
        # Programs kept from an earlier run would hide what compilation takes.
        environment = os.environ | x64 | {"JAX_ENABLE_COMPILATION_CACHE": "0", "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended at {order}: its own message is above.")
        return json.loads(line)


@contextlib.contextmanager
def sides(commands: dict[str, list[str]], kind: str) -> Iterator[dict[str, Side]]:
    """New processes, ended at the end."""
    running = {name: Side(command, kind) for name, command in commands.items()}
    try:
        yield running
    finally:
        for side in running.values():
            side.process.kill()
            side.process.communicate()


@dataclasses.dataclass
class Implicit(Target):
    """Time, compilation and memory of a hypergradient at equal error, bilax and jaxopt in turn."""

    only: Annotated[str | None, Arg(help="one kind of follower alone, such as ridge")] = None
    size: Annotated[int | None, Arg(help="one number of follower variables alone")] = None
    repeats: Annotated[int, Arg(help="timed runs of each side")] = 9
    cache: Annotated[Path, Arg(help="folder for the peer's environment")] = (
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "bilax" / "peers"
    )

    name: ClassVar[str] = "benchmarks/implicit"
    claimant: ClassVar[str] = "what is to hold"
    free: ClassVar[tuple[str, ...]] = ("redraw", "only", "size", "repeats")
    in_cells: ClassVar[bool] = True

    def compute(self) -> dict[str, Any]:
        commands = {
            "bilax": [sys.executable, "-m", "bilax.experiments.peers.implicit_by_bilax"],
            "jaxopt": [str(environment(self.cache, PEER)), str(Path(__file__).with_name("implicit_by_jaxopt.py"))],
        }
        cases = QUICK if self.quick else dict.fromkeys(work.WORKS, SIZES)
        lines = [(n, s) for n, some in cases.items() for s in some if self.only in (None, n) and self.size in (None, s)]
        results = stored_results(self.path, self, self.free) or {"versions": list(PEER), "lines": []}
        with tempfile.TemporaryDirectory() as folder, steps(2 * len(lines), "implicit") as advance:
            for name, size in lines:
                given = work.make(name, size, self.seed)
                exact, auto = self._reference(commands, name, given, Path(folder))
                for kind in LEVELS:
                    advance(f"{name}, {size}, {kind}")
                    work.store(given, Path(folder), kind)
                    line = self._line(commands, name, size, kind, exact["slope"], folder)
                    results["lines"] = with_line(results["lines"], line | {"reference": exact, "auto": auto})
                    save_json(self.path, dataclasses.replace(self, only=None, size=None), results)
        return results

    @staticmethod
    def _reference(commands: dict[str, list[str]], name: str, given: work.Given, folder: Path) -> tuple[Any, str]:
        work.store(given, folder, "float64")
        with sides({"bilax": commands["bilax"]}, "float64") as one:
            exact = one["bilax"].ask(do="reference", work=name, folder=str(folder))
            return exact, one["bilax"].ask(do="chosen", work=name, folder=str(folder))["variant"]

    def _line(
        self, commands: dict[str, list[str]], name: str, size: int, kind: str, exact: float, folder: str
    ) -> dict[str, Any]:
        level = LEVELS[kind]
        order = {"work": name, "folder": folder, "level": level, "most": 2000 if size <= 1000 else 500}
        ours = ("LBFGS + cg",) + (("Newton + dense", "LBFGS + dense") if size <= 100 else ())
        ours += () if work.WORKS[name].shape == "plain" else ("FISTA + cg",)
        with sides(commands, kind) as running:
            best = {
                "bilax": cheapest(running["bilax"], order, ours, exact, 1e-9),
                "jaxopt": cheapest(running["jaxopt"], order, VARIANTS.get(name, SMOOTH), exact, 1e-11),
            }
        found = self._timed(commands, kind, order, best, exact)
        return {"work": name, "size": size, "kind": kind, "level": level, **found}

    def _timed(
        self, commands: dict[str, list[str]], kind: str, order: dict[str, Any], best: dict[str, Any], exact: float
    ) -> dict[str, Any]:
        """Both settings in fresh processes, in turn."""
        found: dict[str, Any] = {}
        with sides(commands, kind) as running:
            for side, one in running.items():
                compiled = one.ask(do="compile", **order, variant=best[side]["variant"])["seconds"]
                found[side] = best[side] | {"compile": compiled, "all": []}
            for i in range((3 if self.quick else self.repeats) + 1):
                for side, one in running.items():
                    run = one.ask(do="run", **{key: best[side][key] for key in ("tolerance", "linear")})
                    found[side]["all"] += [run["seconds"]] if i else []
                    found[side] |= {"error": abs(run["slope"] / exact - 1), "steps": run["steps"]}
            for side, one in running.items():
                found[side] |= one.ask(do="peak")
                found[side]["seconds"] = min(found[side]["all"])
        return found

    def show(self, results: dict[str, Any]) -> list[Path]:
        console.print("jaxopt's environment: " + ", ".join(results["versions"]), style="dim")
        rows = [_row(line) for line in results["lines"]]
        columns = ["follower", "d", "float", "by", "ms", "steps", "error", "jaxopt by", "ms", "steps", "error"]
        show_table(
            "One hypergradient at equal error; then jaxopt's time, compilation and memory over bilax's",
            [*columns, "time", "compile", "memory"],
            rows,
        )
        return []

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        texts = {"seconds": "faster than jaxopt", "compile": "compiles sooner", "megabytes": "takes less memory"}
        lines, claims = results["lines"], []
        for key, text in texts.items():
            behind = [line for line in lines if not ahead(line, key)]
            names = ", ".join(f"{line['work']} {line['size']} {line['kind'][-2:]}" for line in behind)
            here = f"{len(lines) - len(behind)} of {len(lines)}" + (f"; not {names}" if names else "")
            claims.append(Claim(text, here, not behind))
        return claims


def with_line(lines: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines with one more, or with one made anew, in the order of the works."""

    def place(line):
        return list(work.WORKS).index(line["work"]), line["size"], line["kind"]

    return sorted([line for line in lines if place(line) != place(new)] + [new], key=place)


def environment(cache: Path, packages: tuple[str, ...]) -> Path:
    """The Python of a virtual environment with these packages, which is made if it is not there."""
    folder = cache / "-".join(packages).replace("==", "-").replace("[", "-").replace("]", "")
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        console.print(f"making an environment for {', '.join(packages)} ...", style="dim")
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", *packages]
        subprocess.run(pip, check=True)
        ready.touch()
    return python


def cheapest(
    side: Side, order: dict[str, Any], variants: tuple[str, ...], exact: float, least: float
) -> dict[str, Any]:
    """The fastest variant at the loosest tolerance that reaches the level; else the most exact of all that was met."""
    found: list[dict[str, Any]] = []
    for variant in variants:
        side.ask(do="compile", **order, variant=variant)
        quickest = min((one["seconds"] for one in found if one["reached"]), default=math.inf)
        found.append(loosest(side, variant, order["level"], exact, least, 3 * quickest, order["most"]))
    good = [one for one in found if one["reached"]]
    return min(good, key=lambda one: one["seconds"]) if good else min(found, key=lambda one: one["error"])


def loosest(
    side: Side, variant: str, level: float, exact: float, least: float, limit: float, most: int
) -> dict[str, Any]:
    """The loosest tolerance that reaches the level, then that of the linear system, in steps of √10.

    Ends early at a run longer than `limit` seconds, or of `most` steps.
    """

    def run(tolerance: float, linear: float) -> dict[str, Any]:
        order = {"do": "run", "tolerance": tolerance, "linear": linear}
        first = side.ask(**order)
        # What takes long is told well enough by one run.
        seconds = [first["seconds"]] + [side.ask(**order)["seconds"] for _ in range(2) if first["seconds"] < 1]
        error = abs(first["slope"] / exact - 1)
        found = {"variant": variant, "tolerance": tolerance, "linear": linear, "steps": first["steps"]}
        found |= {"error": error if math.isfinite(error) else math.inf, "reached": error <= level}
        return found | {"seconds": min(seconds)}

    # With level / 10 an SVM's derivative was off by the level from the linear system alone.
    linear, tolerance = level / 30, 0.1
    best = run(1.0, linear)
    one = best
    # A run that took all the steps there are would be the same at any tighter tolerance.
    while not best["reached"] and tolerance >= least and one["seconds"] < limit and one["steps"] < most:
        one = run(tolerance, linear)
        best = one if one["reached"] or one["error"] < best["error"] else best
        tolerance /= 10
    if best["reached"]:
        looser = run(best["tolerance"] * math.sqrt(10), linear)
        best = looser if looser["reached"] else best
        # A little more work on the follower may allow less on the linear system.
        best = min((looser_linear(run, best, factor) for factor in (1.0, math.sqrt(0.1), 0.1)), key=cost)
    return best


def looser_linear(
    run: Callable[[float, float], dict[str, Any]], found: dict[str, Any], factor: float
) -> dict[str, Any]:
    """The loosest tolerance of the linear system that still reaches the level, with the follower's times `factor`."""
    best = found if factor == 1.0 else run(factor * found["tolerance"], found["linear"])
    while best["reached"] and best["linear"] < 0.3:
        one = run(best["tolerance"], math.sqrt(10) * best["linear"])
        if not one["reached"]:
            break
        best = one
    return best


def cost(one: dict[str, Any]) -> tuple[bool, float]:
    """What reaches the level comes first, then what is quick."""
    return not one["reached"], one["seconds"]


def reached(line: dict[str, Any], side: str) -> bool:
    """Whether a side came to the level."""
    return line[side]["error"] <= 1.5 * line["level"]


def ahead(line: dict[str, Any], key: str) -> bool:
    """Whether bilax comes to the level, and jaxopt does not or takes more."""
    return reached(line, "bilax") and (not reached(line, "jaxopt") or ratio(line, key) >= 1)


def ratio(line: dict[str, Any], key: str) -> float:
    """What jaxopt takes over what bilax takes."""
    return line["jaxopt"][key] / line["bilax"][key]


def _row(line: dict[str, Any]) -> list[str]:
    row = [line["work"], f"{line['size']:,}", line["kind"][-2:]]
    for side in ("bilax", "jaxopt"):
        one = line[side]
        by = one["variant"].replace("ProximalGradient", "PG").replace("BlockCoordinateDescent", "BCD")
        by += " (auto)" if side == "bilax" and by.startswith(line["auto"]) else ""
        missed = "" if reached(line, side) else " (missed)"
        row += [
            by,
            f"{1e3 * one['seconds']:.3g}",
            str(one["steps"]),
            f"{one['error']:.0e}{missed}",
        ]
    return row + [f"{ratio(line, key):.2f}" for key in ("seconds", "compile", "megabytes")]
