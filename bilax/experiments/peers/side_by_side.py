"""`bilax bench peers`: the same outer steps by bilax and by other libraries, in turn, each in a process of its own."""

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import queue
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from bilax.app.errors import refuse
from bilax.app.show import (
    Arg,
    Claim,
    Target,
    console,
    label_log,
    plt,
    save_json,
    saved_figure,
    show_table,
    steps,
    stored_results,
)
from bilax.app.versions import changed_rooms, code_of
from bilax.experiments.peers import orders
from bilax.experiments.peers.cases import CASES, Case
from bilax.experiments.peers.implicit import environment
from bilax.files import DataError

TORCH = ("torch==2.13.0", "numpy==2.4.6", "matplotlib==3.11.2", "optree==0.20.0", "graphviz==0.21", "tqdm==4.70.1")
"""PyTorch, and what the peers below import; first, so that none of them brings another build of it"""
PEERS = {
    "higher": "higher==0.2.1",
    "TorchOpt": "torchopt==0.7.3",
    "BOAT": "boat-torch==1.1.1",
    "Betty": "betty-ml==0.1.1",
    "learn2learn": "learn2learn==0.2.0",
}
NO_CHOICE = "has no choice among the follower's iterates and no gradient in its start"
KEEPS_ALL = "keeps all states of the follower, and has no checkpoints"
MEASURED = ("problem", "follower", "gradient", "methods", "run", "models")
MEASURED += tuple(
    f"experiments/peers/{one}.py" for one in ("cases", "steps_by_bilax", "steps_by_torch", "torch_problems")
)
"""the code that these numbers depend on"""
MOST_BYTES = 12 << 30
"""that a side may take"""
SAMPLE = 0.4
"""seconds that a peer's sample takes at the least, if the case's whole run is so long"""


BROKEN_OFF = threading.Event()
"""whether no more processes are to begin"""


@contextlib.contextmanager
def lanes(cores: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that have so many cores each to themselves, and so have the processes that they begin."""
    allowed, free = sorted(os.sched_getaffinity(0)), queue.SimpleQueue()
    count = max(1, len(allowed) // cores)
    for i in range(count):
        free.put(allowed[i * cores : (i + 1) * cores])
    BROKEN_OFF.clear()
    with ThreadPoolExecutor(count, initializer=lambda: os.sched_setaffinity(0, free.get())) as pool:
        try:
            yield pool
        except BaseException:
            BROKEN_OFF.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class Side:
    """A process that takes orders, on the cores of the thread that begins it."""

    def __init__(self, command: list[str], dtype: str, cache: str | None = None):
        if BROKEN_OFF.is_set():
            raise SideError("broken off")
        stored = {"JAX_ENABLE_COMPILATION_CACHE": "0"}
        if cache is not None:
            stored = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        more = {"JAX_ENABLE_X64": str(int(dtype == "float64")), "JAX_PLATFORMS": "cpu", **stored}
        self.process = subprocess.Popen(
            command, env=os.environ | more, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        # What does not fit becomes an error of that process alone.
        resource.prlimit(self.process.pid, resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """What it answers; an error of its own ends the line."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended (out of memory, most likely)"}
        if "error" in answer:
            raise SideError(answer["error"])
        return answer


class SideError(Exception):
    """A side could not do what it was told."""


@contextlib.contextmanager
def started(command: list[str], dtype: str, cache: str | None = None) -> Iterator[Side]:
    """A new process, ended at the end."""
    side = Side(command, dtype, cache)
    try:
        yield side
    finally:
        side.process.kill()
        side.process.communicate()


@dataclasses.dataclass
class Peers(Target):
    """Time of an outer step, time to the first result, peak memory and error of the hypergradient, beside each peer."""

    only: Annotated[str | None, Arg(help="one case alone, such as toy-40")] = None
    peer: Annotated[str | None, Arg(help="one peer alone, such as higher")] = None
    repeats: Annotated[int, Arg(help="timed samples of each side, in turn")] = 7
    starts: Annotated[int, Arg(help="fresh processes of each side, for the first result and memory")] = 2
    cores: Annotated[int, Arg(help="that each side may use; as many cases are measured at a time as have cores")] = 1
    cache: Annotated[Path, Arg(help="folder for the peers' environment")] = (
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "bilax" / "peers"
    )

    name: ClassVar[str] = "benchmarks/peers"
    claimant: ClassVar[str] = "what is to hold"
    free: ClassVar[tuple[str, ...]] = ("redraw", "only", "peer", "cores", "repeats", "starts")
    in_cells: ClassVar[bool] = True

    def compute(self) -> dict[str, Any]:
        cases = {name: case for name, case in CASES.items() if self._asked(name, case)}
        if not cases:
            refuse(f"--only {self.only}: there is no such case. There are {', '.join(CASES)}.")
        results = stored_results(self.path, self, self.free) or {"lines": []}
        python, missing = torch_environment(self.cache)
        code = code_of(MEASURED)
        with steps(len(cases), "peers") as advance, lanes(self.cores) as pool:
            done = {
                pool.submit(self._case, name, case, python, missing, self._left(results["lines"], name, case)): name
                for name, case in cases.items()
            }
            for future in concurrent.futures.as_completed(done):
                advance(f"{CASES[done[future]].title}: done")
                try:
                    lines = future.result()
                except DataError as error:
                    if self.only is not None:
                        raise
                    text = str(error).splitlines()[0]
                    console.print(f"{done[future]} is left out, for its data are not here: {text}")
                    continue
                for line in lines:
                    results["lines"] = with_line(results["lines"], line | {"code": code, "cores": self.cores})
                    save_json(self.path, dataclasses.replace(self, only=None, peer=None), results)
        return results

    def _asked(self, name: str, case: Case) -> bool:
        return self.only == name or (self.only is None and (case.quick or not self.quick))

    def _left(self, lines: list[dict[str, Any]], name: str, case: Case) -> list[str]:
        """The peers to be measured: those asked for, else those that the present code was not measured with."""
        if self.peer is not None:
            return [self.peer]
        done = [line["peer"] for line in lines if line["case"] == name and not changed_rooms(line["code"])]
        return [peer for peer in case.peers if self.only is not None or peer not in done]

    def _case(
        self, name: str, case: Case, python: Path, missing: dict[str, str], peers: Sequence[str]
    ) -> list[dict[str, Any]]:
        """One line for each peer, all measured in turn with one process of bilax."""
        why = {p: missing.get(p) or cannot(p, case) for p in peers}
        lines = [{"case": name, "peer": peer, "cannot": reason} for peer, reason in why.items() if reason]
        able = [peer for peer, reason in why.items() if not reason]
        if not able:
            return lines
        script = str(Path(__file__).with_name("steps_by_torch.py"))
        commands = {"bilax": [sys.executable, "-m", "bilax.experiments.peers.steps_by_bilax"]}
        commands |= {peer: [str(python), script, peer] for peer in able}
        with tempfile.TemporaryDirectory() as folder:
            given = case.make(self.seed)
            orders.store(Path(folder), given, case.dtype)
            exact = reference(commands["bilax"], case, given)
            found = {side: self._alone(command, case, folder, exact) for side, command in commands.items()}
            failed = [side for side in found if "cannot" in found[side]]
            good = {side: command for side, command in commands.items() if side not in failed}
            for side, seconds in self._in_turn(good, case, folder).items():
                each = {key: [getattr(one, key) for one in seconds] for key in orders.Seconds._fields}
                found[side] |= {"all": each, "seconds": float(np.median(each["processor"]))}
        made = [{"case": name, "peer": p, "bilax": found["bilax"], "theirs": found[p]} for p in able if p not in failed]
        return lines + made + [{"case": name, "peer": p, **found[p]} for p in failed]

    def _alone(self, command: list[str], case: Case, folder: str, exact: dict[str, Any]) -> dict[str, Any]:
        """In fresh processes: time to the first result, without and with programs on disk; memory; error."""
        try:
            found = [first(command, case, folder) for _ in range(1 if self.quick else self.starts)]
            result = {key: float(np.median([one[key] for one in found])) for key in found[0]}
            if "bilax.experiments.peers.steps_by_bilax" in command:
                with tempfile.TemporaryDirectory() as cache:
                    first(command, case, folder, cache)
                    result["cached"] = first(command, case, folder, cache)["first"]
            with started(command, case.dtype) as side:
                side.ask("load", folder=folder, **case.order())
                side.ask("gradient", out=f"{folder}/gradient.npz")
                result["error"] = distance(f"{folder}/gradient.npz", exact["gradient"])
                if case.checked:
                    side.ask("run", steps=case.checked)
                    side.ask("end", out=f"{folder}/end.npz")
                    result["off"] = distance(f"{folder}/end.npz", exact["end"])
                return result | {"versions": side.ask("versions"), "differences": exact["differences"]}
        except SideError as error:
            return {"cannot": f"fails: {error}"}

    def _in_turn(self, commands: dict[str, list[str]], case: Case, folder: str) -> dict[str, list[orders.Seconds]]:
        """Seconds of an outer step, in samples taken in turn; a first one of each does not count."""
        with contextlib.ExitStack() as stack:
            running = {side: stack.enter_context(started(one, case.dtype)) for side, one in commands.items()}
            counts = {}
            for side, one in running.items():
                one.ask("load", folder=folder, **case.order())
                counts[side] = case.ours if side == "bilax" else 1
                long = one.ask("run", steps=counts[side])["processor"]
                if side != "bilax":
                    # Two at the least, as ours: k̄, and so the way back, may be short in the first.
                    counts[side] = max(2, min(case.outer_steps, math.ceil(SAMPLE / long)))
            seconds: dict[str, list[orders.Seconds]] = {side: [] for side in running}
            for _ in range(3 if self.quick else self.repeats):
                for side, one in running.items():
                    took = orders.Seconds(**one.ask("run", steps=counts[side]))
                    # A call of `solve` takes a turn more than steps, to evaluate the end; the paper's runs are long.
                    turns = counts[side] + int(side == "bilax")
                    seconds[side].append(orders.Seconds(*(part / turns for part in took)))
        return seconds

    def show(self, results: dict[str, Any]) -> list[Path]:
        lines = [line for line in results["lines"] if "cannot" not in line]
        show_table("What each takes", COLUMNS, rows_of(lines))
        show_table("Times what bilax takes", RATIO_COLUMNS, [_ratios(line) for line in lines])
        made = {name: number for line in lines for name, number in line["theirs"]["versions"].items()}
        console.print(", ".join(f"{name} {number}" for name, number in made.items()), style="dim")
        cores = " or ".join(sorted({str(line["cores"]) for line in lines}))
        console.print(f"Each side had {cores} core(s); seconds are the processor's but for one column.")
        for line in results["lines"]:
            if "cannot" in line:
                console.print(f"{line['case']}: {line['peer']} cannot: {line['cannot']}")
        stale = sorted({room for line in results["lines"] for room in changed_rooms(line["code"])})
        if stale:
            console.print(f"older than the code that they measure: {', '.join(stale)} changed since", style="yellow")
        return [_figure(lines, self.figure_path())] if lines else []

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        lines = [line for line in results["lines"] if "cannot" not in line]
        texts = {
            "processor": "an outer step is faster",
            "megabytes": "peak memory is less",
            "first": "the first result is there sooner, nothing on disk",
            "whole": "the paper's whole run ends sooner, compilation included",
        }
        if not lines:
            return []
        off = max(line["bilax"]["differences"] for line in lines)
        checked = Claim("central differences confirm our hypergradients", f"to {off:.0e}, relative", off < 1e-5)
        return [checked, *(_claim(lines, key, text) for key, text in texts.items())]


COLUMNS = ["case", "program", "ms a step (quartiles)", "first result, s", "again", "whole run, s", "peak, MB", "error"]
"""`again` is with the compiled programs on disk; the error is the hypergradient's, relative to double precision"""
RATIO_COLUMNS = ["case", "program", "time of a step", "by the clock", "first result", "whole run", "peak memory"]


def rows_of(lines: list[dict[str, Any]]) -> list[list[str]]:
    """bilax once for each case, then the peers."""
    rows = []
    for i, line in enumerate(lines):
        if i == 0 or lines[i - 1]["case"] != line["case"]:
            rows.append([line["case"], "bilax", *_numbers(line, "bilax")])
        rows.append([line["case"], line["peer"], *_numbers(line, "theirs")])
    return rows


def _ratios(line: dict[str, Any]) -> list[str]:
    keys = ("processor", "clock", "first", "whole", "megabytes")
    return [line["case"], line["peer"], *(_short(ratio(line, key)) for key in keys)]


def _short(number: float) -> str:
    """Three digits, in no other notation."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _numbers(line: dict[str, Any], side: str) -> list[str]:
    one = line[side]
    low, high = np.quantile(one["all"]["processor"], (0.25, 0.75))
    step, low, high = (_short(1e3 * number) for number in (one["seconds"], low, high))
    times = [f"{step} ({low} to {high})", f"{value(line, side, 'first'):.2f}"]
    cached = f"{value(line, side, 'cached'):.2f}" if "cached" in one else "–"
    return [*times, cached, _short(value(line, side, "whole")), f"{one['megabytes']:.0f}", f"{one['error']:.0e}"]


def _figure(lines: list[dict[str, Any]], path: Path) -> Path:
    """What each peer takes over what bilax takes, a row for each case: right of the line bilax takes less."""
    names = list(dict.fromkeys(line["case"] for line in lines))
    figure, panels = plt().subplots(1, 3, figsize=(10, 0.32 * len(names) + 1.4), sharey=True)
    titles = {"processor": "time of an outer step", "whole": "the whole run", "megabytes": "peak memory"}
    for axis, (key, title) in zip(panels, titles.items(), strict=True):
        for peer, marker in zip(("PyTorch", *PEERS), "o^svDP", strict=True):
            own = [line for line in lines if line["peer"] == peer]
            if own:
                places = [names.index(line["case"]) for line in own]
                axis.plot([ratio(line, key) for line in own], places, marker, ls="", alpha=0.8, label=peer)
        axis.axvline(1, color="grey", lw=0.8)
        axis.set(xscale="log", title=title, xlabel="times what bilax takes")
        label_log(axis.xaxis)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    panels[0].legend(fontsize=7)
    return saved_figure(figure, path)


def value(line: dict[str, Any], side: str, key: str) -> float:
    """One number of a side; `whole` is the first result and the paper's other outer steps."""
    one = line[side]
    if key == "whole":
        return value(line, side, "first") + (CASES[line["case"]].outer_steps - 1) * one["seconds"]
    # A call of `solve` also evaluates the end, by a turn more; the others' loops do not.
    return one[key] - one["seconds"] if side == "bilax" and key in ("first", "cached") else one[key]


def ratio(line: dict[str, Any], key: str) -> float:
    """What the peer takes over what bilax takes; of a step's times, the median over pairs of samples."""
    if key in orders.Seconds._fields:
        return float(np.median(np.divide(line["theirs"]["all"][key], line["bilax"]["all"][key])))
    return value(line, "theirs", key) / value(line, "bilax", key)


def _claim(lines: list[dict[str, Any]], key: str, text: str) -> Claim:
    ratios = {f"{line['case']} {line['peer']}": ratio(line, key) for line in lines}
    behind = [f"{name} {one:.2f}" for name, one in ratios.items() if one < 1]
    least, most = (_short(one) for one in (min(ratios.values()), max(ratios.values())))
    here = f"{len(lines) - len(behind)} of {len(lines)}, {least} to {most} times"
    return Claim(text, here + (f"; not {', '.join(behind)}" if behind else ""), not behind)


def cannot(peer: str, case: Case) -> str | None:
    """Why a peer cannot express a case."""
    if peer == "Betty":
        return NO_CHOICE
    return KEEPS_ALL if case.checkpoint and peer == "higher" else None


def with_line(lines: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines with one more, or with one made anew, in the order of the cases."""

    def place(line):
        return list(CASES).index(line["case"]), ["PyTorch", *PEERS].index(line["peer"])

    known = [line for line in lines if line["case"] in CASES and place(line) != place(new)]
    return sorted([*known, new], key=place)


def first(command: list[str], case: Case, folder: str, cache: str | None = None) -> dict[str, float]:
    """What a new process takes to the result of one outer step: seconds of the processor, by the clock, and memory."""
    began = time.perf_counter()
    with started(command, case.dtype, cache) as side:
        side.ask("load", folder=folder, **case.order())
        side.ask("run", steps=1)
        clock, found = time.perf_counter() - began, side.ask("peak")
        return {"first": found["processor"], "first_clock": clock, "megabytes": found["megabytes"]}


def reference(command: list[str], case: Case, given: orders.Given) -> dict[str, Any]:
    """The hypergradient in double precision, what central differences make of it, and where the check ends."""
    with tempfile.TemporaryDirectory() as folder, started(command, "float64") as side:
        orders.store(Path(folder), given, "float64")
        side.ask("load", folder=folder, **case.order())
        side.ask("gradient", out=f"{folder}/gradient.npz")
        found = {"gradient": dict(np.load(f"{folder}/gradient.npz")), **side.ask("differences")}
        if case.checked:
            side.ask("run", steps=case.checked)
            side.ask("end", out=f"{folder}/end.npz")
            found["end"] = dict(np.load(f"{folder}/end.npz"))
        return found


def distance(path: str, exact: dict[str, np.ndarray]) -> float:
    """How far x and z in a file are from the exact ones, relative to these."""
    with np.load(path) as found:
        a, b = (np.concatenate([one["x"], one["z"]]) for one in (found, exact))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def torch_environment(cache: Path) -> tuple[Path, dict[str, str]]:
    """The Python of the peers' environment, and why those that are not in it could not be installed."""
    python = environment(cache, TORCH)
    notes = python.parent.parent / "peers.json"
    known = json.loads(notes.read_text()) if notes.exists() else {}
    for peer, package in PEERS.items():
        if known.get(peer, {}).get("package") == package:
            continue
        console.print(f"installing {package} ...", style="dim")
        # Without what they ask for: it is there, and old pins of it would replace PyTorch.
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", package]
        done = subprocess.run(pip, capture_output=True, text=True)
        known[peer] = {"package": package, "why": None if done.returncode == 0 else reason(done.stdout + done.stderr)}
        notes.write_text(json.dumps(known))
    return python, {peer: f"cannot be installed: {one['why']}" for peer, one in known.items() if one["why"]}


def reason(log: str) -> str:
    """The line of pip's output that tells most: the first that a compiler calls an error, else the last."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "fatal error:" in line), lines[-1] if lines else "no message")
