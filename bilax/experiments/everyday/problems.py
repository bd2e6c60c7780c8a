"""Ordinary bilevel problems, written as users write them: NumPy or JAX arrays, numbers, dictionaries, data.

Each comes with a judge that knows the follower's exact answer without bilax or JAX.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.nn import sigmoid, softplus

import bilax
from bilax.experiments.everyday import data, judges


class Everyday(NamedTuple):
    """A problem with its start, as it goes to `solve`, and its judge."""

    problem: bilax.Problem
    x0: Any
    y0: Any
    judge: judges.Judge
    data: tuple[Any, ...] = ()


def penalties() -> Everyday:
    """A log-penalty for each of 30 features of a logistic regression; closes over NumPy arrays."""
    train, target, held_out, held_out_target = data.tumours().standardised()

    def upper(x, y):
        return softplus(-held_out_target * (held_out @ y["w"] + y["b"])).mean()

    def lower(x, y):
        return softplus(-target * (train @ y["w"] + y["b"])).mean() + jnp.sum(jnp.exp(x) * y["w"] ** 2)

    problem = bilax.Problem(upper, lower, bilax.Box(-12.0, 8.0))
    return Everyday(problem, np.full(30, -4.0), {"w": np.zeros(30), "b": 0.0}, judges.penalties())


def unscaled() -> Everyday:
    """Ten log-penalties of a logistic regression on features as they are measured, from 1e-2 to 1e3."""
    train, target, held_out, held_out_target = (jnp.asarray(part, jnp.float32) for part in data.tumours())
    train, held_out = train[:, :10], held_out[:, :10]

    def upper(x, y):
        return jnp.mean(softplus(-held_out_target * (held_out @ y["w"] + y["b"])))

    def lower(x, y):
        return jnp.mean(softplus(-target * (train @ y["w"] + y["b"]))) + jnp.sum(jnp.exp(x) * y["w"] ** 2)

    problem = bilax.Problem(upper, lower, bilax.Box(-20.0, 5.0))
    return Everyday(problem, jnp.full(10, -3.0), {"w": jnp.zeros(10), "b": jnp.zeros(())}, judges.unscaled())


def _tolls(charge: Callable[[Any], Any], judge: judges.Judge) -> Everyday:
    costs = jnp.asarray([1.0, 1.5, 2.0, 4.0], jnp.float32)

    def upper(t, y):
        return -jnp.sum(t * y[:3])

    def lower(t, y):
        return jnp.sum((costs + jnp.append(t, 0.0)) * y) + charge(y)

    problem = bilax.Problem(upper, lower, bilax.Box(0.0, 5.0), bilax.Simplex())
    return Everyday(problem, np.ones(3), np.full(4, 0.25), judge)


def tolls_entropy() -> Everyday:
    """Tolls on three of four roads; travellers minimise cost and ½ Σ y log y, which has no slope at zero."""
    return _tolls(lambda y: 0.5 * jnp.sum(y * jnp.log(y)), judges.tolls_entropy())


def tolls_squares() -> Everyday:
    """The same with ½‖y‖²: roads may be empty."""
    return _tolls(lambda y: 0.5 * jnp.sum(y**2), judges.tolls_squares())


def ridge_each() -> Everyday:
    """A log-penalty for each of ten features of a ridge regression; the arrays come as data."""

    def upper(x, y, train, target, held_out, held_out_target):
        return jnp.mean((held_out @ y["w"] + y["b"] - held_out_target) ** 2)

    def lower(x, y, train, target, held_out, held_out_target):
        return jnp.mean((train @ y["w"] + y["b"] - target) ** 2) + jnp.sum(jnp.exp(x) * y["w"] ** 2)

    problem = bilax.Problem(upper, lower, bilax.Box(-15.0, 5.0))
    y0 = {"w": np.zeros(10), "b": 150.0}
    return Everyday(problem, np.zeros(10), y0, judges.ridge_each(), tuple(data.diabetes()))


def ridge_one() -> Everyday:
    """One log-penalty, a Python number without bounds, of a ridge regression on 65 features."""
    train, target, held_out, held_out_target = (jnp.asarray(part, jnp.float32) for part in data.diabetes_products())

    def upper(x, y):
        return jnp.mean((held_out @ y - held_out_target) ** 2)

    def lower(x, y):
        return 0.5 * jnp.sum((train @ y - target) ** 2) + 0.5 * jnp.exp(x) * jnp.sum(y**2)

    return Everyday(bilax.Problem(upper, lower), 0.0, np.zeros(65), judges.ridge_one())


def duopoly() -> Everyday:
    """A leader's quantity; three firms answer, the dearest of which stays out."""
    costs = np.array([10.0, 20.0, 45.0])

    def upper(x, y):
        return -(100 - x - jnp.sum(y) - 15) * x

    def lower(x, y):
        return jnp.sum((costs - 100 + x) * y) + 0.5 * jnp.sum(y) ** 2 + 0.5 * jnp.sum(y**2)

    problem = bilax.Problem(upper, lower, bilax.Box(0.0, 100.0), bilax.NonNegative())
    return Everyday(problem, 10.0, np.ones(3), judges.duopoly())


def portfolio() -> Everyday:
    """Views on returns, at first the past means, and an aversion to risk, for a portfolio that does well later."""
    mean, covariance, later = data.market()

    def upper(x, y):
        earned = later @ y
        return -jnp.mean(earned) + 0.1 * jnp.var(earned)

    def lower(x, y):
        return -jnp.dot(x["views"], y) + 0.5 * jnp.exp(x["log_aversion"]) * (y @ covariance @ y)

    box = bilax.Box(
        {"views": np.full(8, -5.0), "log_aversion": -3.0},
        {"views": np.full(8, 5.0), "log_aversion": 3.0},
    )
    x0 = {"views": mean, "log_aversion": 0.0}
    return Everyday(bilax.Problem(upper, lower, box, bilax.Simplex()), x0, np.full(8, 1 / 8), judges.portfolio())


def kernel_ridge() -> Everyday:
    """Width and penalty of a kernel ridge regression, whose Hessian is nearly singular."""
    train, target, held_out, held_out_target = data.waves()

    def kernel(a, b, x):
        return jnp.exp(-0.5 * (a - b.T) ** 2 / jnp.exp(x["log_width"]) ** 2)

    def upper(x, y):
        return jnp.mean((kernel(held_out, train, x) @ y - held_out_target) ** 2)

    def lower(x, y):
        fitted = kernel(train, train, x) @ y
        return jnp.mean((fitted - target) ** 2) + jnp.exp(x["log_penalty"]) * jnp.dot(y, fitted)

    x0 = {"log_width": 0.0, "log_penalty": 0.0}
    return Everyday(bilax.Problem(upper, lower, bilax.Box(-8.0, 4.0)), x0, np.zeros(60), judges.kernel_ridge())


def example_weights() -> Everyday:
    """Weights of 120 training examples, a quarter of them wrong, without bounds."""
    train, target, held_out, held_out_target = (jnp.asarray(part, jnp.float32) for part in data.wrong_labels())

    def scores(y, inputs):
        return inputs @ y[:5] + y[5]

    def upper(x, y):
        return jnp.mean(softplus(-held_out_target * scores(y, held_out)))

    def lower(x, y):
        return jnp.mean(sigmoid(x) * softplus(-target * scores(y, train))) + 1e-3 * jnp.sum(y**2)

    return Everyday(bilax.Problem(upper, lower), jnp.zeros(120), jnp.zeros(6), judges.example_weights())


def stiff() -> Everyday:
    """Least squares of condition number 1e6, in NumPy arrays."""
    A, B, c, wanted = data.stiff()

    def upper(x, y):
        return 0.5 * jnp.sum((y - wanted) ** 2) + 0.01 * jnp.sum(x**2)

    def lower(x, y):
        return 0.5 * jnp.sum((A @ y - B @ x - c) ** 2)

    return Everyday(bilax.Problem(upper, lower), np.zeros(5), np.zeros(20), judges.stiff())


def softmax() -> Everyday:
    """A log-penalty for each of five classes of a softmax regression with 325 weights."""
    split = data.digits()
    train, held_out = jnp.asarray(split.train, jnp.float32), jnp.asarray(split.held_out, jnp.float32)

    def loss(y, inputs, labels):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(inputs @ y["W"] + y["b"], labels))

    def upper(x, y):
        return loss(y, held_out, split.held_out_target)

    def lower(x, y):
        return loss(y, train, split.target) + jnp.sum(jnp.exp(x) * y["W"] ** 2)

    y0 = {"W": jnp.zeros((64, 5)), "b": jnp.zeros(5)}
    return Everyday(bilax.Problem(upper, lower, bilax.Box(-12.0, 4.0)), jnp.full(5, -2.0), y0, judges.softmax())


def sensor_weights() -> Everyday:
    """Log-weights of 40 measurements, ten of them broken, in non-negative least squares."""
    mixing, measured, later_mixing, later = data.sensors()

    def upper(x, y):
        return jnp.mean((later_mixing @ y - later) ** 2)

    def lower(x, y):
        return 0.5 * jnp.sum(jnp.exp(x) * (mixing @ y - measured) ** 2)

    problem = bilax.Problem(upper, lower, bilax.Box(-6.0, 6.0), bilax.NonNegative())
    return Everyday(problem, np.zeros(40), np.ones(8), judges.sensor_weights())


def svm_dual() -> Everyday:
    """A kernel width for each of two features of a support vector machine, by its dual in a box."""
    train, sign, held_out, held_out_sign = (jnp.asarray(part, jnp.float32) for part in data.moons())

    def kernel(a, b, x):
        return jnp.exp(-jnp.sum(jnp.exp(x) * (a[:, None] - b) ** 2, axis=-1))

    def upper(x, y):
        return jnp.mean(softplus(-held_out_sign * (kernel(held_out, train, x) @ (sign * y))))

    def lower(x, y):
        signed = sign * y
        return 0.5 * signed @ kernel(train, train, x) @ signed + 5e-4 * jnp.sum(y**2) - jnp.sum(y)

    problem = bilax.Problem(upper, lower, bilax.Box(-6.0, 6.0), bilax.Box(0.0, 1.0))
    return Everyday(problem, np.zeros(2), np.full(60, 0.5), judges.svm_dual())


def elastic_net() -> Everyday:
    """Both penalties of an elastic net; coefficients are the difference of two non-negative vectors."""
    train, target, held_out, held_out_target = data.sparse()

    def upper(x, y):
        return jnp.mean((held_out @ (y["plus"] - y["minus"]) - held_out_target) ** 2)

    def lower(x, y):
        w = y["plus"] - y["minus"]
        penalty = jnp.exp(x["log_l1"]) * jnp.sum(y["plus"] + y["minus"]) + 0.5 * jnp.exp(x["log_l2"]) * jnp.sum(w**2)
        return 0.5 * jnp.mean((train @ w - target) ** 2) + penalty

    problem = bilax.Problem(upper, lower, bilax.Box(-8.0, 3.0), bilax.NonNegative())
    y0 = {"plus": np.zeros(30), "minus": np.zeros(30)}
    return Everyday(problem, {"log_l1": -1.0, "log_l2": -1.0}, y0, judges.elastic_net())


def pricing() -> Everyday:
    """Prices of two products; a rival answers with the prices of its own two. Profits are not concave."""
    appeal, rival_appeal = jnp.asarray([3.0, 4.0], jnp.float32), jnp.asarray([3.5, 2.5], jnp.float32)
    costs = jnp.asarray([1.0, 0.5], jnp.float32)

    def shares(x, y):
        utilities = jnp.concatenate([appeal - x, rival_appeal - y, jnp.zeros(1, x.dtype)])
        return jax.nn.softmax(utilities)

    def upper(x, y):
        return -jnp.sum((x - 1.0) * shares(x, y)[:2])

    def lower(x, y):
        return -jnp.sum((y - costs) * shares(x, y)[2:4])

    problem = bilax.Problem(upper, lower, bilax.Box(0.0, 20.0), bilax.Box(0.0, 20.0))
    return Everyday(problem, np.ones(2), np.ones(2), judges.pricing())


def wells() -> Everyday:
    """A follower with two wells; it starts in the one that is lower at x0, but not at the best x."""
    problem = bilax.Problem(
        upper=lambda x, y: (x + 0.4) ** 2 + (y - 0.8) ** 2,
        lower=lambda x, y: (y**2 - 1) ** 2 + x * y,
        x_set=bilax.Box(-1.0, 1.0),
        y_set=bilax.Box(-2.0, 2.0),
    )
    return Everyday(problem, 0.5, -1.0, judges.wells())


def tanh_network() -> Everyday:
    """Weight decay of a network of two hidden units, whose best weights are meant."""
    train, target, held_out, held_out_target = data.waves()

    def predict(y, inputs):
        return jnp.tanh(inputs * y["w"] + y["b"]) @ y["v"] + y["c"]

    def upper(x, y):
        return jnp.mean((predict(y, held_out) - held_out_target) ** 2)

    def lower(x, y):
        decay = sum(jnp.sum(y[name] ** 2) for name in ("w", "b", "v"))
        return jnp.mean((predict(y, train) - target) ** 2) + jnp.exp(x) * decay

    y0 = {"w": np.array([1.0, -1.0]), "b": np.array([0.5, 0.5]), "v": np.array([0.5, -0.5]), "c": 0.0}
    return Everyday(bilax.Problem(upper, lower, bilax.Box(-10.0, 2.0)), -2.0, y0, judges.tanh_network())


PROBLEMS: dict[str, Callable[[], Everyday]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        penalties,
        tolls_entropy,
        tolls_squares,
        ridge_each,
        ridge_one,
        duopoly,
        portfolio,
        kernel_ridge,
        example_weights,
        stiff,
        unscaled,
        softmax,
        sensor_weights,
        svm_dual,
        elastic_net,
        pricing,
        wells,
        tanh_network,
    )
}
"""each is made when it is called, for some read data sets"""
