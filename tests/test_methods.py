"""Every method through the one loop: a table of what each can do, and a user's own method beside them."""

import dataclasses
import random
import runpy
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilax
from bilax.run.checkpoint import steps_saved
from tests.problems import central_difference
from tests.processes import forked

SOBA = Path(__file__).parent.parent / "docs" / "examples" / "soba.py"
Soba = runpy.run_path(str(SOBA))["Soba"]

MEANS = jnp.asarray([[1.0, -0.5], [0.2, 0.8], [-0.3, 0.4]])


def upper(view, y, target):
    return jnp.sum((y - target) ** 2) + 0.1 * jnp.sum(view**2)


def lower(view, y, target):
    return 0.5 * jnp.sum((y - view) ** 2) + 0.05 * jnp.sum(y**2)


PLAIN = bilax.Problem(upper, lower, bilax.Box(-3.0, 3.0), bilax.Box(-5.0, 5.0))
CONTEXT = bilax.Problem(upper, lower, PLAIN.x_set, PLAIN.y_set, context=lambda x, target: jnp.tanh(x))
JOINED = bilax.Problem(
    lambda x, y, targets: jnp.sum((y - targets) ** 2) / 3 + 0.1 * jnp.sum(x**2),
    lambda x, y, targets: 0.5 * jnp.sum((y - x) ** 2) + 0.05 * jnp.sum(y**2),
    PLAIN.x_set,
    PLAIN.y_set,
    context=lambda x, targets: jnp.tanh(x),
)
"""three tasks, written as one problem"""
X0, Y0 = jnp.asarray([1.0, -0.5]), jnp.asarray([0.3, 0.2])
STEPS = 12
RECIPES: dict[str, Any] = bilax.RECIPES
METHODS = {
    **{name: make(4, 0.2) for name, make in RECIPES.items() if name not in ("one_step", "t_rhg")},
    "one_step": bilax.one_step(0.2),
    "t_rhg": bilax.t_rhg(4, 0.2, 2),
    "penalty": bilax.penalty(4, 0.2),
    "bvfim": bilax.bvfim(4, 0.2),
    "meta_sgd, maml_pp, t_net, imaml": bilax.maml_pp(4, rates=lambda x: jnp.full(4, 0.2) * jnp.exp(0.1 * x[0])),
    "auto": bilax.auto(),
    "a user's SOBA": Soba(0.1, 0.2),
    "soba, ma_soba, fsla": bilax.fsla(0.2, 0.1),
    "saba, srba": bilax.saba(0.2, 0.1),
    "stocbio, amigo, bsa, ttsa, sustain, mrbo": bilax.bsa(2, 3, 0.2, 0.1, 0.3),
    "f2sa, f3sa": bilax.f2sa(2, 0.1, 0.1, weight=2.0),
    "v_pbgd, bome, g_pbgd, meha": bilax.v_pbgd(2, 0.2, 0.1, 0.1, 2.0),
    "pzobo": bilax.pzobo(2, 0.2, 0.1),
}
"""where a row has several names, one of the kind is tried"""
AGAIN = "comes back to the same examples"
REFUSED = {
    ("one_step", "tasks"): "goes on from the last y_K",
    ("saba, srba", "streamed data"): AGAIN,
    ("saba, srba", "mini-batches"): AGAIN,
}
"""what a method does not do, and what it says then"""


class Note:
    """A callback after every fourth step."""

    every = 4

    def __init__(self):
        self.seen = []

    def __call__(self, state, history):
        self.seen.append((state.step, float(history.upper[-1])))


def noise(step, key):
    return (MEANS[0] + 0.1 * jax.random.normal(key, (2,)),)


BATCHES = [noise(i, jax.random.fold_in(jax.random.key(0), i)) for i in range(STEPS + 1)]
ROWS = jnp.stack([batch for (batch,) in BATCHES])


def by_step(step, key):
    """What `noise` gives a method that draws once a step."""
    return (ROWS[step],)


def draws_often(method):
    """Whether each draw of a step has a key, and so a batch, of its own."""
    return max(getattr(method, "draws", (1, 1))) > 1


def steady_or_noise(method):
    """Random data, if the method takes them from a function."""
    return (MEANS[0],) if method is METHODS["saba, srba"] else noise


def free(method, problem=PLAIN):
    """The problem without bounds of y for the methods whose theory has none."""
    return dataclasses.replace(problem, y_set=bilax.Reals()) if hasattr(method, "draws") else problem


def run(method, problem=PLAIN, data=(MEANS[0],), steps=STEPS, callbacks=(), **options):
    problem = free(method, problem)
    # In chunks always, so that all runs of a method on one kind of data share a program.
    return bilax.solve(problem, method, X0, Y0, steps=steps, data=data, callbacks=[*callbacks, _pass], **options)


def _pass(state, history):
    return None


class StopAt:
    """Ends a run early."""

    def __init__(self, step):
        self.every = step

    def __call__(self, state, history):
        return True


def same(a, b, exactly=True):
    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=0 if exactly else 1e-9, atol=0 if exactly else 1e-12)

    jax.tree.map(compare, (a.x, a.y, a.z, a.upper, a.history), (b.x, b.y, b.z, b.upper, b.history))


def best_upper(targets):
    """F at the solution y(x) = x / 1.1, where x is what the follower sees, of as many tasks."""
    x = (targets.mean(0) / 1.1) / (1 / 1.1**2 + 0.1)
    return jnp.sum((x / 1.1 - targets) ** 2) / len(targets) + 0.1 * jnp.sum(x**2)


def save_and_resume(method, folder):
    saving = bilax.Saving(folder, every_steps=5)
    data = steady_or_noise(method)
    assert run(method, data=data, saving=saving, callbacks=[StopAt(7)]).steps == 7
    same(run(method, data=data, saving=saving, resume=True), run(method, data=data))


def stream(method, folder):
    streamed, expected = run(method, data=BATCHES), run(method, data=by_step if draws_often(method) else noise)
    np.testing.assert_allclose(streamed.history.upper, expected.history.upper, rtol=1e-9)


def draw_mini_batches(method, folder):
    assert len(np.unique(run(method, data=noise).history.upper)) == STEPS


def share_tasks(method, folder):
    together = run(method, CONTEXT, data=(MEANS,), tasks=True)
    assert together.y.shape == MEANS.shape
    if any(method is METHODS[name] for name in ("ia_gm", "soba, ma_soba, fsla")):  # one of each way to have tasks
        starts = jnp.stack([X0, X0 + 0.1]), jnp.stack([Y0, Y0])
        many = bilax.multistart(free(method, CONTEXT), method, *starts, steps=STEPS, data=(MEANS,), tasks=True)
        assert many.y.shape == (2, *MEANS.shape)
        np.testing.assert_allclose(many.history.upper[0], together.history.upper, rtol=1e-9)
    if isinstance(method, bilax.Method):
        alone = [run(method, CONTEXT, data=(mean,)).history.upper[0] for mean in MEANS]
        np.testing.assert_allclose(together.history.upper[0], np.mean(alone), rtol=1e-9)
    elif isinstance(method, bilax.Auto):
        np.testing.assert_allclose(together.upper, best_upper(MEANS), rtol=1e-6)
    else:
        by_hand = bilax.solve(
            free(method, JOINED), method, X0, jnp.stack([Y0] * 3), steps=STEPS, data=(MEANS,), callbacks=[_pass]
        )
        same(together, by_hand, exactly=False)


def start_many(method, folder):
    x0s, y0s = jnp.stack([X0, X0 + 1]), jnp.stack([Y0, Y0])

    def many(callback, **options):
        options = {"steps": STEPS, "data": (MEANS[:2],), "data_axes": (0,), "callbacks": [callback], **options}
        return bilax.multistart(free(method, CONTEXT), method, x0s, y0s, **options)

    whole, saving = many(_pass), bilax.Saving(folder, every_steps=5)
    if isinstance(method, bilax.Auto):  # alone it has more starts of its own
        np.testing.assert_allclose(whole[0].upper, best_upper(MEANS[:1]), rtol=1e-6)
    else:
        same(whole[0], run(method, CONTEXT), exactly=False)
    many(StopAt(7), saving=saving)
    same(many(_pass, saving=saving, resume=True), whole)


def call_back(method, folder):
    note = Note()
    ended = run(method, data=steady_or_noise(method), callbacks=[note])
    assert note.seen == [(i, ended.history.upper[i - 1]) for i in (4, 8, 12)]


def look_through_a_context(method, folder):
    if isinstance(method, bilax.Auto):
        np.testing.assert_allclose(run(method, CONTEXT).upper, best_upper(MEANS[:1]), rtol=1e-6)
        return
    # Without one, on data of which the first batch is the same, by a program that other abilities have compiled.
    data = by_step if draws_often(method) else steady_or_noise(method)
    first = ROWS[0] if callable(data) else MEANS[0]
    found, plain = run(method, CONTEXT, data=(first,)).history, run(method, data=data).history
    assert np.isfinite(found.upper).all()
    assert found.grad_x_norm[0] != pytest.approx(plain.grad_x_norm[0]) or found.grad_x_norm[0] == 0


ABILITIES = {
    "saving and resuming": save_and_resume,
    "streamed data": stream,
    "mini-batches": draw_mini_batches,
    "tasks": share_tasks,
    "multistart": start_many,
    "callbacks": call_back,
    "context": look_through_a_context,
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_do_what_the_loop_can(name, tmp_path):
    """The table of the README: every method × every ability, or a refusal with its reason."""
    for ability, shown in ABILITIES.items():
        folder = tmp_path / ability
        if (name, ability) in REFUSED:
            with pytest.raises(ValueError, match=REFUSED[name, ability]):
                shown(METHODS[name], folder)
        else:
            shown(METHODS[name], folder)


def table() -> str:
    """Every method × every ability as Markdown; the tests above are what a "yes" stands on."""
    lines = [f"| | {' | '.join(ABILITIES)} |", "|---" * (1 + len(ABILITIES)) + "|"]
    for name in METHODS:
        cells = ["refused: " + REFUSED[name, a] if (name, a) in REFUSED else "yes" for a in ABILITIES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_the_docs_have_the_table_and_the_example_as_they_are():
    text = (SOBA.parent.parent / "methods.md").read_text()
    assert table() in text, table()
    assert SOBA.read_text().split("import bilax\n\n\n")[1] in text


def test_a_user_s_soba_is_short_and_converges_to_the_solution():
    assert len(SOBA.read_text().splitlines()) <= 40
    found = run(Soba(0.1, 0.2), steps=3000, tolerance=1e-10)
    # y(x) = x / 1.1, so x minimises ‖x/1.1 − t‖² + 0.1 ‖x‖².
    expected = (MEANS[0] / 1.1) / (1 / 1.1**2 + 0.1)
    assert found.status is bilax.Status.converged
    np.testing.assert_allclose(found.x, expected, rtol=1e-6)


def streamed_run(steps: int, **options) -> str:
    solution = run(Soba(0.01, 0.02), data=[(MEANS[i % 3],) for i in range(steps)], steps=steps, **options)
    return " ".join(np.asarray(array).tobytes().hex() for array in (solution.x, solution.history.upper))


def saved_run(steps: int, folder: Path) -> str:
    return streamed_run(steps, saving=bilax.Saving(folder, every_steps=5, every_seconds=None), resume=True)


def test_a_user_s_soba_on_streamed_data_is_killed_and_resumed_to_the_bit(tmp_path):
    steps, draw, folder, out = 300, random.Random(0), tmp_path / "run", tmp_path / "end"
    whole = streamed_run(steps)
    for _ in range(2):
        before, deadline = steps_saved(folder), time.monotonic() + 120
        process = forked(saved_run, out, steps, folder)
        while steps_saved(folder) == before and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.join()
        assert steps_saved(folder)[-1] < steps
    forked(saved_run, out, steps, folder).join(timeout=300)
    assert out.read_text() == whole


# What the follower sees of the leader


def _learned(k, leader, slope):
    return jnp.exp(leader["log_rate"]) * slope


LEARNED = bilax.Problem(
    lambda x, y, t: jnp.sum((y - t) ** 2) + 0.1 * jnp.sum(x["w"] ** 2),
    lambda x, y, t: jnp.sum(jnp.cosh(y - x["w"])) + 0.1 * jnp.sum(y**4),
)
LEARNED_X = {"w": X0, "log_rate": jnp.asarray([-2.0, -1.5])}


@pytest.mark.parametrize("rule", [bilax.Reverse(), bilax.Reverse(checkpoint=True), bilax.Forward()])
def test_a_learned_step_length_has_the_derivative_of_finite_differences(rule):
    phi = bilax.approximate(
        LEARNED, bilax.Method(5, bilax.LearnedDescent(_learned), bilax.pessimistic(), rule, "auxiliary")
    )

    def value(x):
        return phi(x, Y0, MEANS[0])[0]

    slope = jax.grad(value)(LEARNED_X)
    direction = {"w": jnp.asarray([0.3, -1.0]), "log_rate": jnp.asarray([1.0, 0.4])}
    expected = central_difference(value, LEARNED_X, direction)
    np.testing.assert_allclose(sum(jnp.vdot(slope[k], direction[k]) for k in slope), expected, rtol=1e-8)
    solution = bilax.solve(LEARNED, phi.method, LEARNED_X, Y0, data=(MEANS[0],), steps=20)
    assert not np.allclose(solution.x["log_rate"], LEARNED_X["log_rate"])


@pytest.mark.parametrize("recipe", [bilax.rhg, bilax.iaptt_gm, bilax.ia_gm_a, bilax.bda, bilax.fhg])
def test_the_step_size_itself_can_be_differentiated(recipe):
    def value(alpha):
        return bilax.approximate(PLAIN, recipe(5, alpha))(X0, Y0, MEANS[0])[0]

    slope = jax.grad(value)(jnp.asarray(0.1))
    np.testing.assert_allclose(slope, central_difference(value, jnp.asarray(0.1), 1.0), rtol=1e-7)


def test_rules_say_what_they_make_of_a_step_size():
    def value(alpha, rule):
        return bilax.approximate(PLAIN, bilax.rhg(1, alpha, derivative=rule))(X0, Y0, MEANS[0])[0]

    # At a solution the length of the step that led there does not matter.
    assert jax.grad(value)(jnp.asarray(0.1), bilax.Implicit()) == 0
    with pytest.raises(ValueError, match=r"does not differentiate the step size.*Reverse"):
        jax.grad(value)(jnp.asarray(0.1), bilax.FiniteDifference())


def test_the_start_may_be_a_function_of_x():
    method = bilax.rhg(3, 0.1, start=lambda x, target: jnp.tanh(2 * x) + target)
    phi = bilax.approximate(PLAIN, method)

    def value(x):
        return phi(x, Y0, MEANS[0])[0]

    by_hand = bilax.approximate(PLAIN, bilax.rhg(3, 0.1))
    np.testing.assert_allclose(value(X0), by_hand(X0, jnp.tanh(2 * X0) + MEANS[0], MEANS[0])[0], rtol=1e-12)
    slope, direction = jax.grad(value)(X0), jnp.asarray([1.0, -0.3])
    np.testing.assert_allclose(slope @ direction, central_difference(value, X0, direction), rtol=1e-8)
    assert run(method, steps=5).steps == 5


# What x0 and y0 may be


def test_a_network_with_activation_functions_may_be_the_follower():
    inputs, answers = jax.random.normal(jax.random.key(0), (2, 8, 3))
    network = eqx.nn.MLP(3, 3, 4, 1, key=jax.random.key(1))

    def loss(x, y):
        return jnp.mean(jnp.exp(x) * (jax.vmap(y)(inputs) - answers) ** 2)

    problem = bilax.Problem(loss, loss, context=lambda x: 2 * x)
    seen = []

    def look(state, history):
        seen.append(state.z(inputs[0]).shape)

    def record(x, z, info):
        return info.y(inputs[0])

    options: Any = {"steps": 3, "record": record, "callbacks": [look], "optimizer": optax.sgd(1e-2)}
    solution = bilax.solve(problem, bilax.ia_gm(2, 0.1), jnp.zeros(()), network, **options)
    assert solution.history.record.shape == (3, 3)
    assert seen[-1] == (3,)
    assert solution.y.activation is network.activation
    assert loss(0.0, solution.y) < loss(0.0, network)
    with pytest.raises(ValueError, match="y0 holds no arrays"):
        bilax.solve(problem, bilax.ia_gm(2, 0.1), jnp.zeros(()), eqx.nn.Lambda(jnp.tanh))


def test_sets_and_starts_see_a_network_as_it_was_written():
    network, one = eqx.nn.MLP(1, 1, 3, 1, key=jax.random.key(0)), jnp.ones(1)
    # y is as large as it may be, then where it starts: both are what the network says, which learns to say 0.2.
    bound = bilax.Problem(
        lambda x, y: (y - 0.2) ** 2, lambda x, y: (y - 3) ** 2, y_set=lambda x: bilax.Box(-9.0, x(one)[0])
    )
    still = bilax.Problem(lambda x, y: (y - 0.2) ** 2, lambda x, y: 0 * y)
    begun = bilax.rhg(5, 0.3, start=lambda x: x(one)[0])
    for problem, method in ((bound, bilax.rhg(5, 0.3)), (still, begun)):
        found = bilax.solve(problem, method, network, 0.0, steps=40)
        np.testing.assert_allclose([found.y, found.x(one)[0]], 0.2, atol=0.01)


def test_a_status_prints_its_name(capsys):
    print(run(METHODS["rhg"]).status)
    assert capsys.readouterr().out == "step_limit\n"


def test_optimisers_are_refused_by_methods_that_have_none():
    with pytest.raises(TypeError, match="optimizer is not for Soba"):
        run(Soba(0.1, 0.1), optimizer=optax.adam(0.1))
    with pytest.raises(TypeError, match="z_optimizer is not for ValueFunction"):
        run(bilax.bvfim(2, 0.1), z_optimizer=optax.adam(0.1))
    with pytest.raises(TypeError, match="init, step and point"):
        run(Soba)
    with pytest.raises(ValueError, match="tasks must stay the same"):
        run(bilax.penalty(2, 0.1), data=lambda step, key: (MEANS,), tasks=True)
