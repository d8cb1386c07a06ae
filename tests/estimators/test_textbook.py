"""Pattern by pattern of noise, the estimators are the recursions of the paper."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from tests.reference import estimators as oracle
from tests.tools import cut_size, few, make_chunk, make_model, make_params, random_alpha, random_q0, run

T = 4


def noise_for(*shape, seed=0):
    return np.random.default_rng(seed + 50).normal(size=shape)


def cell_vector(grads):
    return np.asarray(ravel_pytree(grads.cell)[0])


WHERE = [("vanilla", "preactivation"), ("lstm", "state"), ("nested", "params")]
HOW = [(*where, immediate) for where in WHERE for immediate in ("estimated", "exact")]


@pytest.mark.parametrize("cell, cut, immediate", few(HOW, ("lstm", "state", "exact")))
def test_uoro(cell, cut, immediate):
    """Equations 6 and 7 in every combination of rescaling and Q_0, with a reset in the middle."""
    model = make_model(cell)
    params, chunk = make_params(model), make_chunk(model, T, reset=(2,))
    n = cut_size(model, cut)
    u, alpha = noise_for(T, n), random_alpha(T)
    for q0 in (np.eye(n), random_q0(n)):
        for rescale, textbook in (("none", {}), ("gir", {"gir": True}), (jnp.asarray(alpha), {"alpha": alpha})):
            est = sg.uoro(model, cut=cut, noise="given", rescale=rescale, q0=q0, immediate=immediate)
            got = cell_vector(run(est, params, [chunk], jnp.asarray(u))[0])
            want = oracle.uoro(model, params, chunk, cut, u, q0, immediate=immediate, **textbook)
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cell, groups", few([("lstm", 1), ("gru", 2), ("lstm", 4), ("gru", 8)], ("gru", 2)))
def test_uoro_in_groups(cell, groups):
    """Each group is a UORO of its own; a GRU's three matrices (2, 2 and 4 rows) are never in one group."""
    model = make_model(cell)
    params, chunk = make_params(model), make_chunk(model, T, reset=(2,))
    n = cut_size(model, "preactivation")
    u, scale = noise_for(T, n), np.exp(noise_for(n, seed=1))
    blocks = np.arange(n).reshape(groups, -1)
    borders = [0, 8] if cell == "lstm" else [0, 2, 4, 8]
    members = [
        [i for i in block if a <= i < b]
        for block in blocks
        for a, b in itertools.pairwise(borders)
        if any(a <= i < b for i in block)
    ]
    alpha = random_alpha(T, len(members))
    for rescale, textbook in (("gir", {"gir": True}), (jnp.asarray(alpha), {"alpha": alpha})):
        est = sg.uoro(model, noise="given", rescale=rescale, q0=scale, groups=groups)
        got, _, state = run(est, params, [chunk], jnp.asarray(u))
        assert state.memory.tangent.shape[0] == len(members)
        want = oracle.uoro(model, params, chunk, "preactivation", u, np.diag(scale), groups=members, **textbook)
        np.testing.assert_allclose(cell_vector(got), want, rtol=1e-10, atol=1e-12)


def test_a_full_q0_makes_one_group_of_several_matrices():
    model = make_model("gru")
    params, chunk = make_params(model), make_chunk(model, T)
    u, q0 = noise_for(T, 8), random_q0(8)
    est = sg.uoro(model, noise="given", q0=q0)
    got, _, state = run(est, params, [chunk], jnp.asarray(u))
    assert state.memory.tangent.shape[0] == 1
    want = oracle.uoro(model, params, chunk, "preactivation", u, q0, gir=True)
    np.testing.assert_allclose(cell_vector(got), want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cell, cut", few(WHERE[:2], WHERE[0]))
def test_uoro_is_the_total_gradient_estimate(cell, cut):
    """Equation 8, from the unrolled network, for given α in both ways of splitting it, in any chunks."""
    model = make_model(cell)
    params, chunk = make_params(model), make_chunk(model, T)
    n = cut_size(model, cut)
    u, alpha, q0 = noise_for(T, n), random_alpha(T), random_q0(n)
    want = oracle.total_gradient_estimate(model, params, chunk, cut, u, q0, alpha)
    for gamma in ("one", "geometric"):
        rescale = sg.noise.given(alpha, gamma=gamma)
        est = sg.uoro(model, cut=cut, noise="given", rescale=rescale, q0=q0)
        for pieces in ((4,), (1, 3)):
            state, total, start = est.init(params), 0.0, 0
            for size in pieces:
                here = slice(start, start + size)
                part = jax.tree.map(lambda leaf, here=here: leaf[here], chunk)
                grads, state, info = est.update(params, state, part, jnp.asarray(u[here]))
                total, start = total + cell_vector(grads), start + size
            np.testing.assert_allclose(total, want, rtol=1e-9, atol=1e-12)
        assert (np.ptp(info.diagnostics["gamma"]) == 0) and ((gamma == "one") == bool(np.all(info[1]["gamma"] == 1)))


@pytest.mark.parametrize("cell, cut", few([("vanilla", "preactivation"), ("gru", "state")], ("gru", "state")))
def test_spatial_rtrl(cell, cut):
    model = make_model(cell)
    params, chunk = make_params(model), make_chunk(model, T, reset=(2,))
    n = cut_size(model, cut)
    nu, q0 = noise_for(T, n), random_q0(n)
    got = run(sg.spatial_rtrl(model, cut=cut, noise="given", q0=q0), params, [chunk], jnp.asarray(nu))[0]
    want = oracle.spatial_rtrl(model, params, chunk, cut, nu, q0)
    np.testing.assert_allclose(cell_vector(got), want, rtol=1e-10, atol=1e-12)


MATRICES = {  # rows of z and columns of θ of each weight matrix
    "lstm": [(range(8), range(32))],
    "gru": [(range(2), range(4)), (range(2, 4), range(4, 10)), (range(4, 8), range(10, 26))],
}


@pytest.mark.parametrize("cell", few(MATRICES, "gru"))
def test_preuoro(cell):
    """Equation 11 and the GIR coefficients of Section 8, matrix by matrix."""
    model = make_model(cell)
    params, chunk = make_params(model), make_chunk(model, T, reset=(2,))
    tau, alpha = noise_for(T), random_alpha(T)
    matrices = [(list(rows), list(columns)) for rows, columns in MATRICES[cell]]
    for rescale, textbook in (("gir", {"gir": True}), (jnp.asarray(alpha), {"alpha": alpha}), ("none", {})):
        est = sg.preuoro(model, noise="given", rescale=rescale)
        got = cell_vector(run(est, params, [chunk], jnp.asarray(tau))[0])
        want = oracle.preuoro(model, params, chunk, tau, matrices, **textbook)
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "cell, immediate",
    few([("vanilla", "exact"), ("lstm", "estimated"), ("gru", "exact"), ("stack", "estimated")], ("vanilla", "exact")),
)
def test_preuoro_is_uoro_with_as_many_groups_as_preactivations(cell, immediate):
    model = make_model(cell)
    params, chunk = make_params(model), make_chunk(model, T, reset=(2,))
    n, alpha = cut_size(model, "preactivation"), jnp.asarray(random_alpha(T))
    tau = jnp.sign(jnp.asarray(noise_for(T)))
    pre = sg.preuoro(model, noise="given", rescale=alpha, immediate=immediate)
    groups = sg.uoro(model, noise="given", rescale=alpha, groups=n, immediate=immediate)
    got = run(pre, params, [chunk], tau)[0]
    want = run(groups, params, [chunk], jnp.repeat(tau[:, None], n, axis=1))[0]
    np.testing.assert_allclose(cell_vector(got), cell_vector(want), rtol=1e-10, atol=1e-12)


def test_q0_and_alpha_are_state():
    """They may change between updates, without a new trace."""
    model = make_model("vanilla")
    params, chunk = make_params(model), make_chunk(model, T)
    u, q0, alpha = noise_for(T, 2), random_q0(2), random_alpha(T)
    est = sg.uoro(model, noise="given", q0=np.eye(2), rescale=np.ones(T))
    state = est.init(params)
    got = est.update(params, sg.with_noise(state, q0=q0, alpha=alpha), chunk, jnp.asarray(u))[0]
    want = oracle.uoro(model, params, chunk, "preactivation", u, q0, alpha=alpha)
    np.testing.assert_allclose(cell_vector(got), want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "make, change, words",
    [
        (lambda m: sg.uoro(m), {"q0": np.eye(2)}, "no q0 to replace"),
        (lambda m: sg.uoro(m), {"alpha": np.ones(T)}, "no alpha to replace"),
        (lambda m: sg.uoro(m), {"sigma": 0.1}, "no sigma to replace"),
        (lambda m: sg.uoro(m, q0=np.eye(2)), {"q0": np.ones(2)}, r"q0 must keep the shape \(2, 2\)"),
        (lambda m: sg.uoro(m, q0=np.eye(2)), {"q0": np.ones((2, 2))}, "singular"),
        (lambda m: sg.uoro(m, rescale=np.ones(T)), {"alpha": np.ones(T + 1)}, "alpha"),
        (lambda m: sg.uoro(m, rescale=np.ones(T)), {"alpha": -np.ones(T)}, "positive"),
        (lambda m: sg.bptt(m), {"q0": np.eye(2)}, "a noisy estimator"),
        (lambda m: sg.carried(sg.uoro(m)), {"q0": np.ones(2)}, "nothing else chooses"),
    ],
)
def test_noise_that_cannot_be_replaced(make, change, words):
    model = make_model("vanilla")
    with pytest.raises(ValueError, match=words):
        sg.with_noise(make(model).init(make_params(model)), **change)
