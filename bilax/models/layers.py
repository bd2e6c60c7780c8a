"""Convolution, normalisation and pooling of pictures (n, height, width, channels).

Normalisation takes its statistics from the pictures it is given, so a network is a pure function of its weights and
of one task's pictures.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Pictures = Float[Array, "n _ _ _"]


class Convolution(eqx.Module):
    """A square convolution without bias that keeps height and width (zeros outside the picture)."""

    kernel: Float[Array, "side side channels filters"]

    def __init__(self, channels: int, filters: int, key: Array, side: int = 3):
        scale = (2 / (side * side * channels)) ** 0.5
        self.kernel = scale * jax.random.normal(key, (side, side, channels, filters), jnp.float32)

    def __call__(self, x: Pictures) -> Pictures:
        # With one kernel per task (MAML's), XLA's convolution on CPU took 6 to 9 times as long as patches × matrix.
        return jax.lax.platform_dependent(x, self.kernel, cpu=convolve_patches, default=convolve)


def convolve(x: Pictures, kernel: Array) -> Pictures:
    """The convolution as XLA has it."""
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def convolve_patches(x: Pictures, kernel: Array) -> Pictures:
    """The same as a product of a matrix of patches with the kernel as a matrix, for kernels of odd side."""
    side, (height, width) = kernel.shape[0], x.shape[1:3]
    edge = side // 2
    padded = jnp.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    shifted = [padded[:, i : i + height, j : j + width] for i in range(side) for j in range(side)]
    return jnp.concatenate(shifted, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])


class Normalization(eqx.Module):
    """Batch normalisation with the statistics of the pictures at hand, then a learned scale and shift."""

    scale: Float[Array, " channels"]
    shift: Float[Array, " channels"]

    def __init__(self, channels: int):
        self.scale, self.shift = jnp.ones(channels, jnp.float32), jnp.zeros(channels, jnp.float32)

    def __call__(self, x: Pictures) -> Pictures:
        mean = jnp.mean(x, (0, 1, 2))
        variance = jnp.mean((x - mean) ** 2, (0, 1, 2))
        return (x - mean) * (self.scale * jax.lax.rsqrt(variance + 1e-5)) + self.shift


def max_pool(x: Pictures) -> Pictures:
    """The largest of each 2 × 2 block; an odd last row or column is left out, and a single one stays as it is."""
    n, height, width, channels = x.shape
    rows, columns = min(2, height), min(2, width)
    x = x[:, : height // rows * rows, : width // columns * columns]
    blocks = x.reshape(n, height // rows, rows, width // columns, columns, channels)
    # The derivative of max looks for where the input equals the output. Once compiled, the two may be computed apart
    # and differ in the last bit, and then the gradient is lost. Choosing by index loses nothing.
    blocks = blocks.transpose(0, 1, 3, 5, 2, 4).reshape(n, height // rows, width // columns, channels, rows * columns)
    chosen = jax.nn.one_hot(jnp.argmax(blocks, axis=-1), rows * columns, dtype=x.dtype)
    return jnp.sum(blocks * chosen, axis=-1)
