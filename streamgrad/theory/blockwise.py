"""C, B, V(Q) and the total variance of long episodes, without ever holding b in memory.

`collect` keeps T² N numbers: half a gigabyte for 784 steps of an LSTM with 50 units, for one stream. All that C, B and
the variances depend on is g_{q,r} = Σ_{t>=q} b_r^(t). For r >= q it is g_{r,r}, which one reverse pass gives; for r < q
the functions here go back from blocks of q at once, and reduce what they see on the way. Memory does not grow with
T² N, but with T times the size of the state, and with C itself. They equal the functions of the same names for an
`Episode` to rounding. All work at preactivations, for one stream; `jax.vmap` over chunks for many.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float
from streamgrad.base import Chunk, Model, Params
from streamgrad.theory.episode import matrix_of_row
from streamgrad.theory.shaping import (
    Spatial,
    group_norms,
    make_alpha,
    make_spatial,
    row_squares,
    same_group,
)
from streamgrad.theory.sweep import Tape, check_episode, padded_length, record, rows_of, same_episode, sweep


def c_matrix(
    model: Model,
    params: Params,
    chunk: Chunk,
    q0: Any = None,
    groups: int = 1,
    per_group: bool = False,
    block: int | None = None,
) -> Array:
    """C as `streamgrad.theory.c_matrix` gives it, straight from the stream.

    Args:
      model: the model.
      params: its parameters.
      chunk: one stream.
      q0: Q_0, `[N, N]`, a diagonal `[N]`, or None for the identity.
      groups: as in `uoro`.
      per_group: whether to return C of every group, or their sum.
      block: from how many steps q reverse passes go back together: time against memory.

    Returns:
      C, `[T, T]`; or `[G, T, T]` with `per_group`.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> sg.variance.blockwise.c_matrix(model, model.init(jax.random.key(0)), chunk, block=2).shape
      (5, 5)
    """
    tape, spatial, squares = _prepare(model, params, chunk, groups, q0, block)
    length = squares.shape[0]
    weights = spatial.sum_groups(spatial.row_weights(squares))

    def entries(weights: Float[Array, "K G"], g: Float[Array, "K N"]) -> Float[Array, "K L"]:
        values = spatial.sum_groups(spatial.shape(g) ** 2) * weights
        return values if per_group else jnp.sum(values, axis=1, keepdims=True)

    def visit(c: Array, q: Array, r: Array, g: Float[Array, "K N"]) -> Array:
        zero = jnp.zeros((), q.dtype)
        return jax.lax.dynamic_update_slice(c, entries(weights[q], g)[:, None], (q[0], jnp.asarray(r, q.dtype), zero))

    depth = spatial.groups.count if per_group else 1
    buffer = jnp.zeros((padded_length(length, block), length, depth), squares.dtype)
    lower = sweep(tape, tape.future, visit, buffer, block)[:length]
    # Above the diagonal g_{q,r} = g_{r,r}, in the same episode.
    upper = jax.vmap(lambda w: entries(jnp.broadcast_to(w[None], (length, w.shape[0])), tape.diagonal))(weights)
    upper = jnp.where(same_episode(tape.episode)[:, :, None], upper, 0)
    c = jnp.where(np.tril(np.ones((length, length), bool))[:, :, None], lower, upper)
    return jnp.moveaxis(c, -1, 0) if per_group else c[:, :, 0]


def b_matrix(
    model: Model, params: Params, chunk: Chunk, alpha: Any = None, groups: int = 1, block: int | None = None
) -> Float[Array, "N N"]:
    """B as `streamgrad.theory.b_matrix` gives it, straight from the stream.

    Args:
      model: the model.
      params: its parameters.
      chunk: one stream.
      alpha: `[T]`, `[T, G]`, or None for ones.
      groups: as in `uoro`.
      block: as in `c_matrix`.

    Returns:
      B, zero between groups.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> sg.variance.blockwise.b_matrix(model, model.init(jax.random.key(0)), chunk).shape
      (4, 4)
    """
    tape, spatial, squares = _prepare(model, params, chunk, groups, None, block)
    index = spatial.groups.index
    alpha = make_alpha(alpha, squares.shape[0], spatial.groups.count, squares.dtype)
    weights = group_norms(squares, spatial.groups)

    def visit(b: Array, q: Array, r: Array, g: Float[Array, "K N"]) -> Array:
        scale = jnp.where((r < q)[:, None], alpha[r][None] / alpha[q] * jnp.sqrt(weights[q]), 0)
        scaled = scale[:, index] * g
        return b + scaled.T @ scaled

    lower = sweep(tape, tape.future, visit, jnp.zeros((squares.shape[1],) * 2, squares.dtype), block)
    scaled = (alpha * jnp.sqrt(_weights_so_far(tape, weights, alpha)))[:, index] * tape.diagonal
    return jnp.where(same_group(spatial.groups), lower + scaled.T @ scaled, 0)


def v(
    model: Model,
    params: Params,
    chunk: Chunk,
    alpha: Any = None,
    q0: Any = None,
    groups: int = 1,
    block: int | None = None,
) -> Float[Array, ""]:
    """V(Q) as `streamgrad.theory.v` gives it, straight from the stream; takes the arguments of both.

    Args:
      model: the model.
      params: its parameters.
      chunk: one stream.
      alpha: `[T]`, `[T, G]`, or None for ones.
      q0: as in `c_matrix`.
      groups: as in `uoro`.
      block: as in `c_matrix`.

    Returns:
      V(Q).

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> bool(sg.variance.blockwise.v(model, params, chunk) > 0)
      True
    """
    return _variance(model, params, chunk, alpha, q0, groups, block)[0]


def total_variance(
    model: Model,
    params: Params,
    chunk: Chunk,
    alpha: Any = None,
    q0: Any = None,
    kurtosis: float = 0.0,
    groups: int = 1,
    block: int | None = None,
) -> Float[Array, ""]:
    """The total variance as `streamgrad.theory.total_variance` gives it, straight from the stream.

    Args:
      model: the model.
      params: its parameters.
      chunk: one stream.
      alpha: `[T]`, `[T, G]`, or None for ones.
      q0: as in `c_matrix`.
      kurtosis: κ, excess kurtosis of the noise.
      groups: as in `uoro`.
      block: as in `c_matrix`.

    Returns:
      The trace of the covariance.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> bool(sg.variance.blockwise.total_variance(model, params, chunk) > 0)
      True
    """
    value, cross, per_kurtosis = _variance(model, params, chunk, alpha, q0, groups, block)
    return value + cross + kurtosis * per_kurtosis


def _variance(
    model: Model, params: Params, chunk: Chunk, alpha: Any, q0: Any, groups: Any, block: int | None
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """V(Q), the cross term, and what every unit of kurtosis adds, from one sweep."""
    tape, spatial, squares = _prepare(model, params, chunk, groups, q0, block)
    alpha = make_alpha(alpha, squares.shape[0], spatial.groups.count, squares.dtype)
    rows = spatial.row_weights(squares)
    weights = spatial.sum_groups(rows)
    features = tape.features or ()
    matrix = matrix_of_row(spatial.groups.rows)

    def visit(carry: tuple, q: Array, r: Array, g: Float[Array, "K N"]) -> tuple:
        value, cross = carry
        earlier = (r < q)[:, None]
        scale = jnp.where(earlier, (alpha[r][None] / alpha[q]) ** 2 * weights[q], 0)
        value = value + jnp.sum(scale * spatial.sum_groups(spatial.shape(g) ** 2))
        inner = jnp.stack([a[q] @ a[r] for a in features], axis=1)[:, matrix]
        cross = cross + 2 * jnp.sum(jnp.where(earlier, inner * g * tape.diagonal[q], 0))
        return value, cross

    zero = jnp.zeros((), squares.dtype)
    value, cross = sweep(tape, tape.future, visit, (zero, zero), block)
    now = spatial.sum_groups(spatial.shape(tape.diagonal) ** 2)
    value = value + jnp.sum(now * alpha**2 * _weights_so_far(tape, weights, alpha))
    cross = cross + jnp.sum(squares * tape.diagonal**2)
    return value, cross, jnp.sum(spatial.shape(tape.diagonal) ** 2 * rows)


def _prepare(
    model: Model, params: Params, chunk: Chunk, groups: Any, q0: Any, block: Any
) -> tuple[Tape, Spatial, Float[Array, "T N"]]:
    """The tape, Q_0 with groups, and the diagonal of J_t J_t^T."""
    check_episode(model, params, chunk, "preactivation", block)
    rows = rows_of(model, "preactivation")
    tape = record(model, params, chunk, "preactivation")
    spatial = make_spatial(rows, "preactivation", groups, q0, tape.diagonal.dtype)
    return tape, spatial, row_squares(tape.features or (), rows)


def _weights_so_far(tape: Tape, weights: Float[Array, "T G"], alpha: Float[Array, "T G"]) -> Float[Array, "T G"]:
    """Σ_{q<=r} weights_q / α_q² for every r, over the steps of its own episode."""
    length = weights.shape[0]
    causal = np.tril(np.ones((length, length), bool)) & same_episode(tape.episode)
    return jnp.where(causal, 1, 0).astype(weights.dtype) @ (weights / alpha**2)
