"""Proofs over sets that linear rows describe: SciPy solves the followers, exact fractions judge the bounds."""

from fractions import Fraction
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import bilax
from bilax.trust import linear_rows
from bilax.trust.interval_rules import Traced
from bilax.trust.proof import prove_convex_over_rows

SIZE = 8
DEMAND = np.random.default_rng(0).uniform(1, 3, SIZE)
PRICES = np.random.default_rng(1).uniform(0, 1, SIZE)
LOADS = bilax.Polyhedron(
    np.r_[np.eye(SIZE), -np.eye(SIZE)], np.r_[2 * DEMAND, np.zeros(SIZE)], np.ones((1, SIZE)), [DEMAND.sum()]
)


def shifted_load(p, y):
    """What a household pays, and what it minds to use its devices at other hours."""
    return p @ y + 0.15 * jnp.sum((y - DEMAND) ** 2 / DEMAND)


def by_scipy(lower, a_set, start):
    """SLSQP's answer, with exact derivatives."""
    value = jax.jit(jax.value_and_grad(lower))
    constraints = [{"type": "ineq", "fun": lambda y: a_set.h - a_set.G @ y, "jac": lambda y: -a_set.G}]
    if a_set.A is not None:
        constraints.append({"type": "eq", "fun": lambda y: a_set.A @ y - a_set.b, "jac": lambda y: a_set.A})
    found = scipy.optimize.minimize(
        lambda y: [np.asarray(part) for part in value(y)], start, jac=True, method="SLSQP", constraints=constraints,
        options={"ftol": 1e-15, "maxiter": 500},
    )  # fmt: skip
    return found.x


def certify(lower, y, y_set, x=(), **options):
    problem = bilax.Problem(lambda x, y: 0.0, lower, y_set=y_set)
    return bilax.certify(problem, SimpleNamespace(x=x, y=y), **options)


@pytest.fixture(scope="module")
def load():
    with jax.enable_x64(True):
        return by_scipy(lambda y: shifted_load(PRICES, y), LOADS, DEMAND)


def test_a_convex_follower_over_a_polyhedron_is_proven(load):
    found = certify(shifted_load, load, LOADS, PRICES)
    assert found.verdict is bilax.Verdict.global_follower
    assert found.bound is not None
    height = float(PRICES @ load + 0.15 * np.sum((load - DEMAND) ** 2 / DEMAND))
    assert height - 2 * found.tolerance <= found.bound <= height + 1e-12


def test_another_point_of_the_polyhedron_is_refuted(load):
    found = certify(shifted_load, 0.98 * load + 0.02 * DEMAND, LOADS, PRICES)
    assert found.verdict is bilax.Verdict.not_stationary
    np.testing.assert_allclose(found.y_lowest, load, atol=1e-4)


def test_a_set_of_the_users_own_is_proven_within_its_bounds_and_told_by_its_name(load):
    class Loads:
        def project(self, v):
            return LOADS.project(v)

        def bounds(self, v):
            return 0.0, 2 * DEMAND

    inside = certify(lambda x, y: jnp.sum((y - DEMAND) ** 2), DEMAND, Loads())
    assert inside.verdict is bilax.Verdict.global_follower
    # Where what holds y is no bound of a coordinate, the box of the bounds has lower points.
    held = certify(shifted_load, load, Loads(), PRICES, time_limit=2.0)
    assert held.verdict is bilax.Verdict.not_excluded
    assert "the box of Loads.bounds" in held.words
    assert "bilax.Polyhedron" in held.words
    assert "object at" not in held.words


def test_when_nothing_was_searched_the_certificate_says_so(load):
    def rugged(p, y):
        return jnp.sum((y - load) ** 2 + jnp.sin(3 * (y - load)) ** 2)

    found = certify(rugged, load, LOADS, time_limit=0.0)
    assert found.verdict is bilax.Verdict.not_excluded
    assert "over Polyhedron only convex followers can be proven" in found.words
    assert "Nothing was searched" in found.words
    assert "give certify a larger time_limit" in found.words
    # Compiling the projection does not count, so that there is time for all of it.
    searched = certify(rugged, load, LOADS, time_limit=60.0)
    assert searched.verdict is bilax.Verdict.not_excluded
    assert "time_limit" not in searched.words


def random_polyhedron(rng, size):
    """Around the origin, its rows not along the axes; none bounds a coordinate by itself."""
    turn = np.linalg.qr(rng.normal(size=(size, size)))[0]
    return bilax.Polyhedron(np.r_[turn, -turn], rng.uniform(0.1, 2, 2 * size))


@pytest.mark.parametrize("linear", [True, False])
def test_random_polyhedra(linear):
    rng = np.random.default_rng(5)
    for size in (2, 5):
        a_set = random_polyhedron(rng, size)
        root, cost = rng.normal(size=(size + 1, size)), 3 * rng.normal(size=size)

        def lower(x, y, root=root, cost=cost):
            return cost @ y + (0.0 if linear else jnp.sum((root @ y) ** 2))

        with jax.enable_x64(True):
            best = by_scipy(lambda y, lower=lower: lower((), y), a_set, np.zeros(size))
        if linear:
            best = scipy.optimize.linprog(cost, a_set.G, a_set.h, bounds=(None, None)).x
        assert certify(lower, best, a_set).rigorous
        assert not certify(lower, 0.99 * best, a_set, time_limit=1.0).rigorous


def test_other_sets_of_rows_and_products_are_proven():
    target = np.asarray([1.0, 2.0, 3.0])

    def distance(x, y):
        return jnp.sum((y - target) ** 2)

    for a_set in (
        bilax.Halfspace(np.ones(3), 1.0),
        bilax.Hyperplane(np.asarray([1.0, -2.0, 0.5]), 1.0),
        bilax.Affine(np.asarray([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0]]), np.asarray([1.0, 0.5])),
    ):
        best = np.asarray(a_set.project(jnp.asarray(target)))
        assert certify(distance, best, a_set).rigorous
        assert not certify(distance, np.asarray(a_set.project(jnp.asarray(best + np.eye(3)[0] / 10))), a_set).rigorous
    product = bilax.Product((bilax.Simplex(), bilax.Polyhedron(np.eye(2), 1.0, np.ones((1, 2)), [1.0])))
    best = np.asarray([0.0, 1.0]), np.asarray([0.2, 0.8])

    def both(x, y):
        return y[0][0] - y[0][1] + jnp.sum((y[1] - jnp.asarray([0.2, 0.8])) ** 2)

    assert certify(both, best, product).rigorous
    assert not certify(both, (np.asarray([0.1, 0.9]), best[1]), product).rigorous


def exact_least(cost, vertices):
    return min(sum(Fraction(c) * v for c, v in zip(cost, vertex, strict=True)) for vertex in vertices)


def test_bounds_by_multipliers_lie_below_the_exact_minimum():
    """Triangles whose corners are found in fractions: no bound may lie above the least value, not by one unit."""
    rng = np.random.default_rng(7)
    for _ in range(100):
        G, h = rng.normal(size=(3, 2)), rng.uniform(0.5, 2, 3)
        G[2] = -G[0] * rng.uniform(0.5, 2) - G[1] * rng.uniform(0.5, 2)
        corners = [corner(G[rows], h[rows]) for rows in ([0, 1], [0, 2], [1, 2])]
        rows = linear_rows.Rows.without_box(G, h).boxed()
        for i, unit in enumerate(np.eye(2)):
            assert Fraction(rows.lo[i]) <= exact_least(unit, corners) <= Fraction(rows.lo[i]) + Fraction(1, 10**9)
            assert Fraction(rows.hi[i]) >= -exact_least(-unit, corners) >= Fraction(rows.hi[i]) - Fraction(1, 10**9)


def corner(G, h):
    """Where two rows meet, by Cramer's rule in fractions."""
    (a, b), (c, d) = [[Fraction(one) for one in row] for row in G]
    p, q = (Fraction(one) for one in h)
    det = a * d - b * c
    return (p * d - b * q) / det, (a * q - p * c) / det


def test_boxes_of_open_polyhedra_are_open():
    rows = linear_rows.Rows.without_box(np.asarray([[-1.0, 0.0], [1.0, -1.0]]), np.zeros(2)).boxed()
    np.testing.assert_array_equal(rows.hi, np.inf)
    assert rows.lo[0] <= 0
    assert rows.lo[0] > -1e-9


def test_a_tangent_anywhere_in_the_polyhedron_bounds_f_from_below():
    """Also at points that are no minima, where rows that y does not touch have their price."""
    rng = np.random.default_rng(9)
    with jax.enable_x64(True):
        for size in (2, 4):
            a_set, cost = random_polyhedron(rng, size), rng.normal(size=size)
            rows = linear_rows.rows_of(a_set, jnp.zeros(size))
            least = scipy.optimize.linprog(cost, a_set.G, a_set.h, bounds=(None, None)).fun
            for y in 0.05 * rng.normal(size=(5, size)):
                linear = prove_convex_over_rows(Traced(lambda v, cost=cost: cost @ v, size), rows, y)
                assert linear is not None
                assert least - 1e-9 <= linear[0] <= least + 1e-13
                bowl = Traced(lambda v, cost=cost: cost @ v + jnp.sum(v**2), size)
                best = by_scipy(lambda v, cost=cost: cost @ v + jnp.sum(v**2), a_set, np.zeros(size))
                curved = prove_convex_over_rows(bowl, rows, y)
                assert curved is not None
                assert curved[0] <= cost @ best + best @ best + 1e-13
