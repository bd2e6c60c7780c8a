# %% [markdown]
# # 30 penalties, and 10,000
#
# **In short.** One penalty is found by a grid as well as by anything. Thirty penalties, one per feature, are out of a grid's reach,
# and the gradient finds a validation loss that random search and Optuna do not come near in the same time. But the lowest validation loss
# is not the best model: thirty numbers over-fit one validation set, and five folds too if F is minimised to its end; ten thousand do so at once,
# and the test loss tells. The remedy is a leader that is less free.
#
# ## The problem
#
# Logistic regression on breast-cancer data, a penalty $e^{x_j}$ for each of 30 features. The follower fits the weights, the leader
# wants a low validation loss.

# %%
import itertools
import os
import time

import bilax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import optuna
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import KFold

quick = "BILAX_QUICK" in os.environ
features, labels = load_breast_cancer(return_X_y=True)
features = jnp.asarray((features - features.mean(0)) / features.std(0))
labels = jnp.asarray(labels, float)
order = np.random.default_rng(0).permutation(len(labels))
train, valid, test = (order[:150], order[150:300], order[300:])


def losses(weights, part):
    scores = features[part] @ weights[:-1] + weights[-1]
    return jax.nn.softplus(scores) - labels[part] * scores


def loss(weights, part):
    return jnp.mean(losses(weights, part))


def penalty(x, weights):
    return 0.5 * jnp.sum(jnp.exp(x) * weights[:-1] ** 2)


problem = bilax.Problem(
    upper=lambda x, weights: loss(weights, valid),
    lower=lambda x, weights: loss(weights, train) + penalty(x, weights),
    x_set=bilax.Box(-12.0, 6.0),
)
began = time.perf_counter()
tuned = bilax.solve(problem, bilax.auto(), np.full(30, -3.0), np.zeros(31), steps=30 if quick else 2000)
seconds = {"gradient": time.perf_counter() - began}
print(tuned.plan)
print(f"validation {tuned.upper:.4f}, test {loss(tuned.y, test):.4f}, {seconds['gradient']:.0f} s with compilation")

# %% [markdown]
# ## Grid, random search, Optuna
#
# All three see the same function: fit the weights for given penalties (by L-BFGS here, too), return the validation loss. The grid
# has one common penalty, as people do; the other two have all thirty, and as long as the gradient took.

# %%
solver = bilax.Method(500, bilax.LBFGS(), follower_tolerance=1e-6)
phi = jax.jit(bilax.approximate(problem, solver))


def trial(x):
    value, info = phi(jnp.asarray(x, jnp.float32), jnp.zeros(31))
    return float(value), info.y


budget = 1.0 if quick else seconds["gradient"]
rng = np.random.default_rng(1)
found = {"gradient": (float(tuned.upper), float(loss(tuned.y, test)))}
best = {"grid": [], "random": [], "optuna": []}
for name, points in (
    ("grid", [np.full(30, value) for value in np.linspace(-12, 6, 5 if quick else 40)]),
    ("random", (rng.uniform(-12, 6, 30) for _ in itertools.count())),
):
    began, results = time.perf_counter(), []
    for x in points:
        results.append(trial(x))
        seconds[name] = time.perf_counter() - began
        if name != "grid" and seconds[name] > budget:
            break
    best[name] = np.minimum.accumulate([value for value, _ in results])
    value, weights = min(results, key=lambda result: result[0])
    found[name] = value, float(loss(weights, test))

optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
began = time.perf_counter()
study.optimize(lambda t: trial([t.suggest_float(f"x{j}", -12, 6) for j in range(30)])[0], timeout=budget)
seconds["optuna"] = time.perf_counter() - began
best["optuna"] = np.minimum.accumulate([t.value for t in study.trials])
found["optuna"] = study.best_value, float(loss(trial([study.best_params[f"x{j}"] for j in range(30)])[1], test))

for name, (value, unseen) in found.items():
    print(f"{name:9} validation {value:.4f}   test {unseen:.4f}   {seconds[name]:5.1f} s")

# %%
figure, axis = plt.subplots(figsize=(6.4, 3), layout="constrained")
for name, values in best.items():
    axis.plot(np.arange(1, len(values) + 1), values, label=f"{name}: {values[-1]:.3f}")
axis.axhline(float(tuned.upper), color="k", ls="--", lw=1, label=f"gradient: {float(tuned.upper):.3f}")
axis.set(xlabel="trials", ylabel="best validation loss so far", xscale="log")
axis.legend()

# %% [markdown]
# ## The lowest is not the best
#
# Look at the column *test*. The leader has thirty degrees of freedom and 150 validation examples; it uses them. Two remedies come to mind:
# a validation that is harder to please, and a leader that is less free. For the first, take five folds of scikit-learn's `KFold`, each
# with weights of its own. The folds are tasks (`tasks=True`): the leaves of `data` have an axis for them, here one row of zeros and ones
# for each, with ones where an example is held out, and F is the mean over them. For the second, one penalty for all; or thirty that a term in F holds
# together, as if their logarithms were normal around their mean with a standard deviation of ½ (`bilax.sklearn.TunedLogisticRegression` does that).

# %%
pool = order[:300]
held = np.zeros((5, len(pool)), np.float32)
for row, (_, part) in zip(held, KFold(5).split(pool), strict=True):
    row[part] = 1
folds = bilax.Problem(
    upper=lambda x, weights, held: jnp.average(losses(weights, pool), weights=held),
    lower=lambda x, weights, held: jnp.average(losses(weights, pool), weights=1 - held) + penalty(x, weights),
    x_set=bilax.Box(-12.0, 6.0),
)
one = bilax.Problem(
    upper=lambda x, weights, held: folds.upper(jnp.full(30, x), weights, held),
    lower=lambda x, weights, held: folds.lower(jnp.full(30, x), weights, held),
    x_set=bilax.Box(-12.0, 6.0),
)
together = bilax.Problem(
    upper=lambda x, weights, held: (
        folds.upper(x, weights, held) + jnp.sum((x - x.mean()) ** 2) / (2 * 0.5**2 * len(pool))
    ),
    lower=folds.lower,
    x_set=folds.x_set,
)
folded, near, common = (
    bilax.solve(cv, bilax.auto(), x0, np.zeros(31), data=(held,), tasks=True, steps=30 if quick else 2000)
    for cv, x0 in ((folds, np.full(30, -3.0)), (together, np.full(30, -3.0)), (one, -3.0))
)
print(folded.plan)
print("F of each fold", jax.vmap(folds.upper, (None, 0, 0))(folded.x, folded.y, held))

# %% [markdown]
# No fold's weights are for use: with the penalties found, they are fitted once more on all that may be seen.

# %%
refit = jax.jit(bilax.approximate(bilax.Problem(problem.upper, lambda x, w: loss(w, pool) + penalty(x, w)), solver))
for name, x in (
    ("30 penalties, one validation set", tuned.x),
    ("30 penalties, five folds", folded.x),
    ("30 held together, five folds", near.x),
    ("one penalty, five folds", jnp.full(30, common.x)),
):
    weights = refit(jnp.asarray(x, jnp.float32), jnp.zeros(31))[1].y
    print(f"{name:34} test {loss(weights, test):.4f}   (weights fitted again on all 300)")

# %% [markdown]
# Folds alone are no remedy: each penalty has found what suits these five parts. What helps is less freedom, and on these data one penalty
# is as good as any. [How sure is the answer?](../how-sure.md) has the checks that tell before the test set does.
#
# ## 10,000 penalties
#
# A gradient costs about as much for ten thousand numbers as for one. Ridge regression with 10,000 features of which 20 matter, 400
# examples: far more penalties than examples, so the validation set *will* be over-fitted. A third part tells, and stops the run.

# %%
count = 1000 if quick else 10_000
rng = np.random.default_rng(2)
truth = np.zeros(count)
truth[:20] = 1.0
inputs = rng.normal(size=(600, count)).astype(np.float32)
targets = (inputs @ truth + rng.normal(size=600)).astype(np.float32)
parts = {"train": slice(0, 200), "valid": slice(200, 400), "stop": slice(400, 500), "test": slice(500, 600)}


def error(w, part):
    return jnp.mean((inputs[parts[part]] @ w - targets[parts[part]]) ** 2)


ridge = bilax.Problem(
    upper=lambda x, w: error(w, "valid"), lower=lambda x, w: error(w, "train") + jnp.sum(jnp.exp(x) * w**2) / 200
)
method = bilax.Method(
    100, bilax.LBFGS(), derivative=bilax.Implicit(tolerance=None, max_steps=50), start="warm", follower_tolerance=1e-3
)
watch = bilax.EarlyStopping(
    lambda state: {name: float(error(state.z, name)) for name in ("stop", "valid", "test")}, patience=60, every=5
)
many = bilax.solve(
    ridge, method, np.full(count, 2.0, np.float32), np.zeros(count, np.float32),
    steps=20 if quick else 300, optimizer=optax.adam(0.3), callbacks=[watch],
)  # fmt: skip
curves = {name: [values[name] for values in watch.values] for name in ("valid", "stop", "test")}
print(f"{count:,} penalties, {many.steps} outer steps; best on the third part at step {watch.best_step}")

# %%
figure, axis = plt.subplots(figsize=(6.4, 3), layout="constrained")
for name, label in (("valid", "what is tuned on"), ("stop", "what stops it"), ("test", "test")):
    axis.plot(watch.steps, curves[name], label=label)
axis.axvline(watch.best_step, color="k", ls=":", lw=1)
axis.set(xlabel="outer step", ylabel="mean squared error", yscale="log")
axis.legend()

# %% [markdown]
# The curve that is tuned on lies far below the other two, which hardly move: nothing was learned that holds for other data. **Never report the
# number you tuned on.**
