"""A network of dense layers, for inputs that are not pictures."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Dense(eqx.Module):
    """Dense layers with ReLU after each: inputs (n, ...) are flattened, features are the last layer's."""

    layers: tuple[tuple[Float[Array, "inputs outputs"], Float[Array, " outputs"]], ...]

    def __init__(self, inputs: int, widths: tuple[int, ...], key: Array):
        sizes = (inputs, *widths)
        self.layers = tuple(
            (jnp.sqrt(2 / a).astype(jnp.float32) * jax.random.normal(k, (a, b), jnp.float32), jnp.zeros(b, jnp.float32))
            for a, b, k in zip(sizes, widths, jax.random.split(key, len(widths)), strict=False)
        )

    def __call__(self, x: Array) -> Float[Array, "n features"]:
        x = x.reshape(len(x), -1)
        for weight, bias in self.layers:
            x = jax.nn.relu(x @ weight + bias)
        return x
