"""How α, Q_0 and groups enter the variance: what C, B, V(Q) and the total variance share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float
from streamgrad.checks import is_traced
from streamgrad.noise.groups import Groups, make_groups
from streamgrad.noise.shaping import check_q0, shaping
from streamgrad.step.cuts import Layout
from streamgrad.theory.episode import matrix_of_row


class Spatial(NamedTuple):
    """The spatial side of a noise, Q_0 and groups, ready for use.

    Attributes:
      groups: the partition of z.
      q0: Q_0, `[N, N]`, `[N]` or None for the identity.
      inverse: Q_0^{-1}, of the same shape.
    """

    groups: Groups
    q0: Array | None
    inverse: Array | None

    def shape(self, g: Float[Array, "*any N"]) -> Float[Array, "*any N"]:
        """g^T Q_0, for any number of vectors g."""
        if self.q0 is None:
            return g
        return g * _along_last(self.q0, g.ndim) if self.q0.ndim == 1 else g @ self.q0

    def sum_groups(self, x: Float[Array, "*any N"]) -> Float[Array, "*any G"]:
        """Sum over the entries of each group."""
        if self.groups.count == 1:
            return jnp.sum(x, axis=-1, keepdims=True)
        return x @ jnp.asarray(one_hot(self.groups), x.dtype)

    def row_weights(self, squares: Float[Array, "T N"]) -> Float[Array, "T N"]:
        """‖(Q_0^{-1} J_q)_k‖² for every entry k, where J_q J_q^T is diagonal with the entries `squares[q]`."""
        if self.inverse is None:
            return squares
        if self.inverse.ndim == 1:
            return squares * self.inverse[None] ** 2
        return squares @ (self.inverse**2).T


def make_spatial(rows: tuple[int, ...], cut: str, groups: Any, q0: Any, dtype: Any) -> Spatial:
    """Check Q_0 and the number of groups, and put them together.

    Args:
      rows: how many entries of z each weight matrix has.
      cut: where z is.
      groups: as in `uoro`.
      q0: as in `uoro`.
      dtype: to compute in.

    Returns:
      The two together.
    """
    size = sum(rows)
    check_q0(q0, size)
    partition = make_groups(Layout(size, 0, rows), cut, groups, q0)
    pair = shaping(q0, dtype)
    return Spatial(partition, None, None) if pair is None else Spatial(partition, pair.q0, pair.inverse)


def make_alpha(alpha: Any, length: int, columns: int, dtype: Any, what: str = "groups") -> Float[Array, "T G"]:
    """α for every step and group; None is all ones, `[T]` is the same for all groups."""
    if alpha is None:
        return jnp.ones((length, columns), dtype)
    shape = np.shape(alpha)
    if shape not in ((length,), (length, 1), (length, columns)):
        raise ValueError(
            f"alpha must have the shape ({length},), or ({length}, {columns}) with a column for each of the {what}, "
            f"not {shape}."
        )
    if not is_traced(alpha):
        values = np.asarray(alpha)
        if not np.all(np.isfinite(values)) or not np.all(values > 0):
            raise ValueError("alpha must be finite and positive.")
    values = jnp.asarray(alpha, dtype)
    return jnp.broadcast_to(values[:, None] if values.ndim == 1 else values, (length, columns))


def squeeze_groups(x: Float[Array, "T G"]) -> Array:
    """`[T]` where there is one group, so that the common case stays simple; `[T, G]` where there are several."""
    return x[:, 0] if x.shape[1] == 1 else x


def one_hot(groups: Groups) -> np.ndarray:
    """`[N, G]`, 1 where an entry belongs to a group."""
    return groups.index[:, None] == np.arange(groups.count)[None, :]


def same_group(groups: Groups) -> np.ndarray:
    """`[N, N]`, whether two entries belong to the same group."""
    return groups.index[:, None] == groups.index[None, :]


def row_squares(features: tuple[Float[Array, "T _"], ...], rows: tuple[int, ...]) -> Float[Array, "T N"]:
    """The diagonal of J_t J_t^T: ‖a_t‖² of the weight matrix that each entry of z belongs to."""
    norms = jnp.stack([jnp.sum(a**2, axis=1) for a in features], axis=1)
    return norms[:, matrix_of_row(rows)]


def group_norms(squares: Float[Array, "T N"], groups: Groups) -> Float[Array, "T G"]:
    """‖a_t‖² of each group; every group must lie inside one weight matrix."""
    first = np.array([np.flatnonzero(groups.index == g)[0] for g in range(groups.count)])
    return squares[:, first]


def _along_last(x: Array, ndim: int) -> Array:
    return jax.lax.expand_dims(x, tuple(range(ndim - 1)))
