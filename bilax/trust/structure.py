"""What a function's jaxpr tells of its structure: whether it is a sum of parts with variables of their own, or convex.

f is read backwards from its value through sums and constant factors, to the *terms* that they add up. What a term's
entries depend on is then followed forwards from the variables. Variables that no entry brings together are separate
parts. Where entries depend on y through linear maps (X @ y), the maps' values are taken as variables instead: a sum of
convex functions of such values is convex, which is how regressions of any size are recognised.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.extend import core

from bilax.trust import interval as iv
from bilax.trust.branch_and_bound import LIMIT, least_eigenvalue
from bilax.trust.interval import Interval
from bilax.trust.interval_rules import MOVES, Bounds, Interpreter, Jet, Traced
from bilax.trust.program import ENTRY_BY_ENTRY, dependents, is_linear, needed, recognised, terms_of, varying

_ROWS = (1, 8, 64)
_MOST_NUMBERS = 4_000_000
"""about how many numbers one evaluation may hold"""


class Convexity(NamedTuple):
    """What is proven of a convex function at a point."""

    value: Interval
    slope: Interval
    """its gradient"""
    curvature: np.ndarray
    """for each coordinate a number such that the Hessian minus their diagonal matrix has no negative eigenvalue"""


class _Seen(NamedTuple):
    """What is known of a value: the variable that each entry depends on (−1: none), and how."""

    ids: np.ndarray | None
    """None: entries mix variables, and the value is linear in y"""
    linear: bool


class _Analysis:
    """The terms of f, the variables of their entries, and which variables go together."""

    def __init__(self, traced: Traced, rows: int):
        self.size, self.rows = traced.size, rows
        self.program, self.consts = traced.jaxpr(rows)
        self.seen: dict[Any, _Seen] = {}
        self.edges: list[np.ndarray] = []
        self.fresh: dict[Any, np.ndarray] = {}
        self.count = rows * self.size
        self.seen[self.program.invars[0]] = _Seen(np.arange(self.count).reshape(rows, self.size), True)
        self.depends = dependents(self.program)
        self.roots = terms_of(self.program, self.depends)[0]
        # Only what leads to the terms: what adds them up brings nothing together.
        for eqn in needed(self.program.eqns, self.roots, set()):
            self._follow(eqn)
        self.root_ids = [self._ids(root) for root in self.roots]
        edges = np.concatenate([np.zeros((0, 2), int), *self.edges])
        graph = scipy.sparse.coo_matrix((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), (self.count, self.count))
        self.part_of = scipy.sparse.csgraph.connected_components(graph, directed=False)[1]

    # Forwards

    def _known(self, atom: Any) -> _Seen | None:
        return None if isinstance(atom, core.Literal) else self.seen.get(atom)

    def _ids(self, atom: Any) -> np.ndarray:
        """The variables of a value's entries; one that mixes them becomes a block of variables of its own."""
        known = self._known(atom)
        if known is None:
            return np.full(atom.aval.shape, -1)
        if known.ids is not None:
            return known.ids
        if atom not in self.fresh:
            size = int(np.prod(atom.aval.shape))
            self.fresh[atom] = np.arange(self.count, self.count + size).reshape(atom.aval.shape)
            self.count += size
        return self.fresh[atom]

    def _follow(self, eqn: Any) -> None:
        known = [self._known(atom) for atom in eqn.invars]
        if not any(known):
            return
        name, out = eqn.primitive.name, eqn.outvars[0]
        linear = is_linear(eqn, varying(eqn, self.depends)) and all(one is None or one.linear for one in known)
        pair = name in _PAIRS and not (linear and sum(one is not None for one in known) == 2)
        if name in ENTRY_BY_ENTRY or pair or recognised(eqn):
            if linear and any(one is not None and one.ids is None for one in known):
                self.seen[out] = _Seen(None, True)
            else:
                self.seen[out] = _Seen(self._join([self._ids(atom) for atom in eqn.invars], out.aval.shape), linear)
        elif linear and name not in MOVES:
            self.seen[out] = _Seen(None, True)
        elif name in MOVES:
            self._move(eqn, known, linear)
        elif name.startswith("reduce_") or name in ("cumsum", "cumprod"):
            axes = eqn.params.get("axes", (eqn.params.get("axis"),))
            self.seen[out] = _Seen(
                self._over(self._ids(eqn.invars[0]), tuple(int(a) for a in axes), out.aval.shape), False
            )
        elif name == "dot_general":
            self.seen[out] = _Seen(self._dot(eqn), False)
        else:
            self._all_together(eqn)

    def _join(self, parts: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        joined = np.full(shape, -1)
        for ids in parts:
            ids = np.broadcast_to(ids, shape)
            both = (joined >= 0) & (ids >= 0) & (joined != ids)
            self.edges.append(np.stack([joined[both], ids[both]], 1))
            joined = np.where(joined >= 0, joined, ids)
        return joined

    def _over(self, ids: np.ndarray, axes: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        first = ids.max(axes, keepdims=True)
        spread = np.broadcast_to(first, ids.shape)
        both = (ids >= 0) & (ids != spread)
        self.edges.append(np.stack([ids[both], spread[both]], 1))
        return first.reshape(shape) if np.prod(shape) == first.size else np.broadcast_to(first, shape)

    def _dot(self, eqn: Any) -> np.ndarray:
        """The inner product of two values entry by entry; anything more brings all together."""
        (left, right), (batch_left, batch_right) = eqn.params["dimension_numbers"]
        shapes = [atom.aval.shape for atom in eqn.invars]
        if any(len(shape) != len(left) + len(batch_left) for shape in shapes):
            return self._all_together(eqn)
        one, two = self._ids(eqn.invars[0]), self._ids(eqn.invars[1])
        one, two = one.transpose([*batch_left, *left]), two.transpose([*batch_right, *right])
        joined = self._join([one, two], one.shape)
        return self._over(joined, tuple(range(len(batch_left), joined.ndim)), eqn.outvars[0].aval.shape)

    def _move(self, eqn: Any, known: list[_Seen | None], linear: bool) -> None:
        if linear and any(one is not None and one.ids is None for one in known):
            for out in eqn.outvars:
                self.seen[out] = _Seen(None, True)
            return
        moved = MOVES[eqn.primitive.name]([self._ids(atom).astype(float) for atom in eqn.invars], eqn.params, 0)
        for out, ids in zip(eqn.outvars, moved, strict=True):
            self.seen[out] = _Seen(np.asarray(ids).astype(int), linear)

    def _all_together(self, eqn: Any) -> np.ndarray:
        """For operations whose entries are not followed: every result depends on every argument."""
        every = np.concatenate([self._ids(atom).ravel() for atom in eqn.invars])
        every = np.unique(every[every >= 0])
        self.edges.append(np.stack([every[:-1], every[1:]], 1))
        for out in eqn.outvars:
            self.seen[out] = _Seen(np.full(out.aval.shape, every[0]), False)
        return self.seen[eqn.outvars[0]].ids  # pyright: ignore[reportReturnType]

    # Backwards

    @functools.cached_property
    def weights(self) -> tuple[list[Interval], Interval]:
        """What f multiplies each entry of its terms by, and what it adds to them, per row."""
        ones = Jet(iv.point(np.ones(self.rows)))
        (start,), slopes = self.transposed(self.roots, self.program.outvars, [ones])
        return slopes, start

    def transposed(self, sources: list[Any], targets: list[Any], cotangents: list[Jet]) -> tuple[list[Interval], ...]:
        """The targets, linear in the sources, where those are zero; and the cotangents pulled back to the sources.

        Values on the way that do not depend on y are found on intervals, since they too are rounded.
        """
        on_the_way = [
            eqn for eqn in needed(self.program.eqns, targets, set(sources)) if self.depends & set(eqn.outvars)
        ]
        inputs = {a: None for eqn in on_the_way for a in eqn.invars if not isinstance(a, core.Literal)}
        constants = [a for a in inputs if a not in self.depends]
        values = self.evaluate(constants, iv.point(np.zeros((self.rows, self.size))), 0) if constants else []

        def forward(start, constants_now):
            known = dict(zip(constants, constants_now, strict=True)) | dict(zip(sources, start, strict=True))
            for eqn in on_the_way:
                out = eqn.primitive.bind(
                    *(a.val if isinstance(a, core.Literal) else known[a] for a in eqn.invars), **eqn.params
                )
                known.update(zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True))
            return [known[target] for target in targets]

        def both(constants_now, cotangents):
            zeros = [jnp.zeros(source.aval.shape) for source in sources]
            value, pull = jax.vjp(lambda start: forward(start, constants_now), zeros)
            return value, pull(cotangents)[0]

        like = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in constants]
        like_cotangents = [jax.ShapeDtypeStruct(target.aval.shape, jnp.float64) for target in targets]
        closed = jax.make_jaxpr(both)(like, like_cotangents)
        with np.errstate(all="ignore"):
            out = [jet.value for jet in Interpreter(0, 1).run(closed.jaxpr, closed.consts, [*values, *cotangents])]
        return out[: len(targets)], out[len(targets) :]

    def evaluate(
        self, targets: list[Any], boxes: Interval, order: int, seeds: dict[Any, np.ndarray] | None = None, k: int = 1
    ) -> list[Any]:
        """Jets of intermediate values over boxes (rows, size); `seeds` replaces the slopes of some of them."""
        program = self.program._replace(outvars=targets, eqns=needed(self.program.eqns, targets, set()))
        seeds = seeds or {}
        start = Jet(boxes, _point_of(seeds.get(program.invars[0])) if order else None)
        with np.errstate(all="ignore"):
            return Interpreter(order, k, seeds if order else {}).run(program, self.consts, [start])


def _point_of(array: np.ndarray | None) -> Interval | None:
    return None if array is None else Interval(array, array)


_PAIRS = {"add", "sub", "add_any"}
"""Operations entry by entry of which one, a sum of two linear values, mixes their variables."""


class Separable:
    """f as a sum of parts of a few variables each; see `Parts`."""

    def __init__(self, traced: Traced, reference: np.ndarray, analysis: _Analysis):
        self.traced, self.reference, self.size = traced, reference, traced.size
        part = analysis.part_of[: self.size]
        _, self.part = np.unique(part, return_inverse=True)
        self.count = int(self.part.max()) + 1
        order = np.argsort(self.part, kind="stable")
        starts = np.searchsorted(self.part[order], np.arange(self.count))
        self.colour = np.empty(self.size, int)
        self.colour[order] = np.arange(self.size) - starts[self.part[order]]
        self.width = int(self.colour.max()) + 1
        self._analyses = {1: analysis}

    def spread(self, point: np.ndarray, filling: float = 0.0) -> np.ndarray:
        """A vector of all variables as rows of the parts' variables."""
        out = np.full((self.count, self.width), filling)
        out[self.part, self.colour] = point
        return out

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """The vector that `spread` made rows of."""
        return rows[self.part, self.colour]

    @property
    def constant(self) -> Interval:
        """What f adds to its parts."""
        start = self._analyses[1].weights[1]
        return Interval(*(end.reshape(-1)[0] for end in start))

    def bounds(self, which: np.ndarray, boxes: Interval, order: int) -> Bounds:
        place = np.empty(len(which), int)
        by_part = np.argsort(which, kind="stable")
        first = np.searchsorted(which[by_part], which[by_part])
        place[by_part] = np.arange(len(which)) - first
        depth, k = int(place.max()) + 1, self.width
        most = max(1, _MOST_NUMBERS // (self.size * k ** max(order, 1)))
        rows = max(r for r in _ROWS if r == 1 or (r <= most and r < 8 * depth))
        outs = [np.zeros((len(which), 2, *[k] * lead)) for lead in range(3)]
        for begin in range(0, depth, rows):
            mine = np.flatnonzero((place >= begin) & (place < begin + rows))
            row = place[mine] - begin
            ends = []
            for end in boxes:
                full = np.tile(self.reference, (rows, 1))
                table = np.tile(self.spread(self.reference), (rows, 1, 1))
                table[row, which[mine]] = end[mine]
                full = table[:, self.part, self.colour]
                ends.append(full)
            whole = Interval(ends[0], ends[0]) if boxes.is_point else Interval(*ends)
            found = self._rows(whole, order)
            for lead in range(order + 1):
                for i in (0, 1):
                    outs[lead][mine, i] = found[lead][i][row, which[mine]]
        parts = [Interval(out[:, 0], out[:, 1]) for out in outs]
        return Bounds(*parts)

    def _rows(self, boxes: Interval, order: int) -> list[Interval]:
        """Per row and part: enclosures of value (rows, parts), slope (..., k) and bend (..., k, k)."""
        rows, k = len(boxes.lo), self.width
        if rows not in self._analyses:
            self._analyses[rows] = _Analysis(self.traced, rows)
        analysis = self._analyses[rows]
        seeds = np.zeros((k, rows, self.size))
        seeds[self.colour, :, np.arange(self.size)] = 1
        invar = analysis.program.invars[0]
        jets = analysis.evaluate(analysis.roots, boxes, order, {invar: seeds}, k)
        out = []
        for lead in range(order + 1):
            shape = (k,) * lead
            total = _Total(shape, rows * self.count)
            for jet, ids, weight in zip(jets, analysis.root_ids, analysis.weights[0], strict=True):
                if jet.parts[lead] is not None:
                    terms = iv.mul(jet.parts[lead], weight)
                    terms = Interval(*(np.broadcast_to(end, (*shape, *ids.shape)).reshape(*shape, -1) for end in terms))
                    total.add(terms, (ids // self.size * self.count + self.part[ids % self.size]).ravel())
            summed = total.interval()
            out.append(Interval(*(np.moveaxis(end, -1, 0).reshape(rows, self.count, *shape) for end in summed)))
        return out


class _Total:
    """Sums of intervals by place, with the rounding error of the sums."""

    def __init__(self, shape: tuple[int, ...], places: int):
        self.shape, self.places, self.most = shape, places, 1
        self.ends = [np.zeros((int(np.prod(shape)), places)) for _ in range(4)]

    def add(self, terms: Interval, where: np.ndarray) -> None:
        self.most += int(np.bincount(where, minlength=self.places).max(initial=0))
        for i, end in enumerate((terms.lo, terms.hi, np.abs(terms.lo), np.abs(terms.hi))):
            flat = end.reshape(-1, len(where))
            for row, values in enumerate(flat):
                self.ends[i][row] += np.bincount(where, values, self.places)

    def interval(self) -> Interval:
        slack = 4 * self.most * 2.0**-52
        lo, hi, low_size, high_size = self.ends
        lo = lo - np.where(np.isfinite(lo), slack * low_size, 0) - 1e-320
        hi = hi + np.where(np.isfinite(hi), slack * high_size, 0) + 1e-320
        # Sums to which nothing was added stay exact.
        lo, hi = np.where(low_size == 0, 0.0, lo), np.where(high_size == 0, 0.0, hi)
        return iv.safe(lo.reshape(*self.shape, -1), hi.reshape(*self.shape, -1))


def separate(traced: Traced, reference: np.ndarray) -> Separable | None:
    """f as a sum of parts with few variables each, or None where it is none."""
    analysis = _Analysis(traced, 1)
    if analysis.fresh or any(np.any(ids < 0) for ids in analysis.root_ids):
        return None
    found = Separable(traced, reference, analysis)
    return found if found.count > 1 and found.width <= LIMIT else None


def convexity(traced: Traced, lo: np.ndarray, hi: np.ndarray, y: np.ndarray) -> Convexity | None:
    """f's value, gradient and curvature at y if it is proven convex over the box, else None."""
    analysis = _Analysis(traced, 1)
    if any(np.any(ids < 0) for ids in analysis.root_ids):
        return None
    parts, part = np.unique(analysis.part_of, return_inverse=True)
    order = np.argsort(part, kind="stable")
    colour = np.empty(analysis.count, int)
    colour[order] = np.arange(analysis.count) - np.searchsorted(part[order], np.arange(len(parts)))[part[order]]
    k = int(colour.max()) + 1
    if k > LIMIT or analysis.count * k * k > _MOST_NUMBERS:
        return None
    blocks = {analysis.program.invars[0]: np.arange(traced.size)[None]} | analysis.fresh
    seeds = {
        var: (np.arange(k).reshape(-1, *[1] * ids.ndim) == colour[ids]).astype(float) for var, ids in blocks.items()
    }

    def sums(boxes, order_wanted):
        jets = analysis.evaluate(analysis.roots, boxes, order_wanted, seeds, k)
        total = _Total((k,) * order_wanted, len(parts))
        for jet, ids, weight in zip(jets, analysis.root_ids, analysis.weights[0], strict=True):
            if jet.parts[order_wanted] is not None:
                terms = iv.mul(jet.parts[order_wanted], weight)
                shape = ((k,) * order_wanted) + ids.shape
                total.add(
                    Interval(*(np.broadcast_to(e, shape).reshape(*shape[:order_wanted], -1) for e in terms)),
                    part[ids].ravel(),
                )
        return total.interval()

    bend = Interval(*(np.moveaxis(end, -1, 0) for end in sums(Interval(lo[None], hi[None]), 2)))
    with np.errstate(all="ignore"):
        least = least_eigenvalue(bend, np.ones((len(parts), k)))
    if not np.all(least >= 0):
        return None
    slopes = sums(iv.point(y[None]), 1)
    by_id = Interval(*(end[colour, part] for end in slopes))
    slope = _pull_back(analysis, by_id)
    sizes = np.bincount(part)
    own = np.arange(traced.size)
    curvature = np.where(sizes[part[own]] == 1, least[part[own]], 0.0)
    return Convexity(traced.bounds(iv.point(y[None]), 0).value, slope, curvature)


def _pull_back(analysis: _Analysis, by_id: Interval) -> Interval:
    """The gradient by y, from that by y's own entries and by the linear maps' values."""
    own = Interval(*(end[: analysis.size] for end in by_id))
    if not analysis.fresh:
        return own
    jets = [Jet(Interval(*(end[ids] for end in by_id))) for ids in analysis.fresh.values()]
    _, (pulled,) = analysis.transposed(analysis.program.invars, list(analysis.fresh), jets)
    return iv.add(own, Interval(*(end.reshape(-1) for end in pulled)))
