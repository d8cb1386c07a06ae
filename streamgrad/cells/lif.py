"""Leaky integrate-and-fire neurons, with or without an adaptive threshold."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float
from streamgrad.base import Cell
from streamgrad.cells.affine import Affine, affine, reads_vector
from streamgrad.cells.ring import init_parts
from streamgrad.checks import check_flag, check_number, check_size


class LIFState(NamedTuple):
    """Voltages, spikes and, where there are any, adaptations of thresholds and filtered spikes."""

    v: Float[Array, " H"]
    s: Float[Array, " H"]
    a: Float[Array, " H"] | None = None
    filtered: Float[Array, " H"] | None = None


def lif(
    n_in: int,
    n_hidden: int,
    tau: float = 20.0,
    v_th: float = 1.0,
    beta: float | None = None,
    tau_a: float = 200.0,
    tau_out: float | None = None,
    dampening: float = 0.3,
    reset_gradient: bool = False,
) -> Cell:
    """Recurrent leaky integrate-and-fire neurons (LIF), or ones whose threshold adapts (ALIF).

    v_t = α v_{t-1} + W (s_{t-1}, x_t) - v_th s_{t-1}, and s_t = 1 where v_t > A_t, else 0. The threshold A_t is v_th,
    or with `beta` v_th + β a_t, where a_t = ρ a_{t-1} + s_{t-1}. α = exp(-1/tau), ρ = exp(-1/tau_a).

    A spike's derivative is that of a surrogate, ds/dv = -ds/dA = (γ / v_th) max(0, 1 - |v - A| / v_th), and gradients
    are exact with respect to it. They do not go through the reset, - v_th s_{t-1}, unless `reset_gradient`: the
    eligibility traces of e-prop leave that way out, backpropagation in its authors' code has it. They always go
    through a_t.

    Args:
      n_in: size of x.
      n_hidden: H, the number of neurons.
      tau: time constant of the voltages in steps.
      v_th: threshold, above 0.
      beta: how much a past spike raises the threshold, at least 0; None for a constant threshold.
      tau_a: time constant of the adaptation in steps, where there is one.
      tau_out: time constant in steps of the filtered spikes, sum_k κ^k s_{t-k} with κ = exp(-1/tau_out), which then
        are the output instead of the spikes.
      dampening: γ of the surrogate, above 0.
      reset_gradient: whether derivatives go through the reset.

    Returns:
      A cell with parameters `{"w": [H, H + n_in]}`, the state `(v, s, a, filtered)`, of which the last two may be None,
      and as its output the spikes, filtered or not. The published neurons have no connections to themselves: here they
      begin as zeros and are learnt like others.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> cell = sg.cells.lif(1, 3, v_th=0.5)
      >>> cell.step({"w": jnp.ones((3, 4))}, cell.init_state(), jnp.ones(1)).s.tolist()
      [1.0, 1.0, 1.0]

    References:
      Bellec et al., A solution to the learning dilemma for recurrent networks of spiking neurons, 2020.
    """
    check_size(n_in=n_in, n_hidden=n_hidden)
    check_flag(reset_gradient=reset_gradient)
    optional = {} if tau_out is None else {"tau_out": tau_out}
    for name, value in {"tau": tau, "v_th": v_th, "tau_a": tau_a, "dampening": dampening, **optional}.items():
        check_number(**{name: value})
        if value <= 0:
            raise ValueError(f"{name} must be a number above 0, not {value!r}.")
    if beta is not None:
        check_number(beta=beta)
        if beta < 0:
            raise ValueError(f"beta must be None or a number of at least 0, not {beta!r}.")
    alpha, rho = math.exp(-1 / tau), math.exp(-1 / tau_a)
    kappa = 0.0 if tau_out is None else math.exp(-1 / tau_out)

    def step(affine: Affine, state: LIFState, x: Array) -> LIFState:
        reset = v_th * (state.s if reset_gradient else jax.lax.stop_gradient(state.s))
        v = alpha * state.v + affine("w", state.s, x) - reset
        a = None if state.a is None else rho * state.a + state.s
        threshold = v_th if beta is None or a is None else v_th + beta * a
        # In units of v_th, so that the surrogate is a function of one number.
        s = _spike((v - threshold) / v_th, dampening)
        return LIFState(v, s, a, None if state.filtered is None else kappa * state.filtered + s)

    def init_params(key: Array) -> dict[str, Array]:
        w = init_parts(key, n_hidden, (n_hidden, 1 / math.sqrt(n_hidden)), (n_in, 1 / math.sqrt(n_in)))
        own = jnp.arange(n_hidden)
        return {"w": w.at[own, own].set(0)}

    def init_state() -> LIFState:
        zeros = jnp.zeros(n_hidden)
        return LIFState(zeros, zeros, None if beta is None else zeros, None if tau_out is None else zeros)

    def output(state: LIFState) -> Array:
        return state.s if state.filtered is None else state.filtered

    return reads_vector(affine(step, init_params, init_state, output), n_in)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _spike(over: Float[Array, " H"], dampening: float) -> Float[Array, " H"]:
    """1 where the voltage is over the threshold, else 0."""
    del dampening
    return (over > 0).astype(over.dtype)


@_spike.defjvp
def _spike_jvp(dampening: float, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (over,), (moved,) = primals, tangents
    return _spike(over, dampening), dampening * jnp.maximum(0, 1 - jnp.abs(over)) * moved
