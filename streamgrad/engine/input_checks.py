"""The checks before an estimator's functions: for one stream, and for many, of which the first is looked at."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad.base import Chunk, EstimatorState, Params, Trace, users_model, widened
from streamgrad.checks import check_chunk, check_own_state, check_params, check_state, once_per_shape, one_step
from streamgrad.engine.method import Method
from streamgrad.keys import is_single_key
from streamgrad.trees import check_inputs, check_like, check_numbers, common_length, is_real, kind_of


class Checks(NamedTuple):
    """The checks before each function of the contract, which are called as it is.

    Attributes:
      init: `init(params)`.
      update: `update(params, state, chunk, key)`.
      advance: `advance(params, state, chunk, key)`; the chunk has no targets.
      credit: `credit(params, trace, dl_doutput)`.
    """

    init: Callable[..., None]
    update: Callable[..., None]
    advance: Callable[..., None]
    credit: Callable[..., None]


def checks_of(method: Method, many: bool = False) -> Checks:
    """The checks of a method, for one stream or for many; each is made once for each shape.

    Args:
      method: the method.
      many: whether everything but the parameters and shared state has a leading axis for streams.

    Returns:
      The checks, which raise ValueError.
    """
    model, user = method.model, users_model(method.model)
    expected = jax.eval_shape(user.init, jax.eval_shape(lambda: jax.random.key(0)))

    @functools.cache
    def expected_state(*dtypes: Any) -> EstimatorState:
        """The state that `init` returns for parameters of these dtypes."""
        leaves, structure = jax.tree.flatten(expected)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        return jax.eval_shape(
            lambda params: method.init(widened(user.enter(params))), jax.tree.unflatten(structure, shapes)
        )

    def check_init(params: Params) -> None:
        if user is model:
            return check_params(expected, params)
        if not isinstance(params, Params):
            raise ValueError(f"params must be what model.init(key) returns, not {kind_of(params)}.")
        check_numbers("params.cell", params.cell)
        check_like("params", expected, params, "the model's own")

    def check_own(params: Params, state: EstimatorState) -> None:
        check_init(params)
        check_state(state)
        first = _first(state) if many else state
        check_own_state(expected_state(*map(jnp.result_type, jax.tree.leaves(params))), first)

    def one(tree: Any) -> Any:
        return one_step(tree) if many else tree

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> None:
        check_own(params, state)
        chunk = one(chunk)
        method.check(chunk, check_chunk(model, chunk), key if is_single_key(key) else one(key))

    def advance(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> None:
        if method.uses_loss:
            raise ValueError(
                f"{method.label} looks at the losses while it moves on, so that it cannot advance before they are "
                "known: use update."
            )
        check_own(params, state)
        chunk = one(chunk)
        length = check_inputs(model.cell.example_input, chunk.inputs, chunk.reset)
        method.check(chunk, length, key if is_single_key(key) else one(key))

    def credit(params: Params, trace: Trace, dl_doutput: Any) -> None:
        if not isinstance(trace, Trace):
            raise ValueError(f"trace must be the third value that advance returned, not {kind_of(trace)}.")
        check_own(params, trace.before)
        streams = (common_length({"inputs": trace.inputs}, "the batch"),) if many else ()
        shape = (*streams, common_length({"inputs": one(trace.inputs)}, "time"), model.width)
        if np.shape(dl_doutput) != shape or not is_real(jnp.result_type(dl_doutput)):
            raise ValueError(
                f"dl_doutput must be real numbers of the shape of the output that advance returned, {shape}, "
                f"not {kind_of(dl_doutput)}."
            )

    return Checks(check_init, *map(once_per_shape, (update, advance, credit)))


def _first(state: EstimatorState) -> EstimatorState:
    """Shapes and dtypes of the state of one of many streams."""
    return EstimatorState(one_step(state.cell), one_step(state.memory), state.shared)
