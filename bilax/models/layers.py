"""Convolution, normalisation and pooling of pictures (n, height, width, channels).

Normalisation takes its statistics from the pictures it is given, so a network is a pure function of its weights and
of one task's pictures.
"""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Integer

from bilax.phi import most_within

Pictures = Float[Array, "n _ _ _"]

PATCH_BYTES = 4 << 20
"""of neighbourhoods that are multiplied at a time"""
THIN = 8
"""With fewer channels, whole neighbourhoods are small enough to be copied."""


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


def convolve_on_cpu(x: Pictures, kernel: Array) -> Pictures:
    """The same. XLA's for CPU is fast, but not where channels are few, and its derivative in the kernel is slow."""
    return _convolution.bind(x, kernel)


def _convolve(x: Pictures, kernel: Array) -> Pictures:
    side, _, channels, filters = kernel.shape
    if channels >= THIN:
        return convolve(x, kernel)
    found = jax.lax.map(lambda few: _patches(few, side) @ kernel.reshape(-1, filters), _in_parts(x, side))
    return found.reshape(*x.shape[:3], filters)


def _in_parts(x: Pictures, side: int) -> Float[Array, "parts _ _ _ _"]:
    """Few pictures at a time, so that their neighbourhoods stay in cache."""
    count = most_within(PATCH_BYTES, len(x), x[0].size * side**2 * x.dtype.itemsize)
    return x.reshape(-1, count, *x.shape[1:])


def _turned(kernel: Array) -> Array:
    """The kernel of the transposed convolution."""
    return jnp.flip(kernel, (0, 1)).swapaxes(2, 3)


def _kernel_slope(x: Pictures, slope: Pictures, side: int) -> Array:
    """The derivative of Σ slope · convolve(x, kernel) in the kernel."""
    channels, filters = x.shape[-1], slope.shape[-1]
    products = _by_patches if channels < THIN else _by_rows

    def add(total, part):
        few, slopes = part
        return total + products(few, slopes.T, side), None

    parts = _in_parts(x, side)
    parts = parts, slope.reshape(len(parts), -1, filters)
    total, _ = jax.lax.scan(add, jnp.zeros((filters, side * side * channels), x.dtype), parts)
    return total.T.reshape(side, side, channels, filters)


def _primitive(name: str, compute: Callable[..., Array]) -> Primitive:
    """`compute` as an operation of its own, for which we tell JAX the derivatives."""
    primitive = Primitive(name)
    primitive.def_impl(compute)
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=False))

    def out(*arrays, **options):
        like = jax.eval_shape(functools.partial(compute, **options), *arrays)
        return ShapedArray(like.shape, like.dtype)

    def batched(arrays, axes, **options):
        # One task after the other, so that what is multiplied stays in cache.
        mapped = [jnp.moveaxis(array, axis, 0) for array, axis in zip(arrays, axes, strict=True) if axis is not None]

        def one(parts):
            rest = iter(parts)
            both = (array if axis is None else next(rest) for array, axis in zip(arrays, axes, strict=True))
            return primitive.bind(*both, **options)

        return jax.lax.map(one, mapped), 0

    primitive.def_abstract_eval(out)
    batching.primitive_batchers[primitive] = batched
    return primitive


# Both are linear in each of their arrays, and the transpose of either in either array is one of the two. So all
# derivatives of any order, forward and backward, are made of these two.
_convolution = _primitive("convolution", _convolve)
_convolution_slope = _primitive("convolution_slope", _kernel_slope)
ad.defbilinear(
    _convolution,
    lambda slope, x, kernel: convolve_on_cpu(slope, _turned(kernel)),
    lambda slope, x, kernel: _convolution_slope.bind(x, slope, side=kernel.aval.shape[0]),
)
ad.defbilinear(
    _convolution_slope,
    lambda bar, x, slope, side: convolve_on_cpu(slope, _turned(bar)),
    lambda bar, x, slope, side: convolve_on_cpu(x, bar),
)


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
