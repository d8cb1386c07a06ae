"""An influence at a few units of each row, in an array of its own for each place that a row's units have.

`M[p]` is `[b, rows, A]`. In one array `[b, p, rows, A]` a compiler could not see that D M may be written over M, since
every new entry needs old ones of other places: it would copy all of M at every update.
"""

import functools

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Bool, Float
from streamgrad.step.platform import by_platform
from streamgrad.trees import cleared

Places = tuple[Array, ...]

# Sums of at most this many terms are written out: a matrix product is not worth its while, and a sum is one kernel.
MOST_SUMMANDS = 8


def times(v: Array, by: Array, axis: int) -> Array:
    """Σ_p v_p by_p along an axis, counted from the front; the other axes may be of one, to be repeated."""
    count = v.shape[axis]
    if not 0 < count <= MOST_SUMMANDS:
        return jnp.sum(v * by, axis=axis)
    each = [jax.lax.index_in_dim(v, p, axis, False) * jax.lax.index_in_dim(by, p, axis, False) for p in range(count)]
    return functools.reduce(jnp.add, each)


def advanced(
    jacobians: Float[Array, "b p p rows"],
    memory: Places,
    left: Float[Array, "K b p rows"],
    right: Float[Array, "K b A"],
    reset: Bool[Array, " b"] | None = None,
) -> Places:
    """D M + Σ_t left_t right_t^T, row by row; without D M where an episode has begun."""
    if not memory:
        return memory
    moved = cleared(reset, _moved(jacobians, memory))

    def one_product(moved: list[Array], left: Array, right: Array) -> Places:
        product = jnp.einsum("kbpn,kba->bpna", left, right)
        return tuple(m + product[:, p] for p, m in enumerate(moved))

    def product_for_each(moved: list[Array], left: Array, right: Array) -> Places:
        return tuple(m + jnp.einsum("kbn,kba->bna", left[:, :, p], right) for p, m in enumerate(moved))

    return by_platform(product_for_each, one_product, moved, left, right)


def _moved(jacobians: Float[Array, "b p p rows"], memory: Places) -> list[Array]:
    if len(memory) > MOST_SUMMANDS:
        moved = jnp.einsum("bpqn,bqna->bpna", jacobians, jnp.stack(memory, axis=1))
        return [moved[:, p] for p in range(len(memory))]
    return [
        functools.reduce(jnp.add, [jacobians[:, p, q, :, None] * m for q, m in enumerate(memory)])
        for p in range(len(memory))
    ]


def summed(by: Float[Array, "b p rows"], memory: Places) -> Float[Array, "rows A"]:
    """Σ over streams and places of M, each row of it times a number of its own."""

    def as_products(by: Array, memory: Places) -> Array:
        return functools.reduce(jnp.add, [jnp.einsum("bn,bna->na", by[:, p], m) for p, m in enumerate(memory)])

    def as_sums(by: Array, memory: Places) -> Array:
        terms = [by[:, p, :, None] * m for p, m in enumerate(memory)]
        return jnp.sum(functools.reduce(jnp.add, terms), axis=0)

    return by_platform(as_products, as_sums, by, memory)  # for products of matrices a GPU copies M first
