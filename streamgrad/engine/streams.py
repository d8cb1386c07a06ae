"""Many streams at once."""

from typing import Any

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Params, Trace
from streamgrad.checks import check_at_most, check_batch, check_estimator, check_fits, check_size, once_per_shape
from streamgrad.engine.collectives import ALONE, Devices
from streamgrad.engine.estimator import Engine, Result, Streams
from streamgrad.engine.method import STREAMS
from streamgrad.keys import check_keys, one_key_per_stream


def batched(est: GradientEstimator, batch_size: int, watched: int | None = None) -> GradientEstimator:
    """Run an estimator on many streams at once: the mean of their gradients, each with its own noise.

    Args:
      est: an estimator for one stream.
      batch_size: B, the number of streams.
      watched: for estimators that go through a chunk at once, such as `rtrl` and `ok`: credit for the past before it
        comes from this many streams alone, the first, and stands for all of them. Streams are exchangeable, so that the
        mean stays right, and time and memory of the influence fall by B / watched; but the older credit is averaged
        over fewer streams. None for all.

    Returns:
      The same record. `state` and `chunk` gain a leading batch axis (`inputs[B, T, ...]`), and so does `info`; what
      the streams share (`state.shared`) does not. `key` is one key, which is split, or one for each stream. Also
      `credit` is the mean over streams; `credit(params, trace, dl_doutput, per_stream=True)` gives each stream's own
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
    if watched is not None:
        check_watched(est, batch_size, watched)
    memories = watched or batch_size
    streams = est.streams if isinstance(est, Engine) else mapped(est, ALONE)

    def init(params: Params) -> EstimatorState:
        check_fits(jax.eval_shape(est.init, params), batch_size, memories)
        one = est.init(params)

        def repeat(tree: PyTree, count: int) -> PyTree:
            return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], count, axis=0), tree)

        return EstimatorState(repeat(one.cell, batch_size), repeat(one.memory, memories), one.shared)

    check = once_per_shape(lambda state, chunk: check_batch(state, chunk, batch_size, memories))

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any = None) -> Result:
        check(state, chunk)
        check_keys(key, batch_size)
        return streams.update(params, state, chunk, key)

    def advance(
        params: Params, state: EstimatorState, inputs: PyTree, key: Any = None, reset: Array | None = None
    ) -> tuple[Array, EstimatorState, Trace]:
        check(state, Chunk(inputs, None, reset))
        check_keys(key, batch_size)
        return streams.advance(params, state, inputs, key, reset)

    def credit(params: Params, trace: Trace, dl_doutput: Array, per_stream: bool = False) -> PyTree:
        if per_stream and memories < batch_size:
            raise ValueError("only streams that are watched have credit of their own: leave watched out of batched.")
        return (streams.credit_each if per_stream else streams.credit)(params, trace, dl_doutput)

    label = f"batched({est!r}, {batch_size}{'' if watched is None else f', watched={watched}'})"
    return GradientEstimator(init, update, advance, credit, label=label)


def check_watched(est: GradientEstimator, batch_size: int, watched: Any) -> None:
    """The estimator can be given a memory of this many of its streams."""
    check_size(watched=watched)
    check_at_most("watched", watched, batch_size, "the number of streams")
    if not isinstance(est, Engine) or not est.method.watchable:
        raise ValueError(f"watched is for estimators that go through a chunk at once, such as rtrl, not for {est!r}.")


def mapped(est: GradientEstimator, devices: Devices) -> Streams:
    """The functions of an estimator from elsewhere, for a batch of streams, or for those of one device of several."""

    def mean(grads: PyTree) -> PyTree:
        return devices.mean(jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), grads))

    def keys_of(key: Any, tree: PyTree) -> Any:
        return one_key_per_stream(key, len(jax.tree.leaves(tree)[0]))

    @jax.jit
    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Result:
        many = jax.vmap(est.update, in_axes=(None, STREAMS, 0, 0), out_axes=(0, STREAMS, 0))
        grads, state, info = many(params, state, chunk, keys_of(key, chunk.inputs))
        return mean(grads), state, info

    @jax.jit
    def advance(
        params: Params, state: EstimatorState, inputs: PyTree, key: Any, reset: Array | None
    ) -> tuple[Array, EstimatorState, Trace]:
        traces = Trace(STREAMS, 0, 0, 0)  # pyright: ignore[reportArgumentType], axes in place of arrays
        many = jax.vmap(est.advance, in_axes=(None, STREAMS, 0, 0, 0), out_axes=(0, STREAMS, traces))
        return many(params, state, inputs, keys_of(key, inputs), reset)

    @jax.jit
    def credit_each(params: Params, trace: Trace, dl_doutput: Array) -> PyTree:
        traces = Trace(STREAMS, 0, 0, 0)  # pyright: ignore[reportArgumentType], likewise
        keyed = trace._replace(key=keys_of(trace.key, dl_doutput))
        return jax.vmap(est.credit, in_axes=(None, traces, 0))(params, keyed, dl_doutput)

    return Streams(update, advance, lambda *arguments: mean(credit_each(*arguments)), credit_each)
