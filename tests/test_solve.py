"""The outer loop: the paper's example, optimisers, data, convergence, repeated runs."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bilax
from bilax.methods.algorithm import evaluate
from tests.problems import central_difference, neural, quadratic, toy

X_STAR = 11 * np.pi / 4


@pytest.mark.parametrize("start", [(1.0, 2.0), (5.0, 1.0), (7.0, -1.0)])
def test_iaptt_gm_solves_the_papers_example(start):
    solution = bilax.solve(toy().problem, bilax.iaptt_gm(40, 5e-4), *start, steps=500, optimizer=optax.sgd(0.1))
    assert abs(float(solution.x) - X_STAR) < 0.02 * X_STAR
    assert float(solution.y) == pytest.approx(-2, abs=0.02)
    assert solution.status is bilax.Status.step_limit
    assert all(len(leaf) == 500 for leaf in jax.tree.leaves(solution.history))
    assert len(jax.tree.leaves(solution.history)) == 7


def test_basin_shares_are_those_of_the_prototype():
    """The share of a grid of starts that ends within 2 % of x*; here a coarser grid than the figure's."""
    xs, ys = (a.ravel() for a in np.meshgrid(np.linspace(1, 10, 14), np.linspace(-2, 2, 14)))
    optimizer = optax.sgd(0.1)

    def share(method):
        batch = bilax.multistart(toy().problem, method, xs, ys, optimizer=optimizer)
        return np.mean(np.abs(batch.x - X_STAR) < 0.02 * X_STAR)

    assert share(bilax.iaptt_gm(40, 5e-4)) == pytest.approx(0.976, abs=0.03)
    assert share(bilax.rhg(40, 5e-4)) == pytest.approx(0.042, abs=0.03)
    assert share(bilax.iaptt_gm(40, 5e-3)) == pytest.approx(0.186, abs=0.04)
    assert share(bilax.ia_gm(40, 5e-3)) == pytest.approx(0.032, abs=0.03)


def test_multistart_equals_a_loop_of_solves():
    xs, ys = jnp.asarray([1.0, 5.0, 7.0]), jnp.asarray([2.0, 1.0, -1.0])
    method = bilax.iaptt_gm(10, 5e-3)
    batch = bilax.multistart(toy().problem, method, xs, ys, steps=30)
    for i in range(3):
        one = bilax.solve(toy().problem, method, xs[i], ys[i], steps=30)
        np.testing.assert_allclose(batch.x[i], one.x, rtol=1e-9)
        np.testing.assert_allclose(batch[i].history.upper, one.history.upper, rtol=1e-9)
        np.testing.assert_array_equal(batch[i].history.k_bar, one.history.k_bar)
    assert float(batch.best.upper) == float(np.min(batch.upper))


def test_an_empty_leader_and_a_tuple_follower():
    problem = bilax.Problem(lambda x, y: (y[0] - 1) ** 2 + y[1] ** 2, lambda x, y: (y[0] * y[1] - 1) ** 2)
    solution = bilax.solve(problem, bilax.iaptt_gm(20, 0.05), (), (2.0, 2.0), steps=300)
    assert solution.x == ()
    assert float(solution.history.grad_x_norm[-1]) == 0
    assert float(solution.upper) < float(solution.history.upper[0])


def test_x_and_z_may_have_their_own_optimisers():
    case = neural()

    def run(**optimisers):
        return bilax.solve(
            case.problem, bilax.iaptt_gm(5, case.step_size), case.x, case.z, steps=3, data=case.data, **optimisers
        )

    both = run(optimizer=optax.adam(1e-2))
    still = run(optimizer=optax.adam(1e-2), z_optimizer=optax.sgd(1e-12))
    assert optax.tree.norm(jax.tree.map(jnp.subtract, both.z, case.z)) > 1e-3
    assert optax.tree.norm(jax.tree.map(jnp.subtract, still.z, case.z)) < 1e-9


def test_history_tells_what_phi_and_its_gradient_were():
    case = neural()
    method = bilax.iaptt_gm(5, case.step_size)
    solution = bilax.solve(case.problem, method, case.x, case.z, steps=2, data=case.data)
    phi = bilax.approximate(case.problem, method)
    (value, info), (gx, gz) = jax.value_and_grad(phi, (0, 1), has_aux=True)(case.x, case.z, *case.data)
    first = [leaf[0] for leaf in jax.tree.leaves(solution.history)]
    expected = [value, info.lower, info.residual, info.k_bar, optax.tree.norm(gx), optax.tree.norm(gz), 5]
    np.testing.assert_allclose(first, expected, rtol=1e-12)
    seen = case.problem.view(case.x)
    slope = jax.grad(lambda y: case.problem.lower(seen, y, *case.data))(info.y)
    np.testing.assert_allclose(info.residual, case.step_size * optax.tree.norm(slope), rtol=1e-10)
    last, _ = phi(solution.x, solution.z, *case.data)
    np.testing.assert_allclose(solution.upper, last, rtol=1e-12)


def test_a_users_record_is_kept_for_each_outer_step():
    problem, method = toy().problem, bilax.iaptt_gm(3, 1e-2)

    def record(x, z, info):
        return {"x": x, "gap": info.y_last - z}

    solution = bilax.solve(problem, method, 5.0, 1.0, steps=4, record=record)
    shorter = bilax.solve(problem, method, 5.0, 1.0, steps=3)
    assert solution.history.record["x"].shape == (4,)
    np.testing.assert_array_equal(solution.history.record["x"][[0, 3]], [5.0, shorter.x])


def test_data_may_be_a_function_of_step_and_key():
    problem = bilax.Problem(lambda x, y, t: (x - t) ** 2 + 0 * y, lambda x, y, t: 0.5 * y**2)
    method = bilax.rhg(1, 0.1)

    def noisy(step, key):
        return (jax.random.normal(key) + step,)

    keys = jax.random.key(1), jax.random.key(1), jax.random.PRNGKey(1), jax.random.key(2)
    runs = [bilax.solve(problem, method, 0.0, 0.0, steps=5, data=noisy, key=key) for key in keys]
    for run in runs[1:3]:
        np.testing.assert_array_equal(runs[0].history.upper, run.history.upper)
    assert not np.allclose(runs[0].history.upper, runs[3].history.upper)
    expected = [(jax.random.normal(jax.random.fold_in(jax.random.key(1), 0)) + 0) ** 2]
    np.testing.assert_allclose(runs[0].history.upper[:1], expected, rtol=1e-12)


CONVEX = {
    "rhg": bilax.rhg(50, 0.2, start="warm"),
    "ls": bilax.ls(50, 0.2, start="warm"),
    "ia_gm_a": bilax.ia_gm_a(50, 0.2),
}


@pytest.mark.parametrize("method", CONVEX.values(), ids=CONVEX)
def test_a_convex_problem_converges_to_its_solution(method):
    case, hypergradient = quadratic()
    solution = bilax.solve(
        case.problem, method, case.x, case.z, steps=5000, data=case.data, tolerance=1e-7, optimizer=optax.sgd(0.05)
    )
    assert solution.status is bilax.Status.converged
    assert 10 < solution.steps < 5000
    assert len(solution.history.upper) == solution.steps
    assert float(jnp.linalg.norm(hypergradient(solution.x))) < 1e-4


def test_a_second_call_compiles_nothing():
    problem, method, optimizer = toy().problem, bilax.iaptt_gm(3, 1e-2), optax.sgd(0.1)
    bilax.solve(problem, method, 1.0, 2.0, steps=4, optimizer=optimizer)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **kwargs: compiled.append(event))
    bilax.solve(problem, method, 5.0, 1.0, steps=4, optimizer=optimizer)
    assert not [name for name in compiled if "backend_compile" in name]


def test_a_users_own_dynamics_and_rule_fit_without_touching_the_package():
    class SignDescent:
        def init(self, y):
            return y, jnp.zeros((), int)

        def step(self, k, state, follower):
            y, count = state
            return follower.project(y - 0.01 * jnp.tanh(jax.grad(follower.lower)(y))), count + 1

        def point(self, state):
            return state[0]

        def residual_step(self, k):
            return 0.01

    class HalfTruth:
        def keep(self, inner_steps):
            return None

        def has_z_gradient(self, inner_steps):
            return True

        def check(self, method):
            pass

        def pullback(self, run, v):
            return bilax.Cotangents(jax.tree.map(jnp.zeros_like, run.params), jax.tree.map(lambda a: a / 2, v))

    case = toy()
    mine = bilax.Method(6, SignDescent(), bilax.pessimistic())
    phi = bilax.approximate(case.problem, mine)
    gradient = jax.grad(lambda x: phi(x, case.z)[0])(case.x)
    np.testing.assert_allclose(gradient, central_difference(lambda x: phi(x, case.z)[0], case.x, 1.0), rtol=1e-7)
    half = bilax.iaptt_gm(6, 5e-3, derivative=HalfTruth())
    _, gz = jax.value_and_grad(bilax.approximate(case.problem, half), 1, has_aux=True)(case.x, case.z)
    np.testing.assert_allclose(gz, case.x / 2)
    assert bilax.solve(case.problem, half, case.x, case.z, steps=2).steps == 2


shapes = st.lists(st.lists(st.integers(1, 2), max_size=2).map(tuple), min_size=1, max_size=3)


@settings(max_examples=8)  # each compiles three programs
@given(
    shapes=shapes,
    wrap=st.sampled_from([tuple, list, lambda leaves: {str(i): leaf for i, leaf in enumerate(leaves)}]),
    y_set=st.sampled_from([bilax.Reals(), bilax.Box(-0.7, 0.9), bilax.Ball(1.0), bilax.NonNegative(), bilax.Simplex()]),
    count=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_reverse_equals_forward_for_any_tree_set_and_steps(shapes, wrap, y_set, count, seed):
    rng = np.random.default_rng(seed)
    y = wrap([jnp.asarray(rng.normal(size=shape)) for shape in shapes])
    y = y_set.project(y)
    alphas = [float(a) for a in rng.uniform(0.01, 0.3, size=count)]
    problem = bilax.Problem(
        lambda x, y: sum(jnp.sum(jnp.sin(leaf) * x) for leaf in jax.tree.leaves(y)),
        lambda x, y: sum(jnp.sum(jnp.cos(leaf * x) + 0.5 * (leaf - x) ** 2) for leaf in jax.tree.leaves(y)),
        y_set=y_set,
    )
    x = jnp.asarray(rng.normal())
    results = []
    for rule in (bilax.Reverse(), bilax.Forward(), bilax.Reverse(checkpoint=True)):
        phi = bilax.approximate(problem, bilax.iaptt_gm(count, alphas, derivative=rule))
        results.append(jax.value_and_grad(phi, (0, 1), has_aux=True)(x, y))
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), results[0], other)


def test_a_python_number_beside_single_precision():
    """Under x64 a Python number is a double whose dtype gave way, in one branch of a condition and not in the other."""
    problem = bilax.Problem(lambda x, y: jnp.sum((y - 1) ** 2) + x**2, lambda x, y: jnp.sum((y - x) ** 2))
    solution = bilax.solve(problem, bilax.rhg(3, 0.25), 0.0, jnp.zeros(2, jnp.float32), steps=60)
    np.testing.assert_allclose(solution.x, 1.75 / (2 * 0.875**2 + 1), atol=1e-5)  # y = 0.875 x


def test_a_run_whose_follower_is_far_from_solved_does_not_end_as_converged():
    """A step of 1e-12 makes every residual small; x stands still, for nothing answers to it."""
    problem = bilax.Problem(lambda x, y: jnp.sum((y - 1) ** 2) + x**2, lambda x, y: jnp.sum((y - x) ** 2))
    ends = [
        bilax.solve(problem, bilax.rhg(3, step), 0.5, jnp.zeros(2), steps=200, tolerance=1e-3).status
        for step in (1e-12, 0.5)
    ]
    assert ends == [bilax.Status.doubtful, bilax.Status.converged]


def test_a_follower_outside_of_its_set_does_not_count_as_converged():
    """An algorithm of somebody's own that forgets Y."""

    class Forgetful(NamedTuple):
        def init(self, problem, x0, y0, data):
            return x0, y0

        def step(self, problem, carry, data, key):
            x, y = carry[0], jnp.full_like(carry[1], 10.0)
            return (x, y), evaluate(problem, x, y, data, converged=True)._replace(residual=0.0)

        def point(self, carry):
            return carry

    problem = bilax.Problem(lambda x, y: x**2, lambda x, y: jnp.sum((y - 10) ** 2), y_set=lambda x: bilax.Box(0, x))
    assert bilax.solve(problem, Forgetful(), 1.0, jnp.zeros(2)).status is bilax.Status.doubtful
    assert bilax.solve(problem, Forgetful(), 10.0, jnp.zeros(2)).status is bilax.Status.converged


@pytest.mark.parametrize(("momentum", "told"), [(0.99, True), (0.0, False)])
def test_a_run_that_passed_a_lower_upper_tells_where(momentum, told):
    """With momentum x swings through the minimum of F = (x − 1)² and is beyond it at the end; without, it creeps."""
    problem = bilax.Problem(lambda x, y: (y - 1.0) ** 2, lambda x, y: (y - x) ** 2)
    optimizer = optax.sgd(1e-3, momentum=momentum)
    solution = bilax.solve(problem, bilax.rhg(1, 0.5), 0.0, 0.0, steps=70, optimizer=optimizer)
    text = repr(solution)
    lowest = int(np.argmin(solution.history.upper))
    assert ("but upper=" in text) is told
    if told:
        near = re.search(r"near step (\d+)", text)
        assert near is not None
        assert abs(int(near[1]) - lowest) <= 2
        assert solution.history.upper[-1] > 0.1


def test_a_low_upper_of_a_follower_that_was_not_solved_yet_is_not_told():
    """On its way from y0 = 0 to its minimum at 1 the follower passes where F is lowest."""
    problem = bilax.Problem(lambda x, y: (y - 0.5) ** 2, lambda x, y: (y - 1.0) ** 2 + x**2)
    method = bilax.soba(0.02, 1e-3)
    solution = bilax.solve(problem, method, 0.5, 0.0, steps=200)
    assert np.min(solution.history.upper) < solution.upper - 0.2
    assert "but upper=" not in repr(solution)
