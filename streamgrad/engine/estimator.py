"""From a method to an estimator, of one stream or of many: checks, compilation, parameters of any kind and precision.

    dL/dθ = (dL/dW) (dW/dθ)

Methods work on matrices W in float32 or float64. The user's parameters θ may be of any precision, and where the cell is
another library's W is a function of them. An influence is kept of W, and the gradient goes back to θ once per chunk:
for parameters that stay as they are that is the chain rule; while they change, θ takes the place of the parameters the
past was made with, as it does everywhere in online learning.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, PyTree
from streamgrad.base import (
    Chunk,
    EstimatorState,
    GradientEstimator,
    Info,
    Params,
    Trace,
    fold_weight,
    narrowed,
    real_dtype,
    users_model,
    widened,
    work_dtype,
    worked,
)
from streamgrad.checks import (
    check_at_most,
    check_batch,
    check_estimator,
    check_fits,
    check_size,
    check_values,
    once_per_shape,
)
from streamgrad.engine.collectives import ALONE, Devices
from streamgrad.engine.forward_mode_errors import naming_reverse_only
from streamgrad.engine.input_checks import Checks, checks_of
from streamgrad.engine.method import STREAMS, Method, Outcome, as_batch, only_stream, watched_streams
from streamgrad.keys import check_keys, one_key_per_stream
from streamgrad.step_loss import Credit
from streamgrad.trees import kind_of

Result = tuple[Params, EstimatorState, Info]


class Streams(NamedTuple):
    """The contract's functions for a batch of streams, with one key for all or one for each.

    Attributes:
      update: the mean of the streams' gradients.
      advance: all of them move on.
      credit: the mean of the streams' gradients.
      credit_each: the gradient of each, with a leading axis for streams.
    """

    update: Callable[..., Result]
    advance: Callable[..., tuple[Array, EstimatorState, Trace]]
    credit: Callable[..., PyTree]
    credit_each: Callable[..., PyTree]


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Engine(GradientEstimator):
    """An estimator of this library: the contract's functions for one stream, and the method that they are made of.

    Attributes:
      method: the method.
      streams: the same functions for a batch of streams.
    """

    method: Method
    streams: Streams


def estimator(method: Method) -> GradientEstimator:
    """Turn a method into an estimator: check the input, compile, and support batches.

    Args:
      method: how gradients are estimated.

    Returns:
      The estimator for one stream, which is a batch of one. Its functions are traced once for each shape, whether the
      caller compiles them or not.
    """
    check_method(method)
    program, check = Program(method), checks_of(method)

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Result:
        grads, state, info = program.update(params, _batch(state), as_batch(chunk), as_batch(key))
        return grads, _stream(state), only_stream(info)

    def advance(params: Params, trace: Trace) -> tuple[Array, EstimatorState]:
        outputs, state = program.advance(params, _batch_trace(trace))
        return outputs[0], _stream(state)

    def credit(params: Params, trace: Trace, dl_doutput: Array) -> PyTree:
        return program.credit(params, _batch_trace(trace), as_batch(dl_doutput))

    def init(params: Params) -> EstimatorState:
        check.init(params)
        check_fits(jax.eval_shape(program.init, params))
        return program.init(params)

    functions = checked(method, check, update, advance, credit)
    return Engine(init, *functions, method=method, streams=streams_of(method, ALONE), label=method.label)


def check_method(method: Any) -> None:
    """`method` is a `Method`, of a model as estimators work on it."""
    if not isinstance(method, Method):
        raise ValueError(f"method must be a streamgrad.Method, not {kind_of(method)}.")
    if worked(method.model).cell is not method.model.cell:
        raise ValueError(
            f"the method {method.name} must work on matrices and real numbers, which this cell's parameters are not: "
            "make it with model=streamgrad.worked(model)."
        )


def streams_of(method: Method, devices: Devices) -> Streams:
    """The contract's functions for a batch of streams, or for those of one device of several."""
    program, check = Program(method, devices), checks_of(method, many=True)
    update, advance, credit = checked(method, check, program.update, program.advance, program.credit)
    each = checked(method, check, program.update, program.advance, program.credit_each)[2]
    return Streams(update, advance, credit, each)


def checked(
    method: Method, check: Checks, update: Callable, advance: Callable, credit: Callable
) -> tuple[Callable, Callable, Callable]:
    """The contract's functions, from programs: compiled, with the checks of their input before them."""
    compiled_update, compiled_advance, compiled_credit = map(jax.jit, (update, advance, credit))
    model = users_model(method.model)

    def checked_update(params: Params, state: EstimatorState, chunk: Chunk, key: Any = None) -> Result:
        check.update(params, state, chunk, key)
        check_values(model, chunk)
        return compiled_update(params, state, chunk, key)

    def checked_advance(
        params: Params, state: EstimatorState, inputs: PyTree, key: Any = None, reset: Array | None = None
    ) -> tuple[Array, EstimatorState, Trace]:
        chunk, trace = Chunk(inputs, None, reset), Trace(state, inputs, reset, key)
        check.advance(params, state, chunk, key)
        check_values(model, chunk)
        return *compiled_advance(params, trace), trace

    def checked_credit(params: Params, trace: Trace, dl_doutput: Array) -> PyTree:
        check.credit(params, trace, dl_doutput)
        return compiled_credit(params, trace, dl_doutput)

    return checked_update, checked_advance, checked_credit


class Program:
    """The programs of a method for all streams of one device, before they are compiled.

    An estimate depends on the losses through dL_t/dy_t alone, and linearly, y_t the cell's output; methods of which
    that is not true say `uses_loss`. So `credit` is the
    run of `update`, once more from the state before the chunk, with losses that are linear in the output; and `advance`
    is that run with losses of zero, of which the compiler drops everything that is for the gradient.
    """

    def __init__(self, method: Method, devices: Devices = ALONE) -> None:
        self.method, self.devices, self.model = method, devices, method.model
        self.worked = users_model(method.model).cell.worked
        self.run = naming_reverse_only(method.model, method.run)

    def enter(self, params: Params) -> tuple[Params, Params]:
        """The matrices that the user's parameters make, and the same in the precision that is worked in."""
        matrices = users_model(self.model).enter(params)
        return matrices, widened(matrices)

    def back(self, params: PyTree, grads: PyTree, matrices: PyTree) -> PyTree:
        """A gradient of the cell's matrices as one of the user's parameters, in their precisions."""
        grads = narrowed(grads, matrices)
        return grads if self.worked is None else jax.vjp(self.worked.weights, params)[1](grads)[0]

    def init(self, params: Params) -> EstimatorState:
        """The state of one stream at the beginning."""
        return self.method.init(self.enter(params)[1])

    def outcome(self, params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Outcome:
        """All streams through a chunk, with the method's noise."""
        streams, length = jax.tree.leaves(chunk.inputs)[0].shape[:2]
        watched = watched_streams(state)
        keys = jax.tree.map(lambda leaf: leaf[:watched], one_key_per_stream(key, streams))
        dtype = real_dtype(params.cell)

        def draw(key: Any) -> PyTree:
            return self.method.draw(state.shared, key, length, dtype)

        noise = jax.vmap(draw, axis_size=watched)(keys)
        return self.run(params, state, fold_weight(chunk), noise, self.devices)

    def mean(self, outcome: Outcome) -> Params:
        """The mean of the gradient over the streams of all devices."""
        own = jax.tree.map(lambda leaf: leaf / len(outcome.info.loss), outcome.grads)
        return self.devices.mean(own)

    def update(self, params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Result:
        """As in `GradientEstimator`."""
        matrices, inner = self.enter(params)
        outcome = self.outcome(inner, state, chunk, key)
        new = outcome.state
        if self.method.learn is not None:
            new = new._replace(shared=self.method.learn(inner, state, outcome, chunk, self.devices))
        grads = self.mean(outcome)
        cell = self.back(params.cell, grads.cell, matrices.cell)
        return Params(cell, narrowed(grads.head, params.head)), new, outcome.info

    def advance(self, params: Params, trace: Trace) -> tuple[Array, EstimatorState]:
        """The outputs, and the state after the chunk."""
        steps = jax.tree.leaves(trace.inputs)[0].shape[:2]
        nothing = jnp.zeros((*steps, self.model.width), work_dtype(params.cell))
        outcome = self.with_credit(self.enter(params)[1], trace, nothing)
        if outcome.info.outputs is None:
            raise ValueError("this estimator cannot advance: the Info of its method has no outputs.")
        return outcome.info.outputs, outcome.state

    def with_credit(self, params: Params, trace: Trace, dl_doutput: Array) -> Outcome:
        """All streams through the chunk of a trace, with losses that are linear in the outputs."""
        return self.outcome(params, trace.before, Chunk(trace.inputs, Credit(dl_doutput), trace.reset), trace.key)

    def credit(self, params: Params, trace: Trace, dl_doutput: Array) -> PyTree:
        """The mean of the streams' gradients."""
        matrices, inner = self.enter(params)
        grads = self.mean(self.with_credit(inner, trace, dl_doutput)).cell
        return self.back(params.cell, grads, matrices.cell)

    def credit_each(self, params: Params, trace: Trace, dl_doutput: Array) -> PyTree:
        """The gradient of each stream, as a batch of one."""
        matrices, inner = self.enter(params)
        keys = one_key_per_stream(trace.key, len(dl_doutput))

        def one(before: EstimatorState, inputs: PyTree, reset: Array | None, key: Any, dl_doutput: Array) -> PyTree:
            trace = _batch_trace(Trace(before, inputs, reset, key))
            grads = self.with_credit(inner, trace, as_batch(dl_doutput)).grads.cell
            return self.back(params.cell, grads, matrices.cell)

        many = jax.vmap(one, in_axes=(STREAMS, 0, 0, 0, 0))
        return many(trace.before, trace.inputs, trace.reset, keys, dl_doutput)


def _batch(state: EstimatorState) -> EstimatorState:
    """The state of one stream as that of a batch of one."""
    return EstimatorState(as_batch(state.cell), as_batch(state.memory), state.shared)


def _stream(state: EstimatorState) -> EstimatorState:
    """The state of the stream of a batch of one."""
    return EstimatorState(only_stream(state.cell), only_stream(state.memory), state.shared)


def _batch_trace(trace: Trace) -> Trace:
    """The trace of one stream as that of a batch of one."""
    return Trace(_batch(trace.before), *as_batch((trace.inputs, trace.reset, trace.key)))


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
        if not isinstance(trace, Trace):
            raise ValueError(f"trace must be the third value that advance returned, not {kind_of(trace)}.")
        check(trace.before, Chunk(trace.inputs, None, trace.reset))
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
