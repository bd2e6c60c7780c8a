"""The cases of `bilax bench peers` in PyTorch: two modules, the leader with x and the follower with z, and two losses.

Imports nothing of bilax. A loss gets the follower as something that can be called, so that each library may hand in
its own way of putting other weights into a module.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

Net = Callable[..., torch.Tensor]


class Number(nn.Module):
    """One parameter, which is what a call returns."""

    def __init__(self, value: np.ndarray):
        super().__init__()
        self.value = nn.Parameter(torch.from_numpy(np.array(value)))

    def forward(self) -> torch.Tensor:
        return self.value


class Toy:
    """min over x in [1, 10] of x + x y, y a minimum of −sin(x y) over [−2, 2]."""

    tasks = 1
    leader_box, follower_box = (1.0, 10.0), (-2.0, 2.0)

    def __init__(self, given: Any):
        self.leader, self.follower = Number(given.x[0]), Number(given.z[0])

    def lower(self, net: Net, task: int) -> torch.Tensor:
        return -torch.sin(self.leader() * net())

    def upper(self, net: Net, task: int) -> torch.Tensor:
        return self.leader() + self.leader() * net()

    def ours(self, leaves: list[torch.Tensor], of_leader: bool) -> list[np.ndarray]:
        """Leaves of the leader or of the follower in bilax's layout and order."""
        return [leaf.detach().numpy() for leaf in leaves]


KINDS: dict[str, Any] = {"toy": Toy}
