"""Many streams at once."""

from typing import Any

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Params
from streamgrad.checks import check_batch, check_estimator, check_size, once_per_shape
from streamgrad.engine.acting import bare
from streamgrad.engine.estimator import STREAMS, Engine, Result, Streams
from streamgrad.keys import one_key_per_stream


def batched(est: GradientEstimator, batch_size: int) -> GradientEstimator:
    """Run an estimator on many streams at once: the mean of their gradients, each with its own noise.

    Args:
      est: an estimator for one stream.
      batch_size: B, the number of streams.

    Returns:
      The same record. `state` and `chunk` gain a leading batch axis (`inputs[B, T, ...]`), and so does `info`; what
      the streams share (`state.shared`) does not. `key` is one key, which is split, or one for each stream. Also
      `credit` is the mean over streams; `credit(params, state, dl_doutput, per_stream=True)` gives each stream's own
      gradient, with a leading axis.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 3), sg.heads.softmax(2))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.batched(sg.uoro(model), 4)
      >>> chunk = sg.Chunk(jnp.ones((4, 5, 2)), jnp.zeros((4, 5), int))
      >>> grads, state, info = est.update(params, est.init(params), chunk, jax.random.key(1))
      >>> info.loss.shape
      (4, 5)
    """
    check_estimator(est)
    check_size(batch_size=batch_size)
    streams = est.streams if isinstance(est, Engine) else _mapped(est)

    def init(params: Params) -> EstimatorState:
        one = est.init(params)

        def repeat(leaf: Array) -> Array:
            return jnp.repeat(leaf[None], batch_size, axis=0)

        return EstimatorState(jax.tree.map(repeat, one.cell), jax.tree.map(repeat, one.memory), one.shared)

    check = once_per_shape(lambda state, chunk: check_batch(state, chunk, batch_size))

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Result:
        check(bare(state), chunk)
        return streams.update(params, state, chunk, one_key_per_stream(key, batch_size))

    def advance(
        params: Params, state: EstimatorState, inputs: PyTree, key: Any, reset: Array | None = None
    ) -> tuple[Array, EstimatorState]:
        check(bare(state), Chunk(inputs, None, reset))
        return streams.advance(params, state, inputs, one_key_per_stream(key, batch_size), reset)

    def credit(params: Params, state: EstimatorState, dl_doutput: Array, per_stream: bool = False) -> PyTree:
        return (streams.credit_each if per_stream else streams.credit)(params, state, dl_doutput)

    return GradientEstimator(init, update, advance, credit)


def _mapped(est: GradientEstimator) -> Streams:
    """The functions of an estimator from elsewhere, for a batch of streams."""
    axes = STREAMS._replace(trace=0)

    def mean(grads: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), grads)

    @jax.jit
    def update(params: Params, state: EstimatorState, chunk: Chunk, keys: Any) -> Result:
        many = jax.vmap(est.update, in_axes=(None, axes, 0, 0), out_axes=(0, axes, 0))
        grads, state, info = many(params, state, chunk, keys)
        return mean(grads), state, info

    @jax.jit
    def advance(
        params: Params, state: EstimatorState, inputs: PyTree, keys: Any, reset: Array | None
    ) -> tuple[Array, EstimatorState]:
        many = jax.vmap(est.advance, in_axes=(None, axes, 0, 0, 0), out_axes=(0, axes))
        return many(params, state, inputs, keys, reset)

    @jax.jit
    def credit_each(params: Params, state: EstimatorState, dl_doutput: Array) -> PyTree:
        return jax.vmap(est.credit, in_axes=(None, axes, 0))(params, state, dl_doutput)

    return Streams(update, advance, lambda *arguments: mean(credit_each(*arguments)), credit_each)
