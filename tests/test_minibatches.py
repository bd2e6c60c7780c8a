"""Mini-batches on the device: epochs without replacement, the same after a break, another order for each start."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilax
from bilax.problem.minibatches import _shuffled

ROWS = np.arange(23.0)
DATA = bilax.Minibatches((ROWS,), (10 * ROWS, ROWS.astype(int)), (5, 4))


@functools.partial(jax.jit, static_argnames="ahead")
def rows_of(steps, start=0, data=DATA, ahead=None):
    """What two draws of each level see at every step: F's rows, and f's; found `ahead` of so many steps if given."""
    first = bilax.Draws(data, steps[0], jax.random.key(3), (2, 2), start)
    first = first if ahead is None else first.ahead(ahead)

    def at(step):
        draws = first.later(step - steps[0])
        upper = jnp.stack([draws.upper(i)[0][0] for i in range(2)])
        return upper, jnp.stack([draws.lower(i)[1][1] for i in range(2)])

    return jax.vmap(at)(steps)


def test_every_epoch_has_each_row_once_at_the_most_and_all_rows_have_their_turn():
    upper, lower = (np.asarray(rows) for rows in rows_of(jnp.arange(200)))
    assert upper.shape == (200, 2, 5)
    for rows, blocks in ((upper, 4), (lower, 5)):
        epochs = rows.reshape(-1, blocks, rows.shape[-1])
        assert all(len(np.unique(epoch)) == epoch.size for epoch in epochs)
        orders = {tuple(epoch[:, 0]) for epoch in epochs}
        assert len(orders) > 0.7 * len(epochs)
        counts = np.bincount(rows.astype(int).ravel(), minlength=23)
        assert counts.min() > 0.75 * counts.mean()


def test_the_shuffle_is_a_permutation_and_looks_like_any_other():
    for count in (1, 2, 7, 64):
        places, seeds = jnp.arange(count), jnp.arange(2000, dtype=jnp.uint32)[:, None]
        order = np.asarray(jax.jit(_shuffled, static_argnums=1)(places, count, seeds)).astype(int)
        assert (np.sort(order) == np.arange(count)).all()
        if count >= 7:  # each place to each other, and the next block anywhere, with the same probability
            first = np.bincount(order[:, 0], minlength=count)
            gaps = np.bincount((order[:, 1] - order[:, 0]) % count, minlength=count)[1:]
            for seen in (first, gaps):
                expected = seen.mean()
                assert ((seen - expected) ** 2 / expected).sum() < len(seen) + 5 * np.sqrt(2 * len(seen))


def test_places_found_ahead_are_the_same():
    steps = jnp.arange(7, 19)
    for one, other in zip(rows_of(steps, ahead=12), rows_of(steps), strict=True):
        np.testing.assert_array_equal(one, other)


def test_starts_have_orders_of_their_own_and_steps_far_on_do_not_overflow():
    own = [np.asarray(rows_of(jnp.arange(20), start)[1]) for start in (0, 1)]
    assert (own[0] != own[1]).any()
    far = np.asarray(rows_of(jnp.arange(2**31 - 3, 2**31, dtype=jnp.int32))[1])
    assert ((far >= 0) & (far < 23)).all()


def mean_square(x, y, upper_batch, lower_batch):
    return jnp.mean((y - upper_batch[0]) ** 2) + 0.1 * x**2


def toward(x, y, upper_batch, lower_batch):
    return 0.5 * jnp.mean((y - x - 0.1 * lower_batch[0]) ** 2)


PROBLEM = bilax.Problem(mean_square, toward)


def run(data: Any = DATA, steps=40, method=None, **options):
    method = method or bilax.soba(0.1, 0.05)
    start = jnp.asarray(0.5), jnp.asarray(1.0)
    return bilax.solve(PROBLEM, method, *start, data=data, steps=steps, callbacks=[lambda *_: None], **options)


def test_a_run_that_was_stopped_goes_on_with_the_batch_that_is_next(tmp_path):
    class Stop:
        every = 14

        def __call__(self, state, history):
            return True

    for n in (1, 7):
        whole = run(steps=42, record_every=n)
        folder = tmp_path / str(n)
        saving = bilax.Saving(folder, every_steps=7)
        options = {"data": DATA, "steps": 42, "saving": saving, "record_every": n}
        part = bilax.solve(
            PROBLEM, bilax.soba(0.1, 0.05), jnp.asarray(0.5), jnp.asarray(1.0), callbacks=[Stop()], **options
        )
        assert part.steps == 14
        resumed = run(steps=42, saving=saving, resume=True, record_every=n)
        jax.tree.map(
            np.testing.assert_array_equal, (resumed.x, resumed.y, resumed.history), (whole.x, whole.y, whole.history)
        )


def test_thinned_history_is_that_of_a_full_run():
    every, seventh = run(steps=42), run(steps=42, record_every=7)
    np.testing.assert_allclose(seventh.history.upper, every.history.upper[::7], rtol=1e-12)
    np.testing.assert_allclose((seventh.x, seventh.y), (every.x, every.y), rtol=1e-12)
    assert seventh.steps == 42
    assert len(seventh.history.upper) == 6


def test_many_starts_are_single_runs_with_orders_of_their_own():
    starts = jnp.full(3, 0.5), jnp.full(3, 1.0)
    many = bilax.multistart(PROBLEM, bilax.soba(0.1, 0.05), *starts, data=DATA, steps=40)
    assert len(np.unique(many.x)) == 3
    np.testing.assert_allclose(many[0].x, run().x, rtol=1e-12)


def test_without_a_size_the_objectives_get_all_rows():
    whole = run(data=bilax.Minibatches((ROWS,), (10 * ROWS,), None))
    np.testing.assert_allclose(whole.x, run(data=((ROWS,), (10 * ROWS,))).x, rtol=1e-12)


def test_wrong_minibatches_say_what_is_wrong():
    with pytest.raises(ValueError, match="from 1 to the 23 rows of upper"):
        bilax.Minibatches(ROWS, ROWS, 24)
    with pytest.raises(ValueError, match="one example per row"):
        bilax.Minibatches((ROWS, ROWS[:3]), ROWS, 2)
    with pytest.raises(ValueError, match="pair"):
        bilax.Minibatches(ROWS, ROWS, (2, 3, 4))
    with pytest.raises(ValueError, match="multiple"):
        run(steps=41, record_every=2)
    with pytest.raises(ValueError, match="record_every"):
        run(record_every=0)
    with pytest.raises(ValueError, match="x_rate must be a positive number"):
        bilax.soba(0.1, -1.0)
    bounded = bilax.Problem(mean_square, toward, y_set=bilax.Box(0.0, 1.0))
    with pytest.raises(ValueError, match="follower without bounds"):
        bilax.solve(bounded, bilax.soba(0.1, 0.1), jnp.zeros(()), jnp.zeros(()), data=DATA)
