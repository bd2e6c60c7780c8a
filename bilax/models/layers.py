"""Convolution, normalisation and pooling of pictures (n, height, width, channels).

Normalisation takes its statistics from the pictures it is given, so a network is a pure function of its weights and
of one task's pictures.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from bilax.phi import most_within

Pictures = Float[Array, "n _ _ _"]

PATCH_BYTES = 4 << 20
"""of neighbourhoods that are multiplied at a time"""


class Convolution(eqx.Module):
    """A square convolution of odd side without bias that keeps height and width (zeros outside the picture)."""

    kernel: Float[Array, "side side channels filters"]

    def __init__(self, channels: int, filters: int, key: Array, side: int = 3):
        scale = (2 / (side * side * channels)) ** 0.5
        self.kernel = scale * jax.random.normal(key, (side, side, channels, filters), jnp.float32)

    def __call__(self, x: Pictures) -> Pictures:
        return jax.lax.platform_dependent(x, self.kernel, cpu=convolve_on_cpu, default=convolve)


def convolve(x: Pictures, kernel: Array) -> Pictures:
    """The convolution as XLA has it."""
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@jax.custom_vjp
def convolve_on_cpu(x: Pictures, kernel: Array) -> Pictures:
    """The same, with our own derivative in the kernel: on CPU, XLA's convolution is fast and this derivative slow."""
    return convolve(x, kernel)


def _convolve_forward(x: Pictures, kernel: Array) -> tuple[Pictures, tuple[Pictures, Array]]:
    # The rule's own forward pass is what a second derivative goes through.
    return convolve_on_cpu(x, kernel), (x, kernel)


def _convolve_backward(kept: tuple[Pictures, Array], slope: Pictures) -> tuple[Pictures, Array]:
    x, kernel = kept
    return convolve_on_cpu(slope, _turned(kernel)), _kernel_slope(x, slope, kernel.shape[0])


convolve_on_cpu.defvjp(_convolve_forward, _convolve_backward)


def _turned(kernel: Array) -> Array:
    """The kernel of the transposed convolution."""
    return jnp.flip(kernel, (0, 1)).swapaxes(2, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _kernel_slope(x: Pictures, slope: Pictures, side: int) -> Array:
    """The derivative of Σ slope · convolve(x, kernel) in the kernel, which is linear in x and in the slope."""
    channels, filters = x.shape[-1], slope.shape[-1]
    products = _by_patches if channels < 8 else _by_rows

    # Few pictures at a time, and one task after the other, so that what is multiplied stays in cache.
    @jax.custom_batching.sequential_vmap
    def one_task(x, slope):
        count = most_within(PATCH_BYTES, len(x), x[0].size * side**2 * x.dtype.itemsize)

        def add(total, part):
            return total + products(part[0], part[1].reshape(-1, filters).T, side), None

        parts = tuple(leaf.reshape(-1, count, *leaf.shape[1:]) for leaf in (x, slope))
        total, _ = jax.lax.scan(add, jnp.zeros((filters, side * side * channels), x.dtype), parts)
        return total.T.reshape(side, side, channels, filters)

    return one_task(x, slope)


def _kernel_slope_forward(x: Pictures, slope: Pictures, side: int) -> tuple[Array, tuple[Pictures, Pictures]]:
    return _kernel_slope(x, slope, side), (x, slope)


def _kernel_slope_backward(side: int, kept: tuple[Pictures, Pictures], bar: Array) -> tuple[Pictures, Pictures]:
    x, slope = kept
    return convolve_on_cpu(slope, _turned(bar)), convolve_on_cpu(x, bar)


_kernel_slope.defvjp(_kernel_slope_forward, _kernel_slope_backward)


def _by_patches(x: Pictures, slope: Float[Array, "filters positions"], side: int) -> Array:
    patches = _patches(x, side)
    return slope @ patches.reshape(-1, patches.shape[-1])


def _by_rows(x: Pictures, slope: Float[Array, "filters positions"], side: int) -> Array:
    """The same product in `side` parts. Neighbours in the row are copied; those above and below are the same, moved."""
    edge, (height, width) = side // 2, x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    rows = jnp.concatenate([padded[:, :, j : j + width] for j in range(side)], axis=-1)
    parts = (rows[:, i : i + height].reshape(-1, rows.shape[-1]) for i in range(side))
    return jnp.concatenate([slope @ part for part in parts], axis=1)


def _patches(x: Pictures, side: int) -> Pictures:
    """Each position's side × side neighbourhood as its channels."""
    edge, (height, width) = side // 2, x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    shifted = [padded[:, i : i + height, j : j + width] for i in range(side) for j in range(side)]
    return jnp.concatenate(shifted, axis=-1)


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
    count, height, width, channels = x.shape
    rows, columns = min(2, height), min(2, width)
    whole = x[:, : height // rows * rows, : width // columns * columns]
    return _largest(whole.reshape(count, height // rows, rows, width // columns, columns, channels))


# The derivative of max looks for where the input equals the output. Once compiled, the two may be computed apart and
# differ in the last bit, and then the gradient is lost. Here it goes to the place that was chosen, in one pass.
@jax.custom_jvp
def _largest(blocks: Float[Array, "n h a w b c"]) -> Pictures:
    return _choose(blocks)[0]


@_largest.defjvp
def _largest_tangent(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Pictures, Pictures]:
    (blocks,), (slope,) = primals, tangents
    largest, place = _choose(blocks)
    rows, columns = blocks.shape[2], blocks.shape[4]
    places = jnp.arange(rows * columns, dtype=place.dtype).reshape(rows, 1, columns, 1)
    return largest, jnp.sum(jnp.where(place[:, :, None, :, None] == places, slope, 0), (2, 4))


def _choose(blocks: Float[Array, "n h a w b c"]) -> tuple[Pictures, Integer[Array, "n h w c"]]:
    """The largest of each block and its place, the first of equals."""
    rows, columns = blocks.shape[2], blocks.shape[4]
    first, *others = (blocks[:, :, i, :, j] for i in range(rows) for j in range(columns))
    largest, place = first, jnp.zeros(first.shape, jnp.uint8)
    for i, entry in enumerate(others, 1):
        larger = entry > largest
        largest, place = jnp.where(larger, entry, largest), jnp.where(larger, jnp.uint8(i), place)
    return largest, place
