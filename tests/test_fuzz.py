"""A few hundred damaged and hostile files, or BILAX_FUZZ many; tests/fuzz.py says what is asked of readers."""

import os
import subprocess
import sys
from pathlib import Path

from tests import fuzz


def test_damaged_and_hostile_files_are_read_or_refused():
    count, seed = os.environ.get("BILAX_FUZZ", "200"), os.environ.get("BILAX_FUZZ_SEED", "0")
    command = [sys.executable, "-m", "tests.fuzz", count, seed]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\nlast: {done.stderr[-500:]}"
    assert f"{count} inputs, 0 went wrong" in done.stdout


def test_a_reader_that_fails_runs_something_or_takes_too_long_would_be_seen(monkeypatch, capsys):
    def careless(folder):
        os.system("true")

    def surprised(folder):
        raise KeyError("status")

    for read, told in ((careless, "os.system"), (surprised, "KeyError: 'status'")):
        kind = fuzz.make_stored, lambda folder, read=read: None if folder.name == "warm" else read(folder), 1
        monkeypatch.setitem(fuzz.KINDS, "careless", kind)
        assert fuzz.main(2, 0, ("careless",)) == 2
        assert told in capsys.readouterr().out
