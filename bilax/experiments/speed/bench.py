"""What bilax costs: the outer loop, growth in T and K, truncation's saving, the price of progress."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilax
from bilax.app.show import (
    Target,
    load_json,
    plt,
    samples,
    save_json,
    saved_figure,
    show_table,
    steps,
    stored_results,
    timings,
)
from bilax.app.versions import changed_rooms
from bilax.experiments.cleaning import problem as cleaning
from bilax.experiments.toy import figures as toy

TITLES = {
    "main": "500 outer × 40 inner steps",
    "by_T": "growth in T",
    "by_K": "growth in K",
    "sweep": "the sweep's cost at K = 2,000",
    "overhead": "the price of progress, T = 100,000",
    "cleaning_overhead": "the price of progress in hyper-cleaning",
}


@dataclasses.dataclass
class Speed(Target):
    """The numerical example: run and compile time, growth in T and K, the sweep's cost in k̄, and overheads."""

    name: ClassVar[str] = "speed"
    in_cells: ClassVar[bool] = True

    def compute(self) -> dict[str, Any]:
        """Part by part, each stored as it is made; what the present code has measured is not measured again."""
        parts: dict[str, Callable[[], Any]] = {
            "main": self._main,
            "by_T": lambda: self._growth({t: (t, 40) for t in (8000, 16000, 32000, 64000)}),
            "by_K": lambda: self._growth({k: (1000, k) for k in (500, 1000, 2000, 4000)}),
            "sweep": lambda: self._sweep(2000),
            "overhead": lambda: self._overhead(100_000, 3 if self.quick else 31),
            "cleaning_overhead": lambda: self._cleaning_overhead(4 if self.quick else 16, 2 if self.quick else 15),
        }
        # A program found in the cache would compile in no time.
        jax.config.update("jax_enable_compilation_cache", False)
        results = {} if self.quick else self._known()
        with steps(len(parts), "speed") as advance:
            for name, part in parts.items():
                advance(TITLES[name])
                if name not in results:
                    # The example is the paper's, in double precision; hyper-cleaning is in single.
                    with jax.enable_x64(name != "cleaning_overhead"):
                        results[name] = part()
                    if not self.quick:
                        save_json(self.path, self, results)
        return results

    def _known(self) -> dict[str, Any]:
        """What is stored, if the present code made it."""
        found = stored_results(self.path, self, self.free) or {}
        code = load_json(self.path).get("code") if found else None
        return found if code and not changed_rooms(code) else {}

    @property
    def repeats(self) -> int:
        return 5 if self.quick else 15

    def _main(self) -> dict[str, float]:
        began = time.perf_counter()
        self._solve(500, 40)
        first = time.perf_counter() - began
        seconds = timings({"run": lambda: self._solve(500, 40)}, self.repeats)["run"]
        return {"seconds": seconds, "compile_seconds": first - seconds}

    def _growth(self, sizes: dict[int, tuple[int, int]]) -> dict[int, float]:
        return timings({n: lambda size=size: self._solve(*size) for n, size in sizes.items()}, self.repeats)

    @staticmethod
    def _solve(count: int, inner_steps: int, **options: Any) -> bilax.Solution:
        method = toy.methods(inner_steps)["IAPTT-GM"]
        return bilax.solve(toy.PROBLEM, method, *toy.STARTS[1], steps=count, optimizer=toy.OPTIMIZER, **options)

    def _sweep(self, inner_steps: int) -> list[dict[str, float]]:
        """Seconds for φ alone and with its gradient, where the selection is made to choose a given k̄."""
        # The follower climbs by about one a step, and F is highest at `top`, so k̄ is near it.
        problem = bilax.Problem(
            lambda x, y, top: -jnp.mean((y - top) ** 2), lambda x, y, top: jnp.sum(0.1 * x * jnp.sin(y) - y)
        )
        z = jnp.zeros(256)
        phi = bilax.approximate(problem, bilax.iaptt_gm(inner_steps, 1.0))
        gradient, plain = jax.jit(jax.value_and_grad(phi, (0, 1), has_aux=True)), jax.jit(phi)
        tops = (1.0, 250.0, 500.0, 1000.0, 1500.0, 2000.0)
        runs = {("φ", top): lambda t=top: plain(1.0, z, t) for top in tops}
        runs |= {("gradient", top): lambda t=top: gradient(1.0, z, t) for top in tops}
        seconds = timings(runs, 3 * self.repeats)
        return [
            {
                "k_bar": int(plain(1.0, z, top)[1].k_bar),
                "forward": seconds["φ", top],
                "with_gradient": seconds["gradient", top],
            }
            for top in tops
        ]

    def _overhead(self, count: int, repeats: int) -> dict[str, Any]:
        """Whole runs in chunks, with progress, against one compiled call; in turn, so that both meet the same noise."""

        def run(**options):
            return self._solve(count, 40, **options) and None

        return _watched(run, repeats)

    @staticmethod
    def _cleaning_overhead(count: int, repeats: int) -> dict[str, Any]:
        """The same for hyper-cleaning at the paper's size; what the pictures show does not matter here."""
        rng = np.random.default_rng(0)
        inputs = jnp.asarray(rng.random((5000, 784)), jnp.float32)
        targets = cleaning.targets(jnp.asarray(rng.integers(0, 10, 5000)), 10)
        batch = cleaning.Batch(inputs, targets, inputs, targets)
        start = jnp.zeros(5000, jnp.float32), cleaning.network(jax.random.key(0), 784, 10)
        method, optimizer = bilax.iaptt_gm(50, 0.03), optax.adam(0.01)

        def run(**options):
            settings: Any = {"steps": count, "optimizer": optimizer, "data": (batch,), **options}
            return bilax.solve(cleaning.problem(), method, *start, **settings) and None

        return _watched(run, repeats)

    def show(self, results: dict[str, Any]) -> list[Path]:
        overhead, heavy = (_percent(results[name]) for name in ("overhead", "cleaning_overhead"))
        show_table(
            "The numerical example with IAPTT-GM",
            ["what", "value"],
            [
                ["500 outer × 40 inner steps", f"{1e3 * results['main']['seconds']:.2f} ms"],
                ["compilation of that", f"{results['main']['compile_seconds']:.2f} s"],
                ["growth in T, K = 40", _line(results["by_T"], "outer step")],
                ["growth in K, T = 1,000", _line(results["by_K"], "inner step per outer step")],
                ["100,000 outer steps, one compiled call", f"{results['overhead']['plain']:.3f} s"],
                ["overhead of chunks, history and progress", overhead],
                ["the same in hyper-cleaning at the paper's size", heavy],
            ],
        )
        show_table(
            "K = 2,000: the backward pass costs k̄ steps",
            ["k̄", "φ (µs)", "φ and gradient (µs)", "difference (µs)", "per swept step (ns)"],
            [
                [r["k_bar"], f"{1e6 * r['forward']:.0f}", f"{1e6 * r['with_gradient']:.0f}",
                 f"{1e6 * (r['with_gradient'] - r['forward']):.0f}",
                 f"{1e9 * (r['with_gradient'] - r['forward']) / r['k_bar']:.0f}"]
                for r in results["sweep"]
            ],
        )  # fmt: skip
        pyplot = plt()
        figure, axes = pyplot.subplots(1, 3, figsize=(10, 3.2))
        for ax, name in ((axes[0], "by_T"), (axes[1], "by_K")):
            counts = [int(k) for k in results[name]]
            ax.loglog(counts, [1e3 * s for s in results[name].values()], "o-")
            ax.set(xlabel=name[-1] + (" (K = 40)" if name == "by_T" else " (T = 1,000)"), ylabel="run time (ms)")
        k_bars = [r["k_bar"] for r in results["sweep"]]
        axes[2].plot(k_bars, [1e6 * r["with_gradient"] for r in results["sweep"]], "o-", label="φ and gradient")
        axes[2].plot(k_bars, [1e6 * r["forward"] for r in results["sweep"]], "o-", label="φ alone")
        axes[2].set(xlabel="k̄ (K = 2,000)", ylabel="µs", ylim=(0, None))
        axes[2].legend()
        return [saved_figure(figure, self.figure_path())]


def _line(by: dict[str, float], unit: str) -> str:
    """The best a + b n, and how far the measurements lie from it."""
    counts, seconds = np.array([int(k) for k in by], float), np.array(list(by.values()))
    slope, start = np.polyfit(counts, seconds, 1, w=1 / seconds)
    deviation = np.max(np.abs(start + slope * counts - seconds) / seconds)
    return f"{1e3 * start:.1f} ms + {1e6 * slope:.2f} µs per {unit}, to within {100 * deviation:.0f} %"


def _percent(found: dict[str, Any]) -> str:
    low, middle, high = (100 * value for value in found["overhead"])
    return f"{middle:.1f} % ({low:.1f} to {high:.1f})"


def _watched(run: Callable[..., Any], pairs: int) -> dict[str, Any]:
    """Seconds without and with progress, medians; and the median of what progress adds, pair by pair, with its 95 %
    interval."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        seconds = samples({"plain": run, "watched": lambda: run(progress=True)}, pairs)
    added = np.sort(seconds["watched"] / seconds["plain"] - 1)
    # The ranks between which the median lies with probability 0.95, whatever the noise is.
    half = 0.98 * np.sqrt(pairs)
    low, high = (int(np.clip(rank, 0, pairs - 1)) for rank in (np.floor(pairs / 2 - half), np.ceil(pairs / 2 + half)))
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    return {**medians, "overhead": [added[low], np.median(added), added[high]], "pairs": pairs}
