"""One pass through a chunk of all streams: forward with tangents, the losses, and back with several cotangents at once.

Arrays of a pass have time first, K steps, and then streams, B of them. The influence of the past may be that of the
first b streams alone (`watched` of `streamgrad.batched`), so that some streams send one cotangent back and others many.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Float, PyTree
from streamgrad.base import Chunk, Model, Params
from streamgrad.engine.collectives import everywhere
from streamgrad.step.platform import unroll
from streamgrad.step.step_vjp import StepVjp, step_vjp
from streamgrad.step.weights import Outer, add_pulled, sum_outer, zero_each
from streamgrad.trees import cleared, restart


class Forward(NamedTuple):
    """A chunk after the forward pass and its losses.

    Attributes:
      maps: the linear maps of the steps.
      residuals: the numbers that these maps need, of every step.
      features: a_t of each weight matrix, leaves `[K, B, A]`; None where the cell has no preactivations.
      states: h_t, ravelled.
      end: h_K, ravelled.
      tangents: Φ h̃ for each tangent that was sent along, or None.
      losses: L_t.
      head: the head's gradient, summed over streams and time.
      dl_dstate: dL_t/dh_t.
      reset: where episodes begin, or None.
    """

    maps: StepVjp
    residuals: PyTree
    features: PyTree
    states: Float[Array, "K B S"]
    end: Float[Array, "B S"]
    tangents: Float[Array, "b r S"] | None
    losses: Float[Array, "K B"]
    head: PyTree
    dl_dstate: Float[Array, "K B S"]
    reset: Bool[Array, "K B"] | None

    def begun(self, watched: int) -> Bool[Array, " b"] | None:
        """Whether an episode has begun inside the chunk, of the first streams: then Φ is zero.

        Clear the factor or the product of Φ there (`streamgrad.trees.cleared`): it may have gone to NaN.
        """
        return None if self.reset is None else jnp.any(self.reset[:, :watched], axis=0)


class Back(NamedTuple):
    """A chunk after the reverse pass.

    Attributes:
      inside: the cell's gradient by backpropagation inside the chunk, summed over streams and time.
      dl_dstart: dL_chunk/dh_0.
      asked: v Φ for each vector v that was sent back from the chunk's end, `[b, R, S]`; None where there was none.
      pulled: v Σ_s G_s J_s for each of them, leaves `[b, R, *shape]`; at preactivations in factors,
        `left[K, b, R, rows]` and `right[K, b, A]` of each weight matrix, time first as the reverse pass writes them.
    """

    inside: PyTree
    dl_dstart: Float[Array, "B S"]
    asked: PyTree
    pulled: PyTree


def go_forward(
    model: Model,
    params: Params,
    start: PyTree,
    chunk: Chunk,
    tangents: Float[Array, "b r S"] | None = None,
    maps: StepVjp | None = None,
) -> Forward:
    """Through the steps of a chunk, and to its losses.

    Args:
      model: the model.
      params: its parameters.
      start: h_0, of all streams.
      chunk: its inputs, targets and resets, `[B, K, ...]`.
      tangents: h̃, of the first b streams, to take along.
      maps: the linear maps of the steps, if not those of the whole transition.

    Returns:
      The pass so far.
    """
    fresh, unravel = ravel_pytree(model.init_state(params))
    inputs, targets, reset = jax.tree.map(
        lambda leaf: jnp.swapaxes(leaf, 0, 1), (chunk.inputs, chunk.targets, chunk.reset)
    )
    if maps is None:
        maps = step_maps(model, params, chunk)

    def one(state: Array, x: PyTree, reset: Array | None) -> tuple[Array, tuple]:
        state = restart(reset, fresh, state)
        new, residuals, features = maps.forward(state, x)
        return new, (new, residuals, features)

    def along(state: Array, tangents: Array, x: PyTree, reset: Array | None) -> Array:
        state = restart(reset, fresh, state)
        moved = jax.vmap(lambda tangent: maps.push(state, x, tangent))(tangents)
        return restart(reset, jnp.zeros_like(moved), moved)

    def step(carry: tuple, now: tuple) -> tuple[tuple, tuple]:
        states, tangents = carry
        new, result = jax.vmap(one)(states, *now)
        if tangents is not None:
            watched = jax.tree.map(lambda leaf: leaf[: len(tangents)], (states, *now))
            tangents = jax.vmap(along)(watched[0], tangents, *watched[1:])
        return (new, tangents), result

    vectors = jax.vmap(lambda cell: ravel_pytree(cell)[0])(start)
    (end, tangents), found = jax.lax.scan(step, (vectors, tangents), (inputs, reset), unroll=unroll())
    states, residuals, features = found
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (states, targets))
    losses, head, dl_dstate = model.read_out_chunk(params.head, jax.vmap(unravel)(flat[0]), flat[1])
    losses, dl_dstate = losses.reshape(states.shape[:2]), dl_dstate.reshape(states.shape)
    return Forward(maps, residuals, features, states, end, tangents, losses, head, dl_dstate, reset)


def step_maps(model: Model, params: Params, chunk: Chunk, recurrent_features: list | None = None) -> StepVjp:
    """The linear maps of the steps of a chunk; `recurrent_features` as in `streamgrad.step.step_vjp.step_vjp`."""
    x = jax.tree.map(lambda leaf: leaf[0, 0], chunk.inputs)
    return step_vjp(model.cell, params.cell, model.init_state(params), x, recurrent_features)


def go_back(
    forward: Forward,
    params: PyTree,
    asks: Float[Array, "b R S"] | None = None,
    *,
    signal: Float[Array, "K B S"] | None = None,
    future: Float[Array, "B S"] | None = None,
    factors: Float[Array, "K B"] | None = None,
    steps_at_once: int | None = None,
    pick: Callable[[PyTree], PyTree] = lambda left: left,
) -> Back:
    """One reverse pass: the losses' cotangent of all streams, and the vectors asked for of the first b.

        e_t = dL_t/dh_t + f_{t+1} e_{t+1} (dh_{t+1}/dh_t),    e_K = dL_K/dh_K + future

    Args:
      forward: the pass so far.
      params: the cell's parameters.
      asks: the vectors v that are sent back from the chunk's end; None for none.
      signal: in place of dL_t/dh_t.
      future: the cotangent that enters the chunk from beyond its end.
      factors: f_t, of the flow that leaves step t backwards; 0 where there is a reset. None for 1 elsewhere.
      steps_at_once: after how many steps the factors of `pulled` are multiplied out and added up, which bounds memory;
        None for never.
      pick: `pick(left[K, b, R, rows]) -> left[K, b, p, rows]`, for each weight matrix: of the products with the vectors
        asked for, those that are wanted.

    Returns:
      The rest of the pass.
    """
    dl_dstate, features = forward.dl_dstate if signal is None else signal, forward.features
    length, streams = dl_dstate.shape[:2]
    watched, count = (0, 0) if asks is None else asks.shape[:2]
    at_the_end = jnp.zeros_like(dl_dstate[0]) if future is None else future
    begin = (at_the_end[:, None], asks)
    over = None if forward.reset is None or asks is None else episode_over(forward.reset[:, :watched])
    steps = (forward.residuals, dl_dstate, forward.reset if factors is None else None, over, factors)
    together = asks is not None and watched == streams and asks.size <= BESIDE_LOSSES
    one_step = _one_step(forward.maps, together)
    if features is None:

        def step(carry: tuple, now: tuple) -> tuple[tuple, None]:
            cotangents, sums = carry
            cotangents, here = one_step(cotangents, now)
            return (cotangents, jax.tree.map(jnp.add, sums, here)), None

        sums = (zero_each(params, streams, 1), None if asks is None else zero_each(params, watched, count))
        (cotangents, sums), _ = jax.lax.scan(step, (begin, sums), steps, reverse=True, unroll=unroll())
        inside = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=(0, 1)), sums[0])
        return Back(inside, cotangents[0][:, 0], cotangents[1], sums[1])

    thin = Thin(features)
    # A feature that has gone to NaN is not undone by a cotangent of zero.
    few = None if asks is None else cleared(over, jax.tree.map(lambda leaf: leaf[:, :watched], features))
    here, nothing = thin.steps(one_step), thin.nothing(params, (streams, 1), None if asks is None else (watched, count))
    steps = (steps, (thin.of(features), thin.of(few)))

    def walk_back(carry: tuple, steps: tuple, few: PyTree) -> tuple[tuple, PyTree, Outer | None]:
        carry, (left, asked) = jax.lax.scan(here, carry, steps, reverse=True, unroll=unroll())
        if asked is None:
            return carry, left, None
        pulled = thin.with_sums(Outer(asked, few), carry[1][1])
        return carry, left, everywhere(pulled._replace(left=pick(pulled.left)))

    if steps_at_once is None or steps_at_once >= length:
        (cotangents, sums), left, pulled = walk_back((begin, nothing), steps, few)
    else:

        def stretch(carry: tuple, part: tuple) -> tuple[tuple, PyTree]:
            cotangents, sums, total = carry
            (cotangents, here), left, pulled = walk_back((cotangents, nothing), *part)
            return (cotangents, jax.tree.map(jnp.add, sums, here), add_pulled(total, pulled)), left

        asked = jax.tree.map(lambda w: jax.ShapeDtypeStruct((1, watched, count, w.shape[0]), w.dtype), params)
        wanted = jax.tree.map(lambda leaf: leaf.shape[2], jax.eval_shape(pick, asked))
        zero = jax.tree.map(lambda w, n: jnp.zeros((watched, n, *w.shape), w.dtype), params, wanted)
        count = -(-length // steps_at_once)
        carry, left = in_stretches(stretch, (begin, nothing, zero), (steps, few), -(-length // count), reverse=True)
        cotangents, sums, pulled = carry
    whole = thin.with_sums(Outer(left, features), sums[0])
    left = jax.tree.map(lambda leaf: leaf[:, :, 0], whole.left)
    return Back(sum_outer(Outer(left, whole.right)), cotangents[0][:, 0], cotangents[1], pulled)


class Thin:
    """Weight matrices of a single feature, which are most often parameters of their own, whose feature is 1.

    A product over the steps of a chunk is a sum for them, so that it is added up step by step, and not written down.
    """

    def __init__(self, features: PyTree) -> None:
        self.structure = jax.tree.structure(features)
        self.which = [leaf.shape[-1] == 1 for leaf in jax.tree.leaves(features)]

    def of(self, tree: PyTree) -> list[Array]:
        """The leaves of these matrices; none of a tree that is None."""
        leaves = [] if tree is None else zip(jax.tree.leaves(tree), self.which, strict=True)
        return [leaf for leaf, thin in leaves if thin]

    def nothing(self, params: PyTree, *counts: tuple[int, int] | None) -> tuple[list[Array], ...]:
        """Zeros to add to: `[streams, vectors, rows]` for each kind of cotangents."""
        return tuple(
            [jnp.zeros((*count, w.shape[0]), w.dtype) for w in self.of(params)] if count else [] for count in counts
        )

    def steps(self, one_step: Callable[[tuple, tuple], tuple[tuple, tuple]]) -> Callable:
        """One step back that adds up the products of thin matrices, and returns a zero in their place."""

        def step(carry: tuple, now: tuple) -> tuple[tuple, tuple]:
            cotangents, (first, second) = carry
            cotangents, (left, asked) = one_step(cotangents, now[0])
            of_all, of_few = now[1]
            first = [s + v * x[:, None] for s, v, x in zip(first, self.of(left), of_all, strict=True)]
            second = [s + v * x[:, None] for s, v, x in zip(second, self.of(asked), of_few, strict=True)]
            return (cotangents, (first, second)), (self._without(left), self._without(asked))

        return step

    def _without(self, tree: PyTree) -> PyTree:
        if tree is None:
            return None
        leaves = zip(jax.tree.leaves(tree), self.which, strict=True)
        return jax.tree.unflatten(self.structure, [jnp.zeros(()) if thin else leaf for leaf, thin in leaves])

    def with_sums(self, factors: Outer, sums: list[Array]) -> Outer:
        """The factors, with those sums as if they were a single step with feature 1."""
        rest = iter(sums)
        left, right = [], []
        for v, a, thin in zip(jax.tree.leaves(factors.left), jax.tree.leaves(factors.right), self.which, strict=True):
            added = next(rest) if thin else None
            left.append(v if added is None else added[None])
            right.append(a if added is None else jnp.ones((1, *added.shape[:1], 1), added.dtype))
        return Outer(jax.tree.unflatten(self.structure, left), jax.tree.unflatten(self.structure, right))


# The most numbers that are put beside the losses' cotangents, for one product with the weights instead of two. Beyond,
# to copy them at every step costs more than to read the weights again.
BESIDE_LOSSES = 1 << 20


def _one_step(maps: StepVjp, together: bool) -> Callable[[tuple, tuple], tuple[tuple, tuple]]:
    """One step back with both kinds of cotangents, `[B, 1, S]` and `[b, R, S]`; `together` only where b is B."""

    def pull(residuals: PyTree, cotangents: Array, reset: Array | None) -> tuple[Array, PyTree]:
        back, here = jax.vmap(jax.vmap(maps.pull, in_axes=(None, 0)))(residuals, cotangents)
        return back if reset is None else jnp.where(reset[:, None, None], 0, back), here

    def step(cotangents: tuple, now: tuple) -> tuple[tuple, tuple]:
        losses, asked = cotangents
        residuals, dl_dstate, reset, over, factor = now
        losses = losses + dl_dstate[:, None]
        if together:
            back, here = pull(residuals, jnp.concatenate([losses, asked], axis=1), reset)
            first, second = (jax.tree.map(lambda leaf, p=p: leaf[:, p], here) for p in (slice(0, 1), slice(1, None)))
            return (back[:, :1], cleared(over, back[:, 1:])), (first, cleared(over, second))
        losses, first = pull(residuals, losses, reset)
        losses = losses if factor is None else scaled(factor[:, None, None], losses)
        if asked is None:
            return (losses, None), (first, None)
        few, few_resets = jax.tree.map(lambda leaf: leaf[: len(asked)], (residuals, reset))
        asked, second = pull(few, asked, few_resets)
        return (losses, cleared(over, asked)), (first, cleared(over, second))

    return step


def scaled(factor: Float[Array, "*any"], flow: Float[Array, "*all"]) -> Float[Array, "*all"]:
    """A flow times a factor; nothing at all where that is 0."""
    return jnp.where(factor == 0, 0, factor * flow)


def episode_over(reset: Bool[Array, " *steps"] | None) -> Bool[Array, " *steps"] | None:
    """Whether another episode begins after a step, `[K]` or `[K, b]`, so that the end does not depend on it."""
    if reset is None:
        return None
    begun = jax.lax.cummax(reset.astype(jnp.int32), axis=0, reverse=True) > 0
    return jnp.concatenate([begun[1:], jnp.zeros_like(begun[:1])])


def in_stretches(
    walk: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    carry: PyTree,
    steps: PyTree,
    size: int,
    reverse: bool = False,
) -> tuple[PyTree, PyTree]:
    """A scan over stretches of `size` steps and the rest: the last steps, or in reverse the first, may be fewer.

    Args:
      walk: `walk(carry, steps of a stretch) -> (carry, found)`.
      carry: to begin with.
      steps: all steps, time leading.
      size: of a stretch.
      reverse: whether stretches are gone through from the last to the first.

    Returns:
      The last carry, and what was found, joined in time.
    """
    length = jax.tree.leaves(steps)[0].shape[0]
    rest = length % size
    whole, single = length - rest, length - rest == size
    first, last = (rest, length) if reverse else (0, whole)
    parts = jax.tree.map(lambda leaf: leaf[first:last], steps)
    found = []
    if single:
        carry, here = walk(carry, parts)
        found.append(here)
    elif whole:
        parts = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), parts)
        carry, here = jax.lax.scan(walk, carry, parts, reverse=reverse)
        found.append(jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), here))
    if rest:
        carry, here = walk(carry, jax.tree.map(lambda leaf: leaf[:rest] if reverse else leaf[whole:], steps))
        found.insert(0 if reverse else 1, here)
    return carry, jax.tree.map(lambda *parts: parts[0] if len(parts) == 1 else jnp.concatenate(parts), *found)
