"""What the experiments share: stored results, tables, figures, and the paper's claims beside ours."""

import abc
import contextlib
import dataclasses
import datetime
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, Protocol, runtime_checkable

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import bilax
from bilax.app.errors import refuse
from bilax.app.text import printable
from bilax.app.versions import code_of, rooms_of
from bilax.files import DataError, read_json, write_whole


class _PlainConsole(Console):
    """Prints text as it is: names of files and classes may hold what rich takes for markup, or a terminal obeys."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


console = _PlainConsole(width=None if sys.stdout.isatty() else 120)

Arg = tyro.conf.arg

PLACES = ("cache", "folder", "out", "repository", "runs")
"""settings that say where files lie, not what is computed"""


@dataclasses.dataclass
class Claim:
    """One sentence, the paper's mostly, and what came out here."""

    paper: str
    here: str
    held: bool | None
    """None where the numbers do not tell: the difference is smaller than what is not known of it"""

    @property
    def word(self) -> str:
        """Whether it held: yes, no or open."""
        return "open" if self.held is None else "yes" if self.held else "no"


@dataclasses.dataclass
class Target(abc.ABC):
    """Something that `bilax reproduce` makes: numbers stored as JSON, and a table and figures drawn from them."""

    out: Annotated[Path, Arg(help="folder for the numbers and figures")] = Path("results")
    redraw: Annotated[bool, Arg(help="draw from the stored numbers; compute nothing")] = False
    quick: Annotated[bool, Arg(help="a smaller version that ends soon")] = False
    seed: Annotated[int, Arg(help="seed of everything random")] = 0

    name: ClassVar[str]
    claimant: ClassVar[str] = "the paper says"
    free: ClassVar[tuple[str, ...]] = ("redraw",)
    """settings that stored numbers may have been made with others of"""
    in_cells: ClassVar[bool] = False
    """whether `compute` stores its parts one by one, so that there is nothing to store at the end"""

    @abc.abstractmethod
    def compute(self) -> dict[str, Any]:
        """The numbers, as plain lists and dictionaries."""

    @abc.abstractmethod
    def show(self, results: dict[str, Any]) -> list[Path]:
        """Prints the table, draws the figures and returns their paths."""

    def claims(self, results: dict[str, Any]) -> list[Claim]:
        """What the paper says of this, and whether it held."""
        return []

    def main(self) -> None:
        """Computes or reads the numbers, then shows them."""
        written = []
        if self.redraw:
            results = self.stored()
        else:
            results = self.compute()
            if self.quick or not self.in_cells:
                save_json(self.path, self, results)
                written.append(self.path)
        written += self.show(results)
        show_claims(self.claims(results), self.claimant)
        for path in written:
            console.print(f"wrote {path}", style="dim", soft_wrap=True)

    @property
    def path(self) -> Path:
        """Where the numbers go."""
        return self.out / f"{self.name}{'-quick' if self.quick else ''}.json"

    def stored(self) -> dict[str, Any]:
        """The numbers of an earlier run of the same settings."""
        record = load_json(self.path)
        for key, made, asked in _differences(record, self, self.free):
            refuse(f"{self.path} was made with {key} = {made}, not {asked}: run the command without --redraw.")
        return record["results"]

    def left(self) -> int:
        """How many parts are not stored with these settings yet."""
        return int(stored_results(self.path, self, self.free) is None)

    def figure_path(self, suffix: str = "") -> Path:
        """Where a figure of this target goes."""
        return self.out / f"{self.name}{suffix}{'-quick' if self.quick else ''}.png"


def show_claims(claims: Sequence[Claim], claimant: str) -> None:
    """Prints each claim with what came out here."""
    if not claims:
        return
    table = Table(box=None, padding=(0, 1), show_header=True, header_style="bold")
    for name in (claimant, "here", "held"):
        table.add_column(name, ratio=None if name == "held" else 1)
    for claim in claims:
        colour = {"yes": "green", "no": "red", "open": "yellow"}[claim.word]
        table.add_row(claim.paper, claim.here, Text(claim.word, colour))
    console.print(table)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table; numbers are set right, text left."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for i, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", no_wrap=i == 0)
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row))
    console.print(table)


@runtime_checkable
class Findings(Protocol):
    """What `bilax.certify`, `bilax.diagnose` and `bilax.check_hypergradient` return."""

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Names and numbers."""
        ...

    @property
    def words(self) -> str:
        """What they mean."""
        ...


def show_findings(title: str, findings: Findings) -> None:
    """Prints the numbers of a certificate, a diagnosis or a gradient check as a table, and its words below."""
    table = Table(title=title, caption=findings.words, title_justify="left", caption_justify="left", show_header=False)
    for row in findings.rows:
        table.add_row(*row)
    console.print(table)


@contextlib.contextmanager
def steps(total: int, what: str) -> Iterator[Any]:
    """A progress bar over `total` pieces of work; yields advance(description)."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=_PlainConsole(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda text=None: bar.update(task, advance=1, description=text or what)


def timings(runs: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """The median seconds of each, after one call that does not count; in turn, so that all meet the same noise."""
    return {name: float(np.median(values)) for name, values in samples(runs, repeats).items()}


def samples(runs: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, np.ndarray]:
    """The seconds of each call, `repeats` of each in turn; a first call of each does not count."""
    seconds: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - began)
    return {name: np.array(values[1:]) for name, values in seconds.items()}


def save_json(path: Path, config: Any, results: dict[str, Any]) -> None:
    """Writes results with all that is needed to make them again, paths left out; whole or not at all."""
    record = {
        "bilax": bilax.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "code": code_of(rooms_of(type(config).__module__)),
        "config": {
            k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(config).items() if k not in PLACES
        },
        "results": to_plain(results),
    }
    write_whole(path, (json.dumps(record, indent=1) + "\n").encode())


def load_json(path: Path) -> dict[str, Any]:
    """Reads what `save_json` wrote."""
    if not path.exists():
        refuse(f"{path} does not exist: run the same command without --redraw first.")
    try:
        record = read_json(path)
        if not isinstance(record.get("config"), dict) or not isinstance(record.get("results"), dict):
            raise DataError(f"{path}: lacks config or results, so `bilax` did not write it.")
    except DataError as error:
        refuse(str(error))
    return record


def stored_results(path: Path, config: Any, besides: Sequence[str] = ()) -> dict[str, Any] | None:
    """The results in `path` if there are any of the same settings; where files lie and `besides` may differ."""
    if not path.exists():
        return None
    record = load_json(path)
    return None if _differences(record, config, besides) else record["results"]


def refuse_to_replace(path: Path) -> NoReturn:
    """Ends the program, for `path` holds what took long and was made with other settings."""
    refuse(f"{path} holds a complete run of other settings: choose another --out, or remove it.")


def _differences(record: dict[str, Any], config: Any, besides: Sequence[str]) -> list[tuple[str, Any, Any]]:
    """Name, stored and present value of each setting that differs; one that the record lacks had its default."""
    mine, made = json.loads(json.dumps(dataclasses.asdict(config), default=str)), record["config"]
    before = {field.name: field.default for field in dataclasses.fields(config)}
    before = json.loads(json.dumps(before, default=str))
    free = {*PLACES, *besides}
    pairs = [(key, made.get(key, before[key]), mine[key]) for key in mine if key not in free]
    return [(key, old, new) for key, old, new in pairs if old != new]


def file_stem(*words: Any) -> str:
    """A file name of letters, digits and dashes: "T-RHG + ℓ_q" is t-rhg-l_q."""
    text = "-".join(map(str, words)).lower().replace("ℓ", "l")
    return re.sub("-+", "-", re.sub(r"[^a-z0-9_.-]", "-", text)).strip("-")


def to_plain(value: Any, digits: int = 7) -> Any:
    """Arrays as lists, numbers rounded to `digits` significant digits, so that files stay small."""
    if isinstance(value, dict):
        return {str(k): to_plain(v, digits) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v, digits) for v in value]
    if isinstance(value, str | bool | int | None):
        return value
    if np.ndim(value):
        return [to_plain(v, digits) for v in np.asarray(value)]
    number = np.asarray(value).item()
    return float(f"{number:.{digits}g}") if isinstance(number, float) else number


def saved_figure(figure: Any, path: Path) -> Path:
    """Writes a figure, which is then closed, and returns where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt().close(figure)
    return path


def plt() -> Any:
    """pyplot without a screen, in this project's style."""
    import matplotlib
    from cycler import cycler

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    pyplot.rcParams.update(
        {
            "figure.dpi": 110,
            "figure.constrained_layout.use": True,
            "savefig.dpi": 150,
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "legend.frameon": False,
            "lines.linewidth": 1.6,
            # Okabe and Ito's colours, which colour-blind readers can tell apart.
            "axes.prop_cycle": cycler(
                color=["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
            ),
        }
    )
    return pyplot


def label_log(axis: Any) -> None:
    """Ticks at round numbers, also where a logarithmic axis has less than a decade."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    subs = (1, 2, 3, 5) if high < 100 * low else (1,)
    axis.set_major_locator(MaxNLocator(5) if high < 5 * low else LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")
