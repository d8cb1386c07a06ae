"""Backpropagation inside the chunk, an influence across chunks: from the latter to an estimator.

    dL_chunk/dθ = backpropagation inside the chunk + (dL_chunk/dh_0) M_0
    M_K         = Φ M_0 + Σ_s G_s J_s,    Φ = dh_K/dh_0,    G_s = dh_K/dz_s

Only what lies before the chunk needs an influence. Methods differ in how M is represented: that is an `Across`. What it
needs of a chunk are products of some vectors with Φ and with Σ_s G_s J_s from the left, which the reverse pass of the
losses takes along, and of some vectors with Φ from the right, which the forward pass takes along. A reset inside the
chunk cuts both.

It is written for all streams at once, because the influence may be that of the first few streams alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Float, PyTree
from streamgrad.base import Chunk, EstimatorState, Info, Model, Params, real_dtype
from streamgrad.engine.estimator import Algorithm, Outcome, restart
from streamgrad.engine.unroll import unroll
from streamgrad.step.linear import Linear, linear
from streamgrad.step.weights import Outer, sum_outer


class Crossing(NamedTuple):
    """What a chunk does to what lies before it, for b streams.

    Attributes:
      back: v Φ for each vector v that was asked for.
      pulled: v Σ_s G_s J_s for each of them. At preactivations in factors, `left[K, b, R, rows]` and `right[K, b, A]` of
        each weight matrix, time first as the reverse pass writes them; for any other cell leaves `[b, R, *shape]`.
      tangents: Φ h̃ for each tangent that was sent along, or None.
      reset: whether an episode has begun inside the chunk, or None where none can have; then Φ is zero.
    """

    back: Float[Array, "b R S"]
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
      older: `older(shared, memory, dl_dstart[b, S]) -> (grads, shared)`, the mean of (dL_chunk/dh_0) M_0 over b
        streams, and what they share afterwards.
      tangents: `tangents(memory) -> [r, S]`, what the forward pass takes along; None for nothing.
      draw: `draw(key, length, dtype) -> noise`, for a chunk of so many steps.
      shared: `shared(params) -> shared`, what all streams have in common.
      block: `block(params, length) -> K`: a chunk of so many steps is walked through in blocks of at most K, each a
        chunk of its own, which bounds memory and changes nothing where M is exact. None for chunks as they come.
    """

    init: Callable[[PyTree, PyTree], PyTree]
    asks: Callable[[PyTree, PyTree], Float[Array, "R S"]]
    advance: Callable[[PyTree, PyTree, PyTree, Crossing], tuple[PyTree, dict[str, Array]]]
    older: Callable[[PyTree, PyTree, Float[Array, "b S"]], tuple[PyTree, PyTree]]
    tangents: Callable[[PyTree], Float[Array, "r S"]] | None = None
    draw: Callable[[Any, int, Any], PyTree] = lambda key, length, dtype: None
    shared: Callable[[PyTree], PyTree] = lambda params: ()
    block: Callable[[PyTree, int], int] | None = None


class Walk(NamedTuple):
    """What a stretch of all streams came to; time leading, then streams.

    Attributes:
      end: h_K, ravelled, `[B, S]`.
      states: h_t, ravelled, `[K, B, S]`.
      losses: L_t, `[K, B]`.
      head: the head's gradient, summed over streams and time.
      inside: the cell's gradient by backpropagation inside the stretch, summed likewise.
      dl_dstart: dL/dh_0, `[B, S]`.
      crossing: of the streams that are watched.
    """

    end: Float[Array, "B S"]
    states: Float[Array, "K B S"]
    losses: Float[Array, "K B"]
    head: PyTree
    inside: PyTree
    dl_dstart: Float[Array, "B S"]
    crossing: Crossing


def chunkwise(
    model: Model, across: Across, check: Callable[[Chunk, int, Any], None] = lambda *_: None
) -> Algorithm:
    """An estimator that backpropagates inside chunks and has an influence across them.

    Args:
      model: the model whose gradients are estimated.
      across: how the influence is represented.
      check: as in `Algorithm`.

    Returns:
      The algorithm. Its `batch` watches as many streams as `state.memory` has.
    """

    def init(params: Params) -> EstimatorState:
        state = model.init_state(params)
        return EstimatorState(state, across.init(params.cell, state), across.shared(params.cell))

    def batch(params: Params, state: EstimatorState, chunk: Chunk, keys: Any) -> Outcome:
        """All streams; what was summed over them keeps a leading axis of one."""
        streams = jax.tree.leaves(state.cell)[0].shape[0]
        watched = leading(state.memory, streams)
        dtype = real_dtype(params.cell)
        few = jax.tree.map(lambda leaf: leaf[:watched], keys)
        length = jax.tree.leaves(chunk.inputs)[0].shape[1]
        noise = jax.vmap(lambda key: across.draw(key, length, dtype), axis_size=watched)(few)
        unravel = ravel_pytree(model.init_state(params))[1]
        start = jax.vmap(lambda cell: ravel_pytree(cell)[0])(state.cell)
        by_time = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), chunk)

        def stretch(carry: tuple, part: Chunk) -> tuple[tuple, tuple]:
            """A block of the chunk: a chunk of its own."""
            start, memory, shared, grads = carry
            walk = _walk(model, params, across, start, memory, noise, part)
            older, shared = across.older(shared, memory, walk.dl_dstart[:watched])
            # The mean over the watched streams stands for all: streams are exchangeable.
            cell = jax.tree.map(lambda inside, older: inside + streams * older, walk.inside, older)
            grads = jax.tree.map(jnp.add, grads, Params(cell, walk.head))
            memory, diagnostics = across.advance(shared, memory, noise, walk.crossing)
            return (walk.end, memory, shared, grads), (walk.losses, walk.states, diagnostics)

        carry = (start, state.memory, state.shared, jax.tree.map(jnp.zeros_like, params))
        block = across.block(params.cell, length) if across.block else length
        carry, (losses, states, diagnostics) = _in_blocks(stretch, carry, by_time, block)
        end, memory, shared, grads = carry
        outputs = jax.vmap(jax.vmap(lambda vector: model.cell.output(unravel(vector))), in_axes=1)(states)
        return Outcome(
            jax.tree.map(lambda leaf: leaf[None], grads),
            EstimatorState(jax.vmap(unravel)(end), memory, shared),
            Info(losses.T, diagnostics),
            outputs=outputs,
        )

    def run(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Outcome:
        as_streams = jax.tree.map(lambda leaf: leaf[None], (state._replace(shared=None), chunk, key))
        many = batch(params, as_streams[0]._replace(shared=state.shared), *as_streams[1:])
        shared, many = many.state.shared, many._replace(state=many.state._replace(shared=None))
        one = jax.tree.map(lambda leaf: leaf[0], many)
        return one._replace(state=one.state._replace(shared=shared))

    return Algorithm(init, run, check=check, batch=batch)


def leading(tree: PyTree, otherwise: int) -> int:
    """The length of the leading axis of a tree; `otherwise` where it has no arrays."""
    leaves = jax.tree.leaves(tree)
    return leaves[0].shape[0] if leaves else otherwise


def _walk(
    model: Model,
    params: Params,
    across: Across,
    start: Float[Array, "B S"],
    memory: PyTree,
    noise: PyTree,
    chunk: Chunk,
) -> Walk:
    """Forward through a stretch with the tangents, and back with the losses' cotangent and those asked for."""
    fresh, unravel = ravel_pytree(model.init_state(params))
    maps = linear(model.cell, params.cell, unravel(fresh), jax.tree.map(lambda leaf: leaf[0, 0], chunk.inputs))
    tangents = None if across.tangents is None else jax.vmap(across.tangents)(memory)
    end, moved, states, kept, features = _forward(maps, fresh, start, tangents, chunk)
    losses, head, dl_dstate = _read_out(model, params, unravel, states, chunk)
    asks = jax.vmap(across.asks)(memory, noise)
    cotangents, pulled, inside = _backward(maps, kept, features, params.cell, dl_dstate, asks, chunk.reset)
    reset = None if chunk.reset is None else jnp.any(chunk.reset[:, : len(asks)], axis=0)
    return Walk(end, states, losses, head, inside, cotangents[0], Crossing(cotangents[1], pulled, moved, reset))


def _forward(
    maps: Linear, fresh: Float[Array, " S"], start: Float[Array, "B S"], tangents: Array | None, chunk: Chunk
) -> tuple[Array, Array | None, Array, PyTree, PyTree]:
    """The state at the end, the tangents there; and of every step the state, what is kept of it, and its features."""

    def one(state: Array, x: PyTree, reset: Array | None) -> tuple[Array, tuple]:
        state = restart(reset, fresh, state)
        new, kept, features = maps.take(state, x)
        return new, (new, kept, features)

    def along(state: Array, tangents: Array, x: PyTree, reset: Array | None) -> Array:
        state = restart(reset, fresh, state)
        moved = jax.vmap(lambda tangent: maps.push(state, x, tangent))(tangents)
        return restart(reset, jnp.zeros_like(moved), moved)

    def step(carry: tuple, now: tuple) -> tuple[tuple, tuple]:
        states, tangents = carry
        new, result = jax.vmap(one)(states, *now)
        if tangents is not None:
            few = jax.tree.map(lambda leaf: leaf[: len(tangents)], (states, *now))
            tangents = jax.vmap(along)(few[0], tangents, *few[1:])
        return (new, tangents), result

    (end, tangents), found = jax.lax.scan(step, (start, tangents), (chunk.inputs, chunk.reset), unroll=unroll())
    return end, tangents, *found


def _read_out(
    model: Model, params: Params, unravel: Callable, states: Float[Array, "K B S"], chunk: Chunk
) -> tuple[Float[Array, "K B"], PyTree, Float[Array, "K B S"]]:
    """L_t, the head's gradient summed over streams and time, and dL_t/dh_t."""
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (states, chunk.targets))
    losses, head, dl_dstate = model.read_out_chunk(params.head, jax.vmap(unravel)(flat[0]), flat[1])
    return losses.reshape(states.shape[:2]), head, dl_dstate.reshape(states.shape)


def _backward(
    maps: Linear,
    kept: PyTree,
    features: PyTree,
    params: PyTree,
    dl_dstate: Float[Array, "K B S"],
    asks: Float[Array, "b R S"],
    reset: Bool[Array, "K B"] | None,
) -> tuple[tuple[Array, Array], PyTree, PyTree]:
    """One reverse pass: the losses' cotangent of all streams, and those asked for of the first b.

    Returns:
      dL/dh_0 and the vectors asked for times Φ; what they are times Σ_s G_s J_s; and the gradient inside.
    """
    watched, count = asks.shape[:2]
    everyone = watched == dl_dstate.shape[1]
    factored = features is not None

    def pulled(kept: PyTree, cotangents: Array, reset: Array | None) -> tuple[Array, PyTree]:
        """Several cotangents of each stream, one step back."""
        back, here = jax.vmap(jax.vmap(maps.pull, in_axes=(None, 0)))(kept, cotangents)
        if reset is not None:
            back = jnp.where(reset[:, None, None], 0, back)
        return back, here

    def add(total: PyTree | None, here: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, total, here)

    def step(carry: tuple, now: tuple) -> tuple[tuple, tuple | None]:
        (losses, asked), sums = carry
        kept, dl_dstate, reset = now
        losses = losses + dl_dstate[:, None]
        if everyone:  # one product with the weights for both kinds
            back, here = pulled(kept, jnp.concatenate([losses, asked], axis=1), reset)
            back = back[:, :1], back[:, 1:]
            here = tuple(jax.tree.map(lambda leaf, part=part: leaf[:, part], here) for part in SPLIT)
        else:
            few = jax.tree.map(lambda leaf: leaf[:watched], (kept, reset))
            first, second = pulled(kept, losses, reset), pulled(few[0], asked, few[1])
            back, here = (first[0], second[0]), (first[1], second[1])
        return (back, None if factored else add(sums, here)), here if factored else None

    begin = (jnp.zeros_like(dl_dstate[0])[:, None], asks)
    sums = None
    if not factored:
        sums = tuple(
            jax.tree.map(lambda leaf, shape=shape: jnp.zeros((*shape, *leaf.shape), leaf.dtype), params)
            for shape in ((dl_dstate.shape[1], 1), (watched, count))
        )
    ((losses, asked), sums), here = jax.lax.scan(
        step, (begin, sums), (kept, dl_dstate, reset), reverse=True, unroll=unroll()
    )
    if sums is not None:
        inside = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=(0, 1)), sums[0])
        return (losses[:, 0], asked), sums[1], inside
    left = jax.tree.map(lambda leaf: leaf[:, :, 0], here[0])
    few = jax.tree.map(lambda leaf: leaf[:, :watched], features)
    return (losses[:, 0], asked), Outer(here[1], few), sum_outer(Outer(left, features))


SPLIT = (slice(0, 1), slice(1, None))


def _in_blocks(stretch: Callable, carry: tuple, chunk: Chunk, length: int) -> tuple[tuple, tuple]:
    """Walk through a chunk in blocks of at most `length` steps; diagnostics are those of the last."""
    steps = jax.tree.leaves(chunk.inputs)[0].shape[0]
    if steps <= length:
        return stretch(carry, chunk)
    count = -(-steps // length)
    length = -(-steps // count)  # of about the same size
    whole = steps - steps % length
    blocks = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, length, *leaf.shape[1:]), chunk)
    carry, result = jax.lax.scan(stretch, carry, blocks)
    losses, states = (leaf.reshape(whole, *leaf.shape[2:]) for leaf in result[:2])
    diagnostics = jax.tree.map(lambda leaf: leaf[-1], result[2])
    if whole < steps:
        carry, rest = stretch(carry, jax.tree.map(lambda leaf: leaf[whole:], chunk))
        losses, states = jnp.concatenate([losses, rest[0]]), jnp.concatenate([states, rest[1]])
        diagnostics = rest[2]
    return carry, (losses, states, diagnostics)
