"""Problems with known answers, each solved by one call of `solve_global`: what is proven of follower and leader."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import bilax
from bilax.app.show import Claim, Target, save_json, show_table, steps, stored_results
from bilax.experiments.suite.problems import MORE, PROBLEMS, Known

NEAR = 2e-3
"""how near to F*, in units of 1 + |F*|, F and its bound are to be"""


@dataclasses.dataclass
class Proofs(Target):
    """The suite's twelve problems and 27 more: solved, and proven to be globally optimal within how much."""

    name: ClassVar[str] = "proofs"
    claimant: ClassVar[str] = "what is to hold"

    def compute(self) -> dict[str, Any]:
        return problem_by_problem(self, solved)

    def show(self, results: dict[str, Any]) -> list[Path]:
        columns = ("best", "upper", "gap", "proven", "bound", "within", "seconds", "cpu_seconds")
        headings = ["problem", "F*", "F", "gap", "proven", "bound of F", "within", "seconds", "of processor"]
        rows = [[name, *(found[column] for column in columns)] for name, found in results.items()]
        show_table("solve_global, compilation included", headings, rows)
        return []

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        found = results.values()
        room = [NEAR * (1 + abs(f["best"])) for f in found]
        right = [abs(f["upper"] - f["best"]) <= near for f, near in zip(found, room, strict=True)]
        closed = [f["within"] is not None and f["within"] <= near for f, near in zip(found, room, strict=True)]
        wrong = sum(f["bound"] is not None and f["bound"] > f["best"] + 1e-3 for f in found)
        followers = sum(f["proven"] for f in found)
        return [
            Claim(f"F is F* within {NEAR} (1 + |F*|)", f"{sum(right)} of {len(right)}", all(right)),
            Claim(
                "the follower is proven to be a global minimiser",
                f"{followers} of {len(right)}",
                followers == len(right),
            ),
            Claim("the leader is proven to be optimal within as much", f"{sum(closed)} of {len(right)}", all(closed)),
            Claim("no bound of F lies above F*", f"{wrong} do", not wrong),
        ]


def problem_by_problem(target: Target, solve: Callable[[Known], dict[str, Any]]) -> dict[str, Any]:
    """Each stored when it is done; a run that was ended is gone on with."""
    problems = dict([*PROBLEMS.items()][:2]) if target.quick else PROBLEMS | MORE
    results = stored_results(target.path, target, ("redraw",)) or {}
    results = {} if results.keys() >= problems.keys() else results
    with steps(len(problems), target.name) as advance:
        for name, known in problems.items():
            if name not in results:
                results[name] = solve(known)
                save_json(target.path, target, results)
            advance(name)
    return results


def solved(known: Known) -> dict[str, Any]:
    """What `solve_global` says of a problem, and how long it took."""
    start, work = time.perf_counter(), time.process_time()
    found = bilax.solve_global(known.problem, known.x0, known.y0)
    times = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - work}
    proven = {"proven": found.certificate.rigorous, "bound": found.bound, "within": found.within}
    numbers = {"best": float(known.best), "upper": found.upper, "gap": found.certificate.gap}
    return numbers | proven | times
