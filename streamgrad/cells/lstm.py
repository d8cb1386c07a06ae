"""The LSTM."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float
from streamgrad.base import Cell
from streamgrad.cells.affine import Affine, affine, init_weights, reads_vector
from streamgrad.checks import check_number, check_size


class LSTMState(NamedTuple):
    """The whole recurrent state of an LSTM."""

    h: Float[Array, " H"]
    c: Float[Array, " H"]


def lstm(n_in: int, n_hidden: int, forget_bias: float = 1.0) -> Cell:
    """A long short-term memory: (i, f, g, o) = W a_t, c_t = σ(f) c_{t-1} + σ(i) tanh(g), h_t = σ(o) tanh(c_t).

    Args:
      n_in: size of x.
      n_hidden: H, size of h and of c.
      forget_bias: what the bias of the forget gate begins with; it is a parameter like any other.

    Returns:
      A cell with parameters `{"w": [4 H, H + n_in + 1]}`, the state `(h, c)` and the output h.

    Example:
      >>> import jax, streamgrad as sg
      >>> cell = sg.cells.lstm(2, 3)
      >>> cell.init_params(jax.random.key(0))["w"][:, -1].tolist()
      [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    check_size(n_in=n_in, n_hidden=n_hidden)
    check_number(forget_bias=forget_bias)

    def step(affine: Affine, state: LSTMState, x: Array) -> LSTMState:
        i, f, g, o = jnp.split(affine("w", state.h, x, 1), 4)
        c = jax.nn.sigmoid(f) * state.c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return LSTMState(jax.nn.sigmoid(o) * jnp.tanh(c), c)

    def init_params(key: Array) -> dict[str, Array]:
        w = init_weights(key, 4 * n_hidden, n_hidden, n_in)
        return {"w": w.at[n_hidden : 2 * n_hidden, -1].set(forget_bias)}

    def init_state() -> LSTMState:
        return LSTMState(jnp.zeros(n_hidden), jnp.zeros(n_hidden))

    return reads_vector(affine(step, init_params, init_state, lambda state: state.h), n_in)
