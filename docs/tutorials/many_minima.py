# %% [markdown]
# # A follower with many minima
#
# **In short.** With a fixed start the follower takes the minimum next to it, and the leader optimises the wrong branch: RHG
# ends far from the solution. Letting the start z move with x finds the right branch. Letting the *worst* step count keeps the
# leader from profiting of a follower that has not arrived yet; that matters once the follower is solved well. Neither is a
# guarantee: the last picture shows from where each method fails.
#
# The example is the paper's. The leader chooses x in [1, 10], the follower y in [−2, 2]:
#
# $$ \min_{x,\,y} \; x + x y \quad \text{such that } y \text{ minimises } -\sin(x y). $$
#
# The follower's minima are the curves $x y = \pi/2 + 2\pi k$: several of them for every x, all of the same depth. The leader wants
# $xy$ as low as possible and x small; the one solution is $x^* = 11\pi/4 \approx 8.64$, $y^* = -2$, $F^* = -8.64$.

# %%
import os

import bilax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

quick = "BILAX_QUICK" in os.environ
problem = bilax.Problem(
    upper=lambda x, y: x + x * y,
    lower=lambda x, y: -jnp.sin(x * y),
    x_set=bilax.Box(1.0, 10.0),
    y_set=bilax.Box(-2.0, 2.0),
)
settings = {"steps": 100 if quick else 500, "optimizer": optax.sgd(0.1)}

# %% [markdown]
# ## Why RHG fails
#
# RHG starts the follower at the same y0 in every outer step. From (5, 1) that is a bad start, and no x changes that:

# %%
start = (5.0, 1.0)
rhg = bilax.solve(problem, bilax.rhg(40, 5e-4), *start, **settings)
iaptt = bilax.solve(problem, bilax.iaptt_gm(40, 5e-4), *start, **settings)
for name, solution in (("RHG", rhg), ("IAPTT-GM", iaptt)):
    print(f"{name:9} x = {solution.x:.3f}  y = {solution.y:.3f}  F = {solution.upper:.3f}  ({solution.status})")

# %% [markdown]
# In the picture F is the colour and the follower's minima are the black curves. A solution lies on a black curve, as far into
# the dark as possible. IAPTT-GM's start z (dashed, mostly below the solid line) travels across the curves; RHG's y stays near where it started.

# %%
resolution = 100 if quick else 400
paths = {
    "RHG": bilax.leader_path(problem, bilax.rhg(40, 5e-4), *start, **settings),
    "IAPTT-GM": bilax.leader_path(problem, bilax.iaptt_gm(40, 5e-4), *start, **settings),
}
bilax.landscape(problem, *start, paths=paths, resolution=resolution)

# %% [markdown]
# ## What k̄ does
#
# φ is F at the step $\bar k$ where F is largest. With α = 5e-4 the follower barely moves in 40 steps, so it hardly matters which step
# counts. With α = 5e-3 it does: the end point of IA-GM, which takes the last step, and that of IAPTT-GM differ.

# %%
grid = np.linspace(0.02, 0.98, 8 if quick else 24)
xs, ys = (part.ravel() for part in np.meshgrid(1 + 9 * grid, -2 + 4 * grid))
share = {}
for alpha in (5e-4, 5e-3):
    for name, recipe in (("IAPTT-GM", bilax.iaptt_gm), ("IA-GM", bilax.ia_gm), ("RHG", bilax.rhg)):
        ends = bilax.multistart(problem, recipe(40, alpha), xs, ys, **settings)
        share[alpha, name] = np.abs(ends.x - 11 * np.pi / 4) < 0.02 * 11 * np.pi / 4
        print(f"α = {alpha:g}  {name:9} {share[alpha, name].mean():.0%} of the starts end within 2 % of x*")

# %%
figure, axes = plt.subplots(2, 3, figsize=(8, 4.4), sharex=True, sharey=True, layout="constrained")
for axis, ((alpha, name), reached) in zip(axes.flat, share.items(), strict=True):
    axis.imshow(
        reached.reshape(len(grid), -1), origin="lower", extent=(1, 10, -2, 2), aspect="auto", cmap="Blues", vmax=1.3
    )
    axis.set(title=f"{name}, α = {alpha:g}: {reached.mean():.0%}")
for axis in axes[-1]:
    axis.set_xlabel("$x_0$")
for axis in axes[:, 0]:
    axis.set_ylabel("$y_0$")

# %% [markdown]
# Blue starts reach the solution. Two things to take home: z is what helps most here; and *no* gradient method is safe from
# all starts, least of all when the follower is solved well, for then z cannot cross from one curve to the next.
#
# ## What to do in earnest
#
# One variable each is small enough to look everywhere. `solve_global` does, and proves what it says of the follower:

# %%
found = bilax.solve_global(problem, *start)
print(f"x = {found.x:.5f}  y = {found.y:.5f}  F = {found.upper:.5f}")
print(found.certificate)
print(bilax.certify(problem, iaptt))

# %% [markdown]
# IAPTT-GM's end is near the solution, but the certificate is right to be strict: after 40 steps of 5e-4 the follower has not
# settled. Next: [when not to trust the answer](doubt.md).
