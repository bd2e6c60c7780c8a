"""The work that the programs are given: data, objectives and how a process takes orders. NumPy and JAX alone.

Every follower is convex with one log-penalty x as its leader, which a validation loss judges.
"""

import json
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import softplus

CLASSES = 10
SVM_CLASSES = 5
SMOOTHING = 0.1
"""of the hinge, in the SVM with a box: the dual's own quadratic term, without which it has many solutions"""
RATIO = 0.1
"""the elastic net's squares beside its absolute values"""


class Work(NamedTuple):
    """A follower f(x, y, *data) + term over a set, named by `shape`, and a leader's loss F(x, y, *data)."""

    lower: Callable[..., Any]
    upper: Callable[..., Any]
    shape: str
    """"plain", "lasso", "elastic net", "non-negative", "box" ([0, 1]) or "simplex" (each row)"""


def _squares(x, w, train, target, held_out, held_out_target):
    return 0.5 * jnp.mean((train @ w - target) ** 2)


def _held_out_squares(x, w, train, target, held_out, held_out_target):
    return jnp.mean((held_out @ w - held_out_target) ** 2)


def _with_squares(fit):
    def lower(x, w, *data):
        return fit(x, w, *data) + 0.5 * jnp.exp(x) * jnp.sum(w**2)

    return lower


def _logistic(x, w, train, target, held_out, held_out_target):
    return jnp.mean(softplus(-target * (train @ w)))


def _held_out_logistic(x, w, train, target, held_out, held_out_target):
    return jnp.mean(softplus(-held_out_target * (held_out @ w)))


def _cross_entropy(scores, target):
    return jnp.mean(jax.nn.logsumexp(scores, axis=1) - jnp.sum(scores * target, axis=1))


def _softmax(x, w, train, target, held_out, held_out_target):
    return _cross_entropy(train @ w, target)


def _held_out_softmax(x, w, train, target, held_out, held_out_target):
    return _cross_entropy(held_out @ w, held_out_target)


def _svm(x, a, train, target, held_out, held_out_target):
    w = (target * a) @ train
    return 0.5 * jnp.exp(-x) * (w @ w) / a.size + 0.5 * SMOOTHING * jnp.sum(a**2) - jnp.sum(a)


def _held_out_svm(x, a, train, target, held_out, held_out_target):
    w = jnp.exp(-x) * ((target * a) @ train) / a.size
    return jnp.mean(softplus(-held_out_target * (held_out @ w)))


def svm_weights(x, a, train, target):
    """The primal weights of a multiclass SVM."""
    return jnp.exp(-x) * train.T @ (target - a)


def _multiclass_svm(x, a, train, target, held_out, held_out_target):
    w = train.T @ (target - a)
    return 0.5 * jnp.exp(-x) * jnp.sum(w**2) + jnp.sum(a * (target - 1))


def _held_out_multiclass_svm(x, a, train, target, held_out, held_out_target):
    return _cross_entropy(held_out @ svm_weights(x, a, train, target), held_out_target)


WORKS = {
    "ridge": Work(_with_squares(_squares), _held_out_squares, "plain"),
    "logistic": Work(_with_squares(_logistic), _held_out_logistic, "plain"),
    "softmax": Work(_with_squares(_softmax), _held_out_softmax, "plain"),
    "lasso": Work(_squares, _held_out_squares, "lasso"),
    "elastic net": Work(_squares, _held_out_squares, "elastic net"),
    "nnls": Work(_with_squares(_squares), _held_out_squares, "non-negative"),
    "svm box": Work(_svm, _held_out_svm, "box"),
    "svm simplex": Work(_multiclass_svm, _held_out_multiclass_svm, "simplex"),
}


class Given(NamedTuple):
    """What a follower of a size is solved with."""

    x: Any
    y0: Any
    data: tuple[Any, ...]


def make(name: str, size: int, seed: int) -> Given:
    """Data for `size` follower variables, in double precision."""
    random = np.random.default_rng([seed, size, sorted(WORKS).index(name)])
    if name == "svm simplex":
        features, examples = 2 * size // SVM_CLASSES, size // SVM_CLASSES
    elif name == "svm box":
        features, examples = min(size // 2, 1000), size
    else:
        features = size // CLASSES if name == "softmax" else size
        examples = min(3 * size, 3000 if size <= 1000 else 2000)
    train, held_out = (_features(random, count, features) for count in (examples, min(examples, 1000)))
    if name == "svm simplex":
        train, held_out = train / np.sqrt(features), held_out / np.sqrt(features)
    start: Any = np.zeros(features)
    if name in ("softmax", "svm simplex"):
        classes = CLASSES if name == "softmax" else SVM_CLASSES
        truth = random.standard_normal((features, classes)) / np.std(train) / np.sqrt(features)
        target, held_out_target = (
            np.eye(classes)[np.argmax(a @ truth + 0.5 * random.gumbel(size=(len(a), classes)), axis=1)]
            for a in (train, held_out)
        )
        start = np.zeros((features, classes)) if name == "softmax" else np.full((examples, classes), 1 / classes)
        return Given(np.log(0.01 if name == "softmax" else 1.0), start, (train, target, held_out, held_out_target))
    truth = random.standard_normal(features) * (random.random(features) < min(0.1, 30 / features))
    truth = np.abs(truth) + 0.0 if name == "nnls" else truth
    noisy = [a @ truth + 0.5 * np.std(a @ truth) * random.standard_normal(len(a)) for a in (train, held_out)]
    if name in ("logistic", "svm box"):
        target, held_out_target = (np.where(b > 0, 1.0, -1.0) for b in noisy)
        start = np.zeros(size) if name == "svm box" else start
    else:
        target, held_out_target = noisy
    x = np.log(0.01)
    if name in ("lasso", "elastic net"):
        x = np.log(0.1 * np.max(np.abs(train.T @ target)) / examples)
    return Given(x, start, (train, target, held_out, held_out_target))


def _features(random: np.random.Generator, count: int, features: int) -> np.ndarray:
    """Normal features, neighbours correlated."""
    drawn = random.standard_normal((count, features))
    drawn[:, 1:] += 0.7 * drawn[:, :-1]
    return drawn


def load(folder: str) -> Given:
    """What the parent wrote, in the precision of this process."""
    arrays = [jnp.asarray(np.load(path)) for path in sorted(Path(folder).glob("*.npy"))]
    return Given(arrays[0], arrays[1], tuple(arrays[2:]))


def store(given: Given, folder: Path, kind: str) -> None:
    """Writes what `load` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, array in enumerate((given.x, given.y0, *given.data)):
        np.save(folder / f"{i}.npy", np.asarray(array, kind))


def serve(hypergradient: Callable[..., Callable[..., Any]], **answers: Callable[..., Any]) -> None:
    """Does what it is told by lines of JSON until there are none.

    `hypergradient(order)` gives a function (tolerances, x, y0, *data) -> (∂φ/∂x, follower steps), with the tolerances
    of the follower and of the linear system as arrays, so that all share one program.
    """
    compiled: Any = None
    arguments: tuple[Any, ...] = ()
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "compile":
            given = load(order["folder"])
            arguments = jax.block_until_ready((given.x, given.y0, *given.data))
            began = time.perf_counter()
            compiled = jax.jit(hypergradient(order)).lower((given.x, given.x), *arguments).compile()
            answer = {"seconds": time.perf_counter() - began}
        elif order["do"] == "run":
            tolerances = tuple(jnp.asarray(order[name], arguments[0].dtype) for name in ("tolerance", "linear"))
            answer = timed(compiled, tolerances, *arguments)
        elif order["do"] == "peak":
            # ru_maxrss is at least what the process held that started this one.
            found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
            answer = {"megabytes": int(found[1]) / 1024 if found else math.nan}
        else:
            answer = answers[order["do"]](order)
        print(json.dumps(answer), flush=True)


def timed(run: Callable[..., tuple[Any, Any]], *arguments: Any) -> dict[str, Any]:
    """What it answers, and its time: the least of as many runs as 20 ms hold, for whatever disturbs only adds."""
    began, seconds, answer = time.perf_counter(), [], None
    while answer is None or time.perf_counter() - began < 0.02:
        before = time.perf_counter()
        answer = jax.block_until_ready(run(*arguments))
        seconds.append(time.perf_counter() - before)
    slope, steps = answer
    return {"seconds": min(seconds), "slope": float(slope), "steps": int(steps)}
