"""The last descent of a search: F along the follower's solution y(x), to the precision of doubles.

The follower is solved by Newton steps at every x, and the slope of F(x, y(x)) follows from the implicit function
theorem over the directions that no constraint holds.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jaxtyping import Array

from bilax.trust.branch_and_bound import Domain, One, descend
from bilax.trust.flat_problem import FlatProblem
from bilax.trust.interval_rules import Traced

_STEPS = 80


class Polished(NamedTuple):
    """Where the descent ended."""

    x: np.ndarray
    y: np.ndarray
    upper: float
    slope: float
    """the largest entry of x − Proj(x − ∇F(x, y(x))), in units of F's change over the box or of 1"""


class Reduced:
    """F(x, y(x)) and its slope, near a follower's solution."""

    def __init__(self, flat: FlatProblem, domain: Domain, n: int, m: int):
        self.flat, self.domain, self.n = flat, domain, n
        # x is a variable of the traced function, so that it is traced once for all x.
        self.traced = Traced(lambda v: flat.lower(v[:n], v[n:]), n + m)
        self.terms = jax.jit(self._terms)
        self.mixed = jax.jit(self._mixed)

    def _terms(self, x: Array, y: Array) -> Any:
        upper, (upper_x, upper_y) = jax.value_and_grad(self.flat.upper, (0, 1))(x, y)
        slope = jax.grad(self.flat.lower, 1)(x, y)
        return upper, upper_x, upper_y, slope, jax.hessian(self.flat.lower, 1)(x, y)

    def _mixed(self, x: Array, y: Array, response: Array) -> Array:
        return jax.grad(lambda x: jnp.vdot(jax.grad(self.flat.lower, 1)(x, y), response))(x)

    def follow(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The follower's solution at x, from y."""
        domain = self.domain._replace(
            lo=np.concatenate([x, self.domain.lo[0]])[None], hi=np.concatenate([x, self.domain.hi[0]])[None]
        )
        if self.domain.simplex:
            return self._on_simplex(x, y)
        start = np.concatenate([x, y])[None]
        return descend(One(self.traced), domain, np.zeros(1, int), start, np.inf)[0][0, self.n :]

    def _on_simplex(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        traced = Traced(lambda v: self.flat.lower(jnp.asarray(x), v), y.size)
        return descend(One(traced), self.domain, np.zeros(1, int), y[None], np.inf)[0][0]

    def value_and_slope(self, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        upper, upper_x, upper_y, slope, bend = (np.asarray(part) for part in self.terms(x, y))
        onto = self._onto(y, slope)
        response = np.linalg.pinv(onto @ bend @ onto, rcond=1e-10, hermitian=True) @ onto @ upper_y
        total = upper_x - np.asarray(self.mixed(x, y, response))
        return float(upper), np.where(np.isfinite(total), total, 0.0)

    def _onto(self, y: np.ndarray, slope: np.ndarray) -> np.ndarray:
        """The projector on the directions that no constraint holds."""
        near = 1e-9 * (1 + np.abs(y))
        if self.domain.total is not None:
            free = ((y > near) | (slope <= y @ slope / self.domain.total)).astype(float)
            return np.diag(free) - np.outer(free, free) / max(free.sum(), 1)
        lo, hi = self.domain.lo[0], self.domain.hi[0]
        held = ((y <= lo + near) & (slope > 0)) | ((y >= hi - near) & (slope < 0))
        return np.diag((~held).astype(float))


def polish(reduced: Reduced, x: np.ndarray, y: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> Polished:
    """Descends F(x, y(x)) within lo ≤ x ≤ hi by L-BFGS; follows the minimum that y is in."""
    best = [np.inf, x, y]

    def value(point):
        followed = reduced.follow(point, best[2])
        upper, slope = reduced.value_and_slope(point, followed)
        if upper < best[0]:
            best[:] = [upper, point.copy(), followed]
        return upper, slope

    with np.errstate(all="ignore"):
        value(x)
        scipy.optimize.minimize(
            value, x, jac=True, method="L-BFGS-B", bounds=scipy.optimize.Bounds(lo, hi),  # pyright: ignore
            options={"maxiter": _STEPS, "maxfun": 2 * _STEPS, "ftol": 1e-15, "gtol": 1e-10},
        )  # fmt: skip
        upper, slope = reduced.value_and_slope(best[1], best[2])
    moved = np.clip(best[1] - slope, lo, hi) - best[1]
    return Polished(best[1], best[2], upper, float(np.max(np.abs(moved), initial=0.0)) / (1 + abs(upper)))
