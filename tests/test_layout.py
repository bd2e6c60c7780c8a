"""A line of code knows its room: which part of the package may import which."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "bilax"
LIBRARY = {"files", "problem", "follower", "gradient", "methods", "run", "trust"}
MAY_IMPORT = {
    "files": set(),
    "problem": {"files"},
    "follower": {"problem"},
    "gradient": {"problem", "follower"},
    "methods": {"problem", "follower", "gradient"},
    "run": {"files", "problem", "methods.algorithm"},
    "trust": LIBRARY,
    "datasets": {"files"},
    "models": {"problem"},
    "cleaning": LIBRARY | {"datasets", "models"},
    "sklearn": {"bilax", "problem"},
    "app": LIBRARY | {"bilax", "datasets", "models"},
    # The library by its public names alone.
    "experiments": {"bilax", "files", "app", "datasets", "models", "sklearn"},
}
BESIDES = {
    "run/solve.py": {"gradient", "methods"},
    "run/solve_auto.py": {"gradient", "methods"},
    "run/start.py": {"gradient", "methods"},
}
"""`solve` takes a recipe and makes an algorithm of it; the loop and all around it know algorithms alone"""
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or path.name == "files.py"]


def imported(path: Path) -> set[str]:
    """The modules of bilax that a file imports, without `bilax.`; the package itself is "bilax"."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names |= {
                f"{node.module}.{alias.name}" if node.module == "bilax" else str(node.module) for alias in node.names
            }
    return {name.removeprefix("bilax.") for name in names if name.split(".")[0] == "bilax"}


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_every_file_imports_only_from_the_rooms_below_it(path):
    place = path.relative_to(PACKAGE)
    room = place.parts[0].removesuffix(".py")
    allowed = MAY_IMPORT[room] | {room} | BESIDES.get(str(place), set())
    wrong = {name for name in imported(path) if name not in allowed and name.split(".")[0] not in allowed}
    assert not wrong, f"bilax/{place} may import from {sorted(allowed)}, not from {sorted(wrong)}"


def test_a_wrong_arrow_would_be_seen(tmp_path):
    (tmp_path / "a.py").write_text("import bilax\nfrom bilax.run.loop import Loop\nfrom bilax.app import cli\n")
    assert imported(tmp_path / "a.py") == {"bilax", "run.loop", "app"}
