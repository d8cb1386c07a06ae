"""Gaussian noise cannot be enumerated: fixed-seed z-tests.

For each entry of the cell's gradient, z = (sample mean - BPTT) / (sample standard deviation / sqrt(n)). Under the
hypothesis each z is standard normal (n is large), and the test fails where the largest |z| of the m entries of a case
exceeds the two-sided quantile of 1e-4 / m. Had the seed not been fixed, a case would raise a false alarm once in 10,000
runs at the most (Bonferroni), all of them together once in 1,400. `test_power` shows that a bias of 10% would not pass.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import streamgrad as sg
from tests.tools import bptt, cut_size, few, make_chunk, make_model, make_params, random_alpha, random_q0

FALSE_ALARM = 1e-4
SAMPLES = 40_000


def largest_z(est, model, factor=1.0):
    """The largest |z| over the entries of the cell's gradient, and the threshold for it."""
    params, chunk = make_params(model), make_chunk(model, 4)
    state = est.init(params)

    @jax.jit
    def moments(keys):
        grads = jax.vmap(lambda key: est.update(params, state, chunk, key)[0].cell)(keys)
        flat = jnp.concatenate([leaf.reshape(len(keys), -1) for leaf in jax.tree.leaves(grads)], axis=1)
        return jnp.sum(flat, axis=0), jnp.sum(flat**2, axis=0)

    parts = [moments(keys) for keys in jax.random.split(jax.random.key(20), (8, SAMPLES // 8))]
    total, squares = (sum(part[i] for part in parts) for i in (0, 1))
    mean = total / SAMPLES
    deviation = jnp.sqrt((squares / SAMPLES - mean**2) / SAMPLES)
    truth = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(bptt(model, params, chunk).cell)])
    z = np.asarray((mean - factor * truth) / deviation)
    return np.max(np.abs(z)), norm.isf(FALSE_ALARM / len(z) / 2)


CASES = {
    "uoro, preactivation": lambda model: sg.uoro(model, noise="gaussian", rescale="none"),
    "uoro, preactivation, Q_0, alpha": lambda model: sg.uoro(
        model, noise="gaussian", q0=random_q0(cut_size(model, "preactivation")), rescale=random_alpha(4)
    ),
    "uoro, state, GIR, exact": lambda model: sg.uoro(model, cut="state", noise="gaussian", immediate="exact"),
    "uoro, params, GIR": lambda model: sg.uoro(model, cut="params", noise="gaussian"),
    "spatial_rtrl": lambda model: sg.spatial_rtrl(model, noise="gaussian"),
    "preuoro, GIR": lambda model: sg.preuoro(model, noise="gaussian"),
}


@pytest.mark.parametrize("case", few(CASES, *list(CASES)[:2]))
def test_unbiased(case):
    model = make_model("gru" if "preuoro" in case else "vanilla")
    z, threshold = largest_z(CASES[case](model), model)
    assert z < threshold


def test_power():
    """The same test against a gradient that is 10% too large."""
    model = make_model("vanilla")
    z, threshold = largest_z(sg.uoro(model, noise="gaussian", rescale="none"), model, factor=1.1)
    assert z > threshold


@pytest.mark.parametrize("name, kurtosis", [("gaussian", 0), ("rademacher", -2)])
def test_moments(name, kurtosis):
    """Zero mean, unit variance, no correlation, and the kurtosis that the variance theory is told.

    The bounds are 5 standard errors: a false alarm once in 1.7 million for each.
    """
    noise = sg.noise.find_noise(name)
    u = np.asarray(noise.draw(jax.random.key(0), (100_000, 3), jnp.float64))
    n = len(u)
    assert np.all(np.abs(u.mean(0)) < 5 / np.sqrt(n))
    products = u.T @ u / n
    assert np.all(np.abs(products - np.eye(3)) < 5 * np.sqrt(2 / n) + 1e-12)
    assert np.all(np.abs((u**4).mean(0) - 3 - kurtosis) < 5 * np.sqrt(96 / n))
    assert noise.kurtosis == kurtosis
