"""What `make docs` does beside mkdocs: runs the pages, makes those that come from results/, and sets formulas.

BILAX_QUICK=1 takes small numbers in the tutorials; BILAX_PLAIN=1 runs nothing, to see whether the site can be built.
What the code of a page printed is kept in .cache/docs until it or the package changes.
"""

import hashlib
import html
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
os.environ.setdefault("MPLBACKEND", "Agg")

import pages  # noqa: E402

CACHE = ROOT / ".cache" / "docs"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.S)
BARE_NAME = re.compile(
    r'<div class="doc-signature highlight"><pre><span></span><code><span class="n">\w+</span>\s*</code></pre></div>'
)


def on_files(files: Files, config: Any) -> Files:
    """Adds the tutorials and the pages that are made from stored results; leaves out what only makes them."""
    made = {f"tutorials/{path.stem}.md": pages.tutorial_to_markdown(path.read_text()) for path in _tutorials()}
    made |= _kept_pages()
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    made["contributing.md"] = contributing.replace("(docs/", "(").replace("[SECURITY.md](SECURITY.md)", "SECURITY.md")
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for path in sorted((ROOT / "results").rglob("*.png")):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    for file in [file for file in files if file.src_uri.endswith(".py")]:
        files.remove(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with what its code prints and draws."""
    if "BILAX_PLAIN" in os.environ or not any(pages.code_blocks(markdown)):
        return markdown
    code = [found["code"] for found in pages.code_blocks(markdown)]
    key = hashlib.sha256("\n".join([*code, _source(), os.environ.get("BILAX_QUICK", "")]).encode()).hexdigest()
    kept = CACHE / key
    if not kept.exists():
        print(f"running {page.file.src_uri}", file=sys.stderr, flush=True)
        outputs = pages.outputs_of(markdown, page.file.src_uri)
        CACHE.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(outputs))
    return pages.with_outputs(markdown, json.loads(kept.read_text()))


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers set without a script; attributes without a block that repeats their name."""
    return BARE_NAME.sub("", FORMULA.sub(_formula, content))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The search of pages opened as files by a script of our own, for the plugin's would come from the network."""
    return _without_network(output, "../" * page.url.count("/"))


def on_post_template(output: str, template_name: str, **_: Any) -> str:
    """The same for pages such as 404.html."""
    return _without_network(output, "")


def _without_network(output: str, here: str) -> str:
    return output.replace("https://unpkg.com/iframe-worker/shim", f"{here}assets/worker.js")


def _formula(found: re.Match[str]) -> str:
    return convert(html.unescape(found[2]).strip(), display="block" if found[1] == "div" else "inline")


def _kept_pages() -> dict[str, str]:
    """The pages that tell stored results, made anew where the results or the package have changed."""
    from bilax.experiments.stored.pages import pages_from_results

    found = hashlib.sha256(_source().encode())
    for path in sorted([*(ROOT / "results").rglob("*.json"), *(ROOT / "bilax").rglob("*.md")]):
        found.update(path.read_bytes())
    kept = CACHE / found.hexdigest()
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(pages_from_results(ROOT / "results")))
    return json.loads(kept.read_text())


def _tutorials() -> list[Path]:
    return sorted((ROOT / "docs" / "tutorials").glob("*.py"))


def _source() -> str:
    found = hashlib.sha256()
    for path in sorted((ROOT / "bilax").rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
