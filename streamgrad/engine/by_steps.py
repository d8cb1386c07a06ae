"""From an influence, which one step of the network advances, to a gradient estimator: the paper's online algorithms."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import PyTree
from streamgrad.base import Chunk, EstimatorState, Influence, Info, Model, Params, real_dtype
from streamgrad.checks import check_model, leading_length
from streamgrad.engine.estimator import Algorithm, Engine, Outcome, Seen, estimator, restart, sum_over_streams
from streamgrad.step.cuts import linearise
from streamgrad.step.matvec import by_parts


def online(
    model: Model,
    influence: Influence,
    check: Callable[[Chunk, int, Any], None] = lambda *_: None,
    *,
    label: str = "online(influence)",
) -> Engine:
    """Turn an influence into a gradient estimator: dL/dθ = Σ_t (dL_t/dh_t) (dh_t/dθ), while the stream runs.

    Nothing of the past is kept but the influence: the state's size does not depend on the stream's length.

    Args:
      model: the model whose gradients are estimated.
      influence: how dh_t/dθ is represented.
      check: as in `Algorithm`.
      label: what `repr` shows.

    Returns:
      The estimator. The head's gradient is exact.
    """
    check_model(model)
    if not isinstance(influence, Influence):
        raise ValueError(f"influence must be a streamgrad.Influence, not {influence!r}.")
    return estimator(model, stepwise(model, influence, check), label=label)


def stepwise(
    model: Model, influence: Influence, check: Callable[[Chunk, int, Any], None] = lambda *_: None
) -> Algorithm:
    """The algorithm that `online` makes an estimator of."""
    adds = influence.total is None

    def init(params: Params) -> EstimatorState:
        state = model.init_state(params)
        return EstimatorState(state, influence.init(params.cell, state), influence.shared(params.cell))

    def run(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Outcome:
        fresh = init(params)
        length = leading_length(chunk, "time")
        noise = influence.draw(state.shared, key, length, real_dtype(params.cell))

        def step(carry: tuple, now: tuple) -> tuple[tuple, tuple]:
            cell_state, before, cell_sum, head_sum = carry
            x, target, reset, noise = now
            cell_state = restart(reset, fresh.cell, cell_state)
            before = restart(reset, fresh.memory, before)
            with by_parts():  # for those who send many tangents through a step
                at = linearise(influence.cut, params.cell, cell_state, x)
            loss, head_grads, dl_dstate = model.read_out(params.head, at.state, target)
            after, diagnostics = influence.advance(state.shared, before, at, noise, dl_dstate)
            contribution = influence.contract(before, after, at, dl_dstate)
            if adds:
                cell_sum, contribution = jax.tree.map(jnp.add, cell_sum, contribution), None
            head_sum = jax.tree.map(jnp.add, head_sum, head_grads)
            seen = Seen(ravel_pytree(at.state)[0], dl_dstate)
            kept = (Info(loss, diagnostics), contribution, seen, model.cell.output(at.state))
            return (at.state, after, cell_sum, head_sum), kept

        zero = jax.tree.map(jnp.zeros_like, params)
        carry = (state.cell, state.memory, zero.cell if adds else None, zero.head)
        steps = (chunk.inputs, chunk.targets, chunk.reset, noise)
        carry, (info, contributions, seen, outputs) = jax.lax.scan(step, carry, steps)
        cell_state, memory, cell_sum, head_sum = carry
        summands = (cell_sum if adds else contributions, head_sum)
        return Outcome(summands, EstimatorState(cell_state, memory, state.shared), info, seen, outputs)

    def total(summands: tuple[PyTree, PyTree]) -> Params:
        of_cell = influence.total or sum_over_streams
        return Params(of_cell(summands[0]), sum_over_streams(summands[1]))

    return Algorithm(init, run, total, check, uses_loss=influence.uses_loss)
