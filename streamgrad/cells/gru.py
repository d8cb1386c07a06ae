"""The gated recurrent unit."""

import jax
import jax.numpy as jnp

from streamgrad._typing import Array
from streamgrad.base import Cell
from streamgrad.cells.affine import Affine, affine, init_weights, reads_vector
from streamgrad.checks import check_size


def gru(n_in: int, n_hidden: int) -> Cell:
    """A gated recurrent unit whose reset gate acts after the product with the weights.

    (r, u) = σ(W_gates (h, x, 1)), n = tanh(W_input (x, 1) + r * W_state (h, 1)), h_t = (1 - u) n + u h_{t-1}.

    Because the reset gate acts after the product, every preactivation is a product of weights with features that no
    gate of this step has touched, and the cut at the preactivations exists.

    Args:
      n_in: size of x.
      n_hidden: H, size of the state.

    Returns:
      A cell with parameters `{"gates": [2 H, H + n_in + 1], "candidate_input": [H, n_in + 1],
      "candidate_state": [H, H + 1]}` and a vector `[H]` as its state.

    Example:
      >>> import jax, streamgrad as sg
      >>> sorted(sg.cells.gru(2, 3).init_params(jax.random.key(0)))
      ['candidate_input', 'candidate_state', 'gates']
    """
    check_size(n_in=n_in, n_hidden=n_hidden)

    def step(affine: Affine, state: Array, x: Array) -> Array:
        r, u = jnp.split(jax.nn.sigmoid(affine("gates", state, x, 1)), 2)
        from_input = affine("candidate_input", x, 1)
        from_state = affine("candidate_state", state, 1)
        n = jnp.tanh(from_input + r * from_state)
        return (1 - u) * n + u * state

    def init_params(key: Array) -> dict[str, Array]:
        gates_key, input_key, state_key = jax.random.split(key, 3)
        return {
            "gates": init_weights(gates_key, 2 * n_hidden, n_hidden, n_in),
            "candidate_input": init_weights(input_key, n_hidden, n_in),
            "candidate_state": init_weights(state_key, n_hidden, n_hidden),
        }

    return reads_vector(affine(step, init_params, lambda: jnp.zeros(n_hidden)), n_in)
