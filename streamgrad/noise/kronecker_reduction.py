"""A sum of many Kronecker products as a sum of few, without bias and with as little noise as signs allow.

    X = Σ_i l_i ⊗ r_i  ≈  Σ_q l'_q ⊗ r'_q,    q < rank

In orthogonal bases of both sides X = Σ_i σ_i x_i ⊗ y_i. The largest σ are kept exactly. The others are laid end to end
on a line, which is cut into pieces of the same length w, one for each remaining term; a piece's term is

    l' ⊗ r' = (Σ_i s_i √z_i x_i) ⊗ (Σ_i s_i √z_i y_i)

with random signs s and the length z_i of σ_i inside the piece. Its mean is Σ_i z_i x_i ⊗ y_i, and the squared error of
all pieces is (Σσ)² / n - Σ z², for n pieces: the least possible but for those σ that a cut goes through.

The left factors may be large, [S, N] each, and l'_q = Σ_i t_qi l_i needs a small matrix t alone. It is found from a
sketch, the projection of the factors on a few directions, so that the factors are read twice in all: for the sketch and
for l'. The mean does not depend on the sketch, and the squared error is a few percent above that without one, less for
large S.
"""

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float

# Matrices up to this size are decomposed in one kernel for all streams on a GPU, and fast on a CPU.
SMALL = 32

# The least width of a sketch: the squared error is then 1 to 4 percent above that without one.
WIDTH = 64


def signs_needed(terms: int, rank: int) -> int:
    """The number of signs that `reduce` takes to add `terms` terms to `rank` old ones."""
    return sum(batches * size * left for batches, size, left in _plan(terms, rank))


def sketch_width(rank: int) -> int:
    """The number of directions of a sketch: twice the number of terms that are decomposed at once."""
    return max(WIDTH, 2 * max(SMALL, 2 * rank))


def _plan(terms: int, rank: int) -> list[tuple[int, int, int]]:
    """Rounds of (batches, terms of a batch, terms left of it); the last round includes the old terms.

    Decomposing a matrix of m terms takes m³: many terms are first reduced in small batches, in parallel, to as many as
    fit into the last round.
    """
    small, rounds = max(SMALL, 2 * rank), []
    while terms + rank > small:
        batches = -(-terms // small)
        size = -(-terms // batches)
        left = min(max(rank, (small - rank) // batches), size)
        if left == size:  # nothing to gain
            break
        rounds.append((batches, size, left))
        terms = batches * left
    return [*rounds, (1, terms + rank, rank)]


def reduce(
    old: tuple[Float[Array, "rank ..."], Float[Array, "rank A"]],
    new: tuple[Float[Array, "K ..."], Float[Array, "K A"]],
    signs: Float[Array, " n"],
) -> tuple[Float[Array, "rank ..."], Float[Array, "rank A"]]:
    """Add K new terms to a sum of Kronecker products, and reduce all of them to the old number.

    Args:
      old: left and right factors of the old terms; the left ones of any shape.
      new: of the new terms.
      signs: random, `signs_needed(K, rank)` of them.

    Returns:
      Left and right factors. The mean over the signs is the sum of all terms, to rounding, whatever the rounding of
      the decomposition and whatever the sketch.

    Example:
      >>> import jax.numpy as jnp
      >>> one = jnp.eye(2)
      >>> left, right = reduce((0 * one, 0 * one), (one, one), jnp.ones(8))
      >>> (left.T @ right).round(3).tolist()  # of rank two, and so exact
      [[1.0, 0.0], [0.0, 1.0]]
    """
    rank, count = len(old[0]), len(new[0])
    *rounds, (_, size, _) = _plan(count, rank)
    with jax.default_matmul_precision("highest"):
        short = [sketch(x, rank).reshape(len(x), -1) for x in (old[0], new[0])]
        # All rounds are made on the sketch; `by` has the coefficients of a round's terms in the new ones.
        left, right, by = short[1], new[1], jnp.eye(count, dtype=short[1].dtype)
        for batches, length, remaining in rounds:
            now, signs = jnp.split(signs, [batches * length * remaining])
            left, right, by = (_batched(x, batches, length) for x in (left, right, by))
            mix, right = jax.vmap(_reduce_once)(left, right, now.reshape(batches, remaining, length))
            left, by = ((mix @ x).reshape(batches * remaining, -1) for x in (left, by))
            right = right.reshape(batches * remaining, -1)
        left, right = jnp.concatenate([short[0], left]), jnp.concatenate([old[1], right])
        mix, right = _reduce_once(left, right, signs.reshape(rank, size))
        mixed = jnp.tensordot(mix[:, :rank], old[0], 1) + jnp.tensordot(mix[:, rank:] @ by, new[0], 1)
        return mixed, right


def _batched(terms: Float[Array, "m n"], batches: int, length: int) -> Float[Array, "batches length n"]:
    """Terms in batches of one length, the last one filled up with zeros."""
    return jnp.pad(terms, ((0, batches * length - len(terms)), (0, 0))).reshape(batches, length, -1)


def sketch(left: Float[Array, "m ..."], rank: int) -> Float[Array, "m ..."]:
    """Left factors with their last axis, where it is long, projected on a few fixed random directions.

    A projection on p directions preserves all lengths in a space of up to p / 2 dimensions within a factor of about
    three, and none is lost, however special the factors; that of a matrix is closer, since each of its rows has
    another error. The decomposition then works on small arrays, and reads the large ones once.
    """
    size, width = left.shape[-1], sketch_width(rank)
    if size > width:
        # Orthogonal directions: the nearer `width` is to `size`, the less is lost.
        basis = np.linalg.qr(np.random.default_rng(0).normal(size=(size, width)))[0] * (size / width) ** 0.5
        left = jnp.matmul(left, jnp.asarray(basis, left.dtype), precision="highest")
    return left


def _reduce_once(
    left: Float[Array, "m n"], right: Float[Array, "m A"], signs: Float[Array, "rank m"]
) -> tuple[Float[Array, "rank m"], Float[Array, "rank A"]]:
    """`reduce` by a single decomposition: the matrix t for the left factors, and the right factors.

    With R R^T = C C^T and the eigenvectors V of C^T (L L^T) C, the rows of V^T C^T L are orthogonal and as long as the
    singular values, and those of V^T C^{-1} R are orthonormal. X = L^T (C V) (C V)^{-1} R holds for any invertible C
    and orthogonal V, and a term may be split between pieces in any proportions: neither the ridge under C, nor the
    rounding of V, nor lengths that are a sketch's bias anything.
    """
    rank, terms = signs.shape
    eps = jnp.finfo(left.dtype).eps
    # A term's length is moved from its right factor to its left one, and the largest is made one: squares stay inside
    # float32, and no term is lost under the ridge because its factors are unequal.
    (left, on_left), (right, on_right) = _unit(left), _unit(right)
    root = jnp.sqrt(on_left) * jnp.sqrt(on_right)
    top = _or_one(jnp.max(root))
    share = jax.lax.optimization_barrier(root / top)
    left = left * (share**2)[:, None]
    c = jnp.linalg.cholesky(right @ right.T + 10 * terms * eps * jnp.eye(terms, dtype=right.dtype))
    inner = c.T @ (left @ left.T) @ c
    vectors = _one_sign(jnp.linalg.eigh((inner + inner.T) / 2)[1][:, ::-1])
    turn = vectors.T @ c.T
    # Lengths tell σ better than the roots of the eigenvalues, which say nothing below √eps of the largest.
    sigma = jnp.sqrt(jnp.sum((turn @ left) ** 2, axis=1))
    sigma = jnp.where(sigma > 10 * terms**0.5 * eps * jnp.max(sigma), sigma, 0)  # the rest is rounding
    shares = pieces(sigma, rank)
    mix = signs * jnp.sqrt(shares / _or_one(jnp.sum(shares, axis=0))[None])
    balance = jnp.sqrt(_or_one(sigma))[None]
    # At the end, and for few columns: beside another decomposition LAPACK's threads have been seen to wait.
    back = jax.scipy.linalg.solve_triangular(c, ((mix * balance) @ vectors.T).T, lower=True, trans=1).T
    weights = jnp.sqrt(on_right) / jnp.sqrt(_or_one(on_left)) * share
    return ((mix / balance) @ turn) * weights[None], top * (back @ right)


def _unit(rows: Float[Array, "m n"]) -> tuple[Float[Array, "m n"], Float[Array, " m"]]:
    """Rows of length one and their lengths, without squares of tiny or huge numbers."""
    largest = _or_one(jnp.max(jnp.abs(rows), axis=1))
    # Behind the barrier: the compiler may take constants out of the squares, which then overflow.
    rows = jax.lax.optimization_barrier(rows / largest[:, None])
    length = jnp.sqrt(jnp.sum(rows**2, axis=1))
    return rows / _or_one(length)[:, None], largest * length


def _or_one(size: Array) -> Array:
    """A divisor: one in place of zero, and of numbers without a finite inverse."""
    return jnp.where(size >= jnp.finfo(size.dtype).tiny, size, 1)


def _one_sign(vectors: Float[Array, "m m"]) -> Float[Array, "m m"]:
    """Eigenvectors with their largest entry positive: their sign must not be chance."""
    largest = jnp.take_along_axis(vectors, jnp.argmax(jnp.abs(vectors), axis=0)[None], axis=0)
    return vectors * jnp.where(largest < 0, -1, 1)


def pieces(sigma: Float[Array, " m"], rank: int) -> Float[Array, "rank m"]:
    """The length of each σ inside each piece of the line: the largest have a piece of their own.

    σ_i has one if it is at least as long as the pieces that the others would be cut into.

    Example:
      >>> import jax.numpy as jnp
      >>> pieces(jnp.array([5.0, 1.0, 1.0, 1.0]), 3).tolist()
      [[5.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.5, 0.0], [0.0, 0.0, 0.5, 1.0]]
    """
    ends = jnp.cumsum(sigma)
    begins = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    rest = jnp.cumsum(sigma[::-1])[::-1]  # of σ_i and all after it
    left = (rank - jnp.arange(rank)).astype(sigma.dtype)
    own = jnp.cumprod(sigma[:rank] * left >= rest[:rank])  # each only if all before it have one
    own = jnp.minimum(jnp.sum(own), rank - 1)
    q = jnp.arange(rank)
    width = rest[own] / (rank - own).astype(sigma.dtype)
    starts = jnp.where(q <= own, begins[q], begins[own] + (q - own).astype(sigma.dtype) * width)
    stops = jnp.concatenate([starts[1:], jnp.full((1,), jnp.inf, starts.dtype)])
    return jnp.maximum(jnp.minimum(ends[None, :], stops[:, None]) - jnp.maximum(begins[None, :], starts[:, None]), 0)
