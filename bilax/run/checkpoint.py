"""Saving a run and going on from it: whole or not at all, and checked when read.

A folder holds checkpoints `step_000000123`, written by orbax's CheckpointManager under another name and renamed last,
and `history/`, one file for what was recorded between two of them. Arrays have the names of their places in the state,
and a SHA-256 each.
"""

import contextlib
import dataclasses
import errno
import hashlib
import logging
import math
import os
import re
import shutil
import stat
import tempfile
import warnings
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from bilax.files import DataError, check_size, may_unpack, read_arrays, write_arrays
from bilax.problem.trees import named_leaves
from bilax.run.processes import is_first, says_lost, together, wait_for_all, whole

try:
    import fcntl
except ImportError:  # Windows: there, two runs in one folder go unnoticed
    fcntl = None

PREFIX = "step"
CHECKPOINT = re.compile(f"{PREFIX}_[0-9]{{9,15}}")
HISTORY = "history"
NOT_COMPARED = "spread over several processes"
"""of data whose fingerprint would have to be put together of all processes' parts"""
ROOM = 1 << 29
"""bytes that a checkpoint may hold beside what the run needs"""


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


class ConfigurationError(ValueError):
    """A run was to be resumed with other settings than it was begun with."""


class Saved(NamedTuple):
    """What a checkpoint holds."""

    step: int
    arrays: dict[str, Any]
    """by name"""
    configuration: dict[str, str]
    """what must be the same for the run to go on"""
    next_step: dict[str, float]
    """what the next outer step was computed to give when the checkpoint was made"""
    history: dict[str, np.ndarray]
    """what was recorded, by name; the steps are the last axis but those of a `record`'s own"""


@contextlib.contextmanager
def opened(saving: Saving, *, resume: bool) -> Iterator["Checkpoints"]:
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
    with _alone(saving) as folder:
        if any(saving.path.glob("step-*/manifest.json")):
            raise ConfigurationError(
                f"{saving.folder} holds a run that bilax 0.1 saved, in a form that this version does not read. Go on "
                "with it in bilax 0.1, or choose another folder."
            )
        steps = steps_saved(saving.path)
        if not resume and steps:
            raise FileExistsError(
                f"{saving.folder} already holds a run (steps {steps}). Go on with it by resume=True, or choose "
                "another folder."
            )
        for path in saving.path.glob(f"{PREFIX}_*") if is_first() else ():
            if ".orbax" not in path.name and (wrong := _what_is_wrong(path)):
                _set_aside(path, wrong)
        wait_for_all("bilax: the folder was looked at")
        kept = _LatestAndBest(saving.keep)
        with contextlib.closing(_manager(saving, kept)) as manager:
            yield Checkpoints(saving, manager, kept, folder)


@contextlib.contextmanager
def _alone(saving: Saving) -> Iterator[int | None]:
    """Locks the folder and yields its descriptor, which stands for the same folder even if it is renamed."""
    if fcntl is None or not is_first():
        yield None
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
        yield folder
    finally:
        os.close(folder)


def steps_saved(folder: Path) -> list[int]:
    """The steps at which checkpoints lie in `folder`, in order."""
    return sorted(int(path.name[len(PREFIX) + 1 :]) for path in _checkpoints(folder))


def _checkpoints(folder: Path) -> list[Path]:
    # Orbax gives a folder this name when all is in it.
    return [path for path in folder.glob(f"{PREFIX}_*") if CHECKPOINT.fullmatch(path.name)]


def _what_is_wrong(path: Path) -> str:
    """Why orbax must not look at a folder; it would wait for a pipe, or read a device, for ever."""
    if not CHECKPOINT.fullmatch(path.name):
        return "its name is not that of a step"
    if not (path / "_CHECKPOINT_METADATA").exists():
        return "it is not whole"
    for each in (path, *path.rglob("*")):
        kind = each.lstat().st_mode
        if not (stat.S_ISDIR(kind) or stat.S_ISREG(kind)):
            return f"{each.name} is neither a file nor a folder"
    return ""


def _set_aside(path: Path, reason: str) -> None:
    aside = path.with_name(f"damaged-{path.name}")
    warnings.warn(
        f"the checkpoint {path.name} is damaged ({reason}); it is set aside as {aside.name}, and an older one is used.",
        stacklevel=2,
    )
    with contextlib.suppress(OSError):  # there is none yet, or it is no folder
        shutil.rmtree(aside)
    os.replace(path, aside)


class _LatestAndBest:
    """Which checkpoints orbax is to keep: the latest ones, and the one with the lowest score."""

    def __init__(self, latest: int):
        self.latest, self.scores = latest, {}
        """the scores are by step"""

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = sorted(checkpoint.step for checkpoint in checkpoints)
        kept = {*steps[-self.latest :], min(steps, key=lambda step: self.scores.get(step, np.inf), default=None)}
        return [checkpoint.step in kept for checkpoint in checkpoints]


class Checkpoints:
    """The checkpoints of one run, of which this process is the only writer."""

    def __init__(self, saving: Saving, manager: Any, kept: _LatestAndBest, folder: int | None):
        self.saving, self.manager, self.kept, self.folder = saving, manager, kept, folder
        self.recorded = 0
        """up to which step the history is on disk"""

    def save(self, saved: Saved, score: float) -> bool:
        """Writes one checkpoint; a full disk or the like gives a warning, and the run goes on."""
        import orbax.checkpoint as ocp

        score = score if np.isfinite(score) else 1e308  # which JSON knows
        arrays = {
            name: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for name, leaf in saved.arrays.items()
        }
        about = {
            "configuration": saved.configuration,
            "next_step": saved.next_step,
            "score": score,
            "sha256": {name: digest(leaf) for name, leaf in arrays.items()},
        }
        try:
            self._check_folder(
                sum(np.dtype(leaf.dtype).itemsize * leaf.size for leaf in (*arrays.values(), *saved.history.values()))
            )
            if saved.step > self.recorded and is_first():
                write_arrays(self._part(self.recorded, saved.step), saved.history)
            if _own_among_several():
                items = {"about": ocp.args.JsonSave(about | {"arrays": _as_text(arrays)})}  # pyright: ignore
            else:
                items = {"arrays": ocp.args.StandardSave(arrays), "about": ocp.args.JsonSave(about)}  # pyright: ignore
            self.kept.scores[saved.step] = score
            if not self.manager.save(saved.step, args=ocp.args.Composite(**items)):
                raise OSError("orbax holds that this step is saved already")
        except Exception as error:
            if says_lost(error):
                raise
            with contextlib.suppress(OSError):
                self._part(self.recorded, saved.step).unlink(missing_ok=True)
            steps = steps_saved(self.saving.path)
            if steps:
                self.manager.reload()
            warnings.warn(
                f"could not save step {saved.step} in {self.saving.folder}: {error}. The run goes on; the last step "
                f"that is safe is {max(steps) if steps else 'none'}. Free some space or permissions there.",
                stacklevel=2,
            )
            return False
        self.recorded = saved.step
        return True

    def _check_folder(self, size: int) -> None:
        """Refuses to write where the folder that is locked no longer is, or where so many bytes have no room.

        Another run may have taken the place; and where a disk is full, orbax's threads print hundreds of lines.
        """
        if shutil.disk_usage(self.saving.path).free < size + (1 << 20):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.folder is None:
            return
        there, mine = os.stat(self.saving.path), os.fstat(self.folder)
        if (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            raise OSError("the folder was removed, and there is another in its place")

    def restore(self, size: int) -> Saved | None:
        """The newest checkpoint that is whole; None where there is none. A damaged one is set aside with a warning.

        `size` is how many bytes the state of the run takes.
        """
        for step in sorted(self.manager.all_steps(), reverse=True):
            try:
                saved = self._read(step, size)
            except Exception as error:
                if says_lost(error):
                    raise
                if is_first():
                    _set_aside(self.saving.path / f"{PREFIX}_{step:09d}", str(error))
                wait_for_all("bilax: a damaged checkpoint was set aside")
                self.manager.reload()
                continue
            self.recorded = step
            # Orbax does not store what it is told of a checkpoint's worth.
            self.kept.scores = {each: self._score(each) for each in self.manager.all_steps()}
            for later in (part for part, _, end in self._parts() if end > step and is_first()):
                later.unlink()
            return saved
        return None

    def _read(self, step: int, size: int) -> Saved:
        import orbax.checkpoint as ocp

        path = self.saving.path / f"{PREFIX}_{step:09d}"
        packed = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        items: dict[str, Any] = {"about": ocp.args.JsonRestore()}  # pyright: ignore
        if (path / "arrays").exists():
            check_size(path.name, _announced(path / "arrays"), ROOM + 2 * size + may_unpack(packed))
            # As NumPy arrays: orbax would bind them to the devices that they were saved on.
            room = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), _known(path / "arrays"))
            items["arrays"] = ocp.args.StandardRestore(room)
        else:
            check_size(path.name, packed, ROOM + 4 * size)
        read = self.manager.restore(step, args=ocp.args.Composite(**items))
        about = read["about"]
        found = read["arrays"] if "arrays" in items else _from_text(about["arrays"])
        arrays = {name: np.asarray(leaf) for name, leaf in found.items()}
        for name, leaf in arrays.items():
            if digest(leaf) != about["sha256"][name]:
                raise DataError(f"{name} has changed since it was written")
        configuration = {str(name): str(value) for name, value in about["configuration"].items()}
        next_step = {str(name): float(value) for name, value in about["next_step"].items()}
        return Saved(step, arrays, configuration, next_step, read_history(self.saving.path, step))

    def _score(self, step: int) -> float:
        """That of an older checkpoint; ∞ where it does not tell."""
        import orbax.checkpoint as ocp

        try:
            items = ocp.args.Composite(about=ocp.args.JsonRestore())  # pyright: ignore
            score = float(self.manager.restore(step, args=items)["about"]["score"])
        except Exception:  # damaged, or of an earlier version
            return np.inf
        return np.inf if np.isnan(score) else score

    def _part(self, begin: int, end: int) -> Path:
        return self.saving.path / HISTORY / f"{begin:09d}-{end:09d}.npz"

    def _parts(self) -> list[tuple[Path, int, int]]:
        return history_parts(self.saving.path)


def history_parts(folder: Path) -> list[tuple[Path, int, int]]:
    """The files of a run's history with their first step and the step after their last, in order."""
    found = []
    for path in (folder / HISTORY).glob("*-*.npz"):
        begin, _, end = path.stem.partition("-")
        if begin.isdecimal() and end.isdecimal():
            found.append((path, int(begin), int(end)))
    return sorted(found, key=lambda part: part[1:])


def read_history(folder: Path, until: int | None = None) -> dict[str, np.ndarray]:
    """What a run has recorded, up to step `until`, by name; empty where nothing is saved."""
    parts, reached = [], 0
    for path, begin, end in history_parts(folder):
        if begin == reached and (until is None or end <= until):
            parts.append(read_arrays(path))
            reached = end
    if until is not None and reached != until:
        raise ValueError(f"its history ends at step {reached}")
    if not parts:
        return {}
    try:
        axis = parts[0][".upper"].ndim - 1  # 1 where there are many starts
        return {name: np.concatenate([part[name] for part in parts], axis) for name in parts[0]}
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{folder / HISTORY}: its parts do not go together ({error!r}).") from None


def check_configuration(saved: Saved, now: dict[str, str], saving: Saving) -> None:
    """Refuses to go on with a run that was begun with other settings, and says which."""
    then = saved.configuration
    differ = [
        name
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name) and NOT_COMPARED not in (then.get(name), now.get(name))
    ]
    lines = [f"  {name}: saved {then.get(name, 'nothing')}, now {now.get(name, 'nothing')}" for name in differ]
    _refuse(lines, saving)


def check_next_step(saved: Saved, now: dict[str, float], rough: float, saving: Saving) -> None:
    """Refuses to go on where the next outer step is no longer what it was when the checkpoint was made.

    This finds whatever has changed of objectives, optimisers, sets and data, by what it does: their text may change
    with a version of JAX, and a function's name says nothing. `rough` is the relative difference that rounding makes.
    """
    lines = []
    for name, before in saved.next_step.items():
        value = now.get(name, np.nan)
        if not np.isclose(value, before, rtol=rough, atol=1e-4 * rough, equal_nan=True):
            lines.append(f"  the next step's {name}: saved {before:.9g}, now {value:.9g}")
    if lines:
        lines.append("  (objectives, optimisers, sets or data are others than they were)")
    _refuse(lines, saving)


def _refuse(lines: list[str], saving: Saving) -> None:
    if lines:
        raise ConfigurationError(
            f"the run in {saving.folder} was begun with another configuration, so it cannot go on:\n"
            + "\n".join(lines)
            + "\nUse the same settings, or another folder."
        )


def fingerprint(tree: PyTree) -> str:
    """A short text that differs between trees of different numbers, shapes or types."""
    return hashlib.sha256("".join(digest(leaf) for leaf in named_leaves(tree).values()).encode()).hexdigest()[:16]


def digest(leaf: Any) -> str:
    """SHA-256 of an array's type, shape and content."""
    array = np.asarray(whole(leaf))
    found = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def _own_among_several() -> bool:
    """Whether this process saves a run of its own beside others: there orbax writes arrays in the first one alone."""
    return jax.process_count() > 1 and not together()


def _as_text(arrays: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Each array's type, shape and content, for JSON."""
    known = {name: np.asarray(leaf) for name, leaf in arrays.items()}
    return {name: (leaf.dtype.name, leaf.shape, b64encode(leaf.tobytes()).decode()) for name, leaf in known.items()}


def _from_text(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(b64decode(content), jnp.dtype(kind)).reshape(shape)
        for name, (kind, shape, content) in arrays.items()
    }


def _known(folder: Path) -> PyTree:
    """What orbax knows of the arrays in a folder before it reads them."""
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointHandler().metadata(folder).tree  # pyright: ignore


def _announced(folder: Path) -> int:
    """The bytes that orbax will make room for."""
    leaves = jax.tree.leaves(_known(folder))
    shapes = [(leaf.shape, leaf.storage.chunk_shape, np.dtype(leaf.dtype).itemsize) for leaf in leaves]
    return sum(max(math.prod(shape), math.prod(chunk)) * itemsize for shape, chunk, itemsize in shapes)


def _manager(saving: Saving, kept: _LatestAndBest) -> Any:
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # what goes wrong is raised as well
    own = jax.process_index()
    who = {"primary_host": own, "active_processes": {own}} if _own_among_several() else {}
    processes = ocp.options.MultiprocessingOptions(**who)
    return ocp.CheckpointManager(
        saving.path,
        item_handlers={
            "arrays": ocp.StandardCheckpointHandler(multiprocessing_options=processes),
            "about": ocp.JsonCheckpointHandler(multiprocessing_options=processes),
        },
        options=ocp.CheckpointManagerOptions(
            step_prefix=PREFIX,
            step_format_fixed_length=9,
            preservation_policy=kept,  # pyright: ignore[reportArgumentType]
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
            save_root_metadata=False,
            create=False,
            multiprocessing_options=processes,
        ),
    )
