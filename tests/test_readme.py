"""The README's example runs as it is printed, and is as short as it promises."""

import re
from pathlib import Path

import bilax

ROOT = Path(__file__).parent.parent


def test_the_example_runs_and_solves_the_problem(capsys):
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    example = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    assert len(example.splitlines()) <= 15
    assert "bilax.auto()" in example
    names = {}
    exec(example, names)
    assert abs(float(names["solution"].upper) + 2.00853) < 1e-5
    assert names["solution"].status is bilax.Status.converged
    assert "Newton" in capsys.readouterr().out


def test_every_public_name_exists_and_says_what_it_is():
    for name in bilax.__all__:
        thing = getattr(bilax, name)
        assert name.startswith("_") or name == "RECIPES" or thing.__doc__, name


def test_the_version_is_told_once_and_the_same_everywhere():
    assert f"version: {bilax.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {bilax.__version__}" in (ROOT / "CHANGELOG.md").read_text()
