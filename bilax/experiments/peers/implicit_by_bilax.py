"""bilax's side of `bilax bench implicit`: `python -m bilax.experiments.peers.implicit_by_bilax`, orders by stdin."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

import bilax
from bilax.experiments.peers import work

DYNAMICS = {"Newton": bilax.Newton(), "LBFGS": bilax.LBFGS(), "FISTA": bilax.Nesterov(None, "fista")}


class Rows(eqx.Module):
    """Every row on the simplex."""

    flat = True

    def project(self, v: Any) -> Any:
        return jax.vmap(bilax.Simplex().project)(v)


def problem_of(name: str) -> bilax.Problem:
    """One of the works as a `Problem`."""
    one = work.WORKS[name]
    sets: dict[str, Any] = {
        "plain": bilax.Reals(),
        "lasso": lambda x: bilax.L1(jnp.exp(x)),
        "elastic net": lambda x: bilax.ElasticNet(jnp.exp(x), work.RATIO * jnp.exp(x)),
        "non-negative": bilax.NonNegative(),
        "box": bilax.Box(0.0, 1.0),
        "simplex": Rows(),
    }
    return bilax.Problem(one.upper, one.lower, y_set=sets[one.shape])


def hypergradient(order: dict[str, Any]) -> Any:
    """The derivative of the validation loss in x, and the follower's steps."""
    problem, (dynamics, _, linear) = problem_of(order["work"]), order["variant"].partition(" + ")
    rule = bilax.Implicit(1.0, 1000, dense=0 if linear == "cg" else 1000)
    method = bilax.Method(order["most"], DYNAMICS[dynamics], derivative=rule, follower_tolerance=1.0)

    def run(tolerances, x, y0, *data):
        here = eqx.tree_at(lambda m: (m.follower_tolerance, m.derivative.tolerance), method, tolerances)
        phi = bilax.approximate(problem, here)
        slope, info = jax.grad(phi, has_aux=True)(x, y0, *data)
        return slope, info.steps

    return run


def chosen(order: dict[str, Any]) -> dict[str, str]:
    """What `auto` would solve the follower by."""
    given = work.load(order["folder"])
    algorithm, _ = bilax.auto().prepare(problem_of(order["work"]), given.x, given.y0, given.data, True, True)
    dynamics = algorithm.method.dynamics
    names = [name for name, one in DYNAMICS.items() if type(one) is type(dynamics)]
    return {"variant": names[0] if names else type(dynamics).__name__}


def reference(order: dict[str, Any]) -> dict[str, float]:
    """The hypergradient from a follower solved to rounding, how far central differences are off, and the residual.

    The solution that L-BFGS finds is improved by Newton steps along the face, written here without the library.
    """
    one, given = work.WORKS[order["work"]], work.load(order["folder"])
    problem, data = problem_of(order["work"]), given.data
    method = bilax.Method(5000, bilax.LBFGS(), derivative=bilax.Implicit(1e-8, 2000), follower_tolerance=1e-9)
    start = jax.jit(lambda x, y0: bilax.approximate(problem, method)(x, y0, *data)[1].y)(given.x, given.y0)
    y0, unravel = ravel_pytree(start)

    def slope(x, y):
        smooth = jax.grad(lambda v: one.lower(x, unravel(v), *data))(y)
        return smooth + (work.RATIO * jnp.exp(x) * y if one.shape == "elastic net" else 0)

    def prox(x, v, alpha):
        return ravel_pytree(_prox(one.shape, unravel(v), alpha * jnp.exp(x)))[0]

    def face(x, y, alpha):
        return jax.vjp(lambda v: prox(x, v, alpha), y - alpha * slope(x, y))[1]

    def along(x, y, right):
        def operator(u):
            return free(jax.jvp(lambda v: slope(x, v), (y,), (free(u),))[1])

        def free(u):
            return face(x, y, alpha)(u)[0]

        return jax.scipy.sparse.linalg.cg(operator, free(right), tol=1e-14, maxiter=4000)[0]

    def polished(x):
        def step(_, y):
            # One proximal step puts y on its face, where the term is linear.
            near = prox(x, y - alpha * slope(x, y), alpha)
            gone = prox(x, near - alpha * slope(x, near), alpha) - near
            return near + along(x, near, gone / alpha)

        return jax.lax.fori_loop(0, 4, step, y0)

    def upper(x, y):
        return one.upper(x, unravel(y), *data)

    def both(x):
        y = polished(x)
        direct, v = jax.grad(upper, (0, 1))(x, y)
        w = along(x, y, v)
        kept = jax.vjp(lambda x: prox(x, y - alpha * slope(x, y), alpha), x)[1](w / alpha)[0]
        off = jnp.max(jnp.abs(y - prox(x, y - alpha * slope(x, y), alpha))) / jnp.max(jnp.abs(y))
        return direct + kept, upper(x, y), off

    vector = jax.random.normal(jax.random.key(0), y0.shape, y0.dtype)
    for _ in range(10):
        vector = jax.jvp(lambda v: slope(given.x, v), (y0,), (vector / jnp.linalg.norm(vector),))[1]
    alpha = 0.5 / jnp.linalg.norm(vector)
    run, h = jax.jit(both), 1e-5
    (exact, _, off), (_, more, _), (_, less, _) = (run(given.x + d) for d in (0.0, h, -h))
    differences = (more - less) / (2 * h)
    return {"slope": float(exact), "differences": float(abs(differences / exact - 1)), "residual": float(off)}


def _prox(shape: str, v: Any, by: Any) -> Any:
    if shape == "plain":
        return v
    if shape in ("lasso", "elastic net"):
        return jnp.where(jnp.abs(v) > by, v - by * jnp.sign(v), 0)
    if shape == "non-negative":
        return jnp.where(v > 0, v, 0)
    if shape == "box":
        return jnp.where(v > 1, 1.0, jnp.where(v > 0, v, 0))
    ordered = -jnp.sort(-v, axis=1)
    sums = jnp.cumsum(ordered, axis=1) - 1
    count = jnp.sum(ordered * jnp.arange(1, v.shape[1] + 1) > sums, axis=1, keepdims=True)
    level = jnp.take_along_axis(sums, count - 1, axis=1) / count
    return jnp.where(v > level, v - level, 0)


if __name__ == "__main__":
    work.serve(hypergradient, versions=lambda _: {"jax": jax.__version__}, chosen=chosen, reference=reference)
