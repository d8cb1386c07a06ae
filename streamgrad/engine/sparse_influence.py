"""An influence M = dh/dθ that is kept where it can be non-zero (`streamgrad.step.influence_sparsity`).

For each weight matrix it is an array `[p, rows, A]`: for each of its p places and each row of weights the derivative of
one unit. Places of a row's own come first, then those that all rows share.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float, PyTree
from streamgrad.engine.row_arrays import MOST_SUMMANDS
from streamgrad.step.influence_sparsity import InfluencePattern, LeafPattern
from streamgrad.step.platform import by_platform
from streamgrad.step.static_gather import static_gather


def _each(pattern: InfluencePattern, function: Callable[..., Array], *trees: PyTree) -> PyTree:
    """A function of each weight matrix's pattern and of the leaves of trees like the parameters."""
    structure = jax.tree.structure(trees[0])
    columns = zip(*map(jax.tree.leaves, trees), strict=True)
    return jax.tree.unflatten(structure, [function(leaf, *c) for leaf, c in zip(pattern.leaves, columns, strict=True)])


def zeros(pattern: InfluencePattern, params: PyTree) -> PyTree:
    """An influence of nothing."""
    return _each(pattern, lambda leaf, w: jnp.zeros((len(leaf.reached), *w.shape), w.dtype), params)


def colour_vectors(pattern: InfluencePattern, dtype: Any) -> Float[Array, "R S"]:
    """For each colour the vector of its units: what the reverse pass takes along."""
    return jnp.asarray(np.arange(pattern.vectors)[:, None] == pattern.colours, dtype)


def pick(pattern: InfluencePattern, asked: PyTree) -> PyTree:
    """Of dh_K/dz_s, summed over the units of each colour, what each row reaches: `[K, b, R, rows]` to p places."""

    def one(leaf: LeafPattern, left: Float[Array, "K b R rows"]) -> Float[Array, "K b p rows"]:
        shared = static_gather(left, pattern.colours[leaf.shared], axis=2)
        found = (
            jnp.concatenate([_take_each(left, _colours(pattern, leaf)), shared], axis=2) if leaf.own.size else shared
        )
        return _masked(found, leaf.reached)

    return _each(pattern, one, asked)


def move(pattern: InfluencePattern, back: Float[Array, "b R S"], memory: PyTree) -> PyTree:
    """Φ M, from Φ summed over the units of each colour.

    M'[j, n] = Σ_i Φ[j, i] M[i, n]    over the units i that row n reaches
    """

    def one(leaf: LeafPattern, m: Float[Array, "b p rows A"]) -> Float[Array, "b p rows A"]:
        width = len(leaf.own)
        own, shared = m[:, :width], m[:, width:]
        found, of_own = [], back
        if width:
            of_own = static_gather(back, leaf.own, axis=2)  # from a row's own units: to all colours, [b, R, w, rows]
            moved = _row_by_row(_between_own(pattern, leaf, of_own), own)
            pairs = _pairs(pattern, leaf.own[:, :, None], leaf.shared[None, None])
            if pairs.any():  # of truncated patterns alone: else shared units feed only shared units
                of_shared = jnp.take(static_gather(back, leaf.shared, axis=2), _colours(pattern, leaf), axis=1)
                moved += jnp.einsum("bpnt,btna->bpna", _masked(of_shared, pairs), shared)
            found.append(moved)
        if len(leaf.shared):
            colours = pattern.colours[leaf.shared]
            pairs = pattern.moves[np.ix_(leaf.shared, leaf.shared)]
            among = _masked(static_gather(static_gather(back, colours, axis=1), leaf.shared, axis=2), pairs)
            moved = jnp.einsum("bst,btna->bsna", among, shared)
            if width:
                pairs = _pairs(pattern, leaf.shared[:, None, None], leaf.own[None])
                moved += jnp.einsum("bsqn,bqna->bsna", _masked(static_gather(of_own, colours, axis=1), pairs), own)
            found.append(moved)
        return found[0] if len(found) == 1 else jnp.concatenate(found, axis=1) if found else m

    return _each(pattern, one, memory)


def truncated(pattern: InfluencePattern, memory: PyTree) -> PyTree:
    """An influence without the entries that a row does not reach; leaves `[p, rows, A]`."""
    return _each(pattern, lambda leaf, m: _masked(m, leaf.reached[:, :, None]), memory)


def _row_by_row(
    jacobians: Float[Array, "b p q rows"], memory: Float[Array, "b q rows A"]
) -> Float[Array, "b p rows A"]:
    """Σ_q D[p, q, n] M[q, n] for each row n; of few units as sums, for which no matrix product is worth its while."""
    if not 0 < memory.shape[1] <= MOST_SUMMANDS:
        return jnp.einsum("bpqn,bqna->bpna", jacobians, memory)
    terms = [jacobians[:, :, q, :, None] * memory[:, None, q] for q in range(memory.shape[1])]
    return functools.reduce(jnp.add, terms)


def _sum_rows(by: Float[Array, "b p rows"], memory: Float[Array, "b p rows A"]) -> Float[Array, "rows A"]:
    """Σ over streams and units of M, each row of it times a number of its own."""
    # A GPU reads M once for a sum, and for a product of matrices copies it first.
    return by_platform(
        lambda by, memory: jnp.einsum("bpn,bpna->na", by, memory),
        lambda by, memory: jnp.sum(by[..., None] * memory, axis=(0, 1)),
        by,
        memory,
    )


def among_own(pattern: InfluencePattern, back: Float[Array, "b R S"]) -> list[Array]:
    """Φ between the own units of each row, or of each set of units, `[b, p, q, rows]` for each leaf."""
    return [_between_own(pattern, leaf, static_gather(back, leaf.own, axis=2)) for leaf in pattern.leaves]


def at_units(pattern: InfluencePattern, vectors: Float[Array, "*any S"]) -> list[Array]:
    """The entries of vectors at the own units, `[*any, p, rows]` for each leaf; zero where a row has fewer."""
    return [_masked(static_gather(vectors, leaf.own, axis=vectors.ndim - 1), leaf.reached) for leaf in pattern.leaves]


def contract(pattern: InfluencePattern, dl_dstate: Float[Array, "b S"], memory: PyTree) -> PyTree:
    """Σ over streams of (dL/dh) M."""

    def one(leaf: LeafPattern, m: Float[Array, "b p rows A"]) -> Float[Array, "rows A"]:
        width = len(leaf.own)
        total = jnp.zeros(m.shape[2:], m.dtype)
        if len(leaf.shared):
            total += jnp.tensordot(static_gather(dl_dstate, leaf.shared, axis=1), m[:, width:], axes=2)
        if width:
            total += _sum_rows(static_gather(dl_dstate, leaf.own, axis=1), m[:, :width])
        return total

    return _each(pattern, one, memory)


def _between_own(
    pattern: InfluencePattern, leaf: LeafPattern, of_own: Float[Array, "b R w rows"]
) -> Float[Array, "b p q rows"]:
    among = _take_each(of_own, _colours(pattern, leaf)[:, None], axis=1)
    return _masked(among, _pairs(pattern, leaf.own[:, None], leaf.own[None]))


def _colours(pattern: InfluencePattern, leaf: LeafPattern) -> np.ndarray:
    """The colours of every row's own units; 0 where there is none."""
    return np.append(pattern.colours, 0)[leaf.own]


def _pairs(pattern: InfluencePattern, to: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Whether one unit can depend on another; never where there is none."""
    moves = np.pad(pattern.moves, ((0, 1), (0, 1)))
    return moves[to, of]


def _take_each(array: Array, index: np.ndarray, axis: int = 2) -> Array:
    """Entries along an axis, by numbers that may differ from row to row; rows are the last axis of both."""
    if np.all(index == index[..., :1]):
        return static_gather(array, index[..., 0].ravel(), axis)
    shape = (*(1,) * axis, *index.shape)
    return jnp.take_along_axis(array, index.reshape(shape), axis=axis)


def _masked(array: Array, allowed: np.ndarray) -> Array:
    """Zero where nothing can be."""
    if allowed.all():
        return array
    return jnp.where(allowed.reshape((1,) * (array.ndim - allowed.ndim) + allowed.shape), array, 0)
