"""A function's jaxpr as a plain list of operations, and what can be read from it without computing anything."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    *("checkpoint", "remat", "remat2", "custom_lin"),
}
"""Operations that run another jaxpr once."""
REARRANGING = {
    *("reshape", "squeeze", "expand_dims", "transpose", "rev", "concatenate", "stack", "broadcast_in_dim", "slice"),
    *("pad", "split"),
}
"""Operations that only move entries about, to places that are known."""


ENTRY_BY_ENTRY = {
    *("neg", "abs", "square", "exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "sin", "cos", "tan"),
    *("sinh", "cosh", "tanh", "logistic", "atan", "asinh", "asin", "acos", "atanh", "acosh", "erf", "erfc", "lgamma"),
    *("integer_pow", "pow", "max", "min", "clamp", "select_n", "sign", "rem", "floor", "ceil", "round", "is_finite"),
    *("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "stop_gradient", "copy"),
    *("mul", "div", "convert_element_type"),
}
"""Operations that work entry by entry, besides sums."""


class Program(NamedTuple):
    """As much of a jaxpr as an interpreter reads."""

    constvars: list[Any]
    invars: list[Any]
    eqns: list[Any]
    outvars: list[Any]


def needed(eqns: list[Any], targets: list[Any], given: set[Any]) -> list[Any]:
    """Those of the equations that the targets depend on, if the given values are known."""
    wanted, kept = set(targets) - given, []
    for eqn in reversed(eqns):
        if wanted & set(eqn.outvars):
            kept.append(eqn)
            wanted |= {a for a in eqn.invars if not isinstance(a, core.Literal)} - given
    return kept[::-1]


def inlined(closed: Any, without_constant: bool = False) -> tuple[Program, list[Any]]:
    """A jaxpr with the contents of its calls in their place, but for those with a rule."""
    constvars, consts, eqns = list(closed.jaxpr.constvars), list(closed.consts), []

    def walk(jaxpr, names):
        def read(atom):
            return atom if isinstance(atom, core.Literal) else names[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(atom) for atom in eqn.invars]
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if eqn.primitive.name in CALLS and isinstance(inner, core.ClosedJaxpr) and not recognised(eqn):
                constants = [core.Var(var.aval) for var in inner.jaxpr.constvars]
                constvars.extend(constants)
                consts.extend(inner.consts)
                inside = dict(zip([*inner.jaxpr.constvars, *inner.jaxpr.invars], [*constants, *inputs], strict=True))
                names.update(zip(eqn.outvars, walk(inner.jaxpr, inside), strict=True))
            else:
                outs = [core.Var(var.aval) for var in eqn.outvars]
                names.update(zip(eqn.outvars, outs, strict=True))
                eqns.extend(_as_sum(eqn.replace(invars=inputs, outvars=outs)))
        return [read(atom) for atom in jaxpr.outvars]

    names = {var: var for var in [*closed.jaxpr.constvars, *closed.jaxpr.invars]}
    outs = walk(closed.jaxpr, names)
    program = Program(constvars, list(closed.jaxpr.invars), eqns, outs)
    return (_without_constant(program) if without_constant else program), consts


def terms_of(program: Program, depends: set[Any]) -> tuple[list[Any], list[Any]]:
    """The values that the result is a linear function of, as far back as that holds, and the operations after them."""
    makers = {out: eqn for eqn in program.eqns for out in eqn.outvars}
    waiting, terms, after, passed = list(program.outvars), [], [], set()
    while waiting:
        atom = waiting.pop()
        if isinstance(atom, core.Literal) or atom in passed or atom not in depends:
            continue
        passed.add(atom)
        eqn = makers.get(atom)
        if eqn is not None and is_linear(eqn, varying(eqn, depends)):
            after.append(eqn)
            waiting += eqn.invars
        else:
            terms.append(atom)
    return terms, after


def _without_constant(program: Program) -> Program:
    """The program with zeros for what is added to its terms and does not depend on the variables."""
    depends = dependents(program)
    zero = jax.make_jaxpr(lambda v: v + 0.0)(jnp.zeros((), jnp.float64)).jaxpr.eqns[0].invars[1]
    users: dict[Any, list[Any]] = {}
    for eqn in program.eqns:
        for atom in eqn.invars:
            if not isinstance(atom, core.Literal):
                users.setdefault(atom, []).append(eqn)
    # Only where nothing but further sums use the value.
    sums, eqns = set(), []
    for eqn in reversed(program.eqns):
        kept = varying(eqn, depends)
        later = all(id(user) in sums for out in eqn.outvars for user in users.get(out, []))
        if later and any(kept) and is_linear(eqn, kept):
            sums.add(id(eqn))
            if eqn.primitive.name in ("add", "sub") and not all(kept):
                eqn = eqn.replace(invars=[a if keep else zero for a, keep in zip(eqn.invars, kept, strict=True)])
        eqns.append(eqn)
    return program._replace(eqns=eqns[::-1])


def varying(eqn: Any, depends: set[Any]) -> list[bool]:
    """Which arguments depend on the variables."""
    return [not isinstance(a, core.Literal) and a in depends for a in eqn.invars]


def _as_sum(eqn: Any) -> list[Any]:
    """An inner product of two arrays as their product and its sum, whose terms can be told apart."""
    if eqn.primitive.name != "dot_general":
        return [eqn]
    (left, right), batch = eqn.params["dimension_numbers"]
    one, two = (atom.aval for atom in eqn.invars)
    if left != right or batch[0] != batch[1] or tuple(batch[0]) != tuple(range(len(batch[0]))):
        return [eqn]
    if one.shape != two.shape or one.dtype != two.dtype or len(one.shape) != len(left) + len(batch[0]):
        return [eqn]
    product = core.Var(one)
    axes = tuple(int(axis) for axis in left)
    sum_params = {"axes": axes, "out_sharding": None}
    return [
        eqn.replace(outvars=[product], primitive=jax.lax.mul_p, params={}),
        eqn.replace(invars=[product], primitive=jax.lax.reduce_sum_p, params=sum_params),
    ]


def dependents(program: Program) -> set[Any]:
    found = set(program.invars)
    for eqn in program.eqns:
        if any(not isinstance(a, core.Literal) and a in found for a in eqn.invars):
            found |= set(eqn.outvars)
    return found


def is_linear(eqn: Any, varying: list[bool]) -> bool:
    """Whether the result is a linear function, plus a constant, of the arguments that depend on y."""
    name = eqn.primitive.name
    if not all(np.dtype(out.aval.dtype) == np.float64 for out in eqn.outvars):
        return False
    if name in ("add", "sub", "add_any", "neg", "reduce_sum", "cumsum", "copy", *REARRANGING):
        return True
    if name == "convert_element_type":
        return np.dtype(eqn.invars[0].aval.dtype) == np.float64
    if name in ("mul", "dot_general"):
        return sum(varying) == 1
    return name == "div" and not varying[1]


def _wiring(jaxpr: Any) -> tuple[Any, ...]:
    """The operations of a jaxpr and what feeds them, without shapes; those of inner calls in their place."""
    names: dict[Any, Any] = {}
    steps: list[Any] = []

    def read(atom):
        return (
            ("literal", float(atom.val))
            if isinstance(atom, core.Literal) and np.ndim(atom.val) == 0
            else names.get(atom)
        )

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if eqn.primitive.name in CALLS and inner is not None:
                inside = getattr(inner, "jaxpr", inner)
                names.update(zip(inside.invars, [read(atom) for atom in eqn.invars], strict=True))
                walk(inside)
                names.update(zip(eqn.outvars, [read(atom) for atom in inside.outvars], strict=True))
            elif eqn.primitive.name in ("broadcast_in_dim", "convert_element_type"):
                names[eqn.outvars[0]] = read(eqn.invars[0])
            else:
                steps.append((eqn.primitive.name, *(read(atom) for atom in eqn.invars)))
                names.update((out, (len(steps), i)) for i, out in enumerate(eqn.outvars))

    names.update((var, ("in", i)) for i, var in enumerate(jaxpr.invars))
    walk(jaxpr)
    return (*steps, *(read(atom) for atom in jaxpr.outvars))


def recognised(eqn: Any) -> str | None:
    """The name of a called function that has a rule of its own, told by its operations, not by its name."""
    inner = eqn.params.get("call_jaxpr")
    doubles = all(np.dtype(atom.aval.dtype) == np.float64 for atom in eqn.invars)
    if inner is None or len(eqn.invars) != 2 or len(eqn.outvars) != 1 or not doubles:
        return None
    wiring = _wiring(getattr(inner, "jaxpr", inner))
    if wiring == _known_wirings()["logaddexp"]:
        return "logaddexp"
    same = eqn.invars[0] is eqn.invars[1]
    return "xlogy" if same and wiring == _known_wirings()["xlogy"] else None


@functools.cache
def _known_wirings() -> dict[str, tuple[Any, ...]]:
    """How functions look whose parts, taken one by one, would give poor bounds."""
    number = jax.ShapeDtypeStruct((), jnp.float64)

    def inside(function):
        eqn = jax.make_jaxpr(function)(number, number).jaxpr.eqns[0]
        while "call_jaxpr" not in eqn.params:
            eqn = eqn.params["jaxpr"].jaxpr.eqns[0]
        return _wiring(eqn.params["call_jaxpr"].jaxpr)

    return {"logaddexp": inside(jnp.logaddexp), "xlogy": inside(jax.scipy.special.xlogy)}
