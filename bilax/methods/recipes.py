"""The hypergradient methods by name; each is four choices, see `bilax.Method`.

method            dynamics             value at               derivative              start
rhg               gradient descent     y_K                    reverse, all steps      fixed (or warm)
t_rhg             gradient descent     y_K                    reverse, last h steps   fixed (or warm)
fhg               gradient descent     y_K                    forward                 fixed
bda               aggregated           y_K                    reverse                 fixed (or warm)
ls                gradient descent     y_K                    implicit, CG            fixed (or warm)
ns                gradient descent     y_K                    implicit, Neumann       fixed (or warm)
one_step          gradient descent     y_1                    exact or differences    warm
ia_gm             gradient descent     y_K                    reverse                 auxiliary
ia_gm_a           Nesterov             y_K                    reverse                 auxiliary
iaptt_gm          gradient descent     argmax_k F(x, y_k)     reverse from k̄          auxiliary
maml              gradient descent     y_K                    reverse                 auxiliary, x = ()
fomaml            gradient descent     y_K                    first order             auxiliary, x = ()
reptile           gradient descent     y_K                    displacement            auxiliary, x = ()
"""

from typing import Any, Literal, TypedDict, Unpack

from bilax.follower.dynamics import Aggregated, Dynamics, GradientDescent, Nesterov, Steps
from bilax.follower.trajectory import ArgMax, EveryStep, Last, pessimistic
from bilax.gradient.first_order import Displacement, FiniteDifference, FirstOrder
from bilax.gradient.implicit import Implicit, Neumann
from bilax.gradient.method import Method, Start
from bilax.gradient.rule import Derivative
from bilax.gradient.unrolled import Forward, Reverse


class Parts(TypedDict, total=False):
    """What every recipe lets you replace."""

    dynamics: Dynamics
    select: Last | ArgMax | EveryStep
    derivative: Derivative
    start: Start
    follower_tolerance: float | None


def rhg(inner_steps: int, step_size: Steps | None, **parts: Unpack[Parts]) -> Method:
    """Reverse hypergradient (Franceschi et al. 2017): back-propagation through all K steps."""
    return _method(inner_steps, parts, GradientDescent(step_size))


def t_rhg(inner_steps: int, step_size: Steps | None, window: int, **parts: Unpack[Parts]) -> Method:
    """Truncated RHG (Shaban et al. 2019): back-propagation through the last `window` steps."""
    return _method(inner_steps, parts, GradientDescent(step_size), derivative=Reverse(window=window))


def fhg(inner_steps: int, step_size: Steps | None, **parts: Unpack[Parts]) -> Method:
    """Forward hypergradient (Franceschi et al. 2017): the same derivative as RHG, in forward mode."""
    return _method(inner_steps, parts, GradientDescent(step_size), derivative=Forward())


def bda(inner_steps: int, step_size: Steps, mu: Steps = 0.4, **parts: Unpack[Parts]) -> Method:
    """Bilevel descent aggregation (Liu et al. 2020): the follower also heeds the leader, with weight μ."""
    return _method(inner_steps, parts, Aggregated(step_size, mu))


def ls(
    inner_steps: int,
    step_size: Steps | None,
    tolerance: float | None = 1e-6,
    max_steps: int = 100,
    **parts: Unpack[Parts],
) -> Method:
    """Implicit gradient by a linear system (Pedregosa 2016), solved by conjugate gradients."""
    return _method(inner_steps, parts, GradientDescent(step_size), derivative=Implicit(tolerance, max_steps))


def ns(inner_steps: int, step_size: Steps | None, terms: int = 40, **parts: Unpack[Parts]) -> Method:
    """Implicit gradient by a Neumann series (Lorraine et al. 2020)."""
    return _method(inner_steps, parts, GradientDescent(step_size), derivative=Neumann(terms))


def one_step(step_size: Steps | None, epsilon: float | None = None, **parts: Unpack[Parts]) -> Method:
    """DARTS (Liu et al. 2019): one follower step; exact, or by finite differences of size `epsilon`."""
    rule = Reverse() if epsilon is None else FiniteDifference(epsilon)
    return _method(1, parts, GradientDescent(step_size), derivative=rule, start="warm")


def ia_gm(inner_steps: int, step_size: Steps | None, **parts: Unpack[Parts]) -> Method:
    """Initialization auxiliary without truncation: φ(x, z) = F(x, y_K(x, z))."""
    return _method(inner_steps, parts, GradientDescent(step_size), start="auxiliary")


def ia_gm_a(
    inner_steps: int, step_size: Steps | None, sequence: Literal["paper", "fista"] = "paper", **parts: Unpack[Parts]
) -> Method:
    """IA-GM(A), Section 3.2: the auxiliary with Nesterov's dynamics, Eq. (yk_def2)."""
    return _method(inner_steps, parts, Nesterov(step_size, sequence), start="auxiliary")


def iaptt_gm(inner_steps: int, step_size: Steps | None, **parts: Unpack[Parts]) -> Method:
    """IAPTT-GM, Algorithm 1: φ_K(x, z) = max over 1 ≤ k ≤ K of F(x, y_k(x, z))."""
    return _method(inner_steps, parts, GradientDescent(step_size), select=pessimistic(), start="auxiliary")


def maml(inner_steps: int, step_size: Steps | None, **parts: Unpack[Parts]) -> Method:
    """MAML (Finn et al. 2017): the start z is all there is to learn; x is empty, tasks are a vmap of φ."""
    return _method(inner_steps, parts, GradientDescent(step_size), start="auxiliary")


def fomaml(inner_steps: int, step_size: Steps | None, **parts: Unpack[Parts]) -> Method:
    """First-order MAML (Finn et al. 2017)."""
    return _method(inner_steps, parts, GradientDescent(step_size), derivative=FirstOrder(), start="auxiliary")


def reptile(inner_steps: int, step_size: Steps | None, **parts: Unpack[Parts]) -> Method:
    """Reptile (Nichol et al. 2018)."""
    return _method(inner_steps, parts, GradientDescent(step_size), derivative=Displacement(), start="auxiliary")


RECIPES = {
    recipe.__name__: recipe
    for recipe in (rhg, t_rhg, fhg, bda, ls, ns, one_step, ia_gm, ia_gm_a, iaptt_gm, maml, fomaml, reptile)
}


def _method(inner_steps: int, parts: Parts, dynamics: Dynamics, **recipe: Any) -> Method:
    chosen: dict[str, Any] = {"dynamics": dynamics, **recipe, **parts}
    return Method(inner_steps, **chosen)
