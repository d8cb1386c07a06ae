"""From an influence to a gradient estimator, from one stream to many, and what every estimator shares."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Bool, PyTree
from streamgrad.base import (
    Chunk,
    EstimatorState,
    GradientEstimator,
    Influence,
    Info,
    Model,
    Params,
    real_dtype,
)
from streamgrad.checks import (
    check_chunk,
    check_like,
    check_params,
    check_same_state,
    check_size,
    is_key,
    leading_length,
)
from streamgrad.cuts import linearise

Init = Callable[[Params], EstimatorState]
Update = Callable[[Params, EstimatorState, Chunk, Any], tuple[Params, EstimatorState, Info]]


def estimator(
    model: Model, init: Init, update: Update, check: Callable[[Chunk, int, Any], None] = lambda *_: None
) -> GradientEstimator:
    """Put the checks of the input before a pair of pure functions, and compile the second.

    Args:
      model: the model whose gradients are estimated.
      init: as in `GradientEstimator`.
      update: as in `GradientEstimator`.
      check: `check(chunk, length, key)`, raises ValueError for what this estimator in particular cannot take.

    Returns:
      The estimator. Its `update` is traced once for each shape, whether the caller compiles it or not.
    """
    compiled = jax.jit(update)
    expected = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    expected_state = jax.eval_shape(model.cell.init_state)

    def checked_init(params: Params) -> EstimatorState:
        check_params(expected, params)
        return init(params)

    def checked_update(
        params: Params, state: EstimatorState, chunk: Chunk, key: Any
    ) -> tuple[Params, EstimatorState, Info]:
        check_params(expected, params)
        if not isinstance(state, EstimatorState):
            raise ValueError(f"state must be what init(params) returns, not {type(state).__name__}.")
        check_like("state.cell", expected_state, state.cell, "the cell's state")
        check(chunk, check_chunk(model, chunk), key)
        return compiled(params, state, chunk, key)

    return GradientEstimator(checked_init, checked_update)


def restart(reset: Bool[Array, ""] | None, fresh: PyTree, current: PyTree) -> PyTree:
    """`fresh` where an episode begins, `current` where it goes on."""
    if reset is None:
        return current
    return jax.tree.map(lambda new, old: jnp.where(reset, new, old), fresh, current)


def transition(model: Model, params: Params, state: PyTree, x: PyTree) -> PyTree:
    """h_t = F(h_{t-1}, x_t; θ) in the dtype of the state."""
    new = model.cell.step(params.cell, state, x)
    check_same_state(state, new)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), new, state)


def online(
    model: Model, influence: Influence, check: Callable[[Chunk, int, Any], None] = lambda *_: None
) -> GradientEstimator:
    """Turn an influence into a gradient estimator: dL/dθ = Σ_t (dL_t/dh_t) (dh_t/dθ), while the stream runs.

    Nothing of the past is kept but the influence, so that the state's size does not depend on the stream's length.

    Args:
      model: the model whose gradients are estimated.
      influence: how dh_t/dθ is represented.
      check: as in `estimator`.

    Returns:
      The estimator. The head's gradient is exact.
    """

    def init(params: Params) -> EstimatorState:
        state = model.init_state(params)
        return EstimatorState(state, influence.init(params.cell, state), influence.shared(params.cell))

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> tuple[Params, EstimatorState, Info]:
        fresh = init(params)
        length = leading_length(chunk, "time")
        noise = influence.draw(state.shared, key, length, real_dtype(params.cell))

        def step(carry: tuple, now: tuple) -> tuple[tuple, tuple]:
            cell_state, before, grads = carry
            x, target, reset, noise = now
            cell_state = restart(reset, fresh.cell, cell_state)
            before = restart(reset, fresh.memory, before)
            at = linearise(influence.cut, params.cell, cell_state, x)
            loss, head_grads, dl_dstate = model.read_out(params.head, at.state, target)
            after, diagnostics = influence.advance(state.shared, before, at, noise, dl_dstate)
            new = Params(influence.contract(before, after, at, dl_dstate), head_grads)
            return (at.state, after, jax.tree.map(jnp.add, grads, new)), (loss, diagnostics)

        zero = jax.tree.map(jnp.zeros_like, params)
        steps = (chunk.inputs, chunk.targets, chunk.reset, noise)
        (cell_state, memory, grads), (loss, diagnostics) = jax.lax.scan(step, (state.cell, state.memory, zero), steps)
        return grads, EstimatorState(cell_state, memory, state.shared), Info(loss, diagnostics)

    return estimator(model, init, update, check)


# The axes that `batched` maps: all of the state but what the streams share.
_STREAMS = EstimatorState(cell=0, memory=0, shared=None)


def batched(est: GradientEstimator, batch_size: int) -> GradientEstimator:
    """Run an estimator on many streams at once: the mean of their gradients, each with its own noise.

    Args:
      est: an estimator for one stream.
      batch_size: B, the number of streams.

    Returns:
      The same record. `state` and `chunk` gain a leading batch axis (`inputs[B, T, ...]`), and so does `info`; what
      the streams share (`state.shared`) does not. `key` is one key, which is split, or one for each stream.

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
    check_size(batch_size=batch_size)
    streams = jax.vmap(est.update, in_axes=(None, _STREAMS, 0, 0), out_axes=(0, _STREAMS, 0))

    def init(params: Params) -> EstimatorState:
        one = est.init(params)

        def repeat(leaf: Array) -> Array:
            return jnp.repeat(leaf[None], batch_size, axis=0)

        return EstimatorState(jax.tree.map(repeat, one.cell), jax.tree.map(repeat, one.memory), one.shared)

    @jax.jit
    def compiled(params: Params, state: EstimatorState, chunk: Chunk, keys: Any) -> tuple[Params, EstimatorState, Info]:
        grads, state, info = streams(params, state, chunk, keys)
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), grads), state, info

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> tuple[Params, EstimatorState, Info]:
        if not isinstance(chunk, Chunk):
            raise ValueError(f"chunk must be a streamgrad.Chunk, not {type(chunk).__name__}.")
        size = leading_length(chunk, "the batch")
        if size != batch_size:
            raise ValueError(f"the chunk has {size} streams, but the estimator was made for {batch_size}.")
        return compiled(params, state, chunk, _one_key_per_stream(key, batch_size))

    return GradientEstimator(init, update)


def _one_key_per_stream(key: Any, batch_size: int) -> Any:
    """Split a single key; pass on what is one for each stream already; None stays None."""
    if key is None:
        return None
    single = is_key(key) and (key.ndim == 0 if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key.ndim == 1)
    if single:
        return jax.random.split(key, batch_size)
    if not hasattr(key, "shape") or key.shape[:1] != (batch_size,):
        raise ValueError(f"key must be one JAX PRNG key, or one for each of the {batch_size} streams.")
    return key
