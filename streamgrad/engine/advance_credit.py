"""The two halves of `update`: `advance`, before any loss is known, and `credit`, for a gradient at the output.

    Σ_t (dL_t/dy_t) (dy_t/dθ),    y_t the cell's output

An estimate depends on the losses through dL_t/dy_t alone, and linearly. So `credit` is the run of `update`, once more
from the state before the chunk, with losses that are linear in the output; and `advance` is that run with losses of
zero, of which the compiler drops all that is for the gradient. Whatever runs, runs unchanged.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, PyTree
from streamgrad.base import Chunk, EstimatorState, Model, Params, narrowed, work_dtype
from streamgrad.checks import check_values
from streamgrad.step_loss import Credit


class Trace(NamedTuple):
    """A chunk that `advance` went over, for `credit` to go over again.

    Attributes:
      before: the state that it began with.
      inputs: as in `Chunk`.
      reset: likewise.
      key: as in `update`.
    """

    before: EstimatorState
    inputs: PyTree
    reset: Array | None
    key: Any


def bare(state: Any) -> Any:
    """A state without the trace of the chunk before, which the next one has no use for."""
    return state._replace(trace=None) if isinstance(state, EstimatorState) else state


def advancing(
    model: Model, run: Callable[..., Any], axes: int, check: Callable[..., None]
) -> Callable[..., tuple[Array, EstimatorState]]:
    """Make the `advance` of a run.

    Args:
      model: the model.
      run: as in `streamgrad.engine.estimator.Algorithm`, for one stream or many.
      axes: how many axes of the inputs come before those of one x: time, and perhaps streams.
      check: `check(params, state, chunk, key)`, called before anything is traced; the chunk has no targets.

    Returns:
      `advance`, as in `GradientEstimator`.
    """

    @jax.jit
    def compiled(params: Params, trace: Trace) -> tuple[Array, EstimatorState]:
        steps = jax.tree.leaves(trace.inputs)[0].shape[:axes]
        nothing = jnp.zeros((*steps, model.width), work_dtype(params.cell))
        outcome = run(params, trace.before, _chunk(trace, nothing), trace.key)
        if outcome.outputs is None:
            raise ValueError("this estimator cannot advance: the Outcome of its algorithm has no outputs.")
        return outcome.outputs, outcome.state

    def advance(
        params: Params, state: EstimatorState, inputs: PyTree, key: Any, reset: Array | None = None
    ) -> tuple[Array, EstimatorState]:
        chunk, trace = Chunk(inputs, None, reset), Trace(bare(state), inputs, reset, key)
        check(params, trace.before, chunk, key)
        check_values(model, chunk)
        output, new = compiled(params, trace)
        return output, new._replace(trace=trace)

    return advance


def crediting(
    run: Callable[..., Any], gradient: Callable[[Any], Params], check: Callable[..., None]
) -> Callable[..., PyTree]:
    """Make the `credit` of a run.

    Args:
      run: as in `streamgrad.engine.estimator.Algorithm`, for one stream or many.
      gradient: `gradient(outcome)`, of one stream, or the mean or each one of many.
      check: `check(params, state, dl_doutput)`, called before anything is traced.

    Returns:
      `credit`, as in `GradientEstimator`.
    """

    @jax.jit
    def compiled(params: Params, trace: Trace, dl_doutput: Array) -> PyTree:
        grads = gradient(run(params, trace.before, _chunk(trace, dl_doutput), trace.key)).cell
        return narrowed(grads, params.cell)

    def credit(params: Params, state: EstimatorState, dl_doutput: Array) -> PyTree:
        check(params, state, dl_doutput)
        return compiled(params, state.trace, dl_doutput)

    return credit


def _chunk(trace: Trace, dl_doutput: Array) -> Chunk:
    return Chunk(trace.inputs, Credit(dl_doutput), trace.reset)
