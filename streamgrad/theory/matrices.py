"""C and B: the matrices that the optimal α and the optimal Q_0 are solved from (Sections 7.1.1 and 7.1.2).

Both are sums over pairs of steps (q, r). Pairs with r >= q need g_{r,r}, which every episode has; those with r < q come
from `Episode.fold`, the one place where it matters whether b is kept.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float, Int
from streamgrad.theory.episode import Episode
from streamgrad.theory.spatial import Spatial, feature_squares, group_norms, make_alpha, same_group, spatial_of


class PairSum(NamedTuple):
    """A sum over all pairs of steps (q, r).

    Attributes:
      earlier: `earlier(q[K], r[R], g[K, R, N])`, the terms of pairs with r < q.
      rest: the sum over the pairs with r >= q.
    """

    earlier: Callable[[Int[Array, " K"], Int[Array, " R"], Float[Array, "K R N"]], Array]
    rest: Array


def add_up(ep: Episode, *sums: PairSum) -> tuple[Array, ...]:
    """The totals of several sums, from one pass over the episode."""

    def visit(totals: tuple, q: Array, r: Array, g: Array) -> tuple:
        return tuple(total + one.earlier(q, r, g) for total, one in zip(totals, sums, strict=True))

    return ep.fold(visit, tuple(one.rest for one in sums))


def row_weights(ep: Episode, spatial: Spatial) -> Float[Array, "T N"]:
    """‖(Q_0^{-1} J_q)_k‖² for every step q and entry k."""
    if ep.jacobian is None:
        return spatial.row_weights(feature_squares(ep.all_features, ep.rows))
    if spatial.inverse is None:
        shaped = ep.jacobian
    elif spatial.inverse.ndim == 1:
        shaped = spatial.inverse[None, :, None] * ep.jacobian
    else:
        shaped = jnp.einsum("ki,qip->qkp", spatial.inverse, ep.jacobian)
    return jnp.sum(shaped**2, axis=2)


def weights_so_far(ep: Episode, alpha: Float[Array, "T G"], weights: Float[Array, "T G"]) -> Float[Array, "T G"]:
    """Σ_{q<=r} (α_r² / α_q²) weights_q for every r, over the steps of its own episode."""
    # The square of a quotient, not a quotient of squares, which would leave the range of float32 sooner.
    ratios = (alpha[None] / alpha[:, None]) ** 2
    return jnp.sum(jnp.where(ep.causal[:, :, None], ratios * weights[:, None], 0), axis=0)


def c_by_group(ep: Episode, spatial: Spatial, summed: bool = False) -> Float[Array, "T T G"]:
    """C of every group, the group last; or `[T, T, 1]`, their sum."""
    weights = spatial.sum_groups(row_weights(ep, spatial))

    def entries(weights: Float[Array, "Q 1 G"], g: Float[Array, "Q R N"]) -> Float[Array, "Q R _"]:
        values = spatial.sum_groups(spatial.shape(g) ** 2) * weights
        return jnp.sum(values, axis=-1, keepdims=True) if summed else values

    def visit(c: Array, q: Int[Array, " K"], r: Int[Array, " R"], g: Float[Array, "K R N"]) -> Array:
        return jax.lax.dynamic_update_slice(c, entries(weights[q][:, None], g), (q[0], r[0], jnp.zeros_like(r[0])))

    depth = 1 if summed else spatial.partition.count
    earlier = ep.fold(visit, jnp.zeros((ep.padded, ep.length, depth), ep.dtype))[: ep.length]
    later = jax.vmap(lambda w: entries(w[None, None], ep.diagonal[None])[0])(weights)
    return earlier + jnp.where(ep.causal[:, :, None], later, 0)


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
      >>> ep = sg.theory.collect(model, model.init(jax.random.key(0)), chunk)
      >>> sg.theory.c_matrix(ep).shape, sg.theory.c_matrix(ep, groups=2, per_group=True).shape
      ((5, 5), (2, 5, 5))
    """
    c = c_by_group(ep, spatial_of(ep, q0, groups), summed=not per_group)
    return jnp.moveaxis(c, -1, 0) if per_group else c[:, :, 0]


def b_matrix(ep: Episode, alpha: Any = None, groups: int = 1) -> Float[Array, "N N"]:
    """The matrix B that Q_0 is solved from (Equation 15).

        B = Σ_{q,r} (α_r² / α_q²) ‖a_q‖² g_{q,r} g_{q,r}^T with g_{q,r} = Σ_{t>=q} b_r^(t)
        V(Q) = tr(B Q_0 Q_0^T) tr((Q_0 Q_0^T)^{-1}), for each group

    Args:
      ep: from `collect`, at preactivations.
      alpha: as in `v`.
      groups: as in `uoro`; with several weight matrices each is at least a group.

    Returns:
      B. Each group has its own block on the diagonal; what lies between groups plays no part, and is zero.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.theory.collect(model, model.init(jax.random.key(0)), chunk)
      >>> sg.theory.b_matrix(ep).shape
      (4, 4)
    """
    if ep.jacobian is not None:
        raise ValueError(
            "b_matrix needs J J^T to be a multiple of the identity, as it is at preactivations: "
            "collect the episode at the cut 'preactivation'."
        )
    partition = spatial_of(ep, None, groups).partition
    alpha = make_alpha(alpha, ep.length, ep.dtype, partition)
    norms = group_norms(feature_squares(ep.all_features, ep.rows), partition)
    roots = jnp.sqrt(norms)

    def square(scale: Float[Array, "*any G"], g: Float[Array, "*any N"]) -> Float[Array, "N N"]:
        tall = (scale[..., partition.index] * g).reshape(-1, ep.size)
        return tall.T @ tall

    def earlier(q: Int[Array, " K"], r: Int[Array, " R"], g: Float[Array, "K R N"]) -> Float[Array, "N N"]:
        return square(alpha[r][None] / alpha[q][:, None] * roots[q][:, None], g)

    rest = square(jnp.sqrt(weights_so_far(ep, alpha, norms)), ep.diagonal)
    (b,) = add_up(ep, PairSum(earlier, rest))
    return jnp.where(same_group(partition), b, 0)
