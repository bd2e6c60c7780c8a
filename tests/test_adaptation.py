"""Learned adaptation: values and slopes against plain transcriptions, finite differences and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilax
from tests.problems import central_difference

DRAW = np.random.default_rng(3)
TARGETS = jnp.asarray(DRAW.normal(size=(3, 2, 2)))
"""three tasks, each with a point to learn from and one to be judged by"""
Y0 = {"w": jnp.asarray(DRAW.normal(size=(2, 2))), "b": jnp.asarray(DRAW.normal(size=2))}
K = 3


def learnt(y, task):
    return jnp.sum(jnp.cosh(y["w"] @ task[0] + y["b"] - 0.3)) + 0.1 * jnp.sum(y["w"] ** 4)


def judged(y, task):
    return jnp.sum((y["w"] @ task[1] + y["b"] - task[0]) ** 2)


PROBLEM = bilax.Problem(lambda x, y, task: judged(y, task), lambda x, y, task: learnt(y, task))
LEADERS = {
    "meta_sgd": jax.tree.map(lambda leaf: 0.05 + 0.02 * jnp.sin(7 * leaf), Y0),
    "maml_pp": {"w": jnp.asarray([0.1, 0.05, 0.02]), "b": jnp.asarray([0.02, 0.1, 0.07])},
    "t_net": {"w": jnp.asarray([[1.0, 0.2], [-0.3, 0.8]]), "b": jnp.asarray([[0.9, 0.0], [0.4, 1.1]])},
}
WEIGHTS = (0.2, 0.3, 0.5)
METHODS = {
    "meta_sgd": bilax.meta_sgd(K),
    "maml_pp": bilax.maml_pp(K, weights=WEIGHTS),
    "t_net": bilax.t_net(K, 0.05),
}


def plain(name, x, y, task):
    """The leader's value by steps written out."""
    values = []
    for k in range(K):
        slope = jax.grad(learnt)(y, task)
        if name == "meta_sgd":
            along = {part: x[part] * slope[part] for part in y}
        elif name == "maml_pp":
            along = {part: x[part][k] * slope[part] for part in y}
        else:
            along = {part: 0.05 * slope[part] @ (x[part] @ x[part].T) for part in y}
        y = {part: y[part] - along[part] for part in y}
        values.append(judged(y, task))
    return sum(w * v for w, v in zip(WEIGHTS, values, strict=True)) if name == "maml_pp" else values[-1]


@pytest.mark.parametrize("name", METHODS)
def test_values_and_slopes_are_those_of_the_steps_written_out(name):
    phi, x = bilax.Tasks(bilax.approximate(PROBLEM, METHODS[name])), LEADERS[name]

    def whole(x, z):
        return jnp.mean(jnp.stack([plain(name, x, z, task) for task in TARGETS]))

    (value, info), slopes = jax.value_and_grad(phi, (0, 1), has_aux=True)(x, Y0, TARGETS)
    expected, expected_slopes = jax.jit(jax.value_and_grad(whole, (0, 1)))(x, Y0)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), slopes, expected_slopes)
    direction = jax.tree.map(jnp.cos, x)
    along = sum(jnp.vdot(slopes[0][part], direction[part]) for part in x)
    np.testing.assert_allclose(along, central_difference(lambda x: phi(x, Y0, TARGETS)[0], x, direction), rtol=1e-7)
    assert info.y["w"].shape == (3, 2, 2)


def test_the_transformed_weights_of_t_net_take_these_steps():
    """Weights W Tᵀ with steps on W, as the paper has them, are y with steps along ∇f T Tᵀ."""
    warp = LEADERS["t_net"]["w"]
    made = {"w": jnp.linalg.solve(warp, Y0["w"].T).T, "b": Y0["b"]}
    for _ in range(K):
        slope = jax.grad(lambda made: learnt({"w": made["w"] @ warp.T, "b": made["b"]}, TARGETS[0]))(made)
        made = jax.tree.map(lambda a, s: a - 0.05 * s, made, slope)
    phi = bilax.approximate(PROBLEM, METHODS["t_net"])
    found = phi({"w": warp, "b": jnp.eye(2)}, Y0, TARGETS[0])[1].y
    np.testing.assert_allclose(found["w"], made["w"] @ warp.T, rtol=1e-10)
    np.testing.assert_allclose(found["b"], made["b"], rtol=1e-10)


def test_imaml_has_the_derivative_of_the_solved_follower():
    """f = ½ yᵀA y − bᵀy, F = ½ ‖y − t‖²: y* = (A + λ)⁻¹ (b + λ x) and ∂F/∂x = λ (A + λ)⁻¹ (y* − t)."""
    a = jnp.asarray([[2.0, 0.3], [0.3, 0.5]])
    b, t, x = jnp.asarray([1.0, -1.0]), jnp.asarray([0.5, 2.0]), jnp.asarray([0.7, 0.1])
    problem = bilax.Problem(
        lambda x, y, t: 0.5 * jnp.sum((y - t) ** 2), lambda x, y, t: 0.5 * y @ a @ y - b @ y, lower_at=None
    )
    near = bilax.near_leader(problem, 2.0)
    phi = bilax.approximate(near, bilax.imaml(200, 0.2))
    (_, info), slope = jax.value_and_grad(phi, has_aux=True)(x, jnp.zeros(2), t)
    inverse = jnp.linalg.inv(a + 2 * jnp.eye(2))
    y = inverse @ (b + 2 * x)
    np.testing.assert_allclose(info.y, y, rtol=1e-9)
    np.testing.assert_allclose(slope, 2 * inverse @ (y - t), rtol=1e-8)
    # Steps begin at x, wherever z is.
    one = bilax.approximate(near, bilax.imaml(1, 0.2))(x, jnp.full(2, 9.0), t)[1].y
    np.testing.assert_allclose(one, x - 0.2 * (a @ x - b), rtol=1e-12)
    assert bilax.solve(near, bilax.imaml(50, 0.2), x, x, data=(t,), steps=300).upper < 1e-6


def test_every_step_says_what_it_is_for():
    with pytest.raises(ValueError, match=r"weights has 2 entries for inner_steps=3"):
        bilax.maml_pp(3, weights=[0.5, 0.5])
    with pytest.raises(ValueError, match=r"EveryStep\(\) is for all of inner_steps"):
        bilax.rhg(3, 0.1, select=bilax.EveryStep(), derivative=bilax.Reverse(window=2))
    with pytest.raises(ValueError, match="weight must be positive"):
        bilax.near_leader(PROBLEM, 0.0)
    value = {}
    for checkpoint in (False, True):
        method = bilax.rhg(K, 0.05, select=bilax.EveryStep(), derivative=bilax.Reverse(checkpoint=checkpoint))
        phi = bilax.approximate(PROBLEM, method)
        value[checkpoint] = jax.grad(lambda z, phi=phi: phi((), z, TARGETS[0])[0])(Y0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), value[False], value[True])
