"""From an algorithm for one stream to an estimator: checks before it, compilation, and the form for many streams."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import (
    Chunk,
    EstimatorState,
    GradientEstimator,
    Info,
    Model,
    Params,
    fold_weight,
    narrowed,
    widened,
)
from streamgrad.checks import check_fits, check_values
from streamgrad.engine.advance_credit import advancing, bare, crediting
from streamgrad.engine.collectives import ALONE, Columns, Devices, Spread
from streamgrad.engine.forward_mode_errors import naming_reverse_only
from streamgrad.engine.input_checks import Checks, checks_of
from streamgrad.engine.reparametrised import from_outside
from streamgrad.keys import one_key_per_stream
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
      seen: for `Algorithm.learn`, a `Seen` or whatever it wants to know; where nothing learns, the compiler drops it.
      outputs: y_t, the cell's output at each step, for `advance` and `Info.outputs`.
    """

    summands: PyTree
    state: EstimatorState
    info: Info
    seen: PyTree = None
    outputs: Float[Array, "T width"] | None = None


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
      learn: `learn(params, state before, outcome, chunk, devices) -> shared`, for what the streams share and learn from
        each chunk. Called once for all of them: everything has a leading axis for streams but `shared`. Where streams
        are spread over devices it is called on each with its own, and what it returns must be the same on all of them:
        `devices.mean` makes it so.
      uses_loss: whether `memory` or `shared` depend on the losses, so that the estimator cannot `advance` before they
        are known. What `learn` does is no matter: it is not called then.
      batch: `batch(params, state, chunk, keys, devices)`, `run` for all streams at once, one key each, where that is
        more than mapping `run` over them. What it has summed over streams already has a leading axis of one.
      columns: `columns(columns) -> Spread`, where `batch` can keep `memory` by columns of θ on the devices of a mesh
        axis; else None.
    """

    init: Callable[[Params], EstimatorState]
    run: Callable[[Params, EstimatorState, Chunk, Any], Outcome]
    total: Callable[[PyTree], Params] = sum_over_streams
    check: Callable[[Chunk, int, Any], None] = lambda *_: None
    learn: Callable[[Params, EstimatorState, Outcome, Chunk, Devices], PyTree] | None = None
    uses_loss: bool = False
    batch: Callable[[Params, EstimatorState, Chunk, Any, Devices], Outcome] | None = None
    columns: Callable[[Columns], Spread] | None = None


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


class Streams(NamedTuple):
    """The contract's functions for a batch of streams, with one key for all or one for each.

    Attributes:
      update: the mean of the streams' gradients.
      advance: all of them move on.
      credit: the mean of the streams' gradients.
      credit_each: the gradient of each, with a leading axis for streams.
    """

    update: Callable[..., Result]
    advance: Callable[..., tuple[Array, EstimatorState]]
    credit: Callable[..., PyTree]
    credit_each: Callable[..., PyTree]


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Engine(GradientEstimator):
    """An estimator of this library: the contract's functions, and what the library itself needs to know.

    Attributes:
      model: the model whose gradients are estimated.
      streams: the same functions for a batch of streams.
      on: `on(devices) -> Streams`, for the streams of one device of several, inside a program over all of them.
      noisy: None where there is no noise to choose, or it has been chosen.
      watchable: whether `streams` takes a memory of fewer streams than there are.
      columns: as in `Algorithm`.
    """

    model: Model
    streams: Streams
    on: Callable[[Devices], Streams]
    noisy: Noisy | None = None
    watchable: bool = False
    columns: Callable[[Columns], Spread] | None = None


def over_streams(
    algorithm: Algorithm, devices: Devices, params: Params, state: EstimatorState, chunk: Chunk, key: Any
) -> Outcome:
    """`Algorithm.run` for a batch of streams: all have an axis for them but what they share, and one key for all."""
    keys = one_key_per_stream(key, len(jax.tree.leaves(chunk.inputs)[0]))
    if algorithm.batch is not None:
        return algorithm.batch(params, state, chunk, keys, devices)

    def one(state: EstimatorState, chunk: Chunk, key: Any) -> tuple[Outcome, PyTree]:
        outcome = algorithm.run(params, state, chunk, key)
        return outcome._replace(state=outcome.state._replace(shared=None)), outcome.state.shared

    outcome, shared = jax.vmap(one, in_axes=(STREAMS, 0, 0), out_axes=(0, None))(state, chunk, keys)
    return outcome._replace(state=outcome.state._replace(shared=shared))


def estimator(model: Model, algorithm: Algorithm, noisy: Noisy | None = None, *, label: str = "estimator") -> Engine:
    """Put the checks of the input before an algorithm, compile it, and add the form for many streams.

    Args:
      model: the model whose gradients are estimated.
      algorithm: for one stream.
      noisy: what of its noise may be chosen from outside.
      label: what `repr` shows.

    Returns:
      The estimator. Its functions are traced once for each shape, whether the caller compiles them or not. Where the
      model's cell is worked on in another form than it was given, the algorithm is for that form.
    """
    if model.inner is not model:
        return from_outside(model, estimator(model.inner, algorithm, noisy, label=label))
    algorithm = of_any_precision(algorithm)
    check, check_many = checks_of(model, algorithm.init, algorithm.check, algorithm.uses_loss)
    run = naming_reverse_only(model, algorithm.run)

    def alone(outcome: Outcome) -> Params:
        return algorithm.total(as_stream(outcome.summands))

    @jax.jit
    def compiled(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Result:
        outcome = run(params, state, fold_weight(chunk), key)
        new = outcome.state
        if algorithm.learn is not None:
            one, after = as_stream(outcome), as_stream(new)._replace(shared=new.shared)
            before = as_stream(state)._replace(shared=state.shared)
            known = algorithm.learn(params, before, one._replace(state=after), as_stream(chunk), ALONE)
            new = new._replace(shared=known)
        return narrowed(alone(outcome), params), new, outcome.info._replace(outputs=outcome.outputs)

    def init(params: Params) -> EstimatorState:
        check.init(params)
        check_fits(jax.eval_shape(algorithm.init, params))
        return algorithm.init(params)

    def spread(columns: Columns) -> Spread:
        assert algorithm.columns is not None
        found = algorithm.columns(columns)

        def init(params: Params) -> EstimatorState:
            check.init(params)
            return found.init(params)

        return found._replace(init=init)

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Result:
        check.update(params, bare(state), chunk, key)
        check_values(model, chunk)
        return compiled(params, bare(state), chunk, key)

    on = functools.partial(streams_of, model, algorithm, check_many)
    return Engine(
        init,
        update,
        advancing(model, run, 1, check.advance),
        crediting(run, alone, check.credit),
        model=model,
        streams=on(ALONE),
        on=on,
        noisy=noisy,
        watchable=algorithm.batch is not None,
        columns=None if algorithm.columns is None else spread,
        label=label,
    )


def streams_of(model: Model, algorithm: Algorithm, check: Checks, devices: Devices) -> Streams:
    """The contract's functions for a batch of streams, or for those of one device of several."""
    if devices.columns is not None:
        _, check = checks_of(model, part_of(algorithm, devices.columns), algorithm.check, algorithm.uses_loss)
    run = naming_reverse_only(model, functools.partial(over_streams, algorithm, devices))
    run_each = functools.partial(over_streams, algorithm._replace(batch=None), devices)

    def mean(outcome: Outcome) -> Params:
        own = jax.tree.map(lambda leaf: leaf / len(outcome.info.loss), algorithm.total(outcome.summands))
        return devices.mean_gradient(own)

    def each(outcome: Outcome) -> Params:
        return jax.vmap(lambda summands: algorithm.total(as_stream(summands)))(outcome.summands)

    @jax.jit
    def compiled(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Result:
        outcome = run(params, state, fold_weight(chunk), key)
        new = outcome.state
        if algorithm.learn is not None:
            new = new._replace(shared=algorithm.learn(params, state, outcome, chunk, devices))
        return narrowed(mean(outcome), params), new, outcome.info._replace(outputs=outcome.outputs)

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Result:
        check.update(params, bare(state), chunk, key)
        check_values(model, chunk)
        return compiled(params, bare(state), chunk, key)

    return Streams(
        update,
        advancing(model, run, 2, check.advance),
        crediting(run, mean, check.credit),
        crediting(run_each, each, check.credit),
    )


def of_any_precision(algorithm: Algorithm) -> Algorithm:
    """The algorithm for parameters of any precisions: it works in `widened` ones, in which its gradient is."""

    def entered(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, *rest: function(widened(params), *rest)

    def columns(columns: Columns) -> Spread:
        assert algorithm.columns is not None
        spread = algorithm.columns(columns)
        return spread._replace(init=entered(spread.init))

    return algorithm._replace(
        init=entered(algorithm.init),
        run=entered(algorithm.run),
        learn=None if algorithm.learn is None else entered(algorithm.learn),
        batch=None if algorithm.batch is None else entered(algorithm.batch),
        columns=None if algorithm.columns is None else columns,
    )


def part_of(algorithm: Algorithm, columns: Columns) -> Callable[[Params], EstimatorState]:
    """`Algorithm.init` as one device has it that keeps some columns of θ."""
    assert algorithm.columns is not None
    spread = algorithm.columns(columns)

    def cut(leaf: Array, axis: int) -> Array:
        return leaf if axis < 0 else jnp.split(leaf, columns.count, axis)[0]

    def init(params: Params) -> EstimatorState:
        state = spread.init(params)
        return state._replace(memory=jax.tree.map(cut, state.memory, spread.axes(state.memory)))

    return init


def as_stream(tree: PyTree) -> PyTree:
    """As one of a batch: with a leading axis of length 1."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


def transition(model: Model, params: Params, state: PyTree, x: PyTree) -> PyTree:
    """h_t = F(h_{t-1}, x_t; θ) in the dtype of the state."""
    return same_dtype(model.cell.step(params.cell, state, x), state)
