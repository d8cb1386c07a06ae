"""Measured means and variances agree with the theory, and with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad.theory.empirical import moments, summary
from tests import tools


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uoro", "groups", "preuoro"])
def test_gaussian_noise_within_three_standard_errors(kind):
    """A sample of fixed seed; a correct program would fail this for one seed in 370, and it does not for this one."""
    model = tools.make_model("lstm", 1, 1)
    params = tools.make_params(model, seed=3)
    chunk = tools.make_chunk(model, 3, seed=4)
    ep = jax.jit(lambda: sg.theory.collect(model, params, chunk))()
    alpha = tools.random_alpha(3)
    if kind == "preuoro":
        est = sg.preuoro(model, noise="gaussian", rescale=jnp.asarray(alpha))
        want = sg.theory.total_variance(ep, alpha, groups=ep.size)
    else:
        groups = 1 if kind == "uoro" else 2
        q0 = tools.random_q0(4) if kind == "uoro" else tools.random_alpha(4)
        est = sg.uoro(model, noise="gaussian", rescale=jnp.asarray(alpha), groups=groups, q0=q0)
        want = sg.theory.total_variance(ep, alpha, q0, groups)
    got = sg.theory.empirical(est, params, chunk, jax.random.key(1), 200_000, block=20_000)
    assert abs(got.total_variance - want) < 3 * got.total_variance_error
    assert got.total_variance_error < 0.05 * want
    flat, exact = ravel_pytree(got.mean)[0], ravel_pytree(ep.gradient)[0]
    errors = ravel_pytree(got.mean_error)[0]
    noisy = np.asarray(errors) > 1e-12  # the head's gradient is exact
    assert np.max(np.abs(flat - exact)[noisy] / errors[noisy]) < 4  # 16 entries
    np.testing.assert_allclose(np.asarray(flat)[~noisy], np.asarray(exact)[~noisy], rtol=1e-9)


@pytest.mark.parametrize(("n", "block"), tools.few([(37, 10), (40, 10), (5, 64)], (37, 10)))
def test_equals_numpy(n, block):
    model = tools.make_model("vanilla", 1, 2)
    params = tools.make_params(model)
    chunk = tools.make_chunk(model, 3)
    est = sg.uoro(model, noise="gaussian", rescale="none")
    got = sg.theory.empirical(est, params, chunk, jax.random.key(2), n, block)
    state = est.init(params)
    keys = jax.random.split(jax.random.key(2), n)
    samples = np.stack([ravel_pytree(est.update(params, state, chunk, k)[0])[0] for k in keys])
    np.testing.assert_allclose(ravel_pytree(got.mean)[0], samples.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(ravel_pytree(got.variance)[0], samples.var(axis=0, ddof=1), atol=1e-12)
    np.testing.assert_allclose(got.total_variance, samples.var(axis=0, ddof=1).sum())
    squares = np.sum((samples - samples.mean(axis=0)) ** 2, axis=1)
    np.testing.assert_allclose(got.total_variance_error, squares.std(ddof=1) / np.sqrt(n), rtol=0.2)
    assert got.samples == n


def test_the_standard_error_hardly_depends_on_the_centre():
    """Squared norms are measured from a centre off the mean by δ; what is left of it is of order δ², and not δ."""
    samples = jnp.asarray(np.random.default_rng(0).exponential(size=(400, 3)))  # skewed, so that order δ would be seen
    mean = jnp.mean(samples, axis=0)
    squares = np.sum(np.asarray(samples - mean[None]) ** 2, axis=1)
    want = squares.std(ddof=1) / np.sqrt(400)
    off = []
    for delta in (1e-3, 1e-4):
        centre = mean + delta
        found = moments(samples, centre)
        off.append(abs(float(summary(found, found.mean)[2]) / want - 1))
    assert off[0] < 1e-5 and off[1] < 1e-7


@pytest.mark.slow
def test_any_registered_estimator():
    model = tools.make_model("vanilla", 1, 2)
    params = tools.make_params(model)
    chunk = tools.make_chunk(model, 3)
    for name in ("uoro", "rtrl", "pes"):
        row = sg.estimators.find_estimator(name)
        got = sg.theory.empirical(row.make(model, **row.options), params, chunk, jax.random.key(0), 8)
        assert (float(got.total_variance) < 1e-20) == (not row.noisy)
    together = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), chunk)
    batched = sg.batched(sg.uoro(model), 2)
    assert sg.theory.empirical(batched, params, together, jax.random.key(0), 8).total_variance > 0
    with pytest.raises(ValueError, match="n must be"):
        sg.theory.empirical(batched, params, together, jax.random.key(0), 1)
    with pytest.raises(ValueError, match="key"):
        sg.theory.empirical(batched, params, together, None, 8)
