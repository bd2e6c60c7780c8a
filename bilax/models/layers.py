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
    """A square convolution of odd side without bias that keeps height and width (zeros outside the picture)."""

    kernel: Float[Array, "side side channels filters"]
    shared: bool = eqx.field(static=True)
    """whether all tasks have the same kernel; MAML's have not. Only the speed on CPU depends on it."""

    def __init__(self, channels: int, filters: int, key: Array, side: int = 3, shared: bool = True):
        scale = (2 / (side * side * channels)) ** 0.5
        self.kernel = scale * jax.random.normal(key, (side, side, channels, filters), jnp.float32)
        self.shared = shared

    def __call__(self, x: Pictures) -> Pictures:
        # On CPU, XLA's convolution is the faster one forward and its derivative in the kernel is the slower one; with
        # one kernel per task it takes 6 to 9 times as long as patches × matrix.
        cpu = convolve_shared if self.shared else convolve_patches
        return jax.lax.platform_dependent(x, self.kernel, cpu=cpu, default=convolve)


def convolve(x: Pictures, kernel: Array) -> Pictures:
    """The convolution as XLA has it."""
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@jax.custom_vjp
def convolve_shared(x: Pictures, kernel: Array) -> Pictures:
    """The same; its derivative in the kernel goes over few pictures at a time, so that patches stay in cache."""
    return convolve(x, kernel)


def _convolve_forward(x: Pictures, kernel: Array) -> tuple[Pictures, tuple[Pictures, Array]]:
    return convolve(x, kernel), (x, kernel)


def _convolve_backward(kept: tuple[Pictures, Array], slope: Pictures) -> tuple[Pictures, Array]:
    x, kernel = kept
    count = _few(len(x), x[0].size * kernel.shape[0] ** 2 * x.dtype.itemsize)
    parts = [leaf.reshape(-1, count, *leaf.shape[1:]) for leaf in (x, slope)]

    def add(total, part):
        patches = _patches(part[0], kernel.shape[0])
        return total + patches.reshape(-1, patches.shape[-1]).T @ part[1].reshape(-1, kernel.shape[-1]), None

    total, _ = jax.lax.scan(add, jnp.zeros((kernel[..., 0].size, kernel.shape[-1]), x.dtype), tuple(parts))
    return convolve(slope, jnp.flip(kernel, (0, 1)).swapaxes(2, 3)), total.reshape(kernel.shape)


convolve_shared.defvjp(_convolve_forward, _convolve_backward)


def convolve_patches(x: Pictures, kernel: Array) -> Pictures:
    """The same as a product of a matrix of patches with the kernel as a matrix."""
    return _patches(x, kernel.shape[0]) @ kernel.reshape(-1, kernel.shape[-1])


def _patches(x: Pictures, side: int) -> Pictures:
    """Each position's side × side neighbourhood as its channels."""
    edge, (height, width) = side // 2, x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    shifted = [padded[:, i : i + height, j : j + width] for i in range(side) for j in range(side)]
    return jnp.concatenate(shifted, axis=-1)


def _few(count: int, size: int) -> int:
    """The largest divisor of `count` that keeps so many things of `size` bytes within 2 MB, or 1."""
    return max(d for d in range(1, count + 1) if count % d == 0 and (d == 1 or d * size <= 2 << 20))


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
    height, width = x.shape[1:3]
    # The derivative of max looks for where the input equals the output. Once compiled, the two may be computed apart
    # and differ in the last bit, and then the gradient is lost. Choosing loses nothing.
    if height > 1:
        x = _larger(x[:, 0 : height // 2 * 2 : 2], x[:, 1::2])
    if width > 1:
        x = _larger(x[:, :, 0 : width // 2 * 2 : 2], x[:, :, 1::2])
    return x


def _larger(a: Pictures, b: Pictures) -> Pictures:
    return jnp.where(a >= b, a, b)
