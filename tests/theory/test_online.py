"""Appendices B, D and F: single Jacobian estimates, greedy coefficients, and B estimated online."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad.noise.groups import Groups
from streamgrad.theory.online_b import advance_b, init_b
from tests import tools
from tests.reference import unrolled


def episode(cell="vanilla", length=5, n_hidden=3, reset=None):
    model = tools.make_model(cell, 1, n_hidden)
    params = tools.make_params(model, seed=2)
    chunk = tools.make_chunk(model, length, seed=5, reset=reset)
    return model, params, chunk, jax.jit(lambda: sg.theory.collect(model, params, chunk))()


# Appendix B


@pytest.mark.parametrize("reset", [(2,), pytest.param(None, marks=pytest.mark.slow)])
def test_single_jacobian_estimate(reset):
    length = 5
    model, params, chunk, _ = episode("lstm", length, 2, reset)
    nu = jnp.asarray(np.random.default_rng(0).normal(size=(length, 8)))
    terms = jax.jit(lambda: sg.theory.jacobian_terms(model, params, chunk, nu))()
    alpha = tools.random_alpha(length)

    def estimate(tau, alpha):
        """h̃_t w̃_t^T for the last t (Section 6.1)."""
        pushed = (tau * alpha) @ np.asarray(terms.pushed)
        return np.outer(pushed, (tau / alpha) @ np.asarray(terms.pulled))

    def variance(alpha):
        samples = np.stack([estimate(tau, alpha) for tau in tools.all_signs(length)])
        return float(np.sum(samples.var(axis=0)))

    np.testing.assert_allclose(sg.theory.jacobian_variance(terms, alpha), variance(alpha), rtol=1e-10)
    best = np.asarray(sg.theory.jacobian_alpha(terms))
    np.testing.assert_allclose(
        best**2,
        np.where(
            np.linalg.norm(terms.pushed, axis=1) > 0,
            np.linalg.norm(terms.pulled, axis=1) / np.maximum(np.linalg.norm(terms.pushed, axis=1), 1e-300),
            1,
        ),
    )
    found = scipy.optimize.minimize(lambda x: float(sg.theory.jacobian_variance(terms, np.exp(x))), np.zeros(length))
    assert float(sg.theory.jacobian_variance(terms, best)) <= found.fun * (1 + 1e-9)
    # the mean over both noises is the Jacobian: with ν the rows of √N I, in turn, it is exact
    whole = 0.0
    for i in range(8):
        at_i = sg.theory.jacobian_terms(model, params, chunk, jnp.zeros((length, 8)).at[:, i].set(1.0))
        whole = whole + np.asarray(at_i.pushed).T @ np.asarray(at_i.pulled)
    influence = jacobian_of_the_last_state(model, params, chunk)
    np.testing.assert_allclose(whole, influence, atol=1e-12)


def jacobian_of_the_last_state(model, params, chunk):
    flat, unravel = ravel_pytree(params.cell)
    reset = unrolled.resets(chunk)

    def last(flat):
        state = model.init_state(params)
        for t in range(len(reset)):
            state = model.init_state(params) if reset[t] else state
            state = model.cell.step(unravel(flat), state, chunk.inputs[t])
        return ravel_pytree(state)[0]

    return jax.jit(jax.jacrev(last))(flat)


# Appendix D


def test_greedy_minimises_its_objective_at_every_step():
    length = 5
    _, _, _, ep = episode("lstm", length, 2)
    q0 = tools.random_q0(ep.size)
    got = sg.theory.greedy_alpha(ep, q0)
    beta, gamma = np.asarray(got.beta), np.asarray(got.gamma)
    b, a = np.asarray(ep.b), np.asarray(ep.features)
    weight = np.sum(a**2, axis=1) * np.trace(np.linalg.inv(q0 @ q0.T))

    def alpha_until(s, beta, gamma):
        return np.array([beta[q] * np.prod(gamma[q + 1 : s + 1]) for q in range(s + 1)])

    for s in range(1, length):
        # C^(s): later gradients are taken to be zero
        c = np.array(
            [[np.sum((b[q : s + 1, r].sum(axis=0) @ q0) ** 2) * weight[q] for r in range(s + 1)] for q in range(s + 1)]
        )

        def objective(log_ratio, s=s, c=c):
            trial = gamma.copy()
            trial[s] = beta[s] * np.exp(log_ratio)
            alpha = alpha_until(s, beta, trial)
            return np.sum(alpha[None, :] ** 2 / alpha[:, None] ** 2 * c)

        best = scipy.optimize.minimize_scalar(objective, bracket=(-1, 1), tol=1e-12)
        assert objective(np.log(gamma[s] / beta[s])) <= best.fun * (1 + 1e-9)
        np.testing.assert_allclose(np.log(gamma[s] / beta[s]), best.x, atol=1e-5)
    np.testing.assert_allclose(got.alpha, alpha_until(length - 1, beta, gamma), rtol=1e-10)
    # and as printed
    for s in range(length):
        np.testing.assert_allclose(beta[s] ** 4, weight[s] / np.sum((b[s, s] @ q0) ** 2))


@pytest.mark.slow
def test_greedy_as_ratios_of_expectations():
    """Means over all sign patterns of the recursion's own terms."""
    length = 3
    model, params, chunk, ep = episode("vanilla", length, 3)
    q0 = tools.random_q0(3)
    want = sg.theory.greedy_alpha(ep, q0)
    u = jnp.asarray(tools.all_signs(length, 3))
    state = model.init_state(params)
    vertex = model.cell.cuts["preactivation"]
    tangent, cotangent = jnp.zeros((len(u), 3)), jnp.zeros((len(u), *params.cell["w"].shape))
    for s in range(length):
        at = sg.cuts.linearise(vertex, params.cell, state, chunk.inputs[s])
        _, _, dl_dstate = model.read_out(params.head, at.state, chunk.targets[s])
        propagated, pushed = jax.vmap(at.propagate)(tangent), jax.vmap(at.push)(u[:, s] @ q0.T)
        pulled = jax.vmap(lambda v, at=at: at.pull(v)["w"])(u[:, s] @ jnp.linalg.inv(q0))
        beta, gamma = sg.theory.greedy_coefficients(
            jnp.mean(jnp.sum(pulled**2, axis=(1, 2))),
            jnp.mean((pushed @ dl_dstate) ** 2),
            jnp.mean(jnp.sum(cotangent**2, axis=(1, 2))),
            jnp.mean((propagated @ dl_dstate) ** 2),
        )
        np.testing.assert_allclose([beta, gamma], [want.beta[s], want.gamma[s]], rtol=1e-10)
        tangent = gamma * propagated + beta * pushed
        cotangent = cotangent / gamma + pulled / beta
        state = at.state


@pytest.mark.slow
def test_greedy_with_zeros_resets_and_groups():
    _, _, _, ep = episode("gru", 6, 2, reset=(3,))
    got = sg.theory.greedy_alpha(ep)
    assert got.beta.shape == (6, 3)
    np.testing.assert_array_equal(got.gamma[np.array([0, 3])], 1)
    quiet = jax.tree.map(jnp.zeros_like, ep)
    for leaf in sg.theory.greedy_alpha(quiet):
        np.testing.assert_array_equal(leaf, 1)
    # exact α is at least as good as greedy α, which is not the plain one
    _, _, _, ep = episode("lstm", 8, 3)
    exact = sg.theory.optimal_alpha(sg.theory.c_matrix(ep)).value
    assert exact <= sg.theory.v(ep, sg.theory.greedy_alpha(ep).alpha)


def test_greedy_of_two_episodes_is_that_of_each():
    """Nothing of the first has a say in the second."""
    model, params, chunk, ep = episode("lstm", 7, 2, reset=(3,))
    both = sg.theory.greedy_alpha(ep)
    parts = [part._replace(reset=None) for part in tools.split(chunk, (3, 4))]
    each = [sg.theory.greedy_alpha(sg.theory.collect(model, params, part)) for part in parts]
    for name in ("beta", "gamma", "alpha"):
        want = np.concatenate([getattr(one, name) for one in each])
        np.testing.assert_allclose(getattr(both, name), want, rtol=1e-10)


# Appendix F


def test_online_b_does_not_depend_on_how_alpha_is_split():
    """γ = 1 and β = α, or any γ: a and the tangents of both halves stay in proportion, and so do m and n."""
    model, params, chunk, ep = episode("vanilla", 4, 2)
    groups = Groups(1, np.zeros(ep.size, int), ep.rows)
    alpha, gamma = tools.random_alpha(4), np.array([1.0, 1.7, 0.6, 2.5])
    beta = alpha / np.append(np.cumprod(gamma[:0:-1])[::-1], 1)  # α_s = β_s γ_{s+1} … γ_T
    noise = sg.theory.draw_b_noise(jax.random.key(0), 4, ep.size)

    def totals(gamma, beta):
        state, memory = model.init_state(params), init_b(groups, 2, jnp.float64)
        for t in range(4):
            at = sg.cuts.linearise(model.cell.cuts["preactivation"], params.cell, state, chunk.inputs[t])
            dl_dstate = model.read_out(params.head, at.state, chunk.targets[t])[2]
            here = jax.tree.map(lambda leaf, t=t: leaf[t], noise)
            memory = advance_b(groups, memory, at, dl_dstate, here, gamma[t : t + 1], beta[t : t + 1], "none")
            state = at.state
        return np.outer(memory.m.total, memory.n.total)

    plain = totals(jnp.ones(4), jnp.asarray(alpha))
    np.testing.assert_allclose(totals(jnp.asarray(gamma), jnp.asarray(beta)), plain, rtol=1e-10)
    want = sg.theory.estimate_b_online(model, params, chunk, noise, alpha, rescale="none").b
    np.testing.assert_allclose((plain + plain.T) / 2, want, rtol=1e-10)


@pytest.mark.parametrize("rescale", tools.few(["gir", "none"], "gir"))
@pytest.mark.parametrize("cell", tools.few(["vanilla", "gru"], "gru"))
def test_online_b_by_full_enumeration(cell, rescale):
    """T=2 and all four noises: the mean of the estimate is B^(k) for k=1 and k=2."""
    length = 2
    model, params, chunk, ep = episode(cell, length, 2 if cell == "vanilla" else 1)
    size = ep.size
    groups = 1
    index = sg.theory.partition(ep, groups)
    alpha = tools.random_alpha(length, index.max() + 1)
    mine = index[:, None] == index[None, :]
    if cell == "vanilla":  # 2^12 patterns
        patterns = tools.all_signs(2 * length + 2 * length * size)
        weights = 1 / len(patterns)
        sigma, tau = patterns[:, :2], patterns[:, 2:4]
        nu, mu = patterns[:, 4:8].reshape(-1, 2, 2), patterns[:, 8:].reshape(-1, 2, 2)
        noises = sg.theory.BNoise(*map(jnp.asarray, (sigma, tau, nu, mu)))
        estimate = sg.theory.estimate_b_online
        got = jax.jit(jax.vmap(lambda n: estimate(model, params, chunk, n, alpha, groups, rescale)))(noises)
        means = [np.einsum("ni,nj->ij", got.m[:, k], got.n[:, k]) * weights for k in range(length)]
    else:  # given σ and τ the halves are independent, so that their means are all that is needed: 2^8 patterns
        halves = jnp.asarray(tools.all_signs(length, size))
        means = [np.zeros((size, size)) for _ in range(length)]
        one = jnp.ones((length, size))

        @jax.jit
        def mean_of_half(sigma, tau):
            def half(nu):
                noise = sg.theory.BNoise(sigma, tau, nu, one)
                return sg.theory.estimate_b_online(model, params, chunk, noise, alpha, groups, rescale).m

            return jnp.mean(jax.vmap(half)(halves), axis=0)

        for sigma, tau in tools.all_signs(2, length):
            m = mean_of_half(jnp.asarray(sigma), jnp.asarray(tau))
            means = [mean + np.outer(m[k], m[k]) / 16 for k, mean in enumerate(means)]
    b = np.asarray(ep.b)
    norms = np.asarray(ep.feature_norms)[:, np.repeat(np.arange(len(ep.rows)), ep.rows)]
    want = np.zeros((size, size))
    for k in range(length):
        want = np.zeros((size, size))
        for s in range(k + 1):
            for t in range(k + 1):
                upto = range(min(s, t) + 1)
                first = sum(norms[q] / alpha[q, index] ** 2 for q in upto)
                second = sum(np.outer(alpha[r, index] * b[s, r], alpha[r, index] * b[t, r]) for r in upto)
                want += np.sqrt(np.outer(first, first)) * second
        np.testing.assert_allclose(
            np.where(mine, means[k], 0), np.where(mine, want, 0), atol=1e-10 * np.abs(want).max()
        )
    np.testing.assert_allclose(
        sg.theory.b_matrix(ep, alpha), np.where(mine, means[-1], 0), atol=1e-10 * np.abs(want).max()
    )


def test_online_b_is_symmetric_and_checks_its_input():
    model, params, chunk, ep = episode("gru", 4, 2, reset=(2,))
    noise = sg.theory.draw_b_noise(jax.random.key(0), 4, ep.size)
    got = jax.jit(lambda: sg.theory.estimate_b_online(model, params, chunk, noise))().b
    index = sg.theory.partition(ep)
    np.testing.assert_allclose(got, got.T, rtol=1e-15)
    assert np.all(np.asarray(got)[index[:, None] != index[None, :]] == 0)
    with pytest.raises(ValueError, match="nu must have the shape"):
        sg.theory.estimate_b_online(model, params, chunk, noise._replace(nu=noise.nu[:, :2]))
    with pytest.raises(ValueError, match="rescale"):
        sg.theory.estimate_b_online(model, params, chunk, noise, rescale="other")
