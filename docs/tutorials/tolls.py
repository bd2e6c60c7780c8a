# %% [markdown]
# # Tolls: a game on a simplex
#
# **In short.** A leader who sets prices and followers who spread by cost and habit is a bilevel problem with a simplex. `auto` solves it
# without settings; the revenue that a naive operator expects, because it forgets that drivers answer, is far off.
#
# ## The game
#
# Four roads between two towns, and the town owns three of them. Drivers' shares $y$ lie on a simplex. They minimise travel cost and toll, but not
# all in the same way: an entropy term spreads them, and a congestion term makes a full road slow.
#
# $$ f(x, y) = \sum_i (c_i + x_i)\, y_i + \tfrac12 \sum_i d_i y_i^2 + \theta \sum_i y_i \log y_i $$

# %%
import bilax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

cost, congestion, spread = np.array([1.0, 1.5, 2.0, 4.0]), np.array([2.0, 1.0, 1.0, 0.5]), 0.3


def drivers(toll, share):
    paid = jnp.append(toll, 0.0)  # the fourth road is free
    return (cost + paid) @ share + 0.5 * congestion @ share**2 + spread * jnp.sum(share * jnp.log(share))


problem = bilax.Problem(
    upper=lambda toll, share: -toll @ share[:3], lower=drivers, x_set=bilax.Box(0.0, 6.0), y_set=bilax.Simplex()
)
solution = bilax.solve(problem, bilax.auto(), np.ones(3), np.full(4, 0.25))
print("tolls  ", solution.x)
print("shares ", solution.y)
print("revenue", -solution.upper, solution.status)

# %% [markdown]
# ## Can it be believed?
#
# The follower is convex in y, so its answer is unique. `certify` proves it for this x:

# %%
print(bilax.certify(problem, solution))

# %% [markdown]
# Whether another x is better is the leader's question. With three tolls a coarse grid can answer it:

# %%
method = bilax.Method(50, bilax.Newton(), follower_tolerance=1e-6)
phi = bilax.approximate(problem, method)
ticks = np.linspace(0, 6, 7)
grid = jnp.asarray([(a, b, c) for a in ticks for b in ticks for c in ticks], jnp.float32)
revenue = -jax.jit(jax.vmap(lambda toll: phi(toll, jnp.full(4, 0.25))[0]))(grid)
print(f"best of {len(grid)} grid points {revenue.max():.4f} at {grid[revenue.argmax()]}; bilax {-solution.upper:.4f}")

# %% [markdown]
# ## The operator who forgets that drivers answer
#
# It sees the shares under today's tolls of 1 and thinks they stay:

# %%
today = phi(jnp.ones(3), jnp.full(4, 0.25))[1].y
common = np.linspace(0, 6, 121)
expected = common * float(today[:3].sum())
real = -jax.jit(jax.vmap(lambda t: phi(jnp.full(3, t), jnp.full(4, 0.25))[0]))(jnp.asarray(common, jnp.float32))
figure, axis = plt.subplots(figsize=(6.4, 3), layout="constrained")
axis.plot(common, expected, "--", label="expected, if drivers stayed")
axis.plot(common, real, label="what comes in")
axis.plot(float(np.mean(solution.x)), -float(solution.upper), "*", ms=13, label="bilax, a toll for each road")
axis.set(xlabel="toll on each of the three roads", ylabel="revenue", ylim=(0, 4))
axis.legend()

# %% [markdown]
# ## A limit that depends on the leader
#
# Suppose the town may also narrow road 1: at most the share x["width"] fits on it, and width costs upkeep. The follower's set then
# depends on x: `y_set` is a function of x. Every derivative rule heeds it. Squares take the entropy's place here, for on a set with
# corners shares may be exactly zero.

# %%
corner = np.vstack([-np.eye(4), [1.0, 0.0, 0.0, 0.0]])  # y ≥ 0, and y_1 ≤ width


def allowed(x):
    return bilax.Polyhedron(corner, jnp.append(jnp.zeros(4), x["width"]), np.ones((1, 4)), np.ones(1))


narrow = bilax.Problem(
    upper=lambda x, y: -x["toll"] @ y[:3] + 0.8 * x["width"],
    lower=lambda x, y: (cost + jnp.append(x["toll"], 0.0)) @ y + 0.5 * (congestion + 1.0) @ y**2,
    x_set=bilax.Product({"toll": bilax.Box(0.0, 6.0), "width": bilax.Box(0.05, 1.0)}),
    y_set=allowed,
)
first = {"toll": np.ones(3), "width": np.asarray(0.5)}
result = bilax.solve(narrow, bilax.auto(), first, np.full(4, 0.25))
print("tolls", result.x["toll"], " width", result.x["width"], " shares", result.y)
print(result)
