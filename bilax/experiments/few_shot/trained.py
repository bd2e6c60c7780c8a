"""What a trained representation is for: `bilax evaluate` and `bilax adapt`, and the same from Python.

from bilax.experiments.few_shot.trained import load_trained

trained = load_trained("runs/my-run")
classify = trained.adapt(trained.read(files), labels)
labels_of_new = classify(trained.read(new_files))
"""

import csv
import dataclasses
import io
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import PyTree, UInt8

import bilax
from bilax.app.errors import plain_errors, refuse
from bilax.app.run_folder import read_run
from bilax.app.show import Arg, console, show_table
from bilax.app.text import cell
from bilax.datasets import DataError
from bilax.datasets.classes import decode
from bilax.datasets.episodes import Episode
from bilax.datasets.folders import FORMATS, SUFFIXES, list_folder
from bilax.datasets.registry import entry, load_own_test, names
from bilax.experiments.few_shot import learners as few_shot
from bilax.experiments.few_shot.learners import Learner, Linear, Score
from bilax.experiments.few_shot.run import TEST_BATCH, TEST_SEED, FewShot, load_learned, tested
from bilax.files import write_whole


class Trained(NamedTuple):
    """A run of `bilax run few-shot` that can be used."""

    config: FewShot
    learner: Learner
    method: bilax.Method
    x: PyTree
    z: PyTree
    shape: tuple[int, int, int]
    """(height, width, channels) of the pictures it was trained on"""

    def answers(self, task: Episode) -> np.ndarray:
        """A row of scores for each query of a task of any number of classes."""
        way, x = int(np.max(task.support_targets)) + 1, self.x
        if self.config.method in ("meta-sgd", "imaml"):
            x = start_for(x, way)
        elif self.config.method == "t-net" and way != self.config.way:
            raise ValueError(f"t-net has learned how {self.config.way} classes depend on each other, got {way}.")
        return np.asarray(few_shot.answers(self.learner, self.method, x, start_for(self.z, way), task))

    def adapt(self, pictures: Any, labels: Any) -> "Classifier":
        """Learns new classes from a few pictures (n, height, width, channels), bytes or numbers in [0, 1], of each.

        They should be as in training; `read` makes them so.
        """
        found = _prepared(pictures, self.shape)
        names, targets, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
        if len(targets) != len(found):
            raise ValueError(f"labels must name each picture: there are {len(targets)} for {len(found)} pictures.")
        if len(names) < 2:
            raise ValueError("labels must name at least two classes.")
        if len(set(counts.tolist())) > 1:
            few = int(counts.min())
            raise ValueError(f"labels must name as many pictures of each class: give {few} of each, not {counts}.")
        return Classifier(self, names, found, targets.astype(np.int32))

    def read(self, files: Iterable[str | Path]) -> UInt8[np.ndarray, "n height width channels"]:
        """Pictures in files as the network has seen those of training: drawings as bright strokes on a dark ground."""
        height, width, channels = self.shape
        found = [decode(Path(path), (height, width), channels, str(path), FORMATS) for path in files]
        if not found:
            raise ValueError("files must name at least one picture.")
        return np.stack([bright_strokes(one) for one in found] if entry(self.config.dataset).drawings else found)


class Classifier(NamedTuple):
    """New classes learnt from a few pictures of each; call it with pictures to get their labels.

    Batch statistics are those of the pictures of a call together with the examples, as in training, so what is said of
    a picture depends a little on the others it comes with. More than a task of training has are cut into such parts.
    """

    trained: Trained
    names: np.ndarray
    pictures: np.ndarray
    targets: np.ndarray

    def __call__(self, pictures: Any) -> np.ndarray:
        return self.names[np.argmax(self.scores(pictures), axis=1)]

    def scores(self, pictures: Any) -> np.ndarray:
        """A row for each picture, a column for each of `names`."""
        query = _prepared(pictures, self.trained.shape)
        config = self.trained.config
        parts = np.array_split(query, -(-len(query) // (config.way * config.queries)))
        unknown = (np.zeros(len(part), np.int32) for part in parts)
        tasks = (Episode(self.pictures, self.targets, *part) for part in zip(parts, unknown, strict=True))
        return np.concatenate([self.trained.answers(task) for task in tasks])


def load_trained(folder: str | Path) -> Trained:
    """Reads the folder of an ended `bilax run few-shot`; its data set is not needed."""
    record = read_run(Path(folder))
    settings = record.config["config"]
    if settings.get("experiment") != FewShot.name:
        raise ValueError(f"{folder} holds a run of {settings.get('experiment')!r}, not of few-shot.")
    if settings.get("dataset") in names("functions"):
        raise ValueError(f"{folder} was trained on {settings['dataset']}, which has no classes.")
    missing = {"dataset", "folder", "shape"} - set(settings)
    if missing:
        raise ValueError(f"the config.json of {folder} lacks {' and '.join(sorted(missing))}.")
    known = {field.name for field in dataclasses.fields(FewShot)} - {"seed", "out"}
    options = {name: value for name, value in settings.items() if name in known}
    try:
        options["folder"] = None if options["folder"] in (None, "None") else Path(options["folder"])
        config, (height, width, channels) = FewShot(**options), settings["shape"]
        if not all(type(count) is int and count > 0 for count in (height, width, channels, config.way, config.queries)):
            raise ValueError("a size that is no whole number of at least 1")
        # Shapes alone: how large the network is to be is for learned.eqx to show.
        learner = eqx.filter_eval_shape(lambda: config.learner(0, (height, width, channels)))
        method = config.make_method()
    except Exception as error:  # settings of any kind go through equinox and JAX
        raise ValueError(f"the config.json of {folder} is damaged: it makes no network ({error!r}).") from error
    x, z = load_learned(Path(folder), (learner.x0, learner.y0))
    return Trained(config, learner, method, x, z, (height, width, channels))


def bright_strokes(drawing: UInt8[np.ndarray, "h w c"]) -> UInt8[np.ndarray, "h w c"]:
    """The drawing, inverted if it is on light paper: its edge is mostly brighter than half."""
    edge = np.concatenate([drawing[[0, -1]].reshape(-1), drawing[:, [0, -1]].reshape(-1)])
    return 255 - drawing if np.median(edge) > 127 else drawing


def start_for(z: PyTree, way: int) -> PyTree:
    """The follower's start for another number of classes: each begins where those of training did on average."""

    def head(node):
        if isinstance(node, Linear) and len(node.bias) != way:
            return Linear(
                jnp.repeat(node.weight.mean(1, keepdims=True), way, 1), jnp.repeat(node.bias.mean(keepdims=True), way)
            )
        return node

    if isinstance(z, jax.Array | np.ndarray):  # class means
        return jnp.zeros((way, z.shape[1]), z.dtype)
    return jax.tree.map(head, z, is_leaf=lambda node: isinstance(node, Linear))


@dataclasses.dataclass
class Evaluate:
    """Tests a run of `bilax run few-shot` again: on its test classes, or by Omniglot's official one-shot test."""

    run: Annotated[tyro.conf.Positional[Path], Arg(help="the run's folder")]
    tasks: Annotated[int, Arg(help="test tasks at the least")] = 600
    folder: Annotated[Path | None, Arg(help="where the data set is, if no longer where it was in training")] = None
    omniglot_runs: Annotated[bool, Arg(help="20 runs of 20-way one-shot classification, from all_runs.zip")] = False
    convolves: ClassVar[bool] = True

    def main(self) -> None:
        """Evaluates and prints."""
        with plain_errors(), jax.enable_x64(True):
            trained = _load(self.run)
            if self.folder is not None:
                trained = trained._replace(config=dataclasses.replace(trained.config, folder=self.folder))
            if self.omniglot_runs:
                found = omniglot_runs(trained)
                show_table(
                    f"{self.run}: Omniglot's official one-shot test",
                    ["runs", "accuracy", "± (95 %)", "error"],
                    [[found.tasks, f"{found.mean:.4f}", f"{found.half:.4f}", f"{100 * (1 - found.mean):.1f} %"]],
                )
                return
            config = trained.config
            begun = read_run(self.run).config["config"].get("data_tag")
            if begun not in (None, config.data_tag()):
                raise DataError(f"{self.run} was trained on other pictures or classes than are there now.")
            batches = config.batches("test", TEST_SEED, TEST_BATCH)
            found = tested(trained.learner, trained.method, trained.x, trained.z, batches, self.tasks)
        title = f"{self.run}: {config.way}-way {config.shots}-shot, test classes of {config.dataset}"
        show_table(title, ["tasks", "accuracy", "± (95 %)"], [[found.tasks, f"{found.mean:.4f}", f"{found.half:.4f}"]])


def omniglot_runs(trained: Trained) -> Score:
    """Accuracy over the 20 runs of the official test; its interval is over runs."""
    tasks = load_own_test(trained.config.dataset, trained.config.folder, trained.shape[0])
    right = np.array([np.mean(np.argmax(trained.answers(task), axis=1) == task.query_targets) for task in tasks])
    return few_shot.interval(right)


@dataclasses.dataclass
class Adapt:
    """Learns your own classes from a few pictures of each, with a representation that `bilax run few-shot` trained.

    --examples has one folder for each class, with the same number of pictures in all; --pictures has those to be named.
    """

    run: Annotated[tyro.conf.Positional[Path], Arg(help="the run's folder")]
    examples: Annotated[Path, Arg(help="a folder with one folder of pictures for each class")]
    pictures: Annotated[Path, Arg(help="a folder with the pictures to be named")]
    out: Annotated[Path, Arg(help="the table to write")] = Path("labels.csv")
    convolves: ClassVar[bool] = True

    def main(self) -> None:
        """Adapts, names the pictures and writes a table of file, label, score and its margin over the second best."""
        with plain_errors(), jax.enable_x64(True):
            trained = _load(self.run)
            known = list_folder(self.examples)
            labels = [name for name, paths in known.items() for _ in paths]
            files = sorted(path for path in self.pictures.glob("[!.]*") if path.suffix.lower() in SUFFIXES)
            if not files:
                raise DataError(f"{self.pictures}: no picture ({', '.join(SUFFIXES)}) is in there.")
            try:
                classify = trained.adapt(trained.read(itertools.chain(*known.values())), labels)
            except DataError:
                raise
            except ValueError as error:
                refuse(f"bilax adapt: {self.examples}: {error}")
            scores = classify.scores(trained.read(files))
            best = np.argmax(scores, axis=1)
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(["file", "label", "score", "margin"])
            ordered = np.sort(scores, axis=1)
            for i, path in enumerate(files):
                margin = ordered[i, -1] - ordered[i, -2]
                named = cell(path.name), cell(classify.names[best[i]])
                writer.writerow([*named, f"{ordered[i, -1]:.5g}", f"{margin:.5g}"])
            write_whole(self.out, text.getvalue().encode(errors="surrogateescape"))
        counts = {str(name): int(np.sum(best == i)) for i, name in enumerate(classify.names)}
        show_table(f"{len(files)} pictures", ["class", "pictures"], [[name, count] for name, count in counts.items()])
        console.print(f"wrote {self.out}", style="dim", soft_wrap=True)


def _load(folder: Path) -> Trained:
    try:
        return load_trained(folder)
    except DataError:
        raise
    except ValueError as error:
        refuse(f"bilax: {error}")


def _prepared(pictures: Any, shape: tuple[int, int, int]) -> np.ndarray:
    array = np.asarray(pictures)
    if array.ndim != 4 or array.shape[1:] != shape or not len(array):
        raise ValueError(
            f"pictures must have shape (n, {', '.join(map(str, shape))}) as in training, got {array.shape}."
        )
    numbers = np.asarray(array, np.float32) / np.float32(255 if array.dtype == np.uint8 else 1)
    if not (np.isfinite(numbers) & (numbers >= 0) & (numbers <= 1)).all():
        raise ValueError(f"pictures must be bytes (uint8) or numbers in [0, 1], got others, of {array.dtype}.")
    return numbers
