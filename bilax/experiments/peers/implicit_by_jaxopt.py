"""jaxopt's side of `bilax bench implicit`: run as a script in an environment of its own, orders by stdin."""

import functools

import jax
import jax.numpy as jnp
import jaxopt  # pyright: ignore[reportMissingImports]
import work  # pyright: ignore[reportMissingImports]
from jaxopt import linear_solve, objective, projection, prox  # pyright: ignore[reportMissingImports]


def prox_of(shape):
    """The proximal map, and what it is told of x."""
    if shape == "lasso":
        return prox.prox_lasso, jnp.exp
    if shape == "elastic net":
        return prox.prox_elastic_net, lambda x: (jnp.exp(x), work.RATIO)
    if shape == "non-negative":
        return prox.make_prox_from_projection(projection.projection_non_negative), lambda x: None
    if shape == "box":
        return prox.make_prox_from_projection(projection.projection_box), lambda x: (0.0, 1.0)
    rows = jax.vmap(projection.projection_simplex)
    return prox.make_prox_from_projection(lambda a, _: rows(a)), lambda x: None


def solution(order, tolerances, x, y0, data):
    """The follower's solution by one of jaxopt's solvers, differentiable in x, and how many steps it took."""
    one = work.WORKS[order["work"]]
    solver, _, linear = order["variant"].partition(" + ")
    solve = functools.partial(getattr(linear_solve, f"solve_{linear}"), tol=tolerances[1], maxiter=1000)
    options = {"tol": tolerances[0], "maxiter": order["most"], "implicit_diff": True, "implicit_diff_solve": solve}

    def lower(y, x, data):
        return one.lower(x, y, *data)

    if solver == "LBFGS":
        return jaxopt.LBFGS(lower, **options).run(y0, x, data)
    if solver == "LBFGSB":
        upper = jnp.ones_like(y0) if one.shape == "box" else jnp.full_like(y0, jnp.inf)
        return jaxopt.LBFGSB(lower, **options).run(y0, (jnp.zeros_like(y0), upper), x, data)
    if solver == "ProximalGradient":
        map_of, told = prox_of(one.shape)
        return jaxopt.ProximalGradient(lower, map_of, **options).run(y0, told(x), x, data)
    if one.shape == "simplex":
        block = prox.make_prox_from_projection(projection.projection_simplex)
        descent = jaxopt.BlockCoordinateDescent(objective.multiclass_linear_svm_dual, block, **options)
        return descent.run(y0, None, jnp.exp(x), data[:2])
    map_of, told = prox_of(one.shape)
    return jaxopt.BlockCoordinateDescent(objective.least_squares, map_of, **options).run(y0, told(x), data[:2])


def hypergradient(order):
    """The derivative of the validation loss in x, and the follower's steps."""
    upper = work.WORKS[order["work"]].upper

    def loss(x, tolerances, y0, data):
        y, state = solution(order, tolerances, x, y0, data)
        return upper(x, y, *data), state.iter_num

    return lambda tolerances, x, y0, *data: jax.grad(loss, has_aux=True)(x, tolerances, y0, data)


if __name__ == "__main__":
    work.serve(hypergradient, versions=lambda _: {"jax": jax.__version__})
