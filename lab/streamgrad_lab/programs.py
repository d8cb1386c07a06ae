"""An estimator as a compiled program: several streams from beginning to end, chunk by chunk.

Compiling takes longer than all that is measured. So there is one program for each estimator, that everything is
measured with; and programs are compiled side by side.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad import Chunk, EstimatorState, GradientEstimator, Params, batched
from streamgrad._typing import Array, PyTree
from streamgrad.noise.rescale import total_log_alpha
from streamgrad_lab.candidates import Candidate
from streamgrad_lab.progress import Progress
from streamgrad_lab.timing import state_bytes, temp_bytes

WARM_UP = 10_000  # steps, at most, until an estimator that learns from the past uses what it has learnt
SETTLED = 200  # chunks, until one that does not say whether it does has learnt enough
TOLD = ("gamma", "beta", "carried")  # what is looked at of an estimator's diagnostics

Past = Callable[[int], Chunk]  # the index of a batch of streams -> that batch


class Compiled(NamedTuple):
    """A compiled estimator.

    Attributes:
      run: `run(key)` gives the gradient of the cell, summed over the chunks of a stream and averaged over streams, and
        α of each stream, or None.
      streams: how many.
      warm: whether what it learns from the past, if anything, is in use.
      state_bytes: of one stream.
      scratch_bytes: of all.
    """

    run: Callable[[Any], tuple[Array, Array | None]]
    streams: int
    warm: bool
    state_bytes: int
    scratch_bytes: int


def compile_all(
    candidates: Iterable[Candidate],
    params: Params,
    many: Chunk,
    chunk_length: int,
    key: Any,
    past: Past,
    progress: Progress,
) -> Iterator[tuple[Candidate, Future[Compiled]]]:
    """The programs, side by side on as many cores as there are, while the theory of the next one is worked out.

    Args:
      candidates: what to compile.
      params: the model's parameters.
      many: the streams, from their beginning.
      chunk_length: K, the steps of a chunk.
      key: of the noise while an estimator learns from the past.
      past: as in `compare`.
      progress: likewise.

    Returns:
      Each candidate with its program to come.
    """
    streams, length = jax.tree.leaves(many.targets)[0].shape[:2]

    def finish(lowered: Any, state: EstimatorState) -> Compiled:
        compiled = lowered.compile()
        carried, now, seen = None, state, 0
        # The stream begins afresh for all estimators; of the past only what was learnt is kept.
        for index in range(WARM_UP // length):
            before = now.shared
            _, _, carried, _, now = compiled(params, now, past(index), jax.random.fold_in(key, 2**31 + index))
            seen += -(-length // chunk_length)
            if same(before, now.shared) if carried is None else bool(carried):
                break
            if carried is None and seen >= SETTLED:
                break
        state = state._replace(shared=now.shared)
        warm, each = carried is None or bool(carried), state_bytes(state) // streams
        return Compiled(lambda key: compiled(params, state, many, key)[:2], streams, warm, each, temp_bytes(compiled))

    def whole(est: GradientEstimator, params: Params, state: Any, many: Chunk, key: Any) -> tuple[Any, ...]:
        grads, state, found = walk(est, params, state, many, chunk_length, key)
        alpha = carried = None
        if {"gamma", "beta"} <= set(found):
            alpha = jnp.exp(jax.vmap(total_log_alpha)(found["gamma"], found["beta"]))
        if "carried" in found:
            carried = jnp.all(found["carried"][:, -1] > 0)
        return ravel_pytree(grads.cell)[0], alpha, carried, grads.head, state

    candidates = candidates if isinstance(candidates, Sized) else list(candidates)
    total = len(candidates)
    pool = ThreadPoolExecutor(os.cpu_count())
    for number, candidate in enumerate(candidates):
        progress("preparing", number, total, candidate.name)
        if candidate.least_streams > streams or chunk_length % candidate.every or length % candidate.every:
            continue
        est = batched(candidate.est, streams)
        state = est.init(params)
        lowered = jax.jit(functools.partial(whole, est)).lower(params, state, many, key)
        yield candidate, pool.submit(finish, lowered, state)
    progress("preparing", total, total, "done")
    pool.shutdown(wait=False)


def walk(
    est: GradientEstimator, params: Params, state: EstimatorState, many: Chunk, chunk_length: int, key: Any
) -> tuple[Params, EstimatorState, dict[str, Array]]:
    """Take streams through an estimator in chunks of K steps, the last of which may be shorter.

    Args:
      est: for a batch of streams.
      params: the same for all chunks.
      state: with which the streams begin.
      many: the streams.
      chunk_length: K.
      key: each chunk gets one of its own.

    Returns:
      The sum of the gradients, the state at the end, and the diagnostics in `TOLD` of all chunks, joined along time.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 3), sg.heads.softmax(2))
      >>> params, est = model.init(jax.random.key(0)), sg.batched(sg.uoro(model), 4)
      >>> many = sg.Chunk(jnp.ones((4, 10, 2)), jnp.zeros((4, 10), int))
      >>> grads, state, found = walk(est, params, est.init(params), many, 4, jax.random.key(1))
      >>> found["gamma"].shape
      (4, 10, 1)
    """
    streams, steps = jax.tree.leaves(many.targets)[0].shape[:2]
    count, rest = divmod(steps, chunk_length)
    keys = jax.random.split(key, count + 1)

    def step(carry: tuple, now: tuple) -> tuple[tuple, dict[str, Array]]:
        state, total = carry
        grads, state, info = est.update(params, state, *now)
        told = {name: info.diagnostics[name] for name in TOLD if name in info.diagnostics}
        return (state, jax.tree.map(jnp.add, total, grads)), told

    def cut(leaf: Array) -> Array:
        return jnp.swapaxes(leaf[:, : steps - rest].reshape(streams, count, chunk_length, *leaf.shape[2:]), 0, 1)

    def join(leaf: Array) -> Array:
        """`[chunks, streams, time, …]` to `[streams, time of all chunks, …]`."""
        return jnp.swapaxes(leaf, 0, 1).reshape(streams, -1, *leaf.shape[3:])

    carry = (state, jax.tree.map(jnp.zeros_like, params))
    carry, found = jax.lax.scan(step, carry, (jax.tree.map(cut, many), keys[:count]))
    found = jax.tree.map(join, found)
    if rest:
        carry, last = step(carry, (jax.tree.map(lambda leaf: leaf[:, -rest:], many), keys[count]))
        found = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), found, last)
    return carry[1], carry[0], found


def same(before: PyTree, after: PyTree) -> bool:
    """Whether nothing was learnt: two trees of the same structure are equal in every number."""
    return all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(after)))
