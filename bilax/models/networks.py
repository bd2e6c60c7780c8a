"""ConvNet-4 and ResNet-12 (appendix C): pictures of one task in, one vector of features for each out."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bilax.models.layers import Convolution, Normalization, Pictures, max_pool, unpooled


class _Group(eqx.Module):
    """Convolution and normalisation."""

    convolution: Convolution
    normalization: Normalization

    def __init__(self, channels: int, filters: int, key: Array, side: int = 3):
        self.convolution = Convolution(channels, filters, key, side)
        self.normalization = Normalization(filters)

    def __call__(self, x: Pictures) -> Pictures:
        return self.normalization(self.convolution(x))


class Block(eqx.Module):
    """Convolution with bias, 2 × 2 max-pooling unless it is not `pooled`, ReLU, normalisation."""

    convolution: Convolution
    bias: Float[Array, " filters"]
    normalization: Normalization
    pooled: bool = eqx.field(static=True)

    def __init__(self, channels: int, filters: int, key: Array, pooled: bool = True):
        self.convolution = Convolution(channels, filters, key)
        self.bias = jnp.zeros(filters, jnp.float32)
        self.normalization = Normalization(filters)
        self.pooled = pooled

    def __call__(self, x: Pictures) -> Pictures:
        if not self.pooled:
            return self.normalization(jax.nn.relu(self.convolution(x) + self.bias))
        # What pooling leaves out is not computed. The bias and ReLU commute with the maximum, and a quarter of the
        # numbers is left after pooling.
        return self.normalization(jax.nn.relu(max_pool(self.convolution(x, unpooled(x))) + self.bias))


class ConvNet4(eqx.Module):
    """Four times 3 × 3 convolution with k filters, ReLU, 2 × 2 max-pooling, normalisation; then flattened.

    The paper names normalisation before ReLU and pooling; its authors' program has it last, and so have we: features
    are then centred, which a classifier that is fitted by ten steps of descent needs. 28 × 28 pictures give k features,
    84 × 84 ones 25 k. Only the first `pools` blocks pool: two for Relation Net, which compares small pictures.
    """

    blocks: tuple[Block, ...]

    def __init__(self, channels: int, filters: int, key: Array, pools: int = 4):
        keys = jax.random.split(key, 4)
        self.blocks = tuple(Block(channels if i == 0 else filters, filters, keys[i], i < pools) for i in range(4))

    def __call__(self, x: Pictures) -> Float[Array, "n features"]:
        for block in self.blocks:
            x = block(x)
        return x.reshape(len(x), -1)


class _Residual(eqx.Module):
    """Three groups with a short cut beside them, then pooling."""

    groups: tuple[_Group, ...]
    short_cut: _Group

    def __init__(self, channels: int, filters: int, key: Array):
        keys = jax.random.split(key, 4)
        self.groups = tuple(_Group(channels if i == 0 else filters, filters, keys[i]) for i in range(3))
        self.short_cut = _Group(channels, filters, keys[3], 1)

    def __call__(self, x: Pictures) -> Pictures:
        y = self.groups[0](x)
        for group in self.groups[1:]:
            y = group(_activate(y))
        return _activate(max_pool(y + self.short_cut(x)))


class ResNet12(eqx.Module):
    """Four residual blocks of k, 2k, 4k and 8k filters, two 1 × 1 convolutions of 8k, and the mean over positions.

    The paper gives k and the order of the layers; that the filters double is from the network it cites (Oreshkin et
    al. 2018), and so is the leaky ReLU.
    """

    blocks: tuple[_Residual, ...]
    last: tuple[_Group, ...]

    def __init__(self, channels: int, filters: int, key: Array):
        keys = jax.random.split(key, 6)
        widths = (channels, *(filters * 2**i for i in range(4)))
        self.blocks = tuple(_Residual(widths[i], widths[i + 1], keys[i]) for i in range(4))
        self.last = tuple(_Group(widths[4], widths[4], keys[i], 1) for i in (4, 5))

    def __call__(self, x: Pictures) -> Float[Array, "n features"]:
        for block in self.blocks:
            x = block(x)
        for group in self.last:
            x = _activate(group(x))
        return x.mean((1, 2))


def _activate(x: Array) -> Array:
    return jax.nn.leaky_relu(x, 0.1)
