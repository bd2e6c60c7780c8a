"""Problems whose global, optimistic solutions are known; all variables in boxes.

`PROBLEMS` are of Mitsos and Barton's test set (2007) and of BASBLib. `MORE` are further ones with exact answers: those
called mb_2007 of the same test set; above the others stands the follower's answer y(x), from which F* follows.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import bilax


class Known(NamedTuple):
    """A problem whose global, optimistic solution is known."""

    problem: bilax.Problem
    x0: Any
    y0: Any
    best: float
    """F*"""


def known(
    upper: Any, lower: Any, x: tuple[float, float] | None, y: tuple[float, float], best: float, n: int = 0, m: int = 0
) -> Known:
    """F, f, the intervals of x and y, and F*; `n` and `m` are their sizes, 0 for a number."""
    x_set = bilax.Reals() if x is None else bilax.Box(*x)
    x0 = () if x is None else jnp.full((n,) if n else (), sum(x) / 2)
    return Known(bilax.Problem(upper, lower, x_set, bilax.Box(*y)), x0, jnp.full((m,) if m else (), sum(y) / 2), best)


def _wells(y):
    return 16 * y**4 + 2 * y**3 - 8 * y**2 - 1.5 * y + 0.5


ONE = (-1.0, 1.0)
UNIT = (0.0, 1.0)

PROBLEMS: dict[str, Known] = {
    "toy": known(lambda x, y: x + x * y, lambda x, y: -jnp.sin(x * y), (1.0, 10.0), (-2.0, 2.0), -11 * jnp.pi / 4),
    "mb_2007_05": known(lambda x, y: y, lambda x, y: _wells(y), None, ONE, 0.5),
    "mb_2007_06": known(lambda x, y: y, lambda x, y: y**3, None, ONE, -1.0),
    "mb_2007_11": known(lambda x, y: y, lambda x, y: x * _wells(y), ONE, (-0.8, 1.0), -0.8),
    "mb_2007_13": known(lambda x, y: x - y, lambda x, y: 0.5 * x * y**2 - y * x**3, ONE, ONE, -1.0),
    "mb_2007_15": known(lambda x, y: x + y, lambda x, y: 0.5 * x * y**2 - y**3 / 3, ONE, ONE, 0.0),
    "mb_2007_17": known(
        lambda x, y: (x + 0.5) ** 2 + 0.5 * y**2, lambda x, y: 0.5 * x * y**2 + y**4 / 4, ONE, ONE, 0.1875
    ),
    "mb_2007_18": known(lambda x, y: -(x**2) + y**2, lambda x, y: x * y**2 - y**4 / 2, ONE, ONE, -1.0),
    "mb_2007_20": known(lambda x, y: (x - 0.25) ** 2 + y**2, lambda x, y: -(x**2) * y + y**3 / 3, ONE, ONE, 0.3125),
    "mb_2007_23": known(
        lambda x, y: x**2 - y, lambda x, y: ((y - 1 - 0.1 * x) ** 2 - 0.5 - 0.5 * x) ** 2, UNIT, (0.0, 3.0), -1.755
    ),
    "lmp_1987_01": known(lambda x, y: 0.5 * (1 - x) + x * y, lambda x, y: (x - 1) * y, UNIT, UNIT, 0.0),
    "b_1998_02": known(
        lambda x, y: 0.5 * (x[0] - 0.8) ** 2 + 0.5 * (x[1] - 0.2) ** 2 + 0.5 * (y - 1) ** 2,
        lambda x, y: 0.5 * y**2 - y - x[0] * y + 2 * x[1] * y,
        UNIT,
        UNIT,
        0.0,
        n=2,
    ),
}

_ROOT = (np.sqrt(13) - 1) / 6
_S = float(np.real(np.roots([4, 0, 1, -2])[-1]))
_T = float(np.real(np.roots([1, 0, 1, -1])[-1]))
TWO = (-2.0, 2.0)

MORE: dict[str, Known] = {
    # 0 for x ≤ 0, else ±√x
    "mb_2007_12": known(lambda x, y: -x + x * y + 10 * y**2, lambda x, y: -x * y**2 + y**4 / 2, ONE, ONE, 0.0),
    "mb_2007_14": known(lambda x, y: (x - 0.25) ** 2 + y**2, lambda x, y: y**3 / 3 - x * y, ONE, ONE, 0.25),
    "mb_2007_16": known(lambda x, y: 2 * x + y, lambda x, y: -x * y**2 / 2 - y**4 / 4, ONE, ONE, -2.0),
    "mb_2007_19": known(
        lambda x, y: x * y - y + y**2 / 2, lambda x, y: -x * y**2 + y**4 / 2, ONE, ONE, _ROOT**3 - _ROOT + _ROOT**2 / 2
    ),
    # x
    "nearest": known(lambda x, y: (x - 0.3) ** 2 + (y - 0.7) ** 2, lambda x, y: (y - x) ** 2, UNIT, UNIT, 0.08),
    "distance": known(lambda x, y: x**2 + (y - 1) ** 2, lambda x, y: jnp.abs(y - x), ONE, ONE, 0.5),
    "lopsided": known(lambda x, y: x + y**2, lambda x, y: jnp.maximum(y - x, 2 * (x - y)), ONE, ONE, -0.25),
    "hyperbola": known(
        lambda x, y: (x + y - 1) ** 2 + x**2 / 2, lambda x, y: jnp.sqrt(1 + (y - x) ** 2), ONE, ONE, 1 / 9
    ),
    "catenary": known(lambda x, y: y**4 - x, lambda x, y: jnp.cosh(y - x), ONE, ONE, -0.75 * 0.25 ** (1 / 3)),
    # x²
    "parabola": known(lambda x, y: x + y, lambda x, y: jnp.log1p((y - x**2) ** 2), ONE, ONE, -0.25),
    # x − 1/2
    "between": known(
        lambda x, y: (x - 1) ** 2 + y**2,
        lambda x, y: x * (y - 0.5) ** 2 + (1 - x) * (y + 0.5) ** 2,
        UNIT,
        ONE,
        0.125,
    ),
    # ±√x
    "fork": known(lambda x, y: x - y, lambda x, y: (y**2 - x) ** 2, UNIT, ONE, -0.25),
    "fork_down": known(lambda x, y: x**2 + y, lambda x, y: (y**2 - x) ** 2, UNIT, ONE, -0.75 * 0.25 ** (1 / 3)),
    "pitchfork": known(
        lambda x, y: (x - 0.25) ** 2 + (y - 1) ** 2,
        lambda x, y: y**4 - 2 * x * y**2,
        ONE,
        TWO,
        (_S**2 - 0.25) ** 2 + (_S - 1) ** 2,
    ),
    # ±x
    "cross": known(
        lambda x, y: (x - 1) ** 2 + (y + 0.5) ** 2, lambda x, y: (y - x) ** 2 * (y + x) ** 2, UNIT, ONE, 0.125
    ),
    # −1 below x = 0, 1 above, anything there
    "switch": known(lambda x, y: (x - 0.2) ** 2 + y, lambda x, y: -x * y, ONE, ONE, -0.96),
    # −sign(x)
    "farthest": known(lambda x, y: (x - 0.5) ** 2 + (y - 1) ** 2, lambda x, y: -((y - x) ** 2), ONE, ONE, 0.25),
    # 0 for x > 0, ±1 for x < 0
    "flip": known(lambda x, y: (x + 0.5) ** 2 + y**2, lambda x, y: x * y**2, ONE, ONE, 0.25),
    # 0 for |x| < 1, sign(x) beyond, anything between them at ±1
    "threshold": known(lambda x, y: x**2 / 2 + (y - 1) ** 2, lambda x, y: jnp.abs(y) - x * y, TWO, ONE, 0.5),
    # −2, and 1 too at x = 1
    "cubic": known(lambda x, y: (x - 1) ** 2 + (y - 1) ** 2, lambda x, y: y**3 - 3 * x * y, (0.25, 1.0), TWO, 0.0),
    # π/2 − x, or 0
    "wave": known(
        lambda x, y: (x - 1) ** 2 + (y - 1) ** 2,
        lambda x, y: -jnp.sin(x + y),
        (0.0, 3.0),
        (0.0, 3.0),
        2 * (1 - np.pi / 4) ** 2,
    ),
    # 3π/2
    "sine": known(lambda x, y: (x - 1) ** 2 + y**2, lambda x, y: jnp.sin(y), (0.0, 2.0), (0.0, 6.0), 2.25 * np.pi**2),
    # −1, 0 or 1
    "comb": known(
        lambda x, y: (x - y - 0.5) ** 2 + 0.1 * y, lambda x, y: -jnp.cos(2 * np.pi * y), ONE, (-1.2, 1.2), -0.1
    ),
    # −sign(x₁ + x₂)
    "sum": known(lambda x, y: jnp.sum((x - 0.5) ** 2) + (y - 1) ** 2, lambda x, y: (x[0] + x[1]) * y, ONE, ONE, 0.5, 2),
    # x₁ x₂
    "product": known(
        lambda x, y: jnp.sum((x - 1) ** 2) + y**2,
        lambda x, y: (y - x[0] * x[1]) ** 2,
        UNIT,
        ONE,
        2 * (_T - 1) ** 2 + _T**4,
        2,
    ),
    # (x, −x)
    "pair": known(
        lambda x, y: (x - 1) ** 2 + jnp.sum(y**2), lambda x, y: (y[0] - x) ** 2 + (y[1] + x) ** 2, ONE, ONE, 2 / 3, m=2
    ),
    # (s, s) with s = ±√x
    "chain": known(
        lambda x, y: x + y[0] + y[1], lambda x, y: (y[0] ** 2 - x) ** 2 + (y[1] - y[0]) ** 2, UNIT, ONE, -1.0, m=2
    ),
}
