"""PES is its textbook, and unbiased for the network whose parameters are noisy; plain ES is not.

Means over Gaussian noise are taken by quadrature, so that they are exact, and compared with the gradient of the same
quadrature of the loss, by backpropagation through the noisy networks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from tests.reference import pes as oracle
from tests.reference.unrolled import resets
from tests.tools import (
    bptt,
    by_hand,
    error,
    few,
    gaussian_nodes,
    make_chunk,
    make_model,
    make_params,
    one_sentence,
    split,
    weighed,
)


def flat(tree) -> np.ndarray:
    return np.asarray(ravel_pytree(tree)[0])


def size_of(params) -> int:
    return flat(params.cell).size


SIZES = (2, 1, 3, 2)
CASES = [(cell, accumulate) for cell in ("vanilla", "lstm", "gru", "stack", "nested") for accumulate in (True, False)]


@pytest.mark.parametrize("cell, accumulate", few(CASES, ("vanilla", True), ("lstm", True), ("vanilla", False)))
def test_textbook(cell, accumulate):
    """With resets inside chunks and at their beginnings, weights, and a σ that is another one in each chunk."""
    model = make_model(cell)
    params = make_params(model)
    P = size_of(params)
    noise = np.random.default_rng(0).normal(size=(len(SIZES), 3, P))
    sigmas = [0.3, 0.1, 0.2, 0.4]
    est = sg.pes(model, lambda n: jnp.asarray(sigmas)[n], particles=6, accumulate=accumulate, noise="given")
    weight = jnp.asarray(np.random.default_rng(2).uniform(-1, 2, size=8))
    for reset, weights in (((1, 4, 6), weight), (None, None)):
        chunks = list(split(make_chunk(model, 8, reset=reset)._replace(weight=weights), SIZES))
        state = est.init(params)
        want = oracle.pes(model, params, chunks, noise, sigmas, accumulate)
        for chunk, u, (cell_grads, head, losses) in zip(chunks, noise, want, strict=True):
            grads, state, info = est.update(params, state, chunk, jnp.asarray(u))
            np.testing.assert_allclose(flat(grads.cell), cell_grads, rtol=1e-8, atol=1e-9)
            np.testing.assert_allclose(flat(grads.head), flat(head), rtol=1e-9, atol=1e-10)
            np.testing.assert_allclose(info.loss, losses, rtol=1e-10)


def tiny_model():
    """Two weights: few enough to integrate over the noise of two chunks. A sine has no poles to slow that down."""
    cell = sg.cells.affine(
        lambda affine, h, x: jnp.sin(affine("w", h, x)),
        lambda key: {"w": jax.random.normal(key, (1, 2))},
        lambda: jnp.zeros(1),
        example_input=jnp.zeros(1),
    )
    model = sg.Model(cell, sg.heads.squared_error(2))
    return model, make_params(model)._replace(cell={"w": jnp.asarray([[0.8, -0.5]])})


SIGMAS = (0.1, 0.15)


def expected_loss(model, params, chunks, nodes, weights):
    """The mean over noise `[nodes, 2, P]` of the loss of both chunks, θ + σ_τ u_τ in the chunk τ."""
    fresh = model.init_state(params)

    def one(u):
        theta, unravel = ravel_pytree(params.cell)
        state, total = fresh, 0.0
        for chunk, noise, sigma in zip(chunks, u, SIGMAS, strict=True):
            for t, begins in enumerate(resets(chunk)):
                state = fresh if begins else state
                state = model.cell.step(unravel(theta + sigma * noise), state, chunk.inputs[t])
                total += model.head.loss(params.head, model.cell.output(state), chunk.targets[t])
        return total

    return jnp.asarray(weights) @ jax.vmap(one)(jnp.asarray(nodes))


def mean_of_both(est, params, chunks, nodes, weights):
    """The mean over noise of the gradients of two chunks, summed."""

    @jax.jit
    @jax.vmap
    def both(u):
        first, state, _ = est.update(params, est.init(params), chunks[0], u[0][None])
        second, _, _ = est.update(params, state, chunks[1], u[1][None])
        return jax.tree.map(jnp.add, first, second)

    grads = both(jnp.asarray(nodes))
    return jax.tree.map(lambda leaf: np.tensordot(weights, leaf, axes=1), grads)


@pytest.mark.parametrize("reset", few([None, (2,), (4,)], None, (4,)))
def test_the_mean_is_the_gradient_of_the_expected_loss(reset):
    """Exactly, over the noise of two chunks of three steps, of which the second has another σ; also for the head."""
    model, params = tiny_model()
    chunks = list(split(make_chunk(model, 6, reset=reset), (3, 3)))
    nodes, weights = gaussian_nodes(12, 2, size_of(params))
    want = jax.grad(lambda params: expected_loss(model, params, chunks, nodes, weights))(params)
    est = sg.pes(model, lambda n: jnp.asarray(SIGMAS)[n], particles=2, noise="given")
    got = mean_of_both(est, params, chunks, nodes, weights)
    assert error(got, want) < 1e-10
    # The noise is large enough to tell it from the gradient without any, and the past counts.
    whole = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *chunks)
    assert error(got, bptt(model, params, whole)) > 1e-2
    plain = sg.pes(model, lambda n: jnp.asarray(SIGMAS)[n], particles=2, accumulate=False, noise="given")
    assert error(mean_of_both(plain, params, chunks, nodes, weights).cell, want.cell) > 1e-2


def test_more_particles_are_the_mean_of_pairs():
    """Each pair is an estimate of its own, with states of its own."""
    model = make_model("gru")
    params = make_params(model)
    noise = np.random.default_rng(0).normal(size=(2, 4, size_of(params)))
    chunks = list(split(make_chunk(model, 6, reset=(4,)), (3, 3)))

    def total(particles, noise):
        est = sg.pes(model, 0.2, particles=particles, noise="given")
        state, grads = est.init(params), []
        for chunk, u in zip(chunks, noise, strict=True):
            found, state, _ = est.update(params, state, chunk, jnp.asarray(u))
            grads.append(flat(found))
        return sum(grads)

    want = np.mean([total(2, noise[:, i : i + 1]) for i in range(4)], axis=0)
    assert error(total(8, noise), want) < 1e-10


def test_antithetic():
    """The sign of the noise changes nothing, so that what the loss is even in cancels: a constant in it is no noise."""
    model = make_model("vanilla")
    params, chunk = make_params(model), make_chunk(model, 4)
    u = jnp.asarray(np.random.default_rng(0).normal(size=(2, size_of(params))))
    est = sg.pes(model, 0.1, particles=4, noise="given")
    one = est.update(params, est.init(params), chunk, u)[0]
    assert error(est.update(params, est.init(params), chunk, -u)[0], one) < 1e-12

    def shifted(head, y, target):
        return 1e3 + model.head.loss(head, y, target)

    other = sg.Model(model.cell, sg.heads.from_function(model.head.init_params, shifted))
    far = sg.pes(other, 0.1, particles=4, noise="given")
    assert error(far.update(params, far.init(params), chunk, u)[0].cell, one.cell) < 1e-8


@pytest.mark.parametrize("accumulate", [True, False])
def test_small_noise_along_a_basis(accumulate):
    """With noise along each axis of θ in the first chunk, a pair for each, the sum is the gradient up to O(σ²)."""
    model = make_model("gru")
    params, chunk = make_params(model), make_chunk(model, 4)
    P = size_of(params)
    errors = []
    for sigma in (1e-2, 1e-3):
        est = sg.pes(model, sigma, particles=2 * P, accumulate=accumulate, noise="given")
        got = est.update(params, est.init(params), chunk, jnp.sqrt(P) * jnp.eye(P))[0]
        errors.append(error(got.cell, bptt(model, params, chunk).cell))
    assert errors[0] < 0.1 and errors[1] < 2e-2 * errors[0]


def test_weights():
    """As a head's own factors; where one is 0, the target may be anything."""
    model = make_model("gru")
    params, weight = make_params(model), np.array([0.5, 0.0, 2.0, -1.0, 0.0])
    chunk = make_chunk(model, 5, reset=(3,))._replace(weight=jnp.asarray(weight))
    hidden = chunk._replace(targets=jnp.where(weight[:, None] == 0, jnp.nan, chunk.targets))
    u = jnp.asarray(np.random.default_rng(0).normal(size=(1, size_of(params))))
    est, other = (sg.pes(m, 0.1, particles=2, noise="given") for m in (model, weighed(model)))
    grads, _, info = est.update(params, est.init(params), hidden, u)
    want, _, told = other.update(params, other.init(params), by_hand(chunk), u)
    assert error(grads, want) < 1e-10
    np.testing.assert_allclose(info.loss, told.loss)


def test_streams_have_noise_of_their_own():
    model = make_model("vanilla")
    params = make_params(model)
    est = sg.pes(model, 0.2, particles=4, noise="given")
    many = sg.batched(est, 3)
    streams = [make_chunk(model, 3, seed=seed, reset=(seed,)) for seed in range(3)]
    noise = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 2, size_of(params))))
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *streams)
    state, each = many.init(params), [est.init(params) for _ in streams]
    for u in noise:
        grads, state, _ = many.update(params, state, together, u)
        alone = [est.update(params, s, chunk, v) for s, chunk, v in zip(each, streams, u, strict=True)]
        each = [found[1] for found in alone]
        want = jax.tree.map(lambda *leaves: sum(leaves) / 3, *[found[0] for found in alone])
        assert error(grads, want) < 1e-10
    one = many.update(params, state, together, jnp.repeat(noise[0, :1], 3, axis=0))[0]
    assert error(one, many.update(params, state, together, noise[0])[0]) > 1e-3


@pytest.mark.parametrize("accumulate", few([True, False], True))
def test_advance_and_credit(accumulate):
    """`advance` says what the network at θ says; `credit` is the update for the loss dl_doutput · y."""
    model = make_model("lstm")

    def linear(head, y, target):
        return jnp.sum(target * y)

    other = sg.Model(model.cell, sg.heads.from_function(lambda key, width: (), linear))
    params = make_params(model)
    bare = params._replace(head=())
    rng = np.random.default_rng(0)
    est, same = (sg.pes(m, 0.1, particles=4, accumulate=accumulate) for m in (model, other))
    state, whole = est.init(params), same.init(bare)
    chunk = make_chunk(model, 7, reset=(4,))
    said, _ = model.run(params, model.init_state(params), chunk.inputs, chunk.reset)
    start = 0
    for number, part in enumerate(split(chunk, (3, 4))):
        key, length = jax.random.key(number), len(part.targets)
        outputs, state, trace = est.advance(params, state, part.inputs, key, part.reset)
        np.testing.assert_allclose(outputs, said[start : start + length], rtol=1e-12)
        dl_dy = jnp.asarray(rng.normal(size=outputs.shape))
        want, whole, _ = same.update(bare, whole, part._replace(targets=dl_dy), key)
        assert error(est.credit(params, trace, dl_dy), want.cell) < 1e-10
        start += length


def test_a_reset_clears_what_is_not_finite():
    model = make_model("vanilla")
    params, chunk = make_params(model), make_chunk(model, 4, reset=(0,))
    est = sg.pes(model)
    state = est.update(params, est.init(params), chunk, jax.random.key(0))[1]
    gone = state._replace(
        cell=jax.tree.map(lambda leaf: leaf * jnp.nan, state.cell),
        memory=jax.tree.map(lambda leaf: leaf * jnp.nan, state.memory),
    )
    grads, after, info = est.update(params, gone, chunk, jax.random.key(1))
    want, clean, _ = est.update(params, state, chunk, jax.random.key(1))
    assert error(grads, want) < 1e-12 and np.all(np.isfinite(info.loss))
    assert error(after.memory, clean.memory) < 1e-12
    later = make_chunk(model, 4, reset=(2,))
    after = est.update(params, gone, later, jax.random.key(1))[1]
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(after))


def test_noise_is_drawn_anew_for_each_chunk():
    """Its spread is σ: the mean over keys of the squared score is that of unit noise, to five standard errors."""
    model = make_model("vanilla")
    params, chunk = make_params(model), make_chunk(model, 2)
    est = sg.pes(model, 0.5, particles=2)
    state = est.update(params, est.init(params), chunk, jax.random.key(0))[1]
    keys = jax.random.split(jax.random.key(1), 500)
    after = jax.vmap(lambda key: est.update(params, state, chunk, key)[1].memory.score)(keys)
    added = np.asarray(after - state.memory.score[None]) * 0.5
    assert abs(np.mean(added**2) - 1) < 5 * np.sqrt(2 / added.size)


MODEL = make_model("vanilla")
ERRORS = {
    "sigma of 0": ({"sigma": 0.0}, "sigma must be one positive, finite number, not 0.0"),
    "sigma no number": ({"sigma": "small"}, "sigma must be one"),
    "schedule": ({"sigma": lambda n: 0.0 * n}, r"sigma\(0\) must be one positive"),
    "odd particles": ({"particles": 3}, "particles must be an even number of at least 2, .*not 3"),
    "no particles": ({"particles": 0}, "particles must be an even number of at least 2, .*not 0"),
    "signs": ({"noise": "rademacher"}, "Gaussian noise.*'rademacher'"),
    "accumulate": ({"accumulate": "yes"}, "accumulate must be True or False, not 'yes'"),
}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    options, match = ERRORS[case]
    with pytest.raises(ValueError, match=match) as found:
        sg.pes(MODEL, **options)
    assert one_sentence(found)
