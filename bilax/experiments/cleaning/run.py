"""`bilax run cleaning`: one method on one data set with half of the training labels wrong; all seeds run together."""

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
import optax

import bilax
from bilax.app.data_command import data_arg
from bilax.app.run_folder import RunRecord
from bilax.app.show import Arg, to_plain
from bilax.datasets.registry import entry, load
from bilax.experiments.cleaning import problem as cleaning
from bilax.experiments.cleaning.problem import Activation, Split
from bilax.experiments.runner import End, Experiment, Setup


@dataclasses.dataclass
class Cleaning(Experiment):
    """One method on one data set with half of the training labels wrong: initial networks and corruptions by seed.

    The measures are means over the seeds at the last recording; accuracies and F1 are fractions.
    """

    inner_steps: Annotated[int, Arg(help="K, follower steps per outer step")] = 50
    step_size: Annotated[float, Arg(help="α, the follower's step")] = 0.03
    outer_steps: Annotated[int, Arg(help="T, outer steps")] = 3000
    rate: Annotated[float, Arg(help="the outer step for x")] = 0.01
    z_rate: Annotated[float | None, Arg(help="Adam's rate for z; it shrinks to zero")] = 7e-5
    optimizer: Annotated[cleaning.Optimizer, Arg(help="of x")] = "adam"
    seed: Annotated[tuple[int, ...], Arg(help="one or several, run together")] = (0, 1, 2)
    dataset: Annotated[str, data_arg("digits need no files", "examples")] = "digits"
    folder: Annotated[Path | None, Arg(help="look for the data here before BILAX_DATA and the cache")] = None
    activation: Annotated[Activation, Arg(help="between the two layers")] = "none"
    hidden: Annotated[int, Arg(help="hidden units; 0 for a single layer, a convex follower")] = 300
    sizes: Annotated[tuple[int, int, int, int] | None, Arg(help="training, validation, held-out and test examples")] = (
        None
    )
    corrupted: Annotated[float, Arg(help="share of wrong training labels")] = 0.5
    may_keep: Annotated[bool, Arg(help="the authors' corruption, which leaves one in ten labels right")] = False
    z_decay: Annotated[float, Arg(help="weight decay of z, times its rate")] = 4.0
    every: Annotated[int, Arg(help="outer steps between measurements")] = 25
    batch: Annotated[int | None, Arg(help="examples of each step, F's and the follower's; all by default")] = None
    patience: Annotated[int | None, Arg(help="stop after so many outer steps without a rise")] = None

    name: ClassVar[str] = "cleaning"
    together: ClassVar[bool] = True
    double: ClassVar[bool] = False
    free: ClassVar[tuple[str, ...]] = tuple(set(Experiment.free) - {"outer_steps"} | {"folder", "patience"})
    """z's rate shrinks over all outer steps, so their number is settled when a run begins"""

    def check(self) -> None:
        super().check()
        for name in ("every", "batch", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                self.refuse(f"--{name} must be at least 1, got {value}.")

    def defaults(self) -> dict[str, Any]:
        # From a fixed start, 50 steps of 0.03 do not train the network. Its Hessian is indefinite, for which conjugate
        # gradients are not made: LS takes what three of their steps give, the best of 1, 2, 3, 5 and 10 by the
        # held-out accuracy at y_K on the digits.
        return {"start": "warm", "terms": 3 if self.method == "ls" else self.inner_steps}

    @functools.cached_property
    def parts(self) -> Split:
        """The data, split and corrupted."""
        sizes = self.sizes or entry(self.dataset, "examples").sizes
        train, test = load(self.dataset, self.folder)
        return cleaning.split(train.join(test), sizes, self.corrupted, self.seed, self.may_keep)

    def networks(self) -> Any:
        """One initial network for each seed."""
        inputs, keys = self.parts.train.inputs.shape[1], jax.random.split(jax.random.key(self.seed[0]), len(self.seed))
        return jax.vmap(lambda key: cleaning.network(key, inputs, self.parts.classes, self.hidden))(keys)

    def setup(self, seed: int) -> Setup:
        return cleaning.setup(self.parts, self.networks(), self.activation, self.batch)

    def optimizers(self) -> dict[str, optax.GradientTransformation]:
        z_rate = self.rate if self.z_rate is None else self.z_rate
        moves_z = cleaning.z_optimizer(self.outer_steps, z_rate, self.z_decay)
        return {"optimizer": self._optimizer(self.rate), "z_optimizer": moves_z}

    def validation(self, seed: int) -> bilax.EarlyStopping:
        return cleaning.measuring(self.make_method(), self.parts, self.activation, self.every, self.patience)

    def measures(self, end: End) -> dict[str, Any]:
        assert end.validation is not None
        last = end.validation.measures[-1] if end.validation.measures else {}
        shown = {"test_z": "accuracy at z", "test_y": "accuracy at y_K", "f1": "F1"}
        return {
            f"{label}{what}": float(function(last[name]))
            for name, label in shown.items()
            if name in last
            for what, function in (("", np.mean), (" ±", np.std))
        }

    def details(self, end: End) -> dict[str, Any]:
        assert end.validation is not None
        return {
            "recorded": end.validation.steps,
            "seconds_per_step": end.seconds / max(1, int(np.max(end.solution.steps))),
            "curves": curves(end.validation),
            "extremes": extremes(np.asarray(end.solution.x[0]), self.parts),
        }

    @classmethod
    def pictures(cls, record: RunRecord) -> dict[str, bytes]:
        """The examples with the lowest and the highest weights, for a report."""
        from bilax.experiments.cleaning.table_3 import draw_extremes

        shown = (record.result or {}).get("extremes")
        if not shown:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            picture = draw_extremes(shown, Path(folder) / "weights.png").read_bytes()
        return {"the lowest weights (labels that seem wrong) and the highest": picture}


def curves(measured: bilax.EarlyStopping) -> dict[str, Any]:
    """What was measured as plain numbers, with a leading axis for recordings, then seeds."""
    names = measured.measures[0] if measured.measures else ()
    return {name: to_plain([each[name] for each in measured.measures], 5) for name in names}


def extremes(x: np.ndarray, parts: Split, count: int = 24) -> dict[str, Any]:
    """The training examples with the lowest and the highest weights of the first seed, pictures as hex bytes."""
    if len(parts.train.shape) != 2:
        return {}
    order = np.argsort(x, kind="stable")
    pixels = np.round(255 * np.clip(parts.train.inputs, 0, 1)).astype(np.uint8)
    return {
        "shape": list(parts.train.shape),
        **{
            name: [
                {
                    "weight": float(1 / (1 + np.exp(-x[i]))),
                    "given": int(parts.noisy[0, i]),
                    "true": int(parts.train.labels[i]),
                    "pixels": pixels[i].tobytes().hex(),
                }
                for i in rows
            ]
            for name, rows in (("lowest", order[:count]), ("highest", order[::-1][:count]))
        },
    }
