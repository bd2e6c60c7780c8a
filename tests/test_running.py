"""Long runs: chunks, data, callbacks, saving, resuming, interruptions and damaged files."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilax
from bilax.run import checkpoint, chunks
from bilax.run.checkpoint import steps_saved
from bilax.run.chunks import CAPACITY
from tests.problems import toy
from tests.processes import forked

PROBLEM = bilax.Problem(
    lambda x, y, t: jnp.sum((y - t) ** 2) + 0.1 * jnp.sum(x**2),
    lambda x, y, t: jnp.sum(jnp.cosh(y - x)) + 0.1 * jnp.sum(y**4),
)
METHOD, OPTIMIZER = bilax.iaptt_gm(4, 0.1), optax.adam(1e-2)
X0, Y0 = jnp.asarray([1.0, -0.5]), jnp.asarray([0.3, 0.2])


def noise(step, key):
    return (jax.random.normal(key, (2,)),)


def run(steps=60, data=noise, **options):
    return bilax.solve(PROBLEM, METHOD, X0, Y0, steps=steps, optimizer=OPTIMIZER, data=data, **options)


def assert_same(a, b):
    jax.tree.map(
        np.testing.assert_array_equal, (a.x, a.y, a.z, a.upper, a.history), (b.x, b.y, b.z, b.upper, b.history)
    )
    assert a.status is b.status


def test_chunks_give_the_same_bits_as_one_call():
    assert_same(run(), run(callbacks=[lambda state, history: None]))


def test_a_chunk_takes_the_memory_of_the_one_before_and_nothing_of_the_users(tmp_path, monkeypatch):
    problem, x0, y0, step_size, _ = toy()
    given, seen, advance = [], [], chunks._advance

    def watched(loop, state, *others):
        given.append(state)
        return advance(loop, state, *others)

    monkeypatch.setattr(chunks, "_advance", watched)
    bilax.solve(
        problem, bilax.iaptt_gm(4, step_size), x0, y0, steps=4, callbacks=[lambda state, _: seen.append(state)],
        saving=bilax.Saving(tmp_path, every_steps=1),
    )  # fmt: skip
    assert len(given) > 4  # what the next step gives is saved too
    assert all(leaf.is_deleted() for state in given for leaf in jax.tree.leaves(state))
    assert (float(x0), float(y0)) == (5.0, 1.0)
    assert len({float(state.x) for state in seen}) == len(seen) > 1
    assert all(np.isfinite(state.good.upper) for state in seen)


def test_an_iterable_of_batches_equals_the_same_data_traced(tmp_path):
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(61)]
    batches = [noise(0, key) for key in keys]
    whole, listed = run(), run(data=batches)
    np.testing.assert_allclose(listed.history.upper, whole.history.upper, rtol=1e-12)
    assert_same(listed, run(data=iter(batches)))
    short = run(data=batches[:25])
    assert short.status is bilax.Status.data_ended
    assert short.steps == 25

    def broken():
        yield from batches[:10]
        raise OSError("the disk is gone")

    saving = bilax.Saving(tmp_path)
    with pytest.raises(RuntimeError, match=r"reading the data failed.*disk is gone"):
        run(data=broken(), saving=saving)
    assert_same(run(data=batches, saving=saving, resume=True), listed)
    assert 0 < steps_saved(tmp_path)[0] <= 10
    shorter = run(data=batches[:3], saving=saving, resume=True, steps=61)
    assert shorter.status is bilax.Status.data_ended
    assert np.isfinite(shorter.upper)
    uneven = [*batches[:30], (jnp.zeros(1),), *batches[31:]]
    with pytest.raises(RuntimeError, match=r"batch 30 has the shapes .*\(1,\).*those before it .*\(2,\).*leave out"):
        run(data=uneven)


def test_the_end_is_evaluated_on_the_batch_of_the_last_step():
    batches = [(jnp.full(2, float(i)),) for i in range(300)]
    problem = bilax.Problem(lambda x, y, t: jnp.sum(t) + jnp.sum(x**2), lambda x, y, t: jnp.sum((y - x) ** 2))
    options = {"steps": 300, "optimizer": optax.sgd(0.1), "data": batches, "tolerance": 1e-8}
    solution = bilax.solve(problem, bilax.rhg(50, 0.25), X0, Y0, **options)
    assert solution.status is bilax.Status.converged
    np.testing.assert_allclose(solution.upper, 2 * (solution.steps - 1), rtol=1e-9)


def test_a_random_optimiser_draws_anew_at_each_step():
    optimizer = optax.chain(optax.sgd(0.1), optax.add_noise(1.0, 0.0, jax.random.key(0)))
    problem = bilax.Problem(lambda x, y: 0 * y, lambda x, y: (y - x) ** 2)
    xs = bilax.solve(problem, bilax.rhg(1, 0.1), 0.0, 0.0, steps=5, optimizer=optimizer, record=lambda x, z, info: x)
    assert len(np.unique(np.diff(xs.history.record))) == 4


def test_progress_prints_plain_lines_without_a_terminal(capsys):
    run(progress=True)
    err = capsys.readouterr().err
    assert "step 60/60" in err
    assert "upper" in err
    run()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("line", ["[" * 5000, "{}", "null", '{"step": null}', '{"step": "x"}', "no json"])
def test_a_line_of_a_log_that_is_none_is_kept(line, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(f'{{"step": 1}}\n{line}\n{{"step": 9}}\n')
    bilax.JsonLines(log).restore({}, bilax.Snapshot((), (), 2, None))  # pyright: ignore[reportArgumentType]
    assert log.read_text() == f'{{"step": 1}}\n{line}\n'


def test_callbacks_may_stop_the_run_and_may_fail(tmp_path):
    seen = []

    def stop_at_once(state, history):
        seen.append((int(state.step), len(history.upper)))
        return True

    stopped = run(callbacks=[stop_at_once])
    assert stopped.status is bilax.Status.stopped_by_callback
    assert seen == [(stopped.steps, stopped.steps)]

    assert run(callbacks=[lambda state, history: history.upper[-1] < 1e9]).status is bilax.Status.stopped_by_callback
    assert run(callbacks=[lambda state, history: 1]).steps == 60

    def fails(state, history):
        raise KeyError("oops")

    saving = bilax.Saving(tmp_path / "fails")
    with pytest.raises(KeyError, match="oops"):
        run(callbacks=[fails], saving=saving)
    assert steps_saved(saving.path)

    early = bilax.EarlyStopping(lambda state: 1.0, patience=5)
    assert run(callbacks=[early]).status is bilax.Status.stopped_by_callback
    assert early.best == 1.0
    run(callbacks=[bilax.JsonLines(tmp_path / "log.jsonl")])
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 60
    assert {"upper", "lower", "residual", "k_bar", "grad_x_norm", "grad_z_norm"} < set(lines[-1])


def test_tensorboard_gets_every_step(tmp_path):
    pytest.importorskip("tensorboardX")
    run(callbacks=[bilax.TensorBoard(tmp_path)])
    assert next(tmp_path.glob("events*")).stat().st_size > 60 * 20


def test_time_limit():
    assert run(steps=10**6, time_limit=0.0).status is bilax.Status.time_limit


@pytest.mark.parametrize("data", [noise, [noise(0, jax.random.key(i)) for i in range(80)]], ids=["traced", "iterable"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, data):
    whole = run(data=data, saving=bilax.Saving(tmp_path / "a", every_steps=20))
    part = run(steps=35, data=data, saving=bilax.Saving(tmp_path / "b", every_steps=20))
    assert part.steps == 35
    assert_same(run(data=data, saving=bilax.Saving(tmp_path / "b", every_steps=20), resume=True), whole)
    # Resuming a finished run computes nothing more and gives the same.
    assert_same(run(data=data, saving=bilax.Saving(tmp_path / "b", every_steps=20), resume=True), whole)
    assert_same(run(data=data, saving=bilax.Saving(tmp_path / "c"), resume=True), whole)


def test_a_run_that_goes_on_needs_no_program_of_its_own(tmp_path, caplog):
    saving = bilax.Saving(tmp_path, every_steps=20)
    run(steps=40, saving=saving, callbacks=[lambda state, history: state.step > 0])
    with jax.log_compiles():
        assert run(steps=60, saving=saving, resume=True).steps == 60
    assert "Compiling jit(advance)" not in caplog.text
    assert "Compiling jit(finish)" not in caplog.text


def stopping():
    # The lowest value comes at step 20 of those measured every 10.
    return bilax.EarlyStopping(lambda state: abs(state.step - 20), patience=30, every=10)


def test_a_resumed_run_equals_an_uninterrupted_one_also_with_callbacks(tmp_path):
    early = stopping()
    whole = run(steps=200, callbacks=[early])
    assert whole.status is bilax.Status.stopped_by_callback
    assert whole.steps == 50
    assert (early.best, early.best_step, early.steps) == (0, 20, [10, 20, 30, 40, 50])
    assert early.best_point is not None

    class StopAt:
        every = 25

        def __call__(self, state, history):
            raise InterruptedError

    saving, log = bilax.Saving(tmp_path / "saved"), tmp_path / "log.jsonl"
    with pytest.raises(InterruptedError):
        run(steps=200, callbacks=[stopping(), bilax.JsonLines(log, every=5), StopAt()], saving=saving)
    log.write_text(log.read_text() + '{"step": 30}\n')  # as a run that is killed after its last checkpoint leaves it
    again = stopping()
    assert_same(run(steps=200, callbacks=[again, bilax.JsonLines(log, every=5)], saving=saving, resume=True), whole)
    assert (again.steps, again.values) == (early.steps, early.values)
    np.testing.assert_array_equal(again.best_point[0], early.best_point[0])  # pyright: ignore
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [*range(5, 55, 5)]


def test_early_stopping_asks_for_a_gain_in_any_of_its_numbers():
    def ends(*rows, **options):
        early = bilax.EarlyStopping(lambda state: rows[state.step - 1], patience=2, every=1, **options)
        for step in range(1, len(rows) + 1):
            if early(bilax.Snapshot(0.0, 0.0, step, None), bilax.History(*[()] * 6)):  # pyright: ignore
                return step
        return None

    assert ends(5.0, 4.0, 4.0, 4.0) == 4
    assert ends(5.0, 4.0, 3.0, 2.0) is None
    assert ends(5.0, 4.9, 4.8, 4.7) is None
    assert ends(5.0, 4.9, 4.8, 4.7, gain=0.3) == 3
    assert ends({"a": 1, "b": 5}, {"a": 1, "b": 4}, {"a": 1, "b": 3}, {"a": 1, "b": 2}) is None
    assert ends({"a": 1, "b": 5}, {"a": 1, "b": 5}, {"a": 1, "b": 5}) == 3
    assert ends(float("nan"), 1.0, 1.0, 1.0) == 4
    with pytest.raises(ValueError, match="needs patience, or every"):
        bilax.EarlyStopping(lambda state: 0.0)
    with pytest.raises(ValueError, match="every must be None or a whole number"):
        run(callbacks=[type("Odd", (), {"every": 0.5, "__call__": print})()])


def test_a_run_of_the_version_before_is_refused_with_a_sentence(tmp_path):
    (tmp_path / "step-000000040").mkdir()
    (tmp_path / "step-000000040" / "manifest.json").write_text("{}")
    for resume in (False, True):
        with pytest.raises(bilax.ConfigurationError, match=r"holds a run that bilax 0\.1 saved.*choose another folder"):
            run(saving=bilax.Saving(tmp_path), resume=resume)


def test_data_are_read_no_further_than_needed_and_threads_end():
    drawn, threads = [], threading.active_count()

    def batches():
        for i in range(1000):
            drawn.append(i)
            yield (jnp.zeros(2),)

    assert run(steps=10, data=batches()).steps == 10
    assert len(drawn) == 10
    run(steps=1000, data=batches(), callbacks=[lambda state, history: True])
    assert threading.active_count() == threads


def test_a_source_that_blocks_does_not_keep_a_run_from_its_end():
    def batches():
        yield from [(jnp.zeros(2),)] * 5
        time.sleep(30)
        yield (jnp.zeros(2),)

    began = time.monotonic()
    stopped = run(data=batches(), time_limit=1.5)
    assert stopped.status is bilax.Status.time_limit
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_source_that_blocks_does_not_keep_signals_from_a_run(tmp_path, number):
    def batches():
        yield from [(jnp.zeros(2),)] * 5
        os.kill(os.getpid(), number)
        time.sleep(30)

    began = time.monotonic()
    with pytest.raises(bilax.Interrupted) as ended:
        run(data=batches(), saving=bilax.Saving(tmp_path))
    assert ended.value.solution.steps == steps_saved(tmp_path)[-1] <= 5
    assert time.monotonic() - began < 20


def test_whole_numbers_that_grow_are_refused():
    """In place of wrapping around: np.stack puts int64 into int32 without a word."""
    kinds = [np.int32, np.int32, np.int64]
    with pytest.raises(RuntimeError, match="batch 2 holds int64, those before it int32"):
        run(data=[(np.full(2, 2**40 if kind is np.int64 else 1, kind),) for kind in kinds], steps=3)
    run(data=[(np.zeros(2, kind),) for kind in (np.float32, np.float64)], steps=2)  # which are only rounded


@pytest.mark.parametrize("options", [{}, {"time_limit": 1e6}, {"tolerance": 1e9}], ids=["whole", "chunks", "early"])
def test_debug_nans_finds_no_fault_with_the_library(options):
    with jax.debug_nans(True):
        assert np.isfinite(run(**options).upper)
        starts = bilax.multistart(toy().problem, bilax.rhg(2, 5e-4), jnp.array([2.0, 3.0]), jnp.ones(2), **options)
    assert np.isfinite(starts.best.upper)


def test_the_history_is_written_in_parts(tmp_path):
    run(saving=bilax.Saving(tmp_path, every_steps=20))
    parts = sorted(path.name for path in (tmp_path / "history").iterdir())
    assert parts == [f"{i:09d}-{i + 20:09d}.npz" for i in (0, 20, 40)]
    assert {len(np.load(tmp_path / "history" / name)[".upper"]) for name in parts} == {20}


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    saving, met = bilax.Saving(tmp_path, every_steps=20), []

    def another(state, history):
        with pytest.raises(OSError, match=r"another run is writing to .*choose another folder"):
            run(saving=saving, resume=True)
        met.append(int(state.step))

    whole = run(saving=saving, callbacks=[another])
    assert met
    assert_same(run(saving=saving, resume=True), whole)


def test_only_the_last_and_the_best_checkpoints_are_kept(tmp_path):
    solution = run(saving=bilax.Saving(tmp_path, every_steps=5, keep=2))
    best = 5 * (1 + int(np.argmin(solution.history.upper[4::5])))
    assert best < 55
    assert steps_saved(tmp_path) == [best, 55, 60]


def test_the_best_checkpoint_is_kept_alone_beside_the_last_when_a_run_goes_on(tmp_path):
    # F grows with the step, so that the first checkpoint is the best one for good.
    for steps in (15, 25, 35, 60):
        options = {"data": lambda step, key: (jnp.full(2, 1.0 + step),), "steps": steps}
        run(**options, saving=bilax.Saving(tmp_path, every_steps=5, keep=2), resume=True)
        assert steps_saved(tmp_path) == [5, steps - 5, steps]


def test_another_configuration_refuses_to_resume_and_says_what_differs(tmp_path):
    saving = bilax.Saving(tmp_path, every_steps=20)
    run(steps=20, saving=saving)
    with pytest.raises(FileExistsError, match=r"already holds a run.*resume=True"):
        run(saving=saving)

    def resume(method=METHOD, x0=X0, optimizer=OPTIMIZER, **options):
        return bilax.solve(
            PROBLEM, method, x0, Y0, steps=60, optimizer=optimizer, data=noise, saving=saving, resume=True, **options
        )

    with pytest.raises(bilax.ConfigurationError, match=r"method: saved .*inner_steps=4.*now .*inner_steps=5"):
        resume(method=bilax.iaptt_gm(5, 0.1))
    with pytest.raises(bilax.ConfigurationError, match="x0: saved"):
        resume(x0=X0 + 1)
    with pytest.raises(bilax.ConfigurationError, match=r"(?s)move of x: saved .* now .*optimisers"):
        resume(optimizer=optax.adam(2e-2))
    with pytest.raises(bilax.ConfigurationError, match="key: saved"):
        resume(key=jax.random.key(3))
    assert resume().steps == 60
    with pytest.raises(ValueError, match="resume=True needs saving"):
        run(resume=True)


@pytest.mark.parametrize("where", ["objective", "set"])
def test_another_array_refuses_to_resume(tmp_path, where):
    def go_on(value, **options):
        array = jnp.full(300, value)  # too large to be a literal of the traced program
        held = array if where == "objective" else jnp.ones(300)
        problem = bilax.Problem(
            lambda x, y: jnp.sum((y - held) ** 2),
            lambda x, y: jnp.sum((held * y - x) ** 2),
            y_set=bilax.Box(-array, array) if where == "set" else bilax.Reals(),
        )
        return bilax.solve(
            problem, bilax.rhg(2, 0.1), jnp.zeros(300), jnp.zeros(300), saving=bilax.Saving(tmp_path), **options
        )

    go_on(0.1, steps=2)
    assert go_on(0.1, steps=3, resume=True).steps == 3
    match = "next step's upper: saved" if where == "objective" else "arrays in the problem"
    with pytest.raises(bilax.ConfigurationError, match=match):
        go_on(0.2, steps=4, resume=True)


def damage(path: Path, how: str) -> None:
    victim = max((p for p in (path / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(victim.read_bytes())
    if how == "truncated":
        victim.write_bytes(content[: len(content) // 2])
    elif how == "bit flipped":
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif how == "file gone":
        victim.unlink()
    else:
        (path / "about" / "metadata").write_text("{")


@pytest.mark.parametrize("how", ["truncated", "bit flipped", "file gone", "description cut", "history cut"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, how):
    whole = run()
    saving = bilax.Saving(tmp_path, every_steps=20)
    run(steps=40, saving=saving)
    if how == "history cut":
        (tmp_path / "history" / "000000020-000000040.npz").write_bytes(b"PK")
    else:
        damage(tmp_path / "step_000000040", how)
    with pytest.warns(UserWarning, match="step_000000040 is damaged.*older one is used"):
        assert_same(run(saving=saving, resume=True), whole)


def test_a_damaged_older_checkpoint_does_not_end_a_healthy_run(tmp_path):
    saving = bilax.Saving(tmp_path, every_steps=20)
    run(steps=40, saving=saving)
    damage(tmp_path / "step_000000020", "description cut")
    assert_same(run(saving=saving, resume=True), run())


def ctrl_c_at(step):
    for i in range(10**6):
        if i == step:
            signal.raise_signal(signal.SIGINT)
        yield (jnp.zeros(2),)


def test_ctrl_c_ends_a_run_and_one_that_is_saved_is_saved_first(tmp_path):
    seen = []
    options = {"steps": 10**5, "callbacks": [lambda state, history: seen.append(state.step)]}
    with pytest.raises(bilax.Interrupted) as ended:
        run(data=ctrl_c_at(50), saving=bilax.Saving(tmp_path), **options)
    solution = ended.value.solution
    assert solution.status is bilax.Status.interrupted
    assert seen[-1] == solution.steps == steps_saved(tmp_path)[-1]
    # Without saving too, so that a user's loop around `solve` ends as well.
    with pytest.raises(bilax.Interrupted) as ended:
        run(data=ctrl_c_at(50), time_limit=60.0, throw=True, steps=10**5)
    assert ended.value.solution.status is bilax.Status.interrupted
    assert np.isfinite(ended.value.solution.upper)


def test_a_folder_that_cannot_be_written_is_refused_at_the_call(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write to the folder.*Choose a folder"):
        run(saving=bilax.Saving(tmp_path / "file" / "run"))
    with pytest.raises(ValueError, match="every_steps"):
        bilax.Saving(tmp_path, every_steps=0)
    if os.path.isdir("/proc/self"):
        with pytest.raises(OSError, match="cannot write to the folder"):
            run(saving=bilax.Saving("/proc/self/bilax"))


def test_a_full_disk_loses_nothing_that_was_saved(tmp_path):
    """A limit on the size of files, set after the first save, stands for the full disk."""
    saving = bilax.Saving(tmp_path, every_steps=20)
    run(steps=20, saving=saving)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.warns(UserWarning, match="could not save step .*last step that is safe is 20"):
            full = run(saving=saving, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert steps_saved(tmp_path) == [20]
    assert not list(tmp_path.glob("*orbax*"))
    assert_same(run(saving=saving, resume=True), full)


def test_orbax_is_not_asked_to_write_to_a_full_disk(tmp_path, monkeypatch, capfd):
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.warns(UserWarning, match="No space left on device.*last step that is safe is none"):
        assert run(saving=bilax.Saving(tmp_path)).steps == 60
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("another", [False, True])
def test_a_folder_that_was_removed_is_not_made_again(tmp_path, another):
    folder = tmp_path / "run"

    def remove(state, history):
        if state.step == 20:
            shutil.rmtree(folder)
            if another:
                folder.mkdir()

    with pytest.warns(UserWarning, match="could not save step 40"):
        whole = run(saving=bilax.Saving(folder, every_steps=20, every_seconds=None), callbacks=[remove])
    assert_same(whole, run(callbacks=[lambda state, history: None]))
    assert folder.exists() == another
    assert not another or not list(folder.iterdir())


def test_empty_and_strange_step_folders_are_set_aside(tmp_path):
    saving = bilax.Saving(tmp_path, every_steps=20)
    run(steps=20, saving=saving)
    for name in ("step_000000040", "step_²", "step_x"):
        (tmp_path / name).mkdir()
    shutil.copytree(tmp_path / "step_000000020", tmp_path / "step_000000050")
    (tmp_path / "step_000000050" / "about" / "metadata").unlink()
    os.mkfifo(tmp_path / "step_000000050" / "about" / "metadata")
    with pytest.warns(UserWarning, match="is damaged") as told:
        assert_same(run(saving=saving, resume=True), run())
    assert len(told) == 4
    assert steps_saved(tmp_path) == [20, 40, 60]


def test_a_checkpoint_that_announces_too_much_is_set_aside(tmp_path, monkeypatch):
    saving = bilax.Saving(tmp_path, every_steps=20)
    run(steps=40, saving=saving)
    monkeypatch.setattr(checkpoint, "_announced", lambda path: 1 << 40 if "40" in path.parent.name else 0)
    with pytest.warns(UserWarning, match="step_000000040 is damaged .*unpacks to 1,099,511,627,776 bytes"):
        assert_same(run(saving=saving, resume=True), run())


KILLS, RACES = int(os.environ.get("BILAX_KILLS", "3")), int(os.environ.get("BILAX_RACES", "1"))


def saved_run(steps: int, folder: Path) -> str:
    """What a process does that may be killed: begins or goes on, and tells its end."""
    try:
        solution = run(steps=steps, saving=bilax.Saving(folder, every_steps=5, every_seconds=None), resume=True)
    except bilax.Interrupted as ended:
        solution = ended.solution
    return end_of(solution)


def end_of(solution) -> str:
    x, upper = (np.asarray(array).tobytes().hex() for array in (solution.x, solution.history.upper))
    return f"{solution.status.name} {x} {upper}"


@pytest.mark.parametrize(("racing", "kills"), [(1, KILLS), (2, RACES)], ids=["one", "two"])
def test_killed_runs_end_bit_identical(tmp_path, racing, kills):
    """kill −9 at random moments, during saves too: one run, or two that race for a folder, again and again."""
    steps, rng = max(400, 100 * kills), random.Random(0)
    whole = run(steps=steps, callbacks=[lambda state, history: None])  # in chunks, as the children run
    folder, outs = tmp_path / "run", [tmp_path / f"end-{i}" for i in range(racing)]
    for _ in range(kills):
        before = steps_saved(folder)
        processes = [forked(saved_run, out, steps, folder) for out in outs]
        deadline = time.monotonic() + 120
        while steps_saved(folder) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.15))
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        assert before != steps_saved(folder), "nobody won"
        assert steps_saved(folder)[-1] < steps, "the run ended before it could be killed"
    for process in [forked(saved_run, out, steps, folder) for out in outs]:
        process.join(timeout=300)
    # One that comes while the other writes is refused; one that comes after finds the run at its end.
    ends = [out.read_text() for out in outs if out.exists()]
    assert ends
    assert set(ends) == {end_of(whole)}


def test_sigterm_saves_and_ends(tmp_path):
    """A program of its own, as a scheduler would end it."""
    program = "import sys, pathlib, tests.processes as p, tests.test_running as t;"
    program += "print(t.saved_run(10**9, pathlib.Path(sys.argv[1])))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True, env=environment
    )
    while not steps_saved(tmp_path) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert out.startswith("terminated")
    reached = len(bytes.fromhex(out.split()[2])) // 8
    assert steps_saved(tmp_path)[-1] == reached


def test_memory_stays_flat_over_many_steps():
    """Beyond the history, 200,000 outer steps need no more than 65,536 do, with the same program."""
    solve = {"method": bilax.iaptt_gm(4, 5e-4), "x0": 5.0, "y0": 1.0, "optimizer": optax.sgd(0.1), "time_limit": 1e9}
    problem = toy().problem
    bilax.solve(problem, steps=CAPACITY, **solve)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    solution = bilax.solve(problem, steps=200_000, **solve)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert solution.steps == 200_000
    history = sum(leaf.nbytes for leaf in jax.tree.leaves(solution.history))
    assert grown < 2 * history + 8e6


def test_what_a_resumed_run_notices_and_what_it_does_not(tmp_path):
    def begin(folder, target, steps=40, name="penalty", **options):
        def helper(y):
            return 0.1 * jnp.sum(y**2)

        helper.__name__ = name
        scale = jax.jit(helper)
        shape = jax.ShapeDtypeStruct((), X0.dtype)

        def upper(x, y, *data):
            number = jax.lax.stop_gradient(jax.pure_callback(lambda: np.asarray(target, X0.dtype), shape))
            return jnp.sum((y - number) ** 2) + scale(x)

        saving = bilax.Saving(tmp_path / folder, every_steps=20)
        problem = bilax.Problem(upper, lambda x, y, *data: jnp.sum((y - x) ** 2))
        return bilax.solve(problem, bilax.rhg(2, 0.1), X0, Y0, steps=steps, saving=saving, **options)

    whole = begin("callback", 1.0)
    assert_same(begin("callback", 1.0, name="another", resume=True), whole)
    assert begin("callback", 1.0, steps=30, resume=True).steps == 40
    with pytest.raises(bilax.ConfigurationError, match="the next step's upper"):
        begin("callback", 2.0, steps=60, resume=True)
    batches = [(jnp.full(2, i / 60),) for i in range(60)]
    saving = bilax.Saving(tmp_path / "data", every_steps=20)
    run(steps=40, data=batches, saving=saving)
    with pytest.raises(bilax.ConfigurationError, match="the next step's"):
        run(data=[(-batch,) for (batch,) in batches], saving=saving, resume=True)
