"""Each dynamics against the equation written out in plain Python, and Algorithm 1 against a plain loop."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilax
from tests.problems import toy

X, K, ALPHA = 1.3, 9, 0.9


def slope(y, x=X):
    return -x * np.cos(x * y)


def clip(y):
    return min(max(y, -2.0), 2.0)


def descent(y, alphas):
    return [y := clip(y - a * slope(y)) for a in alphas]


def accelerated(y, factor):
    u, t, out = y, 1.0, []
    for _ in range(K):
        y_next = clip(u - ALPHA * slope(u))
        t_next = (1 + np.sqrt(1 + factor * t**2)) / 2
        u = y_next + (t - 1) / t_next * (y_next - y)
        y, t = y_next, t_next
        out.append(y)
    return out


def aggregated(y, mus):
    return [y := clip(y - ALPHA * (mu * X + (1 - mu) * slope(y))) for mu in mus]


def adam(y):
    m = v = 0.0
    out = []
    for k in range(1, K + 1):
        g = slope(y)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        y = clip(y - 0.3 * (m / (1 - 0.9**k)) / (np.sqrt(v / (1 - 0.999**k)) + 1e-8))
        out.append(y)
    return out


ALPHAS = [ALPHA / (k + 1) for k in range(K)]
MUS = [0.4 / (k + 1) for k in range(K)]
WRITTEN_OUT = {
    "constant": (bilax.GradientDescent(ALPHA), lambda y: descent(y, [ALPHA] * K)),
    "sequence": (bilax.GradientDescent(ALPHAS), lambda y: descent(y, ALPHAS)),
    "schedule": (bilax.GradientDescent(lambda k: ALPHA / (k + 1)), lambda y: descent(y, ALPHAS)),
    "paper's t": (bilax.Nesterov(ALPHA, "paper"), lambda y: accelerated(y, 1)),
    "FISTA's t": (bilax.Nesterov(ALPHA, "fista"), lambda y: accelerated(y, 4)),
    "aggregated": (bilax.Aggregated(ALPHA, 0.4), lambda y: aggregated(y, [0.4] * K)),
    "vanishing weight": (bilax.Aggregated(ALPHA, lambda k: 0.4 / (k + 1)), lambda y: aggregated(y, MUS)),
    "adam": (bilax.FromOptax(optax.adam(0.3)), adam),
}


@pytest.mark.parametrize("start", [0.3, -1.9, 2.0])
@pytest.mark.parametrize("name", list(WRITTEN_OUT))
def test_trajectories_are_those_of_the_equations(name, start):
    dynamics, written_out = WRITTEN_OUT[name]
    expected = written_out(start)
    _, info = bilax.approximate(toy().problem, bilax.Method(K, dynamics, bilax.pessimistic()))(X, start)
    np.testing.assert_allclose(info.y_last, expected[-1], rtol=1e-12)
    scores = [X + X * y for y in expected]
    assert int(info.k_bar) == int(np.argmax(scores)) + 1
    np.testing.assert_allclose(info.y, expected[int(np.argmax(scores))], rtol=1e-12)


def test_momentum_of_the_papers_sequence_stays_a_quarter():
    """t_{k+1} = (1 + √(1 + t_k²))/2 tends to 4/3, so its momentum tends to 1/4; FISTA's tends to 1."""
    flat = bilax.Follower(lambda y: y, lambda y: 0.0 * y)
    for dynamics, limit in ((bilax.Nesterov(0.1, "paper"), 0.25), (bilax.Nesterov(0.1, "fista"), 1.0)):
        state, t = dynamics.init(jnp.asarray(0.0)), [1.0]
        for k in range(400):
            state = dynamics.step(k, state, flat)
            t.append(float(state[2]))
        assert (t[-2] - 1) / t[-1] == pytest.approx(limit, abs=0.01)


def test_algorithm_1_is_that_of_a_plain_loop():
    """x onto X and z onto Y after each update, from a start that leaves both."""
    x, z, rate = 9.5, -1.9, 0.3
    method = bilax.iaptt_gm(K, 0.05)
    solution = bilax.solve(
        toy().problem, method, x, z, steps=6, optimizer=optax.sgd(rate), record=lambda x, z, _: (x, z)
    )
    left = False
    for t in range(6):
        np.testing.assert_allclose([leaf[t] for leaf in solution.history.record], [x, z], rtol=1e-12)
        ys = [z]
        for _ in range(K):
            ys.append(clip(ys[-1] - 0.05 * slope(ys[-1], x)))
        k_bar = 1 + int(np.argmax([x + x * y for y in ys[1:]]))
        assert int(solution.history.k_bar[t]) == k_bar
        by_x, by_z = 1 + ys[k_bar], x
        for y in reversed(ys[:k_bar]):
            inside = abs(y - 0.05 * slope(y, x)) <= 2
            by_x += inside * by_z * 0.05 * (np.cos(x * y) - x * y * np.sin(x * y))
            by_z = inside * by_z * (1 - 0.05 * x * x * np.sin(x * y))
        left |= abs(z - rate * by_z) > 2
        x, z = min(max(x - rate * by_x, 1.0), 10.0), clip(z - rate * by_z)
    assert left, "the start was to make z leave Y"
    np.testing.assert_allclose([solution.x, solution.z], [x, z], rtol=1e-12)
