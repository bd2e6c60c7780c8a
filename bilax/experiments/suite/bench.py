"""Twelve bilevel problems with non-convex followers and known global solutions, as a benchmark.

From Mitsos and Barton, A Test Set for Bilevel Programs (2007), and the BASBLib collection.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilax
from bilax.app.show import Claim, Target, plt, show_table, steps
from bilax.experiments.suite.problems import PROBLEMS, Known

TOLERANCE = 0.01
"""how near to F* counts as solved"""


_METHODS: dict[str, bilax.Method | bilax.Algorithm] = {
    "rhg": bilax.rhg(40, 0.01),
    "bda": bilax.bda(40, 0.01),
    "ls": bilax.ls(40, 0.01, tolerance=None),
    "ns": bilax.ns(40, 0.01),
    "ia_gm": bilax.ia_gm(40, 0.01),
    "iaptt_gm": bilax.iaptt_gm(40, 0.01),
    "bvfim": bilax.bvfim(40, 0.01),
    "penalty": bilax.penalty(40, 0.01),
}
_OPTIMIZER = optax.adam(0.02)
_STEPS = 500


class End(NamedTuple):
    """Where a method ended: what it claims, and what the certificate and the grid say of it."""

    x: Any
    y: Any
    upper: float
    outcome: str
    """solved, too good, or missed"""
    verdict: str
    gap: float
    agrees: bool
    """whether a grid of 10⁵ follower points confirms the verdict"""


@dataclasses.dataclass
class Suite(Target):
    """Every method from one start and from many, and `solve_global`, on the twelve problems."""

    name: ClassVar[str] = "suite"
    claimant: ClassVar[str] = "what is to hold"

    def compute(self) -> dict[str, Any]:
        problems = dict(list(PROBLEMS.items())[:3]) if self.quick else PROBLEMS
        side = 3 if self.quick else 15
        results: dict[str, Any] = {}
        with steps(len(problems), "suite") as advance:
            for name, known in problems.items():
                results[name] = {"best": known.best, "global": _run_global(known)}
                with jax.enable_x64(True):
                    results[name] |= {"one": {}, "many": {}}
                    for method, ends in _run_methods(known, side).items():
                        for which, end in zip(("one", "many"), ends, strict=True):
                            results[name][which][method] = end._asdict()
                advance(name)
        return {"starts": side, "problems": results}

    def show(self, results: dict[str, Any]) -> list[Path]:
        problems = results["problems"]
        methods = list(_METHODS)
        for which, title in (
            ("one", "one start"),
            ("many", f"the best of {results['starts']}² starts (or {results['starts']})"),
        ):
            rows = [
                [name, p["best"], *(_mark(p[which][m]) for m in methods), _mark(p["global"])]
                for name, p in problems.items()
            ]
            show_table(
                f"F from {title}; + solved, ! too good to be true", ["problem", "F*", *methods, "solve_global"], rows
            )
        rows = [
            [name, p["best"], *(p["global"][key] for key in ("upper", "gap", "proven", "seconds", "cpu_seconds"))]
            for name, p in problems.items()
        ]
        show_table(
            "solve_global",
            ["problem", "F*", "F", "gap", "proven", "seconds, compilation included", "of processor"],
            rows,
        )
        return [self._draw(results)]

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        problems = results["problems"]
        ends = [end for p in problems.values() for which in ("one", "many") for end in p[which].values()]
        best = [p["global"] for p in problems.values()]
        solved = sum(b["outcome"] == "solved" for b in best)
        return [
            Claim(
                "solve_global finds F* to 0.01, certified, each within 10 s",
                f"{solved} of {len(best)}, the slowest in {max(b['seconds'] for b in best):.1f} s with compilation",
                solved == len(best) and all(b["seconds"] < 10 for b in best),
            ),
            Claim(
                "certify agrees with a grid of 10⁵ follower points on every end point",
                f"{sum(e['agrees'] for e in ends + best)} of {len(ends + best)}",
                all(e["agrees"] for e in ends + best),
            ),
            Claim(
                "gradient methods return points better than F* where Assumption 3.1(5) fails",
                f"{sum(e['outcome'] == 'too good' for e in ends)} of {len(ends)} end points",
                any(e["outcome"] == "too good" for e in ends),
            ),
        ]

    def _draw(self, results: dict[str, Any]) -> Path:
        pyplot = plt()
        problems, methods = results["problems"], [*_METHODS, "solve_global"]
        colours = {"solved": "#009E73", "too good": "#D55E00", "missed": "#BBBBBB"}
        figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
        for axis, which, title in zip(axes, ("one", "many"), ("from one start", "best of many starts"), strict=True):
            for i, p in enumerate(problems.values()):
                for j, method in enumerate(methods):
                    end = p["global"] if method == "solve_global" else p[which][method]
                    axis.add_patch(pyplot.Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, color=colours[end["outcome"]]))
                    axis.text(j, i, f"{end['upper']:.2f}", ha="center", va="center", fontsize=6.5)
            axis.set(xlim=(-0.5, len(methods) - 0.5), ylim=(len(problems) - 0.5, -0.5), title=title)
            axis.set_xticks(range(len(methods)), methods, rotation=45, ha="right")
            axis.set_yticks(range(len(problems)), [f"{name}  ({p['best']:.3g})" for name, p in problems.items()])
            axis.grid(False)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
        labels = ["solved: within 0.01 of F*, global follower", "too good to be true: below F* − 0.01", "missed"]
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        path = self.figure_path()
        figure.savefig(path)
        pyplot.close(figure)
        return path


def _mark(end: dict[str, Any]) -> str:
    return f"{end['upper']:.3g}{ {'solved': ' +', 'too good': ' !', 'missed': ''}[end['outcome']] }"


def _run_global(known: Known) -> dict[str, Any]:
    start, work = time.perf_counter(), time.process_time()
    found = bilax.solve_global(known.problem, known.x0, known.y0)
    seconds, work = time.perf_counter() - start, time.process_time() - work
    with jax.enable_x64(True):
        end = _judge(known, found.x, found.y, found.upper)
    return end._asdict() | {"seconds": seconds, "cpu_seconds": work, "proven": found.certificate.rigorous}


def _run_methods(known: Known, side: int) -> dict[str, tuple[End, End]]:
    """Per method the end from one start, a quarter into each interval, and the best end from a grid of starts."""
    xs, ys = _starts(known, side)
    found = {}
    for name, method in _METHODS.items():
        batch = bilax.multistart(known.problem, method, xs, ys, steps=_STEPS, optimizer=_OPTIMIZER)
        found[name] = tuple(_judge(known, run.x, run.y, run.upper) for run in (batch[0], batch.best))
    return found


def _starts(known: Known, side: int) -> tuple[Any, Any]:
    # The grid leaves out the bounds, where several followers are stationary whatever x is.
    places = np.concatenate([[0.25], np.linspace(0.02, 0.98, side)])
    y_lo, y_hi = ends(known.problem.y_set)
    if isinstance(known.x0, tuple):
        return (), jnp.asarray(y_lo + places * (y_hi - y_lo))
    x_lo, x_hi = ends(known.problem.x_set)
    grid = np.asarray([(0.25, 0.25), *((a, b) for a in places[1:] for b in places[1:])])
    xs = jnp.asarray(x_lo + grid[:, 0] * (x_hi - x_lo))
    if np.ndim(known.x0):
        # Two leader variables: the second runs through the interval in another order.
        xs = jnp.stack([xs, x_lo + (grid.sum(1) * 7 % 1) * (x_hi - x_lo)], axis=1)
    return xs, jnp.asarray(y_lo + grid[:, 1] * (y_hi - y_lo))


def ends(box: Any) -> tuple[float, float]:
    """The bounds of a box whose bounds are numbers."""
    return float(box.lo), float(box.hi)


def _judge(known: Known, x: Any, y: Any, upper: Any) -> End:
    certificate = bilax.certify(known.problem, _Pair(x, y))
    verdict = certificate.verdict
    outcome = "missed"
    if float(upper) < known.best - TOLERANCE:
        outcome = "too good"
    elif float(upper) < known.best + TOLERANCE and verdict is bilax.Verdict.global_follower:
        outcome = "solved"
    on_grid = grid_verdict(known.problem, x, y, certificate.tolerance)
    return End(x, y, float(upper), outcome, verdict.value, certificate.gap, verdict is on_grid)


class _Pair(NamedTuple):
    x: Any
    y: Any


def grid_verdict(problem: bilax.Problem, x: Any, y: Any, tolerance: float, points: int = 100_001) -> bilax.Verdict:
    """The verdict on a one-dimensional follower by brute force, from values on a grid alone.

    Not a global minimiser if a grid point is lower by more than `tolerance`; stationary if no point within a
    small step is lower by more than that.
    """
    lo, hi = ends(problem.y_set)
    with jax.enable_x64(True):
        x, y = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), (x, y))
        lower = jax.vmap(lambda v: problem.lower(x, v))
        value = problem.lower(x, y)
        if float(value - lower(jnp.linspace(lo, hi, points)).min()) <= tolerance:
            return bilax.Verdict.global_follower
        # A step of 1/L along the slope, with L and the slope by differences.
        h = 1e-4 * (hi - lo)
        centre = jnp.clip(y, lo + h, hi - h)
        left, middle, right = lower(jnp.stack([centre - h, centre, centre + h]))
        curvature = jnp.abs(left - 2 * middle + right) / h**2
        near = 1e-7 * (hi - lo)
        slope = (problem.lower(x, jnp.minimum(y + near, hi)) - problem.lower(x, jnp.maximum(y - near, lo))) / (
            jnp.minimum(y + near, hi) - jnp.maximum(y - near, lo)
        )
        curvature = jnp.maximum(curvature, jnp.abs(slope) / (hi - lo))
        moved = jnp.clip(y - slope / (curvature + 1e-12), lo, hi)
        gain = curvature * (moved - y) ** 2 / 2
    return bilax.Verdict.stationary_only if float(gain) <= tolerance else bilax.Verdict.not_stationary
