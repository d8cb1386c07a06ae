"""V(Q) and the exact total variance of the gradient estimate, in corrected form (Sections 6.5, 7.1, 8; docs/errata.md).

With x_t = Q^T b^(t) and Y_t = Q^{-1} S^(t) J the estimate is Σ_t x_t^T u u^T Y_t, and by Corollary 1 its covariance is

    Σ_{s,t} (x_t·x_s) Y_t^T Y_s + Y_t^T x_s x_t^T Y_s + κ Y_t^T ((x_t x_s^T) ⊙ I) Y_s.

All three parts follow from g_{q,r} = Σ_{t>=q} b_r^(t) alone. The first is V(Q), or its matrix. In the third α cancels,
and it is Σ_q over (Q_0^{-1} J_q)_k scaled by (Q_0^T g_{q,q})_k. In the second Q cancels: Y_t^T x_s is the gradient of
L_s with respect to the parameters of the first t steps. Of two steps s, t only the earlier one limits, and summing the
later ones telescopes into

    Σ_s F_s F_s^T - F'_s F'_s^T,    F_s = Σ_{q<=s} J_q^T g_{s,q},    F'_s = Σ_{q<s} J_q^T g_{s,q}.

Noise of different groups is independent, and covariances between groups vanish. The trace of the second part is
therefore the same for any groups.

PreUORO (Section 8, Appendix H) has the V(Q) and the total variance of `uoro` with as many groups as preactivations, for
any Q_0: `groups=ep.size`. All rows of its estimate share τ, which changes only covariances between rows.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float, Int
from streamgrad.theory.episode import Episode
from streamgrad.theory.matrices import PairSum, add_up, row_weights, weights_so_far
from streamgrad.theory.spatial import Spatial, feature_squares, make_alpha, spatial_of


def v(ep: Episode, alpha: Any = None, q0: Any = None, groups: int = 1) -> Float[Array, ""]:
    """V(Q), the part of the total variance that α and Q_0 can change (Equation 10).

        V(Q) = Σ_{q,r} (α_r² / α_q²) ‖Σ_{t>=q} b_r^(t)T Q_0‖² ‖Q_0^{-1} J_q‖²,    summed over groups

    Args:
      ep: from `collect`.
      alpha: `[T]`, `[T, G]` with one for each group, `[T, M]` with one for each weight matrix, or None for ones.
      q0: Q_0, `[N, N]`, a diagonal `[N]`, or None for the identity. A matrix must not mix two groups; with one group
        and several weight matrices it may, and makes one group of all of them, as in `uoro`.
      groups: as in `uoro`; `ep.size` for `preuoro`.

    Returns:
      V(Q).

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.theory.collect(model, model.init(jax.random.key(0)), chunk)
      >>> sol = sg.theory.optimal_alpha(sg.theory.c_matrix(ep))
      >>> bool(sg.theory.v(ep, sol.alpha) < sg.theory.v(ep))
      True
      >>> round(float(sg.theory.v(ep) / sg.theory.v(ep, groups=ep.size)), 3)  # N, without noise shaping
      4.0
    """
    spatial = spatial_of(ep, q0, groups)
    return jnp.sum(v_by_group(ep, make_alpha(alpha, ep.length, ep.dtype, spatial.partition), spatial))


def v_by_group(ep: Episode, alpha: Float[Array, "T G"], spatial: Spatial) -> Float[Array, " G"]:
    """V(Q) of every group."""
    return add_up(ep, _v_sum(ep, alpha, spatial))[0]


def total_variance(
    ep: Episode, alpha: Any = None, q0: Any = None, groups: int = 1, kurtosis: float = 0.0
) -> Float[Array, ""]:
    """The trace of the covariance of the total gradient estimate of `uoro`, exact.

        V(Q) + Σ_{s,t} b^(s)T S^(t) J J^T S^(s) b^(t) + κ Σ_q Σ_k (Q_0^T g_{q,q})_k² ‖(Q_0^{-1} J_q)_k‖²

    where g_{q,q} = Σ_{t>=q} b_q^(t). The printed form has ‖dL/dθ‖² in place of the second term (docs/errata.md).

    Args:
      ep: from `collect`.
      alpha: as in `v`.
      q0: as in `v`.
      groups: as in `v`.
      kurtosis: κ, excess kurtosis of the noise: 0 for Gaussian, -2 for Rademacher.

    Returns:
      The total variance. α and Q_0 must not depend on the noise: this does not hold for GIR.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.theory.collect(model, model.init(jax.random.key(0)), chunk)
      >>> bool(sg.theory.total_variance(ep, kurtosis=-2.0) < sg.theory.total_variance(ep))
      True
    """
    spatial = spatial_of(ep, q0, groups)
    alpha = make_alpha(alpha, ep.length, ep.dtype, spatial.partition)
    value, cross = add_up(ep, _v_sum(ep, alpha, spatial), _cross_sum(ep))
    return jnp.sum(value) + cross + kurtosis * kurtosis_term(ep, spatial)


def cross_term(ep: Episode) -> Float[Array, ""]:
    """Σ_{s,t} b^(s)T S^(t) J J^T S^(s) b^(t), which neither α, Q_0 nor groups can change."""
    return add_up(ep, _cross_sum(ep))[0]


def kurtosis_term(ep: Episode, spatial: Spatial) -> Float[Array, ""]:
    """Σ_q Σ_k (Q_0^T g_{q,q})_k² ‖(Q_0^{-1} J_q)_k‖²: what every unit of kurtosis adds; never negative."""
    return jnp.sum(spatial.shape(ep.diagonal) ** 2 * row_weights(ep, spatial))


def spatial_total_variance(ep: Episode, q0: Any = None, kurtosis: float = 0.0) -> Float[Array, ""]:
    """The total variance of `spatial_rtrl`, exact: noise of different steps never meets, and steps add up.

        Σ_q ‖g_q^T Q_0‖² ‖Q_0^{-1} J_q‖² + ‖g_q^T J_q‖² + κ Σ_k (Q_0^T g_q)_k² ‖(Q_0^{-1} J_q)_k‖²,    g_q = g_{q,q}

    Args:
      ep: from `collect`.
      q0: as in `v`.
      kurtosis: κ, excess kurtosis of the noise: 0 for Gaussian, -2 for Rademacher.

    Returns:
      The trace of the covariance.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.theory.collect(model, model.init(jax.random.key(0)), chunk)
      >>> bool(sg.theory.spatial_total_variance(ep) < sg.theory.total_variance(ep))
      True
    """
    spatial = spatial_of(ep, q0)
    squares, weights = spatial.shape(ep.diagonal) ** 2, row_weights(ep, spatial)
    value = jnp.sum(jnp.sum(squares, axis=1) * jnp.sum(weights, axis=1))
    return value + _cross_sum(ep).rest + kurtosis * jnp.sum(squares * weights)


def _v_sum(ep: Episode, alpha: Float[Array, "T G"], spatial: Spatial) -> PairSum:
    """V(Q) of every group, as a sum over pairs of steps."""
    weights = spatial.sum_groups(row_weights(ep, spatial))

    def earlier(q: Int[Array, " K"], r: Int[Array, " R"], g: Float[Array, "K R N"]) -> Float[Array, " G"]:
        ratios = (alpha[r][None] / alpha[q][:, None]) ** 2
        return jnp.sum(spatial.sum_groups(spatial.shape(g) ** 2) * ratios * weights[q][:, None], axis=(0, 1))

    later = spatial.sum_groups(spatial.shape(ep.diagonal) ** 2)
    return PairSum(earlier, jnp.sum(later * weights_so_far(ep, alpha, weights), axis=0))


def _cross_sum(ep: Episode) -> PairSum:
    """The cross term: ‖F_s‖² - ‖F'_s‖² = ‖J_s^T g_{s,s}‖² + 2 Σ_{q<s} (J_s^T g_{s,s})·(J_q^T g_{s,q})."""
    if ep.jacobian is not None:
        now = jnp.einsum("si,sip->sp", ep.diagonal, ep.jacobian)

        def earlier_dense(q: Int[Array, " K"], r: Int[Array, " R"], g: Float[Array, "K R N"]) -> Float[Array, ""]:
            return 2 * jnp.einsum("kri,rip,kp->", g, ep.jacobian[r], now[q])

        return PairSum(earlier_dense, jnp.sum(now**2))
    ends = np.cumsum(ep.rows)[:-1]
    features, diagonals = ep.all_features, jnp.split(ep.diagonal, ends, axis=1)

    def earlier(q: Int[Array, " K"], r: Int[Array, " R"], g: Float[Array, "K R N"]) -> Float[Array, ""]:
        total = jnp.zeros((), g.dtype)
        for a, diagonal, part in zip(features, diagonals, jnp.split(g, ends, axis=2), strict=True):
            total += jnp.sum((a[q] @ a[r].T) * jnp.einsum("kri,ki->kr", part, diagonal[q]))
        return 2 * total

    return PairSum(earlier, jnp.sum(feature_squares(features, ep.rows) * ep.diagonal**2))
