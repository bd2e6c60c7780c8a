"""`bilax bench stale`: which stored numbers are older than the code that they measure."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from bilax.app.show import Arg, show_table
from bilax.app.versions import changed_rooms
from bilax.files import DataError, read_json


@dataclasses.dataclass
class Stale:
    """What is stored, when it was made, and which parts of the package have changed since."""

    results: Annotated[Path, Arg(help="folder of the stored numbers")] = Path("results")

    def main(self) -> None:
        """Prints one line for each file."""
        rows = [row(path, self.results) for path in sorted(self.results.rglob("*.json"))]
        show_table("Stored numbers and the code that they measure", ["file", "made", "changed since"], rows)


def row(path: Path, results: Path) -> list[str]:
    """The file, its version and day, and what has changed."""
    try:
        record = read_json(path)
    except DataError as error:
        return [str(path.relative_to(results)), "–", str(error)]
    made = " ".join(str(record.get(key, "–")) for key in ("bilax", "date"))
    return [str(path.relative_to(results)), made, changes(record)]


def changes(record: dict[str, Any]) -> str:
    """In words; the numbers of a file that was made in parts may be of different age."""
    codes = list(_codes(record.get("results"))) or list(_codes(record))
    if not codes:
        return "not noted when it was made"
    changed = [changed_rooms(code) for code in codes]
    rooms = sorted({room for one in changed for room in one})
    if not rooms:
        return "nothing"
    parts = f" ({sum(map(bool, changed))} of {len(codes)} parts)" if len(codes) > 1 else ""
    return ", ".join(rooms) + parts


def _codes(value: Any) -> Iterator[dict[str, str]]:
    """Every note of the code, however deep."""
    if isinstance(value, dict):
        if isinstance(value.get("code"), dict):
            yield value["code"]
        for key, part in value.items():
            if key != "code":
                yield from _codes(part)
    elif isinstance(value, list):
        for part in value:
            yield from _codes(part)
