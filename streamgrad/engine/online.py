"""From an influence to a gradient estimator, from one stream to many, and what every estimator shares."""

import functools
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
    check_batch,
    check_chunk,
    check_estimator,
    check_model,
    check_own_state,
    check_params,
    check_same_state,
    check_size,
    check_state,
    check_values,
    leading_length,
    once_per_shape,
    one_step,
)
from streamgrad.keys import one_key_per_stream
from streamgrad.step.cuts import linearise

Result = tuple[Params, EstimatorState, Info]
Parts = Callable[[Params, EstimatorState, Chunk, Any], tuple[PyTree, EstimatorState, Info]]
Check = Callable[[Chunk, int, Any], None]
Learn = Callable[[Params, EstimatorState, EstimatorState, Chunk, Info], tuple[PyTree, Info]]

# The axes along which streams are mapped: all of the state but what they share.
_STREAMS = EstimatorState(cell=0, memory=0, shared=None)


def sum_over_streams(summands: PyTree) -> PyTree:
    """Add up along the leading axis.

    As a product with ones, since compilers fuse a plain sum with what makes its terms, and then walk through memory
    stream by stream for each single entry.
    """

    def add(leaf: Array) -> Array:
        return jnp.tensordot(jnp.ones(len(leaf), leaf.dtype), leaf, axes=1, precision="highest")

    return jax.tree.map(add, summands)


def estimator(
    model: Model,
    init: Callable[[Params], EstimatorState],
    parts: Parts,
    total: Callable[[PyTree], Params] = sum_over_streams,
    check: Check = lambda *_: None,
    learn: Learn | None = None,
) -> GradientEstimator:
    """Put the checks of the input before pure functions, compile them, and add the form for many streams.

    Args:
      model: the model whose gradients are estimated.
      init: as in `GradientEstimator`.
      parts: like `update` in `GradientEstimator`, but what it returns in place of the gradient is left to `total`.
      total: makes the gradient, summed over streams, of what `parts` returns, stacked along a leading axis for
        streams. A sum of outer products, for one, is a single matrix product over all streams and steps.
      check: `check(chunk, length, key)`, raises ValueError for what this estimator in particular cannot take. It looks
        at shapes and dtypes alone, and is called once for each.
      learn: `learn(params, state before, state after, chunk, info) -> (shared, info)`, for what the streams share and
        learn from each chunk. Called once for all of them: everything has a leading axis for streams but `shared`.

    Returns:
      The estimator. Its `update` is traced once for each shape, whether the caller compiles it or not.
    """
    check_init, check_update, check_streams = _checks(model, init, check)

    @jax.jit
    def compiled(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Result:
        summands, new, info = parts(params, state, chunk, key)
        if learn is not None:
            before, after, one_chunk, one_info = jax.tree.map(lambda leaf: leaf[None], (state, new, chunk, info))
            shared, one_info = learn(
                params, before._replace(shared=state.shared), after._replace(shared=new.shared), one_chunk, one_info
            )
            new, info = new._replace(shared=shared), jax.tree.map(lambda leaf: leaf[0], one_info)
        return total(jax.tree.map(lambda leaf: leaf[None], summands)), new, info

    @jax.jit
    def compiled_streams(params: Params, state: EstimatorState, chunk: Chunk, keys: Any) -> Result:
        many = jax.vmap(parts, in_axes=(None, _STREAMS, 0, 0), out_axes=(0, _STREAMS, 0))
        summands, new, info = many(params, state, chunk, keys)
        if learn is not None:
            shared, info = learn(params, state, new, chunk, info)
            new = new._replace(shared=shared)
        return jax.tree.map(lambda leaf: leaf / len(info.loss), total(summands)), new, info

    def checked_init(params: Params) -> EstimatorState:
        check_init(params)
        return init(params)

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Result:
        check_update(params, state, chunk, key)
        check_values(model, chunk)
        return compiled(params, state, chunk, key)

    def streams(params: Params, state: EstimatorState, chunk: Chunk, keys: Any) -> Result:
        check_streams(params, state, chunk, keys)
        check_values(model, chunk)
        return compiled_streams(params, state, chunk, keys)

    return GradientEstimator(checked_init, update, streams)


def _checks(
    model: Model, init: Callable[[Params], EstimatorState], check: Check
) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """What is checked before `init`, before `update`, and before `update` for a batch of streams."""
    check_model(model)
    expected = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))

    @functools.cache
    def expected_state(*dtypes: Any) -> EstimatorState:
        """What `init` returns for parameters of these dtypes."""
        leaves, structure = jax.tree.flatten(expected)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        return jax.eval_shape(init, jax.tree.unflatten(structure, shapes))

    def one_stream(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> None:
        check_params(expected, params)
        check_state(state)
        check_own_state(expected_state(*map(jnp.result_type, jax.tree.leaves(params))), state)
        check(chunk, check_chunk(model, chunk), key)

    def many_streams(params: Params, state: EstimatorState, chunk: Chunk, keys: Any) -> None:
        first = EstimatorState(one_step(state.cell), one_step(state.memory), state.shared)
        one_stream(params, first, one_step(chunk), one_step(keys))

    return lambda params: check_params(expected, params), once_per_shape(one_stream), once_per_shape(many_streams)


def restart(reset: Bool[Array, ""] | None, fresh: PyTree, current: PyTree) -> PyTree:
    """`fresh` where an episode begins, `current` where it goes on."""
    if reset is None:
        return current
    return jax.tree.map(lambda new, old: jnp.where(reset, new, old), fresh, current)


def transition(model: Model, params: Params, state: PyTree, x: PyTree) -> PyTree:
    """h_t = F(h_{t-1}, x_t; θ) in the dtype of the state."""
    return same_dtype(model.cell.step(params.cell, state, x), state)


def same_dtype(new: PyTree, state: PyTree) -> PyTree:
    """A new state in the dtypes of the old; says so where the cell has changed its structure or shapes."""
    check_same_state(state, new)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), new, state)


def online(model: Model, influence: Influence, check: Check = lambda *_: None) -> GradientEstimator:
    """Turn an influence into a gradient estimator: dL/dθ = Σ_t (dL_t/dh_t) (dh_t/dθ), while the stream runs.

    Nothing of the past is kept but the influence, so that the state's size does not depend on the stream's length.

    Args:
      model: the model whose gradients are estimated.
      influence: how dh_t/dθ is represented.
      check: as in `estimator`.

    Returns:
      The estimator. The head's gradient is exact.
    """
    check_model(model)
    if not isinstance(influence, Influence):
        raise ValueError(f"influence must be a streamgrad.Influence, not {influence!r}.")
    init, parts, total = online_parts(model, influence)
    return estimator(model, init, parts, total, check)


def online_parts(
    model: Model, influence: Influence
) -> tuple[Callable[[Params], EstimatorState], Parts, Callable[[PyTree], Params]]:
    """What `online` is made of: `init`, `parts` and `total` as `estimator` takes them."""
    adds = influence.total is None

    def init(params: Params) -> EstimatorState:
        state = model.init_state(params)
        return EstimatorState(state, influence.init(params.cell, state), influence.shared(params.cell))

    def parts(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> tuple[PyTree, EstimatorState, Info]:
        fresh = init(params)
        length = leading_length(chunk, "time")
        noise = influence.draw(state.shared, key, length, real_dtype(params.cell))

        def step(carry: tuple, now: tuple) -> tuple[tuple, tuple]:
            cell_state, before, cell_sum, head_sum = carry
            x, target, reset, noise = now
            cell_state = restart(reset, fresh.cell, cell_state)
            before = restart(reset, fresh.memory, before)
            at = linearise(influence.cut, params.cell, cell_state, x)
            loss, head_grads, dl_dstate = model.read_out(params.head, at.state, target)
            after, diagnostics = influence.advance(state.shared, before, at, noise, dl_dstate)
            contribution = influence.contract(before, after, at, dl_dstate)
            if adds:
                cell_sum, contribution = jax.tree.map(jnp.add, cell_sum, contribution), None
            head_sum = jax.tree.map(jnp.add, head_sum, head_grads)
            return (at.state, after, cell_sum, head_sum), (loss, diagnostics, contribution)

        zero = jax.tree.map(jnp.zeros_like, params)
        carry = (state.cell, state.memory, zero.cell if adds else None, zero.head)
        steps = (chunk.inputs, chunk.targets, chunk.reset, noise)
        carry, (loss, diagnostics, contributions) = jax.lax.scan(step, carry, steps)
        cell_state, memory, cell_sum, head_sum = carry
        summands = (cell_sum if adds else contributions, head_sum)
        return summands, EstimatorState(cell_state, memory, state.shared), Info(loss, diagnostics)

    def total(summands: tuple[PyTree, PyTree]) -> Params:
        of_cell = influence.total or sum_over_streams
        return Params(of_cell(summands[0]), sum_over_streams(summands[1]))

    return init, parts, total


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
    check_estimator(est)
    check_size(batch_size=batch_size)
    run = est.streams or _mean_of_streams(est)

    def init(params: Params) -> EstimatorState:
        one = est.init(params)

        def repeat(leaf: Array) -> Array:
            return jnp.repeat(leaf[None], batch_size, axis=0)

        return EstimatorState(jax.tree.map(repeat, one.cell), jax.tree.map(repeat, one.memory), one.shared)

    check = once_per_shape(lambda state, chunk: check_batch(state, chunk, batch_size))

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Result:
        check(state, chunk)
        return run(params, state, chunk, one_key_per_stream(key, batch_size))

    return GradientEstimator(init, update)


def _mean_of_streams(est: GradientEstimator) -> Callable[[Params, EstimatorState, Chunk, Any], Result]:
    """`update` for a batch of streams, for an estimator that knows no faster way."""

    @jax.jit
    def run(params: Params, state: EstimatorState, chunk: Chunk, keys: Any) -> Result:
        many = jax.vmap(est.update, in_axes=(None, _STREAMS, 0, 0), out_axes=(0, _STREAMS, 0))
        grads, state, info = many(params, state, chunk, keys)
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), grads), state, info

    return run
