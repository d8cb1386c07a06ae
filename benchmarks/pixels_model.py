"""A stack of linear recurrent units for `benchmarks.pixels`, in real arithmetic."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

import streamgrad as sg

RECURRENT = ("b", "nu", "theta")  # the recurrence's parameters: they do not decay, and may have a rate of their own
CLASSES = 10


class LayerState(NamedTuple):
    """The state of a layer.

    Attributes:
      real: of the recurrent units.
      imag: likewise.
      y: what the layer gives to the next; its own next step does not read it.
    """

    real: jax.Array
    imag: jax.Array
    y: jax.Array


class TopState(NamedTuple):
    """The state of the last layer: also the mean of its y so far, and over how many steps.

    Attributes:
      layer: as in every layer.
      mean: of y over the sequence; no gradient goes through it.
      steps: how many.
    """

    layer: LayerState
    mean: jax.Array
    steps: jax.Array


def layer(n_in: int, width: int, n_out: int, r_min: float, block: str = "mlp", top: bool = False) -> sg.Cell:
    """A linear recurrent unit with its read-out.

        h_t = λ h_{t-1} + γ (B x_t),    λ = exp(-exp(ν) + i exp(θ)),    complex, `width` of them
        y_t = block(norm(Re(C h_t)))

    Args:
      n_in: size of x.
      width: how many units.
      n_out: size of y.
      r_min: the least modulus of λ at the beginning; the largest is 1.
      block: "mlp", one layer of 4 `width` rectified units, or "glu", a gate, with a skip connection where sizes allow.
      top: whether the output is the mean of y over the sequence so far, whose gradient is that of the last y alone.

    Returns:
      The cell.

    References:
      Orvieto et al., Resurrecting recurrent neural networks for long sequences, 2023.
    """

    def step_layer(affine: Callable[..., jax.Array], state: LayerState, x: jax.Array) -> LayerState:
        modulus, phase, gamma = jnp.exp(-jnp.exp(affine("nu"))), jnp.exp(affine("theta")), jnp.exp(affine("gamma"))
        real, imag = modulus * jnp.cos(phase), modulus * jnp.sin(phase)
        drive = affine("b", x, 1)
        new_real = real * state.real - imag * state.imag + gamma * drive[:width]
        new_imag = real * state.imag + imag * state.real + gamma * drive[width:]
        z = normalised(affine("c", new_real, new_imag, 1)) * affine("scale") + affine("shift")
        if block == "mlp":
            y = affine("down", jax.nn.relu(affine("up", z, 1)), 1)
        else:
            value, gate = jnp.split(affine("glu", jax.nn.gelu(z), 1), 2)
            y = value * jax.nn.sigmoid(gate) + (x if n_in == n_out else 0)
        return LayerState(new_real, new_imag, y)

    def step(affine: Callable[..., jax.Array], state: LayerState | TopState, x: jax.Array) -> LayerState | TopState:
        if isinstance(state, LayerState):
            return step_layer(affine, state, x)
        below = step_layer(affine, state.layer, x)
        steps = state.steps + 1
        mean = state.mean + jax.lax.stop_gradient(below.y - state.mean) / steps
        return TopState(below, jax.lax.stop_gradient(mean), steps)

    def output(state: LayerState | TopState) -> jax.Array:
        if isinstance(state, LayerState):
            return state.y
        return state.layer.y + jax.lax.stop_gradient(state.mean - state.layer.y)

    def init_params(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, 6)
        square = jax.random.uniform(keys[0], (width,)) * (1 - r_min**2) + r_min**2  # of the modulus: even over the ring
        square = jnp.minimum(square, 1 - 1e-6)
        params = {
            "nu": jnp.log(-0.5 * jnp.log(square)),
            "theta": jnp.log(6.28 * jax.random.uniform(keys[1], (width,), minval=1e-4)),
            "gamma": 0.5 * jnp.log(1 - square),
            "b": weights(keys[2], 2 * width, n_in, 0.5),
            "c": jnp.concatenate([_normal(keys[3], (width, 2 * width), width), jnp.zeros((width, 1))], axis=1),
            "scale": jnp.ones(width),
            "shift": jnp.zeros(width),
        }
        if block == "mlp":
            return params | {"up": weights(keys[4], 4 * width, width), "down": weights(keys[5], n_out, 4 * width)}
        return params | {"glu": weights(keys[4], 2 * n_out, width)}

    def init_state() -> LayerState | TopState:
        below = LayerState(jnp.zeros(width), jnp.zeros(width), jnp.zeros(n_out))
        return TopState(below, jnp.zeros(n_out), jnp.zeros(())) if top else below

    return sg.cells.affine(step, init_params, init_state, output, jax.ShapeDtypeStruct((n_in,), jnp.result_type(float)))


def weights(key: jax.Array, n_out: int, n_in: int, scale: float = 1.0) -> jax.Array:
    """Normal weights of the variance scale / n_in, and a column of zeros for the bias."""
    return jnp.concatenate([_normal(key, (n_out, n_in), n_in / scale), jnp.zeros((n_out, 1))], axis=1)


def _normal(key: jax.Array, shape: tuple[int, int], size: float) -> jax.Array:
    return jax.random.normal(key, shape) / jnp.sqrt(size)


def normalised(x: jax.Array) -> jax.Array:
    """Mean 0 and variance 1."""
    return (x - jnp.mean(x)) * jax.lax.rsqrt(jnp.var(x) + 1e-6)


def make_model(layers: int, width: int, r_min: float, block: str = "mlp") -> sg.Model:
    """A stack of layers over one input at a time, whose output are the logits, and a cross entropy.

    Args:
      layers: how many.
      width: units of each.
      r_min: as in `layer`.
      block: likewise.

    Returns:
      The model; its head has no parameters.
    """
    sizes = [1, *[width] * (layers - 1), CLASSES]
    pairs = itertools.pairwise(sizes)
    cells = [layer(n, width, m, r_min, block, top=i == layers - 1) for i, (n, m) in enumerate(pairs)]
    head = sg.heads.from_function(lambda key, width: (), _cross_entropy, lambda params, output: jax.nn.softmax(output))
    return sg.Model(sg.cells.stack(*cells), head)


def _cross_entropy(params: tuple, output: jax.Array, target: jax.Array) -> jax.Array:
    del params
    return -jax.nn.log_softmax(output)[target]
