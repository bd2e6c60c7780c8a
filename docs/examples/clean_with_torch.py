"""Finds wrong labels with a PyTorch network: each example gets a weight, trained so that the network does well on a few
examples whose labels are trusted. Needs `pip install 'bilax[torch]'`."""

import jax
import numpy as np
import optax
import torch
from sklearn.datasets import load_digits

import bilax

# 800 pictures of digits, 300 of them with a wrong label; 200 more whose labels are trusted; the rest to measure with.
inputs, labels = load_digits(return_X_y=True)
inputs, labels = (inputs / 16).astype(np.float32), labels.astype(np.int32)
random = np.random.default_rng(0)
train, trusted, rest = np.split(random.permutation(len(labels)), [800, 1000])
noisy = labels[train].copy()
noisy[:300] = (noisy[:300] + random.integers(1, 10, 300)) % 10

torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
apply, parameters = bilax.from_torch(module)


def losses(y, inputs, labels):
    return optax.softmax_cross_entropy_with_integer_labels(apply(y, inputs), labels)


problem = bilax.Problem(
    upper=lambda x, y: losses(y, inputs[trusted], labels[trusted]).mean(),
    lower=lambda x, y: (jax.nn.sigmoid(x) * losses(y, inputs[train], noisy)).mean(),
)
solution = bilax.solve(
    problem, bilax.iaptt_gm(20, 0.5), np.zeros(800, np.float32), parameters, steps=150, optimizer=optax.adam(0.1)
)

bilax.to_torch(solution.y, module)  # the module is a PyTorch module as before, and trained
with torch.no_grad():
    accuracy = (module(torch.tensor(inputs[rest])).argmax(1).numpy() == labels[rest]).mean()
said = solution.x < 0
print(f"{said.sum()} labels called wrong, {said[:300].sum()} of them rightly; {300 - said[:300].sum()} missed.")
print(f"The module gives {accuracy:.1%} of {len(rest)} other digits their label.")
