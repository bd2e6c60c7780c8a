"""PyTorch modules as JAX functions: `from_torch` and `to_torch`.

`torch.export` runs the module once for each shape of inputs, without computing anything, and writes down which of
PyTorch's operations it calls; these are then called in JAX (`bilax.models.aten`). So the module's own Python may be
anything that PyTorch can export, and derivatives of every order are JAX's.
"""

import copy
import itertools
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from bilax.models.aten import MAY_DRAW, NEEDS_KEY, OPERATIONS, RANDOM

Parameters = dict[str, Array]
_LEFT_OUT = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "generator")


def from_torch(module: Any) -> tuple[Callable[..., PyTree], Parameters]:
    """A PyTorch module as a pure function `apply(parameters, *inputs, key=None)`, and its parameters.

        apply, parameters = bilax.from_torch(torch.nn.Linear(3, 2))
        apply(parameters, jnp.ones((5, 3))).shape  # (5, 2)

    - `parameters` is a dictionary of arrays by the names of `module.named_parameters()`, ready to be x0 or y0. Those
      with `requires_grad=False` are not in it and stay as they are.
    - `apply` takes arrays of any shapes that the module takes, and gives its outputs. `jax.grad`, `jit` and `vmap`
      work on it; it may be part of both objectives.
    - The module is copied as it is now, with its mode. After `module.eval()` batch normalisation uses the stored
      statistics and dropout does nothing. In training mode normalisation uses those of the batch, and the stored ones
      do not change (a function has no state): to renew them, call `to_torch` and run some batches through the module in
      training mode. Dropout needs a `key`.
    - `bilax.to_torch(parameters, module)` puts the result back.

    Needs `pip install 'bilax[torch]'`. An operation that has no counterpart is named when `apply` is first called.
    """
    torch = _torch("from_torch")
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {module!r}.")
    module = copy.deepcopy(module).cpu()
    parameters = {name: jnp.asarray(_array(one)) for name, one in module.named_parameters() if one.requires_grad}
    programs: dict[Any, _Program] = {}

    def apply(parameters: Mapping[str, Any], *inputs: Any, key: Array | None = None) -> PyTree:
        _check_names(module, parameters)
        leaves, structure = jax.tree.flatten(inputs, is_leaf=lambda leaf: leaf is None)
        leaves = [leaf if leaf is None or isinstance(leaf, bool) else jnp.asarray(leaf) for leaf in leaves]
        signature = structure, tuple(leaf if _fixed(leaf) else (leaf.shape, leaf.dtype) for leaf in leaves)  # pyright: ignore
        if signature not in programs:
            programs[signature] = _export(module, leaves, structure)
        return _run(programs[signature], parameters, leaves, key)

    return apply, parameters


def to_torch(parameters: Mapping[str, Any], module: Any) -> Any:
    """Writes parameters such as `solution.y` into the PyTorch module they came from, in place, and returns it."""
    torch = _torch("to_torch")
    _check_names(module, parameters)
    varied = {name: one for name, one in module.named_parameters() if one.requires_grad}
    for name, one in varied.items():
        if one.shape != np.shape(parameters[name]):
            shapes = f"{np.shape(parameters[name])}, the module's {tuple(one.shape)}"
            raise ValueError(f"parameters[{name!r}] has the shape {shapes}.")
    with torch.no_grad():
        for name, one in varied.items():
            one.copy_(torch.from_numpy(np.array(parameters[name], np.float64)))
    return module


class _Program(NamedTuple):
    """What `torch.export` wrote down for inputs of one shape."""

    nodes: tuple[Any, ...]
    places: tuple[Any, ...]
    """for each placeholder the name of a parameter, a constant array, or the number of an input"""
    wanted: tuple[int, ...]
    """which of the graph's outputs are the module's; the others are new statistics"""
    join: Callable[[list[Any]], Any]
    """puts outputs together as the module does"""
    own: Any
    """the module's precision; JAX may compute in another one, and is then to stay there"""


def _export(module: Any, leaves: list[Any], structure: Any) -> _Program:
    torch = _torch("from_torch")
    own = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.get_default_dtype())

    def example(leaf):
        if _fixed(leaf):
            return leaf
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return torch.empty(leaf.shape, dtype=own if floating else getattr(torch, str(leaf.dtype)))

    program = _exported(module, jax.tree.unflatten(structure, [example(leaf) for leaf in leaves]))
    signature = program.graph_signature
    # Of parameters that are one tensor under several names, the first name counts.
    names = {id(one): name for name, one in module.named_parameters() if one.requires_grad}
    varied = {name: names.get(id(one)) for name, one in module.named_parameters(remove_duplicate=False)}
    constants = {**program.state_dict, **program.constants}
    count = itertools.count()
    places = tuple(
        next(count) if spec.target is None else varied.get(spec.target) or _array(constants[spec.target])
        for spec in signature.input_specs
    )
    wanted = tuple(i for i, spec in enumerate(signature.output_specs) if spec.kind.name == "USER_OUTPUT")
    return _Program(tuple(program.graph.nodes), places, wanted, program.call_spec.out_spec.unflatten, own)


def _exported(module: Any, inputs: Any) -> Any:
    """The graph of the module in the operations that we know; refuses what would be lost on the way."""
    torch = _torch("from_torch")
    # What every torch.autograd.Function.apply asks first, whatever name it was given.
    asked = mock.patch.object(torch.autograd.function, "_is_setup_context_defined", _refuse_own_backward, create=True)
    with warnings.catch_warnings(), asked:
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(module, inputs, strict=False)
        except NotImplementedError:
            raise
        except Exception as error:
            raise ValueError(
                f"torch.export cannot follow {type(module).__name__} with these inputs: {error}"
            ) from error
        for node in program.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
                raise NotImplementedError(_REFUSED.format(what=node.target, why=_BLOCK))
        rules = torch.export.default_decompositions().items()
        program = program.run_decompositions({one: rule for one, rule in rules if _name(one) not in _KNOWN})
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem and _name(node.target) not in _KNOWN:
            raise NotImplementedError(_REFUSED.format(what=node.target, why="it has no counterpart in JAX here"))
    return program


_KNOWN = {**OPERATIONS, **RANDOM}
_REFUSED = "bilax.from_torch cannot convert {what}: {why}."
_BLOCK = "it wraps a block of the module. For a block under torch.no_grad() write tensor.detach() on what leaves it"


def _refuse_own_backward(*_: Any) -> None:
    why = "torch.export sees its forward pass alone, so a backward pass of its own would be lost"
    raise NotImplementedError(_REFUSED.format(what="a torch.autograd.Function", why=why))


def _name(operation: Any) -> str:
    """ATen's name of an operation, without the overload."""
    return operation.overloadpacket.__name__ if hasattr(operation, "overloadpacket") else str(operation)


def _run(program: _Program, parameters: Mapping[str, Any], leaves: list[Any], key: Array | None) -> PyTree:
    """Calls the operations one after the other."""
    torch = _torch("from_torch")
    compute = jnp.result_type(*parameters.values()) if parameters else None
    values: dict[Any, Any] = {}
    places = iter(program.places)

    def convert(argument) -> Any:
        """An argument as JAX's: values of earlier nodes, dtypes."""
        if isinstance(argument, torch.fx.Node):
            return values[argument]
        if isinstance(argument, torch.dtype):
            return compute if argument == program.own else jax.dtypes.canonicalize_dtype(_dtype(argument))
        if isinstance(argument, list | tuple):
            return [convert(one) for one in argument]
        return argument

    for number, node in enumerate(program.nodes):
        if node.op == "placeholder":
            place = next(places)
            values[node] = leaves[place] if isinstance(place, int) else _value(place, parameters, compute)
        elif node.op == "output":
            outputs = convert(node.args[0])
            return program.join([outputs[i] for i in program.wanted])
        else:
            options = {name: convert(one) for name, one in node.kwargs.items() if name not in _LEFT_OUT}
            mixed = None if key is None else jax.random.fold_in(key, number)
            values[node] = _call(node.target, convert(node.args), options, mixed)
    raise AssertionError("a graph without output")


def _call(operation: Any, arguments: list[Any], options: dict[str, Any], key: Array | None) -> Any:
    if operation is operator.getitem:
        return arguments[0][arguments[1]]
    name = _name(operation)
    try:
        if name in RANDOM:
            if key is None:
                raise ValueError(NEEDS_KEY)
            return RANDOM[name](key, *arguments, **options)
        return OPERATIONS[name](*arguments, **options, **({"random": key} if name in MAY_DRAW else {}))
    except (TypeError, NotImplementedError) as error:
        why = f"with the arguments {[*map(_shown, arguments)]} {options or ''}: {error}"
        raise NotImplementedError(_REFUSED.format(what=operation, why=why)) from error


def _shown(argument: Any) -> str:
    return f"array{argument.shape}" if hasattr(argument, "shape") else str(argument)


def _value(place: Any, parameters: Mapping[str, Any], compute: Any) -> Array:
    if isinstance(place, str):
        return jnp.asarray(parameters[place])
    return jnp.asarray(place, compute if np.issubdtype(place.dtype, np.floating) else None)


def _fixed(leaf: Any) -> bool:
    """Whether an input is no array, and part of what the program is."""
    return leaf is None or isinstance(leaf, bool)


def _array(tensor: Any) -> np.ndarray:
    if str(tensor.dtype) == "torch.bfloat16":
        return np.asarray(tensor.detach().float().numpy(), jnp.bfloat16)
    return np.array(tensor.detach().cpu().numpy())


def _dtype(dtype: Any) -> Any:
    return jnp.dtype(str(dtype).removeprefix("torch."))


def _check_names(module: Any, parameters: Any) -> None:
    expected = [name for name, one in module.named_parameters() if one.requires_grad]
    if not isinstance(parameters, Mapping) or set(parameters) != set(expected):
        given = sorted(parameters) if isinstance(parameters, Mapping) else type(parameters).__name__
        raise ValueError(f"parameters must be a dictionary with the module's names {expected}, got {given}.")


def _torch(what: str) -> Any:
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import torch.export  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError(f"bilax.{what} needs PyTorch: pip install 'bilax[torch]'.") from None
    return torch
