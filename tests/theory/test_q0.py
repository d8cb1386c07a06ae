"""The optimal Q_0, its damping, the predicted gain, and the theorem of Appendix E."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import streamgrad as sg
from tests import tools


def random_spd(rng, size, spread=2.0):
    basis, _ = np.linalg.qr(rng.normal(size=(size, size)))
    return (basis * 10.0 ** rng.uniform(-spread, spread, size=size)) @ basis.T


def test_trace_product_beats_10000_random_matrices():
    rng = np.random.default_rng(0)
    for size in (2, 5):
        x, y = random_spd(rng, size), random_spd(rng, size)
        best = sg.theory.minimise_trace_product(jnp.asarray(x), jnp.asarray(y))
        a = np.asarray(best.a)
        assert np.linalg.eigvalsh(a).min() > 0
        root = np.real(np.trace(scipy.linalg.sqrtm(x @ y)))
        np.testing.assert_allclose(best.value, root**2, rtol=1e-9)
        np.testing.assert_allclose(np.trace(x @ a) * np.trace(y @ np.linalg.inv(a)), root**2, rtol=1e-9)
        others = np.stack([random_spd(rng, size) for _ in range(5000)])
        # near misses, too: they are the ones that could win
        chol = np.linalg.cholesky(a)
        near = np.stack([chol @ random_spd(rng, size, 0.2) @ chol.T for _ in range(5000)])
        tried = np.concatenate([others, near])
        values = np.einsum("ij,nji->n", x, tried) * np.einsum("ij,nji->n", y, np.linalg.inv(tried))
        assert values.min() >= float(best.value) * (1 - 1e-12)


def test_optimal_q0_is_the_formula_and_minimises_v():
    rng = np.random.default_rng(1)
    b = random_spd(rng, 6)
    for damping in (0.0, 0.005, 0.3):
        want = np.linalg.inv(scipy.linalg.sqrtm(scipy.linalg.sqrtm(b + damping * np.trace(b) / 6 * np.eye(6))))
        got = sg.theory.optimal_q0(jnp.asarray(b), damping)
        np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-9)
        np.testing.assert_array_equal(got, got.T)
    qq = np.asarray(sg.theory.optimal_q0(jnp.asarray(b), 0.0)) @ np.asarray(sg.theory.optimal_q0(jnp.asarray(b), 0.0))
    gain = sg.theory.predicted_gain(jnp.asarray(b))
    shaped = np.trace(b @ qq) * np.trace(np.linalg.inv(qq))
    np.testing.assert_allclose(shaped, gain.shaped, rtol=1e-8)
    np.testing.assert_allclose(gain.plain, 6 * np.trace(b))
    best = sg.theory.minimise_trace_product(jnp.asarray(b), jnp.eye(6))
    np.testing.assert_allclose(best.value, gain.shaped, rtol=1e-9)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("damping", [0.0, 0.005])
def test_never_a_nan(dtype, damping):
    rng = np.random.default_rng(2)
    tall = rng.normal(size=(5, 2))
    negative = tall @ tall.T - 1e-7 * np.eye(5)  # as an estimate may be
    for b in (np.zeros((5, 5)), tall @ tall.T, negative, 1e-36 * tall @ tall.T, 1e30 * tall @ tall.T, -np.eye(5)):
        q0 = sg.theory.optimal_q0(jnp.asarray(b, dtype), damping)
        assert np.all(np.isfinite(q0))
        assert np.all(np.isfinite(jnp.linalg.inv(q0)))
        assert np.linalg.eigvalsh(np.asarray(q0, float)).min() > 0
    assert float(sg.theory.predicted_gain(jnp.zeros((5, 5))).ratio) == 1


@pytest.mark.slow
def test_groups_stay_apart_exactly():
    model = tools.make_model("gru", 1, 2)
    params = tools.make_params(model)
    chunk = tools.make_chunk(model, 6)
    ep = jax.jit(lambda: sg.theory.collect(model, params, chunk))()
    index = sg.theory.partition(ep)
    b = sg.theory.b_matrix(ep)
    q0 = np.asarray(sg.theory.optimal_q0(b, partition=index))
    across = index[:, None] != index[None, :]
    assert np.all(np.asarray(b)[across] == 0) and np.all(q0[across] == 0)
    for g in range(index.max() + 1):
        mine = np.ix_(index == g, index == g)
        np.testing.assert_allclose(q0[mine], sg.theory.optimal_q0(jnp.asarray(np.asarray(b)[mine])), rtol=1e-7)
    # the index has more groups than one block would: `uoro` makes the same of a diagonal, or of two blocks
    sg.uoro(model, groups=2, q0=q0)


@pytest.mark.slow
def test_predicted_gain_is_the_gain():
    model = tools.make_model("lstm", 1, 2)
    params = tools.make_params(model)
    chunk = tools.make_chunk(model, 12)
    ep = jax.jit(lambda: sg.theory.collect(model, params, chunk))()
    alpha = tools.random_alpha(12)
    b = sg.theory.b_matrix(ep, alpha)
    gain = sg.theory.predicted_gain(b)
    np.testing.assert_allclose(sg.theory.v(ep, alpha), gain.plain, rtol=1e-10)
    np.testing.assert_allclose(sg.theory.v(ep, alpha, sg.theory.optimal_q0(b, 0.0)), gain.shaped, rtol=1e-6)
    for seed in range(5):
        assert sg.theory.v(ep, alpha, tools.random_q0(ep.size, seed)) >= gain.shaped


def test_diagonal_q0_of_tallec_and_ollivier():
    """q_i² ∝ ‖dz_i/dθ‖ / ‖dh/dz_i‖ minimises Σ_{ij} of the temporally corresponding terms of one step."""
    rng = np.random.default_rng(4)
    pulled, pushed = rng.uniform(0.1, 3, size=(2, 5))
    q = np.asarray(sg.theory.diagonal_q0(jnp.asarray(pulled), jnp.asarray(pushed)))
    np.testing.assert_allclose(q**2 / (pulled / pushed), (q**2 / (pulled / pushed))[0])

    def size(q):  # ‖dh/dz diag(q)‖² ‖diag(1/q) dz/dθ‖²
        return np.sum((q * pushed) ** 2) * np.sum((pulled / q) ** 2)

    assert all(size(q * np.exp(0.1 * rng.normal(size=5))) >= size(q) for _ in range(200))
    zeros = sg.theory.diagonal_q0(jnp.array([0.0, 1.0, 4.0]), jnp.array([1.0, 0.0, 1.0]))
    np.testing.assert_array_equal(zeros, 1.0)


def test_errors():
    with pytest.raises(ValueError, match="square"):
        sg.theory.optimal_q0(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="damping"):
        sg.theory.optimal_q0(jnp.eye(2), -1.0)
    with pytest.raises(ValueError, match="partition"):
        sg.theory.optimal_q0(jnp.eye(2), partition=[0])
    with pytest.raises(ValueError, match="same shape"):
        sg.theory.minimise_trace_product(jnp.eye(2), jnp.eye(3))
