"""The paper's lemmas and theorems as experiments: measured rates and limits beside the predicted ones."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import bilax
from bilax.app.show import Claim, Target, plt, show_table
from bilax.experiments.suite.bench import ends
from bilax.experiments.suite.problems import PROBLEMS


@dataclasses.dataclass
class Theory(Target):
    """Lemmas 3.1 and 3.2 and Theorems 3.1 and 3.4, measured."""

    name: ClassVar[str] = "theory"

    def compute(self) -> dict[str, Any]:
        with jax.enable_x64(True):
            return {
                "lemma_31": residual_rate(300 if self.quick else 3000),
                "theorem_31": infima([1, 4, 16, 64] if self.quick else [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]),
                "theorem_34": acceleration(200 if self.quick else 1000),
            }

    def show(self, results: dict[str, Any]) -> list[Path]:
        rows = [[name, case["predicted"], case["slope"]] for name, case in _slopes(results).items()]
        show_table("fitted slopes in log-log", ["what", "predicted", "measured"], rows)
        limits = results["theorem_31"]
        rows = [[name, case["minimum"][-1], case["stationary"], case["best"]] for name, case in limits["cases"].items()]
        show_table(f"K = {limits['K'][-1]}", ["problem", "inf φ_K", "best stationary F", "F* (global follower)"], rows)
        return [self._draw(results)]

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        rate, limits, speed = results["lemma_31"], results["theorem_31"], results["theorem_34"]
        good, bad = limits["cases"]["toy"], limits["cases"]["mb_2007_05"]
        below = all(np.all(np.asarray(c["minimum"]) <= c["stationary"] + 1e-6) for c in limits["cases"].values())
        ratio = max(np.max(np.asarray(c["residual"]) / np.asarray(c["bound"])) for c in rate["cases"].values())
        slow = rate["cases"]["slow follower"]["slope"]
        paper, fista = speed["cases"]["Nesterov, the paper's t_k"], speed["cases"]["Nesterov, FISTA's t_k"]
        return [
            Claim(
                "Lemma 3.1: min over k of the residual is at most C_f/√(K+1), for all x and z",
                f"at most {ratio:.2g} of the bound; the slowest follower has slope {slow:.3f} (predicted −0.5)",
                bool(ratio <= 1 and abs(slow + 0.5) < 0.075),
            ),
            Claim(
                "Lemma 3.2: min φ_K is at most the best stationary value", f"on {len(limits['cases'])} problems", below
            ),
            Claim(
                "Theorem 3.1: inf φ_K tends to F* under Assumption 3.1",
                f"toy: {good['minimum'][-1]:.4f}, F* = {good['best']:.4f}",
                abs(good["minimum"][-1] - good["best"]) < 0.02,
            ),
            Claim(
                "Assumption 3.1(5) is needed for it",
                f"mb_2007_05, which breaks it: inf φ_K = {bad['minimum'][-1]:.3f}, F* = {bad['best']:.3f}",
                abs(bad["minimum"][-1] - bad["best"]) > 0.5,
            ),
            Claim(
                "Theorem 3.4: f − f* falls as 1/K² with the dynamics of Eq. (yk_def2)",
                f"slope {paper['slope']:.2f} with t_k as printed",
                abs(paper["slope"] + 2) < 0.3,
            ),
            Claim(
                "the same with FISTA's t_k, as the cited theorem has it",
                f"slope {fista['slope']:.2f} (predicted −2)",
                abs(fista["slope"] + 2) < 0.3,
            ),
        ]

    def _draw(self, results: dict[str, Any]) -> Path:
        pyplot = plt()
        figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4))
        rate, limits, speed = results["lemma_31"], results["theorem_31"], results["theorem_34"]
        for i, (name, case) in enumerate(rate["cases"].items()):
            axes[0].loglog(rate["K"], case["residual"], color=f"C{i}", label=name)
            axes[0].loglog(rate["K"], case["bound"], color=f"C{i}", ls=":", label="its bound $C_f/\\sqrt{K+1}$")
        _guide(axes[0], rate["K"], rate["cases"]["slow follower"]["residual"], -0.5)
        axes[0].set(title="Lemma 3.1", xlabel="K", ylabel="largest over (x, z) of min residual")
        axes[0].set_ylim(bottom=1e-7)
        for i, (name, case) in enumerate(limits["cases"].items()):
            axes[1].semilogx(limits["K"], case["minimum"], "o-", color=f"C{i}", ms=3, label=f"inf $\\varphi_K$, {name}")
            axes[1].axhline(case["best"], color=f"C{i}", ls="--", lw=1)
            if abs(case["best"] - case["stationary"]) > 1e-3:
                axes[1].axhline(case["stationary"], color=f"C{i}", ls=":", lw=1)
        axes[1].plot([], [], "k--", lw=1, label="F*")
        axes[1].plot([], [], "k:", lw=1, label="best stationary F, where it differs")
        axes[1].set(title="Lemma 3.2 and Theorem 3.1", xlabel="K")
        for i, (name, case) in enumerate(speed["cases"].items()):
            label = f"{name}: {case['slope']:.2f}"
            axes[2].loglog(speed["K"], case["gap"], color=f"C{i}", label=label)
        _guide(axes[2], speed["K"], speed["cases"]["gradient descent"]["gap"], -1.0)
        _guide(axes[2], speed["K"], speed["cases"]["Nesterov, FISTA's t_k"]["gap"], -2.0)
        axes[2].set(title="Theorem 3.4", xlabel="K", ylabel="$f - f^*$")
        for axis in axes:
            axis.legend(fontsize=7)
        path = self.figure_path()
        figure.savefig(path)
        pyplot.close(figure)
        return path


def _slopes(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    cases = {f"residual, {k}": v for k, v in results["lemma_31"]["cases"].items()}
    cases |= {f"f − f*, {k}": v for k, v in results["theorem_34"]["cases"].items()}
    return {name: case for name, case in cases.items() if "predicted" in case}


def _guide(axis: Any, counts: Any, values: Any, slope: float) -> None:
    """The predicted slope as a thin line through the middle of a curve, a little above it."""
    counts, values = np.asarray(counts, float), np.asarray(values)
    middle = len(counts) // 2
    line = 1.6 * values[middle] * (counts / counts[middle]) ** slope
    axis.loglog(counts, line, color="0.5", lw=0.8, ls="-.", label=f"slope {slope:g}")


def fit_slope(counts: Any, values: Any) -> float:
    """The slope in log-log over the last nine tenths of the range, on a logarithmic scale of counts."""
    counts, values = np.asarray(counts, float), np.asarray(values)
    start = np.searchsorted(counts, counts[-1] / 30)
    picks = np.unique(np.geomspace(start + 1, len(counts), 60).astype(int) - 1)
    return float(np.polyfit(np.log(counts[picks]), np.log(values[picks]), 1)[0])


def residual_rate(longest: int) -> dict[str, Any]:
    """Lemma 3.1: the largest over (x, z) of min over k ≤ K of ‖R_α‖, against C_f/√(K+1).

    The paper's example falls much faster than the bound. (1 + y)^(−x) / x (x + 1) shows that the rate itself
    cannot be improved: its residual falls as K^(−(x+1)/(x+2)), which tends to K^(−1/2) as x tends to 0.
    """
    least = 0.02

    def flattening(x, y):
        return (1 + y) ** -x / (x * (x + 1))

    slow = bilax.Problem(lambda x, y: y, flattening, bilax.Box(least, 1.0), bilax.Box(0.0, 1e3))
    # L_f is x² ≤ 100 for the toy and 1 for the slow one; M − m is 2, and at most 1 / x (x + 1).
    cases = {
        "the paper's example": (PROBLEMS["toy"].problem, 100.0, 2.0),
        "slow follower": (slow, 1.0, 1 / (least * (least + 1))),
    }
    counts = np.unique(np.geomspace(1, longest, 80).astype(int))
    out = {}
    for name, (problem, lipschitz, span) in cases.items():
        alpha = 1 / lipschitz
        xs = jnp.linspace(*ends(problem.x_set), 33)
        zs = jnp.linspace(*ends(problem.y_set), 65)
        smallest = np.asarray(_least_residuals(problem, alpha, xs, zs, longest))[counts]
        bound = np.sqrt(span / (1 / alpha - lipschitz / 2) / (counts + 1))
        out[name] = {"residual": smallest, "bound": bound, "slope": fit_slope(counts, np.maximum(smallest, 1e-300))}
    out["slow follower"]["predicted"] = -0.5
    return {"K": counts, "cases": out}


def _least_residuals(problem: bilax.Problem, alpha: float, xs: Any, zs: Any, longest: int) -> Any:
    """For K = 0..longest the largest over all (x, z) of the least residual among y_0..y_K."""
    dynamics = bilax.GradientDescent(alpha)

    @jax.jit
    def run(xs, zs):
        def step(carry, k):
            ys, least = carry

            def one(x, y):
                follower = problem.follower(x, ())
                return dynamics.step(k, y, follower), bilax.residual(follower, y, alpha)

            after, residuals = jax.vmap(jax.vmap(one, (None, 0)))(xs, ys)
            least = jnp.minimum(least, residuals)
            return (after, least), jnp.max(least)

        ys = jnp.broadcast_to(zs, (xs.size, zs.size))
        return jax.lax.scan(step, (ys, jnp.full(ys.shape, jnp.inf)), jnp.arange(longest + 1))[1]

    return run(xs, zs)


def infima(counts: list[int]) -> dict[str, Any]:
    """Lemma 3.2 and Theorem 3.1: inf over (x, z) of φ_K on a grid, the best stationary value, and F*.

    The grid of z holds the stationary followers of each x, as the lemma's proof does. The best stationary value
    is known: for the toy it is F* itself; for the other two the follower's local minimum, or maximum, is better
    for the leader than its global minimum.
    """
    stationary = {"toy": PROBLEMS["toy"].best, "mb_2007_05": -0.5, "mb_2007_17": 0.0}
    alphas = {"toy": 0.01, "mb_2007_05": 0.005, "mb_2007_17": 0.3}
    cases = {}
    for name, lowest in stationary.items():
        known = PROBLEMS[name]
        minimum = [_infimum(known, count, alphas[name]) for count in counts]
        cases[name] = {"minimum": minimum, "stationary": float(lowest), "best": float(known.best)}
    return {"K": counts, "cases": cases}


def _infimum(known: Any, count: int, alpha: float) -> float:
    phi = bilax.approximate(known.problem, bilax.iaptt_gm(count, alpha))
    zs = jnp.append(jnp.linspace(*ends(known.problem.y_set), 401), 0.0)
    if isinstance(known.x0, tuple):
        return float(jnp.min(jax.jit(jax.vmap(lambda z: phi((), z)[0]))(zs)))
    lo, hi = ends(known.problem.x_set)
    # 11π/4 and its like are where the toy's infimum sits; a grid alone would miss it by its spacing.
    special = jnp.pi * jnp.arange(1, 13, 2) / 4 if hi > 2 else jnp.asarray([-0.5])
    xs = jnp.concatenate([jnp.linspace(lo, hi, 201), special])
    return float(jnp.min(jax.jit(jax.vmap(jax.vmap(lambda x, z: phi(x, z)[0], (None, 0)), (0, None)))(xs, zs)))


def acceleration(longest: int) -> dict[str, Any]:
    """Theorem 3.4: f(x, y_K) − f*(x) for a convex follower, by plain and by accelerated dynamics with α = 1/L_f.

    f(x, y) = ½ Σ λ_i (y_i − x)² with λ spread evenly in its logarithm from 1e-8 to 1 is as slow as convexity
    allows: descent falls exactly as 1/K on it.
    """
    curvatures = jnp.geomspace(1e-8, 1.0, 2000)
    lower = lambda x, y: 0.5 * jnp.sum(curvatures * (y - x) ** 2)  # noqa: E731
    follower = bilax.Problem(lambda x, y: jnp.sum(y), lower).follower(jnp.asarray(1.0), ())
    dynamics = {
        "gradient descent": (bilax.GradientDescent(1.0), -1.0),
        "Nesterov, the paper's t_k": (bilax.Nesterov(1.0, "paper"), None),
        "Nesterov, FISTA's t_k": (bilax.Nesterov(1.0, "fista"), -2.0),
    }
    counts, picks = np.arange(1, longest + 1), np.unique(np.geomspace(1, longest, 80).astype(int))
    cases = {}
    for name, (dynamic, predicted) in dynamics.items():

        def step(state, k, dynamic=dynamic):
            state = dynamic.step(k, state, follower)
            return state, follower.lower(dynamic.point(state))

        gap = np.asarray(jax.lax.scan(step, dynamic.init(jnp.zeros(2000)), jnp.arange(longest))[1])
        cases[name] = {"gap": gap[picks - 1], "slope": fit_slope(counts, gap)}
        if predicted is not None:
            cases[name]["predicted"] = predicted
    return {"K": picks, "cases": cases}
