"""The paper's non-convex numerical example, Eq. (non-convex toy), and Figures 1 and 2 and Table 1 made from it.

    min over x in [1, 10] of x + x y   such that   y minimises −sin(x y) over [−2, 2]

The follower has many global minima; the one solution is x* = 11π/4, y* = −2, F* = −11π/4.
"""

import dataclasses
import json
import math
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilax
from bilax.app.show import Claim, Target, plt, show_table, steps, timings

X_STAR = 11 * math.pi / 4
F_STAR = -X_STAR
STARTS = ((1.0, 2.0), (5.0, 1.0), (7.0, -1.0))
INNER_STEPS, STEP_SIZE, OUTER_STEPS = 40, 5e-4, 500
"""the appendix's settings; the outer step is 0.1"""
OPTIMIZER = optax.sgd(0.1)
FOLLOWERS = ((5e-4, 40), (5e-4, 160), (5e-3, 40), (2e-2, 40))
"""(step size, inner steps) from the paper's rough follower to well-solved ones"""
GRID = 40


def _upper(x, y):
    return x + x * y


def _lower(x, y):
    return -jnp.sin(x * y)


PROBLEM = bilax.Problem(_upper, _lower, bilax.Box(1.0, 10.0), bilax.Box(-2.0, 2.0))


def methods(inner_steps: int = INNER_STEPS, step_size: float = STEP_SIZE) -> dict[str, bilax.Method]:
    """The methods of Figure 1, with the appendix's 𝒯 = 40 and μ = 0.4; the follower's start is fixed, as there."""
    return {
        "IAPTT-GM": bilax.iaptt_gm(inner_steps, step_size),
        "IA-GM": bilax.ia_gm(inner_steps, step_size),
        "RHG": bilax.rhg(inner_steps, step_size),
        "BDA": bilax.bda(inner_steps, step_size, mu=0.4),
        "LS": bilax.ls(inner_steps, step_size, tolerance=None, max_steps=40),
        "NS": bilax.ns(inner_steps, step_size, terms=40),
    }


def leader(x: Any, z: Any, info: bilax.Info) -> Any:
    """What the curves need of each outer step."""
    return x


def share_reached(x: Any) -> float:
    """The share of end points within 2 % of x*."""
    return float(np.mean(reached(x)))


def reached(x: Any) -> Any:
    """Which end points lie within 2 % of x*."""
    return np.abs(np.asarray(x) - X_STAR) < 0.02 * X_STAR


def grid(count: int) -> tuple[Any, Any]:
    """count × count starts over X × Y, flattened; y varies slowest."""
    xs, ys = np.meshgrid(np.linspace(1, 10, count), np.linspace(-2, 2, count))
    return xs.ravel(), ys.ravel()


@dataclasses.dataclass
class Figure1(Target):
    """Error curves of six methods from three starts, and the basin map: which starts reach the solution at all."""

    name = "figure-1"

    def compute(self) -> dict[str, Any]:
        followers = FOLLOWERS[:1] if self.quick else FOLLOWERS
        count = 20 if self.quick else GRID
        curves, basins = {}, []
        with jax.enable_x64(True), steps(6 + 6 * len(followers), "Figure 1") as advance:
            for name, method in methods().items():
                advance(f"curves of {name}")
                runs = [bilax.solve(PROBLEM, method, *s, optimizer=OPTIMIZER, record=leader) for s in STARTS]
                curves[name] = [self._curve(run) for run in runs]
            for step_size, inner_steps in followers:
                for name, method in methods(inner_steps, step_size).items():
                    advance(f"basin of {name}, α = {step_size:g}, K = {inner_steps}")
                    batch = bilax.multistart(PROBLEM, method, *grid(count), optimizer=OPTIMIZER)
                    rows = reached(batch.x).reshape(count, count)
                    basins.append(
                        {
                            "method": name,
                            "step_size": step_size,
                            "inner_steps": inner_steps,
                            "share": share_reached(batch.x),
                            "map": ["".join("1" if cell else "0" for cell in row) for row in rows],
                        }
                    )
        return {"starts": STARTS, "curves": curves, "basins": basins, "grid": count}

    @staticmethod
    def _curve(run: bilax.Solution) -> dict[str, Any]:
        return {
            "x": float(run.x),
            "y": float(run.y),
            "upper": float(run.upper),
            "status": run.status.name,
            "F_error": np.abs(run.history.upper - F_STAR)[::5] / abs(F_STAR),
            "x_error": np.abs(run.history.record - X_STAR)[::5] / X_STAR,
        }

    def show(self, results: dict[str, Any]) -> list[Path]:
        starts = [f"from ({x:g}, {y:g})" for x, y in results["starts"]]
        rows = [
            [name, *(f"{run['x']:.4f}, {run['upper']:.4f}" for run in runs)] for name, runs in results["curves"].items()
        ]
        show_table(f"End points x, F; the solution is x* = {X_STAR:.4f}, F* = {F_STAR:.4f}", ["method", *starts], rows)
        settings = list(dict.fromkeys((b["step_size"], b["inner_steps"]) for b in results["basins"]))
        names = list(dict.fromkeys(b["method"] for b in results["basins"]))
        share = {(b["method"], b["step_size"], b["inner_steps"]): b["share"] for b in results["basins"]}
        show_table(
            f"Share of {results['grid']} × {results['grid']} starts that end within 2 % of x*",
            ["follower", *names],
            [[f"α = {a:g}, K = {k}", *(f"{share[n, a, k]:.3f}" for n in names)] for a, k in settings],
        )
        return [self._draw_curves(results), self._draw_basins(results, settings, names)]

    def _draw_curves(self, results: dict[str, Any]) -> Path:
        pyplot = plt()
        figure, axes = pyplot.subplots(2, 3, figsize=(9.5, 5), sharex=True, sharey="row")
        for column, start in enumerate(results["starts"]):
            for name, runs in results["curves"].items():
                run = runs[column]
                ticks = 5 * np.arange(len(run["F_error"]))
                style = {"zorder": 3, "lw": 2.4} if name == "IAPTT-GM" else {"ls": "--" if name == "IA-GM" else "-"}
                axes[0, column].semilogy(ticks, run["F_error"], label=name, **style)
                axes[1, column].semilogy(ticks, run["x_error"], **style)
            axes[0, column].set_title(f"$(x_0, y_0)$ = ({start[0]:g}, {start[1]:g})")
            axes[1, column].set_xlabel("outer step")
        axes[0, 0].set_ylabel("$|F - F^*| / |F^*|$")
        axes[1, 0].set_ylabel("$|x - x^*| / |x^*|$")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
        figure.savefig(self.figure_path())
        return self.figure_path()

    def _draw_basins(self, results: dict[str, Any], settings: list[Any], names: list[str]) -> Path:
        pyplot = plt()
        figure, axes = pyplot.subplots(
            len(settings), len(names), figsize=(1.75 * len(names), 1.6 * len(settings) + 0.7), squeeze=False,
            sharex=True, sharey=True,
        )  # fmt: skip
        for basin in results["basins"]:
            row = settings.index((basin["step_size"], basin["inner_steps"]))
            ax = axes[row, names.index(basin["method"])]
            cells = np.array([[int(c) for c in line] for line in basin["map"]])
            ax.imshow(
                cells, origin="lower", extent=(1, 10, -2, 2), aspect="auto", cmap=_basin_colours(), vmin=0, vmax=1
            )
            ax.plot(
                *zip(*results["starts"], strict=True), "o", ms=3.5, mfc="white", mec="black", mew=0.8, clip_on=False
            )
            ax.grid(visible=False)
            ax.text(
                0.96, 0.93, f"{basin['share']:.3f}", transform=ax.transAxes, ha="right", va="top", fontsize=8,
                bbox={"fc": "white", "ec": "none", "alpha": 0.85, "pad": 1.5},
            )  # fmt: skip
            if row == 0:
                ax.set_title(basin["method"])
        for row, (step_size, inner_steps) in enumerate(settings):
            axes[row, 0].set_ylabel(f"α = {step_size:g}, K = {inner_steps}\n$y_0$")
        for ax in axes[-1]:
            ax.set_xlabel("$x_0$")
        figure.suptitle("Starts that reach x* (blue), and their share; circles are the paper's three starts")
        path = self.figure_path("-basins")
        figure.savefig(path)
        return path

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        def hits(name):
            return sum(bool(reached(run["x"])) for run in results["curves"][name])

        def ends(name):
            return ", ".join(f"{run['x']:.3f}" for run in results["curves"][name])

        others = {name: hits(name) for name in ("RHG", "BDA", "LS", "NS")}
        share = {b["method"]: b["share"] for b in results["basins"][:6]}
        return [
            Claim(
                "IAPTT-GM reaches the solution from all three starts", f"x = {ends('IAPTT-GM')}", hits("IAPTT-GM") == 3
            ),
            Claim(
                "RHG, BDA, LS and NS fail to converge to the true solution",
                "starts that reach it: " + ", ".join(f"{n} {h} of 3" for n, h in others.items()),
                not any(others.values()),
            ),
            Claim(
                "IA-GM fails to converge to the true solution, so truncation is needed",
                f"at the paper's setting x = {ends('IA-GM')}; share of the grid {share['IA-GM']:.3f}, IAPTT-GM "
                f"{share['IAPTT-GM']:.3f}",
                hits("IA-GM") < 3,
            ),
        ]


def _basin_colours() -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap(["#EFE7DA", "#0072B2"])


@dataclasses.dataclass
class Figure2(Target):
    """k̄ per outer step and the speed of IAPTT-GM against IA-GM, for follower runs up to K = 2,000 steps."""

    name = "figure-2"

    def compute(self) -> dict[str, Any]:
        counts = (40, 200) if self.quick else (40, 200, 1000, 2000)
        rows, stretches, length, repeats = [], 10, 20 if self.quick else 100, 3 if self.quick else 7
        with jax.enable_x64(True), steps(len(counts), "Figure 2") as advance:
            for inner_steps in counts:
                advance(f"K = {inner_steps}")
                rows += self._stretches(inner_steps, stretches, length, repeats)
        return {"start": STARTS[1], "stretch": length, "rows": rows}

    @staticmethod
    def _stretches(inner_steps: int, stretches: int, length: int, repeats: int) -> list[dict[str, Any]]:
        """Gradient descent keeps no memory, so a run can be cut into stretches that are timed one by one."""
        chosen = {name: methods(inner_steps)[name] for name in ("IAPTT-GM", "IA-GM")}
        points = {name: tuple(jnp.asarray(v) for v in STARTS[1]) for name in chosen}
        rows = {name: {"method": name, "K": inner_steps, "k_bar": [], "seconds_per_step": []} for name in chosen}

        def run(name):
            return bilax.solve(PROBLEM, chosen[name], *points[name], steps=length, optimizer=OPTIMIZER)

        for _ in range(stretches):
            seconds = timings({name: lambda name=name: run(name) and None for name in chosen}, repeats)
            for name in chosen:
                end = run(name)
                points[name] = end.x, end.z
                rows[name]["k_bar"] += end.history.k_bar.tolist()
                rows[name]["seconds_per_step"].append(seconds[name] / length)
        return list(rows.values())

    def show(self, results: dict[str, Any]) -> list[Path]:
        table = []
        for row in results["rows"]:
            rate = 1 / np.mean(row["seconds_per_step"])
            table.append([row["method"], row["K"], float(np.mean(row["k_bar"])), float(rate)])
        show_table("Truncation and speed", ["method", "K", "mean k̄", "outer steps per second"], table)
        pyplot = plt()
        counts = sorted({row["K"] for row in results["rows"]})
        figure, axes = pyplot.subplots(2, len(counts), figsize=(2.6 * len(counts), 4.6), squeeze=False, sharex=True)
        for row in results["rows"]:
            column = counts.index(row["K"])
            axes[0, column].plot(row["k_bar"], label=row["method"])
            ticks = results["stretch"] * (np.arange(len(row["seconds_per_step"])) + 0.5)
            axes[1, column].plot(ticks, 1 / np.array(row["seconds_per_step"]), "o-", ms=3)
            axes[0, column].set_title(f"K = {row['K']}")
            axes[1, column].set_xlabel("outer step")
            axes[1, column].set_ylim(bottom=0)
        axes[0, 0].set_ylabel("k̄, the steps swept back over")
        axes[1, 0].set_ylabel("outer steps per second")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
        figure.savefig(self.figure_path())
        return [self.figure_path()]

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        by = {(r["method"], r["K"]): r for r in results["rows"]}
        largest = max(r["K"] for r in results["rows"])
        ratios, shares = {}, {}
        for _, count in by:
            ours, plain = by["IAPTT-GM", count], by["IA-GM", count]
            ratios[count] = float(np.sum(plain["seconds_per_step"]) / np.sum(ours["seconds_per_step"]))
            shares[count] = float(np.mean(ours["k_bar"])) / count
        return [
            Claim(
                "PTT chooses k̄ smaller than K",
                "mean k̄ / K: " + ", ".join(f"{shares[k]:.2f} (K = {k})" for k in shares),
                shares[largest] < 1,
            ),
            Claim(
                "truncation makes the outer iteration faster than IA-GM's",
                "speed against IA-GM: " + ", ".join(f"{ratios[k]:.2f}× (K = {k})" for k in ratios),
                ratios[largest] > 1,
            ),
        ]


PAPER_TABLE_1 = {
    "LS": (10.426, 5.120),
    "NS": (10.387, 10.815),
    "RHG": (10.153, 9.990),
    "BDA": (10.154, 16.800),
    "IAPTT-GM": (10.153, 10.835),
}
"""memory (GB) and run time (s), Table 1 of the paper"""


@dataclasses.dataclass
class Table1(Target):
    """Time and peak memory of five methods on the example, each in a process of its own."""

    name = "table-1"

    def compute(self) -> dict[str, Any]:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in PAPER_TABLE_1}
        rounds, repeats = (1, 5) if self.quick else (5, 25)
        with steps(rounds * len(runs), "Table 1") as advance:
            for name in rounds * list(runs):
                advance(f"{name} in a fresh process")
                # A program found in the cache would compile in no time and without the compiler's memory.
                environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
                command = [
                    sys.executable,
                    "-c",
                    f"from bilax.experiments.toy.figures import measure; measure({name!r}, {repeats})",
                ]
                measured = json.loads(
                    subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
                )
                runs[name].append(measured)
        rows = {name: {key: float(np.median([m[key] for m in many])) for key in many[0]} for name, many in runs.items()}
        return {"rows": rows, "outer_steps": OUTER_STEPS, "inner_steps": INNER_STEPS}

    def show(self, results: dict[str, Any]) -> list[Path]:
        table = []
        for name, row in results["rows"].items():
            memory, seconds = PAPER_TABLE_1[name]
            table.append(
                [
                    name,
                    f"{1e3 * row['seconds']:.2f}",
                    f"{row['compile_seconds']:.2f}",
                    f"{row['peak_mb'] - row['import_mb']:.0f}",
                    f"{row['peak_mb']:.0f}",
                    f"{row['temporary_bytes']:.0f}",
                    f"{seconds:.3f}",
                    f"{memory:.3f}",
                ]
            )
        show_table(
            f"{results['outer_steps']} outer × {results['inner_steps']} inner steps, one process each",
            ["method", "run (ms)", "compile (s)", "memory above import (MB)", "peak (MB)", "XLA temporaries (B)",
             "paper: run (s)", "paper: memory (GB)"],
            table,
        )  # fmt: skip
        return []

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        rows = results["rows"]
        ms = {name: 1e3 * row["seconds"] for name, row in rows.items()}
        above = {name: row["peak_mb"] - row["import_mb"] for name, row in rows.items()}
        others = max(above[n] for n in ("LS", "NS", "BDA"))
        return [
            Claim(
                "IAPTT-GM needs less memory than NS, LS and BDA, and the same as RHG",
                ", ".join(f"{n} {v:.0f} MB" for n, v in above.items()) + " above the import (mostly the compiler's)",
                above["IAPTT-GM"] < others and abs(above["IAPTT-GM"] - above["RHG"]) < 0.05 * above["RHG"],
            ),
            Claim(
                "IAPTT-GM is a bit slower than RHG and NS, and faster than BDA",
                ", ".join(f"{n} {v:.1f} ms" for n, v in ms.items()),
                ms["IAPTT-GM"] > max(ms["RHG"], ms["NS"]) and ms["IAPTT-GM"] < ms["BDA"],
            ),
        ]


def measure(name: str, repeats: int) -> None:
    """Prints as JSON what one method costs in this process; `Table1` calls it in a fresh one."""
    with jax.enable_x64(True):
        jnp.zeros(()).block_until_ready()
        imported = _peak_mb()
        method = methods()[name]

        def run():
            begin = time.perf_counter()
            bilax.solve(PROBLEM, method, *STARTS[1], optimizer=OPTIMIZER)
            return time.perf_counter() - begin

        first = run()
        times = [run() for _ in range(repeats)]
        gradient = jax.jit(jax.value_and_grad(bilax.approximate(PROBLEM, method), (0, 1), has_aux=True))
        memory = gradient.lower(1.0, 1.0).compile().memory_analysis()
    seconds = float(np.median(times))
    json.dump(
        {
            "seconds": seconds,
            "compile_seconds": first - seconds,
            "import_mb": imported,
            "peak_mb": _peak_mb(),
            "temporary_bytes": int(memory.temp_size_in_bytes) if memory else 0,
        },
        sys.stdout,
    )


def _peak_mb() -> float:
    # On Linux ru_maxrss is at least what the process held that started this one.
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    if found:
        return int(found[1]) / 2**10
    # macOS counts ru_maxrss in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
