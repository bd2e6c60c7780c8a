"""Runs on several devices give what one device gives."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bilax
from bilax.problem.minibatches import batches

PROGRAM = Path(__file__).parent / "on_devices.py"


@pytest.fixture(scope="module")
def four_devices():
    """What `on_devices.py` finds where JAX sees four devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_ENABLE_X64": "0"}
    done = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "run",
    ["cleaning", "few_shot", "mini_batches", "many_starts", "streamed", "resumed_elsewhere", "batches_elsewhere"],
)
def test_many_devices_give_what_one_gives(four_devices, run):
    assert four_devices[run] < 1e-5


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """What each of two processes prints last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment, folder = os.environ | {"JAX_ENABLE_X64": "0"}, tmp_path_factory.mktemp("two") / "run"
    two = [
        subprocess.Popen(
            [sys.executable, PROGRAM, address, str(i), folder],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
        )
        for i in range(2)
    ]
    try:
        return [process.communicate(timeout=300)[0].splitlines()[-1] for process in two]
    finally:
        for process in two:
            process.kill()


def test_two_processes_give_what_one_gives(two_processes):
    apart, steps = two_processes[0].split()
    assert float(apart) < 1e-5
    assert steps == "20"


def test_a_run_without_a_mesh_waits_for_no_other_process(two_processes):
    own = json.loads(two_processes[1])
    assert own["apart"] < 1e-5
    assert own["lines"] == 2
    assert "several processes cannot do together" in own["auto"]
    assert "devices of processes [0]" in own["another's device"]


def test_variables_of_examples_lie_with_them(four_devices):
    assert four_devices["x is cut"]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("three devices", "no array of the data has a first axis that is a multiple of 3"),
        ("three devices, batches", "rows of upper must be a multiple of the 3 devices, got 16"),
        ("three devices, tasks", "is a multiple of 3"),
        ("no mesh", "mesh must be a mesh such as jax.make_mesh"),
        ("two axes", "mesh must have one axis"),
    ],
)
def test_what_cannot_be_divided_is_refused(four_devices, what, said):
    assert said in four_devices[what]


def test_dealt_rows_make_the_same_batches():
    rows = np.arange(24.0)[:, None] * [1, 100]
    plain = bilax.Minibatches((), rows, 8, seed=3).lower
    dealt = plain.dealt("lower", 4)
    for start in range(24):
        one, same = batches([plain], [start])[0], batches([dealt], [start])[0]
        np.testing.assert_array_equal(np.sort(one, axis=0), np.sort(same, axis=0))
        # Two rows of each hand, which are those that one device holds.
        whose = {row: hand for hand, some in enumerate(np.asarray(dealt.arrays)[..., 0]) for row in some}
        assert [whose[row] for row in np.asarray(same)[:, 0]] == [0, 0, 1, 1, 2, 2, 3, 3]
    np.testing.assert_array_equal(np.sort(dealt.all, axis=0), rows)
