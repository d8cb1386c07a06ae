"""C and B: the matrices that the optimal α and the optimal Q_0 are solved from (Sections 7.1.1 and 7.1.2)."""

from typing import Any

import jax.numpy as jnp

from streamgrad._typing import Array, Float
from streamgrad.theory.episode import Episode
from streamgrad.theory.shaping import (
    Spatial,
    group_norms,
    make_alpha,
    make_spatial,
    row_squares,
    same_group,
)


def spatial_of(ep: Episode, groups: Any, q0: Any) -> Spatial:
    """Q_0 and groups for an episode, checked."""
    return make_spatial(ep.rows, ep.cut, groups, q0, ep.b.dtype)


def row_weights(ep: Episode, spatial: Spatial) -> Float[Array, "T N"]:
    """‖(Q_0^{-1} J_q)_k‖² for every step q and entry k."""
    if ep.jacobian is None:
        return spatial.row_weights(row_squares(ep.all_features, ep.rows))
    if spatial.inverse is None:
        shaped = ep.jacobian
    elif spatial.inverse.ndim == 1:
        shaped = spatial.inverse[None, :, None] * ep.jacobian
    else:
        shaped = jnp.einsum("ki,qip->qkp", spatial.inverse, ep.jacobian)
    return jnp.sum(shaped**2, axis=2)


def c_by_group(ep: Episode, spatial: Spatial) -> Float[Array, "T T G"]:
    """C of every group, the group last."""
    squares = spatial.sum_groups(spatial.shape(ep.future) ** 2)
    return squares * spatial.sum_groups(row_weights(ep, spatial))[:, None, :]


def c_matrix(ep: Episode, q0: Any = None, groups: int = 1, per_group: bool = False) -> Array:
    """The matrix C that α is solved from (Equation 12).

        C[q, r] = ‖Σ_{t>=q} b_r^(t)T Q_0‖² ‖Q_0^{-1} J_q‖²,    V(Q) = Σ_{q,r} (α_r² / α_q²) C[q, r]

    Args:
      ep: from `collect`.
      q0: Q_0, `[N, N]`, a diagonal `[N]`, or None for the identity.
      groups: as in `uoro`; every group has a C of its own.
      per_group: whether to return them all, for an α per group, or their sum, for an α that all groups share.

    Returns:
      C, `[T, T]`; or `[G, T, T]` with `per_group`.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.variance.collect(model, model.init(jax.random.key(0)), chunk)
      >>> sg.variance.c_matrix(ep).shape, sg.variance.c_matrix(ep, groups=2, per_group=True).shape
      ((5, 5), (2, 5, 5))
    """
    by_group = c_by_group(ep, spatial_of(ep, groups, q0))
    return jnp.moveaxis(by_group, -1, 0) if per_group else jnp.sum(by_group, axis=-1)


def b_matrix(ep: Episode, alpha: Any = None, groups: int = 1) -> Float[Array, "N N"]:
    """The matrix B that Q_0 is solved from (Equation 15).

        B = Σ_{q,r} (α_r² / α_q²) ‖a_q‖² g_{q,r} g_{q,r}^T with g_{q,r} = Σ_{t>=q} b_r^(t)
        V(Q) = tr(B Q_0 Q_0^T) tr((Q_0 Q_0^T)^{-1}), for each group

    Args:
      ep: from `collect`, at preactivations.
      alpha: `[T]`, `[T, G]`, or None for ones.
      groups: as in `uoro`; with several weight matrices each is at least a group.

    Returns:
      B. Each group has its own block on the diagonal; what lies between groups plays no part, and is zero.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.variance.collect(model, model.init(jax.random.key(0)), chunk)
      >>> sg.variance.b_matrix(ep).shape
      (4, 4)
    """
    if ep.jacobian is not None:
        raise ValueError(
            "b_matrix needs J J^T to be a multiple of the identity, as it is at preactivations: "
            "collect the episode at the cut 'preactivation'."
        )
    groups_of = spatial_of(ep, groups, None).groups
    alpha = make_alpha(alpha, ep.length, groups_of.count, ep.b.dtype)
    norms = group_norms(row_squares(ep.all_features, ep.rows), groups_of)
    # A scale for each (q, r) and entry, so that B is one product of a tall matrix with itself.
    scale = (alpha[None] / alpha[:, None] * jnp.sqrt(norms)[:, None])[:, :, groups_of.index]
    tall = (scale * ep.future).reshape(-1, ep.size)
    return jnp.where(same_group(groups_of), tall.T @ tall, 0)
