"""Twelve bilevel problems with non-convex followers and known global solutions, as a benchmark."""

from typing import Any, NamedTuple

import jax.numpy as jnp

import bilax


class Known(NamedTuple):
    """A problem whose global, optimistic solution is known."""

    problem: bilax.Problem
    x0: Any
    y0: Any
    best: float
    """F*"""


def _known(upper: Any, lower: Any, x: tuple[float, float] | None, y: tuple[float, float], best: float, n: int = 0):
    x_set = bilax.Reals() if x is None else bilax.Box(*x)
    x0 = () if x is None else jnp.full((n,) if n else (), sum(x) / 2)
    return Known(bilax.Problem(upper, lower, x_set, bilax.Box(*y)), x0, jnp.asarray(sum(y) / 2), best)


def _wells(y):
    return 16 * y**4 + 2 * y**3 - 8 * y**2 - 1.5 * y + 0.5


ONE = (-1.0, 1.0)
UNIT = (0.0, 1.0)

PROBLEMS: dict[str, Known] = {
    "toy": _known(lambda x, y: x + x * y, lambda x, y: -jnp.sin(x * y), (1.0, 10.0), (-2.0, 2.0), -11 * jnp.pi / 4),
    "mb_2007_05": _known(lambda x, y: y, lambda x, y: _wells(y), None, ONE, 0.5),
    "mb_2007_06": _known(lambda x, y: y, lambda x, y: y**3, None, ONE, -1.0),
    "mb_2007_11": _known(lambda x, y: y, lambda x, y: x * _wells(y), ONE, (-0.8, 1.0), -0.8),
    "mb_2007_13": _known(lambda x, y: x - y, lambda x, y: 0.5 * x * y**2 - y * x**3, ONE, ONE, -1.0),
    "mb_2007_15": _known(lambda x, y: x + y, lambda x, y: 0.5 * x * y**2 - y**3 / 3, ONE, ONE, 0.0),
    "mb_2007_17": _known(
        lambda x, y: (x + 0.5) ** 2 + 0.5 * y**2, lambda x, y: 0.5 * x * y**2 + y**4 / 4, ONE, ONE, 0.1875
    ),
    "mb_2007_18": _known(lambda x, y: -(x**2) + y**2, lambda x, y: x * y**2 - y**4 / 2, ONE, ONE, -1.0),
    "mb_2007_20": _known(lambda x, y: (x - 0.25) ** 2 + y**2, lambda x, y: -(x**2) * y + y**3 / 3, ONE, ONE, 0.3125),
    "mb_2007_23": _known(
        lambda x, y: x**2 - y, lambda x, y: ((y - 1 - 0.1 * x) ** 2 - 0.5 - 0.5 * x) ** 2, UNIT, (0.0, 3.0), -1.7549
    ),
    "lmp_1987_01": _known(lambda x, y: 0.5 * (1 - x) + x * y, lambda x, y: (x - 1) * y, UNIT, UNIT, 0.0),
    "b_1998_02": _known(
        lambda x, y: 0.5 * (x[0] - 0.8) ** 2 + 0.5 * (x[1] - 0.2) ** 2 + 0.5 * (y - 1) ** 2,
        lambda x, y: 0.5 * y**2 - y - x[0] * y + 2 * x[1] * y,
        UNIT,
        UNIT,
        0.0,
        n=2,
    ),
}
