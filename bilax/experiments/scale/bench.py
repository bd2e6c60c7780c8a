"""`bilax bench scale`: memory and time of the sweep, the cost of an outer step, exchanges of devices, bfloat16."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import bilax
from bilax.app.show import Arg, Claim, Target, plt, show_table, timings
from bilax.datasets.registry import load

RULES = {"all states": False, "checkpoint=True": True}
COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
SHAPE = re.compile(r"(?:f32|s32|u32|pred|bf16)\[([0-9,]*)\]")


def loss(y: Any, inputs: Any, labels: Any) -> Any:
    """−log softmax at the labels, of a linear classifier."""
    scores = (inputs @ y).astype(jnp.float32) if inputs.dtype == jnp.bfloat16 else inputs @ y
    return jax.nn.logsumexp(scores, axis=1) - jnp.take_along_axis(scores, labels[:, None], axis=1)[:, 0]


def weighted(x: Any, y: Any, valid: Any, train: Any) -> Any:
    """The follower's objective of hyper-cleaning."""
    return jnp.mean(jax.nn.sigmoid(x) * loss(y, *train))


CLEANING = bilax.Problem(lambda x, y, valid, train: jnp.mean(loss(y, *valid)), weighted)
GROWING = bilax.Problem(lambda x, y, valid, train: jnp.mean(y**2), weighted)
"""F grows along the trajectory, so that truncation chooses k̄ = K and the sweep has its full length"""


def arguments(examples: int, features: int, classes: int) -> tuple[Any, ...]:
    """x, z and data of random numbers."""
    rng = np.random.default_rng(0)

    def some():
        inputs = rng.normal(size=(examples, features)).astype(np.float32) / np.float32(np.sqrt(features))
        return jnp.asarray(inputs), jnp.asarray(rng.integers(0, classes, examples))

    return jnp.zeros(examples), jnp.zeros((features, classes)), some(), some()


def hypergradient(problem: bilax.Problem, inner_steps: int, checkpoint: bool | int = False) -> Any:
    """A jitted function to φ and its derivatives in x and z."""
    method = bilax.iaptt_gm(inner_steps, 0.5, derivative=bilax.Reverse(checkpoint=checkpoint))
    return jax.jit(jax.value_and_grad(bilax.approximate(problem, method), (0, 1), has_aux=True))


def straight_line(sizes: list[int], seconds: list[float]) -> dict[str, Any]:
    """A least-squares line, and the share of the variance that it explains."""
    slope, offset = np.polyfit(sizes, seconds, 1)
    left = np.var(np.asarray(seconds) - slope * np.asarray(sizes) - offset)
    return {
        "sizes": sizes, "seconds": seconds, "slope": slope, "offset": offset, "explained": 1 - left / np.var(seconds)
    }  # fmt: skip


def collectives(text: str) -> dict[str, Any]:
    """How often a compiled program's text names each kind of exchange, and how many numbers those move."""
    found: dict[str, list[int]] = {}
    for shapes, kind in COLLECTIVE.findall(text):
        numbers = sum(math.prod(int(n) for n in dims.split(",") if n) for dims in SHAPE.findall(shapes))
        found.setdefault(kind, []).append(numbers)
    return {kind: sorted(numbers) for kind, numbers in found.items()}


@dataclasses.dataclass
class Scale(Target):
    """Memory and time of the sweep for K up to 6,400, how an outer step grows, what devices exchange, bfloat16."""

    devices: Annotated[int, Arg(help="parts of the CPU among which hyper-cleaning is divided")] = 4
    name = "scale"
    claimant = "what scale asks for"

    def compute(self) -> dict[str, Any]:
        ks = (25, 100) if self.quick else (100, 400, 1600, 6400)
        small = (8, 200, 50) if self.quick else (8, 2000, 50)
        sweeps = [self._sweep(small, k, 1 if k > 1000 else 3) for k in ks]
        large = (8, 1000, 100) if self.quick else (8, 10_000, 100)
        sweeps += [self._sweep(large, k, 2) for k in ks[:2]]
        return {
            "sweep": sweeps,
            "memory": [self._memory(large, k) for k in ks],
            "growth": self._growth(),
            "exchanged": self._exchanged(),
            "bfloat16": self._half_precision(),
        }

    @staticmethod
    def _sweep(sizes: tuple[int, int, int], inner_steps: int, repeats: int) -> dict[str, Any]:
        given = arguments(*sizes)
        runs = {name: hypergradient(GROWING, inner_steps, rule) for name, rule in RULES.items()}
        k_bar = int(runs["checkpoint=True"](*given)[0][1].k_bar)
        seconds = timings({name: lambda run=run: run(*given) for name, run in runs.items()}, repeats)
        return {"K": inner_steps, "variables": sizes[1] * sizes[2], "k_bar": k_bar, "seconds": seconds}

    @staticmethod
    def _memory(sizes: tuple[int, int, int], inner_steps: int) -> dict[str, Any]:
        """Bytes of working memory that the compiled program asks for; nothing is run."""
        given, variables = arguments(*sizes), sizes[1] * sizes[2]
        room = 40 * 4 * variables
        found = {
            name: hypergradient(GROWING, inner_steps, rule).lower(*given).compile().memory_analysis().temp_size_in_bytes
            for name, rule in (RULES | {"within 40 states": room}).items()
        }
        return {"K": inner_steps, "variables": variables, "bytes": found}

    def _growth(self) -> dict[str, Any]:
        few = 1 if self.quick else 4
        cases = {
            "K": [(few * k, 1000, 100) for k in (10, 20, 40, 80)],
            "variables": [(20, 1000, few * d) for d in (100, 200, 400, 800)],
            # More than a cache holds, all of them: what fits is faster, which makes the line bend.
            "examples": [(20, few * n, 100) for n in (8000, 16_000, 32_000, 64_000)],
        }
        found = {}
        for name, grid in cases.items():
            runs = {}
            for k, n, d in grid:
                run, given = hypergradient(GROWING, k), arguments(n, d, 10)
                runs[k, n, d] = lambda run=run, given=given: run(*given)
            seconds = timings(runs, 2 if self.quick else 5)
            sizes = [{"K": k, "examples": n, "variables": 10 * d}[name] for k, n, d in grid]
            found[name] = straight_line(sizes, list(seconds.values()))
        return found

    def _exchanged(self) -> dict[str, Any]:
        """The exchanges of hyper-cleaning divided by examples: those of φ alone, and with its gradient."""
        features, classes, inner_steps = 100, 10, 40
        x, z, *data = arguments(64 * self.devices, features, classes)
        mesh = Mesh(jax.devices()[: self.devices], ("data",))
        cut, copied = (NamedSharding(mesh, spec) for spec in (PartitionSpec("data"), PartitionSpec()))
        given = jax.device_put(x, cut), jax.device_put(z, copied), *jax.device_put(data, cut)
        method = bilax.iaptt_gm(inner_steps, 0.5)
        phi = jax.jit(bilax.approximate(CLEANING, method))
        texts = [str(run.lower(*given).compile().as_text()) for run in (phi, hypergradient(CLEANING, inner_steps))]
        value, gradient = (collectives(text) for text in texts)
        return {"K": inner_steps, "variables": features * classes, "value": value, "gradient": gradient}

    @staticmethod
    def _half_precision() -> list[dict[str, Any]]:
        """The error of the derivative in x on the digits where inputs, or inputs and follower, are bfloat16."""
        train, _ = load("digits")
        # Shades of the digits are multiples of 1/16, which bfloat16 would hold exactly.
        inputs, labels = np.asarray(train.inputs, float) - np.mean(train.inputs, axis=0), jnp.asarray(train.labels)
        half = len(inputs) // 2
        start = 0.1 * np.random.default_rng(0).normal(size=(inputs.shape[1], 10))

        def gradient(of_inputs, of_y):
            rows, z = jnp.asarray(inputs, of_inputs), jnp.asarray(start, of_y)
            data = (rows[:half], labels[:half]), (rows[half : 2 * half], labels[half : 2 * half])
            method = bilax.rhg(50, 0.5)
            x = jnp.zeros(half, jnp.float64 if of_inputs == jnp.float64 else jnp.float32)
            return np.asarray(jax.grad(lambda x: bilax.approximate(CLEANING, method)(x, z, *data)[0])(x), float)

        with jax.enable_x64(True):
            exact = gradient(jnp.float64, jnp.float64)
        kinds = ((jnp.float32, jnp.float32), (jnp.bfloat16, jnp.float32), (jnp.bfloat16, jnp.bfloat16))
        found = [(a.__name__, b.__name__, gradient(a, b)) for a, b in kinds]
        size = np.linalg.norm(exact)
        return [
            {
                "inputs": a, "follower": b, "error": np.linalg.norm(g - exact) / size,
                "cosine": g @ exact / np.linalg.norm(g) / size,
            }
            for a, b, g in found
        ]  # fmt: skip

    def show(self, results: dict[str, Any]) -> list[Path]:
        sweep, memory = results["sweep"], results["memory"]
        show_table(
            "the sweep, seconds",
            ["K", "variables", "k̄", *RULES, "ratio"],
            [[r["K"], r["variables"], r["k_bar"], *(r["seconds"][n] for n in RULES), _ratio(r)] for r in sweep],
        )
        names = list(memory[0]["bytes"])
        show_table(
            f"working memory of the compiled program in MB, {memory[0]['variables']:,} variables",
            ["K", *names],
            [[row["K"], *(row["bytes"][name] / 2**20 for name in names)] for row in memory],
        )
        show_table(
            "an outer step against a straight line",
            ["in", "seconds per unit", "explained"],
            [[name, fit["slope"], fit["explained"]] for name, fit in results["growth"].items()],
        )
        exchanged = results["exchanged"]
        show_table(
            f"numbers exchanged, {exchanged['variables']} variables: each line of the program once, loops not unrolled",
            ["", "kind", "numbers"],
            [[of, kind, str(n)] for of in ("value", "gradient") for kind, n in exchanged[of].items()],
        )
        show_table(
            "the derivative in bfloat16",
            ["inputs", "follower", "relative error", "cosine"],
            [[row["inputs"], row["follower"], row["error"], row["cosine"]] for row in results["bfloat16"]],
        )
        figure, (left, middle, right) = plt().subplots(1, 3, figsize=(13, 3.6))
        for name in names:
            left.loglog([row["K"] for row in memory], [row["bytes"][name] / 2**20 for row in memory], "o-", label=name)
        left.set(xlabel="K", ylabel="working memory, MB", title=f"{memory[0]['variables']:,} variables")
        shown = [row for row in sweep if row["variables"] == sweep[0]["variables"]]
        for name in RULES:
            middle.loglog([row["K"] for row in shown], [row["seconds"][name] for row in shown], "o-", label=name)
        middle.set(xlabel="K", ylabel="seconds", title=f"{sweep[0]['variables']:,} variables")
        for name, fit in results["growth"].items():
            sizes = np.asarray(fit["sizes"], float)
            (line,) = right.plot(sizes / sizes.max(), fit["seconds"], "o", label=name)
            right.plot(sizes / sizes.max(), fit["slope"] * sizes + fit["offset"], color=line.get_color())
        right.set(xlabel="share of the largest", ylabel="seconds", title="an outer step")
        for axes in (left, middle, right):
            axes.legend(fontsize=8)
        figure.savefig(self.figure_path())
        return [self.figure_path()]

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        worst = max(map(_ratio, results["sweep"]))
        straight = min(fit["explained"] for fit in results["growth"].values())
        exchanged, y = results["exchanged"], results["exchanged"]["variables"]
        whole = {of: sum(n >= y for n in exchanged[of].get("all-reduce", [])) for of in ("value", "gradient")}
        only = {*exchanged["value"], *exchanged["gradient"]} == {"all-reduce"}
        return [
            Claim("checkpointed sweeps take at most 1.6 times as long", f"{worst:.2f} at the worst", worst <= 1.6),
            Claim("an outer step is linear in K, |y| and examples", f"explained: {straight:.4f}", straight > 0.99),
            Claim(
                "one all-reduce of |y| per follower step and one per step back, nothing else of that size",
                f"{whole['value']} and {whole['gradient']} in the program's text",
                only and whole["gradient"] <= whole["value"] + 2,
            ),
        ]


def _ratio(row: dict[str, Any]) -> float:
    return row["seconds"]["checkpoint=True"] / row["seconds"]["all states"]
