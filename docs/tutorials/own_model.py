# %% [markdown]
# # Bring your own model
#
# **In short.** x and y are any trees of arrays, so a model from anywhere will do once it is a function of its parameters. Here the same
# problem four times: how strongly to decay each layer of a small network, tuned on validation data. A plain function, an equinox module, a
# flax nnx module, and a PyTorch module.

# %%
import os

import bilax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

quick = "BILAX_QUICK" in os.environ
rng = np.random.default_rng(0)
inputs = rng.uniform(-3, 3, size=(80, 1)).astype(np.float32)
targets = (np.sin(inputs) + 0.3 * rng.normal(size=inputs.shape)).astype(np.float32)
train, valid = slice(0, 40), slice(40, 80)
method = bilax.rhg(20 if quick else 100, 0.05, start="warm")
settings = {"steps": 10 if quick else 150, "optimizer": optax.adam(0.05)}


def problem_for(apply, decay):
    """F and f for a function apply(parameters, inputs) and a function decay(x, parameters)."""

    def loss(y, part):
        return jnp.mean((apply(y, inputs[part]) - targets[part]) ** 2)

    return bilax.Problem(upper=lambda x, y: loss(y, valid), lower=lambda x, y: loss(y, train) + decay(x, y))


def show(name, solution):
    first = float(solution.history.upper[0])
    print(f"{name:18} validation {first:.3f} -> {float(solution.upper):.3f}, decay {np.exp(np.asarray(solution.x))}")


# %% [markdown]
# ## A plain function
#
# Parameters are a dictionary, the model a function. x has one number for each layer, in logarithms.

# %%
one, two = jax.random.split(jax.random.key(0))
parameters = {
    "hidden": (jax.random.normal(one, (1, 16)), jnp.zeros(16)),
    "out": (0.3 * jax.random.normal(two, (16, 1)), jnp.zeros(1)),
}


def apply(y, u):
    return jnp.tanh(u @ y["hidden"][0] + y["hidden"][1]) @ y["out"][0] + y["out"][1]


def decay(x, y):
    return jnp.exp(x[0]) * optax.tree.norm(y["hidden"], squared=True) + jnp.exp(x[1]) * optax.tree.norm(
        y["out"], squared=True
    )


x0 = jnp.full(2, -6.0)
show("plain function", bilax.solve(problem_for(apply, decay), method, x0, parameters, **settings))

# %% [markdown]
# ## equinox
#
# A module is a tree already. Of its leaves the floating arrays are varied, and the rest stays.

# %%
mlp = eqx.nn.MLP(1, 1, 16, 1, activation=jnp.tanh, key=jax.random.key(0))


def module_decay(x, y):
    first, last = (eqx.filter(layer, eqx.is_inexact_array) for layer in y.layers)
    return jnp.exp(x[0]) * optax.tree.norm(first, squared=True) + jnp.exp(x[1]) * optax.tree.norm(last, squared=True)


solution = bilax.solve(problem_for(lambda y, u: jax.vmap(y)(u), module_decay), method, x0, mlp, **settings)
show("equinox", solution)
print("solution.y is a module again:", solution.y(jnp.ones(1)))

# %% [markdown]
# ## flax nnx
#
# `nnx.split` gives the parameters as a tree and the rest as a definition; `nnx.merge` puts them together.


# %%
class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.out = nnx.Linear(1, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, u):
        return self.out(jnp.tanh(self.hidden(u)))


definition, state = nnx.split(Network(nnx.Rngs(0)), nnx.Param)
weights = nnx.to_pure_dict(state)


def nnx_apply(y, u):
    fresh = jax.tree.map(lambda leaf: leaf, state)  # a copy, whose values are replaced
    nnx.replace_by_pure_dict(fresh, y)
    return nnx.merge(definition, fresh)(u)


def nnx_decay(x, y):
    return jnp.exp(x[0]) * optax.tree.norm(y["hidden"], squared=True) + jnp.exp(x[1]) * optax.tree.norm(
        y["out"], squared=True
    )


show("flax nnx", bilax.solve(problem_for(nnx_apply, nnx_decay), method, x0, weights, **settings))

# %% [markdown]
# ## PyTorch
#
# `bilax.from_torch` translates a module into a JAX function and a dictionary of its parameters; `bilax.to_torch` writes the result
# back. It needs `pip install "bilax[torch]"`.

# %%
import torch

torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
torch_apply, torch_parameters = bilax.from_torch(module)
print({name: array.shape for name, array in torch_parameters.items()})


def torch_decay(x, y):
    size = {name: jnp.sum(array**2) for name, array in y.items()}
    return jnp.exp(x[0]) * (size["0.weight"] + size["0.bias"]) + jnp.exp(x[1]) * (size["2.weight"] + size["2.bias"])


solution = bilax.solve(problem_for(torch_apply, torch_decay), method, x0, torch_parameters, **settings)
show("PyTorch", solution)
bilax.to_torch(solution.y, module)
with torch.no_grad():
    error = float(((module(torch.tensor(inputs[valid])) - torch.tensor(targets[valid])) ** 2).mean())
print(f"the PyTorch module itself now has a validation error of {error:.3f}")

# %% [markdown]
# The settings above mean a hundred steps of training. If you mean a network that is *trained to its end*, let `auto` do it: the
# same problem, no settings, and some minutes, for each x is answered from every start that led to a minimum of its own.

# %%
problem = problem_for(torch_apply, torch_decay)
trained = bilax.solve(problem, bilax.auto(), x0, torch_parameters, steps=3 if quick else 2000)
print(f"F {trained.upper:.4f}, log penalties {trained.x}")
print(trained.plan)

# %% [markdown]
# F is lower than after a hundred steps. Before you believe it, go on once more, `bilax.solve(problem, bilax.auto(), trained.x,
# trained.y)`; begin at other x0, for the leader has local minima of its own, and of a network of more than 400 weights `auto` follows
# one start alone; and look at data that F has not seen, for many leader variables over-fit the validation data ([how
# sure](../how-sure.md)). With `auto`, `history.upper[0]` is the best of its first starts and not F at x0.

# %% [markdown]
# ## What to watch
#
# - **Classes**: `optax.softmax_cross_entropy_with_integer_labels(apply(y, u), labels).mean()` is PyTorch's `cross_entropy`.
# - **Random parts** (dropout): put a key among the data, `data=lambda step, key: (key,)`, and use it in the objective.
# - **Batch normalisation**: a function has no state. Take the statistics of the batch, or freeze them (`module.eval()` in PyTorch).
# - **Which parameters are the leader's?** x may be a module, too: a shared network as x and its last layer as y is how few-shot
#   learning is written here.
# - **A follower that is trained for some steps** is not solved: `rhg` and its kin differentiate the training itself. `auto` trains to
#   the end, which takes longer and, up to some thousand weights, often ends better: `bilax.solve(problem, bilax.auto(), x0, parameters, progress=True, time_limit=300)`.
# - **F is that of `solution.y`.** Trained again from another start, a network ends in another minimum with another F; `solution.plan`
#   says so where it does. Take `solution.y` back into your module as above.
# - **Several kinds of leader variables**, such as class weights and decays: a dictionary x, and
#   `x_set=bilax.Product({"weights": bilax.Box(-4.0, 4.0), "decay": bilax.Box(-12.0, 0.0)})`. All weights twice as large, and the decay
#   too, change nothing: hold the weights together, such as by `len(w) * jax.nn.softmax(w)`.
