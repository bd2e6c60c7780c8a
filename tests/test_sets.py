"""Projections: what they are, and what their derivative is, on the boundary too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bilax
from bilax.problem import checks, sets
from bilax.trust.flat_problem import flatten

SETS = {
    "reals": bilax.Reals(),
    "box": bilax.Box(-1.0, 0.5),
    "non-negative": bilax.NonNegative(),
    "ball": bilax.Ball(1.5),
    "simplex": bilax.Simplex(),
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
    ],
)
def test_a_set_tells_its_bounds(name, lo, hi):
    point = {"a": jnp.zeros((2, 3), jnp.float32), "b": jnp.asarray(0.0)}

    def check(point):
        for expected, bound in zip((lo, hi), SETS[name].bounds(point), strict=True):
            checks.check_same("bound", bound, "point", point)
            # NumPy, not JAX: so that the value is known while a search is compiled.
            assert all(isinstance(leaf, np.ndarray) and (leaf == expected).all() for leaf in jax.tree.leaves(bound))
        return point

    check(point)
    jax.jit(check)(point)


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
