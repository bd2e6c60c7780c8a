"""Projections: what they are, and what their derivative is, on the boundary too."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

import bilax
from bilax.problem import checks, sets
from bilax.trust.flat_problem import flatten
from tests.problems import central_difference, directions

SETS = {
    "reals": bilax.Reals(),
    "box": bilax.Box(-1.0, 0.5),
    "non-negative": bilax.NonNegative(),
    "ball": bilax.Ball(1.5),
    "simplex": bilax.Simplex(),
}
MORE = {
    "ball with a centre": bilax.Ball(1.5, 0.4),
    "l1 ball": bilax.L1Ball(1.5),
    "scaled simplex": bilax.Simplex(0.8),
}
numbers = st.floats(-3, 3, allow_subnormal=False)
trees = st.recursive(
    st.integers(1, 3).flatmap(lambda n: st.lists(numbers, min_size=n, max_size=n).map(np.asarray)),
    lambda inner: st.one_of(
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from(["a", "b"]), inner, min_size=1),
        st.lists(inner, min_size=1, max_size=2),
    ),
    max_leaves=4,
)


def ravel(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def inside(name, v):
    flat = ravel(v)
    return {
        "reals": True,
        "box": np.all((flat >= -1) & (flat <= 0.5)),
        "non-negative": np.all(flat >= 0),
        "ball": np.linalg.norm(flat) <= 1.5 + 1e-12,
        "simplex": np.all(flat >= 0) and abs(flat.sum() - 1) < 1e-12,
    }[name]


@pytest.mark.parametrize("name", list(SETS))
@given(tree=trees, other=st.integers(0, 9))
def test_projection_is_the_nearest_point(name, tree, other):
    tree = jax.tree.map(jnp.asarray, tree)
    projected = SETS[name].project(tree)
    assert jax.tree.structure(projected) == jax.tree.structure(tree)
    assert inside(name, projected)
    np.testing.assert_allclose(ravel(SETS[name].project(projected)), ravel(projected), atol=1e-12)
    # Obtuse angle: (v − Pv)·(w − Pv) ≤ 0 for every w of a convex set characterises the projection.
    rng = np.random.default_rng(other)
    w = ravel(SETS[name].project(jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), tree)))
    v, p = ravel(tree), ravel(projected)
    assert (v - p) @ (w - p) <= 1e-9


def test_derivative_on_the_boundary():
    """A point of the closed set counts as inside; a zero coordinate of the simplex counts as active."""
    slope = jax.grad(lambda v: jnp.sum(bilax.Box(-1.0, 2.0).project(v)))
    np.testing.assert_array_equal(slope(jnp.asarray([-1.0, 2.0, 0.0, -1.1, 2.1])), [1, 1, 1, 0, 0])
    slope = jax.grad(lambda v: jnp.sum(bilax.NonNegative().project(v)))
    np.testing.assert_array_equal(slope(jnp.asarray([0.0, 1.0, -1.0])), [1, 1, 0])
    on_sphere = jnp.asarray([0.6, 0.8])
    np.testing.assert_allclose(jax.jacobian(bilax.Ball(1.0).project)(on_sphere), np.eye(2), atol=1e-12)
    outside = jax.jacobian(bilax.Ball(1.0).project)(2 * on_sphere)
    np.testing.assert_allclose(outside, (np.eye(2) - np.outer(on_sphere, on_sphere)) / 2, atol=1e-12)
    np.testing.assert_allclose(jax.jacobian(bilax.Ball(1.0).project)(jnp.zeros(2)), np.eye(2), atol=1e-12)
    vertex = jax.jacobian(bilax.Simplex().project)(jnp.asarray([0.5, 0.5, 0.0]))
    np.testing.assert_allclose(vertex, [[0.5, -0.5, 0], [-0.5, 0.5, 0], [0, 0, 0]], atol=1e-12)


def test_derivative_on_the_boundary_of_the_other_sets():
    """Inside, and up to and including the boundary, it is the identity, and the set's size does not matter."""
    on_it = np.asarray([0.75, -0.25, 0.5, 0.0])
    for make, size in ((bilax.L1Ball, np.abs(on_it).sum()), (bilax.Ball, np.sqrt(np.sum(on_it**2)))):
        slopes = jax.jit(jax.jacobian(lambda v, r, make=make: make(r).project(v), (0, 1)))
        for r in (size, 2 * size):
            by_v, by_r = slopes(on_it, r)
            np.testing.assert_array_equal(by_v, np.eye(4))
            np.testing.assert_array_equal(by_r, np.zeros(4))
    half = jax.jit(jax.jacobian(lambda v: bilax.Halfspace(1.0, 1.0).project(v)))(on_it)
    np.testing.assert_array_equal(half, np.eye(4))
    cone = jax.jit(jax.jacobian(bilax.SecondOrderCone().project))
    np.testing.assert_array_equal(cone(np.asarray([5.0, 3.0, 4.0])), np.eye(3))
    for tip in ([-5.0, 3.0, 4.0], [-1.0, 0.0, 0.0], [-6.0, 3.0, 4.0]):
        np.testing.assert_array_equal(cone(np.asarray(tip)), np.zeros((3, 3)))
    assert np.isfinite(cone(np.zeros(3))).all()
    corner = jax.jit(jax.jacobian(lambda v: bilax.Polyhedron(np.eye(2), 1.0).project(v)))
    for point, expected in (([1.0, 1.0], [1, 1]), ([1.0, 1.5], [1, 0]), ([2.0, 1.5], [0, 0]), ([0.3, 0.2], [1, 1])):
        np.testing.assert_allclose(corner(np.asarray(point)), np.diag(expected), atol=1e-14)


RNG = np.random.default_rng(5)
ROWS, EQUATIONS, INNER = RNG.normal(size=(6, 5)), RNG.normal(size=(2, 5)), 0.3 * RNG.normal(size=5)
SIGNS = np.array(np.meshgrid(*[[-1, 1]] * 5)).reshape(5, -1).T


class Made(NamedTuple):
    """A set made of parameters, and what holds inside it: every number of `inside` ≥ 0 and every one of `equal` = 0."""

    make: Any
    parameters: dict[str, Any]
    inside: Any = None
    equal: Any = None


def parts(p):
    return {"a": p[:2], "b": (p[2], p[3:, None])}


MADE = {
    "box": Made(
        lambda p: bilax.Box(parts(p["lo"]), parts(p["lo"] + 1)),
        {"lo": INNER},
        lambda p, v: np.r_[v - INNER, INNER + 1 - v],
    ),
    "ball": Made(
        lambda p: bilax.Ball(p["r"], parts(p["c"])),
        {"r": 0.7, "c": INNER},
        lambda p, v: 0.49 - np.sum((v - INNER) ** 2),
    ),
    "l1 ball": Made(lambda p: bilax.L1Ball(p["r"]), {"r": 1.3}, lambda p, v: 1.3 - SIGNS @ v),
    "simplex": Made(lambda p: bilax.Simplex(p["s"]), {"s": 1.3}, lambda p, v: v, lambda p, v: v.sum() - 1.3),
    "half-space": Made(
        lambda p: bilax.Halfspace(parts(p["a"]), p["b"]), {"a": ROWS[0], "b": 0.1}, lambda p, v: 0.1 - ROWS[0] @ v
    ),
    "hyperplane": Made(
        lambda p: bilax.Hyperplane(parts(p["a"]), p["b"]),
        {"a": ROWS[0], "b": 0.1},
        None,
        lambda p, v: 0.1 - ROWS[0] @ v,
    ),
    "affine": Made(
        lambda p: bilax.Affine(p["A"], p["b"]),
        {"A": EQUATIONS, "b": np.asarray([0.3, -1.0])},
        None,
        lambda p, v: EQUATIONS @ v - p["b"],
    ),
    "polyhedron": Made(
        lambda p: bilax.Polyhedron(p["G"], p["h"]),
        {"G": ROWS, "h": ROWS @ INNER + 0.2},
        lambda p, v: p["h"] - ROWS @ v,
    ),
    "polyhedron with equations": Made(
        lambda p: bilax.Polyhedron(p["G"], p["h"], p["A"], p["b"]),
        {"G": ROWS, "h": ROWS @ INNER + 0.2, "A": EQUATIONS, "b": EQUATIONS @ INNER},
        lambda p, v: p["h"] - ROWS @ v,
        lambda p, v: EQUATIONS @ v - p["b"],
    ),
    "second-order cone": Made(
        lambda p: bilax.SecondOrderCone(), {}, lambda p, v: np.r_[v[0], v[0] ** 2 - v[1:] @ v[1:]]
    ),
    "product": Made(
        lambda p: bilax.Product({"a": bilax.Simplex(p["s"]), "b": (bilax.Box(0.0, p["s"]), bilax.Ball(p["s"]))}),
        {"s": 0.6},
        lambda p, v: np.r_[v[:3], 0.6 - v[2], 0.36 - v[3:] @ v[3:]],
        lambda p, v: v[:2].sum() - 0.6,
    ),
}
FLAT = set(MADE) - {"ball", "second-order cone", "product"}
POINTS = np.concatenate([1.5 * RNG.normal(size=(6, 5)), 0.05 * RNG.normal(size=(1, 5))])


def nearest_by_scipy(made: Made, v: np.ndarray, start: np.ndarray) -> np.ndarray:
    """By sequential quadratic programming, with differences for the constraints' slopes; the cone's by its height."""
    if not made.parameters:
        norm = np.linalg.norm(v[1:])

        def at(t):
            return np.r_[t, v[1:] * min(1, t / norm)]

        distance: Any = scipy.optimize.minimize_scalar(
            lambda t: np.sum((at(t) - v) ** 2), bounds=(0, 9), method="bounded", options={"xatol": 1e-9}
        )
        return at(distance.x)
    kinds = {"ineq": made.inside, "eq": made.equal}
    constraints = [
        {"type": kind, "fun": lambda z, test=test: np.atleast_1d(test(made.parameters, z))}
        for kind, test in kinds.items()
        if test is not None
    ]
    found = scipy.optimize.minimize(
        lambda z: 0.5 * np.sum((z - v) ** 2),
        start,
        jac=lambda z: z - v,
        method="SLSQP",
        constraints=constraints,
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return found.x


@pytest.mark.parametrize("name", list(MADE))
def test_projection_and_its_derivatives_against_scipy_and_differences(name):
    """Values by SLSQP, derivatives in v and in what the set is made of by differences; a tree, under jit and vmap."""
    made = MADE[name]
    parameters = jax.tree.map(jnp.asarray, made.parameters)

    def project(parameters, v):
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(made.make(parameters).project(parts(v)))])

    one = jax.jit(project)
    all_at_once = jax.jit(jax.vmap(lambda v: (project(parameters, v), jax.jacfwd(project, (0, 1))(parameters, v))))
    values, (by_parameters, by_v) = all_at_once(POINTS)
    backward = jax.jit(jax.vmap(lambda v: jax.jacrev(project, (0, 1))(parameters, v)))(POINTS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), (by_parameters, by_v), backward)
    outside = 0
    for i, v in enumerate(jnp.asarray(POINTS)):
        np.testing.assert_allclose(one(parameters, v), values[i], atol=1e-14)
        np.testing.assert_allclose(values[i], nearest_by_scipy(made, np.asarray(v), values[i] + 0.01), atol=2e-7)
        point = (parameters, v)
        direction = directions(point, i)
        expected = central_difference(lambda point: one(*point), point, direction, 1e-4)
        pairs = zip(jax.tree.leaves((by_parameters, by_v)), jax.tree.leaves(direction), strict=True)
        actual = sum(np.reshape(slope[i], (5, -1)) @ np.ravel(along) for slope, along in pairs)
        np.testing.assert_allclose(actual, expected, atol=1e-9)
        if name in FLAT:
            np.testing.assert_allclose(by_v[i] @ by_v[i], by_v[i], atol=1e-12)
        outside += float(jnp.max(jnp.abs(values[i] - v))) > 1e-3
    assert outside >= 3
    assert sets.is_flat(made.make(parameters)) == (name in FLAT)


def test_simplex_and_l1_ball_far_away_and_with_infinities():
    for scale in (1.0, 1e9):
        v = jnp.asarray(scale * np.random.default_rng(1).normal(size=50), jnp.float32)
        for total in (1.0, 0.8):
            p = bilax.Simplex(total).project(v)
            assert p.dtype == jnp.float32
            assert abs(float(p.sum()) - total) < 1e-5
            support = np.asarray(p > 0, float)
            slope = jax.jacobian(lambda v, total=total: bilax.Simplex(total).project(v))(v)
            np.testing.assert_allclose(slope, np.diag(support) - np.outer(support, support) / support.sum(), atol=1e-6)
    np.testing.assert_array_equal(bilax.Simplex().project(jnp.asarray([0.0, 0.0, -np.inf])), [0.5, 0.5, 0.0])


def test_redundant_and_many_active_rows():
    """Doubly stochastic matrices: dependent equations, and more active inequalities than there are dimensions left."""
    n = 4
    sums = np.concatenate([np.kron(np.eye(n), np.ones(n)), np.kron(np.ones(n), np.eye(n))])
    birkhoff = bilax.Polyhedron(-np.eye(n * n), np.zeros(n * n), sums, np.ones(2 * n))
    project = jax.jit(lambda v: birkhoff.project(v))
    rng = np.random.default_rng(2)
    for scale in (0.3, 3.0, 30.0):
        v = scale * rng.normal(size=(n, n))
        p = np.asarray(project(v))
        np.testing.assert_allclose(np.r_[p.sum(0), p.sum(1)], 1, atol=1e-12)
        assert p.min() > -1e-12
        # Against all vertices, the permutations: the angle is obtuse at every one of them.
        for order in itertools.permutations(range(n)):
            assert np.sum((v - p) * (np.eye(n)[list(order)] - p)) < 1e-10 * scale
    np.testing.assert_allclose(project(np.full((n, n), 1 / n)), 1 / n, atol=1e-15)
    np.testing.assert_allclose(ravel(birkhoff.bounds(v)), np.r_[np.zeros(n * n), np.ones(n * n)], atol=1e-9)
    doubled = bilax.Affine(np.r_[EQUATIONS, EQUATIONS], np.r_[[0.3, -1.0], [0.3, -1.0]])
    np.testing.assert_allclose(doubled.project(POINTS[0]), bilax.Affine(EQUATIONS, [0.3, -1.0]).project(POINTS[0]))
    single = bilax.Polyhedron(ROWS.astype(np.float32), 0.0).project(jnp.asarray(POINTS[0], jnp.float32))
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, bilax.Polyhedron(ROWS, 0.0).project(POINTS[0]), atol=1e-5)


def test_many_polyhedra():
    """p is feasible, and v − p is a sum of active rows with weights that are not negative (SciPy's least squares)."""
    rng = np.random.default_rng(8)
    project = jax.jit(lambda G, h, v: bilax.Polyhedron(G, h).project(v))
    left_something = 0
    for _ in range(150):
        G, v = rng.normal(size=(9, 4)), 3 * rng.normal(size=4)
        h = G @ rng.normal(size=4) + rng.uniform(0, 0.5, 9)
        p = np.asarray(project(G, h, v))
        assert np.all(G @ p <= h + 1e-10)
        active = np.abs(G @ p - h) < 1e-9
        assert scipy.optimize.nnls(G[active].T, v - p)[1] < 1e-9 * (1 + np.linalg.norm(v - p))
        first = np.argmax((G @ v - h) / np.linalg.norm(G, axis=1))
        left_something += not active[first]
    assert left_something > 5, "the row that is broken most must not always hold p"


def test_what_a_set_is_made_of_is_checked():
    """By name and with a remedy; inside jit too where it is known, and not where it is traced."""
    wrong = {
        r"Ball\(radius\): radius must be positive": lambda: bilax.Ball(0.0),
        r"L1Ball\(radius\): radius must be positive": lambda: bilax.L1Ball(-1.0),
        r"Simplex\(total\): total must be positive": lambda: bilax.Simplex(np.nan),
        r"Halfspace\(a, b\): a must be finite and not zero": lambda: bilax.Halfspace(0.0, 1.0),
        r"Hyperplane\(a, b\): a must be finite and not zero": lambda: bilax.Hyperplane({"a": np.zeros(2)}, 1.0),
        r"Affine\(A, b\): A must be a matrix": lambda: bilax.Affine(np.ones(3), 1.0),
        r"Affine\(A, b\): no point": lambda: bilax.Affine(np.ones((2, 3)), [1.0, 2.0]),
        r"A and b belong together": lambda: bilax.Polyhedron(np.eye(2), 1.0, A=np.eye(2)),
        r"no point fulfils all rows": lambda: bilax.Polyhedron(np.asarray([[1.0], [-1.0]]), [-1.0, -1.0]),
    }
    for message, make in wrong.items():
        for call in (make, lambda make=make: jax.jit(lambda v: make().project(v))(0.5)):
            with pytest.raises(ValueError, match=message):
                call()
    with pytest.raises(ValueError, match="2 columns, but the point has 3"):
        bilax.Affine(np.ones((1, 2)), 1.0).project(np.ones(3))
    with pytest.raises(ValueError, match="one set for each part"):
        bilax.Product({"a": bilax.Reals()}).project({"b": 1.0})
    with pytest.raises(ValueError, match=r"Ball\(centre=...\).*Give a number"):
        bilax.Ball(1.0, {"a": 1.0}).project({"b": 1.0})
    with pytest.raises(TypeError, match="tree of weights"):
        bilax.Product((bilax.Reals(), bilax.L1(1.0)))
    with pytest.raises(TypeError, match="expected a set"):
        bilax.Each(bilax.L1(1.0))


def test_a_product_goes_on_in_any_tree_and_each_row_has_its_own():
    product = bilax.Product((bilax.NonNegative(), bilax.Each(bilax.Simplex())))
    v = ({"u": jnp.asarray(-1.0), "w": jnp.ones(2)}, jnp.asarray([[2.0, 0.0], [0.5, 0.5], [-1.0, 3.0]]))
    projected = product.project(v)
    np.testing.assert_array_equal(ravel(projected), [0, 1, 1, 1, 0, 0.5, 0.5, 0, 1])
    assert product.flat
    lo, hi = product.bounds(v)
    np.testing.assert_array_equal(ravel(lo), np.zeros(9))
    np.testing.assert_array_equal(ravel(hi), [np.inf] * 3 + [1] * 6)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((lo, hi)))
    own = bilax.Each(bilax.Simplex(jnp.asarray([1.0, 2.0, 3.0])), own=True)
    np.testing.assert_allclose(own.project(v[1]).sum(1), [1, 2, 3])
    np.testing.assert_array_equal(own.bounds(v[1])[1], [[1, 1], [2, 2], [3, 3]])


def test_the_boundary_rule_reaches_phi():
    """A follower that rests exactly on its bound, with no force, still answers the leader from inside."""
    problem = bilax.Problem(lambda x, y: y, lambda x, y: 0.5 * (y - x) ** 2, y_set=bilax.Box(0.0, 1.0))
    phi = bilax.approximate(problem, bilax.ia_gm(1, 0.5))
    gx, gz = jax.grad(lambda x, z: phi(x, z)[0], (0, 1))(1.0, 1.0)
    np.testing.assert_allclose([gx, gz], [0.5, 0.5])
    gx, gz = jax.grad(lambda x, z: phi(x, z)[0], (0, 1))(1.1, 1.0)
    np.testing.assert_allclose([gx, gz], [0.0, 0.0])


def test_bounds_may_be_trees_and_arrays():
    box = bilax.Box({"a": jnp.asarray([0.0, -1.0]), "b": -2.0}, {"a": jnp.asarray([1.0, 1.0]), "b": 2.0})
    projected = box.project({"a": jnp.asarray([-5.0, -5.0]), "b": jnp.asarray(5.0)})
    np.testing.assert_array_equal(projected["a"], [0, -1])
    assert float(projected["b"]) == 2
    assert bilax.Box(-1, 1).project(jnp.asarray(3.0, jnp.float32)).dtype == jnp.float32


def test_bounds_may_be_traced():
    cut = jax.jit(lambda lo, hi: bilax.Box(lo, 1.0).project(2.0 * lo) + bilax.Box(0.0, hi).project(hi + 1))
    assert cut(-3.0, 5.0) == -3.0 + 5.0


def test_a_box_may_be_made_inside_jit():
    array = jnp.asarray([1.0, 2.0])
    cut = jax.jit(lambda v: bilax.Box(0.0, 1.0).project(v) + bilax.Box(-array, array).project(v))
    np.testing.assert_array_equal(cut(jnp.asarray([-3.0, 5.0])), [-1.0, 3.0])
    np.testing.assert_array_equal(jax.vmap(jax.grad(lambda v: bilax.Box(0.0, array[0]).project(v)))(array), [1, 0])
    with pytest.raises(ValueError, match="lo must not exceed hi"):
        jax.jit(lambda v: bilax.Box(1.0, 0.0).project(v))(0.5)


@pytest.mark.parametrize(
    ("name", "lo", "hi"),
    [
        ("reals", -np.inf, np.inf),
        ("box", -1.0, 0.5),
        ("non-negative", 0.0, np.inf),
        ("ball", -1.5, 1.5),
        ("simplex", 0.0, 1.0),
        ("ball with a centre", -1.1, 1.9),
        ("l1 ball", -1.5, 1.5),
        ("scaled simplex", 0.0, 0.8),
    ],
)
def test_a_set_tells_its_bounds(name, lo, hi):
    point = {"a": jnp.zeros((2, 3), jnp.float32), "b": jnp.asarray(0.0)}

    def check(point):
        for expected, bound in zip((lo, hi), {**SETS, **MORE}[name].bounds(point), strict=True):
            checks.check_same("bound", bound, "point", point)
            # NumPy, not JAX: so that the value is known while a search is compiled.
            assert all(isinstance(leaf, np.ndarray) and np.allclose(leaf, expected) for leaf in jax.tree.leaves(bound))
        return point

    check(point)
    jax.jit(check)(point)


def test_bounds_of_a_cone():
    lo, hi = bilax.SecondOrderCone().bounds({"a": jnp.zeros((2, 2)), "b": jnp.asarray(0.0)})
    np.testing.assert_array_equal(ravel(lo), [0] + [-np.inf] * 4)
    np.testing.assert_array_equal(ravel(hi), [np.inf] * 5)


def test_bounds_of_a_box_are_spread_over_the_point():
    point = {"a": jnp.zeros((2, 2)), "b": jnp.asarray(0.0)}
    lo, hi = bilax.Box({"a": jnp.asarray([0.0, -1.0]), "b": -2.0}, 3.0).bounds(point)
    np.testing.assert_array_equal(lo["a"], [[0, -1], [0, -1]])
    assert float(lo["b"]) == -2
    np.testing.assert_array_equal(ravel(hi), 3 * np.ones(5))
    traced = jax.jit(lambda lo: bilax.Box(lo, 1.0).bounds(point))(-2.0)
    np.testing.assert_array_equal(ravel(traced[0]), -2 * np.ones(5))


class OwnSet:
    """The interval [2, 3] in every coordinate, told by its projection alone."""

    def project(self, v):
        return jax.tree.map(lambda leaf: jnp.clip(leaf, 2.0, 3.0), v)


class OwnBoundedSet(OwnSet):
    def bounds(self, v):
        lo, hi = (jax.tree.map(lambda leaf, end=end: jnp.full_like(leaf, end), v) for end in (2.0, 3.0))
        return lo, hi


def test_ones_own_set_is_unbounded_unless_it_tells_its_bounds():
    point = (jnp.zeros(2), jnp.asarray(0.0))
    for bound, expected in zip(sets.bounds(OwnSet(), point), (-np.inf, np.inf), strict=True):
        np.testing.assert_array_equal(ravel(bound), np.full(3, expected))
    for bound, expected in zip(sets.bounds(OwnBoundedSet(), point), (2, 3), strict=True):
        np.testing.assert_array_equal(ravel(bound), np.full(3, expected))


def search_range(a_set):
    """Where the follower's minima are sought, and whether the bounds are known while the search is compiled."""
    problem = bilax.Problem(lambda x, y: y, lambda x, y: y**2, y_set=a_set)
    known = []

    def spread(y, unit):
        found = flatten(problem, (), y).y_range
        known.append(found.bounded)
        return jax.vmap(found.spread)(unit)

    return np.ravel(jax.jit(spread)(jnp.asarray(2.5), jnp.linspace(0, 1, 101)[:, None])), known[0]


def test_a_search_stays_within_the_bounds_that_a_set_tells():
    points, known = search_range(OwnSet())
    assert not known
    assert points.min() < 0
    assert points.max() > 100
    points, _ = search_range(OwnBoundedSet())
    np.testing.assert_allclose(points, np.linspace(2, 3, 101))
    for a_set in (bilax.Box(2.0, 3.0), bilax.Ball(3.0), bilax.Simplex()):
        assert search_range(a_set)[1]
    for a_set in (bilax.Reals(), bilax.NonNegative(), bilax.Box(0.0, np.inf)):
        assert not search_range(a_set)[1]


def test_bounds_that_do_not_fit_the_point_are_refused():
    class TooShort(OwnSet):
        def bounds(self, v):
            return jax.tree.map(lambda leaf: leaf[:1], v), v

    problem = bilax.Problem(lambda x, y: jnp.sum(y), lambda x, y: jnp.sum(y**2), y_set=TooShort())
    with pytest.raises(ValueError, match=r"the lower bound of .*TooShort.* is float64\[1\]"):
        flatten(problem, (), jnp.zeros(2))


def test_any_object_with_project_is_a_set():
    class EvenNumbers:
        def project(self, v):
            return jax.tree.map(lambda a: 2 * jnp.round(a / 2), v)

    problem = bilax.Problem(lambda x, y: x**2 + y, lambda x, y: (x - y) ** 2, x_set=EvenNumbers())
    solution = bilax.solve(problem, bilax.rhg(2, 0.1), 4.0, 0.0, steps=3)
    assert float(solution.x) % 2 == 0


def test_a_polyhedron_tells_its_bounds_also_while_it_is_traced():
    rows, right = np.r_[np.eye(3), -2 * np.eye(3), np.ones((1, 3))], np.r_[[3.0, 2.0, 9.0], np.zeros(3), 4.0]
    point = jnp.zeros(3)
    lo, hi = bilax.Polyhedron(rows, right).bounds(point)
    np.testing.assert_allclose(ravel(lo), 0, atol=1e-12)
    np.testing.assert_allclose(ravel(hi), [3, 2, 4])

    def traced(rows, right):
        return bilax.Polyhedron(rows, right, np.asarray([[0.0, 1.0, 0.0]]), [1.5]).bounds(point)

    lo, hi = jax.jit(traced)(rows, right)
    # Only what rows with one coefficient tell.
    np.testing.assert_array_equal(lo, [0, 1.5, 0])
    np.testing.assert_array_equal(hi, [3, 1.5, 9])


def test_one_number_is_a_bound_for_all_coordinates_and_crossed_bounds_are_refused():
    class Own(OwnSet):
        ends: tuple[float, float] = 2.0, 3

        def bounds(self, v):
            return self.ends

    for bound, expected in zip(sets.bounds(Own(), jnp.zeros(2)), (2, 3), strict=True):
        np.testing.assert_array_equal(bound, np.full(2, expected, float))
    own = Own()
    own.ends = 3.0, 2.0
    with pytest.raises(ValueError, match=r"Own\.bounds.*lower.*above"):
        flatten(bilax.Problem(lambda x, y: jnp.sum(y), lambda x, y: jnp.sum(y**2), y_set=own), (), jnp.zeros(2))
