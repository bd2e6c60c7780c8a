"""bilax's side of `bilax bench stochastic`: `python -m bilax.experiments.peers.stochastic_side`, orders by stdin."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import bilax
from bilax.experiments.stochastic import curves, objectives
from bilax.experiments.stochastic.problems import PROBLEMS
from bilax.experiments.stochastic.settings import METHODS, Setting


class Given:
    """A problem with its data, and a method to run on it."""

    def __init__(self, order: dict[str, Any]):
        folder, kind = Path(order["folder"]), getattr(objectives, order["kind"])
        upper, lower = (
            kind(*(np.load(file) for file in sorted(folder.glob(f"{level}-*.npy")))) for level in ("upper", "lower")
        )
        if order["dense"]:
            upper, lower = objectives.matrices(upper), objectives.matrices(lower)
        self.data = bilax.Minibatches(upper, lower, order["batch"])
        self.batches = sum(len(part[0]) for part in (upper, lower)) / order["batch"]
        self.problem = PROBLEMS[order["kind"]]
        self.x0, self.y0 = (np.load(folder / f"{name}.npy") for name in ("x0", "y0"))

    def begin(self, order: dict[str, Any]) -> None:
        """Takes a method, its settings and how many steps it takes between two looks."""
        setting = Setting(order["step_size"], order["outer_ratio"], order["more"])
        self.method, self.chunk = METHODS[order["method"]](setting, self.batches), order["chunk"]

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """So many chunks from the start, one seed or several together."""
        where, looks = (self.problem, self.method, self.x0, self.y0, self.data), order["chunks"]
        curve = curves.run(*where, self.chunk, looks, order["seed"], order["seeds"])
        np.savez(order["out"], x=curve.x, y=curve.y)
        return {"seconds": [curve.computed * (i + 1) / looks for i in range(looks)], "wall": curve.seconds}


def main() -> None:
    """Answers orders until there are none."""
    given: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        if order["do"] == "load":
            given = Given(order)
        elif order["do"] == "begin":
            given.begin(order)
        elif order["do"] == "run":
            answer = given.run(order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
