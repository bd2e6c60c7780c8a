"""Many tasks: the mean of φ over them, each with a follower of its own."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
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

    def __call__(self, x: PyTree, z: PyTree, *data: Any) -> tuple[Float[Array, ""], Info]:
        count_tasks(data)
        value, each = _mean((x, z, data), self.phi)
        each = jax.lax.stop_gradient(each)
        numbers = {
            name: jnp.mean(getattr(each, name)) for name in ("k_bar", "lower", "residual", "solve_error", "steps")
        }
        return value, each._replace(**numbers, solved=jnp.all(each.solved))

    @compiled
    def each(self, x: PyTree, z: PyTree, *data: Any) -> tuple[Float[Array, " tasks"], Info]:
        """φ of each task by itself, with an axis for the tasks in all that is returned."""
        count_tasks(data)
        return jax.lax.map(lambda task: self.phi(x, z, *task), data, batch_size=tasks_at_once(data))


def count_tasks(data: PyTree) -> int:
    """How many tasks the data hold; refuses data without one common leading axis."""
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(data)}
    if len(counts) != 1 or () in counts or (0,) in counts:
        raise ValueError(
            "tasks need data whose leaves have one common leading axis, the tasks; the first axes are "
            f"{sorted(counts)}."
        )
    return counts.pop()[0]


def tasks_at_once(data: PyTree) -> int:
    """How many tasks are best computed side by side: all on an accelerator, on CPU so few that they stay in cache."""
    leaves = jax.tree.leaves(data)
    count, size = len(leaves[0]), sum(leaf.nbytes for leaf in leaves)
    return count if jax.default_backend() != "cpu" else most_within(AT_ONCE_BYTES, count, size // count)


@eqx.filter_custom_vjp
def _mean(inputs: PyTree, phi: Phi) -> tuple[Array, Info]:
    x, z, data = inputs
    values, each = Tasks(phi).each(x, z, *data)
    return jnp.mean(values), each


@_mean.def_fwd
def _mean_forward(perturbed: PyTree, inputs: PyTree, phi: Phi):
    # As with φ itself, the gradient is computed here: forward and back through few tasks before the next ones begin,
    # which takes the memory of few.
    common, fixed = eqx.partition(inputs[:2], perturbed[:2])
    own, given = eqx.partition(inputs[2], perturbed[2])
    count, few = len(jax.tree.leaves(inputs[2])[0]), tasks_at_once(inputs[2])

    def share(common, own, given):
        x, z = eqx.combine(common, fixed)
        values, each = jax.vmap(lambda *task: phi(x, z, *eqx.combine(*task)))(own, given)
        return jnp.sum(values) / count, each

    def add(total, part):
        (value, each), (common_bar, own_bar) = jax.value_and_grad(share, (0, 1), has_aux=True)(common, *part)
        return jax.tree.map(jnp.add, total, common_bar), (value, each, own_bar)

    parts = jax.tree.map(lambda leaf: leaf.reshape(-1, few, *leaf.shape[1:]), (own, given))
    common_bar, (values, *found) = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, common), parts)
    each, own_bar = jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), found)
    return (jnp.sum(values), each), (*common_bar, own_bar)


@_mean.def_bwd
def _mean_backward(gradients, cotangent, perturbed, inputs, phi):
    return scaled(gradients, cotangent[0], inputs)
