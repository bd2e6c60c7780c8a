"""`bilax bench few-shot`: one outer step of few-shot learning, beside the same on PyTorch with higher if installed.

Theirs is the way of the paper's authors' program: an inner loop by higher, in which every step runs the backbone again,
on the support for the follower's gradient and on the queries to find the worst iterate, all of it recorded; then one
backward pass for z and another for x. A second version runs the backbone once and goes back once, as ours does, so that
one sees what is owed to the algorithm and what to the compiler.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilax
from bilax.app.show import Arg, Claim, Target, console, samples, show_table
from bilax.datasets.episodes import Episode
from bilax.experiments.few_shot import learners as few_shot
from bilax.models import ConvNet4

SIZES = {"28 × 28, 64 filters": (28, 1, 64, 4.0), "84 × 84 × 3, 32 filters": (84, 3, 32, 3.0)}
"""side, channels, filters, and how many times faster than higher the step should be"""
RATE = 1e-3


STEPS = 8
"""outer steps in one call of ours"""


@dataclasses.dataclass
class FewShotSpeed(Target):
    """One outer step of IAPTT-GM: 5-way 1-shot, 15 queries, 4 tasks; K = 10 and 50; beside PyTorch with higher."""

    repeats: Annotated[int, Arg(help="timed steps of each, in turn")] = 7
    name = "few-shot-speed"
    convolves = True
    claimant = "to be shown"

    def compute(self) -> dict[str, Any]:
        reference = all(importlib.util.find_spec(name) for name in ("torch", "higher"))
        if not reference:
            console.print("PyTorch and higher are not installed, so only bilax is timed: pip install torch higher")
        results = {}
        for size, (side, channels, filters, _) in SIZES.items():
            console.print(f"{size} ...", style="dim")
            episode = made_episode(side, channels)
            runs: dict[str, Callable[[], Any]] = {f"bilax, K = {k}": ours(episode, filters, k) for k in (10, 50)}
            if reference:
                runs |= {"higher, K = 10": theirs(episode, filters, 10, once=False)}
                runs |= {"higher, K = 10, backbone once": theirs(episode, filters, 10, once=True)}
            found = samples(runs, 2 if self.quick else self.repeats)
            steps = {name: STEPS if name.startswith("bilax") else 1 for name in found}
            results[size] = {name: (values / steps[name]).tolist() for name, values in found.items()}
        return results

    def show(self, results: dict[str, Any]) -> list[Path]:
        rows = []
        for size, found in results.items():
            for name, seconds in found.items():
                ratio = np.median(np.divide(seconds, found["bilax, K = 10"]))
                rows.append([size, name, f"{np.median(seconds):.3f}", f"{ratio:.2f}"])
        show_table("One outer step, 4 tasks", ["pictures", "program", "seconds", "times bilax, K = 10"], rows)
        return []

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        claims = []
        for size, found in results.items():
            base = found["bilax, K = 10"]
            grown = float(np.median(np.divide(found["bilax, K = 50"], base)))
            claims.append(Claim(f"{size}: K = 50 costs at most 1.3 of K = 10", f"{grown:.2f}", grown <= 1.3))
            if "higher, K = 10" in found:
                goal, ratio = SIZES[size][3], float(np.median(np.divide(found["higher, K = 10"], base)))
                claims.append(Claim(f"{size}: {goal:.0f} times faster than higher", f"{ratio:.2f}", ratio >= goal))
        return claims


def made_episode(side: int, channels: int, tasks: int = 4, way: int = 5, queries: int = 15) -> Episode:
    """Tasks of noise: what the pictures show does not matter to the clock."""
    draw = np.random.default_rng(0)
    labels = np.arange(way, dtype=np.int32)
    support, query = (
        draw.random((tasks, way * count, side, side, channels), dtype=np.float32) for count in (1, queries)
    )
    targets = (np.tile(np.repeat(labels, count), (tasks, 1)) for count in (1, queries))
    return Episode(support, next(targets), query, next(targets))


def ours(episode: Episode, filters: int, inner_steps: int) -> Callable[[], Any]:
    """`STEPS` outer steps with Adam; what `solve` does besides, above all to evaluate the end, counts as ours."""
    network = ConvNet4(episode.support.shape[-1], filters, jax.random.key(0))
    learner = few_shot.heads(network, jnp.asarray(episode.support[0]), 5)
    method, optimizer, data = bilax.iaptt_gm(inner_steps, 0.1), optax.adam(RATE), (jax.device_put(episode),)

    def run():
        options: Any = {"steps": STEPS, "optimizer": optimizer, "data": data, "tasks": True}
        return bilax.solve(learner.problem, method, learner.x0, learner.y0, **options).x

    return run


def theirs(episode: Episode, filters: int, inner_steps: int, once: bool) -> Callable[[], None]:
    """The same on PyTorch: unrolled by higher, the iterate chosen by the queries' loss, differentiated from there."""
    import higher  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]

    def group(n_in):
        norm = nn.BatchNorm2d(filters, track_running_stats=False)
        return nn.Conv2d(n_in, filters, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), norm

    channels = episode.support.shape[-1]
    body = nn.Sequential(*(layer for i in range(4) for layer in group(filters if i else channels)), nn.Flatten())
    support, query = (
        torch.from_numpy(np.ascontiguousarray(part.transpose(0, 1, 4, 2, 3)))
        for part in (episode.support, episode.query)
    )
    support_targets, query_targets = (
        torch.from_numpy(part.astype(np.int64)) for part in (episode.support_targets, episode.query_targets)
    )
    head = nn.Linear(body(support[0]).shape[1], 5)
    outer = torch.optim.Adam([*body.parameters(), *head.parameters()], RATE)
    inner = torch.optim.SGD(head.parameters(), 0.1)
    cross_entropy = nn.functional.cross_entropy

    def task(t):
        features = (body(support[t]), body(query[t])) if once else None
        with higher.innerloop_ctx(head, inner, copy_initial_weights=False) as (fast, descent):
            losses = []
            for _ in range(inner_steps):
                seen = features[0] if features else body(support[t])
                descent.step(cross_entropy(fast(seen), support_targets[t]))
                seen = features[1] if features else body(query[t])
                losses.append(cross_entropy(fast(seen), query_targets[t]).item())
            worst = list(fast.parameters(time=1 + int(np.argmax(losses))))
            seen = features[1] if features else body(query[t])
            loss = cross_entropy(fast(seen, params=worst), query_targets[t]) / len(support)
            groups = list(fast.parameters(time=0)), list(body.parameters())
            if once:
                slopes = torch.autograd.grad(loss, [*groups[0], *groups[1]])
            else:
                slopes = [slope for group in groups for slope in torch.autograd.grad(loss, group, retain_graph=True)]
        for leaf, slope in zip([*head.parameters(), *body.parameters()], slopes, strict=True):
            leaf.grad = slope if leaf.grad is None else leaf.grad + slope

    def run():
        outer.zero_grad()
        for t in range(len(support)):
            task(t)
        outer.step()

    return run
