"""The cases of `bilax bench peers` in PyTorch: two modules, the leader with x and the follower with z, and two losses.

Imports nothing of bilax. A loss gets the follower as something that can be called, so that each library may hand in
its own way of putting other weights into a module.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

Net = Callable[..., torch.Tensor]


class Number(nn.Module):
    """One parameter, which is what a call returns."""

    def __init__(self, value: np.ndarray):
        super().__init__()
        self.value = nn.Parameter(torch.from_numpy(np.array(value)))

    def forward(self) -> torch.Tensor:
        return self.value


class Problem:
    """One follower, no sets, and nothing to be computed once."""

    leader: nn.Module
    follower: nn.Module
    tasks = 1
    leader_box: tuple[float, float] | None = None
    follower_box: tuple[float, float] | None = None

    def begin(self, task: int, once: bool) -> None:
        """Computes what depends on the leader and a task alone, if it is to be computed once."""

    def ours(self, leaves: list[torch.Tensor], of_leader: bool) -> list[np.ndarray]:
        """Leaves of the leader or of the follower in bilax's layout and order."""
        return [leaf.detach().numpy() for leaf in leaves]


class Toy(Problem):
    """min over x in [1, 10] of x + x y, y a minimum of −sin(x y) over [−2, 2]."""

    leader_box, follower_box = (1.0, 10.0), (-2.0, 2.0)

    def __init__(self, given: Any, order: dict[str, Any]):
        self.leader, self.follower = Number(given.x[0]), Number(given.z[0])

    def lower(self, net: Net, task: int) -> torch.Tensor:
        return -torch.sin(self.leader() * net())

    def upper(self, net: Net, task: int) -> torch.Tensor:
        return self.leader() + self.leader() * net()


class Cleaning(Problem):
    """The leader weighs examples by σ(x), the follower is a network of two layers with ReLU."""

    def __init__(self, given: Any, order: dict[str, Any]):
        hidden, inputs = given.z[0].shape
        self.leader = Number(given.x[0])
        self.follower = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, len(given.z[3])))
        _fill(self.follower, given.z)
        self.inputs, labels, self.held_out, held_out_labels = map(torch.from_numpy, given.data)
        self.labels, self.held_out_labels = labels.long(), held_out_labels.long()

    def lower(self, net: Net, task: int) -> torch.Tensor:
        losses = nn.functional.cross_entropy(net(self.inputs), self.labels, reduction="none")
        return (torch.sigmoid(self.leader()) * losses).mean()

    def upper(self, net: Net, task: int) -> torch.Tensor:
        return nn.functional.cross_entropy(net(self.held_out), self.held_out_labels)


class FewShot(Problem):
    """ANIL: the backbone is the leader, a linear classifier the follower. MAML: both are the follower."""

    def __init__(self, given: Any, order: dict[str, Any]):
        support, labels, query, query_labels = map(torch.from_numpy, given.data)
        self.support, self.query = (part.permute(0, 1, 4, 2, 3).contiguous() for part in (support, query))
        self.labels, self.query_labels = labels.long(), query_labels.long()
        self.tasks, self.heads = len(support), order["kind"] == "heads"
        leaves = [*given.x, *given.z]
        body = NETWORKS[order["network"]](support.shape[-1], leaves[0].shape[-1])
        with torch.no_grad():
            self.maps = body[:-1](self.support[0]).shape[1:]  # channels, height, width
        head = nn.Linear(int(np.prod(self.maps)), leaves[-1].shape[0])
        _fill(nn.ModuleList([body, head]), [*map(_from_kernel, leaves[:-2]), self._from_head(leaves[-2]), leaves[-1]])
        self.leader = body if self.heads else nn.Module()
        self.follower = head if self.heads else nn.Sequential(body, head)
        self.seen: Any = None

    def begin(self, task: int, once: bool) -> None:
        if self.heads:
            self.seen = self._features(self.leader, task) if once else None

    def lower(self, net: Net, task: int) -> torch.Tensor:
        seen = self.seen or (self._features(self.leader, task) if self.heads else self.support[task][None])
        return nn.functional.cross_entropy(net(seen[0]), self.labels[task])

    def upper(self, net: Net, task: int) -> torch.Tensor:
        if self.heads:
            scores = net((self.seen or self._features(self.leader, task))[1])
        else:
            scores = self._features(net, task)[1]
        return nn.functional.cross_entropy(scores, self.query_labels[task])

    def _features(self, net: Net, task: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of support and queries; they go through together, so that the statistics are those of the whole task."""
        support, query = self.support[task], self.query[task]
        found = net(torch.cat([support, query]))
        return found[: len(support)], found[len(support) :]

    def ours(self, leaves: list[torch.Tensor], of_leader: bool) -> list[np.ndarray]:
        if of_leader or not leaves:
            return [_to_kernel(leaf.detach().numpy()) for leaf in leaves]
        *body, weight, bias = (leaf.detach().numpy() for leaf in leaves)
        way = len(bias)
        head = weight.reshape(way, *self.maps).transpose(2, 3, 1, 0).reshape(-1, way)
        return [*map(_to_kernel, body), head, bias]

    def _from_head(self, weight: np.ndarray) -> np.ndarray:
        """From (height · width · channels, way) to (way, channels · height · width)."""
        channels, height, width = self.maps
        return weight.reshape(height, width, channels, -1).transpose(3, 2, 0, 1).reshape(weight.shape[1], -1)


def _convnet(channels: int, filters: int) -> nn.Sequential:
    """Four times convolution, pooling, ReLU, normalisation by the batch's own statistics."""

    def group(n_in):
        norm = nn.BatchNorm2d(filters, track_running_stats=False)
        return nn.Conv2d(n_in, filters, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), norm

    return nn.Sequential(*(layer for i in range(4) for layer in group(filters if i else channels)), nn.Flatten())


class Residual(nn.Module):
    """Three groups of convolution and normalisation with a short cut beside them, then pooling."""

    def __init__(self, channels: int, filters: int):
        super().__init__()
        self.groups = nn.ModuleList([_group(filters if i else channels, filters, 3) for i in range(3)])
        self.short_cut = _group(channels, filters, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.groups[0](x)
        for group in self.groups[1:]:
            y = group(nn.functional.leaky_relu(y, 0.1))
        return nn.functional.leaky_relu(nn.functional.max_pool2d(y + self.short_cut(x), 2), 0.1)


def _resnet(channels: int, filters: int) -> nn.Sequential:
    """Four residual blocks of k, 2k, 4k and 8k filters, two 1 × 1 convolutions, the mean over positions."""
    widths = [channels, *(filters * 2**i for i in range(4))]
    blocks = (Residual(*widths[i : i + 2]) for i in range(4))
    last = (layer for _ in range(2) for layer in (_group(widths[4], widths[4], 1), nn.LeakyReLU(0.1)))
    return nn.Sequential(*blocks, *last, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _group(channels: int, filters: int, side: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels, filters, side, padding=side // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(filters, track_running_stats=False))


NETWORKS = {"ConvNet4": _convnet, "ResNet12": _resnet}


def _from_kernel(leaf: np.ndarray) -> np.ndarray:
    return leaf.transpose(3, 2, 0, 1) if leaf.ndim == 4 else leaf


def _to_kernel(leaf: np.ndarray) -> np.ndarray:
    return leaf.transpose(2, 3, 1, 0) if leaf.ndim == 4 else leaf


def _fill(module: nn.Module, leaves: list[np.ndarray]) -> None:
    for parameter, value in zip(module.parameters(), leaves, strict=True):
        parameter.data = torch.from_numpy(np.array(value, order="C"))


KINDS: dict[str, Any] = {"toy": Toy, "cleaning": Cleaning, "heads": FewShot, "networks": FewShot}
