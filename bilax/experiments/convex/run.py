"""`bilax run convex`."""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilax.app.show import Arg
from bilax.experiments.convex import figures as convex
from bilax.experiments.runner import End, Experiment, Setup


@dataclasses.dataclass
class Convex(Experiment):
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

    def measures(self, end: End) -> dict[str, Any]:
        solution = end.solution
        distance = optax.tree.norm(jax.tree.map(lambda leaf: jnp.asarray(leaf) - 1, solution.y))
        return {"‖x − x*‖": float(np.linalg.norm(solution.x - 1)), "‖y − y*‖": float(distance)}
