"""`bilax.clean_labels`: which labels are wrong, and how far that can be believed."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num, PyTree
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp
from scipy.special import softmax as _softmax

from bilax.cleaning.baselines import Judgement, flagged_by, judge, suspicion
from bilax.cleaning.fitting import fit, make_models, mean_probabilities, solved, unseen_logits
from bilax.cleaning.mixture import Leader, Rows, first_guess, tune
from bilax.cleaning.networks import MODELS, MakeModel, linear
from bilax.cleaning.pooling import estimate_transition, pool, posterior
from bilax.datasets.tables import columns_of, encoder
from bilax.files import read_arrays, write_arrays

TUNED = 2000
"""rows at the most by which the leader's few variables are chosen; the models are then trained on all"""
CANDIDATES = ("trusted alone", "confident learning", "bilevel")
TOGETHER = "all together"
"""the pool of the candidates, which is taken where there are trusted rows to weigh them by"""
RIDGES = (200.0, 20.0, 2.0, 0.5)
"""penalties of which the best is where the leader begins; from strong to weak, for each solution starts the next"""
ROUNDS = 3
"""of the T that suits the models, and of the models that suit T, before hypergradients see to both together"""
CLEARLY = 2
"""standard errors by which another candidate must be better than ours to be recommended"""
FEW = 5
"""trusted rows of a class below which they are called few"""


class Candidate(NamedTuple):
    """One way of judging labels: its probabilities of the true class, each row by a model that has not seen it."""

    noisy: Float[np.ndarray, "n c"]
    trusted: Float[np.ndarray, "m c"]
    transition: Float[np.ndarray, "c c"]
    """T[true class, label] that goes with them"""
    models: PyTree


class Scale(NamedTuple):
    """How inputs are standardised: (inputs − centre) / size."""

    centre: Float[np.ndarray, "..."]
    size: Float[np.ndarray, "..."]

    def __call__(self, inputs: np.ndarray) -> Float[np.ndarray, "n ..."]:
        found = np.subtract(inputs, self.centre, dtype=np.float32)
        found /= self.size
        return found


class Finding(NamedTuple):
    """What one candidate says of the data."""

    probabilities: Float[np.ndarray, "n c"]
    """of the classes, each row by a model that has not seen it"""
    suspicion: Float[np.ndarray, " n"]
    """how wrong each label looks"""
    flagged: Bool[np.ndarray, " n"]
    """which it calls wrong"""


class CleanedLabels(NamedTuple):
    """What `clean_labels` found; see its methods for what to do with it."""

    probability: Float[np.ndarray, " n"]
    """that the label is wrong"""
    suggested: np.ndarray
    """the most probable class of each row, the label taken into account"""
    classes: np.ndarray
    transition: Float[np.ndarray, "c c"]
    """T[true class, label]: how often each class was given each label"""
    recommended: str
    """which candidate these are of"""
    table: dict[str, Judgement]
    """all candidates, judged on held-out trusted rows"""
    notes: tuple[str, ...]
    """what there is to know about the data and about how far this can be believed, with numbers"""
    candidates: dict[str, Finding]
    models: PyTree
    """one for each fold, along a leading axis of their arrays"""
    scale: Scale
    encode: Callable[[str, Any], np.ndarray]
    """what makes numbers of inputs such as those given"""

    def predict_proba(self, inputs: Any) -> Float[np.ndarray, "n c"]:
        """Probabilities of the classes of new inputs: the mean over the models trained on the way."""
        return mean_probabilities(self.models, self.scale(self.encode("inputs", inputs)))

    def flag(self, precision: float | None = None, share: float | None = None) -> Bool[np.ndarray, " n"]:
        """Which labels to look at: those more probably wrong than right; or as many as an expected `precision` allows;
        or a `share` of all, the most probably wrong ones."""
        if precision is not None and share is not None:
            raise ValueError("give precision or share, not both.")
        for name, value in (("precision", precision), ("share", share)):
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {value}.")
        if precision is None and share is None:
            return self.probability > 0.5
        order = np.argsort(-self.probability, kind="stable")
        if share is not None:
            count = round(share * len(order))
        else:
            means = np.cumsum(self.probability[order]) / np.arange(1, len(order) + 1)
            count = int(np.sum(means >= (precision or 0)))
        flagged = np.zeros(len(order), bool)
        flagged[order[:count]] = True
        return flagged

    def save(self, path: str | Path) -> None:
        """Writes the models, with the classes and how inputs are standardised, as an .npz file."""
        leaves = jax.tree.leaves(eqx.filter(self.models, eqx.is_inexact_array))
        arrays = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
        write_arrays(
            Path(path), {"classes": self.classes, "centre": self.scale.centre, "size": self.scale.size, **arrays}
        )

    def expected_precision(self, flagged: Bool[np.ndarray, " n"]) -> float:
        """The share of wrong labels among the flagged ones that the probabilities promise; NaN where there are none."""
        return float(self.probability[flagged].mean()) if flagged.any() else float("nan")

    def __repr__(self) -> str:
        flagged = self.flag()
        sure = f", of which {self.expected_precision(flagged):.0%} should be wrong" if flagged.any() else ""
        return (
            f"CleanedLabels({int(flagged.sum())} of {len(flagged)} labels flagged{sure}; by {self.recommended}; "
            f"fields: {', '.join(self._fields)})"
        )


def clean_labels(
    inputs: Any,
    labels: Any,
    trusted: tuple[Any, Any] | None = None,
    *,
    model: str | MakeModel = "linear",
    folds: int = 5,
    epochs: int = 10,
    batch: int = 512,
    standardize: bool = True,
    seed: int = 0,
    keep: str | Path | None = None,
    progress: Callable[[str], Any] = lambda stage: None,
) -> CleanedLabels:
    """Finds wrong labels: the probability of each, what it should be, and how far that can be believed.

    - `inputs`: numbers (n, ...), or a pandas DataFrame, whose texts are encoded; `labels`: n texts or numbers.
    - `trusted`: (inputs, labels) of rows whose labels are right. Even two of each class help much. Without them the
      labels are judged by each other, which sees no mistake that most labels of a class share.
    - `model`: "linear", "mlp", "convnet" (pictures), or a function (key, shape of an input, classes) -> a module from
      inputs (n, ...) to logits (n, classes), such as one of equinox. Its weights are trained here.
    - `folds`: no row is judged by a model that has seen it; so many models are trained.
    - `epochs`, `batch`: of models that are trained on mini-batches (all but a linear one on small data).
    - `keep`: a folder for what each stage found; a second call with the same data and settings reads it there.
    - `progress`: called with the name of each stage as it begins.

    Three candidates are computed: models trained on the trusted rows alone, confident learning (Northcutt, Jiang and
    Chuang 2021) on the noisy ones alone, and the bilevel one, which learns from both and chooses by hypergradient how
    (`bilax.cleaning.mixture` has the equations). With trusted rows a fourth pools their probabilities, weighed by what
    held-out rows say (`bilax.cleaning.pooling`). They are judged on held-out trusted rows that get wrong labels with
    the frequencies found in the data; the pool, or without trusted rows the bilevel one, is taken unless another is
    better by more than one standard error, and the notes say so.
    """
    data = _prepare(inputs, labels, trusted, standardize)
    make = _model(model)
    _check_count("folds", folds, 2)
    _check_count("epochs", epochs, 1)
    _check_count("batch", batch, 2)
    key = jax.random.key(seed)
    stages = _Stages(data, make, folds, epochs, batch, seed, key, progress)
    store = _Store(keep, stages.tag(model))
    names = CANDIDATES if len(data.trusted_labels) else CANDIDATES[1:]
    candidates: dict[str, Candidate] = {}
    for name in names:
        progress(name)
        candidates[name] = store.get(name, stages, lambda name=name: stages.run(name, candidates))
    if len(data.trusted_labels):
        candidates[TOGETHER] = _together(data, candidates)
    return _conclude(data, candidates, seed)


class _Data(NamedTuple):
    inputs: Num[np.ndarray, "n ..."]
    labels: Int[np.ndarray, " n"]
    trusted_inputs: Num[np.ndarray, "m ..."]
    trusted_labels: Int[np.ndarray, " m"]
    classes: np.ndarray
    scale: Scale
    encode: Callable[[str, Any], np.ndarray]


def _prepare(inputs: Any, labels: Any, trusted: tuple[Any, Any] | None, standardize: bool) -> _Data:
    encode = _frame_encoder(inputs)
    inputs, labels = encode("inputs", inputs), check_labels("labels", labels)
    check_same_length("inputs", inputs, "labels", labels)
    if trusted is None:
        known = np.zeros((0, *inputs.shape[1:]), np.float32), labels[:0]
    else:
        known = encode("trusted inputs", trusted[0]), check_labels("trusted labels", trusted[1])
        check_same_length("trusted inputs", known[0], "trusted labels", known[1])
        if known[0].shape[1:] != inputs.shape[1:]:
            raise ValueError(f"trusted inputs have shape {known[0].shape[1:]}, but the others {inputs.shape[1:]}.")
        if (known[1].dtype.kind == "U") != (labels.dtype.kind == "U"):
            raise ValueError(
                f"trusted labels are {known[1].dtype}, the others {labels.dtype}: give both the same kind."
            )
    classes, numbers = np.unique(np.concatenate([labels, known[1]]), return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"all labels are {classes[0]}: there must be at least two classes.")
    if 2 * len(classes) > len(numbers):
        raise ValueError(f"{len(classes)} classes among {len(numbers)} rows: labels must be classes, not measurements.")
    numbers = numbers.astype(np.int32)
    return _Data(
        inputs, numbers[: len(labels)], known[0], numbers[len(labels) :], classes, _scale(inputs, standardize), encode
    )


def _frame_encoder(inputs: Any) -> Callable[[str, Any], np.ndarray]:
    """What makes numbers of inputs: of the columns of a DataFrame as of this one's, else what they are."""
    if not hasattr(inputs, "columns"):
        return check_inputs
    encode = encoder("inputs", columns_of("inputs", inputs))
    return lambda name, frame: check_inputs(name, encode(name, columns_of(name, frame)))


def _scale(inputs: np.ndarray, standardize: bool) -> Scale:
    shape = inputs.shape[1:]
    if not standardize:
        return Scale(np.zeros(shape, np.float32), np.ones(shape, np.float32))
    centre = inputs.mean(axis=0, dtype=np.float64).astype(np.float32)
    # A chunk at a time: a copy of all in double precision could be more than there is memory.
    square = sum(
        ((inputs[i : i + 4096] - centre) ** 2).sum(axis=0, dtype=np.float64) for i in range(0, len(inputs), 4096)
    )
    size = np.sqrt(square / len(inputs))
    # Pixels have one scale: the noise of a nearly constant one would be blown up by its own.
    size = np.full(shape, np.sqrt(np.mean(size**2))) if len(shape) > 1 else size
    return Scale(centre, np.where(size > 1e-6 * np.max(size, initial=1e-30), size, 1.0).astype(np.float32))


def check_inputs(name: str, inputs: Any) -> np.ndarray:
    """Inputs as an array (n, ...) of finite numbers in single precision (bytes stay bytes)."""
    found = np.asarray(inputs)
    if found.dtype.kind not in "fiub" or found.ndim < 2 or not found.size:
        raise ValueError(
            f"{name} must be numbers of shape (n, ...), got {found.dtype} of shape {found.shape}; "
            "columns of text must be turned into numbers first."
        )
    if found.dtype != np.uint8:
        with np.errstate(over="ignore"):
            found = found.astype(np.float32, copy=False)
        wrong = next((i for i in range(0, len(found), 4096) if not np.isfinite(found[i : i + 4096]).all()), None)
        if wrong is not None:
            place = np.argwhere(~np.isfinite(found[wrong : wrong + 4096]))[0]
            row, rest = wrong + int(place[0]), ", ".join(map(str, place[1:]))
            raise ValueError(f"{name}[{row}, {rest}] is missing or not finite: fill in or leave out such rows.")
    return found


def check_labels(name: str, labels: Any) -> np.ndarray:
    """Labels as an array of whole numbers or of text."""
    found = np.asarray(labels)
    if found.ndim != 1 or not len(found):
        raise ValueError(f"{name} must be in one axis and not empty, got shape {found.shape}.")
    if found.dtype.kind == "O":
        missing = [i for i, value in enumerate(found) if value is None or value != value]
        if missing:
            raise ValueError(f"{name}[{missing[0]}] is missing ({len(missing)} are).")
        found = np.array([str(value) for value in found])
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise ValueError(f"{name}[{int(np.argmin(np.isfinite(found)))}] is missing or not finite.")
    if found.dtype.kind not in "iubfU":
        raise ValueError(f"{name} must be text or numbers, got {found.dtype}.")
    return found


def check_same_length(first: str, one: np.ndarray, second: str, other: np.ndarray) -> None:
    """Refuses two arrays of different length."""
    if len(one) != len(other):
        raise ValueError(f"{first} has {len(one)} rows, but {second} {len(other)}.")


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")


def _model(model: str | MakeModel) -> MakeModel:
    if callable(model):
        return model
    if model not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)} or a function, got {model!r}.")
    return MODELS[model]


class _Stages(NamedTuple):
    """How each candidate is computed."""

    data: _Data
    make: MakeModel
    folds: int
    epochs: int
    batch: int
    seed: int
    key: Array
    progress: Callable[[str], Any]

    def tag(self, model: Any) -> str:
        """What all that is stored depends on, in short."""
        digest = hashlib.sha256(repr((model, self.folds, self.epochs, self.batch, self.seed, TUNED)).encode())
        for part in (*self.data[:4], *self.data.scale):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    def start(self, make: MakeModel) -> PyTree:
        """Models that have learnt nothing yet."""
        return make_models(make, self.key, self.data.inputs.shape[1:], len(self.data.classes), self.folds)

    def run(self, name: str, before: dict[str, Candidate]) -> Candidate:
        """A candidate; those before it give the bilevel one its start."""
        rows, places = self.dealt()
        few = rows if len(self.data.labels) + len(self.data.trusted_labels) <= TUNED else self.dealt(TUNED)[0]
        see = {"trusted alone": _only_trusted, "confident learning": _only_noisy, "bilevel": lambda rows: rows}[name]
        guess = self.first_transition(before)
        # Where T plays no part it begins where its prior is flat, so that the leader looks at the penalty alone.
        at = guess if name == "bilevel" else np.full_like(guess, 1 / len(guess))
        x, models = tune(*self.best_ridge(first_guess(at), see(few)), see(few))
        if self.make is not linear:
            models = self.start(self.make)
        if self.make is not linear or few is not rows:
            models = fit(x, models, see(rows), self.key, self.epochs, self.batch)
        m, logits = len(self.data.trusted_labels), self.unseen(models, rows, places)
        warmth = temperature(logits[:m], self.data.trusted_labels) if m and name != "confident learning" else 1.0
        trusted = _softmax(logits[:m] / warmth, axis=1)
        if m and name != "confident learning":  # the trusted rows have judged; now all models learn from all of them
            models = fit(
                x, models, see(rows)._replace(held=jnp.asarray(False)), self.key, -(-self.epochs // 3), self.batch
            )
            logits = self.unseen(models, rows, places)
        noisy = _softmax(logits[m:] / warmth, axis=1)
        start = guess if name == "bilevel" else None
        return Candidate(noisy, trusted, estimate_transition(noisy, self.data.labels, start), models)

    def best_ridge(self, x: Leader, rows: Rows) -> tuple[Leader, PyTree]:
        """The leader's start with the best penalty of a coarse grid: far off the follower is stiff and each evaluation
        slow, and the leader's few steps do not always lead from there to the best."""
        best = np.inf, x, self.start(linear)
        models = best[2]
        for ridge in RIDGES:
            tried = x._replace(ridge=jnp.asarray(np.log(ridge), jnp.float32))
            value, models = solved(tried, models, rows)
            if not value < best[0]:  # F falls and then rises, and the weaker the penalty, the longer it takes
                break
            best = value, tried, models
        noisy = bool(((rows.counted > 0) & ~rows.trusted).any())
        for _ in range(ROUNDS if noisy else 0):  # else T plays no part
            tried = best[1]._replace(flips=better_flips(*best[1:], rows))
            value, models = solved(tried, best[2], rows)
            if not value < best[0]:
                break
            best = value, tried, models
        return best[1:]

    def unseen(self, models: PyTree, rows: Rows, places: Int[np.ndarray, "folds b"]) -> Float[np.ndarray, "rows c"]:
        """The logits of all rows, trusted ones first, each by its fold's model."""
        counted = np.asarray(rows.counted) > 0
        found = np.zeros((len(self.data.trusted_labels) + len(self.data.labels), len(self.data.classes)))
        found[places[counted]] = unseen_logits(models, rows)[counted]
        return found

    def first_transition(self, before: dict[str, Candidate]) -> Float[np.ndarray, "c c"]:
        """What the bilevel candidate begins with: T as the trusted rows alone see it; else one label in five wrong."""
        c = len(self.data.classes)
        plain = np.full((c, c), 0.2 / c) + 0.8 * np.eye(c)
        return before["trusted alone"].transition if "trusted alone" in before else plain

    def dealt(self, most: int | None = None) -> tuple[Rows, Int[np.ndarray, "folds b"]]:
        """The rows in folds, each class and kind spread evenly, and which row is where (trusted ones first)."""
        data, random = self.data, np.random.default_rng(self.seed)
        m, n = len(data.trusted_labels), len(data.labels)
        kinds = [np.arange(m), m + np.arange(n)]
        labels = np.concatenate([data.trusted_labels, data.labels])
        order = np.concatenate(
            [_spread(labels, kind, count, random) for kind, count in zip(kinds, _counts(m, n, most), strict=True)]
        )
        length = room(-(-len(order) // self.folds))
        places = np.zeros(length * self.folds, int)
        places[: len(order)] = order
        counted = (np.arange(len(places)) < len(order)).reshape(length, self.folds).T
        places = places.reshape(length, self.folds).T
        inputs = np.empty((*places.shape, *data.inputs.shape[1:]), np.float32)
        for k, fold in enumerate(places):
            sure = fold < m
            inputs[k, sure] = data.scale(data.trusted_inputs[fold[sure]])
            inputs[k, ~sure] = data.scale(data.inputs[fold[~sure] - m])
        rows = Rows(
            jnp.asarray(inputs),
            jnp.asarray(labels[places]),
            jnp.asarray(places < m),
            jnp.asarray(counted, jnp.float32),
            jnp.asarray(True),
        )
        return rows, places


def room(length: int) -> int:
    """Places for so many rows: a sixteenth more at the most (or seven), so that data of nearly equal size share their
    programs, which take longer to compile than to run."""
    step = max(8, 2 ** (length.bit_length() - 5))
    return -(-length // step) * step


def _counts(m: int, n: int, most: int | None) -> tuple[int, int]:
    """How many trusted and noisy rows are taken: all, or `most`, a third of them trusted if there are so many."""
    if most is None or m + n <= most:
        return m, n
    some = min(m, max(most // 3, most - n))
    return some, min(n, most - some)


def _spread(labels: np.ndarray, kind: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """`count` of the rows `kind` in an order that deals each class evenly."""
    drawn = random.permutation(kind)[:count]
    return drawn[np.argsort(labels[drawn], kind="stable")]


def better_flips(x: Leader, models: PyTree, rows: Rows) -> Float[Array, "c c"]:
    """The logits of T at which F is least for these models, by EM: hypergradients need many steps for it."""
    noisy = np.asarray((rows.counted > 0) & ~rows.trusted)
    probabilities = _softmax(unseen_logits(models, rows)[noisy], axis=1)
    found = estimate_transition(probabilities, np.asarray(rows.labels)[noisy], _softmax(np.asarray(x.flips), axis=1))
    return first_guess(found).flips


def _only_trusted(rows: Rows) -> Rows:
    return rows._replace(counted=rows.counted * rows.trusted)


def _only_noisy(rows: Rows) -> Rows:
    """Noisy labels taken for true ones, as confident learning does; trusted rows are not learnt from."""
    return rows._replace(counted=rows.counted * ~rows.trusted, trusted=jnp.ones_like(rows.trusted))


def temperature(logits: Float[np.ndarray, "m c"], labels: Int[np.ndarray, " m"]) -> float:
    """By what to divide logits of held-out rows so that their labels are most likely (Guo et al. 2017), with a prior
    that leaves it at 1 where rows are few."""

    def loss(log_warmth):
        scaled = logits / np.exp(log_warmth)
        return np.sum(logsumexp(scaled, axis=1) - scaled[np.arange(len(labels)), labels]) + 2 * log_warmth**2

    best: Any = minimize_scalar(loss, bounds=(-2, 2), method="bounded")
    return float(np.exp(best.x))


class _Store:
    """Where the stages leave what they found, if anywhere."""

    def __init__(self, folder: str | Path | None, tag: str):
        self.folder, self.tag = None if folder is None else Path(folder), tag

    def get(self, name: str, stages: _Stages, compute: Callable[[], Candidate]) -> Candidate:
        """What is stored of the same data and settings, or computed and stored now."""
        if self.folder is None:
            return compute()
        path = self.folder / f"{name.replace(' ', '-')}.npz"
        if path.exists():
            arrays = read_arrays(path)
            if str(arrays.get("tag")) == self.tag:
                return _from_arrays(arrays, stages.start(stages.make))
        found = compute()
        write_arrays(path, {"tag": np.array(self.tag), **_to_arrays(found)})
        return found


def _to_arrays(candidate: Candidate) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves(eqx.filter(candidate.models, eqx.is_inexact_array))
    return (
        candidate._asdict() | {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)} | {"models": np.zeros(0)}
    )


def _from_arrays(arrays: dict[str, np.ndarray], like: PyTree) -> Candidate:
    varied, rest = eqx.partition(like, eqx.is_inexact_array)
    leaves = [jnp.asarray(arrays[f"leaf_{i}"]) for i in range(len(jax.tree.leaves(varied)))]
    models = eqx.combine(jax.tree.unflatten(jax.tree.structure(varied), leaves), rest)
    return Candidate(arrays["noisy"], arrays["trusted"], arrays["transition"], models)


def _together(data: _Data, candidates: dict[str, Candidate]) -> Candidate:
    """The pool of all candidates. New inputs are judged by the models of the bilevel one, which weighs most."""
    trusted, noisy = (np.stack([getattr(c, kind) for c in candidates.values()]) for kind in ("trusted", "noisy"))
    last = candidates["bilevel"]
    sure, rest, transition = pool(trusted, noisy, data.trusted_labels, data.labels, last.transition)
    return Candidate(rest, sure, transition, last.models)


def _conclude(data: _Data, candidates: dict[str, Candidate], seed: int) -> CleanedLabels:
    """The last candidate is taken, unless another is clearly better."""
    ours, table = list(candidates)[-1], _judged(data, candidates, seed)
    better = [name for name, judged in table.items() if judged.behind < -CLEARLY]
    recommended = max(better, key=lambda name: table[name].auc) if better else ours
    chosen = candidates[recommended]
    likely = posterior(chosen.noisy, chosen.transition, data.labels)
    probability = 1 - likely[np.arange(len(data.labels)), data.labels]
    return CleanedLabels(
        probability,
        data.classes[likely.argmax(axis=1)],
        data.classes,
        chosen.transition,
        recommended,
        table,
        tuple(_notes(data, candidates, table, ours, recommended)),
        {name: _finding(name, found, data.labels) for name, found in candidates.items()},
        chosen.models,
        data.scale,
        data.encode,
    )


def _finding(name: str, found: Candidate, labels: Int[np.ndarray, " n"]) -> Finding:
    asked = name, found.noisy, found.transition, labels
    return Finding(found.noisy, suspicion(*asked), flagged_by(*asked))


def _judged(data: _Data, candidates: dict[str, Candidate], seed: int) -> dict[str, Judgement]:
    flagged = {
        name: int(flagged_by(name, found.noisy, found.transition, data.labels).sum())
        for name, found in candidates.items()
    }
    if not len(data.trusted_labels):
        return {name: Judgement(np.nan, np.nan, 0.0, count) for name, count in flagged.items()}
    asked = {name: (found.trusted, found.transition) for name, found in candidates.items()}
    ours = list(candidates)[-1]
    found = judge(asked, ours, data.trusted_labels, candidates[ours].transition, seed)
    return {name: Judgement(*found[name], flagged[name]) for name in candidates}


def _notes(
    data: _Data, candidates: dict[str, Candidate], table: dict[str, Judgement], ours: str, recommended: str
) -> list[str]:
    """Sentences for a person, with numbers."""
    notes, classes, m = [], data.classes, len(data.trusted_labels)
    if not m:
        notes.append(
            "No trusted rows: labels were judged by other labels alone. A mistake that most labels of a class share "
            "cannot be seen, the probabilities hold only if most labels of each class are right, and no candidate can "
            "be recommended over another. Two trusted rows of each class would change that."
        )
        return notes + _noise_notes(candidates[recommended], classes)
    counts = np.bincount(data.trusted_labels, minlength=len(classes))
    missing = np.flatnonzero(counts == 0)
    if missing.size:
        rows = int(np.isin(data.labels, missing).sum())
        notes.append(
            f"The trusted rows lack {_some(classes[missing])}: what is said of the {rows} rows so labelled rests on "
            "noisy labels alone."
        )
    few = np.flatnonzero((counts > 0) & (counts < FEW))
    if few.size:
        notes.append(
            f"Trusted rows are few: {m} in all, fewer than {FEW} of {_some(classes[few])}. Which candidate is best "
            "cannot be told surely by so few."
        )
    agreed = float(np.mean(candidates["confident learning"].trusted.argmax(axis=1) == data.trusted_labels))
    chance = float(np.max(np.bincount(data.labels)) / len(data.labels))
    if agreed < max(0.5, chance):
        notes.append(
            f"The trusted labels contradict the rest: a model trained on the data alone agrees with {100 * agreed:.0f} "
            f"% of them, where naming the commonest class would with {100 * chance:.0f} %. Either most labels are "
            "wrong, or the trusted rows are of another kind."
        )
    if recommended == ours:
        notes.append(
            f'By held-out trusted rows no candidate is clearly better than "{ours}" (AUC '
            f"{table[ours].auc:.3f} ± {table[ours].error:.3f})."
        )
    else:
        notes.append(
            f'"{recommended}" finds wrong labels among held-out trusted rows better than "{ours}": AUC '
            f'{table[recommended].auc:.3f} against {table[ours].auc:.3f}. What is reported is by "{recommended}".'
        )
    return notes + _noise_notes(candidates[recommended], classes)


def _noise_notes(candidate: Candidate, classes: np.ndarray) -> list[str]:
    bad = np.flatnonzero(np.diag(candidate.transition) < 0.5)
    if not bad.size:
        return []
    return [f"More than half of the rows that are {_some(classes[bad])} seem to have another label."]


def _some(names: np.ndarray, most: int = 5) -> str:
    shown = ", ".join(str(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
