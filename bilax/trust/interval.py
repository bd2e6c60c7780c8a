"""Interval arithmetic on NumPy arrays, rounded outwards.

An interval is a pair (lo, hi) of arrays of doubles and stands for every value between them, entry by entry. Each
function here returns an interval that contains every possible result for real numbers. Sums, products, quotients and
roots are rounded correctly by the processor, so one step to the neighbouring double is enough. For the others the
library's error is a few units in the last place; `_LIBRARY` and `_SPECIAL` are several times what is known of it, and
the tests compare every function with arithmetic of many digits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.special

Numbers = Any
"""an array of doubles, or one of them"""

_EPS = 2.0**-52
_HUGE = np.finfo(float).max
_SPECK = 1e-320
"""more than any error of a result so small that it loses digits"""
_LIBRARY = 8
"""units in the last place allowed to exp, log, sin and their kin; NumPy's own limit is four"""
_SPECIAL = 64
"""the same for SciPy's erf and erfc"""
_SPECK_OF_GAMMA = 4e-16
"""an absolute allowance: near their zeros log Γ and its slope may have few digits that are right"""
_FARTHEST_ANGLE = 1e8
"""beyond it a sine is anything from −1 to 1: where it turns cannot be told well enough"""


class Interval(NamedTuple):
    """All values between `lo` and `hi`, entry by entry. Both are the same array where all values are known."""

    lo: Numbers
    hi: Numbers

    @property
    def is_point(self) -> bool:
        return self.lo is self.hi

    @property
    def middle(self) -> Numbers:
        return self.lo if self.is_point else self.lo / 2 + self.hi / 2

    @property
    def width(self) -> Numbers:
        return np.nextafter(self.hi - self.lo, np.inf)


def point(value: Any) -> Interval:
    """The interval of one value."""
    value = np.asarray(value, float)
    return safe(value, value)


def whole(shape: Any) -> Interval:
    """Everything."""
    return Interval(np.full(shape, -np.inf), np.full(shape, np.inf))


def safe(lo: Numbers, hi: Numbers) -> Interval:
    """An interval whose ends that are not numbers are infinite."""
    if lo is hi and not np.isnan(lo).any():
        return Interval(lo, lo)
    return Interval(np.where(np.isnan(lo), -np.inf, lo), np.where(np.isnan(hi), np.inf, hi))


def hull(a: Interval, b: Interval) -> Interval:
    """The least interval that contains both."""
    return Interval(np.minimum(a.lo, b.lo), np.maximum(a.hi, b.hi))


def where(chosen: Any, a: Interval, b: Interval) -> Interval:
    """a where chosen, else b."""
    return Interval(np.where(chosen, a.lo, b.lo), np.where(chosen, a.hi, b.hi))


def widened(lo: Numbers, hi: Numbers, ulps: Any) -> Interval:
    """The ends moved outwards by so many units in the last place; an infinite end that points inwards is finite."""
    lo, hi = np.minimum(lo, _HUGE), np.maximum(hi, -_HUGE)
    lower = lo - np.where(np.isinf(lo), 0, (ulps + 1) * _EPS * np.abs(lo)) - _SPECK
    upper = hi + np.where(np.isinf(hi), 0, (ulps + 1) * _EPS * np.abs(hi)) + _SPECK
    return safe(lower, upper)


def _neighbours(lo: Numbers, hi: Numbers) -> Interval:
    return safe(np.nextafter(lo, -np.inf), np.nextafter(hi, np.inf))


def add(a: Interval, b: Interval) -> Interval:
    """a + b; exact sums stay exact (Knuth's error-free sum tells which are)."""
    return safe(_add_down(a.lo, b.lo), -_add_down(-a.hi, -b.hi))


def _add_down(a: Numbers, b: Numbers) -> Numbers:
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    return np.where(error >= 0, total, np.nextafter(total, -np.inf))


def neg(a: Interval) -> Interval:
    if a.is_point:
        negative = -a.lo
        return Interval(negative, negative)
    return Interval(-a.hi, -a.lo)


def sub(a: Interval, b: Interval) -> Interval:
    return add(a, neg(b))


def mul(a: Interval, b: Interval) -> Interval:
    """a · b. Zero times infinity is zero: the zero is exact, the infinity only a bound."""
    firsts = (a.lo,) if a.is_point else tuple(a)
    seconds = (b.lo,) if b.is_point else tuple(b)
    products = [np.multiply(one, two) for one in firsts for two in seconds]
    products = [np.where(np.isnan(product), 0.0, product) for product in products]
    lo, hi = products[0], products[0]
    for product in products[1:]:
        lo, hi = np.minimum(lo, product), np.maximum(hi, product)
    out = _neighbours(lo, hi)
    # The sign is exact, also where a product is too small for a double.
    rises = ((a.lo >= 0) & (b.lo >= 0)) | ((a.hi <= 0) & (b.hi <= 0))
    falls = ((a.lo >= 0) & (b.hi <= 0)) | ((a.hi <= 0) & (b.lo >= 0))
    return Interval(np.where(rises, np.maximum(out.lo, 0), out.lo), np.where(falls, np.minimum(out.hi, 0), out.hi))


def scale(a: Interval, factor: float) -> Interval:
    """a times a number."""
    return mul(a, point(factor))


def reciprocal(a: Interval) -> Interval:
    """1 / a; everything where a changes its sign."""
    out = _neighbours(1 / a.hi, 1 / a.lo)
    positive, negative = a.lo >= 0, a.hi <= 0
    lo = np.where(positive, np.maximum(out.lo, 0), out.lo)
    hi = np.where(negative, np.minimum(out.hi, 0), out.hi)
    # Zero at an end: the other side is open.
    lo = np.where(a.hi == 0, -np.inf, lo)
    hi = np.where(a.lo == 0, np.inf, hi)
    through = ((a.lo < 0) & (a.hi > 0)) | ((a.lo == 0) & (a.hi == 0))
    return safe(np.where(through, -np.inf, lo), np.where(through, np.inf, hi))


def div(a: Interval, b: Interval) -> Interval:
    """a / b, in one rounding where b keeps away from zero."""
    apart = (b.lo > 0) | (b.hi < 0)
    ends = [one / two for one in a for two in b]
    direct = _neighbours(np.minimum.reduce(ends), np.maximum.reduce(ends))
    finite = np.isfinite(a.lo) & np.isfinite(a.hi) & np.isfinite(b.lo) & np.isfinite(b.hi)
    rises = ((a.lo >= 0) & (b.lo > 0)) | ((a.hi <= 0) & (b.hi < 0))
    falls = ((a.lo >= 0) & (b.hi < 0)) | ((a.hi <= 0) & (b.lo > 0))
    direct = Interval(
        np.where(rises, np.maximum(direct.lo, 0), direct.lo), np.where(falls, np.minimum(direct.hi, 0), direct.hi)
    )
    return where(apart & finite, direct, mul(a, reciprocal(b)))


def absolute(a: Interval) -> Interval:
    low, high = np.abs(a.lo), np.abs(a.hi)
    return Interval(np.where((a.lo <= 0) & (a.hi >= 0), 0.0, np.minimum(low, high)), np.maximum(low, high))


def square(a: Interval) -> Interval:
    size = absolute(a)
    out = _neighbours(size.lo * size.lo, size.hi * size.hi)
    return Interval(np.maximum(out.lo, 0), out.hi)


def power(a: Interval, exponent: int) -> Interval:
    """a to a whole number."""
    if exponent < 0:
        return reciprocal(power(a, -exponent))
    if exponent in (0, 1):
        return a if exponent else point(np.ones_like(a.lo))
    if exponent == 2:
        return square(a)
    if exponent % 2 == 0:
        size = absolute(a)
        out = widened(np.power(size.lo, float(exponent)), np.power(size.hi, float(exponent)), _LIBRARY)
        return Interval(np.maximum(out.lo, 0), out.hi)
    lo, hi = (np.copysign(np.power(np.abs(end), float(exponent)), end) for end in a)
    out = widened(lo, hi, _LIBRARY)
    return Interval(
        np.where(a.lo >= 0, np.maximum(out.lo, 0), out.lo), np.where(a.hi <= 0, np.minimum(out.hi, 0), out.hi)
    )


def real_power(a: Interval, exponent: Numbers) -> Interval:
    """a to known real exponents, for a ≥ 0 (what is below zero is cut off)."""
    ends = [np.power(np.maximum(end, 0), exponent) for end in a]
    out = widened(np.minimum(*ends), np.maximum(*ends), _LIBRARY)
    return Interval(np.maximum(out.lo, 0), out.hi)


def _rising(function: Callable[[Numbers], Numbers], ulps: int, least: float = -np.inf, most: float = np.inf):
    """The rule for a function that never falls, with values between `least` and `most`."""

    def rule(a: Interval) -> Interval:
        out = widened(function(a.lo), function(a.hi), ulps)
        return Interval(np.clip(out.lo, least, most), np.clip(out.hi, least, most))

    return rule


def _through_zero(function: Callable[[Numbers], Numbers], ulps: int, most: float = np.inf):
    """The rule for a rising function whose sign is that of its argument."""

    def rule(a: Interval) -> Interval:
        out = _rising(function, ulps, -most, most)(a)
        return Interval(
            np.where(a.lo >= 0, np.maximum(out.lo, 0), out.lo), np.where(a.hi <= 0, np.minimum(out.hi, 0), out.hi)
        )

    return rule


def _wave(function: Callable[[Numbers], Numbers], trough: float, crest: float) -> Callable[[Interval], Interval]:
    """The rule for sin or cos, which are lowest at `trough` + 2πk and highest at `crest` + 2πk."""

    def rule(a: Interval) -> Interval:
        # More room than the rounding of the division takes.
        room = 1e-15 * (4 + np.abs(a.lo) + np.abs(a.hi))

        def meets(angle):
            low, high = (a.lo - angle) / (2 * np.pi) - room, (a.hi - angle) / (2 * np.pi) + room
            return (np.floor(high) >= np.ceil(low)) | ~known

        known = (np.abs(a.lo) < _FARTHEST_ANGLE) & (np.abs(a.hi) < _FARTHEST_ANGLE)
        lo, hi = (
            (function(end) - _speck_of_angle(end) for end in a),
            (function(end) + _speck_of_angle(end) for end in a),
        )
        out = widened(np.minimum(*lo), np.maximum(*hi), _LIBRARY)
        return Interval(
            np.where(meets(trough), -1.0, np.maximum(out.lo, -1)), np.where(meets(crest), 1.0, np.minimum(out.hi, 1))
        )

    return rule


def _speck_of_angle(angle: Numbers) -> Numbers:
    # An absolute allowance: near its zeros, other than 0 itself, a wave may have few digits that are right.
    return _EPS * np.minimum(1, np.abs(angle))


sin = _wave(np.sin, -np.pi / 2, np.pi / 2)
cos = _wave(np.cos, np.pi, 0.0)


def tan(a: Interval) -> Interval:
    """The tangent; everything where a pole may lie inside."""
    room = 1e-15 * (4 + np.abs(a.lo) + np.abs(a.hi))
    low, high = a.lo / np.pi - 0.5 - room, a.hi / np.pi - 0.5 + room
    known = (np.abs(a.lo) < _FARTHEST_ANGLE) & (np.abs(a.hi) < _FARTHEST_ANGLE) & (np.floor(high) < np.ceil(low))
    out = widened(np.tan(a.lo) - _speck_of_angle(a.lo), np.tan(a.hi) + _speck_of_angle(a.hi), _LIBRARY)
    return where(known, out, whole(np.shape(a.lo)))


def cosh(a: Interval) -> Interval:
    size = absolute(a)
    return _rising(np.cosh, _LIBRARY, 1.0)(size)


def bell(a: Interval) -> Interval:
    """exp(−a²)"""
    return exp(neg(square(a)))


def softplus(a: Interval) -> Interval:
    """log(1 + eᵃ)"""
    return _rising(lambda v: np.maximum(v, 0) + np.log1p(np.exp(-np.abs(v))), 2 * _LIBRARY, 0.0)(a)


def logistic(a: Interval) -> Interval:
    def value(v):
        small = np.exp(-np.abs(v))
        return np.where(v >= 0, 1 / (1 + small), small / (1 + small))

    return _rising(value, 2 * _LIBRARY, 0.0, 1.0)(a)


def logistic_slope(a: Interval) -> Interval:
    """The logistic function's derivative, which falls as |a| rises."""
    size = absolute(a)

    def value(v):
        small = np.exp(-v)
        return small / (1 + small) ** 2

    out = widened(value(size.hi), value(size.lo), 4 * _LIBRARY)
    return Interval(np.maximum(out.lo, 0), np.minimum(out.hi, 0.25))


def x_log_x(a: Interval) -> Interval:
    """a log a for a ≥ 0, which is 0 at 0 and turns at 1/e."""
    lo, hi = np.maximum(a.lo, 0), np.maximum(a.hi, 0)
    ends = [np.where(end > 0, end * np.log(np.where(end > 0, end, 1)), 0.0) for end in (lo, hi)]
    # Near a = 1 the logarithm keeps its digits, so the product does.
    out = widened(np.minimum(*ends), np.maximum(*ends), 2 * _LIBRARY)
    turns = (lo <= 0.36787944117144234) & (hi >= 0.36787944117144233)
    return Interval(np.where(turns, np.minimum(out.lo, -0.36787944117144239), out.lo), out.hi)


exp = _rising(np.exp, _LIBRARY, 0.0)
expm1 = _through_zero(np.expm1, _LIBRARY)
exp2 = _rising(np.exp2, _LIBRARY, 0.0)
log = _rising(lambda v: np.log(np.maximum(v, 0)), _LIBRARY)
log1p = _through_zero(lambda v: np.log1p(np.maximum(v, -1)), _LIBRARY)
sqrt = _rising(lambda v: np.sqrt(np.maximum(v, 0)), 1, 0.0)
cbrt = _through_zero(np.cbrt, _LIBRARY)
sinh = _through_zero(np.sinh, _LIBRARY)
tanh = _through_zero(np.tanh, _LIBRARY, 1.0)
atan = _through_zero(np.arctan, _LIBRARY)
asinh = _through_zero(np.arcsinh, _LIBRARY)
asin = _through_zero(lambda v: np.arcsin(np.clip(v, -1, 1)), _LIBRARY)
acosh = _rising(lambda v: np.arccosh(np.maximum(v, 1)), _LIBRARY, 0.0)
atanh = _through_zero(lambda v: np.arctanh(np.clip(v, -1, 1)), _LIBRARY)
erf = _through_zero(scipy.special.erf, _SPECIAL, 1.0)


def lgamma(a: Interval) -> Interval:
    """log Γ(a), which is convex where a > 0; everything where a may be less."""
    ends = [scipy.special.gammaln(end) for end in a]
    out = widened(np.minimum(*ends) - _SPECK_OF_GAMMA, np.maximum(*ends) + _SPECK_OF_GAMMA, _SPECIAL)
    turns = (a.lo < 1.461632144968363) & (a.hi > 1.461632144968362)
    out = Interval(np.where(turns, -0.1214862905358497, out.lo), out.hi)
    return where(a.lo > 0, out, whole(np.shape(a.lo)))


def lgamma_slope(a: Interval) -> Interval:
    """The digamma function, which rises where a > 0."""
    ends = scipy.special.psi(a.lo) - _SPECK_OF_GAMMA, scipy.special.psi(a.hi) + _SPECK_OF_GAMMA
    return where(a.lo > 0, widened(*ends, _SPECIAL), whole(np.shape(a.lo)))


def lgamma_bend(a: Interval) -> Interval:
    """The trigamma function, which falls where a > 0."""
    out = widened(scipy.special.zeta(2.0, a.hi), scipy.special.zeta(2.0, a.lo), _SPECIAL)
    return where(a.lo > 0, out, whole(np.shape(a.lo)))


def acos(a: Interval) -> Interval:
    out = widened(np.arccos(np.clip(a.hi, -1, 1)), np.arccos(np.clip(a.lo, -1, 1)), _LIBRARY)
    return Interval(np.maximum(out.lo, 0), out.hi)


def erfc(a: Interval) -> Interval:
    # In its tail exp(−a²) is taken of a rounded square.
    ulps = _SPECIAL + 8 * np.clip(a.hi, 0, 40) ** 2
    out = widened(scipy.special.erfc(a.hi), scipy.special.erfc(a.lo), ulps)
    return Interval(np.clip(out.lo, 0, 2), np.clip(out.hi, 0, 2))


def maximum(a: Interval, b: Interval) -> Interval:
    return Interval(np.maximum(a.lo, b.lo), np.maximum(a.hi, b.hi))


def total(a: Interval, axes: tuple[int, ...]) -> Interval:
    """The sum over axes; few terms are added one by one, many by NumPy with the bound n·ε·Σ|terms| of its error."""
    count = int(np.prod([a.lo.shape[axis] for axis in axes]))
    if 1 <= count <= 8:
        moved = [np.moveaxis(end, axes, range(len(axes))) for end in a]
        parts = [end.reshape(count, *end.shape[len(axes) :]) for end in moved]
        out = Interval(parts[0][0], parts[1][0])
        for i in range(1, count):
            out = add(out, Interval(parts[0][i], parts[1][i]))
        return out
    lo, hi = a.lo.sum(axes), a.hi.sum(axes)
    slack = 2 * count * _EPS
    lower = lo - np.where(np.isfinite(lo), slack * np.abs(a.lo).sum(axes), 0) - _SPECK
    upper = hi + np.where(np.isfinite(hi), slack * np.abs(a.hi).sum(axes), 0) + _SPECK
    return safe(np.minimum(lower, _HUGE), np.maximum(upper, -_HUGE))


def contract(subscripts: str, a: Interval, b: Interval, count: int) -> Interval:
    """An einsum of two intervals with `count` terms in each sum.

    By middle and radius, which keeps matrix products fast; the error of floating sums of n products, in any order, is
    below n·ε·Σ|a||b|.
    """
    middles, radii = [], []
    for one in (a, b):
        middle = one.middle
        middles.append(middle)
        radii.append(None if one.is_point else np.nextafter(np.maximum(one.hi - middle, middle - one.lo), np.inf))
    centre = np.einsum(subscripts, *middles, optimize=True)
    sizes = np.abs(middles[0]), np.abs(middles[1])
    slack = 4 * (count + 2) * _EPS
    reach = slack * np.einsum(subscripts, *sizes, optimize=True)
    if radii[1] is not None:
        reach = reach + np.einsum(subscripts, sizes[0], radii[1], optimize=True)
    if radii[0] is not None:
        reach = reach + np.einsum(subscripts, radii[0], sizes[1] + (0 if radii[1] is None else radii[1]), optimize=True)
    reach = reach * (1 + slack) + _SPECK * count
    return _neighbours(centre - reach, centre + reach)
