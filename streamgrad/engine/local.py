"""A local influence through a chunk, in factors: an element-wise recursion backwards, and one matrix product.

For each row n of weights and its few units U, with D_t = dh_t/dh_{t-1} and I_t = dh_t/dz_t between them alone:

    M_t = D_t M_{t-1} + I_t a_t^T,    dL/dθ = Σ_t (dL_t/dh_t) M_t

Read backwards, e_t = dL_t/dh_t + e_{t+1} D_{t+1}, so that dL/dθ = Σ_t (e_t I_t) a_t^T + (e_1 D_1) M_0. The same with
C_t = C_{t+1} D_{t+1} from C_K = 1 in place of e gives M_K. Nothing of the size of the weights is touched in between.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, Model, Params
from streamgrad.engine import shaped
from streamgrad.engine.chunkwise import Across, Crossing, Walk, chunkwise
from streamgrad.engine.estimator import Algorithm
from streamgrad.engine.passes import backward, forward, read_out
from streamgrad.engine.unroll import unroll
from streamgrad.step.linear import Linear, linear
from streamgrad.step.local import Local
from streamgrad.step.weights import Outer, add_pulled, sum_outer

Signal = Callable[[Params, Float[Array, "K B S"], PyTree, Float[Array, "K B S"]], Float[Array, "K B S"]]


def by_own_units(model: Model, local: Local, inside: str, signal: Signal | None = None) -> Algorithm:
    """The algorithm of an influence at each weight's own units; arguments as in `local_walk`."""
    return chunkwise(model, local_influence(local, inside), walk_through=local_walk(local, inside, signal))


def local_influence(local: Local, inside: str) -> Across:
    """M at the units of each row, across chunks.

    Args:
      local: which units.
      inside: "steps" for the recursion at every step, "backprop" for backpropagation inside the chunk.

    Returns:
      The influence, for `chunkwise` with `local_walk`.
    """
    reach = local.reach

    def init(params: PyTree, state: PyTree) -> PyTree:
        del state
        return shaped.zeros(reach, params)

    def advance(shared: PyTree, memory: PyTree, noise: None, crossing: Crossing) -> tuple[PyTree, dict[str, Array]]:
        del shared, noise
        moved = jax.tree.map(shaped.row_by_row, crossing.back, memory)
        return add_pulled(moved, crossing.pulled), {}

    def older(memory: PyTree, start: PyTree) -> PyTree:
        if inside == "backprop":
            return shaped.contract(reach, start / len(start), memory)
        return jax.tree.map(lambda e, m: shaped.sum_rows(e / len(e), m), start, memory)

    return Across(init, lambda memory, noise: jnp.zeros(()), advance, older)


def local_walk(local: Local, inside: str, signal: Signal | None = None) -> Callable[..., Walk]:
    """How a local influence goes through a chunk.

    Args:
      local: which units.
      inside: as in `local_influence`.
      signal: `signal(params, states, targets, dl_dstate) -> [K, B, S]`, what is sent to the units in place of
        dL_t/dh_t; None for that itself.

    Returns:
      `walk_through`, for `chunkwise`.
    """
    reach = local.reach

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
        del across, noise, block
        fresh, unravel = ravel_pytree(model.init_state(params))
        x = jax.tree.map(lambda leaf: leaf[0, 0], chunk.inputs)
        few = linear(model.cell, params.cell, unravel(fresh), x, local.columns)
        maps, whole = few, None
        if inside == "backprop":
            whole = linear(model.cell, params.cell, unravel(fresh), x)
            maps = few._replace(take=_both(whole, few))
        end, _, states, kept, features = forward(maps, fresh, start, None, chunk)
        losses, head, dl_dstate = read_out(model, params, unravel, states, chunk)
        sent = dl_dstate if signal is None else signal(params, states, chunk.targets, dl_dstate)
        watched = jax.tree.leaves(memory)[0].shape[0]

        if whole is None:
            jacobians, entries = _between(reach, few, kept, chunk.reset, fresh.dtype)
            signals = shaped.at_units(reach, params.cell, sent)
            e, left = _back(signals, jacobians, entries)
            total = sum_outer(Outer(left, features))
            jacobians, entries = jax.tree.map(lambda leaf: leaf[:, :watched], (jacobians, entries))
        else:
            asks = jnp.zeros((0, 0, fresh.size), fresh.dtype)
            found, _, total = backward(whole, kept[0], features, params.cell, sent, asks, chunk.reset, len(sent))
            e = found[0]
            some, reset = jax.tree.map(lambda leaf: leaf[:, :watched], (kept[1], chunk.reset))
            jacobians, entries = _between(reach, few, some, reset, fresh.dtype)
        some = jax.tree.map(lambda leaf: leaf[:, :watched], features)
        moves, right = _forget(jacobians, entries)
        return Walk(end, states, losses, head, total, e, Crossing(moves, Outer(right, some), None, None))

    return walk


def _both(whole: Linear, few: Linear) -> Callable:
    """A step, with what both linear maps need of it."""

    def take(state: Array, x: PyTree) -> tuple[Array, tuple, PyTree]:
        new, kept, features = whole.take(state, x)
        return new, (kept, few.take(state, x)[1]), features

    return take


def _between(reach: shaped.Reach, maps: Linear, kept: PyTree, reset: Array | None, dtype: Any) -> tuple[PyTree, PyTree]:
    """D_t and I_t between the units of each row, for all steps at once: `[K, B, p, q, rows]` and `[K, B, p, rows]`."""
    vectors = shaped.colour_vectors(reach, dtype)
    of_steps = jax.vmap(jax.vmap(jax.vmap(maps.pull, in_axes=(None, 0)), in_axes=(0, None)), in_axes=(0, None))
    back, here = of_steps(kept, vectors)  # [K, B, R, S] and [K, B, R, rows]
    if reset is not None:
        back = jnp.where(reset[:, :, None, None], 0, back)
    steps, streams = back.shape[:2]
    jacobians = shaped.among_own(reach, here, back.reshape(-1, *back.shape[2:]))
    jacobians = jax.tree.map(lambda leaf: leaf.reshape(steps, streams, *leaf.shape[1:]), jacobians)
    return jacobians, shaped.pick(reach, here)


def _times(v: Array, by: Array) -> Array:
    """Σ_p v[:, p] by[:, p]; of few terms one by one, for a compiler makes a kernel of its own of every sum."""
    if not 0 < v.shape[1] <= 8:
        return jnp.sum(v * by, axis=1)
    return functools.reduce(jnp.add, [v[:, p] * by[:, p] for p in range(v.shape[1])])


def _back(signals: PyTree, jacobians: PyTree, entries: PyTree) -> tuple[PyTree, PyTree]:
    """e_1 D_1 and e_t I_t, from e_t = dL_t/dh_t + e_{t+1} D_{t+1}."""

    def step(e: PyTree, now: tuple) -> tuple[PyTree, PyTree]:
        signal, jacobian, entry = now
        e = jax.tree.map(jnp.add, e, signal)
        left = jax.tree.map(_times, e, entry)
        return jax.tree.map(lambda e, d: _times(e[:, :, None], d), e, jacobian), left

    begin = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), signals)
    return jax.lax.scan(step, begin, (signals, jacobians, entries), reverse=True, unroll=unroll())


def _forget(jacobians: PyTree, entries: PyTree) -> tuple[PyTree, PyTree]:
    """C_1 D_1 and C_t I_t, from C_t = C_{t+1} D_{t+1}."""

    def step(c: PyTree, now: tuple) -> tuple[PyTree, PyTree]:
        jacobian, entry = now
        each = jax.vmap(_times, in_axes=(1, None), out_axes=1)
        right = jax.tree.map(each, c, entry)
        return jax.tree.map(lambda c, d: each(c[:, :, :, None], d), c, jacobian), right

    def identity(d: Float[Array, "K b p p rows"]) -> Float[Array, "b p p rows"]:
        eye = np.eye(d.shape[2])[None, :, :, None]
        return jnp.broadcast_to(jnp.asarray(eye, d.dtype), d.shape[1:])

    begin = jax.tree.map(identity, jacobians)
    return jax.lax.scan(step, begin, (jacobians, entries), reverse=True, unroll=unroll())
