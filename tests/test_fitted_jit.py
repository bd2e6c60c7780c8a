"""How a program is compiled follows from what it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilax.problem import fitted_jit
from bilax.problem.fitted_jit import arithmetic


def counted(function, *arguments):
    return arithmetic(jax.make_jaxpr(function)(*arguments).jaxpr)


VECTOR, MATRIX = jnp.ones(100), jnp.ones((20, 30))


@pytest.mark.parametrize(
    ("function", "arguments", "elements", "products"),
    [
        pytest.param(lambda v: v * v + 1.0, (VECTOR,), 200, 0, id="two operations on each element"),
        pytest.param(lambda v: jnp.sin(v) ** 2, (VECTOR[:64],), 0, 0, id="small"),
        pytest.param(lambda v: v[::-1].reshape(10, 10).T, (VECTOR,), 0, 0, id="moved"),
        pytest.param(lambda v: v.at[3].set(1.0), (VECTOR,), 0, 0, id="one element written"),
        pytest.param(jnp.matmul, (MATRIX, MATRIX.T), 0, 2 * 20 * 30 * 20, id="matrices"),
        pytest.param(jax.jit(lambda v: v + 1.0), (VECTOR,), 100, 0, id="inside"),
        pytest.param(
            lambda v: jax.lax.fori_loop(0, 7, lambda _, a: a * 0.5, v), (VECTOR,), 700, 0, id="in a loop of 7 turns"
        ),
        pytest.param(
            lambda v: jax.lax.while_loop(lambda a: a[0] > 1.0, lambda a: a * 0.5, v),
            (VECTOR,),
            1000,
            0,
            id="in a loop with a condition",
        ),
        pytest.param(
            lambda a, b: jax.lax.conv(a, b, (1, 1), "VALID"),
            (jnp.ones((2, 3, 8, 8)), jnp.ones((5, 3, 3, 3))),
            0,
            2 * (2 * 5 * 6 * 6) * (3 * 3 * 3),
            id="convolution",
        ),
    ],
)
def test_arithmetic(function, arguments, elements, products):
    assert counted(function, *arguments) == (elements, products)


@pytest.mark.parametrize(
    ("function", "argument", "plainly"),
    [
        (lambda v: jnp.sin(v) * v, VECTOR[:3], True),
        (lambda v: jnp.sin(v) * v, VECTOR, False),
        (lambda v: jnp.tanh(v @ v.T), jnp.ones((100, 100)), True),
        (lambda v: jnp.tanh(v @ v[0]), jnp.ones((100, 10)), False),
    ],
    ids=["small", "elements", "matrices", "a matrix and a vector"],
)
def test_vectors_are_made_where_elements_take_the_time(monkeypatch, function, argument, plainly):
    traces = []

    def traced(v):
        traces.append(v)
        return function(v)

    expected = function(argument)
    np.testing.assert_allclose(fitted_jit.fitted_jit(traced)(argument), expected, rtol=1e-5)
    assert len(traces) == 1  # to look at a program does not trace it again
    monkeypatch.setattr(fitted_jit, "known", lambda **_: {"compiler_options": {"xla_no_such_option": True}})
    program = fitted_jit.fitted_jit(function)
    if plainly:
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            program(argument)
    else:
        np.testing.assert_allclose(program(argument), expected, rtol=1e-5)


def test_options_that_xla_does_not_know_are_left_out():
    assert fitted_jit.known(xla_no_such_option=True) == {}
    assert fitted_jit.known(xla_cpu_use_fusion_emitters=False)
