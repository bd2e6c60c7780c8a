"""Pictures of small problems: the landscape that the leader sees, and which starts end where."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from bilax.gradient.phi import Info
from bilax.methods.recipes import Method
from bilax.problem.problem import Problem
from bilax.problem.terms import inside
from bilax.run.solve import multistart, solve
from bilax.trust.flat_problem import flatten

_SGD = optax.sgd(0.1)


def landscape(
    problem: Problem,
    x: PyTree,
    y: PyTree,
    *,
    x_range: Sequence[float | int] | None = None,
    y_range: Sequence[float | int] | None = None,
    paths: dict[str, Any] | None = None,
    data: tuple[Any, ...] = (),
    resolution: int = 400,
) -> Any:
    """F as colours over (x, y), with the follower's minima as curves: global ones solid black, local ones white.

    For one leader and one follower variable; x and y give their structure. `paths` maps a name to what
    `leader_path` returns. The ranges default to the sets' bounds. Returns a matplotlib figure.
    """
    x, y = jax.tree.map(jnp.asarray, (x, y))
    flat = flatten(problem, x, y, data)
    if flat.x_range.lo.size != 1 or flat.y_range.lo.size != 1:
        raise ValueError("landscape draws one leader and one follower variable; for more, use bilax.basin_map.")
    xs = np.linspace(*_limits("x_range", x_range, flat.x_range), resolution)
    ys = np.linspace(*_limits("y_range", y_range, flat.y_range), 2 * resolution)

    @jax.jit
    def over_grid(xs, ys):
        def values(x, y):
            return flat.upper(x[None], y[None]), flat.lower(x[None], y[None])

        return jax.vmap(jax.vmap(values, (None, 0)), (0, None))(xs, ys)

    upper, lower = (np.asarray(v) for v in over_grid(xs, ys))
    figure, axis = _axes()
    mesh = axis.pcolormesh(xs, ys, upper.T, shading="auto", cmap="viridis", rasterized=True)
    figure.colorbar(mesh, ax=axis, label="F(x, y)")
    best, other = _follower_curves(lower)
    axis.plot(xs[other[0]], ys[other[1]], ".", ms=1.2, color="white", clip_on=False, label="follower's local minima")
    axis.plot(xs[best[0]], ys[best[1]], ".", ms=2.4, color="black", clip_on=False, label="follower's global minima")
    for i, (name, path) in enumerate((paths or {}).items()):
        colour = ("#D55E00", "#F0E442", "#56B4E9", "#CC79A7")[i % 4]
        axis.plot(path["x"], path["z"], "--", lw=0.9, color=colour, label=f"{name}: $(x, z)$")
        axis.plot(path["x"], path["y"], "-", lw=1.6, color=colour, label=rf"{name}: $(x, y_{{\bar k}})$")
        axis.plot(path["x"][-1], path["y"][-1], "*", ms=11, color=colour, mec="black", mew=0.6)
    axis.set(xlabel="x", ylabel="y", xlim=(xs[0], xs[-1]), ylim=(ys[0], ys[-1]))
    axis.locator_params(nbins=6)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3, fontsize=7, markerscale=4, facecolor="0.8", framealpha=1
    )
    return figure


def leader_path(
    problem: Problem,
    method: Method,
    x0: PyTree,
    y0: PyTree,
    *,
    steps: int = 500,
    optimizer: optax.GradientTransformation = _SGD,
    data: tuple[Any, ...] = (),
) -> dict[str, np.ndarray]:
    """The points (x, z, y_k̄) that `solve` passes through, one row per outer step, each flattened."""
    solution = solve(problem, method, x0, y0, steps=steps, optimizer=optimizer, data=data, record=_place)
    return solution.history.record


def _place(x: PyTree, z: PyTree, info: Info) -> dict[str, Array]:
    return {name: ravel_pytree(point)[0] for name, point in (("x", x), ("z", z), ("y", info.y))}


def basin_map(
    problem: Problem,
    method: Method,
    x0: PyTree,
    y0: PyTree,
    directions: tuple[tuple[PyTree, PyTree], tuple[PyTree, PyTree]],
    *,
    extent: Sequence[float | int],
    resolution: int = 40,
    steps: int = 500,
    optimizer: optax.GradientTransformation = _SGD,
    data: tuple[Any, ...] = (),
    best: float | None = None,
) -> Any:
    """Where starts of a plane end: F at the end of a solve from each of resolution² starts.

    The starts are (x0, y0) + s·directions[0] + t·directions[1], with each direction a pair (in x, in y) of trees
    like x0 and y0, s from extent[0] to extent[1] and t from extent[2] to extent[3]; they are projected onto the
    sets. `best` (F*, if known) is drawn as the boundary of the starts that end within 2 % of it. Returns a
    matplotlib figure.
    """
    if len(directions) != 2 or any(len(direction) != 2 for direction in directions):
        raise ValueError("directions must be two pairs (in x, in y) of trees shaped like x0 and y0.")
    s_lo, s_hi, t_lo, t_hi = extent
    s, t = np.linspace(s_lo, s_hi, resolution), np.linspace(t_lo, t_hi, resolution)
    grid_s, grid_t = (g.ravel() for g in np.meshgrid(s, t))

    def start(a, b):
        x, y = jax.tree.map(lambda origin, u, v: origin + a * u + b * v, (x0, y0), directions[0], directions[1])
        return problem.x_set.project(x), inside(problem.y_set, y)

    xs, ys = jax.vmap(start)(jnp.asarray(grid_s, float), jnp.asarray(grid_t, float))
    ends = multistart(problem, method, xs, ys, steps=steps, optimizer=optimizer, data=data)
    upper = np.asarray(ends.upper).reshape(resolution, resolution)
    figure, axis = _axes()
    mesh = axis.pcolormesh(s, t, upper, shading="auto", cmap="viridis", rasterized=True)
    figure.colorbar(mesh, ax=axis, label="F at the end")
    if best is not None:
        near = np.abs(upper - best) <= 0.02 * max(abs(best), 1e-12)
        axis.set_title(f"{near.mean():.0%} of the starts end within 2 % of F*", fontsize=9)
        if near.any() and not near.all():
            axis.contour(s, t, near.astype(float), levels=[0.5], colors="#D55E00", linewidths=1.2)
    axis.set(xlabel="s", ylabel="t")
    return figure


def _limits(name: str, given: Sequence[float | int] | None, found: Any) -> tuple[float, float]:
    lo, hi = given if given is not None else (float(found.lo[0]), float(found.hi[0]))
    if not np.isfinite([lo, hi]).all() or not lo < hi:
        raise ValueError(
            f"{name} must be two finite numbers, lowest first: the set has no bounds to take, got {lo, hi}."
        )
    return lo, hi


def _follower_curves(lower: np.ndarray) -> tuple[Any, Any]:
    """Indices (i, j) at which f(x_i, ·) has a global and a merely local minimum on the grid."""
    padded = np.pad(lower, ((0, 0), (1, 1)), constant_values=np.inf)
    dips = (lower <= padded[:, :-2]) & (lower <= padded[:, 2:])
    lowest, spread = lower.min(1, keepdims=True), np.ptp(lower, axis=1, keepdims=True)
    # Two minima of the same depth differ by as much as the grid misses of each.
    is_best = dips & (lower <= lowest + 1e-3 * spread)
    return np.nonzero(is_best), np.nonzero(dips & ~is_best)


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    # Not by pyplot, which would keep it, and whose backend is the caller's.
    figure = Figure(figsize=(5.2, 4.4), layout="constrained")
    return figure, figure.subplots()
