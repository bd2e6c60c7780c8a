"""Proximal maps: against dense grids, Moreau's identity, closed forms and differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import bilax
from tests.problems import central_difference, directions

V = np.asarray([-2.3, -0.71, -0.2, 0.0, 0.05, 0.4, 0.93, 3.1])
STEP = 0.7
TERMS = {
    "l1": (lambda w: bilax.L1(w), 0.6, lambda y, w: w * np.abs(y)),
    "l1, a weight each": (lambda w: bilax.L1(w), np.linspace(0.0, 1.4, 8), lambda y, w: w * np.abs(y)),
    "elastic net": (lambda w: bilax.ElasticNet(w, 2 * w), 0.4, lambda y, w: w * np.abs(y) + w * y**2),
    "lq": (lambda w: bilax.Lq(w), np.linspace(0.0, 0.7, 8), lambda y, w: w * np.abs(y) ** 0.5),
    "lq, q = 0.8": (lambda w: bilax.Lq(w, 0.8), 0.3, lambda y, w: w * np.abs(y) ** 0.8),
}


@pytest.mark.parametrize("name", list(TERMS))
def test_the_map_minimises_on_a_dense_grid(name):
    """Coordinate by coordinate, in value and in place; and its derivatives are those of differences."""
    make, weight, value = TERMS[name]
    prox = jax.jit(lambda v, w: make(w).prox(v, STEP))
    found = np.asarray(prox(V, weight))
    grid = np.union1d(np.linspace(-4, 4, 160_001), [0.0])
    for i, v in enumerate(V):
        own = np.broadcast_to(weight, V.shape)[i]
        objective = value(grid, own) + (grid - v) ** 2 / (2 * STEP)
        assert abs(found[i] - grid[np.argmin(objective)]) < 6e-5
        assert value(found[i], own) + (found[i] - v) ** 2 / (2 * STEP) <= objective.min() + 1e-12
        np.testing.assert_allclose(make(own).value(jnp.asarray(v)), value(v, own), rtol=1e-14)
    point = jnp.asarray(V), jnp.asarray(weight)
    direction = directions(point, 1)
    direction = direction[0], jnp.where(point[1] > 0, direction[1], 0)
    expected = central_difference(lambda point: prox(*point), point, direction)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(jax.jvp(prox, point, direction)[1], expected, atol=1e-9)
    by_v, by_w = jax.jit(jax.jacrev(prox, (0, 1)))(*point)
    np.testing.assert_allclose(
        by_v @ direction[0] + np.reshape(by_w, (8, -1)) @ np.ravel(direction[1]), expected, atol=1e-9
    )


def test_groups():
    """Rows or leaves are shortened: by BFGS on the map's own objective, where the group does not vanish."""
    v, weight = np.asarray([[0.6, -0.8], [0.1, 0.2], [3.0, 4.0]]), 0.5
    for rows in (True, False):
        term = bilax.GroupL1(weight, rows)
        prox = jax.jit(lambda v, term=term: term.prox(v, STEP))
        groups = v if rows else v.reshape(1, -1)
        norms = np.linalg.norm(groups, axis=1, keepdims=True)
        expected = groups * np.maximum(1 - STEP * weight / norms, 0)
        np.testing.assert_allclose(prox(v), expected.reshape(v.shape), rtol=1e-14)
        np.testing.assert_allclose(term.value(jnp.asarray(v)), weight * norms.sum())
        slopes = jax.jit(jax.jacobian(prox))
        assert np.isfinite(slopes(np.zeros((3, 2)))).all()
        along = jnp.asarray(np.random.default_rng(0).normal(size=v.shape))
        difference = central_difference(prox, jnp.asarray(v), along)
        np.testing.assert_allclose(jnp.tensordot(slopes(v), along), difference, atol=1e-9)
    row = v[2]
    found = scipy.optimize.minimize(lambda y: weight * np.linalg.norm(y) + np.sum((y - row) ** 2) / (2 * STEP), row)
    np.testing.assert_allclose(bilax.GroupL1(weight).prox(jnp.asarray(v), STEP)[2], found.x, atol=1e-6)


def test_moreaus_identity():
    """v = prox of a norm + projection onto the dual norm's ball of the same size."""
    rng = np.random.default_rng(3)
    for scale in (0.3, 3.0):
        v, weight = jnp.asarray(scale * rng.normal(size=7)), 0.8
        ball = bilax.Box(-weight, weight).project(v)
        np.testing.assert_allclose(bilax.L1(weight).prox(v, 1.0) + ball, v, atol=1e-14)
        ball = bilax.Ball(weight).project(v)
        np.testing.assert_allclose(bilax.GroupL1(weight, rows=False).prox(v, 1.0) + ball, v, atol=1e-14)
        # The other way round: the prox of max|v_i| is what the L1 ball's projection leaves, here by a search for it.
        p = v - bilax.L1Ball(weight).project(v)

        def objective(t, v=np.asarray(v)):
            return 0.8 * t + np.sum((np.clip(v, -t, t) - v) ** 2) / 2

        cap = scipy.optimize.minimize_scalar(objective, bounds=(0, 20), method="bounded", options={"xatol": 1e-10})
        np.testing.assert_allclose(p, np.clip(v, -cap.x, cap.x), atol=1e-6)  # pyright: ignore[reportAttributeAccessIssue]


def test_trees_are_taken_leaf_by_leaf_and_keep_their_precision():
    v = {"a": jnp.asarray(V[:5], jnp.float32), "b": (jnp.asarray(V[5]), jnp.asarray(V[6:]))}
    weights = {"a": 0.5, "b": (0.0, jnp.asarray([0.1, 0.2]))}
    for make in (bilax.L1, lambda w: bilax.ElasticNet(w, 0.3), bilax.Lq):
        for weight in (0.5, weights):
            whole = make(weight).prox(v, STEP)
            each = jax.tree.map(lambda _, w=weight: w, v) if isinstance(weight, float) else weight
            expected = jax.tree.map(lambda leaf, w, make=make: make(w).prox(leaf, STEP), v, each)
            jax.tree.map(np.testing.assert_array_equal, whole, expected)
            jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), whole, v)


def test_at_the_threshold_exactly_a_coordinate_is_held():
    slope = jax.jacobian(lambda v: bilax.L1(1.0).prox(v, 0.5))(jnp.asarray([0.5, -0.5, 0.6]))
    np.testing.assert_array_equal(np.diag(slope), [0, 0, 1])


def test_the_range_of_q_is_checked():
    with pytest.raises(ValueError, match=r"For q = 1 use bilax\.L1"):
        bilax.Lq(0.1, 1.0)
