"""Noise at the state: what a loss without a baseline adds to REINFORCE's variance, and the best Q_0 (Section 9)."""

from typing import Any

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float
from streamgrad.checks import check_size
from streamgrad.theory.episode import Episode
from streamgrad.theory.matrices import row_weights
from streamgrad.theory.optimal_q import check_damping, minimise_trace_product
from streamgrad.theory.spatial import make_alpha, spatial_of


def score_variance(ep: Episode, sigma: Any, q0: Any = None) -> Float[Array, ""]:
    """The variance of the term by which REINFORCE without a baseline differs from UORO as σ goes to zero (Section 9).

        Σ_t L_t|_{u=0} w̄_t = σ^{-1} Σ_s (Σ_{t>=s} L_t) u_s^T Q_0^{-1} J_s
        E‖Σ_t L_t|_{u=0} w̄_t‖² = σ^{-2} Σ_s (Σ_{t>=s} L_t)² ‖Q_0^{-1} J_s‖²

    The sums of losses are over the episode of s. For a single loss L_t it is the paper's σ^{-2} L_t² E‖Σ_s u_s^T J_s‖².

    Args:
      ep: from `collect`, at the cut "state".
      sigma: σ.
      q0: Q_0, `[N, N]`, a diagonal `[N]`, or None for the identity.

    Returns:
      The variance, summed over all of the cell's parameters.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.theory.collect(model, model.init(jax.random.key(0)), chunk, cut="state")
      >>> ratio = sg.theory.score_variance(ep, 0.01) / sg.theory.score_variance(ep, 0.1)
      >>> round(float(ratio), 2)
      100.0
    """
    _check_cut(ep)
    ahead = jnp.where(ep.causal, ep.loss[None, :], 0).sum(axis=1)
    weights = row_weights(ep, spatial_of(ep, q0)).sum(axis=1)
    return jnp.sum((ahead / sigma) ** 2 * weights)


def state_q0(ep: Episode, alpha: Any = None, damping: float = 0.005, iterations: int = 50) -> Float[Array, "N N"]:
    """The Q_0 at the state that minimises V(Q), damped: Section 7.1.2 where J J^T is no multiple of the identity.

        V(Q) = Σ_q tr(X_q A) tr(Y_q A^{-1}),    A = Q_0 Q_0^T
        X_q = Σ_r (α_r² / α_q²) g_{q,r} g_{q,r}^T,    Y_q = J_q J_q^T

    Stationary where A X A = Y for X = Σ_q tr(Y_q A^{-1}) X_q and Y = Σ_q tr(X_q A) Y_q. `minimise_trace_product` solves
    it for given X and Y; half of each step towards that is taken, along the geodesic between positive definite
    matrices. V(Q) is convex along geodesics: there is one minimum.

    Args:
      ep: from `collect`, at the cut "state".
      alpha: `[T]`, or None for ones, as it is for REINFORCE.
      damping: how much of their mean eigenvalue to add to those of X and Y.
      iterations: how many steps.

    Returns:
      Q_0, symmetric, with tr(Q_0 Q_0^T) = N as for the identity: σ Q_0 u is as large as σ u.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.theory.collect(model, model.init(jax.random.key(0)), chunk, cut="state")
      >>> q0 = sg.theory.state_q0(ep)
      >>> bool(sg.theory.v(ep, None, q0) < sg.theory.v(ep))
      True
    """
    _check_cut(ep)
    check_damping(damping)
    check_size(iterations=iterations)
    scale = make_alpha(alpha, ep.length, ep.dtype)[:, 0]
    weighted = ep.future * (scale[None, :] / scale[:, None])[:, :, None]
    identity = jnp.eye(ep.size, dtype=ep.dtype)

    def damped(x: Array) -> Array:
        mean = jnp.trace(x) / ep.size
        return jnp.where(mean > 0, x / jnp.where(mean > 0, mean, 1), identity) + damping * identity

    def root(x: Array) -> Array:
        values, vectors = jnp.linalg.eigh(x)
        return (vectors * jnp.sqrt(values)[None, :]) @ vectors.T

    @jax.jit
    def solve(g: Float[Array, "T T N"], jacobian: Float[Array, "T N P"]) -> Float[Array, "N N"]:
        xs, ys = jnp.einsum("qri,qrj->qij", g, g), jnp.einsum("qip,qjp->qij", jacobian, jacobian)

        def step(a: Array, _: None) -> tuple[Array, None]:
            inverse = jnp.linalg.inv(a)
            x = jnp.einsum("q,qij->ij", jnp.einsum("qij,ji->q", ys, inverse), xs)
            y = jnp.einsum("q,qij->ij", jnp.einsum("qij,ji->q", xs, a), ys)
            towards = minimise_trace_product(damped(x), damped(y)).a
            middle = minimise_trace_product(inverse, towards).a  # G with G A^{-1} G = `towards`
            return middle * ep.size / jnp.trace(middle), None

        return root(jax.lax.scan(step, identity, length=iterations)[0])

    return solve(weighted, ep.jacobian)


def _check_cut(ep: Episode) -> None:
    if ep.cut != "state":
        raise ValueError(f"this is for noise at the state: collect the episode at the cut 'state', not {ep.cut!r}.")
