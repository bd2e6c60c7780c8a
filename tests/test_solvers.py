"""Followers that are solved: every solver against SciPy, when it stops, and derivatives of the steps taken."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
from jax.flatten_util import ravel_pytree

import bilax
from bilax.follower.lbfgs import inverse_curvature, no_pairs, remember
from bilax.follower.several_starts import SeveralStarts
from tests.followers import FOLLOWERS, FollowerCase, X
from tests.problems import central_difference

SOLVERS = {
    "newton": bilax.Newton(),
    "lbfgs": bilax.LBFGS(),
    "descent": bilax.GradientDescent(None),
    "fista": bilax.Nesterov(None, "fista"),
    "optax": bilax.FromOptax(optax.lbfgs()),
}
CASES = (
    [("newton", name) for name in FOLLOWERS if name not in ("lq", "box of x", "simplex of x")]
    + [("lbfgs", name) for name in FOLLOWERS if FOLLOWERS[name].flat and name not in ("box of x", "simplex of x")]
    + [(solver, name) for solver in ("descent", "fista") for name in ("logistic", "box", "group lasso")]
    + [("optax", name) for name in ("logistic", "rosenbrock")]
)


def run(case: FollowerCase, dynamics, tolerance=1e-9, steps=2000, dtype: type = np.float64):
    method = bilax.Method(steps, dynamics, follower_tolerance=tolerance)
    start = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), case.start)
    return bilax.approximate(case.problem, method)(X.astype(dtype), start)[1]


def slope_at(case: FollowerCase, y):
    return np.asarray(ravel_pytree(jax.grad(lambda y: case.lower(X, y))(y))[0])


def gap(name: str, y) -> float:
    """How far y may be from optimal: max over w in Y of ⟨∇f, y − w⟩, plus what the term says; written out for each Y.

    It is zero at a solution alone, where f is convex. Of unbounded Y, the largest coordinate of what should vanish.
    """
    case = FOLLOWERS[name]
    flat, slope = np.asarray(ravel_pytree(y)[0]), slope_at(case, y)
    y_set = case.y_set(X)
    if isinstance(y_set, bilax.Reals):
        return np.abs(slope).max()
    if isinstance(y_set, bilax.NonNegative):
        return max(-flat.min(), -slope.min(), abs(flat @ slope))
    if isinstance(y_set, bilax.Box):
        lo, hi = float(y_set.lo), float(y_set.hi)
        assert flat.min() >= lo
        assert flat.max() <= hi
        return slope @ flat - np.where(slope > 0, lo * slope, hi * slope).sum()
    if isinstance(y_set, bilax.Simplex):
        assert flat.min() >= 0
        assert abs(flat.sum() - 1) < 1e-12
        return slope @ flat - slope.min()
    if isinstance(y_set, bilax.Ball):
        centre, radius = float(y_set.centre), float(y_set.radius)
        assert np.linalg.norm(flat - centre) <= radius + 1e-12
        return float(slope @ (flat - centre) + radius * np.linalg.norm(slope))
    if isinstance(y_set, bilax.L1Ball):
        assert np.abs(flat).sum() <= float(y_set.radius) + 1e-12
        return slope @ flat + float(y_set.radius) * np.abs(slope).max()
    if isinstance(y_set, bilax.L1 | bilax.ElasticNet):
        weight = np.asarray(y_set.weight if isinstance(y_set, bilax.L1) else y_set.l1)
        slope = slope if isinstance(y_set, bilax.L1) else slope + float(y_set.l2) * flat
        return np.max(
            np.where(flat == 0, np.maximum(np.abs(slope) - weight, 0), np.abs(slope + weight * np.sign(flat)))
        )
    if isinstance(y_set, bilax.GroupL1):
        weight, rows, slopes = float(y_set.weight), flat.reshape(3, 2), slope.reshape(3, 2)
        zero = (rows == 0).all(1)
        norms = np.where(zero, 1, np.linalg.norm(rows, axis=1))
        held = np.maximum(np.linalg.norm(slopes, axis=1) - weight, 0)
        free = np.linalg.norm(slopes + weight * rows / norms[:, None], axis=1)
        return np.where(zero, held, free).max()
    return gap_by_scipy(case, y_set, flat, slope)


def gap_by_scipy(case, y_set, flat, slope) -> float:
    """Linear sets by a linear program over a large box around y; the cone and the product by their conditions."""
    match y_set:
        case bilax.Halfspace():
            rows = {"A_ub": np.asarray(y_set.a)[None], "b_ub": float(y_set.b)}
        case bilax.Hyperplane():
            rows = {"A_eq": np.asarray(y_set.a)[None], "b_eq": float(y_set.b)}
        case bilax.Affine():
            rows = {"A_eq": np.asarray(y_set.A), "b_eq": np.asarray(y_set.b)}
        case bilax.Polyhedron():
            rows = {"A_ub": y_set.G, "b_ub": np.full(5, y_set.h), "A_eq": y_set.A, "b_eq": np.asarray(y_set.b)}
        case bilax.SecondOrderCone():
            # Self-dual: y and the slope lie in the cone and are orthogonal.
            outside = max(np.linalg.norm(v[1:]) - v[0] for v in (flat, slope))
            return max(outside, abs(flat @ slope))
        case _:
            simplex = slope[3:] @ flat[3:] - np.exp(0.2) * slope[3:].min()
            return abs(slope[0]) + slope[1:3] @ flat[1:3] + 0.2 * np.linalg.norm(slope[1:3]) + simplex
    around = [(v - 1, v + 1) for v in flat]
    lowest = scipy.optimize.linprog(slope, bounds=around, **rows)  # pyright: ignore[reportArgumentType]
    assert lowest.success
    return slope @ flat - lowest.fun


@pytest.mark.parametrize(("solver", "name"), CASES, ids=lambda v: v.replace(" ", "-"))
def test_solves_the_follower(solver, name):
    """By conditions of optimality that are written out here, and without using up its steps."""
    exact = solver in ("newton", "lbfgs")
    # A line search that looks at values alone cannot tell slopes below the root of f's rounding.
    info = run(FOLLOWERS[name], SOLVERS[solver], 1e-9 if exact else 1e-6)
    assert int(info.steps) < (60 if solver == "newton" else 2000)
    # The stiff one's slopes are a million times what y is.
    limit = {"newton": 1e-8, "lbfgs": 1e-7}.get(solver, 1e-5)
    assert gap(name, info.y) <= limit * (1e4 if name == "stiff" else 1)


@pytest.mark.parametrize("name", ["logistic", "box", "lasso"])
def test_agrees_with_l_bfgs_b(name):
    """SciPy's own, with the lasso's variables split into their positive and negative parts."""
    case = FOLLOWERS[name]
    y_set = case.y_set(X)
    weight = float(y_set.weight) if name == "lasso" else 0.0
    value = jax.jit(jax.value_and_grad(lambda y: case.lower(X, y)))

    def split(parts):
        f, slope = value(parts[:6] - parts[6:])
        return float(f) + weight * parts.sum(), np.r_[slope, -slope] + weight

    def plain(y):
        f, slope = value(y)
        return float(f), np.asarray(slope)

    limits = {"logistic": [(None, None)] * 6, "box": [(-0.2, 0.3)] * 6, "lasso": [(0, None)] * 12}[name]
    fun, size = (split, 12) if name == "lasso" else (plain, 6)
    options = {"ftol": 0, "gtol": 1e-12, "maxiter": 10_000, "maxfun": 100_000}
    found = scipy.optimize.minimize(
        fun, np.full(size, 0.1), jac=True, method="L-BFGS-B", bounds=limits, options=options
    )
    expected = found.x[:6] - found.x[6:] if name == "lasso" else found.x
    np.testing.assert_allclose(run(case, bilax.Newton()).y, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["logistic", "simplex", "lasso"])
@pytest.mark.parametrize("solver", ["newton", "lbfgs"])
def test_single_precision_ends_at_the_same_point(solver, name):
    case = FOLLOWERS[name]
    info = run(case, SOLVERS[solver], 1e-5, 300, np.float32)
    assert jax.tree.leaves(info.y)[0].dtype == np.float32
    assert int(info.steps) < 100
    np.testing.assert_allclose(info.y, run(case, bilax.Newton()).y, atol=2e-3)


@pytest.mark.parametrize("solver", ["newton", "lbfgs", "descent"])
def test_when_it_stops_does_not_depend_on_scales(solver):
    """f multiplied, y stretched: as many steps, and the same solution."""

    def lower(x, y, by, stretch):
        return by * FOLLOWERS["logistic"].lower(X, y / stretch)

    problem = bilax.Problem(lambda x, y, by, stretch: jnp.sum(y / stretch), lower)
    phi = bilax.approximate(problem, bilax.Method(2000, SOLVERS[solver], follower_tolerance=1e-6))
    found = {}
    for by, stretch in ((1.0, 1.0), (1e-8, 1.0), (1e8, 1.0), (1.0, 1e-4), (1.0, 1e4), (1e-8, 1e3)):
        scales = jnp.asarray(by), jnp.asarray(stretch)  # arrays: numbers would be compiled in, each anew
        _, info = phi((), stretch * jnp.asarray(FOLLOWERS["logistic"].start), *scales)
        found[by, stretch] = int(info.steps), np.asarray(info.y) / stretch
    steps, y = found[1.0, 1.0]
    for other_steps, other in found.values():
        assert abs(other_steps - steps) <= (10 if solver == "descent" else 2)
        np.testing.assert_allclose(other, y, atol=1e-4)


@pytest.mark.parametrize(
    "solver",
    [
        bilax.Newton(),
        bilax.LBFGS(),
        bilax.GradientDescent(),
        SeveralStarts(bilax.Newton(), jnp.full((1, 2), 9.0)),
    ],
    ids=["newton", "l-bfgs", "descent", "several starts"],
)
def test_a_start_outside_of_y_comes_in_though_f_is_lower_there(solver):
    problem = bilax.Problem(
        lambda x, y: jnp.sum(y), lambda x, y: jnp.sum((y - 10) ** 2), y_set=lambda x: bilax.Box(0.0, x)
    )
    method = bilax.Method(20, solver, derivative=bilax.Implicit(), follower_tolerance=1e-6)
    (_, info), slope = jax.value_and_grad(bilax.approximate(problem, method), has_aux=True)(1.0, jnp.full(2, 5.0))
    np.testing.assert_allclose(info.y, 1.0)
    np.testing.assert_allclose(slope, 2.0)


def test_below_the_rounding_of_f_the_slope_tells_where_to_stop():
    """A follower on a pedestal of 100 in single precision, whose last digits are all that f has left to tell."""
    curvature, pull = jnp.linspace(1, 30, 12, dtype=np.float32), jnp.sin(jnp.arange(12, dtype=np.float32))

    def lower(x, y):
        return 100 + jnp.sum(jnp.cosh(y) - 1) + 0.5 * jnp.sum(curvature * y**2) - pull @ y

    method = bilax.Method(200, bilax.LBFGS(), derivative=bilax.Implicit(), follower_tolerance=1e-5)
    _, info = bilax.approximate(bilax.Problem(lambda x, y: jnp.sum(y), lower), method)((), jnp.zeros_like(pull))
    assert np.abs(jnp.sinh(info.y) + curvature * info.y - pull).max() < 1e-4
    assert int(info.steps) < 30


def test_a_searched_step_tells_at_once_when_it_is_solved():
    """At the first step whose slope is small, whatever its number, and without a gradient of its own."""
    curvature, start = jnp.asarray([1.0, 3.0, 9.0]), jnp.asarray([1.0, -2.0, 0.5])
    problem = bilax.Problem(lambda x, y: y @ y, lambda x, y: 0.5 * curvature @ (y - 1) ** 2)

    def end(count, tolerance=None):
        method = bilax.Method(count, bilax.GradientDescent(None), follower_tolerance=tolerance)
        return bilax.approximate(problem, method)(jnp.zeros(()), start)[1]

    def slope(count):
        return np.linalg.norm(curvature * (np.asarray(end(count).y) - 1))

    size = max(np.linalg.norm(curvature * (start - 1)), np.linalg.norm(curvature * start))
    steps = [int(end(100, tolerance).steps) for tolerance in (0.1, 3e-3, 1e-5)]
    for count, tolerance in zip(steps, (0.1, 3e-3, 1e-5), strict=True):
        assert slope(count - 1) <= tolerance * size < slope(count - 2)
    assert any(count % 10 for count in steps)


def test_the_length_of_a_proximal_step_is_the_least_inverse_curvature_of_the_pairs():
    curvature = jnp.asarray([0.5, 4.0, 2.0])
    pairs = no_pairs(2, curvature)
    assert inverse_curvature(pairs, jnp.asarray(7.0)) == 7
    for step in (jnp.eye(3)[0], jnp.eye(3)[1], jnp.eye(3)[2]):
        pairs = remember(pairs, step, curvature * step)
    assert inverse_curvature(pairs, jnp.asarray(7.0)) == pytest.approx(1 / 4)


def test_a_tiny_step_never_counts_as_solved():
    case = FOLLOWERS["logistic"]
    info = run(case, bilax.GradientDescent(1e-12), 1e-3, 50)
    assert int(info.steps) == 50
    assert float(info.residual) < 1e-10, "the residual is small, the follower far from solved"
    info = run(case, bilax.GradientDescent(0.5), 1e-3, 5000)
    assert int(info.steps) < 5000
    assert np.abs(slope_at(case, info.y)).max() < 1e-2


def test_the_history_tells_the_steps_taken():
    case = FOLLOWERS["logistic"]
    method = bilax.Method(50, bilax.Newton(), derivative=bilax.Implicit(), follower_tolerance=1e-9, start="warm")
    solution = bilax.solve(case.problem, method, X, jnp.asarray(case.start), steps=5, optimizer=optax.sgd(1e-3))
    steps = np.asarray(solution.history.follower_steps)
    assert steps.shape == (5,)
    assert steps[0] > steps[-1] >= 1, "a warm start needs fewer"
    assert steps[0] < 50


RULES = {"reverse": bilax.Reverse(), "checkpointed": bilax.Reverse(checkpoint=True), "forward": bilax.Forward()}
UNROLLED = {
    "descent": (bilax.GradientDescent(0.5), 1e-2),
    "descent, searched": (bilax.GradientDescent(None), 1e-2),
    "fista": (bilax.Nesterov(0.3, "fista"), 1e-1),
    "newton": (bilax.Newton(), 1e-2),
    "lbfgs": (bilax.LBFGS(), 1e-1),
}


@pytest.mark.parametrize("select", ["last", "pessimistic"])
@pytest.mark.parametrize("name", list(UNROLLED))
def test_derivatives_of_the_steps_taken(name, select):
    """Stopped where it is nearly solved: the exact rules sweep over those steps alone, and agree with differences."""
    dynamics, tolerance = UNROLLED[name]
    case = FOLLOWERS["box" if name == "descent" else "logistic"]
    z = jnp.asarray(case.start)
    choice = bilax.Last() if select == "last" else bilax.pessimistic()
    direction, expected = (jnp.asarray([0.6, -0.8]), jnp.cos(jnp.arange(6.0))), None
    # The search along a line of L-BFGS is a loop that JAX cannot reverse.
    rules = RULES if name != "lbfgs" else {"forward": bilax.Forward()}
    for rule in rules.values():
        method = bilax.Method(60, dynamics, choice, rule, follower_tolerance=tolerance)
        phi = bilax.approximate(case.problem, method)
        program = jax.jit(jax.value_and_grad(phi, (0, 1), has_aux=True))
        (_, info), gradient = program(X, z)
        assert 1 <= int(info.k_bar) <= int(info.steps) < 60
        if expected is None:
            expected = central_difference(lambda point, p=program: p(*point)[0][0], (X, z), direction)
        actual = sum(jnp.vdot(a, b) for a, b in zip(gradient, direction, strict=True))
        np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-9)


def test_what_a_solver_cannot_do_is_said():
    with pytest.raises(ValueError, match=r"LBFGS works along flat faces.*use bilax.Newton"):
        run(FOLLOWERS["ball of x"], bilax.LBFGS())
    with pytest.raises(ValueError, match="memory must be a whole number"):
        bilax.LBFGS(0)
    with pytest.raises(ValueError, match=r"needs a step length"):
        run(FOLLOWERS["lasso"], SOLVERS["optax"])
    problem = bilax.Problem(lambda x, y: y**2, lambda x, y: (y - x) ** 2)
    with pytest.raises(ValueError, match=r"LBFGS\(\) search along a line.*derivative=bilax.Implicit\(\)"):
        jax.grad(lambda x: bilax.approximate(problem, bilax.Method(2, bilax.LBFGS()))(x, x)[0])(1.0)


@pytest.mark.parametrize("solver", [bilax.GradientDescent(), bilax.Nesterov(sequence="fista")])
def test_a_searched_step_goes_on_below_the_rounding_of_f(solver):
    """Values alone let the step grow once they differ by rounding, and it never came below 1e-9."""
    assert int(run(FOLLOWERS["logistic"], solver, 1e-9, 300).steps) < 100


def test_line_searches_cannot_be_unrolled_in_reverse_and_the_remedy_is_named():
    case = FOLLOWERS["logistic"]
    phi = bilax.approximate(case.problem, bilax.Method(3, bilax.LBFGS()))
    with pytest.raises(ValueError, match=r"bilax\.Implicit\(\)"):
        jax.grad(phi, has_aux=True)(X, jnp.asarray(case.start))


def test_newton_leaves_a_corner_whose_slope_points_inwards():
    """f = q² − 4q + (2a² − a) q is indefinite where q = 0; its one stationary point is a = 1/4, q = 2 + 1/16."""
    problem = bilax.Problem(
        lambda x, y: y[0],
        lambda x, y: y[0] ** 2 - 4 * y[0] + (2 * y[1] ** 2 - y[1]) * y[0] + 0 * x,
        y_set=bilax.Box(np.zeros(2), np.asarray([np.inf, 1.0])),
    )
    method = bilax.Method(50, bilax.Newton(), derivative=bilax.Implicit(), follower_tolerance=1e-8)
    starts = jnp.asarray([[0.0, 0.0], [0.0, 0.5], [0.0, 1.0], [5.0, 1.0], [0.1, 0.9]])
    info = jax.jit(jax.vmap(lambda z: bilax.approximate(problem, method)(0.0, z)[1]))(starts)
    np.testing.assert_allclose(info.y, np.broadcast_to([2.0625, 0.25], (5, 2)), atol=1e-8)


def test_a_follower_in_single_precision_whose_data_are_in_double():
    shift = np.asarray([1.0, 2.0])
    problem = bilax.Problem(lambda x, y: jnp.sum(y), lambda x, y: jnp.sum((y - shift) ** 2))
    method = bilax.Method(20, bilax.LBFGS(), derivative=bilax.Implicit(), follower_tolerance=1e-4)
    _, info = bilax.approximate(problem, method)((), jnp.zeros(2, np.float32))
    np.testing.assert_allclose(info.y, shift, rtol=1e-5)


@pytest.mark.parametrize("steps", [20, 300])
def test_a_search_that_begins_at_the_minimum_finds_a_length_that_contracts(steps):
    # With y0 = x there is no slope to measure along, and no step that a test could refuse. dy_K/dx = 1 − Π(1 − α_k c).
    curvature = np.array([1.0, 30.0, 4.0])
    problem = bilax.Problem(lambda x, y: jnp.sum(y), lambda x, y: 0.5 * jnp.sum(curvature * (y - x) ** 2))
    slope, _ = jax.grad(bilax.approximate(problem, bilax.rhg(steps, None)), has_aux=True)(np.ones(3), np.ones(3))
    assert np.all((slope > 0) & (slope < 1.000001))
    assert steps == 20 or np.all(slope > 0.999)
