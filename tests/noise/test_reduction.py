"""Sums of Kronecker products reduced to fewer: the mean over the signs is the sum, and the spread is the theory's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamgrad.noise import reduction
from streamgrad.noise.reduction import pieces, reduce, signs_needed
from tests.tools import all_signs


def terms(count, width=5, features=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, width)), rng.normal(size=(count, features))


def products(old, new, signs):
    old, new = tuple(map(jnp.asarray, old)), tuple(map(jnp.asarray, new))
    many = jax.vmap(lambda signs: (lambda left, right: left.T @ right)(*reduce(old, new, signs)))
    return np.asarray(jax.jit(many)(jnp.asarray(signs)))


@pytest.mark.parametrize("rank, added", [(1, 1), (1, 4), (2, 2), (3, 1)])
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
    monkeypatch.setattr(reduction, "SMALL", 4)
    old, new = terms(1), terms(4, seed=1)
    whole = old[0].T @ old[1] + new[0].T @ new[1]
    assert len(reduction._plan(4, 1)) > 1
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
    *rounds, last = reduction._plan(count, rank)
    left = count
    for blocks, size, kept in rounds:
        assert blocks * size >= left and kept < size <= max(reduction.SMALL, 2 * rank)
        left = blocks * kept
    assert last == (1, left + rank, rank)


@pytest.mark.parametrize("left, right", [(0.0, 1.0), (0.0, 0.0), (1e-20, 1e-15), (1e25, 1e-20), (1.0, 0.0)])
def test_float32_at_its_ends(left, right):
    """Zero, tiny and huge factors, and two terms that are one: finite, and the mean right to rounding."""
    scales = (np.float32(left), np.float32(right))
    old, new = ([x.astype(np.float32) * s for x, s in zip(terms(2, seed=i), scales, strict=True)] for i in range(2))
    new = [np.repeat(x[:1], 2, axis=0) for x in new]
    whole = old[0].T.astype(float) @ old[1] + new[0].T.astype(float) @ new[1]
    found = products(old, new, all_signs(signs_needed(2, 2)).astype(np.float32))
    assert found.dtype == np.float32 and np.all(np.isfinite(found))
    np.testing.assert_allclose(found.mean(axis=0), whole, atol=1e-5 * np.max(np.abs(whole)))
