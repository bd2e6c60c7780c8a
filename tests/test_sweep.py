"""`bilax sweep`: what is tried, and that a sweep which was killed goes on."""

import time

import pytest

from bilax.experiments.sweep import Sweep, _suggestion


class Asked:
    """Stands for a trial: answers with what it was asked."""

    def suggest_int(self, name, low, high, log):
        return f"whole {low} {high} {log}"

    def suggest_float(self, name, low, high, log):
        return ("float", low, high, log)

    def suggest_categorical(self, name, choices):
        return str(choices)


def test_ranges_become_words_of_the_command_line():
    assert _suggestion("inner-steps=5..20")(Asked()) == ["--inner-steps", "whole 5 20 False"]
    assert _suggestion("inner-steps=1..100")(Asked()) == ["--inner-steps", "whole 1 100 True"]
    assert _suggestion("rate=1e-4..0.1")(Asked()) == ["--rate", "('float', 0.0001, 0.1, True)"]
    assert _suggestion("mu=0.2..0.8")(Asked()) == ["--mu", "('float', 0.2, 0.8, False)"]
    assert _suggestion("method=rhg,bda")(Asked()) == ["--method", "['rhg', 'bda']"]


@pytest.mark.parametrize("text", ["rate", "rate=", "rate=1..x", "rate=2..1"])
def test_a_wrong_range_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        _suggestion(text)
    assert f"--over {text}:" in capsys.readouterr().err


def test_a_killed_sweep_takes_up_the_settings_it_was_at(tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    seen, broken = [], []

    def run(self, number, words):
        seen.append((number, words))
        if number == 2 and not broken:
            broken.append(words)
            raise KeyboardInterrupt  # the trial is left as it is where a process is killed
        return (float(words[1]) - 0.3) ** 2

    monkeypatch.setattr(Sweep, "_run", run)
    sweep = Sweep("toy", ("rate=0.1..0.9",), tmp_path, trials=5)
    with pytest.raises(KeyboardInterrupt):
        sweep.main()
    sweep.main()
    assert [words for number, words in seen if words == broken[0]] == [broken[0]] * 2
    assert len(seen) == 6
    assert len({tuple(words) for _, words in seen}) == 5
    sweep.main()
    assert len(seen) == 6
    assert "the best of 5" in capsys.readouterr().out


def test_workers_ask_for_trials_one_after_another(tmp_path, monkeypatch):
    optuna = pytest.importorskip("optuna")
    asking, ask, together = [], optuna.Study.ask, []

    def slowly(study):
        asking.append(study)
        time.sleep(0.05)
        trial = ask(study)
        together.append(len(asking))
        asking.pop()
        return trial

    monkeypatch.setattr(optuna.Study, "ask", slowly)
    monkeypatch.setattr(Sweep, "_run", lambda self, number, words: 0.0)
    Sweep("toy", ("rate=0.1..0.9",), tmp_path, trials=4, workers=4).main()
    # SQLite would give two of them the one that a killed sweep has left.
    assert together == [1] * 4
