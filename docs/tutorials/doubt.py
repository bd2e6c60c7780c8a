# %% [markdown]
# # When not to trust the answer
#
# **In short.** A bilevel solver can be wrong in five ways that a loss curve does not show: the follower is not solved, it is at the wrong minimum, the derivative
# is wrong, the leader is at a local minimum, or it has over-fitted. Each has a check of one line.

# %%
import bilax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

# %% [markdown]
# ## 1. The follower is not solved
#
# Ten short steps from zero leave y near zero, whatever x is. The leader then finds an x that is good *for a follower that has not moved*:

# %%
problem = bilax.Problem(lambda x, y: (y - 1.0) ** 2 + 0.01 * x**2, lambda x, y: 0.5 * (y - x) ** 2)
for steps in (10, 100, 1000):
    solution = bilax.solve(problem, bilax.rhg(steps, 0.01), 0.0, 0.0, steps=300)
    print(f"K = {steps:4}: x = {solution.x:.3f}, F = {solution.upper:.4f}, residual {solution.residual:.4f}")

# %% [markdown]
# The right answer is x = 1/1.01. **Check:** `solution.residual` against what it is at the start, or double K and see whether x moves.
#
# ## 2. It is at the wrong minimum
#
# F is better than it can be. **Check:** `bilax.certify`.

# %%
trap = bilax.Problem(
    upper=lambda x, y: (x - 0.1) ** 2 + (y - 0.3) ** 2,
    lower=lambda x, y: y**3 / 3 - x * y,
    x_set=bilax.Box(-1.0, 1.0),
    y_set=bilax.Box(-1.0, 1.0),
)
method = bilax.rhg(60, 0.5)
wrong = bilax.solve(trap, method, 0.5, 0.5)
right = bilax.solve_global(trap, 0.5, 0.5)
print(f"claimed F = {wrong.upper:.4f}; what can be had: {right.upper:.4f}")
print(bilax.certify(trap, wrong))

# %%
path = bilax.leader_path(trap, method, 0.5, 0.5, steps=200)
bilax.landscape(trap, 0.5, 0.5, paths={"RHG": path}, resolution=200)

# %% [markdown]
# The black curve, the follower's lowest minima, jumps down to y = −1. There the path leaves it and goes on along the white one, minima that
# are only *local*.
#
# ## 3. The derivative is wrong
#
# Custom derivatives, `stop_gradient` in the wrong place, a rule that does not fit. **Check:** `bilax.check_hypergradient` compares with finite
# differences in double precision.

# %%
broken = bilax.Problem(lambda x, y: (y - 1.0) ** 2, lambda x, y: (y - jax.lax.stop_gradient(x)) ** 2)
print(bilax.check_hypergradient(broken, bilax.rhg(10, 0.2), 0.5, 0.0).words)
print(bilax.check_hypergradient(problem, bilax.rhg(10, 0.2, derivative=bilax.Implicit()), 0.5, 0.0).words)

# %% [markdown]
# The second is no mistake of the rule: after ten steps the follower is not solved, and the implicit derivative is that of a solved one.
#
# ## 4. The leader is at a local minimum
#
# **Check:** many starts, one program.

# %%
wavy = bilax.Problem(
    upper=lambda x, y: jnp.sin(3 * y) + 0.1 * y**2, lower=lambda x, y: (y - x) ** 2, x_set=bilax.Box(-6.0, 6.0)
)
starts = jnp.linspace(-5.5, 5.5, 23)
many = bilax.multistart(wavy, bilax.rhg(10, 0.4), starts, starts, steps=300, optimizer=optax.sgd(0.02))
ends, counts = np.unique(np.round(many.upper, 3), return_counts=True)
for end, count in zip(ends, counts, strict=True):
    print(f"F = {end:6.3f} from {count} starts")
print("best", many.best.x, many.best.upper)

# %%
figure, axis = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
line = np.linspace(-6, 6, 400)
axis.plot(line, np.sin(3 * line) + 0.1 * line**2, color="0.6")
axis.plot(many.x, many.upper, "o", ms=5, label="ends of 23 starts")
axis.plot(many.best.x, many.best.upper, "*", ms=14, label="best")
axis.set(xlabel="x", ylabel="F with the follower solved")
axis.legend()

# %% [markdown]
# ## 5. It has over-fitted
#
# The leader minimises the validation loss, so that loss is no longer an honest estimate. With as many leader variables as validation examples it can be
# driven to nothing. **Check:** a third part of the data that neither level sees; [30 and 10,000 penalties](penalties.md) shows it.
#
# ## 6. It depends on the way there
#
# F is that of `solution.y`. A follower with many minima, such as a network, solved again from another start with the same x may end in another
# minimum, with another F. **Check:** `print(solution.plan)` says what solving anew from y0 gives; `auto` asks at the end.
#
# ## And when a run says so itself
#
# `solution.status` is not decoration:

# %%
for name, call in (
    ("step too long", lambda: bilax.solve(problem, bilax.rhg(50, 3.0), 0.5, 0.0)),
    ("leader too fast", lambda: bilax.solve(problem, bilax.rhg(50, 0.5), 0.5, 0.0, optimizer=optax.sgd(10.0))),
):
    solution = call()
    print(f"{name}: {solution.status}. {solution.status.message}")
