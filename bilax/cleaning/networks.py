"""Models that tell the class of an input: modules from (n, ...) inputs to (n, classes) logits."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bilax.models.dense import Dense
from bilax.models.layers import Convolution, max_pool

MakeModel = Callable[[Array, tuple[int, ...], int], Any]
"""(random key, shape of one input, classes) -> a module that turns inputs (n, *shape) into logits (n, classes)"""


class Linear(eqx.Module):
    """Logistic regression: inputs are flattened; starts at zero."""

    weight: Float[Array, "*folds inputs classes"]
    bias: Float[Array, "*folds classes"]

    def __init__(self, inputs: int, classes: int):
        self.weight, self.bias = jnp.zeros((inputs, classes), jnp.float32), jnp.zeros(classes, jnp.float32)

    def __call__(self, x: Array) -> Float[Array, "n classes"]:
        return x.reshape(len(x), -1) @ self.weight + self.bias


class Network(eqx.Module):
    """Features, then logistic regression on them."""

    features: Any
    head: Linear

    def __call__(self, x: Array) -> Float[Array, "n classes"]:
        return self.head(self.features(x))


class Convolutions(eqx.Module):
    """Two convolutions of 3 × 3 with ReLU and pooling, for pictures (n, height, width) or with channels last."""

    layers: tuple[Convolution, Convolution]

    def __init__(self, channels: int, filters: int, key: Array):
        first, second = jax.random.split(key)
        self.layers = Convolution(channels, filters, first), Convolution(filters, 2 * filters, second)

    def __call__(self, x: Array) -> Float[Array, "n features"]:
        x = x if x.ndim == 4 else x[..., None]
        for layer in self.layers:
            x = max_pool(jax.nn.relu(layer(x)))
        return x.reshape(len(x), -1)


def linear(key: Array, shape: tuple[int, ...], classes: int) -> Linear:
    """Logistic regression."""
    return Linear(math.prod(shape), classes)


def mlp(key: Array, shape: tuple[int, ...], classes: int) -> Network:
    """One hidden layer of 128."""
    return Network(Dense(math.prod(shape), (128,), key), Linear(128, classes))


def convnet(key: Array, shape: tuple[int, ...], classes: int) -> Network:
    """A small convolutional network for pictures."""
    if len(shape) not in (2, 3):
        raise ValueError(
            f'model="convnet" is for pictures (height, width[, channels]), but an input has shape {shape}.'
        )
    features = Convolutions(shape[2] if len(shape) == 3 else 1, 8, key)
    found = jax.eval_shape(features, jnp.zeros((1, *shape), jnp.float32))
    return Network(features, Linear(found.shape[1], classes))


MODELS: dict[str, MakeModel] = {"linear": linear, "mlp": mlp, "convnet": convnet}
