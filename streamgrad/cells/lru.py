"""The linear recurrent unit."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float
from streamgrad.base import Cell
from streamgrad.cells.function import of_vectors
from streamgrad.cells.ring import check_ring, eigenvalues, init_parts, init_ring, normaliser, turn, twice
from streamgrad.checks import check_size


class LRUState(NamedTuple):
    """The state of a linear recurrent unit, real and imaginary parts, and its read-out, which no later step sees."""

    h: Float[Array, " D"]
    y: Float[Array, " O"] | None = None


def lru(
    n_in: int,
    n_hidden: int,
    n_out: int | None = None,
    r_min: float = 0.0,
    r_max: float = 1.0,
    max_phase: float = 2 * math.pi,
) -> Cell:
    """A linear recurrent unit: h_t = λ h_{t-1} + γ (B x_t), y_t = Re(C h_t) + D x_t, with complex h, λ, B and C.

    λ = exp(-exp(ν) + i exp(θ)) multiplies element by element, so that no unit reads another. It begins evenly drawn
    from a ring, and γ, learnt as its logarithm, as sqrt(1 - |λ|²). Everything is computed in real numbers.

    Args:
      n_in: size of x.
      n_hidden: H, how many complex numbers the state has.
      n_out: size of y; None for no read-out, so that a head reads the state itself, real parts first.
      r_min: least |λ| to begin with, at least 0.
      r_max: largest |λ| to begin with, at most 1.
      max_phase: largest angle of λ to begin with, at most 2 π.

    Returns:
      A cell with parameters `{"nu": [H], "theta": [H], "log_gamma": [H], "b": [2 H, n_in]}`, and with a read-out
      `"read": [n_out, 2 H + n_in]`, the columns of Re C, Im C and D. Rows of `b` are Re B, then Im B. The state is
      `(h, y)`, h of shape `[2 H]`; the output is y, or `[2 H]` real and imaginary parts.

    Example:
      >>> import jax, streamgrad as sg
      >>> cell = sg.cells.lru(2, 8, n_out=3, r_min=0.9, max_phase=0.3)
      >>> {name: leaf.shape for name, leaf in sorted(cell.init_params(jax.random.key(0)).items())}
      {'b': (16, 2), 'log_gamma': (8,), 'nu': (8,), 'read': (3, 18), 'theta': (8,)}

    References:
      Orvieto et al., Resurrecting recurrent neural networks for long sequences, 2023.
    """
    check_size(n_in=n_in, n_hidden=n_hidden, **({} if n_out is None else {"n_out": n_out}))
    check_ring(r_min, r_max, max_phase)

    def step(params: dict[str, Array], state: LRUState, x: Array) -> LRUState:
        by, gamma = eigenvalues(params["nu"], params["theta"]), jnp.exp(params["log_gamma"])
        h = turn(by, state.h) + twice(gamma) * (params["b"] @ x)
        if n_out is None:
            return LRUState(h)
        # Re(C h) = Re C Re h - Im C Im h.
        return LRUState(h, params["read"] @ jnp.concatenate([h[:n_hidden], -h[n_hidden:], x]))

    def init_params(key: Array) -> dict[str, Array]:
        for_ring, for_b, for_read = jax.random.split(key, 3)
        nu, theta = init_ring(for_ring, n_hidden, r_min, r_max, max_phase)
        params = {
            "nu": nu,
            "theta": theta,
            "log_gamma": jnp.log(normaliser(nu)),
            "b": init_parts(for_b, 2 * n_hidden, (n_in, 1 / math.sqrt(2 * n_in))),
        }
        if n_out is None:
            return params
        scale = 1 / math.sqrt(n_hidden)
        blocks = (n_hidden, scale), (n_hidden, scale), (n_in, 1 / math.sqrt(n_in))
        return {**params, "read": init_parts(for_read, n_out, *blocks)}

    def init_state() -> LRUState:
        return LRUState(jnp.zeros(2 * n_hidden), None if n_out is None else jnp.zeros(n_out))

    def output(state: LRUState) -> Array:
        return state.h if state.y is None else state.y

    return of_vectors(step, init_params, init_state, output, n_in)
