"""A local influence through a chunk, in factors: an element-wise recursion backwards, and one matrix product.

For each row n of weights and its few units U, with D_t = dh_t/dh_{t-1} and I_t = dh_t/dz_t between them alone:

    M_t = D_t M_{t-1} + I_t a_t^T,    dL/dθ = Σ_t (dL_t/dh_t) M_t

Read backwards, e_t = dL_t/dh_t + e_{t+1} D_{t+1}, so that dL/dθ = Σ_t (e_t I_t) a_t^T + (e_1 D_1) M_0. The same with
C_t = C_{t+1} D_{t+1} from C_K = 1 in place of e gives M_K. Nothing of the size of the weights is touched in between,
and D, e and C are those of a set of units, whichever rows have them.

In this file a list is one over the ranges of rows (`RowUnits.ranges`), or over the tables of sets of units
(`RowUnits.by_set`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Float, PyTree
from streamgrad.base import Chunk, Model, Params
from streamgrad.engine import sparse_influence
from streamgrad.engine.chunk import Across, Crossing, Walk, begun, chunkwise, leading
from streamgrad.engine.chunk_passes import backward, episode_over, forward, read_out
from streamgrad.engine.estimator import Algorithm
from streamgrad.engine.row_arrays import Places, advanced, summed, times
from streamgrad.step.platform import unroll
from streamgrad.step.row_units import RowRange, RowUnits
from streamgrad.step.static_gather import static_gather
from streamgrad.step.step_vjp import StepVjp, step_vjp
from streamgrad.step.weights import Outer, sum_outer
from streamgrad.trees import cleared

Signal = Callable[[Params, Float[Array, "K B S"], PyTree, Float[Array, "K B S"]], Float[Array, "K B S"]]


def by_own_units(model: Model, local: RowUnits, inside: str, signal: Signal | None = None) -> Algorithm:
    """The algorithm of an influence at each weight's own units; arguments as in `local_walk`."""
    return chunkwise(model, local_influence(local), walk_through=local_walk(local, inside, signal))


def local_influence(local: RowUnits) -> Across:
    """M at the units of each row, across chunks.

    Args:
      local: which units.

    Returns:
      The influence, for `chunkwise` with `local_walk`. Its memory is a list of blocks of rows, each with an array
      `[rows, A]` for every place.
    """

    def init(params: PyTree, state: PyTree) -> list[Places]:
        del state
        matrices = jax.tree.leaves(params)

        def zeros(block: RowRange) -> Places:
            some = matrices[block.matrix][block.begin : block.end]
            return tuple(
                jnp.zeros_like(some) for _ in local.by_set.leaves[block.table].own
            )  # each of its own, to donate

        return list(map(zeros, local.ranges))

    def advance(
        shared: PyTree, memory: list[Places], noise: None, crossing: Crossing
    ) -> tuple[list[Places], dict[str, Array]]:
        del shared, noise
        left, features = crossing.pulled
        parts = zip(local.ranges, crossing.back, memory, left, strict=True)
        return [advanced(moves, m, v, features[block.matrix], crossing.reset) for block, moves, m, v in parts], {}

    def older(memory: list[Places], start: PyTree) -> PyTree:
        def one(block: RowRange, e: Float[Array, "b p rows"], m: Places) -> Float[Array, "rows A"]:
            features = jax.tree.leaves(local.weights)[block.matrix].shape[1]
            return summed(e / len(e), m) if m else jnp.zeros((block.end - block.begin, features), e.dtype)

        # To join sums while they are made takes a GPU twice as long as to make them and join them afterwards.
        sums = jax.lax.optimization_barrier(list(map(one, local.ranges, start, memory)))
        return _whole(local, sums, axis=0)

    return Across(init, lambda memory, noise: jnp.zeros(()), advance, older)


def local_walk(local: RowUnits, inside: str, signal: Signal | None = None) -> Callable[..., Walk]:
    """How a local influence goes through a chunk.

    Args:
      local: which units.
      inside: "steps" for the recursion at every step, "backprop" for backpropagation inside the chunk.
      signal: `signal(params, states, targets, dl_dstate) -> [K, B, S]`, what is sent to the units in place of
        dL_t/dh_t; None for that itself.

    Returns:
      `walk_through`, for `chunkwise`.
    """

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
        few = step_vjp(model.cell, params.cell, unravel(fresh), x, local.recurrent_features)
        maps, whole = few, None
        if inside == "backprop":
            whole = step_vjp(model.cell, params.cell, unravel(fresh), x)
            maps = few._replace(forward=_both(whole, few))
        end, _, states, kept, features = forward(maps, fresh, start, None, chunk)
        losses, head, dl_dstate = read_out(model, params, unravel, states, chunk)
        sent = dl_dstate if signal is None else signal(params, states, chunk.targets, dl_dstate)
        watched = leading(memory, len(start))

        def first(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: leaf[:, :watched], tree)

        if whole is None:
            jacobians, entries = _between(local, few, kept, chunk.reset, sent)
            signals = sparse_influence.at_units(local.by_set, sent)
            e, moves, es, cs = _recursions(signals, jacobians, watched)
            left = [times(v, entry, 2) for v, entry in zip(_at_rows(local, es), entries, strict=True)]
            total = sum_outer(Outer(_whole(local, left, axis=2), features))
            entries = first(entries)
        else:
            asks = jnp.zeros((0, 0, fresh.size), fresh.dtype)
            found, _, total = backward(whole, kept[0], features, params.cell, sent, asks, chunk.reset, len(sent))
            jacobians, entries = _between(local, few, *first((kept[1], chunk.reset, sent)))
            e = sparse_influence.at_units(local.by_set, found[0])
            _, moves, _, cs = _recursions([], jacobians, watched)
        right = [times(c, entry[:, :, None], 3) for c, entry in zip(_at_rows(local, cs), entries, strict=True)]
        over = episode_over(first(chunk.reset))  # there C is zero, but what it is multiplied with may be NaN
        pulled = cleared(over, Outer(right, jax.tree.leaves(first(features))))
        crossing = Crossing(_at_rows(local, moves), pulled, None, begun(chunk, watched))
        return Walk(end, states, losses, head, total, _at_rows(local, e), crossing)

    return walk


def _both(whole: StepVjp, few: StepVjp) -> Callable:
    """A step, with what both linear maps need of it."""

    def one(state: Array, x: PyTree) -> tuple[Array, tuple, PyTree]:
        new, kept, features = whole.forward(state, x)
        return new, (kept, few.forward(state, x)[1]), features

    return one


def _between(
    local: RowUnits, maps: StepVjp, kept: PyTree, reset: Bool[Array, "K B"] | None, sent: Float[Array, "K B S"]
) -> tuple[list[Array], list[Array]]:
    """For all steps at once D_t between the units of each set, `[K, B, p, p, U]`, and I_t, `[K, B, p, rows]`."""
    vectors = sparse_influence.colour_vectors(local.by_row, sent.dtype)
    steps, streams = sent.shape[:2]
    pull = jax.vmap(maps.pull, in_axes=(None, 0))
    for size in (streams, steps):  # which `kept` need not tell: of a linear step nothing is
        pull = jax.vmap(pull, in_axes=(0, None), axis_size=size)
    back, here = pull(kept, vectors)  # [K, B, R, S] and [K, B, R, rows]
    if reset is not None:
        back = jnp.where(reset[:, :, None, None], 0, back)
    jacobians = sparse_influence.among_own(local.by_set, back.reshape(-1, *back.shape[2:]))
    rows = jax.tree.leaves(here)
    entries = sparse_influence.pick(
        local.by_row, [rows[block.matrix][..., block.begin : block.end] for block in local.ranges]
    )
    return [leaf.reshape(steps, streams, *leaf.shape[1:]) for leaf in jacobians], entries


def _recursions(
    signals: list[Float[Array, "K B _p _U"]], jacobians: list[Float[Array, "K B _p _p _U"]], watched: int
) -> tuple[list[Array], list[Array], list[Array], list[Array]]:
    """e_1 D_1 and, of the first streams, C_1 D_1; and all e_t and C_t.

    Args:
      signals: dL_t/dh_t, or an empty list where no e is wanted.
      jacobians: D_t.
      watched: how many streams have C.

    Returns:
      `[B, p, U]`, `[b, p, p, U]`, `[K, B, p, U]` and `[K, b, p, p, U]`.
    """

    def step(carry: tuple, now: tuple) -> tuple[tuple, tuple]:
        e, c = carry
        signal, jacobian = now
        e = list(map(jnp.add, e, signal))
        moved_e = [times(v[:, :, None], d, 1) for v, d in zip(e, jacobian if e else [], strict=True)]
        moved_c = [times(v[:, :, :, None], d[:watched, None], 2) for v, d in zip(c, jacobian, strict=True)]
        return (moved_e, moved_c), (e, c)

    def identity(d: Float[Array, "K B p p U"]) -> Float[Array, "b p p U"]:
        eye = np.eye(d.shape[2])[None, :, :, None]
        return jnp.broadcast_to(jnp.asarray(eye, d.dtype), (watched, *d.shape[2:]))

    begin = ([jnp.zeros_like(leaf[0]) for leaf in signals], list(map(identity, jacobians)))
    (e, moves), (es, cs) = jax.lax.scan(step, begin, (signals, jacobians), reverse=True, unroll=unroll())
    return e, moves, es, cs


def _at_rows(local: RowUnits, tables: list[Float[Array, "... _U"]]) -> list[Float[Array, "... _rows"]]:
    """What each set of units has, for the rows of every block."""
    return [static_gather(tables[block.table], block.sets, tables[block.table].ndim - 1) for block in local.ranges]


def _whole(local: RowUnits, parts: list[Array], axis: int) -> PyTree:
    """Arrays over the rows of every block, joined along an axis; in the structure of the parameters."""
    structure = jax.tree.structure(local.weights)
    matrices: list[list[Array]] = [[] for _ in range(structure.num_leaves)]
    for block, part in zip(local.ranges, parts, strict=True):
        matrices[block.matrix].append(part)
    return jax.tree.unflatten(structure, [_joined(part, axis) for part in matrices])


def _joined(parts: list[Array], axis: int) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)
