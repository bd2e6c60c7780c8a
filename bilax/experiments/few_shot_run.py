"""`bilax run few-shot`: one method on one data set, trained on some classes and tested on others."""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

import bilax
from bilax.cli import nearest, refuse
from bilax.datasets import DataError
from bilax.datasets.classes import Splits
from bilax.datasets.episodes import Episodes, Sinusoids, load_digit_tasks
from bilax.datasets.imagenet import load_folder, load_mini_imagenet, load_tiered_imagenet
from bilax.datasets.omniglot import load_omniglot
from bilax.experiments import few_shot
from bilax.experiments.common import Arg
from bilax.experiments.few_shot import Learner, LqPenalty
from bilax.experiments.single import Run, Setup
from bilax.models import ConvNet4, Dense, ResNet12

WHOLE = {"maml": bilax.maml, "fomaml": bilax.fomaml, "reptile": bilax.reptile}
"""methods in which each task adapts the whole network"""
TEST_SEED = 2**31
"""of the test tasks, the same for all methods and seeds"""
TEST_BATCH = 20


@dataclasses.dataclass
class FewShot(Run):
    """N-way M-shot learning: a shared representation, and one linear classifier per task (the paper's Section 4.2).

    Methods are protonet, maml, fomaml, reptile, anil (which is ia-gm) and those of the other experiments. protonet's
    follower is solved by one step whatever K and α are. Training and test classes differ; the result is the mean over
    test tasks with its 95 % interval.
    """

    method: Annotated[str, Arg(help="iaptt-gm, ia-gm, anil, rhg, t-rhg, bda, maml, fomaml, reptile, protonet, ...")] = (
        "iaptt-gm"
    )
    inner_steps: Annotated[int, Arg(help="K, follower steps per outer step")] = 10
    step_size: Annotated[float, Arg(help="α, the follower's step")] = 0.1
    outer_steps: Annotated[int, Arg(help="T, outer steps")] = 2000
    rate: Annotated[float, Arg(help="the outer step for x (and z)")] = 1e-3
    optimizer: Annotated[Literal["sgd", "adam"], Arg(help="of the outer loop")] = "adam"
    dataset: Annotated[
        Literal["digits", "sinusoid", "omniglot", "mini-imagenet", "tiered-imagenet", "folder"],
        Arg(help="the first two need no files; folder is your own pictures, one folder per class"),
    ] = "digits"
    folder: Annotated[Path | None, Arg(help="where the data set is; Omniglot is also looked for in BILAX_DATA")] = None
    rotations: Annotated[bool, Arg(help="omniglot: quarter turns of training characters as extra classes")] = False
    backbone: Annotated[Literal["convnet4", "resnet12"], Arg(help="for pictures")] = "convnet4"
    filters: Annotated[int | None, Arg(help="k; 32 for convnet4 and 48 for resnet12 by default")] = None
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
    test_tasks: Annotated[int, Arg(help="tasks of the final test at the least")] = 600
    name = "few-shot"

    def make_method(self) -> bilax.Method:
        recipes = {**WHOLE, "anil": bilax.ia_gm}
        shared = [name.replace("_", "-") for name in bilax.RECIPES if name not in (*WHOLE, "one_step")]
        known = [*shared, *recipes, "protonet"]
        if self.method not in known:
            refuse(f"bilax run {self.name}: unknown method '{self.method}': {nearest(self.method, known)}")
        if self.start == "warm":
            refuse(f"bilax run {self.name}: --start warm has no meaning for tasks that change; use fixed or auxiliary.")
        if self.method == "protonet":
            return bilax.rhg(1, 1.0)
        if self.method not in recipes:
            return super().make_method()
        try:
            parts: Any = {} if self.start is None else {"start": self.start}
            return recipes[self.method](self.inner_steps, self.step_size, **parts)
        except (ValueError, TypeError) as error:
            refuse(f"bilax run {self.name}: {error}")

    def setup(self, seed: int) -> Setup:
        try:
            learner = self.learner(seed)
            data = self.batches("train", seed, self.meta_batch or (2 if self.backbone == "resnet12" else 4))
        except ValueError as error:
            refuse(f"bilax run {self.name}: {error}")
        return Setup(learner.problem, learner.x0, learner.y0, data, tasks=True)

    def measures(self, solution: bilax.Solution) -> dict[str, Any]:
        test = self.batches("test", TEST_SEED, TEST_BATCH)
        found = few_shot.evaluate(self.learner(0), self.make_method(), solution.x, solution.z, test, self.test_tasks)
        what = "test error" if self.dataset == "sinusoid" else "test accuracy"
        return {what: found.mean, "± (95 %)": found.half, "test tasks": found.tasks}

    def batches(self, part: Literal["train", "validation", "test"], seed: int, tasks: int) -> Episodes | Sinusoids:
        """Tasks of one part of the classes."""
        if self.dataset == "sinusoid":
            return Sinusoids(self.shots, self.queries, tasks, seed)
        return Episodes(getattr(self.splits, part), self.way, self.shots, self.queries, tasks, seed)

    @functools.cached_property
    def splits(self) -> Splits:
        """The classes of the data set."""
        if self.dataset == "digits":
            return load_digit_tasks()
        if self.dataset == "omniglot":
            return load_omniglot(self.folder, rotations=self.rotations)
        if self.folder is None:
            raise DataError(f"--dataset {self.dataset} needs --folder, where its files are.")
        load = {"mini-imagenet": load_mini_imagenet, "tiered-imagenet": load_tiered_imagenet, "folder": load_folder}
        return load[self.dataset](self.folder)

    def learner(self, seed: int) -> Learner:
        """The learner that the method needs, with a network drawn from the seed."""
        key = jax.random.key(seed)
        if self.dataset == "sinusoid":
            network, example, outputs = Dense(1, (40, 40), key, size=5.0), jnp.zeros((2, 1), jnp.float32), 1
        else:
            make, filters = {"convnet4": (ConvNet4, 32), "resnet12": (ResNet12, 48)}[self.backbone]
            shape = self.splits.train.shape
            network = make(shape[2], self.filters or filters, key)
            example, outputs = jnp.zeros((2, *shape), jnp.float32), self.way
        if self.method == "protonet":
            if self.dataset == "sinusoid" or self.penalty != "none":
                raise DataError("protonet has no classifier to penalise and needs classes, which sinusoids have not.")
            return few_shot.prototypes(network, example, outputs)
        make_learner = few_shot.networks if self.method in WHOLE else few_shot.heads
        return make_learner(network, example, outputs, self._penalty())

    def _penalty(self) -> few_shot.Penalty:
        if self.penalty == "none":
            return few_shot.no_penalty
        return LqPenalty(self.penalty_q, self.penalty_epsilon, self.penalty_weight, self.penalty == "elementwise")
