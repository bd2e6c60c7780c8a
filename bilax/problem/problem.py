"""The bilevel problem: min over x in X of F(x, y), such that y minimises f(x, ·) over Y."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from bilax.problem.sets import Reals, Set
from bilax.problem.terms import Term, proximal, term_value


class Follower(NamedTuple):
    """What the follower sees once the leader has moved: both objectives as functions of y alone."""

    upper: Callable[[PyTree], Float[Array, ""]]
    lower: Callable[[PyTree], Float[Array, ""]]
    """f, without the term that `y_set` may be"""
    y_set: Any = Reals()
    """the set or term, as this leader makes it"""
    leader: PyTree = ()
    """what it sees of the leader: x, or what `context` made of it. A dynamics may take from here a step length, a
    preconditioner or a proximal weight that is learned: derivatives go through it"""

    def project(self, v: PyTree) -> PyTree:
        """The point of Y nearest to v."""
        if not isinstance(self.y_set, Set):
            raise ValueError(
                f"{self.y_set} is a term with a proximal map, which needs a step length: use dynamics that have one "
                "(bilax.GradientDescent, Nesterov, Newton, LBFGS), or follower.prox(v, step) in your own."
            )
        return self.y_set.project(v)

    def prox(self, v: PyTree, step: Any) -> PyTree:
        """The proximal map of Y's term for a step length; the projection, where Y is a set."""
        return proximal(self.y_set, v, step)

    def total(self, y: PyTree) -> Any:
        """f and the term together: what the follower minimises."""
        return self.lower(y) + term_value(self.y_set, y)


class Problem(eqx.Module):
    """A leader's and a follower's objective, and the sets their variables live in.

    - `upper(x, y, *data)` is F, `lower(x, y, *data)` is f; both return a scalar.
    - x and y are any pytrees of floating arrays; x may be empty, `()`.
    - `y_set` may also be a term with a proximal map that is added to f, such as `bilax.L1(0.1)`; or a function of x
      that gives a set or a term, such as `lambda x: bilax.Box(0.0, x)`: every derivative rule heeds how it depends on
      x.
    - `context(x, *data)`, if given, is computed once per outer step, and the objectives (and `y_set`) see its value in
      place of x. Put there what does not depend on y, such as a shared network's features.
    - `lower_at(k, x, y, *data)`, if given, is what the follower's step k = 0, 1, … descends on in place of f: a
      minibatch of it, for a follower trained by stochastic gradients. Derivatives are exact for the steps taken; f
      itself is what residuals, the implicit rules, certificates and the value-function methods mean.
    """

    upper: Callable[..., Any]
    lower: Callable[..., Any]
    x_set: Set = Reals()
    y_set: Set | Term | Callable[[PyTree], Set | Term] = Reals()
    context: Callable[..., PyTree] | None = None
    lower_at: Callable[..., Any] | None = None

    def __check_init__(self):
        for name in ("upper", "lower"):
            if not callable(getattr(self, name)):
                raise TypeError(f"Problem({name}=...): expected a function (x, y, *data) -> scalar.")
        if not isinstance(self.x_set, Set):
            raise TypeError(_NO_SET.format(name="x_set", given=self.x_set, more=""))
        if not isinstance(self.y_set, Set | Term) and (isinstance(self.y_set, type) or not callable(self.y_set)):
            more = ", a term such as bilax.L1(0.1), or a function of x that gives one"
            raise TypeError(_NO_SET.format(name="y_set", given=self.y_set, more=more))
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
            y_set=self.set_of_y(view),
            leader=view,
        )

    def set_of_y(self, view: PyTree) -> Set | Term:
        """Y, or the term in its place, as this leader makes it."""
        if isinstance(self.y_set, Set | Term):
            return self.y_set
        made = self.y_set(view)
        if not isinstance(made, Set | Term):
            raise TypeError(_NO_SET.format(name="y_set", given=made, more=", from the function"))
        return made


_NO_SET = (
    "Problem({name}=...): expected a set such as bilax.Box(0, 1), or any object with a method project(v){more}; "
    "got {given!r}."
)
