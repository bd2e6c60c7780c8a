"""Learned adaptation: what a task learns with is learned over tasks, as part of the leader x.

method      x                                      follower's step                            value
meta_sgd    α, a tree like y                       y − α ∘ ∇f                                 F(y_K)
maml_pp     α, for each leaf of y K numbers        y − α_k ∇f                                 Σ_k w_k F(y_k)
t_net       T, for each leaf a square matrix       y − α ∇f T Tᵀ                              F(y_K)
imaml       where tasks begin, a tree like y       solves f + λ/2 ‖y − x‖² (near_leader)      F(y_K), implicitly

The first three also learn where tasks begin, z. x may be more than this: `rates` and `warps` then pick it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from bilax.follower.learned import LearnedDescent
from bilax.follower.trajectory import EveryStep
from bilax.gradient.method import Method
from bilax.methods.recipes import ls
from bilax.methods.stochastic import check_rate

Pick = Callable[[PyTree], PyTree]
"""what the follower sees of the leader -> the part of it that is meant"""


def _all_of_it(leader: PyTree) -> PyTree:
    return leader


class _PerVariable(eqx.Module):
    rates: Pick

    def __call__(self, k: Any, leader: PyTree, slope: PyTree) -> PyTree:
        rates = jax.tree.broadcast(self.rates(leader), slope)
        return jax.tree.map(lambda rate, s: (rate * s).astype(s.dtype), rates, slope)


class _PerStep(eqx.Module):
    rates: Pick

    def __call__(self, k: Any, leader: PyTree, slope: PyTree) -> PyTree:
        rates = jax.tree.broadcast(self.rates(leader), slope)
        return jax.tree.map(lambda rate, s: (rate[k] * s).astype(s.dtype), rates, slope)


class _Warped(eqx.Module):
    step_size: float
    warps: Pick

    def __call__(self, k: Any, leader: PyTree, slope: PyTree) -> PyTree:
        def along(warp, s):
            return (self.step_size * (s @ warp @ warp.T)).astype(s.dtype)

        return jax.tree.map(along, self.warps(leader), slope)


def meta_sgd(inner_steps: int, rates: Pick = _all_of_it) -> Method:
    """Meta-SGD (Li, Zhou, Chen and Li 2017): a step length for every variable, learned with the start z.

    x is a tree like y with a length for each number of it, such as `jax.tree.map(lambda leaf: 0 * leaf + 0.1, y0)`, or
    with a single number for a leaf. `rates` picks them from x (or its context) where there is more, or makes them:
    `lambda x: jnp.exp(x["log_rates"])`. They may become negative, as in the paper.
    """
    return Method(inner_steps, LearnedDescent(_PerVariable(rates)), start="auxiliary")


def maml_pp(inner_steps: int, rates: Pick = _all_of_it, weights: Sequence[float] | None = None) -> Method:
    """MAML++ (Antoniou, Edwards and Storkey 2019): a step length for each step and layer, and a loss after each step.

    x is a tree like y with `inner_steps` numbers for each leaf, or one such array for all; z is learned too. The leader
    descends Σ_k w_k F(x, y_k), `weights` being w_1, …, w_K, equal and of sum 1 if not given. The paper shifts them to
    the last step while it trains: solve again from there with `weights=[0, …, 0, 1]`. Its batch statistics for each
    step are a matter of the network, and not here.
    """
    select = EveryStep(None if weights is None else tuple(weights))
    return Method(inner_steps, LearnedDescent(_PerStep(rates)), select, start="auxiliary")


def t_net(inner_steps: int, step_size: float, warps: Pick = _all_of_it) -> Method:
    """T-net (Lee and Choi 2018, MT-net without its masks): steps along ∇f T Tᵀ, T learned with the start z.

    x has for each leaf of y, whose last axis has n entries, a matrix T of n rows, at first
    `jax.tree.map(lambda leaf: jnp.eye(leaf.shape[-1]), y0)`. Weights W Tᵀ with plain steps of W are weights y with
    these steps, so T is a preconditioner that tasks do not change. WarpGrad's (Flennerhag et al. 2020) is a network
    between the layers: a `bilax.LearnedDescent` of your own.
    """
    check_rate("step_size", step_size)
    return Method(inner_steps, LearnedDescent(_Warped(step_size, warps)), start="auxiliary")


def imaml(inner_steps: int, step_size: float, tolerance: float | None = None, max_steps: int = 5) -> Method:
    """iMAML (Rajeswaran, Finn, Kakade and Levine 2019): tasks begin at x and stay near to it; implicit derivative.

    To be run on `bilax.near_leader(problem, weight)`; x is a tree like y. The derivative is
    λ (∂²_yy f + λ)⁻¹ ∂_y F, by at most `max_steps` steps of conjugate gradients, whatever error they leave; a
    `tolerance` ends a run whose system is not solved to it.
    """
    return ls(inner_steps, step_size, tolerance, max_steps, start=_at_the_leader)


def _at_the_leader(x: PyTree, *data: Any) -> PyTree:
    return x
