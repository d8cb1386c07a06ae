"""The variance over τ of a single Jacobian estimate, and the α that minimises it (Section 6.1, Appendix B)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, Model, Params, widened
from streamgrad.checks import check_chunk, check_own_matrices, find_cut
from streamgrad.step import cuts
from streamgrad.step.cuts import linearise
from streamgrad.theory.spatial import make_alpha
from streamgrad.trees import restart


class JacobianTerms(NamedTuple):
    """What the steps s <= t contribute to h̃_t and w̃_t, before τ and α.

    Attributes:
      pushed: (dh_t/dz_s) ν_s for the last step t, `[T, S]`.
      pulled: ν_s^T J_s, `[T, P]`, parameters ravelled.
    """

    pushed: Float[Array, "T S"]
    pulled: Float[Array, "T P"]


def jacobian_terms(
    model: Model, params: Params, chunk: Chunk, nu: Float[Array, "T N"], cut: str = "preactivation"
) -> JacobianTerms:
    """Propagate the contribution of every step to the chunk's last one.

    Args:
      model: the model.
      params: its parameters.
      chunk: one stream, from the beginning of an episode on.
      nu: the spatial noise ν_s.
      cut: one of the cell's.

    Returns:
      The terms. Steps before the last reset contribute nothing.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> terms = sg.variance.jacobian_terms(model, model.init(jax.random.key(0)), chunk, jnp.ones((5, 4)))
      >>> terms.pushed.shape, terms.pulled.shape
      ((5, 4), (5, 28))
    """
    check_own_matrices(model)
    vertex = find_cut(model, cut)
    length = check_chunk(model, chunk)
    layout = cuts.layout(model.cell, vertex)
    if np.shape(nu) != (length, layout.size):
        raise ValueError(f"nu must have the shape ({length}, {layout.size}), not {np.shape(nu)}.")
    params = widened(params)
    fresh = model.init_state(params)
    count = ravel_pytree(params.cell)[0].size

    def step(carry: tuple, now: tuple) -> tuple[tuple, None]:
        state, pushed, pulled = carry
        s, x, reset, nu = now
        zero = jax.tree.map(jnp.zeros_like, (pushed, pulled))
        state, pushed, pulled = restart(reset, (fresh, *zero), (state, pushed, pulled))
        at = linearise(vertex, params.cell, state, x)
        pushed = jax.vmap(at.propagate)(pushed).at[s].set(at.push(nu))
        pulled = pulled.at[s].set(ravel_pytree(at.pull(nu))[0])
        return (at.state, pushed, pulled), None

    start: tuple[PyTree, Array, Array] = (
        fresh,
        jnp.zeros((length, layout.state_size), nu.dtype),
        jnp.zeros((length, count), nu.dtype),
    )
    steps = (jnp.arange(length), chunk.inputs, chunk.reset, nu)
    (_, pushed, pulled), _ = jax.lax.scan(step, start, steps)
    return JacobianTerms(pushed, pulled)


def jacobian_variance(terms: JacobianTerms, alpha: Any = None, kurtosis: float = -2.0) -> Float[Array, ""]:
    """The total variance of h̃_t w̃_t^T over the temporal noise τ, with the spatial noise fixed (Appendix B).

        tr(R R^T A²) tr(J̃ J̃^T A^{-2}) + ‖R^T J̃‖² + κ Σ_s ‖R_s‖² ‖J̃_s‖²,    A = diag(α)

    where the rows of R are (dh_t/dz_s) ν_s, and those of J̃ are ν_s^T J_s.

    Args:
      terms: from `jacobian_terms`.
      alpha: α_s^(t), `[T]`, or None for ones.
      kurtosis: κ, excess kurtosis of τ: the paper's τ are signs.

    Returns:
      The variance, summed over all entries of the Jacobian.

    Example:
      >>> import jax.numpy as jnp, streamgrad as sg
      >>> terms = sg.variance.JacobianTerms(jnp.eye(2), jnp.eye(2))
      >>> float(sg.variance.jacobian_variance(terms))  # τ_1 τ_2 in two entries
      2.0
    """
    alpha = make_alpha(alpha, terms.pushed.shape[0], terms.pushed.dtype)[:, 0]
    pushed, pulled = jnp.sum(terms.pushed**2, axis=1), jnp.sum(terms.pulled**2, axis=1)
    mean = jnp.sum((terms.pushed.T @ terms.pulled) ** 2)
    return jnp.sum(alpha**2 * pushed) * jnp.sum(pulled / alpha**2) + mean + kurtosis * jnp.sum(pushed * pulled)


def jacobian_alpha(terms: JacobianTerms) -> Float[Array, " T"]:
    """The α_s^(t) that minimise the variance of h̃_t w̃_t^T over τ (Section 6.1).

        α_s² = ‖ν_s^T J_s‖ / ‖(dh_t/dz_s) ν_s‖

    They depend on t in a way that no recursion with one γ_t for all s can follow, which is why GIR is greedy.

    Args:
      terms: from `jacobian_terms`.

    Returns:
      α. Where either norm is zero the step's own product is zero, too; its α is then 1, finite but arbitrary.

    Example:
      >>> import jax.numpy as jnp, streamgrad as sg
      >>> terms = sg.variance.JacobianTerms(jnp.array([[1.0], [4.0]]), jnp.array([[4.0], [1.0]]))
      >>> sg.variance.jacobian_alpha(terms).tolist()
      [2.0, 0.5]
    """
    pushed, pulled = jnp.linalg.norm(terms.pushed, axis=1), jnp.linalg.norm(terms.pulled, axis=1)
    alive = (pushed > 0) & (pulled > 0)
    return jnp.where(alive, jnp.sqrt(jnp.where(alive, pulled, 1)) / jnp.sqrt(jnp.where(alive, pushed, 1)), 1)
