"""Greedy rescaling (Appendix D) and NoBackTrack's Q_t: unbiased by enumeration, and equal to a textbook loop."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from tests.reference import estimators as oracle
from tests.tools import (
    all_signs,
    bptt,
    cut_size,
    error,
    few,
    made,
    make_chunk,
    make_model,
    make_params,
    mean_over,
    random_q0,
    run,
    split,
)

TOLERANCE = 1e-10


def assert_unbiased(est, model, chunk, patterns, params=None):
    params = make_params(model) if params is None else params
    assert error(mean_over(est, params, chunk, patterns), bptt(model, params, chunk)) < TOLERANCE


HOW = list(itertools.product(("preactivation", "state"), (0.0, 0.9), ("estimated", "exact")))


@pytest.mark.parametrize(
    "cut, decay, immediate", few(HOW, ("preactivation", 0.9, "estimated"), ("state", 0.0, "exact"))
)
def test_greedy_is_unbiased(cut, decay, immediate):
    """All patterns, a Q_0 that is not symmetric, and a reset."""
    model = make_model("vanilla")
    rescale = sg.noise.greedy(decay)
    est = sg.uoro(model, cut=cut, noise="given", rescale=rescale, q0=random_q0(2), immediate=immediate)
    assert_unbiased(est, model, make_chunk(model, 5, reset=(3,)), all_signs(5, 2))


@pytest.mark.parametrize("groups", few([1, 2, 4], 2))
def test_greedy_is_unbiased_in_groups(groups):
    model = make_model("vanilla", n_hidden=4)
    est = sg.uoro(model, noise="given", rescale="greedy", groups=groups, q0=np.array([1.0, 2.0, -0.5, 3.0]))
    assert_unbiased(est, model, make_chunk(model, 3), all_signs(3, 4))


@pytest.mark.parametrize("cell", few(["lstm", "stack"], "stack"))
def test_greedy_preuoro_is_unbiased(cell):
    model = make_model(cell)
    est = sg.preuoro(model, noise="given", rescale="greedy")
    assert_unbiased(est, model, make_chunk(model, 8, reset=(5,)), all_signs(8))


def without_loss(model, length, steps):
    """A model whose loss is a weighted one, and a chunk in which some steps weigh nothing."""
    head = model.head

    def loss(params, output, target):
        return target[2] * head.loss(params, output, target[:2])

    model = sg.Model(model.cell, sg.Head(head.init_params, loss))
    chunk = make_chunk(model, length)
    weight = jnp.where(jnp.isin(jnp.arange(length), jnp.array(steps)), 0.0, 1.0)
    return model, chunk._replace(targets=jnp.concatenate([chunk.targets, weight[:, None]], axis=1))


@pytest.mark.parametrize("decay", few([0.0, 0.9], 0.9))
@pytest.mark.parametrize("steps", [pytest.param((0, 1, 2, 3), marks=pytest.mark.slow), (2,)])
def test_steps_without_a_loss_are_kept(steps, decay):
    """What no loss sees yet is not lost: later losses see it."""
    model, chunk = without_loss(make_model("vanilla"), 5, steps)
    est = sg.uoro(model, noise="given", rescale=sg.noise.greedy(decay))
    assert_unbiased(est, model, chunk, all_signs(5, 2))


def test_unbiased_where_units_are_saturated():
    model = make_model("vanilla")
    params = make_params(model)
    params = params._replace(cell={"w": params.cell["w"].at[0, -1].set(800.0)})  # tanh' is exactly zero there
    for cut in ("preactivation", "state"):
        est = sg.uoro(model, cut=cut, noise="given", rescale="greedy")
        assert_unbiased(est, model, make_chunk(model, 4), all_signs(4, 2), params)


@pytest.mark.parametrize("factor", [0.0, 1e4, 1e-18, 30.0])
@pytest.mark.parametrize("make", few([sg.uoro, sg.preuoro, sg.nobacktrack], sg.uoro))
def test_greedy_is_finite(make, factor):
    model = make_model("lstm")
    params, chunk = make_params(model, dtype=jnp.float32), make_chunk(model, 6, dtype=jnp.float32)
    params = jax.tree.map(lambda leaf: leaf * jnp.float32(factor), params)
    if factor == 0:
        chunk = chunk._replace(inputs=jnp.zeros_like(chunk.inputs))
    for target in (1.0, 1e-25, 1e18):
        here = chunk._replace(targets=jnp.float32(target) * chunk.targets)
        result = run(made(make, model, rescale="greedy"), params, split(here, (2, 4)), jax.random.key(0))
        for leaf in jax.tree.leaves((result[0].cell, result[2])):
            assert leaf.dtype in (jnp.float32, jnp.int32)
            assert np.all(np.isfinite(leaf))


@pytest.mark.parametrize("decay", few([0.0, 0.9], 0.9))
@pytest.mark.parametrize("cell, cut", few([("vanilla", "preactivation"), ("lstm", "state")], ("lstm", "state")))
def test_greedy_is_the_textbook_loop(cell, cut, decay):
    model = make_model(cell)
    params, chunk, n = make_params(model), make_chunk(model, 6, reset=(4,)), cut_size(model, cut)
    u, q0 = np.random.default_rng(1).normal(size=(6, n)), random_q0(n)
    est = sg.uoro(model, cut=cut, noise="given", rescale=sg.noise.greedy(decay), q0=q0)
    grads, _, info = est.update(params, est.init(params), chunk, jnp.asarray(u))
    want, beta, gamma = oracle.greedy(model, params, chunk, cut, u, q0, decay)
    np.testing.assert_allclose(ravel_pytree(grads.cell)[0], want, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(info.diagnostics["beta"][:, 0], beta, rtol=1e-9)
    np.testing.assert_allclose(info.diagnostics["gamma"][:, 0], gamma, rtol=1e-9)


def test_beta_is_that_of_the_theory():
    """With signs at the preactivations, and nothing averaged over time, β is that of `greedy_alpha`, free of noise."""
    model = make_model("vanilla", n_hidden=4)
    params, chunk = make_params(model), make_chunk(model, 5, reset=(2,))
    want = sg.theory.greedy_alpha(sg.theory.collect(model, params, chunk), groups=2).beta
    est = sg.uoro(model, rescale=sg.noise.greedy(decay=0.0), groups=2)
    info = est.update(params, est.init(params), chunk, jax.random.key(0))[2]
    np.testing.assert_allclose(info.diagnostics["beta"], want, rtol=1e-10)


def test_coefficients_of_preuoro_are_those_of_the_theory():
    """Of N rows it averages over, the theory counts ‖a‖² N times: β is the fourth root of N larger there.

    With nothing averaged over time β is free of noise, and so is γ after a single step.
    """
    model = make_model("vanilla", n_hidden=4)
    params, chunk = make_params(model), make_chunk(model, 5, reset=(2,))
    want = sg.theory.greedy_alpha(sg.theory.collect(model, params, chunk))
    est = sg.preuoro(model, rescale=sg.noise.greedy(decay=0.0))
    told = est.update(params, est.init(params), chunk, jax.random.key(0))[2].diagnostics
    np.testing.assert_allclose(told["beta"][:, 0] * 4**0.25, want.beta, rtol=1e-10)
    second = np.array([1, 3])  # of both episodes
    np.testing.assert_allclose(told["gamma"][second, 0], want.gamma[second], rtol=1e-10)


@pytest.mark.parametrize("rescale", few(["gir", "none", "greedy"], "gir"))
def test_nobacktrack_is_unbiased(rescale):
    model = make_model("vanilla")
    est = sg.nobacktrack(model, noise="given", rescale=rescale)
    assert_unbiased(est, model, make_chunk(model, 5, reset=(3,)), all_signs(5, 2))


@pytest.mark.parametrize("cell", few(["lstm", "nested"], "lstm"))
def test_nobacktrack_is_the_textbook_loop(cell):
    model = make_model(cell)
    params, chunk, n = make_params(model), make_chunk(model, 5, reset=(3,)), cut_size(model, "state")
    u = np.random.default_rng(2).normal(size=(5, n))
    got = run(sg.nobacktrack(model, noise="given"), params, [chunk], jnp.asarray(u))[0]
    want = oracle.nobacktrack(model, params, chunk, u)
    np.testing.assert_allclose(ravel_pytree(got.cell)[0], want, rtol=1e-9, atol=1e-12)


def test_without_any_loss_greedy_is_gir():
    model, chunk = without_loss(make_model("vanilla"), 5, (0, 1, 2, 3, 4))
    params = make_params(model)
    coefficients = []
    for rescale in ("greedy", "gir"):
        est = sg.uoro(model, rescale=rescale)
        coefficients.append(est.update(params, est.init(params), chunk, jax.random.key(0))[2].diagnostics)
    for name in ("gamma", "beta"):
        np.testing.assert_allclose(coefficients[0][name], coefficients[1][name], rtol=1e-10)
