"""The current step alone: no credit for anything before it."""

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Model, Params, worked
from streamgrad.engine.across import finish
from streamgrad.engine.chunk import go_forward
from streamgrad.engine.collectives import Devices
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, Outcome
from streamgrad.step.weights import Outer, sum_outer


def immediate(model: Model) -> GradientEstimator:
    """The gradient through the current step, with the state before it held fixed.

        dL/dθ ≈ Σ_t (dL_t/dh_t) (dh_t/dθ_t)

    The baseline that every online method has to beat: no memory, no recurrence backwards, and all steps of a chunk at
    once. For many tasks of adaptation it is enough. It is `windowed_bptt` with a window of one step, and cheaper than
    BPTT.

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
      >>> grads, state, info = est.update(params, est.init(params), chunk)
      >>> state.memory
      ()
    """
    model = worked(model)

    def init(params: Params) -> EstimatorState:
        return EstimatorState(model.init_state(params), (), ())

    def run(params: Params, state: EstimatorState, chunk: Chunk, noise: None, devices: Devices) -> Outcome:
        """Forward through the chunk; then back through each of its steps by itself."""
        del noise, devices
        forward = go_forward(model, params, state.cell, chunk)

        def here(residuals: PyTree, cotangent: Array) -> PyTree:
            return forward.maps.pull(residuals, cotangent)[1]

        left = jax.vmap(jax.vmap(here))(forward.residuals, forward.dl_dstate)
        if forward.features is None:
            grads = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=(0, 1)), left)
        else:
            grads = sum_outer(Outer(left, forward.features))
        return finish(model, params, forward, grads, ())

    return estimator(Method(name="immediate", model=model, init=init, run=run, watchable=True))
