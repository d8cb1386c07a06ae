"""The covariance of the gradient estimate, the whole matrix; its parts are explained in `objective`."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float
from streamgrad.theory.episode import Episode
from streamgrad.theory.spatial import make_alpha, same_group, spatial_of


def covariance(
    ep: Episode, alpha: Any = None, q0: Any = None, groups: int = 1, kurtosis: float = 0.0
) -> Float[Array, "P P"]:
    """The covariance of the total gradient estimate of `uoro`, exact: the whole matrix, for small models.

    Args:
      ep: from `collect`, with b kept.
      alpha: as in `v`.
      q0: as in `v`.
      groups: as in `uoro`. `preuoro` has the blocks of `groups=ep.size`, and others beside them.
      kurtosis: as in `total_variance`.

    Returns:
      The covariance of the gradient with respect to the cell's parameters, in the order of
      `jax.flatten_util.ravel_pytree`. The head's gradient is exact and has none.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.theory.collect(model, model.init(jax.random.key(0)), chunk)
      >>> sg.theory.covariance(ep).shape
      (28, 28)
    """
    spatial = spatial_of(ep, q0, groups)
    partition = spatial.partition
    alpha = make_alpha(alpha, ep.length, ep.dtype, partition)
    jacobian = dense_jacobian(ep)
    inverse = jnp.eye(ep.size, dtype=ep.dtype) if spatial.inverse is None else spatial.inverse
    inverse = jnp.diag(inverse) if inverse.ndim == 1 else inverse
    shaped = jnp.einsum("ki,qip->qkp", inverse, jacobian)  # Q_0^{-1} J_q

    squares = spatial.sum_groups(spatial.shape(ep.future) ** 2)
    weights = jnp.sum((alpha[None] / alpha[:, None]) ** 2 * squares, axis=1)  # for every q and group
    first = jnp.einsum("qkp,qk,qko->po", shaped, weights[:, partition.index], shaped)
    third = jnp.einsum("qkp,qk,qko->po", shaped, spatial.shape(ep.diagonal) ** 2, shaped)

    def partial_gradients(until: int) -> Float[Array, "T P"]:
        """F_s for until=0, F'_s for until=-1."""
        mask = np.tri(ep.length, k=until, dtype=bool)[:, :, None]
        return jnp.einsum("sqi,qip->sp", jnp.where(mask, ep.future, 0), jacobian)

    upto, before = partial_gradients(0), partial_gradients(-1)
    second = upto.T @ upto - before.T @ before
    if partition.count > 1:
        row = _row_of_parameter(ep)
        second = jnp.where(same_group(partition)[row][:, row], second, 0)
    return first + second + kurtosis * third


def dense_jacobian(ep: Episode) -> Float[Array, "T N P"]:
    """J_t as a matrix, parameters ravelled: I ⊗ a_t^T at preactivations."""
    if ep.jacobian is not None:
        return ep.jacobian
    features = jnp.concatenate([jnp.tile(a, (1, n)) for a, n in zip(ep.all_features, ep.rows, strict=True)], axis=1)
    own_row = _row_of_parameter(ep)[None, None, :] == np.arange(ep.size)[None, :, None]
    return jnp.where(own_row, features[:, None, :], 0)


def _row_of_parameter(ep: Episode) -> np.ndarray:
    """The row of each ravelled parameter, among those of all weight matrices, `[P]`."""
    widths = np.repeat([a.shape[1] for a in ep.all_features], ep.rows)
    return np.repeat(np.arange(ep.size), widths)
