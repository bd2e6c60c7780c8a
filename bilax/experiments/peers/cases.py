"""The work of `bilax bench peers`: what each case is, and the numbers that every side gets."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from bilax import models
from bilax.datasets import load
from bilax.experiments.cleaning import problem as cleaning
from bilax.experiments.peers.orders import Given
from bilax.experiments.toy import figures as toy

EVERY_PEER = ("PyTorch", "higher", "TorchOpt", "BOAT", "Betty")
WAY, QUERIES = 5, 15


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
    """the start and the data by a seed"""
    dtype: str = "float32"
    ours: int = 1
    """outer steps in one sample of bilax, which is one call of `solve`"""
    checkpoint: bool = False
    """whether bilax keeps √K states and computes the others again"""
    network: str = "ConvNet4"
    """of `bilax.models`, for what learns from few pictures"""
    peers: tuple[str, ...] = EVERY_PEER
    quick: bool = False
    """whether `--quick` measures it"""
    checked: int = 0
    """after how many outer steps the points are compared"""

    def order(self) -> dict[str, Any]:
        """What the processes are told."""
        told = ("kind", "inner_steps", "step_size", "optimizer", "worst", "checkpoint", "network")
        return {name: getattr(self, name) for name in told}


def _toy(seed: int) -> Given:
    x, z = toy.STARTS[1]
    return Given([np.array(x)], [np.array(z)], [])


def _toy_case(inner_steps: int) -> Case:
    settings: Any = {"dtype": "float64", "ours": toy.OUTER_STEPS, "quick": inner_steps == 40, "checked": 20}
    title, outer = f"numerical example, K = {inner_steps}", ("sgd", 0.1)
    return Case(title, "toy", inner_steps, toy.STEP_SIZE, outer, True, toy.OUTER_STEPS, _toy, **settings)


def _cleaning(examples: int, hidden: int, seed: int) -> Given:
    train, test = load("mnist")
    parts = cleaning.split(train.join(test), (examples, examples, 1, 1), seeds=(seed,))
    network = cleaning.network(jax.random.key(seed), parts.train.inputs.shape[1], parts.classes, hidden)
    data = [parts.train.inputs, parts.noisy[0], parts.validation.inputs, parts.validation.labels]
    return Given([np.zeros(examples)], jax.tree.leaves(network), data)


def _cleaning_case(worst: bool) -> Case:
    how = "PTT" if worst else "the full sweep"
    make = functools.partial(_cleaning, 5000, 300)
    return Case(f"hyper-cleaning, {how}", "cleaning", 50, 0.03, ("adam", 0.01), worst, 3000, make)


def _large_case(inner_steps: int, checkpoint: bool) -> Case:
    """A network of 1,000,120 weights, 64 examples to learn from and 64 to judge by."""
    title = f"a follower of 10⁶ weights, K = {inner_steps}" + (", checkpoints" if checkpoint else "")
    settings: Any = {"ours": max(4, 800 // inner_steps), "checkpoint": checkpoint, "peers": ("PyTorch", "higher")}
    make = functools.partial(_cleaning, 64, 1258)
    return Case(title, "cleaning", inner_steps, 0.03, ("adam", 0.01), False, 3000, make, **settings)


def _pictures(side: int, channels: int, tasks: int, seed: int) -> list[np.ndarray]:
    """Tasks of noise: what pictures show does not matter to the clock."""
    draw, labels = np.random.default_rng(seed), np.arange(WAY, dtype=np.int32)
    found = []
    for count in (1, QUERIES):
        found.append(draw.random((tasks, WAY * count, side, side, channels), dtype=np.float32))
        found.append(np.tile(np.repeat(labels, count), (tasks, 1)))
    return found


def _few_shot(kind: str, network_name: str, side: int, channels: int, filters: int, seed: int) -> Given:
    data = _pictures(side, channels, 4, seed)
    network = getattr(models, network_name)(channels, filters, jax.random.key(seed))
    features = jax.eval_shape(network, data[0][0]).shape[1]
    draw = np.random.default_rng(seed + 1)
    head = [0.1 * draw.standard_normal((features, WAY)) / np.sqrt(features), np.zeros(WAY)]
    leaves = jax.tree.leaves(network)
    return Given(leaves, head, data) if kind == "heads" else Given([], leaves + head, data)


def _few_shot_case(kind: str, side: int, channels: int, filters: int, network="ConvNet4", **more: Any) -> Case:
    method, steps, rate = ("ANIL with PTT", 10, 0.1) if kind == "heads" else ("MAML", 5, 0.01)
    title = f"{method}, {network}, {side} × {side} × {channels}, {filters} filters, 4 tasks"
    make = functools.partial(_few_shot, kind, network, side, channels, filters)
    settings: Any = {"ours": 16, "network": network, "peers": (*EVERY_PEER, "learn2learn"), **more}
    return Case(title, kind, steps, rate, ("adam", 1e-3), kind == "heads", 2000, make, **settings)


FEW: Any = {"peers": ("PyTorch", "higher"), "ours": 8}
"""for what takes long: the rival, and the way of the paper's authors"""

CASES = {
    "toy-40": _toy_case(40),
    "toy-400": _toy_case(400),
    "cleaning-ptt": _cleaning_case(True),
    "cleaning-full": _cleaning_case(False),
    "anil-omniglot": _few_shot_case("heads", 28, 1, 64, quick=True),
    "anil-cifar-fs": _few_shot_case("heads", 32, 3, 64),
    "anil-84": _few_shot_case("heads", 84, 3, 32, **FEW),
    "maml-omniglot": _few_shot_case("networks", 28, 1, 64),
    "maml-cifar-fs": _few_shot_case("networks", 32, 3, 64, **FEW),
    "anil-resnet": _few_shot_case("heads", 32, 3, 16, "ResNet12", **FEW),
    "maml-resnet": _few_shot_case("networks", 32, 3, 16, "ResNet12", **FEW),
    "large-100": _large_case(100, False),
    "large-100-checkpoints": _large_case(100, True),
    "large-1000": _large_case(1000, False),
    "large-1000-checkpoints": _large_case(1000, True),
}
