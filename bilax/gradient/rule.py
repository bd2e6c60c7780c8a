"""What a derivative rule is: how the derivative of the chosen iterate y_k̄(x, z) is pulled back to x and z.

A rule is any object with

    keep(K) -> Keep                  which states the forward pass stores: 1 for all, m for every m-th, None for none,
                                     or a function of the first state that gives the spacings of several levels
    has_z_gradient(K) -> bool        whether its z-gradient means anything
    check(method)                    raises if the method's other parts do not fit
    pullback(run, v) -> Cotangents   those of the parameters and of z, for the cotangent v of y_k̄

`run` is the follower's run as the rule may see it. Its `params` are exactly the leaves that are being
differentiated, so a rule never pays for a gradient that nobody asked for.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
from jaxtyping import PyTree

from bilax.follower.trajectory import Keep, Trajectory, Unrolling
from bilax.problem.problem import Problem

if TYPE_CHECKING:
    from bilax.gradient.method import Method


class FollowerRun(NamedTuple):
    """One run of the follower: all that a rule may look at."""

    problem: Problem
    method: "Method"
    unrolling: Unrolling
    params: PyTree
    """the differentiated leaves of (the leader's view, data, method)"""
    follower: Any
    """follower(params, k=None) -> Follower, as step k sees it if k is given"""
    z: PyTree
    z_wanted: PyTree
    """which leaves of z are differentiated"""
    trajectory: Trajectory

    @property
    def y(self) -> PyTree:
        """The chosen iterate."""
        return self.method.dynamics.point(self.trajectory.chosen)


class Cotangents(NamedTuple):
    """What a rule pulls back, and how well the linear solve behind it went (0 where there is none)."""

    params: PyTree
    z: PyTree
    solve_error: Any = 0.0
    """‖v − A w‖ / ‖v‖"""
    solved: Any = True


@runtime_checkable
class Derivative(Protocol):
    """What a rule must offer; see the module's docstring."""

    def keep(self, inner_steps: int) -> Keep: ...
    def has_z_gradient(self, inner_steps: int) -> bool: ...
    def check(self, method: "Method") -> None: ...
    def pullback(self, run: FollowerRun, v: PyTree) -> Cotangents: ...


class StatelessRule(eqx.Module):
    """A rule that needs no states, has a z-gradient and fits every method, unless it says otherwise."""

    def keep(self, inner_steps: int) -> int | None:
        return None

    def has_z_gradient(self, inner_steps: int) -> bool:
        return True

    def check(self, method: "Method") -> None:
        return None
