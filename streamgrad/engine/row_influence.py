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

from streamgrad._typing import Array, Bool, Float, PyTree
from streamgrad.base import Chunk, EstimatorState, Model, Params
from streamgrad.engine import sparse_influence
from streamgrad.engine.across import finish, older_credit, with_older
from streamgrad.engine.chunk import episode_over, go_back, go_forward, step_maps
from streamgrad.engine.collectives import Devices
from streamgrad.engine.method import Outcome, watched_streams
from streamgrad.engine.row_arrays import Places, advanced, summed, times
from streamgrad.step.platform import unroll
from streamgrad.step.row_units import RowRange, RowUnits
from streamgrad.step.static_gather import static_gather
from streamgrad.step.step_vjp import StepVjp
from streamgrad.step.weights import Outer, sum_outer
from streamgrad.trees import cleared

Signal = Callable[[Params, Float[Array, "K B S"], PyTree, Float[Array, "K B S"]], Float[Array, "K B S"]]


def by_own_units(
    model: Model, units: RowUnits, inside: str, signal: Signal | None = None
) -> tuple[Callable[[Params], EstimatorState], Callable[..., Outcome]]:
    """An influence at each weight's own units: `init` and `run` of a `Method`.

    Args:
      model: the model.
      units: of each row of weights.
      inside: "estimated" for the recursion at every step, "backprop" for backpropagation inside the chunk.
      signal: `signal(params, states, targets, dl_dstate) -> [K, B, S]`, the learning signal in place of dL_t/dh_t; None
        for that itself.

    Returns:
      `init` and `run`. The memory is a list of blocks of rows, each with an array `[rows, A]` for every place.
    """

    def init(params: Params) -> EstimatorState:
        matrices = jax.tree.leaves(params.cell)

        def zeros(block: RowRange) -> Places:
            some = matrices[block.matrix][block.begin : block.end]
            # Each of its own, to be donated.
            return tuple(jnp.zeros_like(some) for _ in units.by_set.leaves[block.table].own)

        return EstimatorState(model.init_state(params), list(map(zeros, units.ranges)), ())

    def contract(memory: list[Places], dl_dstart: list[Array]) -> PyTree:  # of each range of rows `[b, p, rows]`
        def one(block: RowRange, e: Float[Array, "b p rows"], m: Places) -> Float[Array, "rows A"]:
            features = jax.tree.leaves(units.weights)[block.matrix].shape[1]
            return summed(e / len(e), m) if m else jnp.zeros((block.end - block.begin, features), e.dtype)

        # To join sums while they are made takes a GPU twice as long as to make them and join them afterwards.
        sums = jax.lax.optimization_barrier(list(map(one, units.ranges, dl_dstart, memory)))
        return _whole(units, sums, axis=0)

    def run(params: Params, state: EstimatorState, chunk: Chunk, noise: None, devices: Devices) -> Outcome:
        del noise, devices
        few = step_maps(model, params, chunk, units.recurrent_features)
        maps, whole = few, None
        if inside == "backprop":
            whole = step_maps(model, params, chunk)
            maps = few._replace(forward=_both(whole, few))
        forward = go_forward(model, params, state.cell, chunk, maps=maps)
        sent = forward.dl_dstate
        if signal is not None:
            targets = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), chunk.targets)
            sent = signal(params, forward.states, targets, sent)
        watched = watched_streams(state)

        def first(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: leaf[:, :watched], tree)

        if whole is None:
            jacobians, entries = _between(units, few, forward.residuals, forward.reset, sent)
            signals = sparse_influence.at_units(units.by_set, sent)
            e, moves, es, cs = _recursions(signals, jacobians, watched)
            left = [times(v, entry, 2) for v, entry in zip(_at_rows(units, es), entries, strict=True)]
            grads = sum_outer(Outer(_whole(units, left, axis=2), forward.features))
            entries = first(entries)
        else:
            plain = forward._replace(maps=whole, residuals=forward.residuals[0])
            back = go_back(plain, params.cell, signal=sent)
            jacobians, entries = _between(units, few, *first((forward.residuals[1], forward.reset, sent)))
            e, grads = sparse_influence.at_units(units.by_set, back.dl_dstart), back.inside
            _, moves, _, cs = _recursions([], jacobians, watched)
        older = older_credit(contract, state, _at_rows(units, e), forward)
        grads, memory = with_older(grads, older, state, forward)
        right = [times(c, entry[:, :, None], 3) for c, entry in zip(_at_rows(units, cs), entries, strict=True)]
        over = episode_over(first(forward.reset))  # there C is zero, but its factor may be NaN
        left, features = cleared(over, (right, jax.tree.leaves(first(forward.features))))
        parts = zip(units.ranges, _at_rows(units, moves), memory, left, strict=True)
        begun = forward.begun(watched)
        memory = [advanced(moves, m, v, features[block.matrix], begun) for block, moves, m, v in parts]
        return finish(model, params, forward, grads, memory)

    return init, run


def _both(whole: StepVjp, few: StepVjp) -> Callable:
    """A step, with what both linear maps need of it."""

    def one(state: Array, x: PyTree) -> tuple[Array, tuple, PyTree]:
        new, kept, features = whole.forward(state, x)
        return new, (kept, few.forward(state, x)[1]), features

    return one


def _between(
    units: RowUnits, maps: StepVjp, kept: PyTree, reset: Bool[Array, "K B"] | None, sent: Float[Array, "K B S"]
) -> tuple[list[Array], list[Array]]:
    """For all steps at once D_t between the units of each set, `[K, B, p, p, U]`, and I_t, `[K, B, p, rows]`."""
    vectors = sparse_influence.colour_vectors(units.by_row, sent.dtype)
    steps, streams = sent.shape[:2]
    pull = jax.vmap(maps.pull, in_axes=(None, 0))
    for size in (streams, steps):  # said, since a linear step has no residuals to tell them
        pull = jax.vmap(pull, in_axes=(0, None), axis_size=size)
    back, here = pull(kept, vectors)  # [K, B, R, S] and [K, B, R, rows]
    if reset is not None:
        back = jnp.where(reset[:, :, None, None], 0, back)
    jacobians = sparse_influence.among_own(units.by_set, back.reshape(-1, *back.shape[2:]))
    rows = jax.tree.leaves(here)
    entries = sparse_influence.pick(
        units.by_row, [rows[block.matrix][..., block.begin : block.end] for block in units.ranges]
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


def _at_rows(units: RowUnits, tables: list[Float[Array, "... _U"]]) -> list[Float[Array, "... _rows"]]:
    """What each set of units has, for the rows of every block."""
    return [static_gather(tables[block.table], block.sets, tables[block.table].ndim - 1) for block in units.ranges]


def _whole(units: RowUnits, parts: list[Array], axis: int) -> PyTree:
    """Arrays over the rows of every block, joined along an axis; in the structure of the parameters."""
    structure = jax.tree.structure(units.weights)
    matrices: list[list[Array]] = [[] for _ in range(structure.num_leaves)]
    for block, part in zip(units.ranges, parts, strict=True):
        matrices[block.matrix].append(part)
    return jax.tree.unflatten(structure, [_joined(part, axis) for part in matrices])


def _joined(parts: list[Array], axis: int) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)
