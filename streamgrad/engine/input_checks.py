"""What is checked before an estimator's functions: for one stream, and for many of which the first is looked at."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad.base import Chunk, EstimatorState, Model, Params
from streamgrad.checks import (
    check_chunk,
    check_model,
    check_own_state,
    check_params,
    check_state,
    once_per_shape,
    one_step,
)
from streamgrad.engine.advance_credit import Trace
from streamgrad.keys import is_single_key
from streamgrad.trees import check_inputs, common_length, is_real, kind_of


class Checks(NamedTuple):
    """The checks before each function of the contract, which are called as it is.

    Attributes:
      init: `init(params)`.
      update: `update(params, state, chunk, key)`.
      advance: `advance(params, state, chunk, key)`; the chunk has no targets.
      credit: `credit(params, state, dl_doutput)`.
    """

    init: Callable[..., None]
    update: Callable[..., None]
    advance: Callable[..., None]
    credit: Callable[..., None]


def checks_of(
    model: Model,
    init: Callable[[Params], EstimatorState],
    check: Callable[[Chunk, int, Any], None],
    uses_loss: bool,
) -> tuple[Checks, Checks]:
    """The checks of an algorithm with these fields, for one stream and for many; each is made once for each shape."""
    check_model(model)
    expected = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))

    @functools.cache
    def expected_state(*dtypes: Any) -> EstimatorState:
        """What `init` returns for parameters of these dtypes."""
        leaves, structure = jax.tree.flatten(expected)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        return jax.eval_shape(init, jax.tree.unflatten(structure, shapes))

    def check_own(params: Params, state: EstimatorState) -> None:
        check_params(expected, params)
        check_state(state)
        check_own_state(expected_state(*map(jnp.result_type, jax.tree.leaves(params))), state)

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> None:
        check_own(params, state)
        check(chunk, check_chunk(model, chunk), key)

    def advance(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> None:
        if uses_loss:
            raise ValueError(
                "this estimator looks at the losses while it moves on, as dni does, and others with rescale='greedy' "
                "or baseline='average', so that it cannot advance before they are known: use update."
            )
        check_own(params, state)
        check(chunk, check_inputs(model.cell.example_input, chunk.inputs, chunk.reset), key)

    def credit(params: Params, state: EstimatorState, dl_doutput: Any, streams: tuple[int, ...] = ()) -> None:
        trace = _trace_of(state)
        check_own(params, trace.before)
        shape = (*streams, common_length({"inputs": trace.inputs}, "time"), model.width)
        if np.shape(dl_doutput) != shape or not is_real(jnp.result_type(dl_doutput)):
            raise ValueError(
                f"dl_doutput must be real numbers of the shape of the output that advance returned, {shape}, "
                f"not {kind_of(dl_doutput)}."
            )

    def update_many(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> None:
        update(params, _first(state), one_step(chunk), key if is_single_key(key) else one_step(key))

    def advance_many(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> None:
        advance(params, _first(state), one_step(chunk), key if is_single_key(key) else one_step(key))

    def credit_many(params: Params, state: EstimatorState, dl_doutput: Any) -> None:
        trace = _trace_of(state)
        streams = common_length({"inputs": trace.inputs}, "the batch")
        first = Trace(_first(trace.before), one_step(trace.inputs), one_step(trace.reset), None)
        credit(params, state._replace(trace=first), dl_doutput, (streams,))

    def check_init(params: Params) -> None:
        check_params(expected, params)

    return (
        Checks(check_init, *map(once_per_shape, (update, advance, credit))),
        Checks(check_init, *map(once_per_shape, (update_many, advance_many, credit_many))),
    )


def _first(state: EstimatorState) -> EstimatorState:
    """Shapes and dtypes of the state of one of many streams."""
    return EstimatorState(one_step(state.cell), one_step(state.memory), state.shared)


def _trace_of(state: Any) -> Trace:
    if not isinstance(state, EstimatorState) or not isinstance(state.trace, Trace):
        raise ValueError("credit needs the state that advance returned, with its trace.")
    return state.trace
