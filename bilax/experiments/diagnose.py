"""`bilax diagnose`: what the follower looks like at a point, and which method suits it."""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

import bilax
from bilax.app.errors import nearest, refuse
from bilax.app.show import Arg, show_findings
from bilax.experiments.convex import figures as convex
from bilax.experiments.suite import bench as suite
from bilax.experiments.toy import figures as toy


@dataclasses.dataclass
class DiagnoseToy:
    """The paper's non-convex example at (x, y)."""

    at: Annotated[tuple[float, float], Arg(help="the point (x, y)")] = toy.STARTS[1]

    def main(self) -> None:
        """Prints the diagnosis."""
        with jax.enable_x64(True):
            show_findings("diagnosis", bilax.diagnose(toy.PROBLEM, *map(float, self.at)))


@dataclasses.dataclass
class DiagnoseConvex:
    """The paper's convex example at its start."""

    reading: Annotated[convex.Reading, Arg(help="‖v‖⁴ as Σ v⁴ or as the Euclidean norm's fourth power")] = "sum"

    def main(self) -> None:
        """Prints the diagnosis."""
        with jax.enable_x64(True):
            show_findings(
                "diagnosis", bilax.diagnose(convex.problem(self.reading), *convex.start(convex.STARTS[self.reading]))
            )


@dataclasses.dataclass
class DiagnoseSuite:
    """One of the twelve problems with known answers, at the middle of its sets."""

    problem: Annotated[str, Arg(help="such as mb_2007_05")] = "mb_2007_05"

    def main(self) -> None:
        """Prints the diagnosis."""
        if self.problem not in suite.PROBLEMS:
            refuse(
                f"bilax diagnose suite: unknown problem '{self.problem}': {nearest(self.problem, list(suite.PROBLEMS))}"
            )
        known = suite.PROBLEMS[self.problem]
        with jax.enable_x64(True):
            point = jax.tree.map(jnp.asarray, (known.x0, known.y0))
            show_findings("diagnosis", bilax.diagnose(known.problem, *point))
