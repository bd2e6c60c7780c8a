"""`bilax bench peers`: what its sides are told and answer, and what is made of stored lines. No peer is needed."""

import importlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bilax.app import versions
from bilax.app.show import save_json
from bilax.experiments.peers import orders, side_by_side, steps_by_bilax
from bilax.experiments.peers.cases import CASES
from bilax.experiments.stored import stale
from bilax.files import DataError


def line(case="toy-40", peer="higher", times=2.0):
    each = [1.0, 2.0, 4.0]
    ours: dict[str, Any] = {
        "seconds": 2.0,
        "first": 10.0,
        "cached": 5.0,
        "megabytes": 100.0,
        "error": 0.0,
        "differences": 1e-9,
    }
    theirs: dict[str, Any] = {key: times * number for key, number in ours.items() if key != "cached"} | {
        "versions": {peer: "1.0"}
    }
    for side, factor in ((ours, 1), (theirs, times)):
        side["all"] = {key: [factor * one for one in each] for key in orders.Seconds._fields}
    return {"case": case, "peer": peer, "code": {}, "cores": 1, "bilax": ours, "theirs": theirs}


def test_a_side_gives_the_gradient_of_the_numerical_example(tmp_path):
    case = CASES["toy-40"]._replace(inner_steps=3)
    orders.store(tmp_path, case.make(0), "float32")
    work = steps_by_bilax.Ours(case.order(), orders.load(str(tmp_path)))

    def phi(x, z):
        y = [z]
        for _ in range(3):
            y.append(np.clip(y[-1] + case.step_size * x * np.cos(x * y[-1]), -2, 2))
        return max(x + x * one for one in y[1:])

    h = 1e-6
    exact = [(phi(5 + h, 1) - phi(5 - h, 1)) / (2 * h), (phi(5, 1 + h) - phi(5, 1 - h)) / (2 * h)]
    np.testing.assert_allclose(np.concatenate(work.gradient()), exact, rtol=1e-5)
    assert work.run(2).clock > 0
    assert work.end()[0].shape == (1,)


def test_ratios_are_of_pairs_and_the_whole_run_counts_the_start():
    steps = CASES["toy-40"].outer_steps
    assert side_by_side.ratio(line(), "clock") == 2
    # Ours evaluates its end, for which the others' loops have no turn.
    assert side_by_side.value(line(), "bilax", "whole") == (10 - 2) + (steps - 1) * 2
    assert side_by_side.value(line(), "theirs", "whole") == 20 + (steps - 1) * 4


def test_lines_stay_in_the_order_of_the_cases_and_are_replaced():
    lines = side_by_side.with_line([line("toy-400")], line())
    lines = side_by_side.with_line(lines, line(times=3.0))
    assert [(one["case"], one["theirs"]["first"]) for one in lines] == [("toy-40", 30.0), ("toy-400", 20.0)]


def test_claims_name_where_bilax_is_behind(tmp_path, capsys):
    target = side_by_side.Peers(out=tmp_path, redraw=True)
    cannot = {"case": "toy-40", "peer": "Betty", "cannot": "no iterates", "code": {"run": "other"}}
    results = {"lines": [line(), line(peer="BOAT", times=0.5), cannot]}
    claims = target.claims(results)
    assert [claim.held for claim in claims] == [True, False, False, False, False]
    assert all("not toy-40 BOAT 0." in claim.here for claim in claims[1:])
    assert "not toy-40 BOAT 0.50" in claims[1].here
    results["lines"][0]["bilax"]["differences"] = 0.1
    assert not target.claims(results)[0].held
    target.show(results)
    shown = capsys.readouterr().out
    assert "Betty cannot: no iterates" in shown
    assert "older than the code that they measure: run changed since" in shown


def test_peers_that_were_measured_with_the_present_code_are_not_measured_again(tmp_path):
    case, made = CASES["toy-40"], line() | {"code": versions.code_of(["run"])}
    old = line(peer="BOAT") | {"code": {"run": "other"}}
    left = side_by_side.Peers(out=tmp_path)._left([made, old], "toy-40", case)
    assert left == [peer for peer in case.peers if peer != "higher"]


def test_a_case_whose_data_are_not_here_is_left_out(tmp_path, monkeypatch, capsys):
    def missing(seed):
        raise DataError("no such pictures")

    monkeypatch.setattr(side_by_side, "torch_environment", lambda cache: (Path(sys.executable), {}))
    monkeypatch.setattr(side_by_side, "CASES", {"cleaning-ptt": CASES["cleaning-ptt"]._replace(make=missing)})
    assert side_by_side.Peers(out=tmp_path).compute()["lines"] == []
    assert "cleaning-ptt is left out, for its data are not here: no such pictures" in capsys.readouterr().out
    with pytest.raises(DataError):
        side_by_side.Peers(out=tmp_path, only="cleaning-ptt").compute()


def test_the_code_of_a_room_changes_with_what_it_does_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "PACKAGE", tmp_path)
    (tmp_path / "room").mkdir()

    def hashed(text):
        (tmp_path / "room" / "a.py").write_text(text)
        versions.code_hash.cache_clear()
        return versions.code_hash("room")

    plain = hashed("def f(x):\n    return x + 1\n")
    assert hashed('"""What it is."""\n\n\ndef f(x):\n    """One more."""\n    return x  +  1  # so\n') == plain
    assert hashed("def f(x):\n    return x + 2\n") != plain
    assert versions.changed_rooms({"room": plain}) == ["room"]
    versions.code_hash.cache_clear()


def test_lanes_have_cores_of_their_own_and_begin_nothing_once_broken_off(monkeypatch):
    monkeypatch.setattr(side_by_side, "BROKEN_OFF", threading.Event())
    cores = os.sched_getaffinity(0)
    together = threading.Barrier(len(cores))

    def bound(_):
        together.wait(60)
        return os.sched_getaffinity(0)

    with side_by_side.lanes(1) as pool:
        found = list(pool.map(bound, cores))
    assert sorted(map(tuple, found)) == sorted((core,) for core in cores)
    assert os.sched_getaffinity(0) == cores
    with pytest.raises(KeyboardInterrupt), side_by_side.lanes(1):
        raise KeyboardInterrupt
    with pytest.raises(side_by_side.SideError, match="broken off"):
        side_by_side.Side([sys.executable, "-c", ""], "float32")


def test_what_numbers_depend_on_is_there_and_tables_that_show_them_are_not_among_it():
    named = [room for rooms in versions.OWN.values() for room in rooms]
    assert all((versions.PACKAGE / room).exists() for room in [*named, *side_by_side.MEASURED])
    rooms = versions.rooms_of("bilax.experiments.few_shot.table_2")
    assert "experiments/few_shot/run.py" in rooms
    assert "experiments/few_shot" not in rooms


def test_how_peers_were_measured_is_free_when_it_is_asked_what_is_left(tmp_path):
    save_json(tmp_path / "benchmarks" / "peers.json", side_by_side.Peers(only="toy-40"), {"lines": []})
    assert side_by_side.Peers(out=tmp_path).left() == 0
    assert side_by_side.Peers(out=tmp_path, seed=1).left() == 1


def test_stored_numbers_say_which_code_made_them_and_what_has_changed(tmp_path, capsys):
    save_json(tmp_path / "made.json", side_by_side.Peers(), {"lines": []})
    record = json.loads((tmp_path / "made.json").read_text())
    assert record["code"] == versions.code_of([*versions.LIBRARY, "experiments/peers"])
    assert stale.changes(record) == "nothing"
    record["results"]["lines"] = [{"code": {"run": "other"}}, {"code": versions.code_of(["run"])}]
    assert stale.changes(record) == "run (1 of 2 parts)"
    (tmp_path / "old.json").write_text('{"bilax": "0.1.0", "config": {}, "results": {}}')
    stale.Stale(tmp_path).main()
    shown = capsys.readouterr().out
    assert "not noted" in shown
    assert "nothing" in shown


def test_a_side_tells_its_errors_and_goes_on(monkeypatch, capsys):
    class Fails(steps_by_bilax.Ours):
        def __init__(self): ...

        def run(self, steps):
            raise ValueError("too many")

    told = [{"do": "load", "folder": "."}, {"do": "run", "steps": 1}, {"do": "versions"}]
    monkeypatch.setattr("sys.stdin", [json.dumps(order) for order in told])
    monkeypatch.setattr("sys.stdout", sys.stdout)  # put back at the end
    orders.serve(lambda order, given: Fails(), lambda: {"one": "1"})
    answers = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert answers == [{}, {"error": "ValueError: too many"}, {"one": "1"}]


def test_pips_message_is_cut_to_what_matters():
    log = "building\nmeta_dataset.c:210:12: fatal error: longintrepr.h: No such file\nERROR: failed"
    assert side_by_side.reason(log) == "meta_dataset.c:210:12: fatal error: longintrepr.h: No such file"
    assert side_by_side.reason("a\nERROR: no such version\n") == "ERROR: no such version"


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_what_its_sides_need(name):
    case = CASES[name]
    assert case.kind in steps_by_bilax.KINDS
    assert {"PyTorch", *side_by_side.PEERS} >= set(case.peers)


def test_pytorch_with_checkpoints_has_the_same_gradient_and_higher_cannot(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    folder = Path(side_by_side.__file__).parent
    monkeypatch.syspath_prepend(str(folder))
    steps_by_torch = importlib.import_module("steps_by_torch")
    case = CASES["large-100-checkpoints"]._replace(inner_steps=7)
    draw = np.random.default_rng(0)
    shapes = [(3, 5), (3,), (10, 3), (10,)]
    labels = draw.integers(0, 10, (2, 6)).astype(np.int32)
    inputs = draw.standard_normal((2, 6, 5))
    data = [inputs[0], labels[0], inputs[1], labels[1]]
    given = orders.Given([np.zeros(6)], [draw.standard_normal(shape) for shape in shapes], data)
    found = []
    for checkpoint in (True, False):
        order = case._replace(checkpoint=checkpoint).order()
        found.append(np.concatenate(steps_by_torch.PyTorch(order, given).gradient()))
    np.testing.assert_allclose(*found, rtol=1e-12)
    ours = np.concatenate(steps_by_bilax.Ours(case.order(), given).gradient())
    np.testing.assert_allclose(found[0], ours, rtol=1e-8, atol=1e-12)
    assert "keeps all" in str(side_by_side.cannot("higher", case))
    assert side_by_side.cannot("higher", case._replace(checkpoint=False)) is None
