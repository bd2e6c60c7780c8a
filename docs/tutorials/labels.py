# %% [markdown]
# # Cleaning labels
#
# **In short.** If you have noisy labels and a few examples that you trust, `bilax.clean_labels(inputs, labels, trusted)` finds the wrong
# ones, says how far that can be believed, and judges itself against simpler ways. Below it is what the paper does by hand: a
# weight for every example, tuned so that a network trained with these weights does well on the trusted ones.

# %%
import os

import bilax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

quick = "BILAX_QUICK" in os.environ
inputs, labels = load_digits(return_X_y=True)
inputs = (inputs / 16).astype(np.float32)
rng = np.random.default_rng(0)
order = rng.permutation(len(labels))
train, trusted, test = np.split(order[: 400 if quick else None], [200, 250] if quick else [1000, 1100])
noisy = labels[train].copy()
spoilt = rng.random(len(train)) < 0.3
noisy[spoilt] = (noisy[spoilt] + rng.integers(1, 10, spoilt.sum())) % 10
print(f"{len(train)} examples, {np.mean(noisy != labels[train]):.0%} with a wrong label; {len(trusted)} trusted")

# %% [markdown]
# ## The short way

# %%
cleaned = bilax.clean_labels(inputs[train], noisy, (inputs[trusted], labels[trusted]), folds=2 if quick else 5)
flagged, wrong = cleaned.flag(), noisy != labels[train]
found = (flagged & wrong).sum()
print(
    f"flagged {flagged.sum()}: {found / flagged.sum():.0%} of them are wrong, {found / wrong.sum():.0%} of the wrong ones found"
)
print(f"it expected {cleaned.expected_precision(flagged):.0%} to be wrong, and took: {cleaned.recommended}")
for note in cleaned.notes:
    print("-", note)

# %% [markdown]
# The twelve most suspicious, with the label they came with and the one suggested:

# %%
worst = np.argsort(-cleaned.probability)[:12]
figure, axes = plt.subplots(1, 12, figsize=(9, 1.3), layout="constrained")
for axis, i in zip(axes, worst, strict=True):
    axis.imshow(inputs[train[i]].reshape(8, 8), cmap="gray_r")
    axis.set_title(f"{noisy[i]}→{cleaned.suggested[i]}", color="#D55E00" if wrong[i] else "#0072B2", fontsize=9)
    axis.axis("off")

# %% [markdown]
# Orange: the label was wrong indeed.
#
# ## As a bilevel problem
#
# Every training example i has a weight $\sigma(x_i)$. The follower trains a network on the weighted examples, the leader wants its loss on the
# trusted ones to be low: a wrong label pulls the network away from that, and its weight falls. (What the data sets of the
# paper need is `bilax run cleaning`; `bilax clean` is the short way for your own files.)


# %%
def network(key, hidden=32):
    one, two = jax.random.split(key)
    return {"in": 0.1 * jax.random.normal(one, (64, hidden)), "out": 0.1 * jax.random.normal(two, (hidden, 10))}


def losses(y, inputs, labels):
    logits = jnp.tanh(inputs @ y["in"]) @ y["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


problem = bilax.Problem(
    upper=lambda x, y: losses(y, inputs[trusted], labels[trusted]).mean(),
    lower=lambda x, y: (jax.nn.sigmoid(x) * losses(y, inputs[train], noisy)).mean(),
)
solution = bilax.solve(
    problem,
    bilax.iaptt_gm(10 if quick else 30, 1.0),
    jnp.zeros(len(train)),
    network(jax.random.key(0)),
    steps=10 if quick else 200,
    optimizer=optax.adam(0.1),
    z_optimizer=optax.adam(0.01),
)
low = np.asarray(solution.x) < 0
print(f"F {solution.history.upper[0]:.3f} -> {solution.upper:.3f} ({solution.status})")
print(
    f"weight below one half: {low.sum()}, {np.mean(wrong[low]):.0%} of them wrong, {low[wrong].mean():.0%} of the wrong ones found"
)

# %%
figure, axis = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
weights = jax.nn.sigmoid(solution.x)
for which, name in ((~wrong, "right label"), (wrong, "wrong label")):
    axis.hist(np.asarray(weights)[which], bins=np.linspace(0, 1, 31), alpha=0.7, label=name)
axis.set(xlabel="weight σ(x) at the end", ylabel="examples")
axis.legend()

# %% [markdown]
# Two cautions. The leader has as many variables as there are examples, so it over-fits the trusted ones if you let it; test on a
# third part. And a weight is no probability: only `clean_labels` says how far to believe it.

# %%
if len(test):
    logits = jnp.tanh(inputs[test] @ solution.y["in"]) @ solution.y["out"]
    ours = np.mean(np.argmax(logits, 1) == labels[test])
    short = np.mean(cleaned.predict_proba(inputs[test]).argmax(1) == labels[test])
    print(f"accuracy on {len(test)} new digits: the weighted network {ours:.1%}, clean_labels' models {short:.1%}")
