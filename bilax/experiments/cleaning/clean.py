"""`bilax clean`: which labels of a person's own data are wrong, judged from a few that are trusted."""

import csv
import dataclasses
import io
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jaxtyping import Float, Int

import bilax
from bilax.app.errors import plain_errors
from bilax.app.show import Arg, console, show_table
from bilax.datasets import Examples, load, read_npz
from bilax.datasets.examples import check_labels, check_trusted
from bilax.experiments.cleaning import problem as cleaning
from bilax.experiments.cleaning.problem import Split
from bilax.experiments.cleaning.table import draw_pictures
from bilax.files import write_whole


class Weights(NamedTuple):
    """What was found out about each example."""

    weight: Float[np.ndarray, " n"]
    """σ(x_i): below 0.5 the label is suspicious"""
    suggested: Int[np.ndarray, " n"]
    """the label that the cleaned network gives"""


def weigh(
    data: Examples,
    trusted: Examples,
    steps: int = 200,
    inner_steps: int = 10,
    step_size: float = 0.15,
    batch: int | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> Weights:
    """Weighs the examples of `data` with IAPTT-GM and the trusted ones as validation set.

    Inputs are centred and scaled to a mean squared length of 100, which is what MNIST's have and what the step
    sizes go with.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    classes = int(max(data.labels.max(), trusted.labels.max())) + 1
    data, trusted = _scaled(data, trusted)
    # There is no truth to measure against: only the training and the trusted part matter.
    parts = Split(data, trusted, trusted, trusted, data.labels[None])
    key = jax.random.key(seed)
    y0s = jax.tree.map(lambda leaf: leaf[None], cleaning.network(key, data.inputs.shape[1], classes, hidden=100))
    setup, method = cleaning.setup(parts, y0s, batch=batch), bilax.iaptt_gm(inner_steps, step_size)
    z_optimizer = cleaning.z_optimizer(steps, 0.5 / max(steps, 1))
    options: Any = {"steps": steps, "optimizer": optax.adam(0.05), "z_optimizer": z_optimizer, "key": key}
    solution = setup.solve(method, progress=not quiet, throw=True, **options)[0]
    whole = cleaning.all_examples(parts)
    whole = whole._replace(train_targets=whole.train_targets[0])
    network = bilax.approximate(setup.problem, method)(solution.x, solution.z, whole)[1].y_last
    scores = np.asarray(cleaning.logits(network, jnp.asarray(data.inputs)))
    return Weights(1 / (1 + np.exp(-np.asarray(solution.x))), scores.argmax(axis=0))


@dataclasses.dataclass
class Clean:
    """Finds wrong labels: weighs each example of an .npz file (x, y) by how well it serves trusted examples."""

    data: Annotated[Path, tyro.conf.Positional, Arg(help=".npz file with x (n, ...) and y (n,), labels from 0")]
    trusted: Annotated[Path, Arg(help=".npz file of the same kind whose labels are right")]
    out: Annotated[Path, Arg(help="table to write: index, label, weight, suspicious, suggested label")] = Path(
        "weights.csv"
    )
    steps: Annotated[int, Arg(help="outer steps")] = 200
    batch: Annotated[int | None, Arg(help="examples per outer step, for large files; all by default")] = None
    seed: Annotated[int, Arg(help="seed of the initial network and of the batches")] = 0

    def main(self) -> None:
        """Writes the table, and the most suspicious examples as a picture where they are pictures."""
        with plain_errors():
            data, trusted = read_npz(self.data), read_npz(self.trusted)
            classes = int(trusted.labels.max()) + 1
            check_labels(self.data, data.labels, classes)
            check_trusted(self.trusted, trusted, self.data, data, classes)
            if self.out.suffix == ".png":
                raise ValueError("out is a table, and a picture of the same name goes beside it: let it end in .csv.")
            weights = weigh(data, trusted, self.steps, batch=self.batch, seed=self.seed)
            write_weights(self.out, data, weights)
            suspicious = np.flatnonzero(weights.weight < 0.5)
            console.print(f"{len(suspicious)} of {len(data.labels)} labels are suspicious.")
            show_suspicious(data, weights)
            written = [self.out]
            if is_picture(data):
                written.append(draw_suspicious(data, weights, self.out.with_suffix(".png")))
        for path in written:
            console.print(f"wrote {path}", style="dim", soft_wrap=True)


def write_weights(path: Path, data: Examples, weights: Weights) -> None:
    """One line for each example, whole or not at all."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(("index", "label", "weight", "suspicious", "suggested"))
    for i, (label, weight, suggested) in enumerate(zip(data.labels, *weights, strict=True)):
        table.writerow((i, label, f"{weight:.6f}", int(weight < 0.5), suggested))
    write_whole(path, text.getvalue().encode())


def show_suspicious(data: Examples, weights: Weights, count: int = 10, truth: np.ndarray | None = None) -> None:
    """Prints the examples of lowest weight."""
    rows = []
    for i in np.argsort(weights.weight, kind="stable")[:count]:
        known = () if truth is None else (int(truth[i]),)
        rows.append((int(i), int(data.labels[i]), int(weights.suggested[i]), *known, float(weights.weight[i])))
    known = () if truth is None else ("true label",)
    show_table("most suspicious", ("example", "its label", "suggested", *known, "weight"), rows)


def is_picture(data: Examples) -> bool:
    """Whether inputs are (height, width), or have one, three or four channels last."""
    return len(data.shape) == 2 or (len(data.shape) == 3 and data.shape[2] in (1, 3, 4))


def draw_suspicious(data: Examples, weights: Weights, path: Path, truth: np.ndarray | None = None) -> Path:
    """The pictures of lowest and of highest weight; red where the label is judged (or known to be) wrong."""
    order = np.argsort(weights.weight, kind="stable")

    def entry(i):
        right = weights.weight[i] >= 0.5 if truth is None else data.labels[i] == truth[i]
        caption = str(data.labels[i])
        if truth is not None and not right:
            caption += f" (is {truth[i]})"
        elif not right:
            caption += f" ({weights.suggested[i]}?)"
        shape = data.shape[:2] if data.shape[2:] == (1,) else data.shape
        return _unit(data.inputs[i].reshape(shape)), caption, bool(right)

    groups = [
        ("lowest weights: labelled, in brackets " + ("what it is" if truth is not None else "suggested"), order[:36]),
        ("highest weights", order[::-1][:12]),
    ]
    return draw_pictures([(title, [entry(i) for i in rows]) for title, rows in groups], path)


def demo(out: Path) -> list[Path]:
    """Hyper-cleaning of scikit-learn's digits with half of the labels wrong: finds them and shows them."""
    parts = cleaning.split(load("digits")[0], (900, 300, 0, 0))
    data = parts.train._replace(labels=parts.noisy[0])
    wrong = data.labels != parts.train.labels
    console.print(f"{len(wrong)} pictures of digits, {wrong.sum()} with a wrong label; 300 more can be trusted.")
    began = time.perf_counter()
    weights = weigh(data, parts.validation, steps=100, quiet=True)
    said = weights.weight < 0.5
    console.print(
        f"IAPTT-GM calls {said.sum()} labels wrong, {(said & wrong).sum()} of them rightly, and misses "
        f"{(wrong & ~said).sum()} ({time.perf_counter() - began:.1f} s)."
    )
    fixed = (weights.suggested == parts.train.labels).mean()
    console.print(f"The cleaned network gives {100 * fixed:.1f} % of the pictures their true label.")
    show_suspicious(data, weights, 5, parts.train.labels)
    table, picture = out / "digits-weights.csv", out / "digits-wrong-labels.png"
    write_weights(table, data, weights)
    return [table, draw_suspicious(data, weights, picture, parts.train.labels)]


def _scaled(data: Examples, trusted: Examples) -> tuple[Examples, Examples]:
    centre = data.inputs.mean(axis=0)
    length = np.sqrt(np.mean(np.sum((data.inputs - centre) ** 2, axis=1)))
    scale = np.float32(10 / max(length, 1e-12))
    first, second = (part._replace(inputs=scale * (part.inputs - centre)) for part in (data, trusted))
    return first, second


def _unit(picture: np.ndarray) -> np.ndarray:
    low, high = picture.min(), picture.max()
    return (picture - low) / max(high - low, 1e-12)
