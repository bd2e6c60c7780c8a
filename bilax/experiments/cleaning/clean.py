"""`bilax clean`: which labels of a person's own data are wrong, judged from a few that are trusted."""

import dataclasses
import importlib
import importlib.util
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

import bilax
from bilax.app.errors import plain_errors
from bilax.app.show import Arg, console, show_table, steps
from bilax.datasets import load
from bilax.datasets.labelled import Labelled, csv_bytes, read_embeddings, read_labelled, write_cleaned
from bilax.experiments.cleaning import problem as cleaning
from bilax.experiments.cleaning.bench import by_cleanlab
from bilax.experiments.cleaning.page import advice, candidate_rows, page
from bilax.files import write_whole


@dataclasses.dataclass
class Clean:
    """Finds wrong labels in an .npz file (x, y), a table (.csv, .parquet) or pictures in one folder per class.

    Writes labels.csv (row, label, suggestion, probability that it is wrong), a cleaned copy, the model and a page.
    """

    data: Annotated[Path, tyro.conf.Positional, Arg(help=".npz, .csv, .parquet, or a folder with one folder per class")]
    trusted: Annotated[
        Path | None, Arg(help="data of the same kind whose labels are right; two of each class help much")
    ] = None
    label: Annotated[str | None, Arg(help="column of the labels; else the first named label, target, class or y")] = (
        None
    )
    drop: Annotated[tuple[str, ...], Arg(help="columns to leave out, such as numbers of rows")] = ()
    out: Annotated[Path, Arg(help="folder to write into; it must be new, or --resume given")] = Path("cleaned")
    model: Annotated[
        str, Arg(help="linear, mlp, convnet, or package.module:function (key, shape, classes) -> module")
    ] = "linear"
    precision: Annotated[float | None, Arg(help="flag as many labels as this expected share of wrong ones allows")] = (
        None
    )
    share: Annotated[float | None, Arg(help="flag this share of the labels")] = None
    fix: Annotated[Literal["drop", "relabel"], Arg(help="what the cleaned copy does with flagged rows")] = "drop"
    embeddings: Annotated[Path | None, Arg(help=".npy or .npz (x): numbers to judge by in place of the inputs")] = None
    trusted_embeddings: Annotated[Path | None, Arg(help="the same for the trusted rows")] = None
    raw: Annotated[bool, Arg(help="do not standardise the inputs")] = False
    size: Annotated[int, Arg(help="side to which pictures in folders are scaled")] = 32
    folds: Annotated[int, Arg(help="models, each judging the rows that it has not seen")] = 5
    epochs: Annotated[int, Arg(help="passes over the data, of models trained on mini-batches")] = 10
    batch: Annotated[int, Arg(help="rows of a mini-batch")] = 512
    seed: Annotated[int, Arg(help="seed of folds, networks and batches")] = 0
    resume: Annotated[
        bool, Arg(help="go on in --out: what is there of the same data and settings is not computed again")
    ] = False

    def main(self) -> None:
        """Reads, judges, writes and says what came out."""
        with plain_errors():
            self.check()
            data = read_labelled(self.data, self.label, self.drop, size=self.size)
            trusted = None
            if self.trusted is not None:
                trusted = read_labelled(self.trusted, self.label, self.drop, data, self.size)
            found = self.judge(data, trusted)
            flagged = found.flag(self.precision, self.share)
            others = _others(found, data.labels)
            show_table("candidates", ("", "AUC on held-out trusted rows", "flagged", ""), candidate_rows(found, others))
            for sentence in (*found.notes, advice(found, flagged)):
                console.print(sentence)
            written = self.write(data, found, flagged, others)
        for path in written:
            console.print(f"wrote {path}", style="dim", soft_wrap=True)

    def check(self) -> None:
        """Refuses options that do not go together, and a folder that holds something."""
        if self.size < 1:
            raise ValueError(f"--size must be at least 1, got {self.size}.")
        if (self.embeddings is None) != (self.trusted_embeddings is None) and self.trusted is not None:
            raise ValueError(
                "--embeddings and --trusted-embeddings go together: both sets are judged by the same numbers."
            )
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"{self.out} is a file: --out must be a folder.")
        if self.out.is_dir() and any(self.out.iterdir()) and not self.resume:
            raise ValueError(f"{self.out} is not empty: choose another --out, or go on with what is there by --resume.")

    def judge(self, data: Labelled, trusted: Labelled | None) -> bilax.CleanedLabels:
        """`bilax.clean_labels` with a progress bar; each stage is kept for --resume."""
        inputs = data.inputs if self.embeddings is None else read_embeddings(self.embeddings, len(data.labels))
        known = None
        if trusted is not None:
            path = self.trusted_embeddings
            known = (trusted.inputs if path is None else read_embeddings(path, len(trusted.labels))), trusted.labels
        with steps(4, "reading") as advance:
            return bilax.clean_labels(
                inputs,
                data.labels,
                known,
                model=_own_model(self.model),
                folds=self.folds,
                epochs=self.epochs,
                batch=self.batch,
                standardize=not self.raw,
                seed=self.seed,
                keep=self.out / "stages",
                progress=advance,
            )

    def write(
        self, data: Labelled, found: bilax.CleanedLabels, flagged: np.ndarray, others: dict[str, int]
    ) -> list[Path]:
        """All files; returns where they are."""
        table, model, report = (self.out / name for name in ("labels.csv", "model.npz", "report.html"))
        write_whole(table, csv_bytes(label_rows(data, found, flagged)))
        relabel = self.fix == "relabel"
        labels = np.where(flagged, found.suggested.astype(data.labels.dtype), data.labels) if relabel else data.labels
        copy = write_cleaned(self.data, self.out, data, np.ones_like(flagged) if relabel else ~flagged, labels)
        found.save(model)
        write_whole(report, page(f"Labels of {self.data.name}", data, found, flagged, others).encode(errors="replace"))
        return [table, copy, model, report]


def label_rows(data: Labelled, found: bilax.CleanedLabels, flagged: np.ndarray) -> list[tuple[Any, ...]]:
    """The table of all rows, as `labels.csv` has it."""
    head = ("row", *(("file",) if data.files else ()), "label", "suggestion", "probability", "flagged")
    rows: list[tuple[Any, ...]] = [head]
    for i, (label, suggestion, probability, flag) in enumerate(
        zip(data.labels, found.suggested, found.probability, flagged, strict=True)
    ):
        file = (str(data.files[i]),) if data.files else ()
        rows.append((i, *file, label, suggestion, f"{probability:.6f}", int(flag)))
    return rows


def _others(found: bilax.CleanedLabels, labels: np.ndarray) -> dict[str, int]:
    """How many labels cleanlab flags, where it is installed."""
    if importlib.util.find_spec("cleanlab") is None:
        return {}
    places = np.searchsorted(found.classes, labels.astype(found.classes.dtype))
    return {"cleanlab": int(by_cleanlab(places, found.candidates["confident learning"].probabilities)[1].sum())}


def _own_model(name: str) -> Any:
    """A model of the package by its name, or a function of the user's own."""
    if ":" not in name:
        return name
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")  # a file beside the data is what people have
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--model {name}: {error}.") from None
    finally:
        sys.path.remove("")


def demo(out: Path) -> list[Path]:
    """Scikit-learn's digits with half of the labels wrong: finds them and shows them."""
    parts = cleaning.split(load("digits")[0], (900, 100, 0, 0))
    labels, wrong = parts.noisy[0], parts.noisy[0] != parts.train.labels
    console.print(f"{len(wrong)} pictures of digits, {wrong.sum()} with a wrong label; 100 more can be trusted.")
    began = time.perf_counter()
    pictures = parts.train.inputs.reshape(-1, *parts.train.shape)
    trusted = parts.validation.inputs.reshape(-1, *parts.train.shape), parts.validation.labels
    found = bilax.clean_labels(pictures, labels, trusted)
    said = found.flag()
    console.print(
        f"{said.sum()} labels are called wrong, {(said & wrong).sum()} of them rightly, and {(wrong & ~said).sum()} "
        f"are missed ({time.perf_counter() - began:.1f} s)."
    )
    fixed = np.mean(found.suggested == parts.train.labels)
    console.print(f"The suggestions are right for {100 * fixed:.1f} % of the pictures.")
    data = Labelled(pictures, labels, {})
    table, report = out / "digits-labels.csv", out / "digits-wrong-labels.html"
    write_whole(table, csv_bytes(label_rows(data, found, said)))
    write_whole(report, page("Digits with half of the labels wrong", data, found, said, {}).encode())
    return [table, report]
