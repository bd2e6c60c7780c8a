"""A network of dense layers, for inputs that are not pictures."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Dense(eqx.Module):
    """Dense layers with ReLU after each: inputs (n, ...) are flattened, features are the last layer's."""

    layers: tuple[tuple[Float[Array, "inputs outputs"], Float[Array, " outputs"]], ...]

    def __init__(self, inputs: int, widths: tuple[int, ...], key: Array, size: float = 1.0):
        """`size` is that of the inputs: the first layer is drawn smaller by as much, so that features are about 1."""
        keys = jax.random.split(key, len(widths))
        layers = []
        for i, (before, after) in enumerate(itertools.pairwise((inputs, *widths))):
            scale = (2 / before) ** 0.5 / (size if i == 0 else 1)
            weight = scale * jax.random.normal(keys[i], (before, after), jnp.float32)
            layers.append((weight, jnp.zeros(after, jnp.float32)))
        self.layers = tuple(layers)

    def __call__(self, x: Array) -> Float[Array, "n features"]:
        x = x.reshape(len(x), -1)
        for weight, bias in self.layers:
            x = jax.nn.relu(x @ weight + bias)
        return x
