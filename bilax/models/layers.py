"""Convolution, normalisation and pooling of pictures (n, height, width, channels).

Normalisation takes its statistics from the pictures it is given, so a network is a pure function of its weights and
of one task's pictures.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Integer

from bilax.problem.trees import most_within

Pictures = Float[Array, "n _ _ _"]

Less = tuple[int, int]
"""how many rows and columns fewer than its input an output has; those are left out at the end"""

PART_BYTES = 4 << 20
"""of what is made of the pictures that are convolved at a time"""
THIN = 8
"""With fewer channels, rows side by side are small enough to be copied, and so are whole neighbourhoods."""
WIDE = 48
"""With so many channels, fewer products are worth the sums that they take."""


class Convolution(eqx.Module):
    """A square convolution of odd side without bias that keeps height and width (zeros outside the picture)."""

    kernel: Float[Array, "side side channels filters"]

    def __init__(self, channels: int, filters: int, key: Array, side: int = 3):
        scale = (2 / (side * side * channels)) ** 0.5
        self.kernel = scale * jax.random.normal(key, (side, side, channels, filters), jnp.float32)

    def __call__(self, x: Pictures, less: Less = (0, 0)) -> Pictures:
        on_cpu, elsewhere = (functools.partial(f, less=less) for f in (convolve_on_cpu, convolve))
        return jax.lax.platform_dependent(x, self.kernel, cpu=on_cpu, default=elsewhere)


def convolve(x: Pictures, kernel: Array, less: Less = (0, 0)) -> Pictures:
    """The convolution as XLA has it, without the last rows and columns of which there are to be `less`."""
    padding = [(side // 2, side // 2 - few) for side, few in zip(kernel.shape, less, strict=False)]
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def convolve_on_cpu(x: Pictures, kernel: Array, less: Less = (0, 0)) -> Pictures:
    """The same by other means. XLA's derivative in the kernel is slow on CPU, and its convolution of few channels."""
    return _convolution.bind(x, kernel, less=less)


def _convolve(x: Pictures, kernel: Array, less: Less) -> Pictures:
    side, _, channels, filters = kernel.shape
    if x.shape[1] * x.shape[2] < side**2:
        # XLA would swap a picture with a kernel that is larger, and then be slow.
        return _patches(x, side, less) @ kernel.reshape(-1, filters)
    if channels < THIN:
        columns = kernel.swapaxes(0, 1).reshape(1, side, -1, filters)
        return convolve(_rows_moved(x, side, less[0]), columns, (0, less[1]))
    if channels >= WIDE and side == 3:
        found = jax.lax.map(lambda few: _convolve_tiles(few, kernel, less), _in_parts(x, 4))
        return found.reshape(len(x), *found.shape[2:])
    return convolve(x, kernel, less)


def _kernel_slope(x: Pictures, slope: Pictures, side: int) -> Array:
    """The derivative of Σ slope · convolve(x, kernel) in the kernel."""
    channels, filters = x.shape[-1], slope.shape[-1]
    tiled = side == 3 and channels >= THIN
    parts = _in_parts(x, 4 if tiled else side**2)
    parts = parts, slope.reshape(*parts.shape[:2], *slope.shape[1:])

    def add(totals, part):
        few, slopes = part
        products = _tiles_products(few, slopes) if tiled else [_planes_product(few, slopes, side)]
        return [total + product for total, product in zip(totals, products, strict=True)], None

    shapes = [(filters, side * channels)] * 4 if tiled else [(side**2 * channels, filters)]
    totals, _ = jax.lax.scan(add, [jnp.zeros(shape, x.dtype) for shape in shapes], parts)
    if not tiled:
        return totals[0].reshape(side, side, channels, filters)
    a, b, c, d = (total.T.reshape(side, channels, filters) for total in totals)
    outer = (b + c) / 2
    return jnp.stack([a + outer, (b - c) / 2, outer + d], axis=1)


def _in_parts(x: Float[Array, "n ..."], copies: int, limit: int = PART_BYTES) -> Float[Array, "parts _ ..."]:
    """Few pictures at a time, so that `copies` of them stay in cache."""
    count = most_within(limit, len(x), copies * x[0].size * x.dtype.itemsize)
    return x.reshape(-1, count, *x.shape[1:])


def _less(x: Any, out: Any) -> Less:
    return x.shape[1] - out.shape[1], x.shape[2] - out.shape[2]


def _turned(kernel: Array) -> Array:
    """The kernel of the transposed convolution."""
    return jnp.flip(kernel, (0, 1)).swapaxes(2, 3)


def _primitive(name: str, compute: Callable[..., Array], shape: Callable[..., tuple[int, ...]]) -> Primitive:
    """`compute` as an operation of its own, with the shape of its result, for which we tell JAX the derivatives."""
    primitive = Primitive(name)
    primitive.def_impl(compute)
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=False))

    def out(first, second, **options):
        return ShapedArray(shape(first.shape, second.shape, **options), first.dtype)

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
_convolution = _primitive(
    "convolution", _convolve, lambda x, kernel, less: (x[0], x[1] - less[0], x[2] - less[1], kernel[-1])
)
_convolution_slope = _primitive(
    "convolution_slope", _kernel_slope, lambda x, slope, side: (side, side, x[-1], slope[-1])
)
ad.defbilinear(
    _convolution,
    lambda slope, x, kernel, less: convolve_on_cpu(slope, _turned(kernel), _less(slope, x.aval)),
    lambda slope, x, kernel, less: _convolution_slope.bind(x, slope, side=kernel.aval.shape[0]),
)
ad.defbilinear(
    _convolution_slope,
    lambda bar, x, slope, side: convolve_on_cpu(slope, _turned(bar), _less(slope, x.aval)),
    lambda bar, x, slope, side: convolve_on_cpu(x, bar, _less(x, slope.aval)),
)


# Winograd's way (Lavin and Gray 2016) along rows: two neighbouring outputs of a kernel of three are had from four
# inputs by four products in place of six.
def _convolve_tiles(x: Pictures, kernel: Array, less: Less) -> Pictures:
    width = x.shape[2] - less[1]
    left, middle, right = kernel[:, 0], kernel[:, 1], kernel[:, 2]
    outer = (left + right) / 2
    columns = left, outer + middle / 2, outer - middle / 2, right
    tiles = zip(_tiles(x, width), columns, strict=True)
    a, b, c, d = (convolve(tile, column[:, None], (less[0], 0)) for tile, column in tiles)
    pairs = jnp.stack([a + b + c, b - c - d], axis=3)
    return pairs.reshape(*a.shape[:2], -1, kernel.shape[-1])[:, :, :width]


def _tiles_products(x: Pictures, slope: Pictures) -> list[Float[Array, "filters _"]]:
    (height, width), filters = slope.shape[1:3], slope.shape[-1]
    even = jnp.pad(slope, ((0, 0), (0, 0), (0, width % 2), (0, 0)))
    first, second = even[:, :, ::2], even[:, :, 1::2]

    def product(tile, slopes):
        moved = _rows_moved(tile, 3, x.shape[1] - height)
        return slopes.reshape(-1, filters).T @ moved.reshape(-1, moved.shape[-1])

    slopes = first, first + second, first - second, -second
    return [product(*pair) for pair in zip(_tiles(x, width), slopes, strict=True)]


def _tiles(x: Pictures, width: int) -> tuple[Pictures, Pictures, Pictures, Pictures]:
    """What four inputs that reach over two outputs are turned into, for all pairs of `width` outputs."""
    even = width + width % 2
    padded = _padded(x, (1, 3), (0, x.shape[2] - even))
    a, b, c, d = (padded[:, :, j : j + even - 1 : 2] for j in range(4))
    return a - c, b + c, c - b, b - d


def _planes_product(x: Pictures, slope: Pictures, side: int) -> Float[Array, "_ filters"]:
    # Channels first: rows of a picture are then copied whole, not a few channels at a time.
    planes = jnp.moveaxis(_padded(x, (side, side), _less(x, slope)), -1, 0)
    height, width = slope.shape[1:3]
    moved = [planes[:, :, i : i + height, j : j + width] for i in range(side) for j in range(side)]
    return jnp.concatenate(moved).reshape(side**2 * x.shape[-1], -1) @ slope.reshape(-1, slope.shape[-1])


def _rows_moved(x: Pictures, side: int, fewer: int) -> Pictures:
    """The rows that reach to each row of the output as its channels."""
    rows, height = _padded(x, (side, 1), (fewer, 0)), x.shape[1] - fewer
    return jnp.concatenate([rows[:, i : i + height] for i in range(side)], axis=-1)


def _patches(x: Pictures, side: int, less: Less) -> Pictures:
    """The side × side neighbourhood of each position of the output as its channels."""
    padded = _padded(x, (side, side), less)
    height, width = (size - side + 1 for size in padded.shape[1:3])
    shifted = [padded[:, i : i + height, j : j + width] for i in range(side) for j in range(side)]
    return jnp.concatenate(shifted, axis=-1)


def _padded(x: Pictures, sides: tuple[int, int], less: Less) -> Pictures:
    """Zeros around, as far as neighbourhoods of the output's positions reach."""
    around = [(side // 2, side // 2 - few, 0) for side, few in zip(sides, less, strict=True)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *around, (0, 0, 0)])


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


def max_pool(x: Pictures, rows: int = 2, columns: int = 2) -> Pictures:
    """The largest of each block; rows and columns left over are left out, and a picture smaller than a block is one."""
    count, height, width, channels = x.shape
    odd_rows, odd_columns = unpooled(x, rows, columns)
    rows, columns = min(rows, height), min(columns, width)
    whole = x[:, : height - odd_rows, : width - odd_columns]
    return _choose(whole.reshape(count, height // rows, rows, width // columns, columns, channels))[0]


def unpooled(x: Pictures, rows: int = 2, columns: int = 2) -> Less:
    """How many last rows and columns `max_pool` leaves out."""
    height, width = x.shape[1:3]
    return height % min(rows, height), width % min(columns, width)


# The derivative of max looks for where the input equals the output. Once compiled, the two may be computed apart and
# differ in the last bit, and then the gradient is lost. Here it goes to the place that was chosen.
@jax.custom_jvp
def _choose(blocks: Float[Array, "n h a w b c"]) -> tuple[Pictures, Integer[Array, "n h w c"]]:
    """The largest of each block and its place, the first of equals."""
    return jax.lax.platform_dependent(blocks, cpu=_choose_in_parts, default=_choose_at_once)


@_choose.defjvp
def _choose_tangent(primals: tuple[Array], tangents: tuple[Array]) -> Any:
    (blocks,), (slope,) = primals, tangents
    largest, place = _choose(blocks)
    rows, columns = blocks.shape[2], blocks.shape[4]
    places = jnp.arange(rows * columns, dtype=place.dtype).reshape(rows, 1, columns, 1)
    chosen = jnp.sum(jnp.where(place[:, :, None, :, None] == places, slope, 0), (2, 4))
    return (largest, place), (chosen, np.zeros(place.shape, jax.dtypes.float0))


def _choose_in_parts(blocks: Float[Array, "n h a w b c"]) -> tuple[Pictures, Integer[Array, "n h w c"]]:
    if len(blocks) < 2:
        return _choose_at_once(blocks)
    # In a loop, which takes at least two rounds: XLA would choose anew in everything that needs the place, with all
    # that leads to it.
    parts = _in_parts(blocks, 1, min(PART_BYTES, blocks.nbytes // 2))
    return jax.tree.map(lambda found: found.reshape(-1, *found.shape[2:]), jax.lax.map(_choose_at_once, parts))


def _choose_at_once(blocks: Float[Array, "n h a w b c"]) -> tuple[Pictures, Integer[Array, "n h w c"]]:
    rows, columns = blocks.shape[2], blocks.shape[4]
    first, *others = (blocks[:, :, i, :, j] for i in range(rows) for j in range(columns))
    largest, place = first, jnp.zeros(first.shape, jnp.uint8)
    for i, entry in enumerate(others, 1):
        larger = (entry > largest) | jnp.isnan(entry)  # and then nothing is larger than NaN
        largest, place = jnp.where(larger, entry, largest), jnp.where(larger, jnp.uint8(i), place)
    return largest, place
