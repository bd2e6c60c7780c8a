"""Few-shot learning: tasks are a mean of φ, learners agree with naive ones, gradients with finite differences."""

import dataclasses
import functools
import itertools
import json
import pickle
import shutil
import signal
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
from PIL import Image, ImageOps
from sklearn.linear_model import Ridge

import bilax
from bilax.app import cli
from bilax.datasets import DATA_SETS, DataError
from bilax.datasets.episodes import Episode, Episodes, Sinusoids
from bilax.datasets.omniglot import SMALL
from bilax.experiments.few_shot import learners as few_shot
from bilax.experiments.few_shot.learners import (
    LeastSquares,
    Linear,
    LqPenalty,
    Relation,
    evaluate,
    heads,
    networks,
    prototypes,
    relations,
    ridge,
)
from bilax.experiments.few_shot.run import FewShot, load_learned, save_learned
from bilax.experiments.few_shot.table_2 import METHODS as TABLE_2
from bilax.experiments.few_shot.table_2 import Table2
from bilax.experiments.few_shot.trained import load_trained, omniglot_runs, start_for
from bilax.experiments.few_shot.truncation import Truncation
from bilax.experiments.runner import End, Experiment
from bilax.gradient.tasks import tasks_at_once
from bilax.models import ConvNet4, Dense, ResNet12
from tests.test_episodes import archive, drawing, mini, one_shot_runs

WAY, SHOTS, QUERIES, TASKS = 3, 2, 4, 3
KEY = jax.random.key(1)


def double(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, float), tree)


def random_tasks(shape: tuple[int, ...] = (4,), seed: int = 0, tasks: int = TASKS) -> Episode:
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(tasks, WAY, 1, *shape))

    def part(each):
        x = centres + 0.7 * draw.normal(size=(tasks, WAY, each, *shape))
        return x.reshape(tasks, WAY * each, *shape), np.tile(np.repeat(np.arange(WAY), each), (tasks, 1))

    return Episode(*part(SHOTS), *part(QUERIES))


def network(seed: int = 0) -> Dense:
    return double(Dense(4, (6, 5), jax.random.key(seed)))


def task(episode: Episode, i: int) -> Episode:
    return Episode(*(jnp.asarray(field[i]) for field in episode))


def mean(trees: Iterable[Any]) -> Any:
    """The mean over the tasks, of as many trees."""
    return jax.tree.map(lambda *leaves: sum(leaves) / TASKS, *trees)


def moved(tree: Any, seed: int = 0) -> Any:
    """Another point near by, so that nothing is at zero."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + 0.3 * draw.normal(size=leaf.shape), tree)


def learner_of(kind: str, penalty=few_shot.no_penalty, body: Any = None, shape: tuple[int, ...] = (4,)):
    body = network() if body is None else body
    example = jnp.zeros((2, *shape))
    if kind == "prototypes":
        found = prototypes(body, example, WAY)
    elif kind in ("relations", "ridge"):
        found = relations(body, example, WAY, KEY) if kind == "relations" else ridge(body, example, WAY)
        found = found._replace(x0=double(found.x0))
    else:
        found = {"heads": heads, "networks": networks}[kind](body, example, WAY, penalty)
    return found._replace(y0=double(found.y0))


METHODS = {
    "protonet": ("prototypes", bilax.rhg(1, 1.0)),
    "relation-net": ("relations", bilax.rhg(1, 1.0)),
    "ridge": ("ridge", bilax.rhg(1, 1.0, dynamics=LeastSquares())),
    "rhg": ("heads", bilax.rhg(4, 0.1)),
    "t-rhg": ("heads", bilax.t_rhg(4, 0.1, 2)),
    "bda": ("heads", bilax.bda(4, 0.1)),
    "ia-gm": ("heads", bilax.ia_gm(4, 0.1)),
    "iaptt-gm": ("heads", bilax.iaptt_gm(4, 0.1)),
    "maml": ("networks", bilax.maml(3, 0.1)),
    "fomaml": ("networks", bilax.fomaml(3, 0.1)),
    "reptile": ("networks", bilax.reptile(3, 0.1)),
}


@eqx.filter_jit
def gradients(phi, x, z, episode):
    return jax.value_and_grad(phi, (0, 1), has_aux=True)(x, z, episode)


def assert_trees_close(a, b, **options):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, **options)


# tasks


@pytest.mark.parametrize("at_once", [1, TASKS])
@pytest.mark.parametrize("name", ["rhg", "iaptt-gm", "maml"])
def test_tasks_equal_a_loop_over_tasks(name, at_once, monkeypatch):
    kind, method = METHODS[name]
    learner, episode = learner_of(kind), random_tasks()
    phi = bilax.approximate(learner.problem, method)
    z = moved(learner.y0)
    size = sum(np.asarray(leaf[0]).nbytes for leaf in episode)
    monkeypatch.setattr("bilax.gradient.tasks.AT_ONCE_BYTES", size * at_once)
    assert tasks_at_once(episode) == at_once
    tasks = jax.jit(jax.value_and_grad(bilax.Tasks(phi), (0, 1), has_aux=True))
    (value, info), found = tasks(learner.x0, z, episode)
    np.testing.assert_allclose(value, jax.jit(bilax.Tasks(phi))(learner.x0, z, episode)[0], rtol=1e-12)
    each = [gradients(phi, learner.x0, z, task(episode, i)) for i in range(TASKS)]
    np.testing.assert_allclose(value, np.mean([one[0][0] for one in each]), rtol=1e-12)
    assert_trees_close(found, mean(one[1] for one in each), rtol=1e-9, atol=1e-12)
    assert_trees_close(info.y, jax.tree.map(lambda *leaves: jnp.stack(leaves), *(one[0][1].y for one in each)))
    np.testing.assert_allclose(info.k_bar, np.mean([one[0][1].k_bar for one in each]))


@pytest.mark.parametrize(("bytes_at_once", "expected"), [(1, 1), (47, 2), (48, 3), (95, 3), (96, 6), (1 << 20, 6)])
def test_on_cpu_so_many_tasks_go_side_by_side_as_fit_and_divide_their_number(bytes_at_once, expected, monkeypatch):
    monkeypatch.setattr("bilax.gradient.tasks.AT_ONCE_BYTES", bytes_at_once)
    assert tasks_at_once((np.zeros((6, 2), np.float32), np.zeros((6, 1, 2), np.float32))) == expected


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_tasks_have_a_derivative_in_their_own_data(at_once, monkeypatch):
    problem = bilax.Problem(lambda x, y, a, n: (y - x) ** 2 * n, lambda x, y, a, n: 0.5 * (y - a * x) ** 2)
    phi, weights = bilax.approximate(problem, bilax.rhg(3, 0.2)), jnp.arange(1, 5)
    a = jnp.array([0.5, 2.0, -1.0, 3.0])
    monkeypatch.setattr("bilax.gradient.tasks.AT_ONCE_BYTES", at_once * (a.nbytes + weights.nbytes) // 4)

    def loop(x, z, a):
        return sum(phi(x, z, a[i], weights[i])[0] for i in range(4)) / 4

    for argument in ((0, 1, 2), (2,), (1,)):
        found = jax.grad(bilax.Tasks(phi), argument, has_aux=True)(1.5, 0.3, a, weights)[0]
        assert_trees_close(found, jax.grad(loop, argument)(1.5, 0.3, a), rtol=1e-12)


def test_each_task_has_its_own_k_bar():
    learner, episode = learner_of("heads"), random_tasks(seed=3, tasks=12)
    z, steps = double(moved(learner.y0, 2)), 6
    method = bilax.iaptt_gm(steps, 0.8)
    phi = bilax.approximate(learner.problem, method)
    found = jax.jit(jax.vmap(lambda one: phi(learner.x0, z, one)[1].k_bar))(episode)

    @jax.jit
    def values(one):
        seen, y, values = learner.problem.view(learner.x0, one), z, []
        for _ in range(steps):
            slope = jax.grad(lambda y: learner.problem.lower(seen, y, one))(y)
            y = jax.tree.map(lambda a, g: a - 0.8 * g, y, slope)
            values.append(learner.problem.upper(seen, y, one))
        return jnp.stack(values)

    naive = [1 + int(np.argmax(values(task(episode, i)))) for i in range(12)]
    assert found.tolist() == naive
    assert len(set(naive)) > 1


def test_solve_with_tasks_takes_the_steps_of_a_plain_loop():
    learner, method = learner_of("heads"), bilax.iaptt_gm(3, 0.1)
    batches = [(random_tasks(seed=i),) for i in range(4)]
    solution = bilax.solve(
        learner.problem, method, learner.x0, learner.y0, steps=4, optimizer=optax.sgd(0.1), data=batches, tasks=True
    )
    phi, x, z = bilax.approximate(learner.problem, method), learner.x0, learner.y0
    for (episode,) in batches:
        slope = mean(gradients(phi, x, z, task(episode, i))[1] for i in range(TASKS))
        x, z = jax.tree.map(lambda a, g: a - 0.1 * g, (x, z), slope)
    assert_trees_close((solution.x, solution.z), (x, z), rtol=1e-9, atol=1e-12)
    assert solution.y.weight.shape == (TASKS, *learner.y0.weight.shape)
    assert solution.history.k_bar.shape == (4,)


@pytest.mark.parametrize(
    ("data", "method", "reason"),
    [
        ((jnp.zeros((3, 2)), jnp.zeros((4, 2))), bilax.rhg(1, 0.1), "one common leading axis"),
        ((jnp.zeros(()),), bilax.rhg(1, 0.1), "one common leading axis"),
        ((), bilax.rhg(1, 0.1), "one common leading axis"),
        ((jnp.zeros((3, 2)),), bilax.rhg(1, 0.1, start="warm"), 'start="warm" goes on from the last y_K'),
    ],
)
def test_data_without_tasks_are_refused(data, method, reason):
    problem = bilax.Problem(lambda x, y, *data: y**2 + x, lambda x, y, *data: (y - x) ** 2)
    with pytest.raises(ValueError, match=reason):
        bilax.solve(problem, method, 1.0, 1.0, steps=1, data=data, tasks=True)


# gradients


@pytest.mark.parametrize(
    ("name", "penalty"),
    [
        ("rhg", few_shot.no_penalty),
        ("rhg", LqPenalty(weight=0.3)),
        ("bda", LqPenalty(epsilon=0.1, weight=0.1, elementwise=True)),
        ("iaptt-gm", LqPenalty(weight=0.3)),
        ("maml", few_shot.no_penalty),
        ("maml", LqPenalty(weight=0.3)),
        ("protonet", few_shot.no_penalty),
        ("relation-net", few_shot.no_penalty),
        ("ridge", few_shot.no_penalty),
    ],
)
def test_gradients_agree_with_finite_differences(name, penalty):
    kind, method = METHODS[name]
    learner, episode = learner_of(kind, penalty), random_tasks()
    phi = bilax.Tasks(bilax.approximate(learner.problem, method))
    check_directions(phi, learner.x0, moved(learner.y0), episode)


@pytest.mark.parametrize("kind", ["heads", "networks"])
def test_gradients_through_convolutions_agree_with_finite_differences(kind):
    body = double(ConvNet4(1, 2, KEY))
    learner, episode = learner_of(kind, body=body, shape=(4, 4, 1)), random_tasks((4, 4, 1), tasks=2)
    phi = bilax.Tasks(bilax.approximate(learner.problem, bilax.ia_gm(1, 0.1)))
    check_directions(phi, learner.x0, moved(learner.y0), episode)


def check_directions(phi, x, z, episode):
    _, slope = gradients(phi, x, z, episode)
    draw, h = np.random.default_rng(5), 1e-6
    for _ in range(3):
        way = jax.tree.map(lambda leaf: jnp.asarray(draw.normal(size=leaf.shape)), (x, z))
        ahead, behind = (jax.tree.map(lambda a, d, s=s: a + s * h * d, (x, z), way) for s in (1, -1))
        # The program that gave the gradient tells the values, too: `test_tasks_equal_a_loop_over_tasks` compares them
        # with those of a program without derivatives.
        above, below = (gradients(phi, x, z, episode)[0][0] for x, z in (ahead, behind))
        numeric = (above - below) / (2 * h)
        exact = optax.tree.vdot(slope, way)
        assert abs(exact) > 1e-3
        np.testing.assert_allclose(exact, numeric, rtol=1e-5)


# learners against naive ones


def test_prototypical_net_is_the_naive_one():
    learner, episode = learner_of("prototypes"), random_tasks()

    @jax.jit
    @jax.value_and_grad
    def naive(body, one):
        total, support, query = 0.0, body(one.support), body(one.query)
        centres = [support[c * SHOTS : (c + 1) * SHOTS].mean(0) for c in range(WAY)]
        for features, label in zip(query, one.query_targets, strict=True):
            nearness = jnp.stack([-((features - centre) ** 2).sum() for centre in centres])
            total -= (nearness - jnp.log(jnp.exp(nearness).sum()))[label] / len(query)
        return total

    expected, expected_slope = mean(naive(learner.x0, task(episode, i)) for i in range(TASKS))
    phi = bilax.Tasks(bilax.approximate(learner.problem, METHODS["protonet"][1]))
    for z in (learner.y0, moved(learner.y0)):  # the start must not matter
        (value, _), (slope, _) = gradients(phi, learner.x0, z, episode)
        np.testing.assert_allclose(value, expected, rtol=1e-10)
        assert_trees_close(slope, expected_slope, rtol=1e-8, atol=1e-10)


def test_relation_net_is_the_naive_one():
    learner, episode = learner_of("relations"), random_tasks()
    body, relation = learner.x0[0], jax.tree.map(np.asarray, learner.x0[1])
    total = 0.0
    for i in range(TASKS):
        one = task(episode, i)
        support, query, labels = (np.asarray(a) for a in (body(one.support), body(one.query), one.query_targets))
        for features, label in zip(query, labels, strict=True):
            for c in range(WAY):
                pair = np.concatenate([support[c * SHOTS : (c + 1) * SHOTS].mean(0), features])
                for weight, bias in relation.layers.layers:
                    pair = np.maximum(pair @ weight + bias, 0)
                said = 1 / (1 + np.exp(-(pair @ relation.last.weight + relation.last.bias)[0]))
                total += (said - (label == c)) ** 2 / (len(query) * WAY * TASKS)
    phi = bilax.Tasks(bilax.approximate(learner.problem, METHODS["relation-net"][1]))
    np.testing.assert_allclose(phi(learner.x0, moved(learner.y0), episode)[0], total, rtol=1e-10)


def test_relation_net_compares_small_pictures_by_convolutions():
    relation = double(Relation(6 * 7 * 2, KEY, (6, 7, 2)))
    draw = np.random.default_rng(0)
    query, means = (jnp.asarray(draw.normal(size=(n, 6 * 7 * 2))) for n in (4, 3))
    pairs = jnp.stack([
        jnp.concatenate([means[c].reshape(6, 7, 2), query[i].reshape(6, 7, 2)], 2) for i in range(4) for c in range(3)
    ])  # fmt: skip
    for block in relation.blocks:  # 6 × 7 becomes 3 × 3 and then 1 × 1
        height, width = pairs.shape[1:3]
        padded = np.pad(pairs, ((0, 0), (1, 1), (1, 1), (0, 0)))
        near = [padded[:, a : a + height, b : b + width] for a in range(3) for b in range(3)]
        found = np.concatenate(near, 3) @ np.asarray(block.convolution.kernel).reshape(-1, 64)
        rows, columns = height // 2, width // 2
        found = found[:, : 2 * rows, : 2 * columns].reshape(-1, rows, 2, columns, 2, 64).max((2, 4))
        found = np.maximum(found + np.asarray(block.bias), 0)
        mean, variance = found.mean((0, 1, 2)), found.var((0, 1, 2))
        pairs = (found - mean) / np.sqrt(variance + 1e-5)
    (weight, bias), *_ = relation.layers.layers
    last = np.maximum(pairs.reshape(12, -1) @ weight + bias, 0) @ relation.last.weight + relation.last.bias
    np.testing.assert_allclose(relation(query, means).reshape(-1), (1 / (1 + np.exp(-last)))[:, 0], rtol=1e-6)


def test_the_ridge_head_is_scikit_learns():
    learner, episode = learner_of("ridge"), random_tasks()
    body, scale = learner.x0
    x = body, scale._replace(log_penalty=jnp.asarray(0.7), factor=jnp.asarray(2.0), shift=jnp.asarray(0.3))
    total = 0.0
    for i in range(TASKS):
        one = task(episode, i)
        support, query = (np.asarray(body(part)) for part in (one.support, one.query))
        ones = np.ones((len(support), 1)), np.ones((len(query), 1))
        model = Ridge(np.exp(0.7), fit_intercept=False).fit(
            np.hstack([support, ones[0]]), np.eye(WAY)[one.support_targets]
        )
        scores = 2.0 * model.predict(np.hstack([query, ones[1]])) + 0.3
        total -= np.mean(scipy.special.log_softmax(scores, 1)[np.arange(len(query)), one.query_targets]) / TASKS
    phi = bilax.Tasks(bilax.approximate(learner.problem, METHODS["ridge"][1]))
    np.testing.assert_allclose(phi(x, moved(learner.y0), episode)[0], total, rtol=1e-9)


def naive_adaptation(z, one: Episode, steps: int = 3, rate: float = 0.1):
    """K plain steps on the support set's cross-entropy, written out."""

    def cross_entropy(y, x, labels):
        body, head = y
        scores = body(x) @ head.weight + head.bias
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1))

    y = z
    for _ in range(steps):
        slope = jax.grad(cross_entropy)(y, one.support, one.support_targets)
        y = jax.tree.map(lambda a, g: a - rate * g, y, slope)

    def judge(y):
        body, head = y
        features = body(jnp.concatenate([one.support, one.query]))[len(one.support) :]
        scores = features @ head.weight + head.bias
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), one.query_targets[:, None], 1))

    return y, judge


def naive_slope(name: str, z, one: Episode):
    y, judge = naive_adaptation(z, one)
    if name == "maml":

        def whole(z):
            y, judge = naive_adaptation(z, one)
            return judge(y)

        return jax.grad(whole)(z)
    return jax.grad(judge)(y) if name == "fomaml" else jax.tree.map(jnp.subtract, z, y)


@pytest.mark.parametrize("name", ["maml", "fomaml", "reptile"])
def test_maml_and_its_kin_are_the_naive_ones(name):
    kind, method = METHODS[name]
    learner, episode = learner_of(kind), random_tasks()
    z = moved(learner.y0)
    (value, _), (_, slope) = gradients(bilax.Tasks(bilax.approximate(learner.problem, method)), learner.x0, z, episode)

    @jax.jit
    def naive(z, one):
        y, judge = naive_adaptation(z, one)
        return judge(y), naive_slope(name, z, one)

    expected, expected_slope = mean(naive(z, task(episode, i)) for i in range(TASKS))
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    assert_trees_close(slope, expected_slope, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", ["meta-sgd", "maml-pp", "t-net", "imaml"])
def test_learned_steps_begin_as_those_of_maml_and_are_learned(name):
    config = FewShot(method=name, dataset="sinusoid", inner_steps=2, step_size=0.05, shots=4, queries=4)
    learner, method = config.learner(0), config.make_method()
    (task,) = next(iter(config.batches("train", 0, 2)))
    found = bilax.Tasks(bilax.approximate(learner.problem, few_shot.unaided(method))).each(learner.x0, learner.y0, task)
    plain = dataclasses.replace(config, method="maml").learner(0)
    maml = bilax.Tasks(bilax.approximate(plain.problem, bilax.rhg(2, 0.05))).each((), plain.y0, task)
    if name != "imaml":  # whose steps are those of another f
        np.testing.assert_allclose(found[0], maml[0], rtol=1e-5)
    ended = bilax.solve(learner.problem, method, learner.x0, learner.y0, data=(task,), tasks=True, steps=2)
    moved = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()), *(eqx.filter(x, eqx.is_array) for x in (ended.x, learner.x0))
    )
    assert all(distance > 0 for distance in jax.tree.leaves(moved))
    assert few_shot.answers(learner, method, ended.x, ended.z, jax.tree.map(lambda leaf: leaf[0], task)).shape == (4, 1)


def test_reptile_alone_adapts_to_samples_of_the_task_and_in_training_alone():
    learner, one = FewShot(method="reptile", filters=2, way=3).learner(0), task(random_tasks((8, 8, 1)), 0)
    y = moved(learner.y0)
    assert learner.test.lower_at is None
    assert FewShot(method="maml", filters=2, way=3).learner(0).problem.lower_at is None

    @jax.jit
    def values(k):
        return learner.problem.follower((), (one,), k).lower(y), learner.test.lower((), y, few_shot.sample(one, k, 3))

    for found, expected in (values(k) for k in range(4)):
        assert found == expected


@pytest.mark.parametrize(("shots", "queries", "samples"), [(1, 3, 4), (2, 5, 3), (3, 2, 1)])
def test_samples_of_a_task_have_all_classes_and_nothing_in_common(shots, queries, samples):
    way, rng = 4, np.random.default_rng(0)
    support, query = (jnp.asarray(rng.permutation(np.repeat(np.arange(way), n))) for n in (shots, queries))
    numbers = jnp.arange(way * (shots + queries))
    whole = Episode(numbers[: len(support)], support, numbers[len(support) :], query)
    labels = dict(zip(numbers.tolist(), np.concatenate([support, query]), strict=True))
    seen = []
    for k in range(samples):
        found = few_shot.sample(whole, jnp.asarray(k), way)
        assert [labels[int(i)] for i in found.support] == found.support_targets.tolist()
        np.testing.assert_array_equal(np.bincount(found.support_targets), np.full(way, shots))
        np.testing.assert_array_equal(found.query, whole.query)
        seen += found.support.tolist()
    assert len(set(seen)) == len(seen) == samples * way * shots
    assert set(seen[: way * shots]) == set(whole.support.tolist())
    again = few_shot.sample(whole, samples, way)
    assert again.support.tolist() == seen[: way * shots]


def test_samples_of_a_regression_are_rows():
    whole = Episode(*(jnp.arange(float(n))[:, None] for n in (2, 2, 5, 5)))
    for k, rows in enumerate([[0, 1], [0, 1], [2, 3], [0, 1]]):
        found = few_shot.sample(whole, k, 1)
        np.testing.assert_array_equal(found.support[:, 0], rows)
        np.testing.assert_array_equal(found.support_targets[:, 0], rows)


def test_the_representation_is_computed_once_whatever_k_is():
    episode = task(random_tasks(), 0)

    def uses_of_the_network(steps):
        learner = learner_of("heads")
        phi = bilax.approximate(learner.problem, bilax.iaptt_gm(steps, 0.1))
        text = str(jax.make_jaxpr(jax.value_and_grad(lambda x: phi(x, learner.y0, episode)[0]))(learner.x0))
        # The first layer's product (18 inputs of 4 numbers, 6 units) stands outside every loop.
        return text.count("f64[18,6] = dot_general")

    assert uses_of_the_network(1) == uses_of_the_network(7) >= 1


# penalty, loss, score


def test_the_penalty_is_the_footnotes():
    head = Linear(jnp.array([[3.0], [0.0]]), jnp.array([4.0]))
    np.testing.assert_allclose(LqPenalty(0.5, 0.1, 2.0)(head), 2 * (5 + 0.1) ** 0.25)
    expected = sum((w**2 + 0.01) ** 0.25 for w in (3.0, 0.0, 4.0))
    np.testing.assert_allclose(LqPenalty(0.5, 0.1, elementwise=True)(head), expected)
    zero = jax.tree.map(jnp.zeros_like, head)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(jax.grad(LqPenalty())(zero)))
    for name, wrong in (("q", (1.0, 0.1, 1.0)), ("epsilon", (0.5, 0.0, 1.0)), ("weight", (0.5, 0.1, -1.0))):
        with pytest.raises(ValueError, match=f"{name} must"):
            LqPenalty(*wrong)


def test_losses_and_scores_follow_the_targets():
    scores = jnp.array([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
    labels = jnp.array([1, 0, 0])
    np.testing.assert_allclose(few_shot.score(scores, labels), 2 / 3, rtol=1e-6)
    expected = np.mean([np.log1p(np.exp(-1)), np.log1p(np.exp(-2)), np.log1p(np.exp(3))])
    np.testing.assert_allclose(few_shot.loss(scores, labels), expected)
    values = jnp.array([[1.0], [3.0]])
    np.testing.assert_allclose(few_shot.loss(values, jnp.zeros((2, 1))), 2.5)
    np.testing.assert_allclose(few_shot.score(values, jnp.zeros((2, 1))), 5.0)


def test_evaluation_is_the_mean_over_tasks_with_its_interval():
    learner, method = learner_of("networks"), METHODS["maml"][1]
    batches = [(random_tasks(seed=i),) for i in range(5)]
    found = evaluate(learner, method, (), learner.y0, batches, tasks=10)
    each = []
    for (episode,) in batches[:4]:
        for i in range(TASKS):
            (body, head), _ = naive_adaptation(learner.y0, task(episode, i))
            answers = np.argmax(body(task(episode, i).query) @ head.weight + head.bias, axis=1)
            each.append(np.mean(answers == episode.query_targets[i]))
    assert found.tasks == 12
    np.testing.assert_allclose(found.mean, np.mean(each))
    np.testing.assert_allclose(found.half, 2.200985 * np.std(each, ddof=1) / np.sqrt(12), rtol=1e-6)  # t of 11


@pytest.mark.parametrize(
    ("method", "same"),
    [
        (bilax.bda(4, 0.1, mu=0.9), bilax.rhg(4, 0.1)),
        (bilax.iaptt_gm(4, 0.1), bilax.rhg(4, 0.1)),
        (bilax.ia_gm_a(4, 0.1), bilax.rhg(4, 0.1, dynamics=bilax.Nesterov(0.1))),
    ],
)
def test_evaluation_learns_as_in_training_but_nothing_from_the_answers(method, same):
    learner, one = learner_of("heads"), task(random_tasks(seed=7), 0)
    told = bilax.approximate(learner.problem, same)(learner.x0, learner.y0, one)[1].y_last
    expected = learner.predict(learner.problem.view(learner.x0, one), told, one)
    np.testing.assert_allclose(few_shot.answers(learner, method, learner.x0, learner.y0, one), expected, rtol=1e-9)
    batches = [(random_tasks(seed=7),)]
    assert evaluate(learner, method, learner.x0, learner.y0, batches) == evaluate(
        learner, same, learner.x0, learner.y0, batches
    )


def test_training_on_sinusoids_learns_to_fit_new_ones():
    learner = heads(Dense(1, (40, 40), KEY, size=5.0), jnp.zeros((2, 1), jnp.float32), 1)
    method, test = bilax.ia_gm(5, 0.1), Sinusoids(tasks=100, seed=9)
    before = evaluate(learner, method, learner.x0, learner.y0, test, 100)
    solution = bilax.solve(
        learner.problem, method, learner.x0, learner.y0, steps=600, optimizer=optax.adam(3e-3),
        data=itertools.islice(Sinusoids(tasks=8), 600), tasks=True,
    )  # fmt: skip
    after = evaluate(learner, method, solution.x, solution.z, test, 100)
    assert after.mean + after.half < 0.6 * before.mean


# the command line


def made_tiered(folder: Path) -> Path:
    draw = np.random.default_rng(0)
    for part in ("train", "val", "test"):
        files = []
        for picture in draw.integers(0, 256, (12, 16, 16, 3)).astype(np.uint8):
            path = folder / "one.png"
            Image.fromarray(picture).save(path)
            files.append(np.frombuffer(path.read_bytes(), np.uint8))
        (folder / f"{part}_images_png.pkl").write_bytes(pickle.dumps(files))
        labels = {"label_specific": np.arange(12) // 4}
        (folder / f"{part}_labels.pkl").write_bytes(pickle.dumps(labels))
    return folder


def few_shot_command(*words):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "few-shot", *map(str, words)])
    return ended.value.code


def test_made_files_of_tiered_imagenets_format_run_end_to_end(tmp_path, capsys):
    out = tmp_path / "run"
    code = few_shot_command(
        "--dataset", "tiered-imagenet", "--folder", made_tiered(tmp_path), "--method", "iaptt-gm",
        "--filters", 2, "--way", 3, "--queries", 2, "--outer-steps", 1, "--test-tasks", 20, "--inner-steps", 2,
        "--out", out, "--json",
    )  # fmt: skip
    assert code == 0
    result = json.loads((out / "result.json").read_text())
    assert result["measures"]["test tasks"] == 20
    assert 0 <= result["measures"]["test accuracy"] <= 1
    assert json.loads(capsys.readouterr().out)["0"]["steps"] == 1


METHODS_ON_FILES = sorted({each["method"] for each in TABLE_2.values()} | {"ridge"})


@pytest.mark.parametrize(
    ("method", "dataset", "backbone"),
    [
        *((method, "tiered-imagenet", "convnet4") for method in METHODS_ON_FILES),
        # Whole networks as followers take minutes to compile for this one; `test_runs_of_all_kinds` has protonet on it.
        ("iaptt-gm", "mini-imagenet", "resnet12"),
    ],
)
def test_every_method_takes_a_step_on_made_files_of_both_formats(method, dataset, backbone, tmp_path, monkeypatch):
    def shallow(make, *arguments, **options):
        """The first of the blocks, or the two that Relation Net needs: they take a fraction of the time to compile."""
        whole = make(*arguments, **options)
        less = eqx.tree_at(lambda n: n.blocks, whole, whole.blocks[: 1 + (method == "relation-net")])
        return less if make is ConvNet4 else eqx.tree_at(lambda n: n.last, less, ())

    for make in (ConvNet4, ResNet12):
        monkeypatch.setattr(f"bilax.experiments.few_shot.run.{make.__name__}", functools.partial(shallow, make))
    folder = {"mini-imagenet": mini, "tiered-imagenet": made_tiered}[dataset](tmp_path)
    config = FewShot(
        method=method, dataset=dataset, folder=folder, backbone=backbone, filters=2, way=3, queries=2, inner_steps=2
    )
    setup = config.setup(0)
    solution = bilax.solve(
        setup.problem, config.make_method(), setup.x0, setup.y0, data=setup.data, tasks=True, steps=2,
        optimizer=optax.adam(1e-3),
    )  # fmt: skip
    assert solution.status is bilax.Status.step_limit
    start, end = jax.tree.leaves((setup.x0, setup.y0)), jax.tree.leaves((solution.x, solution.z))
    assert any(not np.array_equal(a, b) for a, b in zip(start, end, strict=True))


def made_omniglot(folder: Path) -> Path:
    folder.mkdir()
    alphabets = ("Greek", "Tagalog", "Early_Aramaic", "Latin")
    names = [f"{a}/character0{i}/0{i}_0{j}.png" for a in alphabets for i in (1, 2, 3) for j in (1, 2, 3)]
    archive(folder / SMALL[0], {name: drawing() for name in names[:18]})
    archive(folder / SMALL[1], {name: drawing() for name in names[18:]})
    archive(folder / "all_runs.zip", one_shot_runs())
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "--dataset mini-imagenet --folder {mini} --backbone resnet12 --way 3 --method protonet",
        "--dataset mini-imagenet --folder {mini} --way 3 --method ia-gm --penalty footnote --distortions",
        "--method relation-net",
        "--dataset sinusoid --shots 5 --queries 5 --method maml --penalty elementwise",
        "--dataset sinusoid --shots 5 --queries 5 --method anil",
        "--dataset sinusoid --shots 5 --queries 5 --method bda",
        "--dataset sinusoid --shots 5 --queries 5 --method reptile",
    ],
)
def test_runs_of_all_kinds_end_with_a_score(words, tmp_path):
    (tmp_path / "mini").mkdir()
    sinusoids = "sinusoid" in words
    sizes = ["--inner-steps", 2, "--outer-steps", 2, "--validate-every", 1, "--validation-tasks", 20]
    sizes += ["--test-tasks", 20, "--out", tmp_path / "run", "--json"]
    sizes += [] if sinusoids else ["--filters", 2, "--queries", 2]
    assert few_shot_command(*words.format(mini=mini(tmp_path / "mini")).split(), *sizes) == 0
    measures = json.loads((tmp_path / "run" / "result.json").read_text())["measures"]
    score = measures["test error" if sinusoids else "test accuracy"]
    assert score > 0 if sinusoids else 0 <= score <= 1
    seen = dict(json.loads((tmp_path / "run" / "result.json").read_text())["validation"])
    assert set(seen) == {1, 2}
    assert all(value > 0 if sinusoids else 0 <= value <= 1 for value in seen.values())  # errors, or accuracies


def test_omniglots_official_test_is_run(tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    code = few_shot_command(
        "--dataset", "omniglot", "--folder", made_omniglot(tmp_path / "data"), "--rotations", "--distortions",
        "--method", "protonet", "--filters", 2, "--way", 3, "--queries", 2, "--outer-steps", 1, "--test-tasks", 20,
        "--out", out, "--json",
    )  # fmt: skip
    assert code == 0
    capsys.readouterr()
    cli.main(["evaluate", str(out), "--omniglot-runs"])
    found = omniglot_runs(load_trained(out))
    assert found.tasks == 2
    assert f"{found.mean:.4f}" in capsys.readouterr().out
    # The test's own file is all that it needs, wherever it is now.
    (tmp_path / "moved").mkdir()
    shutil.move(tmp_path / "data" / "all_runs.zip", tmp_path / "moved")
    monkeypatch.delenv("BILAX_DATA", raising=False)
    with pytest.raises(SystemExit, match=r"Put all_runs\.zip in a folder and name it with --folder"):
        cli.main(["evaluate", str(out), "--omniglot-runs"])
    cli.main(["evaluate", str(out), "--omniglot-runs", "--folder", str(tmp_path / "moved")])
    assert f"{found.mean:.4f}" in capsys.readouterr().out
    # Files of one's own are ink on paper, as those of training were, or chalk on a blackboard.
    paper, board = tmp_path / "paper.png", tmp_path / "board.png"
    paper.write_bytes(drawing())
    with Image.open(paper) as picture:
        ImageOps.invert(picture.convert("L")).save(board)
    ink, chalk = load_trained(out).read([paper, board])
    assert ink.mean() < 0.3 * 255
    np.testing.assert_array_equal(ink, chalk)


def test_a_folder_that_cannot_be_read_is_told(tmp_path, capsys, monkeypatch):
    def forbidden(*arguments, **options):
        raise PermissionError("no permission to read characters")

    monkeypatch.setitem(DATA_SETS, "omniglot", dataclasses.replace(DATA_SETS["omniglot"], files=(), classes=forbidden))
    assert few_shot_command("--dataset", "omniglot", "--out", tmp_path / "run") == 2
    assert "bilax run few-shot: no permission to read characters" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_a_picture_that_breaks_on_the_way_is_told(part, tmp_path, capsys):
    folder = made_tiered(tmp_path)
    path = folder / f"{part}_images_png.pkl"
    files = pickle.loads(path.read_bytes())
    for i in range(1, 12):  # whole by their ends, and broken inside
        files[i] = np.concatenate([files[i][:40], files[i][60:]])
    path.write_bytes(pickle.dumps(files))
    code = few_shot_command(
        "--dataset", "tiered-imagenet", "--folder", folder, "--filters", 2, "--way", 3, "--queries", 2,
        "--outer-steps", 2, "--validate-every", 1, "--validation-tasks", 20, "--test-tasks", 20, "--inner-steps", 2,
        "--out", tmp_path / "run", "--json",
    )  # fmt: skip
    assert code == 2
    assert "cannot be read as PNG" in capsys.readouterr().err


def test_a_picture_that_breaks_late_is_told(tmp_path, capsys, monkeypatch):
    whole = Episodes.batch

    def batch(self, index):
        if index == 5:
            raise DataError("picture 7 cannot be read")
        return whole(self, index)

    monkeypatch.setattr(Episodes, "batch", batch)
    words = ("--method", "protonet", "--filters", 2, "--queries", 2, "--outer-steps", 9, "--out", tmp_path, "--json")
    assert few_shot_command(*words) == 2
    assert "bilax run few-shot: picture 7 cannot be read" in capsys.readouterr().err


def test_a_run_is_evaluated_and_goes_on_with_its_own_pictures_only(tmp_path, capsys):
    out, folder = tmp_path / "run", tmp_path / "pictures"
    for i in range(9):
        (folder / f"kind{i}").mkdir(parents=True)
        for j in range(3):
            Image.fromarray(np.full((9, 7, 3), 20 * i + j, np.uint8)).save(folder / f"kind{i}" / f"{j}.png")
    words = (
        "--dataset", "folder", "--folder", folder, "--method", "protonet", "--filters", 2, "--way", 2, "--queries", 2,
        "--test-tasks", 20, "--out", out, "--json",
    )  # fmt: skip
    assert few_shot_command(*words, "--outer-steps", 1) == 0
    cli.main(["evaluate", str(out), "--tasks", "20"])
    shutil.copytree(folder / "kind0", folder / "another")  # which moves classes between the parts
    with pytest.raises(SystemExit, match="trained on other pictures or classes"):
        cli.main(["evaluate", str(out), "--tasks", "20"])
    capsys.readouterr()
    assert few_shot_command(*words, "--outer-steps", 2, "--resume") == 2
    assert "data_tag: begun with" in capsys.readouterr().err
    shutil.rmtree(folder)
    assert load_trained(out).shape == (84, 84, 3)  # to adapt, what it was trained on is not needed


# what is learned, and its use


TINY: dict[str, Any] = {
    "dataset": "digits", "method": "protonet", "filters": 2, "queries": 2, "rate": 0.05, "validation_tasks": 20,
    "test_tasks": 20, "json": True,
}  # fmt: skip
PROBLEMS: dict[Any, few_shot.Learner] = {}
OPTIMIZERS: dict[Any, optax.GradientTransformation] = {}


@pytest.fixture
def compiled_once(monkeypatch):
    """Runs share what is compiled: of the same settings they get the same functions, not only equal ones."""
    learner, optimizer = FewShot.learner, Experiment._optimizer

    def shared_learner(self, seed, shape=None):
        found = learner(self, seed, shape)
        assert self.penalty == "none"
        return PROBLEMS.setdefault((self.method, self.way), found)._replace(x0=found.x0, y0=found.y0)

    def shared_optimizer(self, rate):
        return OPTIMIZERS.setdefault((self.optimizer, rate, self.clip), optimizer(self, rate))

    monkeypatch.setattr(FewShot, "learner", shared_learner)
    monkeypatch.setattr(FewShot, "_optimizer", shared_optimizer)
    monkeypatch.setattr("bilax.run.data.Batches.capacity", lambda self, steps: 8)  # whatever the number of steps


def validating(monkeypatch, values, dataset="digits", **options):
    """The validation of a run, told what it finds: x holds the step."""

    def evaluate(learner, method, x, *rest):
        return few_shot.Score(values[int(x[0])], 0.0, 20)

    monkeypatch.setattr(few_shot, "evaluate", evaluate)
    config = FewShot(dataset=dataset, validate_every=10, **({} if dataset == "sinusoid" else {"filters": 2}), **options)
    found = config.validation(0)
    assert found is not None
    return config, found


def at(step: int) -> tuple[bilax.Snapshot, bilax.History]:
    unused: Any = None
    history = bilax.History(*[np.zeros(step)] * len(bilax.History._fields))
    return bilax.Snapshot(jnp.full(2, float(step)), jnp.zeros(1), step, unused), history


@pytest.mark.parametrize(("dataset", "sign"), [("digits", 1), ("sinusoid", -1)])
def test_validation_keeps_the_best_ends_the_run_and_survives_a_restart(dataset, sign, tmp_path, monkeypatch):
    values = {step: 1 + sign * value for step, value in {10: -0.7, 20: -0.5, 30: -0.6, 40: -0.5}.items()}

    def callback(gain=0.0):
        return validating(monkeypatch, values, dataset, patience=20, gain=gain)[1]

    first = callback()
    assert first.every == 10
    assert not first(*at(10))
    kept = {name: np.asarray(value) for name, value in first.saved().items()}
    assert not first(*at(20))
    again = callback()  # as after a kill that lost the steps since 10
    again.restore(kept, at(10)[0])
    assert [again(*at(step)) for step in (20, 30, 40)] == [False, False, True]
    config = FewShot(dataset=dataset, validate_every=10)
    last: Any = types.SimpleNamespace(
        x=jnp.full(2, 40.0), z=jnp.zeros(1), history=types.SimpleNamespace(k_bar=np.ones(4))
    )
    assert config.details(End(last, again, tmp_path, 0.0))["validation"] == [[k, v] for k, v in values.items()]
    best, _ = load_learned(tmp_path, (jnp.zeros(2), jnp.zeros(1)))
    assert best[0] == 20
    # What single precision cannot tell apart is no gain.
    values[40] += sign * 1e-9
    nearly = callback()
    assert [nearly(*at(step)) for step in values] == [False, False, False, True]
    demanding = callback(gain=0.3)
    assert [demanding(*at(step)) for step in (10, 20, 30)] == [False, False, True]


@pytest.mark.parametrize(
    ("gain", "patience", "end"),
    [(0.0, 20, None), (0.025, 30, None), (0.025, 20, 30), (0.02, 20, 30), (0.1, 90, 100), (0.1, 100, None)],
)
def test_patience_may_ask_for_a_gain(gain, patience, end, monkeypatch):
    rising = {step: 0.5 + 0.001 * step for step in range(10, 101, 10)}
    _, callback = validating(monkeypatch, rising, patience=patience, gain=gain)
    assert next((step for step in rising if callback(*at(step))), None) == end


@pytest.mark.usefixtures("compiled_once")
def test_a_killed_run_with_patience_ends_as_an_uninterrupted_one(tmp_path, monkeypatch):
    killed, evaluation, learned = tmp_path / "killed", few_shot.evaluate, {}
    small = FewShot(
        **TINY, outer_steps=40, validate_every=2, patience=6, gain=0.01, save_every=0.0, out=tmp_path / "whole"
    )

    def evaluate(learner, method, x, z, batches, tasks):
        learned[len(learned)] = x, z
        if len(learned) == 3:  # what is on the disk now is all that a kill leaves
            shutil.copytree(tmp_path / "whole", killed)
        return evaluation(learner, method, x, z, batches, tasks)

    with monkeypatch.context() as patch:
        patch.setattr(few_shot, "evaluate", evaluate)
        patch.setattr("bilax.run.chunks.CHUNK_SECONDS", 60.0)
        whole = small.train()
    assert not (killed / "result.json").exists()
    steps = [step for step, _ in whole["validation"]]
    assert steps == list(range(2, whole["steps"] + 1, 2))
    assert whole["status"] == "stopped_by_callback"
    values = np.array([value for _, value in whole["validation"]])
    waited = [values[n - 3 : n].max() - values[: n - 3].max() <= 0.01 + 1e-6 for n in range(4, len(values) + 1)]
    assert waited.index(True) == len(waited) - 1 > 0
    best = load_learned(tmp_path / "whole", learned[0])
    assert_trees_close(best, learned[int(values.argmax())], rtol=0)
    # The clock does not say where validations fall.
    monkeypatch.setattr("bilax.run.chunks.CHUNK_SECONDS", 0.0)
    again = dataclasses.replace(small, out=killed, save_every=1e9).train()
    for name in ("status", "steps", "validation", "measures", "upper"):
        assert again[name] == whole[name]
    assert (killed / "learned.eqx").read_bytes() == (tmp_path / "whole" / "learned.eqx").read_bytes()
    # More patience goes on from the end.
    longer = dataclasses.replace(small, out=killed, patience=12, outer_steps=whole["steps"] + 2).train()
    assert (longer["status"], longer["steps"]) == ("step_limit", whole["steps"] + 2)
    assert longer["validation"][:-1] == whole["validation"]


def test_damaged_learned_files_are_told(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_learned(tmp_path, jnp.zeros(2))
    save_learned(tmp_path, jnp.zeros(2))
    with pytest.raises(DataError, match="is damaged, or of another run"):
        load_learned(tmp_path, jnp.zeros(3))
    (tmp_path / "learned.eqx").write_bytes((tmp_path / "learned.eqx").read_bytes()[:-9])
    with pytest.raises(DataError, match="is damaged"):
        load_learned(tmp_path, jnp.zeros(2))


def test_another_number_of_classes_starts_at_the_mean_of_the_old_ones():
    z = Linear(jnp.array([[1.0, 3.0], [2.0, 4.0]]), jnp.array([5.0, 7.0]))
    found = start_for(z, 3)
    np.testing.assert_array_equal(found.weight, [[2.0] * 3, [3.0] * 3])
    np.testing.assert_array_equal(found.bias, [6.0] * 3)
    assert np.array_equal(start_for(z, 2).weight, z.weight)
    assert start_for(jnp.ones((2, 4)), 3).shape == (3, 4)


def test_a_trained_run_is_evaluated_and_adapted_to_new_classes(tmp_path, capsys):
    out = tmp_path / "run"
    code = few_shot_command(
        "--method", "iaptt-gm", "--filters", 4, "--outer-steps", 4, "--validate-every", 2, "--validation-tasks", 20,
        "--test-tasks", 20, "--inner-steps", 2, "--out", out, "--json",
    )  # fmt: skip
    assert code == 0
    stored = json.loads((out / "result.json").read_text())["measures"]["test accuracy"]
    cli.main(["evaluate", str(out), "--tasks", "20"])
    assert f"{stored:.4f}" in capsys.readouterr().out
    assert (out / "episode.png").read_bytes()[1:4] == b"PNG"

    trained = load_trained(out)
    tests = trained.config.splits.test
    pictures = np.concatenate([np.asarray(each)[:3] for each in tests.pictures[:3]])
    classify = trained.adapt(pictures, np.repeat(["five", "six", "seven"], 3))
    new = np.asarray(tests.pictures[1])[5:9]
    labels = classify(new)
    assert labels.shape == (4,)
    assert set(labels) <= {"five", "six", "seven"}
    assert classify.scores(new).shape == (4, 3)
    many = np.concatenate([np.asarray(each)[:40] for each in tests.pictures[:3]])
    apart = [classify.scores(part) for part in (many[:60], many[60:])]  # a task has 5 · 15 queries
    np.testing.assert_array_equal(classify.scores(many), np.concatenate(apart))
    for arguments, message in [
        ((pictures[:, :4], ["a"] * 9), "pictures must have shape"),
        ((pictures, ["a"] * 8), "labels must name each picture"),
        ((pictures.astype(int), ["a"] * 9), "or numbers in \\[0, 1\\], got others, of int64"),
        ((pictures, ["a"] * 9), "at least two classes"),
        ((pictures, ["a"] * 4 + ["b"] * 5), "as many pictures of each class"),
    ]:
        with pytest.raises(ValueError, match=message):
            trained.adapt(*arguments)

    for i, picture in enumerate(pictures):
        folder = tmp_path / "examples" / "567"[i // 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture[..., 0]).save(folder / f"{i}.png")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "._0.png").write_bytes(b"what a Mac leaves behind")
    for i, picture in enumerate(new):
        Image.fromarray(picture[..., 0]).save(tmp_path / "new" / f"{i}.png")
    table = tmp_path / "labels.csv"
    cli.main(["adapt", str(out), "--examples", str(tmp_path / "examples"), "--pictures", str(tmp_path / "new"),
              "--out", str(table)])  # fmt: skip
    names = {"five": "5", "six": "6", "seven": "7"}
    rows = [line.split(",")[:2] for line in table.read_text().splitlines()]
    assert rows[1:] == [[f"{i}.png", names[label]] for i, label in enumerate(labels)]


@pytest.mark.parametrize("verb", [["evaluate"], ["adapt", "--examples", "a", "--pictures", "b"]])
def test_a_folder_without_a_few_shot_run_is_refused(verb, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"config": {"experiment": "toy"}}))
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_text(json.dumps({"config": {"experiment": "few-shot"}}))
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "config.json").write_text('{"config": []}')
    cases = {
        "cut": "lacks dataset and folder and shape",
        "list": "must hold a dictionary",
        "inner": "is damaged: it holds no settings",
        "none": "is not a run folder",
    }
    good = {"experiment": "few-shot", "dataset": "digits", "folder": None, "shape": [8, 8, 1]}
    changes = [
        {"backbone": "vit"},
        {"folder": 5},
        {"shape": [8, 8]},
        {"shape": [8, 0, 1]},
        {"queries": 0},
        {"way": "5"},
    ]
    for i, change in enumerate(changes):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "config.json").write_text(json.dumps({"config": good | change}))
        cases[str(i)] = "is damaged: it makes no network"
    for name, message in (cases | {"": "a run of 'toy', not of few-shot"}).items():
        with pytest.raises(SystemExit) as ended:
            cli.main([verb[0], str(tmp_path / name), *verb[1:]])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


RUN: dict[str, Any] = {
    "status": "step_limit",
    "steps": 4,
    "seconds": 60.0,
    "mean_k_bar": 1.0,
    "test accuracy": 0.9,
    "± (95 %)": 0.01,
}
RUN |= {"validation": [[2, 0.5], [4, 0.8]], "data_tag": "a"}


def test_table_2_is_drawn_beside_what_was_published(tmp_path, capsys):
    target = Table2(out=tmp_path)
    better = RUN | {"test accuracy": 0.95}
    cells = {"mini-imagenet-5-1-resnet12": {"IAPTT-GM": [RUN], "RHG": [better]}}
    (figure,) = target.show({"cells": cells})
    assert figure.exists()
    shown = capsys.readouterr().out
    assert "50.54 ± 0.85 | 95.00 ± 1.00" in shown
    assert "53.31 ± 0.89 | –" in shown
    assert "different data" not in shown
    target.show({"cells": {"omniglot-5-1": {"RHG": [RUN], "MAML": [RUN | {"data_tag": "b"}]}}})
    shown = capsys.readouterr().out
    assert "computed with different data" in shown
    assert "98.7 (Finn 2017)" in shown


def test_a_lead_in_table_2_must_be_clear():
    def first(**rows):
        labels = {"iaptt": "IAPTT-GM", "rhg": "RHG", "proto": "Proto Net", "wide": "Proto Net, 64 filters"}
        labels["short"] = "Proto Net, a quarter of the steps"
        return Table2().claims({"cells": {"cifar-fs-5-1": {labels[name]: runs for name, runs in rows.items()}}})

    for accuracy, clear in ((0.95, False), (0.89, None), (0.88, True)):
        (claim,) = first(iaptt=[RUN], rhg=[RUN | {"test accuracy": accuracy}])
        assert claim.held is clear
        assert claim.here.endswith("within the intervals") == (accuracy == 0.89)
    # Seeds that differ widen the interval: t(0.975, 2) = 4.303 times 2 / sqrt(3) per cent.
    seeds = [RUN | {"test accuracy": accuracy} for accuracy in (0.88, 0.9, 0.92)]
    (claim,) = first(iaptt=seeds, rhg=[RUN | {"test accuracy": 0.86}])
    assert claim.held is None
    assert "IAPTT-GM 90.00 ± 4.97" in claim.here
    # What was published with 64 filters is compared with that row; 2 per cent less are level.
    for accuracy, level in ((0.54, True), (0.53, False)):
        claim = first(proto=[RUN], wide=[RUN | {"test accuracy": accuracy}], short=[RUN | {"steps": 7}])[-1]
        assert claim.held == level
        assert claim.here.endswith(" after 7 steps")
        assert "Proto Net has 55.5" in claim.paper


def test_table_2_stores_its_cells_and_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    asked, status = [], "step_limit"

    def train(config):
        asked.append(config)
        # 2.5 is the best of the scales
        score = 1 / (1 + abs(config.feature_scale - 2.5))
        return RUN | {
            "status": status,
            "validation": [[2, score]],
            "measures": {"test accuracy": 0.9, "± (95 %)": 0.01},
        }

    monkeypatch.setattr(FewShot, "train", train)

    def run(*methods, columns=("cifar-fs-5-1",), **options):
        Table2(methods=methods, columns=columns, out=tmp_path, runs=tmp_path, **options).compute()
        return len(asked)

    # Four choices, three seeds.
    assert run("IAPTT-GM") == 7
    assert [config.feature_scale for config in asked] == [0.4, 1, 2.5, 6.25, 2.5, 2.5, 2.5]
    assert [config.outer_steps for config in asked[3:]] == [250, 10_000, 10_000, 10_000]
    assert {config.seed for config in asked} == {(0,), (1,), (2,)}
    assert all(config.distortions and config.schedule == "cosine" and config.clip == 2 for config in asked)
    assert len({config.out for config in asked}) == 7
    assert run("IAPTT-GM") == 7
    assert run("IAPTT-GM, a quarter of the steps", "IAPTT-GM, twice the steps") == 9
    assert [config.outer_steps for config in asked[7:]] == [2500, 20_000]
    # Those of its kind take what it chose, also for more shots; others choose for themselves.
    assert run("RHG", columns=("cifar-fs-5-5",)) == 14
    assert run("BDA", columns=("cifar-fs-5-5",)) == 15
    assert asked[-1].feature_scale == 2.5
    assert run("MAML", columns=("cifar-fs-5-5",)) == 20
    assert [config.step_size for config in asked[-5:-1]] == [0.01, 0.05, 0.2, 0.8]
    table = Table2(out=tmp_path, runs=tmp_path, redraw=True)
    results = table.stored()
    assert {name: {label: len(runs) for label, runs in rows.items()} for name, rows in results["cells"].items()} == {
        "cifar-fs-5-1": {
            "IAPTT-GM": 3,
            "IAPTT-GM, a quarter of the steps": 1,
            "IAPTT-GM, twice the steps": 1,
        },
        "cifar-fs-5-5": {"BDA": 1, "RHG": 1, "MAML": 1},
    }
    assert table.left() == len(table.plan()) - 8
    assert len(asked) == 20
    status = "terminated"
    with pytest.raises(SystemExit) as ended:
        run("Proto Net")
    assert (ended.value.code, len(asked)) == (143, 21)
    assert "the same command goes on" in capsys.readouterr().out
    for columns, message in ((("cifar-fs",), "must be such as"), (("mnist-5-1",), "no data set mnist")):
        with pytest.raises(SystemExit):
            run(columns=columns)
        assert message in capsys.readouterr().err
    nothing = Table2(columns=("mini-imagenet-5-1",), out=tmp_path, redraw=True)
    assert nothing.show(nothing.stored()) == []


def test_table_2_in_small(tmp_path):
    table = Table2(quick=True, methods=("Proto Net",), out=tmp_path)
    (run,) = table.compute()["cells"]["digits-5-1"]["Proto Net"]
    assert 0.2 < run["test accuracy"] < 1
    assert [step for step, _ in run["validation"]] == [20, 40, 60]
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("compiled_once")
def test_the_clock_ends_a_run_and_more_time_goes_on(tmp_path):
    def train(**options):
        return FewShot(**TINY, validate_every=2, out=tmp_path, **options).train()

    first = train(minutes=1e-4, outer_steps=50)
    assert first["status"] == "time_limit"
    assert first["steps"] < 50
    second = train(minutes=10.0, outer_steps=4 + first["steps"])
    assert (second["status"], second["steps"]) == ("step_limit", 4 + first["steps"])
    assert second["seconds"] > first["seconds"]
    third = train(minutes=10.0, outer_steps=6 + first["steps"])
    assert third["seconds"] > second["seconds"]
    assert json.loads((tmp_path / "result.json").read_text())["seconds"] == third["seconds"]
    assert second["validation"][: len(first["validation"])] == first["validation"]
    assert [step for step, _ in third["validation"]] == list(range(2, third["steps"] + 1, 2))


@pytest.mark.usefixtures("compiled_once")
def test_what_has_not_been_validated_is_tested_where_it_ended(tmp_path):
    def learned(steps):
        FewShot(**TINY, validate_every=5, out=tmp_path, outer_steps=steps).train()
        return (tmp_path / "learned.eqx").read_bytes()

    assert learned(2) != learned(4)
    best = learned(6)
    assert learned(7) == best  # the first validation is the best until there is another


def test_a_run_that_goes_on_draws_no_task_again(tmp_path, monkeypatch):
    whole, drawn = Episodes.batch, []

    def batch(self, index):
        drawn.append(index)
        return whole(self, index)

    def train(steps):
        FewShot(**TINY, out=tmp_path, outer_steps=steps).train()

    train(4)
    monkeypatch.setattr(Episodes, "batch", batch)
    train(6)
    assert 4 in drawn
    assert not {1, 2} & set(drawn)  # 0 is an example, and a test; 3 is the last that was used


@pytest.mark.usefixtures("compiled_once")
def test_a_run_that_is_broken_off_does_not_stay_for_its_test(tmp_path, capsys, monkeypatch):
    words = ["run", "few-shot", "--dataset", "digits", "--method", "protonet", "--filters", "2", "--queries", "2"]
    words += ["--rate", "0.05", "--test-tasks", "20", "--seed", "0", "1", "--outer-steps", "4", "--out", str(tmp_path)]

    def break_off(self, seed):
        def validate(state):
            signal.raise_signal(signal.SIGTERM)
            return 0.0

        return bilax.EarlyStopping(validate, every=2) if seed == 1 else None

    with monkeypatch.context() as patch:
        patch.setattr(FewShot, "validation", break_off)
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
    assert ended.value.code == 143
    table = capsys.readouterr().out
    assert "test accuracy" in table  # of the first seed
    assert "resume=True goes on" in table
    broken = json.loads((tmp_path / "seed-1" / "result.json").read_text())
    assert (broken["status"], broken["steps"], broken["measures"]) == ("terminated", 2, {})
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--resume"])
    assert ended.value.code == 0
    whole = json.loads((tmp_path / "seed-1" / "result.json").read_text())
    assert whole["status"] == "step_limit"
    assert 0 < whole["measures"]["test accuracy"] <= 1


@pytest.mark.parametrize("kind", ["heads", "networks"])
def test_an_answer_depends_on_the_picture_also_where_it_is_the_only_one(kind):
    learner = learner_of(kind, body=double(ConvNet4(1, 3, KEY)), shape=(4, 4, 1))
    one = task(random_tasks((4, 4, 1), tasks=1), 0)
    z, first = moved(learner.y0), one._replace(query=one.query[:1], query_targets=one.query_targets[:1])
    second = first._replace(query=first.query + jax.random.normal(KEY, first.query.shape))
    a, b = (few_shot.answers(learner, bilax.rhg(2, 0.1), learner.x0, z, each) for each in (first, second))
    assert np.abs(a - b).max() > 1e-3


def test_the_feature_scale_is_that_of_the_features():
    task = jax.random.normal(KEY, (4, 8, 8, 1), jnp.float32)
    plain, scaled = (FewShot(filters=3, feature_scale=scale).learner(0).x0(task) for scale in (1.0, 2.5))
    np.testing.assert_allclose(scaled, 2.5 * plain, rtol=1e-5)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--backbone", "resnet12", "--feature-scale", "2"], "--feature-scale is for convnet4"),
        (["--feature-scale", "-1"], "and positive"),
        (["--way", "6"], "test classes: way=6 needs as many classes; there are 5: lower it, or add classes"),
        (["--seed", "-1"], "--seed must not be negative, got -1"),
        (["--minutes", "nan"], "--minutes must not be negative, got nan"),
        (["--rotations"], "--rotations is for omniglot"),
        (["--dataset", "sinusoid", "--distortions"], "--distortions is for pictures"),
        (["--dataset", "sinusoid", "--backbone", "resnet12"], "--backbone is for pictures"),
        (["--dataset", "sinusoid", "--feature-scale", "2"], "--feature-scale is for pictures"),
        (["--validate-every", "0"], "--validate-every must be at least 1"),
        (["--filters", "0"], "--filters must be at least 1"),
        (["--meta-batch", "0"], "tasks must be a whole number"),
        (["--outer-steps", "0"], "steps"),
        (["--patience", "5"], "--patience needs --validate-every"),
        (["--gain", "0.1"], "--gain needs --patience"),
        (["--patience", "5", "--validate-every", "5", "--gain", "-1"], "--gain must not be negative"),
        (["--method", "protonets"], "did you mean protonet?"),
        (["--method", "mamml"], "did you mean maml?"),
        (["--start", "warm"], "--start warm has no meaning"),
        (["--method", "maml", "--start", "fixed"], "--start is not for maml"),
        (["--method", "protonet", "--start", "auxiliary"], "--start is not for protonet"),
        (["--patience", "0", "--validate-every", "5"], "--patience must be at least 1"),
        (["--method", "maml", "--inner-steps", "0"], "inner_steps must be a whole number"),
        (["--dataset", "folder"], "needs --folder"),
        (["--dataset", "mini-imagenet"], "in a folder and name it with --folder or BILAX_DATA"),
        (["--dataset", "sinusoid", "--method", "protonet"], "needs classes; sinusoid has none"),
        (["--way", "11"], "way=11 needs as many classes; there are 10"),
        (["--shots", "0"], "shots must be a whole number"),
        (["--penalty", "footnote", "--penalty-q", "2"], "q must lie strictly between 0 and 1"),
    ],
)
def test_wrong_words_get_a_hint(words, hint, capsys, tmp_path):
    assert few_shot_command(*words, "--out", tmp_path / "run") == 2
    assert hint in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_classifier_with_a_hidden_layer_begins_without_an_opinion_and_is_penalised_whole():
    learner = dataclasses.replace(FewShot(**TINY), method="ia-gm", hidden=3).learner(0)
    assert isinstance(learner.y0, few_shot.TwoLayers)
    features = jnp.ones((2, len(learner.y0.hidden.layers[0][0])), jnp.float32)
    np.testing.assert_array_equal(learner.y0(features), 0)
    weights = [np.asarray(leaf, float) for leaf in jax.tree.leaves(learner.y0)]
    expected = sum(np.sum((w**2 + 1e-6) ** 0.25) for w in weights)
    np.testing.assert_allclose(few_shot.LqPenalty(0.5, 1e-3, elementwise=True)(learner.y0), expected, rtol=1e-5)


def test_truncation_is_compared_along_each_line(tmp_path, monkeypatch, capsys):
    asked = []

    def train(config):
        asked.append(config)
        accuracy = 0.5 if config.method == "iaptt-gm" and config.step_size == 3 else 0.4
        return RUN | {"validation": [[4, accuracy]], "measures": {}}

    monkeypatch.setattr(FewShot, "train", train)
    target = Truncation(out=tmp_path, runs=tmp_path)
    results = target.compute()
    # What is changed back to the default is not run twice: 5 + 3 + 2 + 3 settings, of which 4 are one.
    assert len(asked) == 3 * 10
    assert len({config.out for config in asked}) == len(asked)
    target.compute()
    assert len(asked) == 3 * 10
    with pytest.raises(SystemExit):
        dataclasses.replace(target, outer_steps=7).compute()  # does not replace what took long
    assert [claim.held for claim in target.claims(results)] == [True, False, False, False]
    (figure,) = dataclasses.replace(target, redraw=True).show(target.stored())
    assert figure.exists()
    assert "50.0" in capsys.readouterr().out


def test_processes_divide_the_tasks(monkeypatch, capsys):
    config, parts = FewShot(dataset="sinusoid"), []
    whole = next(iter(config.setup(0).data))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for own in range(2):
        monkeypatch.setattr(jax, "process_index", lambda own=own: own)
        parts.append(next(iter(dataclasses.replace(config, distributed=True).setup(0).data)))
    jax.tree.map(lambda all, *some: np.testing.assert_array_equal(all, np.concatenate(some)), whole, *parts)
    with pytest.raises(SystemExit):
        dataclasses.replace(config, distributed=True, meta_batch=3).setup(0)
    assert "--meta-batch must be a multiple of the 2 processes" in capsys.readouterr().err
