"""`solve` for a method that chooses itself: `bilax.auto()`."""

import contextlib
import dataclasses
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from bilax.gradient.implicit import DENSE
from bilax.methods.auto import Auto
from bilax.methods.auto_remarks import nudged, on_bounds, solved_anew
from bilax.methods.solved_follower import SolvedFollower
from bilax.problem.joined_tasks import all_tasks
from bilax.problem.minibatches import Draws, of_start
from bilax.problem.precision import double_precision, in_double
from bilax.problem.problem import Problem
from bilax.problem.variables import Fixed
from bilax.run.chunks import Plan
from bilax.run.data import Batches
from bilax.run.loop import Loop, Record
from bilax.run.options import RunOptions
from bilax.run.progress import tell
from bilax.run.solution import BilevelError, Solution, Status
from bilax.run.start import for_each_task, joined_record, start


class Setting(NamedTuple):
    """What `solve` and `multistart` hand to a method that chooses itself."""

    problem: Problem
    x0: PyTree
    y0: PyTree
    data: Any
    key: Array
    steps: int
    fixed: Fixed
    record: Record
    options: RunOptions
    doubles: tuple[bool, bool]
    """whether x0 and y0 came as arrays of double precision, even if JAX is set to single"""
    tasks: bool = False
    many: bool = False
    data_axes: Any = None


def solve_by_itself(method: Auto, given: Setting) -> Solution:
    """Chooses, runs, looks at the end once more and runs again if need be; as long as there is time."""
    began = time.monotonic()

    def left():
        limit = given.options.time_limit
        return None if limit is None else max(limit - (time.monotonic() - began), 0.0)

    def in_time():
        return left() != 0.0

    def said(what):
        if given.options.progress:
            tell(what)

    problem, x0, y0 = given[:3]
    data: Any = given.data
    steady = isinstance(data, tuple) and not isinstance(data, Batches)
    precise = steady and method.precise(x0, y0)
    with double_precision() if precise else contextlib.nullcontext():
        if precise:
            x0, y0, data = in_double(x0), in_double(y0), _floats_in_double(data)
        by_task = False
        if given.tasks:
            y0 = for_each_task(method, y0, data, given.many, given.data_axes)
            by_task = method.by_task(problem, jax.tree.map(lambda leaf: leaf[0], x0) if given.many else x0)
            problem = problem if by_task else all_tasks(problem)
        # One step's data, and of many starts the first.
        example: Any = (
            data.first if isinstance(data, Batches) else Draws(data, jnp.zeros((), int), given.key, (1, 1)).upper()
        )
        one = x0, y0, example
        if given.many:
            one = *jax.tree.map(lambda leaf: leaf[0], (x0, y0)), of_start(example, given.data_axes, 0)
        said("looking at the follower")
        algorithm, plan = method.prepare(problem, *one, steady=steady, alone=given.many, tasks=by_task, in_time=in_time)
        again, solution = (algorithm, plan), None
        for _ in range(2):
            if again is None or (solution is not None and (again[0] is algorithm or given.options.saving is not None)):
                break
            algorithm, plan = again
            record = joined_record(given.record, given.fixed)
            said("compiling" if solution is None else "running again")
            loop = Loop(problem, algorithm, data, None, record, given.many, given.data_axes)
            options = dataclasses.replace(given.options, throw=False, time_limit=left())  # a second run may succeed
            solution = start(Plan(loop, x0, y0, given.key, given.steps, given.fixed), options)
            again = None
            if steady and not given.many and solution.ended is not Status.time_limit:
                if not in_time() and solution.ended is Status.converged:
                    solution = dataclasses.replace(solution, status=Status.time_limit)
                    plan = plan.and_then("The run had converged, but there was no time to look for a lower follower.")
                elif in_time():
                    said("looking for a lower follower at the end")
                    again = method.review(problem, algorithm, y0, solution, data, plan)
        assert solution is not None
        if given.options.throw and solution.ended.failed:
            raise BilevelError(solution)
        if again is not None and not solution.ended.failed:
            solution, plan = dataclasses.replace(solution, status=Status.doubtful), again[1]
        elif solution.ended is Status.doubtful:
            plan = plan.and_then(
                "Where the run ended no step lowers F though its slope promises more, or the follower is far from "
                "solved (a step of its descent on f would move y by more than a hundredth of its size). So F jumps "
                "there from one minimum of the follower to another, or its minimum is too flat to be found. Try other "
                "starts of x and y and compare, or give f a term that holds y, such as a penalty on its square."
            )
        if isinstance(algorithm, SolvedFollower) and not given.many and not solution.ended.failed:
            solution, plan = _with_remarks(plan, problem, algorithm, solution, y0, data)
    double_x, double_y = (precise and double for double in given.doubles)
    return dataclasses.replace(
        solution,
        x=_as_given(solution.x, given.x0, double_x),
        y=_as_given(solution.y, given.y0, double_y),
        z=_as_given(solution.z, given.y0, double_y),
        plan=plan,
    )


def _with_remarks(
    plan: Any, problem: Problem, algorithm: SolvedFollower, solution: Solution, y0: PyTree, data: tuple[Any, ...]
) -> tuple[Solution, Any]:
    """The solution, and the plan with what is worth knowing of the end; doubtful, if its F is too good to be true."""
    # What a run that is not to be trusted met on its way is no advice.
    remarks = [on_bounds(problem, solution)] if solution.ended is not Status.doubtful else []
    # Of smaller followers several minima were looked for.
    one = jax.tree.map(lambda leaf: leaf[0], y0) if algorithm.tasks else y0
    if optax.tree.size(one) > DENSE:
        if solution.ended is Status.time_limit:
            remarks.append(
                "There was no time to solve the follower anew from y0 at the end: whether that ends elsewhere, with "
                "another F, is not known."
            )
        else:
            found = [solved_anew(problem, algorithm, solution, y0, data)]
            found += [] if algorithm.tasks else [nudged(problem, algorithm, solution, data)]
            remarks += [one.words for one in found if one]
            if any(one.too_good for one in found if one) and solution.ended is Status.converged:
                solution = dataclasses.replace(solution, status=Status.doubtful)
    for remark in filter(None, remarks):
        plan = plan.and_then(remark)
    return solution, plan


def _floats_in_double(data: PyTree) -> PyTree:
    def cast(leaf):
        array = jnp.asarray(leaf)
        return array.astype(jnp.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array

    return jax.tree.map(cast, data)


def _as_given(found: PyTree, like: PyTree, double: bool) -> PyTree:
    """The variables of `found` in the precision that the user gave."""
    kinds = {jnp.result_type(leaf) for leaf in jax.tree.leaves(like)}
    kind = np.dtype(np.float64) if double else jnp.result_type(*kinds) if kinds else None
    return jax.tree.map(lambda leaf: leaf.astype(kind) if eqx.is_inexact_array_like(leaf) else leaf, found)
