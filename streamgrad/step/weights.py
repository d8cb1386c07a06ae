"""How parameter leaves, rows of weights and features correspond. No other file looks at the shape of a leaf.

A leaf is a weight matrix W `[rows, A]`. Its rows make preactivations z = W a, and the rows of all matrices, one after
the other in the order of the leaves, are the N entries of the ravelled z. A gradient of the weights is a sum of outer
products of a vector over rows and one over features. A reverse pass gives them as these two factors, to be summed at
once.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float, PyTree
from streamgrad.step.platform import by_platform


class Outer(NamedTuple):
    """Outer products left right^T, one for each weight matrix; in the structure of the parameters.

    Attributes:
      left: a vector over the rows of each matrix.
      right: a vector over its columns, the features.
    """

    left: PyTree
    right: PyTree


def rows_of(params: PyTree) -> tuple[int, ...]:
    """The number of rows of each weight matrix."""
    return tuple(leaf.shape[0] for leaf in jax.tree.leaves(params))


def by_matrix(rows: Any, counts: Sequence[int]) -> list[Any]:
    """Split an array along its last axis, over all preactivations, into a part for each weight matrix.

    Example:
      >>> [part.tolist() for part in by_matrix(np.arange(5), (2, 3))]
      [[0, 1], [2, 3, 4]]
    """
    split = np.split if isinstance(rows, np.ndarray) else jnp.split
    return split(rows, np.cumsum(counts)[:-1], axis=-1)


def like_params(params: PyTree, rows: Float[Array, "*any N"]) -> PyTree:
    """An array over all preactivations, in the structure of the parameters."""
    return jax.tree.unflatten(jax.tree.structure(params), by_matrix(rows, rows_of(params)))


def zero_rows(params: PyTree, length: int) -> PyTree:
    """Zeros over time and rows, `[length, rows]` for each weight matrix."""
    return jax.tree.map(lambda w: jnp.zeros((length, w.shape[0]), w.dtype), params)


def zero_features(params: PyTree) -> PyTree:
    """Zeros over the features of each weight matrix."""
    return jax.tree.map(lambda w: jnp.zeros_like(w[0]), params)


def outer(left: PyTree, right: PyTree) -> PyTree:
    """left right^T for each weight matrix, with any leading axes of `left`.

    Written out, for the compiler to add it on the fly: a product of matrices would be made first.
    """

    def one(left: Float[Array, "*any rows"], right: Float[Array, " A"]) -> Float[Array, "*any rows A"]:
        return left[..., None] * right.reshape((1,) * left.ndim + right.shape)

    return jax.tree.map(one, left, right)


def sum_outer(factors: Outer) -> PyTree:
    """Σ left right^T over streams and time, the two leading axes, as one matrix product for each matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> sum_outer(Outer({"w": jnp.ones((2, 5, 3))}, {"w": jnp.ones((2, 5, 4))}))["w"].tolist()[0]
      [10.0, 10.0, 10.0, 10.0]
    """
    return jax.tree.map(lambda left, right: jnp.einsum("btn,bta->na", left, right), factors.left, factors.right)


def zero_terms(params: PyTree, rank: int, state_size: int) -> tuple[PyTree, PyTree]:
    """Zeros for sums of `rank` Kronecker products, of each weight matrix: `[rank, S, rows]` and `[rank, A]`.

    A matrix with fewer features has one term for each of them, and every sum is exact.
    """
    left = jax.tree.map(lambda w: jnp.zeros((min(rank, w.shape[1]), state_size, w.shape[0]), w.dtype), params)
    return left, jax.tree.map(lambda w: jnp.zeros((min(rank, w.shape[1]), w.shape[1]), w.dtype), params)


def add_outer(weights: PyTree, left: list[Array], features: list[Array]) -> PyTree:
    """W + Σ_t left_t features_t^T, for each weight matrix; `[T, rows]` and `[T, A]`."""
    leaves, structure = jax.tree.flatten(weights)
    added = [jnp.einsum("tn,ta->na", v, a) for v, a in zip(left, features, strict=True)]
    return jax.tree.unflatten(structure, [a + w for a, w in zip(added, leaves, strict=True)])


def scale_rows(weights: PyTree, by: Float[Array, " N"]) -> PyTree:
    """Multiply each row of the weights by its own number."""
    leaves, structure = jax.tree.flatten(weights)
    scaled = [row[:, None] * leaf for row, leaf in zip(by_matrix(by, rows_of(weights)), leaves, strict=True)]
    return jax.tree.unflatten(structure, scaled)


def row_squares(weights: PyTree) -> Float[Array, " N"]:
    """The squared norm of each row of the weights."""
    return jnp.concatenate([jnp.sum(leaf**2, axis=1) for leaf in jax.tree.leaves(weights)])


def sum_row_groups(weights: PyTree, by: list[Array]) -> PyTree:
    """Σ over streams of weights `[B, rows, A]`, each group of rows times its own number.

    The numbers `by` are `[B, g]` for each matrix, whose g groups have the same number of rows.
    """
    leaves, structure = jax.tree.flatten(weights)
    sums = []
    for leaf, numbers in zip(leaves, by, strict=True):
        groups = leaf.reshape(*numbers.shape, -1)  # one number times one long vector
        sums.append(jnp.einsum("bg,bgr->gr", numbers, groups).reshape(leaf.shape[1:]))
    return jax.tree.unflatten(structure, sums)


def project_row_groups(left: list[Array], weights: PyTree) -> list[Array]:
    """left^T W for every group of rows, for each weight matrix: `[g, T, n]` to `[g, T, A]`."""
    return [
        v @ w.reshape(v.shape[0], v.shape[2], w.shape[1]) for v, w in zip(left, jax.tree.leaves(weights), strict=True)
    ]


def steps_at_once(params: PyTree, vectors: int, length: int) -> int:
    """The number of steps after which a reverse pass of a chunk multiplies its factors out.

    A step leaves one number for each vector and preactivation; M has one for each vector and weight. The factors of a
    whole chunk are stored if they are no larger than M; else M's increment itself is, and factors of a quarter of M.
    """
    weights, rows = sum(leaf.size for leaf in jax.tree.leaves(params)), sum(rows_of(params))
    if length * rows <= weights or length * rows * vectors <= LARGE:
        return length
    return max(weights // (4 * rows), 1)


# The number of entries below which a sum of matrices is made at once: a loop over parts of it would only cost time.
LARGE = 1 << 16


def add_pulled(matrices: PyTree, pulled: PyTree) -> PyTree:
    """M plus the parameters' cotangents of a reverse pass, for b streams and S vectors each.

    Args:
      matrices: leaves `[b, S, *shape]`.
      pulled: the same; or factors, `left[K, b, S, rows]` and `right[K, b, A]` of each weight matrix, whose product over
        the K steps is added. To a large M it is added a few rows at a time, and never stored as a whole.
    """
    if not isinstance(pulled, Outer):
        return jax.tree.map(jnp.add, matrices, pulled)

    def at_once(matrix: Array, left: Float[Array, "K b S rows"], right: Float[Array, "K b A"]) -> Array:
        return matrix + jnp.einsum("kbsn,kba->bsna", left, right)

    def in_parts(matrix: Array, left: Array, right: Array) -> Array:
        size = matrix.shape[1]
        length = size // max(n for n in range(1, 17) if size % n == 0)

        def one(i: Array, matrix: Array) -> Array:
            at = i * length
            rows = jax.lax.dynamic_slice_in_dim(matrix, at, length, axis=1)
            rows = at_once(rows, jax.lax.dynamic_slice_in_dim(left, at, length, axis=2), right)
            return jax.lax.dynamic_update_slice_in_dim(matrix, rows, at, axis=1)

        return jax.lax.fori_loop(0, size // length, one, matrix)

    def add(matrix: Array, left: Array, right: Array) -> Array:
        if matrix.size <= LARGE:
            return at_once(matrix, left, right)
        # A GPU's product of matrices adds to M in place; a CPU's is made first, and added afterwards.
        return by_platform(in_parts, at_once, matrix, left, right)

    return jax.tree.map(add, matrices, pulled.left, pulled.right)


def scale_pulled(pulled: PyTree, by: Float[Array, "b R"]) -> PyTree:
    """The parameters' cotangents of a reverse pass with R vectors, each times a number of its own."""
    if not isinstance(pulled, Outer):
        return scale_each(pulled, by)
    return pulled._replace(left=jax.tree.map(lambda left: by[None, :, :, None] * left, pulled.left))


def square_norms_pulled(pulled: PyTree) -> Float[Array, "b R"]:
    """The squared norms of the parameters' cotangents, for each of b streams and R vectors.

    For factors it is Σ_{k,l} (left_k · left_l) (right_k · right_l), without an array as large as the weights.
    """
    if not isinstance(pulled, Outer):
        return square_norms_each(pulled)

    def one(left: Float[Array, "K b R rows"], right: Float[Array, "K b A"]) -> Float[Array, "b R"]:
        lefts, rights = jnp.einsum("kbrn,lbrn->brkl", left, left), jnp.einsum("kba,lba->bkl", right, right)
        return jnp.maximum(jnp.einsum("brkl,bkl->br", lefts, rights), 0)

    return functools.reduce(jnp.add, map(one, jax.tree.leaves(pulled.left), jax.tree.leaves(pulled.right)))


def zero_each(params: PyTree, *counts: int) -> PyTree:
    """Zeros of the shapes `[*counts, *shape]`, for parameters with leaves `[*shape]`."""
    return jax.tree.map(lambda leaf: jnp.zeros((*counts, *leaf.shape), leaf.dtype), params)


def scale_each(weights: PyTree, by: Float[Array, "b R"]) -> PyTree:
    """Leaves `[b, R, *shape]`, each of the b R trees multiplied by its own number."""
    return jax.tree.map(lambda leaf: by.reshape(*by.shape, *(1,) * (leaf.ndim - 2)) * leaf, weights)


def square_norms_each(weights: PyTree) -> Float[Array, "b R"]:
    """The squared norm of each of b R trees with leaves `[b, R, *shape]`."""
    squares = [jnp.sum(leaf.reshape(*leaf.shape[:2], -1) ** 2, axis=2) for leaf in jax.tree.leaves(weights)]
    return functools.reduce(jnp.add, squares)


def sum_scaled(weights: PyTree, by: Float[Array, "b R"]) -> PyTree:
    """The sum of b R trees with leaves `[b, R, *shape]`, each multiplied by its own number."""
    return jax.tree.map(lambda leaf: jnp.tensordot(by, leaf, axes=2), weights)
