"""From a plan to a solution: as one program, or in chunks where somebody looks in."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from bilax.gradient.tasks import count_tasks
from bilax.methods.hypergradient import Hypergradient
from bilax.methods.solved_follower import SolvedFollower
from bilax.problem.compiled import compiled
from bilax.problem.fitted_jit import fitted_jit
from bilax.problem.minibatches import Minibatches, of_start
from bilax.problem.quick_jit import quick_jit
from bilax.problem.variables import Fixed
from bilax.run.chunks import CAPACITY, Plan, drive, finished
from bilax.run.data import Batches
from bilax.run.devices import Devices, examples
from bilax.run.loop import Loop, Point, Record, advance, begin, finish
from bilax.run.options import RunOptions
from bilax.run.processes import whole
from bilax.run.solution import BilevelError, History, Solution, Status


def start(plan: Plan, options: RunOptions) -> Solution:
    """Runs a plan, as one program where nobody looks in on it."""
    every = options.record_every
    if plan.steps % every or (every > 1 and isinstance(plan.loop.data, Batches)):
        raise ValueError(
            f"record_every={every} is for steps that are a multiple of it, got {plan.steps}, and for data that are not "
            "read from an iterable: give bilax.Minibatches, a tuple or a function."
        )
    plan = plan._replace(loop=plan.loop._replace(every=every))
    if options.mesh is not None:
        plan = _spread(plan, options.mesh)
    elif isinstance(plan.loop.data, Minibatches) and getattr(plan.loop.algorithm, "passes_over_all", False):
        plan = plan._replace(loop=plan.loop._replace(data=plan.loop.data.with_all_apart()), given=plan.loop)
    # The history of a whole run is there before the run: one too long for that is taken in parts.
    if options.in_chunks or isinstance(plan.loop.data, Batches) or plan.steps // every > 16 * CAPACITY:
        solution = drive(plan, options)
    else:
        run = (_run_once if isinstance(plan.loop.algorithm, SolvedFollower) else _run)(*plan[:5])
        point, status, taken, history = whole(run)
        solution = finished(point, status, taken, history, plan)
    if options.throw and solution.ended.failed:
        raise BilevelError(solution)
    return solution


def _spread(plan: Plan, mesh: Any) -> Plan:
    """The plan with its arrays where the devices of a mesh want them."""
    loop, many = plan.loop, plan.loop.many
    devices = Devices.of(mesh, len(jax.tree.leaves((plan.x0, plan.y0))[0]) if many else None)
    algorithm: Any = devices.everywhere(loop.algorithm)
    if isinstance(algorithm, Hypergradient) and algorithm.tasks:
        algorithm = dataclasses.replace(algorithm, mesh=devices.mesh)
    data = devices.source(loop.data, loop.data_axes)
    x0, y0 = (devices.variables(one, examples(data), many) for one in (plan.x0, plan.y0))
    problem = devices.everywhere(loop.problem)
    loop = loop._replace(problem=problem, algorithm=algorithm, data=data, divided=devices.starts)
    return Plan(loop, x0, y0, devices.everywhere(plan.key), plan.steps, plan.fixed, devices, plan.loop)


def _whole_run(loop: Loop, x0: PyTree, y0: PyTree, key: Array, steps: int) -> tuple[Point, Array, Array, History]:
    """A whole run as one program."""
    turns = steps // loop.every
    state, history = advance(loop, begin(loop, x0, y0, key), jnp.asarray(turns), turns, end=True)
    return *finish(loop, state, Status.step_limit, y0), state.step, history


_run = compiled(_whole_run, nan_is_meant=True, jit=fitted_jit)
_run_once = quick_jit(_whole_run)
"""for runs that take less time than their compilation"""


def for_each_task(algorithm: Any, y0: PyTree, data: Any, many: bool = False, data_axes: Any = None) -> PyTree:
    """A follower for each task; their axis is after that of the starts, if there is one."""
    if not isinstance(data, tuple):
        raise ValueError(
            f"{type(algorithm).__name__} keeps a follower for each task from one outer step to the next, so with "
            "tasks=True the tasks must stay the same: give data as a tuple, or use a recipe such as bilax.ia_gm, whose "
            "followers start anew."
        )
    count = count_tasks(of_start(data, data_axes, 0) if many else data)

    def repeat(leaf):
        return jnp.broadcast_to(leaf, (count, *jnp.shape(leaf)))

    return jax.tree.map(jax.vmap(repeat) if many else repeat, y0)


class _JoinedRecord(eqx.Module):
    """A user's record, who sees x, z and y as they were written."""

    record: Any
    fixed: Fixed

    def __call__(self, x: PyTree, z: PyTree, info: Any) -> PyTree:
        names = {name for name in ("y", "y_last") if hasattr(info, name)}
        info = info._replace(**{name: self.fixed.join_y(getattr(info, name)) for name in names}) if names else info
        return self.record(self.fixed.join_x(x), self.fixed.join_y(z), info)


def joined_record(record: Record, fixed: Fixed) -> Record:
    """The record of a run over the variables alone."""
    return _JoinedRecord(record, fixed) if jax.tree.leaves(fixed) else record
