"""The plain tanh network."""

import jax.numpy as jnp

from streamgrad._typing import Array
from streamgrad.base import Cell
from streamgrad.cells.affine import Affine, affine, init_weights, reads_vector
from streamgrad.checks import check_number, check_size


def vanilla(n_in: int, n_hidden: int, leak: float = 1.0) -> Cell:
    """A network with one tanh layer: h_t = tanh(W a_t) with a_t = (h_{t-1}, x_t, 1) (Equation 1).

    With a leak α, h_t = (1 - α) h_{t-1} + α tanh(W a_t): a leaky rate network.

    Args:
      n_in: size of x.
      n_hidden: H, size of the state.
      leak: α, above 0 and at most 1.

    Returns:
      A cell with parameters `{"w": [H, H + n_in + 1]}` and a vector `[H]` as its state.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> cell = sg.cells.vanilla(2, 3)
      >>> cell.step(cell.init_params(jax.random.key(0)), cell.init_state(), jnp.zeros(2)).tolist()
      [0.0, 0.0, 0.0]
    """
    check_size(n_in=n_in, n_hidden=n_hidden)
    check_number(leak=leak)
    if not 0 < leak <= 1:
        raise ValueError(f"leak must be above 0 and at most 1, not {leak}.")

    def step(affine: Affine, state: Array, x: Array) -> Array:
        new = jnp.tanh(affine("w", state, x, 1))
        return new if leak == 1 else (1 - leak) * state + leak * new

    def init_params(key: Array) -> dict[str, Array]:
        return {"w": init_weights(key, n_hidden, n_hidden, n_in)}

    return reads_vector(affine(step, init_params, lambda: jnp.zeros(n_hidden)), n_in)
