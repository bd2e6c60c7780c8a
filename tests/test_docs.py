"""Every block of code in the documentation runs, every public name has an example, and no link is broken."""

import os
import re
import sys
from pathlib import Path

import jax
import pytest

import bilax
import bilax.sklearn
from bilax.experiments.stored.pages import pages_from_results

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
os.environ.setdefault("MPLBACKEND", "Agg")

import pages  # noqa: E402  # pyright: ignore[reportMissingImports]

PAGES = pages.pages(DOCS)
RUN = sorted(name for name, text in PAGES.items() if any(pages.code_blocks(text)))
NEEDS = {
    "reference/data.md": ("torch",),
    "tutorials/own_model.md": ("flax", "torch"),
    "tutorials/penalties.md": ("optuna",),
}
"""what a page imports beside what bilax needs: the extra `docs`, and PyTorch"""
MADE = {"claims.md", "peers.md", "contributing.md"}
"""pages that are made when the site is built, from results/ and CONTRIBUTING.md"""


@pytest.fixture
def like_a_user(monkeypatch):
    """Single precision and small numbers."""
    monkeypatch.setenv("BILAX_QUICK", "1")
    with jax.enable_x64(False):
        yield


@pytest.mark.parametrize("name", RUN)
def test_the_blocks_of_a_page_run(name, like_a_user):
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    pages.run_page(PAGES[name], name)


def test_a_page_shows_its_own_figures_alone():
    import matplotlib.pyplot as plt

    plt.figure()
    draw = "import matplotlib.pyplot as plt\nplt.figure()"
    assert pages.run_page(f"```python\n{draw}\n```\n").count("data:image") == 1


def test_a_block_that_fails_is_named():
    with pytest.raises(RuntimeError, match="some page, block 2 fails"):
        pages.run_page("```python\na = 1\n```\n\n```python\nassert a == 2\n```\n", "some page")


def test_what_a_block_prints_and_draws_is_shown():
    page = "```python\nimport matplotlib.pyplot as plt\n_ = plt.plot([1, 2])\nprint('said')\n41 + 1\n```\n"
    shown = pages.run_page(page)
    assert "said\n42" in shown
    assert "data:image/png;base64" in shown


def test_every_public_name_has_an_example():
    reference = "\n".join(text for name, text in PAGES.items() if name.startswith("reference/"))
    examples = dict(re.findall(r"^::: bilax\.(\S+)\n\n```python\n(.*?)^```", reference, re.S | re.M))
    named = {name for name in bilax.__all__ if name not in ("RECIPES", "__version__")}
    named |= {f"sklearn.{name}" for name in bilax.sklearn.__all__}
    assert named - set(examples) == set(), "these lack an example in docs/reference"
    assert set(examples) - named == set(), "these are not public any more"


def test_the_page_of_claims_counts_what_held_and_what_is_open(tmp_path):
    page = pages_from_results(ROOT / "results")["claims.md"]
    counts = {word: page.count(f">{word}</span>") for word in ("yes", "no", "open")}
    said = f"Of {sum(counts.values())} sentences that were checked {counts['yes']} held, {counts['no']} did not, and "
    assert f"{said}{counts['open']} are open" in page
    assert "Nothing is stored yet: `bilax reproduce figure-1`" in pages_from_results(tmp_path)["claims.md"]


def links(text: str) -> set[str]:
    """What a page refers to, code aside."""
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    return {target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"[a-z]+:", target)}


def anchors(text: str) -> set[str]:
    """What can be jumped to: headings, by the names that mkdocs gives them."""
    given = set(re.findall(r"\{ #(\S+) \}", text))
    titles = re.findall(r"^#+ (.+?)(?: \{.*)?$", text, re.M)
    return given | {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower())).strip("-") for title in titles}


@pytest.mark.parametrize("name", sorted(PAGES))
def test_no_link_is_broken(name):
    for target in links(PAGES[name]):
        path, _, anchor = target.partition("#")
        place = os.path.normpath(Path(name).parent / path) if path else name
        if place in MADE:
            continue
        there = place in PAGES or (DOCS / place).exists() or (ROOT / place).exists()
        assert there, f"{name} refers to {target}, which does not exist"
        assert not anchor or anchor in anchors(PAGES[place]), f"{name} refers to {target}: there is no such heading"


def test_no_link_of_the_repository_is_broken():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        for target in links((ROOT / name).read_text()):
            assert (ROOT / target.partition("#")[0]).exists(), f"{name} refers to {target}, which does not exist"


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"^ +- (?:\w+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed == set(PAGES) | MADE
