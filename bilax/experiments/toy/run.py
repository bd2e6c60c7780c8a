"""`bilax run toy`."""

import dataclasses
import io
from typing import Annotated, Any

import jax
import numpy as np

import bilax
from bilax.app.run_folder import RunRecord
from bilax.app.show import Arg
from bilax.experiments.runner import End, Experiment, Setup
from bilax.experiments.toy import figures as toy

LONGEST = 10_000_000
"""follower steps that a report takes anew"""


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

    @classmethod
    def pictures(cls, record: RunRecord) -> dict[str, bytes]:
        """The landscape with the path of the run, for a report."""
        known = {field.name for field in dataclasses.fields(cls)}
        config = cls(**{name: value for name, value in record.config["config"].items() if name in known})
        if config.inner_steps * config.outer_steps > LONGEST:
            return {}
        with jax.enable_x64(True):
            setup, method = config.setup(int(record.config["config"]["seed"])), config.make_method()
            path = bilax.leader_path(
                setup.problem, method, setup.x0, setup.y0, steps=config.outer_steps, **config.optimizers()
            )
            figure = bilax.landscape(setup.problem, setup.x0, setup.y0, paths={config.method: path})
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=130)
        return {"the path over F, and the follower's minima": stream.getvalue()}
