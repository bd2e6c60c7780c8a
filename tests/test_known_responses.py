"""How solutions answer to what defines them, where the answer is known in closed form.

Regressions, support vectors, quadratic programs, fixed points: what people differentiate implicitly.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.special
from jax.flatten_util import ravel_pytree
from sklearn.datasets import load_digits, make_classification, make_regression
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import MultiTaskLasso
from sklearn.svm import SVC, LinearSVC

import bilax


def respond(lower, leader, start, y_set=None, rule=None):
    """y(leader) and its Jacobian dy/dleader, by Newton's method and the implicit rule."""
    flat, unravel = ravel_pytree(jax.tree.map(jnp.asarray, start))
    problem = bilax.Problem(
        lambda x, y, look: jnp.vdot(look, y),
        lambda x, y, look: lower(x, unravel(y)),
        y_set=bilax.Reals() if y_set is None else y_set,
    )
    method = bilax.Method(60, bilax.Newton(), derivative=rule or bilax.Implicit(1e-8), follower_tolerance=1e-12)
    phi = bilax.approximate(problem, method)
    slopes = jax.jit(jax.vmap(jax.value_and_grad(phi, has_aux=True), (None, None, 0)))
    (_, info), jacobian = slopes(jax.tree.map(jnp.asarray, leader), flat, jnp.eye(flat.size))
    return info.y[0], jacobian


def differences(function, x, h=1e-5):
    return (8 * (function(x + h) - function(x - h)) - (function(x + 2 * h) - function(x - 2 * h))) / (12 * h)


def regression(rows, columns, **options) -> tuple[np.ndarray, np.ndarray]:
    X, t = make_regression(rows, columns, random_state=0, **options)[:2]
    return np.asarray(X), np.asarray(t)


REGRESSION = regression(10, 3)


def squares(w, X=REGRESSION[0], t=REGRESSION[1]):
    return 0.5 * jnp.mean((X @ w - t) ** 2)


def test_ridge_in_the_penalty_the_inputs_and_the_targets():
    X, t = REGRESSION

    def lower(leader, w):
        return squares(w, leader["X"], leader["t"]) + 0.5 * leader["penalty"] * jnp.sum(w**2)

    def closed(leader):
        X = leader["X"]
        return jnp.linalg.solve(X.T @ X + 10 * leader["penalty"] * jnp.eye(3), X.T @ leader["t"])

    leader = {"penalty": jnp.asarray(5.0), "X": jnp.asarray(X), "t": jnp.asarray(t)}
    w, jacobian = respond(lower, leader, np.zeros(3))
    np.testing.assert_allclose(w, [16.513907, 8.206254, 23.623608], atol=1e-6)
    np.testing.assert_allclose(jacobian["penalty"], [-2.501716, -1.267183, -3.542637], atol=1e-6)
    expected = jax.jacobian(closed)(leader)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), jacobian, expected)


def test_softmax_regression_with_an_intercept():
    """Intercepts may be shifted together, so the Hessian is singular; dW/dλ = −H⁺ W all the same."""
    X, labels = make_classification(50, 5, n_informative=3, n_classes=3, random_state=0)

    def lower(penalty, y):
        scores = X @ y["W"] + y["b"]
        loss = jnp.mean(jax.nn.logsumexp(scores, axis=1) - scores[jnp.arange(50), labels])
        return loss + 0.5 * penalty * jnp.sum(y["W"] ** 2)

    start = {"W": np.zeros((5, 3)), "b": np.zeros(3)}
    y, jacobian = respond(lower, 1e-2, start)
    unravel = ravel_pytree(start)[1]
    hessian = jax.jit(jax.hessian(lambda v: lower(1e-2, unravel(v))))(y)
    slope = jax.grad(lambda v: lower(1e-2, unravel(v)))(y)
    np.testing.assert_allclose(slope, 0, atol=1e-9)
    expected = -np.linalg.pinv(hessian, rcond=1e-10, hermitian=True)[:, :15] @ y[:15]
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(jacobian[:15], expected[:15], rtol=1e-6, atol=1e-7)


def test_lasso_and_elastic_net():
    w, jacobian = respond(lambda p, w: squares(w), 10.0, np.ones(3), lambda p: bilax.L1(p))
    np.testing.assert_allclose(w, [62.164852, 29.035834, 88.270122], atol=1e-6)
    np.testing.assert_allclose(jacobian, [-0.601718, -0.691496, -0.610469], atol=1e-6)
    both = jnp.asarray([2.0, 0.8])
    w, jacobian = respond(lambda p, w: squares(w), both, np.ones(3), lambda p: bilax.ElasticNet(p[0], p[0] * p[1]))
    np.testing.assert_allclose(w, [33.441817, 16.619645, 47.580572], atol=1e-6)
    np.testing.assert_allclose(jacobian[:, 0], [-8.674318, -4.6453, -11.950154], atol=1e-6)
    np.testing.assert_allclose(jacobian[:, 1], [-20.913651, -10.795246, -29.106128], atol=1e-6)


def test_lasso_with_a_weight_for_each_of_thirty_features():
    """dw_S/dλ_S = −(X_Sᵀ X_S / n)⁻¹ diag(sign w_S) on the support S; nothing elsewhere."""
    X, t = regression(40, 30, n_informative=6, noise=5.0)
    weights = jnp.asarray(np.linspace(3.0, 9.0, 30))
    w, jacobian = respond(lambda p, w: squares(w, X, t), weights, np.zeros(30), lambda p: bilax.L1(p))
    support = np.flatnonzero(w)
    assert 4 <= support.size < 25
    expected = np.zeros((30, 30))
    inverse = np.linalg.inv(X[:, support].T @ X[:, support] / 40)
    expected[np.ix_(support, support)] = -inverse * np.sign(w[support])
    np.testing.assert_allclose(jacobian, expected, atol=1e-8)
    slope = X.T @ (X @ w - t) / 40
    assert np.all(np.abs(slope) <= weights + 1e-8)


def test_multiclass_support_vector_machine():
    """Crammer and Singer's dual, a simplex for each example; its Hessian is singular, but W(λ) is smooth."""
    X, labels = make_classification(20, 5, n_informative=3, n_classes=3, random_state=0)
    X = X / np.linalg.norm(X, axis=1, keepdims=True)
    Y = np.eye(3)[labels]
    penalty = 0.5

    def lower(penalty, beta):
        return 0.5 * jnp.sum((X.T @ (Y - beta)) ** 2) / penalty + jnp.sum(beta * (Y - 1))

    def upper(penalty, beta, look):
        return jnp.sum(look * (X.T @ (Y - beta))) / penalty

    problem = bilax.Problem(upper, lambda p, beta, look: lower(p, beta), y_set=bilax.Each(bilax.Simplex()))
    method = bilax.Method(100, bilax.Newton(), derivative=bilax.Implicit(1e-6), follower_tolerance=1e-10)
    phi = bilax.approximate(problem, method)
    looks = np.eye(15).reshape(15, 5, 3)
    slopes = jax.jit(jax.vmap(jax.value_and_grad(phi, has_aux=True), (None, None, 0)))
    (W, info), by_penalty = slopes(penalty, jnp.full((20, 3), 1 / 3), looks)
    fitted = LinearSVC(
        multi_class="crammer_singer", C=1 / penalty, fit_intercept=False, tol=1e-10, max_iter=1_000_000
    ).fit(X, labels)
    np.testing.assert_allclose(W.reshape(5, 3), fitted.coef_.T, atol=1e-5)
    # Near here each row keeps its support: W solves a linear system, whose answer is differenced.
    beta = np.asarray(info.y[0])
    free = np.argwhere(beta > 1e-9)

    def exact(penalty):
        size = len(free)
        same = free[:, None, 1] == free[None, :, 1]
        matrix = (X @ X.T)[free[:, 0]][:, free[:, 0]] * same / penalty
        sums = (free[:, 0] == np.arange(20)[:, None]).astype(float)
        right = ((X @ X.T @ Y) / penalty - (Y - 1))[tuple(free.T)]
        system = np.block([[matrix, sums.T], [sums, np.zeros((20, 20))]])
        solution = np.linalg.lstsq(system, np.r_[right, np.ones(20)], rcond=1e-12)[0][:size]
        beta = np.zeros((20, 3))
        beta[tuple(free.T)] = solution
        return (X.T @ (Y - beta)).ravel() / penalty

    np.testing.assert_allclose(exact(penalty), W, atol=1e-8)
    expected = differences(exact, penalty, 1e-4)
    assert np.abs(expected + exact(penalty) / penalty).max() > 1e-2, "the multipliers must move too"
    np.testing.assert_allclose(by_penalty, expected, atol=1e-6)


def test_least_squares_in_a_box_and_a_ball_whose_size_is_led():
    X, t = regression(50, 5, n_informative=3)
    w, jacobian = respond(lambda s, w: squares(w, X, t), 10.0, np.zeros(5), lambda s: bilax.Box(-s, s))
    expected = scipy.optimize.lsq_linear(X, t, (-10, 10), tol=1e-14).x
    np.testing.assert_allclose(w, expected, atol=1e-6)
    held = np.abs(np.asarray(w)) == 10
    assert 0 < held.sum() < 5
    free = ~held
    response = np.where(held, np.sign(w), 0.0)
    response[free] = -np.linalg.solve(X[:, free].T @ X[:, free], X[:, free].T @ X[:, held] @ response[held])
    np.testing.assert_allclose(jacobian, response, atol=1e-9)
    random = np.random.RandomState(0)
    X = random.randn(10, 5)
    t = X @ random.rand(5)
    w, jacobian = respond(lambda r, w: squares(w, X, t), 0.1, np.zeros(5), lambda r: bilax.Ball(r))
    np.testing.assert_allclose(np.linalg.norm(w), 0.1)
    np.testing.assert_allclose(jacobian, [0.286502, 0.398609, 0.674282, 0.199865, 0.515425], atol=1e-6)


def test_a_quadratic_program_in_a_box():
    random = np.random.RandomState(0)
    M, c, lo = random.randn(5, 5), random.randn(5), random.randn(5)
    Q, hi = M @ M.T, lo + 5 * random.rand(5)
    x, jacobian = respond(lambda c, x: 0.5 * x @ Q @ x + c @ x, c, lo, bilax.Box(lo, hi))
    held = (x == lo) | (x == hi)
    free = np.flatnonzero(~held)
    slope = Q @ x + c
    assert np.all(np.where(x == lo, slope >= 0, True) & np.where(x == hi, slope <= 0, True))
    np.testing.assert_allclose(slope[free], 0, atol=1e-10)
    expected = np.zeros((5, 5))
    expected[np.ix_(free, free)] = -np.linalg.inv(Q[np.ix_(free, free)])
    assert 0 < free.size < 5
    np.testing.assert_allclose(jacobian, expected, atol=1e-9)


def test_active_bounds_are_those_of_the_solution_and_not_of_the_start():
    p, jacobian = respond(lambda x, p: 0.5 * jnp.sum((p - 1.5 * x) ** 2), 0.5, np.zeros(1), bilax.Box(0.0, 10.0))
    np.testing.assert_allclose([p[0], jacobian[0]], [0.75, 1.5], rtol=1e-14)


def test_nonlinear_least_squares():
    u = np.asarray([0.038, 0.194, 0.425, 0.626, 1.253, 2.5, 3.74])
    v = np.asarray([0.05, 0.127, 0.094, 0.2122, 0.2729, 0.2665, 0.3317])
    c, jacobian = respond(lambda u, c: jnp.sum((c[0] * u / (c[1] + u) - v) ** 2), u, np.asarray([0.1, 0.1]))
    np.testing.assert_allclose(c, [0.36183689, 0.55626653], atol=1e-7)

    def conditions(c, u):
        error, share = c[0] * u / (c[1] + u) - v, u / (c[1] + u)
        return [error @ share, error @ (share / (c[1] + u))]

    def fit(u):
        return scipy.optimize.root(conditions, [0.36, 0.55], args=(u,), tol=1e-14).x

    expected = [differences(lambda s, e=e: fit(u + s * e), 0.0, 1e-4) for e in np.eye(7)]
    np.testing.assert_allclose(jacobian, np.transpose(expected), atol=1e-8)


def test_fixed_points():
    """x = cos x + θ is where x²/2 − sin x − θx is least; x = M x + b, where ½ xᵀ(I − M)x − bᵀx is."""
    theta = np.asarray([0.0, np.pi / 2])
    lower = lambda theta, x: jnp.sum(0.5 * x**2 - jnp.sin(x) - theta * x)  # noqa: E731
    x, jacobian = respond(lower, theta, np.asarray([0.0, np.pi / 4]))
    np.testing.assert_allclose(x, np.cos(x) + theta, atol=1e-9)
    np.testing.assert_allclose(jacobian, np.diag(1 / (1 + np.sin(x))), atol=1e-9)
    half = np.random.default_rng(0).normal(size=(20, 20))
    M = (half + half.T) / (2.2 * np.linalg.norm(half + half.T, 2))
    b = np.ones(20)
    for rule in (None, bilax.Implicit(1e-12, dense=0)):
        x, jacobian = respond(lambda b, x: 0.5 * x @ (x - M @ x) - b @ x, b, np.zeros(20), rule=rule)
        np.testing.assert_allclose(jacobian, np.linalg.inv(np.eye(20) - M), atol=1e-9)


def test_quadratic_programs_in_all_that_defines_them():
    """min ½xᵀQx + cᵀx, Ax = b, with and without x ≥ 0: against the linear system of its conditions."""
    leader = {
        "Q": 2 * np.asarray([[2.0, 0.5], [0.5, 1.0]]),
        "c": np.asarray([1.0, 1.0]),
        "A": np.asarray([[1.0, 1.0]]),
        "b": np.asarray([1.0]),
    }
    leader = jax.tree.map(jnp.asarray, leader)

    def lower(leader, x):
        return 0.25 * x @ (leader["Q"] + leader["Q"].T) @ x + leader["c"] @ x

    def closed(leader):
        Q, A = (leader["Q"] + leader["Q"].T) / 2, leader["A"]
        system = jnp.block([[Q, A.T], [A, jnp.zeros((1, 1))]])
        return jnp.linalg.solve(system, jnp.concatenate([-leader["c"], leader["b"]]))[:2]

    expected = jax.jacobian(closed)(leader)
    for y_set in (
        lambda p: bilax.Affine(p["A"], p["b"]),
        lambda p: bilax.Polyhedron(-np.eye(2), 0.0, p["A"], p["b"]),
    ):
        x, jacobian = respond(lower, leader, np.asarray([0.3, 0.7]), y_set)
        np.testing.assert_allclose(x, [0.25, 0.75], atol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), jacobian, expected)


def test_projections_as_quadratic_programs():
    """A simplex and a box section, told as polyhedra, are what the sets of their own say."""
    v = jnp.asarray(np.random.default_rng(0).normal(size=8))
    as_rows = bilax.Polyhedron(-np.eye(8), 0.0, np.ones((1, 8)), 1.0)
    slopes = jax.jit(lambda v: (as_rows.project(v), jax.jacfwd(as_rows.project)(v)))
    expected = jax.jit(lambda v: (bilax.Simplex().project(v), jax.jacfwd(bilax.Simplex().project)(v)))(v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), slopes(v), expected)
    point, normal = jnp.asarray([1.0, 2.0]), jnp.asarray([-0.5, 1.5])
    nearest = point - (normal @ point - 0.3) / (normal @ normal) * normal
    np.testing.assert_allclose(bilax.Hyperplane(normal, 0.3).project(point), nearest, rtol=1e-14)
    weights = np.asarray([[1.0, 2.0, 3.0]])
    section = bilax.Polyhedron(np.r_[np.eye(3), -np.eye(3)], np.r_[0.8 * np.ones(3), np.zeros(3)], weights, 1.0)
    p = np.asarray(section.project(jnp.asarray([1.2, 3.0, 0.7])))
    threshold = scipy.optimize.brentq(
        lambda t: weights[0] @ np.clip(np.asarray([1.2, 3.0, 0.7]) - t * weights[0], 0, 0.8) - 1, -9, 9, xtol=1e-15
    )
    np.testing.assert_allclose(p, np.clip(np.asarray([1.2, 3.0, 0.7]) - threshold * weights[0], 0, 0.8), atol=1e-12)


def test_digits_told_apart_by_softmax_regression():
    """Three digits on a 3 × 3 grid; the response to the penalty by differences of SciPy's solutions."""
    pixels, labels = (np.asarray(part)[:60] for part in load_digits(n_class=3, return_X_y=True))
    X = pixels.reshape(60, 8, 8)[:, 1:7, 1:7].reshape(60, 3, 2, 3, 2).mean((2, 4)).reshape(60, 9) / 16
    Y = np.eye(3)[labels]

    def lower(x, w):
        scores = X @ w.reshape(9, 3)
        fit = jnp.mean(jax.nn.logsumexp(scores, axis=1) - jnp.sum(scores * Y, axis=1))
        return fit + 0.5 * jnp.exp(x) * jnp.sum(w**2)

    def by_scipy(x):
        def value_and_slope(w):
            scores = X @ w.reshape(9, 3)
            shares = scipy.special.softmax(scores, axis=1)
            value = np.mean(scipy.special.logsumexp(scores, axis=1) - np.sum(scores * Y, axis=1))
            slope = (X.T @ (shares - Y) / 60).ravel()
            return value + 0.5 * np.exp(x) * w @ w, slope + np.exp(x) * w

        options = {"maxiter": 5000, "maxfun": 5000, "ftol": 0, "gtol": 1e-11}
        near = scipy.optimize.minimize(value_and_slope, np.zeros(27), jac=True, method="L-BFGS-B", options=options).x
        # It may stop at 1e-8, of which differences make 1e-6.
        return scipy.optimize.root(lambda w: value_and_slope(w)[1], near, tol=1e-14).x

    w, jacobian = respond(lower, -4.0, np.zeros(27))
    np.testing.assert_allclose(w, by_scipy(-4.0), atol=1e-7)
    np.testing.assert_allclose(jacobian, differences(by_scipy, -4.0, 1e-2), atol=1e-6)


def test_entropic_transport_answers_to_its_costs():
    """The plan of Sinkhorn's iteration, as the softmax of the dual's solution, one potential of which is held at 0."""
    random = np.random.default_rng(0)
    costs, supply, demand = random.random((3, 4)), np.full(3, 1 / 3), np.asarray([0.1, 0.2, 0.3, 0.4])

    def plan(costs, duals):
        u, v = duals[:3], jnp.append(duals[3:], 0.0)
        return jnp.exp((u[:, None] + v - costs) / 0.2)

    def lower(costs, duals):
        return 0.2 * jnp.sum(plan(costs, duals)) - supply @ duals[:3] - demand[:3] @ duals[3:]

    def sinkhorn(costs):
        kernel, v = np.exp(-costs / 0.2), np.ones(4)
        for _ in range(400):
            v = demand / (kernel.T @ (supply / (kernel @ v)))
        return (supply / (kernel @ v))[:, None] * kernel * v

    duals, jacobian = respond(lower, costs, np.zeros(6))
    np.testing.assert_allclose(plan(costs, duals), sinkhorn(costs), atol=1e-10)
    direct, by_duals = jax.jacobian(plan, (0, 1))(jnp.asarray(costs), duals)
    response = direct + jnp.einsum("ijk,kab->ijab", by_duals, jacobian)
    for i, j in ((0, 0), (2, 1)):
        unit = np.zeros((3, 4))
        unit[i, j] = 1
        expected = differences(lambda t, unit=unit: sinkhorn(costs + t * unit), 0.0, 1e-4)
        np.testing.assert_allclose(response[:, :, i, j], expected, atol=1e-8)


def test_isotonic_regression_answers_by_the_means_of_its_blocks():
    """y = cumulated steps, all but the first not negative; each block's level is the mean of its inputs."""
    x = np.random.default_rng(1).normal(size=8) + np.linspace(0, 1.5, 8)
    steps_allowed = bilax.Box(np.r_[-np.inf, np.zeros(7)], np.inf)
    steps, jacobian = respond(lambda x, s: 0.5 * jnp.sum((jnp.cumsum(s) - x) ** 2), x, np.zeros(8), steps_allowed)
    fitted = IsotonicRegression().fit_transform(np.arange(8), x)
    np.testing.assert_allclose(jnp.cumsum(steps), fitted, atol=1e-10)
    same = np.isclose(fitted[:, None], fitted, atol=1e-10)
    assert 2 <= len(np.unique(np.round(fitted, 9))) < 8
    np.testing.assert_allclose(jnp.cumsum(jacobian, axis=0), same / same.sum(axis=1), atol=1e-9)


def test_kernel_support_vector_machine_in_its_width_and_its_bound():
    """The dual with an offset: Σ t_i a_i = 0, 0 ≤ a ≤ C; scikit-learn's solution, and its conditions differentiated."""
    X, labels = map(np.asarray, make_classification(10, 3, n_informative=2, n_redundant=0, random_state=3))
    t = np.where(labels > 0, 1.0, -1.0)
    distances = np.sum((X[:, None] - X) ** 2, axis=2)
    leader = jnp.asarray([0.4, 0.8])

    def quadratic(leader):
        return np.outer(t, t) * jnp.exp(-leader[0] * distances)

    def allowed(leader):
        return bilax.Polyhedron(
            np.r_[np.eye(10), -np.eye(10)], jnp.append(jnp.full(10, leader[1]), np.zeros(10)), t[None], 0.0
        )

    a, jacobian = respond(lambda p, a: 0.5 * a @ quadratic(p) @ a - jnp.sum(a), leader, np.full(10, 0.1), allowed)
    fitted = SVC(C=0.8, kernel="precomputed", tol=1e-10).fit(np.exp(-0.4 * distances), labels)
    dual = np.zeros(10)
    dual[fitted.support_] = np.abs(fitted.dual_coef_[0])
    np.testing.assert_allclose(a, dual, atol=1e-6)
    free, full = np.flatnonzero((dual > 1e-6) & (dual < 0.8 - 1e-6)), dual >= 0.8 - 1e-6
    assert free.size > 1
    assert full.any()

    def closed(leader):
        held = jnp.where(full, leader[1], 0.0)
        Q, sums = quadratic(leader), t[free][None]
        system = jnp.block([[Q[jnp.ix_(free, free)], sums.T], [sums, jnp.zeros((1, 1))]])
        right = jnp.append(1 - (Q @ held)[free], -t @ held)
        return held.at[free].set(jnp.linalg.solve(system, right)[:-1])

    np.testing.assert_allclose(a, closed(leader), atol=1e-9)
    np.testing.assert_allclose(jacobian, jax.jacobian(closed)(leader), atol=1e-8)


def test_lbfgs_in_a_box_is_scipys():
    """Rosenbrock's and Beale's functions and a quadratic, with bounds that hold none, some and all coordinates."""

    def lower(kind, y):
        rosenbrock = 100 * (y[1] - y[0] ** 2) ** 2 + (1 - y[0]) ** 2
        beale = (1.5 - y[0] + y[0] * y[1]) ** 2 + (2.25 - y[0] + y[0] * y[1] ** 2) ** 2
        beale += (2.625 - y[0] + y[0] * y[1] ** 3) ** 2
        return kind @ jnp.asarray([rosenbrock, beale, (y[0] - 3) ** 2 + 2 * (y[1] + y[0]) ** 2])

    @jax.jit
    def solve(kind, lo, hi):
        problem = bilax.Problem(lambda x, y: y[0], lower, y_set=lambda x: bilax.Box(lo, hi))
        method = bilax.Method(200, bilax.LBFGS(), derivative=bilax.Implicit(1e-6), follower_tolerance=1e-10)
        return bilax.approximate(problem, method)(kind, jnp.clip(jnp.asarray([-1.0, 0.5]), lo, hi))[1].y

    value_and_slope = jax.jit(jax.value_and_grad(lower, 1))
    for i, lo, hi in (
        (0, -5.0, 5.0), (0, -5.0, 0.5), (0, [-5.0, 1.5], [0.8, 2.0]), (1, -4.0, 4.0), (1, -2.0, 0.3), (2, 0.5, 2.0),
        (2, [-1.0, 0.0], [1.0, 1.0]),
    ):  # fmt: skip
        kind, lo, hi = jnp.eye(3)[i], np.broadcast_to(lo, 2), np.broadcast_to(hi, 2)
        start = np.clip([-1.0, 0.5], lo, hi)
        bounds = scipy.optimize.Bounds(lo, hi)  # pyright: ignore[reportCallIssue, reportArgumentType]
        expected = scipy.optimize.minimize(
            lambda y, kind=kind: jax.tree.map(np.asarray, value_and_slope(kind, y)),
            start, jac=True, bounds=bounds, method="L-BFGS-B", options={"ftol": 0, "gtol": 1e-12},
        )  # fmt: skip
        np.testing.assert_allclose(solve(kind, lo, hi), expected.x, atol=1e-6)


def test_group_lasso_is_scikit_learns_for_several_tasks():
    """(1/2n)‖Y − XW‖² + λ Σ ‖W_j‖ over rows j, and its response to λ."""
    X = np.asarray(make_regression(30, 6, random_state=0)[0])
    truth = np.zeros((6, 2))
    truth[:3] = [[2.0, -1.0], [0.5, 1.0], [-1.0, 0.3]]
    Y = X @ truth + 0.3 * np.random.default_rng(0).normal(size=(30, 2))

    def by_scikit(weight):
        return MultiTaskLasso(weight, fit_intercept=False, tol=1e-15, max_iter=100_000).fit(X, Y).coef_.T

    problem = bilax.Problem(
        lambda x, W, look: jnp.vdot(look, W),
        lambda x, W, look: 0.5 * jnp.sum((X @ W - Y) ** 2) / 30,
        y_set=lambda x: bilax.GroupL1(x),
    )
    method = bilax.Method(60, bilax.Newton(), derivative=bilax.Implicit(1e-8), follower_tolerance=1e-12)
    slopes = jax.jit(jax.vmap(jax.value_and_grad(bilax.approximate(problem, method), has_aux=True), (None, None, 0)))
    (_, info), jacobian = slopes(0.4, jnp.zeros((6, 2)), jnp.eye(12).reshape(12, 6, 2))
    expected = by_scikit(0.4)
    assert 0 < np.sum(np.all(expected == 0, axis=1)) < 6
    np.testing.assert_allclose(info.y[0], expected, atol=1e-7)
    np.testing.assert_allclose(jacobian.reshape(6, 2), differences(by_scikit, 0.4, 1e-3), atol=1e-5)
