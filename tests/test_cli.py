"""The command line: help, suggestions, run folders, reports."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bilax.app import cli, report
from bilax.app import run_folder as runs
from bilax.app import show as common
from bilax.experiments import runner


def bilax_command(*words, check=True, **options):
    command = [sys.executable, "-m", "bilax", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=check, **options)


def run_cli(*words):
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return ended.value.code


def test_help_fits_a_screen_and_is_light(capsys):
    cli.main([])
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 100
    for command in [*cli.COMMANDS, *cli.VERBS]:
        assert command in text
    light = "import sys, bilax.app.cli as c; c.main(['--help']); assert not {'jax', 'tyro', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", light], check=True, capture_output=True)
    cli.main(["run"])
    assert "toy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["rum"], "did you mean run?"),
        (["run", "tooy"], "did you mean toy?"),
        (["reproduce", "figure1"], "did you mean figure-1?"),
        (["run", "toy", "--method", "iapt-gm"], "did you mean iaptt-gm?"),
        (["run", "toy", "--method", "zzz"], "known are: rhg"),
        (["run", "toy", "--inner-steps", "0"], "inner_steps must be a whole number of at least 1"),
        (["run", "toy", "--step-size", "-1"], "step_size must be positive"),
        (["run", "toy", "--method", "t-rhg", "--window", "99"], "window=99 exceeds inner_steps=40"),
        (["run", "toy", "--method", "ls", "--start", "auxiliary"], "has no z-gradient"),
        (["run", "toy", "--clip", "0"], "--clip must be positive"),
        (["run", "toy", "--resume"], "--resume needs --out"),
        (["run", "toy", "--seed"], "--seed needs at least one number"),
        (["reproduce", "table-3", "--methods", "iapt-gm"], "did you mean iaptt-gm?"),
        (["report", "/nowhere"], "is not a run folder"),
        (["reproduce", "figure-1", "--redraw", "--out", "/nowhere"], "run the same command without --redraw"),
    ],
)
def test_wrong_words_get_a_hint(words, hint, capsys):
    assert run_cli(*words) == 2
    assert hint in capsys.readouterr().err


def test_a_diagnosis_is_shown_as_a_table_with_its_reasons(capsys):
    assert not cli.main(["diagnose", "suite", "--problem", "mb_2007_05"])
    out = capsys.readouterr().out
    assert out.startswith("diagnosis")
    assert "│ distinct minima         │ 2 from 16 starts" in out
    assert "the start decides" in out


def test_clipped_gradients_move_x_by_their_length(tmp_path):
    moved = {}
    for name, words in (("whole", ()), ("clipped", ("--clip", 0.05))):
        folder = tmp_path / name
        assert run_cli("run", "toy", "--rate", 1, "--outer-steps", 1, "--at", 5, 1, "--out", folder, *words) == 0
        moved[name] = abs(json.loads((folder / "result.json").read_text())["measures"]["x"] - 5)
    np.testing.assert_allclose(moved["whole"], runs.read_run(tmp_path / "clipped").history["grad_x_norm"][0])
    np.testing.assert_allclose(moved["clipped"], 0.05)


def test_run_writes_a_folder_that_can_be_resumed_and_reported(tmp_path, capsys):
    folder = tmp_path / "run"
    assert run_cli("run", "toy", "--outer-steps", 40, "--out", folder, "--json") == 0
    result = json.loads(capsys.readouterr().out)["0"]
    record = runs.read_run(folder)
    assert record.config["config"]["inner_steps"] == 40
    assert record.result is not None
    assert result["upper"] == record.result["upper"]
    assert {name: values.shape for name, values in record.history.items()} == dict.fromkeys(
        ("upper", "lower", "residual", "k_bar", "grad_x_norm", "grad_z_norm", "follower_steps"), (40,)
    )
    assert run_cli("run", "toy", "--outer-steps", 40, "--out", folder) == 2
    assert "add --resume" in capsys.readouterr().err
    assert run_cli("run", "toy", "--outer-steps", 60, "--out", folder, "--resume") == 0
    assert "toy with iaptt-gm" in capsys.readouterr().out
    assert len(runs.read_run(folder).history["upper"]) == 60
    np.testing.assert_array_equal(runs.read_run(folder).history["upper"][:40], record.history["upper"])
    assert run_cli("run", "toy", "--outer-steps", 60, "--out", folder, "--resume", "--rate", 0.2) == 2
    assert "rate: begun with 0.1, now 0.2" in capsys.readouterr().err
    assert json.loads((folder / "config.json").read_text())["config"]["rate"] == 0.1

    assert run_cli("run", "toy", "--outer-steps", 30, "--seed", 0, 1, "--out", tmp_path / "two", "--method", "rhg") == 0
    capsys.readouterr()
    cli.main(["report", str(folder), str(tmp_path / "two"), "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "3 run" in capsys.readouterr().out
    for text in ("iaptt-gm", "rhg", "seed-1", "step_limit", "data:image/png;base64,", "What differs"):
        assert text in page
    assert "http" not in page.replace("http-equiv", "")


def test_a_half_written_run_is_readable(tmp_path):
    runs.write_config(tmp_path, {"method": "<script>alert(1)</script>", "seed": 0})
    page = report.page([runs.read_run(tmp_path)])
    assert "has not ended" in page
    assert "<script>" not in page
    part = tmp_path / "checkpoints" / "history" / "000000000-000000010.npz"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(ValueError, match=r"000000010\.npz: cannot be read"):
        runs.read_run(tmp_path)


def test_interrupts_give_the_usual_exit_code(tmp_path):
    import signal
    import time

    folder = tmp_path / "run"
    words = ["run", "toy", "--outer-steps", "1000000000", "--out", str(folder), "--save-every", "0.2"]
    process = subprocess.Popen([sys.executable, "-m", "bilax", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None and not list(folder.glob("checkpoints/step_*")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"resume=True goes on" in out
    assert runs.read_run(folder).result["status"] == "interrupted"  # pyright: ignore[reportOptionalSubscript]


def test_ctrl_c_outside_a_run_ends_without_a_traceback(monkeypatch, capsys):
    def stop(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.load("bilax.experiments.demo:Demo"), "main", stop)
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo"])
    assert ended.value.code == 130
    assert "bilax demo: broken off" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "count", "expected"),
    [("bilax run toy --inn", 3, "--inner-steps"), ("bilax clean --lab", 2, "--label"), ("bilax eva", 1, "evaluate")],
)
def test_completion_is_valid_bash(words, count, expected, capsys):
    cli.main(["completion", "bash"])
    script = capsys.readouterr().out
    probe = script + f'\nCOMP_WORDS=({words}) COMP_CWORD={count}; _bilax; echo "${{COMPREPLY[@]}}"'
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    assert subprocess.run([bash, "-c", probe], capture_output=True, text=True, check=True).stdout.strip() == expected


def test_stored_results_can_be_drawn_again(tmp_path, capsys):
    cli.main(["reproduce", "figure-3-left", "--quick", "--out", str(tmp_path)])
    first = capsys.readouterr().out
    assert "the paper says" in first
    figure = tmp_path / "figure-3-left-quick.png"
    figure.unlink()
    cli.main(["reproduce", "figure-3-left", "--quick", "--redraw", "--out", str(tmp_path)])
    assert figure.exists()
    assert capsys.readouterr().out == first.replace(f"wrote {tmp_path}/figure-3-left-quick.json\n", "")
    stored = common.load_json(tmp_path / "figure-3-left-quick.json")
    assert {"bilax", "jax", "date", "config", "results"} <= set(stored)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no headless Chromium is installed here")
def test_the_report_shows_in_a_real_browser(tmp_path, capsys):
    assert run_cli("run", "toy", "--outer-steps", 40, "--out", tmp_path / "run") == 0
    cli.main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")])
    capsys.readouterr()
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update"]  # fmt: skip
    probe = (
        "<script>addEventListener('load', () => {"
        "const ok = [...document.images].every(i => i.complete && i.naturalWidth > 300);"
        "document.title = `figures ${document.images.length} ${ok} `"
        "+ (document.documentElement.scrollWidth <= innerWidth); })</script></head>"
    )
    page = tmp_path / "page.html"
    page.write_text(page.read_text().replace("</head>", probe))
    chromium = str(shutil.which("chromium"))
    command = [chromium, *quiet, "--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path}/profile",
               "--window-size=400,800", "--virtual-time-budget=3000", "--dump-dom", page.as_uri()]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(tmp_path)}
    )
    assert "<title>figures 4 true true</title>" in done.stdout
    assert "CONSOLE" not in done.stderr
    assert Path(page).exists()


class FullAtTheEnd:
    """A disk on which only result.json finds no room."""

    def __init__(self, write):
        self.write = write

    def __call__(self, path, content):
        if path.name == "result.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        self.write(path, content)


def test_a_disk_that_fills_at_the_end_is_told_and_the_run_can_go_on(tmp_path, monkeypatch, capsys):
    command = ["run", "toy", "--out", str(tmp_path / "run"), "--outer-steps", "10", "--inner-steps", "3"]
    monkeypatch.setattr(runs, "write_whole", FullAtTheEnd(runs.write_whole))
    assert run_cli(*command) == 2
    assert "No space left on device\nWhat was saved" in capsys.readouterr().err
    monkeypatch.undo()
    assert run_cli(*command, "--resume") == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 10


def test_a_run_whose_folder_was_taken_by_another_does_not_write_its_end(tmp_path, monkeypatch, capsys):
    solve = runner.Experiment._solve

    def then_take(self, setup, method, seed, folder, *rest):
        solution = solve(self, setup, method, seed, folder, *rest)
        shutil.rmtree(folder)
        runs.write_config(folder, {})
        return solution

    monkeypatch.setattr(runner.Experiment, "_solve", then_take)
    command = ["run", "toy", "--out", str(tmp_path / "run"), "--outer-steps", "10", "--inner-steps", "3"]
    assert run_cli(*command) == 2
    assert "another run has taken the folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
