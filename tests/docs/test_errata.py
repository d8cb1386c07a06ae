"""Every erratum of docs/errata.md: the printed form is wrong, the corrected one right, by enumeration if noisy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad.noise.shaping import shape_noise, shaping
from tests import tools
from tests.reference import theory as textbook

LENGTH, SIZE = 4, 3


@functools.cache
def network():
    """A tanh network of 3 units over 4 steps, with random α and Q_0: 4,096 sign patterns are all there are."""
    model = tools.make_model("vanilla", 1, SIZE)
    params = tools.make_params(model)
    chunk = tools.make_chunk(model, LENGTH)
    ep = jax.jit(lambda: sg.theory.collect(model, params, chunk))()
    return model, params, chunk, ep, tools.random_alpha(LENGTH), tools.random_q0(SIZE)


@functools.cache
def enumerated_uoro():
    model, params, chunk, _, alpha, q0 = network()
    est = sg.uoro(model, noise="given", rescale=jnp.asarray(alpha), q0=q0)
    grads = [textbook.flat_cell(g) for g in tools.over_patterns(est, params, chunk, tools.all_signs(LENGTH, SIZE))]
    return textbook.moments(jnp.concatenate(grads))


def relative(got, want) -> float:
    return float(np.max(np.abs(np.asarray(got) - want)) / np.max(np.abs(want)))


@functools.cache
def terms():
    """x_t = Q^T b^(t) and Y_t = Q^{-1} S^(t) J of Section 6.4: the estimate is Σ_t x_t^T u u^T Y_t."""
    model, params, chunk, ep, alpha, q0 = network()
    b = textbook.gradients(model, params, chunk, "preactivation")
    jac = textbook.jacobians(model, params, chunk, "preactivation")
    flat, q, j, s = textbook.stacked(b, jac, alpha, q0, ep.episode)
    return [q.T @ row for row in flat], [np.linalg.inv(q) @ one @ j for one in s]


def over_pairs(term):
    """Σ_{s,t} term(x_t, Y_t, x_s, Y_s)."""
    x, y = terms()
    return sum(term(x[t], y[t], x[s], y[s]) for t in range(LENGTH) for s in range(LENGTH))


def test_proposition_1_second_moment():
    """A (BC + (BC)^T) D, not 2 A BC D: they differ where two steps meet, with A = Y_t^T, BC = x_t x_s^T, D = Y_s."""
    *_, ep, alpha, q0 = network()
    mean, covariance = enumerated_uoro()
    want = covariance + np.outer(mean, mean)
    rest = over_pairs(lambda x, y, x2, y2: (x @ x2) * y.T @ y2 - 2 * y.T @ np.diag(x * x2) @ y2)
    product = over_pairs(lambda x, y, x2, y2: y.T @ np.outer(x, x2) @ y2)
    swapped = over_pairs(lambda x, y, x2, y2: y.T @ np.outer(x2, x) @ y2)
    gradient = ravel_pytree(ep.gradient.cell)[0]
    library = sg.theory.covariance(ep, alpha, q0, kurtosis=-2.0) + jnp.outer(gradient, gradient)
    assert relative(library, want) < 1e-10
    assert relative(library, rest + product + swapped) < 1e-10
    assert relative(library, rest + 2 * product) > 1e-2


def test_corollary_1_covariance_and_its_trace():
    """V^T y x^T W, not V^T x y^T W; and once in the trace, not twice."""
    *_, ep, alpha, q0 = network()
    want = enumerated_uoro()[1]
    rest = over_pairs(lambda x, v, y, w: (x @ y) * v.T @ w - 2 * v.T @ np.diag(x * y) @ w)
    corrected = over_pairs(lambda x, v, y, w: v.T @ np.outer(y, x) @ w)
    printed = over_pairs(lambda x, v, y, w: v.T @ np.outer(x, y) @ w)
    library = sg.theory.covariance(ep, alpha, q0, kurtosis=-2.0)
    assert relative(library, want) < 1e-10
    assert relative(library, rest + corrected) < 1e-10
    assert relative(library, rest + printed) > 1e-2
    total = float(sg.theory.total_variance(ep, alpha, q0, kurtosis=-2.0))
    assert abs(np.trace(rest + corrected) / total - 1) < 1e-10
    assert abs(np.trace(rest + 2 * printed) / total - 1) > 1e-2


def test_total_variance():
    """Section 6.5 and Appendix H: V(Q) + Σ_{s,t} b^(s)T S^(t) J J^T S^(s) b^(t), not V(Q) + ‖dL/dθ‖²."""
    model, params, chunk, ep, alpha, q0 = network()
    _, covariance = enumerated_uoro()
    want = np.trace(covariance)
    b = textbook.gradients(model, params, chunk, "preactivation")
    jac = textbook.jacobians(model, params, chunk, "preactivation")
    value = textbook.v(b, jac, alpha, q0, ep.episode)
    cross = np.trace(over_pairs(lambda x, y, x2, y2: y.T @ np.outer(x2, x) @ y2))
    kurtosis = -2 * np.trace(over_pairs(lambda x, y, x2, y2: y.T @ np.diag(x * x2) @ y2))
    gradient = sum(np.sum(np.asarray(leaf) ** 2) for leaf in jax.tree.leaves(ep.gradient.cell))
    assert abs((value + cross + kurtosis) / want - 1) < 1e-10
    assert abs((value + gradient + kurtosis) / want - 1) > 1e-4
    assert abs(sg.theory.total_variance(ep, alpha, q0, kurtosis=-2.0) / want - 1) < 1e-10


def test_gradient_of_v_and_newtons_step():
    """Appendix C: (C̄^T - C̄) 1 is V's gradient; following the printed one climbs."""
    rng = np.random.default_rng(2)
    c = np.exp(2 * rng.normal(size=(5, 5)))

    def value(zeta):
        return float(np.sum(c * np.exp(zeta[None, :] - zeta[:, None])))

    def five_steps(sign):
        zeta = np.zeros(5)
        for _ in range(5):
            bar = c * np.exp(zeta[None, :] - zeta[:, None])
            hessian = np.diag((bar + bar.T).sum(axis=1)) - bar - bar.T
            zeta = zeta - sign * np.linalg.solve(hessian + 1e-8 * np.eye(5), (bar - bar.T).sum(axis=1))
        return value(zeta)

    best = float(sg.theory.optimal_alpha(jnp.asarray(c)).value)
    assert best < value(np.zeros(5)) < five_steps(+1.0)  # as printed
    assert five_steps(-1.0) == pytest.approx(best, rel=1e-6)


def test_damped_q0_has_a_negative_exponent():
    """Sections 7.1.3 and 7.2: (B + λ I)^{-1/4}; with +1/4 it is worse than no shaping at all."""
    _, _, _, ep, alpha, _ = network()
    b = sg.theory.b_matrix(ep, alpha)
    values, vectors = np.linalg.eigh(np.asarray(b) + 0.005 * float(jnp.trace(b)) / SIZE * np.eye(SIZE))
    printed = (vectors * values**0.25) @ vectors.T
    corrected = sg.theory.optimal_q0(b, 0.005)
    np.testing.assert_allclose(corrected, (vectors * values**-0.25) @ vectors.T, rtol=1e-8, atol=1e-10)
    assert sg.theory.v(ep, alpha, corrected) < sg.theory.v(ep, alpha) < sg.theory.v(ep, alpha, printed)


def test_appendix_b_swaps_m_and_n():
    """α_k⁴ ∝ m_k/n_k with C_qr = m_q n_r; the final formula is right, the line before it is not."""
    rng = np.random.default_rng(3)
    m, n = np.exp(rng.normal(size=(2, 5)))
    c = np.outer(m, n)

    def value(alpha):
        return np.sum(c * alpha[None, :] ** 2 / alpha[:, None] ** 2)

    best = float(sg.theory.optimal_alpha(jnp.asarray(c)).value)
    assert value((m / n) ** 0.25) == pytest.approx(best)
    assert value((n / m) ** 0.25) > 1.01 * best


def test_actual_variance_needs_the_cotangent_of_the_same_step():
    """Section 7.2: Σ_t dL_t/dh_t h̃_t w̃_t^T is the estimate; with w̃_{t-1} it is biased."""
    model, params, chunk, ep, alpha, q0 = network()
    jac = textbook.jacobians(model, params, chunk, "preactivation")
    u = tools.all_signs(LENGTH, SIZE)
    right = np.einsum("tsi,ij,nsj,s->nt", np.asarray(ep.b), q0, u, alpha)  # dL_t/dh_t · h̃_t
    steps = np.einsum("nsi,ij,sjp,s->nsp", u, np.linalg.inv(q0), jac, 1 / alpha)
    now = np.cumsum(steps, axis=1)
    exact = ravel_pytree(ep.gradient.cell)[0]
    mean, covariance = enumerated_uoro()
    corrected = np.einsum("nt,ntp->np", right, now)
    printed = np.einsum("nt,ntp->np", right, now - steps)
    np.testing.assert_allclose(corrected.mean(axis=0), exact, atol=1e-10)
    np.testing.assert_allclose(textbook.moments(corrected)[1], covariance, atol=1e-9)
    np.testing.assert_allclose(mean, exact, atol=1e-10)
    assert relative(printed.mean(axis=0), np.asarray(exact)) > 1e-2


def test_immediate_jacobian_is_that_of_the_preactivations():
    """Section 7.1: J_r = dz_r/dθ_r = I ⊗ a_r^T, not dh_r/dz_r."""
    model, params, chunk, ep, _, _ = network()
    jac = textbook.jacobians(model, params, chunk, "preactivation")
    for r in range(LENGTH):
        np.testing.assert_allclose(jac[r], np.kron(np.eye(SIZE), np.asarray(ep.features)[r][None]), atol=1e-14)
    step = sg.cuts.linearise(model.cell.cuts["preactivation"], params.cell, model.init_state(params), chunk.inputs[0])
    push = np.asarray(jax.vmap(step.push)(jnp.eye(SIZE))).T  # dh_r/dz_r
    weight = np.asarray(jnp.sum(ep.features**2, axis=1))
    # only the first makes J J^T a multiple of the identity, on which Section 7.1.2 rests
    np.testing.assert_allclose(jac[0] @ jac[0].T, weight[0] * np.eye(SIZE), atol=1e-13)
    assert relative(push @ push.T, weight[0] * np.eye(SIZE)) > 1e-2


def test_truncated_identity_of_preuoro():
    """Section 8 and Appendix H: S̄^(t)_ij = δ_ij 1[i <= t], not 1[i >= t]."""
    model, params, chunk, ep, alpha, _ = network()
    est = sg.preuoro(model, noise="given", rescale=jnp.asarray(alpha))
    tau = tools.all_signs(LENGTH)
    want = np.asarray(textbook.flat_cell(next(tools.over_patterns(est, params, chunk, tau))))
    b, a = np.asarray(ep.b), np.asarray(ep.features)

    def equation(s):
        """Σ_t B̄^(t)T Q̄ τ τ^T Q̄^{-1} S̄^(t) J̄, for every τ."""
        left = np.einsum("tsi,ns->nti", b, tau * alpha)
        right = np.einsum("ns,ts,sj->ntj", tau / alpha, s, a)
        return np.einsum("nti,ntj->nij", left, right).reshape(len(tau), -1)

    causal = np.tril(np.ones((LENGTH, LENGTH)))  # [t, i]
    assert relative(equation(causal), want) < 1e-12
    assert relative(equation(causal.T), want) > 1e-2


def test_noise_covariance_of_reinforce():
    """Section 9: with h̄ = h + σ Q u the noise has covariance Σ = σ² Q Q^T, not σ² Q^T Q; the score is Σ^{-1} σ Q u."""
    model, params, chunk, _, _, q0 = network()
    sigma = 0.3
    kicks = sigma * shape_noise(shaping(jnp.asarray(q0)), jnp.asarray(tools.all_signs(SIZE))).right
    corrected, printed = sigma**2 * q0 @ q0.T, sigma**2 * q0.T @ q0
    assert relative(kicks.T @ kicks / len(kicks), corrected) < 1e-12
    assert relative(kicks.T @ kicks / len(kicks), printed) > 1e-2

    ep = jax.jit(lambda: sg.theory.collect(model, params, chunk, "state"))()
    ahead = np.cumsum(np.asarray(ep.loss)[::-1])[::-1]

    def score_variance(noise):
        return float(np.einsum("s,sip,ij,sjp->", ahead**2, ep.jacobian, np.linalg.inv(noise), ep.jacobian))

    library = float(sg.theory.score_variance(ep, sigma, q0))
    assert abs(score_variance(corrected) / library - 1) < 1e-10
    assert abs(score_variance(printed) / library - 1) > 1e-2
