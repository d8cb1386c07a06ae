"""The element-wise LSTM."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float
from streamgrad.base import Cell
from streamgrad.cells.affine import Affine, affine, init_weights, reads_vector
from streamgrad.checks import check_number, check_size


class ELSTMState(NamedTuple):
    """The memory of an element-wise LSTM, and its output, which the next step does not see."""

    h: Float[Array, " H"]
    c: Float[Array, " H"]


def elstm(n_in: int, n_hidden: int, forget_bias: float = 0.0) -> Cell:
    """An LSTM each of whose units reads x and its own memory alone.

    f_t = σ(F (x_t, 1) + w_f * c_{t-1}), z_t = tanh(Z (x_t, 1) + w_z * c_{t-1}), c_t = f_t * c_{t-1} + (1 - f_t) * z_t,
    o_t = σ(O (c_t, x_t, 1)), h_t = o_t * c_t. The output gate reads all of c_t, but the next step does not read h_t, so
    that dc_t/dc_{t-1} is diagonal.

    Args:
      n_in: size of x.
      n_hidden: H, size of h and of c.
      forget_bias: what the bias of f begins with; it is a parameter like any other.

    Returns:
      A cell with parameters `{"w": [2 H, n_in + 1], "w_f": [H], "w_z": [H], "o": [H, H + n_in + 1]}`, where rows of
      `w` are F, then Z, the state `(h, c)` and the output h.

    Example:
      >>> import jax, streamgrad as sg
      >>> cell = sg.cells.elstm(2, 3)
      >>> {name: leaf.shape for name, leaf in sorted(cell.init_params(jax.random.key(0)).items())}
      {'o': (3, 6), 'w': (6, 3), 'w_f': (3,), 'w_z': (3,)}

    References:
      Irie, Gopalakrishnan and Schmidhuber, Exploring the promise and limits of real-time recurrent learning, 2023.
    """
    check_size(n_in=n_in, n_hidden=n_hidden)
    check_number(forget_bias=forget_bias)

    def step(affine: Affine, state: ELSTMState, x: Array) -> ELSTMState:
        for_f, for_z = jnp.split(affine("w", x, 1), 2)
        f = jax.nn.sigmoid(for_f + affine("w_f") * state.c)
        z = jnp.tanh(for_z + affine("w_z") * state.c)
        c = f * state.c + (1 - f) * z
        return ELSTMState(jax.nn.sigmoid(affine("o", c, x, 1)) * c, c)

    def init_params(key: Array) -> dict[str, Array]:
        for_w, for_f, for_z, for_o = jax.random.split(key, 4)
        return {
            "w": init_weights(for_w, 2 * n_hidden, n_in).at[:n_hidden, -1].set(forget_bias),
            # Small, as published: a unit that listens to itself too much is stuck.
            "w_f": 0.1 * jax.random.normal(for_f, (n_hidden,)),
            "w_z": 0.1 * jax.random.normal(for_z, (n_hidden,)),
            "o": init_weights(for_o, n_hidden, n_hidden, n_in),
        }

    def init_state() -> ELSTMState:
        return ELSTMState(jnp.zeros(n_hidden), jnp.zeros(n_hidden))

    return reads_vector(affine(step, init_params, init_state, lambda state: state.h), n_in)
