"""The minimal gated recurrent unit."""

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float
from streamgrad.base import Cell
from streamgrad.cells.affine import Affine, affine, init_weights, reads_vector
from streamgrad.checks import check_flag, check_number, check_size


def mingru(n_in: int, n_hidden: int, positive: bool = False, update_bias: float = 0.0) -> Cell:
    """A GRU whose gate and candidate read x alone: h_t = (1 - z_t) * h_{t-1} + z_t * h̃_t.

    z_t = σ(W_z (x_t, 1)) and h̃_t = W_h (x_t, 1). To keep h positive h̃_t = g(W_h (x_t, 1)), with g(a) = a + 1/2 where
    a >= 0, and σ(a) elsewhere. No unit reads another.

    Args:
      n_in: size of x.
      n_hidden: H, size of the state.
      positive: whether h̃ goes through g.
      update_bias: what the bias of z begins with; the lower, the longer the memory. It is a parameter like any other.

    Returns:
      A cell with parameters `{"w": [2 H, n_in + 1]}`, rows of W_z first, and a vector `[H]` as its state.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> cell = sg.cells.mingru(2, 3, positive=True)
      >>> cell.step(cell.init_params(jax.random.key(0)), cell.init_state(), jnp.zeros(2)).tolist()
      [0.25, 0.25, 0.25]

    References:
      Feng, Tung, Ahmed, Bengio and Hajimirsadeghi, Were RNNs all we needed?, 2024.
    """
    check_size(n_in=n_in, n_hidden=n_hidden)
    check_flag(positive=positive)
    check_number(update_bias=update_bias)

    def step(affine: Affine, state: Array, x: Array) -> Array:
        for_z, candidate = jnp.split(affine("w", x, 1), 2)
        z = jax.nn.sigmoid(for_z)
        return (1 - z) * state + z * (_positive(candidate) if positive else candidate)

    def init_params(key: Array) -> dict[str, Array]:
        return {"w": init_weights(key, 2 * n_hidden, n_in).at[:n_hidden, -1].set(update_bias)}

    return reads_vector(affine(step, init_params, init_state=lambda: jnp.zeros(n_hidden)), n_in)


def _positive(a: Float[Array, " H"]) -> Float[Array, " H"]:
    """g, which is continuous: both branches are 1/2 at 0."""
    return jnp.where(a >= 0, a + 0.5, jax.nn.sigmoid(a))
