"""`--devices` and `--distributed`: the command line on several devices and in several processes."""

import os
import sys
from typing import Any, NoReturn

import jax

from bilax.app.errors import refuse
from bilax.run.processes import is_first, says_lost, wait_for_all

__all__ = ["is_first", "lost", "mesh", "prepare", "says_lost", "wait_for_all"]

SILENCE = 30
"""seconds after which a process that is not heard of counts as gone"""
TOLD = {
    "coordinator_address": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}


def prepare(devices: int | None, distributed: bool) -> None:
    """What must be said to JAX before it computes anything."""
    if devices is not None and not distributed:
        jax.config.update("jax_num_cpu_devices", devices)
    if not distributed:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _keep_output_clean()
    told: dict[str, Any] = {name: os.environ[variable] for name, variable in TOLD.items() if variable in os.environ}
    try:
        told |= {name: int(told[name]) for name in ("num_processes", "process_id") if name in told}
        jax.distributed.initialize(**told, heartbeat_timeout_seconds=SILENCE)
    except (ValueError, RuntimeError) as error:
        refuse(
            f"bilax: --distributed found no cluster ({error}). Start it by srun, mpirun, in Kubernetes or on a TPU "
            f"slice, or set {', '.join(TOLD.values())} for each process."
        )


def _keep_output_clean() -> None:
    """Sends what libraries print to the standard error: Gloo would greet its peers in the midst of --json."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        own = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = os.fdopen(own, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def mesh(devices: int | None, distributed: bool) -> Any:
    """The devices that were asked for, in one row; None for the one that JAX chooses."""
    if devices is None and not distributed:
        return None
    there = jax.devices()
    number = len(there) if devices is None else devices
    if number > len(there):
        refuse(f"bilax: --devices {number}: there are {len(there)}, {there[0].device_kind}.")
    return jax.make_mesh((number,), ("data",), devices=there[:number])


def lost(name: str, error: Exception) -> NoReturn:
    """Ends a process whose run cannot go on because another is gone."""
    first_line = str(error).strip().splitlines()[0][:200]
    print(
        f"\nbilax {name}: another process of this run has ended or cannot be reached ({first_line}). This one ends, "
        "too. Start all of them again with --resume: the run goes on from its last checkpoint.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)  # JAX would wait for the others at a normal exit
