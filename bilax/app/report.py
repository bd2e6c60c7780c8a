"""`bilax report`: one self-contained HTML page on one or several runs."""

import base64
import dataclasses
import html
import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from bilax.app.conclusion import conclusion
from bilax.app.errors import refuse
from bilax.app.run_folder import RunRecord, read_run
from bilax.app.show import console, plt
from bilax.app.text import label
from bilax.files import read_whole, write_whole

PANELS = {
    "upper": "leader's objective F(x, y)",
    "lower": "follower's objective f(x, y)",
    "residual": "follower's residual ‖R‖",
    "k_bar": "chosen step k̄",
}
LARGEST = 1e100
"""value that is drawn; matplotlib's axes end before a float does"""
LARGEST_PICTURE = 1 << 24
"""bytes of a picture that is taken into the page"""
ACROSS = 4
"""runs side by side in a table"""
HIDDEN = ("data_tag", "seconds_per_step")
"""what result.json holds that is not shown"""
STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin: 0 0 .3rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
 overflow-wrap: anywhere; }
th:first-child { min-width: 6rem; } td.number { text-align: right; }
img { max-width: 100%; height: auto; background: white; border-radius: 4px; }
.said { background: var(--soft); border-left: 4px solid #0072B2; padding: .7rem 1rem; margin: .8rem 0; }
.said p { margin: .2rem 0; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: .5rem; }
figure { margin: 0; } figcaption { font-size: .9rem; }
details { margin: .5rem 0; } summary { cursor: pointer; } .failed { color: #c0392b; font-weight: 600; }
@media (max-width: 40rem) { body { font-size: 14px; } th, td { padding: .25rem .4rem; } }
@media print { body { max-width: none; font-size: 11px; } .panels { grid-template-columns: 1fr 1fr; }
 details > * { display: block; } }
"""


@dataclasses.dataclass
class Report:
    """Makes one HTML page that needs no network: settings, how each run ended, curves, a comparison.

    Runs that have not ended are shown as far as they are.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """run folders, or folders that hold some"""
    out: Path = Path("report.html")
    """the page to write"""

    def main(self) -> None:
        """Reads the runs, writes the page and says where."""
        try:
            records = [read_run(folder) for folder in find_runs(self.runs)]
            write_whole(self.out, page(records).encode(errors="backslashreplace"))
        except (OSError, ValueError) as error:
            refuse(f"bilax report: {error}")
        console.print(f"wrote {self.out}: {len(records)} run{'s' * (len(records) > 1)}", soft_wrap=True)


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The run folders among `folders` and right below them."""
    found = []
    for folder in folders:
        inner = sorted(path.parent for path in folder.glob("*/config.json"))
        found += [folder] if (folder / "config.json").exists() or not inner else inner
    if not found:
        raise ValueError("give at least one run folder.")
    return found


def page(records: Sequence[RunRecord]) -> str:
    """The whole page: for each group of runs that can be compared what they came to, pictures, curves and settings."""
    title = f"bilax: {records[0].name}" if len(records) == 1 else f"bilax: {len(records)} runs"
    groups = comparable(records)
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
    ]
    if len(groups) > 1:
        parts.append("<p>These runs are not all of one kind: each kind has its own part, for they do not compare.</p>")
    for name, group in groups.items():
        parts += [f"<h2>{html.escape(name)}</h2>" if len(groups) > 1 else "", *_part(group)]
    return "\n".join([*parts, "</body></html>"])


def comparable(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """The runs by what they solved: an experiment, and the data where there are several."""
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        config = record.config["config"]
        words = [str(config[name]) for name in ("experiment", "dataset") if config.get(name)]
        groups.setdefault(", ".join(words) or "unknown", []).append(record)
    return groups


def _part(records: Sequence[RunRecord]) -> list[str]:
    heading = "h2" if len(records) == 1 else "h3"
    said = [_said(record, heading="" if len(records) == 1 else record.name) for record in records]
    pictures = "".join(_pictures(record, named=len(records) > 1) for record in records)
    return [
        *said,
        pictures and f"<div class=panels>{pictures}</div>",
        f"<{heading}>Curves</{heading}>",
        _curves(records),
        f"<{heading}>Numbers</{heading}>",
        _ends(records),
        f"<{heading}>Settings</{heading}>",
        _settings(records),
    ]


def _said(record: RunRecord, heading: str) -> str:
    title = f"<h3>{html.escape(heading)}</h3>" if heading else ""
    return f"<div class=said>{title}{''.join(f'<p>{_prose(s)}</p>' for s in conclusion(record))}</div>"


def _prose(text: str) -> str:
    """Escaped, with what is in backticks as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _pictures(record: RunRecord, named: bool) -> str:
    """What the run left in its folder, and what its experiment draws of it."""
    found = {path.stem: read_whole(path, LARGEST_PICTURE) for path in sorted(record.folder.glob("*.png"))[:4]}
    found |= _drawn(record)
    names = {name: f"{record.name}: {name}" if named else name for name in found}
    return "".join(
        f"<figure>{_image(content, names[name])}<figcaption>{html.escape(names[name])}</figcaption></figure>"
        for name, content in found.items()
    )


def _drawn(record: RunRecord) -> dict[str, bytes]:
    from bilax.app.cli import COMMANDS, load

    known = COMMANDS["run"].get(str(record.config["config"].get("experiment")))
    if known is None:
        return {}
    try:
        return load(known[0]).pictures(record)
    except (AttributeError, TypeError, ValueError, KeyError):  # an experiment without pictures, or a damaged run
        return {}


def _ends(records: Sequence[RunRecord]) -> str:
    """How each run ended: a column for each, no more side by side than a screen holds."""
    rows = [{**_flat(record.result or _so_far(record))} for record in records]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in HIDDEN]
    tables = []
    for begin in range(0, len(records), ACROSS):
        runs, some = records[begin : begin + ACROSS], rows[begin : begin + ACROSS]
        head = "".join(f"<th>{html.escape(record.name)}</th>" for record in runs) if len(records) > 1 else ""
        body = "".join(
            f"<tr><th>{html.escape(name)}</th>{''.join(_cell(name, row.get(name, '')) for row in some)}</tr>"
            for name in names
        )
        tables.append(
            f"<table>{f'<thead><tr><th></th>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"
        )
    return "".join(tables)


def _so_far(record: RunRecord) -> dict[str, Any]:
    steps = _curves_of(record, "upper").shape[1]
    last = {name: float(np.mean(_curves_of(record, name)[:, -1])) for name in PANELS if steps}
    return {"status": "has not ended", "steps": steps * _spacing(record), **last}


def _flat(result: dict[str, Any]) -> dict[str, Any]:
    # Curves and the like are for other pages than a table.
    measures = result.get("measures")
    every = result | (measures if isinstance(measures, dict) else {})
    return {name: value for name, value in every.items() if isinstance(value, str | float | int)}


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float | int) and not isinstance(value, bool):
        return f"<td class=number>{_short(value)}</td>"
    failed = name == "status" and value in ("diverged", "non_finite", "linear_solve_failed")
    return f"<td{' class=failed' if failed else ''}>{_prose(str(value))}</td>"


def _short(value: float | int) -> str:
    try:
        return f"{value:.5g}"
    except OverflowError:  # a whole number larger than any float
        return f"{str(value)[:5]}… ({len(str(value))} digits)"


def _settings(records: Sequence[RunRecord]) -> str:
    every = [{n: v for n, v in record.config["config"].items() if v is not None and n != "out"} for record in records]
    names = list(dict.fromkeys(name for config in every for name in config))
    values = {name: [str(config.get(name, "–")) for config in every] for name in names}
    differ = [name for name in names if len(set(values[name])) > 1]
    parts = []
    for begin in range(0, len(records) if differ else 0, ACROSS):
        head = "".join(f"<th>{html.escape(record.name)}</th>" for record in records[begin : begin + ACROSS])
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th>"
            + "".join(f"<td>{html.escape(v)}</td>" for v in values[name][begin : begin + ACROSS])
            + "</tr>"
            for name in differ
        )
        parts.append(f"<p>What differs:</p><table><tr><th></th>{head}</tr>{rows}</table>")
    versions = records[0].config.get("versions")
    shared = {name: values[name][0] for name in names if name not in differ}
    shared |= versions if isinstance(versions, dict) else {}
    rows = "".join(f"<tr><th>{html.escape(n)}</th><td>{html.escape(str(v))}</td></tr>" for n, v in shared.items())
    title = "The same in all, and versions" if len(records) > 1 else "All settings, and versions"
    parts.append(f"<details><summary>{title}</summary><table>{rows}</table></details>")
    return "".join(parts)


def _curves(records: Sequence[RunRecord]) -> str:
    """One picture per quantity, so that a narrow screen can stack them."""
    return f"<div class=panels>{''.join(_image(_panel(records, name), title) for name, title in PANELS.items())}</div>"


def _curves_of(record: RunRecord, name: str) -> np.ndarray:
    """One row for each start; what a picture could not show is cut."""
    curves = np.atleast_2d(record.history.get(name, np.zeros((1, 0))))
    if curves.ndim > 2 or curves.dtype.kind not in "biuf":
        raise ValueError(f"{record.folder}: the history of {name} holds no curves, but {curves.dtype} {curves.shape}.")
    return np.clip(curves.astype(float), -LARGEST, LARGEST)


def _spacing(record: RunRecord) -> int:
    """Outer steps to one entry of the history."""
    found = record.config["config"].get("record_every", 1)
    return found if isinstance(found, int) and 0 < found < 1 << 31 else 1


def _panel(records: Sequence[RunRecord], name: str) -> bytes:
    pyplot = plt()
    figure, ax = pyplot.subplots(figsize=(5.2, 3.2))
    colours = itertools.cycle(pyplot.rcParams["axes.prop_cycle"].by_key()["color"])
    for record in records:
        curves = _curves_of(record, name)
        # No picture shows more points than it has pixels; k̄ jumps, and a line through it would fill the picture.
        stride = max(1, curves.shape[1] // 2000)
        style: dict[str, Any] = {"ls": "", "marker": ".", "ms": 2} if name == "k_bar" else {"lw": 1.3}
        colour = next(colours)
        for i, values in enumerate(curves):
            name_once = label(record.name) if i == 0 else None
            ax.plot(
                _spacing(record) * np.arange(len(values))[::stride],
                values[::stride],
                label=name_once,
                color=colour,
                **style,
            )
    if name == "residual" and any(np.any(_curves_of(record, name) > 0) for record in records):
        ax.set_yscale("log")
    ax.set(title=PANELS[name], xlabel="outer step")
    if 1 < len(records) <= 12 and name == "upper":
        ax.legend()
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    pyplot.close(figure)
    return stream.getvalue()


def _image(content: bytes, alternative: str) -> str:
    data = base64.b64encode(content).decode()
    return f'<img alt="{html.escape(alternative, quote=True)}" src="data:image/png;base64,{data}">'
