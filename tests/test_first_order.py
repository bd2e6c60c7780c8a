"""F²SA and its kin: 50 steps as NumPy takes them, and convergence on a noisy quadratic."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilax
from tests.noisy_quadratic import X0, Y0, check, cross, error, f, f_x, f_y, hess, key_at, upper_x, upper_y


def weight(k):
    return 3 * (k + 1.0) ** (1 / 7)


def rate(k):
    return 0.3 / (k + 1) ** (3 / 7)


def fine(k):
    return rate(k) / weight(k)


def slow(k):
    return 0.1 / (k + 1) ** (4 / 7)


def share(k):
    return 0.9 / (k + 1) ** (4 / 7)


METHODS = {
    "f2sa": bilax.f2sa(2, fine, slow, rate, weight),
    "penalty": bilax.penalty(2, 0.3, weight),
    "f3sa": bilax.f3sa(fine, slow, rate, weight, share),
    "bome": bilax.bome(10, 0.3, rate, rate),
    "v_pbgd": bilax.v_pbgd(10, 0.3, 0.01, 0.01, 10.0),
    "v_pbgd carried": bilax.v_pbgd(2, 0.3, 0.01, 0.01, 10.0, carried=True),
    "g_pbgd": bilax.g_pbgd(0.01, 0.01, 10.0),
    "meha": bilax.meha(0.1, 0.1, 0.1, 2.0, weight),
    "pzobo": bilax.pzobo(10, 0.3, slow, 3, 0.01),
}


def f2sa(batches):
    x, y, z = X0, Y0, Y0
    for k, (above, below) in enumerate(batches):
        for i in range(2):
            y = y - fine(k) * (weight(k) * f_y(x, y, below[i]) + upper_y(x, y, above[i]))
            z = z - rate(k) * f_y(x, z, below[2 + i])
        x = x - slow(k) * (upper_x(x, y, above[2]) + weight(k) * (f_x(x, y, below[4]) - f_x(x, z, below[5])))
        yield x, y


def penalty(batches):
    x, y, z = X0, Y0, Y0
    for k, ((above,), (below,)) in enumerate(batches):
        for _ in range(2):
            y = y - 0.3 * (f_y(x, y, below) + upper_y(x, y, above) / weight(k))
            z = z - 0.3 * f_y(x, z, below)
        x = x - 0.1 * (upper_x(x, y, above) + weight(k) * (f_x(x, y, below) - f_x(x, z, below)))
        yield x, z


def carried(batches):
    x, y, z = X0, Y0, Y0
    for (above,), (below,) in batches:
        for _ in range(2):
            z = z - 0.3 * f_y(x, z, below)
        slope = upper_x(x, y, above) + 10 * (f_x(x, y, below) - f_x(x, z, below))
        y = y - 0.01 * (upper_y(x, y, above) + 10 * f_y(x, y, below))
        x = x - 0.01 * slope
        yield x, y


def f3sa(batches):
    x, y, z = X0, Y0, Y0
    old = old_x = (x, y, z)
    d, d_x = None, None

    def storm(here, before, last, k):
        if last is None:
            return here
        return [a + (1 - share(k)) * (c - b) for a, b, c in zip(here, before, last, strict=True)]

    for k, (above, below) in enumerate(batches):

        def of_y(x, y, z, above=above, below=below):
            return upper_y(x, y, above[0]), f_y(x, y, below[0]), f_y(x, z, below[1])

        def of_x(x, y, z, above=above, below=below):
            return upper_x(x, y, above[1]), f_x(x, y, below[2]), f_x(x, z, below[3])

        d = storm(of_y(x, y, z), of_y(*old), d, k)
        old = x, y, z
        y, z = y - fine(k) * (d[0] + weight(k) * d[1]), z - rate(k) * d[2]
        d_x = storm(of_x(x, y, z), of_x(*old_x), d_x, k)
        old_x = x, y, z
        x = x - slow(k) * (d_x[0] + weight(k) * (d_x[1] - d_x[2]))
        yield x, y


def together(measure, multiplier, rate):
    def run(batches):
        x, y = X0, Y0
        for k, ((above,), (below,)) in enumerate(batches):
            q, q_x, q_y = measure(x, y, below)
            u_x, u_y = upper_x(x, y, above), upper_y(x, y, above)
            factor = multiplier(k, u_x @ q_x + u_y @ q_y, q, q_x @ q_x + q_y @ q_y)
            x, y = x - rate(k) * (u_x + factor * q_x), y - rate(k) * (u_y + factor * q_y)
            yield x, y

    return run


def value_gap(x, y, below):
    z = y
    for _ in range(10):
        z = z - 0.3 * f_y(x, z, below)
    return f(x, y, below) - f(x, z, below), f_x(x, y, below) - f_x(x, z, below), f_y(x, y, below)


def squared_slope(x, y, below):
    slope = f_y(x, y, below)
    return slope @ slope, 2 * cross(slope), 2 * hess(below) @ slope


def barrier(k, inner, q, size):
    return max(0.5 * size - inner, 0) / size


def meha(batches):
    x, y, theta = X0, Y0, Y0
    for k, ((above,), (below,)) in enumerate(batches):
        theta = theta - 0.1 * (f_y(x, theta, below) + (theta - y) / 2)
        x = x - 0.1 * (upper_x(x, y, above) / weight(k) + f_x(x, y, below) - f_x(x, theta, below))
        y = y - 0.1 * (upper_y(x, y, above) / weight(k) + f_y(x, y, below) - (y - theta) / 2)
        yield x, y


def pzobo(batches):
    x, y = X0, Y0
    for k, ((above,), below) in enumerate(batches):

        def answer(x, y=y, below=below):
            for batch in below[:10]:
                y = y - 0.3 * f_y(x, y, batch)
            return y

        there = answer(x)
        spread = 0.0
        for key in jax.random.split(key_at(k), 3):
            u = np.asarray(optax.tree.random_like(key, X0, jax.random.normal))
            spread = spread + ((answer(x + 0.01 * u) - there) / 0.01) @ upper_y(x, there, above) * u / 3
        x, y = x - slow(k) * (upper_x(x, there, above) + spread), there
        yield x, y


TRANSCRIBED = {
    "f2sa": f2sa,
    "penalty": penalty,
    "v_pbgd carried": carried,
    "f3sa": f3sa,
    "bome": together(value_gap, barrier, rate),
    "v_pbgd": together(value_gap, lambda *_: 10.0, lambda k: 0.01),
    "g_pbgd": together(squared_slope, lambda *_: 10.0, lambda k: 0.01),
    "meha": meha,
    "pzobo": pzobo,
}


@pytest.mark.parametrize("name", METHODS)
def test_fifty_steps_are_those_of_numpy(name):
    check(METHODS[name], TRANSCRIBED[name])


@pytest.mark.parametrize("name", METHODS)
def test_it_converges_on_a_noisy_quadratic(name):
    # Those of papers without noise get all data: on batches they are biased.
    assert error(METHODS[name], 20_000, whole=name in FULL) < 0.1


FULL = ("penalty", "bome", "v_pbgd", "v_pbgd carried", "g_pbgd", "meha")


def bounded(y_set):
    """y(x) is x's projection onto the set (or its proximal point), and F wants y at 2 and x at 0."""
    return bilax.Problem(
        lambda x, y: 0.5 * jnp.sum((y - 2) ** 2) + 0.05 * jnp.sum(x**2),
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        y_set=y_set,
    )


@pytest.mark.parametrize("name", ["f2sa", "v_pbgd", "meha"])
def test_the_follower_stays_in_its_set(name):
    method = {"f2sa": bilax.f2sa(3, 0.05, 0.05, 0.2, 10.0), "v_pbgd": METHODS[name], "meha": METHODS[name]}[name]
    steps, set_ = 400, bilax.Box(-1.0, 1.0)
    found = bilax.solve(bounded(set_), method, jnp.zeros(2), jnp.zeros(2), steps=steps, record_every=steps)
    assert (np.abs(found.y) <= 1).all()
    # The leader gains nothing beyond x = 1, where the follower is on its bound.
    np.testing.assert_allclose(found.y, 1.0, atol=0.1)


def test_sets_and_terms_are_refused_where_the_theory_has_none():
    def call(method, y_set):
        bilax.solve(bounded(y_set), method, jnp.zeros(2), jnp.zeros(2), steps=1)

    for method in (
        METHODS["bome"],
        METHODS["g_pbgd"],
        bilax.stocbio(1, 1, 0.1, 0.1, 0.1),
        bilax.mrbo(1, 0.1, 0.1, 0.1),
    ):
        with pytest.raises(ValueError, match="follower without bounds"):
            call(method, bilax.Box(0.0, 1.0))
    with pytest.raises(ValueError, match="projects y onto a set"):
        call(METHODS["v_pbgd"], bilax.L1(0.1))
    with pytest.raises(ValueError, match="depends on x"):
        call(METHODS["f2sa"], lambda x: bilax.Ball(1.0))
    with pytest.raises(ValueError, match="needs a step length"):
        call(bilax.f2sa(1, optax.adam(0.1), 0.1), bilax.L1(0.1))
    with pytest.raises(ValueError, match="inner_steps must be a whole number"):
        bilax.f2sa(0, 0.1, 0.1)
    with pytest.raises(ValueError, match="v_rate must be a positive number"):
        bilax.stocbio(1, 1, 0.1, 0.1, -0.1)
