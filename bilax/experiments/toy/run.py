"""`bilax run toy`."""

import dataclasses
from typing import Annotated, Any

import numpy as np

from bilax.app.show import Arg
from bilax.experiments.runner import End, Experiment, Setup
from bilax.experiments.toy import figures as toy


@dataclasses.dataclass
class Toy(Experiment):
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

    def measures(self, end: End) -> dict[str, Any]:
        solution = end.solution
        return {
            "x": float(solution.x),
            "y": float(solution.y),
            "|x − x*| / x*": abs(float(solution.x) - toy.X_STAR) / toy.X_STAR,
        }
