"""The same problems by the default call, `bilax.auto()`: how many are right, and how many wrong without saying so."""

import dataclasses
import time
from pathlib import Path
from typing import Any, ClassVar

import bilax
from bilax.app.show import Claim, Target, show_table
from bilax.experiments.suite.problems import PROBLEMS, Known
from bilax.experiments.suite.proofs import NEAR, problem_by_problem


@dataclasses.dataclass
class ByAuto(Target):
    """The suite's twelve problems and 27 more through `bilax.auto()`."""

    name: ClassVar[str] = "auto"
    claimant: ClassVar[str] = "what is to hold"

    def compute(self) -> dict[str, Any]:
        return problem_by_problem(self, solved)

    def show(self, results: dict[str, Any]) -> list[Path]:
        rows = [
            [name, *(found[key] for key in ("best", "upper")), _right(found), found["status"], found["cpu_seconds"]]
            for name, found in results.items()
        ]
        headings = ["problem", "F*", "F", "right", "status", "seconds of processor, compilation included"]
        show_table("bilax.auto()", headings, rows)
        return []

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        suite = [found for name, found in results.items() if name in PROBLEMS]
        right = [sum(map(_right, some)) for some in (suite, results.values())]
        wrong = [name for name, found in results.items() if found["status"] == "converged" and not _right(found)]
        told = f"{len(wrong)} of {len(results)}" + (f": {', '.join(wrong)}" if wrong else "")
        return [
            Claim(
                f"F is F* within {NEAR} (1 + |F*|) on the suite's twelve",
                f"{right[0]} of {len(suite)} ({right[1]} of all {len(results)})",
                right[0] == len(suite),
            ),
            Claim("none that ends as converged is wrong", told, not wrong),
        ]


def _right(found: dict[str, Any]) -> bool:
    return abs(found["upper"] - found["best"]) <= NEAR * (1 + abs(found["best"]))


def solved(known: Known) -> dict[str, Any]:
    """Where `auto` ends, and how."""
    work = time.process_time()
    found = bilax.solve(known.problem, bilax.auto(), known.x0, known.y0)
    seconds = time.process_time() - work
    numbers = {"best": float(known.best), "upper": float(found.upper), "status": found.ended.name}
    return numbers | {"cpu_seconds": seconds}
