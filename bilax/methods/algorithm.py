"""What `solve` runs: an algorithm is `init`, `step` and `point` on a carry of its own.

    init(problem, x0, y0, data) -> carry                       any tree of arrays: all that the next step needs
    step(problem, carry, data, key) -> (carry, Evaluation)     one outer step, and what was found where it began
    point(carry) -> (x, z)                                     the leader's variables, and where the follower stands

All three are traced: no Python loop over steps, no state outside the carry. `data` is the tuple of this step, `key` a
random key of its own. What else a run needs (health, the last good point, tolerance, history, data, progress,
callbacks, saving, resuming, many starts) is the loop's and is the same for all algorithms. The end of a run is
evaluated by a step that is not taken.

An algorithm with an attribute `draws = (outer, inner)` gets in place of the tuple a `bilax.Draws`, which has so many
independent batches of the leader's and of the follower's data for the step.

A field named `optimizer` (or `z_optimizer`) is what `solve(optimizer=...)` replaces.

An algorithm with `prepares = True` has a turn of `step` before the first one, of which nothing is recorded: what `init`
would have to compute by the same program as `step` is then compiled once.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from bilax.follower.dynamics import residual
from bilax.problem.problem import Problem
from bilax.problem.terms import brought_inside, inside


class Evaluation(NamedTuple):
    """What one outer step found at the point (x, z) where it began."""

    y: PyTree
    """the follower's answer there; `()` if it is the z of `point`"""
    upper: Float[Array, ""]
    """F(x, y)"""
    lower: Float[Array, ""]
    """f(x, y)"""
    residual: Any
    """how far the follower is from stationary"""
    k_bar: Any = 0
    """which iterate of the follower was chosen, if there was a choice"""
    y_last: PyTree = ()
    """where the follower ended, if y was chosen on its way"""
    grad_x: PyTree = ()
    grad_z: PyTree = ()
    solved: Any = True
    """whether the linear system behind the gradient was solved"""
    follower_steps: Any = 0
    """how many steps the follower took, where it is known"""
    converged: Any = False
    """whether the algorithm itself says that it has arrived"""
    doubtful: Any = False
    """whether it says so only because it cannot go on"""
    info: Any = ()
    """what `record` gets; for the hypergradient methods a `bilax.Info`"""


@runtime_checkable
class Algorithm(Protocol):
    """What an algorithm must offer; see the module's docstring."""

    def init(self, problem: Problem, x0: PyTree, y0: PyTree, data: Any) -> PyTree: ...
    def step(self, problem: Problem, carry: PyTree, data: Any, key: Array) -> tuple[PyTree, Evaluation]: ...
    def point(self, carry: PyTree) -> tuple[PyTree, PyTree]: ...


def evaluate(
    problem: Problem, x: PyTree, y: PyTree, data: tuple[Any, ...], step_size: Any = 1.0, **more: Any
) -> Evaluation:
    """Both objectives and ‖R_α(x, y)‖ at a point, for algorithms that do not have them at hand; `more` is passed on."""
    follower = problem.follower(problem.view(x, *data), data)
    return Evaluation(y, follower.upper(y), follower.total(y), residual(follower, y, step_size), **more)


def unsettled(problem: Problem, x: PyTree, y: PyTree, y0: PyTree, data: tuple[Any, ...]) -> Array:
    """Whether y is far from stationary for the follower, or from its Y: a coarse question without scale.

    A proximal step of the inverse curvature met on the way from y0 would move y by more than a hundredth of its size
    and of that way. It takes no second derivatives, which not every objective has.
    """
    follower = problem.follower(problem.view(x, *data), data)
    y0 = brought_inside(follower.y_set, y0)
    slope, back = jax.grad(follower.lower), optax.tree.sub(y0, y)
    way = optax.tree.norm(back)

    def turn_over(share):
        there = jax.tree.map(lambda a, b: a + share * b, y, back)
        return optax.tree.norm(optax.tree.sub(slope(there), slope(y))) / share

    # Near y, too: both ends may be stationary, with a hill between them.
    turn = jnp.fmax(turn_over(1.0), turn_over(0.001))
    known = (way > 0) & (turn > 0)
    alpha = jnp.where(known, way / jnp.where(known, turn, 1), 1)
    step, eps = residual(follower, y, alpha), jnp.finfo(way.dtype).eps
    return ~(step <= jnp.maximum(0.01 * jnp.maximum(way, optax.tree.norm(y)), jnp.sqrt(eps)))


def update(
    optimizer: optax.GradientTransformation, gradient: PyTree, memory: PyTree, point: PyTree, a_set: Any, **more: Any
) -> tuple[PyTree, PyTree]:
    """One projected step of an optax optimiser: the next point and the next memory.

    `more` is for optimisers that search along a line, `value`, `grad` and `value_fn`, or that are told the `step`.
    """
    updates, memory = optax.with_extra_args_support(optimizer).update(gradient, memory, point, **more)
    return inside(a_set, optax.apply_updates(point, updates)), memory


def view_once(problem: Problem, x: PyTree, data: tuple[Any, ...]) -> tuple[Problem, PyTree, Any]:
    """The problem whose leader is the view, computed here, the view, and what makes of a slope in it one in x."""
    if problem.context is None:
        return problem, x, lambda slope: slope
    view, pull = eqx.filter_vjp(lambda x: problem.view(x, *data), x)
    return dataclasses.replace(problem, context=None), view, lambda slope: pull(slope)[0]
