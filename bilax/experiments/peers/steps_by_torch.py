"""PyTorch's side of `bilax bench peers`: `python steps_by_torch.py LIBRARY`, orders by stdin. Imports nothing of bilax.

Each library in the way that its own documentation shows: PyTorch by `torch.autograd.grad(create_graph=True)` and
`torch.func.functional_call`; higher by `innerloop_ctx`; TorchOpt by its functional optimiser, which leaves room for a
projection; BOAT by `Problem.run_iter` with NGD and DI, and PTT and RAD.
"""

import importlib.metadata
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).parent))

import orders
import torch_problems


class Unrolled:
    """Outer steps of which a library makes the follower's."""

    once = True
    """whether what depends on the leader alone is computed once, not in every step of the follower"""

    def __init__(self, order: dict[str, Any], given: Any):
        self.problem = torch_problems.KINDS[order["kind"]](given, order)
        self.count, self.rate, self.worst = order["inner_steps"], order["step_size"], order["worst"]
        self.checkpoint = order["checkpoint"]
        self.leaves = [*self.problem.leader.parameters()], [*self.problem.follower.parameters()]
        self.start = [leaf.detach().clone() for part in self.leaves for leaf in part]
        name, rate = order["optimizer"]
        self.make = lambda leaves: {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name](leaves, lr=rate)
        self.outer_rate = rate

    def gradient(self) -> tuple[np.ndarray, np.ndarray]:
        self._reset()
        self._slopes()
        slopes = [[torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in part] for part in self.leaves]
        return self._ours(slopes)

    def run(self, steps: int) -> orders.Seconds:
        self._reset()
        return orders.seconds(lambda: [self._step() for _ in range(steps)])

    def end(self) -> tuple[np.ndarray, np.ndarray]:
        return self._ours(self.leaves)

    def _reset(self) -> None:
        with torch.no_grad():
            for leaf, value in zip([*self.leaves[0], *self.leaves[1]], self.start, strict=True):
                leaf.copy_(value)
                leaf.grad = None
        self.outer = self.make([*self.leaves[0], *self.leaves[1]])

    def _step(self) -> None:
        self.outer.zero_grad()
        self._slopes()
        self.outer.step()
        self._project_outer()

    def _project_outer(self) -> None:
        with torch.no_grad():
            for part, box in zip(self.leaves, (self.problem.leader_box, self.problem.follower_box), strict=True):
                for leaf in part if box else ():
                    leaf.clamp_(*box)

    def _slopes(self) -> None:
        """Adds ∂φ/∂x and ∂φ/∂z to the leaves' `grad`, one task after the other."""
        for task in range(self.problem.tasks):
            self.problem.begin(task, self.once)
            self._task(task)

    def _task(self, task: int) -> None:
        raise NotImplementedError

    def _projected(self, leaves: Any) -> list[torch.Tensor]:
        box = self.problem.follower_box
        return [leaf.clamp(*box) for leaf in leaves] if box else list(leaves)

    def _chosen(self, scores: list[float]) -> int:
        return int(np.argmax(scores)) if self.worst else -1

    def _add(self, loss: torch.Tensor, start: list[torch.Tensor]) -> None:
        """`start` is what stands for z in the graph of the loss."""
        slopes = torch.autograd.grad(loss / self.problem.tasks, [*self.leaves[0], *start])
        for leaf, slope in zip([*self.leaves[0], *self.leaves[1]], slopes, strict=True):
            leaf.grad = slope if leaf.grad is None else leaf.grad + slope

    def _ours(self, parts: Any) -> tuple[np.ndarray, np.ndarray]:
        leader, follower = (self.problem.ours(list(part), i == 0) for i, part in enumerate(parts))
        return orders.flat(leader), orders.flat(follower)


class PyTorch(Unrolled):
    """Nothing but PyTorch."""

    def _task(self, task: int) -> None:
        problem, module = self.problem, self.problem.follower
        names, start = [name for name, _ in module.named_parameters()], self.leaves[1]

        def net(leaves):
            values = dict(zip(names, leaves, strict=True))
            return lambda *inputs: torch.func.functional_call(module, values, inputs)

        def moved(leaves, keep=True):
            return self._projected(self._stepped(problem.lower(net(leaves), task), list(leaves), keep))

        if self.checkpoint:
            return self._swept(moved, lambda leaves: problem.upper(net(leaves), task))
        leaves, iterates, scores = start, [], []
        for _ in range(self.count):
            leaves = moved(leaves)
            if self.worst:
                with torch.no_grad():
                    scores.append(problem.upper(net(leaves), task).item())
                iterates.append(leaves)
        chosen = iterates[self._chosen(scores)] if self.worst else leaves
        self._add(problem.upper(net(chosen), task), start)

    def _swept(self, moved: Any, upper: Any) -> None:
        """The same as bilax has it: of K states √K are kept, and each stretch between them is computed again.

        `torch.utils.checkpoint` around steps that differentiate takes four times as long and more memory than none.
        """
        leader, every, kept = self.leaves[0], math.isqrt(self.count - 1) + 1, []
        leaves = self.leaves[1]
        for k in range(self.count):
            leaves = [leaf.detach().requires_grad_() for leaf in leaves]
            if k % every == 0:
                kept.append(leaves)
            leaves = moved(leaves, keep=False)
        ends = [leaf.detach().requires_grad_() for leaf in leaves]
        slopes = torch.autograd.grad(upper(ends) / self.problem.tasks, [*leader, *ends], allow_unused=True)
        totals, back = list(slopes[: len(leader)]), slopes[len(leader) :]
        for i in reversed(range(len(kept))):
            leaves = kept[i]
            for _ in range(i * every, min((i + 1) * every, self.count)):
                leaves = moved(leaves)
            slopes = torch.autograd.grad(leaves, [*leader, *kept[i]], back)
            totals = [
                new if total is None else total + new for total, new in zip(totals, slopes[: len(leader)], strict=True)
            ]
            back = slopes[len(leader) :]
        for leaf, slope in zip([*leader, *self.leaves[1]], [*totals, *back], strict=True):
            leaf.grad = slope if leaf.grad is None else leaf.grad + slope

    def _stepped(self, loss: torch.Tensor, leaves: list[torch.Tensor], keep: bool) -> list[torch.Tensor]:
        slopes = torch.autograd.grad(loss, leaves, create_graph=keep)
        return [leaf - self.rate * slope for leaf, slope in zip(leaves, slopes, strict=True)]


class TorchOpt(PyTorch):
    """The same with TorchOpt's differentiable SGD."""

    def __init__(self, order: dict[str, Any], given: Any):
        super().__init__(order, given)
        import torchopt  # pyright: ignore[reportMissingImports]

        self.torchopt, self.inner = torchopt, torchopt.sgd(self.rate)

    def _stepped(self, loss: torch.Tensor, leaves: list[torch.Tensor], keep: bool) -> list[torch.Tensor]:
        slopes = torch.autograd.grad(loss, leaves, create_graph=keep)
        # Plain SGD keeps nothing between steps.
        updates, _ = self.inner.update(slopes, self.inner.init(leaves), params=leaves, inplace=False)
        return list(self.torchopt.apply_updates(tuple(leaves), updates, inplace=False))


class Higher(Unrolled):
    """The inner loop by higher, as in the program of the paper's authors, where each step runs the backbone."""

    once = False

    def _task(self, task: int) -> None:
        import higher  # pyright: ignore[reportMissingImports]

        problem, module = self.problem, self.problem.follower
        inner = torch.optim.SGD(module.parameters(), lr=self.rate)
        with higher.innerloop_ctx(module, inner, copy_initial_weights=False) as (fast, descent):
            iterates, scores = [], []
            for _ in range(self.count):
                descent.step(problem.lower(fast, task))
                if problem.follower_box:
                    fast.update_params(self._projected(fast.parameters()))
                if self.worst:
                    with torch.no_grad():
                        scores.append(problem.upper(fast, task).item())
                    iterates.append(list(fast.parameters()))
            if self.worst:
                fast.update_params(iterates[self._chosen(scores)])
            self._add(problem.upper(fast, task), list(fast.parameters(time=0)))


class Boat(Unrolled):
    """BOAT's `Problem`, which makes the outer step too. It has no place for a projection of the follower.

    Without a leader, the follower's start is what it calls the upper model (IAD), as in its example of MAML.
    """

    once = False

    def __init__(self, order: dict[str, Any], given: Any):
        super().__init__(order, given)
        global CURRENT
        CURRENT = self.problem
        sys.modules["steps_by_torch"] = sys.modules[__name__]
        self.folder = tempfile.TemporaryDirectory()

    def _reset(self) -> None:
        super()._reset()
        import boat_torch  # pyright: ignore[reportMissingImports]

        leader, follower = self.problem.leader, self.problem.follower
        alone = not self.leaves[0]
        upper = self.leaves[1] if alone else self.leaves[0]
        self.outer = self.make(upper)
        rule = ["IAD"] if alone else ["RAD"]
        config = {
            "fo_op": None, "gm_op": ["NGD"] if alone else ["NGD", "DI"],
            "na_op": [*rule, "PTT"] if self.worst else rule,
            "return_grad": False, "lower_iters": self.count, "device": "cpu",
            "accumulate_grad": self.problem.tasks > 1, "copy_last_param": False, "fo_ol_batch_input": False,
            "loss_log_path": str(Path(self.folder.name) / "loss.json"),
            "DI": {"lr": self.outer_rate}, "GDA": {"alpha_init": 0.0, "alpha_decay": 0.9}, "RGT": {"truncate_iter": 0},
            "lower_level_model": follower, "upper_level_model": follower if alone else leader,
            "lower_level_var": self.leaves[1], "upper_level_var": upper,
            "lower_level_opt": torch.optim.SGD(self.leaves[1], lr=self.rate), "upper_level_opt": self.outer,
        }  # fmt: skip
        losses = {
            name: {"function": f"steps_by_torch.boat_{name[:5]}"} for name in ("lower_level_loss", "upper_level_loss")
        }
        self.boat = boat_torch.Problem(config, losses).build_ll_solver().build_ul_solver()
        self.done = 0

    def gradient(self) -> tuple[np.ndarray, np.ndarray]:
        self._reset()
        # It clears the gradients after its step, so we keep them as they pass.
        kept: dict[int, torch.Tensor] = {}
        for optimizer in filter(None, (self.outer, self.boat._lower_init_opt)):
            optimizer.register_step_pre_hook(
                lambda one, *_: kept.update({id(p): p.grad.clone() for g in one.param_groups for p in g["params"]})
            )
        self._iterate()
        return self._ours([[kept[id(leaf)] for leaf in part] for part in self.leaves])

    def _step(self) -> None:
        self._iterate()
        self._project_outer()

    def _iterate(self) -> None:
        feeds = [{"task": task} for task in range(self.problem.tasks)]
        feed: Any = feeds if self.problem.tasks > 1 else feeds[0]
        self.boat.run_iter(feed, feed, current_iter=self.done)
        self.done += 1


CURRENT: Any = None
"""the problem whose losses BOAT loads by name"""


def boat_lower(feed: Any, leader: Any, follower: Any, **options: Any) -> torch.Tensor:
    return CURRENT.lower(lambda *inputs: follower(*inputs, **options), feed["task"])


def boat_upper(feed: Any, leader: Any, follower: Any, **options: Any) -> torch.Tensor:
    # It adds up what tasks give.
    return CURRENT.upper(lambda *inputs: follower(*inputs, **options), feed["task"]) / CURRENT.tasks


LIBRARIES = {"PyTorch": PyTorch, "higher": Higher, "TorchOpt": TorchOpt, "BOAT": Boat}
PACKAGES = {"PyTorch": "torch", "higher": "higher", "TorchOpt": "torchopt", "BOAT": "boat-torch", "Betty": "betty-ml"}


def versions(library: str) -> dict[str, str]:
    """Of the library and of PyTorch."""
    return {name: importlib.metadata.version(name) for name in ("torch", PACKAGES[library])}


if __name__ == "__main__":
    named = sys.argv[1]
    orders.serve(LIBRARIES[named], lambda: versions(named))
