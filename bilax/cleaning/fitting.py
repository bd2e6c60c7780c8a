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

SOLVABLE = 4_000_000
"""inputs of all rows together up to which a linear model is solved by L-BFGS"""
CHUNK = 8192
"""rows whose logits are computed at a time"""


def fit(x: Leader, models: PyTree, rows: Rows, key: Array, epochs: int = 10, batch: int = 512) -> PyTree:
    """The models of all folds at the leader's x, beginning at `models`."""
    if isinstance(models, Linear) and rows.inputs.size <= SOLVABLE:
        return _solved(x, models, rows)
    trusted, noisy = (np.flatnonzero(kind) for kind in _kinds(rows))
    steps = int(np.clip(epochs * (len(trusted) + len(noisy)) // batch, 300, 20_000))
    arrays, rest = eqx.partition(models, eqx.is_inexact_array)
    rate = 5e-3 if isinstance(models, Linear) else 2e-3
    fitted = _trained(x, arrays, rest, rows, jnp.asarray(trusted), jnp.asarray(noisy), key, steps, batch, rate)
    return eqx.combine(fitted, rest)


def _kinds(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    counted, trusted = np.asarray(rows.counted).ravel() > 0, np.asarray(rows.trusted).ravel()
    return counted & trusted, counted & ~trusted


@eqx.filter_jit
def _solved(x: Leader, models: PyTree, rows: Rows) -> PyTree:
    return approximate(Problem(upper, lower), SOLVED)(x, models, rows)[1].y


@eqx.filter_jit
def _trained(
    x: Leader,
    arrays: PyTree,
    rest: PyTree,
    rows: Rows,
    trusted: Int[Array, " m"],
    noisy: Int[Array, " n"],
    key: Array,
    steps: int,
    batch: int,
    rate: float,
) -> PyTree:
    """Adam on batches of which half is drawn of the trusted rows, so that few of them are not lost among many."""
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    flat = flattened(rows)
    folds, length = rows.labels.shape
    weight = jnp.exp(x.mix) * telling(x.flips)
    # Half of each kind; a kind that is missing leaves its half to the other.
    sizes = (0, batch) if not len(trusted) else (batch, 0) if not len(noisy) else (batch // 2, batch - batch // 2)

    def loss(arrays, chosen, scale):
        few = flat.each(lambda leaf: leaf[chosen])
        evidence = log_evidence(x.flips, few.labels, few.trusted)
        scale = scale * seen(few, chosen // length, folds)

        def one(arrays, scale):
            model = eqx.combine(arrays, rest)
            return jnp.sum(scale * surprise(model(few.inputs), evidence)) + penalty(x, model)

        return jnp.sum(jax.vmap(one)(arrays, scale)) / (len(trusted) + len(noisy))

    each = len(trusted) / max(sizes[0], 1), weight * len(noisy) / max(sizes[1], 1)
    scale = jnp.concatenate([jnp.full(*pair) for pair in zip(sizes, each, strict=True)])

    def step(carry, key):
        arrays, memory = carry
        drawn = [draw for draw in zip(jax.random.split(key), (trusted, noisy), sizes, strict=True) if draw[2]]
        chosen = jnp.concatenate([jax.random.choice(k, kind, (size,)) for k, kind, size in drawn])
        updates, memory = optimizer.update(jax.grad(loss)(arrays, chosen, scale), memory)
        return (optax.apply_updates(arrays, updates), memory), None

    return jax.lax.scan(step, (arrays, optimizer.init(arrays)), jax.random.split(key, steps))[0][0]


def unseen_logits(models: PyTree, rows: Rows) -> Float[np.ndarray, "folds b c"]:
    """The logits of each row by the model that has not seen it."""
    found = []
    for k in range(len(rows.labels)):
        model = jax.tree.map(lambda leaf: leaf[k] if eqx.is_array(leaf) else leaf, models)  # noqa: B023
        parts = [_logits(model, rows.inputs[k, i : i + CHUNK]) for i in range(0, rows.labels.shape[1], CHUNK)]
        found.append(np.concatenate([np.asarray(part) for part in parts]))
    return np.stack(found)


_logits = eqx.filter_jit(lambda model, inputs: model(inputs))


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
