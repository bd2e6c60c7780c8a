"""Networks: shapes, our way to convolve, and normalisation that belongs to the task alone."""

import functools

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import optax
import pytest

import bilax
from bilax.models import ConvNet4, Dense, ResNet12, layers
from bilax.models.layers import Convolution, Normalization, convolve, convolve_on_cpu, max_pool, unpooled
from bilax.models.networks import Block

KEY = jax.random.key(0)


@pytest.mark.parametrize("channels", [3, 9, 50])
@pytest.mark.parametrize("side", [1, 3, 5])
@pytest.mark.parametrize(("axes", "less"), [((0, None), (0, 0)), ((None, 3), (1, 1)), ((1, 0), (0, 1))])
def test_our_way_to_convolve_is_the_convolution_over_tasks(axes, less, side, channels, monkeypatch):
    monkeypatch.setattr(layers, "PART_BYTES", 1)  # one picture at a time
    shapes = (3, 5, 7, channels), (side, side, channels, 4)
    x, kernel = (
        jax.random.normal(KEY, shape if axis is None else (*shape[:axis], 2, *shape[axis:]))
        for shape, axis in zip(shapes, axes, strict=True)
    )

    def value_and_slopes(convolution):
        over_tasks = jax.vmap(functools.partial(convolution, less=less), axes)
        slopes = jax.grad(lambda x, kernel: jnp.sum(over_tasks(x, kernel) ** 3), (0, 1))
        return over_tasks(x, kernel), *slopes(x, kernel)

    for a, b in zip(value_and_slopes(convolve_on_cpu), value_and_slopes(convolve), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("less", [(0, 0), (0, 1)])
@pytest.mark.parametrize("channels", [3, 9, 50])
def test_derivatives_of_a_convolution_are_right_in_any_order_and_mode(channels, less):
    x, kernel = jax.random.normal(KEY, (2, 4, 5, channels)), jax.random.normal(KEY, (3, 3, channels, 2))
    ours, xla = (functools.partial(f, less=less) for f in (convolve_on_cpu, convolve))

    def squared_slope(convolution):
        slopes = jax.grad(lambda x, kernel: jnp.sum(convolution(x, kernel) ** 3), (0, 1))
        return jax.grad(lambda *at: sum(jnp.sum(s**2) for s in slopes(*at)), (0, 1))(x, kernel)

    for a, b in zip(squared_slope(ours), squared_slope(xla), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    jax.test_util.check_grads(jax.jit(ours), (x, kernel), 2, ["fwd", "rev"])
    # XLA's own derivative in the kernel, the slow one, is nowhere among them.
    assert "conv_general_dilated" not in str(jax.make_jaxpr(lambda: squared_slope(ours))())


@pytest.mark.parametrize(("channels", "share"), [(32, 1.0), (64, 0.75)])
def test_wide_convolutions_take_fewer_products_on_cpu(channels, share):
    x, kernel = jnp.zeros((8, 14, 14, channels)), jnp.zeros((3, 3, channels, channels))
    ours, xla = (jax.jit(f).lower(x, kernel).cost_analysis() for f in (convolve_on_cpu, convolve))
    assert ours
    assert xla
    assert ours["flops"] <= share * xla["flops"]


@pytest.mark.parametrize(("platform", "loops"), [("cpu", True), ("cuda", False), ("tpu", False)])
def test_accelerators_are_given_the_convolution_of_xla(platform, loops):
    convolution = Convolution(64, 8, KEY)
    slope = jax.jit(jax.grad(lambda x: jnp.sum(convolution(x) ** 2)))
    program = slope.trace(jnp.zeros((2, 6, 6, 64), jnp.float32)).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.convolution" in program
    assert ("stablehlo.while" in program) == loops


def test_a_network_can_be_the_follower_of_forward_and_implicit_rules():
    x, target = jax.random.normal(KEY, (6, 4, 4, 1)), jax.random.normal(KEY, (6, 1, 1, 2))
    network = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (Block(1, 2, KEY), Block(2, 2, KEY)))

    def said(network):
        first, second = network
        return second(first(x))

    def lower(weight, network):
        decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(network))
        return jnp.mean((said(network) - target) ** 2) + weight * decay

    problem = bilax.Problem(lambda weight, network: jnp.mean((said(network) + target) ** 2), lower)

    def slope(method):
        phi = bilax.approximate(problem, method)
        return jax.jit(jax.grad(lambda weight: phi(weight, network)[0]))(jnp.asarray(1.0))

    # With enough steps (the decay alone makes each a contraction by 0.8) the implicit rule sees the same follower as
    # the one that goes through all of them.
    forward, reverse, implicit = (slope(recipe(80, 0.1)) for recipe in (bilax.fhg, bilax.rhg, bilax.ls))
    np.testing.assert_allclose(forward, reverse, rtol=1e-9)
    np.testing.assert_allclose(implicit, reverse, rtol=1e-4)


def test_few_pictures_at_a_time_give_the_derivative_of_all():
    x = jax.random.normal(KEY, (6, 64, 64, 8))  # 2.4 MB of patches for each
    kernel, slope = jax.random.normal(KEY, (3, 3, 8, 2)), jax.random.normal(KEY, (6, 64, 64, 2))
    ours, xla = (jax.vjp(lambda k, f=f: f(x, k), kernel)[1](slope)[0] for f in (convolve_on_cpu, convolve))
    np.testing.assert_allclose(ours, xla, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("side", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("channels", [9, 50])
@pytest.mark.parametrize("convolution", [convolve, convolve_on_cpu])
def test_what_pooling_leaves_out_need_not_be_computed(convolution, channels, side):
    x, kernel = jax.random.normal(KEY, (2, side, 5, channels)), jax.random.normal(KEY, (3, 3, channels, 4))
    whole, less = convolution(x, kernel), convolution(x, kernel, unpooled(x))
    np.testing.assert_allclose(less, whole[:, : less.shape[1], : less.shape[2]], rtol=1e-12)
    np.testing.assert_allclose(max_pool(less), max_pool(whole), rtol=1e-12)


def test_pooling_takes_the_largest_and_leaves_out_an_odd_edge():
    x = jnp.arange(15.0).reshape(1, 3, 5, 1)
    np.testing.assert_array_equal(max_pool(x)[0, :, :, 0], [[6.0, 8.0]])
    assert max_pool(x[:, :1, :1]).shape == (1, 1, 1, 1)
    assert max_pool(jnp.zeros((0, 4, 4, 3))).shape == (0, 2, 2, 3)
    np.testing.assert_array_equal(max_pool(x[:, :1])[0, :, :, 0], [[1.0, 3.0]])


def test_pooling_passes_the_derivative_to_the_largest_and_to_the_first_of_equals():
    x = jax.random.normal(KEY, (2, 5, 4, 3))
    jax.test_util.check_grads(lambda x: max_pool(jnp.asarray(x)), (x,), 2, ["fwd", "rev"])
    slope = jax.grad(lambda x: jnp.sum(max_pool(x)))(jnp.zeros((1, 2, 2, 1)))
    np.testing.assert_array_equal(slope[0, :, :, 0], [[1.0, 0.0], [0.0, 0.0]])


def test_normalisation_has_mean_zero_and_variance_one_per_channel():
    x = 3 + 2 * jax.random.normal(KEY, (4, 5, 5, 3))
    y = Normalization(3)(x)
    np.testing.assert_allclose(y.mean((0, 1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(y.var((0, 1, 2)), 1, atol=1e-4)


@pytest.mark.parametrize(
    ("network", "shape", "features"),
    [
        (ConvNet4(1, 6, KEY), (28, 28, 1), 6),
        (ConvNet4(3, 2, KEY), (84, 84, 3), 50),
        (ConvNet4(1, 6, KEY), (8, 8, 1), 6),
        (ResNet12(3, 2, KEY), (20, 20, 3), 16),
        (Dense(6, (5, 4), KEY), (2, 3), 4),
    ],
)
def test_networks_give_features_in_single_precision(network, shape, features):
    x = jax.random.normal(KEY, (3, *shape), jnp.float32)
    out = jax.jit(lambda network, x: network(x))(network, x)
    assert out.shape == (3, features)
    assert out.dtype == jnp.float32
    assert np.isfinite(out).all()
    assert np.std(out) > 0


def test_a_task_is_normalised_by_its_own_pictures():
    model = ConvNet4(1, 3, KEY)
    network = jax.jit(lambda x: model(x))
    scale = jnp.array([1.0, 9.0], jnp.float32).reshape(2, 1, 1, 1, 1)
    tasks = scale * jax.random.normal(KEY, (2, 4, 8, 8, 1), jnp.float32)
    together = jax.vmap(network)(tasks)
    np.testing.assert_allclose(together[1], network(tasks[1]), atol=1e-4)
    assert not np.allclose(network(tasks.reshape(8, 8, 8, 1))[4:], together[1], atol=1e-2)


def test_the_gradient_over_tasks_is_that_of_a_loop():
    # With jnp.max in the pooling, compiled gradients over tasks went wrong: see max_pool.
    model = jax.tree.map(lambda leaf: leaf.astype(float), ConvNet4(1, 2, KEY))
    tasks = jax.random.normal(KEY, (2, 9, 4, 4, 1))
    together = jax.jit(jax.grad(lambda model: jnp.sum(jnp.sin(jax.vmap(model)(tasks)))))(model)
    one = jax.jit(jax.grad(lambda model, x: jnp.sum(jnp.sin(model(x)))))
    apart = jax.tree.map(jnp.add, one(model, tasks[0]), one(model, tasks[1]))
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


def test_a_module_of_flax_is_varied_by_its_state():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    inputs = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    graph, y0 = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))

    def lower(x, y):
        return jnp.mean((nnx.merge(graph, y)(inputs)[:, 0] - x * inputs[:, 0]) ** 2)

    problem = bilax.Problem(lambda x, y: lower(2.0, y), lower)
    method = bilax.rhg(20, 0.1, start="warm")
    # As where double precision is off: a module's weights are single.
    x0 = np.ones((), np.float32)
    solution = bilax.solve(problem, method, x0, y0, steps=60, optimizer=optax.adam(0.1))
    np.testing.assert_allclose(solution.x, 2.0, atol=0.1)
    np.testing.assert_allclose(nnx.merge(graph, solution.y).kernel[...].ravel(), [solution.x, 0, 0], atol=0.01)
