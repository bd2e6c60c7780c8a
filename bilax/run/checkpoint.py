"""Saving a run and going on from it: whole or not at all, and checked when read.

A checkpoint is a folder `step-000000123` holding what orbax wrote and a `manifest.json` with a SHA-256 of each
file. It is written under another name and renamed last, so a reader never sees half of one.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

try:
    import fcntl
except ImportError:  # Windows: there, two runs in one folder go unnoticed
    fcntl = None

PREFIX = "step-"
PARTIAL = ".writing-"


@dataclasses.dataclass(frozen=True)
class Saving:
    """Where and how often `solve` saves.

    - `folder`: made if it is not there. A folder that already holds a run is refused unless resumed.
    - `every_steps`, `every_seconds`: save after so many outer steps, or seconds; give one or both.
    - `keep`: how many of the latest checkpoints to keep; the one with the lowest `upper` is kept besides.
    """

    folder: str | Path
    every_steps: int | None = None
    every_seconds: float | None = 60.0
    keep: int = 3

    def __post_init__(self):
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"Saving(every_steps=...) must be at least 1, got {self.every_steps}.")
        if self.every_seconds is not None and self.every_seconds < 0:
            raise ValueError(f"Saving(every_seconds=...) must not be negative, got {self.every_seconds}.")
        if self.keep < 1:
            raise ValueError(f"Saving(keep=...) must be at least 1, got {self.keep}.")

    @property
    def path(self) -> Path:
        """The folder, absolute."""
        return Path(self.folder).absolute()


@contextlib.contextmanager
def opened(saving: Saving, *, resume: bool) -> Iterator[None]:
    """Makes the folder and keeps it for this run alone.

    Refuses one that cannot be written, that another run is writing, or that holds a run not to be resumed.
    """
    try:
        saving.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=saving.path):
            pass
    except OSError as error:
        raise OSError(
            f"cannot write to the folder {saving.folder} of Saving(folder=...): {error.strerror or error}. "
            "Choose a folder that you may write to."
        ) from error
    with _alone(saving):
        _sweep_partial(saving)
        if not resume and steps_saved(saving.path):
            raise FileExistsError(
                f"{saving.folder} already holds a run (steps {steps_saved(saving.path)}). Go on with it by "
                "resume=True, or choose another folder."
            )
        yield


@contextlib.contextmanager
def _alone(saving: Saving) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    folder = os.open(saving.path, os.O_RDONLY)
    try:
        try:
            # The system forgets this lock when the process ends, in whatever way.
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another run is writing to {saving.folder}: wait until it has ended, or choose another folder."
            ) from None
        except OSError:
            pass  # a disk without locks
        yield
    finally:
        os.close(folder)


def steps_saved(folder: Path) -> list[int]:
    """The steps at which whole checkpoints lie in `folder`, in order."""
    names = [path.name for path in folder.glob(PREFIX + "*") if (path / "manifest.json").exists()]
    return sorted(int(name[len(PREFIX) :]) for name in names if name[len(PREFIX) :].isdigit())


def save(saving: Saving, step: int, tree: PyTree, configuration: dict[str, str], score: float) -> bool:
    """Writes one checkpoint; a full disk or the like gives a warning, and the run goes on."""
    target = saving.path / f"{PREFIX}{step:09d}"
    if target.exists():
        return True
    temporary = saving.path / f"{PARTIAL}{step:09d}"
    try:
        _sweep_partial(saving)
        _checkpointer().save(temporary, _leaves(tree))
        manifest = {
            "step": step,
            "score": score,
            "configuration": configuration,
            "sha256": {str(path.relative_to(temporary)): _digest(path) for path in _files(temporary)},
        }
        with open(temporary / "manifest.json", "w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except Exception as error:
        _sweep_partial(saving)
        saved = steps_saved(saving.path)
        warnings.warn(
            f"could not save step {step} in {saving.folder}: {error}. The run goes on; the last step that is safe "
            f"is {saved[-1] if saved else 'none'}. Free some space or permissions there.",
            stacklevel=2,
        )
        return False
    _forget_old(saving)
    return True


def restore(saving: Saving, like: PyTree, configuration: dict[str, str]) -> PyTree | None:
    """The newest checkpoint that is whole, as a tree like `like`; None where there is none.

    A damaged one is passed over with a warning; one made with another configuration is refused.
    """
    for step in reversed(steps_saved(saving.path)):
        path = saving.path / f"{PREFIX}{step:09d}"
        try:
            manifest = json.loads((path / "manifest.json").read_text())
            for name, digest in manifest["sha256"].items():
                if _digest(path / name) != digest:
                    raise ValueError(f"{name} has changed since it was written")
            _same_configuration(manifest["configuration"], configuration, saving)
            stored = _checkpointer().restore(path)
        except ConfigurationError:
            raise
        except Exception as error:
            warnings.warn(
                f"the checkpoint {path.name} is damaged ({error}); it is set aside as damaged-{path.name}, and an "
                "older one is used.",
                stacklevel=2,
            )
            shutil.rmtree(path.with_name(f"damaged-{path.name}"), ignore_errors=True)
            os.replace(path, path.with_name(f"damaged-{path.name}"))
            continue
        leaves, structure = jax.tree.flatten(like)
        return jax.tree.unflatten(structure, [_like(stored[f"{i:05d}"], leaf) for i, leaf in enumerate(leaves)])
    return None


def fingerprint(tree: PyTree) -> str:
    """A short text that differs between trees of different numbers, shapes or types."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(plain(leaf))
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


class ConfigurationError(ValueError):
    """A run was to be resumed with other settings than it was begun with."""


def _same_configuration(stored: dict[str, str], now: dict[str, str], saving: Saving) -> None:
    differ = [name for name in sorted({*stored, *now}) if stored.get(name) != now.get(name)]
    if differ:
        lines = [f"  {name}: saved {stored.get(name, 'nothing')}, now {now.get(name, 'nothing')}" for name in differ]
        raise ConfigurationError(
            f"the run in {saving.folder} was begun with another configuration, so it cannot go on:\n"
            + "\n".join(lines)
            + "\nUse the same settings, or another folder."
        )


def _sweep_partial(saving: Saving) -> None:
    for leftover in saving.path.glob(PARTIAL + "*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _forget_old(saving: Saving) -> None:
    steps = steps_saved(saving.path)

    def score(step: int) -> float:
        try:
            return json.loads((saving.path / f"{PREFIX}{step:09d}" / "manifest.json").read_text())["score"]
        except (OSError, ValueError, KeyError):
            return math.inf

    best = min(steps, key=score)
    for step in steps[: -saving.keep]:
        if step != best:
            shutil.rmtree(saving.path / f"{PREFIX}{step:09d}", ignore_errors=True)


def _leaves(tree: PyTree) -> dict[str, np.ndarray]:
    return {f"{i:05d}": np.asarray(plain(leaf)) for i, leaf in enumerate(jax.tree.leaves(tree))}


def plain(leaf: Any) -> Any:
    """A leaf as an array that NumPy can hold: random keys as their numbers."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _like(stored: np.ndarray, leaf: Any) -> Any:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(stored), impl=jax.random.key_impl(leaf))
    return jnp.asarray(stored) if isinstance(leaf, jax.Array) else np.asarray(stored)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _checkpointer() -> Any:
    import logging

    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)
    return ocp.PyTreeCheckpointer()
