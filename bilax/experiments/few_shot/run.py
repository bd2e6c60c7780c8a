"""`bilax run few-shot`: one method on one data set, trained on some classes and tested on others.

A run folder also gets learned.eqx, the network and the start of the classifiers that did best on the validation
classes (or the last ones), and episode.png, a test task with its answers.
"""

import dataclasses
import functools
import io
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

import bilax
from bilax.app.data_command import data_arg
from bilax.app.errors import nearest
from bilax.app.show import Arg, Target, console, plt, refuse_to_replace, save_json, steps, stored_results
from bilax.datasets import DataError
from bilax.datasets.classes import Splits
from bilax.datasets.episodes import Episode, Episodes, Sinusoids
from bilax.datasets.registry import DATA_SETS, DataSet, entry, load_classes
from bilax.experiments.few_shot import learners as few_shot
from bilax.experiments.few_shot.learners import Learner, LqPenalty
from bilax.experiments.runner import End, Experiment, Setup, train_or_leave
from bilax.files import read_whole, write_whole
from bilax.models import ConvNet4, Dense, ResNet12

WHOLE = {"maml": bilax.maml, "fomaml": bilax.fomaml, "reptile": bilax.reptile}
"""methods in which each task adapts the whole network"""
ADAPTING = ("meta-sgd", "maml-pp", "t-net", "imaml")
"""the same, with steps that are learned, or near to the leader"""
SOLVED = {
    "protonet": bilax.rhg(1, 1.0),
    "relation-net": bilax.rhg(1, 1.0),
    "ridge": bilax.rhg(1, 1.0, dynamics=few_shot.LeastSquares()),
}
"""methods whose follower is solved by one step"""
VALIDATION_SEED, TEST_SEED = 2**30, 2**31
"""of the validation and test tasks, the same for all methods and seeds"""
TEST_BATCH = 20
FILTERS = 4096
"""at the most; more would fill the memory before training begins"""


def _without_length(recipe: Callable[[int], bilax.Method]) -> Callable[[int, float], bilax.Method]:
    """A recipe whose step lengths are the leader's."""
    return lambda inner_steps, step_size: recipe(inner_steps)


@dataclasses.dataclass
class FewShot(Experiment):
    """N-way M-shot learning: a shared representation, and one linear classifier per task (the paper's Section 4.2).

    Methods are protonet, relation-net, ridge (R2-D2), maml, fomaml, reptile, meta-sgd, maml-pp, t-net, imaml, anil
    (which is ia-gm) and iaptt-gm, ia-gm, ia-gm-a, rhg, t-rhg, fhg, bda, ls, ns.
    The follower of the first three is solved by one step whatever K and α are. Training, validation and test classes
    differ; the result is the mean over test tasks with its 95 % interval, for what did best in validation (every
    --validate-every outer steps; the run ends after --patience steps without one that is better by --gain).
    """

    method: Annotated[
        str,
        Arg(
            help="iaptt-gm, anil, rhg, t-rhg, bda, maml, reptile, meta-sgd, maml-pp, t-net, imaml, protonet, ridge, ..."
        ),
    ] = "iaptt-gm"
    inner_steps: Annotated[int, Arg(help="K, follower steps per outer step")] = 10
    step_size: Annotated[float, Arg(help="α, the follower's step")] = 0.1
    proximity: Annotated[float, Arg(help="imaml: λ, how much a task pays for going away from the common start")] = 2.0
    outer_steps: Annotated[int, Arg(help="T, outer steps")] = 2000
    rate: Annotated[float, Arg(help="the outer step for x (and z)")] = 1e-3
    optimizer: Annotated[Literal["sgd", "adam"], Arg(help="of the outer loop")] = "adam"
    dataset: Annotated[
        str, data_arg("the first two need no files; folder is your own pictures", "classes", "functions")
    ] = "digits"
    folder: Annotated[Path | None, Arg(help="look for the data here before BILAX_DATA and the cache")] = None
    rotations: Annotated[bool, Arg(help="omniglot: quarter turns of training characters as extra classes")] = False
    split: Annotated[
        Literal["alphabets", "vinyals"], Arg(help="omniglot: by alphabet, or by Vinyals' lists beside the archives")
    ] = "alphabets"
    distortions: Annotated[
        bool, Arg(help="training pictures a little different: drawings turned and sheared, photos shifted and mirrored")
    ] = False
    backbone: Annotated[Literal["convnet4", "resnet12"], Arg(help="for pictures")] = "convnet4"
    filters: Annotated[int | None, Arg(help="k; 32 for convnet4 and 48 for resnet12 by default")] = None
    feature_scale: Annotated[float, Arg(help="convnet4: factor of the features at the start, learned from there")] = 1.0
    hidden: Annotated[int | None, Arg(help="width of a hidden layer of each task's classifier; none by default")] = None
    way: Annotated[int, Arg(help="N, classes per task")] = 5
    shots: Annotated[int, Arg(help="M, examples of each class to learn from (in all, for sinusoids)")] = 1
    queries: Annotated[int, Arg(help="examples of each class to be judged by (in all, for sinusoids)")] = 15
    meta_batch: Annotated[int | None, Arg(help="tasks per outer step; 4, or 2 for resnet12, by default")] = None
    penalty: Annotated[
        Literal["none", "footnote", "elementwise"],
        Arg(help="ℓ_q penalty of the classifier: as the paper's footnote prints it, or summed over weights"),
    ] = "none"
    penalty_weight: Annotated[float, Arg(help="factor of the penalty")] = 1.0
    penalty_q: Annotated[float, Arg(help="q of the penalty")] = 0.5
    penalty_epsilon: Annotated[float, Arg(help="ε of the penalty")] = 1e-3
    validate_every: Annotated[int | None, Arg(help="outer steps between validations; none by default")] = None
    validation_tasks: Annotated[int, Arg(help="tasks of each validation at the least")] = 200
    patience: Annotated[int | None, Arg(help="end after so many outer steps without a better validation")] = None
    gain: Annotated[float, Arg(help="by how much a validation must be better for --patience to begin anew")] = 0.0
    minutes: Annotated[float | None, Arg(help="of training at the most, what was done before --resume included")] = None
    test_tasks: Annotated[int, Arg(help="tasks of the final test at the least")] = 600
    name = "few-shot"
    convolves: ClassVar[bool] = True
    free = (*Experiment.free, "folder", "minutes", "patience", "gain", "test_tasks")

    def check(self) -> None:
        super().check()
        for name in ("filters", "hidden", "validate_every", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = name.replace("_", "-")
                self.refuse(f"--{option} must be at least 1, got {value}.")
        if self.hidden is not None and self.method in (*WHOLE, *ADAPTING, *SOLVED):
            self.refuse(f"--hidden is for methods that fit a classifier to each task, not for {self.method}.")
        if self.filters is not None and self.filters > FILTERS:
            self.refuse(f"--filters must be at most {FILTERS}, got {self.filters}.")
        for name in ("rotations", "split"):
            if getattr(self, name) != getattr(FewShot, name) and name not in self.data_set.options:
                those = ", ".join(known for known, one in DATA_SETS.items() if name in one.options)
                self.refuse(f"--{name} is for {those}.")
        if self.regression:
            for name in ("distortions", "backbone", "filters", "feature_scale", "way"):
                if getattr(self, name) != getattr(FewShot, name):
                    self.refuse(f"--{name.replace('_', '-')} is for pictures.")
        if not self.proximity > 0 or (self.proximity != FewShot.proximity and self.method != "imaml"):
            self.refuse(f"--proximity is a positive number for imaml, got {self.proximity} for {self.method}.")
        if self.patience is not None and self.validate_every is None:
            self.refuse("--patience needs --validate-every.")
        if self.gain != 0 and self.patience is None:
            self.refuse("--gain needs --patience.")
        if self.minutes is not None and not self.minutes >= 0:
            self.refuse(f"--minutes must not be negative, got {self.minutes}.")
        if not self.gain >= 0:
            self.refuse(f"--gain must not be negative, got {self.gain}.")

    def make_method(self) -> bilax.Method:
        recipes = {**WHOLE, "anil": bilax.ia_gm, "t-net": bilax.t_net, "imaml": bilax.imaml}
        recipes |= {"meta-sgd": _without_length(bilax.meta_sgd), "maml-pp": _without_length(bilax.maml_pp)}
        shared = [name.replace("_", "-") for name in bilax.RECIPES if name not in (*WHOLE, "one_step")]
        known = [*shared, *recipes, *SOLVED]
        if self.method not in known:
            raise ValueError(f"unknown method '{self.method}': {nearest(self.method, known)}")
        if self.start == "warm":
            raise ValueError("--start warm has no meaning for tasks that change; use fixed or auxiliary.")
        if self.start is not None and self.method in (*WHOLE, *ADAPTING, *SOLVED):
            raise ValueError(f"--start is not for {self.method}, which has a start of its own.")
        if self.method in SOLVED:
            return SOLVED[self.method]
        if self.method not in recipes:
            return super().make_method()
        parts: Any = {} if self.start is None else {"start": self.start}
        return recipes[self.method](self.inner_steps, self.step_size, **parts)

    def setup(self, seed: int) -> Setup:
        tasks = self.meta_batch if self.meta_batch is not None else 2 if self.backbone == "resnet12" else 4
        data = self.batches("train", seed, tasks)
        if self.distributed:
            if tasks % (processes := jax.process_count()):
                self.refuse(f"--meta-batch must be a multiple of the {processes} processes, got {tasks}.")
            data = OwnTasks(data)
        self.batches("test", TEST_SEED, TEST_BATCH)  # what is wrong with it should be told now, not after training
        learner = self.learner(seed)
        return Setup(learner.problem, learner.x0, learner.y0, data, tasks=True)

    def time_limit(self) -> float | None:
        return None if self.minutes is None else 60 * self.minutes

    def data_tag(self) -> str | None:
        return None if self.regression else self.splits.tag()

    def validation(self, seed: int) -> bilax.EarlyStopping | None:
        if self.validate_every is None:
            return None
        batches = self.batches("validation", VALIDATION_SEED, TEST_BATCH)
        learner, method = self.learner(seed), self.make_method()

        def validate(state: bilax.Snapshot) -> float:
            score = few_shot.evaluate(learner, method, state.x, state.z, batches, self.validation_tasks)
            return self._sign * score.mean

        return bilax.EarlyStopping(validate, self.patience, every=self.validate_every, gain=self.gain)

    @property
    def _sign(self) -> int:
        return 1 if self.regression else -1  # errors should be low, accuracies high

    def details(self, end: End) -> dict[str, Any]:
        best = None if end.validation is None else end.validation.best_point
        save_learned(end.folder, best or (end.solution.x, end.solution.z))
        k_bars = np.asarray(end.solution.history.k_bar)
        found = {"data_tag": self.data_tag(), "mean_k_bar": float(np.mean(k_bars[len(k_bars) // 2 :]))}
        if end.validation is None:
            return found | {"validation": []}
        values = (self._sign * value["value"] for value in end.validation.values)
        return found | {"validation": [list(pair) for pair in zip(end.validation.steps, values, strict=True)]}

    def measures(self, end: End) -> dict[str, Any]:
        learner, method = self.learner(0), self.make_method()
        x, z = load_learned(end.folder, (learner.x0, learner.y0))
        test = self.batches("test", TEST_SEED, TEST_BATCH)
        found = tested(learner, method, x, z, test, self.test_tasks)
        if isinstance(test, Episodes):
            task = Episode(*(field[0] for field in test.batch(0)))
            write_whole(end.folder / "episode.png", draw_episode(task, few_shot.answers(learner, method, x, z, task)))
        what = "test error" if self.regression else "test accuracy"
        return {what: found.mean, "± (95 %)": found.half, "test tasks": found.tasks}

    def batches(self, part: Literal["train", "validation", "test"], seed: int, tasks: int) -> Episodes | Sinusoids:
        """Tasks of one part of the classes."""
        if self.data_set.functions:
            return self.data_set.functions(self.shots, self.queries, tasks, seed)
        augment = self.data_set.augment if self.distortions and part == "train" else None
        try:
            return Episodes(getattr(self.splits, part), self.way, self.shots, self.queries, tasks, seed, augment)
        except DataError as error:
            split = " Without train/, val/ and test/, a fifth of the classes is for the test."
            raise DataError(f"{part} classes: {error}{split if self.data_set.needs_folder else ''}") from error

    @property
    def data_set(self) -> DataSet:
        """What is known of the data set."""
        return entry(self.dataset, "classes", "functions")

    @property
    def regression(self) -> bool:
        """Whether tasks ask for values, not for classes."""
        return self.data_set.functions is not None

    @functools.cached_property
    def splits(self) -> Splits:
        """The classes of the data set."""
        options = {name: getattr(self, name) for name in self.data_set.options}
        return load_classes(self.dataset, self.folder, **options)

    def facts(self) -> dict[str, Any]:
        return super().facts() | ({} if self.regression else {"shape": self.splits.train.shape})

    def learner(self, seed: int, shape: tuple[int, int, int] | None = None) -> Learner:
        """The learner that the method needs, with a network drawn from the seed, for pictures of the data's shape."""
        key = jax.random.key(seed)
        if self.regression:
            network, example, outputs = Dense(1, (40, 40), key, size=5.0), jnp.zeros((2, 1), jnp.float32), 1
            maps = None
        else:
            make, filters = {"convnet4": (ConvNet4, 32), "resnet12": (ResNet12, 48)}[self.backbone]
            shape = shape or self.splits.train.shape
            filters = filters if self.filters is None else self.filters
            maps = self._maps(shape, filters)
            network = make(shape[2], filters, key) if maps is None else ConvNet4(shape[2], filters, key, pools=2)
            if self.feature_scale != 1:
                network = self._scaled(network)
            example, outputs = jnp.zeros((2, *shape), jnp.float32), self.way
        if self.method in SOLVED:
            if self.regression:
                raise DataError(f"{self.method} needs classes; {self.dataset} has none.")
            if self.penalty != "none":
                raise DataError(f"{self.method} has no classifier that could have such a penalty.")
            if self.method == "protonet":
                return few_shot.prototypes(network, example, outputs)
            if self.method == "ridge":
                return few_shot.ridge(network, example, outputs)
            return few_shot.relations(network, example, outputs, jax.random.fold_in(key, 1), maps)
        if self.method in WHOLE:
            return few_shot.networks(network, example, outputs, self._penalty(), in_samples=self.method == "reptile")
        if self.method in ADAPTING:
            return self._adapting(few_shot.networks(network, example, outputs, self._penalty()))
        if self.hidden is None:
            return few_shot.heads(network, example, outputs, self._penalty())
        features = jax.eval_shape(network, example).shape[1]
        hidden = Dense(features, (self.hidden,), jax.random.fold_in(key, 1))
        return few_shot.heads(network, example, outputs, self._penalty(), hidden)

    def _adapting(self, learner: Learner) -> Learner:
        """What the leader is of methods that learn how to adapt: first of all steps of the length α."""
        if self.method == "imaml":
            return few_shot.near_leader(learner, self.proximity)
        makes: dict[str, Any] = {
            "meta-sgd": lambda leaf: jnp.full_like(leaf, self.step_size),
            "maml-pp": lambda leaf: jnp.full((self.inner_steps,), self.step_size, leaf.dtype),
            "t-net": lambda leaf: jnp.eye(leaf.shape[-1], dtype=leaf.dtype),
        }
        return few_shot.with_leader(learner, makes[self.method])

    def _maps(self, shape: tuple[int, int, int], filters: int) -> tuple[int, int, int] | None:
        """The shape of the small pictures that Relation Net compares; ResNet-12 makes none."""
        compares = self.method == "relation-net" and self.backbone == "convnet4"
        return (shape[0] // 4, shape[1] // 4, filters) if compares else None

    def _scaled(self, network: Any) -> Any:
        if not isinstance(network, ConvNet4) or not self.feature_scale > 0:
            raise DataError("--feature-scale is for convnet4, and positive.")
        return eqx.tree_at(
            lambda n: n.blocks[-1].normalization.scale, network, replace_fn=lambda s: s * self.feature_scale
        )

    def _penalty(self) -> few_shot.Penalty:
        if self.penalty == "none":
            return few_shot.no_penalty
        return LqPenalty(self.penalty_q, self.penalty_epsilon, self.penalty_weight, self.penalty == "elementwise")


@dataclasses.dataclass(frozen=True)
class OwnTasks:
    """Of each batch the tasks that are this process's, one of several that run together."""

    batches: Episodes | Sinusoids

    def starting_at(self, index: int) -> Iterator[tuple[Episode]]:
        """From batch number `index` on."""
        number, own = jax.process_count(), jax.process_index()
        for batch in self.batches.starting_at(index):
            yield jax.tree.map(lambda leaf: np.split(leaf, number)[own], batch)

    def __iter__(self) -> Iterator[tuple[Episode]]:
        return self.starting_at(0)


def tested(
    learner: Learner, method: bilax.Method, x: PyTree, z: PyTree, batches: Iterable[tuple[Episode]], tasks: int
) -> few_shot.Score:
    """`few_shot.evaluate` with a progress bar."""
    with steps(math.ceil(tasks / TEST_BATCH), "testing") as advance:

        def watched():
            for batch in batches:
                yield batch
                advance()

        return few_shot.evaluate(learner, method, x, z, watched(), tasks)


def stored_run(target: Target, path: Path, config: FewShot, title: str) -> dict[str, Any] | None:
    """What `path` holds of a run with these settings; else the run, which is stored there unless --quick is given.

    None where nothing may be computed (--redraw). What was made with other settings is not replaced.
    """
    found = None if target.quick else stored_results(path, config)
    if found is not None or target.redraw:
        return found
    if path.exists() and not target.quick:
        refuse_to_replace(path)
    console.print(title, style="bold")
    result = train_or_leave(config)
    kept = ("status", "steps", "seconds", "mean_k_bar", "validation", "data_tag")
    found = {name: result[name] for name in kept} | result["measures"]
    if not target.quick:
        save_json(path, config, found)
    return found


LEARNED = "learned.eqx"


def save_learned(folder: Path, learned: PyTree) -> None:
    """Writes (x, z), whole or not at all."""
    buffer = io.BytesIO()
    eqx.tree_serialise_leaves(buffer, learned)
    write_whole(folder / LEARNED, buffer.getvalue())


def load_learned(folder: Path, like: PyTree) -> PyTree:
    """Reads (x, z) of the shape of `like`."""
    path = folder / LEARNED
    if not path.exists():
        raise DataError(f"{path} does not exist: `bilax run few-shot` writes it when a run ends.")
    headers = 1024 * len(jax.tree.leaves(like))  # more than they take
    arrays = [leaf for leaf in jax.tree.leaves(like) if hasattr(leaf, "dtype")]
    content = read_whole(path, headers + sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays))
    try:
        return eqx.tree_deserialise_leaves(io.BytesIO(content), like)
    except Exception as error:  # a damaged file can fail in many ways inside equinox and numpy
        raise DataError(f"{path}: is damaged, or of another run than config.json ({error}).") from error


def draw_episode(task: Episode, scores: Any, per_class: int = 10) -> bytes:
    """A PNG: in each row a class, its examples on the left, its queries on the right with what they were taken for."""
    pyplot = plt()
    support, query = np.asarray(task.support), np.asarray(task.query)
    labels, truths = np.asarray(task.support_targets), np.asarray(task.query_targets)
    said = np.argmax(np.asarray(scores), axis=1)
    way, shots = int(labels.max()) + 1, int(np.bincount(labels).max())
    columns = shots + min(per_class, int(np.bincount(truths).max()))
    figure, axes = pyplot.subplots(
        way, columns, figsize=(0.75 * columns + 0.6, 0.85 * way + 0.7), squeeze=False, layout="constrained"
    )
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.set_visible(False)
    for c in range(way):
        shown = [(picture, "black", "") for picture in support[labels == c]]
        for picture, guess in list(zip(query[truths == c], said[truths == c], strict=True))[: columns - shots]:
            right = guess == c
            shown.append((picture, "tab:green" if right else "tab:red", "" if right else f"as {guess + 1}"))
        for axis, (picture, colour, words) in zip(axes[c], shown, strict=False):
            axis.set_visible(True)
            axis.imshow(picture[..., 0] if picture.shape[-1] == 1 else picture, cmap="gray_r", vmin=0, vmax=1)
            axis.set_title(words, fontsize=7, color=colour, pad=1)
            axis.spines[:].set(visible=True, color=colour, linewidth=2)
        axes[c, 0].set_ylabel(f"class {c + 1}", fontsize=8)
    right = float(np.mean(said == truths))
    figure.suptitle(f"black: learnt from; green: right; red: wrong ({100 * right:.0f} % of queries right)", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    pyplot.close(figure)
    return buffer.getvalue()
