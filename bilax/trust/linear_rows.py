"""Sets as linear rows within a box, and what multipliers prove over them.

Neumaier and Shcherbina (2004), "Safe bounds in linear and mixed-integer linear programming": a solver's multipliers are
rounded and may be wrong, but *any* λ ≥ 0 and μ prove a bound. For v with G v ≤ h, A v = b, and any y,

    g·(v − y) ≥ (g + Gᵀλ + Aᵀμ)·(v − y) − λ·(h − G y) − μ·(b − A y),

and the first product is least at an end of a box that holds v. All of it is evaluated on intervals.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.optimize
from jaxtyping import PyTree

from bilax.problem.polyhedra import Affine, Halfspace, Hyperplane, Polyhedron
from bilax.problem.sets import Box, Each, NonNegative, Product, Reals, Simplex, bounds, broadcast
from bilax.trust import interval as iv
from bilax.trust.interval import Interval

_MOST_NUMBERS = 1_000_000
"""rows that hold more are left out: factorising them would take longer than the rest"""
_MOST_PROGRAMS = 200
"""how many linear programs may look for bounds that no row tells"""


class Multipliers(NamedTuple):
    """λ ≥ 0 of the inequalities and μ of the equations; any of them prove a bound, good ones a good bound."""

    inequalities: np.ndarray
    equations: np.ndarray


class Rows(NamedTuple):
    """A set that holds Y: all flat v with lo ≤ v ≤ hi, G v ≤ h and A v = b."""

    lo: np.ndarray
    hi: np.ndarray
    G: np.ndarray
    h: np.ndarray
    A: np.ndarray
    b: np.ndarray

    @staticmethod
    def without_box(G: Any, h: Any, A: Any = None, b: Any = None) -> "Rows":
        """Rows whose box is not known yet."""
        size = np.shape(G)[1]
        A, b = (np.zeros((0, size)), np.zeros(0)) if A is None else (A, b)
        G, A = np.asarray(G, float), np.asarray(A, float)
        h, b = (np.broadcast_to(np.asarray(right, float), len(rows)) for right, rows in ((h, G), (b, A)))
        return Rows(np.full(size, -np.inf), np.full(size, np.inf), G, h, A, b)

    def boxed(self) -> "Rows":
        """The same with a box that provably holds all points: by rows of one coefficient, then by linear programs."""
        with np.errstate(all="ignore"):
            found = self._by_single_rows()
            return found if np.isfinite([found.lo, found.hi]).all() else _by_programs(found)

    def _by_single_rows(self) -> "Rows":
        G, h = np.concatenate([self.G, self.A, -self.A]), np.concatenate([self.h, self.b, -self.b])
        row, column = np.nonzero((G != 0) & (np.sum(G != 0, 1) == 1)[:, None])
        ends = iv.div(iv.point(h[row]), iv.point(G[row, column]))
        lo, hi, up = self.lo.copy(), self.hi.copy(), G[row, column] > 0
        np.minimum.at(hi, column[up], ends.hi[up])
        np.maximum.at(lo, column[~up], ends.lo[~up])
        return self._replace(lo=lo, hi=hi)

    def rest(self, cost: Interval, by: Multipliers) -> Interval:
        """cost + Gᵀλ + Aᵀμ."""
        for rows, multipliers in ((self.G, by.inequalities), (self.A, by.equations)):
            cost = iv.add(cost, _product(rows.T, multipliers))
        return cost

    def paid(self, by: Multipliers, y: np.ndarray) -> float:
        """A number not below λ·(h − G y) + μ·(b − A y)."""
        slacks = [iv.sub(iv.point(right), _product(rows, y)) for rows, right in ((self.G, self.h), (self.A, self.b))]
        each = [iv.mul(iv.point(one), slack) for one, slack in zip(by, slacks, strict=True)]
        return float(iv.total(Interval(*(np.concatenate(ends) for ends in zip(*each, strict=True))), (0,)).hi)

    def multipliers(self, cost: np.ndarray, y: np.ndarray) -> list[Multipliers]:
        """Candidates for min cost·v at y: those of a linear program, and those of the rows that y touches."""
        return [found for found in (self._of_program(cost), self._of_touched(cost, y)) if found is not None]

    def _of_program(self, cost: np.ndarray) -> Multipliers | None:
        size = float(np.max(np.abs(cost), initial=0)) or 1.0  # the solver's tolerances have no scale
        try:
            found: Any = scipy.optimize.linprog(
                cost / size, self.G if len(self.G) else None, self.h if len(self.G) else None,
                self.A if len(self.A) else None, self.b if len(self.A) else None,
                bounds=np.stack([self.lo, self.hi], 1), method="highs",
            )  # fmt: skip
        except ValueError:  # numbers that the solver does not take
            return None
        if found.status != 0:
            return None
        return _signed(-size * found.ineqlin.marginals, -size * found.eqlin.marginals)

    def _of_touched(self, cost: np.ndarray, y: np.ndarray) -> Multipliers | None:
        """The least squares of what is left of the cost; the ends of the box that y touches take part, too."""
        near = 1e-7 * (1 + np.abs(y))
        touched = self.h - self.G @ y <= 1e-7 * (1 + np.abs(self.G) @ np.abs(y))
        ends = np.concatenate([np.eye(y.size)[self.hi - y <= near], -np.eye(y.size)[y - self.lo <= near]])
        columns = np.concatenate([self.G[touched], self.A, -self.A, ends]).T
        if not columns.size:
            return _signed(np.zeros(len(self.G)), np.zeros(len(self.A)))
        try:
            found = scipy.optimize.nnls(columns, -cost)[0]
        except (RuntimeError, ValueError):  # it came to no end
            return None
        first, equations = int(touched.sum()), len(self.A)
        inequalities = np.zeros(len(self.G))
        inequalities[touched] = found[:first]
        return _signed(
            inequalities, found[first : first + equations] - found[first + equations : first + 2 * equations]
        )


def _signed(inequalities: np.ndarray, equations: np.ndarray) -> Multipliers | None:
    found = Multipliers(np.maximum(inequalities, 0.0), np.asarray(equations, float))
    return found if all(np.isfinite(part).all() for part in found) else None


def _product(matrix: np.ndarray, vector: np.ndarray) -> Interval:
    if not matrix.size:
        return iv.point(np.zeros(len(matrix)))
    return iv.contract("ij,j->i", iv.point(matrix), iv.point(vector), matrix.shape[1])


# The box


class _Side(NamedTuple):
    """What multipliers prove of one end: sign · v_i ≤ most + rest·v for every point of the set."""

    i: int
    sign: float
    most: float
    rest: Interval

    def bound(self, lo: np.ndarray, hi: np.ndarray, without: Any = False) -> float:
        """The most that sign · v_i can be within a box, as far as coordinates count."""
        products = np.where(without, 0.0, _greatest(self.rest, lo, hi))
        return float(iv.total(iv.point(np.append(products, self.most)), (0,)).hi)


def _greatest(rest: Interval, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    return iv.mul(rest, Interval(lo, hi)).hi


def _by_programs(rows: Rows) -> Rows:
    """Bounds for the sides that are open, as far as there are any.

    Multipliers leave a rest that is rounding, but an open box makes that infinite. So first all together: if |v_i| ≤
    D + ε·max|v_j| for all i of a group, with ε < 1, then max|v_j| ≤ D / (1 − ε). Within that box each side is
    bounded once more by itself.
    """
    openings = [
        (int(i), sign) for end, sign in ((rows.hi, 1.0), (rows.lo, -1.0)) for i in np.flatnonzero(np.isinf(end))
    ]
    if len(openings) > _MOST_PROGRAMS:
        return rows
    sides = [side for opening in openings if (side := _side(rows, *opening)) is not None]
    group = np.ones(rows.lo.size, bool)
    group[list({i for i, _ in openings} - _closed(openings, sides))] = False
    radius = _radius(rows, group, sides)
    lo, hi = (
        np.where(group, np.maximum(rows.lo, -radius), rows.lo),
        np.where(group, np.minimum(rows.hi, radius), rows.hi),
    )
    ends = [(side, side.bound(lo, hi)) for side in sides]
    for side, most in ends:
        if side.sign > 0:
            hi[side.i] = min(hi[side.i], most)
        else:
            lo[side.i] = max(lo[side.i], -most)
    return rows._replace(lo=lo, hi=hi)


def _side(rows: Rows, i: int, sign: float) -> _Side | None:
    cost = np.zeros(rows.lo.size)
    cost[i] = -sign
    found = rows._of_program(cost)
    if found is None:
        return None
    return _Side(i, sign, rows.paid(found, np.zeros(cost.size)), iv.neg(rows.rest(iv.point(cost), found)))


def _closed(openings: list[tuple[int, float]], sides: list[_Side]) -> set[int]:
    """The coordinates all of whose open sides have multipliers."""
    without = set(openings) - {(side.i, side.sign) for side in sides}
    return {i for i, _ in openings} - {i for i, _ in without}


def _radius(rows: Rows, group: np.ndarray, sides: list[_Side]) -> float:
    """A number that no coordinate of the group exceeds in size; ∞ where the multipliers do not tell.

    Takes coordinates out of the group where their rest meets one that is open and not in it.
    """
    while True:
        shares, mine = [], [side for side in sides if group[side.i]]
        for side in mine:
            wide = np.isinf(_greatest(side.rest, rows.lo, rows.hi))
            if np.any(wide & ~group):
                group[side.i] = False
                break
            sizes = np.where(wide, np.maximum(np.abs(side.rest.lo), np.abs(side.rest.hi)), 0.0)
            shares.append((side.bound(rows.lo, rows.hi, wide), float(iv.total(iv.point(sizes), (0,)).hi)))
        else:
            break
    known = np.concatenate([rows.lo[group], rows.hi[group]])
    known = float(np.max(np.abs(known[np.isfinite(known)]), initial=0.0))
    if any(share > 0.5 for _, share in shares):
        return np.inf
    return max([known, *(max(most, 0.0) / (1 - share) for most, share in shares)]) * (1 + 1e-12)


# Sets as rows


def rows_of(a_set: Any, v: PyTree) -> Rows:
    """The rows that hold the set, for flat points like v; of sets that are not made of rows only the box."""
    rows = _rows(a_set, v)
    return rows.boxed() if rows.G.size + rows.A.size else rows


def _rows(a_set: Any, v: PyTree) -> Rows:
    size = sum(jnp.size(leaf) for leaf in jax.tree.leaves(v))
    nothing = np.zeros((0, size))
    if size * size > _MOST_NUMBERS:
        return _box_of(a_set, v, nothing)
    if isinstance(a_set, Product):
        sets, parts, _ = a_set._split(v)
        return _joined([_rows(one, part) for one, part in zip(sets, parts, strict=True)])
    if isinstance(a_set, Each) and not a_set.own and len(jax.tree.leaves(v)) == 1:
        leaf = jax.tree.leaves(v)[0]
        return _joined([_rows(a_set.each, jax.tree.map(lambda _: leaf[0], v))] * len(leaf))
    if type(a_set) is Polyhedron:
        return Rows.without_box(a_set.G, a_set.h, a_set.A, a_set.b)
    if type(a_set) is Affine:
        return Rows.without_box(nothing, np.zeros(0), a_set.A, a_set.b)
    if type(a_set) is Halfspace:
        return Rows.without_box(_flat(a_set.a, v)[None], a_set.b)
    if type(a_set) is Hyperplane:
        return Rows.without_box(nothing, np.zeros(0), _flat(a_set.a, v)[None], a_set.b)
    box = _box_of(a_set, v, nothing)
    if type(a_set) is Simplex:
        return box._replace(A=np.ones((1, size)), b=np.full(1, float(a_set.total)))
    return box


def _box_of(a_set: Any, v: PyTree, nothing: np.ndarray) -> Rows:
    lo, hi = (_flat(bound, v) for bound in bounds(a_set, v))
    if type(a_set) not in (Reals, Box, NonNegative, Simplex):
        lo, hi = iv.widened(lo, hi, 4)  # bounds that were computed: a ball's, or the user's own
    return Rows(lo, hi, nothing, np.zeros(0), nothing, np.zeros(0))


def _flat(tree: PyTree, v: PyTree) -> np.ndarray:
    tree = broadcast("a", tree, v)
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(v), strict=True)
    return np.concatenate([np.broadcast_to(np.asarray(one, float), jnp.shape(leaf)).ravel() for one, leaf in pairs])


def _joined(parts: list[Rows]) -> Rows:
    lo, hi, h, b = (np.concatenate([getattr(part, name) for part in parts]) for name in ("lo", "hi", "h", "b"))
    G, A = (np.asarray(scipy.linalg.block_diag(*(getattr(part, name) for part in parts))) for name in ("G", "A"))
    return Rows(lo, hi, G, h, A, b)
