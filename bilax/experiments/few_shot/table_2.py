"""`bilax reproduce table-2`: all methods on few-shot tasks, beside the paper's numbers."""

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from bilax.app.data_command import data_arg
from bilax.app.errors import plain_errors, refuse
from bilax.app.show import (
    Arg,
    Claim,
    Target,
    console,
    file_stem,
    load_json,
    plt,
    refuse_to_replace,
    save_json,
    show_table,
    stored_results,
)
from bilax.experiments.few_shot.run import WHOLE, FewShot
from bilax.experiments.runner import train_or_leave

PAPER = {
    ("Proto Net", "convnet4"): ("49.42 ± 1.84", "68.20 ± 0.66", "53.31 ± 0.89", "72.69 ± 0.74"),
    ("Relation Net", "convnet4"): ("50.44 ± 0.82", "65.32 ± 0.70", "54.48 ± 0.93", "65.32 ± 0.70"),
    ("MAML", "convnet4"): ("48.70 ± 0.75", "63.11 ± 0.11", "49.06 ± 0.50", "67.48 ± 0.47"),
    ("RHG", "convnet4"): ("48.89 ± 0.81", "63.02 ± 0.70", "49.63 ± 0.67", "66.14 ± 0.57"),
    ("T-RHG", "convnet4"): ("47.67 ± 0.82", "63.70 ± 0.76", "50.79 ± 0.69", "67.39 ± 0.60"),
    ("BDA", "convnet4"): ("49.08 ± 0.82", "62.17 ± 0.70", "51.56 ± 0.68", "68.21 ± 0.58"),
    ("MAML", "resnet12"): ("51.03 ± 0.50", "68.26 ± 0.47", "58.58 ± 0.49", "71.24 ± 0.43"),
    ("RHG", "resnet12"): ("50.54 ± 0.85", "64.53 ± 0.68", "58.19 ± 0.76", "75.20 ± 0.60"),
    ("IAPTT-GM", "resnet12"): ("56.69 ± 0.66", "70.21 ± 0.55", "60.71 ± 0.77", "75.85 ± 0.59"),
}
"""Table 2: 5-way accuracy, 1-shot and 5-shot on miniImageNet, then on tieredImageNet, per cent."""

COLUMNS = {"omniglot": ("5-1", "5-5", "20-1")}
"""The columns, if not 5-way 1-shot and 5-shot as in the paper."""
SETTINGS: dict[str, dict[str, Any]] = {"omniglot": {"rotations": True, "distortions": True}}
"""What Omniglot's few training characters need; the same for all methods."""
SCALES: dict[str, dict[str | int, float]] = {"omniglot": {5: 2.5, 20: 5.0, "protonet": 0.1, "relation-net": 1.0}}
"""The feature scale, if not 1: of linear classifiers by the number of classes, of other methods by name. Chosen on the
validation alphabet, by IAPTT-GM among 1.5, 2.5 and 5 for 5-way, among 2.5, 5 and 10 for 20-way: α = 0.1 is the paper's
for the 800 features of 84 × 84 pictures, and here there are 32. For Proto Net among 0.1, 0.3 and 1: distances of
normalised features are so large that the softmax hardly has a slope."""
QUERIES = {20: 5}
"""Queries of each class, if not 15, by the number of classes: 100 in a 20-way task, where 5-way ones have 75."""
GAIN = 0.002
"""What a validation must gain for a run to go on: 0.2 per cent, as in Table 3; accuracies creep up for very long."""

METHODS: dict[str, dict[str, Any]] = {
    "IAPTT-GM": {"method": "iaptt-gm"},
    "IA-GM (ANIL)": {"method": "ia-gm"},
    "IAPTT-GM + ℓ_q": {"method": "iaptt-gm", "penalty": "elementwise", "penalty_weight": 1e-3},
    "IA-GM + ℓ_q": {"method": "ia-gm", "penalty": "elementwise", "penalty_weight": 1e-3},
    "Proto Net": {"method": "protonet"},
    "Relation Net": {"method": "relation-net"},
    "RHG": {"method": "rhg"},
    "T-RHG": {"method": "t-rhg"},
    "BDA": {"method": "bda"},
    "FOMAML": {"method": "fomaml"},
    "Reptile": {"method": "reptile"},
    "MAML": {"method": "maml"},
    "IAPTT-GM, 64 filters": {"method": "iaptt-gm", "filters": 64},
    "IAPTT-GM, clipped": {"method": "iaptt-gm", "clip": 2.0},
    "IA-GM, clipped": {"method": "ia-gm", "clip": 2.0},
}
"""The rows and their settings. That of 64 filters has the network of MAML's experiments on Omniglot, for what a wider
one adds; the last two cut gradients to about three times their usual length."""
ONLY = {"IAPTT-GM, 64 filters": (5, 1), "IAPTT-GM, clipped": (20, 1), "IA-GM, clipped": (20, 1)}
"""rows beyond the protocol, which have one column unless --tasks asks for others"""
ENDS = {"stopped_by_callback": "patience", "time_limit": "the clock", "step_limit": "--outer-steps"}
"""what each status means here"""
STOPPING = ("minutes", "patience", "gain")
"""settings that say when a run ends, and nothing else"""


@dataclasses.dataclass
class Table2(Target):
    """Table 2: few-shot classification by all methods, with and without the ℓ_q penalty.

    On Omniglot (5-way 1-shot and 5-shot, 20-way 1-shot) by default; on miniImageNet or tieredImageNet where you have
    them. Each run ends when validation has not risen by 0.2 per cent in --patience outer steps, or after --minutes.
    Runs that are stored with the same settings are read, so the command can be broken off and given again; those that
    the clock or patience ended go on if --minutes or --patience has grown. The rows of 64 filters and of clipped
    gradients are run in one column alone unless --tasks names others. --quick takes a few steps on scikit-learn's
    digits.
    """

    dataset: Annotated[str, data_arg("what to train and test on", "classes", own=False)] = "omniglot"
    folder: Annotated[Path | None, Arg(help="where the data set is")] = None
    backbone: Annotated[Literal["convnet4", "resnet12"], Arg(help="the network")] = "convnet4"
    filters: Annotated[int | None, Arg(help="k; 32 for convnet4 and 48 for resnet12 by default")] = None
    methods: Annotated[tuple[str, ...], Arg(help="rows of the table")] = tuple(METHODS)
    tasks: Annotated[tuple[str, ...], Arg(help="columns: WAY-SHOTS, as 5-1 5-5 20-1")] = ()
    outer_steps: Annotated[int, Arg(help="T, outer steps at the most")] = 20_000
    validate_every: Annotated[int, Arg(help="outer steps between validations")] = 250
    patience: Annotated[int, Arg(help="end after so many outer steps without a better validation")] = 1500
    minutes: Annotated[float, Arg(help="of training at the most, for each run")] = 60.0
    runs: Annotated[Path, Arg(help="folder for the runs")] = Path("runs/table-2")

    name: ClassVar[str] = "table-2"
    convolves: ClassVar[bool] = True
    in_cells: ClassVar[bool] = True

    def columns(self) -> list[tuple[int, int]]:
        """(way, shots) of each column."""
        default = ("5-1",) if self.quick else COLUMNS.get(self.dataset, ("5-1", "5-5"))
        try:
            return [(int(way), int(shots)) for way, shots in (task.split("-") for task in self.tasks or default)]
        except ValueError:
            refuse(f"--tasks must be such as 5-1 20-1, got {' '.join(self.tasks)}.")

    def config(self, label: str, way: int, shots: int) -> FewShot:
        """The settings of one cell."""
        sizes: dict[str, Any] = {"outer_steps": self.outer_steps, "validate_every": self.validate_every}
        sizes |= {"filters": self.filters, "queries": QUERIES.get(way, 15)}
        if self.quick:
            sizes = {"outer_steps": 60, "validate_every": 20, "validation_tasks": 40, "test_tasks": 100, "filters": 8}
        extra, scales = dict(SETTINGS.get(self.dataset, {})), SCALES.get(self.dataset, {})
        method = METHODS[label]["method"]
        if self.backbone == "convnet4" and method not in WHOLE:
            extra["feature_scale"] = scales.get(method, scales.get(way, 1.0))
        return FewShot(
            **(sizes | extra | METHODS[label]), dataset=self.dataset, folder=self.folder, way=way, shots=shots,
            backbone=self.backbone, patience=self.patience, gain=GAIN, minutes=self.minutes, seed=(self.seed,),
            out=self.runs / self._stem(label, way, shots),
        )  # fmt: skip

    def _stem(self, label: str, way: int, shots: int) -> str:
        other = [f"seed{self.seed}"] if self.seed else []
        return file_stem(self.dataset, self.backbone, f"{way}way", f"{shots}shot", label, *other)

    def compute(self) -> dict[str, Any]:
        """Every cell, the first column first."""
        if self.quick:
            with tempfile.TemporaryDirectory() as folder:
                # What needs no files, and leaves none.
                return dataclasses.replace(self, dataset="digits", folder=None, runs=Path(folder))._all()
        return self._all()

    def stored(self) -> dict[str, Any]:
        """The cells that have been computed, however long they were given."""
        return super().stored() if self.quick else dataclasses.replace(self, minutes=0.0, patience=1)._all()

    def left(self) -> int:
        """How many cells are not stored, whatever ended them."""
        if self.quick:
            return super().left()
        wanted = [(label, task) for label in self.methods for task in self.columns() if ONLY.get(label, task) == task]
        cells = dataclasses.replace(self, redraw=True).stored()["cells"]
        return sum(f"{way}-{shots}" not in cells.get(label, {}) for label, (way, shots) in wanted)

    def _all(self) -> dict[str, Any]:
        unknown = set(self.methods) - set(METHODS)
        if unknown:
            refuse(f"unknown methods {', '.join(sorted(unknown))}; known are {', '.join(METHODS)}.")
        cells: dict[str, dict[str, Any]] = {label: {} for label in self.methods}
        with plain_errors():
            for way, shots in self.columns():
                for label in self.methods:
                    cell = self._cell(label, way, shots)
                    if cell is not None:
                        cells[label][f"{way}-{shots}"] = cell
        # Rows of one column are left out of tables that lack it.
        cells = {label: row for label, row in cells.items() if row or label not in ONLY}
        return {"dataset": self.dataset, "backbone": self.backbone, "cells": cells}

    def _cell(self, label: str, way: int, shots: int) -> dict[str, Any] | None:
        config = self.config(label, way, shots)
        path = self.out / self.name / f"{self._stem(label, way, shots)}.json"
        found = None if self.quick else stored_results(path, config, STOPPING)
        if found is not None and not self._goes_on(found, path):
            return found
        elsewhere = not self.tasks and ONLY.get(label, (way, shots)) != (way, shots)
        if self.redraw or elsewhere:
            return found
        if found is None and path.exists() and not self.quick:
            refuse_to_replace(path)
        console.print(f"{label}, {way}-way {shots}-shot", style="bold")
        result = train_or_leave(config)
        names = ("status", "steps", "seconds", "k_bar", "validation", "data_tag")
        cell = {name: result[name] for name in names} | result["measures"]
        if not self.quick:
            save_json(path, config, cell)
        return cell

    def _goes_on(self, cell: dict[str, Any], path: Path) -> bool:
        """Whether a stored run ended by a limit that has been raised since."""
        if cell["status"] == "time_limit":
            return cell["seconds"] < 60 * self.minutes
        return cell["status"] == "stopped_by_callback" and load_json(path)["config"]["patience"] < self.patience

    def show(self, results: dict[str, Any]) -> list[Path]:
        """Ours, then the paper's table with what is missing, and the validation curves."""
        cells = results["cells"]
        columns = _columns(cells)
        if len({cell.get("data_tag") for row in cells.values() for cell in row.values()} - {None}) > 1:
            console.print("These cells were computed with different data: they do not compare.", style="bold")
        titles = [f"{c.split('-')[0]}-way {c.split('-')[1]}-shot" for c in columns]
        rows = [[label, *(_entry(row.get(c)) for c in columns)] for label, row in cells.items()]
        show_table(f"test accuracy on {results['dataset']}, {results['backbone']}, per cent", ["method", *titles], rows)
        if any(cell["status"] == "time_limit" for row in cells.values() for cell in row.values()):
            console.print("steps: the clock stopped it after so many outer steps; with more --minutes it goes on.")
        details = [
            [
                label,
                title,
                row[c]["steps"],
                f"{row[c]['seconds'] / 60:.1f}",
                ENDS.get(row[c]["status"], row[c]["status"]),
            ]
            for label, row in cells.items()
            for title, c in zip(titles, columns, strict=True)
            if c in row
        ]
        show_table("how each run ended", ["method", "task", "outer steps", "minutes", "ended by"], details)
        self._show_paper(results)
        return [self._draw(cells, columns, titles)] if columns else []

    def _show_paper(self, results: dict[str, Any]) -> None:
        here = {"mini-imagenet": 0, "tiered-imagenet": 2}.get(results["dataset"])
        rows = []
        for (label, backbone), values in PAPER.items():
            ours = ["–"] * 4
            row = results["cells"].get(label, {})
            if here is not None and backbone == results["backbone"]:
                ours[here : here + 2] = [_accuracy(row.get(c)) for c in ("5-1", "5-5")]
            rows.append([label, backbone, *(f"{p} | {o}" for p, o in zip(values, ours, strict=True))])
        headers = ["mini 1-shot", "mini 5-shot", "tiered 1-shot", "tiered 5-shot"]
        show_table("Table 2 of the paper, 5-way: paper | ours", ["method", "backbone", *headers], rows)
        if here is None:
            console.print("–: needs miniImageNet or tieredImageNet, which are not here; give --dataset and --folder.")

    def _draw(self, cells: dict[str, Any], columns: list[str], titles: list[str]) -> Path:
        """Above, the error of each run in test; below, how it came down in validation."""
        pyplot = plt()
        size = (4 * len(columns), 6.4)
        figure, axes = pyplot.subplots(2, len(columns), figsize=size, squeeze=False)
        colours = pyplot.rcParams["axes.prop_cycle"].by_key()["color"]
        # A method's line looks the same in every panel; there are more methods than colours.
        styles = {
            label: {"color": colours[i % len(colours)], "ls": ("-", "--", ":")[i // len(colours)]}
            for i, label in enumerate(METHODS)
        }
        shown = {}
        for test, curves, column, title in zip(*axes, columns, titles, strict=True):
            for place, (label, row) in enumerate(cells.items()):
                if column not in row:
                    continue
                cell = row[column]
                error, half = 100 - 100 * _mean(cell), 100 * cell["± (95 %)"]
                colour = styles[label]["color"]
                test.errorbar(error, place, xerr=half, fmt="o", ms=4, color=colour, capsize=2)
                test.annotate(_stopped(cell), (error, place), (0, 4), textcoords="offset points", size=5)
                curve = np.reshape(cell["validation"], (-1, 2))
                if len(curve):
                    width = 2.2 if label == "IAPTT-GM" else 1.1
                    (shown[label],) = curves.semilogy(
                        curve[:, 0], 100 - 100 * curve[:, 1], marker=".", ms=4, lw=width, **styles[label]
                    )
            names = list(cells) if test is axes[0, 0] else [""] * len(cells)
            test.set(title=title, xlabel="test error (%)", xscale="log", ylim=(len(cells) - 0.5, -0.7))
            test.set_yticks(range(len(cells)), names)
            curves.set(xlabel="outer step", xlim=(0, None))
            if not curves.lines:
                curves.text(0.5, 0.5, "no run came to\nits first validation", ha="center", transform=curves.transAxes)
                curves.set(xticks=[], yticks=[])
            for axis in (test.xaxis, curves.yaxis):
                _label_log(axis)
        axes[1, 0].set_ylabel("validation error (%)")
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=2 * len(columns), fontsize=7)
        path = self.figure_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        return path

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        """IAPTT-GM is best; ℓ_q and truncation help. A lead in test that lies within the intervals is none.

        Runs that the clock stopped are compared where both have been, in validation.
        """
        claims = []
        for column in _columns(results["cells"]):
            row = {label: cells[column] for label, cells in results["cells"].items() if column in cells}
            if "IAPTT-GM" not in row:
                continue
            task = "{}-way {}-shot".format(*column.split("-"))
            rivals = [label for label in row if not label.startswith("IAPTT-GM") and label not in ONLY]
            found = [_compare("IAPTT-GM", row["IAPTT-GM"], rival, row[rival]) for rival in rivals]
            if found:
                said, lead = min(found, key=lambda pair: pair[1])
                claims.append(Claim(f"{task}: IAPTT-GM is best", said, lead > 0))
            pairs = [
                (f"{task}: truncation helps", "IAPTT-GM", "IA-GM (ANIL)"),
                (f"{task}: ℓ_q helps", "IAPTT-GM + ℓ_q", "IAPTT-GM"),
            ]
            for what, one, two in pairs:
                if one in row and two in row:
                    said, lead = _compare(one, row[one], two, row[two])
                    claims.append(Claim(what, said, lead > 0))
        return claims


def _label_log(axis: Any) -> None:
    """Ticks at round numbers, also where a logarithmic axis has less than a decade."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(MaxNLocator(5) if high < 5 * low else LogLocator(subs=(1, 2, 3, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def _compare(one: str, first: dict[str, Any], two: str, second: dict[str, Any]) -> tuple[str, float]:
    """What two runs reached, and how far the first is clearly ahead."""
    if "time_limit" not in (first["status"], second["status"]) or not (first["validation"] and second["validation"]):
        lead, unsure = _mean(first) - _mean(second), math.hypot(first["± (95 %)"], second["± (95 %)"])
        words = "" if abs(lead) > unsure else ": within the intervals"
        return f"{one} {_entry(first)}, {two} {_entry(second)}{words}", lead - unsure
    both = int(min(first["validation"][-1][0], second["validation"][-1][0]))
    a, b = (max(value for step, value in run["validation"] if step <= both) for run in (first, second))
    return f"best validation up to step {both}: {one} {100 * a:.1f}, {two} {100 * b:.1f}", a - b


def _columns(cells: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(column for row in cells.values() for column in row))


def _mean(cell: dict[str, Any]) -> float:
    return cell["test accuracy"]


def _entry(cell: dict[str, Any] | None) -> str:
    stopped = _stopped(cell) if cell else ""
    return f"{_accuracy(cell)} ({stopped})" if stopped else _accuracy(cell)


def _stopped(cell: dict[str, Any]) -> str:
    """After how many outer steps the clock stopped it, if it did."""
    return f"{cell['steps']} steps" if cell["status"] == "time_limit" else ""


def _accuracy(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not run"
    return f"{100 * cell['test accuracy']:.2f} ± {100 * cell['± (95 %)']:.2f}"
