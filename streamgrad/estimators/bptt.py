"""Backpropagation through time over the whole chunk: the exact reference."""

from typing import Any

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Info, Model, Params
from streamgrad.checks import check_size, leading_length
from streamgrad.online import estimator, restart, transition


def bptt(model: Model, recompute: int | None = None) -> GradientEstimator:
    """The exact gradient of the chunk, by reverse mode (Equation 3).

    The state at the chunk's beginning is a constant: what came before it gets no credit. On chunks of k steps this is
    what is mostly called truncated BPTT; `tbptt` reaches across chunks.

    Args:
      model: the model whose gradients are computed.
      recompute: None stores what the reverse pass needs of every step. A number k stores the state at every k-th step
        alone, and computes the k steps between again on the way back: memory of T/k + k steps instead of T, for one
        more forward pass.

    Returns:
      The estimator.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.lstm(2, 4), sg.heads.squared_error(1))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.bptt(model, recompute=3)
      >>> chunk = sg.Chunk(jnp.ones((8, 2)), jnp.zeros((8, 1)))
      >>> grads, state, info = est.update(params, est.init(params), chunk, key=None)
      >>> info.loss.shape
      (8,)

    References:
      Werbos, Backpropagation through time: what it does and how to do it, 1990.
      Chen et al., Training deep nets with sublinear memory cost, 2016 (for `recompute`).
    """
    if recompute is not None:
        check_size(recompute=recompute)

    def init(params: Params) -> EstimatorState:
        return EstimatorState(model.init_state(params), (), ())

    def run(params: Params, state: PyTree, chunk: Chunk) -> tuple[PyTree, Float[Array, " T"]]:
        """The state at the end of a stretch and the loss at each of its steps."""
        fresh = model.init_state(params)

        def step(state: PyTree, now: tuple) -> tuple[PyTree, Array]:
            x, reset = now
            state = transition(model, params, restart(reset, fresh, state), x)
            return state, model.cell.output(state)

        state, outputs = jax.lax.scan(step, state, (chunk.inputs, chunk.reset))
        losses = jax.vmap(model.head.loss, in_axes=(None, 0, 0))(params.head, outputs, chunk.targets)
        return state, losses

    def run_again(params: Params, state: PyTree, chunk: Chunk, k: int) -> tuple[PyTree, Float[Array, " T"]]:
        """`run`, in stretches of k steps that the reverse pass computes anew."""
        length = leading_length(chunk, "time")
        whole = length - length % k
        remembering = jax.checkpoint(run, prevent_cse=False)

        def stretch(state: PyTree, chunk: Chunk) -> tuple[PyTree, Array]:
            return remembering(params, state, chunk)

        stretches = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, k, *leaf.shape[1:]), chunk)
        state, losses = jax.lax.scan(stretch, state, stretches)
        losses = losses.reshape(-1)
        if whole < length:
            state, rest = remembering(params, state, jax.tree.map(lambda leaf: leaf[whole:], chunk))
            losses = jnp.concatenate([losses, rest])
        return state, losses

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> tuple[Params, EstimatorState, Info]:
        del key

        def total(params: Params) -> tuple[Array, tuple[PyTree, Array]]:
            if recompute is None:
                end, losses = run(params, state.cell, chunk)
            else:
                end, losses = run_again(params, state.cell, chunk, recompute)
            return jnp.sum(losses), (end, losses)

        grads, (end, losses) = jax.grad(total, has_aux=True)(params)
        return grads, EstimatorState(end, (), ()), Info(losses, {})

    return estimator(model, init, update)
