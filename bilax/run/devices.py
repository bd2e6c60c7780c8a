"""Many devices: where the arrays of a run lie. The compiler does the rest.

A mesh has one axis. Along it lie, cut at their first axis, the examples (or tasks) of the data and the variables that
have as many rows as those, such as a weight for each example; in `multistart` the starts, where their number allows it.
All else is on every device. The program is the one that a single device runs: XLA partitions it by where its arguments
lie.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from bilax.problem.minibatches import LEVELS, Minibatches
from bilax.problem.trees import is_key
from bilax.run.data import Batches


class Devices(NamedTuple):
    """The devices of a run, and what is cut along them."""

    mesh: Mesh
    starts: bool = False
    """whether the starts are, and not the examples"""

    @classmethod
    def of(cls, mesh: Any, starts: int | None) -> "Devices":
        """Checks a user's mesh; `starts` is how many there are, None where there is one."""
        if not isinstance(mesh, Mesh):
            raise TypeError(f'mesh must be a mesh such as jax.make_mesh((4,), ("data",)), got {mesh!r}.')
        if len(mesh.axis_names) != 1:
            raise ValueError(
                f"mesh must have one axis, along which examples, tasks or starts are cut; this one has "
                f'{mesh.axis_names}. Write jax.make_mesh(({mesh.size},), ("data",)).'
            )
        processes = {device.process_index for device in mesh.devices.flat}
        if mesh.is_multi_process and len(processes) < jax.process_count():
            raise ValueError(
                f"mesh has devices of processes {sorted(processes)}; it must have those of all {jax.process_count()}, "
                f"as jax.devices(), or of this one ({jax.process_index()}) alone, as jax.local_devices()."
            )
        # `jax.make_mesh` gives axes whose shardings the user's functions would have to spell out.
        return cls(Mesh(mesh.devices, mesh.axis_names), starts is not None and starts % mesh.size == 0)

    @property
    def number(self) -> int:
        """How many there are."""
        return self.mesh.size

    @property
    def axis(self) -> str:
        """The mesh's."""
        return self.mesh.axis_names[0]

    def cut(self, axis: int | None) -> NamedSharding:
        """Along an array's axis; None for a copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, self.axis))

    def everywhere(self, tree: PyTree) -> PyTree:
        """The tree with all its arrays on every device."""
        return jax.tree.map(lambda leaf: put(leaf, self.cut(None)) if eqx.is_array(leaf) else leaf, tree)

    def variables(self, tree: PyTree, sizes: set[int], many: bool) -> PyTree:
        """x or y: by the starts, or with the examples whose number is among `sizes`; else everywhere."""

        def place(leaf):
            if self.starts:
                return put(leaf, self.cut(0))
            shape = np.shape(leaf)
            return put(leaf, self.cut(int(many) if shape[many : many + 1] and shape[many] in sizes else None))

        return jax.tree.map(place, tree)

    def data(self, data: PyTree, starts: PyTree, put: Callable[[Any, NamedSharding], Any], before: int = 0) -> PyTree:
        """The tuple that the objectives get; `starts` as `data_axes` of `multistart`, `before` axes to leave alone.

        Refuses what would be wholly on every device: then nothing is gained.
        """
        leaves, structure = jax.tree.flatten(data)
        starts = jax.tree.map(lambda axis: -1 if axis is None else axis, starts, is_leaf=lambda axis: axis is None)
        own = jax.tree.leaves(jax.tree.broadcast(starts, data))
        number = len(self.mesh.local_devices) if put is put_own_part else self.number
        axes = [self._axis(np.shape(leaf)[before:], start, number) for leaf, start in zip(leaves, own, strict=True)]
        if not self.starts and all(axis is None for axis in axes) and not any(map(spread_already, leaves)):
            shapes = [np.shape(leaf)[before:] for leaf in leaves]
            raise ValueError(
                f"mesh has {self.number} devices, but no array of the data has a first axis that is a multiple of "
                f"{self.number}: their shapes are {shapes}. Leave out a few examples, or take other devices."
            )
        places = [self.cut(None if axis is None else before + axis) for axis in axes]
        return jax.tree.unflatten(structure, map(put, leaves, places))

    def _axis(self, shape: tuple[int, ...], start: int, number: int) -> int | None:
        """Which axis of an array of the data is cut in `number`; `start` is that of the starts, -1 if it has none."""
        if self.starts:
            return None if start < 0 else start
        first = int(start == 0)
        return first if len(shape) > first and shape[first] and shape[first] % number == 0 else None

    def source(self, data: Any, starts: PyTree) -> Any:
        """What each step's data come from: a tuple, `Minibatches` or a function; `Batches` stay as they are."""
        if isinstance(data, Batches):
            return data
        if isinstance(data, Minibatches):
            return self._minibatches(data)
        if callable(data):
            return _Spread(self.everywhere(data), self, starts)
        return self.data(data, starts, put)

    def _minibatches(self, given: Minibatches) -> Minibatches:
        if self.starts:
            return self.everywhere(given)
        dealt = [getattr(given, level).dealt(level, self.number) for level in LEVELS]
        placed = jax.tree.map(lambda leaf: put(leaf, self.cut(0)), dealt)
        return eqx.tree_at(lambda given: [getattr(given, level) for level in LEVELS], given, placed)


def examples(data: Any) -> set[int]:
    """How long the axes are along which the arrays of a tuple are cut."""
    if not isinstance(data, tuple) or isinstance(data, Batches):
        return set()
    cut = [leaf for leaf in jax.tree.leaves(data) if spread_already(leaf)]
    specs = [(leaf.shape, getattr(leaf.sharding, "spec", ())) for leaf in cut]
    return {size for shape, spec in specs for size, axis in zip(shape, spec, strict=False) if axis is not None}


def put(leaf: Any, sharding: NamedSharding) -> Any:
    """An array in its place; one that its owner has already spread over several devices stays as it is."""
    if spread_already(leaf):
        if leaf.sharding.device_set != sharding.device_set:
            raise ValueError(
                f"an array of shape {leaf.shape} lies on {len(leaf.sharding.device_set)} devices that are not the "
                f"mesh's {len(sharding.device_set)}. Place it by NamedSharding(mesh, ...) with the same mesh."
            )
        return _partitioned_by_the_compiler(leaf)
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if is_key(leaf):
        numbers = put(np.asarray(jax.random.key_data(leaf)), sharding)
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(leaf))
    array = np.asarray(leaf, jnp.result_type(leaf))
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def _partitioned_by_the_compiler(leaf: jax.Array) -> jax.Array:
    """The same array in the same place, on a mesh that asks nothing of the functions that use it; see `Devices.of`."""
    own = leaf.sharding
    if not isinstance(own, NamedSharding):
        return leaf
    place = NamedSharding(Mesh(own.mesh.devices, own.mesh.axis_names), own.spec)  # pyright: ignore
    return jax.make_array_from_single_device_arrays(leaf.shape, place, [part.data for part in leaf.addressable_shards])


def put_own_part(leaf: Any, sharding: NamedSharding) -> Any:
    """As `put`, of an array of which each process has a part of its own where it is cut: what it has read."""
    if sharding.is_fully_addressable:
        return put(leaf, sharding)
    return jax.make_array_from_process_local_data(sharding, np.asarray(leaf, jnp.result_type(leaf)))


def spread_already(leaf: Any) -> bool:
    """Whether it is an array on several devices."""
    return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1


class _Spread(eqx.Module):
    """A function (step, key) -> data whose examples are cut along the devices as soon as they are there."""

    function: Callable[..., tuple[Any, ...]]
    devices: Devices = eqx.field(static=True)
    axes: Any = eqx.field(static=True)

    def __call__(self, step: Any, key: Any) -> tuple[Any, ...]:
        return self.devices.data(self.function(step, key), self.axes, jax.lax.with_sharding_constraint)
