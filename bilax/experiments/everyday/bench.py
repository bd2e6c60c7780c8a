"""How far the default call gets on ordinary problems, judged by solving the follower exactly where it ended."""

import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
import optax
from jaxtyping import PyTree

import bilax
from bilax.app.errors import nearest, refuse
from bilax.app.show import Arg, Claim, Target, load_json, save_json, show_table, steps
from bilax.experiments.everyday.best import search
from bilax.experiments.everyday.judges import Judge, ravel, unravel
from bilax.experiments.everyday.problems import PROBLEMS, Everyday

QUICK = ("tolls-entropy", "ridge-one", "duopoly", "wells")
PROGRESS, HONESTY, SECONDS = 0.99, 0.02, 20.0


def default_call(problem: bilax.Problem, x0: PyTree, y0: PyTree, data: tuple[Any, ...]) -> bilax.Solution:
    """What a user writes who knows nothing of methods."""
    return bilax.solve(problem, bilax.auto(), x0, y0, data=data)


def advised_call(problem: bilax.Problem, x0: PyTree, y0: PyTree, data: tuple[Any, ...]) -> bilax.Solution:
    """What a user writes who follows `diagnose`."""
    method = bilax.diagnose(problem, x0, y0, data=data).recommended
    return bilax.solve(problem, method, x0, y0, data=data, steps=1000, optimizer=optax.adam(0.05))


CALLS: dict[str, Callable[..., bilax.Solution]] = {"default": default_call, "advice": advised_call}


@dataclasses.dataclass
class EverydayBench(Target):
    """The default call on ordinary problems: share of the possible progress, honesty of what it claims, time."""

    only: Annotated[str | None, Arg(help="one problem alone")] = None
    advice: Annotated[bool, Arg(help="beside it, what `diagnose` recommends, with Adam 0.05 and 1,000 steps")] = False
    search: Annotated[bool, Arg(help="look for the best values anew (minutes) rather than read the stored ones")] = (
        False
    )
    limit: Annotated[float, Arg(help="seconds after which a call is ended")] = 120.0

    name: ClassVar[str] = "everyday"
    claimant: ClassVar[str] = "what is to hold"

    @property
    def path(self) -> Path:
        """A single problem does not replace the results of all."""
        return super().path if self.only is None else self.out / f"{self.name}-{self.only}.json"

    def compute(self) -> dict[str, Any]:
        if self.only not in (None, *PROBLEMS):
            refuse(f"bilax: unknown problem '{self.only}': {nearest(str(self.only), list(PROBLEMS))}")
        names = [self.only] if self.only else list(QUICK if self.quick else PROBLEMS)
        calls = [call for call in CALLS if call == "default" or self.advice]
        best = self._best(names)
        results: dict[str, Any] = {}
        with steps(len(names) * len(calls), "everyday") as advance:
            for name in names:
                everyday = PROBLEMS[name]()
                results[name] = {key: best[name][key] for key in ("start", "local", "best")}
                for call in calls:
                    end = in_new_process(name, call, self.limit)
                    results[name][call] = end | judge(everyday, best[name], end)
                    advance(f"{name}, {call}")
        return results

    def _best(self, names: Iterable[str]) -> dict[str, Any]:
        """The stored results of the search; those that are missing, or of another problem, are made and stored."""
        path = self.out / f"{self.name}-best.json"
        stored = load_json(path)["results"] if path.exists() else {}
        missing = [name for name in names if self.search or not _fits(stored.get(name), PROBLEMS[name]())]
        with steps(len(missing), "search") as advance:
            for name in missing:
                everyday = PROBLEMS[name]()
                stored[name] = search(everyday.judge, everyday.x0)._asdict()
                save_json(path, self, stored)
                advance(f"search, {name}")
        return stored

    def show(self, results: dict[str, Any]) -> list[Path]:
        columns = ["problem", "F at x0", "best", "F", "claimed", "progress, %", "SciPy, %", "seconds", "status"]
        for call in CALLS:
            rows = [[name, r["start"], r["best"], *_row(r, r[call])] for name, r in results.items() if call in r]
            if rows:
                title = f"{call}: F with the follower solved, F as claimed; beside it L-BFGS-B of SciPy from x0"
                show_table(title, columns, rows)
        return []

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        ends = {name: r["default"] for name, r in results.items()}
        return [
            _claim("at least 99 % of the possible progress", ends, lambda e: e["progress"] >= PROGRESS),
            _claim("the claimed F within 2 % of the true one", ends, lambda e: e["off"] <= HONESTY),
            _claim("under 20 s with compilation", ends, lambda e: bool(e["x"]) and e["seconds"] < SECONDS),
        ]


def _fits(stored: dict[str, Any] | None, everyday: Everyday) -> bool:
    return stored is not None and bool(np.isclose(stored["start"], _value(everyday.judge, everyday.x0), rtol=1e-6))


def _row(problem: dict[str, Any], end: dict[str, Any]) -> list[Any]:
    local = _progress(problem, problem["local"])
    percent = [100 * float(share) for share in (end["progress"], local)]
    return [end["value"], end["upper"], *percent, end["seconds"], end["status"].partition(":")[0]]


def _progress(best: dict[str, Any], value: float) -> float:
    return (best["start"] - value) / (best["start"] - best["best"])


def _claim(text: str, ends: dict[str, Any], holds: Callable[[dict[str, Any]], bool]) -> Claim:
    missed = [name for name, end in ends.items() if not holds(end)]
    here = f"{len(ends) - len(missed)} of {len(ends)}" + (f"; not {', '.join(missed)}" if missed else "")
    return Claim(text, here, not missed)


def judge(everyday: Everyday, best: dict[str, Any], end: dict[str, Any]) -> dict[str, float]:
    """F with the follower solved where a call ended, the share of possible progress, and how far the claim is off."""
    if not end["x"] or not np.isfinite(end["x"]).all():
        return {"value": np.nan, "progress": 0.0, "off": np.inf}
    value = _value(everyday.judge, unravel(np.asarray(end["x"]), everyday.x0))
    return {
        "value": value,
        "progress": _progress(best, value),
        "off": abs(end["upper"] - value) / max(abs(value), 1e-12),
    }


def _value(judge: Judge, x: Any) -> float:
    """F at x, which single precision may have put a little outside its bounds."""
    vector = ravel(x)
    inside = np.clip(vector, *judge.bounds)
    if not np.allclose(vector, inside, rtol=1e-5, atol=1e-5):
        return np.inf
    return judge.value(unravel(inside, x))


def in_new_process(name: str, call: str, limit: float) -> dict[str, Any]:
    """How a call ends in a Python of its own: as a user's first one, in single precision, with compilation."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(name, call, there), daemon=True)
    process.start()
    there.close()
    try:
        # A Python that imports JAX takes a few seconds before the clock of the call begins.
        return here.recv() if here.poll(limit + 20) else _failed("out of time", limit)
    except EOFError:
        return _failed("died", limit)
    finally:
        process.kill()
        process.join()


def _run(name: str, call: str, out: Connection) -> None:
    # Programs kept from an earlier run would hide what compilation takes.
    jax.config.update("jax_enable_compilation_cache", False)
    problem, x0, y0, _, data = PROBLEMS[name]()
    began = time.perf_counter()
    try:
        solution = jax.block_until_ready(CALLS[call](problem, x0, y0, data))
    except Exception as error:
        out.send(_failed(f"{type(error).__name__}: {str(error).splitlines()[0]}", time.perf_counter() - began))
        return
    seconds = time.perf_counter() - began
    plan = str(getattr(solution, "plan", "")).partition("\n")[0]
    x = ravel(jax.tree.map(np.asarray, solution.x)).tolist()
    out.send({"x": x, "upper": float(solution.upper), "seconds": seconds, "status": solution.status.name, "plan": plan})


def _failed(status: str, seconds: float) -> dict[str, Any]:
    return {"x": [], "upper": np.nan, "seconds": seconds, "status": status, "plan": ""}
