"""Bounds of a function and of its derivatives over boxes, from its jaxpr.

Every operation of the traced function is replaced by one on *jets*: intervals that contain its value and, if asked for,
its first and second derivatives by the function's variables, over a whole box. Derivatives come from the values that
the program computes and from nothing else, so custom derivative rules and `stop_gradient` change nothing. At a kink the
derivative's interval holds the slopes of both sides; at a jump (`where`, `floor`, a cast) it is everything.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from bilax.trust import interval as iv
from bilax.trust.interval import Interval, Numbers
from bilax.trust.program import CALLS, ENTRY_BY_ENTRY, inlined, recognised

_LONGEST_LOOP = 4096
_MOST_NUMBERS = 4_000_000
"""about how many numbers one evaluation may hold"""


class NotSupportedError(NotImplementedError):
    """The function uses an operation that has no version on intervals here."""


class Jet(NamedTuple):
    """Enclosures of a value (shape S), its slopes (k, *S) and second derivatives (k, k, *S); None stands for zero."""

    value: Interval
    slope: Interval | None = None
    bend: Interval | None = None
    undefined: np.ndarray | None = None
    """0 where the value is a number all over the box, 2 where it nowhere is, else 1; None: 0 everywhere"""

    @property
    def parts(self) -> tuple[Interval | None, Interval | None, Interval | None]:
        return self.value, self.slope, self.bend


class Bounds(NamedTuple):
    """What `bounds_of` returns for each box: enclosures of f, its gradient and its Hessian."""

    value: Interval
    slope: Interval
    """(boxes, k), or nothing if it was not asked for"""
    bend: Interval
    """(boxes, k, k), or nothing if it was not asked for"""


class Traced:
    """A function of a flat vector that returns a scalar (or an array), ready to be bounded over boxes."""

    def __init__(self, function: Callable[..., Any], size: int, without_constant: bool = False):
        """`without_constant` leaves out what f adds to all that depends on its variables, before it is rounded in."""
        self.function, self.size, self.without_constant = function, size, without_constant
        self._jaxprs: dict[int, Any] = {}

    def jaxpr(self, count: int) -> Any:
        if count not in self._jaxprs:
            like = jax.ShapeDtypeStruct((count, self.size), jnp.float64)
            closed = jax.make_jaxpr(jax.vmap(self.function))(like)
            self._jaxprs[count] = inlined(closed, self.without_constant)
        return self._jaxprs[count]

    def jet(self, boxes: Interval, order: int, seeds: np.ndarray | None = None) -> Jet:
        """The jet of f over boxes (count, size); `seeds` (size, k) says which variables each derivative is by."""
        count = len(boxes.lo)
        program, consts = self.jaxpr(count)
        slope, k = None, 1
        if order:
            seeds = np.eye(self.size) if seeds is None else seeds
            k = seeds.shape[1]
            ones = np.broadcast_to(seeds.T[:, None], (seeds.shape[1], count, self.size))
            slope = Interval(ones, ones)
        interpreter = Interpreter(order, k)
        with np.errstate(all="ignore"):
            (out,) = interpreter.run(program, consts, [Jet(boxes, slope)])
        return _as_jet(out)

    def bounds(self, boxes: Interval, order: int) -> Bounds:
        """Enclosures over boxes (count, size), in batches of fixed sizes so that f is traced a few times only."""
        parts = [self._bounds(Interval(lo, hi), order) for lo, hi in zip(*_batches(boxes, order), strict=True)]
        count = len(boxes.lo)
        return jax.tree.map(lambda *ends: np.concatenate(ends)[:count], *parts)

    def is_defined(self, boxes: Interval) -> np.ndarray:
        """Of each box, whether f is surely defined all over it."""
        parts = [self.jet(Interval(lo, hi), 0) for lo, hi in zip(*_batches(boxes, 0), strict=True)]
        return np.concatenate([_flags(jet) == 0 for jet in parts])[: len(boxes.lo)]

    def _bounds(self, boxes: Interval, order: int) -> Bounds:
        jet = self.jet(boxes, order)
        count, k = len(boxes.lo), self.size
        zero = iv.point(0.0)
        value = Interval(*(np.broadcast_to(end, (count,)) for end in jet.value))
        if jet.undefined is not None:
            # Where f is nowhere defined there is nothing to be low.
            value = iv.where(jet.undefined == 2, iv.point(np.inf), value)
        slope, bend = (count, k if order else 0), (count, k, k) if order > 1 else (count, 0, 0)
        return Bounds(
            value,
            Interval(*(np.broadcast_to(end.T, slope) for end in (jet.slope or zero))),
            Interval(*(np.broadcast_to(end.T, bend) for end in (jet.bend or zero))),
        )


def _batches(boxes: Interval, order: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    size = 1 if len(boxes.lo) == 1 else 32 if len(boxes.lo) <= 32 else 512
    while size > 1 and size * boxes.lo.shape[1] ** (1 + order) > _MOST_NUMBERS:
        size = {512: 32, 32: 1}[size]
    parts = -(-len(boxes.lo) // size)
    ends = [np.resize(end, (parts * size, end.shape[1])).reshape(parts, size, -1) for end in boxes]
    lows = list(ends[0])
    return lows, lows if boxes.is_point else list(ends[1])


def _as_jet(value: Any) -> Jet:
    return value if isinstance(value, Jet) else Jet(iv.point(np.asarray(value, float)))


class Interpreter:
    """Runs a jaxpr on jets. What is not in double precision (integers, truths) and does not vary stays an array."""

    def __init__(self, order: int, k: int, seeds: dict[Any, np.ndarray] | None = None):
        """`seeds`: values of the outermost jaxpr to differentiate by, with slopes (k, *shape) of their own."""
        self.order, self.k, self.seeds = order, k, seeds or {}

    def run(self, jaxpr: Any, consts: Any, args: Any) -> list[Any]:
        known: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        makers: dict[Any, Any] = {}

        def read(atom):
            value = atom.val if isinstance(atom, core.Literal) else known[atom]
            if not isinstance(value, Jet) and np.dtype(atom.aval.dtype) == np.float64:  # pyright: ignore
                return Jet(iv.point(np.asarray(value)))
            return value

        for eqn in jaxpr.eqns:
            outs = self.apply(eqn, [read(atom) for atom in eqn.invars], makers)
            known.update(zip(eqn.outvars, outs, strict=True))
            for out in self.seeds.keys() & set(eqn.outvars):
                known[out] = known[out]._replace(slope=Interval(self.seeds[out], self.seeds[out]), bend=None)
            makers.update((out, eqn) for out in eqn.outvars)
        return [read(atom) for atom in jaxpr.outvars]

    def apply(self, eqn: Any, args: list[Any], makers: dict[Any, Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
        if name in CALLS and inner is not None:
            return self.call(eqn, inner, args)
        if name in _LOOPS:
            return getattr(self, name)(params, args)
        if not any(isinstance(arg, Jet) for arg in args):
            if name != "iota" and np.dtype(eqn.outvars[0].aval.dtype) == np.float64 and name != "convert_element_type":
                raise NotSupportedError(name)
            out = eqn.primitive.bind(*args, **params)
            outs = out if eqn.primitive.multiple_results else [out]
            return [np.asarray(value) for value in outs]
        if np.dtype(eqn.outvars[0].aval.dtype) in _COARSE:
            raise NotSupportedError(f"{name} in {eqn.outvars[0].aval.dtype}, which rounds more than can be bounded")
        outs = self.rule_of(eqn, args, makers)
        if (
            name in MOVES
            or name == "select_n"
            or all(not isinstance(arg, Jet) or arg.undefined is None for arg in args)
        ):
            return [self.wrapped(out, var.aval.dtype) for out, var in zip(outs, eqn.outvars, strict=True)]
        return [self.doubted(eqn, out, flags) for out, flags in zip(outs, self.flags(eqn, args), strict=True)]

    def wrapped(self, out: Any, dtype: Any) -> Any:
        """Whole numbers that may be too large for their type can be anything that it holds."""
        if not isinstance(out, Jet) or np.dtype(dtype).kind not in "iu":
            return out
        info = np.iinfo(dtype)
        lost = (out.value.lo < info.min) | (out.value.hi > info.max)
        if not np.any(lost):
            return out
        ends = np.where(lost, info.min, out.value.lo), np.where(lost, info.max, out.value.hi)
        return self.with_jumps(Interval(*ends), True, varies=True)

    def flags(self, eqn: Any, args: list[Any]) -> list[np.ndarray]:
        """Where the results may be undefined because arguments are."""
        name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
        own = [_flags(_as_jet(arg)) for arg in args]
        if name in ENTRY_BY_ENTRY or name in ("add", "sub", "add_any"):
            together = np.broadcast_to(functools.reduce(np.maximum, own), shape)
            return [np.minimum(together, 1) if name in _FORGIVING else together]
        if name == "reduce_sum":
            return [own[0].max(tuple(eqn.params["axes"]), initial=0)]
        return [np.ones(var.aval.shape) for var in eqn.outvars]

    def doubted(self, eqn: Any, out: Any, flags: np.ndarray) -> Any:
        """A result some of whose arguments may be undefined: truths and whole numbers hide it, numbers do not."""
        dtype = np.dtype(eqn.outvars[0].aval.dtype)
        if dtype.kind == "f":
            return out._replace(undefined=flags if out.undefined is None else np.maximum(flags, out.undefined))
        if dtype.kind != "b":
            anything = iv.where(flags == 0, _as_jet(out).value, iv.whole(()))
            return self.wrapped(self.with_jumps(anything, True, varies=True), dtype)
        of_nothing = float(eqn.primitive.name in ("ne", "convert_element_type"))
        low, high = (np.where(flags == 2, of_nothing, end) for end in (0.0, 1.0))
        value = iv.where(flags == 0, _as_jet(out).value, Interval(low, high))
        return _truth(value.lo > 0, value.hi > 0)

    def rule_of(self, eqn: Any, args: list[Any], makers: dict[Any, Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name in _BITWISE and np.dtype(eqn.outvars[0].aval.dtype) != bool:
            raise NotSupportedError(f"{name} of the bits of whole numbers")
        same = len(eqn.invars) == 2 and eqn.invars[0] is eqn.invars[1]
        together = self.same_factors(eqn, args, same, makers)
        if together is not None:
            return [together]
        if name in ("eq", "ne") and same:
            return [np.full(np.shape(args[0].value.lo), name == "eq")]
        if name in _SAME:
            return args
        if name in _UNARY:
            return [self.unary(_UNARY[name], args[0])]
        if name in MOVES:
            return self.move(MOVES[name], params, args)
        rule = getattr(self, f"on_{name.replace('-', '_')}", None)
        if rule is None:
            raise NotSupportedError(name)
        out = rule(eqn, *args)
        return out if isinstance(out, list) else [out]

    # Calls and loops

    def call(self, eqn: Any, inner: Any, args: list[Any]) -> list[Any]:
        jaxpr, known = getattr(inner, "jaxpr", inner), recognised(eqn)
        if known == "logaddexp":
            difference = self.add(args[0], self.unary(_NEG, args[1]))
            return [self.add(args[1], self.unary(_SOFTPLUS, difference))]
        if known == "xlogy":
            return [self.unary(_X_LOG_X, args[0])]
        return self.run(jaxpr, getattr(inner, "consts", ()), args)

    def scan(self, params: dict[str, Any], args: list[Any]) -> list[Any]:
        length, split = params["length"], (params["num_consts"], params["num_consts"] + params["num_carry"])
        if length > _LONGEST_LOOP:
            raise NotSupportedError(f"a loop of {length} rounds")
        consts, carry, stacked = args[: split[0]], args[split[0] : split[1]], args[split[1] :]
        body, outs = params["jaxpr"], []
        for i in range(length):
            at = length - 1 - i if params["reverse"] else i
            results = self.run(body.jaxpr, body.consts, [*consts, *carry, *(_entry(arg, at) for arg in stacked)])
            carry = results[: params["num_carry"]]
            outs.append(results[params["num_carry"] :])
        outs = outs[::-1] if params["reverse"] else outs
        stacks = [self.move(MOVES["stack"], {"axis": 0}, list(parts))[0] for parts in zip(*outs, strict=True)]
        return [*carry, *stacks]

    # `while` is a word of Python's own, so the methods are found by their names in `_LOOPS`.
    def loop(self, params: dict[str, Any], args: list[Any]) -> list[Any]:
        conditions, bodies = params["cond_nconsts"], params["body_nconsts"]
        for_condition, for_body = args[:conditions], args[conditions : conditions + bodies]
        carry = args[conditions + bodies :]
        for _ in range(_LONGEST_LOOP):
            (go_on,) = self.run(params["cond_jaxpr"].jaxpr, params["cond_jaxpr"].consts, [*for_condition, *carry])
            if isinstance(go_on, Jet) or np.size(go_on) != 1:
                raise NotSupportedError("a while_loop whose rounds depend on y")
            if not bool(go_on):
                return carry
            carry = self.run(params["body_jaxpr"].jaxpr, params["body_jaxpr"].consts, [*for_body, *carry])
        raise NotSupportedError(f"a while_loop of more than {_LONGEST_LOOP} rounds")

    def cond(self, params: dict[str, Any], args: list[Any]) -> list[Any]:
        if isinstance(args[0], Jet) or np.size(args[0]) != 1:
            raise NotSupportedError("a cond that depends on y")
        branch = params["branches"][int(np.clip(int(args[0]), 0, len(params["branches"]) - 1))]
        return self.run(branch.jaxpr, branch.consts, args[1:])

    # Arithmetic

    def unary(self, rule: "_Unary", a: Jet) -> Jet:
        if rule is _NEG:
            negative = (None if part is None else iv.neg(part) for part in a.parts)
            return Jet(*negative, undefined=a.undefined)  # pyright: ignore[reportArgumentType]
        value = rule.value(a.value)
        flags = a.undefined
        if rule.least is not None:
            flags = _either(flags, _outside(rule, a.value, value))
        return self.chained(rule, a, value)._replace(undefined=flags)

    def chained(self, rule: "_Unary", a: Jet, value: Interval) -> Jet:
        """The chain rule."""
        if a.slope is None or not self.order:
            return Jet(value)
        first = rule.first(a.value)
        slope = iv.mul(_lead(first, 1), a.slope)
        if self.order < 2:
            return Jet(value, slope)
        bend = iv.mul(_lead(rule.second(a.value), 2), _outer_square(a.slope))
        if a.bend is not None:
            bend = iv.add(bend, iv.mul(_lead(first, 2), a.bend))
        return Jet(value, slope, bend)

    def add(self, a: Jet, b: Jet) -> Jet:
        flags = _either(a.undefined, b.undefined)
        return Jet(iv.add(a.value, b.value), _plus(a.slope, b.slope), _plus(a.bend, b.bend), flags)

    def mul(self, a: Jet, b: Jet) -> Jet:
        def product(one, two, lead):
            # Both differentiated: one by the first axis, the other by the second.
            return _outer(one, two) if lead == ((0,), (1,)) else iv.mul(one, two)

        return self.bilinear(a, b, product)._replace(undefined=_either(a.undefined, b.undefined))

    def bilinear(self, a: Jet, b: Jet, product: Callable[..., Interval]) -> Jet:
        """The product rule. `product(a, b, (i, j))` multiplies with the derivative axes i of a and j of b in front."""
        value = product(a.value, b.value, ((), ()))
        if not self.order or (a.slope is None and b.slope is None):
            return Jet(value)
        one = (0,)
        slope = _plus(
            None if b.slope is None else product(a.value, b.slope, ((), one)),
            None if a.slope is None else product(a.slope, b.value, (one, ())),
        )
        if self.order < 2:
            return Jet(value, slope)
        two = (0, 1)
        bend = _plus(
            None if b.bend is None else product(a.value, b.bend, ((), two)),
            None if a.bend is None else product(a.bend, b.value, (two, ())),
        )
        if a.slope is not None and b.slope is not None:
            cross = product(a.slope, b.slope, ((0,), (1,)))
            bend = _plus(bend, iv.add(cross, Interval(*(np.swapaxes(end, 0, 1) for end in cross))))
        return Jet(value, slope, bend)

    def same_factors(self, eqn: Any, args: list[Any], same: bool, makers: dict[Any, Any]) -> Jet | None:
        """u·u, u·log u and the inner product of u with itself, whose factors go together; None for all else."""
        if eqn.primitive.name == "mul":
            if same:
                return self.unary(_UNARY["square"], args[0])
            for atom, other, jet in zip(eqn.invars, eqn.invars[::-1], args, strict=True):
                maker = None if isinstance(other, core.Literal) else makers.get(other)
                if maker is not None and maker.primitive.name == "log" and maker.invars[0] is atom:
                    return self.unary(_X_LOG_X, jet)
        if eqn.primitive.name != "dot_general" or not same:
            return None
        (left, right), batch = eqn.params["dimension_numbers"]
        rest = [axis for axis in range(np.ndim(args[0].value.lo)) if axis not in (*left, *batch[0])]
        if left != right or batch[0] != batch[1] or rest or list(batch[0]) != sorted(batch[0]):
            return None
        return self.sum_over(self.unary(_UNARY["square"], args[0]), tuple(left))

    def sum_over(self, a: Jet, axes: tuple[int, ...]) -> Jet:
        return Jet(
            *(  # pyright: ignore
                None if part is None else iv.total(part, tuple(axis + lead for axis in axes))
                for lead, part in enumerate(a.parts)
            )
        )

    def on_add(self, eqn, a, b):
        return self.add(_as_jet(a), _as_jet(b))

    def on_add_any(self, eqn, a, b):
        return self.add(_as_jet(a), _as_jet(b))

    def on_sub(self, eqn, a, b):
        if eqn.invars[0] is eqn.invars[1]:
            return Jet(iv.point(np.zeros(np.shape(a.value.lo))))
        return self.add(_as_jet(a), self.unary(_NEG, _as_jet(b)))

    def on_mul(self, eqn, a, b):
        return self.mul(_as_jet(a), _as_jet(b))

    def on_div(self, eqn, a, b):
        if np.dtype(eqn.outvars[0].aval.dtype).kind in "iu":
            raise NotSupportedError("a division of whole numbers that depend on y")
        a, b = _as_jet(a), _as_jet(b)
        if b.slope is None:
            out = self.bilinear(a, b, lambda one, two, lead: iv.div(one, two))
        else:
            out = self.mul(a, self.unary(_RECIPROCAL, b))._replace(value=iv.div(a.value, b.value))
        pole = (b.value.lo <= 0) & (b.value.hi >= 0)
        return out._replace(
            undefined=_either(out.undefined, np.broadcast_to(pole, np.shape(out.value.lo)).astype(float))
        )

    def on_rem(self, eqn, a, b):
        a, b = _as_jet(a), _as_jet(b)
        if np.dtype(eqn.outvars[0].aval.dtype).kind in "iu" or b.slope is not None:
            raise NotSupportedError("a remainder of whole numbers, or by what depends on y")
        quotient = self.on_div(eqn, a, b)
        out = self.add(a, self.unary(_NEG, self.mul(b, self.steps(np.trunc, quotient))))
        # It is smaller than b and has the sign of a.
        size = iv.absolute(b.value).hi
        lo = np.clip(out.value.lo, np.where(a.value.lo >= 0, 0.0, -size), size)
        hi = np.clip(out.value.hi, -size, np.where(a.value.hi <= 0, 0.0, size))
        return out._replace(value=Interval(lo, hi), undefined=quotient.undefined)

    def on_integer_pow(self, eqn, a):
        return self.unary(_whole_power(eqn.params["y"]), a)

    def on_pow(self, eqn, a, b):
        a, b = _as_jet(a), _as_jet(b)
        if b.slope is None and (b.value.is_point or bool(np.all(b.value.lo == b.value.hi))):
            # Whole exponents, and they alone, have powers of what is negative.
            whole = np.isfinite(b.value.lo) & (b.value.lo == np.round(b.value.lo))
            out = None if whole.all() else self.unary(_real_power(b.value.lo), a)
            for exponent in np.unique(b.value.lo[whole]):
                power = self.unary(_whole_power(int(exponent)), a)
                out = power if out is None else self.on_select_n(eqn, np.asarray(b.value.lo == exponent), out, power)
            return out
        if np.any(a.value.lo < 0):
            raise NotSupportedError("pow with a negative base and an exponent that depends on y")
        return self.unary(_UNARY["exp"], self.mul(b, self.unary(_UNARY["log"], a)))

    def on_max(self, eqn, a, b):
        return self.larger(_as_jet(a), _as_jet(b))

    def on_min(self, eqn, a, b):
        negative = self.larger(self.unary(_NEG, _as_jet(a)), self.unary(_NEG, _as_jet(b)))
        return self.unary(_NEG, negative)

    def on_clamp(self, eqn, low, a, high):
        return self.on_min(eqn, self.larger(_as_jet(low), a), _as_jet(high))

    def larger(self, a: Jet, b: Jet) -> Jet:
        value = iv.maximum(a.value, b.value)
        if not self.order or (a.slope is None and b.slope is None):
            return Jet(value)
        first, second = a.value.lo >= b.value.hi, b.value.lo >= a.value.hi
        # A point where both are equal has the slopes of both sides.
        first, second = first & ~second, second & ~first
        slope = _choose(first, second, *self.full(a.slope, b.slope, value, 1))
        if self.order < 2:
            return Jet(value, slope)
        bends = self.full(a.bend, b.bend, value, 2)
        bend = _choose(first, second, *bends)
        kink = ~(first | second)
        # With one variable a kink of a maximum only bends upwards; with several its entries can be anything.
        lo = bend.lo if self.k == 1 else np.where(kink, -np.inf, bend.lo)
        return Jet(value, slope, Interval(lo, np.where(kink, np.inf, bend.hi)))

    def full(self, a: Interval | None, b: Interval | None, value: Interval, lead: int) -> tuple[Interval, Interval]:
        """Both with zeros written out."""
        shape = (self.k,) * lead + np.shape(value.lo)
        zero = np.zeros(shape)
        return tuple(
            Interval(zero, zero) if part is None else Interval(*(np.broadcast_to(end, shape) for end in part))
            for part in (a, b)
        )  # pyright: ignore[reportReturnType]

    def on_atan2(self, eqn, a, b):
        a, b = _as_jet(a), _as_jet(b)
        if not np.all(b.value.lo > 0):
            raise NotSupportedError("atan2 where its second argument is not positive")
        return self.unary(_UNARY["atan"], self.on_div(eqn, a, b))

    # Sums, products and extremes over axes

    def on_reduce_sum(self, eqn, a):
        return self.sum_over(a, tuple(int(axis) for axis in eqn.params["axes"]))

    def on_reduce_prod(self, eqn, a):
        return self.fold(a, eqn.params["axes"], self.mul)

    def on_reduce_max(self, eqn, a):
        return self.fold(a, eqn.params["axes"], self.larger)

    def on_reduce_min(self, eqn, a):
        return self.unary(_NEG, self.fold(self.unary(_NEG, a), eqn.params["axes"], self.larger))

    def fold(self, a: Jet, axes: Any, join: Callable[[Jet, Jet], Jet]) -> Jet:
        for axis in sorted((int(axis) for axis in axes), reverse=True):
            parts = [_take(a, i, axis) for i in range(a.value.lo.shape[axis])]
            if not parts:
                raise NotSupportedError("an extreme or product of nothing")
            # Halves, so that many factors make no long chain.
            while len(parts) > 1:
                pairs = [join(one, two) for one, two in zip(parts[::2], parts[1::2], strict=False)]
                parts = pairs + ([parts[-1]] if len(parts) % 2 else [])
            a = parts[0]
        return a

    def on_cumsum(self, eqn, a):
        return self.running(eqn, a, self.add)

    def on_cumprod(self, eqn, a):
        return self.running(eqn, a, self.mul)

    def on_cummax(self, eqn, a):
        return self.running(eqn, a, self.larger)

    def on_cummin(self, eqn, a):
        return self.unary(_NEG, self.running(eqn, self.unary(_NEG, a), self.larger))

    def on_sort(self, eqn, *args):
        if len(args) != 1 or args[0].undefined is not None:
            raise NotSupportedError("sort of several arrays together, or of what may be undefined")
        (a,), axis = args, eqn.params["dimension"]
        value = Interval(*(np.sort(end, axis) for end in a.value))
        if not self.order or a.slope is None:
            return Jet(value)
        # Each result is one of the entries; where two change places it bends.
        ends = a.slope.lo.min(axis + 1, keepdims=True), a.slope.hi.max(axis + 1, keepdims=True)
        slope = Interval(*(np.broadcast_to(end, (self.k, *value.lo.shape)) for end in ends))
        return Jet(value, slope, iv.whole((self.k, self.k, *value.lo.shape)) if self.order > 1 else None)

    def running(self, eqn: Any, a: Jet, join: Callable[[Jet, Jet], Jet]) -> Jet:
        axis, parts = eqn.params["axis"], []
        count = a.value.lo.shape[axis]
        if count > _LONGEST_LOOP:
            raise NotSupportedError(f"{eqn.primitive.name} of {count} entries")
        for i in range(count)[::-1] if eqn.params["reverse"] else range(count):
            entry = _take(a, i, axis)
            parts.append(join(parts[-1], entry) if parts else entry)
        parts = parts[::-1] if eqn.params["reverse"] else parts
        return self.move(MOVES["stack"], {"axis": axis}, parts)[0]

    def on_dot_general(self, eqn, a, b):
        subscripts, count = _subscripts(eqn)

        def product(one, two, lead):
            letters = "YZ"
            front = ["".join(letters[i] for i in axes) for axes in lead]
            left, right, out = subscripts
            return iv.contract(
                f"{front[0]}{left},{front[1]}{right}->{''.join(sorted(front[0] + front[1]))}{out}", one, two, count
            )

        return self.bilinear(_as_jet(a), _as_jet(b), product)

    # Moving entries about

    def move(self, mover: Callable[..., Any], params: dict[str, Any], args: list[Any]) -> list[Any]:
        """Applies a rearrangement to every part of the jets. What has no slope gets zeros where another has one."""
        jets = [_as_jet(arg) for arg in args]
        parts = []
        for lead in range(3):
            pieces = [jet.parts[lead] for jet in jets]
            if all(piece is None for piece in pieces):
                parts.append(None)
                continue
            shapes = [(self.k,) * lead + np.shape(jet.value.lo) for jet in jets]
            pieces = [
                _zeros(shape) if piece is None else _fill(piece, shape)
                for piece, shape in zip(pieces, shapes, strict=True)
            ]
            lows = mover([piece.lo for piece in pieces], params, lead)
            highs = (
                lows if all(piece.is_point for piece in pieces) else mover([piece.hi for piece in pieces], params, lead)
            )
            parts.append([Interval(low, high) for low, high in zip(lows, highs, strict=True)])
        outs = [Jet(*(None if part is None else part[i] for part in parts)) for i in range(len(parts[0]))]  # pyright: ignore
        if any(jet.undefined is not None for jet in jets):
            flags = mover([_flags(jet) for jet in jets], params, 0)
            outs = [out._replace(undefined=np.asarray(own)) for out, own in zip(outs, flags, strict=True)]
        return outs

    def by_place(self, eqn: Any, args: list[Any]) -> Jet:
        """A move whose other arguments say where: the primitive itself does it, for each derivative."""
        names = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2}
        if eqn.primitive.name in ("scatter", "scatter-add"):
            varied, fixed = [0, 2], [1]
        else:
            varied, fixed = list(range(names[eqn.primitive.name])), list(range(names[eqn.primitive.name], len(args)))
        if any(isinstance(args[i], Jet) for i in fixed):
            raise NotSupportedError(f"{eqn.primitive.name} at a place that depends on y")

        def mover(arrays, _, lead):
            def one(*varying):
                full = dict(zip(varied, varying, strict=True)) | {i: args[i] for i in fixed}
                return eqn.primitive.bind(*(full[i] for i in range(len(args))), **eqn.params)

            for _ in range(lead):
                one = jax.vmap(one)
            return [np.asarray(one(*(jnp.asarray(array) for array in arrays)))]

        (out,) = self.move(mover, {}, [args[i] for i in varied])
        return Jet(*(None if part is None else iv.safe(*part) for part in out.parts))  # pyright: ignore

    def on_gather(self, eqn, *args):
        return self.by_place(eqn, list(args))

    def on_dynamic_slice(self, eqn, *args):
        return self.by_place(eqn, list(args))

    def on_dynamic_update_slice(self, eqn, *args):
        return self.by_place(eqn, list(args))

    def on_scatter(self, eqn, *args):
        return self.by_place(eqn, list(args))

    def on_scatter_add(self, eqn, *args):
        out, sizes = self.by_place(eqn, list(args)), self.by_place(eqn, [_sizes(arg) for arg in args])
        slack = 2.0**-50 * (np.size(_as_jet(args[2]).value.lo) + 1)
        parts = (
            part if part is None or size is None else iv.safe(part.lo - slack * size.lo, part.hi + slack * size.lo)
            for part, size in zip(out.parts, sizes.parts, strict=True)
        )
        return Jet(*parts)  # pyright: ignore[reportArgumentType]

    # What jumps

    def on_convert_element_type(self, eqn, a):
        kind = np.dtype(eqn.params["new_dtype"]).kind
        if kind == "b":
            return _truth((a.value.lo > 0) | (a.value.hi < 0), (a.value.lo != 0) | (a.value.hi != 0))
        if np.dtype(eqn.invars[0].aval.dtype).kind == "b":
            return self.with_jumps(a.value, a.value.lo != a.value.hi, varies=True)
        if kind == "f":
            return a
        return self.steps(np.trunc, a)

    def steps(self, function: Callable[[Numbers], Numbers], a: Jet) -> Jet:
        """A rising function of steps: its slope is nothing where no step lies inside, else everything."""
        lo, hi = function(a.value.lo), function(a.value.hi)
        return self.with_jumps(Interval(lo, hi), lo != hi, a.slope is not None)

    def with_jumps(self, value: Interval, jump: Any, varies: bool) -> Jet:
        if not self.order or not varies:
            return Jet(value)
        slopes = [self.everything(value, jump, lead) for lead in range(1, self.order + 1)]
        return Jet(value, *slopes)  # pyright: ignore[reportArgumentType]

    def everything(self, value: Interval, jump: Any, lead: int) -> Interval:
        shape = (self.k,) * lead + np.shape(value.lo)
        return Interval(
            np.where(np.broadcast_to(jump, shape), -np.inf, 0.0), np.where(np.broadcast_to(jump, shape), np.inf, 0.0)
        )

    def on_floor(self, eqn, a):
        return self.steps(np.floor, a)

    def on_ceil(self, eqn, a):
        return self.steps(np.ceil, a)

    def on_round(self, eqn, a):
        lo, hi = np.floor(a.value.lo), np.ceil(a.value.hi)
        sure = np.round(a.value.lo) == np.round(a.value.hi)
        # Halves go either way, by the method that was asked for.
        sure &= (np.abs(a.value.lo % 1 - 0.5) > 0) & (np.abs(a.value.hi % 1 - 0.5) > 0)
        value = Interval(np.where(sure, np.round(a.value.lo), lo), np.where(sure, np.round(a.value.hi), hi))
        return self.with_jumps(value, ~sure, a.slope is not None)

    def on_sign(self, eqn, a):
        return self.steps(np.sign, a)

    def on_is_finite(self, eqn, a):
        sure = np.isfinite(a.value.lo) & np.isfinite(a.value.hi)
        return _truth(sure, np.ones_like(sure))

    def on_lt(self, eqn, a, b):
        a, b = _as_jet(a), _as_jet(b)
        return _truth(a.value.hi < b.value.lo, a.value.lo < b.value.hi)

    def on_le(self, eqn, a, b):
        a, b = _as_jet(a), _as_jet(b)
        return _truth(a.value.hi <= b.value.lo, a.value.lo <= b.value.hi)

    def on_gt(self, eqn, a, b):
        return self.on_lt(eqn, b, a)

    def on_ge(self, eqn, a, b):
        return self.on_le(eqn, b, a)

    def on_eq(self, eqn, a, b):
        a, b = _as_jet(a).value, _as_jet(b).value
        surely = (a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo)
        return _truth(surely, (a.lo <= b.hi) & (b.lo <= a.hi))

    def on_ne(self, eqn, a, b):
        return self.on_not(eqn, self.on_eq(eqn, a, b))

    def on_not(self, eqn, a):
        if not isinstance(a, Jet):
            return np.logical_not(a)
        return _truth(a.value.hi == 0, a.value.lo == 0)

    def on_and(self, eqn, a, b):
        a, b = _as_jet(a).value, _as_jet(b).value
        return _truth((a.lo > 0) & (b.lo > 0), (a.hi > 0) & (b.hi > 0))

    def on_or(self, eqn, a, b):
        a, b = _as_jet(a).value, _as_jet(b).value
        return _truth((a.lo > 0) | (b.lo > 0), (a.hi > 0) | (b.hi > 0))

    def on_reduce_or(self, eqn, a):
        axes = tuple(int(axis) for axis in eqn.params["axes"])
        return _truth((a.value.lo > 0).any(axes), (a.value.hi > 0).any(axes))

    def on_reduce_and(self, eqn, a):
        axes = tuple(int(axis) for axis in eqn.params["axes"])
        return _truth((a.value.lo > 0).all(axes), (a.value.hi > 0).all(axes))

    def on_select_n(self, eqn, which, *cases):
        if not any(isinstance(case, Jet) for case in cases) and not isinstance(which, Jet):
            return np.asarray(eqn.primitive.bind(which, *cases, **eqn.params))
        if len(cases) != 2:
            raise NotSupportedError("a choice of more than two cases")
        first, second = (_as_jet(case) for case in cases)
        choice = _as_jet(which).value
        never, always = choice.hi == 0, choice.lo > 0
        value = _choose(never, always, first.value, second.value)
        flags = None
        if first.undefined is not None or second.undefined is not None:
            one, two = (0.0 if case.undefined is None else case.undefined for case in (first, second))
            either = np.where((one == 2) & (two == 2), 2.0, np.minimum(np.maximum(one, two), 1))
            flags = np.broadcast_to(np.where(never, one, np.where(always, two, either)), np.shape(value.lo))
        if not self.order or (not isinstance(which, Jet) and first.slope is None and second.slope is None):
            return Jet(value, undefined=flags)
        open_still = ~(never | always)
        slopes = []
        for lead in range(1, self.order + 1):
            chosen = _choose(never, always, *self.full(first.parts[lead], second.parts[lead], value, lead))
            slopes.append(Interval(np.where(open_still, -np.inf, chosen.lo), np.where(open_still, np.inf, chosen.hi)))
        return Jet(value, *slopes)._replace(undefined=flags)


_FORGIVING = {"pow", "integer_pow", "max", "min", "clamp"}
"""what may be defined where an argument is not"""
_BITWISE = {"and", "or", "not"}
_LOOPS = {"scan", "while", "cond"}
setattr(Interpreter, "while", Interpreter.loop)
_COARSE = {np.dtype(name) for name in ("float32", "float16", jnp.bfloat16)}


class _Unary(NamedTuple):
    """A function of one number with its first and second derivative, all on intervals."""

    value: Callable[[Interval], Interval]
    first: Callable[[Interval], Interval]
    second: Callable[[Interval], Interval]
    least: float | None = None
    """where the domain begins; None: it is defined everywhere"""
    most: float = np.inf


def _constant(number: float) -> Callable[[Interval], Interval]:
    return lambda a: iv.point(np.full(np.shape(a.lo), number))


def _one_plus(a: Interval) -> Interval:
    return iv.add(iv.point(1.0), a)


def _within(least: float, most: float, rule: _Unary) -> _Unary:
    """The rule with derivatives that are everything where the argument may leave the domain."""

    def guarded(derivative):
        def apply(a):
            return iv.where((a.lo < least) | (a.hi > most), iv.whole(np.shape(a.lo)), derivative(a))

        return apply

    def value(a):
        outside = (a.hi < least) | (a.lo > most)
        return iv.where(outside, iv.whole(np.shape(a.lo)), rule.value(a))

    return _Unary(value, guarded(rule.first), guarded(rule.second), least, most)


def _outside(rule: _Unary, a: Interval, value: Interval) -> np.ndarray | None:
    """Where a function is undefined, as `Jet` tells it; None where it nowhere is."""
    never = (a.hi < rule.least) | (a.lo > rule.most)
    # At an infinite value it is no number.
    perhaps = (a.lo < rule.least) | (a.hi > rule.most) | np.isinf(value.lo) | np.isinf(value.hi)
    return never + 1.0 * (never | perhaps) if np.any(perhaps) else None


def _sizes(value: Any) -> Any:
    """The largest magnitudes of what varies."""
    if not isinstance(value, Jet):
        return value
    parts = (None if part is None else np.maximum(np.abs(part.lo), np.abs(part.hi)) for part in value.parts)
    return Jet(*(None if part is None else Interval(part, part) for part in parts))  # pyright: ignore


def _flags(jet: Jet) -> np.ndarray:
    return np.zeros(np.shape(jet.value.lo)) if jet.undefined is None else jet.undefined


def _either(one: np.ndarray | None, two: np.ndarray | None) -> np.ndarray | None:
    if one is None or two is None:
        return two if one is None else one
    return np.maximum(one, two)


def _with_poles(rule: _Unary) -> _Unary:
    """The rule with derivatives that are everything where a pole may lie inside: across one, f is not continuous."""

    def guarded(derivative):
        def apply(a):
            value = rule.value(a)
            inside = ~np.isfinite(value.lo) | ~np.isfinite(value.hi)
            edge = ((a.lo >= 0) | (a.hi <= 0)) & (rule.value is not iv.tan)
            return iv.where(inside & ~edge, iv.whole(np.shape(a.lo)), derivative(a))

        return apply

    return _Unary(rule.value, guarded(rule.first), guarded(rule.second), -np.inf)


def _whole_power(n: int) -> _Unary:
    def derivative(times, exponent):
        return lambda a: iv.scale(iv.power(a, exponent), float(times)) if times else iv.point(np.zeros(np.shape(a.lo)))

    rule = _Unary(lambda a: iv.power(a, n), derivative(n, n - 1), derivative(n * (n - 1), n - 2))
    return rule if n >= 0 else _with_poles(rule)


def _real_power(p: Numbers) -> _Unary:
    exponent = iv.point(p)

    def derivative(factor, less):
        lower = iv.sub(exponent, iv.point(less))

        def apply(a):
            # The exponent may be rounded: a power lies between those of its neighbours.
            return iv.mul(factor, iv.hull(iv.real_power(a, lower.lo), iv.real_power(a, lower.hi)))

        return apply

    second = iv.mul(exponent, iv.sub(exponent, iv.point(1.0)))
    rule = _Unary(lambda a: iv.real_power(a, p), derivative(exponent, 1.0), derivative(second, 2.0))
    return _within(0.0, np.inf, rule)


def _tanh_slope(a: Interval) -> Interval:
    return iv.scale(iv.logistic_slope(iv.scale(a, 2.0)), 4.0)


def _tan_slope(a: Interval) -> Interval:
    return _one_plus(iv.square(iv.tan(a)))


def _inverse_root(a: Interval) -> Interval:
    return iv.reciprocal(iv.sqrt(a))


_TWO_OVER_ROOT_PI = Interval(np.asarray(1.1283791670955126), np.asarray(1.1283791670955128))
_LOG_TWO = Interval(np.asarray(0.6931471805599452), np.asarray(0.6931471805599454))


def _erf_slope(a: Interval) -> Interval:
    return iv.mul(_TWO_OVER_ROOT_PI, iv.bell(a))


def _abs_slope(a: Interval) -> Interval:
    return Interval(np.where((a.lo >= 0) & (a.hi > 0), 1.0, -1.0), np.where((a.hi <= 0) & (a.lo < 0), -1.0, 1.0))


def _abs_bend(a: Interval) -> Interval:
    # A kink bends upwards, by any amount.
    return Interval(
        np.zeros(np.shape(a.lo)), np.where((a.lo < 0) & (a.hi > 0) | (a.lo == 0) | (a.hi == 0), np.inf, 0.0)
    )


_NEG = _Unary(iv.neg, _constant(-1.0), _constant(0.0))
_RECIPROCAL = _whole_power(-1)
_SOFTPLUS = _Unary(iv.softplus, iv.logistic, iv.logistic_slope)
_X_LOG_X = _within(0.0, np.inf, _Unary(iv.x_log_x, lambda a: _one_plus(iv.log(a)), iv.reciprocal))
_UNARY: dict[str, _Unary] = {
    "neg": _NEG,
    "abs": _Unary(iv.absolute, _abs_slope, _abs_bend),
    "square": _whole_power(2),
    "exp": _Unary(iv.exp, iv.exp, iv.exp),
    "exp2": _Unary(iv.exp2, lambda a: iv.mul(_LOG_TWO, iv.exp2(a)), lambda a: iv.mul(iv.square(_LOG_TWO), iv.exp2(a))),
    "expm1": _Unary(iv.expm1, iv.exp, iv.exp),
    "log": _within(0.0, np.inf, _Unary(iv.log, iv.reciprocal, lambda a: iv.neg(iv.square(iv.reciprocal(a))))),
    "log1p": _within(
        -1.0,
        np.inf,
        _Unary(
            iv.log1p,
            lambda a: iv.reciprocal(_one_plus(a)),
            lambda a: iv.neg(iv.square(iv.reciprocal(_one_plus(a)))),
        ),
    ),
    "sqrt": _within(
        0.0,
        np.inf,
        _Unary(
            iv.sqrt,
            lambda a: iv.scale(_inverse_root(a), 0.5),
            lambda a: iv.scale(iv.mul(_inverse_root(a), iv.reciprocal(a)), -0.25),
        ),
    ),
    "rsqrt": _within(
        0.0,
        np.inf,
        _Unary(
            _inverse_root,
            lambda a: iv.scale(iv.mul(_inverse_root(a), iv.reciprocal(a)), -0.5),
            lambda a: iv.scale(iv.mul(_inverse_root(a), iv.square(iv.reciprocal(a))), 0.75),
        ),
    ),
    "cbrt": _Unary(
        iv.cbrt,
        lambda a: iv.div(iv.square(iv.reciprocal(iv.cbrt(a))), iv.point(3.0)),
        lambda a: iv.whole(np.shape(a.lo)),
    ),
    "sin": _Unary(iv.sin, iv.cos, lambda a: iv.neg(iv.sin(a))),
    "cos": _Unary(iv.cos, lambda a: iv.neg(iv.sin(a)), lambda a: iv.neg(iv.cos(a))),
    "tan": _with_poles(_Unary(iv.tan, _tan_slope, lambda a: iv.scale(iv.mul(iv.tan(a), _tan_slope(a)), 2.0))),
    "sinh": _Unary(iv.sinh, iv.cosh, iv.sinh),
    "cosh": _Unary(iv.cosh, iv.sinh, iv.cosh),
    "tanh": _Unary(iv.tanh, _tanh_slope, lambda a: iv.scale(iv.mul(iv.tanh(a), _tanh_slope(a)), -2.0)),
    "logistic": _Unary(
        iv.logistic,
        iv.logistic_slope,
        lambda a: iv.mul(iv.logistic_slope(a), iv.neg(iv.tanh(iv.scale(a, 0.5)))),
    ),
    "atan": _Unary(
        iv.atan,
        lambda a: iv.reciprocal(_one_plus(iv.square(a))),
        lambda a: iv.scale(iv.mul(a, iv.square(iv.reciprocal(_one_plus(iv.square(a))))), -2.0),
    ),
    "asinh": _Unary(
        iv.asinh,
        lambda a: _inverse_root(_one_plus(iv.square(a))),
        lambda a: iv.neg(iv.mul(a, iv.power(_inverse_root(_one_plus(iv.square(a))), 3))),
    ),
    "asin": _within(
        -1.0,
        1.0,
        _Unary(
            iv.asin,
            lambda a: _inverse_root(iv.sub(iv.point(1.0), iv.square(a))),
            lambda a: iv.mul(a, iv.power(_inverse_root(iv.sub(iv.point(1.0), iv.square(a))), 3)),
        ),
    ),
    "acos": _within(
        -1.0,
        1.0,
        _Unary(
            iv.acos,
            lambda a: iv.neg(_inverse_root(iv.sub(iv.point(1.0), iv.square(a)))),
            lambda a: iv.neg(iv.mul(a, iv.power(_inverse_root(iv.sub(iv.point(1.0), iv.square(a))), 3))),
        ),
    ),
    "atanh": _within(
        -1.0,
        1.0,
        _Unary(
            iv.atanh,
            lambda a: iv.reciprocal(iv.sub(iv.point(1.0), iv.square(a))),
            lambda a: iv.scale(iv.mul(a, iv.square(iv.reciprocal(iv.sub(iv.point(1.0), iv.square(a))))), 2.0),
        ),
    ),
    "acosh": _within(
        1.0,
        np.inf,
        _Unary(
            iv.acosh,
            lambda a: _inverse_root(iv.sub(iv.square(a), iv.point(1.0))),
            lambda a: iv.neg(iv.mul(a, iv.power(_inverse_root(iv.sub(iv.square(a), iv.point(1.0))), 3))),
        ),
    ),
    "erf": _Unary(iv.erf, _erf_slope, lambda a: iv.scale(iv.mul(a, _erf_slope(a)), -2.0)),
    "lgamma": _Unary(iv.lgamma, iv.lgamma_slope, iv.lgamma_bend),
    "erfc": _Unary(iv.erfc, lambda a: iv.neg(_erf_slope(a)), lambda a: iv.scale(iv.mul(a, _erf_slope(a)), 2.0)),
}
_SAME = {"stop_gradient", "copy", "copy_p", "optimization_barrier"}
"""what returns its arguments"""


def _truth(surely: Any, possibly: Any) -> Any:
    """A truth: a plain array where all is decided, else a jet of zeros and ones."""
    if bool(np.all(surely == possibly)):
        return np.asarray(surely)
    return Jet(Interval(np.asarray(surely, float), np.asarray(possibly, float)))


def _choose(first: Any, second: Any, a: Interval, b: Interval) -> Interval:
    """a where `first`, b where `second`, and the hull of both elsewhere."""
    return iv.where(first, a, iv.where(second, b, iv.hull(a, b)))


def _plus(a: Interval | None, b: Interval | None) -> Interval | None:
    if a is None or b is None:
        return a if b is None else b
    return iv.add(a, b)


def _lead(a: Interval, count: int) -> Interval:
    """With `count` axes in front."""
    if a.is_point:
        end = a.lo[(None,) * count]
        return Interval(end, end)
    return Interval(*(end[(None,) * count] for end in a))


def _outer(a: Interval, b: Interval) -> Interval:
    return iv.mul(Interval(*(end[:, None] for end in a)), Interval(*(end[None] for end in b)))


def _outer_square(a: Interval) -> Interval:
    """a aᵀ, with squares on the diagonal, where both factors are one number."""
    product, squares, k = _outer(a, a), iv.square(a), np.arange(len(a.lo))
    lo, hi = product.lo.copy(), product.hi.copy()
    lo[k, k], hi[k, k] = squares.lo, squares.hi
    return Interval(lo, hi)


def _zeros(shape: tuple[int, ...]) -> Interval:
    zero = np.zeros(shape)
    return Interval(zero, zero)


def _fill(a: Interval, shape: tuple[int, ...]) -> Interval:
    if a.is_point:
        end = np.broadcast_to(a.lo, shape)
        return Interval(end, end)
    return Interval(*(np.broadcast_to(end, shape) for end in a))


def _take(a: Jet, i: int, axis: int) -> Jet:
    parts = [
        None if part is None else Interval(*(np.take(end, i, axis + lead) for end in part))
        for lead, part in enumerate(a.parts)
    ]
    flags = None if a.undefined is None else np.take(a.undefined, i, axis)
    return Jet(*parts, undefined=flags)  # pyright: ignore[reportArgumentType]


def _entry(a: Any, i: int) -> Any:
    return _take(a, i, 0) if isinstance(a, Jet) else a[i]


def _subscripts(eqn: Any) -> tuple[tuple[str, str, str], int]:
    """The einsum of a dot_general: letters of both arguments and of the result, and how many terms a sum has."""
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    shapes = [atom.aval.shape for atom in eqn.invars]
    letters = iter("abcdefghijklmnopqrstuvwxABCDEFGHIJKLMNOPQRSTUVWX")
    names = [dict.fromkeys(range(len(shape)), "") for shape in shapes]
    for one, two in [*zip(left_batch, right_batch, strict=True), *zip(left, right, strict=True)]:
        names[0][one] = names[1][two] = next(letters)
    for own in names:
        own.update((axis, next(letters)) for axis, letter in own.items() if not letter)
    batch = [names[0][axis] for axis in left_batch]
    used = {*batch, *(names[0][axis] for axis in left)}
    free = [letter for own in names for letter in own.values() if letter not in used]
    count = int(np.prod([shapes[0][axis] for axis in left], initial=1))
    return ("".join(names[0].values()), "".join(names[1].values()), "".join([*batch, *free])), count


def _move_broadcast(arrays, params, lead):
    (array,) = arrays
    shape = array.shape[:lead] + tuple(params["shape"])
    places = [*range(lead), *(int(axis) + lead for axis in params["broadcast_dimensions"])]
    full = [1] * len(shape)
    for place, size in zip(places, array.shape, strict=True):
        full[place] = size
    return [np.broadcast_to(array.reshape(full), shape)]


def _move_slice(arrays, params, lead):
    strides = params["strides"] or (1,) * len(params["start_indices"])
    cuts = [slice(*cut) for cut in zip(params["start_indices"], params["limit_indices"], strides, strict=True)]
    return [arrays[0][(slice(None),) * lead + tuple(cuts)]]


def _move_pad(arrays, params, lead):
    array, filling = arrays
    config = params["padding_config"]
    if any(low < 0 or high < 0 for low, high, _ in config):
        raise NotSupportedError("a pad that cuts off")
    shape = [
        low + high + size + max(size - 1, 0) * inner
        for size, (low, high, inner) in zip(array.shape[lead:], config, strict=True)
    ]
    out = np.broadcast_to(filling[(...,) + (None,) * len(shape)], array.shape[:lead] + tuple(shape)).copy()
    places = tuple(
        slice(low, low + size + max(size - 1, 0) * inner, inner + 1)
        for size, (low, _, inner) in zip(array.shape[lead:], config, strict=True)
    )
    out[(slice(None),) * lead + places] = array
    return [out]


def _move_split(arrays, params, lead):
    return np.split(arrays[0], np.cumsum(params["sizes"])[:-1], axis=params["axis"] + lead)


MOVES: dict[str, Callable[..., Any]] = {
    "reshape": lambda arrays, p, lead: [arrays[0].reshape(arrays[0].shape[:lead] + tuple(p["new_sizes"]))],
    "squeeze": lambda arrays, p, lead: [np.squeeze(arrays[0], tuple(int(axis) + lead for axis in p["dimensions"]))],
    "expand_dims": lambda arrays, p, lead: [np.expand_dims(arrays[0], tuple(axis + lead for axis in p["dimensions"]))],
    "transpose": lambda arrays, p, lead: [
        arrays[0].transpose([*range(lead), *(int(axis) + lead for axis in p["permutation"])])
    ],
    "rev": lambda arrays, p, lead: [np.flip(arrays[0], tuple(int(axis) + lead for axis in p["dimensions"]))],
    "concatenate": lambda arrays, p, lead: [np.concatenate(arrays, p["dimension"] + lead)],
    "stack": lambda arrays, p, lead: [np.stack(arrays, p["axis"] + lead)],
    "broadcast_in_dim": _move_broadcast,
    "slice": _move_slice,
    "pad": _move_pad,
    "split": _move_split,
}
