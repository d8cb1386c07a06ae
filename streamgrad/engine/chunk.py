"""Backpropagation inside the chunk, an influence across chunks: from the latter to an estimator.

    dL_chunk/dθ = backpropagation inside the chunk + (dL_chunk/dh_0) M_0
    M_K         = Φ M_0 + Σ_s G_s J_s,    Φ = dh_K/dh_0,    G_s = dh_K/dz_s

Only what lies before the chunk needs an influence. Methods differ in how M is represented: that is an `Across`. What it
needs of a chunk are products of some vectors with Φ and with Σ_s G_s J_s from the left, which the reverse pass of the
losses takes along, and of some vectors with Φ from the right, which the forward pass takes along. A reset inside the
chunk cuts both.

It is written for all streams at once, because the influence may be that of the first few streams alone.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Float, PyTree
from streamgrad.base import Chunk, EstimatorState, Info, Model, Params, real_dtype
from streamgrad.engine.chunk_passes import backward, forward, read_out
from streamgrad.engine.collectives import ALONE, Columns, Devices, Spread
from streamgrad.engine.estimator import Algorithm, Outcome, as_stream
from streamgrad.step.step_vjp import step_vjp
from streamgrad.trees import all_finite, cleared


class Crossing(NamedTuple):
    """What a chunk does to what lies before it, for b streams.

    Attributes:
      back: v Φ for each vector v that was asked for, `[b, R, S]`; or what `Across.advance` makes of it.
      pulled: v Σ_s G_s J_s for each of them, leaves `[b, R, *shape]`. At preactivations it may come in factors,
        `left[K, b, R, rows]` and `right[K, b, A]` of each weight matrix, time first as the reverse pass writes them.
        A walk of its own may give what its `Across.advance` makes of both.
      tangents: Φ h̃ for each tangent that was sent along, or None.
      reset: whether an episode has begun inside the chunk, or None where none can have; then Φ is zero. Clear what
        Φ is multiplied with, or the product (`streamgrad.trees.cleared`): it may have gone to NaN.
    """

    back: PyTree
    pulled: PyTree
    tangents: Float[Array, "b r S"] | None
    reset: Bool[Array, " b"] | None


class Across(NamedTuple):
    """An influence across chunks, as exact or as noisy as it likes.

    `init`, `asks`, `tangents` and `draw` are written for one stream; `advance` and `older` for the b that are watched.

    Attributes:
      init: `init(params, state) -> memory`, for the cell's parameters and the state that an episode begins with.
      asks: `asks(memory, noise) -> [R, S]`, the vectors that the reverse pass takes along from the chunk's end.
      advance: `advance(shared, memory, noise, crossing) -> (memory, diagnostics)`, from chunk to chunk.
      older: `older(memory, dl_dstart[b, S]) -> grads`, the mean of (dL_chunk/dh_0) M_0 over b streams. None for a
        method that gives no credit to what lies before the chunk.
      tangents: `tangents(memory) -> [r, S]`, what the forward pass takes along; None for nothing.
      draw: `draw(key, length, dtype) -> noise`, for a chunk of so many steps.
      shared: `shared(params) -> shared`, what all streams have in common.
      block: `block(params, length)`: after how many steps of a chunk of `length` the reverse pass multiplies factors
        out and adds them up, which bounds memory; `length` for never. None for never, whatever the length.
      pick: as in `streamgrad.engine.chunk_passes.backward`; by default all there is. Only for cells with preactivations.
      weigh: `weigh(shared, memory, dl_dstart, older, devices) -> (older, shared)`, where the older credit is not taken
        as it is, and what streams share afterwards.
      spread: `spread(columns) -> Across`, the same influence where each device keeps some columns of θ; its `init`
        makes what all of them keep, in shapes that can be cut evenly. None where it cannot be spread.
      axes: as in `Spread`.
      own: of the features of steps, those whose columns of θ are this device's.
    """

    init: Callable[[PyTree, PyTree], PyTree]
    asks: Callable[[PyTree, PyTree], Float[Array, "R S"]]
    advance: Callable[[PyTree, PyTree, PyTree, Crossing], tuple[PyTree, dict[str, Array]]]
    older: Callable[[PyTree, Float[Array, "b S"]], PyTree] | None
    tangents: Callable[[PyTree], Float[Array, "r S"]] | None = None
    draw: Callable[[Any, int, Any], PyTree] = lambda key, length, dtype: None
    shared: Callable[[PyTree], PyTree] = lambda params: ()
    block: Callable[[PyTree, int], int] | None = None
    pick: Callable[[PyTree], PyTree] = lambda asked: asked
    weigh: Callable[[PyTree, PyTree, PyTree, PyTree, Devices], tuple[PyTree, PyTree]] | None = None
    spread: Callable[[Columns], "Across"] | None = None
    axes: Callable[[PyTree], PyTree] = lambda memory: last_axis(memory)
    own: Callable[[PyTree], PyTree] = lambda features: features


class Walk(NamedTuple):
    """What a stretch of all streams came to; time leading, then streams.

    Attributes:
      end: h_K, ravelled, `[B, S]`.
      states: h_t, ravelled, `[K, B, S]`.
      losses: L_t, `[K, B]`.
      head: the head's gradient, summed over streams and time.
      inside: the cell's gradient by backpropagation inside the stretch, summed likewise.
      dl_dstart: dL/dh_0, `[B, S]`; or what `Across.older` makes of it, with streams leading.
      crossing: of the streams that are watched.
    """

    end: Float[Array, "B S"]
    states: Float[Array, "K B S"]
    losses: Float[Array, "K B"]
    head: PyTree
    inside: PyTree
    dl_dstart: PyTree
    crossing: Crossing


def chunkwise(
    model: Model,
    across: Across,
    check: Callable[[Chunk, int, Any], None] = lambda *_: None,
    walk_through: "Callable[..., Walk] | None" = None,
) -> Algorithm:
    """An estimator that backpropagates inside chunks and has an influence across them.

    Args:
      model: the model whose gradients are estimated.
      across: how the influence is represented.
      check: as in `Algorithm`.
      walk_through: how it goes through a chunk; by default with all derivatives of the steps, as `walk` does.

    Returns:
      The algorithm. Its `batch` watches as many streams as `state.memory` has.
    """

    def init(params: Params, across: Across = across) -> EstimatorState:
        state = model.init_state(params)
        return EstimatorState(state, across.init(params.cell, state), across.shared(params.cell))

    def on(columns: Columns | None) -> Across:
        return across if columns is None or across.spread is None else across.spread(columns)

    def spread(columns: Columns) -> Spread:
        return Spread(functools.partial(init, across=on(columns)), across.axes)

    def batch(params: Params, state: EstimatorState, chunk: Chunk, keys: Any, devices: Devices) -> Outcome:
        """All streams; what was summed over them keeps a leading axis of one."""
        streams = jax.tree.leaves(state.cell)[0].shape[0]
        watched = leading(state.memory, streams)
        dtype = real_dtype(params.cell)
        own_keys = jax.tree.map(lambda leaf: leaf[:watched], keys)
        length = jax.tree.leaves(chunk.inputs)[0].shape[1]
        noise = jax.vmap(lambda key: across.draw(key, length, dtype), axis_size=watched)(own_keys)
        unravel = ravel_pytree(model.init_state(params))[1]
        start = jax.vmap(lambda cell: ravel_pytree(cell)[0])(state.cell)
        by_time = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), chunk)

        block = across.block(params.cell, length) if across.block else length
        here = on(devices.columns)
        found = (walk_through or walk)(model, params, here, start, state.memory, noise, by_time, block)
        cell, shared = found.inside, state.shared
        if here.older is not None:
            few = jax.tree.map(lambda leaf: leaf[:watched], found.dl_dstart)
            begins = None if by_time.reset is None else by_time.reset[0, :watched]
            older = _older(here.older, state.memory, few, begins)
            older = whole_columns(devices, older, params.cell)
            if across.weigh is not None:
                older, shared = across.weigh(shared, state.memory, few, older, devices)
            # The mean over the watched streams stands for all: streams are exchangeable.
            cell = jax.tree.map(lambda inside, older: inside + streams * older, cell, older)
        # Once the older credit is read, the memory may be written over; else the compiler keeps a copy of all of it.
        cell, before = jax.lax.optimization_barrier((cell, state.memory))
        memory, diagnostics = here.advance(shared, before, noise, found.crossing)
        outputs = jax.vmap(jax.vmap(lambda vector: model.cell.output(unravel(vector))), in_axes=1)(found.states)
        return Outcome(
            as_stream(Params(cell, found.head)),
            EstimatorState(jax.vmap(unravel)(found.end), memory, shared),
            Info(found.losses.T, diagnostics),
            outputs=outputs,
        )

    def run(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Outcome:
        stream = as_stream(state._replace(shared=None))._replace(shared=state.shared)
        many = batch(params, stream, as_stream(chunk), as_stream(key), ALONE)
        shared, many = many.state.shared, many._replace(state=many.state._replace(shared=None))
        one = jax.tree.map(lambda leaf: leaf[0], many)
        return one._replace(state=one.state._replace(shared=shared))

    return Algorithm(init, run, check=check, batch=batch, columns=spread if across.spread else None)


def _older(
    older: Callable[[PyTree, PyTree], PyTree], memory: PyTree, dl_dstart: PyTree, begins: Bool[Array, " b"] | None
) -> PyTree:
    """The older credit, of which streams whose episode begins with the chunk have none, whatever became of them.

    dL_chunk/dh_0 is zero for them, which is enough where their influence is finite. It costs a pass over the influence
    to clear it, which is made only where credit is not finite. Under a caller's `vmap` it is always made.
    """
    credit = older(memory, dl_dstart)
    if begins is None:
        return credit
    gone = jnp.any(begins) & ~all_finite(credit)
    return jax.lax.cond(gone, lambda: older(cleared(begins, memory), dl_dstart), lambda: credit)


def by_features(across: Across) -> Callable[[Columns], Across]:
    """`Across.spread` of an influence whose arrays have the features of the weights as their last axis.

    A bias, which has but one feature, is kept by every device.
    """

    def cut(by: Callable[[Array, int], Array]) -> Callable[[PyTree], PyTree]:
        return functools.partial(jax.tree.map, lambda a: by(a, a.ndim - 1) if a.shape[-1] > 1 else a)

    def spread(columns: Columns) -> Across:
        filled = cut(columns.filled)
        return across._replace(init=lambda params, state: filled(across.init(params, state)), own=cut(columns.own))

    return spread


def whole_columns(devices: Devices, older: PyTree, params: PyTree) -> PyTree:
    """A gradient like the parameters of the columns that this device has, for `Devices.mean_gradient`."""
    columns = devices.columns
    if columns is None:
        return older

    def whole(part: Array, w: Array) -> Array:
        cut = [axis for axis in range(w.ndim) if part.shape[axis] != w.shape[axis]]
        return columns.among_zeros(part, cut[0], w.shape[cut[0]]) if cut else part

    return jax.tree.map(whole, older, params)


def last_axis(memory: PyTree) -> PyTree:
    """`Across.axes` of an influence whose arrays have the features of the weights as their last axis."""
    return jax.tree.map(lambda leaf: leaf.ndim - 1 if leaf.shape[-1] > 1 else -1, memory)


def leading(tree: PyTree, otherwise: int) -> int:
    """The length of the leading axis of a tree; `otherwise` where it has no arrays."""
    leaves = jax.tree.leaves(tree)
    return leaves[0].shape[0] if leaves else otherwise


def walk(
    model: Model,
    params: Params,
    across: Across,
    start: Float[Array, "B S"],
    memory: PyTree,
    noise: PyTree,
    chunk: Chunk,
    block: int,
) -> Walk:
    """Forward through a stretch with the tangents, and back with the losses' cotangent and those asked for."""
    fresh, unravel = ravel_pytree(model.init_state(params))
    maps = step_vjp(model.cell, params.cell, unravel(fresh), jax.tree.map(lambda leaf: leaf[0, 0], chunk.inputs))
    tangents = None if across.tangents is None else jax.vmap(across.tangents)(memory)
    end, moved, states, kept, features = forward(maps, fresh, start, tangents, chunk)
    losses, head, dl_dstate = read_out(model, params, unravel, states, chunk)
    asks = jax.vmap(across.asks)(memory, noise)
    cotangents, pulled, inside = backward(
        maps, kept, features, params.cell, dl_dstate, asks, chunk.reset, block, across.pick, across.own
    )
    return Walk(
        end,
        states,
        losses,
        head,
        inside,
        cotangents[0],
        Crossing(cotangents[1], pulled, moved, begun(chunk, len(asks))),
    )


def begun(chunk: Chunk, watched: int) -> Bool[Array, " b"] | None:
    """`Crossing.reset` of a chunk, time leading."""
    return None if chunk.reset is None else jnp.any(chunk.reset[:, :watched], axis=0)
