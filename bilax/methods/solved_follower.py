"""Descent of Φ(x) = F(x, y(x)) with y(x) a solved follower: quasi-Newton steps with a line search, within bounds.

One outer step is one evaluation of Φ and its derivative, so that the compiled program holds it once: the search along a
line is in the carry.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from bilax.follower.lbfgs import Pairs, forget, no_pairs, quasi_newton, remember, spectral
from bilax.gradient.method import Method
from bilax.gradient.phi import approximate
from bilax.methods.algorithm import Evaluation
from bilax.methods.indifferent_follower import optimistic
from bilax.problem.problem import Problem
from bilax.problem.terms import tangent
from bilax.problem.trees import choose

MOST_TRIALS = 20
"""lengths that are tried along one line"""
STALLED = (100, 1e-5)
"""evaluations in which F must fall by this share of all that it fell: along directions in which nothing is to be had a
leader may else creep for ever"""
REFITS = 3
"""how often in a row, at one point, a follower that took all its steps without arriving goes on from where it is"""
STUCK = 1e-4
"""share of all that was gained, or that F varies by next to the end, which a step promises, and no length of it gives,
where the end is doubtful. A run that begins where it ends has gained nothing, and its slope is not quite zero"""
HALVING = 20
"""evaluations after which the better half of the starts goes on alone; the next half after twice as many"""


class Found(NamedTuple):
    """What is known at a point of the leader."""

    x: PyTree
    value: Array
    slope: Array
    """of Φ, as a flat vector"""
    y: PyTree
    lower: Array
    residual: Array
    steps: Array
    solved: Array


class Carry(NamedTuple):
    """All starts, along a leading axis, and how many rounds are left."""

    searches: "Search"
    starts: PyTree
    rounds: Array


class Search(NamedTuple):
    """One start of the leader: where it is, and the search along the line it is on."""

    here: Found
    best: Found
    """the lowest on this line so far that descends enough"""
    taken: Array
    """how far away that is; 0 if there is none"""
    direction: Array
    length: Array
    low: Array
    high: Array
    trials: Array
    pairs: Pairs
    alpha: Array
    """the length of a gradient step"""
    evaluations: Array
    failures: Array
    """lines in a row on which nothing descended"""
    promised: Array
    """what a step was to gain where the first of these lines began; 0 if F was then met at a kink"""
    varied: Array
    """how much F differed from here at most on these lines"""
    refits: Array
    gained: Array
    mark: Array
    """what had been gained when it was last looked whether anything still is"""
    marked: Array
    """after how many evaluations that was"""
    fresh: Array
    """whether `here` is a point that has not been evaluated yet"""
    done: Array


class SolvedFollower(eqx.Module):
    """Made by `bilax.auto`. Each start of the leader goes its own way; the lowest is the run's point."""

    method: Method
    """how the follower is solved, and Φ differentiated"""
    more_starts: PyTree
    """leader starts beside x0, along a leading axis; None for no more"""
    rounds: int = 0
    """how often, when all have ended, each start takes the best point with some coordinates of its own start"""
    tolerance: float = 1e-4
    """of the leader: √(what a step may gain / what has been gained)"""
    memory: int = 40
    lean: float = 0.0
    """the weight of F in what the follower minimises, so that ties go to the leader"""
    prepares = True
    """The first turn of the loop evaluates the starts: in `init`, F and its derivative would be compiled once more."""
    tasks: bool = False
    """whether y and the data have a leading axis, one entry per task: F and f are the means over them"""

    def init(self, problem: Problem, x0: PyTree, y0: PyTree, data: tuple[Any, ...]) -> Carry:
        starts = jax.tree.map(lambda leaf: leaf[None], x0)
        if self.more_starts is not None:
            starts = jax.tree.map(lambda a, b: jnp.concatenate([a, b.astype(a.dtype)]), starts, self.more_starts)
        like = jax.eval_shape(lambda: self.evaluate(problem, x0, y0, data))
        searches = jax.vmap(lambda x: self._unknown(like, x, y0))(starts)
        return Carry(searches, starts, jnp.asarray(self.rounds))

    def step(self, problem: Problem, carry: Carry, data: tuple[Any, ...], key: Array) -> tuple[Carry, Evaluation]:
        def lane(search):
            return jax.lax.cond(search.done, lambda: search, lambda: self._advance(problem, search, data))

        here = jax.tree.map(lambda leaf: leaf[_best(carry)], carry.searches.here)
        found = Evaluation(here.y, here.value, here.lower, here.residual, grad_x=here.slope, solved=here.solved)
        ended = jnp.all(carry.searches.done)
        stuck = jax.tree.map(lambda leaf: leaf[_best(carry)], self._stuck(carry.searches))
        found = found._replace(follower_steps=here.steps, converged=ended & (carry.rounds == 0), doubtful=stuck)
        found = found._replace(info=here)
        searches = choose(ended & (carry.rounds > 0), self._around_the_best(carry, key), carry.searches)
        fresh, searches = searches.fresh, jax.lax.map(lane, searches)
        searches = _drop_the_worse(self._without_the_lost(searches, fresh))
        return carry._replace(searches=searches, rounds=jnp.where(ended, carry.rounds - 1, carry.rounds)), found

    def point(self, carry: Carry) -> tuple[PyTree, PyTree]:
        here = jax.tree.map(lambda leaf: leaf[_best(carry)], carry.searches.here)
        return here.x, here.y

    def _around_the_best(self, carry: Carry, key: Array) -> Search:
        """Each search anew, from the best point with a fifth of its coordinates as they were at the search's start.

        The best itself stays as it is, and ended.
        """
        best = _best(carry)
        winner = jax.tree.map(lambda leaf: leaf[best], carry.searches)

        def one(i, start, search):
            flat, unravel = ravel_pytree(winner.here.x)
            drawn = jax.random.bernoulli(jax.random.fold_in(key, i), 0.2, flat.shape)
            x = unravel(jnp.where(drawn, ravel_pytree(start)[0], flat))
            here = winner.here._replace(x=x, value=jnp.full_like(winner.here.value, jnp.inf))
            fresh = search._replace(
                here=here,
                length=jnp.zeros_like(search.length),
                direction=jnp.zeros_like(search.direction),
                pairs=forget(search.pairs),
                gained=winner.gained,
                mark=winner.gained,
                marked=jnp.zeros_like(search.marked),
                evaluations=jnp.zeros_like(search.evaluations),
                failures=jnp.zeros_like(search.failures),
                refits=jnp.zeros_like(search.refits),
                varied=jnp.zeros_like(search.varied),
                fresh=jnp.asarray(True),
                done=jnp.asarray(False),
            )
            return choose(i == best, search._replace(evaluations=fresh.evaluations), fresh)

        return jax.vmap(one)(jnp.arange(carry.searches.done.size), carry.starts, carry.searches)

    def evaluate(self, problem: Problem, x: PyTree, y: PyTree, data: tuple[Any, ...]) -> Found:
        """Φ and its slope at x, the follower solved from y."""
        phi = approximate(optimistic(problem, self.lean), self.method)

        def of_one(y, *data):
            (value, info), slope = jax.value_and_grad(phi, has_aux=True)(x, y, *data)
            lower = info.lower - self.lean * value
            return Found((), value, ravel_pytree(slope)[0], info.y, lower, info.residual, info.steps, info.solved)

        # One task after the other: side by side, each would take the steps and the ways of all.
        found = _joined(jax.lax.map(lambda own: of_one(*own), (y, *data))) if self.tasks else of_one(y, *data)
        # A slope that is not to be had is as bad as a value that is not.
        return found._replace(x=x, value=jnp.where(jnp.all(jnp.isfinite(found.slope)), found.value, jnp.inf))

    def _unknown(self, like: Found, x: PyTree, y: PyTree) -> Search:
        """A search from a point that has not been evaluated; `like` tells shapes."""
        here = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        y = jax.tree.map(lambda one, leaf: jnp.asarray(one, leaf.dtype), y, like.y)
        here = here._replace(x=x, y=y, value=here.value + jnp.inf, solved=jnp.ones_like(here.solved))
        zero, count, flat = jnp.zeros_like(here.value), jnp.zeros((), int), ravel_pytree(x)[0]
        numbers = zero, jnp.zeros_like(flat), zero, zero, zero, count, no_pairs(self.memory, flat), zero, count, count
        return Search(here, here, *numbers, zero, zero, count, zero, zero, count, jnp.asarray(True), jnp.asarray(False))

    def _without_the_lost(self, searches: Search, fresh: Array) -> Search:
        """Where the follower takes all its steps and does not arrive, one start is enough to see how far one gets."""
        lost = fresh & ~searches.fresh & (searches.refits == 0) & self._unsolved(searches)
        alone = jnp.all(lost) & (jnp.arange(lost.size) == _lowest(searches))
        return searches._replace(done=searches.done | (lost & ~alone))

    def _unsolved(self, search: Search) -> Array:
        """Whether the follower took all its steps and may not have arrived."""
        return search.here.steps >= self.method.inner_steps

    def _stuck(self, search: Search) -> Array:
        """Whether nothing descended though F's slope promises a good deal: it is not the slope of what is followed."""
        return (search.failures > 0) & (search.promised > STUCK * jnp.maximum(search.gained, search.varied))

    def _refit(self, search: Search) -> Search:
        """The same point once more, the follower going on from where it is.

        A value of F that a solved follower does not grant can be better than all around it.
        """
        zero = jnp.zeros_like(search.length)
        again = {
            "length": zero,
            "direction": jnp.zeros_like(search.direction),
            "failures": jnp.zeros_like(search.failures),
        }
        return search._replace(**again, refits=search.refits + 1, fresh=jnp.asarray(True), done=jnp.asarray(False))

    def _advance(self, problem: Problem, search: Search, data: tuple[Any, ...]) -> Search:
        """Tries one length; then another on the same line, or a new line from the best."""
        here, length = search.here, search.length
        flat, unravel = ravel_pytree(here.x)
        point = problem.x_set.project(unravel(flat + length * search.direction))
        trial = self.evaluate(problem, point, here.y, data)
        promise = search.direction @ here.slope
        rounding = 4 * jnp.finfo(flat.dtype).eps * jnp.abs(here.value)
        enough = jnp.isfinite(trial.value) & (trial.value <= here.value + 1e-4 * length * promise + rounding)
        slope_there = trial.slope @ search.direction
        far = slope_there >= 0.9 * promise
        better = enough & ((search.taken == 0) | (trial.value <= search.best.value))
        low, high = jnp.where(enough, length, search.low), jnp.where(enough, search.high, length)
        differs = jnp.where(jnp.isfinite(trial.value - here.value), jnp.abs(trial.value - here.value), 0)
        search = search._replace(
            varied=jnp.maximum(search.varied, differs),
            best=choose(better, trial, search.best),
            taken=jnp.where(better, length, search.taken),
            low=low,
            high=high,
            length=jnp.where(jnp.isfinite(high), (low + high) / 2, 2 * low),
            trials=search.trials + 1,
            evaluations=search.evaluations + 1,
            # At a kink F rises however short the step, and its slope there says so: nothing was promised in vain.
            promised=jnp.where((slope_there >= 0) & (search.trials + 1 >= MOST_TRIALS), 0, search.promised),
        )
        ends = (enough & far) | (search.trials >= MOST_TRIALS)
        # What began with an unknown point, or one whose follower goes on, only learns what is there.
        alpha = jnp.where(search.refits > 0, search.alpha, _first_length(trial))
        arrived = choose(search.fresh, search._replace(here=trial, alpha=alpha), self._arrive(search))
        after = choose(ends | search.fresh, self._new_line(problem, arrived), search)
        unsolved = self._unsolved(after) & (after.refits < REFITS) & jnp.isfinite(after.here.value)
        in_vain = after.done | (after.taken == 0) & (after.trials >= 3)
        return choose(unsolved & in_vain, self._refit(after), after)

    def _arrive(self, search: Search) -> Search:
        """Moves to the best point of the line, and learns from the way there."""
        moved = search.taken > 0
        after = choose(moved, search.best, search.here)
        step = ravel_pytree(after.x)[0] - ravel_pytree(search.here.x)[0]
        change = after.slope - search.here.slope
        return search._replace(
            here=after,
            pairs=remember(search.pairs, step, change, moved),
            alpha=jnp.where(moved, spectral(step, change, search.alpha), search.alpha / 16),
            failures=jnp.where(moved, 0, search.failures + 1),
            refits=jnp.where(moved, 0, search.refits),
            varied=jnp.where(moved, 0, search.varied),
            gained=search.gained + search.here.value - after.value,
        )

    def _new_line(self, problem: Problem, search: Search) -> Search:
        """A quasi-Newton direction along the face that is active, and towards it; or the end."""
        flat, unravel = ravel_pytree(search.here.x)
        slope, alpha = search.here.slope, search.alpha
        moved = unravel(flat - alpha * slope)
        face = tangent(problem.x_set, moved, alpha)
        assert face is not None, "auto asks for flat sets"

        def free(v):
            return ravel_pytree(face(unravel(v)))[0]

        to_face = ravel_pytree(problem.x_set.project(moved))[0] - flat
        along = quasi_newton(search.pairs, -free(slope), alpha, free)
        along = jnp.where(along @ slope < 0, along, -alpha * free(slope))
        direction = along + to_face - free(to_face)
        gain = -(direction @ slope) / 2
        rounding = 4 * jnp.finfo(flat.dtype).eps * jnp.abs(search.here.value)
        arrived = gain <= self.tolerance**2 * search.gained + rounding
        due = search.evaluations >= search.marked + STALLED[0]
        arrived |= due & (search.gained - search.mark <= STALLED[1] * search.gained)
        zero = jnp.zeros_like(search.length)
        return search._replace(
            taken=zero,
            direction=direction,
            length=zero + 1,
            low=zero,
            high=zero + jnp.inf,
            trials=jnp.zeros_like(search.trials),
            promised=jnp.where(search.failures > 0, search.promised, gain),
            mark=jnp.where(due, search.gained, search.mark),
            marked=jnp.where(due, search.evaluations, search.marked),
            fresh=jnp.asarray(False),
            done=search.done | arrived | (search.failures >= 3) | ~jnp.isfinite(gain + search.here.value),
        )


def _joined(each: Found) -> Found:
    """What was found of each task, as of one follower."""
    return each._replace(
        value=jnp.mean(each.value),
        slope=jnp.mean(each.slope, axis=0),
        lower=jnp.mean(each.lower),
        residual=jnp.linalg.norm(each.residual),
        steps=jnp.max(each.steps),
        solved=jnp.all(each.solved),
    )


def _best(carry: Carry) -> Array:
    return _lowest(carry.searches)


def _lowest(searches: Search) -> Array:
    value = searches.here.value
    return jnp.argmin(jnp.where(jnp.isfinite(value), value, jnp.inf))


def _first_length(here: Found) -> Array:
    """The first step goes a tenth of the way from the origin, or a tenth of 1."""
    norm = jnp.linalg.norm(here.slope)
    return 0.1 * jnp.maximum(jnp.linalg.norm(ravel_pytree(here.x)[0]), 1) / jnp.where(norm > 0, norm, 1)


def _drop_the_worse(carry: Search) -> Search:
    """Successive halving: of many starts the better half goes on, again and again, until one is left."""
    rank = jnp.argsort(jnp.argsort(jnp.where(jnp.isfinite(carry.here.value), carry.here.value, jnp.inf)))
    most = jnp.max(carry.evaluations)
    kept = carry.done.size
    for halvings in range(1, carry.done.size.bit_length()):
        kept = jnp.where(most >= HALVING * 2 ** (halvings - 1), max(carry.done.size >> halvings, 1), kept)
    return carry._replace(done=carry.done | (rank >= kept))
