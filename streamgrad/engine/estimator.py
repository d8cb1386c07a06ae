"""From an algorithm for one stream to an estimator: checks before it, compilation, and the form for many streams."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Info, Model, Params, fold_weight
from streamgrad.checks import (
    check_chunk,
    check_fits,
    check_model,
    check_own_state,
    check_params,
    check_state,
    check_values,
    once_per_shape,
    one_step,
)
from streamgrad.noise.groups import Groups
from streamgrad.noise.rescale import Rescaling
from streamgrad.trees import restart as restart
from streamgrad.trees import same_dtype as same_dtype

Result = tuple[Params, EstimatorState, Info]

# The axes along which streams are mapped: all of the state but what they share.
STREAMS = EstimatorState(cell=0, memory=0, shared=None)


class Seen(NamedTuple):
    """What a chunk showed to whoever learns from it; time leading.

    Attributes:
      state: h_t, ravelled.
      dl_dstate: dL_t/dh_t.
    """

    state: Float[Array, "T S"]
    dl_dstate: Float[Array, "T S"]


class Outcome(NamedTuple):
    """What a chunk of one stream came to.

    Attributes:
      summands: what stands for the gradient until `Algorithm.total` has summed it over streams.
      state: for the next chunk.
      info: as in `GradientEstimator`.
      seen: for `Algorithm.learn`; where nothing learns, the compiler drops it.
    """

    summands: PyTree
    state: EstimatorState
    info: Info
    seen: Seen | None = None
    outputs: Array | None = None


def sum_over_streams(summands: PyTree) -> PyTree:
    """Add up along the leading axis.

    As a product with ones, since compilers fuse a plain sum with what makes its terms, and then walk through memory
    stream by stream for each single entry.
    """

    def add(leaf: Array) -> Array:
        return jnp.tensordot(jnp.ones(len(leaf), leaf.dtype), leaf, axes=1, precision="highest")

    return jax.tree.map(add, summands)


class Algorithm(NamedTuple):
    """An estimator before it is checked and compiled, written for one stream.

    Attributes:
      init: as in `GradientEstimator`.
      run: `run(params, state, chunk, key) -> Outcome`. Weights of the chunk are inside its targets: `Model.loss` finds
        them there.
      total: makes the gradient, summed over streams, of the summands, stacked along a leading axis for streams. A sum
        of outer products, for one, is a single matrix product over all streams and steps.
      check: `check(chunk, length, key)`, raises ValueError for what this estimator in particular cannot take. It looks
        at shapes and dtypes alone, and is called once for each.
      learn: `learn(params, state before, outcome, chunk) -> shared`, for what the streams share and learn from each
        chunk. Called once for all of them: everything has a leading axis for streams but `shared`.
      batch: `run` for all streams at once, one key each, where that is more than mapping `run` over them. What it has
        summed over streams already has a leading axis of one.
    """

    init: Callable[[Params], EstimatorState]
    run: Callable[[Params, EstimatorState, Chunk, Any], Outcome]
    total: Callable[[PyTree], Params] = sum_over_streams
    check: Callable[[Chunk, int, Any], None] = lambda *_: None
    learn: Callable[[Params, EstimatorState, Outcome, Chunk], PyTree] | None = None
    batch: Callable[[Params, EstimatorState, Chunk, Any], Outcome] | None = None


class Noisy(NamedTuple):
    """What of an estimator's noise may be chosen from outside, as `streamgrad.carried` does.

    Attributes:
      groups: the partition of its preactivations.
      shaped: whether its noise is spatial, and Q_0 shapes it.
      rescaled: `rescaled(rescaling) -> Algorithm`, the same estimator with other coefficients. Its shared state is a
        `NoiseSettings`.
    """

    groups: Groups
    shaped: bool
    rescaled: Callable[[Rescaling], Algorithm]


@dataclasses.dataclass(frozen=True, eq=False)
class Engine(GradientEstimator):
    """An estimator of this library: the contract's two functions, and what the library itself needs to know.

    Attributes:
      model: the model whose gradients are estimated.
      streams: `update` for a batch of streams with one key each.
      noisy: None where there is no noise to choose, or it has been chosen.
      watchable: whether `streams` takes a memory of fewer streams than there are.
    """

    model: Model
    streams: Callable[[Params, EstimatorState, Chunk, Any], Result]
    noisy: Noisy | None = None
    watchable: bool = False


def estimator(model: Model, algorithm: Algorithm, noisy: Noisy | None = None) -> Engine:
    """Put the checks of the input before an algorithm, compile it, and add the form for many streams.

    Args:
      model: the model whose gradients are estimated.
      algorithm: for one stream.
      noisy: what of its noise may be chosen from outside.

    Returns:
      The estimator. Its `update` is traced once for each shape, whether the caller compiles it or not.
    """
    check_init, check_update, check_streams = _checks(model, algorithm)

    @jax.jit
    def compiled_streams(params: Params, state: EstimatorState, chunk: Chunk, keys: Any) -> Result:
        outcome = (algorithm.batch or in_parallel(algorithm.run))(params, state, fold_weight(chunk), keys)
        new = outcome.state
        if algorithm.learn is not None:
            new = new._replace(shared=algorithm.learn(params, state, outcome._replace(state=new), chunk))
        grads = jax.tree.map(lambda leaf: leaf / len(outcome.info.loss), algorithm.total(outcome.summands))
        return grads, new, outcome.info

    @jax.jit
    def compiled(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Result:
        def as_stream(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: leaf[None], tree)

        outcome = algorithm.run(params, state, fold_weight(chunk), key)
        new = outcome.state
        if algorithm.learn is not None:
            one, after = as_stream(outcome), as_stream(new)._replace(shared=new.shared)
            before = as_stream(state)._replace(shared=state.shared)
            new = new._replace(shared=algorithm.learn(params, before, one._replace(state=after), as_stream(chunk)))
        return algorithm.total(as_stream(outcome.summands)), new, outcome.info

    def checked_init(params: Params) -> EstimatorState:
        check_init(params)
        check_fits(jax.eval_shape(algorithm.init, params))
        return algorithm.init(params)

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Result:
        check_update(params, state, chunk, key)
        check_values(model, chunk)
        return compiled(params, state, chunk, key)

    def streams(params: Params, state: EstimatorState, chunk: Chunk, keys: Any) -> Result:
        check_streams(params, state, chunk, keys)
        check_values(model, chunk)
        return compiled_streams(params, state, chunk, keys)

    return Engine(checked_init, update, model, streams, noisy, algorithm.batch is not None)


def in_parallel(run: Callable[..., Outcome]) -> Callable[[Params, EstimatorState, Chunk, Any], Outcome]:
    """`run` for many streams, each by itself."""

    def batch(params: Params, state: EstimatorState, chunk: Chunk, keys: Any) -> Outcome:
        def one(state: EstimatorState, chunk: Chunk, key: Any) -> tuple[Outcome, PyTree]:
            outcome = run(params, state, chunk, key)
            return outcome._replace(state=outcome.state._replace(shared=None)), outcome.state.shared

        outcome, shared = jax.vmap(one, in_axes=(STREAMS, 0, 0), out_axes=(0, None))(state, chunk, keys)
        return outcome._replace(state=outcome.state._replace(shared=shared))

    return batch


def _checks(model: Model, algorithm: Algorithm) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """What is checked before `init`, before `update`, and before `update` for a batch of streams."""
    check_model(model)
    expected = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))

    @functools.cache
    def expected_state(*dtypes: Any) -> EstimatorState:
        """What `init` returns for parameters of these dtypes."""
        leaves, structure = jax.tree.flatten(expected)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        return jax.eval_shape(algorithm.init, jax.tree.unflatten(structure, shapes))

    def one_stream(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> None:
        check_params(expected, params)
        check_state(state)
        check_own_state(expected_state(*map(jnp.result_type, jax.tree.leaves(params))), state)
        algorithm.check(chunk, check_chunk(model, chunk), key)

    def many_streams(params: Params, state: EstimatorState, chunk: Chunk, keys: Any) -> None:
        first = EstimatorState(one_step(state.cell), one_step(state.memory), state.shared)
        one_stream(params, first, one_step(chunk), one_step(keys))

    return lambda params: check_params(expected, params), once_per_shape(one_stream), once_per_shape(many_streams)


def transition(model: Model, params: Params, state: PyTree, x: PyTree) -> PyTree:
    """h_t = F(h_{t-1}, x_t; θ) in the dtype of the state."""
    return same_dtype(model.cell.step(params.cell, state, x), state)
