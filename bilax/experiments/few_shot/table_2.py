"""`bilax reproduce table-2`: few-shot learning by all methods, beside what was published."""

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from scipy import stats

from bilax.app.errors import plain_errors, refuse
from bilax.app.show import (
    Arg,
    Claim,
    Target,
    console,
    file_stem,
    label_log,
    plt,
    saved_figure,
    show_table,
)
from bilax.datasets.registry import names
from bilax.experiments.few_shot.run import WHOLE, FewShot, stored_run

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
PAPERS_COLUMNS = ("mini-imagenet-5-1", "mini-imagenet-5-5", "tiered-imagenet-5-1", "tiered-imagenet-5-5")


class Published(NamedTuple):
    """An accuracy in per cent, and where it stands."""

    accuracy: float
    source: str


PUBLISHED = {
    "cifar-fs-5-1": {
        "MAML": Published(58.9, "Bertinetto 2019"),
        "Proto Net": Published(55.5, "Bertinetto 2019"),
        "Relation Net": Published(55.0, "Bertinetto 2019"),
        "ridge head (R2-D2)": Published(64.0, "Bertinetto 2019, 64 filters"),
    },
    "cifar-fs-5-5": {
        "MAML": Published(71.5, "Bertinetto 2019"),
        "Proto Net": Published(72.0, "Bertinetto 2019"),
        "Relation Net": Published(69.3, "Bertinetto 2019"),
        "ridge head (R2-D2)": Published(78.9, "Bertinetto 2019, 64 filters"),
    },
    "omniglot-5-1": {
        "MAML": Published(98.7, "Finn 2017"),
        "Proto Net": Published(98.8, "Snell 2017"),
        "Reptile": Published(97.7, "Nichol 2018, transductive"),
    },
    "omniglot-20-1": {
        "MAML": Published(95.8, "Finn 2017"),
        "Proto Net": Published(96.0, "Snell 2017"),
        "Reptile": Published(89.4, "Nichol 2018, transductive"),
    },
}
"""What authors, or Bertinetto et al. for others, report of the same columns, after some 60,000 outer steps."""

METHODS: dict[str, dict[str, Any]] = {
    "IAPTT-GM": {"method": "iaptt-gm"},
    "IA-GM (ANIL)": {"method": "ia-gm"},
    "BDA": {"method": "bda"},
    "RHG": {"method": "rhg"},
    "MAML": {"method": "maml"},
    "Proto Net": {"method": "protonet"},
    "T-RHG": {"method": "t-rhg"},
    "FOMAML": {"method": "fomaml"},
    "Reptile": {"method": "reptile"},
    "Relation Net": {"method": "relation-net"},
    "ridge head (R2-D2)": {"method": "ridge"},
    "IAPTT-GM + ℓ_q": {"method": "iaptt-gm", "penalty": "elementwise", "penalty_weight": 1e-3},
    "IA-GM + ℓ_q": {"method": "ia-gm", "penalty": "elementwise", "penalty_weight": 1e-3},
    "Meta-SGD": {"method": "meta-sgd"},
    "MAML++": {"method": "maml-pp"},
    "Proto Net, 64 filters": {"method": "protonet", "filters": 64},
    "IAPTT-GM, a quarter of the steps": {"method": "iaptt-gm"},
    "MAML, a quarter of the steps": {"method": "maml"},
    "Proto Net, a quarter of the steps": {"method": "protonet"},
    "IAPTT-GM, twice the steps": {"method": "iaptt-gm"},
    "Proto Net, twice the steps": {"method": "protonet"},
}
"""The rows and their settings. Proto Net was published with 64 filters. The last five tell what longer runs would
give."""
LENGTHS = {"a quarter of the steps": 0.25, "twice the steps": 2}
"""How many steps such a row has, of those of its column."""
MAIN, OTHERS = tuple(METHODS)[:6], tuple(METHODS)[6:]
PLAN: tuple[tuple[str, tuple[str, ...], tuple[int, ...]], ...] = (
    ("cifar-fs-5-1", MAIN, (0,)),
    ("omniglot-5-1", MAIN, (0,)),
    ("omniglot-20-1", MAIN, (0,)),
    ("cifar-fs-5-5", MAIN, (0,)),
    ("cifar-fs-5-1", OTHERS, (0,)),
    ("cifar-fs-5-1", MAIN, (1, 2)),
    ("cifar-fs-5-1-resnet12", ("IAPTT-GM", "RHG", "Proto Net"), (0,)),
)
"""Columns, rows and seeds, in the order in which they are run."""
DATA: dict[str, dict[str, Any]] = {
    "omniglot": {"split": "vinyals"},
    "cifar-fs": {"distortions": True},
}
"""How the data are taken; the same for all methods."""
STEPS = {"cifar-fs-5-1": 10_000, "omniglot-20-1": 1500, "cifar-fs-5-1-resnet12": 1000}
"""Outer steps of every method of a column; 2,500 where it does not say."""
TRIAL_STEPS = {20: 150}
"""Outer steps of the runs that choose a setting, by the number of classes; 250 where it does not say."""
QUERIES = {20: 5}
"""Queries of each class, if not 15, by the number of classes: 100 in a 20-way task, where 5-way ones have 75."""


class Choice(NamedTuple):
    """A setting that one method chooses on the validation classes, for itself and for those of its kind."""

    by: str
    setting: str
    among: tuple[float, ...]


CHOICES = {
    "truncated": Choice("IAPTT-GM", "feature_scale", (0.4, 1.0, 2.5, 6.25)),
    "linear": Choice("RHG", "feature_scale", (0.4, 1.0, 2.5, 6.25)),
    "whole": Choice("MAML", "step_size", (0.01, 0.05, 0.2, 0.8)),
    "prototypes": Choice("Proto Net", "feature_scale", (0.03, 0.1, 0.3, 1.0)),
}
"""What is chosen, by four short runs each; how far a step goes is what decides in each kind."""
KIND = {"iaptt-gm": "truncated", "protonet": "prototypes", "relation-net": None, "ridge": None} | dict.fromkeys(
    [*WHOLE, "meta-sgd", "maml-pp"], "whole"
)
"""The kind of a method; linear, where it does not say. None: nothing is chosen."""


class Column(NamedTuple):
    """What is learned: N-way M-shot tasks of a data set, by a network."""

    dataset: str
    way: int
    shots: int
    backbone: Literal["convnet4", "resnet12"] = "convnet4"

    @classmethod
    def parse(cls, text: str) -> "Column":
        """DATASET-WAY-SHOTS, or DATASET-WAY-SHOTS-resnet12."""
        name, dash, _ = text.partition("-resnet12")
        try:
            dataset, way, shots = name.rsplit("-", 2)
            found = cls(dataset, int(way), int(shots), "resnet12" if dash else "convnet4")
        except ValueError:
            refuse(f"--columns must be such as cifar-fs-5-1 or omniglot-20-1, got {text}.")
        if dataset not in names("classes"):
            refuse(f"--columns: there is no data set {dataset}; known are {', '.join(names('classes'))}.")
        return found

    @property
    def name(self) -> str:
        network = "" if self.backbone == "convnet4" else f"-{self.backbone}"
        return f"{self.dataset}-{self.way}-{self.shots}{network}"

    @property
    def title(self) -> str:
        network = "" if self.backbone == "convnet4" else ", ResNet-12"
        return f"{self.dataset} {self.way}-way {self.shots}-shot{network}"


class Cell(NamedTuple):
    """One run of the table."""

    column: Column
    label: str
    seed: int

    @property
    def where(self) -> str:
        """What it is a run on, in words."""
        return f"{self.column.title}, seed {self.seed}"


@dataclasses.dataclass
class Table2(Target):
    """Table 2: few-shot classification by all methods, on CIFAR-FS and the whole of Omniglot.

    All methods of a column take the same number of outer steps, with Adam's rate falling to zero and gradients cut to
    the same length; what did best in validation is tested. How far a step goes is chosen before, on the validation
    classes, by IAPTT-GM, RHG, MAML and Proto Net for their kinds. Runs that are stored are read, and one that was
    broken off goes on, so the command can be given again; all take some twelve hours of one core. Other columns, such
    as mini-imagenet-5-1, where you have the data. --quick takes a few steps on scikit-learn's digits.
    """

    columns: Annotated[tuple[str, ...], Arg(help="DATASET-WAY-SHOTS, with -resnet12 for that network")] = tuple(
        dict.fromkeys(column for column, _, _ in PLAN)
    )
    methods: Annotated[tuple[str, ...], Arg(help="rows of the table; by default those that a column has")] = ()
    folder: Annotated[Path | None, Arg(help="where the data set is")] = None
    runs: Annotated[Path, Arg(help="folder for the runs")] = Path("runs/table-2")

    name: ClassVar[str] = "table-2"
    convolves: ClassVar[bool] = True
    in_cells: ClassVar[bool] = True

    def plan(self) -> list[Cell]:
        """Every run, in the order in which they are done."""
        unknown = set(self.methods) - set(METHODS)
        if unknown:
            refuse(f"unknown methods {', '.join(sorted(unknown))}; known are {', '.join(METHODS)}.")
        columns = [Column.parse(text) for text in self.columns]
        known = {name for name, _, _ in PLAN}
        parts = [(Column.parse(name), labels, seeds) for name, labels, seeds in PLAN if name in self.columns]
        parts += [(column, MAIN, (self.seed,)) for column in columns if column.name not in known]
        cells = [Cell(column, label, seed) for column, labels, seeds in parts for seed in seeds for label in labels]
        cells = [cell for cell in cells if not self.methods or cell.label in self.methods]
        if not cells:
            refuse(f"{', '.join(self.methods)}: no row of {', '.join(self.columns)}; try cifar-fs-5-1, which has all.")
        return cells

    def config(self, cell: Cell, **changes: Any) -> FewShot:
        """The settings of one run; what is chosen on the validation classes is among `changes`."""
        column, label, seed = cell
        steps = int(STEPS.get(column.name, 2500) * LENGTHS.get(label.partition(", ")[2], 1))
        sizes: dict[str, Any] = {"outer_steps": steps, "validate_every": max(250, steps // 20), "test_tasks": 1000}
        if KIND.get(METHODS[label]["method"]) == "whole":
            sizes["inner_steps"] = 5  # as in MAML's experiments
        if self.quick:
            sizes |= {"outer_steps": 60, "validate_every": 20, "validation_tasks": 40, "test_tasks": 100, "filters": 8}
        data = DATA.get(column.dataset, {})
        return FewShot(
            **(sizes | data | METHODS[label] | changes), dataset=column.dataset, folder=self.folder, way=column.way,
            shots=column.shots, queries=QUERIES.get(column.way, 15), backbone=column.backbone, schedule="cosine",
            clip=2.0, seed=(seed,), out=self.runs / _stem(cell, *map(str, changes.values())),
        )  # fmt: skip

    def compute(self) -> dict[str, Any]:
        """Every cell, in the order of the plan."""
        if self.quick:
            with tempfile.TemporaryDirectory() as folder:
                # What needs no files, and leaves none.
                return dataclasses.replace(self, columns=("digits-5-1",), folder=None, runs=Path(folder))._all()
        return self._all()

    def stored(self) -> dict[str, Any]:
        """The cells that have been computed."""
        return super().stored() if self.quick else dataclasses.replace(self, redraw=True)._all()

    def left(self) -> int:
        """How many cells are not stored."""
        if self.quick:
            return super().left()
        found = dataclasses.replace(self, redraw=True)
        return sum(found._cell(cell) is None for cell in self.plan())

    def _all(self) -> dict[str, Any]:
        cells: dict[str, dict[str, list[Any]]] = {}
        with plain_errors():
            for cell in self.plan():
                found = self._cell(cell)
                if found is not None:
                    cells.setdefault(cell.column.name, {}).setdefault(cell.label, []).append(found)
        return {"cells": cells}

    def _cell(self, cell: Cell) -> dict[str, Any] | None:
        chosen = self._chosen(cell)
        if chosen is None:
            return None
        return stored_run(self, self._path(cell), self.config(cell, **chosen), f"{cell.label}, {cell.where}")

    def _chosen(self, cell: Cell) -> dict[str, float] | None:
        """What is chosen on the validation classes for a method of this kind; None if it is not known yet.

        Columns of more shots take what those of one shot chose.
        """
        kind = KIND.get(METHODS[cell.label]["method"], "linear")
        if (
            kind is None
            or self.quick
            or (cell.column.backbone != "convnet4" and CHOICES[kind].setting == "feature_scale")
        ):
            return {}
        choice, values = CHOICES[kind], {}
        for value in choice.among:
            trial = Cell(cell.column._replace(shots=1), choice.by, self.seed)
            config = self.config(trial, **{choice.setting: value})
            steps = TRIAL_STEPS.get(trial.column.way, 250)
            out = self.runs / _stem(trial, "choice", f"{value:g}")
            config = dataclasses.replace(config, outer_steps=steps, validate_every=steps, test_tasks=20, out=out)
            title = f"{trial.label} with {choice.setting} = {value:g}, {trial.where}"
            found = stored_run(self, self._path(trial, "choice", f"{value:g}"), config, title)
            if found is None:
                return None
            values[value] = found["validation"][-1][1] if found["validation"] else -math.inf
        return {choice.setting: max(values, key=lambda value: values[value])}

    def _path(self, cell: Cell, *more: str) -> Path:
        return self.out / self.name / f"{_stem(cell, *more)}.json"

    def show(self, results: dict[str, Any]) -> list[Path]:
        """Ours beside what was published, how the runs went, the paper's table, and the validation curves."""
        cells = {Column.parse(name): rows for name, rows in results["cells"].items()}
        for column, rows in cells.items():
            if len({run.get("data_tag") for runs in rows.values() for run in runs} - {None}) > 1:
                console.print(f"{column.title}: computed with different data; the rows do not compare.", style="bold")
            known = PUBLISHED.get(column.name, {})
            table = [
                [
                    label,
                    str(Accuracy.of(runs)),
                    len(runs),
                    f"{known[label].accuracy} ({known[label].source})" if label in known else "",
                    runs[0]["steps"],
                    f"{np.mean([run['seconds'] for run in runs]) / 60:.0f}",
                    f"{np.mean([run['mean_k_bar'] for run in runs]):.1f}",
                ]
                for label, runs in rows.items()
            ]
            headers = ["method", "test accuracy (%)", "seeds", "published", "steps", "minutes", "mean k̄"]
            show_table(column.title, headers, table)
        console.print(
            "± is a 95 % interval over tasks, and over seeds where there are several. Batch statistics are those of a "
            "task with its queries (transductive), for all methods. k̄ is the mean of the second half of a run."
        )
        self._show_paper(results["cells"])
        return [self._draw(cells)] if cells else []

    def _show_paper(self, cells: dict[str, Any]) -> None:
        rows = []
        for (label, backbone), values in PAPER.items():
            columns = (name if backbone == "convnet4" else f"{name}-{backbone}" for name in PAPERS_COLUMNS)
            ours = [str(Accuracy.of(cells[c][label])) if label in cells.get(c, {}) else "–" for c in columns]
            rows.append([label, backbone, *(f"{p} | {o}" for p, o in zip(values, ours, strict=True))])
        headers = ["mini 1-shot", "mini 5-shot", "tiered 1-shot", "tiered 5-shot"]
        show_table("Table 2 of the paper, 5-way: paper | ours", ["method", "backbone", *headers], rows)
        console.print("–: needs miniImageNet or tieredImageNet; give --columns mini-imagenet-5-1 --folder PATH.")

    def _draw(self, cells: dict[Column, dict[str, Any]]) -> Path:
        """Above, the error of each method in test; below, how it came down in validation."""
        pyplot = plt()
        figure, axes = pyplot.subplots(2, len(cells), figsize=(3.6 * len(cells) + 1, 6.4), squeeze=False)
        colours = pyplot.rcParams["axes.prop_cycle"].by_key()["color"]
        # A method's line looks the same in every panel; there are more methods than colours.
        styles = {
            label: {"color": colours[i % len(colours)], "ls": ("-", "--", "-.")[i // len(colours)]}
            for i, label in enumerate(METHODS)
        }
        for label in METHODS:
            method, _, length = label.partition(", ")
            if length in LENGTHS:
                styles[label] = styles[method] | {"ls": ":"}
        shown = {}
        for test, curves, (column, rows) in zip(*axes, cells.items(), strict=True):
            for place, (label, runs) in enumerate(rows.items()):
                found = Accuracy.of(runs)
                style = styles[label]
                test.errorbar(100 - found.mean, place, xerr=found.half, fmt="o", ms=4, color=style["color"], capsize=2)
                known = PUBLISHED.get(column.name, {}).get(label)
                if known is not None:
                    test.plot(100 - known.accuracy, place, "x", color="grey", ms=5)
                curve = np.reshape(runs[0]["validation"], (-1, 2))
                if len(curve):
                    width = 2.2 if label == "IAPTT-GM" else 1.1
                    (shown[label],) = curves.semilogy(curve[:, 0], 100 - 100 * curve[:, 1], lw=width, **style)
            test.set(title=column.title, xlabel="test error (%); ×: published", ylim=(len(rows) - 0.5, -0.7))
            test.set_yticks(range(len(rows)), list(rows), fontsize=7)
            test.set_xscale("log")
            curves.set(xlabel="outer step", xlim=(0, None))
            for axis in (test.xaxis, curves.yaxis):
                label_log(axis)
        axes[1, 0].set_ylabel("validation error (%)")
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=6, fontsize=7)
        return saved_figure(figure, self.figure_path())

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        """IAPTT-GM is best; ℓ_q and truncation help; what was published comes out here. A lead must be clear."""
        claims = []
        for name, rows in results["cells"].items():
            title, found = Column.parse(name).title, {label: Accuracy.of(runs) for label, runs in rows.items()}
            rivals = [label for label in found if not label.startswith("IAPTT-GM") and "," not in label]
            if "IAPTT-GM" in found and rivals:
                best = max(rivals, key=lambda label: found[label].mean)
                claims.append(_ahead(f"{title}: IAPTT-GM is best", "IAPTT-GM", best, found))
            for what, one, two in (
                ("truncation helps", "IAPTT-GM", "IA-GM (ANIL)"),
                ("a learned start helps", "IA-GM (ANIL)", "RHG"),
                ("ℓ_q helps", "IAPTT-GM + ℓ_q", "IAPTT-GM"),
            ):
                if one in found and two in found:
                    claims.append(_ahead(f"{title}: {what}", one, two, found))
            for label, known in PUBLISHED.get(name, {}).items():
                wide = f"{label}, 64 filters"  # as published, where it was run
                ours = found.get(wide, found.get(label))
                if ours is not None:
                    says = f"{title}: {label} has {known.accuracy}, in another paper ({known.source})"
                    shown = [wide if wide in found else label, *(f"{label}, {length}" for length in LENGTHS)]
                    here = (f"{found[one]} after {rows[one][0]['steps']} steps" for one in shown if one in found)
                    claims.append(Claim(says, "; ".join(here), ours.mean > known.accuracy - 2))
        return claims


class Accuracy(NamedTuple):
    """Per cent, with a 95 % interval."""

    mean: float
    half: float

    @classmethod
    def of(cls, runs: list[dict[str, Any]]) -> "Accuracy":
        """Of one run, over its test tasks; of several seeds, over those, or over tasks if that is wider.

        All seeds are tested on the same tasks, so chance in these does not average out.
        """
        means = np.array([100 * run["test accuracy"] for run in runs])
        tasks = float(np.mean([100 * run["± (95 %)"] for run in runs]))
        if len(runs) < 2:
            return cls(float(means[0]), tasks)
        seeds = float(stats.t.ppf(0.975, len(runs) - 1) * stats.sem(means))
        return cls(float(means.mean()), max(tasks, seeds))

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.half:.2f}"


def _ahead(says: str, one: str, two: str, found: dict[str, Accuracy]) -> Claim:
    first, second = found[one], found[two]
    lead, unsure = first.mean - second.mean, math.hypot(first.half, second.half)
    words = "" if abs(lead) > unsure else ": within the intervals"
    return Claim(says, f"{one} {first}, {two} {second}{words}", lead > 0 if abs(lead) > unsure else None)


def _stem(cell: Cell, *more: str) -> str:
    seed = [f"seed{cell.seed}"] if cell.seed else []
    return file_stem(cell.column.name, cell.label, *more, *seed)
