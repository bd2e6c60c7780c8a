"""Text and files that are not ours reach terminals, tables, figures and reports unharmed and harmless."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilax
from bilax.app import cli
from bilax.app.show import console, show_table
from bilax.app.text import cell, label, printable
from bilax.experiments.few_shot.run import FewShot
from bilax.experiments.few_shot.trained import load_trained
from bilax.files import write_arrays

NAMES = [r"$\frac$", "r[v2]", "x[", "[b]", ":smile:", "a\x1b]0;b\x07", os.fsdecode(b"\xff\xfe"), "<script>"]


def make_run(folder: Path, config=None, result=None, upper=(1.0, 0.5)) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": {"method": "rhg"}} if config is None else config))
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    curves = {f".{name}": np.asarray(upper) for name in ("upper", "lower", "residual", "k_bar")}
    write_arrays(folder / "checkpoints" / "history" / f"{0:09d}-{len(upper):09d}.npz", curves)
    return folder


def report(*words) -> int:
    """The exit code of a report."""
    try:
        cli.main(["report", *map(str, words)])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_names_of_runs_reach_the_report(tmp_path, capsys):
    runs = [make_run(tmp_path / name) for name in NAMES]
    out = tmp_path / "r[v2]x[/y].html"
    out.parent.mkdir(exist_ok=True)
    assert report(*runs, "--out", out) == 0
    assert str(out) in capsys.readouterr().out.replace("\n", "")
    assert b"<script>" not in out.read_bytes()


STRANGE = [
    {"config": {"config": {}}},
    {"config": {"config": {"method": None}, "versions": 3}},
    {"result": {}},
    {"result": {"message": "m"}},
    {"result": {"status": None, "message": 3, "steps": 10**400, "measures": [1]}},
    {"result": {"status": [], "measures": {"a": 1e308, "b": {"c": 1}}}},
    {"upper": (1e308, -1e308)},
    {"upper": (np.inf, np.nan)},
    {"upper": ()},
]


@pytest.mark.parametrize("together", [True, False])
def test_strange_runs_are_reported(tmp_path, together):
    runs = [make_run(tmp_path / str(i), **strange) for i, strange in enumerate(STRANGE)]
    assert report(*(runs if together else runs[4:5]), "--out", tmp_path / "page.html") == 0
    assert (tmp_path / "page.html").read_text().endswith("</html>")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"config": {}}, "holds no settings"),
        ({"config": []}, "must hold a dictionary"),
        ({"config": {"config": []}}, "holds no settings"),
        ({"result": []}, "must hold a dictionary"),
        ({"upper": ("a", "b")}, "holds no curves"),
        ({"upper": np.zeros((2, 2, 2))}, "holds no curves"),
    ],
)
def test_what_is_no_run_is_refused_in_a_sentence(tmp_path, run, message, capsys):
    assert report(make_run(tmp_path / "run", **run), "--out", tmp_path / "page.html") == 2
    assert message in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_told(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    for out in (tmp_path, tmp_path / "run" / "config.json" / "page.html", Path("/proc/page.html")):
        assert report(run, "--out", out) == 2
        assert "bilax report: [Errno" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "result.json"])
@pytest.mark.parametrize("content", ["", "null", "[1]", '{"config": 3}', '{"seconds": "a"}'])
def test_a_run_whose_files_are_damaged_is_not_resumed_with_a_traceback(tmp_path, name, content, capsys):
    folder = make_run(tmp_path / "run", result={})
    (folder / name).write_text(content)
    with pytest.raises(SystemExit):
        cli.main(["run", "toy", "--out", str(folder), "--resume", "--outer-steps", "2", "--inner-steps", "2"])
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("text", NAMES)
def test_text_is_printed_as_it_is(text, capsys):
    console.print(text)
    show_table(text, [text, "count"], [[text, 1]])
    shown = capsys.readouterr().out
    assert shown.count(printable(text)) == 4
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("text", "shown"), [("=1+1", "'=1+1"), ("@SUM", "'@SUM"), ("-a.png", "'-a.png"), ("a=b", "a=b"), (5, "5")]
)
def test_a_spreadsheet_sees_no_formula(text, shown):
    assert cell(text) == shown


def test_a_figure_sees_no_formula():
    assert label("a$b") == r"a\$b"


def test_a_network_of_an_unknown_method_is_a_value_error(tmp_path):
    settings = {"experiment": "few-shot", "dataset": "digits", "folder": None, "shape": [8, 8, 1], "method": "none"}
    with pytest.raises(ValueError, match="unknown method 'none'"):
        load_trained(make_run(tmp_path / "run", {"config": settings}))
    huge = settings | {"method": "ia-gm", "filters": 10**9, "way": 10**9}
    with pytest.raises(ValueError, match=r"learned\.eqx does not exist|makes no network"):
        load_trained(make_run(tmp_path / "huge", {"config": huge}))


def test_more_filters_than_memory_are_refused(capsys):
    with pytest.raises(SystemExit):
        FewShot(filters=10**9).main()
    assert "--filters must be at most 4096" in capsys.readouterr().err


PROBLEM = bilax.Problem(lambda x, y: jnp.sum((y - 1) ** 2), lambda x, y: jnp.sum((y - x) ** 2))


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: jnp.sum(f(x)))])
def test_solve_inside_a_transformation_says_what_to_use(transform):
    with pytest.raises(TypeError, match=r"Use bilax\.approximate there, and bilax\.multistart"):
        transform(lambda x: bilax.solve(PROBLEM, bilax.rhg(2, 0.1), x, x).x)(jnp.ones(3))


def test_more_steps_than_memory_are_taken_one_after_another():
    solution = bilax.solve(PROBLEM, bilax.rhg(2, 0.1), 1.0, 1.0, steps=10**12, tolerance=1e-3)
    assert solution.status is bilax.Status.converged
