"""Weights of the loss in the theory, and in what is carried over: the same as a head that multiplies by them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from tests.tools import by_hand, few, made, make_chunk, make_model, make_params, weighed

MODEL = make_model("lstm")
WEIGHTS = (0.5, 0.0, -2.0, 1.0, 0.0)


def setup(seed=0):
    """A chunk whose targets are NaN where they do not count, and the same for `weighed`."""
    chunk = make_chunk(MODEL, len(WEIGHTS), seed=seed, reset=(3,))._replace(weight=jnp.asarray(WEIGHTS))
    spoilt = chunk._replace(targets=jnp.where(chunk.weight[:, None] == 0, np.nan, chunk.targets))
    return make_params(MODEL), spoilt, by_hand(chunk)


def assert_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cut", few(["preactivation", "state"], "preactivation"))
def test_theory(cut):
    params, chunk, plain = setup()
    assert_same(
        sg.variance.collect(MODEL, params, chunk, cut), sg.variance.collect(made(weighed, MODEL), params, plain, cut)
    )


@pytest.mark.slow
def test_online_b():
    params, chunk, plain = setup()
    noise = sg.variance.draw_b_noise(jax.random.key(1), len(WEIGHTS), 8)
    got = sg.variance.estimate_b_online(MODEL, params, chunk, noise)
    assert_same(got, sg.variance.estimate_b_online(made(weighed, MODEL), params, plain, noise))


@pytest.mark.parametrize("options", [{"window": 4}, pytest.param({"episode": 3}, marks=pytest.mark.slow)])
def test_carried(options):
    """Gradients, and all that is learnt from the losses, over a few windows of three streams."""
    params = make_params(MODEL)
    chunks, plain = (
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *streams)
        for streams in zip(*(setup(seed)[1:] for seed in range(3)), strict=True)
    )
    ours, theirs = (
        sg.batched(sg.carried(sg.uoro(model), least=1, refresh=1, **options), 3)
        for model in (MODEL, made(weighed, MODEL))
    )
    one, other = ours.init(params), theirs.init(params)
    for seed in range(3):
        got, one, info = ours.update(params, one, chunks, jax.random.key(seed))
        want, other, same = theirs.update(params, other, plain, jax.random.key(seed))
        assert_same((got, one, info), (want, other, same))
    assert int(one.shared.passes) > 0
