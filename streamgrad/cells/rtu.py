"""Recurrent trace units."""

import math

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float
from streamgrad.base import Cell
from streamgrad.cells.function import of_vectors
from streamgrad.cells.ring import check_ring, eigenvalues, init_parts, init_ring, normaliser, turn, twice
from streamgrad.checks import check_choice, check_flag, check_size

ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "identity": lambda x: x}


def rtu(
    n_in: int,
    n_hidden: int,
    linear: bool = True,
    activation: str = "relu",
    r_min: float = 0.0,
    r_max: float = 1.0,
    max_phase: float = 2 * math.pi,
) -> Cell:
    """Recurrent trace units: pairs of units that turn by an angle and shrink, each pair reading x and itself alone.

    With r = exp(-exp(ν)), ω = exp(θ) and γ = sqrt(1 - r²), which ν decides all along,

        a_t = r cos ω * h_{t-1} - r sin ω * k_{t-1} + γ * (W_1 x_t)
        b_t = r sin ω * h_{t-1} + r cos ω * k_{t-1} + γ * (W_2 x_t)

    Linear units keep h = a and k = b, and their output is f(a, b); non-linear ones keep h = f(a) and k = f(b), which
    also is their output.

    Args:
      n_in: size of x.
      n_hidden: H, the number of pairs.
      linear: whether f is outside of the recurrence.
      activation: f, one of "relu", "tanh" and "identity".
      r_min: least r to begin with, at least 0.
      r_max: largest r to begin with, at most 1.
      max_phase: largest ω to begin with, at most 2 π.

    Returns:
      A cell with parameters `{"nu": [H], "theta": [H], "w": [2 H, n_in]}`, rows of W_1 first, the state
      `[2 H]`, h and k, and an output `[2 H]`.

    Example:
      >>> import jax, streamgrad as sg
      >>> cell = sg.cells.rtu(2, 8)
      >>> {name: leaf.shape for name, leaf in sorted(cell.init_params(jax.random.key(0)).items())}
      {'nu': (8,), 'theta': (8,), 'w': (16, 2)}

    References:
      Elelimy, White, Bowling and White, Real-time recurrent learning using trace units in reinforcement learning, 2024.
    """
    check_size(n_in=n_in, n_hidden=n_hidden)
    check_flag(linear=linear)
    check_choice("activation", activation, tuple(ACTIVATIONS))
    check_ring(r_min, r_max, max_phase)
    f = ACTIVATIONS[activation]

    def step(params: dict[str, Array], state: Array, x: Array) -> Array:
        by, gamma = eigenvalues(params["nu"], params["theta"]), normaliser(params["nu"])
        new = turn(by, state) + twice(gamma) * (params["w"] @ x)
        return new if linear else f(new)

    def init_params(key: Array) -> dict[str, Array]:
        for_ring, for_w = jax.random.split(key)
        nu, theta = init_ring(for_ring, n_hidden, r_min, r_max, max_phase)
        return {"nu": nu, "theta": theta, "w": init_parts(for_w, 2 * n_hidden, (n_in, 1 / math.sqrt(n_in)))}

    def output(state: Float[Array, " D"]) -> Array:
        return f(state) if linear else state

    return of_vectors(step, init_params, lambda: jnp.zeros(2 * n_hidden), output, n_in)
