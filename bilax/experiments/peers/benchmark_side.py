"""benchmark_bilevel's side of `bilax bench stochastic`: its own solver classes in its own environment.

python benchmark_side.py REPOSITORY, orders by stdin. Imports nothing of bilax but the formulas.
"""

import functools
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path[:0] = [sys.argv[1], str(Path(__file__).parent.parent / "stochastic")] if __name__ == "__main__" else []


def objectives(order: dict[str, Any]) -> tuple[Any, ...]:
    """f and F in the form that its solvers take: (y, x, start, batch_size) -> mean over rows from `start` on."""
    import objectives as formulas  # pyright: ignore[reportMissingImports]

    folder = Path(order["folder"])
    load = {level: [jnp.asarray(np.load(file)) for file in sorted(folder.glob(f"{level}-*.npy"))] for level in LEVELS}
    kind = getattr(formulas, order["kind"])
    lower, upper = kind(*load["lower"]), kind(*load["upper"])
    if order["dense"]:
        lower, upper = formulas.matrices(lower), formulas.matrices(upper)
    x0, y0 = (jnp.asarray(np.load(folder / f"{name}.npy")) for name in ("x0", "y0"))
    shape = y0.shape

    def rows(part, start, size):
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), part)

    def objective(part, value):
        @functools.partial(jax.jit, static_argnames="batch_size")
        def of_batch(inner_var, outer_var, start=0, batch_size=1):
            weights = outer_var
            if order["kind"] == "Labelled" and part is lower:
                weights = jax.lax.dynamic_slice_in_dim(outer_var, start, batch_size)
            return value(weights, inner_var.reshape(shape), rows(part, start, batch_size))

        return of_batch

    f, F = {
        "Terms": (formulas.quadratic_mean,) * 2,
        "Signed": (
            lambda x, y, part: formulas.logistic_loss(y, part) + formulas.penalty(x, y),
            lambda x, y, part: formulas.logistic_loss(y, part),
        ),
        "Labelled": (formulas.weighted, lambda x, y, part: jnp.mean(formulas.cross_entropies(y, part))),
    }[order["kind"]]
    counts = [len(jax.tree.leaves(part)[0]) for part in (lower, upper)]
    return objective(lower, f), objective(upper, F), *counts, y0.ravel(), x0


LEVELS = ("lower", "upper")


class Clock:
    """What a solver asks between chunks whether to go on; keeps the processor's time and the point of each."""

    def __init__(self, solver: Any, chunks: int):
        self.solver, self.chunks, self.since, self.wall = solver, chunks, 0.0, 0.0
        self.seconds: list[float] = []
        self.points: list[tuple[Any, Any]] = []

    def __call__(self) -> bool:
        if not self.since:
            self.since, self.wall = time.process_time(), time.perf_counter()
            return True
        point = jax.block_until_ready((self.solver.outer_var, self.solver.inner_var))
        self.seconds.append(time.process_time() - self.since)
        self.points.append(point)
        return len(self.points) < self.chunks


def run(solver: Any, order: dict[str, Any]) -> dict[str, Any]:
    """So many chunks from the start, with the batches of a seed."""
    keys = jax.random.split(jax.random.PRNGKey(order["seed"]))
    solver.state_inner_sampler = {**solver.state_inner_sampler, "key": keys[0]}
    solver.state_outer_sampler = {**solver.state_outer_sampler, "key": keys[1]}
    clock = Clock(solver, order["chunks"])
    solver.run(clock)
    wall = time.perf_counter() - clock.wall
    xs, ys = (np.stack([np.asarray(point[i]) for point in clock.points])[None] for i in (0, 1))
    np.savez(order["out"], x=xs, y=ys)
    return {"seconds": clock.seconds, "wall": wall}


def main() -> None:
    """Answers orders until there are none."""
    given: tuple[Any, ...] = ()
    solver: Any = None
    answers, sys.stdout = sys.stdout, sys.stderr  # its code prints
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        if order["do"] == "load":
            given = objectives(order)
        elif order["do"] == "begin":
            module = importlib.import_module(f"solvers.{order['method']}")
            settings = {"step_size": order["step_size"], "outer_ratio": order["outer_ratio"], **order["more"]}
            solver = module.Solver.get_instance(**settings, batch_size=order["batch"], eval_freq=order["chunk"])
            solver.set_objective(*given)
            solver.run(Clock(solver, 1))
        elif order["do"] == "run":
            answer = run(solver, order)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
