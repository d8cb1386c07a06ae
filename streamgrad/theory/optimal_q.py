"""The optimal Q_0 for a given B, and the theorem behind it (Section 7.1.2 and Appendix E)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float


class Gain(NamedTuple):
    """What the optimal Q_0 saves.

    Attributes:
      shaped: tr(B^{1/2})², V with the optimal Q_0.
      plain: tr(B) N, V with Q_0 = I.
      ratio: plain / shaped, at least 1 and at most N.
    """

    shaped: Float[Array, ""]
    plain: Float[Array, ""]
    ratio: Float[Array, ""]


class TraceProduct(NamedTuple):
    """The smallest product of traces.

    Attributes:
      a: the positive definite matrix A that attains it.
      value: tr(X A) tr(Y A^{-1}) = tr((X Y)^{1/2})².
    """

    a: Float[Array, "N N"]
    value: Float[Array, ""]


def optimal_q0(b: Any, damping: float = 0.005, partition: Any = None) -> Float[Array, "N N"]:
    """The Q_0 that minimises V(Q) for a given B, damped (Section 7.1.2; the printed exponent 1/4 lacks its sign).

        Q_0 = (B + damping tr(B)/N I)^{-1/4}

    Symmetric, positive definite and finite for any positive semidefinite B, also where it is singular, zero, or, as an
    estimate may be, not quite positive: eigenvalues below ε times the largest count as that.

    Args:
      b: B, `[N, N]`, symmetric.
      damping: how much of the mean eigenvalue to add to all of them.
      partition: to which group each entry belongs, `[N]`, as `partition(ep, groups)` gives it, or None for one group.
        Each group is damped on its own, and Q_0 is exactly zero between groups.

    Returns:
      Q_0. Its scale is arbitrary: V(Q) does not depend on it.

    Example:
      >>> import jax.numpy as jnp, streamgrad as sg
      >>> sg.theory.optimal_q0(jnp.diag(jnp.array([16.0, 1.0])), damping=0.0).round(3).tolist()
      [[0.5, 0.0], [0.0, 1.0]]
    """
    size = _check_square("B", b)
    check_damping(damping)
    index = np.zeros(size, int) if partition is None else np.asarray(partition)
    if index.shape != (size,):
        raise ValueError(f"partition must say to which group each of the {size} entries belongs, not {index.shape}.")
    mine = index[:, None] == index[None, :]
    b = jnp.asarray(b)
    b = jnp.where(mine, (b + b.T) / 2, 0)
    # Scale-free, and ready for float32: each group relative to the mean of its own eigenvalues.
    mean = jnp.asarray(mine, b.dtype) @ jnp.diagonal(b) / jnp.asarray(mine.sum(axis=1), b.dtype)
    mean = jnp.where(mean > 0, mean, 1)
    scale = jnp.sqrt(mean)
    relative = b / scale[:, None] / scale[None, :] + damping * jnp.eye(size, dtype=b.dtype)
    values, vectors = jnp.linalg.eigh(relative)
    floor = jnp.finfo(b.dtype).eps * jnp.maximum(jnp.max(values), 1)
    root = (vectors * jnp.maximum(values, floor)[None, :] ** -0.25) @ vectors.T
    # Rounding may leave traces between groups whose eigenvalues are close.
    root = jnp.where(mine, (root + root.T) / 2, 0)
    return root * scale[:, None] ** -0.25 * scale[None, :] ** -0.25


def predicted_gain(b: Any) -> Gain:
    """What noise shaping saves: tr(B^{1/2})² against tr(B) N (Section 7.1.2).

    Args:
      b: B, `[N, N]`, for one group.

    Returns:
      Both, and their quotient; 1 where B is zero.

    Example:
      >>> import jax.numpy as jnp, streamgrad as sg
      >>> gain = sg.theory.predicted_gain(jnp.diag(jnp.array([9.0, 1.0])))
      >>> round(float(gain.shaped), 3), round(float(gain.plain), 3), round(float(gain.ratio), 3)
      (16.0, 20.0, 1.25)
    """
    size = _check_square("B", b)
    b = jnp.asarray(b)
    values = jnp.maximum(jnp.linalg.eigvalsh((b + b.T) / 2), 0)
    shaped, plain = jnp.sum(jnp.sqrt(values)) ** 2, jnp.sum(values) * size
    return Gain(shaped, plain, jnp.where(shaped > 0, plain / jnp.where(shaped > 0, shaped, 1), 1))


def minimise_trace_product(x: Any, y: Any) -> TraceProduct:
    """Minimise tr(X A) tr(Y A^{-1}) over positive definite A (Appendix E).

        A = X^{-1/2} (X^{1/2} Y X^{1/2})^{1/2} X^{-1/2},    so that A X A = Y

    Args:
      x: X, `[N, N]`, symmetric and positive definite.
      y: Y, `[N, N]`, symmetric and positive definite.

    Returns:
      A and the minimum, tr((X Y)^{1/2})². Where X or Y is singular the minimum need not be attained; A is then the
      minimiser for eigenvalues that are at least ε times the largest.

    Example:
      >>> import jax.numpy as jnp, streamgrad as sg
      >>> best = sg.theory.minimise_trace_product(jnp.diag(jnp.array([4.0, 1.0])), jnp.eye(2))
      >>> round(float(best.value), 3)
      9.0
    """
    if _check_square("X", x) != _check_square("Y", y):
        raise ValueError(f"X and Y must have the same shape, not {np.shape(x)} and {np.shape(y)}.")
    x, y = jnp.asarray(x), jnp.asarray(y)
    values, vectors = _floored_eigh(x)
    root = (vectors * jnp.sqrt(values)[None, :]) @ vectors.T
    inverse_root = (vectors / jnp.sqrt(values)[None, :]) @ vectors.T
    y_values, y_vectors = _floored_eigh(y)
    middle = root @ ((y_values[None, :] * y_vectors) @ y_vectors.T) @ root
    m_values, m_vectors = _floored_eigh(middle)
    a = inverse_root @ ((m_vectors * jnp.sqrt(m_values)[None, :]) @ m_vectors.T) @ inverse_root
    return TraceProduct((a + a.T) / 2, jnp.sum(jnp.sqrt(m_values)) ** 2)


def check_damping(damping: Any) -> None:
    """`damping` is a finite number, not negative."""
    if not isinstance(damping, int | float) or not 0 <= damping < np.inf:
        raise ValueError(f"damping must be a finite number of at least 0, not {damping!r}.")


def _floored_eigh(x: Float[Array, "N N"]) -> tuple[Float[Array, " N"], Float[Array, "N N"]]:
    values, vectors = jnp.linalg.eigh((x + x.T) / 2)
    largest = jnp.max(values)
    floor = jnp.finfo(x.dtype).eps * jnp.where(largest > 0, largest, 1)
    return jnp.maximum(values, floor), vectors


def _check_square(name: str, x: Any) -> int:
    shape = np.shape(x)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
        raise ValueError(f"{name} must be a square matrix, not of shape {shape}.")
    return shape[0]
