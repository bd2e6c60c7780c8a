"""The bilevel problem behind `bilax.clean_labels`.

An example (u, v) has a true class c, which nobody sees, and the label v that somebody wrote, which is c with
probability T[c, c] and v with probability T[c, v]. A model gives p(c | u). Rows are dealt into folds; the follower is
one model for each fold k, trained on the rows of the other folds, trusted and noisy ones together,

    f(x, y) = Σ_k Σ_{i not in k} w_i (−log Σ_c p_k(c | u_i) T[c, v_i]) + ½ e^ridge ‖y_k‖²

with T = 1 and w = 1 for trusted rows, and w = e^mix I(T) for noisy ones, where I(T) is the share of the true class
that a noisy label tells (mutual information over entropy). The leader has few variables, x = (mix, ridge, logits of
T), so that a handful of trusted rows can tell them, and sees each row through the model that has not seen it,

    F(x, y) = mean over trusted rows of −log p_k(v_i | u_i) + mean over noisy rows of −log Σ_c p_k(c | u_i) T[c, v_i]

with a weak prior for each variable. Without trusted rows the first mean is left out.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from bilax.follower.lbfgs import LBFGS
from bilax.gradient.implicit import Implicit
from bilax.gradient.method import Method
from bilax.methods.solved_follower import SolvedFollower
from bilax.problem.problem import Problem
from bilax.run.solve import solve

NEVER = -1e9
"""the logarithm of a probability of nothing, as far as single precision goes"""
SPREAD = 1.5
"""standard deviation of the leader's prior on the logarithms `mix` and `ridge`"""


class Rows(NamedTuple):
    """Examples dealt into folds of equal length; the last places of a fold may be empty."""

    inputs: Float[Array, "..."]
    labels: Int[Array, "*folds b"]
    trusted: Bool[Array, "*folds b"]
    counted: Float[Array, "*folds b"]
    """0 where a place is empty"""
    held: Bool[Array, ""]
    """whether trusted rows, too, are kept from the model of their fold: they must be where they judge it"""

    def each(self, change: Callable[[Array], Array]) -> "Rows":
        """With all that there is one of for each row changed."""
        return Rows(change(self.inputs), change(self.labels), change(self.trusted), change(self.counted), self.held)


class Leader(NamedTuple):
    """What the leader chooses."""

    mix: Float[Array, ""]
    """logarithm of what a noisy row counts beside a trusted one, beyond what its label tells"""
    ridge: Float[Array, ""]
    """logarithm of the penalty"""
    flips: Float[Array, "c c"]
    """logits of T[true class, label], along the last axis"""


PRIOR = (float(np.log(0.5)), float(np.log(0.5)))
"""where the leader begins: mix and ridge"""


def first_guess(transition: Float[np.ndarray, "c c"]) -> Leader:
    """The leader's start, with these probabilities of labels."""
    logits = np.log(np.maximum(transition, 1e-4))
    # About zero, for the leader's first step is a tenth as long as x: with log T itself it went much too far.
    logits = jnp.asarray(logits - logits.mean(axis=1, keepdims=True), jnp.float32)
    mix, ridge = (jnp.asarray(value, jnp.float32) for value in PRIOR)
    return Leader(mix, ridge, logits)


def telling(flips: Float[Array, "c c"]) -> Float[Array, ""]:
    """The share of the true class that a label tells: mutual information over entropy, classes being equally likely."""
    log_t = jax.nn.log_softmax(flips)
    marginal = jax.nn.logsumexp(log_t, axis=0) - jnp.log(len(flips))
    return jnp.mean(jnp.sum(jnp.exp(log_t) * (log_t - marginal), axis=1)) / jnp.log(len(flips))


def log_evidence(
    flips: Float[Array, "c c"], labels: Int[Array, "*n"], trusted: Bool[Array, "*n"]
) -> Float[Array, "*n c"]:
    """log P(label | true class) of each row."""
    sure = jnp.where(jax.nn.one_hot(labels, len(flips), dtype=bool), 0.0, NEVER)
    return jnp.where(trusted[..., None], sure, jax.nn.log_softmax(flips).T[labels])


def surprise(logits: Float[Array, "*n c"], evidence: Float[Array, "*n c"]) -> Float[Array, "*n"]:
    """−log Σ_c p(c | u) P(label | c) of each row."""
    return -jax.nn.logsumexp(jax.nn.log_softmax(logits) + evidence, axis=-1)


def lower(x: Leader, y: PyTree, rows: Rows) -> Float[Array, ""]:
    """f, divided by the number of rows."""
    folds = len(rows.labels)
    flat = flattened(rows)
    evidence = log_evidence(x.flips, flat.labels, flat.trusted)
    weights = flat.counted * jnp.where(flat.trusted, 1.0, jnp.exp(x.mix) * telling(x.flips))
    fold = jnp.repeat(jnp.arange(folds), rows.labels.shape[1])

    def one(model, weights):
        return jnp.sum(weights * surprise(model(flat.inputs), evidence)) + penalty(x, model)

    return jnp.sum(eqx.filter_vmap(one)(y, weights * seen(flat, fold, folds))) / flat.labels.size


def flattened(rows: Rows) -> Rows:
    """The folds one after the other."""
    return rows.each(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]))


def seen(flat: Rows, fold: Int[Array, " n"], folds: int) -> Bool[Array, "folds n"]:
    """Which rows the model of each fold learns from."""
    return (fold != jnp.arange(folds)[:, None]) | (flat.trusted & ~flat.held)


def penalty(x: Leader, model: PyTree) -> Float[Array, ""]:
    """½ e^ridge times the squares of all matrices and kernels; biases are free."""
    arrays = [leaf for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)) if leaf.ndim > 1]
    return 0.5 * jnp.exp(x.ridge) * sum(jnp.sum(leaf**2) for leaf in arrays)


def upper(x: Leader, y: PyTree, rows: Rows) -> Float[Array, ""]:
    """F."""
    logits = eqx.filter_vmap(lambda model, inputs: model(inputs))(y, rows.inputs)
    each = surprise(logits, log_evidence(x.flips, rows.labels, rows.trusted))
    sure = rows.counted * rows.trusted
    noisy = rows.counted - sure
    prior = ((x.mix - PRIOR[0]) ** 2 + (x.ridge - PRIOR[1]) ** 2) / (2 * SPREAD**2)
    judges = jnp.where(sure.sum() > 0, sure.sum(), noisy.sum())
    rare = -jnp.mean(jax.nn.log_softmax(x.flips)) * len(x.flips) / jnp.maximum(noisy.sum(), 1)
    return _mean(each, sure) + _mean(each, noisy) + prior / judges + rare


def _mean(values: Array, weights: Array) -> Array:
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1)


SOLVED = Method(400, LBFGS(), derivative=Implicit(0.1, 400), start="warm", follower_tolerance=1e-3)
"""how a convex or nearly convex follower is solved and differentiated; pictures under a weak penalty have a condition
number of 10⁵, for which 40 steps of conjugate gradients were too few, and most of the time goes into these: an error of
a tenth leads as far. The likelihood of noisy rows is not convex: on scikit-learn's digits the follower ends where some
curvatures are negative, and there the linear system has no answer"""
TOLERANCE = 0.03
"""of the leader: what is left to gain is then a thousandth of what was gained, and less than chance in so few rows"""


def tune(x0: Leader, y0: PyTree, rows: Rows, steps: int = 15) -> tuple[Leader, PyTree]:
    """The bilevel problem solved: L-BFGS for the follower, its implicit derivative, and L-BFGS for the leader."""
    method = SolvedFollower(SOLVED, None, tolerance=TOLERANCE)
    found = solve(Problem(upper, lower), method, x0, y0, data=(rows,), steps=steps)
    if found.ended.failed:
        warnings.warn(
            f"penalty and noise were tuned for {found.steps} of {steps} steps, and may not be tuned to the end: there "
            f"the labels hardly determine the model ({found.ended.name}). What was best till then is used.",
            stacklevel=2,
        )
    return found.x, found.y
