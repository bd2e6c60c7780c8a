"""How near hyper-cleaning with ReLU comes to this machine's matrix-multiply rate."""

import dataclasses
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

import bilax
from bilax.app.show import Arg, show_table
from bilax.experiments.cleaning import problem as cleaning


def roofline(examples: int = 5000, inner_steps: int = 5, repeats: int = 5) -> dict[str, float]:
    """Measures, in one run, the rate of a plain matrix product and those of φ and of φ with its gradient.

    Only the products that the mathematics needs are counted, at two operations per multiply-add. With n
    examples, d inputs, h hidden units, c classes, p = n d h and q = n h c, they are

        scores         2 (p + q)      the two layers
        follower step  4 p + 6 q      scores; ∂W₁, ∂W₂ and the hidden units' gradient
        its pullback   6 p + 16 q     scores and hidden gradient again, the tangent of both, the adjoint

    φ takes K steps, one scoring by F after each, and one at the chosen iterate; its gradient adds k̄ pullbacks and
    the gradient of F there.
    """
    d, h, c = 784, 300, 10
    p, q = examples * d * h, examples * h * c
    step, scores, pullback = 4 * p + 6 * q, 2 * (p + q), 6 * p + 16 * q
    keys = jax.random.split(jax.random.key(0), 4)
    inputs = [jax.random.uniform(key, (examples, d), jnp.float32) for key in keys[:2]]
    labels = [cleaning.targets(jax.random.randint(key, (examples,), 0, c), c).astype(jnp.float32) for key in keys[2:]]
    batch = cleaning.Batch(inputs[0], labels[0], inputs[1], labels[1])
    z = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), cleaning.network(keys[0], d, c, h))
    # IAPTT-GM scores every iterate and sweeps back from the worst; here the longest sweep is wanted, so the best.
    phi = bilax.approximate(cleaning.problem("relu"), bilax.iaptt_gm(inner_steps, 0.03, select=bilax.ArgMax(_later)))
    x = jnp.zeros(examples, jnp.float32)
    value = jax.jit(lambda x, z, batch: phi(x, z, batch)[0])
    gradient = jax.jit(jax.grad(phi, (0, 1), has_aux=True))

    k_bar = int(phi(x, z, batch)[1].k_bar)
    forward = inner_steps * (step + scores) + scores
    both = inner_steps * (step + scores) + k_bar * pullback + step
    square = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(lambda a, b: a @ b.T)
    rate = max(
        2 * p / _seconds(product, repeats, inputs[0], z[0][0]),
        2 * 2048**3 / _seconds(product, repeats, square, square),
    )
    forward_rate = forward / _seconds(value, repeats, x, z, batch)
    both_rate = both / _seconds(gradient, repeats, x, z, batch)
    return {
        "matrix product, GFLOP/s": rate / 1e9,
        "forward, GFLOP/s": forward_rate / 1e9,
        "forward and backward, GFLOP/s": both_rate / 1e9,
        "forward, share": forward_rate / rate,
        "forward and backward, share": both_rate / rate,
    }


def _later(follower: bilax.Follower, y: Any) -> Any:
    """Scores by F, as IAPTT-GM does, but falls with F, so that a descending follower is followed to its end."""
    return -follower.upper(y)


def _seconds(function: Callable[..., Any], repeats: int, *arguments: Any) -> float:
    jax.block_until_ready(function(*arguments))
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        best = min(best, time.perf_counter() - began)
    return best


@dataclasses.dataclass
class Roofline:
    """Forward and backward passes of hyper-cleaning with ReLU against this machine's matrix-multiply rate."""

    examples: Annotated[int, Arg(help="examples in each of the two sets")] = 5000
    inner_steps: Annotated[int, Arg(help="K")] = 5
    repeats: Annotated[int, Arg(help="the best of so many is taken")] = 5

    def main(self) -> None:
        """Measures and prints."""
        measured = roofline(self.examples, self.inner_steps, self.repeats)
        show_table("hyper-cleaning with ReLU", ("what", "value"), list(measured.items()))
