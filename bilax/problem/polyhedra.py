"""Sets that linear equations and inequalities make. A vector stands for all leaves of v, one after the other."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.optimize
from jax.core import Tracer
from jaxtyping import Array, PyTree

from bilax.problem.sets import broadcast, may_hold, on_vector


class _OneRow(eqx.Module):
    """One row of coefficients and its right-hand side."""

    a: PyTree
    b: Any
    flat = True

    def __check_init__(self):
        _check_normal(type(self).__name__, self.a)


class Hyperplane(_OneRow):
    """All v with ⟨a, v⟩ = b: a budget that is spent. `a` is a tree like v, or a number for every coordinate."""

    def project(self, v: PyTree) -> PyTree:
        """Moves `v` along a."""
        return _along(v, self.a, self.b, "Hyperplane", lambda excess: excess)


class Halfspace(_OneRow):
    """All v with ⟨a, v⟩ ≤ b: a budget that need not be spent. `a` is a tree like v, or a number for all coordinates."""

    def project(self, v: PyTree) -> PyTree:
        """Moves `v` along a where it lies outside."""
        return _along(v, self.a, self.b, "Halfspace", lambda excess: jnp.where(excess > 0, excess, 0))


class Affine(eqx.Module):
    """All v with A v = b, A a matrix with a column for each coordinate of v. Rows may be redundant."""

    A: Any
    b: Any
    flat = True

    def __check_init__(self):
        _check_rows("Affine", "A", self.A, "b", self.b)
        _check_solvable("Affine(A, b)", None, None, self.A, self.b)

    def project(self, v: PyTree) -> PyTree:
        """v − A⁺(A v − b)."""
        return on_vector(lambda flat: _onto_affine(flat, *_as("Affine", flat, self.A, self.b)), v)


class Polyhedron(eqx.Module):
    """All v with G v ≤ h and, if they are given, A v = b: small ones, up to some dozen inequalities.

    Of a `Box`, `Simplex`, `Halfspace` or `Affine`, those project much faster.
    """

    G: Any
    h: Any
    A: Any = None
    b: Any = None
    flat = True

    def __check_init__(self):
        _check_rows("Polyhedron", "G", self.G, "h", self.h)
        if (self.A is None) != (self.b is None):
            raise ValueError("Polyhedron(G, h, A, b): A and b belong together, give both or neither.")
        if self.A is not None:
            _check_rows("Polyhedron", "A", self.A, "b", self.b)
        _check_solvable("Polyhedron(G, h, A, b)", self.G, self.h, self.A, self.b)

    def project(self, v: PyTree) -> PyTree:
        """Finds the inequalities that hold the nearest point, which is then that of an affine set."""

        def one(flat):
            G, h = _as("Polyhedron", flat, self.G, self.h)
            A, b = (G[:0], h[:0]) if self.A is None else _as("Polyhedron", flat, self.A, self.b)
            active = _active(*jax.lax.stop_gradient((flat, G, h, A, b)))
            rows, values = jnp.where(active[:, None], G, 0), jnp.where(active, h, 0)
            return _onto_affine(flat, jnp.concatenate([A, rows]), jnp.concatenate([b, values]))

        return on_vector(one, v)

    def bounds(self, v: PyTree) -> tuple[PyTree, PyTree]:
        """The least and the greatest value of every coordinate, by linear programs.

        While rows are traced, only what those with a single coefficient tell; ∓∞ where nothing does.
        """
        rows = (self.G, self.h, self.A, self.b)
        lo, hi = _of_single_rows(*rows)
        if not any(isinstance(row, Tracer) for row in rows):
            units = np.eye(lo.size)
            lo = np.maximum(lo, [_least(unit, *rows) for unit in units])
            hi = np.minimum(hi, [-_least(-unit, *rows) for unit in units])
        return _unravel_known(lo, v), _unravel_known(hi, v)


def _along(v: PyTree, a: PyTree, b: Any, name: str, step: Any) -> PyTree:
    a = jax.tree.map(lambda one, leaf: jnp.broadcast_to(one, leaf.shape), broadcast(f"{name}(a=...)", a, v), v)
    length = step(optax.tree.vdot(a, v) - b) / optax.tree.vdot(a, a)
    return jax.tree.map(lambda leaf, one: (leaf - length * one).astype(leaf.dtype), v, a)


def _onto_affine(v: Array, A: Array, b: Array) -> Array:
    inverse = jnp.linalg.pinv(A)
    return v - inverse @ (A @ v - b)


def _active(v: Array, G: Array, h: Array, A: Array, b: Array) -> Array:
    """Which inequalities hold the point of the polyhedron nearest to v: linearly independent ones.

    Lawson and Hanson (1974), chapter 23: the shortest z with E z ≤ r is had from the least-squares solution u ≥ 0 of
    (−Eᵀ; −rᵀ) u = (0; 1), and u_i > 0 where z is held. Here z is what is added to the nearest point of A v = b.
    """
    inverse = jnp.linalg.pinv(A) if A.size else jnp.zeros((v.size, 0), v.dtype)
    nearest = v - inverse @ (A @ v - b)
    rows, slack = G - G @ inverse @ A, h - G @ nearest
    norms = jnp.linalg.norm(rows, axis=1)
    # A row that the equations make constant holds nothing, or nothing is feasible.
    usable = norms > 100 * jnp.finfo(v.dtype).eps * jnp.linalg.norm(G, axis=1)
    norms = jnp.where(usable, norms, 1)
    slack = slack / norms
    scale = jnp.max(jnp.where(usable, jnp.abs(slack), 0))
    stacked = -jnp.concatenate([rows.T / norms, slack[None] / jnp.where(scale > 0, scale, 1)])
    # Distances below rounding count as none, so that a point on the boundary is inside.
    touched = slack < -8 * jnp.finfo(v.dtype).eps * (jnp.linalg.norm(v) + jnp.abs(h) / norms)
    target = jnp.zeros(v.size + 1, v.dtype).at[-1].set(1)
    return _nonnegative_least_squares(jnp.where(usable, stacked, 0), target) & jnp.any(touched & usable)


def _nonnegative_least_squares(matrix: Array, target: Array) -> Array:
    """Where the u ≥ 0 that minimises ‖matrix u − target‖ is positive, by Lawson and Hanson's active set."""
    tolerance = 100 * jnp.finfo(matrix.dtype).eps
    columns = matrix.shape[1]

    def body(carry):
        count, _, positive, u = carry
        trial = jnp.linalg.lstsq(jnp.where(positive, matrix, 0), target)[0]
        blocked = positive & (trial <= 0)
        shares = jnp.where(blocked, u / jnp.where(blocked, u - trial, 1), jnp.inf)
        u = jnp.where(positive, u + jnp.minimum(jnp.min(shares), 1) * (trial - u), 0)
        # What blocks leaves; where nothing does, the column that promises most enters.
        stays = positive & ~(shares <= jnp.min(shares) * (1 + tolerance))
        promise = jnp.where(positive, -jnp.inf, matrix.T @ (target - matrix @ u))
        entering = jnp.argmax(promise)
        free = ~jnp.any(blocked)
        done = free & (promise[entering] <= tolerance)
        grown = positive.at[entering].set(positive[entering] | ~done)
        return count + 1, done, jnp.where(free, grown, stays), u

    start = jnp.zeros((), int), jnp.asarray(False), jnp.zeros(columns, bool), jnp.zeros(columns, matrix.dtype)
    return jax.lax.while_loop(lambda carry: ~carry[1] & (carry[0] < 10 * columns + 10), body, start)[2]


def _as(name: str, flat: Array, matrix: Any, right: Any) -> tuple[Array, Array]:
    matrix, right = jnp.asarray(matrix, flat.dtype), jnp.asarray(right, flat.dtype)
    if matrix.shape[1] != flat.size:
        raise ValueError(
            f"{name}: the matrix has {matrix.shape[1]} columns, but the point has {flat.size} coordinates. Give one "
            "column for each, in the order of the leaves."
        )
    return matrix, jnp.broadcast_to(right, matrix.shape[:1])


def _check_normal(name: str, a: PyTree) -> None:
    def is_some_direction(a):
        leaves = jax.tree.leaves(a)
        return jnp.asarray(any(jnp.any(jnp.asarray(leaf) != 0) for leaf in leaves)) & jnp.isfinite(optax.tree.sum(a))

    if not may_hold(is_some_direction, a):
        raise ValueError(f"{name}(a, b): a must be finite and not zero everywhere, got {a}.")


def _check_rows(name: str, matrix_name: str, matrix: Any, right_name: str, right: Any) -> None:
    rows, right_shape = np.shape(matrix), np.shape(right)
    if len(rows) != 2 or right_shape not in ((), rows[:1]):
        raise ValueError(
            f"{name}({matrix_name}, {right_name}): {matrix_name} must be a matrix and {right_name} a vector with a "
            f"number for each of its rows, or one number; got the shapes {list(rows)} and {list(right_shape)}."
        )


def _check_solvable(call: str, G: Any, h: Any, A: Any, b: Any) -> None:
    if any(isinstance(part, Tracer) for part in (G, h, A, b)):
        return
    columns = np.shape(A if G is None else G)[1]
    if _least(np.zeros(columns), G, h, A, b) == np.inf:
        raise ValueError(f"{call}: no point fulfils all rows. Loosen h, or drop rows that contradict others.")


def _least(cost: Any, G: Any, h: Any, A: Any, b: Any) -> float:
    """The least ⟨cost, v⟩; ∞ where no v is feasible, −∞ where there is no least."""

    def right(matrix, value):
        return None if matrix is None else np.broadcast_to(np.asarray(value, float), np.shape(matrix)[:1])

    G, A = (None if matrix is None else np.asarray(matrix, float) for matrix in (G, A))
    found = scipy.optimize.linprog(cost, G, right(G, h), A, right(A, b), bounds=(None, None))
    if found.status == 2:
        return np.inf
    # Also where the solver came to no end: nothing is known then.
    return float(found.fun) if found.status == 0 else -np.inf  # pyright: ignore[reportArgumentType]


def _of_single_rows(G: Any, h: Any, A: Any, b: Any) -> tuple[Any, Any]:
    """The bounds that rows with one coefficient are, g v_j ≤ h; ∓∞ for other coordinates."""
    module: Any = jnp if any(isinstance(part, Tracer) for part in (G, h, A, b)) else np
    if A is not None:
        G, h = _stacked(module, (G, h), (A, b), (-module.asarray(A), -module.asarray(b)))
    else:
        G, h = _stacked(module, (G, h))
    alone = (module.sum(G != 0, axis=1) == 1)[:, None]
    ends = h[:, None] / module.where(G == 0, 1, G)
    lo = module.max(module.where(alone & (G < 0), ends, -np.inf), axis=0, initial=-np.inf)
    return lo, module.min(module.where(alone & (G > 0), ends, np.inf), axis=0, initial=np.inf)


def _stacked(module: Any, *systems: tuple[Any, Any]) -> tuple[Any, Any]:
    rights = [module.broadcast_to(module.asarray(right, float), np.shape(rows)[:1]) for rows, right in systems]
    return module.concatenate([module.asarray(rows, float) for rows, _ in systems]), module.concatenate(rights)


def _unravel_known(flat: Any, v: PyTree) -> PyTree:
    """As ravel_pytree's, but NumPy stays NumPy."""
    leaves, structure = jax.tree.flatten(v)
    ends = np.cumsum([jnp.size(leaf) for leaf in leaves])[:-1]
    split = jnp.split if isinstance(flat, Tracer) else np.split
    parts = zip(split(flat, ends), leaves, strict=True)
    return jax.tree.unflatten(
        structure, [part.reshape(jnp.shape(leaf)).astype(jnp.result_type(leaf)) for part, leaf in parts]
    )
