"""The exact variance of the total gradient estimate, in the corrected form (Sections 6.5, 7.1 and 8; docs/errata.md).

With x_t = Q^T b^(t) and Y_t = Q^{-1} S^(t) J the estimate is Σ_t x_t^T u u^T Y_t, and by Corollary 1 its covariance is

    Σ_{s,t} (x_t·x_s) Y_t^T Y_s + Y_t^T x_s x_t^T Y_s + κ Y_t^T ((x_t x_s^T) ⊙ I) Y_s.

All three parts follow from g_{q,r} = Σ_{t>=q} b_r^(t) alone. The first is V(Q), or its matrix. In the third α cancels,
and it is Σ_q over (Q_0^{-1} J_q)_k scaled by (Q_0^T g_{q,q})_k. In the second Q cancels: Y_t^T x_s is the gradient of
L_s with respect to the parameters of the first t steps. Of two steps s, t only the earlier one limits, and summing the
later ones telescopes into

    Σ_s F_s F_s^T - F'_s F'_s^T,    F_s = Σ_{q<=s} J_q^T g_{s,q},    F'_s = Σ_{q<s} J_q^T g_{s,q}.

Noise of different groups is independent, so that covariances between groups vanish. The trace of the second part is
therefore the same for any groups.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float
from streamgrad.theory.episode import Episode, matrix_of_row
from streamgrad.theory.matrices import c_by_group, row_weights, spatial_of
from streamgrad.theory.shaping import Spatial, make_alpha, same_group


def v(ep: Episode, alpha: Any = None, q0: Any = None, groups: int = 1) -> Float[Array, ""]:
    """V(Q), the part of the total variance that α and Q_0 can change (Equation 10).

        V(Q) = Σ_{q,r} (α_r² / α_q²) ‖Σ_{t>=q} b_r^(t)T Q_0‖² ‖Q_0^{-1} J_q‖²,    summed over groups

    Args:
      ep: from `collect`.
      alpha: `[T]`, `[T, G]` with one for each group, or None for ones.
      q0: Q_0, `[N, N]`, a diagonal `[N]`, or None for the identity. A matrix must not mix two groups; with one group
        and several weight matrices it may, and makes one group of all of them, as in `uoro`.
      groups: as in `uoro`.

    Returns:
      V(Q).

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.variance.collect(model, model.init(jax.random.key(0)), chunk)
      >>> sol = sg.variance.optimal_alpha(sg.variance.c_matrix(ep))
      >>> bool(sg.variance.v(ep, sol.alpha) < sg.variance.v(ep))
      True
    """
    spatial = spatial_of(ep, groups, q0)
    return jnp.sum(v_by_group(ep, alpha, spatial))


def v_by_group(ep: Episode, alpha: Any, spatial: Spatial) -> Float[Array, " G"]:
    """V(Q) of every group."""
    alpha = make_alpha(alpha, ep.length, spatial.groups.count, ep.b.dtype)
    # The square of a quotient, not a quotient of squares, which would leave the range of float32 sooner.
    return jnp.sum(c_by_group(ep, spatial) * (alpha[None] / alpha[:, None]) ** 2, axis=(0, 1))


def total_variance(
    ep: Episode, alpha: Any = None, q0: Any = None, kurtosis: float = 0.0, groups: int = 1
) -> Float[Array, ""]:
    """The trace of the covariance of the total gradient estimate of `uoro`, exact.

        V(Q) + Σ_{s,t} b^(s)T S^(t) J J^T S^(s) b^(t) + κ Σ_q Σ_k (Q_0^T g_{q,q})_k² ‖(Q_0^{-1} J_q)_k‖²

    where g_{q,q} = Σ_{t>=q} b_q^(t). The printed form has ‖dL/dθ‖² in place of the second term (docs/errata.md).

    Args:
      ep: from `collect`.
      alpha: as in `v`.
      q0: as in `v`.
      kurtosis: κ, excess kurtosis of the noise: 0 for Gaussian, -2 for Rademacher.
      groups: as in `uoro`.

    Returns:
      The total variance. α and Q_0 must not depend on the noise, so that this does not hold for GIR.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.variance.collect(model, model.init(jax.random.key(0)), chunk)
      >>> bool(sg.variance.total_variance(ep, kurtosis=-2.0) < sg.variance.total_variance(ep))
      True
    """
    spatial = spatial_of(ep, groups, q0)
    return jnp.sum(v_by_group(ep, alpha, spatial)) + cross_term(ep) + kurtosis * kurtosis_term(ep, spatial)


def cross_term(ep: Episode) -> Float[Array, ""]:
    """Σ_{s,t} b^(s)T S^(t) J J^T S^(s) b^(t), which neither α, Q_0 nor groups can change."""
    g, diagonal = ep.future, _diagonal(ep)
    # ‖F_s‖² - ‖F'_s‖² = ‖J_s^T g_{s,s}‖² + 2 Σ_{q<s} (J_s^T g_{s,s})·(J_q^T g_{s,q})
    weights = jnp.asarray(2 * np.tril(np.ones((ep.length, ep.length)), -1) + np.eye(ep.length), g.dtype)
    if ep.jacobian is not None:
        now = jnp.einsum("si,sip->sp", diagonal, ep.jacobian)
        return jnp.einsum("sq,sqi,qip,sp->", weights, g, ep.jacobian, now)
    total = jnp.zeros((), g.dtype)
    for a, part in zip(ep.all_features, _split_rows(ep.rows), strict=True):
        total += jnp.sum(weights * (a @ a.T) * jnp.einsum("sqi,si->sq", g[:, :, part], diagonal[:, part]))
    return total


def kurtosis_term(ep: Episode, spatial: Spatial) -> Float[Array, ""]:
    """Σ_q Σ_k (Q_0^T g_{q,q})_k² ‖(Q_0^{-1} J_q)_k‖²: what every unit of kurtosis adds; never negative."""
    return jnp.sum(spatial.shape(_diagonal(ep)) ** 2 * row_weights(ep, spatial))


def covariance(
    ep: Episode, alpha: Any = None, q0: Any = None, kurtosis: float = 0.0, groups: int = 1
) -> Float[Array, "P P"]:
    """The covariance of the total gradient estimate of `uoro`, exact: the whole matrix, for small models.

    Args:
      ep: from `collect`.
      alpha: as in `v`.
      q0: as in `v`.
      kurtosis: as in `total_variance`.
      groups: as in `uoro`.

    Returns:
      The covariance of the gradient with respect to the cell's parameters, in the order of
      `jax.flatten_util.ravel_pytree`. The head's gradient is exact and has none.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.variance.collect(model, model.init(jax.random.key(0)), chunk)
      >>> sg.variance.covariance(ep).shape
      (28, 28)
    """
    spatial = spatial_of(ep, groups, q0)
    groups_of = spatial.groups
    alpha = make_alpha(alpha, ep.length, groups_of.count, ep.b.dtype)
    jacobian = dense_jacobian(ep)
    inverse = _dense(spatial.inverse, ep)
    shaped = jnp.einsum("ki,qip->qkp", inverse, jacobian)  # Q_0^{-1} J_q

    squares = spatial.sum_groups(spatial.shape(ep.future) ** 2)
    weights = jnp.sum(alpha[None] ** 2 * squares, axis=1) / alpha**2  # for every q and group
    first = jnp.einsum("qkp,qk,qko->po", shaped, weights[:, groups_of.index], shaped)
    third = jnp.einsum("qkp,qk,qko->po", shaped, spatial.shape(_diagonal(ep)) ** 2, shaped)

    parts, later = _partial_gradients(ep, ep.future)
    second = parts.T @ parts - later.T @ later
    if groups_of.count > 1:
        row = _row_of_parameter(ep)
        second = jnp.where(same_group(groups_of)[row][:, row], second, 0)
    return first + second + kurtosis * third


def preuoro_v(ep: Episode, alpha: Any = None) -> Float[Array, ""]:
    """V of `preuoro` (Appendix H): that of `uoro` with as many groups as preactivations, for any Q_0.

    Args:
      ep: from `collect`, at preactivations.
      alpha: `[T]`, `[T, M]` with one for each weight matrix, or None for ones.

    Returns:
      V.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.variance.collect(model, model.init(jax.random.key(0)), chunk)
      >>> ratio = sg.variance.v(ep) / sg.variance.preuoro_v(ep)
      >>> round(float(ratio), 3)  # N, without noise shaping
      4.0
    """
    return v(ep, _alpha_of_rows(ep, alpha), None, ep.size)


def preuoro_total_variance(ep: Episode, alpha: Any = None, kurtosis: float = 0.0) -> Float[Array, ""]:
    """The total variance of `preuoro`, exact.

    Every row of a weight matrix sees the same noise τ, and `uoro` with a group for each row sees independent ones. The
    variance of each row is the same, and so is their sum; only covariances between rows differ.

    Args:
      ep: from `collect`, at preactivations.
      alpha: as in `preuoro_v`.
      kurtosis: κ, excess kurtosis of τ.

    Returns:
      The trace of the covariance.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.variance.collect(model, model.init(jax.random.key(0)), chunk)
      >>> bool(sg.variance.preuoro_total_variance(ep) < sg.variance.total_variance(ep))
      True
    """
    return total_variance(ep, _alpha_of_rows(ep, alpha), None, kurtosis, ep.size)


def preuoro_covariance(ep: Episode, alpha: Any = None, kurtosis: float = 0.0) -> Float[Array, "P P"]:
    """The covariance of the total gradient estimate of `preuoro`, exact: the whole matrix, for small models.

    Args:
      ep: from `collect`, at preactivations.
      alpha: as in `preuoro_v`.
      kurtosis: κ, excess kurtosis of τ.

    Returns:
      As `covariance`. All rows of all matrices share τ, so that none of it vanishes.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.variance.collect(model, model.init(jax.random.key(0)), chunk)
      >>> sg.variance.preuoro_covariance(ep).shape
      (28, 28)
    """
    alpha = make_alpha(alpha, ep.length, len(ep.rows), ep.b.dtype, "weight matrices")
    row, column = _row_of_parameter(ep), _feature_of_parameter(ep)
    matrix = matrix_of_row(ep.rows)
    of_feature = np.repeat(np.arange(len(ep.rows)), [a.shape[1] for a in ep.all_features])
    features = jnp.concatenate(ep.all_features, axis=1)
    g, diagonal = ep.future, _diagonal(ep)

    # x_t of row i is α_s b_{s,i}^(t), and Y_t of feature j is a_{s,j} / α_s: every pair of parameters (i, j), (i', j').
    right = g * alpha[None][:, :, matrix]
    left = features / alpha[:, of_feature]
    by_row = jnp.einsum("qri,qro->qio", right, right)
    first = jnp.einsum("qp,qo,qpo->po", left[:, column], left[:, column], by_row[:, row][:, :, row])

    causal = np.tril(np.ones((ep.length, ep.length)))

    def projected(mask: np.ndarray) -> Float[Array, "T F N"]:
        return jnp.einsum("sq,qf,sqi->sfi", jnp.asarray(mask, g.dtype), left, right)

    parts, later = projected(causal), projected(causal - np.eye(ep.length))

    def swapped(x: Float[Array, "T F N"]) -> Float[Array, "P P"]:
        pairs = x[:, column][:, :, row]
        return jnp.einsum("spo,sop->po", pairs, pairs)

    both = diagonal[:, row] * features[:, column]
    return first + swapped(parts) - swapped(later) + kurtosis * (both.T @ both)


def spatial_total_variance(ep: Episode, q0: Any = None, kurtosis: float = 0.0) -> Float[Array, ""]:
    """The total variance of `spatial_rtrl`, exact: noise of different steps never meets, so that steps add up.

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
      >>> ep = sg.variance.collect(model, model.init(jax.random.key(0)), chunk)
      >>> bool(sg.variance.spatial_total_variance(ep) < sg.variance.total_variance(ep))
      True
    """
    spatial = spatial_of(ep, 1, q0)
    diagonal = _diagonal(ep)
    squares, weights = spatial.shape(diagonal) ** 2, row_weights(ep, spatial)
    if ep.jacobian is not None:
        mean = jnp.sum(jnp.einsum("qi,qip->qp", diagonal, ep.jacobian) ** 2)
    else:
        mean = jnp.sum(diagonal**2 * ep.feature_norms[:, matrix_of_row(ep.rows)])
    return jnp.sum(jnp.sum(squares, axis=1) * jnp.sum(weights, axis=1)) + mean + kurtosis * jnp.sum(squares * weights)


def dense_jacobian(ep: Episode) -> Float[Array, "T N P"]:
    """J_t as a matrix, parameters ravelled: I ⊗ a_t^T at preactivations."""
    if ep.jacobian is not None:
        return ep.jacobian
    row, column = _row_of_parameter(ep), _feature_of_parameter(ep)
    features = jnp.concatenate(ep.all_features, axis=1)[:, column]
    return jnp.where(row[None, None, :] == np.arange(ep.size)[None, :, None], features[:, None, :], 0)


def _partial_gradients(ep: Episode, g: Float[Array, "T T N"]) -> tuple[Float[Array, "T P"], Float[Array, "T P"]]:
    """F_s and F'_s: gradients of the losses from s on, with respect to the parameters up to s, and before s."""
    lower = jnp.asarray(np.tril(np.ones((ep.length, ep.length))), g.dtype)[:, :, None] * g
    strict = jnp.asarray(np.tril(np.ones((ep.length, ep.length)), -1), g.dtype)[:, :, None] * g
    return _contract(ep, lower), _contract(ep, strict)


def _contract(ep: Episode, g: Float[Array, "T T N"]) -> Float[Array, "T P"]:
    """Σ_q J_q^T g_{s,q} for every s."""
    if ep.jacobian is not None:
        return jnp.einsum("sqi,qip->sp", g, ep.jacobian)
    parts = [
        jnp.einsum("sqi,qj->sij", g[:, :, part], a).reshape(ep.length, -1)
        for a, part in zip(ep.all_features, _split_rows(ep.rows), strict=True)
    ]
    return jnp.concatenate(parts, axis=1)


def _split_rows(rows: tuple[int, ...]) -> list[slice]:
    """Where the preactivations of each weight matrix stand in z."""
    ends = np.cumsum(rows)
    return [slice(int(end - n), int(end)) for n, end in zip(rows, ends, strict=True)]


def _diagonal(ep: Episode) -> Float[Array, "T N"]:
    """g_{q,q}."""
    return ep.future[np.arange(ep.length), np.arange(ep.length)]


def _dense(inverse: Array | None, ep: Episode) -> Float[Array, "N N"]:
    if inverse is None:
        return jnp.eye(ep.size, dtype=ep.b.dtype)
    return jnp.diag(inverse) if inverse.ndim == 1 else inverse


def _alpha_of_rows(ep: Episode, alpha: Any) -> Float[Array, "T N"]:
    """PreUORO's α, one per weight matrix, as one per row."""
    if ep.jacobian is not None:
        raise ValueError("preuoro exists at preactivations alone: collect the episode at the cut 'preactivation'.")
    alpha = make_alpha(alpha, ep.length, len(ep.rows), ep.b.dtype, "weight matrices")
    return alpha[:, matrix_of_row(ep.rows)]


def _row_of_parameter(ep: Episode) -> np.ndarray:
    """To which row of all weight matrices each ravelled parameter belongs, `[P]`."""
    widths = np.repeat([a.shape[1] for a in ep.all_features], ep.rows)
    return np.repeat(np.arange(ep.size), widths)


def _feature_of_parameter(ep: Episode) -> np.ndarray:
    """Which of all matrices' features each ravelled parameter multiplies, `[P]`."""
    widths = [a.shape[1] for a in ep.all_features]
    starts = np.cumsum([0, *widths[:-1]])
    blocks = [np.tile(start + np.arange(w), n) for start, w, n in zip(starts, widths, ep.rows, strict=True)]
    return np.concatenate(blocks)
