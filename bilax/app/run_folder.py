"""Run folders: what a run was asked, what it has done so far and how it ended, readable at any moment.

config.json     the settings, seed and versions, written first
checkpoints/    what the run needs to go on, and all that it recorded, in parts
result.json     the end point and status, written last
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import bilax
from bilax.files import DataError, read_json, write_whole
from bilax.run.checkpoint import read_history
from bilax.run.solution import Solution


class RunRecord(NamedTuple):
    """A run folder as read from disk; `result` is None while the run has not ended."""

    folder: Path
    config: dict[str, Any]
    history: dict[str, np.ndarray]
    """by name; of several starts with an axis for them, then one for the outer steps"""
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
        seconds = _number(read_json(end if end.exists() else path).get("seconds"))
    versions = {"bilax": bilax.__version__, "jax": jax.__version__, "numpy": np.__version__}
    record = {"config": config, "versions": versions, "seconds": seconds}
    write_whole(path, json.dumps(record, indent=1, default=str).encode())
    end.unlink(missing_ok=True)  # a run that goes on has no end yet
    return seconds


def mark(folder: Path) -> tuple[int, int]:
    """What tells the config.json that this run wrote from that of another run which has taken the folder since."""
    about = (folder / "config.json").stat()
    return about.st_ino, about.st_ctime_ns


def check_config(folder: Path, config: dict[str, Any], free: Collection[str]) -> None:
    """Refuses to go on with a run that was begun with other settings than these, those in `free` aside."""
    path = folder / "config.json"
    if not path.exists():
        return
    begun, now = _settings(path), json.loads(json.dumps(config, default=str))
    differ = [name for name in now if name in begun and name not in free and begun[name] != now[name]]
    if differ:
        lines = [f"  {name}: begun with {begun[name]}, now {now[name]}" for name in differ]
        raise bilax.ConfigurationError(
            f"the run in {folder} was begun with another configuration, so it cannot go on:\n"
            + "\n".join(lines)
            + "\nGive what it was begun with, or choose another folder."
        )


def write_result(folder: Path, solution: Solution, extra: dict[str, Any]) -> dict[str, Any]:
    """Writes and returns how the run ended; of several starts the numbers are means."""
    k_bar = float(np.mean(solution.k_bar))
    result = {
        "status": solution.ended.name,
        "message": solution.ended.message,
        "steps": int(np.max(solution.steps)),
        **{name: float(np.mean(getattr(solution, name))) for name in ("upper", "lower", "residual")},
        "k_bar": int(k_bar) if k_bar.is_integer() else k_bar,
        **extra,
    }
    write_whole(folder / "result.json", json.dumps(result, indent=1).encode())
    return result


def read_run(folder: Path) -> RunRecord:
    """Reads a run folder, finished or not; a clear error where it is none."""
    path, end = folder / "config.json", folder / "result.json"
    try:
        config, result = read_json(path), read_json(end) if end.exists() else None
        config["config"] = _settings(path)
    except DataError as error:
        raise ValueError(f"{folder} is not a run folder: {error} Give a folder that `bilax run` wrote.") from None
    history = {name.removeprefix("."): values for name, values in read_history(folder / "checkpoints").items()}
    return RunRecord(folder, config, history, result)


def _settings(path: Path) -> dict[str, Any]:
    settings = read_json(path).get("config")
    if not isinstance(settings, dict):
        raise DataError(f"{path}: is damaged: it holds no settings.")
    return settings


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e12 else 0.0
