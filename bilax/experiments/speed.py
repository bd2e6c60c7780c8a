"""What bilax costs: the outer loop, growth in T and K, truncation's saving, the price of progress."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bilax
from bilax.experiments import toy
from bilax.experiments.common import Target, plt, show_table, steps


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """The median of several timings, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


@dataclasses.dataclass
class Speed(Target):
    """The numerical example: run and compile time, growth in T and K, the sweep's cost in k̄, and overheads."""

    name = "speed"

    def compute(self) -> dict[str, Any]:
        repeats = 5 if self.quick else 15
        # A program found in the cache would compile in no time.
        jax.config.update("jax_enable_compilation_cache", False)
        with jax.enable_x64(True), steps(4, "speed") as advance:
            advance("500 outer × 40 inner steps")
            began = time.perf_counter()
            self._solve(500, 40)
            first = time.perf_counter() - began
            main = median_seconds(lambda: self._solve(500, 40), repeats)
            advance("growth in T and K")
            by_t = {t: median_seconds(lambda t=t: self._solve(t, 40), repeats) for t in (8000, 16000, 32000, 64000)}
            by_k = {k: median_seconds(lambda k=k: self._solve(500, k), repeats) for k in (500, 1000, 2000, 4000)}
            advance("the sweep's cost at K = 2,000")
            sweep = self._sweep(2000, repeats)
            advance("the price of progress, T = 100,000")
            overhead = self._overhead(100_000, repeats)
        return {
            "seconds": main, "compile_seconds": first - main, "by_T": by_t, "by_K": by_k, "sweep": sweep,
            "overhead": overhead,
        }  # fmt: skip

    @staticmethod
    def _solve(count: int, inner_steps: int, **options: Any) -> bilax.Solution:
        method = toy.methods(inner_steps)["IAPTT-GM"]
        return bilax.solve(toy.PROBLEM, method, *toy.STARTS[1], steps=count, optimizer=toy.OPTIMIZER, **options)

    @staticmethod
    def _sweep(inner_steps: int, repeats: int) -> list[dict[str, float]]:
        """Seconds for φ alone and with its gradient, where the selection is made to choose a given k̄."""
        # The follower climbs by about one a step, and F is highest at `top`, so k̄ is near it.
        problem = bilax.Problem(
            lambda x, y, top: -jnp.mean((y - top) ** 2), lambda x, y, top: jnp.sum(0.1 * x * jnp.sin(y) - y)
        )
        z = jnp.zeros(256)
        phi = bilax.approximate(problem, bilax.iaptt_gm(inner_steps, 1.0))
        gradient, plain = jax.jit(jax.value_and_grad(phi, (0, 1), has_aux=True)), jax.jit(phi)
        rows = []
        for top in (1.0, 250.0, 500.0, 1000.0, 1500.0, 2000.0):
            k_bar = int(plain(1.0, z, top)[1].k_bar)
            forward = median_seconds(lambda f=plain, t=top: jax.block_until_ready(f(1.0, z, t)), 3 * repeats)
            both = median_seconds(lambda f=gradient, t=top: jax.block_until_ready(f(1.0, z, t)), 3 * repeats)
            rows.append({"k_bar": k_bar, "forward": forward, "with_gradient": both})
        return rows

    def _overhead(self, count: int, repeats: int) -> dict[str, float]:
        """Whole runs in chunks, with progress, against one compiled call; in turn, so that both meet the same noise."""
        plain, watched = [], []
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            for _ in range(repeats + 1):
                for times, options in ((plain, {}), (watched, {"progress": True})):
                    began = time.perf_counter()
                    self._solve(count, 40, **options)
                    times.append(time.perf_counter() - began)
        return {"plain": float(np.median(plain[1:])), "watched": float(np.median(watched[1:]))}

    def show(self, results: dict[str, Any]) -> list[Path]:
        overhead = results["overhead"]["watched"] / results["overhead"]["plain"] - 1
        show_table(
            "The numerical example with IAPTT-GM",
            ["what", "value"],
            [
                ["500 outer × 40 inner steps", f"{1e3 * results['seconds']:.2f} ms"],
                ["compilation of that", f"{results['compile_seconds']:.2f} s"],
                ["exponent of growth in T (1 is linear)", f"{_slope(results['by_T']):.3f}"],
                ["exponent of growth in K", f"{_slope(results['by_K']):.3f}"],
                ["100,000 outer steps, one compiled call", f"{results['overhead']['plain']:.3f} s"],
                ["overhead of chunks, history and progress", f"{100 * overhead:.1f} %"],
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
            ax.set(xlabel=name[-1] + (" (K = 40)" if name == "by_T" else " (T = 500)"), ylabel="run time (ms)")
        k_bars = [r["k_bar"] for r in results["sweep"]]
        axes[2].plot(k_bars, [1e6 * r["with_gradient"] for r in results["sweep"]], "o-", label="φ and gradient")
        axes[2].plot(k_bars, [1e6 * r["forward"] for r in results["sweep"]], "o-", label="φ alone")
        axes[2].set(xlabel="k̄ (K = 2,000)", ylabel="µs", ylim=(0, None))
        axes[2].legend()
        figure.savefig(self.figure_path())
        return [self.figure_path()]


def _slope(by: dict[str, float]) -> float:
    counts, seconds = np.array([int(k) for k in by], float), np.array(list(by.values()))
    return float(np.polyfit(np.log(counts), np.log(seconds), 1)[0])
