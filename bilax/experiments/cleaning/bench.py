"""`bilax bench clean`: how well wrong labels are found, beside training on the trusted rows alone and cleanlab."""

import dataclasses
import functools
import importlib.util
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float, Int

import bilax
from bilax.app.show import Arg, Claim, Target, load_json, plt, save_json, saved_figure, show_table, steps
from bilax.datasets import find, load

NOISE, SHARES, TRUSTED, SEEDS = ("uniform", "by class"), (0.3, 0.1, 0.5), (0.05, 0.01, 0.2), (0, 1, 2)
ROWS = 10_000
"""of a data set at the most, a fifth of them for the test"""
LEAST = 2
"""trusted rows of each class at the least, where a share of 1 % would be fewer"""
MEASURES = {"auc": "AUC", "f1": "F1", "accuracy": "accuracy"}
OURS = "bilax"
RIVALS = ("trusted alone", "confident learning", "cleanlab")


class Trial(NamedTuple):
    """Noisy rows with their truth, trusted rows, and rows for the test."""

    inputs: Float[np.ndarray, "n ..."]
    labels: Int[np.ndarray, " n"]
    truth: Int[np.ndarray, " n"]
    trusted: tuple[Float[np.ndarray, "m ..."], Int[np.ndarray, " m"]]
    test: tuple[Float[np.ndarray, "t ..."], Int[np.ndarray, " t"]]


def transition(kind: str, share: float, classes: int) -> Float[np.ndarray, "c c"]:
    """T[true class, label]: a wrong label is any other one, or, by class, the next one, and from the first class to the
    last 0.6 to 1.4 times as frequent as `share`."""
    if kind == "uniform":
        return np.full((classes, classes), share / (classes - 1)) * (1 - np.eye(classes)) + (1 - share) * np.eye(
            classes
        )
    rates = share * np.linspace(0.6, 1.4, classes)
    return np.diag(1 - rates) + np.diag(rates) @ np.roll(np.eye(classes), 1, axis=1)


def trial(
    inputs: Float[np.ndarray, "n ..."], truth: Int[np.ndarray, " n"], kind: str, share: float, trusted: float, seed: int
) -> Trial:
    """A fifth for the test; of the others a share of each class trusted, and the labels of the rest made noisy."""
    random = np.random.default_rng([seed, 17])
    order = random.permutation(len(truth))[:ROWS]
    test, rest = np.split(order, [len(order) // 5])
    classes = int(truth.max()) + 1
    groups = [rest[truth[rest] == c] for c in range(classes)]
    sure = np.concatenate([group[: max(LEAST, round(trusted * len(group)))] for group in groups])
    noisy = np.setdiff1d(rest, sure)
    steps = np.cumsum(transition(kind, share, classes), axis=1)[truth[noisy]]
    labels = np.minimum(np.sum(random.random(len(noisy))[:, None] > steps, axis=1), classes - 1)
    return Trial(inputs[noisy], labels, truth[noisy], (inputs[sure], truth[sure]), (inputs[test], truth[test]))


def measure(trial: Trial, suspicion: Float[np.ndarray, " n"], flagged: np.ndarray) -> dict[str, float]:
    """AUC and F1 of finding wrong labels, and the test accuracy of ridge regression on what is left and trusted."""
    from sklearn.linear_model import RidgeClassifier
    from sklearn.metrics import f1_score, roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    wrong = trial.labels != trial.truth
    inputs = np.concatenate([trial.trusted[0], trial.inputs[~flagged]])
    labels = np.concatenate([trial.trusted[1], trial.labels[~flagged]])
    model = make_pipeline(StandardScaler(), RidgeClassifier(alpha=10.0))
    accuracy = model.fit(_flat(inputs), labels).score(_flat(trial.test[0]), trial.test[1])
    scores = roc_auc_score(wrong, suspicion), f1_score(wrong, flagged), accuracy
    return dict(zip(MEASURES, map(float, scores), strict=True))


def _flat(inputs: np.ndarray) -> np.ndarray:
    return inputs.reshape(len(inputs), -1)


def compare(trial: Trial, seed: int) -> dict[str, Any]:
    """All methods on one trial; cleanlab gets the out-of-fold probabilities of the same logistic regression."""
    found = bilax.clean_labels(trial.inputs, trial.labels, trial.trusted, seed=seed)
    labels = trial.labels
    results: dict[str, Any] = {OURS: measure(trial, found.probability, found.flag()), "recommended": found.recommended}
    for name in RIVALS[:2]:
        results[name] = measure(trial, *found.candidates[name][1:])
    if importlib.util.find_spec("cleanlab"):
        results["cleanlab"] = measure(trial, *by_cleanlab(labels, found.candidates["confident learning"].probabilities))
    return results


def by_cleanlab(
    labels: Int[np.ndarray, " n"], probabilities: Float[np.ndarray, "n c"]
) -> tuple[Float[np.ndarray, " n"], np.ndarray]:
    """cleanlab's suspicion of each label, and which it calls issues."""
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flagged = find_label_issues(labels, probabilities, n_jobs=1)
        return 1 - get_label_quality_scores(labels, probabilities), np.asarray(flagged)


def _sklearn(name: str) -> tuple[np.ndarray, np.ndarray]:
    import sklearn.datasets

    inputs, truth = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    return inputs, truth


def _covtype_like() -> tuple[np.ndarray, np.ndarray]:
    """Seven classes in 54 numbers, of which 20 tell something, with classes of two clusters: as covtype, made up."""
    from sklearn.datasets import make_classification

    inputs, truth = make_classification(
        ROWS // 2, 54, n_informative=20, n_redundant=10, n_classes=7, class_sep=2.0, flip_y=0.0, random_state=0
    )
    return np.asarray(inputs), np.asarray(truth)


def _pictures(name: str) -> tuple[np.ndarray, np.ndarray]:
    train = load(name)[0]
    rows = slice(0, 2 * ROWS)
    return train.inputs[rows].reshape(-1, *train.shape), train.labels[rows]


DATA: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "wine": lambda: _sklearn("wine"),
    "breast_cancer": lambda: _sklearn("breast_cancer"),
    "digits": lambda: _sklearn("digits"),
    "covtype-like": _covtype_like,
    "mnist": lambda: _pictures("mnist"),
    "fashion-mnist": lambda: _pictures("fashion-mnist"),
    "ijcnn1": lambda: _pictures("ijcnn1"),
}


LARGE = ("mnist", "fashion-mnist", "ijcnn1")
"""what has to be found on this machine"""


@dataclasses.dataclass
class CleanBench(Target):
    """Wrong labels found by `bilax.clean_labels`, by a model of the trusted rows alone, by confident learning and by
    cleanlab (where installed): noise × trusted rows × seeds. Each trial is stored when done; a second call goes on.
    """

    seeds: Annotated[int, Arg(help="how many, 3 at the most")] = 3
    trusted: Annotated[tuple[float, ...], Arg(help="these shares of trusted rows alone; 0.01, 0.05 and 0.2")] = ()
    only: Annotated[tuple[str, ...], Arg(help="these data sets alone; all that are here by default")] = ()

    name: ClassVar[str] = "benchmarks/clean"
    free: ClassVar[tuple[str, ...]] = ("redraw", "seeds", "trusted", "only")
    claimant: ClassVar[str] = "what is to hold"
    in_cells: ClassVar[bool] = True

    def compute(self) -> dict[str, Any]:
        results = load_json(self.path)["results"] if self.path.exists() and not self.quick else {}
        wanted = [cell for cell in self.cells() if " | ".join(map(str, cell)) not in results]
        with steps(len(wanted), "clean") as advance:
            for cell in wanted:
                name, kind, share, trusted, seed = cell
                made = trial(*_loaded(name), kind, share, trusted, seed)
                results[" | ".join(map(str, cell))] = compare(made, seed)
                if not self.quick:
                    save_json(self.path, self, results)
                advance(" | ".join(map(str, cell)))
        if not self.quick:
            save_json(self.path, self, results)
        return results

    def cells(self) -> Iterator[tuple[str, str, float, float, int]]:
        """Seed by seed, so that what is there when it is broken off is whole."""
        names = [name for name in self.only or DATA if name not in LARGE or find(name)]
        if self.quick:
            yield from itertools.product(names[:1], NOISE[:1], SHARES[1:2], TRUSTED[1:2], SEEDS[:2])
            return
        shares = self.trusted or TRUSTED
        for seed, trusted, share, kind, name in itertools.product(SEEDS[: self.seeds], shares, SHARES, NOISE, names):
            yield name, kind, share, trusted, seed

    def show(self, results: dict[str, Any]) -> list[Path]:
        cells = gathered(results)
        for measure, title in MEASURES.items():
            rows = [[*cell, len(found), *_row(found, measure)] for cell, found in cells.items()]
            columns = ["data", "noise", "share", "trusted", "seeds", OURS, *RIVALS, "behind"]
            show_table(
                f"{title}; behind: how much less than the best, where by more than a standard error", columns, rows
            )
        return [_figure(cells, self.figure_path())]

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        cells = gathered(results)
        return [_claim(cells, measure, title) for measure, title in MEASURES.items()]


Cells = dict[tuple[str, str, str, str], list[dict[str, Any]]]


def gathered(results: dict[str, Any]) -> Cells:
    """The trials of all seeds by cell."""
    cells: Cells = {}
    for name, found in results.items():
        data, kind, share, trusted, _ = name.split(" | ")
        cells.setdefault((data, kind, share, trusted), []).append(found)
    return cells


def means(found: list[dict[str, Any]], measure: str) -> dict[str, float]:
    """The mean over seeds of each method that was run."""
    return {name: float(np.mean([f[name][measure] for f in found])) for name in (OURS, *RIVALS) if name in found[0]}


def behind(found: list[dict[str, Any]], measure: str) -> float:
    """How much less ours is than the best rival, where that is more than a standard error of the difference over seeds
    (of 0.005 where there is one seed); else 0."""
    average = means(found, measure)
    best = max((name for name in average if name != OURS), key=lambda name: average[name])
    gaps = np.array([f[best][measure] - f[OURS][measure] for f in found])
    error = gaps.std(ddof=1) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.005
    return float(gaps.mean()) if gaps.mean() > max(error, 5e-4) else 0.0


def _row(found: list[dict[str, Any]], measure: str) -> list[Any]:
    average, less = means(found, measure), behind(found, measure)
    return [
        *(f"{average[name]:.3f}" if name in average else "" for name in (OURS, *RIVALS)),
        f"{less:.3f}" if less else "",
    ]


def _claim(cells: Cells, measure: str, title: str) -> Claim:
    missed = {cell: behind(found, measure) for cell, found in cells.items() if behind(found, measure)}
    here = f"{len(cells) - len(missed)} of {len(cells)}"
    if missed:
        worst = max(missed, key=lambda cell: missed[cell])
        here += f"; furthest behind by {missed[worst]:.3f}: {', '.join(worst)}"
    return Claim(f"{title}: best or within one standard error of the best in every cell", here, not missed)


def _figure(cells: Cells, path: Path) -> Path:
    """Each rival's AUC and F1 against ours, a dot for each cell: below the line ours is better."""
    figure, panels = plt().subplots(1, 2, figsize=(9, 4.2))
    for axis, measure in zip(panels, ("auc", "f1"), strict=True):
        ours = [means(found, measure)[OURS] for found in cells.values()]
        for name in RIVALS:
            axis.plot(ours, [means(f, measure).get(name, np.nan) for f in cells.values()], ".", label=name, alpha=0.7)
        axis.plot([0, 1], [0, 1], color="grey", lw=0.8)
        axis.set(title=f"{MEASURES[measure]} of finding wrong labels", xlabel=OURS, ylabel="the other method")
    panels[0].legend()
    return saved_figure(figure, path)


@functools.cache
def _loaded(name: str) -> tuple[np.ndarray, np.ndarray]:
    return DATA[name]()
