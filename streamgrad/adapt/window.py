"""Estimates of B and C of a window from one reverse pass.

B and C are sums over pairs of steps (q, r) of terms in g_{q,r} = Σ_{t>=q} b_r^(t). Two gradients in one reverse pass
give an unbiased estimate of both:

- that of all losses, which is g_{r,r} at each step r. For r >= q causality makes g_{q,r} = g_{r,r}, so that every pair
  on and above the diagonal is known exactly;
- that of the losses from a single step q on, which below the diagonal is the row g_{q,r}, r < q. With q uniform over
  the T steps, T times the row is an unbiased estimate of all rows below the diagonal.

    B̂ = Σ_r Σ_{p<=r} (α_r²/α_p²) ‖a_p‖² g_{r,r} g_{r,r}^T + T Σ_{r<q} (α_r²/α_q²) ‖a_q‖² g_{q,r} g_{q,r}^T

It is a sum of squares, hence positive semidefinite. A row alone, above the diagonal too, would need one gradient
instead of two, but would leave most of B to sampling.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Float, Int, PyTree
from streamgrad.base import Model, Params
from streamgrad.noise.groups import Groups
from streamgrad.step.cuts import over_vectors
from streamgrad.theory.spatial import Spatial, feature_squares, group_norms, same_group
from streamgrad.theory.tape import same_episode


class Window(NamedTuple):
    """A stretch of one stream, as a reverse pass needs it; time leading.

    Attributes:
      before: h_{t-1} ravelled, the state before each step, after a reset where there is one.
      inputs: x_t.
      dl_dstate: dL_t/dh_t.
      reset: where episodes begin.
    """

    before: Float[Array, "T S"]
    inputs: PyTree
    dl_dstate: Float[Array, "T S"]
    reset: Bool[Array, " T"]


class Back(NamedTuple):
    """The gradients of one reverse pass over a window.

    Attributes:
      total: g_{r,r}, the gradient of all losses with respect to z_r.
      row: g_{q,r} for r < q, the gradient of the losses from q on; zero elsewhere.
      start: q.
      length: T, as a number.
      norms: ‖a_r‖² of each group.
      episode: the number of resets up to each step.
    """

    total: Float[Array, "T N"]
    row: Float[Array, "T N"]
    start: Int[Array, ""]
    length: Array
    norms: Float[Array, "T G"]
    episode: Int[Array, " T"]


def go_back(
    model: Model, params: Params, groups: Groups, window: Window, start: Int[Array, ""], length: Any = None
) -> Back:
    """One reverse pass over a window: the gradient of all its losses, and of those from one step on.

    Args:
      model: the model, with preactivations.
      params: its parameters.
      groups: the partition of the preactivations.
      window: of one stream. Gradients end where it begins.
      start: q, in 0 … T-1.
      length: T, where the window is not filled to its end; steps beyond must have no gradient of a loss.
    """
    cut = model.cell.cuts["preactivation"]
    fresh = model.init_state(params)
    z = cut.into(params.cell, fresh, jax.tree.map(lambda leaf: leaf[0], window.inputs))
    transition, unravel_state = over_vectors(cut, fresh, z), ravel_pytree(fresh)[1]
    no_dz = jnp.zeros_like(ravel_pytree(z)[0])
    size, start = window.before.shape[0], jnp.asarray(start)
    numbers = jnp.arange(size, dtype=start.dtype)

    def step(later: Float[Array, "K S"], now: tuple) -> tuple[Array, Array]:
        t, vector, x, dl_dstate, reset = now
        seen = later + jnp.stack([dl_dstate, jnp.where(t >= start, dl_dstate, 0)])
        _, vjp = jax.vjp(lambda vector, dz: transition(params.cell, vector, dz, x), vector, no_dz)
        earlier, dz = jax.vmap(vjp)(seen)
        return jnp.where(reset, 0, earlier), dz

    nothing = jnp.zeros((2, window.before.shape[1]), window.before.dtype)
    steps = (numbers, window.before, window.inputs, window.dl_dstate, window.reset)
    _, dz = jax.lax.scan(step, nothing, steps, reverse=True)

    def features(vector: Array, x: PyTree) -> tuple[Array, ...]:
        assert cut.features is not None
        return tuple(jax.tree.leaves(cut.features(params.cell, unravel_state(vector), x)))

    squares = feature_squares(jax.vmap(features)(window.before, window.inputs), groups.rows)
    length = jnp.asarray(size if length is None else length, no_dz.dtype)
    row = jnp.where((numbers < start)[:, None], dz[:, 1], 0)
    return Back(dz[:, 0], row, start, length, group_norms(squares, groups), jnp.cumsum(window.reset))


def estimate_b(groups: Groups, back: Back, log_alpha: Float[Array, "T G"], diagonal: bool = False) -> Array:
    """B̂ of a window, `[N, N]` with zeros between groups or its diagonal `[N]`: unbiased over q (Equation 15)."""
    size = back.total.shape[0]
    causal = np.tril(np.ones((size, size), bool)) & same_episode(back.episode)  # [r, p]
    ratios = jnp.exp(2 * (log_alpha[:, None] - log_alpha[None, :]))
    known = jnp.sum(jnp.where(causal[:, :, None], ratios * back.norms[None], 0), axis=1)
    q = back.start
    before_start = (jnp.arange(size, dtype=q.dtype) < q)[:, None]
    ratio = jnp.exp(2 * (log_alpha - log_alpha[q][None]))
    sampled = jnp.where(before_start, back.length * ratio * back.norms[q][None], 0)
    scales = jnp.sqrt(jnp.concatenate([known, sampled]))[:, groups.index]
    tall = scales * jnp.concatenate([back.total, back.row])
    if diagonal:
        return jnp.sum(tall**2, axis=0)
    return jnp.where(same_group(groups), tall.T @ tall, 0)


class CEstimate(NamedTuple):
    """Ĉ of a window, for each group.

    Attributes:
      known: C[p, r] for r >= p, exact; zero below the diagonal.
      row: C[q, r] for r < q; zero elsewhere.
    """

    known: Float[Array, "T T G"]
    row: Float[Array, "T G"]

    def matrix(self, back: Back) -> Float[Array, "T T G"]:
        """Ĉ, unbiased over q."""
        return self.known.at[back.start].add(back.length * self.row)


def estimate_c(spatial: Spatial, back: Back) -> CEstimate:
    """Ĉ of a window (Equation 12).

    It does not change when Q_0 is multiplied by a number, so that averages over windows may be taken while Q_0 changes.
    """
    size = back.total.shape[0]
    weights = spatial.sum_groups(spatial.row_weights(back.norms[:, spatial.partition.index]))
    total = spatial.sum_groups(spatial.shape(back.total) ** 2)
    row = spatial.sum_groups(spatial.shape(back.row) ** 2)
    causal = np.triu(np.ones((size, size), bool)) & same_episode(back.episode)  # [p, r]
    known = jnp.where(causal[:, :, None], weights[:, None] * total[None], 0)
    return CEstimate(known, weights[back.start][None] * row)
