"""Every noise has zero mean, unit variance and the kurtosis that it says, from which theory predicts variances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamgrad.noise import find_noise

# E[u^8], for the standard error of E[u^4].
EIGHTH = {"rademacher": 1, "uniform": 9, "gaussian": 105}


@pytest.mark.parametrize("name", EIGHTH)
def test_moments(name):
    """Over 200,000 entries, within 5 standard errors: another key would fail in less than 1e-5 of cases."""
    noise, count = find_noise(name), 200_000
    u = np.asarray(noise.draw(jax.random.key(0), (count // 10, 10), jnp.float64))
    fourth = noise.kurtosis + 3
    for power, want, square in ((1, 0, 1), (2, 1, fourth), (3, 0, 15), (4, fourth, EIGHTH[name])):
        assert abs(np.mean(u**power) - want) <= 5 * np.sqrt((square - want**2) / count), power
    # Entries are independent: of any two columns, and of two steps in a row.
    seen = np.concatenate([u[:-1], u[1:]], axis=1)
    assert np.max(np.abs(seen.T @ seen / len(seen) - np.eye(20))) < 6 / np.sqrt(len(seen)) * np.sqrt(max(fourth, 1))
