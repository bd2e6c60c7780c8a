"""`solve` and `multistart`: one loop for every method."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from bilax.gradient.method import Method
from bilax.methods.algorithm import Algorithm
from bilax.methods.auto import Auto
from bilax.methods.hypergradient import Hypergradient
from bilax.problem.checks import check_inside, check_point, holds_doubles, warn_of_doubles
from bilax.problem.joined_tasks import all_tasks
from bilax.problem.problem import Problem
from bilax.problem.sets import Each, Set
from bilax.problem.variables import Fixed, joined_start, take_variables
from bilax.run.chunks import Plan
from bilax.run.data import Batches, Data, check_data
from bilax.run.loop import Loop, Record
from bilax.run.options import RunOptions, Watching
from bilax.run.solution import Solution
from bilax.run.solve_auto import Setting, solve_by_itself
from bilax.run.start import for_each_task, joined_record, start


def _record_nothing(x: PyTree, z: PyTree, info: Any) -> PyTree:
    return ()


def solve(
    problem: Problem,
    method: Method | Algorithm | Auto,
    x0: PyTree,
    y0: PyTree,
    *,
    steps: int | None = None,
    optimizer: optax.GradientTransformation | None = None,
    z_optimizer: optax.GradientTransformation | None = None,
    data: Data = (),
    tasks: bool = False,
    key: Array | None = None,
    tolerance: float | None = None,
    record: Record = _record_nothing,
    **watching: Unpack[Watching],
) -> Solution:
    """Solves the bilevel problem from (x0, y0) by a method: for a recipe such as `iaptt_gm`, Algorithm 1 on φ(x, z).

    - `method`: `bilax.auto()`, which needs no other setting; a recipe, `bilax.penalty(...)`, `bilax.bvfim(...)`, or
      anything with `init`, `step` and `point` (see `bilax.Algorithm`).
    - `steps`: outer steps at the most; 500 by default, for `auto` 5,000 evaluations.
    - `optimizer`, `z_optimizer`: any optax transformation for x and for z (the same one if not given; SGD with rate
      0.1 by default); x is projected onto X and z onto Y after each update.
    - `data`: a tuple that the objectives get after (x, y); `bilax.Minibatches` of the leader's and of the follower's
      examples; a traced function (step, key) -> such a tuple; or an
      iterable of such tuples, one per outer step. It is skipped forward to where a resumed run was, by its method
      `starting_at(step)` if it has one. No more than `steps` batches are read; a run that ends early may have read
      some that it did not use.
    - `tasks`: the leaves of the data have a leading axis, one entry per task. A recipe's φ is the mean over tasks, each
      with a follower of its own that starts from the shared z (`bilax.Tasks`). Other methods keep a follower for each
      task, so the tasks must stay the same; F is their mean and f their sum (for `auto` the mean, too).
    - `key`: makes a run with random data repeatable.
    - `tolerance`: end as converged once the residual and the relative outer step are below it; for `auto`, once the
      next step promises less than its square of what F has fallen (10⁻⁴ by default).
    - `record`: a function (x, z, info) of each outer step whose values come back in `history.record`.
    - `progress`, `callbacks`, `saving`, `resume`, `time_limit`, `throw`, `record_every`: see `bilax.RunOptions`.

    Without progress, callbacks, saving, an iterable and a time limit the whole run is one compiled call; with
    them it is a few, each about half a second long. Where a run fails, the solution is the best solved point that
    it met. A second call with the same functions and equal settings, optimisers and shapes compiles
    nothing.

    Of modules such as `eqx.nn.MLP` in x0 or y0 the floating arrays are varied, the rest stays as it is. Of a module of
    flax: `graph, y0 = nnx.split(module)`, and `nnx.merge(graph, y)` in the objectives; of PyTorch: `bilax.from_torch`.
    Ctrl-C raises `bilax.Interrupted`, a KeyboardInterrupt that has the point; a run that is being saved is saved first.
    """
    if steps is None:
        steps = 5000 if isinstance(method, Auto) else 500
    options, steps = RunOptions(**watching), _check_settings(problem, steps, tolerance, x0, y0, data, key)
    given, x0, y0, fixed = take_variables(problem, x0, y0)
    given_x0, given_y0, doubles = x0, y0, (holds_doubles(x0), holds_doubles(y0))
    x0, y0 = check_point("x0", x0, may_be_empty=True), check_point("y0", y0)
    x0, y0 = check_inside("x0", x0, problem.x_set), check_inside("y0", y0, problem.y_set)
    data = check_data(data)
    if isinstance(method, Auto):
        _check_for_auto(options.mesh, optimizer, z_optimizer)
        method = method if tolerance is None else Auto(tolerance)
        if not method.precise(x0, y0):
            _warn_of_rounding(given_x0, given_y0, data)
        return solve_by_itself(
            method, Setting(given, x0, y0, data, _key(key), steps, fixed, record, options, doubles, tasks)
        )
    _warn_of_rounding(given_x0, given_y0, data)
    algorithm = _algorithm(method, optimizer, z_optimizer, fixed, tasks)
    if tasks and not isinstance(algorithm, Hypergradient):
        given, y0 = all_tasks(given), for_each_task(algorithm, y0, data)
    loop = Loop(given, algorithm, data, tolerance, joined_record(record, fixed))
    return start(Plan(loop, x0, y0, _key(key), steps, fixed), options)


def multistart(
    problem: Problem,
    method: Method | Algorithm | Auto,
    x0s: PyTree,
    y0s: PyTree,
    *,
    steps: int = 500,
    optimizer: optax.GradientTransformation | None = None,
    z_optimizer: optax.GradientTransformation | None = None,
    data: Data = (),
    data_axes: Any = None,
    tasks: bool = False,
    key: Array | None = None,
    tolerance: float | None = None,
    record: Record = _record_nothing,
    **watching: Unpack[Watching],
) -> Solution:
    """`solve` from many starts at once: every leaf of x0s and y0s has a leading axis, one entry per start.

    `data_axes` says which leaves of the data have that axis too, as `in_axes` of `jax.vmap` does for the tuple:
    `data=(inputs, labels), data_axes=(None, 0)` gives each start labels of its own. The same holds for what a function
    (step, key) returns and for the items of an iterable; by default all starts share the data. `tasks` is that of
    `solve`; the axis of the tasks comes behind that of the starts.

    The fields of the result have that axis too; `result.best` and `result[i]` are single solutions. Entries
    of the history past a run's own end are NaN (0 for k_bar).
    """
    options, steps = RunOptions(**watching), _check_settings(problem, steps, tolerance, x0s, y0s, data, key)
    given, x0s, y0s, fixed = take_variables(problem, x0s, y0s)
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves((x0s, y0s))}
    if len(counts) != 1 or () in counts or (0,) in counts:
        raise ValueError(
            f"x0s and y0s need one common leading axis, the starts; the first axes are {sorted(counts)}. "
            "For a single start use bilax.solve."
        )
    doubles = holds_doubles(x0s), holds_doubles(y0s)
    x0s, y0s = check_point("x0s", x0s, may_be_empty=True), check_point("y0s", y0s)
    x0s = check_inside("x0s", x0s, Each(problem.x_set))
    y0s = check_inside("y0s", y0s, Each(problem.y_set)) if isinstance(problem.y_set, Set) else y0s
    data = check_data(data)
    if isinstance(method, Auto):
        _check_for_auto(options.mesh, optimizer, z_optimizer)
        method = method if tolerance is None else Auto(tolerance)
        setting = Setting(given, x0s, y0s, data, _key(key), steps, fixed, record, options, doubles, tasks)
        return solve_by_itself(method, setting._replace(many=True, data_axes=data_axes))
    algorithm = _algorithm(method, optimizer, z_optimizer, fixed, tasks)
    if tasks and not isinstance(algorithm, Hypergradient):
        given, y0s = all_tasks(given), for_each_task(algorithm, y0s, data, True, data_axes)
    loop = Loop(given, algorithm, data, tolerance, joined_record(record, fixed), many=True, data_axes=data_axes)
    return start(Plan(loop, x0s, y0s, _key(key), steps, fixed), options)


def _warn_of_rounding(x0: PyTree, y0: PyTree, data: Any) -> None:
    for name, tree in (("x0", x0), ("y0", y0), ("data", () if callable(data) else data)):
        tree = data.first if tree is data and isinstance(data, Batches) else tree
        warn_of_doubles(name, tree, variables=name != "data")


def _check_for_auto(mesh: Any, *optimizers: Any) -> None:
    if isinstance(mesh, Mesh) and mesh.is_multi_process:
        raise ValueError("bilax.auto() chooses by itself, which several processes cannot do together: name a method.")
    if any(one is not None for one in optimizers):
        raise TypeError("bilax.auto() chooses its optimiser: leave out optimizer and z_optimizer, or name a method.")


def _check_settings(problem: Any, steps: Any, tolerance: Any, *given: Any) -> int:
    # Inside jit whatever is computed is traced; inside vmap and grad only what was given.
    leaves = jax.tree.leaves((given, jnp.zeros(()) + 0), is_leaf=lambda leaf: isinstance(leaf, Iterator))
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise TypeError(
            "solve and multistart compile whole runs and cannot be part of a function that jax.jit, vmap or grad is "
            "asked for. Use bilax.approximate there, and bilax.multistart for many starts."
        )
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a bilax.Problem, got {problem!r}.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}.")
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"tolerance must be positive or None, got {tolerance}.")
    return steps


def _algorithm(method: Any, optimizer: Any, z_optimizer: Any, fixed: Fixed, tasks: bool = False) -> Algorithm:
    """The method with the optimisers that were given."""
    if isinstance(method, Method) and callable(method.start):
        method = dataclasses.replace(method, start=joined_start(method.start, fixed))
    algorithm = Hypergradient(method, tasks=tasks) if isinstance(method, Method) else method
    if isinstance(method, type) or not isinstance(algorithm, Algorithm):
        raise TypeError(
            "method must be a bilax.Method such as bilax.iaptt_gm(40, 5e-4), bilax.penalty(10, 0.1), or an object with "
            f"init, step and point (bilax.Algorithm), got {method!r}."
        )
    for name, one in (("optimizer", optimizer), ("z_optimizer", z_optimizer)):
        if one is None:
            continue
        if not hasattr(one, "init") or not hasattr(one, "update"):
            raise TypeError(f"{name} must be an optax transformation such as optax.adam(1e-3), got {one!r}.")
        if not hasattr(algorithm, name):
            raise TypeError(f"{name} is not for {type(algorithm).__name__}: it has no field of that name to replace.")
        algorithm = dataclasses.replace(algorithm, **{name: one})  # pyright: ignore
    return algorithm


def _key(key: Array | None) -> Array:
    if key is None:
        return jax.random.key(0)
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.shape == (2,):
        return jax.random.wrap_key_data(key)  # as jax.random.PRNGKey makes them
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape:
        raise TypeError(f"key must be a random key such as jax.random.key(0), got {key!r}.")
    return key
