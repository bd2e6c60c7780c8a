"""The two pages: text from the templates beside this file, and in place of each `{{...}}` what results/ hold."""

import dataclasses
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import bilax
from bilax.app.cli import COMMANDS, load
from bilax.app.show import Arg, Claim, Target, console
from bilax.files import DataError, read_json, write_whole

HERE = Path(__file__).parent
MARKS = {"yes": "held", "no": "not-held", "open": "open"}
"""how the site's style sheet calls each answer"""
BENCHES = {
    "everyday": (
        "Ordinary problems, beside SciPy",
        "Problems that people have, by `bilax.solve(problem, bilax.auto(), x0, y0)` with nothing else set. Progress is "
        "from F at the start to the best F that SciPy's optimisers found, the follower solved exactly at each x.",
    ),
    "implicit": (
        "One hypergradient, beside jaxopt",
        "The derivative through a solved follower at equal accuracy, each side with its best solver and tolerance. A "
        "case is a follower, how many variables it has, and the bits of its numbers.",
    ),
    "peers": (
        "The same outer steps, beside PyTorch, higher, TorchOpt, BOAT and Betty",
        "Each library in a process of its own, in the way its documentation shows, with the same start, data, "
        "precision and cores; samples are taken in turn, in seconds of the processor, which others who use the machine "
        "hardly change. The error is that of the hypergradient at the start, relative "
        "to ours in double precision, which central differences confirm. The whole run is the first result (from the "
        "start of the process, imports and compilation included) and the other outer steps of the paper's run length. "
        "Ratios are the other library's over ours: above 1 bilax needs less.",
    ),
    "stochastic": (
        "Mini-batch methods, beside benchmark_bilevel",
        "Its own solver classes and ours with its authors' settings on the same data, in turn: the processor's time "
        "for a step, and what is reached in equal time. Of ten seeds the time is that for each. On the quadratics and "
        "in cleaning a step is a few products with one batch, which are the same on both sides.",
    ),
    "clean": (
        "Wrong labels, beside cleanlab and a model of the trusted rows alone",
        "Labels made wrong at random or by class, some rows trusted: AUC and F1 of finding them, and the accuracy of a "
        "model of what is left.",
    ),
    "suite": (
        "Followers with several minima",
        "Twelve problems with known answers. A value below F* is one that no solution has: the follower was left at a "
        "poor stationary point.",
    ),
}
"""title and text of each stored comparison, by its name in `bilax bench`"""


@dataclasses.dataclass
class Claims:
    """The page of claims: what the paper says of each figure, table and theorem, and what is stored of it here."""

    results: Annotated[Path, Arg(help="folder of the stored numbers")] = Path("results")
    out: Annotated[Path, Arg(help="the page to write, in Markdown")] = Path("claims.md")

    name: ClassVar[str] = "claims"

    def main(self) -> None:
        """Writes the page."""
        write_whole(self.out, pages_from_results(self.results)["claims.md"].encode())
        console.print(f"wrote {self.out}", style="dim", soft_wrap=True)


def pages_from_results(results: Path) -> dict[str, str]:
    """The pages of the documentation that tell stored results, by their path."""
    return {name: _filled((HERE / name).read_text(), results) for name in ("claims.md", "peers.md")}


def _filled(template: str, results: Path) -> str:
    def fill(found: re.Match[str]) -> str:
        word, _, name = found[1].partition(" ")
        parts = {"summary": _summary, "figures": _figures, "bench": _bench}.get(word)
        return parts(results, name) if parts else _claims(results, word)

    return re.sub(r"\{\{(.*?)\}\}", fill, template)


def _summary(results: Path, _: str = "") -> str:
    template = (HERE / "claims.md").read_text()
    titles = {name: title for title, name in re.findall(r"^## (.*) \{ #(.*) \}$", template, re.M)}
    rows, total = [], Counter[str]()
    for name, title in titles.items():
        words = Counter(claim.word for claim in _stored_claims(results, name))
        total += words
        rows.append([f"[{title}](#{name})", *(words[word] or "–" for word in MARKS), _made_by(results, name)])
    said = f"Of {total.total()} sentences that were checked {total['yes']} held, {total['no']} did not, and "
    said += f"{total['open']} are open."
    return f"**{said}**\n\n" + _table(["", "held", "did not", "open", "made by"], rows)


def _claims(results: Path, name: str) -> str:
    rows = [[claim.paper, claim.here, _mark(claim)] for claim in _stored_claims(results, name)]
    if not rows:
        partly = "Too little is stored yet to compare" if _records(results, name) else "Nothing is stored yet"
        return f"{partly}: `bilax reproduce {name}` makes what is missing."
    return f"Made by {_made_by(results, name)}.\n\n" + _table(["the paper says", "here", "held"], rows)


def _figures(results: Path, name: str) -> str:
    if not _records(results, name):
        return ""
    target = _target("reproduce" if name in COMMANDS["reproduce"] else "compare", name, results)
    return f"{_pictures(results, name)}\n\n{_numbers(target, target.stored())}"


def _bench(results: Path, name: str) -> str:
    target = _target("bench", name, results)
    if not target.path.exists():
        return ""
    title, text = BENCHES[name]
    stored = read_json(target.path)["results"]
    rows = [[claim.paper, claim.here, _mark(claim)] for claim in _checked(target, stored)]
    table = _table([target.claimant, "here", "held"], rows) if rows else ""
    head = f"## {title}\n\n{text} Made by `bilax bench {name}`, {_made_by(results, target.name)}."
    return "\n\n".join([head, table, _pictures(results, target.name), _numbers(target, stored)])


def _stored_claims(results: Path, name: str) -> list[Claim]:
    if not _records(results, name):
        return []
    target = _target("reproduce", name, results)
    return _checked(target, target.stored())


def _checked(target: Target, stored: dict[str, Any]) -> list[Claim]:
    """The claims, as far as the stored numbers are in this version's form."""
    try:
        return target.claims(stored)
    except (KeyError, IndexError, TypeError):
        return []


def _target(command: str, name: str, results: Path) -> Target:
    return load(COMMANDS[command][name][0])(out=results, redraw=True)


def _numbers(target: Target, stored: dict[str, Any]) -> str:
    """What the command prints of the stored numbers, folded away; wide tables are moved sideways, not cut."""
    before, console.width = console.width, 180
    try:
        with tempfile.TemporaryDirectory() as folder, console.capture() as text:
            dataclasses.replace(target, out=Path(folder)).show(stored)
    except (KeyError, IndexError, TypeError):
        return "The numbers were stored by an older version, in a form that this one does not show; make them anew."
    finally:
        console.width = before
    lines = "\n".join(f"    {line}".rstrip() for line in text.get().rstrip().splitlines())
    return f'??? note "The numbers"\n\n    ```text\n{lines}\n    ```'


def _pictures(results: Path, name: str) -> str:
    longer = tuple(other for other in COMMANDS["reproduce"] if other.startswith(f"{name}-"))
    found = [path for path in sorted(results.glob(f"{name}*.png")) if not path.stem.endswith("-quick")]
    found = [path for path in found if not (longer and path.stem.startswith(longer))]
    return "\n\n".join(f"![{path.stem}](results/{path.relative_to(results)}){{ .plain }}" for path in found)


def _records(results: Path, name: str) -> list[dict[str, Any]]:
    """What is stored of a target: one file, or one for each cell."""
    found = []
    for path in [results / f"{name}.json", *sorted((results / name).glob("*.json"))]:
        try:
            found.append(read_json(path))
        except DataError:
            continue
    return found


def _made_by(results: Path, name: str) -> str:
    """Version and dates of the stored numbers; older versions than this are marked."""
    records = _records(results, name)
    if not records:
        return "nobody yet"
    versions = sorted({str(record.get("bilax")) for record in records})
    dates = sorted(str(record.get("date")) for record in records)
    days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    stale = "" if versions == [bilax.__version__] else f" (older than this version, {bilax.__version__})"
    return f"bilax {' and '.join(versions)}, {days}{stale}"


def _mark(claim: Claim) -> str:
    return f'<span class="{MARKS[claim.word]}">{claim.word}</span>'


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in [head, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])
