"""The objectives as formulas of JAX and NumPy alone, so that a program in another environment can be given the same."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Terms(NamedTuple):
    """Example i is ½(a_i·y)² + ½(b_i·x)² + (u_i·x)(w_i·y) + c_i·y + d_i·x."""

    a: Any
    b: Any
    u: Any
    w: Any
    c: Any
    d: Any


class Matrices(NamedTuple):
    """Example i is ½yᵀA_i y + ½xᵀB_i x + xᵀC_i y + c_i·y + d_i·x, with A = a aᵀ, B = b bᵀ and C = u wᵀ.

    This is how benchmark_bilevel stores the same examples, at 100 times the memory and the work.
    """

    a: Any
    b: Any
    c: Any
    linear_y: Any
    linear_x: Any


def matrices(terms: Terms) -> Matrices:
    """The same examples by their matrices."""

    def outer(left, right):
        return left[:, :, None] * right[:, None, :]

    return Matrices(outer(terms.a, terms.a), outer(terms.b, terms.b), outer(terms.u, terms.w), terms.c, terms.d)


def quadratic_mean(x: Any, y: Any, terms: Terms | Matrices) -> Any:
    """The mean over the examples."""
    if isinstance(terms, Matrices):
        a, b, c, linear_y, linear_x = terms
        return jnp.mean(0.5 * (a @ y) @ y + 0.5 * (b @ x) @ x + (c @ y) @ x + linear_y @ y + linear_x @ x)
    a, b, u, w, c, d = terms
    return jnp.mean(0.5 * (a @ y) ** 2 + 0.5 * (b @ x) ** 2 + (u @ x) * (w @ y) + c @ y + d @ x)


class Signed(NamedTuple):
    """Inputs and labels ±1."""

    inputs: Any
    labels: Any


def logistic_loss(y: Any, part: Signed) -> Any:
    """The mean of log(1 + exp(−label · input·y))."""
    return jnp.mean(jax.nn.softplus(-part.labels * (part.inputs @ y)))


def penalty(x: Any, y: Any) -> Any:
    """½ Σ exp(x_j) y_j²."""
    return 0.5 * jnp.sum(jnp.exp(x) * y**2)


class Labelled(NamedTuple):
    """Inputs, labels as rows of zeros and a one, and the number of the row."""

    inputs: Any
    targets: Any
    row: Any


def cross_entropies(y: Any, part: Labelled) -> Any:
    """−log softmax at the target, for each example."""
    scores = part.inputs @ y
    return jax.nn.logsumexp(scores, axis=1) - jnp.sum(part.targets * scores, axis=1)


def weighted(weights: Any, y: Any, part: Labelled) -> Any:
    """The mean of σ(weight) times the loss, and 0.2 ‖y‖²."""
    return jnp.mean(jax.nn.sigmoid(weights) * cross_entropies(y, part)) + 0.2 * jnp.sum(y**2)
