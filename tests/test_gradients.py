"""Every derivative rule against finite differences, against the others and against closed forms, in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilax
from tests.problems import (
    Case,
    batched,
    central_difference,
    directions,
    neural,
    one_sided_difference,
    quadratic,
    toy,
)

K = 7
EXACT = {
    "reverse": bilax.Reverse(),
    "checkpointed": bilax.Reverse(checkpoint=True),
    "window": bilax.Reverse(window=K),
    "forward": bilax.Forward(),
}
DYNAMICS = {
    "descent": lambda a: bilax.GradientDescent(a),
    "descent, sequence": lambda a: bilax.GradientDescent([a / (1 + 0.1 * k) for k in range(K)]),
    "descent, schedule": lambda a: bilax.GradientDescent(lambda k: a / (1 + 0.1 * k)),
    "nesterov": lambda a: bilax.Nesterov(a, "paper"),
    "fista": lambda a: bilax.Nesterov(a, "fista"),
    "aggregated": lambda a: bilax.Aggregated(a, 0.4),
    "optax": lambda a: bilax.FromOptax(optax.adam(a, eps_root=1e-8)),
}
SELECT = {"last": bilax.Last(), "pessimistic": bilax.pessimistic()}
CASES = {
    "toy, interior": toy(),
    "toy, bound active all along": toy(1.3, 2.0, 0.9),
    "toy, bound reached on the way": toy(1.3, -1.9, 0.9),
    "quadratic": quadratic()[0],
    "neural": neural(),
    "neural, a batch at each step": batched(),
}

KINDS = {"toy": toy().problem, **{name: CASES[name].problem for name in CASES if not name.startswith("toy")}}


def gradients(case: Case, method: bilax.Method):
    phi = bilax.approximate(case.problem, method)
    (value, info), grads = jax.jit(jax.value_and_grad(phi, (0, 1), has_aux=True))(case.x, case.z, *case.data)
    return value, info, grads


def value_of(case: Case, method: bilax.Method):
    phi = bilax.approximate(case.problem, method)
    return jax.jit(lambda pair: phi(*pair, *case.data)[0])


def assert_close(a, b, rtol):
    scale = max(1e-3, *(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves((a, b))))
    jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=0, atol=rtol * scale), a, b)


COMBINATIONS = [
    (case, dynamics, select)
    for case, dynamics, select in itertools.product(CASES, DYNAMICS, SELECT)
    # The three kinds of step length differ in one look-up; one small case is enough to tell them apart.
    if case == "toy, interior" or dynamics not in ("descent, sequence", "descent, schedule")
]


@functools.cache
def by_all_rules(kind: str, step_size: float, dynamics: str, select: str):
    """Value, info and gradients by every exact rule, and values at many points, as two programs for all points."""
    problem = KINDS[kind]
    phis = {
        name: bilax.approximate(problem, bilax.Method(K, DYNAMICS[dynamics](step_size), SELECT[select], rule))
        for name, rule in EXACT.items()
    }

    @jax.jit
    def found(x, z, data):
        return {name: jax.value_and_grad(phi, (0, 1), has_aux=True)(x, z, *data) for name, phi in phis.items()}

    @jax.jit
    def values(pairs, data):
        return jax.vmap(lambda pair: phis["reverse"](*pair, *data)[0])(pairs)

    return found, values


@pytest.mark.parametrize(("case", "dynamics", "select"), COMBINATIONS, ids=lambda v: v.replace(" ", "-"))
def test_exact_rules_agree_with_differences_and_each_other(case, dynamics, select):
    problem = CASES[case]
    found, values = by_all_rules(case if case in KINDS else "toy", problem.step_size, dynamics, select)
    by_rule = found(problem.x, problem.z, problem.data)
    (value, info), expected = by_rule["reverse"]
    assert jnp.isfinite(value)
    assert 1 <= int(info.k_bar) <= K
    for name in ("checkpointed", "window", "forward"):
        (other_value, other_info), actual = by_rule[name]
        assert int(other_info.k_bar) == int(info.k_bar)
        np.testing.assert_allclose(other_value, value, rtol=1e-12)
        assert_close(actual, expected, 1e-10)

    pairs, inwards = [], case == "toy, bound active all along"
    for seed, which in itertools.product(range(2), (0, 1)):
        pair = [jax.tree.map(np.zeros_like, part) for part in (problem.x, problem.z)]
        pair[which] = directions((problem.x, problem.z)[which], seed)
        # A start on the bound has a derivative towards the inside alone: beyond, it is brought back.
        pair[1] = jax.tree.map(lambda leaf: -np.abs(leaf), pair[1]) if inwards else pair[1]
        pairs.append(tuple(pair))
    along = jax.tree.map(lambda *leaves: np.stack(leaves), *pairs)
    point = jax.tree.map(np.asarray, (problem.x, problem.z))
    difference = one_sided_difference if inwards else central_difference
    measured = difference(lambda pairs: np.asarray(values(pairs, problem.data)), point, along, 1e-5)
    claimed = [
        sum(np.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (expected, pair)), strict=True)) for pair in pairs
    ]
    np.testing.assert_allclose(claimed, measured, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("start", ["fixed", "warm", "auxiliary"])
@pytest.mark.parametrize(
    ("case", "select"), [("toy, interior", "last"), ("toy, interior", "pessimistic"), ("neural", "pessimistic")]
)
def test_starts_move_by_the_gradient_of_phi(case, select, start):
    """One outer step of gradient descent is the gradient itself, for x and, with an auxiliary, for z."""
    problem, rate = CASES[case], 1e-3
    method = bilax.Method(K, bilax.GradientDescent(problem.step_size), SELECT[select], start=start)
    solution = bilax.solve(
        problem.problem, method, problem.x, problem.z, steps=1, optimizer=optax.sgd(rate), data=problem.data
    )
    _, info, (grad_x, grad_z) = gradients(problem, method)
    assert_close(jax.tree.map(lambda a, b: (a - b) / rate, problem.x, solution.x), grad_x, 1e-9)
    expected = {
        "fixed": problem.z,
        "warm": info.y_last,
        "auxiliary": jax.tree.map(lambda z, g: z - rate * g, problem.z, grad_z),
    }
    assert_close(solution.z, expected[start], 1e-12)


@pytest.mark.parametrize("window", [1, 6])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("select", list(SELECT))
def test_window_equals_the_gradient_of_the_last_steps(window, checkpoint, select):
    """A window differentiates as if the trajectory began, constant, `window` steps before k̄."""
    case = neural()
    cut = bilax.Method(
        K, bilax.GradientDescent(case.step_size), SELECT[select], bilax.Reverse(window, checkpoint=checkpoint)
    )
    _, info, (grad_x, grad_z) = gradients(case, cut)
    k_bar = int(info.k_bar)
    before = case.z
    if k_bar > window:
        head = bilax.rhg(k_bar - window, case.step_size)
        before = bilax.approximate(case.problem, head)(case.x, case.z, *case.data)[1].y_last
        assert optax.tree.norm(grad_z) == 0
    _, _, (expected, _) = gradients(case._replace(z=before), bilax.rhg(min(window, k_bar), case.step_size))
    assert_close(grad_x, expected, 1e-10)


def test_k_bar_is_the_first_maximum_and_counts_from_one():
    case = toy(5.0, 1.0, 5e-3)
    values = [
        float(bilax.approximate(case.problem, bilax.rhg(k, case.step_size))(case.x, case.z)[0]) for k in range(1, K + 1)
    ]
    for x, z, expected in [(5.0, 1.0, int(np.argmax(values)) + 1), (5.0, 0.0, K), (5.0, -0.5, 1)]:
        _, info = bilax.approximate(case.problem, bilax.iaptt_gm(K, case.step_size))(x, z)
        assert int(info.k_bar) == expected
    # A constant score is a tie everywhere: the first index wins, also without a gradient being taken.
    tie = bilax.Method(K, bilax.GradientDescent(0.1), bilax.ArgMax(lambda follower, y: 0.0 * y))
    assert int(bilax.approximate(case.problem, tie)(5.0, 1.0)[1].k_bar) == 1
    assert int(gradients(case, tie)[1].k_bar) == 1


@pytest.mark.parametrize(
    "y_set", [bilax.Reals(), bilax.Box(-0.3, 0.4), bilax.NonNegative(), bilax.Ball(0.5), bilax.Simplex()]
)
def test_implicit_rules_reach_the_derivative_of_the_solution(y_set):
    """With the follower solved, CG, GMRES and Neumann give what differentiating the solution map gives."""
    case, closed_form = quadratic()
    case = case._replace(
        problem=bilax.Problem(case.problem.upper, case.problem.lower, y_set=y_set), z=jnp.full(4, 0.25)
    )
    solved = bilax.rhg(2000, 0.2)
    function = value_of(case, solved)
    direction = directions(case.x, 3)
    expected = central_difference(lambda x: function((x, case.z)), case.x, direction)
    if isinstance(y_set, bilax.Reals):
        np.testing.assert_allclose(direction @ closed_form(case.x), expected, rtol=1e-8)
    methods = {
        "ls": bilax.ls(2000, 0.2, tolerance=1e-12, max_steps=200),
        "ns": bilax.ns(2000, 0.2, terms=2000),
    }
    for method in methods.values():
        _, info, (grad_x, grad_z) = gradients(case, method)
        assert bool(info.solved)
        np.testing.assert_allclose(direction @ grad_x, expected, rtol=1e-7)
        assert not np.any(grad_z)


def test_implicit_rules_converge_to_the_closed_form():
    case, closed_form = quadratic()
    exact = closed_form(case.x)

    def error(method):
        return float(jnp.linalg.norm(gradients(case, method)[2][0] - exact))

    by_steps = [error(bilax.ls(500, 0.2, tolerance=None, max_steps=steps)) for steps in (1, 2, 4)]
    by_terms = [error(bilax.ns(500, 0.2, terms=terms)) for terms in (1, 5, 25, 125)]
    assert by_steps[0] > by_steps[1] > by_steps[2]
    assert by_steps[2] < 1e-9
    assert by_terms[0] > by_terms[1] > by_terms[2] > by_terms[3]
    assert by_terms[3] < 1e-6


def test_a_linear_solve_that_stalls_says_so():
    case, _ = quadratic()
    method = bilax.rhg(50, 0.2, derivative=bilax.Implicit(1e-10, max_steps=1, dense=0))
    *_, info, _ = gradients(case, method)
    assert not bool(info.solved)
    assert float(info.solve_error) > 1e-10
    solution = bilax.solve(case.problem, method, case.x, case.z, data=case.data)
    assert solution.status is bilax.Status.linear_solve_failed
    np.testing.assert_array_equal(solution.x, case.x)
    assert np.isfinite(solution.upper)


@pytest.mark.parametrize(
    "case", ["toy, interior", "toy, bound active all along", "neural", "neural, a batch at each step"]
)
def test_finite_differences_approach_the_exact_step(case):
    problem = CASES[case]
    *_, exact = gradients(problem, bilax.one_step(problem.step_size))
    errors = []
    for epsilon in (1e-1, 1e-2, 1e-3):
        *_, near = gradients(problem, bilax.one_step(problem.step_size, epsilon=epsilon))
        errors.append(float(optax.tree.norm(jax.tree.map(jnp.subtract, near, exact))))
    assert errors[2] <= 1e-6 * (1 + float(optax.tree.norm(exact)))
    assert errors[1] <= errors[0]


def test_first_order_and_displacement_are_what_they_say():
    case = neural()
    _, info, (grad_x, grad_z) = gradients(case, bilax.fomaml(K, case.step_size))

    def upper(x, y):
        return case.problem.upper(case.problem.view(x), y, *case.data)

    assert_close((grad_x, grad_z), jax.grad(upper, (0, 1))(case.x, info.y), 1e-12)
    *_, (_, grad_z) = gradients(case, bilax.reptile(K, case.step_size))
    assert_close(grad_z, jax.tree.map(jnp.subtract, case.z, info.y), 1e-12)


@pytest.mark.parametrize("rule", [bilax.Reverse(), bilax.Implicit(1e-3)], ids=["reverse", "implicit"])
def test_steps_descend_on_their_batches_and_all_else_means_f(rule):
    case = batched()
    problem, data = case.problem, case.data
    _, info, (grad_x, _) = gradients(case, bilax.rhg(K, case.step_size, derivative=rule))
    seen, y = problem.view(case.x), case.z
    for k in range(K):
        rows = np.arange(2 * k, 2 * k + 2) % 6
        part = {"each": seen["each"][rows], "rate": seen["rate"]}
        slope = jax.grad(problem.lower, 1)(part, y, data[0][rows], data[1][rows], *data[2:])
        y = jax.tree.map(lambda a, g: a - case.step_size * g, y, slope)
    assert_close(info.y_last, y, 1e-12)
    np.testing.assert_allclose(info.lower, problem.lower(seen, y, *data), rtol=1e-12)
    slope = jax.grad(problem.lower, 1)(seen, y, *data)
    np.testing.assert_allclose(info.residual, case.step_size * optax.tree.norm(slope), rtol=1e-12)
    if isinstance(rule, bilax.Implicit):
        plain = case._replace(problem=neural().problem, z=y)
        *_, (expected, _) = gradients(plain, bilax.rhg(1, 1e-12, derivative=rule))
        assert_close(grad_x, expected, 1e-7)


def test_batches_may_be_drawn_with_a_key_among_the_data():
    points = jnp.linspace(-1, 2, 40)
    problem = bilax.Problem(
        lambda x, y, key: (y - 1) ** 2,
        lambda x, y, key: jnp.mean((y - x * points) ** 2),
        lower_at=lambda k, x, y, key: jnp.mean(
            (y - x * jax.random.choice(jax.random.fold_in(key, k), points, (5,))) ** 2
        ),
    )
    phi = bilax.approximate(problem, bilax.rhg(20, 0.1))
    values = [float(phi(1.0, 0.0, jax.random.key(seed))[0]) for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]

    def value(x):
        return phi(x, 0.0, jax.random.key(3))[0]

    np.testing.assert_allclose(jax.grad(value)(0.7), central_difference(value, 0.7, 1.0), rtol=1e-8)
    run = bilax.solve(
        problem, bilax.rhg(20, 0.1), 0.7, 0.0, steps=300, optimizer=optax.adam(0.02), data=lambda step, key: (key,)
    )
    # x must lift the mean of the points, 1/2, to 1.
    np.testing.assert_allclose(run.x, 2, atol=0.25)


def test_maml_on_an_empty_leader_over_tasks():
    """x = (), tasks as a vmap of φ: the gradient is the mean of the tasks' gradients."""
    problem = bilax.Problem(lambda x, y, t: jnp.sum((y - t) ** 4), lambda x, y, t: jnp.sum(jnp.cosh(y - t)))
    phi = bilax.approximate(problem, bilax.maml(5, 0.1))
    tasks = jnp.linspace(-1, 1, 12).reshape(4, 3)
    z = jnp.asarray([0.3, -0.2, 0.1])

    def loss(z):
        return jnp.mean(jax.vmap(lambda t: phi((), z, t)[0])(tasks))

    expected = jnp.mean(jnp.stack([jax.grad(lambda z, t: phi((), z, t)[0])(z, t) for t in tasks]), 0)
    np.testing.assert_allclose(jax.grad(loss)(z), expected, rtol=1e-12)
    np.testing.assert_allclose(
        jnp.vdot(jax.grad(loss)(z), jnp.ones(3)), central_difference(loss, z, jnp.ones(3)), rtol=1e-8
    )


@pytest.mark.parametrize("rule", [*EXACT.values(), bilax.Implicit(), bilax.Neumann(5)], ids=str)
@pytest.mark.parametrize("select", list(SELECT))
def test_vmap_equals_a_loop(rule, select):
    """Also where each start has its own k̄."""
    case = toy()
    phi = bilax.approximate(case.problem, bilax.Method(K, bilax.GradientDescent(2e-2), SELECT[select], rule))
    gradient = jax.value_and_grad(phi, (0, 1), has_aux=True)
    xs, zs = jnp.linspace(1.5, 9.0, 6), jnp.linspace(-1.9, 1.7, 6)
    (values, infos), grads = jax.vmap(gradient)(xs, zs)
    if select == "pessimistic":
        assert len(set(np.asarray(infos.k_bar).tolist())) > 1
    for i in range(6):
        (value, info), (gx, gz) = gradient(xs[i], zs[i])
        np.testing.assert_allclose(values[i], value, rtol=1e-13)
        np.testing.assert_allclose([grads[0][i], grads[1][i]], [gx, gz], rtol=1e-11, atol=1e-14)
        assert int(infos.k_bar[i]) == int(info.k_bar)


def test_context_is_a_chain_rule_and_data_can_be_differentiated():
    case = neural()
    method = bilax.iaptt_gm(K, case.step_size)
    plain = bilax.Problem(
        lambda x, y, *d: case.problem.upper(case.problem.view(x), y, *d),
        lambda x, y, *d: case.problem.lower(case.problem.view(x), y, *d),
    )
    *_, with_context = gradients(case, method)
    *_, without = gradients(case._replace(problem=plain), method)
    assert_close(with_context, without, 1e-11)

    phi = bilax.approximate(case.problem, method)

    def of_targets(targets):
        return phi(case.x, case.z, case.data[0], targets, *case.data[2:])[0]

    direction = directions(case.data[1], 5)
    np.testing.assert_allclose(
        direction @ jax.grad(of_targets)(case.data[1]),
        central_difference(of_targets, case.data[1], direction),
        rtol=1e-7,
    )


def test_forward_over_the_gradient_gives_second_derivatives():
    case = toy()
    phi = bilax.approximate(case.problem, bilax.iaptt_gm(K, case.step_size))
    slope = jax.grad(lambda x: phi(x, case.z)[0])
    np.testing.assert_allclose(jax.jacfwd(slope)(case.x), central_difference(slope, case.x, 1.0), rtol=1e-7)


def test_forward_mode_pays_for_what_is_asked():
    problem = bilax.Problem(lambda x, y: jnp.sum(y**3) * x, lambda x, y: jnp.sum(jnp.cosh(y - x) * (1 + y**2)))
    z = jnp.linspace(-1, 1, 7)
    forward, reverse = (bilax.approximate(problem, recipe(4, 0.05)) for recipe in (bilax.fhg, bilax.rhg))

    def slope(phi, arguments):
        return jax.grad(lambda x, z: phi(x, z)[0], arguments)

    for arguments, tangents in ((0, 1), (1, 7), ((0, 1), 8)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10),
            *(slope(phi, arguments)(0.3, z) for phi in (forward, reverse)),
        )
        program = str(jax.make_jaxpr(slope(forward, arguments))(0.3, z))
        assert f"f64[{tangents},7]" in program
        assert all(f"f64[{n},7]" not in program for n in (7, 8) if n != tangents)


def test_single_precision_keeps_its_type_through_every_dynamics():
    case = toy()
    x, z = jnp.asarray(5.0, jnp.float32), jnp.asarray(1.0, jnp.float32)
    for make in DYNAMICS.values():
        phi = bilax.approximate(case.problem, bilax.Method(K, make(0.01), bilax.pessimistic()))
        value, grads = jax.value_and_grad(lambda x, z, phi=phi: phi(x, z)[0], (0, 1))(x, z)
        assert {leaf.dtype for leaf in (value, *grads)} == {jnp.dtype("float32")}


def test_the_error_of_an_iterated_solve_does_not_grow_with_the_scale_of_the_follower():
    matrix = np.random.default_rng(0).standard_normal((60, 20))

    def lower(x, y):
        return 1e4 * (jnp.mean((matrix @ y - 1) ** 2) + jnp.exp(x) * jnp.sum(y**2))

    with jax.enable_x64(True):
        problem = bilax.Problem(lambda x, y: jnp.sum((y - 1) ** 2), lower)
        rule = bilax.Implicit(1e-2, 100, dense=0)
        method = bilax.Method(300, bilax.LBFGS(), derivative=rule, follower_tolerance=1e-10)
        slope = jax.grad(bilax.approximate(problem, method), has_aux=True)(0.0, jnp.zeros(20))[0]

    def exact(x):
        w = np.linalg.solve(matrix.T @ matrix / 60 + np.exp(x) * np.eye(20), matrix.T @ np.ones(60) / 60)
        return np.sum((w - 1) ** 2)

    assert float(slope) == pytest.approx((exact(1e-4) - exact(-1e-4)) / 2e-4, rel=1e-2)


@pytest.mark.parametrize("rule", [bilax.Reverse(), bilax.Forward(), bilax.Reverse(window=2)])
def test_a_start_outside_of_y_begins_at_the_nearest_point(rule):
    """z = (5, 0.3) where Y = [0, x]: the trajectory begins at (x, 0.3), and that x has a derivative."""
    problem = bilax.Problem(
        lambda x, y: jnp.sum(jnp.sin(y)), lambda x, y: jnp.sum((y - 0.2) ** 4), y_set=lambda x: bilax.Box(0.0, x)
    )
    phi = bilax.approximate(problem, bilax.Method(3, bilax.GradientDescent(0.1), derivative=rule))
    x, z = jnp.asarray(1.0), jnp.asarray([5.0, 0.3])
    (value, info), (grad_x, grad_z) = jax.value_and_grad(phi, (0, 1), has_aux=True)(x, z)
    assert np.all(info.y <= x)
    np.testing.assert_allclose(value, phi(x, jnp.asarray([1.0, 0.3]))[0])
    if rule == bilax.Reverse(window=2):  # the cut leaves nothing of where it began
        assert grad_x == 0
        assert np.all(grad_z == 0)
        return
    step = 1e-6
    np.testing.assert_allclose(grad_x, (phi(x + step, z)[0] - phi(x - step, z)[0]) / (2 * step), rtol=1e-7)
    assert grad_x != 0
    difference = [(phi(x, z + step * row)[0] - phi(x, z - step * row)[0]) / (2 * step) for row in np.eye(2)]
    np.testing.assert_allclose(grad_z, difference, rtol=1e-7, atol=1e-12)


def test_a_start_on_the_boundary_is_inside_and_stays_as_it_is():
    """At a vertex of the simplex, whose projection has no derivative across the face, z still counts."""
    problem = bilax.Problem(lambda x, y: y[0] - y[1], lambda x, y: 0.5 * jnp.sum((y - x) ** 2), y_set=bilax.Simplex())
    phi = bilax.approximate(problem, bilax.Method(1, bilax.GradientDescent(0.5)))
    grad_z = jax.grad(phi, 1, has_aux=True)(jnp.asarray([0.3, 0.3, 0.4]), jnp.asarray([1.0, 0.0, 0.0]))[0]
    np.testing.assert_allclose(grad_z, [0.5, -0.5, 0.0], atol=1e-12)


def test_states_kept_within_a_number_of_bytes():
    """However few states are kept, the gradient is the same; the plan says how many there are."""
    case, steps = toy(), 23
    state = 8  # bytes of y

    def gradient(checkpoint, window=None):
        rule = bilax.Reverse(window, checkpoint=checkpoint)
        method = bilax.Method(steps, bilax.GradientDescent(case.step_size), bilax.pessimistic(), rule)
        phi = bilax.approximate(case.problem, method)
        return rule.plan(method, case.z), jax.grad(lambda x, z: phi(x, z)[0], (0, 1))(case.x, case.z)

    everything, expected = gradient(False)
    assert (everything.states, everything.spacings) == (steps, (1,))
    cut = gradient(False, window=4)[1]
    for room, spacings in ((steps, (1,)), (steps - 1, (5, 1)), (9, (9, 3, 1))):
        plan, found = gradient(room * state)
        assert plan.spacings == spacings
        assert plan.states <= room
        assert plan.bytes == plan.states * state
        np.testing.assert_allclose(found, expected, rtol=1e-13)
        np.testing.assert_allclose(gradient(room * state, window=4)[1], cut, rtol=1e-13)
    with pytest.raises(ValueError, match=f"at least {9 * state} are needed"):
        gradient(8 * state)
    with pytest.raises(ValueError, match="checkpoint must be True, False or a number of bytes"):
        gradient(0)


def test_phi_can_be_jitted_whatever_the_problem_holds():
    sets = {"a": bilax.Box(np.zeros(2), np.ones(2)), "b": bilax.Reals()}
    problem = bilax.Problem(lambda x, y: y @ y, lambda x, y: jnp.sum((y - x["a"] - x["b"]) ** 2), bilax.Product(sets))
    phi = bilax.approximate(problem, bilax.rhg(3, 0.1))
    x, z = {"a": jnp.zeros(2), "b": jnp.asarray(1.0)}, jnp.zeros(2)
    np.testing.assert_allclose(jax.jit(phi)(x, z)[0], phi(x, z)[0])
