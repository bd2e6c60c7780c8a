"""`bilax reproduce all`: every figure and table of the paper, one after another."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from bilax.app.cli import COMMANDS, load
from bilax.app.show import Arg, Target, console, show_table
from bilax.experiments.stored.pages import Claims
from bilax.files import DataError, read_json, write_whole

ORDER = (
    *("theory", "figure-1", "figure-3-left", "figure-2", "table-1", "figure-3-right"),
    *("table-3-relu", "table-3", "table-2"),
)
"""what takes long comes last"""

QUICK: dict[str, Any] = {
    "table-3": {"dataset": ("mnist",), "methods": ("IAPTT-GM", "IA-GM", "RHG")},
    "table-3-relu": {"dataset": ("mnist",)},
    "table-2": {"methods": ("IAPTT-GM", "IA-GM (ANIL)", "Proto Net", "MAML")},
}
"""what --quick leaves of the longest, so that all end within a quarter of an hour"""


@dataclasses.dataclass
class Everything:
    """Makes every figure and table of the paper, and the page of claims.

    What is stored with the same settings is not computed again, so the command can be broken off and given again. The
    full tables 2 and 3 take many hours; --quick makes small versions of all in minutes.
    """

    out: Annotated[Path, Arg(help="folder for the numbers and figures")] = Path("results")
    quick: Annotated[bool, Arg(help="smaller versions that end soon")] = False
    plan: Annotated[bool, Arg(help="say what is left and how long it takes; compute nothing")] = False

    def main(self) -> None:
        """Makes what is left, and says on the way how much that is."""
        targets = {name: self._target(name) for name in ORDER}
        left = {name: target.left() for name, target in targets.items()}
        self._show(left)
        if self.plan:
            return
        missing = []
        for name, target in targets.items():
            if left.pop(name):
                console.print(f"{name}: {self._outlook(name, left)}", style="bold")
                missing += [] if self._make(name, target) else [name]
        if not self.quick:
            Claims(self.out, self.out / "claims.md").main()
        if missing:
            console.print(f"not made: {', '.join(missing)}; the reasons are above.", style="red")
            sys.exit(1)

    def _target(self, name: str) -> Target:
        less = QUICK.get(name, {}) if self.quick else {}
        return load(COMMANDS["reproduce"][name][0])(out=self.out, quick=self.quick, **less)

    def _make(self, name: str, target: Target) -> bool:
        began = time.perf_counter()
        try:
            target.main()
        except SystemExit as refused:
            if refused.code in (130, 143):
                raise
            return False
        known = {**self._seconds(), name: round(time.perf_counter() - began, 1)}
        write_whole(self._clock, (json.dumps(known, indent=1) + "\n").encode())
        return True

    @property
    def _clock(self) -> Path:
        return self.out / f"seconds{'-quick' if self.quick else ''}.json"

    def _seconds(self) -> dict[str, Any]:
        """How long each took last time."""
        try:
            return read_json(self._clock)
        except DataError:
            return {}

    def _outlook(self, name: str, left: dict[str, int]) -> str:
        known, later = self._seconds(), [name for name, parts in left.items() if parts]
        after = f"{len(later)} after it" if later else "the last"
        told = sum(known.get(other, 0.0) for other in [name, *later])
        return after + (f", about {told / 60:.0f} min in all by what they took last time" if told else "")

    def _show(self, left: dict[str, int]) -> None:
        known = self._seconds()
        rows = [
            [name, "stored" if not parts else "to be made" if parts == 1 else f"{parts} parts to be made", *took]
            for name, parts in left.items()
            for took in [[f"{known[name]:.0f} s" if name in known else "not known"]]
        ]
        show_table("figures and tables of the paper", ["", "", "took last time"], rows)
