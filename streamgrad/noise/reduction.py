"""A sum of many Kronecker products as a sum of few, without bias and with as little noise as signs allow.

    X = Σ_i l_i ⊗ r_i  ≈  Σ_q l'_q ⊗ r'_q,    q < rank

In orthogonal bases of both sides X = Σ_i σ_i x_i ⊗ y_i. The largest σ are kept exactly. The rest is laid end to end on
a line, which is cut into pieces of the same length w, one for each term that is left; a piece's term is

    l' ⊗ r' = (Σ_i s_i √z_i x_i) ⊗ (Σ_i s_i √z_i y_i)

with random signs s and the length z_i of σ_i inside the piece. Its mean is Σ_i z_i x_i ⊗ y_i, and the squared error of
all pieces is (Σσ)² / n - Σ z², for n pieces: the least possible but for those σ that a cut goes through.
"""

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float

# Matrices up to this size are decomposed in one kernel for all streams on a GPU, and fast on a CPU.
SMALL = 32


def signs_needed(terms: int, rank: int) -> int:
    """How many signs `reduce` takes for so many terms, and the terms before them."""
    return sum(blocks * size * kept for blocks, size, kept in _plan(terms, rank))


def _plan(terms: int, rank: int) -> list[tuple[int, int, int]]:
    """Rounds of (blocks, terms in a block, terms kept of it); the last takes what was there before as well.

    Decomposing a matrix of m terms takes m³: many terms are first reduced in small blocks, in parallel, to as many as
    fit into the last round.
    """
    small, rounds = max(SMALL, 2 * rank), []
    while terms + rank > small:
        blocks = -(-terms // small)
        size = -(-terms // blocks)
        kept = min(max(rank, (small - rank) // blocks), size)
        if kept == size:  # nothing to gain
            break
        rounds.append((blocks, size, kept))
        terms = blocks * kept
    return [*rounds, (1, terms + rank, rank)]


def reduce(
    old: tuple[Float[Array, "rank L"], Float[Array, "rank A"]],
    new: tuple[Float[Array, "K L"], Float[Array, "K A"]],
    signs: Float[Array, " n"],
) -> tuple[Float[Array, "rank L"], Float[Array, "rank A"]]:
    """Add new terms to a sum of Kronecker products, and reduce all of them to as many as there were.

    Args:
      old: the left and the right factors of the terms that were there.
      new: of those that are added.
      signs: random, `signs_needed(K, rank)` of them.

    Returns:
      Left and right factors. The mean over the signs is the sum of all terms, to rounding, whatever the rounding of
      the decomposition.

    Example:
      >>> import jax.numpy as jnp
      >>> one = jnp.eye(2)
      >>> left, right = reduce((0 * one, 0 * one), (one, one), jnp.ones(8))
      >>> (left.T @ right).round(3).tolist()  # of rank two, and so exact
      [[1.0, 0.0], [0.0, 1.0]]
    """
    rank = len(old[0])
    left, right = new
    *rounds, (_, size, _) = _plan(len(left), rank)
    for blocks, length, kept in rounds:
        few, signs = jnp.split(signs, [blocks * length * kept])
        cut = [jnp.pad(x, ((0, blocks * length - len(x)), (0, 0))).reshape(blocks, length, -1) for x in (left, right)]
        found = jax.vmap(_reduce_once)(*cut, few.reshape(blocks, kept, length))
        left, right = (x.reshape(blocks * kept, -1) for x in found)
    left, right = jnp.concatenate([old[0], left]), jnp.concatenate([old[1], right])
    return _reduce_once(left, right, signs.reshape(rank, size))


def _reduce_once(
    left: Float[Array, "m L"], right: Float[Array, "m A"], signs: Float[Array, "rank m"]
) -> tuple[Float[Array, "rank L"], Float[Array, "rank A"]]:
    """`reduce` by a single decomposition.

    With R R^T = C C^T and the eigenvectors V of C^T (L L^T) C, the rows of V^T C^T L are orthogonal and as long as the
    singular values, and those of V^T C^{-1} R are orthonormal. X = L^T (C V) (C V)^{-1} R holds for any invertible C
    and orthogonal V, and a term may be split between pieces in any proportions: neither the ridge under C nor the
    rounding of V biases anything.
    """
    rank, terms = signs.shape
    scales = [jnp.max(jnp.abs(side)) for side in (left, right)]
    scales = [jnp.where(scale > 0, scale, 1) for scale in scales]
    left, right = left / scales[0], right / scales[1]  # the squares of what is tiny or huge stay inside float32
    eps = jnp.finfo(left.dtype).eps
    with jax.default_matmul_precision("highest"):
        gram = right @ right.T
        ridge = 10 * eps * jnp.trace(gram) + jnp.finfo(gram.dtype).tiny ** 0.5
        c = jnp.linalg.cholesky(gram + ridge * jnp.eye(terms, dtype=gram.dtype))
        inner = c.T @ (left @ left.T) @ c
        vectors = _one_sign(jnp.linalg.eigh((inner + inner.T) / 2)[1][:, ::-1])
        # Their lengths tell σ better than the roots of the eigenvalues, which say nothing below √eps of the largest.
        orthogonal = (vectors.T @ c.T) @ left
        sigma = jnp.sqrt(jnp.sum(orthogonal**2, axis=1))
        sigma = jnp.where(sigma > 10 * terms * eps * jnp.max(sigma), sigma, 0)  # the rest is rounding
        lengths = pieces(sigma, rank)
        alive = sigma > 0
        safe = jnp.where(alive, sigma, 1)[None]
        mix = signs * jnp.sqrt(lengths / jnp.where(alive, jnp.sum(lengths, axis=0), 1)[None])
        on_right = jax.scipy.linalg.solve_triangular(c, ((mix * jnp.sqrt(safe)) @ vectors.T).T, lower=True, trans=1).T
    balance = jnp.sqrt(scales[0]) * jnp.sqrt(scales[1])
    return balance * ((mix / jnp.sqrt(safe)) @ orthogonal), balance * (on_right @ right)


def _one_sign(vectors: Float[Array, "m m"]) -> Float[Array, "m m"]:
    """Eigenvectors with their largest entry positive: they have no sign of their own, and it must not be chance."""
    largest = jnp.take_along_axis(vectors, jnp.argmax(jnp.abs(vectors), axis=0)[None], axis=0)
    return vectors * jnp.where(largest < 0, -1, 1)


def pieces(sigma: Float[Array, " m"], rank: int) -> Float[Array, "rank m"]:
    """How much of each σ lies in each piece of the line: the largest have one of their own.

    σ_i is kept exactly as long as it is at least as long as the pieces that the rest would be cut into.

    Example:
      >>> import jax.numpy as jnp
      >>> pieces(jnp.array([5.0, 1.0, 1.0, 1.0]), 3).tolist()
      [[5.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.5, 0.0], [0.0, 0.0, 0.5, 1.0]]
    """
    ends = jnp.cumsum(sigma)
    begins = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    rest = jnp.cumsum(sigma[::-1])[::-1]  # of σ_i and all after it
    left = rank - jnp.arange(rank)
    own = jnp.cumprod(sigma[:rank] * left >= rest[:rank])  # each only if all before it have one
    own = jnp.minimum(jnp.sum(own), rank - 1)
    q = jnp.arange(rank)
    width = rest[own] / (rank - own)
    starts = jnp.where(q <= own, begins[q], begins[own] + (q - own) * width)
    stops = jnp.concatenate([starts[1:], jnp.full((1,), jnp.inf, starts.dtype)])
    return jnp.maximum(jnp.minimum(ends[None, :], stops[:, None]) - jnp.maximum(begins[None, :], starts[:, None]), 0)
