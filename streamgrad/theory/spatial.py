"""How α, Q_0 and groups enter the variance: the common part of C, B, V(Q) and the total variance."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float
from streamgrad.checks import is_traced
from streamgrad.noise.groups import Groups, make_groups
from streamgrad.noise.shaping import Shaping, check_q0, shaping
from streamgrad.step.cuts import Layout
from streamgrad.theory.episode import Episode


class Spatial(NamedTuple):
    """The spatial side of a noise, Q_0 and groups, ready for use.

    Attributes:
      partition: the groups of the entries of z.
      q0: Q_0, `[N, N]`, `[N]` or None for the identity.
      inverse: Q_0^{-1}, of the same shape.
    """

    partition: Groups
    q0: Array | None
    inverse: Array | None

    def shape(self, g: Float[Array, "*any N"]) -> Float[Array, "*any N"]:
        """g^T Q_0, for any number of vectors g."""
        if self.q0 is None:
            return g
        return g * _along_last(self.q0, g.ndim) if self.q0.ndim == 1 else g @ self.q0

    def sum_groups(self, x: Float[Array, "*any N"]) -> Float[Array, "*any G"]:
        """Sum over the entries of each group."""
        if self.partition.count == 1:
            return jnp.sum(x, axis=-1, keepdims=True)
        one_hot = self.partition.index[:, None] == np.arange(self.partition.count)[None, :]
        return x @ jnp.asarray(one_hot, x.dtype)

    def row_weights(self, squares: Float[Array, "T N"]) -> Float[Array, "T N"]:
        """‖(Q_0^{-1} J_q)_k‖² for every entry k, where J_q J_q^T is diagonal with the entries `squares[q]`."""
        if self.inverse is None:
            return squares
        if self.inverse.ndim == 1:
            return squares * self.inverse[None] ** 2
        return squares @ (self.inverse**2).T


def spatial_of(ep: Episode, q0: Any = None, groups: int = 1) -> Spatial:
    """Q_0 and groups for an episode, as in `uoro`, checked."""
    check_q0(q0, ep.size)
    found = make_groups(Layout(ep.size, 0, ep.rows), ep.cut, groups, q0)
    return with_shaping(found, shaping(q0, ep.dtype))


def with_shaping(groups: Groups, pair: Shaping | None) -> Spatial:
    """Groups with Q_0 and its inverse; None for the identity."""
    return Spatial(groups, None, None) if pair is None else Spatial(groups, pair.q0, pair.inverse)


def partition(ep: Episode, groups: int = 1) -> np.ndarray:
    """To which group each entry of z belongs, `[N]`, as `uoro(groups=...)` has it without a full Q_0.

    Args:
      ep: from `collect`.
      groups: as in `uoro`.

    Returns:
      The index, for `optimal_q0(B, partition=...)`.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 2), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.theory.collect(model, model.init(jax.random.key(0)), chunk)
      >>> sg.theory.partition(ep).tolist()
      [0, 0, 1, 1, 2, 2, 2, 2]
    """
    return spatial_of(ep, None, groups).partition.index


def make_alpha(alpha: Any, length: int, dtype: Any, partition: Groups | None = None) -> Float[Array, "T G"]:
    """α for every step and group, checked, from `[T]`, `[T, G]`, `[T, M]` with one for each weight matrix, or None.

    Columns for matrices and for groups cannot be confused: where there are as many of both, each matrix is a group.
    """
    count = 1 if partition is None else partition.count
    if alpha is None:
        return jnp.ones((length, count), dtype)
    shape = np.shape(alpha)
    matrices = 1 if partition is None or len(partition.rows) > count else len(partition.rows)
    if shape not in ((length,), (length, 1), (length, count), (length, matrices)):
        raise ValueError(
            f"alpha must have the shape ({length},), or ({length}, {count}) with a column for each group, not {shape}."
        )
    if not is_traced(alpha):
        values = np.asarray(alpha)
        if not np.all(np.isfinite(values)) or not np.all(values > 0):
            raise ValueError("alpha must be finite and positive.")
    values = jnp.asarray(alpha, dtype)
    if partition is not None and len(shape) == 2 and shape[1] not in (1, count):
        values = values[:, matrix_of_group(partition)]
    return jnp.broadcast_to(values[:, None] if values.ndim == 1 else values, (length, count))


def squeeze_groups(x: Float[Array, "T G"]) -> Array:
    """`[T]` where there is one group, the common case; `[T, G]` where there are several."""
    return x[:, 0] if x.shape[1] == 1 else x


def same_group(partition: Groups) -> np.ndarray:
    """`[N, N]`, whether two entries belong to the same group."""
    return partition.index[:, None] == partition.index[None, :]


def matrix_of_row(rows: tuple[int, ...]) -> np.ndarray:
    """The weight matrix of each entry of z, `[N]`."""
    return np.repeat(np.arange(len(rows)), rows)


def matrix_of_group(partition: Groups) -> np.ndarray:
    """The weight matrix of each group, `[G]`; every group must lie inside one."""
    return matrix_of_row(partition.rows)[np.unique(partition.index, return_index=True)[1]]


def feature_squares(features: tuple[Float[Array, "T _"], ...], rows: tuple[int, ...]) -> Float[Array, "T N"]:
    """The diagonal of J_t J_t^T: ‖a_t‖² of the weight matrix that each entry of z belongs to."""
    norms = jnp.stack([jnp.sum(a**2, axis=1) for a in features], axis=1)
    return norms[:, matrix_of_row(rows)]


def group_norms(squares: Float[Array, "T N"], partition: Groups) -> Float[Array, "T G"]:
    """‖a_t‖² of each group; every group must lie inside one weight matrix."""
    return squares[:, np.unique(partition.index, return_index=True)[1]]


def _along_last(x: Array, ndim: int) -> Array:
    return jax.lax.expand_dims(x, tuple(range(ndim - 1)))
