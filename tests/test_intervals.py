"""Interval arithmetic against arithmetic of many digits, and jets against JAX's own derivatives.

BILAX_POINTS sets how many points and boxes every function is tried on; a million takes some minutes.
"""

import os

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from bilax.trust import interval as iv
from bilax.trust.interval import Interval
from bilax.trust.interval_rules import NotSupportedError, Traced

POINTS = int(os.environ.get("BILAX_POINTS", "30000"))
mpmath.mp.prec = 200  # pyright: ignore[reportAttributeAccessIssue]
m = mpmath.mpf


def near(*centres):
    """Numbers of every size, and some very near to where the function has a zero, a turn or an end."""

    def draw(rng, count):
        wide = rng.choice([-1, 1], count) * 10.0 ** rng.uniform(-12, 3, count)
        close = rng.choice(centres, count) * (1 + rng.choice([-1, 1], count) * 10.0 ** rng.uniform(-16, -1, count))
        return np.where(rng.random(count) < 0.5, wide, close)

    return draw


def between(lo, hi, *centres):
    def draw(rng, count):
        return np.clip(
            np.where(rng.random(count) < 0.5, rng.uniform(lo, hi, count), near(*centres)(rng, count)), lo, hi
        )

    return draw


PI = np.pi
FUNCTIONS = {
    "exp": (iv.exp, mpmath.exp, between(-700, 700, 0.0, 1.0)),
    "expm1": (iv.expm1, mpmath.expm1, between(-700, 700, 0.0, 1e-9)),
    "exp2": (iv.exp2, lambda v: m(2) ** v, between(-900, 900, 0.0, 1.0)),
    "log": (iv.log, mpmath.log, between(1e-300, 1e300, 1.0, 2.0)),
    "log1p": (iv.log1p, mpmath.log1p, between(-1 + 1e-15, 1e300, 1e-9, -0.5)),
    "sqrt": (iv.sqrt, mpmath.sqrt, between(0, 1e300, 1.0)),
    "cbrt": (iv.cbrt, lambda v: mpmath.sign(v) * mpmath.cbrt(abs(v)), near(1.0)),
    "sin": (iv.sin, mpmath.sin, near(PI, PI / 2, 3 * PI, 1e5 * PI, 1e7)),
    "cos": (iv.cos, mpmath.cos, near(PI / 2, PI, 5 * PI / 2, 1e5 * PI)),
    "tan": (iv.tan, mpmath.tan, near(PI, PI / 2, 1.0)),
    "sinh": (iv.sinh, mpmath.sinh, between(-700, 700, 1e-9)),
    "cosh": (iv.cosh, mpmath.cosh, between(-700, 700, 1e-9)),
    "tanh": (iv.tanh, mpmath.tanh, near(1e-9, 19.0)),
    "atan": (iv.atan, mpmath.atan, near(1.0)),
    "asinh": (iv.asinh, mpmath.asinh, near(1.0)),
    "asin": (iv.asin, mpmath.asin, between(-1, 1, 1.0, -1.0)),
    "acos": (iv.acos, mpmath.acos, between(-1, 1, 1.0, -1.0)),
    "acosh": (iv.acosh, mpmath.acosh, between(1, 1e300, 1.0)),
    "atanh": (iv.atanh, mpmath.atanh, between(-1 + 1e-16, 1 - 1e-16, 1.0, -1.0)),
    "erf": (iv.erf, mpmath.erf, near(1e-9, 2.0)),
    "erfc": (iv.erfc, mpmath.erfc, between(-10, 26, 1.0, 5.0)),
    "lgamma": (iv.lgamma, mpmath.loggamma, between(1e-3, 1e4, 1.0, 2.0, 1.4616321449683623)),
    "lgamma_slope": (iv.lgamma_slope, mpmath.digamma, between(1e-3, 1e4, 1.4616321449683623)),
    "lgamma_bend": (iv.lgamma_bend, lambda v: mpmath.zeta(2, v), between(1e-3, 30, 1.0)),
    "logistic": (iv.logistic, lambda v: 1 / (1 + mpmath.exp(-v)), between(-700, 700, 0.0)),
    "softplus": (iv.softplus, lambda v: mpmath.log1p(mpmath.exp(v)), between(-700, 700, 0.0)),
    "logistic_slope": (
        iv.logistic_slope,
        lambda v: mpmath.exp(-abs(v)) / (1 + mpmath.exp(-abs(v))) ** 2,
        between(-700, 700, 0.0),
    ),
    "x_log_x": (iv.x_log_x, lambda v: v * mpmath.log(v) if v else m(0), between(0, 1e6, 1 / np.e, 1.0)),
    "square": (iv.square, lambda v: v**2, near(1.0)),
    "reciprocal": (iv.reciprocal, lambda v: 1 / v, near(1.0)),
    "absolute": (iv.absolute, abs, near(1.0)),
    "power 3": (lambda a: iv.power(a, 3), lambda v: v**3, near(1.0)),
    "power 50": (lambda a: iv.power(a, 50), lambda v: v**50, between(-1e6, 1e6, 1.0)),
    "power -7": (lambda a: iv.power(a, -7), lambda v: v**-7, near(1.0)),
    "power 2.5": (lambda a: iv.real_power(a, np.asarray(2.5)), lambda v: v ** m(2.5), between(0, 1e100, 1.0)),
    "power -0.3": (lambda a: iv.real_power(a, np.asarray(-0.3)), lambda v: v ** m(-0.3), between(1e-100, 1e100, 1.0)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_enclosures_contain_the_exact_value(name):
    rule, exact, draw = FUNCTIONS[name]
    rng = np.random.default_rng(0)
    count = POINTS // len(FUNCTIONS) // 2
    ends = draw(rng, count)
    width = np.where(rng.random(count) < 0.3, 0, 10.0 ** rng.uniform(-17, 0.5, count) * (np.abs(ends) + 1e-3))
    other = draw(rng, count)
    other = np.where(rng.random(count) < 0.8, np.clip(ends + width, other.min(), other.max()), other)
    lo, hi = np.minimum(ends, other), np.maximum(ends, other)
    inside = np.clip(lo + rng.random(count) * (hi - lo), lo, hi)
    with np.errstate(all="ignore"):
        out = rule(Interval(lo, hi))
        points = rule(iv.point(lo))
    for i in range(count):
        value, middle = exact(m(float(lo[i]))), exact(m(float(inside[i])))
        assert m(float(points.lo[i])) <= value <= m(float(points.hi[i])), lo[i]
        assert m(float(out.lo[i])) <= min(value, middle), (lo[i], hi[i], inside[i])
        assert max(value, middle) <= m(float(out.hi[i])), (lo[i], hi[i], inside[i])
    # Not so wide as to be of no use.
    ordinary = np.isfinite(points.lo) & (np.abs(points.lo) > 1e-9) & (np.abs(lo) < 1e4)
    assert np.all((points.hi - points.lo)[ordinary] <= 400 * np.spacing(np.abs(points.lo[ordinary])) + 1e-15)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_two_arguments_contain_the_exact_value(name):
    rule = getattr(iv, name)
    exact = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
    }[name]
    rng, count = np.random.default_rng(1), POINTS // 30
    draw = near(1.0, 1e16, -1.0)
    a, b = draw(rng, count), draw(rng, count)
    spread = 10.0 ** rng.uniform(-17, 1, (2, count)) * (rng.random((2, count)) < 0.7)
    first, second = Interval(a, a + spread[0] * np.abs(a)), Interval(b, b + spread[1] * np.abs(b))
    with np.errstate(all="ignore"):
        out = rule(first, second)
    for i in range(count):
        for one in (first.lo[i], first.hi[i]):
            for two in (second.lo[i], second.hi[i]):
                if name == "div" and two == 0:
                    continue
                assert m(float(out.lo[i])) <= exact(m(float(one)), m(float(two))) <= m(float(out.hi[i]))


def test_products_with_matrices_and_long_sums_contain_the_exact_value():
    rng = np.random.default_rng(2)
    for size in (2, 7, 40):
        matrix = rng.normal(size=(4, size)) * 10.0 ** rng.integers(-8, 9, (4, size))
        matrix[0] = np.where(np.arange(size) % 2, 1e8, -1e8)
        lo = rng.normal(size=size)
        hi = lo + 10.0 ** rng.uniform(-16, 0, size) * (rng.random(size) < 0.7)
        out = iv.contract("ij,j->i", iv.point(matrix), Interval(lo, hi), size)
        summed = iv.total(Interval(matrix, matrix + 0), (1,))
        for row, exact_row in enumerate(matrix):
            for _ in range(20):
                point = np.where(rng.random(size) < 0.5, lo, hi)
                value = mpmath.fdot([m(float(v)) for v in exact_row], [m(float(v)) for v in point])
                assert m(float(out.lo[row])) <= value <= m(float(out.hi[row]))
            assert m(float(summed.lo[row])) <= mpmath.fsum(m(float(v)) for v in exact_row) <= m(float(summed.hi[row]))


A = jnp.asarray(np.random.default_rng(3).normal(size=(3, 3)))
SMOOTH = {
    "products": lambda y: jnp.sin(3 * y[0]) * jnp.exp(-y[1]) + y[2] ** 3,
    "quotient": lambda y: jnp.cos(y[0] * y[1]) / (2 + y[2] ** 2) - jnp.square(y[0]),
    "network": lambda y: jnp.tanh(A @ y).sum() - y[0] * y[1] * jax.nn.sigmoid(y[2]),
    "roots": lambda y: jnp.sqrt(1 + y[0] ** 4) - jnp.log(3 + y[1]) + jnp.cbrt(4 + y[2]),
    "quadratic": lambda y: y @ A @ y + jnp.vdot(y, y),
    "softplus": lambda y: jax.nn.softplus(y).sum() + jnp.mean(jnp.logaddexp(0.0, A @ y)),
    "logsumexp": lambda y: jax.nn.logsumexp(y) - jax.nn.log_softmax(y)[0],
    "norm": lambda y: jnp.linalg.norm(y + 3) + jnp.hypot(y[0] + 4, y[1]),
    "powers": lambda y: (2 + y[0]) ** 2.5 + (2 + y[1]) ** y[0] + y[2] ** 50,
    "prod": lambda y: jnp.prod(y) + jnp.cumprod(y)[1] + (jnp.cumsum(y) ** 3).sum(),
    "loops": lambda y: jax.lax.fori_loop(0, 3, lambda i, v: v * v / 2 + y[i], 0.0),
    "scan": lambda y: jax.lax.scan(lambda c, v: (c * v + 1, c + v), 1.0, y)[1].sum(),
    "moves": lambda y: (jnp.roll(y, 1) * y[::-1] * jnp.stack([y[1], y[0], y[2]])).sum() + y[jnp.asarray([0, 2])].prod(),
    "set": lambda y: y.at[1].set(3.0).sum() * y[2],
    "erf": lambda y: jax.scipy.special.erf(y).sum() + jax.nn.gelu(y, approximate=False).sum(),
    "angles": lambda y: jnp.tan(y / 3).sum() + jnp.cosh(y[0]) * jnp.sinh(y[1]) + jnp.arctan2(y[2], 3.0),
    "inverses": lambda y: jnp.arcsin(y / 4).sum() * jnp.arccosh(y[0] + 4) - jnp.arctanh(y[1] / 4) + jnp.arcsinh(y[2]),
    "entropy": lambda y: jax.scipy.special.xlogy(y + 2, y + 2).sum() + ((y + 2) * jnp.log(y + 2)).sum(),
    "order": lambda y: jnp.sort(y * y[::-1]) @ jnp.array([1.0, -2, 0.5]) + jax.lax.cummax(y)[2] - jax.lax.cummin(y)[1],
    "remainder": lambda y: jnp.fmod(y, 0.7).sum() + jnp.mod(y[0] * y[1], 0.9),
    "lgamma": lambda y: jax.scipy.special.gammaln(y + 2).sum() * y[0],
    "add at": lambda y: (jnp.ones(2).at[jnp.array([0, 1, 1])].add(y) ** 2).sum(),
    "kinks": lambda y: jnp.abs(y).sum() + jax.nn.relu(y).sum() + jnp.clip(y, -0.5, 0.5).sum() + jnp.max(y) - jnp.min(y),
}  # fmt: skip


@pytest.mark.parametrize("name", SMOOTH)
def test_jets_contain_values_and_derivatives(name):
    f, rng = SMOOTH[name], np.random.default_rng(0)
    lo = rng.uniform(-1.5, 1, (64, 3))
    hi = lo + rng.random((64, 3)) * 10.0 ** rng.integers(-6, 1, (64, 1))
    points = jnp.asarray(rng.random((20, 64, 3)) * (hi - lo) + lo)
    bounds = Traced(f, 3).bounds(Interval(lo, hi), 2)
    functions = (f, jax.grad(f), jax.jacfwd(jax.grad(f)))
    exact = jax.jit(lambda points: [jax.vmap(jax.vmap(function))(points) for function in functions])(points)
    for enclosure, values in zip(bounds, exact, strict=True):
        slack = 1e-12 * (1 + np.abs(values))
        assert np.all((enclosure.lo - slack <= values) & (values <= enclosure.hi + slack))
    assert np.isfinite(bounds.value.lo).all()
    assert np.median(bounds.value.hi - bounds.value.lo) < 1


@jax.custom_jvp
def flat_by_its_own_rule(y):
    return y**3


flat_by_its_own_rule.defjvp(lambda primals, tangents: (primals[0] ** 3, 0 * tangents[0]))


@pytest.mark.parametrize(
    ("f", "slope"),
    [
        (lambda y: flat_by_its_own_rule(y[0]), 3.0),
        (lambda y: jax.lax.stop_gradient(y[0]) * 3, 3.0),
        (lambda y: jnp.where(y[0] > 1, -3.0, 1.0), -np.inf),
        (lambda y: jnp.floor(y[0]), -np.inf),
        (lambda y: y[0].astype(int).astype(float), -np.inf),
        (lambda y: jnp.sign(y[0] - 1), -np.inf),
        (lambda y: (y[0] > 1).astype(float), -np.inf),
        (lambda y: jnp.round(y[0] - 0.5), -np.inf),
    ],
)
def test_derivatives_are_those_of_the_values(f, slope):
    """Not those that a custom rule, or a step without a slope, would tell."""
    box = Interval(np.full((1, 1), 0.999), np.full((1, 1), 1.001))
    found = Traced(f, 1).bounds(box, 1).slope
    assert found.lo[0, 0] <= slope <= found.hi[0, 0]


@pytest.mark.parametrize(
    ("f", "word"),
    [
        (lambda y: jnp.convolve(y, y)[0], "conv"),
        (lambda y: 1.0 * jnp.argmax(y), "argmax"),
        (lambda y: y[0].astype(jnp.float32).astype(float), "float32"),
        (lambda y: jnp.take(jnp.arange(4.0), y[0].astype(int), mode="clip"), "place that depends"),
        (lambda y: jax.lax.while_loop(lambda v: v < 9, lambda v: 2 * v, y[0] + 1), "while_loop"),
    ],
)
def test_what_is_not_supported_is_said(f, word):
    with pytest.raises(NotSupportedError, match=word):
        Traced(f, 2).bounds(Interval(np.zeros((1, 2)), np.ones((1, 2))), 1)
