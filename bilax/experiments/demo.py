"""What `make run` shows."""

import dataclasses
from pathlib import Path
from typing import Annotated

from bilax.app.show import Arg, console
from bilax.experiments.cleaning import clean as clean
from bilax.experiments.toy.compare import CompareToy


@dataclasses.dataclass
class Demo:
    """Solves the paper's non-convex example with six methods, then finds wrong labels among real digits."""

    out: Annotated[Path, Arg(help="folder for the figures")] = Path("runs")

    def main(self) -> None:
        """Runs both and says where the figures are."""
        CompareToy(out=self.out).main()
        console.print()
        for path in clean.demo(self.out):
            console.print(f"wrote {path}", soft_wrap=True)
