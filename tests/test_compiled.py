"""Compiled programs: equal arguments share one, others do not, and none is kept for ever."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilax
from bilax.problem import compiled

MAPS = Path("/proc/self/maps")


def lower(x, y):
    return jnp.sum((y - x) ** 2)


def upper(x, y):
    return jnp.sum((y - 1.0) ** 2)


def solve(problem, method=None, **options):
    return bilax.solve(problem, method or bilax.rhg(3, 0.1), 0.5, 0.0, steps=4, **options)


@pytest.mark.skipif(not MAPS.exists(), reason="Linux tells how many memory maps there are")
@pytest.mark.parametrize("options", [{}, {"time_limit": 100.0}], ids=["whole", "in chunks"])
def test_programs_of_dropped_objectives_are_freed(monkeypatch, options):
    monkeypatch.setattr(compiled, "KEPT", 2)
    maps = []
    for i in range(8):
        solve(bilax.Problem(lambda x, y, i=i: jnp.sum((y - i) ** 2), lower), **options)
        maps.append(MAPS.read_bytes().count(b"\n"))
    assert maps[-1] - maps[2] < 100, maps


@pytest.mark.parametrize(
    "again",
    [
        lambda: {"optimizer": optax.adam(0.1)},
        lambda: {"optimizer": optax.chain(optax.clip(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 9)))},
        lambda: {"optimizer": optax.masked(optax.sgd(0.1, momentum=0.9), True), "z_optimizer": optax.sgd(0.2)},
        lambda: {"method": bilax.iaptt_gm(3, 0.1)},
        lambda: {"method": bilax.bda(3, 0.1, mu=0.4)},
        lambda: {"method": bilax.penalty(2, 0.1)},
        lambda: {"time_limit": 100.0, "optimizer": optax.adam(0.1)},
    ],
)
def test_equal_optimisers_methods_and_problems_share_a_program(again, caplog):
    with jax.log_compiles():
        first = solve(bilax.Problem(upper, lower, y_set=bilax.Box(-1.0, 2.0)), **again())
        assert "Compiling jit" in caplog.text
        caplog.clear()
        second = solve(bilax.Problem(upper, lower, y_set=bilax.Box(-1.0, 2.0)), **again())
    assert "Compiling jit" not in caplog.text
    np.testing.assert_array_equal(first.x, second.x)


def test_other_numbers_make_another_program():
    problem = bilax.Problem(upper, lower)
    rates = [0.1, 0.2]
    slow, fast = (solve(problem, optimizer=optax.sgd(rate)).x for rate in rates)
    # y_3 = x + (y_0 − x) 0.8³, and F falls along its derivative: x moves ever faster with the rate.
    share = 1 - 0.8**3
    for rate, found in zip(rates, (slow, fast), strict=True):
        x = 0.5
        for _ in range(4):
            x -= rate * 2 * (x * share - 1) * share
        assert found == pytest.approx(x, rel=1e-5)


def test_a_new_function_that_reads_a_changed_variable_is_compiled_anew():
    def end(target):
        variables = {"jnp": jnp, "target": target}
        exec("def leader(x, y): return jnp.sum((y - target) ** 2)", variables)
        return solve(bilax.Problem(variables["leader"], lower), optimizer=optax.sgd(0.5)).x

    assert end(1.0) > 0 > end(-1.0)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        (functools.partial(lower, 1), functools.partial(lower, 1), True),
        (functools.partial(lower, 1), functools.partial(lower, 2), False),
        (functools.partial(lower, x=[1]), functools.partial(lower, x=[1]), True),
        ([np.zeros(1)].append, lower, False),
        (optax.sgd(0.1).update, optax.sgd(0.1).update, True),
        (optax.sgd(0.1).update, optax.sgd(0.3).update, False),
        (optax.sgd(lambda step: 0.1).update, optax.sgd(lambda step: 0.1).update, False),
    ],
)
def test_what_counts_as_equal(one, other, equal):
    calls = []
    function = compiled.compiled(lambda thing, x: calls.append(thing) or x)
    for thing in (one, other, one):
        function(thing, jnp.ones(()))
    assert len(calls) == (1 if equal else 2)


def test_what_is_no_array_passes_through():
    @compiled.compiled
    def function(x, *, name):
        return {"twice": 2 * x, "name": name, "call": lower}

    found = function(jnp.ones(2), name="a")
    assert (found["name"], found["call"]) == ("a", lower)
    np.testing.assert_array_equal(found["twice"], [2.0, 2.0])
