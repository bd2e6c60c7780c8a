"""Run folders: what a run was asked, what it has done so far and how it ended, readable at any moment.

config.json     the settings, seed and versions, written first
history.npz     one array per recorded quantity, replaced whole every few seconds
checkpoints/    what the run needs to go on
result.json     the end point and status, written last
"""

import io
import json
import os
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import bilax
from bilax.run.solution import History, Solution


class RunRecord(NamedTuple):
    """A run folder as read from disk; `result` is None while the run has not ended."""

    folder: Path
    config: dict[str, Any]
    history: dict[str, np.ndarray]
    result: dict[str, Any] | None

    @property
    def name(self) -> str:
        """How a report calls the run."""
        folder = self.folder.absolute()
        return f"{folder.parent.name}/{folder.name}" if folder.name.startswith("seed-") else folder.name


def write_config(folder: Path, config: dict[str, Any]) -> float:
    """Notes what was asked, with the versions that answer it.

    Returns the seconds that earlier parts of the run took, those that were killed aside.
    """
    path, end = folder / "config.json", folder / "result.json"
    seconds = 0.0
    if path.exists():
        last = end if end.exists() else path
        seconds = json.loads(last.read_text()).get("seconds", 0.0)
    versions = {"bilax": bilax.__version__, "jax": jax.__version__, "numpy": np.__version__}
    record = {"config": config, "versions": versions, "seconds": seconds}
    write_whole(path, json.dumps(record, indent=1, default=str).encode())
    return seconds


def check_config(folder: Path, config: dict[str, Any], free: Collection[str]) -> None:
    """Refuses to go on with a run that was begun with other settings than these, those in `free` aside."""
    path = folder / "config.json"
    if not path.exists():
        return
    begun, now = json.loads(path.read_text())["config"], json.loads(json.dumps(config, default=str))
    differ = [name for name in now if name in begun and name not in free and begun[name] != now[name]]
    if differ:
        lines = [f"  {name}: begun with {begun[name]}, now {now[name]}" for name in differ]
        raise bilax.ConfigurationError(
            f"the run in {folder} was begun with another configuration, so it cannot go on:\n"
            + "\n".join(lines)
            + "\nGive what it was begun with, or choose another folder."
        )


class HistoryFile:
    """A callback that keeps history.npz up to date, every few seconds; a run that goes on has no end yet."""

    def __init__(self, folder: Path, seconds: float = 5.0):
        self.folder, self.seconds, self.last = folder, seconds, time.monotonic()

    def __call__(self, state: Any, history: History) -> None:
        (self.folder / "result.json").unlink(missing_ok=True)
        if time.monotonic() - self.last >= self.seconds:
            write_history(self.folder, history)
            self.last = time.monotonic()


def write_history(folder: Path, history: History) -> None:
    """Replaces history.npz."""
    write_arrays(folder / "history.npz", {name: part for name, part in history._asdict().items() if name != "record"})


def write_result(folder: Path, solution: Solution, extra: dict[str, Any]) -> dict[str, Any]:
    """Writes and returns how the run ended."""
    write_history(folder, solution.history)
    result = {
        "status": solution.status.name,
        "message": solution.status.message,
        "steps": solution.steps,
        "upper": float(solution.upper),
        "lower": float(solution.lower),
        "residual": float(solution.residual),
        "k_bar": int(solution.k_bar) if float(solution.k_bar).is_integer() else float(solution.k_bar),
        **extra,
    }
    write_whole(folder / "result.json", json.dumps(result, indent=1).encode())
    return result


def read_run(folder: Path) -> RunRecord:
    """Reads a run folder, finished or not; a clear error where it is none."""
    try:
        config = json.loads((folder / "config.json").read_text())
        result = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is not a run folder: {error}. Give a folder that `bilax run` wrote.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{folder} is not a run folder: its config.json holds no settings.")
    history = read_arrays(folder / "history.npz") if (folder / "history.npz").exists() else {}
    return RunRecord(folder, config, history, result)


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Writes arrays by name as an `.npz` file, whole or not at all."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_whole(path, buffer.getvalue())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file, pickled objects refused; a ValueError that names a file which cannot be read."""
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            raise ValueError("it holds a single array, as np.save writes")
        with content:
            return {name: content[name] for name in content.files}
    except Exception as error:  # a damaged file can fail in many ways inside zipfile, zlib and numpy
        raise ValueError(f"{path}: cannot be read as an .npz file without pickled objects ({error}).") from error


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
