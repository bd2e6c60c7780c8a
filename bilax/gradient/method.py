"""A method is four choices: dynamics, selection, derivative rule, start."""

from collections.abc import Callable
from typing import Literal

import equinox as eqx
from jaxtyping import PyTree

from bilax.follower.dynamics import Aggregated, Dynamics, check_steps
from bilax.follower.trajectory import ArgMax, EveryStep, Last
from bilax.gradient.rule import Derivative
from bilax.gradient.unrolled import Reverse

Start = Literal["fixed", "warm", "auxiliary"] | Callable[..., PyTree]


class Method(eqx.Module):
    """How a bilevel problem becomes a plain function φ(x, z), and how φ is differentiated.

    `start` says where the follower begins at each outer step: "fixed" at y0, "warm" at the last y_K,
    "auxiliary" at z, which the outer loop optimises together with x; or a function (x, *data) -> y, through which
    derivatives go.

    Floating arrays in it, such as a step size given as `jnp.asarray(0.1)`, can be differentiated like x: build the
    method inside the function that `jax.grad` is asked for.
    """

    inner_steps: int
    dynamics: Dynamics
    select: Last | ArgMax | EveryStep = Last()
    derivative: Derivative = Reverse()
    start: Start = "fixed"
    follower_tolerance: float | None = None
    """the follower stops before `inner_steps` where it is solved up to this, a number without scale: for `Newton` and
    `LBFGS` √(gain in f still to be had / gain so far), else the slope against what it was at the start"""

    def __check_init__(self):
        if isinstance(self.inner_steps, bool) or not isinstance(self.inner_steps, int) or self.inner_steps < 1:
            raise ValueError(f"inner_steps must be a whole number of at least 1, got {self.inner_steps!r}.")
        for name, protocol in (("dynamics", Dynamics), ("derivative", Derivative)):
            if not isinstance(getattr(self, name), protocol):
                raise TypeError(f"{name}={getattr(self, name)!r} lacks the methods of bilax.{protocol.__name__}.")
        if not isinstance(self.select, Last | ArgMax | EveryStep):
            raise TypeError(
                "select must be bilax.Last(), bilax.pessimistic(), bilax.ArgMax(score) or bilax.EveryStep(), got "
                f"{self.select!r}."
            )
        if isinstance(self.select, EveryStep):
            self._check_every_step(self.select)
        if not callable(self.start) and self.start not in ("fixed", "warm", "auxiliary"):
            raise ValueError(f'start must be "fixed", "warm", "auxiliary" or a function of x, got {self.start!r}.')
        if self.follower_tolerance is not None and not self.follower_tolerance > 0:
            raise ValueError(f"follower_tolerance must be positive or None, got {self.follower_tolerance}.")
        if getattr(self.dynamics, "step_size", None) is not None:
            check_steps("step_size", self.dynamics.step_size, self.inner_steps)  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(self.dynamics, Aggregated):
            check_steps("mu", self.dynamics.mu, self.inner_steps, below=1.0)
        self.derivative.check(self)
        if self.start == "auxiliary" and not self.derivative.has_z_gradient(self.inner_steps):
            raise ValueError(
                f'start="auxiliary" optimises z, but {self.derivative} has no z-gradient for inner_steps='
                f'{self.inner_steps}. Use start="warm", or a rule that has one, such as bilax.Reverse().'
            )

    def _check_every_step(self, select: EveryStep) -> None:
        if not isinstance(self.derivative, Reverse) or self.derivative.window or self.follower_tolerance is not None:
            raise ValueError(
                "select=EveryStep() is for all of inner_steps and derivative=bilax.Reverse() without a window, got "
                f"{self.derivative} and follower_tolerance={self.follower_tolerance}."
            )
        if select.weights is not None and len(select.weights) != self.inner_steps:
            raise ValueError(
                f"weights has {len(select.weights)} entries for inner_steps={self.inner_steps}: give one for each step."
            )
