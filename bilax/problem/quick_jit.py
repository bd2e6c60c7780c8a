"""Compiling quickly what runs only once or twice."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from bilax.problem.compiled import compiled

_QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 1}


@functools.cache
def _quick_options() -> dict[str, Any]:
    try:
        jax.jit(lambda v: v + 1, compiler_options=_QUICK).lower(0.0).compile()
    except Exception:  # a backend or a release that does not know them
        return {}
    return {"compiler_options": _QUICK}


def quick_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled` for programs that run once or twice: half the compile time, for somewhat slower code."""

    @functools.cache
    def quickly():
        return compiled(function, **_quick_options())

    @functools.wraps(function)
    def call(*args):
        return quickly()(*args)

    return call
