"""Runs the code of a page of the documentation and puts what it prints and draws below each block.

A page is Markdown with blocks of Python, or a tutorial: a script in the percent format that notebooks understand
(`# %% [markdown]` before text, `# %%` before code). The blocks of a page share their names, as the cells of a
notebook do: the value of a last line and the figures that are open are shown. A block with a title is another
library's code and is not run.
"""

import ast
import base64
import contextlib
import io
import re
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^(?P<indent> *)```python(?P<options>[^\n]*)\n(?P<code>.*?)^ *```$", re.S | re.M)
RESULT = '<div class="result" markdown="1">\n\n{}\n\n</div>'


def tutorial_to_markdown(script: str) -> str:
    """The Markdown page that a script in the percent format stands for."""
    parts = []
    for cell in re.split(r"^# %%", script, flags=re.M)[1:]:
        kind, _, body = cell.partition("\n")
        if "[markdown]" in kind:
            parts.append("\n".join(line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()))
        elif body.strip():
            parts.append(f"```python\n{body.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def code_blocks(markdown: str) -> Iterator[re.Match[str]]:
    """The blocks of a page that are run."""
    return (found for found in BLOCK.finditer(markdown) if "title=" not in found["options"])


def run_page(markdown: str, name: str = "page") -> str:
    """The page with the output of every block below it."""
    return with_outputs(markdown, outputs_of(markdown, name))


def with_outputs(markdown: str, outputs: list[str]) -> str:
    """The page with what is known to come out of each block."""
    parts, end = [], 0
    for found, output in zip(code_blocks(markdown), outputs, strict=True):
        parts += [markdown[end : found.end()], textwrap.indent(output, found["indent"])]
        end = found.end()
    return "".join([*parts, markdown[end:]])


def outputs_of(markdown: str, name: str = "page") -> list[str]:
    """What each block prints and draws, as Markdown."""
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.rcdefaults()  # a page does not inherit another's style
    plt.close("all")  # nor figures that somebody left open
    names: dict[str, Any] = {"__name__": f"docs.{name}"}
    return [
        run_block(textwrap.dedent(found["code"]), names, f"{name}, block {number}")
        for number, found in enumerate(code_blocks(markdown), 1)
    ]


def run_block(code: str, names: dict[str, Any], where: str) -> str:
    """Executes a block and returns, as Markdown, what it printed, the value of its last line, and its figures."""
    tree, printed = ast.parse(code), io.StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, where, "exec"), names)
            value = eval(compile(ast.Expression(last.value), where, "eval"), names) if last else None
            if value is not None and not type(value).__module__.startswith("matplotlib"):
                print(value)
    except Exception as error:
        raise RuntimeError(f"{where} fails:\n{code}\n{traceback.format_exc()}") from error
    text = printed.getvalue().rstrip()
    shown = [f"```text\n{text}\n```"] if text else []
    shown += [_picture(figure) for figure in _figures(value)]
    return "".join("\n\n" + RESULT.format(part) for part in shown)


def _figures(value: Any) -> list[Any]:
    import matplotlib.pyplot as plt

    found = [plt.figure(number) for number in plt.get_fignums()]
    plt.close("all")
    return found + ([value] if hasattr(value, "savefig") and value not in found else [])


def _picture(figure: Any) -> str:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=160)
    data = base64.b64encode(stream.getvalue()).decode()
    title = next((axes.get_title() for axes in figure.axes if axes.get_title()), "figure")
    return f"![{title.replace('[', '(').replace(']', ')')}](data:image/png;base64,{data}){{ .figure }}"


def pages(folder: Path) -> dict[str, str]:
    """All pages of the documentation by their path, tutorials as Markdown."""
    found = {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.md"))}
    for path in sorted((folder / "tutorials").glob("*.py")):
        found[f"tutorials/{path.stem}.md"] = tutorial_to_markdown(path.read_text())
    return found
