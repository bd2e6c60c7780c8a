"""A program that `test_devices.py` starts with four devices: the same runs on one, two and four of them.

It prints, as JSON, by how much the solutions differ, relative to the one device's.
"""

import json
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import bilax

ROWS, FEATURES, CLASSES, TASKS = 32, 5, 3, 8
RNG = np.random.default_rng(0)


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


TRAIN = floats(ROWS, FEATURES), RNG.integers(0, CLASSES, ROWS), np.arange(ROWS)
VALID = floats(ROWS // 2, FEATURES), RNG.integers(0, CLASSES, ROWS // 2)
EPISODES = floats(TASKS, 12, FEATURES), floats(TASKS, 12)
NETWORKS, WEIGHTS = floats(4, FEATURES, CLASSES), np.zeros(ROWS, np.float32)


def loss(y, inputs, labels):
    return optax.softmax_cross_entropy_with_integer_labels(inputs @ y, labels)


def upper(x, y, valid, train):
    return loss(y, *valid).mean()


def lower(x, y, valid, train):
    inputs, labels, rows = train
    weights = x if len(rows) == ROWS else x[rows]
    return (jax.nn.sigmoid(weights) * loss(y, inputs, labels)).mean() + 1e-2 * jnp.sum(y**2)


CLEANING = bilax.Problem(upper, lower)
FEW_SHOT = bilax.Problem(
    lambda x, y, inputs, targets: jnp.mean((inputs @ (x + y) - targets) ** 2),
    lambda x, y, inputs, targets: jnp.mean((inputs[:6] @ (x + y) - targets[:6]) ** 2) + jnp.sum(y**2),
)
ADAM = optax.adam(0.1)


def cleaning(mesh, steps=20, data=(VALID, TRAIN), **more):
    method = bilax.iaptt_gm(10, 0.5)
    return bilax.solve(
        CLEANING, method, WEIGHTS, NETWORKS[0], steps=steps, optimizer=ADAM, data=data, mesh=mesh, **more
    )


def few_shot(mesh):
    method, start = bilax.iaptt_gm(5, 0.05), np.zeros(FEATURES, np.float32)
    return bilax.solve(FEW_SHOT, method, start, start, steps=20, optimizer=ADAM, data=EPISODES, tasks=True, mesh=mesh)


def mini_batches(mesh, steps=20, **more):
    data = bilax.Minibatches(VALID, TRAIN, 8)
    return bilax.solve(CLEANING, bilax.soba(0.1, 0.1), WEIGHTS, NETWORKS[0], steps=steps, data=data, mesh=mesh, **more)


def streamed(mesh):
    data = [(VALID, tuple(leaf[i : i + 8] for leaf in TRAIN)) for i in range(20)]
    return bilax.solve(CLEANING, bilax.soba(0.1, 0.1), WEIGHTS, NETWORKS[0], steps=20, data=data, mesh=mesh)


def many_starts(mesh):
    x0s = np.zeros((4, ROWS), np.float32)
    data = VALID, TRAIN
    return bilax.multistart(CLEANING, bilax.rhg(5, 0.5), x0s, NETWORKS, steps=20, optimizer=ADAM, data=data, mesh=mesh)


def devices(count):
    return jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])


def apart(found, expected):
    """The largest difference of x, y and z, relative to the largest of their entries."""
    pairs = zip(*(jax.tree.leaves((one.x, one.y, one.z)) for one in (found, expected)), strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs)


def resumed_elsewhere():
    """Half the steps on four devices, some on two, the others on the one that JAX chooses."""
    with tempfile.TemporaryDirectory() as folder:
        saving = bilax.Saving(folder, every_steps=10)
        cleaning(devices(4), steps=10, saving=saving)
        cleaning(devices(2), steps=15, saving=saving, resume=True)
        return cleaning(None, saving=saving, resume=True)


def batches_elsewhere():
    """The same with mini-batches, which are dealt to the devices."""
    with tempfile.TemporaryDirectory() as folder:
        saving = bilax.Saving(folder)
        mini_batches(devices(4), steps=10, saving=saving)
        return mini_batches(devices(2), saving=saving, resume=True)


def lies_along(mesh):
    """Where x lies between two chunks."""
    seen = []
    cleaning(mesh, steps=2, callbacks=[lambda state, history: seen.append(state.x.sharding)])
    return seen[0].is_equivalent_to(NamedSharding(mesh, PartitionSpec("data")), 1)


def refused(call):
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return "taken"


def own_part(tree, mesh):
    """Arrays of which this process has given its own rows alone."""
    which, among = jax.process_index(), jax.process_count()
    parts = jax.tree.map(lambda leaf: np.split(leaf, among)[which], tree)
    place = NamedSharding(mesh, PartitionSpec("data"))
    return jax.tree.map(lambda part: jax.make_array_from_process_local_data(place, part), parts)


def as_a_process(address, number, folder):
    """One of two processes; the first prints how far they are from one device."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, int(number))
    mesh = jax.make_mesh((2,), ("data",))
    together = cleaning(mesh, steps=10, saving=bilax.Saving(folder), data=own_part((VALID, TRAIN), mesh))
    together = cleaning(mesh, saving=bilax.Saving(folder), resume=True)
    if jax.process_index() == 0:
        print(apart(together, cleaning(None)), together.steps)
    else:
        by_itself(folder, together, mesh)


def by_itself(folder, together, mesh):
    """Runs of the second process, while the first is elsewhere; what it finds is printed."""
    saving, lines = bilax.Saving(f"{folder}-own", every_steps=10), bilax.JsonLines(f"{folder}-lines", every=10)
    cleaning(None, steps=10, saving=saving, callbacks=[lines])
    own = cleaning(None, saving=saving, callbacks=[lines], resume=True, progress=True)
    foreign = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    found = {
        "apart": apart(together, own),
        "lines": len(lines.path.read_text().splitlines()),
        "another's device": refused(lambda: cleaning(foreign)),
        "auto": refused(lambda: bilax.solve(CLEANING, bilax.auto(), WEIGHTS, NETWORKS[0], mesh=mesh)),
    }
    print(json.dumps(found))


def main():
    one = {run.__name__: run(None) for run in (cleaning, few_shot, mini_batches, many_starts)}
    streamed_one = streamed(None)
    print(
        json.dumps(
            {
                "cleaning": apart(cleaning(devices(4)), one["cleaning"]),
                "few_shot": apart(few_shot(devices(4)), one["few_shot"]),
                "mini_batches": apart(mini_batches(devices(4)), one["mini_batches"]),
                "many_starts": apart(many_starts(devices(4)), one["many_starts"]),
                "streamed": apart(streamed(devices(2)), streamed_one),
                "resumed_elsewhere": apart(resumed_elsewhere(), one["cleaning"]),
                "batches_elsewhere": apart(batches_elsewhere(), one["mini_batches"]),
                "x is cut": lies_along(devices(4)),
                "three devices": refused(lambda: cleaning(devices(3))),
                "three devices, batches": refused(lambda: mini_batches(devices(3))),
                "three devices, tasks": refused(lambda: few_shot(devices(3))),
                "no mesh": refused(lambda: cleaning(4)),
                "two axes": refused(lambda: cleaning(jax.make_mesh((2, 2), ("data", "model")))),
            }
        )
    )


if __name__ == "__main__":
    sys.exit(as_a_process(*sys.argv[1:]) if len(sys.argv) > 1 else main())
