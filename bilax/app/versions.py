"""Which code made a stored number, and what has changed since."""

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
LIBRARY = ("problem", "follower", "gradient", "methods", "run")
"""what every experiment computes by"""
OWN = {
    "experiments/cleaning": ("experiments/cleaning", "cleaning"),
    "experiments/few_shot": ("experiments/few_shot/run.py", "experiments/few_shot/learners.py", "models"),
}
"""What the experiments of a folder compute by, where that is more than the folder, or less: not its tables."""


@functools.cache
def code_hash(room: str) -> str:
    """A short hash of what a module or the modules of a folder do; comments, docstrings and layout do not count."""
    found, place = hashlib.sha256(), PACKAGE / room
    for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
        found.update(f"{path.relative_to(PACKAGE)} {ast.dump(_without_docstrings(path))}".encode())
    return found.hexdigest()[:12]


def code_of(rooms: Iterable[str]) -> dict[str, str]:
    """What to store beside numbers that depend on these folders and modules."""
    return {room: code_hash(room) for room in rooms}


def rooms_of(module: str) -> tuple[str, ...]:
    """What numbers of an experiment depend on: the library, and the folder of the module that makes them."""
    folder = "/".join(module.split(".")[1:-1]) if module.startswith("bilax.") else ""
    return (*LIBRARY, *OWN.get(folder, (folder,))) if folder else LIBRARY


def changed_rooms(code: dict[str, str]) -> list[str]:
    """Which of them have changed since."""
    return [room for room, made in code.items() if code_hash(room) != made]


def _without_docstrings(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
            node.body = kept  # pyright: ignore[reportAttributeAccessIssue]
    return tree
