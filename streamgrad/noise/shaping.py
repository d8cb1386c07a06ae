"""Noise shaping: the constant matrix Q_0 by which the noise is given another covariance (Section 6.3).

The tangent receives Q_0 u and the cotangent Q_0^{-T} u; since E[Q_0 u u^T Q_0^{-1}] = I, any invertible Q_0 leaves the
estimate unbiased.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float
from streamgrad.checks import is_traced


class Shaping(NamedTuple):
    """Q_0 with its inverse; part of an estimator's shared state, so that it may change without a new trace.

    Attributes:
      q0: Q_0, `[N, N]` or, if diagonal, `[N]`.
      inverse: Q_0^{-1}, of the same shape.
    """

    q0: Array
    inverse: Array


class Shaped(NamedTuple):
    """The two sides of one noise.

    Attributes:
      right: Q_0 u, for the tangent.
      left: Q_0^{-T} u, for the cotangent.
    """

    right: Float[Array, "*T N"]
    left: Float[Array, "*T N"]


def shaping(q0: Any, dtype: Any = None) -> Shaping | None:
    """Q_0, `[N, N]` or `[N]` for a diagonal matrix, with its inverse; None stands for the identity.

    Example:
      >>> import jax.numpy as jnp
      >>> shaping(jnp.array([2.0, 4.0])).inverse.tolist()
      [0.5, 0.25]
    """
    if q0 is None:
        return None
    q0 = jnp.asarray(q0, dtype)
    return Shaping(q0, 1 / q0 if q0.ndim == 1 else jnp.linalg.inv(q0))


def shape_noise(pair: Shaping | None, u: Float[Array, "T N"]) -> Shaped:
    """Q_0 u and Q_0^{-T} u for all of a chunk's noise at once."""
    if pair is None:
        return Shaped(u, u)
    if pair.q0.ndim == 1:
        return Shaped(u * pair.q0[None], u * pair.inverse[None])
    # Rows of u are vectors, so that the products stand the other way round: (Q u)^T = u^T Q^T. In full precision: that
    # E[Q_0 u u^T Q_0^{-1}] = I is what keeps the estimate unbiased, and a GPU's default would round it to three digits.
    right = jnp.matmul(u, pair.q0.T, precision="highest")
    return Shaped(right, jnp.matmul(u, pair.inverse, precision="highest"))


def shape_gradient(pair: Shaping | None, dl_dz: Float[Array, " N"]) -> Float[Array, " N"]:
    """Q_0^T dL/dz, whose squared norm is the mean square of (dL/dz)^T Q_0 u."""
    if pair is None:
        return dl_dz
    return dl_dz * pair.q0 if pair.q0.ndim == 1 else dl_dz @ pair.q0


def diagonal_q0(pulled: Float[Array, " N"], pushed: Float[Array, " N"]) -> Float[Array, " N"]:
    """The diagonal Q of Tallec and Ollivier, which Section 6.3 mentions.

        q_i² ∝ ‖dz_i/dθ‖ / ‖dh/dz_i‖

    It balances the terms of one step, and leaves out the cross terms between steps that make up most of the variance.
    At the state cut, where dh/dz = I, it is NoBackTrack's scaling of each unit.

    Args:
      pulled: ‖dz_i/dθ‖ for every entry of z.
      pushed: ‖dh/dz_i‖ likewise.

    Returns:
      The diagonal, with a geometric mean of 1; entries where either norm is zero are 1, as their product is zero, too.

    Example:
      >>> import jax.numpy as jnp, streamgrad as sg
      >>> sg.theory.diagonal_q0(jnp.array([4.0, 1.0]), jnp.array([1.0, 4.0])).round(3).tolist()
      [2.0, 0.5]
    """
    if jnp.shape(pulled) != jnp.shape(pushed) or jnp.ndim(pulled) != 1:
        raise ValueError(
            f"pulled and pushed must be two vectors of one size, not {jnp.shape(pulled)}, {jnp.shape(pushed)}."
        )
    alive = (pulled > 0) & (pushed > 0)
    log_q = jnp.where(alive, (jnp.log(jnp.where(alive, pulled, 1)) - jnp.log(jnp.where(alive, pushed, 1))) / 2, 0)
    mean = jnp.sum(log_q) / jnp.maximum(jnp.sum(alive.astype(log_q.dtype)), 1)
    return jnp.exp(jnp.where(alive, log_q - mean, 0))


def check_q0(q0: Any, size: int) -> None:
    """`q0` is an invertible matrix `[N, N]`, or an invertible diagonal `[N]`, of finite numbers."""
    if q0 is None:
        return
    try:
        shape = np.shape(q0)
    except ValueError as error:
        raise ValueError("q0 must be a matrix or a vector, but its rows have different lengths.") from error
    if shape not in ((size,), (size, size)):
        raise ValueError(
            f"q0 must have the shape ({size}, {size}), or ({size},) for a diagonal, as this cut has the size {size}; "
            f"not {shape}."
        )
    if is_traced(q0):
        return
    matrix = np.asarray(q0)
    if not np.issubdtype(matrix.dtype, np.floating) and not np.issubdtype(matrix.dtype, np.integer):
        raise ValueError(f"q0 must be real, not {matrix.dtype}.")
    matrix = np.asarray(matrix, np.float64)
    if not np.all(np.isfinite(matrix)):
        raise ValueError("q0 must be finite.")
    singular_values = np.abs(matrix) if matrix.ndim == 1 else np.linalg.svd(matrix, compute_uv=False)
    if singular_values.min() <= singular_values.max() * size * np.finfo(np.float64).eps:
        raise ValueError("q0 must be invertible, but it is singular.")
