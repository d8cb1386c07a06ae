"""A chunk of one stream: forward, and back with a flow of gradients that estimators may stop, scale or continue."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, Model, Params
from streamgrad.engine.estimator import restart
from streamgrad.step.platform import unroll
from streamgrad.step.step_vjp import StepVjp, step_vjp


class Flow(NamedTuple):
    """What a chunk of one stream came to.

    Attributes:
      maps: the steps' linear maps.
      before: the state that each step began with, ravelled.
      end: h_K, ravelled.
      states: h_t, time leading.
      loss: L_t.
      head: the head's gradient, summed over time.
      back: e_0, what flows out of the chunk's beginning.
      cell: e_t (dh_t/dz_t) over the preactivations z, in the structure of the parameters, `[K, rows]`; or the cell's
        gradient, summed over time, where it has none.
      features: what the weights multiply, `[K, A]`; None where the cell has no preactivations.
    """

    maps: StepVjp
    before: Float[Array, "K S"]
    end: Float[Array, " S"]
    states: PyTree
    loss: Float[Array, " K"]
    head: PyTree
    back: Float[Array, " S"]
    cell: PyTree
    features: PyTree


def through(
    model: Model,
    params: Params,
    start: PyTree,
    chunk: Chunk,
    factors: Float[Array, " K"] | None = None,
    future: Callable[[Float[Array, " S"]], Float[Array, " S"]] = jnp.zeros_like,
) -> Flow:
    """Go through a chunk of one stream, and back.

        e_t = dL_t/dh_t + f_{t+1} e_{t+1} (dh_{t+1}/dh_t),    e_K = dL_K/dh_K + future(h_K)

    Args:
      model: the model.
      params: its parameters.
      start: h_0.
      chunk: its inputs, targets and resets.
      factors: f_t, of the flow that leaves step t backwards; it must be 0 where there is a reset. None for 1 elsewhere.
      future: what flows into the chunk from beyond its end, as a function of the ravelled h_K.

    Returns:
      The losses with their gradients. It takes one forward and one reverse pass.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 3), sg.heads.squared_error(1))
      >>> params = model.init(jax.random.key(0))
      >>> flow = through(model, params, jnp.zeros(3), sg.Chunk(jnp.ones((5, 2)), jnp.zeros((5, 1))))
      >>> flow.back.shape, flow.cell["w"].shape, flow.features["w"].shape
      ((3,), (5, 3), (5, 6))
    """
    vector, unravel = ravel_pytree(start)
    fresh = ravel_pytree(model.init_state(params))[0]
    maps = step_vjp(model.cell, params.cell, start, jax.tree.map(lambda leaf: leaf[0], chunk.inputs))
    if factors is None and chunk.reset is not None:
        factors = jnp.where(chunk.reset, 0, jnp.ones_like(vector, shape=chunk.reset.shape))

    def forward(vector: Array, now: tuple) -> tuple[Array, tuple]:
        x, reset = now
        before = restart(reset, fresh, vector)
        new, kept, features = maps.forward(before, x)
        return new, (before, new, kept, features)

    end, (before, after, kept, features) = jax.lax.scan(forward, vector, (chunk.inputs, chunk.reset), unroll=unroll())
    states = jax.vmap(unravel)(after)
    loss, head, dl_dstate = model.read_out_chunk(params.head, states, chunk.targets)
    outer = features is not None

    def back(carry: tuple, now: tuple) -> tuple[tuple, PyTree]:
        flow, sums = carry
        kept, dl_dstate, factor = now
        flow, here = maps.pull(kept, flow + dl_dstate)
        flow = flow if factor is None else scaled(factor, flow)
        if outer:
            return (flow, sums), here
        return (flow, jax.tree.map(jnp.add, sums, here)), None

    sums = None if outer else jax.tree.map(jnp.zeros_like, params.cell)
    carry, here = jax.lax.scan(back, (future(end), sums), (kept, dl_dstate, factors), reverse=True, unroll=unroll())
    return Flow(maps, before, end, states, loss, head, carry[0], here if outer else carry[1], features)


def scaled(factor: Float[Array, ""], flow: Float[Array, " S"]) -> Float[Array, " S"]:
    """The flow times a factor; nothing at all where that is 0."""
    return jnp.where(factor == 0, 0, factor * flow)
