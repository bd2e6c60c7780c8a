"""A noisy quadratic with a known solution, in JAX for the methods and in NumPy for what they are compared with.

f_i = ½ (aᵢᵀy − bᵢ)² + ¼ ‖y‖² − xᵀPy over 24 examples, F_i = ½ (cᵢᵀy − dᵢ)² + 0.15 ‖x − t‖² over 16, batches of 4.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import bilax

DRAW = np.random.default_rng(1)
A, B = DRAW.normal(size=(24, 2)), DRAW.normal(size=24)
C, D = DRAW.normal(size=(16, 2)), DRAW.normal(size=16)
P, T = 0.3 * DRAW.normal(size=(3, 2)), DRAW.normal(size=3)
X0, Y0 = np.ones(3), np.asarray([0.5, -0.5])
KEY = jax.random.key(5)
DATA = bilax.Minibatches((C, D), (A, B), 4)
ALL = (C, D), (A, B)
PROBLEM = bilax.Problem(
    lambda x, y, above, below: 0.5 * jnp.mean((above[0] @ y - above[1]) ** 2) + 0.15 * jnp.sum((x - T) ** 2),
    lambda x, y, above, below: 0.5 * jnp.mean((below[0] @ y - below[1]) ** 2) + 0.25 * jnp.sum(y**2) - x @ P @ y,
)


def solution():
    """(x, y) where x minimises F(x, y(x)), y(x) = H⁻¹ (Aᵀb/n + Pᵀx)."""
    hessian = A.T @ A / 24 + 0.5 * np.eye(2)
    slope, shift = np.linalg.solve(hessian, P.T), np.linalg.solve(hessian, A.T @ B / 24)
    left = slope.T @ C.T @ C @ slope / 16 + 0.3 * np.eye(3)
    x = np.linalg.solve(left, 0.3 * T + slope.T @ C.T @ (D - C @ shift) / 16)
    return x, shift + slope @ x


# The same in NumPy; a batch is a pair of arrays.


def f_y(x, y, batch):
    a, b = batch
    return a.T @ (a @ y - b) / len(b) + 0.5 * y - P.T @ x


def f_x(x, y, batch):
    return -P @ y


def f(x, y, batch):
    a, b = batch
    return 0.5 * np.mean((a @ y - b) ** 2) + 0.25 * y @ y - x @ P @ y


def hess(batch):
    a, b = batch
    return a.T @ a / len(b) + 0.5 * np.eye(2)


def cross(v):
    """∂²_xy f v."""
    return -P @ v


def upper_y(x, y, batch):
    c, d = batch
    return c.T @ (c @ y - d) / len(d)


def upper_x(x, y, batch):
    return 0.3 * (x - T)


def draws_at(method, step, whole=False):
    return bilax.Draws(ALL if whole else DATA, jnp.asarray(step), KEY, method.draws)


def key_at(step):
    return jax.random.fold_in(KEY, step)


@functools.cache
def runner(method, whole=False):
    """A function of the number of steps that gives (x, y) after them; one program for all numbers."""

    def step(k, carry):
        return method.step(PROBLEM, carry, draws_at(method, k, whole), key_at(k))[0]

    @jax.jit
    def run(count):
        carry = method.init(PROBLEM, jnp.asarray(X0), jnp.asarray(Y0), draws_at(method, 0, whole))
        return method.point(jax.lax.fori_loop(0, count, step, carry))

    return run


@functools.cache
def all_batches(counts, steps=50):
    """The batches of each step: lists of the leader's and of the follower's."""

    @jax.jit
    def at(step):
        draws = bilax.Draws(DATA, step, KEY, counts)
        return [draws.upper(i)[0] for i in range(counts[0])], [draws.lower(i)[1] for i in range(counts[1])]

    return [jax.device_get(at(k)) for k in range(steps)]


def check(method, transcription, steps=50):
    """The method's iterates after 50 steps are those of a generator of (x, y), to 1e-10."""
    *_, (x, y) = transcription(all_batches(method.draws, steps))
    found = runner(method)(steps)
    np.testing.assert_allclose(found[0], x, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(found[1], y, rtol=1e-10, atol=1e-10)


def error(method, steps, whole=False):
    """How far x is from the solution after so many steps."""
    return float(np.linalg.norm(runner(method, whole)(steps)[0] - solution()[0]))
