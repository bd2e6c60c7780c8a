"""Processes that tests kill: forked from one that has imported all that is slow to import, and computed nothing yet."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import jax
import optax  # noqa: F401
import orbax.checkpoint  # noqa: F401
import pytest  # noqa: F401

import bilax.methods.recipes
import bilax.run.checkpoint
import bilax.run.solve  # noqa: F401

jax.config.update("jax_enable_x64", True)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])


def forked(target: Callable[..., str], out: Path, *arguments) -> BaseProcess:
    """A process that writes what `target(*arguments)` returns to the file `out`, if it lives to do so."""
    process = CONTEXT.Process(target=_work, args=(target, out, *arguments), daemon=True)
    process.start()
    return process


def _work(target: Callable[..., str], out: Path, *arguments) -> None:
    out.write_text(target(*arguments))
