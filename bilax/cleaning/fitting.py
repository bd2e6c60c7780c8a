"""Models for all folds at once: solved where the rows are few and the model linear, else trained on mini-batches."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from bilax.cleaning.mixture import (
    SOLVED,
    Leader,
    Rows,
    flattened,
    log_evidence,
    lower,
    penalty,
    seen,
    surprise,
    telling,
    upper,
)
from bilax.cleaning.networks import Linear
from bilax.gradient.phi import approximate
from bilax.problem.problem import Problem
from bilax.problem.quick_jit import quick_jit

SOLVABLE = 4_000_000
"""inputs of all rows together up to which a linear model is solved by L-BFGS"""
CHUNK = 8192
"""rows whose logits are computed at a time"""


def fit(x: Leader, models: PyTree, rows: Rows, key: Array, epochs: int = 10, batch: int = 512) -> PyTree:
    """The models of all folds at the leader's x, beginning at `models`."""
    if isinstance(models, Linear) and rows.inputs.size <= SOLVABLE:
        return solved(x, models, rows)[1]
    counted, trusted = np.asarray(rows.counted).ravel() > 0, np.asarray(rows.trusted).ravel()
    # Trusted rows first, then noisy ones, then empty places: how many there are of each is no matter of the program.
    order = np.argsort(np.where(counted, np.where(trusted, 0, 1), 2), kind="stable")
    counts = jnp.asarray([np.sum(counted & trusted), np.sum(counted & ~trusted)])
    steps = jnp.asarray(int(np.clip(epochs * counted.sum() // batch, 300, 20_000)))
    arrays, rest = eqx.partition(models, eqx.is_inexact_array)
    rate = 5e-3 if isinstance(models, Linear) else 2e-3
    return eqx.combine(_trained(x, arrays, rest, rows, jnp.asarray(order), counts, key, steps, batch, rate), rest)


@quick_jit
def solved(x: Leader, models: PyTree, rows: Rows) -> tuple[Float[Array, ""], PyTree]:
    """F at the models that L-BFGS ends at from `models`, and these."""
    value, info = approximate(Problem(upper, lower), SOLVED)(x, models, rows)
    return value, info.y


@eqx.filter_jit
def _trained(
    x: Leader,
    arrays: PyTree,
    rest: PyTree,
    rows: Rows,
    order: Int[Array, " n"],
    counts: Int[Array, "2"],
    key: Array,
    steps: Int[Array, ""],
    batch: int,
    rate: float,
) -> PyTree:
    """Adam on batches of which half is drawn of the trusted rows, so that few of them are not lost among many."""
    optimizer = optax.adam(lambda k: rate * 0.5 * (1 + jnp.cos(jnp.pi * k / steps)))
    flat = flattened(rows)
    folds, length = rows.labels.shape
    # Half of each kind; a kind that is missing leaves its half to the other.
    half = jnp.where(counts[0] == 0, 0, jnp.where(counts[1] == 0, batch, batch // 2))
    noisy = jnp.arange(batch) >= half
    sizes = jnp.stack([half, batch - half])
    each = counts / jnp.maximum(sizes, 1) * jnp.stack([jnp.ones(()), jnp.exp(x.mix) * telling(x.flips)])
    scale = jnp.where(noisy, each[1], each[0])

    def loss(arrays, chosen):
        few = flat.each(lambda leaf: leaf[chosen])
        evidence = log_evidence(x.flips, few.labels, few.trusted)
        seen_by = scale * seen(few, chosen // length, folds)

        def one(arrays, scale):
            model = eqx.combine(arrays, rest)
            return jnp.sum(scale * surprise(model(few.inputs), evidence)) + penalty(x, model)

        return jnp.sum(jax.vmap(one)(arrays, seen_by)) / counts.sum()

    def step(k, carry):
        arrays, memory = carry
        drawn = jax.random.randint(jax.random.fold_in(key, k), (batch,), 0, jnp.where(noisy, counts[1], counts[0]))
        chosen = order[drawn + jnp.where(noisy, counts[0], 0)]
        updates, memory = optimizer.update(jax.grad(loss)(arrays, chosen), memory)
        return optax.apply_updates(arrays, updates), memory

    return jax.lax.fori_loop(0, steps, step, (arrays, optimizer.init(arrays)))[0]


def unseen_logits(models: PyTree, rows: Rows) -> Float[np.ndarray, "folds b c"]:
    """The logits of each row by the model that has not seen it."""
    chunk = max(CHUNK // len(rows.labels), 1)
    parts = [_logits(models, rows.inputs[:, i : i + chunk]) for i in range(0, rows.labels.shape[1], chunk)]
    return np.concatenate([np.asarray(part) for part in parts], axis=1)


@eqx.filter_jit
def _logits(models: PyTree, inputs: Array) -> Array:
    arrays, rest = eqx.partition(models, eqx.is_inexact_array)
    # One after the other: convolutions with a kernel for each fold are slow side by side.
    return jax.lax.map(lambda own: eqx.combine(own[0], rest)(own[1]), (arrays, inputs))


def mean_probabilities(models: PyTree, inputs: Float[np.ndarray, "n ..."]) -> Float[np.ndarray, "n c"]:
    """The mean over the folds' models of their probabilities."""
    parts = [_probabilities(models, jnp.asarray(inputs[i : i + CHUNK])) for i in range(0, len(inputs), CHUNK)]
    return np.concatenate([np.asarray(part) for part in parts])


@eqx.filter_jit
def _probabilities(models: PyTree, inputs: Array) -> Array:
    return eqx.filter_vmap(lambda model: jax.nn.softmax(model(inputs)))(models).mean(axis=0)


def make_models(make: Any, key: Array, shape: tuple[int, ...], classes: int, folds: int) -> PyTree:
    """One model for each fold, along a leading axis of their arrays."""
    made = [make(k, shape, classes) for k in jax.random.split(key, folds)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves) if eqx.is_inexact_array(leaves[0]) else leaves[0], *made)
