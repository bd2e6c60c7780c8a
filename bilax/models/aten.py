"""PyTorch's operations in JAX: what `bilax.from_torch` makes of each node that `torch.export` leaves in a graph.

`OPERATIONS` has the operations by their ATen name and with ATen's arguments, dtypes as JAX's; PyTorch decomposes all
others into these. `RANDOM` has those that draw numbers: they take a key first.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilax.models.layers import max_pool

Number = int | float
Axes = int | Sequence[int] | None

NEEDS_KEY = (
    "The module draws random numbers (dropout in training mode): call apply(parameters, *inputs, "
    "key=jax.random.key(0)), or module.eval() before bilax.from_torch."
)


def _all_or(dim: Axes) -> Any:
    """ATen's empty list means every axis."""
    return None if dim is None or dim == [] else tuple(dim) if isinstance(dim, list | tuple) else dim


def _reduce(function: Callable[..., Array]) -> Callable[..., Array]:
    def reduced(x: Array, dim: Axes = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
        return function(x if dtype is None else x.astype(dtype), axis=_all_or(dim), keepdims=keepdim)

    return reduced


def _var(x: Array, dim: Axes = None, *, correction: Number = 1, keepdim: bool = False) -> Array:
    return jnp.var(x, axis=_all_or(dim), ddof=int(correction), keepdims=keepdim)


def _best_along(choose: Callable[..., Array]) -> Callable[..., Any]:
    """torch.max and torch.min: of the whole, or values and places along an axis; ties go to the first."""

    def best(x: Array, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return x.reshape(-1)[choose(x.reshape(-1))]
        where = choose(x, axis=dim, keepdims=True)
        value = jnp.take_along_axis(x, where, axis=dim)
        return (value, where) if keepdim else (value.squeeze(dim), where.squeeze(dim))

    return best


def _arg(choose: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, dim=None, keepdim=False: choose(x, axis=dim, keepdims=keepdim)


def _topk(x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Array, Array]:
    order = jnp.argsort(jax.lax.stop_gradient(x), axis=dim, stable=True, descending=largest)
    where = jax.lax.slice_in_dim(order, 0, k, axis=dim % x.ndim)
    return jnp.take_along_axis(x, where, axis=dim), where


def _sort(x: Array, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Array, Array]:
    return _topk(x, x.shape[dim], dim, descending)


def _norm(x: Array, ord: Number = 2, dim: Axes = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    axis = _all_or(dim)
    if ord == 2:
        return jnp.sqrt(jnp.sum(x * x, axis=axis, keepdims=keepdim))
    if math.isinf(ord):
        return (jnp.max if ord > 0 else jnp.min)(jnp.abs(x), axis=axis, keepdims=keepdim)
    return jnp.sum(jnp.abs(x) ** ord, axis=axis, keepdims=keepdim) ** (1 / ord)


def _div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Array:
    found = jnp.true_divide(a, b)
    return found if rounding_mode is None else {"floor": jnp.floor, "trunc": jnp.trunc}[rounding_mode](found)


def _clamp(x: Array, min: Any = None, max: Any = None) -> Array:
    # Not jnp.clip, which passes half of the gradient on a bound where PyTorch passes all.
    x = x if min is None else jnp.where(x < min, min, x)
    return x if max is None else jnp.where(x > max, max, x)


def _hardtanh(x: Array, low: Number = -1.0, high: Number = 1.0) -> Array:
    # Unlike clamp, PyTorch passes nothing on the bounds.
    return jnp.where((x > low) & (x < high), x, jax.lax.stop_gradient(_clamp(x, low, high)))


def _elu(x: Array, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Array:
    below = alpha * jnp.expm1(jnp.where(x > 0, 0, x) * input_scale)
    return scale * jnp.where(x > 0, x, below)


def _softplus(x: Array, beta: Number = 1, threshold: Number = 20) -> Array:
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(x * beta) / beta)


def _cast_first(function: Callable[..., Array]) -> Callable[..., Array]:
    def over(x: Array, dim: int, dtype: Any = None) -> Array:
        return function(x.astype(dtype) if dtype not in (None, False, True) else x, axis=dim)

    return over


def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[tuple(slice(None) if one is None else one for one in indices)]


def _index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    place = x.at[tuple(slice(None) if one is None else one for one in indices)]
    return place.add(values) if accumulate else place.set(values)


def _slice(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _split(x: Array, sizes: int | Sequence[int], dim: int = 0) -> list[Array]:
    length = x.shape[dim]
    cuts = range(sizes, length, sizes) if isinstance(sizes, int) else np.cumsum(sizes)[:-1].tolist()
    return jnp.split(x, list(cuts), axis=dim)


def _gather(x: Array, dim: int, index: Array, *, sparse_grad: bool = False) -> Array:
    # PyTorch takes the leading part of the other axes.
    inner = tuple(slice(None) if i == dim % x.ndim else slice(n) for i, n in enumerate(index.shape))
    return jnp.take_along_axis(x[inner], index, axis=dim)


def _scatter(x: Array, dim: int, index: Array, values: Any, add: bool = False) -> Array:
    where = list(jnp.meshgrid(*map(jnp.arange, index.shape), indexing="ij"))
    where[dim] = index
    if isinstance(values, jax.Array) and values.ndim:
        values = values[tuple(map(slice, index.shape))]
    return x.at[tuple(where)].add(values) if add else x.at[tuple(where)].set(values)


def _embedding(weight: Array, index: Array, padding_idx: int = -1, *_: Any) -> Array:
    if padding_idx >= 0:
        weight = weight.at[padding_idx].set(jax.lax.stop_gradient(weight[padding_idx]))
    return weight[index]


def _pad_edges(x: Array, pad: Sequence[int], **how: Any) -> Array:
    """`pad` begins with the last axis."""
    pairs = list(zip(pad[::2], pad[1::2], strict=True))
    inside = x
    for axis, (low, high) in enumerate(pairs, 1):
        n = x.shape[-axis]
        inside = jax.lax.slice_in_dim(inside, max(-low, 0), n - max(-high, 0), axis=inside.ndim - axis)
    widths = [(0, 0)] * (x.ndim - len(pairs)) + [(max(a, 0), max(b, 0)) for a, b in reversed(pairs)]
    return jnp.pad(inside, widths, **how)


def _pair(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    many = (value,) if isinstance(value, int) else tuple(value)
    return many * count if len(many) == 1 else many


def _convolution(
    x: Array, weight: Array, bias: Array | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Array:  # fmt: skip
    count = weight.ndim - 2
    stride, padding, dilation, more = (_pair(one, count) for one in (stride, padding, dilation, output_padding))
    x, weight = (one.astype(jnp.result_type(x, weight)) for one in (x, weight))
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if transposed:
        # The transpose of a convolution: its stride spreads the input, its kernel is turned round.
        parts = weight.reshape(groups, -1, *weight.shape[1:])
        weight = jnp.flip(jnp.swapaxes(parts, 1, 2), range(3, parts.ndim)).reshape(
            -1, *parts.shape[1:2], *weight.shape[2:]
        )
        edges = [(r - p, r - p + m) for r, p, m in zip(reach, padding, more, strict=True)]
        found = jax.lax.conv_general_dilated(
            x, weight, (1,) * count, edges, stride, dilation, feature_group_count=groups
        )
    else:
        edges = [(p, p) for p in padding]
        found = jax.lax.conv_general_dilated(x, weight, stride, edges, None, dilation, feature_group_count=groups)
    return found if bias is None else found + bias.reshape(-1, *(1,) * count)


def _windows(
    x: Array, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, count: int
) -> dict[str, Any]:
    """How `lax.reduce_window` is to look at the last `count` axes."""
    kernel, padding, dilation = _pair(kernel, count), _pair(padding, count), _pair(dilation, count)
    stride = _pair(stride, count) if stride else kernel
    edges = []
    for n, k, s, p, d in zip(x.shape[-count:], kernel, stride, padding, dilation, strict=True):
        room = n + 2 * p - d * (k - 1) - 1
        # A last window that is not whole counts with ceil_mode, if it begins within the input or the left padding.
        extra = -room % s if ceil_mode and (-(-room // s)) * s < n + p else 0
        edges.append((p, p + extra))
    before = (1,) * (x.ndim - count)
    return {
        "window_dimensions": before + kernel,
        "window_strides": before + stride,
        "padding": [(0, 0)] * len(before) + edges,
        "window_dilation": before + dilation,
    }


def _max_pool(count: int) -> Callable[..., Array]:
    def pool(
        x: Array, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Array:
        sides = _pair(kernel, count)
        apart = _pair(stride or kernel, count) == sides and _pair(dilation, count) == (1,) * count
        if count == 2 and apart and math.prod(sides) <= 16 and not any(_pair(padding, count)) and not ceil_mode:
            # The derivative of reduce_window took three quarters of a small network's time on a CPU.
            last = jnp.moveaxis(x.reshape(-1, *x.shape[-3:]), 1, -1)
            found = jnp.moveaxis(max_pool(last, *sides), -1, 1)
            return found.reshape(*x.shape[:-2], *found.shape[2:])
        windows = _windows(x, kernel, stride, padding, dilation, ceil_mode, count)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, **windows)

    return pool


def _avg_pool(count: int) -> Callable[..., Array]:
    def pool(
        x: Array, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Array:  # fmt: skip
        windows = _windows(x, kernel, stride, padding, 1, ceil_mode, count)
        total = functools.partial(jax.lax.reduce_window, init_value=0.0, computation=jax.lax.add)
        if divisor_override is not None:
            return total(x, **windows) / divisor_override
        ones, edge = jnp.ones(x.shape[-count:], x.dtype), _pair(padding, count)
        last = {name: value[-count:] for name, value in windows.items()}
        if count_include_pad:
            ones = jnp.pad(ones, [(p, p) for p in edge], constant_values=1)
            last["padding"] = [(low - p, high - p) for (low, high), p in zip(last["padding"], edge, strict=True)]
        return total(x, **windows) / total(ones, **last)

    return pool


def _adaptive_avg_pool(count: int) -> Callable[..., Array]:
    """The mean over [⌊i n/m⌋, ⌈(i+1) n/m⌉) for i < m along each of the last axes."""

    def pool(x: Array, sizes: int | Sequence[int | None]) -> Array:
        for axis, size in zip(range(x.ndim - count, x.ndim), _pair(sizes, count), strict=True):  # pyright: ignore
            n, m = x.shape[axis], x.shape[axis] if size is None else size
            i, j = np.arange(m)[:, None], np.arange(n)
            inside = (j >= i * n // m) & (j < -(-(i + 1) * n // m))
            means = jnp.asarray(inside / inside.sum(axis=1, keepdims=True), x.dtype)
            x = jnp.moveaxis(jnp.tensordot(x, means, ((axis,), (1,))), -1, axis)
        return x

    return pool


def _adaptive_max_pool2d(x: Array, sizes: Sequence[int]) -> tuple[Array, None]:
    if any(n % m for n, m in zip(x.shape[-2:], sizes, strict=True)):
        raise NotImplementedError("sizes that do not divide the input's are not implemented")
    kernel = [n // m for n, m in zip(x.shape[-2:], sizes, strict=True)]
    return _max_pool(2)(x, kernel), None


def _scaled(x: Array, weight: Array | None, bias: Array | None, shape: Sequence[int]) -> Array:
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def _normalised(x: Array, axes: Sequence[int], eps: Number) -> tuple[Array, Array, Array]:
    mean, var = jnp.mean(x, axis=axes, keepdims=True), jnp.var(x, axis=axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + eps), mean, var


def _layer_norm(
    x: Array, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: Number = 1e-5, *_: Any
) -> Array:
    return _scaled(_normalised(x, tuple(range(-len(shape), 0)), eps)[0], weight, bias, shape)


def _group_norm(x: Array, groups: int, weight: Any = None, bias: Any = None, eps: Number = 1e-5, *_: Any) -> Array:
    parts = x.reshape(x.shape[0], groups, -1)
    return _scaled(_normalised(parts, (-1,), eps)[0].reshape(x.shape), weight, bias, (-1, *(1,) * (x.ndim - 2)))


def _batch_norm(
    x: Array,
    weight: Any,
    bias: Any,
    running_mean: Array,
    running_var: Array,
    training: bool,
    momentum: Number,
    eps: Number,
) -> tuple[Any, ...]:
    """Statistics of the batch (or those stored), and what the stored ones become."""
    if not training:
        stored = _batch_norm_stored(x, weight, bias, running_mean, running_var, momentum, eps)
        return *stored, running_mean, running_var
    found, mean, var = _batch_norm_alone(x, weight, bias, True, momentum, eps)
    count = x.size // x.shape[1]
    mixed = [
        (1 - momentum) * old + momentum * new
        for old, new in ((running_mean, mean), (running_var, var * count / max(count - 1, 1)))
    ]
    return found, mean, var, *mixed


def _batch_norm_alone(
    x: Array, weight: Any, bias: Any, training: bool, momentum: Number, eps: float
) -> tuple[Array, ...]:
    normal, mean, var = _normalised(x, (0, *range(2, x.ndim)), eps)
    return _scaled(normal, weight, bias, (-1, *(1,) * (x.ndim - 2))), mean.ravel(), var.ravel()


def _batch_norm_stored(
    x: Array, weight: Any, bias: Any, mean: Array, var: Array, momentum: Number, eps: float
) -> tuple[Array, ...]:
    shape = (-1, *(1,) * (x.ndim - 2))
    normal = (x - mean.reshape(shape)) * jax.lax.rsqrt(var.reshape(shape) + eps)
    return _scaled(normal, weight, bias, shape), mean, var


def _attention(
    query: Array, key: Array, value: Array, attn_mask: Array | None = None, dropout_p: Number = 0.0,
    is_causal: bool = False, *, scale: Number | None = None, enable_gqa: bool = False, random: Array | None = None,
) -> Array:  # fmt: skip
    """softmax(q kᵀ · scale + mask) v."""
    if enable_gqa:
        key, value = (jnp.repeat(one, query.shape[-3] // one.shape[-3], axis=-3) for one in (key, value))
    scores = query @ jnp.swapaxes(key, -1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if attn_mask is not None:
        scores = jnp.where(attn_mask, scores, -jnp.inf) if attn_mask.dtype == bool else scores + attn_mask
    weights = jax.nn.softmax(scores, axis=-1)
    if dropout_p:
        weights = _dropout(random, weights, dropout_p)[0]
    return weights @ value


def _recurrent(cell: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrent network of any number of layers and one or two directions, by `lax.scan` over time.

    `cell(gate inputs of x, of h, state)` gives the next state, a tuple that begins with h.
    """

    def run(
        x: Array, start: Any, weights: Sequence[Array], has_biases: bool, layers: int, dropout: Number, train: bool,
        bidirectional: bool, batch_first: bool, *, random: Array | None = None,
    ) -> tuple[Array, ...]:  # fmt: skip
        starts = start if isinstance(start, list | tuple) else [start]
        per, directions = (4 if has_biases else 2), 2 if bidirectional else 1
        if len(weights) != per * layers * directions:
            raise NotImplementedError("projections (proj_size) are not implemented")
        x, ends = jnp.swapaxes(x, 0, 1) if batch_first else x, []
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                i = layer * directions + direction
                out, end = _scan_cell(cell, x, [one[i] for one in starts], weights[per * i : per * (i + 1)], direction)
                outputs.append(out)
                ends.append(end)
            x = jnp.concatenate(outputs, axis=-1)
            if train and dropout and layer < layers - 1:
                x = _dropout(None if random is None else jax.random.fold_in(random, layer), x, dropout)[0]
        lasts = [jnp.stack(parts) for parts in zip(*ends, strict=True)]
        return jnp.swapaxes(x, 0, 1) if batch_first else x, *lasts

    return run


def _scan_cell(
    cell: Callable[..., Any], x: Array, start: Sequence[Array], weights: Sequence[Array], backward: int
) -> Any:
    from_x, from_h, *biases = weights
    bias_x, bias_h = biases or (0, 0)
    seen = x @ from_x.T + bias_x

    def step(state, now):
        after = cell(now, state[0] @ from_h.T + bias_h, state)
        return after, after[0]

    kind = jnp.result_type(seen, *start)
    begin = tuple(one.astype(kind) for one in start)
    end, outputs = jax.lax.scan(step, begin, seen.astype(kind), reverse=bool(backward))
    return outputs, end


def _gru_cell(now: Array, past: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
    (r, z, n), (hr, hz, hn) = jnp.split(now, 3, -1), jnp.split(past, 3, -1)
    update = jax.nn.sigmoid(z + hz)
    new = jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn)
    return ((1 - update) * new + update * state[0],)


def _lstm_cell(now: Array, past: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
    i, f, g, o = jnp.split(now + past, 4, -1)
    cell = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


def _dropout(key: Any, x: Array, p: Number, train: bool | None = True) -> tuple[Array, Array]:
    if not train:
        return x, jnp.ones(x.shape, bool)
    if key is None:
        raise ValueError(NEEDS_KEY)
    kept = jax.random.bernoulli(key, 1 - p, x.shape)
    return jnp.where(kept, x / max(1 - p, 1e-30), 0), kept


def _nearest(x: Array, size: Sequence[int] | None, *scales: Any) -> Array:
    shape = x.shape[:2]
    for axis, n in enumerate(x.shape[2:], 2):
        m = size[axis - 2] if size is not None else int(n * np.ravel(scales[0] if scales else 1)[axis - 2])
        x = jnp.take(x, np.arange(m) * n // m, axis=axis)
    return x.reshape(*shape, *x.shape[2:])


def _full(size: Sequence[int], value: Any = 0, *, dtype: Any = None) -> Array:
    return jnp.full(tuple(size), value, dtype)


def _like(value: Any) -> Callable[..., Array]:
    return lambda x, fill=value, *, dtype=None: jnp.full_like(x, fill, dtype=dtype)


def _diagonal(x: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    return jnp.diagonal(x, offset, dim1, dim2)


def _squeeze(x: Array, dim: Axes = None) -> Array:
    axes = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return jnp.squeeze(x, tuple(i for i in axes if x.shape[i] == 1))


def _expand(x: Array, sizes: Sequence[int], *, implicit: bool = False) -> Array:
    have = (1,) * (len(sizes) - x.ndim) + x.shape
    return jnp.broadcast_to(x, tuple(old if new == -1 else new for old, new in zip(have, sizes, strict=True)))


def _repeat(x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(repeats))


def _same(x: Array, *_: Any, **__: Any) -> Array:
    return x


def _cast(x: Array, *, dtype: Any = None, **_: Any) -> Array:
    return x if dtype is None else x.astype(dtype)


def _affine(c: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return beta * c + alpha * (a @ b)


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    return x @ weight.T if bias is None else x @ weight.T + bias


def _arange(start: Any, end: Any = None, step: Any = 1, *, dtype: Any = None) -> Array:
    return jnp.arange(start, end, step, dtype)


_SAME_NAME = (
    "abs acos acosh asin asinh atan atanh atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil cos cosh exp exp2 "
    "expm1 floor fmod isinf isnan log log10 log1p log2 logical_and logical_not logical_or logical_xor matmul maximum "
    "minimum positive reciprocal remainder round sign sin sinh sqrt square tan tanh tril triu trunc where"
)

OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(jnp, name) for name in _SAME_NAME.split()},
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), jnp.matmul),
    **{short: getattr(jnp, name) for short, name in [
        ("eq", "equal"), ("ne", "not_equal"), ("lt", "less"), ("le", "less_equal"), ("gt", "greater"),
        ("ge", "greater_equal"), ("mul", "multiply"), ("neg", "negative"),
    ]},
    **dict.fromkeys(("clone", "alias", "contiguous", "lift_fresh_copy", "lift_fresh"), _same),
    **{name: lambda x, shape: x.reshape(tuple(shape)) for name in ("view", "reshape", "_unsafe_view")},
    "add": lambda a, b, *, alpha=1: a + (b if alpha == 1 else alpha * b),
    "sub": lambda a, b, *, alpha=1: a - (b if alpha == 1 else alpha * b),
    "div": _div,
    "pow": lambda a, b: jnp.power(a, b),
    "rsqrt": jax.lax.rsqrt,
    "erf": jax.lax.erf,
    "erfinv": jax.lax.erf_inv,
    "lgamma": jax.lax.lgamma,
    "digamma": jax.lax.digamma,
    "addmm": _affine,
    "baddbmm": _affine,
    "linear": _linear,
    "einsum": lambda equation, arrays, **_: jnp.einsum(equation, *arrays),
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "gelu": lambda x, *, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh"),
    "leaky_relu": lambda x, slope=0.01: jnp.where(x > 0, x, slope * x),
    "elu": _elu,
    "softplus": _softplus,
    "clamp": _clamp,
    "hardtanh": _hardtanh,
    "softmax": _cast_first(jax.nn.softmax),
    "_softmax": _cast_first(jax.nn.softmax),
    "log_softmax": _cast_first(jax.nn.log_softmax),
    "_log_softmax": _cast_first(jax.nn.log_softmax),
    "logsumexp": lambda x, dim, keepdim=False: jax.nn.logsumexp(x, axis=_all_or(dim), keepdims=keepdim),
    "sum": _reduce(jnp.sum),
    "mean": _reduce(jnp.mean),
    "prod": _reduce(jnp.prod),
    "amax": _reduce(jnp.max),
    "amin": _reduce(jnp.min),
    "any": _reduce(jnp.any),
    "all": _reduce(jnp.all),
    "var": _var,
    "max": _best_along(jnp.argmax),
    "min": _best_along(jnp.argmin),
    "argmax": _arg(jnp.argmax),
    "argmin": _arg(jnp.argmin),
    "topk": _topk,
    "sort": _sort,
    "cumsum": lambda x, dim, *, dtype=None: jnp.cumsum(x, axis=dim, dtype=dtype),
    "linalg_vector_norm": _norm,
    "permute": jnp.transpose,
    "transpose": jnp.swapaxes,
    "t": jnp.transpose,
    "unsqueeze": jnp.expand_dims,
    "squeeze": _squeeze,
    "expand": _expand,
    "repeat": _repeat,
    "select": lambda x, dim, index: jax.lax.index_in_dim(x, index, dim, keepdims=False),
    "slice": _slice,
    "cat": lambda arrays, dim=0: jnp.concatenate(arrays, axis=dim),
    "stack": lambda arrays, dim=0: jnp.stack(arrays, axis=dim),
    "split": _split,
    "split_with_sizes": _split,
    "unbind": lambda x, dim=0: list(jnp.moveaxis(x, dim, 0)),
    "diagonal": _diagonal,
    "flip": lambda x, dims: jnp.flip(x, tuple(dims)),
    "roll": lambda x, shifts, dims=(): jnp.roll(x, tuple(shifts), tuple(dims) or None),
    "index": _index,
    "index_put": _index_put,
    "index_select": lambda x, dim, index: jnp.take(x, index, axis=dim),
    "gather": _gather,
    "scatter": _scatter,
    "scatter_add": functools.partial(_scatter, add=True),
    "embedding": _embedding,
    "masked_fill": lambda x, mask, value: jnp.where(mask, value, x),
    "constant_pad_nd": lambda x, pad, value=0: _pad_edges(x, pad, constant_values=value),
    **{f"reflection_pad{n}d": functools.partial(_pad_edges, mode="reflect") for n in (1, 2, 3)},
    **{f"replication_pad{n}d": functools.partial(_pad_edges, mode="edge") for n in (1, 2, 3)},
    "copy": lambda x, source, *_: jnp.broadcast_to(source, x.shape).astype(x.dtype),
    "detach": jax.lax.stop_gradient,
    "_to_copy": _cast,
    "arange": _arange,
    "full": _full,
    **dict.fromkeys(("zeros", "empty"), _full),
    "ones": lambda size, *, dtype=None: jnp.ones(tuple(size), dtype),
    "full_like": _like(0),
    "zeros_like": _like(0),
    "empty_like": _like(0),
    "ones_like": _like(1),
    "scalar_tensor": lambda value, *, dtype=None: jnp.asarray(value, dtype),
    "convolution": _convolution,
    **{f"max_pool{n}d": _max_pool(n) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _avg_pool(n) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": _adaptive_avg_pool(n) for n in (1, 2, 3)},
    "adaptive_max_pool2d": _adaptive_max_pool2d,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "_native_batch_norm_legit_functional": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm_stored,
    "_native_batch_norm_legit": _batch_norm_alone,
    "upsample_nearest2d": _nearest,
    "scaled_dot_product_attention": _attention,
    "gru": _recurrent(_gru_cell),
    "lstm": _recurrent(_lstm_cell),
    "rnn_tanh": _recurrent(lambda now, past, state: (jnp.tanh(now + past),)),
    "rnn_relu": _recurrent(lambda now, past, state: (jax.nn.relu(now + past),)),
}  # fmt: skip

MAY_DRAW = ("scaled_dot_product_attention", "gru", "lstm", "rnn_tanh", "rnn_relu")
"""operations that take a key as `random` for their dropout"""

RANDOM: dict[str, Callable[..., Any]] = {
    "native_dropout": _dropout,
    "bernoulli": lambda key, x, p=None: jax.random.bernoulli(key, x if p is None else p, x.shape).astype(x.dtype),
    "rand": lambda key, size, *, dtype=None: jax.random.uniform(key, tuple(size), dtype or float),
    "randn": lambda key, size, *, dtype=None: jax.random.normal(key, tuple(size), dtype or float),
    "rand_like": lambda key, x, *, dtype=None: jax.random.uniform(key, x.shape, dtype or x.dtype),
    "randn_like": lambda key, x, *, dtype=None: jax.random.normal(key, x.shape, dtype or x.dtype),
}
