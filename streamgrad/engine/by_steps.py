"""Recursions by steps, as most methods were published: the influence moves on at every step, and meets its loss."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, PyTree
from streamgrad.base import Chunk, Cut, EstimatorState, Info, Model, Params
from streamgrad.engine.method import Outcome, Seen, per_stream, sum_over_streams
from streamgrad.step.cuts import linearise
from streamgrad.step.matvec import by_parts
from streamgrad.trees import restart


def by_steps(
    model: Model,
    cut: Cut,
    init: Callable[[Params], EstimatorState],
    advance: Callable[..., tuple[PyTree, dict[str, Array]]],
    contract: Callable[..., PyTree],
    total: Callable[[PyTree], PyTree] | None = None,
) -> Callable[..., Outcome]:
    """`Method.run` of a recursion by steps: dL/dθ = Σ_t (dL_t/dh_t) M_t, M_t from M_{t-1} and the step at t.

    `step` below is a `streamgrad.cuts.Step`: the transition at this moment, with its derivatives as linear maps.

    Args:
      model: the model whose gradients are estimated.
      cut: the cut at which the transition is linearised.
      init: as in `Method`; an episode begins with its memory.
      advance: `advance(shared, memory, step, noise, dl_dstate) -> (memory, diagnostics)`, from t-1 to t, of one stream.
        Where it looks at `dl_dstate`, the method says `uses_loss=True`.
      contract: `contract(before, after, step, dl_dstate) -> contribution`, dL_t/dθ, from the memories before and after
        the step.
      total: None where contributions are gradients, which are added as they come. Else `total(contributions) -> grads`
        sums factors of gradients, such as those of outer products, over their leading axes, streams and time.

    Returns:
      `run`. The head's gradient is exact.
    """

    def one(params: Params, state: EstimatorState, chunk: Chunk, noise: PyTree) -> Outcome:
        fresh = init(params)

        def step(carry: tuple, now: tuple) -> tuple[tuple, tuple]:
            cell_state, before, cell_sum, head_sum = carry
            x, target, reset, noise = now
            cell_state = restart(reset, fresh.cell, cell_state)
            before = restart(reset, fresh.memory, before)
            with by_parts():  # for methods that send many tangents through a step
                at = linearise(cut, params.cell, cell_state, x)
            loss, head_grads, dl_dstate = model.read_out(params.head, at.state, target)
            after, diagnostics = advance(state.shared, before, at, noise, dl_dstate)
            contribution = contract(before, after, at, dl_dstate)
            if total is None:
                cell_sum, contribution = jax.tree.map(jnp.add, cell_sum, contribution), None
            head_sum = jax.tree.map(jnp.add, head_sum, head_grads)
            seen = Seen(ravel_pytree(at.state)[0], dl_dstate)
            info = Info(loss, diagnostics, model.cell.output(at.state))
            return (at.state, after, cell_sum, head_sum), (info, contribution, seen)

        zero = jax.tree.map(jnp.zeros_like, params)
        carry = (state.cell, state.memory, zero.cell if total is None else None, zero.head)
        steps = (chunk.inputs, chunk.targets, chunk.reset, noise)
        (cell_state, memory, cell_sum, head_sum), (info, contributions, seen) = jax.lax.scan(step, carry, steps)
        summands = Params(contributions if total else cell_sum, head_sum)
        return Outcome(summands, EstimatorState(cell_state, memory, state.shared), info, seen)

    def add(summands: Params) -> Params:
        return Params((total or sum_over_streams)(summands.cell), sum_over_streams(summands.head))

    return per_stream(one, add)
