"""β and γ chosen online for the variance of the total gradient (Appendix D)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float
from streamgrad.noise.rescale import balance
from streamgrad.theory.episode import Episode
from streamgrad.theory.matrices import row_weights
from streamgrad.theory.spatial import spatial_of, squeeze_groups
from streamgrad.theory.tape import same_episode


class Greedy(NamedTuple):
    """Coefficients of the recursion, `[T]`, or `[T, G]` where there are several groups.

    Attributes:
      beta: β_s.
      gamma: γ_s.
      alpha: α_s = β_s γ_{s+1} … γ_T.
    """

    beta: Array
    gamma: Array
    alpha: Array


def greedy_alpha(ep: Episode, q0: Any = None, groups: int = 1) -> Greedy:
    """The greedy online coefficients in terms of b and J (Appendix D).

        β_s⁴ = ‖Q_0^{-1} J_s‖² / ‖b_s^(s)T Q_0‖²
        γ_s⁴ = Σ_{q<s} ‖Q_0^{-1} J_q‖² / A_q² / Σ_{r<s} A_r² ‖b_r^(s)T Q_0‖²,    A_q = β_q γ_{q+1} … γ_{s-1}

    At each step they minimise V(Q) as if gradients and Jacobians of later steps were zero, with what was chosen before
    fixed. Like GIR they need nothing of the future; unlike it, they look at what the loss sees.

    Args:
      ep: from `collect`, with b kept.
      q0: as in `v`.
      groups: as in `uoro`.

    Returns:
      The coefficients. Where either side of a quotient is zero, as at an episode's first step, the coefficient is 1.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.theory.collect(model, model.init(jax.random.key(0)), chunk)
      >>> float(sg.theory.greedy_alpha(ep).gamma[0])
      1.0
    """
    spatial = spatial_of(ep, q0, groups)
    jacobians = spatial.sum_groups(row_weights(ep, spatial))
    gradients = spatial.sum_groups(spatial.shape(ep.kept) ** 2)
    same = same_episode(ep.episode)
    positions = jnp.arange(ep.length)

    def step(log_a: Float[Array, "T G"], s: Array) -> tuple[Array, tuple[Array, Array]]:
        past = ((positions < s) & same[s])[:, None]
        cotangent = jnp.sum(jnp.where(past, jnp.exp(-2 * log_a) * jacobians, 0), axis=0)
        propagated = jnp.sum(jnp.where(past, jnp.exp(2 * log_a) * gradients[s], 0), axis=0)
        beta, gamma = greedy_coefficients(jacobians[s], gradients[s, s], cotangent, propagated)
        log_a = jnp.where(past, log_a + jnp.log(gamma)[None], log_a).at[s].set(jnp.log(beta))
        return log_a, (beta, gamma)

    log_alpha, (beta, gamma) = jax.lax.scan(step, jnp.zeros_like(jacobians), positions)
    return Greedy(squeeze_groups(beta), squeeze_groups(gamma), squeeze_groups(jnp.exp(log_alpha)))


def greedy_coefficients(pulled: Array, pushed: Array, cotangent: Array, propagated: Array) -> tuple[Array, Array]:
    """The greedy coefficients as ratios of mean squares of the recursion's four terms (Appendix D).

        β_s⁴ = pulled / pushed,    γ_s⁴ = cotangent / propagated

    Expectations or running averages of past steps leave the estimate unbiased, as they do not depend on the noise of
    this step or depend on it evenly.

    Args:
      pulled: E‖u_s^T Q_0^{-1} J_s‖².
      pushed: E(dL_s/dh_s (dh_s/dz_s) Q_0 u_s)², as the loss sees it.
      cotangent: E‖w̃_{s-1}‖².
      propagated: E(dL_s/dh_s (dh_s/dh_{s-1}) h̃_{s-1})², as the loss sees it.

    Returns:
      β_s and γ_s. Where either side of a quotient is zero, the coefficient is 1.

    Example:
      >>> import jax.numpy as jnp, streamgrad as sg
      >>> beta, gamma = sg.theory.greedy_coefficients(*jnp.array([16.0, 1.0, 0.0, 1.0]))
      >>> float(beta), float(gamma)
      (2.0, 1.0)
    """
    beta = balance(pushed, pulled, otherwise=1.0).tangent
    return beta, balance(propagated, cotangent, otherwise=1.0).tangent
