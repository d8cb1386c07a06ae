"""KeRNL is its recursion, with the learning of its kernel; exact where the kernel is the truth, which it finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from tests.reference import kernl as oracle
from tests.tools import (
    bptt,
    by_hand,
    cut_size,
    error,
    few,
    make_chunk,
    make_model,
    make_params,
    one_sentence,
    split,
    weighed,
)

SIZES = (1, 3, 2, 4)


def flat(tree) -> np.ndarray:
    return np.asarray(ravel_pytree(tree)[0])


def parts(chunk, sizes, axis=0):
    """Chunks of these lengths, one after another; time is that axis."""
    start = 0
    for size in sizes:
        yield jax.tree.map(lambda leaf, a=start, b=start + size: jax.lax.slice_in_dim(leaf, a, b, axis=axis), chunk)
        start += size


def kernel_of(model, cut, seed=0):
    """A β and a κ that no symmetry hides anything of."""
    rng = np.random.default_rng(seed)
    size, n = cut_size(model, "state"), cut_size(model, cut)
    return rng.normal(size=(size, n)), rng.uniform(0.4, 0.9, size=n)


def with_kernel(state, beta, kappa):
    return state._replace(shared=state.shared._replace(sensitivity=jnp.asarray(beta), decay=jnp.asarray(kappa)))


def compare(est, state, params, chunks, noises, want):
    """Gradients and what is learnt, chunk by chunk."""
    for chunk, noise, (cell, head, beta, kappa) in zip(chunks, noises, want, strict=True):
        grads, state, _ = est.update(params, state, chunk, jnp.asarray(noise))
        np.testing.assert_allclose(flat(grads.cell), cell, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(flat(grads.head), flat(head), rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(state.shared.sensitivity, beta, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(state.shared.decay, kappa, rtol=1e-9, atol=1e-10)
    return state


CASES = [
    ("vanilla", "state", "estimated"),
    ("vanilla", "preactivation", "estimated"),
    ("vanilla", "state", "exact"),
    ("lstm", "state", "exact"),
    ("lstm", "preactivation", "exact"),
    ("gru", "state", "estimated"),
    ("gru", "preactivation", "exact"),
    ("stack", "preactivation", "estimated"),
]


@pytest.mark.parametrize("cell, cut, immediate", few(CASES, CASES[0]))
def test_textbook(cell, cut, immediate):
    """With resets inside chunks and at their beginnings, weights, and twins that begin again."""
    model = make_model(cell)
    params, n = make_params(model), cut_size(model, cut)
    beta, kappa = kernel_of(model, cut)
    psi = np.random.default_rng(1).normal(size=(10, n))
    weight = jnp.asarray(np.random.default_rng(2).uniform(-1, 2, size=10))
    est = sg.kernl(model, 0.4, sigma=0.3, cut=cut, immediate=immediate, restart=3, noise="given")
    for reset, weights in (((2, 4), weight), (None, None)):
        chunk = make_chunk(model, 10, reset=reset)._replace(weight=weights)
        want = oracle.kernl(model, params, [chunk], SIZES, psi[None], beta, kappa, 0.4, 0.3, cut, immediate, 3)
        begin = with_kernel(est.init(params), beta, kappa)
        compare(est, begin, params, parts(chunk, SIZES), parts(psi, SIZES), want)
    learnt = want[-1]
    assert error(learnt[2], beta) > 0.02 and error(learnt[3], kappa) > 0.02


@pytest.mark.parametrize("cell, cut", few([("vanilla", "state"), ("lstm", "preactivation")], ("vanilla", "state")))
def test_streams_learn_together(cell, cut):
    """All share β and κ, have noise and episodes of their own; without `restart` a twin goes on for ever."""
    model = make_model(cell)
    params, n = make_params(model), cut_size(model, cut)
    beta, kappa = kernel_of(model, cut)
    streams = [make_chunk(model, 10, seed=seed, reset=(seed + 1, seed + 5)) for seed in range(3)]
    psi = np.random.default_rng(1).normal(size=(3, 10, n))
    many = sg.batched(sg.kernl(model, 0.4, sigma=0.3, cut=cut, restart=None, noise="given"), 3)
    want = oracle.kernl(model, params, streams, SIZES, psi, beta, kappa, 0.4, 0.3, cut)
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *streams)
    begin = with_kernel(many.init(params), beta, kappa)
    compare(many, begin, params, parts(together, SIZES, 1), parts(psi, SIZES, 1), want)


def test_it_begins_with_the_identity_and_one_time_constant():
    model = make_model("vanilla")
    params = make_params(model)
    shared = sg.kernl(model, time_constant=4.0).init(params).shared
    np.testing.assert_allclose(shared.sensitivity, np.eye(2))
    np.testing.assert_allclose(shared.decay, np.exp([-0.25, -0.25]))
    shared = sg.kernl(model, cut="preactivation").init(params).shared
    assert shared.sensitivity.shape == (2, 2) and not np.any(shared.sensitivity)


LEAKS = np.array([0.9, 0.6, 0.3])
LEFT, RIGHT = np.array([0.8, -0.5, 0.6]), np.array([0.7, 0.4, 0.9])  # v · u = 0.9


def linear_model(matrix):
    """h' = A h + W (x, 1): A is fixed, and W is learnt."""
    cell = sg.cells.affine(
        lambda affine, h, x: jnp.asarray(matrix, h.dtype) @ h + affine("w", x, 1),
        lambda key: {"w": jax.random.normal(key, (3, 3))},
        lambda: jnp.zeros(3),
        example_input=jnp.zeros(2),
    )
    return sg.Model(cell, sg.heads.squared_error(2))


# The two kinds of linear networks whose kernels KeRNL can express, with β and κ.
TRUTHS = {
    "estimated": (np.diag(LEAKS), np.eye(3), LEAKS),
    "exact": (np.outer(LEFT, RIGHT), np.outer(LEFT, RIGHT), np.full(3, RIGHT @ LEFT)),
}


@pytest.mark.parametrize("immediate", TRUTHS)
def test_with_the_right_kernel_it_is_rtrl(immediate):
    """A leaky network has A^k = I diag(κ)^k, one of rank 1 A^k = A κ^(k-1): then dh/dθ is exact."""
    matrix, beta, kappa = TRUTHS[immediate]
    model = linear_model(matrix)
    params, chunk = make_params(model), make_chunk(model, 12, reset=(5,))
    est = sg.kernl(model, 0.5, immediate=immediate, restart=4)
    state, total = with_kernel(est.init(params), beta, kappa), 0.0
    for number, part in enumerate(split(chunk, (3, 1, 4, 4))):
        grads, state, info = est.update(params, state, part, jax.random.key(number))
        total = total + flat(grads)
        assert np.max(info.diagnostics["missed"]) < 1e-10  # nothing is left to learn
    assert error(total, flat(bptt(model, params, chunk))) < 1e-10
    # It is no kernel that does it, but this one.
    state = with_kernel(est.init(params), beta, 0.9 * kappa)
    assert error(est.update(params, state, chunk, jax.random.key(0))[0], bptt(model, params, chunk)) > 1e-2


@pytest.mark.parametrize("immediate", TRUTHS)
def test_it_learns_the_kernel_of_a_linear_network(immediate):
    """From the identity and from time constants that are all wrong.

    The difference of the twins is linear in the noise, so that the truth has no error at all: steps end there that do
    not become smaller.
    """
    matrix, beta, kappa = TRUTHS[immediate]
    model = linear_model(matrix)
    params = make_params(model)
    est = sg.batched(sg.kernl(model, 0.8, time_constant=2.0, immediate=immediate), 8)
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.normal(size=(1500, 8, 4, 2)))
    targets = jnp.zeros((1500, 8, 4, 2))

    def step(state, now):
        number, x, target = now
        key = jax.random.fold_in(jax.random.key(0), number)
        _, state, info = est.update(params, state, sg.Chunk(x, target), key)
        return state, jnp.mean(info.diagnostics["missed"])

    state, missed = jax.jit(lambda: jax.lax.scan(step, est.init(params), (jnp.arange(1500), inputs, targets)))()
    np.testing.assert_allclose(state.shared.sensitivity, beta, atol=1e-9)
    np.testing.assert_allclose(state.shared.decay, kappa, atol=1e-9)
    assert missed[0] > 0.1 and missed[-1] < 1e-9


def test_no_trace_grows_for_ever():
    """Where a state grows, time constants end at 1,000 steps; where it changes its sign at each step, at none."""
    model = linear_model(np.diag([1.02, -0.5, 0.3]))
    params, est = make_params(model), sg.kernl(model, 0.9, restart=10)
    state = est.init(params)
    for number in range(60):
        state = est.update(params, state, make_chunk(model, 8, seed=number), jax.random.key(number))[1]
    np.testing.assert_allclose(state.shared.decay[:2], [0.999, 0.0])
    np.testing.assert_allclose(state.shared.decay[2], 0.3, atol=0.05)


def test_a_rate_of_zero_learns_nothing():
    model = make_model("vanilla")
    params, est = make_params(model), sg.kernl(model, 0)
    before = est.init(params)
    after = est.update(params, before, make_chunk(model, 5), jax.random.key(0))[1]
    np.testing.assert_array_equal(before.shared.sensitivity, after.shared.sensitivity)
    np.testing.assert_array_equal(before.shared.decay, after.shared.decay)


def test_weights():
    """As a head's own factors; where one is 0, the target may be anything."""
    model = make_model("gru")
    params, weight = make_params(model), np.array([0.5, 0.0, 2.0, -1.0, 0.0])
    chunk = make_chunk(model, 5, reset=(3,))._replace(weight=jnp.asarray(weight))
    hidden = chunk._replace(targets=jnp.where(weight[:, None] == 0, jnp.nan, chunk.targets))
    psi = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)))
    est, other = sg.kernl(model, noise="given"), sg.kernl(weighed(model), noise="given")
    grads, state, info = est.update(params, est.init(params), hidden, psi)
    want, _, told = other.update(params, other.init(params), by_hand(chunk), psi)
    assert error(grads, want) < 1e-12
    np.testing.assert_allclose(info.loss, told.loss)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("immediate", few(["estimated", "exact"]))
def test_advance_and_credit(immediate):
    """The two halves of an update: the same kernel is learnt, and credit is linear in the gradient at the output."""
    model = make_model("lstm")
    params, chunk = make_params(model), make_chunk(model, 7, reset=(2,))
    est = sg.kernl(model, immediate=immediate)
    whole, halves = est.init(params), est.init(params)
    for number, part in enumerate(split(chunk, (3, 4))):
        key = jax.random.key(number)
        grads, whole, info = est.update(params, whole, part, key)
        outputs, halves, trace = est.advance(params, halves, part.inputs, key, part.reset)
        np.testing.assert_allclose(outputs, info.outputs, rtol=1e-12)
        dl_dy = jax.vmap(jax.grad(lambda y, target: model.head.loss(params.head, y, target)))(outputs, part.targets)
        credit = est.credit(params, trace, dl_dy)
        assert error(credit, grads.cell) < 1e-10
        twice = jax.tree.map(lambda leaf: 2 * leaf, credit)
        assert error(est.credit(params, trace, 2 * dl_dy), twice) < 1e-10
        np.testing.assert_allclose(halves.shared.sensitivity, whole.shared.sensitivity, rtol=1e-12)


def test_a_reset_clears_what_is_not_finite():
    """In the state, the twin and the traces; and what streams share is not taken along."""
    model = make_model("vanilla")
    params = make_params(model)
    many = sg.batched(sg.kernl(model), 2)
    chunks = [make_chunk(model, 4, seed=seed, reset=(1,)) for seed in range(2)]
    chunk = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chunks)
    _, state, _ = many.update(params, many.init(params), chunk, jax.random.key(0))

    def spoilt(leaf):
        return leaf.at[0].set(jnp.nan) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    gone = state._replace(cell=jax.tree.map(spoilt, state.cell), memory=jax.tree.map(spoilt, state.memory))
    after = many.update(params, gone, chunk, jax.random.key(1))[1]
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(after))
    assert not np.array_equal(after.shared.sensitivity, state.shared.sensitivity)
    first = jnp.zeros((2, 4), bool).at[:, 0].set(True)
    grads, after, _ = many.update(params, gone, chunk._replace(reset=first), jax.random.key(1))
    want, clean, _ = many.update(params, state, chunk._replace(reset=first), jax.random.key(1))
    assert error(grads, want) < 1e-12
    np.testing.assert_allclose(after.shared.sensitivity, clean.shared.sensitivity, rtol=1e-12)


MODEL = make_model("vanilla")
ERRORS = {
    "learning_rate below 0": ({"learning_rate": -0.1}, "learning_rate must be at least 0 and below 1, .*not -0.1"),
    "learning_rate of 1": ({"learning_rate": 1.0}, "learning_rate must be at least 0 and below 1"),
    "learning_rate not a number": ({"learning_rate": "fast"}, "learning_rate must be a finite number, not 'fast'"),
    "sigma": ({"sigma": 0.0}, "sigma must be one positive, finite number, not 0.0"),
    "time_constant": ({"time_constant": 0}, "time_constant must be .*above 0, not 0"),
    "cut": ({"cut": "params"}, "cut must be one of 'state', 'preactivation', not 'params'"),
    "immediate": ({"immediate": "no"}, "immediate must be one of"),
    "restart": ({"restart": 0}, "restart must be a whole number of at least 1"),
    "noise": ({"noise": "pink"}, "noise must be one of"),
}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    options, match = ERRORS[case]
    with pytest.raises(ValueError, match=match) as found:
        sg.kernl(MODEL, **options)
    assert one_sentence(found)


@pytest.mark.usefixtures("as_a_user")
def test_refusals():
    """At the state each row of weights must enter few units; without weights there is nothing to trace."""
    plain = sg.cells.from_function(
        lambda p, h, x: jnp.tanh(p * h + x), lambda key: jnp.ones(2), lambda: jnp.zeros(2), products=False
    )
    for make in (
        lambda: sg.kernl(make_model("stack")),
        lambda: sg.kernl(sg.Model(plain, sg.heads.squared_error(2))),
    ):
        with pytest.raises(ValueError, match=r"kernl|preactivation") as found:
            make()
        assert one_sentence(found)
