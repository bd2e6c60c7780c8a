"""Few-shot learning (Section 4.2): a shared representation is the leader, what one task learns is its follower.

A learner says what is shared and what each task has of its own. There are five:

- `heads`: the network is x, one linear classifier per task is y, and the features of a task are the problem's context,
  computed once per outer step. For RHG, T-RHG, BDA, IA-GM (which is ANIL), IAPTT-GM and the other recipes.
- `networks`: each task has the whole network and the classifier as y; x is empty. For MAML, FOMAML and Reptile; with
  learned steps as x (`with_leader`) for Meta-SGD, MAML++ and T-net, and with all of y as x (`near_leader`) for iMAML.
- `prototypes`: the class means of a task's features are y; one step of length 1 on half their mean squared distance
  gets there from anywhere. For Prototypical Net (Snell et al. 2017).
- `relations`: the same class means, compared with a query by a network that is learned too. For Relation Net (Sung et
  al. 2018).
- `ridge`: one linear map per task, fitted by squares with a learned penalty, which has a closed form. For R2-D2
  (Bertinetto et al. 2019).

Targets that are whole numbers make a task a classification, others a regression.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Integer, PyTree

import bilax
from bilax.datasets.episodes import Episode
from bilax.models import Block, Dense

Penalty = Callable[[Any], Any]
Network = Callable[[Array], Float[Array, "n features"]]


class Linear(NamedTuple):
    """A linear classifier, or a linear map to values."""

    weight: Float[Array, "features outputs"]
    bias: Float[Array, " outputs"]

    def __call__(self, features: Float[Array, "n features"]) -> Float[Array, "n outputs"]:
        return features @ self.weight + self.bias


class TwoLayers(NamedTuple):
    """A classifier with a hidden layer: a follower that is not convex."""

    hidden: Dense
    last: Linear

    def __call__(self, features: Float[Array, "n features"]) -> Float[Array, "n outputs"]:
        return self.last(self.hidden(features))


class Features(NamedTuple):
    """What the objectives of one task see of the representation."""

    support: Float[Array, "n features"]
    query: Float[Array, "m features"]


class Learner(NamedTuple):
    """A problem for one task, where it starts, and the problem of a test, whose leader's objective is the score."""

    problem: bilax.Problem
    test: bilax.Problem
    predict: Callable[..., Array]
    """(what is seen of x, y, task) to a row of scores, or of values, for each query"""
    x0: PyTree
    y0: PyTree


def no_penalty(head: Linear) -> float:
    """f is the loss alone."""
    return 0.0


class LqPenalty(eqx.Module):
    """The non-convex penalty of the paper's footnote, (‖w‖₂ + ε)^(q/2), times a weight.

    With `elementwise` it is the usual smoothed ℓ_q, the sum of (w_i² + ε²)^(q/2). Here w is the classifier's weight
    matrix and bias.
    """

    q: float = 0.5
    epsilon: float = 1e-3
    weight: float = 1.0
    elementwise: bool = False

    def __check_init__(self):
        if not 0 < self.q < 1:
            raise ValueError(f"q must lie strictly between 0 and 1, got {self.q}.")
        for name in ("epsilon", "weight"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")

    def __call__(self, head: Linear | TwoLayers) -> Any:
        weights = jax.tree.leaves(head)
        if self.elementwise:
            return self.weight * sum(jnp.sum((w**2 + self.epsilon**2) ** (self.q / 2)) for w in weights)
        squared = sum(jnp.sum(w**2) for w in weights)
        # √ has no derivative at 0, where classifiers start; the norm's is taken as 0 there.
        norm = jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1)), 0)
        return self.weight * (norm + self.epsilon) ** (self.q / 2)


def heads(
    network: Network, example: Array, outputs: int, penalty: Penalty = no_penalty, hidden: Dense | None = None
) -> Learner:
    """One classifier per task on a shared representation, linear unless `hidden` is its first layer.

    `example` holds inputs (n, ...) of one task.
    """

    def predict(seen: Features, y: Linear | TwoLayers, task: Episode) -> Array:
        return y(seen.query)

    def lower(seen: Features, y: Linear | TwoLayers, task: Episode) -> Any:
        return loss(y(seen.support), task.support_targets) + penalty(y)

    if hidden is None:
        return _learner(predict, lower, _features, network, linear(network, example, outputs))
    last = linear(lambda pictures: hidden(network(pictures)), example, outputs)
    return _learner(predict, lower, _features, network, TwoLayers(hidden, last))


def networks(
    network: Network, example: Array, outputs: int, penalty: Penalty = no_penalty, in_samples: bool = False
) -> Learner:
    """Each task adapts the whole network and the classifier; their common start is all there is to learn.

    With `in_samples` each step of a training task adapts to another M-shot sample of it, the queries included. This is
    for Reptile: it learns from the adaptation and nothing else, and what it learns of generalising is that a step on
    one sample should help another (Nichol et al. 2018, Section 5).
    """

    def predict(x: PyTree, y: tuple[Any, Linear], task: Episode) -> Array:
        body, head = y
        return head(_features(body, task).query)

    def lower(x: PyTree, y: tuple[Any, Linear], task: Episode) -> Any:
        body, head = y
        return loss(head(body(task.support)), task.support_targets) + penalty(head)

    def lower_at(k: Any, x: PyTree, y: tuple[Any, Linear], task: Episode) -> Any:
        return lower(x, y, sample(task, k, outputs))

    found = _learner(predict, lower, None, (), (network, linear(network, example, outputs)))
    return found._replace(problem=dataclasses.replace(found.problem, lower_at=lower_at)) if in_samples else found


def with_leader(learner: Learner, make: Callable[[Array], Array]) -> Learner:
    """The learner whose x has something for each array of y: step lengths, or a preconditioner."""
    return learner._replace(x0=jax.tree.map(make, eqx.filter(learner.y0, eqx.is_inexact_array)))


def near_leader(learner: Learner, weight: float) -> Learner:
    """The learner whose tasks begin at x, a tree like y, and pay weight/2 times their squared distance from it."""
    problem, test = (bilax.near_leader(problem, weight) for problem in (learner.problem, learner.test))
    return Learner(problem, test, learner.predict, learner.y0, learner.y0)


def sample(task: Episode, k: Any, way: int) -> Episode:
    """The task with other examples to learn from: the k-th sample, as large as the support, of support and queries.

    Samples have equally many examples of each class and none in common; sample 0 is the support itself, and after the
    last one they begin anew.
    """
    classes = way if _is_classification(task.support_targets) else 1

    def by_class(targets: Array) -> Array:
        order = jnp.argsort(targets, stable=True) if classes > 1 else jnp.arange(len(targets))
        return order.reshape(classes, -1)

    support, query = by_class(task.support_targets), by_class(task.query_targets)
    shots, samples = support.shape[1], 1 + query.shape[1] // support.shape[1]
    rows = jnp.concatenate([support, len(task.support) + query], 1)
    rows = jax.lax.dynamic_slice_in_dim(rows, k % samples * shots, shots, 1).reshape(-1)
    return task._replace(
        support=jnp.concatenate([task.support, task.query])[rows],
        support_targets=jnp.concatenate([task.support_targets, task.query_targets])[rows],
    )


def prototypes(network: Network, example: Array, way: int) -> Learner:
    """Classes are where their features are on average; a query belongs to the nearest. To be run by `rhg(1, 1.0)`."""

    def predict(seen: Features, y: Array, task: Episode) -> Array:
        return -jnp.sum((seen.query[:, None] - y) ** 2, axis=2)

    return _learner(predict, _distance, _features, network, _means(network, example, way))


class Relation(eqx.Module):
    """How much a query's features are related to a class's, between 0 and 1.

    Where features are small pictures of the shape `maps`, two blocks of 3 × 3 convolutions with 64 filters look at both
    together and a dense layer of 8 at what they make of it, as published; dense layers of 64 and 8 where not.
    """

    blocks: tuple[Block, ...]
    layers: Dense
    last: Linear
    maps: tuple[int, int, int] | None = eqx.field(static=True)

    def __init__(self, features: int, key: Array, maps: tuple[int, int, int] | None = None):
        keys = jax.random.split(key, 4)
        self.blocks, inputs, widths, self.maps = (), 2 * features, (64, 8), maps
        if maps is not None:
            height, width, channels = maps
            self.blocks = Block(2 * channels, 64, keys[2]), Block(64, 64, keys[3])
            inputs, widths = 64 * max(1, height // 4) * max(1, width // 4), (8,)
        self.layers = Dense(inputs, widths, keys[0])
        self.last = Linear(0.5 * jax.random.normal(keys[1], (8, 1), jnp.float32), jnp.zeros(1, jnp.float32))

    def __call__(self, query: Float[Array, "m features"], means: Float[Array, "way features"]) -> Float[Array, "m way"]:
        shape = (len(query), *means.shape)
        both = [jnp.broadcast_to(part, shape).reshape(-1, *self._maps(shape)) for part in (means[None], query[:, None])]
        pairs = jnp.concatenate(both, axis=-1)
        for block in self.blocks:
            pairs = block(pairs)
        return jax.nn.sigmoid(self.last(self.layers(pairs))).reshape(len(query), len(means))

    def _maps(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[2:] if self.maps is None else self.maps


class Related(NamedTuple):
    """What the objectives of Relation Net see."""

    support: Float[Array, "n features"]
    query: Float[Array, "m features"]
    relation: Relation


def relations(
    network: Network, example: Array, way: int, key: Array, maps: tuple[int, int, int] | None = None
) -> Learner:
    """A query belongs to the class it is most related to; trained on the squared error. To be run by `rhg(1, 1.0)`."""

    def context(x: tuple[Network, Relation], task: Episode) -> Related:
        return Related(*_features(x[0], task), x[1])

    def predict(seen: Related, y: Array, task: Episode) -> Array:
        return seen.relation(seen.query, y)

    def squared_error(scores: Array, targets: Array) -> Array:
        return jnp.mean((scores - jax.nn.one_hot(targets, way, dtype=scores.dtype)) ** 2)

    y0 = _means(network, example, way)
    x0 = (network, Relation(y0.shape[1], key, maps))
    return _learner(predict, _distance, context, x0, y0, squared_error)


class RidgeScale(NamedTuple):
    """What R2-D2 learns beside the network: the penalty's weight, and how answers become scores."""

    log_penalty: Float[Array, ""]
    factor: Float[Array, ""]
    shift: Float[Array, ""]


class Fitted(NamedTuple):
    """What the objectives of a ridge regression see."""

    support: Float[Array, "n features"]
    query: Float[Array, "m features"]
    targets: Integer[Array, " n"]
    scale: RidgeScale

    def answers(self, y: Linear) -> Float[Array, "n way"]:
        """1 for the class of an example, 0 for others."""
        return jax.nn.one_hot(self.targets, len(y.bias), dtype=self.support.dtype)


class LeastSquares(eqx.Module):
    """The follower of `ridge` is at its minimum after one step, whatever its start; to be run by `rhg(1, 1.0)`.

    (XᵀX + λI)⁻¹XᵀY = Xᵀ(XXᵀ + λI)⁻¹Y is solved in as many unknowns as there are examples, of which there are few.
    """

    def init(self, y: Linear) -> Linear:
        return y

    def step(self, k: Any, state: Linear, follower: bilax.Follower) -> Linear:
        seen: Fitted = follower.leader
        inputs = jnp.concatenate([seen.support, jnp.ones_like(seen.support[:, :1])], 1)
        gram = inputs @ inputs.T + jnp.exp(seen.scale.log_penalty) * jnp.eye(len(inputs), dtype=inputs.dtype)
        found = inputs.T @ jax.scipy.linalg.solve(gram, seen.answers(state), assume_a="pos")
        return Linear(found[:-1], found[-1])

    def point(self, state: Linear) -> Linear:
        return state

    def residual_step(self, k: Any) -> float:
        return 1.0


def ridge(network: Network, example: Array, way: int) -> Learner:
    """One linear map per task, with the least squares; to be run with the dynamics `LeastSquares`."""

    def context(x: tuple[Network, RidgeScale], task: Episode) -> Fitted:
        return Fitted(*_features(x[0], task), task.support_targets, x[1])

    def predict(seen: Fitted, y: Linear, task: Episode) -> Array:
        return seen.scale.factor * y(seen.query) + seen.scale.shift

    def lower(seen: Fitted, y: Linear, task: Episode) -> Any:
        squares = jnp.sum((y(seen.support) - seen.answers(y)) ** 2)
        return 0.5 * squares + 0.5 * jnp.exp(seen.scale.log_penalty) * sum(jnp.sum(part**2) for part in y)

    scale = RidgeScale(*(jnp.asarray(value, jnp.float32) for value in (0.0, 1.0, 0.0)))
    return _learner(predict, lower, context, (network, scale), linear(network, example, way))


def _distance(seen: Any, y: Array, task: Episode) -> Any:
    # Every class has as many examples, so the step of length 1 ends at the class means exactly.
    shots = len(task.support_targets) // len(y)
    return 0.5 * jnp.sum((seen.support - y[task.support_targets]) ** 2) / shots


def _means(network: Network, example: Array, way: int) -> Array:
    return jnp.zeros((way, jax.eval_shape(network, example).shape[1]), jnp.float32)


def linear(network: Network, example: Array, outputs: int) -> Linear:
    """The classifier that answers nothing yet."""
    features = jax.eval_shape(network, example).shape[1]
    return Linear(jnp.zeros((features, outputs), jnp.float32), jnp.zeros(outputs, jnp.float32))


def loss(predictions: Array, targets: Array) -> Float[Array, ""]:
    """Mean cross-entropy of scores (n, classes) for whole numbers (n,), else half the mean squared error."""
    if _is_classification(targets):
        return optax.softmax_cross_entropy_with_integer_labels(predictions, targets).mean()
    return 0.5 * jnp.mean((predictions - targets) ** 2)


def score(predictions: Array, targets: Array) -> Float[Array, ""]:
    """The share of right answers for whole numbers, else the mean squared error."""
    if _is_classification(targets):
        return jnp.mean(jnp.argmax(predictions, axis=1) == targets, dtype=predictions.dtype)
    return jnp.mean((predictions - targets) ** 2)


def _is_classification(targets: Array) -> bool:
    return jnp.issubdtype(targets.dtype, jnp.integer)


class Score(NamedTuple):
    """A mean over test tasks with its 95 % interval: mean ± half."""

    mean: float
    half: float
    tasks: int

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.half:.4f}"


def evaluate(
    learner: Learner, method: bilax.Method, x: PyTree, z: PyTree, batches: Iterable[tuple[Episode]], tasks: int = 600
) -> Score:
    """The score of y_K on the queries of at least `tasks` tasks, each learnt from z by `method`'s K and α.

    Neither truncation nor aggregation can be had where the queries' answers are not known.
    """
    each_task = bilax.Tasks(bilax.approximate(learner.test, unaided(method)))
    found: list[np.ndarray] = []
    for (episode,) in batches:
        found.append(np.asarray(each_task.each(x, z, episode)[0], float))
        if sum(map(len, found)) >= tasks:
            break
    return interval(np.concatenate(found))


def interval(scores: np.ndarray) -> Score:
    """The mean of the tasks' scores with its 95 % interval, by Student's t."""
    from scipy import stats  # here, for it takes two thirds of a second that no training needs

    half = stats.t.ppf(0.975, len(scores) - 1) * stats.sem(scores)
    return Score(float(scores.mean()), float(half), len(scores))


def unaided(method: bilax.Method) -> bilax.Method:
    """The method's K steps on f without what looks at F: y_K is taken, and aggregated steps become plain descent."""
    dynamics = method.dynamics
    if isinstance(dynamics, bilax.Aggregated):
        dynamics = bilax.GradientDescent(dynamics.step_size)
    start = method.start if callable(method.start) else "fixed"
    return bilax.Method(method.inner_steps, dynamics, start=start)


@eqx.filter_jit
def answers(learner: Learner, method: bilax.Method, x: PyTree, z: PyTree, task: Episode) -> Array:
    """A row of scores, or of values, for each query of one task, learnt from z; its query_targets are not looked at."""
    unknown = task._replace(query_targets=jnp.zeros_like(task.query_targets))
    y = bilax.approximate(learner.test, unaided(method))(x, z, unknown)[1].y_last
    context = learner.problem.context
    return learner.predict(x if context is None else context(x, unknown), y, unknown)


def _features(network: Network, task: Episode) -> Features:
    # Support and query go through the network together, so batch statistics are those of the whole task.
    features = network(jnp.concatenate([task.support, task.query]))
    return Features(features[: len(task.support)], features[len(task.support) :])


def _learner(
    predict: Callable[..., Array],
    lower: Callable[..., Any],
    context: Any,
    x0: PyTree,
    y0: PyTree,
    loss: Callable[[Array, Array], Array] = loss,
) -> Learner:
    def upper(seen: Any, y: Any, task: Episode) -> Any:
        return loss(predict(seen, y, task), task.query_targets)

    def test(seen: Any, y: Any, task: Episode) -> Any:
        return score(predict(seen, y, task), task.query_targets)

    problem = bilax.Problem(upper, lower, context=context)
    return Learner(problem, dataclasses.replace(problem, upper=test), predict, x0, y0)
