"""`bilax compare toy`: all methods on the paper's example."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

import bilax
from bilax.app.show import Arg, console, plt, show_table
from bilax.experiments.toy import figures as toy


@dataclasses.dataclass
class CompareToy:
    """All methods on the paper's non-convex example from one start: a table, and a figure of their paths."""

    inner_steps: Annotated[int, Arg(help="K, follower steps per outer step")] = toy.INNER_STEPS
    step_size: Annotated[float, Arg(help="α, the follower's step")] = toy.STEP_SIZE
    outer_steps: Annotated[int, Arg(help="T, outer steps")] = toy.OUTER_STEPS
    at: Annotated[tuple[float, float], Arg(help="the start (x0, y0)")] = toy.STARTS[1]
    out: Annotated[Path, Arg(help="folder for the figure")] = Path("runs")

    def main(self) -> None:
        """Runs, prints, draws."""
        rows, paths = [], {}
        with jax.enable_x64(True), console.status("solving") as status:
            for name, method in toy.methods(self.inner_steps, self.step_size).items():
                status.update(f"solving with {name}")
                options: Any = {"steps": self.outer_steps, "optimizer": toy.OPTIMIZER, "record": _path}
                run = bilax.solve(toy.PROBLEM, method, *map(float, self.at), **options)
                began = time.perf_counter()
                bilax.solve(toy.PROBLEM, method, *map(float, self.at), **options)
                seconds = time.perf_counter() - began
                paths[name] = run.history.record
                hit = "yes" if toy.reached(run.x) else "no"
                rows.append([name, f"{run.x:.4f}", f"{run.y:.4f}", f"{run.upper:.4f}", hit, f"{1e3 * seconds:.1f}"])
        show_table(
            f"min x + xy, y minimises −sin(xy); from {self.at}; the solution is x* = 11π/4 = {toy.X_STAR:.4f}, "
            f"y* = −2, F* = {toy.F_STAR:.4f}",
            ["method", "x", "y", "F(x, y)", "within 2 % of x*", "time (ms)"],
            rows,
        )
        console.print(f"wrote {self._draw(paths)}", soft_wrap=True)

    def _draw(self, paths: dict[str, Any]) -> Path:
        pyplot = plt()
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2))
        xs, ys = np.meshgrid(np.linspace(1, 10, 300), np.linspace(-2, 2, 300))
        shown = left.contourf(xs, ys, xs + xs * ys, 30, cmap="Greys", alpha=0.75)
        figure.colorbar(shown, ax=left, label="F(x, y)")
        for k in range(-5, 5):
            curve = (2 * np.pi * k + np.pi / 2) / xs[0]
            curve[np.abs(curve) > 2] = np.nan
            left.plot(xs[0], curve, color="black", lw=0.9, ls=":", label="the follower's solutions" if k == 0 else None)
        for name, (x, y) in paths.items():
            left.plot(x, y, lw=2.4 if name == "IAPTT-GM" else 1.4, ls="--" if name == "IA-GM" else "-")
            right.semilogy(
                np.abs(x + x * y - toy.F_STAR) / abs(toy.F_STAR), label=name, ls="--" if name == "IA-GM" else "-"
            )
        left.plot(toy.X_STAR, -2, "k*", ms=12, clip_on=False, label="solution")
        left.plot(*self.at, "ko", ms=5, label="start")
        left.set(xlabel="x", ylabel="y", xlim=(1, 10), ylim=(-2, 2), title="where each method went")
        left.grid(visible=False)
        left.legend(loc="upper right", frameon=True, fontsize=7)
        right.set(xlabel="outer step", ylabel="$|F - F^*| / |F^*|$", title="error of the leader's objective")
        right.legend()
        path = self.out / "compare-toy.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        return path


def _path(x: Any, z: Any, info: bilax.Info) -> Any:
    return x, info.y
