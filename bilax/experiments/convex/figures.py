"""The paper's convex example, Eq. (ce-2), and the left half of Figure 3: does acceleration help?

    min over x in [−100, 100]ⁿ of ‖x − y₂‖⁴ + ‖y₁ − e‖⁴   such that   (y₁, y₂) minimises ½‖y₁‖² − xᵀy₁

The follower leaves y₂ free, so its solutions are many; the leader's choice among them is x* = y₁* = y₂* = e.
The paper does not say whether ‖·‖⁴ is the Euclidean norm to the fourth power or a sum of fourth powers, nor
where it starts; both readings are here.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilax
from bilax.app.show import Claim, Target, console, plt, show_table, steps

DIMENSION = 50
OUTER_STEPS = 1000
OPTIMIZER = optax.sgd(0.005)
SETTINGS = {"paper's": (20, 0.15), "badly solved": (5, 0.05)}
"""(inner steps, step size): the appendix's, and one that leaves the follower far from its solution"""
STARTS = {"sum": 0.0, "norm": 0.5}
"""the norm's fourth power diverges from 0 at the paper's outer step, for its gradient grows with n"""
Reading = Literal["sum", "norm"]


def problem(reading: Reading) -> bilax.Problem:
    """The example with ‖v‖⁴ read as the sum of fourth powers or as the Euclidean norm to the fourth."""

    def fourth(v):
        return jnp.sum(v**4) if reading == "sum" else jnp.sum(v**2) ** 2

    def upper(x, y):
        return fourth(x - y[1]) + fourth(y[0] - 1)

    def lower(x, y):
        return 0.5 * jnp.sum(y[0] ** 2) - x @ y[0]

    return bilax.Problem(upper, lower, x_set=bilax.Box(-100.0, 100.0))


def start(value: float) -> tuple[Any, Any]:
    """x and (y₁, y₂) with all coordinates equal."""
    vector = jnp.full(DIMENSION, value)
    return vector, (vector, vector)


def distances(x: Any, z: Any, info: bilax.Info) -> Any:
    """‖x − x*‖ and ‖y − y*‖ over y₁ and y₂ together."""
    return optax.tree.norm(x - 1), optax.tree.norm(jax.tree.map(lambda leaf: leaf - 1, info.y))


def methods(inner_steps: int, step_size: float) -> dict[str, bilax.Method]:
    """IA-GM, and IA-GM(A) with the paper's sequence and with FISTA's."""
    return {
        "IA-GM": bilax.ia_gm(inner_steps, step_size),
        "IA-GM(A), paper's t": bilax.ia_gm_a(inner_steps, step_size, "paper"),
        "IA-GM(A), FISTA's t": bilax.ia_gm_a(inner_steps, step_size, "fista"),
    }


@dataclasses.dataclass
class Figure3Left(Target):
    """IA-GM against IA-GM(A) on the convex example: distances to the solution per outer step."""

    name = "figure-3-left"

    def compute(self) -> dict[str, Any]:
        rows, count = [], OUTER_STEPS // 10 if self.quick else OUTER_STEPS
        with jax.enable_x64(True), steps(6 if self.quick else 12, "Figure 3, left") as advance:
            for reading, value in list(STARTS.items())[: 1 if self.quick else 2]:
                for setting, (inner_steps, step_size) in SETTINGS.items():
                    for name, method in methods(inner_steps, step_size).items():
                        advance(f"{name}, ‖·‖⁴ as {reading}, {setting} setting")
                        run = bilax.solve(
                            problem(reading),  # pyright: ignore[reportArgumentType]
                            method,
                            *start(value),
                            steps=count,
                            optimizer=OPTIMIZER,
                            record=distances,
                        )
                        x_distance, y_distance = run.history.record
                        rows.append(
                            {
                                "reading": reading,
                                "setting": setting,
                                "inner_steps": inner_steps,
                                "step_size": step_size,
                                "method": name,
                                "status": run.status.name,
                                "x": x_distance[:: max(1, count // 200)],
                                "y": y_distance[:: max(1, count // 200)],
                            }
                        )
            zero = bilax.solve(
                problem("norm"), methods(20, 0.15)["IA-GM"], *start(0.0), steps=count, optimizer=OPTIMIZER
            )
        return {"rows": rows, "outer_steps": count, "norm_from_zero": zero.status.name, "starts": STARTS}

    def show(self, results: dict[str, Any]) -> list[Path]:
        show_table(
            f"Distances after {results['outer_steps']} outer steps",
            ["‖·‖⁴ read as", "follower", "method", "‖x − x*‖", "‖y − y*‖", "ended"],
            [
                [r["reading"], f"K = {r['inner_steps']}, α = {r['step_size']:g}", r["method"], f"{r['x'][-1]:.4f}",
                 f"{r['y'][-1]:.4f}", r["status"]]
                for r in results["rows"]
            ],
        )  # fmt: skip
        console.print(f"With the norm's fourth power and the start 0 in place of 0.5: {results['norm_from_zero']}.")
        pyplot = plt()
        cases = list(dict.fromkeys((row["reading"], row["setting"]) for row in results["rows"]))
        figure, axes = pyplot.subplots(2, len(cases), figsize=(2.75 * len(cases), 4.8), sharex=True)
        for row in results["rows"]:
            column = cases.index((row["reading"], row["setting"]))
            for line, which in enumerate("xy"):
                ticks = np.linspace(0, results["outer_steps"], len(row[which]))
                style = {"IA-GM": "-", "IA-GM(A), paper's t": "--", "IA-GM(A), FISTA's t": "-."}[row["method"]]
                axes[line, column].plot(ticks, row[which], style, label=row["method"])
            axes[0, column].set_title(f"{row['reading']}, K = {row['inner_steps']}, α = {row['step_size']:g}")
        for line, which in enumerate("xy"):
            axes[line, 0].set_ylabel(f"$\\|{which} - {which}^*\\|$")
        for ax in axes[1]:
            ax.set_xlabel("outer step")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
        figure.savefig(self.figure_path())
        return [self.figure_path()]

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        claims = []
        for reading, setting in dict.fromkeys((r["reading"], r["setting"]) for r in results["rows"]):
            rows = {r["method"]: r for r in results["rows"] if (r["reading"], r["setting"]) == (reading, setting)}
            plain, ours, fista = rows.values()
            claims.append(
                Claim(
                    "IA-GM(A) converges significantly faster than IA-GM",
                    f"{reading}, {setting} setting: the sum of ‖x − x*‖ over the run is {_area(ours, plain):.2f} of "
                    f"IA-GM's with the paper's sequence, {_area(fista, plain):.2f} with FISTA's",
                    _area(ours, plain) < 0.9,
                )
            )
        return claims


def _area(row: dict[str, Any], plain: dict[str, Any]) -> float:
    """How a curve compares with another over the whole run: the ratio of their sums."""
    return float(np.sum(row["x"]) / np.sum(plain["x"]))
