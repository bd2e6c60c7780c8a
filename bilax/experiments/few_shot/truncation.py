"""`bilax compare truncation`: when truncating the trajectory helps in few-shot learning."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated, Any, ClassVar

from bilax.app.data_command import data_arg
from bilax.app.errors import plain_errors
from bilax.app.show import Arg, Claim, Target, file_stem, label_log, plt, saved_figure, show_table
from bilax.experiments.few_shot.run import FewShot, stored_run

METHODS = {"IAPTT-GM": "iaptt-gm", "IA-GM": "ia-gm", "z = 0": "rhg"}
"""with truncation; without it; and without a learned start as well"""
LINES: dict[str, tuple[dict[str, Any], ...]] = {
    "step length α": tuple({"step_size": value} for value in (0.03, 0.1, 0.3, 1.0, 3.0)),
    "follower steps K": tuple({"inner_steps": value} for value in (3, 10, 30)),
    "hidden layer": ({}, {"hidden": 32}),
    "weight of ℓ_q": ({}, *({"penalty": "elementwise", "penalty_weight": value} for value in (1e-3, 1e-2))),
}
"""What is changed, one thing at a time; the rest is as in `Truncation.config`."""


@dataclasses.dataclass
class Truncation(Target):
    """IAPTT-GM beside the same without truncation, as the follower's steps grow longer, more, or less convex.

    Truncation ends the trajectory at the iterate where the leader fares worst. If every step helps the leader that is
    the first one, and the derivative then goes through a single step. Where steps overshoot, or a follower has several
    minima, it is another. Runs are short; each is stored, and what is stored is not run again.
    """

    dataset: Annotated[str, data_arg("what to train and test on", "classes", own=False)] = "cifar-fs"
    folder: Annotated[Path | None, Arg(help="where the data set is")] = None
    outer_steps: Annotated[int, Arg(help="T of each run")] = 250
    runs: Annotated[Path, Arg(help="folder for the runs")] = Path("runs/truncation")

    name: ClassVar[str] = "truncation"
    claimant: ClassVar[str] = "what one may expect"
    convolves: ClassVar[bool] = True
    in_cells: ClassVar[bool] = True

    def config(self, method: str, changes: dict[str, Any]) -> FewShot:
        """The settings of one run."""
        sizes: dict[str, Any] = {"outer_steps": self.outer_steps, "validate_every": self.outer_steps}
        sizes |= {"validation_tasks": 400, "test_tasks": 20}
        if self.quick:
            sizes |= {"outer_steps": 20, "validate_every": 20, "validation_tasks": 40, "filters": 4}
        photos: dict[str, Any] = {"distortions": True} if self.dataset == "cifar-fs" else {}
        return FewShot(
            **(sizes | photos | changes), method=method, dataset=self.dataset, folder=self.folder, schedule="cosine",
            clip=2.0, seed=(self.seed,), out=self.runs / _stem(method, changes),
        )  # fmt: skip

    def compute(self) -> dict[str, Any]:
        """Every run, line by line."""
        if self.quick:
            with tempfile.TemporaryDirectory() as folder:
                return dataclasses.replace(self, dataset="digits", folder=None, runs=Path(folder))._all()
        return self._all()

    def stored(self) -> dict[str, Any]:
        return super().stored() if self.quick else dataclasses.replace(self, redraw=True)._all()

    def _all(self) -> dict[str, Any]:
        lines: dict[str, list[dict[str, Any]]] = {}
        with plain_errors():
            for line, settings in LINES.items():
                for changes in settings[:2] if self.quick else settings:
                    found = {label: self._run(method, changes) for label, method in METHODS.items()}
                    if all(found.values()):
                        value = next((v for v in changes.values() if not isinstance(v, str)), 0)
                        lines.setdefault(line, []).append({"value": value} | found)
        return {"dataset": self.dataset, "lines": lines}

    def _run(self, method: str, changes: dict[str, Any]) -> dict[str, Any] | None:
        stem = _stem(method, changes)
        return stored_run(self, self.out / self.name / f"{stem}.json", self.config(method, changes), stem)

    def show(self, results: dict[str, Any]) -> list[Path]:
        """A row for each setting, and a panel for each line."""
        rows = [
            [
                line,
                f"{point['value']:g}",
                *(f"{_accuracy(point[m]):.1f}" for m in METHODS),
                f"{_k_bar(point):.1f}",
            ]
            for line, points in results["lines"].items()
            for point in points
        ]
        title = f"validation accuracy (%) on {results['dataset']}, 5-way 1-shot, after short runs"
        show_table(title, ["", "value", *METHODS, "mean k̄ of IAPTT-GM"], rows)
        return [self._draw(results["lines"])] if results["lines"] else []

    def _draw(self, lines: dict[str, Any]) -> Path:
        pyplot = plt()
        figure, axes = pyplot.subplots(2, len(lines), figsize=(2.9 * len(lines), 4.6), squeeze=False, sharey="row")
        for (above, below), (line, points) in zip(axes.T, lines.items(), strict=True):
            places = range(len(points))
            for label in METHODS:
                above.plot(places, [_accuracy(point[label]) for point in points], "o-", ms=4, label=label)
            below.plot(places, [_k_bar(point) for point in points], "o-", ms=4)
            for axis in (above, below):
                axis.set_xticks(places, [f"{point['value']:g}" for point in points])
            below.set(xlabel=line, yscale="log")
            label_log(below.yaxis)
        axes[0, 0].set_ylabel("validation accuracy (%)")
        axes[1, 0].set_ylabel("mean k̄")
        axes[0, 0].legend(fontsize=7)
        return saved_figure(figure, self.figure_path())

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        """Of each line, whether truncation helps more as followers get harder. 400 tasks tell two per cent apart."""
        claims = []
        for line, points in results["lines"].items():
            leads = [_accuracy(point["IAPTT-GM"]) - _accuracy(point["IA-GM"]) for point in points]
            said = ", ".join(f"{lead:+.1f} at {point['value']:g}" for lead, point in zip(leads, points, strict=True))
            claims.append(Claim(f"truncation helps clearly somewhere along: {line}", said, max(leads) > 2))
        return claims


def _accuracy(run: dict[str, Any]) -> float:
    """Per cent, at the last validation; a run that failed before it has none, and counts as 0."""
    return 100 * run["validation"][-1][1] if run["validation"] else 0.0


def _k_bar(point: dict[str, Any]) -> float:
    return point["IAPTT-GM"]["mean_k_bar"]


def _stem(method: str, changes: dict[str, Any]) -> str:
    # What is as usual has no name, so that the lines share the run they have in common.
    others = {name: value for name, value in changes.items() if value != getattr(FewShot, name)}
    return file_stem(method, *(f"{name}-{value}" for name, value in others.items()))
