"""The two passes through a chunk of all streams: forward with tangents, and back with several cotangents at once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Bool, Float, PyTree
from streamgrad.base import Chunk, Model, Params
from streamgrad.engine.estimator import restart
from streamgrad.step.platform import unroll
from streamgrad.step.step_vjp import StepVjp
from streamgrad.step.weights import Outer, add_pulled, sum_outer, zero_each
from streamgrad.trees import cleared


def forward(
    maps: StepVjp, fresh: Float[Array, " S"], start: Float[Array, "B S"], tangents: Array | None, chunk: Chunk
) -> tuple[Array, Array | None, Array, PyTree, PyTree]:
    """The state at the end, the tangents there; and of every step the state, what is kept of it, and its features."""

    def one(state: Array, x: PyTree, reset: Array | None) -> tuple[Array, tuple]:
        state = restart(reset, fresh, state)
        new, kept, features = maps.forward(state, x)
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


def read_out(
    model: Model, params: Params, unravel: Callable, states: Float[Array, "K B S"], chunk: Chunk
) -> tuple[Float[Array, "K B"], PyTree, Float[Array, "K B S"]]:
    """L_t, the head's gradient summed over streams and time, and dL_t/dh_t."""
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (states, chunk.targets))
    losses, head, dl_dstate = model.read_out_chunk(params.head, jax.vmap(unravel)(flat[0]), flat[1])
    return losses.reshape(states.shape[:2]), head, dl_dstate.reshape(states.shape)


def backward(
    maps: StepVjp,
    kept: PyTree,
    features: PyTree,
    params: PyTree,
    dl_dstate: Float[Array, "K B S"],
    asks: Float[Array, "b R S"],
    reset: Bool[Array, "K B"] | None,
    block: int,
    pick: Callable[[PyTree], PyTree] = lambda asked: asked,
    own: Callable[[PyTree], PyTree] = lambda features: features,
) -> tuple[tuple[Array, Array], PyTree, PyTree]:
    """One reverse pass: the losses' cotangent of all streams, and those asked for of the first b.

    Args:
      maps: the steps' linear maps.
      kept: what they need, of every step; from `forward`.
      features: of every step, or None where the cell has no preactivations; likewise.
      params: the cell's parameters.
      dl_dstate: dL_t/dh_t.
      asks: the vectors that are taken along from the chunk's end.
      reset: where episodes begin.
      block: after how many steps factors are multiplied out.
      pick: `pick(left[K, b, R, rows]) -> left[K, b, p, rows]`, for each weight matrix: of what the vectors asked for
        are there, what is wanted.
      own: of the features `[K, b, A]` of each weight matrix, those that the vectors asked for are multiplied with.

    Returns:
      dL/dh_0 and the vectors asked for times Φ; what they are times Σ_s G_s J_s, as in `Crossing`; and the gradient
      inside the chunk.
    """
    length, streams = dl_dstate.shape[:2]
    watched, count = asks.shape[:2]

    begin = (jnp.zeros_like(dl_dstate[0])[:, None], asks)
    over = episode_over(None if reset is None else reset[:, :watched])
    steps = (kept, dl_dstate, reset, over)
    one_step = _one_step(maps, watched == streams and asks.size <= FEW)
    if features is None:

        def step(carry: tuple, now: tuple) -> tuple[tuple, None]:
            cotangents, sums = carry
            cotangents, here = one_step(cotangents, now)
            return (cotangents, jax.tree.map(jnp.add, sums, here)), None

        sums = (zero_each(params, streams, 1), zero_each(params, watched, count))
        (cotangents, sums), _ = jax.lax.scan(step, (begin, sums), steps, reverse=True, unroll=unroll())
        inside = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=(0, 1)), sums[0])
        return (cotangents[0][:, 0], cotangents[1]), sums[1], inside

    thin = Thin(features)
    # A feature that has gone to NaN is not undone by a cotangent of zero.
    few = cleared(over, jax.tree.map(lambda leaf: leaf[:, :watched], features))
    here, nothing = thin.steps(one_step), thin.nothing(params, (streams, 1), (watched, count))
    steps, few = (steps, (thin.of(features), thin.of(few))), own(few)

    def walk_back(carry: tuple, steps: tuple, few: PyTree) -> tuple[tuple, PyTree, Outer]:
        carry, (left, asked) = jax.lax.scan(here, carry, steps, reverse=True, unroll=unroll())
        return carry, left, Outer(asked, few)

    if block >= length:
        (cotangents, sums), left, pulled = walk_back((begin, nothing), steps, few)
        pulled = thin.with_sums(pulled, sums[1])
        pulled = pulled._replace(left=pick(pulled.left))
    else:

        def stretch(carry: tuple, part: tuple) -> tuple[tuple, PyTree]:
            cotangents, sums, total = carry
            (cotangents, here), left, pulled = walk_back((cotangents, nothing), *part)
            pulled = thin.with_sums(pulled, here[1])
            total = add_pulled(total, pulled._replace(left=pick(pulled.left)))
            return (cotangents, jax.tree.map(jnp.add, sums, here), total), left

        asked = jax.tree.map(lambda w: jax.ShapeDtypeStruct((1, watched, count, w.shape[0]), w.dtype), params)
        wanted = jax.tree.map(lambda leaf: leaf.shape[2], jax.eval_shape(pick, asked))
        zero = jax.tree.map(
            lambda w, n, a: jnp.zeros((watched, n, w.shape[0], a.shape[-1]), w.dtype), params, wanted, few
        )
        (cotangents, sums, pulled), left = _in_blocks(stretch, (begin, nothing, zero), (steps, few), length, block)
    whole = thin.with_sums(Outer(left, features), sums[0])
    left = jax.tree.map(lambda leaf: leaf[:, :, 0], whole.left)
    return (cotangents[0][:, 0], cotangents[1]), pulled, sum_outer(Outer(left, whole.right))


class Thin:
    """Weight matrices of a single feature, which are most often parameters of their own, whose feature is 1.

    A product over the steps of a chunk is a sum for them, so that it is added up step by step, and not written down.
    """

    def __init__(self, features: PyTree) -> None:
        self.structure = jax.tree.structure(features)
        self.which = [leaf.shape[-1] == 1 for leaf in jax.tree.leaves(features)]

    def of(self, tree: PyTree) -> list[Array]:
        """The leaves of these matrices."""
        return [leaf for leaf, thin in zip(jax.tree.leaves(tree), self.which, strict=True) if thin]

    def nothing(self, params: PyTree, *counts: tuple[int, int]) -> tuple[list[Array], ...]:
        """Zeros to add to: `[streams, vectors, rows]` for each kind of cotangents."""
        return tuple([jnp.zeros((*count, w.shape[0]), w.dtype) for w in self.of(params)] for count in counts)

    def steps(self, one_step: Callable[[tuple, tuple], tuple[tuple, tuple]]) -> Callable:
        """One step back that adds up what is thin, and returns a zero in its place."""

        def step(carry: tuple, now: tuple) -> tuple[tuple, tuple]:
            cotangents, (first, second) = carry
            cotangents, (left, asked) = one_step(cotangents, now[0])
            of_all, of_few = now[1]
            first = [s + v * x[:, None] for s, v, x in zip(first, self.of(left), of_all, strict=True)]
            second = [s + v * x[:, None] for s, v, x in zip(second, self.of(asked), of_few, strict=True)]
            return (cotangents, (first, second)), (self._without(left), self._without(asked))

        return step

    def _without(self, tree: PyTree) -> PyTree:
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


def episode_over(reset: Bool[Array, " *steps"] | None) -> Bool[Array, " *steps"] | None:
    """Whether another episode begins after a step, `[K]` or `[K, b]`: then the step is of no account at the end."""
    if reset is None:
        return None
    begun = jax.lax.cummax(reset.astype(jnp.int32), axis=0, reverse=True) > 0
    return jnp.concatenate([begun[1:], jnp.zeros_like(begun[:1])])


# So many numbers are put beside the losses' cotangents, for one product with the weights instead of two. Beyond, to
# copy them at every step costs more than to read the weights again.
FEW = 1 << 20


def _one_step(maps: StepVjp, together: bool) -> Callable[[tuple, tuple], tuple[tuple, tuple]]:
    """One step back with both kinds of cotangents, `[B, 1, S]` and `[b, R, S]`; `together` only where b is B."""

    def pull(kept: PyTree, cotangents: Array, reset: Array | None) -> tuple[Array, PyTree]:
        back, here = jax.vmap(jax.vmap(maps.pull, in_axes=(None, 0)))(kept, cotangents)
        return back if reset is None else jnp.where(reset[:, None, None], 0, back), here

    def step(cotangents: tuple, now: tuple) -> tuple[tuple, tuple]:
        losses, asked = cotangents
        kept, dl_dstate, reset, over = now
        losses = losses + dl_dstate[:, None]
        if together:
            back, here = pull(kept, jnp.concatenate([losses, asked], axis=1), reset)
            first, second = (jax.tree.map(lambda leaf, p=p: leaf[:, p], here) for p in (slice(0, 1), slice(1, None)))
            return (back[:, :1], cleared(over, back[:, 1:])), (first, cleared(over, second))
        some, some_resets = jax.tree.map(lambda leaf: leaf[: len(asked)], (kept, reset))
        (losses, first), (asked, second) = pull(kept, losses, reset), pull(some, asked, some_resets)
        return (losses, cleared(over, asked)), (first, cleared(over, second))

    return step


def _in_blocks(stretch: Callable, carry: tuple, steps: PyTree, length: int, block: int) -> tuple[tuple, PyTree]:
    """Go back in blocks of about so many steps; what comes before the first whole one is the last of them."""
    count = -(-length // block)
    block = -(-length // count)
    rest = length % block
    parts = jax.tree.map(lambda leaf: leaf[rest:].reshape(-1, block, *leaf.shape[1:]), steps)
    carry, found = jax.lax.scan(stretch, carry, parts, reverse=True)
    found = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), found)
    if rest:
        carry, first = stretch(carry, jax.tree.map(lambda leaf: leaf[:rest], steps))
        found = jax.tree.map(lambda *parts: jnp.concatenate(parts), first, found)
    return carry, found
