"""Backpropagation inside the chunk, an influence across chunks: the credit for the past, and how a chunk is finished.

    dL_chunk/dθ = backpropagation inside the chunk + (dL_chunk/dh_0) M_0
    M_K         = Φ M_0 + Σ_s G_s J_s,    Φ = dh_K/dh_0,    G_s = dh_K/dz_s

Only the past before the chunk needs an influence M. Methods differ in how they represent it, and each has its own
contraction (dL_chunk/dh_0) M_0 and its own step to M_K.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, PyTree
from streamgrad.base import EstimatorState, Info, Model, Params
from streamgrad.engine.chunk import Forward
from streamgrad.engine.collectives import everywhere
from streamgrad.engine.method import Outcome, watched_streams
from streamgrad.trees import all_finite, cleared


def older_credit(
    contract: Callable[[PyTree, PyTree], PyTree], state: EstimatorState, dl_dstart: PyTree, forward: Forward
) -> PyTree:
    """The mean of (dL_chunk/dh_0) M_0 over the streams that are watched.

    Streams whose episode begins with the chunk have none, whatever became of their memory. dL_chunk/dh_0 is zero for
    them, which is enough where their influence is finite. It costs a pass over the influence to clear it, which is made
    only where the credit is not finite. Under a caller's `vmap` it is always made.

    Args:
      contract: `contract(memory, dl_dstart) -> grads`, for the streams that are watched.
      state: before the chunk.
      dl_dstart: dL_chunk/dh_0, with all streams leading, in the form that `contract` takes.
      forward: of the pass.

    Returns:
      A gradient like the cell's parameters.
    """
    watched = watched_streams(state)
    dl_dstart = jax.tree.map(lambda leaf: leaf[:watched], dl_dstart)
    begins: Bool[Array, " b"] | None = None if forward.reset is None else forward.reset[0, :watched]
    credit = contract(state.memory, dl_dstart)
    if begins is not None:
        gone = jnp.any(begins) & ~all_finite(credit)
        memory = state.memory
        credit = jax.lax.cond(gone, lambda: contract(cleared(begins, memory), dl_dstart), lambda: credit)
    return everywhere(credit)


def with_older(inside: PyTree, older: PyTree, state: EstimatorState, forward: Forward) -> tuple[PyTree, PyTree]:
    """The cell's gradient, summed over all streams, for which the watched ones stand: streams are exchangeable.

    Returns:
      The gradient, and the memory. Once the older credit is read, the memory may be written over; without the barrier
      between them a compiler keeps a copy of all of it.
    """
    streams = forward.end.shape[0]
    cell = jax.tree.map(lambda inside, older: inside + streams * older, inside, older)
    return jax.lax.optimization_barrier((cell, state.memory))


def finish(
    model: Model,
    params: Params,
    forward: Forward,
    cell_grads: PyTree,
    memory: PyTree,
    shared: PyTree = (),
    diagnostics: dict[str, Array] | None = None,
) -> Outcome:
    """The outcome of a chunk, from its pass, the cell's gradient summed over streams, and the memory after it."""
    unravel = ravel_pytree(model.init_state(params))[1]
    outputs = jax.vmap(jax.vmap(lambda vector: model.cell.output(unravel(vector))), in_axes=1)(forward.states)
    info = Info(forward.losses.T, diagnostics or {}, outputs)
    return Outcome(
        Params(cell_grads, forward.head), EstimatorState(jax.vmap(unravel)(forward.end), memory, shared), info
    )
