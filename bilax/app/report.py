"""`bilax report`: one self-contained HTML page on one or several runs."""

import base64
import dataclasses
import html
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from bilax.app.errors import refuse
from bilax.app.run_folder import RunRecord, read_run
from bilax.app.show import console, plt
from bilax.app.text import label
from bilax.files import write_whole

PANELS = {
    "upper": "leader's objective F(x, y)",
    "lower": "follower's objective f(x, y)",
    "residual": "follower's residual ‖R‖",
    "k_bar": "chosen step k̄",
}
LARGEST = 1e100
"""value that is drawn; matplotlib's axes end before a float does"""
HIDDEN = ("message", "data_tag", "seconds_per_step")
"""what result.json holds that is no column"""
STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { white-space: nowrap; padding: .3rem .7rem; }
th, td { border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td.number { text-align: right; } img { max-width: 100%; height: auto; background: white; border-radius: 4px; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: .5rem; }
details { margin: .5rem 0; } summary { cursor: pointer; } .failed { color: #c0392b; font-weight: 600; }
@media print { body { max-width: none; font-size: 11px; } .panels { grid-template-columns: 1fr 1fr; }
 details > * { display: block; } .scroll { overflow: visible; } }
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
    """The whole page."""
    title = f"bilax: {records[0].name}" if len(records) == 1 else f"bilax: {len(records)} runs"
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
        "<h2>How they ended</h2>" if len(records) > 1 else "<h2>How it ended</h2>",
        _ends(records),
        "<h2>Curves</h2>",
        _curves(records),
        "<h2>Settings</h2>",
        _settings(records),
        "</body></html>",
    ]
    return "\n".join(parts)


def _ends(records: Sequence[RunRecord]) -> str:
    rows = []
    for record in records:
        result = record.result or _so_far(record)
        rows.append({"run": record.name, "method": record.config["config"].get("method", ""), **_flat(result)})
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in HIDDEN]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(_cell(name, row.get(name, "")) for name in columns) + "</tr>" for row in rows)
    messages = dict.fromkeys((str(row.get("status")), str(row["message"])) for row in rows if row.get("message"))
    words = "".join(f"<p>{html.escape(status)}: {html.escape(text)}</p>" for status, text in messages)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{words}"


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
    return f"<td{' class=failed' if failed else ''}>{html.escape(str(value))}</td>"


def _short(value: float | int) -> str:
    try:
        return f"{value:.5g}"
    except OverflowError:  # a whole number larger than any float
        return f"{str(value)[:5]}… ({len(str(value))} digits)"


def _settings(records: Sequence[RunRecord]) -> str:
    names = list(dict.fromkeys(name for record in records for name in record.config["config"]))
    values = {name: [str(record.config["config"].get(name, "")) for record in records] for name in names}
    differ = [name for name in names if len(set(values[name])) > 1 and name != "out"]
    same = [name for name in names if name not in differ and name != "out"]
    parts = []
    if differ:
        head = "".join(f"<th>{html.escape(record.name)}</th>" for record in records)
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th>" + "".join(f"<td>{html.escape(v)}</td>" for v in values[name]) + "</tr>"
            for name in differ
        )
        parts.append(f"<p>What differs:</p><div class=scroll><table><tr><th></th>{head}</tr>{rows}</table></div>")
    versions = records[0].config.get("versions")
    shared = {name: values[name][0] for name in same} | (versions if isinstance(versions, dict) else {})
    rows = "".join(f"<tr><th>{html.escape(n)}</th><td>{html.escape(str(v))}</td></tr>" for n, v in shared.items())
    title = "The same in all, and versions" if len(records) > 1 else "All settings, and versions"
    parts.append(f"<details open><summary>{title}</summary><div class=scroll><table>{rows}</table></div></details>")
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
