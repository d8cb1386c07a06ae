"""Sums of Kronecker products reduced to fewer: the mean over the signs is the sum, and the spread is the theory's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from streamgrad.noise import kronecker_reduction
from streamgrad.noise.kronecker_reduction import pieces, reduce, signs_needed
from tests.tools import all_signs, few


def terms(count, width=5, features=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, width)), rng.normal(size=(count, features))


def products(old, new, signs):
    old, new = tuple(map(jnp.asarray, old)), tuple(map(jnp.asarray, new))
    many = jax.vmap(lambda signs: (lambda left, right: left.T @ right)(*reduce(old, new, signs)))
    return np.asarray(jax.jit(many)(jnp.asarray(signs)))


@pytest.mark.parametrize("rank, added", few([(1, 1), (1, 4), (2, 2), (3, 1)], (1, 4), (2, 2)))
def test_mean_and_spread(rank, added):
    """E‖X̂ - X‖² = Σ over pieces of (Σ z)² - Σ z², with the singular values by numpy."""
    old, new = terms(rank), terms(added, seed=1)
    whole = old[0].T @ old[1] + new[0].T @ new[1]
    found = products(old, new, all_signs(signs_needed(added, rank)))
    np.testing.assert_allclose(found.mean(axis=0), whole, atol=1e-12)
    sigma = np.zeros(rank + added)
    sigma[:4] = np.linalg.svd(whole)[1][: rank + added]
    z = np.asarray(pieces(jnp.asarray(sigma), rank))
    assert np.sum((found - whole) ** 2, axis=(1, 2)).mean() == pytest.approx(np.sum(z.sum(axis=1) ** 2 - (z**2).sum(1)))


def test_no_more_than_a_little_above_the_least_spread():
    """Benzing et al.: (Σ_{i>=k} σ_i)² / (r - k) - Σ_{i>=k} σ_i² is the least that r terms allow."""
    compiled = jax.jit(pieces, static_argnums=1)
    for seed in range(20):
        sigma = np.sort(np.random.default_rng(seed).gamma(0.5, size=12))[::-1]
        for rank in (1, 3, 8):
            z = np.asarray(compiled(jnp.asarray(sigma), rank))
            np.testing.assert_allclose(z.sum(axis=0), sigma, rtol=1e-8)
            spread = np.sum(z.sum(axis=1) ** 2) - np.sum(z**2)
            k = next((k for k in range(rank - 1) if sigma[k] * (rank - k) < sigma[k:].sum()), rank - 1)
            least = sigma[k:].sum() ** 2 / (rank - k) - np.sum(sigma[k:] ** 2)
            assert least * (1 - 1e-9) <= spread <= 1.5 * least


def test_many_terms_in_small_blocks(monkeypatch):
    """The same mean with several rounds; of rank one in all, so that there is nothing to mix, exactly."""
    monkeypatch.setattr(kronecker_reduction, "SMALL", 4)
    old, new = terms(1), terms(4, seed=1)
    whole = old[0].T @ old[1] + new[0].T @ new[1]
    assert len(kronecker_reduction._plan(4, 1)) > 1
    signs = all_signs(signs_needed(4, 1))
    np.testing.assert_allclose(products(old, new, signs).mean(axis=0), whole, atol=1e-12)
    alike = np.repeat(new[0][:1], 9, axis=0), np.repeat(new[1][:1], 9, axis=0)
    signs = np.ones((1, signs_needed(9, 1)))
    found = products((0 * old[0], 0 * old[1]), alike, signs)
    np.testing.assert_allclose(found[0], alike[0].T @ alike[1], rtol=1e-6)


@pytest.mark.parametrize("count", [1, 7, 24, 25, 64, 300])
@pytest.mark.parametrize("rank", [1, 8, 40])
def test_plans(count, rank):
    """Each round is small, and the last one holds what was there before as well."""
    *rounds, last = kronecker_reduction._plan(count, rank)
    left = count
    for blocks, size, kept in rounds:
        assert blocks * size >= left and kept < size <= max(kronecker_reduction.SMALL, 2 * rank)
        left = blocks * kept
    assert last == (1, left + rank, rank)


@pytest.mark.parametrize(
    "left, right",
    [(0.0, 1.0), (0.0, 0.0), (1e-20, 1e-15), (1e25, 1e-20), (1.0, 0.0), (1e-25, 1.0), (1e25, 1.0), (1e-25, 1e25)],
)
def test_float32_at_its_ends(left, right):
    """Zero, tiny and huge factors, and two terms that are one: finite, and the mean right to rounding."""
    scales = (np.float32(left), np.float32(right))
    old, new = ([x.astype(np.float32) * s for x, s in zip(terms(2, seed=i), scales, strict=True)] for i in range(2))
    new = [np.repeat(x[:1], 2, axis=0) for x in new]
    whole = old[0].T.astype(float) @ old[1] + new[0].T.astype(float) @ new[1]
    found = products(old, new, all_signs(signs_needed(2, 2)).astype(np.float32))
    assert found.dtype == np.float32 and np.all(np.isfinite(found))
    np.testing.assert_allclose(found.mean(axis=0), whole, atol=1e-5 * np.max(np.abs(whole)))


@pytest.mark.parametrize("scale", [1e-38, 1e-42])
def test_what_has_no_inverse_in_float32(scale):
    old, new = ([(x * scale).astype(np.float32) for x in terms(2, seed=i)] for i in range(2))
    assert np.all(np.isfinite(products(old, new, np.ones((1, signs_needed(2, 2)), np.float32))))


def test_float32_with_unequal_factors():
    """Terms of one size, with factors of 1e20 and 1e-20 and the other way round: none is lost."""
    (left, right), scales = terms(3), np.array([[1e20], [1.0], [1e-20]])
    left, right = (left * scales).astype(np.float32), (right / scales).astype(np.float32)
    old, new = (left[:2], right[:2]), (left[2:], right[2:])
    whole = left.T.astype(float) @ right
    found = products(old, new, all_signs(signs_needed(1, 2)).astype(np.float32))
    np.testing.assert_allclose(found.mean(axis=0), whole, atol=1e-5 * np.max(np.abs(whole)))


def large(case, count=72, shape=(4, 160), features=80):
    """Terms wide enough to be sketched."""
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(count, *shape)), rng.normal(size=(count, features))
    if case == "decaying":
        left *= 0.8 ** np.arange(count)[:, None, None]
    elif case == "ill-conditioned":  # both sides, down to 1e-4, in directions of their own
        for side, seed in ((left, 1), (right, 2)):
            basis = np.linalg.qr(np.random.default_rng(seed).normal(size=(count, count)))[0]
            side[:] = np.tensordot(basis * np.logspace(0, -4, count), side, 1)
    elif case == "repeated":  # features that are the same at all steps but a few
        right[5:] = right[:1]
    elif case == "rank 6":
        left[6:] = np.tensordot(rng.normal(size=(count - 6, 6)), left[:6], 1)
    else:
        assert case == "random"
    return [(left[:8], right[:8]), (left[8:], right[8:])]


def estimates(pair, signs, dtype):
    """left'^T right' for each row of signs, multiplied out in float64."""
    old, new = (tuple(jnp.asarray(x, dtype) for x in side) for side in pair)
    left, right = jax.jit(lambda signs: jax.lax.map(lambda s: reduce(old, new, s), signs))(jnp.asarray(signs, dtype))
    assert left.dtype == dtype and left.shape[1:] == old[0].shape
    return np.einsum("pqsn,pqa->psna", np.asarray(left, float), np.asarray(right, float))


def total(pair):
    return sum(np.einsum("qsn,qa->sna", *side) for side in pair)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("case", few(["random", "decaying", "ill-conditioned", "repeated"], "ill-conditioned"))
def test_mean_through_two_rounds(case, dtype, tolerance):
    """A piece is of second order in its signs: rows of a Hadamard matrix have the mean of all patterns, each round."""
    pair = large(case, shape=(2, 80), features=40)
    (blocks, length, kept), (_, size, rank) = kronecker_reduction._plan(64, 8)
    assert length == size == 32
    rows = scipy.linalg.hadamard(32)
    first, second = (np.tile(rows, times) for times in (blocks * kept, rank))
    both = [np.concatenate([a, b]) for a in first for b in second]
    whole = total(pair)
    found = estimates(pair, both, dtype).mean(axis=0)
    assert np.linalg.norm(found - whole) < tolerance * np.linalg.norm(whole)


@pytest.mark.parametrize("dtype", few(["float32", "float64"], "float32"))
@pytest.mark.parametrize("case", few(["random", "decaying", "ill-conditioned"], "ill-conditioned"))
def test_spread_with_a_sketch(case, dtype, monkeypatch):
    """A sketch of 64 columns out of 160 instead of the factors: the squared error is no more than 5% larger."""
    pair, whole = large(case), total(large(case))
    signs = np.random.default_rng(1).choice([-1.0, 1.0], size=(200, signs_needed(64, 8)))

    def spread():
        return np.mean(np.sum((estimates(pair, signs, dtype) - whole) ** 2, axis=(1, 2, 3)))

    sketched = spread()
    monkeypatch.setattr(kronecker_reduction, "WIDTH", 1000)
    assert sketched < 1.05 * spread()


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("case", few(["repeated", "rank 6"], "rank 6"))
def test_few_terms_are_exact(case, dtype, tolerance):
    """A sum of a rank that there is room for has nothing to mix, also where the decomposition is of a sketch."""
    pair = large(case)
    whole = total(pair)
    found = estimates(pair, np.random.default_rng(1).choice([-1.0, 1.0], size=(5, signs_needed(64, 8))), dtype)
    assert np.linalg.norm(found - whole[None]) < tolerance * np.linalg.norm(whole) * 5**0.5


def test_large_factors_are_read_twice():
    """For the sketch and for the result: nothing else of their size is made or read, nor for streams in the middle."""
    streams, count, shape = 3, 40, (24, 200)

    def run(old, new, signs):
        return jax.vmap(reduce, in_axes=(0, 1, 0))(old, new, signs)

    def zeros(*shape):
        return jnp.zeros(shape, jnp.float32)

    old = zeros(streams, 4, *shape), zeros(streams, 4, 7)
    new = zeros(count, streams, *shape), zeros(count, streams, 7)
    jaxpr = jax.make_jaxpr(run)(old, new, zeros(streams, signs_needed(count, 4)))
    readers = [eqn for eqn in jaxpr.eqns if any(getattr(v.aval, "size", 0) == new[0].size for v in eqn.invars)]
    assert [eqn.primitive.name for eqn in readers] == ["dot_general", "dot_general"]
    assert not [eqn for eqn in jaxpr.eqns if any(v.aval.size >= new[0].size for v in eqn.outvars)]
