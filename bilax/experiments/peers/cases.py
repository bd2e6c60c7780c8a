"""The work of `bilax bench peers`: what each case is, and the numbers that every side gets."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bilax.experiments.peers.orders import Given
from bilax.experiments.toy import figures as toy


class Case(NamedTuple):
    """One line of the comparison."""

    title: str
    kind: str
    """which objectives"""
    inner_steps: int
    step_size: float
    optimizer: tuple[str, float]
    """of x and of z: "sgd" or "adam", and its rate"""
    worst: bool
    """whether the sweep back begins at the iterate with the largest F (PTT), or at the last"""
    outer_steps: int
    """the paper's run length"""
    make: Callable[[int], Given]
    """the start and the data by a seed, in double precision"""
    dtype: str = "float32"
    ours: int = 1
    """outer steps in one sample of bilax"""
    peers: tuple[str, ...] = ("PyTorch", "higher", "TorchOpt", "BOAT", "Betty")
    quick: bool = False
    """whether `--quick` measures it"""
    checked: int = 0
    """after how many outer steps the points are compared"""

    def order(self) -> dict[str, Any]:
        """What the processes are told."""
        told = ("kind", "inner_steps", "step_size", "optimizer", "worst")
        return {name: getattr(self, name) for name in told}


def _toy(seed: int) -> Given:
    x, z = toy.STARTS[1]
    return Given([np.array(x)], [np.array(z)], [])


def _toy_case(inner_steps: int) -> Case:
    """The whole run is one sample of ours, as it is one compiled call."""
    settings: Any = {"dtype": "float64", "ours": toy.OUTER_STEPS, "quick": inner_steps == 40, "checked": 20}
    title, outer = f"numerical example, K = {inner_steps}", ("sgd", 0.1)
    return Case(title, "toy", inner_steps, toy.STEP_SIZE, outer, True, toy.OUTER_STEPS, _toy, **settings)


CASES = {
    "toy-40": _toy_case(40),
    "toy-400": _toy_case(400),
}
