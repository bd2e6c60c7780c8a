# %% [markdown]
# # Mini-batches and a million parameters
#
# **In short.** Three ways, from small to large. (1) Each *follower* step sees its own mini-batch: `Problem(lower_at=...)`. (2) Each *outer* step sees
# its own batch of both levels: `data=bilax.Minibatches(...)` with any method. (3) Single-loop methods such as `bilax.soba` take one small
# step of everything per batch. Memory is what grows with parameters: the table below measures it for a million.

# %%
import os
import time

import bilax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

quick = "BILAX_QUICK" in os.environ
rng = np.random.default_rng(0)
rows, features = (500, 10) if quick else (20_000, 50)
truth = rng.normal(size=features) * (np.arange(features) < features // 2)
inputs = rng.normal(size=(2 * rows, features)).astype(np.float32)
labels = (inputs @ truth + 2 * rng.normal(size=2 * rows) > 0).astype(np.float32)
inputs, labels = jnp.asarray(inputs), jnp.asarray(labels)
lower_data, upper_data = (inputs[:rows], labels[:rows]), (inputs[rows:], labels[rows:])


def loss(w, data):
    scores = data[0] @ w
    return jnp.mean(jax.nn.softplus(scores) - data[1] * scores)


problem = bilax.Problem(
    upper=lambda x, w, upper, lower: loss(w, upper),
    lower=lambda x, w, upper, lower: loss(w, lower) + jnp.sum(jnp.exp(x) * w**2),
)
x0, w0 = jnp.full(features, -1.0), jnp.zeros(features)


def value(x):  # F with the follower solved on all data: what counts in the end
    phi = bilax.approximate(problem, bilax.Method(200, bilax.LBFGS(), follower_tolerance=1e-5))
    return float(jax.jit(phi)(x, w0, upper_data, lower_data)[0])


print(f"F at the start {value(x0):.5f}")

# %% [markdown]
# ## A batch for each outer step
#
# `Minibatches` keeps the data on the device and cuts a fresh pair of batches for every outer step, found from the step's number alone, so a
# resumed run sees the same ones. The objectives do not change.

# %%
batches = bilax.Minibatches(upper_data, lower_data, size=64)
outcomes = {}
for name, method, settings in (
    (
        "rhg, all data",
        bilax.rhg(10, 1.0, start="warm"),
        {"data": (upper_data, lower_data), "optimizer": optax.sgd(5.0)},
    ),
    ("rhg, batches of 64", bilax.rhg(10, 0.5, start="warm"), {"data": batches, "optimizer": optax.sgd(1.0)}),
    ("soba, batches of 64", bilax.soba(0.3, 0.3), {"data": batches}),
):
    steps = 20 if quick else 100 if name == "rhg, all data" else 3000
    began = time.perf_counter()
    solution = bilax.solve(problem, method, x0, w0, steps=steps, **settings)
    outcomes[name] = value(solution.x), time.perf_counter() - began, steps
    print(f"{name:20} F {outcomes[name][0]:.5f} after {steps} outer steps, {outcomes[name][1]:.1f} s with compilation")

# %% [markdown]
# Which of them is best for which problem is measured on [the page of methods](../methods.md).
#
# ## A batch for each follower step
#
# A network trained by stochastic gradients is a follower whose step k sees batch k. `lower_at(k, x, y, *data)` says so; derivatives are exact
# for the steps that were taken.

# %%
size = 64


def batch_loss(k, x, w, key):
    picks = jax.random.randint(jax.random.fold_in(key, k), (size,), 0, rows)
    return loss(w, (lower_data[0][picks], lower_data[1][picks])) + jnp.sum(jnp.exp(x) * w**2)


stochastic = bilax.Problem(
    upper=lambda x, w, key: loss(w, upper_data),
    lower=lambda x, w, key: loss(w, lower_data) + jnp.sum(jnp.exp(x) * w**2),
    lower_at=batch_loss,
)
solution = bilax.solve(
    stochastic, bilax.rhg(20, 0.3, start="warm"), x0, w0, steps=20 if quick else 200, optimizer=optax.sgd(2.0),
    data=lambda step, key: (key,),
)  # fmt: skip
print(f"F {value(solution.x):.5f}")

# %% [markdown]
# ## A million parameters
#
# What a rule must remember decides: `Reverse` keeps K states of the follower (a window shortens the sweep back and not what is kept),
# `Reverse(checkpoint=True)` about 2√K, implicit and first-order rules none. Measured for one hypergradient of a network of a million weights, as the compiler counts temporary memory:

# %%
width = 64 if quick else 700
weights = {"in": jnp.zeros((width, width)), "out": jnp.zeros((width, width))}
batch = jnp.ones((16, width))


def network_loss(x, y):
    return jnp.mean((jnp.tanh(batch @ y["in"]) @ y["out"] - 1) ** 2) + jnp.exp(x) * optax.tree.norm(y, squared=True)


large = bilax.Problem(lambda x, y: network_loss(-20.0, y), network_loss)
rules = {
    "Reverse()": bilax.rhg(64, 0.1),
    "Reverse(checkpoint=True)": bilax.rhg(64, 0.1, derivative=bilax.Reverse(checkpoint=True)),
    "Reverse(window=8)": bilax.t_rhg(64, 0.1, window=8),
    "Implicit, 10 steps of CG": bilax.ls(64, 0.1, tolerance=None, max_steps=10),
    "FirstOrder()": bilax.rhg(64, 0.1, derivative=bilax.FirstOrder()),
}
megabytes = {}
for name, method in rules.items():
    gradient = jax.jit(jax.grad(bilax.approximate(large, method), has_aux=True))
    memory = gradient.lower(jnp.asarray(-5.0), weights).compile().memory_analysis()
    megabytes[name] = memory.temp_size_in_bytes / 2**20
print(f"{sum(w.size for w in weights.values()):,} weights, {4 * sum(w.size for w in weights.values()) / 2**20:.1f} MB")

# %%
figure, axis = plt.subplots(figsize=(6.4, 2.2), layout="constrained")
bars = axis.barh(list(megabytes), list(megabytes.values()), color="#0072B2")
axis.bar_label(bars, fmt="{:.0f} MB", padding=3)
axis.set(xlabel="temporary memory of one hypergradient, K = 64")
axis.invert_yaxis()
axis.margins(x=0.15)
