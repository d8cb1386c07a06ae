"""The optimal α for a given C: matrix equilibration, elsewhere known as balancing in the 1-norm (Appendix C).

With ζ = log α² and C̄ = Z^{-1} C Z, Z = diag(exp ζ), V is the sum of all entries of C̄. It is convex in ζ; its gradient
is (C̄^T - C̄) 1 and its Hessian diag((C̄ + C̄^T) 1) - (C̄ + C̄^T). At the minimum every row of C̄ sums to the same as the
column of the same number. (The paper prints the gradient with the opposite sign; docs/errata.md.)

One coordinate at a time has a closed form, ζ_k += ½ log(row sum / column sum), due to Osborne. It mends what is wrong
with single steps, of whatever size, but is slow where whole groups of steps are out of balance with each other; there
Newton's method is good, which in turn is poor far away from the minimum. Hence both.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Bool, Float, Int
from streamgrad.checks import check_size, is_traced

# Newton's step times these; the best is taken. Far away from the minimum a step may be too short by any factor.
_LENGTHS = tuple(2.0**k for k in range(-8, 7))


class Solution(NamedTuple):
    """An optimal α, and how well it was found.

    Attributes:
      alpha: α, positive and finite, with a geometric mean of 1.
      value: V = Σ_{q,r} (α_r² / α_q²) C[q, r], the diagonal included.
      converged: whether the residual fell below the tolerance.
      iterations: Newton steps taken.
      residual: the largest difference between a row sum of C̄ and the column sum of the same number, relative to the
        larger one, diagonal left out.
    """

    alpha: Float[Array, " T"]
    value: Float[Array, ""]
    converged: Bool[Array, ""]
    iterations: Int[Array, ""]
    residual: Float[Array, ""]

    def message(self) -> str:
        """How it went, and what to try where it did not converge; for concrete values, outside of `jit`."""
        if not bool(np.all(np.isfinite(self.residual))):
            return "failed: C has entries that are not finite or are negative; look for a NaN in the episode."
        worst, most = float(np.max(self.residual)), int(np.max(self.iterations))
        if bool(np.all(self.converged)):
            return f"converged in {most} iterations to a residual of {worst:.1e}."
        return (
            f"not converged after {most} iterations: residual {worst:.1e}; alpha is usable, as V never increased. "
            "Try float64, a larger max_iterations, or a larger tolerance."
        )


def optimal_alpha(c: Any, max_iterations: int = 50, tolerance: float | None = None, sweeps: int = 2) -> Solution:
    """The α that minimises V(Q) for a given C (Section 7.1.1 and Appendix C).

        minimise over α > 0:   Σ_{q,r} (α_r² / α_q²) C[q, r]

    The answer does not depend on C's scale, nor on its diagonal. Where the minimum is not attained it is still finite:

    - a step whose row and column are zero (off the diagonal) plays no part, and has α = 1 before normalisation;
    - elsewhere a zero of C, such as all of a column where gradients have vanished, counts as ε² times the largest
      entry, where ε is the resolution of the dtype. That bounds α, which would otherwise run off to 0 or infinity, and
      what V loses by it is far below rounding.

    Args:
      c: C, `[T, T]`, not negative. `jax.vmap` over a batch of them, such as one for each group.
      max_iterations: the largest number of Newton steps.
      tolerance: of the residual; by default ε^(2/3), 4e-11 in float64 and 2e-5 in float32.
      sweeps: how many sweeps of Osborne's coordinate steps come first.

    Returns:
      The solution.

    Example:
      >>> import jax.numpy as jnp, streamgrad as sg
      >>> sol = sg.theory.optimal_alpha(jnp.array([[1.0, 16.0], [1.0, 1.0]]))
      >>> round(float(sol.value), 3), bool(sol.converged)  # 1 + 1 + 2 sqrt(16 * 1)
      (10.0, True)
      >>> round(float(sol.alpha[0] / sol.alpha[1]), 3)
      2.0

    References:
      Osborne, On pre-conditioning of matrices, 1960.
      Idel, A review of matrix scaling and Sinkhorn's normal form, 2016.
    """
    shape = np.shape(c)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
        raise ValueError(f"C must be a square matrix, not of shape {shape}; jax.vmap over a batch of them.")
    check_size(least=0, max_iterations=max_iterations, sweeps=sweeps)
    if not is_traced(c) and np.any(np.asarray(c) < 0):
        raise ValueError("C must not be negative anywhere.")
    c = jnp.asarray(c)
    c = c if jnp.issubdtype(c.dtype, jnp.floating) else c.astype(jnp.result_type(float))
    tolerance = float(jnp.finfo(c.dtype).eps) ** (2 / 3) if tolerance is None else float(tolerance)
    return _solve(c, max_iterations, tolerance, sweeps)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _solve(c: Float[Array, "T T"], max_iterations: int, tolerance: float, sweeps: int) -> Solution:
    eps = jnp.finfo(c.dtype).eps
    length = c.shape[0]
    off = jnp.where(np.eye(length, dtype=bool), 0, c)
    alive = (jnp.max(off, axis=0) > 0) | (jnp.max(off, axis=1) > 0)
    log_c = _log_filled(off, alive)

    def balanced(zeta: Array) -> Float[Array, "T T"]:
        return jnp.exp(log_c + zeta[None, :] - zeta[:, None])

    def residual(bar: Array) -> Float[Array, ""]:
        rows, columns = jnp.sum(bar, axis=1), jnp.sum(bar, axis=0)
        larger = jnp.maximum(rows, columns)
        return jnp.max(jnp.where(alive, jnp.abs(rows - columns) / jnp.where(alive, larger, 1), 0))

    def coordinate(k: Array, zeta: Array) -> Array:
        rows = jax.nn.logsumexp(log_c[k] + zeta)
        columns = jax.nn.logsumexp(log_c[:, k] - zeta)
        # V = exp(columns + ζ_k) + exp(rows - ζ_k) in this coordinate, the others fixed.
        return zeta.at[k].set(jnp.where(alive[k], (rows - columns) / 2, 0))

    def sweep(_: Any, zeta: Array) -> Array:
        return jax.lax.fori_loop(0, length, coordinate, zeta)

    def newton(carry: tuple) -> tuple:
        zeta, iterations, _ = carry
        bar = balanced(zeta)
        direction = _newton_direction(bar, alive)
        lengths = jnp.asarray(_LENGTHS, c.dtype)
        values = jax.vmap(lambda s: jnp.sum(balanced(zeta + s * direction)))(lengths)
        values = jnp.where(jnp.isfinite(values), values, jnp.inf)
        now, full = jnp.sum(bar), values[_LENGTHS.index(1.0)]
        best = jnp.argmin(values)
        # Near the minimum all of them agree to rounding, and the full step is the one that converges quadratically.
        step = jnp.where(full <= values[best] * (1 + 1e-4), 1.0, lengths[best])
        guarded = jnp.minimum(full, values[best]) <= now * (1 + 16 * eps)
        zeta = jnp.where(guarded, zeta + step * direction, zeta)
        # What Newton leaves in single coordinates, of whatever weight, one sweep mends.
        zeta = sweep(0, zeta)
        zeta = zeta - jnp.sum(jnp.where(alive, zeta, 0)) / jnp.maximum(jnp.sum(alive.astype(c.dtype)), 1)
        zeta = jnp.where(alive, zeta, 0)
        return zeta, iterations + 1, residual(balanced(zeta))

    def unfinished(carry: tuple) -> Bool[Array, ""]:
        _, iterations, worst = carry
        return (worst > tolerance) & (iterations < max_iterations)

    zeta = jax.lax.fori_loop(0, sweeps, sweep, jnp.zeros(length, c.dtype))
    start = (zeta, jnp.zeros((), jnp.int32), residual(balanced(zeta)))
    zeta, iterations, worst = jax.lax.while_loop(unfinished, newton, start)

    zeta = zeta - jnp.mean(zeta)
    ratios = jnp.exp(jnp.where(off > 0, jnp.log(jnp.where(off > 0, off, 1)) + zeta[None, :] - zeta[:, None], -jnp.inf))
    value = jnp.sum(ratios) + jnp.trace(c)
    good = jnp.all(jnp.isfinite(c) & (c >= 0))
    worst = jnp.where(good, worst, jnp.nan)
    return Solution(jnp.exp(zeta / 2), value, worst <= tolerance, iterations, worst)


def _log_filled(off: Float[Array, "T T"], alive: Bool[Array, " T"]) -> Float[Array, "T T"]:
    """log C relative to its largest entry; zeros between steps that play a part filled up, the others -inf."""
    largest = jnp.max(off)
    relative = off / jnp.where(largest > 0, largest, 1)
    tiny = float(jnp.finfo(off.dtype).eps) ** 2
    pair = alive[:, None] & alive[None, :] & ~np.eye(off.shape[0], dtype=bool)
    return jnp.where(pair, jnp.log(jnp.where(relative > 0, relative, tiny)), -jnp.inf)


def _newton_direction(bar: Float[Array, "T T"], alive: Bool[Array, " T"]) -> Float[Array, " T"]:
    """-H^{-1} (C̄^T - C̄) 1 across the direction 1, along which V does not change.

    H is the Laplacian of a graph whose weights may span many orders, so that it is scaled to a unit diagonal first. Its
    null vector is then known, and adding its square makes the system definite without touching the solution.
    """
    gradient = jnp.sum(bar, axis=0) - jnp.sum(bar, axis=1)
    both = bar + bar.T
    degree = jnp.where(alive, jnp.sum(both, axis=1), 1)
    root = jnp.sqrt(degree)
    null = jnp.where(alive, root, 0)
    null = null / jnp.maximum(jnp.linalg.norm(null), jnp.finfo(bar.dtype).tiny)
    scaled = jnp.eye(bar.shape[0], dtype=bar.dtype) - both / (root[:, None] * root[None, :])
    eps = jnp.finfo(bar.dtype).eps
    system = scaled + jnp.outer(null, null) + 4 * eps * jnp.eye(bar.shape[0], dtype=bar.dtype)
    direction = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(system), -gradient / root) / root
    direction = jnp.where(alive & jnp.all(jnp.isfinite(direction)), direction, 0)
    return direction
