"""The bilevel problem: min over x in X of F(x, y), such that y minimises f(x, ·) over Y."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from bilax.problem.sets import Reals, Set


class Follower(NamedTuple):
    """What the follower sees once the leader has moved: both objectives as functions of y alone."""

    upper: Callable[[PyTree], Float[Array, ""]]
    lower: Callable[[PyTree], Float[Array, ""]]
    project: Callable[[PyTree], PyTree]
    leader: PyTree = ()
    """what it sees of the leader: x, or what `context` made of it. A dynamics may take from here a step length, a
    preconditioner or a proximal weight that is learned: derivatives go through it"""


class Problem(eqx.Module):
    """A leader's and a follower's objective, and the sets their variables live in.

    - `upper(x, y, *data)` is F, `lower(x, y, *data)` is f; both return a scalar.
    - x and y are any pytrees of floating arrays; x may be empty, `()`.
    - `context(x, *data)`, if given, is computed once per outer step, and the objectives see its value in
      place of x. Put there what does not depend on y, such as a shared network's features.
    - `lower_at(k, x, y, *data)`, if given, is what the follower's step k = 0, 1, … descends on in place of f: a
      minibatch of it, for a follower trained by stochastic gradients. Derivatives are exact for the steps taken; f
      itself is what residuals, the implicit rules, certificates and the value-function methods mean.
    """

    upper: Callable[..., Any]
    lower: Callable[..., Any]
    x_set: Set = Reals()
    y_set: Set = Reals()
    context: Callable[..., PyTree] | None = None
    lower_at: Callable[..., Any] | None = None

    def __check_init__(self):
        for name in ("upper", "lower"):
            if not callable(getattr(self, name)):
                raise TypeError(f"Problem({name}=...): expected a function (x, y, *data) -> scalar.")
        for name in ("x_set", "y_set"):
            if not isinstance(getattr(self, name), Set):
                raise TypeError(
                    f"Problem({name}=...): expected a set such as bilax.Box(0, 1), or any object with a method "
                    f"project(v); got {getattr(self, name)!r}."
                )
        if self.context is not None and not callable(self.context):
            raise TypeError("Problem(context=...): expected None or a function (x, *data) -> tree.")
        if self.lower_at is not None and not callable(self.lower_at):
            raise TypeError("Problem(lower_at=...): expected None or a function (k, x, y, *data) -> scalar.")

    def view(self, x: PyTree, *data: Any) -> PyTree:
        """What the objectives see of the leader: x itself, or its context."""
        return x if self.context is None else self.context(x, *data)

    def follower(self, view: PyTree, data: tuple[Any, ...], k: Any = None) -> Follower:
        """The follower's problem for a fixed view of the leader, as its step k sees it if k is given."""
        lower = self.lower if k is None or self.lower_at is None else functools.partial(self.lower_at, k)
        return Follower(
            upper=lambda y: self.upper(view, y, *data),
            lower=lambda y: lower(view, y, *data),
            project=self.y_set.project,
            leader=view,
        )
