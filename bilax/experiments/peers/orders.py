"""How a process of `bilax bench peers` takes orders. Standard library and NumPy alone, for peers' own environments.

The parent writes the leader's and the follower's variables and the data as x-00.npy, z-00.npy, data-00.npy, ... in one
folder, in bilax's layout; gradients and end points come back as one long vector for x and one for z, in that layout.
"""

import json
import math
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np


class Given(NamedTuple):
    """What a case starts from, leaf by leaf."""

    x: list[np.ndarray]
    z: list[np.ndarray]
    data: list[np.ndarray]


class Seconds(NamedTuple):
    """By the clock, and of the processor: what this process took of all cores, which others hardly change."""

    clock: float
    processor: float


class Work(Protocol):
    """A case in one library."""

    def gradient(self) -> tuple[np.ndarray, np.ndarray]:
        """∂φ/∂x and ∂φ/∂z at the start."""
        ...

    def run(self, steps: int) -> "Seconds":
        """How long so many outer steps from the start take."""
        ...

    def end(self) -> tuple[np.ndarray, np.ndarray]:
        """x and z where the last run ended."""
        ...


def store(folder: Path, given: Given, kind: str) -> None:
    """Writes what `load` reads; whole numbers stay as they are."""
    for name, leaves in given._asdict().items():
        for i, leaf in enumerate(leaves):
            whole = np.issubdtype(np.asarray(leaf).dtype, np.integer)
            np.save(folder / f"{name}-{i:02}.npy", np.asarray(leaf, np.int32 if whole else kind))


def load(folder: str) -> Given:
    """What the parent wrote."""
    found = [[np.load(path) for path in sorted(Path(folder).glob(f"{name}-*.npy"))] for name in Given._fields]
    return Given(*found)


def flat(leaves: list[Any]) -> np.ndarray:
    """One long vector."""
    return np.concatenate([np.zeros(0), *(np.asarray(leaf, np.float64).ravel() for leaf in leaves)])


def serve(make: Callable[[dict[str, Any], Given], Work], versions: Callable[[], dict[str, str]], **more: Any) -> None:
    """Does what it is told by lines of JSON until there are none; `more` are orders of this side alone."""
    # What a library prints is no answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    work: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if order["do"] == "load":
                work = make(order, load(order["folder"]))
            elif order["do"] == "gradient":
                np.savez(order["out"], **dict(zip("xz", work.gradient(), strict=True)))
            elif order["do"] == "run":
                answer = work.run(order["steps"])._asdict()
            elif order["do"] == "end":
                np.savez(order["out"], **dict(zip("xz", work.end(), strict=True)))
            elif order["do"] == "peak":
                answer = {"megabytes": peak_megabytes(), "processor": time.process_time()}
            elif order["do"] == "versions":
                answer = versions()
            else:
                answer = more[order["do"]](order, work)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=answers, flush=True)


def peak_megabytes() -> float:
    """The most memory that this program held. `ru_maxrss` would do, were it not at least what the parent held."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else math.nan


def seconds(run: Callable[[], Any]) -> Seconds:
    """How long one call takes."""
    began = time.perf_counter(), time.process_time()
    run()
    return Seconds(time.perf_counter() - began[0], time.process_time() - began[1])
