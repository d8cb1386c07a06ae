"""The current step alone: no credit for anything before it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, GradientEstimator, Model, Params
from streamgrad.checks import check_model
from streamgrad.contract import label_of
from streamgrad.engine.chunk import Across, Crossing, Walk, chunkwise
from streamgrad.engine.chunk_passes import forward, read_out
from streamgrad.engine.estimator import estimator
from streamgrad.step.step_vjp import step_vjp
from streamgrad.step.weights import Outer, sum_outer


def immediate(model: Model) -> GradientEstimator:
    """The gradient through the current step, with the state before it held fixed.

        dL/dθ ≈ Σ_t (dL_t/dh_t) (dh_t/dθ_t)

    The baseline that every online method has to beat: no memory, no recurrence backwards, and all steps of a chunk at
    once. For many tasks of adaptation it is enough. It is `tbptt` with a window of one step, and cheaper than BPTT.

    Args:
      model: the model whose gradients are estimated.

    Returns:
      The estimator.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.immediate(model)
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk, None)
      >>> state.memory
      ()
    """
    check_model(model)

    def advance(shared: PyTree, memory: PyTree, noise: None, crossing: Crossing) -> tuple[PyTree, dict[str, Array]]:
        del shared, noise, crossing
        return memory, {}

    across = Across(lambda params, state: (), lambda memory, noise: jnp.zeros(()), advance, older=None)
    return estimator(model, chunkwise(model, across, walk_through=_walk), label=label_of("immediate"))


def _walk(
    model: Model,
    params: Params,
    across: Across,
    start: Float[Array, "B S"],
    memory: PyTree,
    noise: PyTree,
    chunk: Chunk,
    block: int,
) -> Walk:
    """Forward through the chunk; then back through each of its steps by itself."""
    del across, memory, noise, block
    fresh, unravel = ravel_pytree(model.init_state(params))
    maps = step_vjp(model.cell, params.cell, unravel(fresh), jax.tree.map(lambda leaf: leaf[0, 0], chunk.inputs))
    end, _, states, kept, features = forward(maps, fresh, start, None, chunk)
    losses, head, dl_dstate = read_out(model, params, unravel, states, chunk)

    def here(kept: PyTree, cotangent: Array) -> PyTree:
        return maps.pull(kept, cotangent)[1]

    left = jax.vmap(jax.vmap(here))(kept, dl_dstate)
    total: Any = (
        jax.tree.map(lambda leaf: jnp.sum(leaf, axis=(0, 1)), left)
        if features is None
        else sum_outer(Outer(left, features))
    )
    return Walk(end, states, losses, head, total, (), Crossing((), (), None, None))
