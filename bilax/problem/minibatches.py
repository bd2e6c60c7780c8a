"""Mini-batches on the device: each outer step's own, found from its number alone, so that nothing has to be saved."""

import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree, UInt32

from bilax.problem.checks import as_arrays

ROUNDS = 12
"""of the shuffle: each leaves a place as it is with probability ½, and 2⁻¹² is less than one place in most orders"""


LEVELS = "upper", "lower"
AHEAD = 1 << 20
"""places that are computed ahead at the most, which take 16 MB"""


class Minibatches(eqx.Module):
    """Data for `solve(data=...)` that stay on the device and are visited in batches, epoch by epoch.

    `upper` and `lower` are trees of arrays with one example per row: the leader's and the follower's. Both objectives
    get a batch of each, `upper(x, y, upper_batch, lower_batch)` and `lower(x, y, upper_batch, lower_batch)`, and use
    their own, so the same objectives take all data by `data=(upper, lower)`. Either may be `()`. Where examples have
    variables of their own, such as weights, let the number of the row be one of the arrays.

    `size` is the number of rows in a batch; a pair for the two levels; None for all rows at every step. Rows are
    shuffled once (`seed=None` leaves them as they are). Each epoch then cuts them, as a ring, from a random row on into
    ⌊n / size⌋ blocks and visits these in random order without replacement; the n mod size rows that are left out
    are others in each epoch. A method that wants several independent batches in one step (`draws`) takes the next ones.
    Every start of `multistart` has an order of its own.
    """

    upper: "Rows"
    lower: "Rows"

    def __init__(self, upper: PyTree, lower: PyTree, size: Any = 64, seed: int | None = 0):
        sizes = size if isinstance(size, tuple | list) else (size, size)
        if len(sizes) != 2:
            raise ValueError(f"size must be a number, None, or a pair (upper, lower) of these, got {size!r}.")
        self.upper = Rows.of("upper", upper, sizes[0], seed)
        self.lower = Rows.of("lower", lower, sizes[1], seed)

    def with_all_apart(self) -> "Minibatches":
        """The same with a copy of all rows beside the ring, for methods that pass over all of them again and again."""
        apart = [getattr(self, level).all for level in LEVELS]
        where = lambda given: [getattr(given, level).apart for level in LEVELS]  # noqa: E731
        return eqx.tree_at(where, self, apart, is_leaf=lambda leaf: leaf is None)


class Rows(eqx.Module):
    """One level's examples, the first few of them once more at the end, so that a block may run over it."""

    arrays: PyTree
    count: int = eqx.field(static=True)
    size: int = eqx.field(static=True)
    hands: int = eqx.field(static=True, default=1)
    """if more than one, the arrays have an axis in front of the rows, to which these are dealt in turn like cards"""
    apart: PyTree = None
    """every row once, where that was asked for: cut from the ring it would be copied each time"""

    @classmethod
    def of(cls, name: str, arrays: PyTree, size: int | None, seed: int | None) -> "Rows":
        """Checks, shuffles and copies to the device."""
        arrays = jax.tree.map(np.asarray, as_arrays(name, arrays))
        counts = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(arrays)}
        if not counts:
            return cls(arrays, 0, 0)
        if len(counts) > 1 or () in counts:
            raise ValueError(f"the arrays of {name} need one example per row; their numbers of rows are {counts}.")
        count = counts.pop()[0]
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= count):
            raise ValueError(f"size must be from 1 to the {count} rows of {name}, or None for all, got {size!r}.")
        if size is None or size == count:
            return cls(jax.tree.map(jnp.asarray, arrays), count, count)
        order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
        ring = np.append(order, order[: size - 1])
        return cls(jax.tree.map(lambda leaf: jnp.asarray(leaf[ring]), arrays), count, size)

    @property
    def blocks(self) -> int:
        """How many batches an epoch has."""
        return 1 if self.size == self.count else self.count // self.size

    @property
    def all(self) -> PyTree:
        """Every row once."""
        if self.apart is not None:
            return self.apart
        if self.hands == 1:
            return jax.tree.map(lambda leaf: leaf[: self.count], self.arrays)
        each = self.count // self.hands
        return jax.tree.map(lambda leaf: leaf[:, :each].reshape(self.count, *leaf.shape[2:]), self.arrays)

    def dealt(self, name: str, hands: int) -> "Rows":
        """The rows in so many parts, such that every batch takes as many of each: for as many devices."""
        for what, number in ((f"rows of {name}", self.count), (f"size of {name}'s batches", self.size)):
            if number % hands:
                raise ValueError(
                    f"the {what} must be a multiple of the {hands} devices, got {number}: each device has its share of "
                    "every batch."
                )
        if self.size == self.count:
            return self

        def deal(leaf):
            ring = np.asarray(leaf)[np.arange(self.count + self.size) % self.count]
            return ring.reshape(-1, hands, *ring.shape[1:]).swapaxes(0, 1)

        return Rows(jax.tree.map(deal, self.arrays), self.count, self.size, hands)


def batches(levels: Sequence[Rows], starts: Sequence[Any]) -> tuple[Any, ...]:
    """Of each level the rows from its start on; all of them where a batch is everything."""
    cut = [i for i, rows in enumerate(levels) if rows.size < rows.count]
    slices = _slices(tuple((levels[i].size, levels[i].hands) for i in cut))
    found = slices(tuple(levels[i].arrays for i in cut), tuple(starts[i] for i in cut)) if cut else ()
    by_level = dict(zip(cut, found, strict=True))
    return tuple(by_level.get(i, rows.arrays) for i, rows in enumerate(levels))


@functools.cache
def _slices(kinds: tuple[tuple[int, int], ...]) -> Any:
    """(arrays, starts), one of each per level -> so many rows from there on; for many starts one after the other.

    A kind is the size of a batch and how many hands the rows are dealt to.

    XLA makes a gather of what `vmap` makes of a slice, and on a CPU computes the place of each number anew: for ten
    batches of 64 rows with 22 numbers that took two thirds of a step of SOBA.
    """

    def plain(arrays, starts):
        def rows(kind, start, part):
            size, hands = kind
            take = functools.partial(_from_hands, start, size) if hands > 1 else None
            return jax.tree.map(take or (lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size)), part)

        return tuple(map(rows, kinds, starts, arrays))

    one = jax.custom_batching.custom_vmap(plain)

    @one.def_vmap
    def many(count, batched, arrays, starts):
        if any(jax.tree.leaves(batched[0])) or not all(batched[1]):
            axes = jax.tree.map(lambda flag: 0 if flag else None, batched)
            found = jax.vmap(plain, axes)(arrays, starts)
        else:
            found = jax.lax.map(lambda each: one(arrays, each), starts)
        return found, jax.tree.map(lambda _: True, found)

    return one


def _from_hands(start: Any, size: int, leaf: Array) -> Array:
    """The rows start, …, start + size − 1, hand by hand. Row r is number r // hands of hand r % hands."""
    hands, each = len(leaf), size // len(leaf)
    # The hands before that of the first row begin one number later. What is cut is never the hands' axis, so that no
    # device needs another's rows.
    found = jax.lax.dynamic_slice_in_dim(leaf, start // hands, each + 1, axis=1)
    later = (jnp.arange(hands) < start % hands).reshape(-1, *[1] * (leaf.ndim - 1))
    return jnp.where(later, found[:, 1:], found[:, :-1]).reshape(size, *leaf.shape[2:])


class Draws(eqx.Module):
    """The data of one outer step, as an algorithm with an attribute `draws` gets them.

    `draws = (outer, inner)` is how many independent batches of the leader's and of the follower's data one step takes.
    `upper(i)` and `lower(i)` are the i-th of them, as the tuple that the objectives get after (x, y); i may be traced.
    A tuple given to `solve`, or an item of an iterable, serves for all of them; a function (step, key) is called with
    another key for each.
    """

    source: Any
    step: Int[Array, ""]
    key: Array
    counts: tuple[int, int] = eqx.field(static=True)
    start: Any = 0
    """which of many starts"""
    axes: Any = eqx.field(static=True, default=None)
    """which leaves of what a function returns have an axis for the starts"""
    streamed: bool = eqx.field(static=True, default=False)
    """whether the source is one batch of many that come from outside"""
    places: Any = None
    """of the steps from `first` on the blocks, and the rows where they begin, for each level: see `ahead`"""
    first: Any = 0

    def upper(self, i: Any = 0) -> tuple[Any, ...]:
        """Data for F: the leader's batch number i, and the follower's first."""
        return self._draw(i, 0)

    def lower(self, i: Any = 0) -> tuple[Any, ...]:
        """Data for f: the follower's batch number i, and the leader's first."""
        return self._draw(0, i)

    def whole(self) -> "Draws":
        """All rows of both levels as one batch."""
        if not isinstance(self.source, Minibatches):
            return self._steady()
        return self.of(self.start, tuple(rows.all for rows in self._rows()))

    def blocks(self, level: str) -> int:
        """How many blocks that stay the same the level's examples make."""
        return getattr(self.source, level).blocks if isinstance(self.source, Minibatches) else 1

    def next_block(self, level: str) -> Array:
        """Which of these blocks is to be visited in this step."""
        if isinstance(self.source, Minibatches):
            return self._place(LEVELS.index(level), 0)[0].astype(int)
        return jnp.zeros((), int)

    def block(self, level: str, i: Any) -> tuple[Any, ...]:
        """The level's block number i, and the other's first; for methods that remember what they found on each."""
        if not isinstance(self.source, Minibatches):
            return self._steady().source
        starts = [i * rows.size if name == level else 0 for name, rows in zip(LEVELS, self._rows(), strict=True)]
        return tuple(batches([rows], [start])[0] for rows, start in zip(self._rows(), starts, strict=True))

    def _rows(self) -> tuple[Rows, Rows]:
        return self.source.upper, self.source.lower

    def _steady(self) -> "Draws":
        if callable(self.source) or self.streamed:
            raise ValueError(
                "this method comes back to the same examples, so it cannot have data from a function or an iterable: "
                "give data=bilax.Minibatches(upper, lower, size), or a tuple."
            )
        return self

    def of(self, start: Any, source: Any) -> "Draws":
        """Those of one start among many."""
        return Draws(source, self.step, self.key, self.counts, start, self.axes, self.streamed)

    def ahead(self, steps: int) -> "Draws":
        """The same with the places of all batches of the next steps, if they are not too many.

        A place takes some 200 operations on whole numbers. XLA makes them part of each program that reads a batch: of
        SOBA's step on ijcnn1 they took a third, of SABA's two thirds. Here they are computed side by side.
        """
        if not isinstance(self.source, Minibatches) or steps * sum(self.counts) > AHEAD:
            return self
        numbers = self.step + jnp.arange(steps)[:, None]
        shapes = [(steps, count) for count in self.counts]
        found = [self._found(level, numbers, jnp.arange(shape[1])) for level, shape in enumerate(shapes)]
        places = [
            tuple(jnp.broadcast_to(one, shape) for one in pair) for pair, shape in zip(found, shapes, strict=True)
        ]
        return eqx.tree_at(
            lambda draws: (draws.places, draws.first), self, (places, self.step), is_leaf=lambda leaf: leaf is None
        )

    def later(self, steps: Any) -> "Draws":
        """The data of a later outer step."""
        return eqx.tree_at(lambda draws: draws.step, self, self.step + steps)

    def _draw(self, i: Any, j: Any) -> tuple[Any, ...]:
        if isinstance(self.source, Minibatches):
            levels, places = self._rows(), (self._place(0, i)[1], self._place(1, j)[1])
            if self.counts == (1, 1):  # both are wanted, and fetched together
                return batches(levels, places)
            return *batches(levels[:1], places[:1]), *batches(levels[1:], places[1:])
        if not callable(self.source):
            return self.source
        first = jax.random.fold_in(self.key, self.step)
        number = i + j
        key = first if isinstance(number, int) and number == 0 else jax.random.fold_in(first, number)
        return of_start(self.source(self.step, key), self.axes, self.start)

    def _place(self, level: int, i: Any) -> tuple[Array, Array]:
        if self.places is None:
            return self._found(level, self.step, i)
        block, start = self.places[level]
        return block[self.step - self.first, i], start[self.step - self.first, i]

    def _found(self, level: int, step: Any, i: Any) -> tuple[Array, Array]:
        rows, words = getattr(self.source, LEVELS[level]), jax.random.key_data(self.key)
        return _place(rows.count, rows.size, self.counts[level], words, level, self.start, step, i)


def of_start(data: PyTree, axes: Any, start: Any) -> PyTree:
    """One start's part of data whose leaves have an axis for the starts where `axes` names one."""

    def take(axis, part):
        return part if axis is None else jax.tree.map(lambda leaf: jnp.take(leaf, start, axis), part)

    if axes is None or isinstance(axes, int):
        return take(axes, data)
    return jax.tree.map(take, axes, data, is_leaf=lambda axis: axis is None)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # traced once, however many batches a method draws
def _place(count: int, size: int, draws: int, words: Any, level: Any, start: Any, step: Any, i: Any) -> Any:
    """Which block, and from which row on, is draw i of a step that has `draws` of them."""
    blocks = count // size if count else 1
    if blocks == 1:
        return jnp.zeros((), int), jnp.zeros((), int)
    seed = _hash(level, start)
    for word in words:
        seed = _hash(seed, word)
    # (step · draws + i) / blocks without overflow
    rest = step % blocks * draws + i
    seed = _hash(seed, step // blocks * draws + rest // blocks)
    block = _shuffled(rest % blocks, blocks, seed)
    return block.astype(int), (block * size + _hash(seed, 0) % count).astype(int) % count


def _shuffled(place: Any, count: int, seed: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Where a random permutation of 0, …, count − 1 takes a place; each is met exactly once.

    The swap-or-not shuffle (Hoang, Morris and Rogaway 2012): a round pairs x with K − x and swaps the two or not by a
    coin that both share. It costs some 200 operations on whole numbers for one place and stores nothing, where a
    permutation would have to be drawn at the beginning of each epoch and carried along.
    """
    x, count = jnp.asarray(place).astype(jnp.uint32), jnp.uint32(count)
    for round in range(ROUNDS):
        total = _hash(seed, 2 * round + 1) % count
        partner = jnp.where(total >= x, total - x, total + count - x)
        coin = _hash(_hash(seed, 2 * round + 2), jnp.maximum(x, partner))
        x = jnp.where(coin >> 31 == 1, partner, x)
    return x


def _hash(a: Any, b: Any) -> UInt32[Array, "..."]:
    """A number that looks random, of two; the last steps of MurmurHash3 (Appleby)."""
    h = (jnp.asarray(a).astype(jnp.uint32) ^ jnp.uint32(0x9E3779B9)) * jnp.uint32(0x85EBCA6B)
    h = h + jnp.asarray(b).astype(jnp.uint32)
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
