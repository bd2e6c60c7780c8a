"""Many tasks: the mean of φ over them, each with a follower of its own."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, PyTree

from bilax.gradient.phi import Info, Phi, scaled
from bilax.problem.compiled import compiled
from bilax.problem.trees import most_within

AT_ONCE_BYTES = 16 << 10
"""of data that tasks computed side by side on CPU have together at the most"""


class Tasks(eqx.Module):
    """The mean of φ over tasks: leaves of `data` have a leading axis, one entry per task; x and z are shared.

    Each task has a follower of its own, and its own k̄. Of what `info` holds, y and y_last keep the axis, solved
    tells of all tasks, and the numbers are means.
    """

    phi: Phi
    mesh: Mesh | None = eqx.field(static=True, default=None)
    """devices with one axis, among which the tasks are divided; each computes its own"""

    def __call__(self, x: PyTree, z: PyTree, *data: Any) -> tuple[Float[Array, ""], Info]:
        count_tasks(data)
        value, each = _mean((x, z, data), self)
        each = jax.lax.stop_gradient(each)
        numbers = {
            name: jnp.mean(getattr(each, name)) for name in ("k_bar", "lower", "residual", "solve_error", "steps")
        }
        return value, each._replace(**numbers, solved=jnp.all(each.solved))

    @compiled
    def each(self, x: PyTree, z: PyTree, *data: Any) -> tuple[Float[Array, " tasks"], Info]:
        """φ of each task by itself, with an axis for the tasks in all that is returned."""
        count_tasks(data)

        def of_all(shared, data):
            phi, x, z = shared
            return jax.lax.map(lambda task: phi(x, z, *task), data, batch_size=tasks_at_once(data))

        return self.divided(of_all, (self.phi, x, z), data)

    def divided(self, function: Callable[[Any, Any], Any], shared: PyTree, own: PyTree) -> Any:
        """function(shared, own) by each device for its part of `own`; the results are joined along their first axis.

        A program that XLA partitions by itself would go through few tasks at a time of all devices together.
        """
        if self.mesh is None:
            return function(shared, own)
        count, (axis,) = count_tasks(own), self.mesh.axis_names
        if count % self.mesh.size:
            raise ValueError(
                f"the number of tasks must be a multiple of the {self.mesh.size} devices of mesh, got {count}."
            )
        arrays, rest = eqx.partition(shared, eqx.is_array)
        part = PartitionSpec(axis)
        run = jax.shard_map(
            lambda arrays, own: function(eqx.combine(arrays, rest), own),
            mesh=self.mesh,
            in_specs=(PartitionSpec(), part),
            out_specs=part,
            check_vma=False,
        )
        return run(arrays, own)


def count_tasks(data: PyTree) -> int:
    """How many tasks the data hold; refuses data without one common leading axis."""
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(data)}
    if len(counts) != 1 or () in counts or (0,) in counts:
        raise ValueError(
            "tasks need data whose leaves have one common leading axis, the tasks; the first axes are "
            f"{sorted(counts)}."
        )
    return counts.pop()[0]


def first_task(data: PyTree) -> PyTree:
    """The data of the first task."""
    count_tasks(data)
    return jax.tree.map(lambda leaf: leaf[0], data)


def tasks_at_once(data: PyTree) -> int:
    """How many tasks are best computed side by side: all on an accelerator, on CPU so few that they stay in cache."""
    leaves = jax.tree.leaves(data)
    count, size = len(leaves[0]), sum(leaf.nbytes for leaf in leaves)
    return count if jax.default_backend() != "cpu" else most_within(AT_ONCE_BYTES, count, size // count)


@eqx.filter_custom_vjp
def _mean(inputs: PyTree, tasks: Tasks) -> tuple[Array, Info]:
    x, z, data = inputs
    values, each = tasks.each(x, z, *data)
    return jnp.mean(values), each


@_mean.def_fwd
def _mean_forward(perturbed: PyTree, inputs: PyTree, tasks: Tasks):
    # As with φ itself, the gradient is computed here: forward and back through few tasks before the next ones begin,
    # which takes the memory of few.
    common, fixed = eqx.partition(inputs[:2], perturbed[:2])
    own, given = eqx.partition(inputs[2], perturbed[2])
    total = count_tasks(inputs[2])

    def of_all(shared, tasks):
        phi, common, fixed = shared
        count, few = count_tasks(tasks), tasks_at_once(tasks)

        def share(common, own, given):
            x, z = eqx.combine(common, fixed)
            values, each = jax.vmap(lambda *task: phi(x, z, *eqx.combine(*task)))(own, given)
            return jnp.sum(values) / total, each

        def add(sum_so_far, part):
            (value, each), (common_bar, own_bar) = jax.value_and_grad(share, (0, 1), has_aux=True)(common, *part)
            return jax.tree.map(jnp.add, sum_so_far, common_bar), (value, each, own_bar)

        parts = jax.tree.map(lambda leaf: leaf.reshape(-1, few, *leaf.shape[1:]), tasks)
        common_bar, (values, *found) = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, common), parts)
        each, own_bar = jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), found)
        return jax.tree.map(lambda leaf: leaf[None], common_bar), values, each, own_bar

    common_bar, values, each, own_bar = tasks.divided(of_all, (tasks.phi, common, fixed), (own, given))
    common_bar = jax.tree.map(lambda leaf: leaf.sum(axis=0), common_bar)
    return (jnp.sum(values), each), (*common_bar, own_bar)


@_mean.def_bwd
def _mean_backward(gradients, cotangent, perturbed, inputs, tasks):
    return scaled(gradients, cotangent[0], inputs)
