"""Truncated BPTT is its definition for any window and block, however the stream is cut and the parameters change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from tests.reference import truncated as oracle
from tests.tools import bptt, error, few, made, make_chunk, make_model, make_params, run, split

slow = pytest.mark.slow
# Chunks of 8 steps by the length of a block.
SPLITS = {1: [(8,), (1, 7), (1,) * 8], 2: [(8,), (2, 6), (2,) * 4], 4: [(8,), (4, 4)]}
# Windows that end within blocks and at their ends, shorter and longer than chunks and than the stream.
WINDOWS = [("lstm", 5, 2, False), ("lstm", 5, 2, True), ("lstm", 3, 1, False), ("lstm", 1, 1, True)]
WINDOWS += [("lstm", 12, 1, False), ("lstm", 12, 1, True), ("lstm", 4, 4, True), ("lstm", 7, 4, False)]
WINDOWS += [("nested", 4, 2, False), ("nested", 3, 1, True), ("gru", 3, 2, True), ("stack", 5, 2, False)]
WINDOWS += [("vanilla", 2, 1, False), ("vanilla", 6, 4, True), ("vanilla", 16, 4, False)]
BOTH = pytest.mark.parametrize("replay", [False, True])


@pytest.mark.parametrize("cell, window, every, replay", few(WINDOWS, WINDOWS[0]))
def test_definition(cell, window, every, replay):
    """While parameters stay the same, replaying changes nothing."""
    model = make_model(cell)
    params, chunk = make_params(model), make_chunk(model, 8, reset=(4,))
    want, exact = oracle.windowed_bptt(model, params, chunk, window, every), run(made(sg.bptt, model), params, [chunk])
    est = made(sg.windowed_bptt, model, window=window, every=every, replay=replay)
    for sizes in SPLITS[every]:
        grads, losses, state = run(est, params, split(chunk, sizes))
        assert error(grads.cell, want) < 1e-10, sizes
        assert error(grads.head, exact[0].head) < 1e-10
        np.testing.assert_allclose(losses, exact[1], rtol=1e-12)
        assert error(state.cell, exact[2].cell) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [(4, 2), (6, 2), (5, 1), (5, 4)])
def test_a_window_or_block_off_by_one_is_seen(wrong):
    """What the tests here hold it to tells windows and blocks apart that differ by a step."""
    model = make_model("lstm")
    params, chunk = make_params(model), make_chunk(model, 12)
    grads, _, _ = run(made(sg.windowed_bptt, model, window=5, every=2), params, split(chunk, (2, 4, 6)))
    assert error(grads.cell, oracle.windowed_bptt(model, params, chunk, 5, 2)) < 1e-10
    assert error(grads.cell, oracle.windowed_bptt(model, params, chunk, *wrong)) > 1e-3


def changing(model, window, every, replay, sizes, reset):
    """A stream with other parameters for each chunk: what the library makes of it, and what the textbook does."""
    stream = make_chunk(model, sum(sizes), seed=1, reset=reset)
    chunks = list(split(stream, sizes))
    params = [make_params(model, seed=seed) for seed in range(len(sizes))]
    est = made(sg.windowed_bptt, model, window=window, every=every, replay=replay)
    state, got = est.init(params[0]), []
    for theta, chunk in zip(params, chunks, strict=True):
        grads, state, info = est.update(theta, state, chunk, None)
        got.append((ravel_pytree(grads.cell)[0], info.loss))
    return (got, state.cell), oracle.windowed_bptt_stream(model, params, chunks, window, every, replay)


CHANGING = [
    ("lstm", 5, 2, (2, 4, 2, 2, 4), False),
    ("lstm", 5, 2, (2, 4, 2, 2, 4), True),
    ("lstm", 4, 1, (1, 1, 1, 2, 1, 1, 2, 1), True),
    ("nested", 5, 2, (2, 4, 2, 2), True),
    ("nested", 6, 1, (1, 2, 1, 1, 5), False),
    ("gru", 6, 3, (3, 3, 6, 3), True),
    ("stack", 11, 2, (2, 6, 2, 4, 2), False),
    ("stack", 11, 2, (2, 6, 2, 4, 2), True),
    ("vanilla", 3, 3, (3, 6, 3), False),
]


@pytest.mark.parametrize("cell, window, every, sizes, replay", few(CHANGING, *CHANGING[:2]))
def test_textbook_while_parameters_change(cell, window, every, sizes, replay):
    model = make_model(cell)
    for reset in ((), (3,), (0, 5, 6)):
        (got, end), (want, last) = changing(model, window, every, replay, sizes, reset)
        for (grads, losses), (textbook, expected) in zip(got, want, strict=True):
            np.testing.assert_allclose(grads, textbook, rtol=1e-9, atol=1e-11)
            np.testing.assert_allclose(losses, expected, rtol=1e-11)
        assert error(end, last) < 1e-11


def test_replaying_matters_while_parameters_change():
    """Gradients, losses and states differ from the first chunk with new parameters on; before, they do not."""
    model = make_model("lstm")
    (plain, end), _ = changing(model, 5, 2, False, (2, 4, 2, 2, 4), ())
    (again, other), _ = changing(model, 5, 2, True, (2, 4, 2, 2, 4), ())
    assert error(again[0], plain[0]) < 1e-14
    assert all(error(b, a) > 1e-3 for (_, a), (_, b) in zip(plain[1:], again[1:], strict=True))
    assert error(other, end) > 1e-3


@pytest.mark.parametrize("cell", few(["lstm", "nested"], "lstm"))
def test_one_block_is_bptt_of_the_chunk(cell):
    """With nothing stored, and so without knowing what an input looks like."""
    model = make_model(cell)
    unknown = sg.Model(model.cell._replace(example_input=None), model.head)
    params, chunk = make_params(model), make_chunk(model, 8, reset=(5,))
    est, exact = sg.windowed_bptt(unknown, window=4, every=4), made(sg.bptt, model)
    state, reference = est.init(params), exact.init(params)
    for part in split(chunk, (4, 4)):
        grads, state, info = est.update(params, state, part, None)
        want, reference, told = exact.update(params, reference, part, None)
        assert error((grads, info.loss, state.cell), (want, told.loss, reference.cell)) < 1e-13
        assert not jax.tree.leaves(state.memory)
    together = est.update(params, est.init(params), chunk, None)[0]
    assert error(together, run(exact, params, split(chunk, (4, 4)))[0]) < 1e-13


@pytest.mark.slow
@BOTH
def test_batches_while_parameters_change(replay):
    model = make_model("vanilla")
    est = made(sg.windowed_bptt, model, window=5, every=2, replay=replay)
    many = sg.batched(est, 3)
    states, singles = many.init(make_params(model)), [est.init(make_params(model)) for _ in range(3)]
    for update, length in enumerate((2, 2, 4, 2)):
        params = make_params(model, seed=update)
        chunks = [make_chunk(model, length, seed=10 * update + seed, reset=(seed - update,)) for seed in range(3)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chunks)
        grads, states, info = many.update(params, states, stacked, None)
        results = [est.update(params, state, chunk, None) for state, chunk in zip(singles, chunks, strict=True)]
        singles = [state for _, state, _ in results]
        assert error(grads, jax.tree.map(lambda *leaves: sum(leaves) / 3, *(grads for grads, _, _ in results))) < 1e-12
        np.testing.assert_allclose(info.loss, jnp.stack([told.loss for _, _, told in results]), rtol=1e-12)


@pytest.mark.slow
@BOTH
def test_float32(replay):
    """Inputs of either precision, as the stored ones are in that of the parameters; numbers as good as can be."""
    model = make_model("lstm")
    est = made(sg.windowed_bptt, model, window=6, every=2, replay=replay)
    params, chunk = make_params(model, dtype=jnp.float32), make_chunk(model, 8, reset=(5,), dtype=jnp.float32)
    want = oracle.windowed_bptt(model, make_params(model), make_chunk(model, 8, reset=(5,)), 6, 2)
    for inputs in (chunk.inputs, chunk.inputs.astype(jnp.float64)):
        grads, _, state = run(est, params, split(chunk._replace(inputs=inputs), (2, 2, 4)))
        assert error(grads.cell, want) < 1e-5
        floats = [leaf for leaf in jax.tree.leaves((grads, state)) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        assert len(floats) > 3 and all(leaf.dtype == jnp.float32 for leaf in floats)


@pytest.mark.slow
@BOTH
def test_what_is_stored(replay):
    """The last window - every inputs, and states; to replay, the oldest state is enough.

    What lies before the beginning of an episode is forgotten.
    """
    model = make_model("lstm")
    est, params = made(sg.windowed_bptt, model, window=7, every=2, replay=replay), make_params(model)
    chunk = make_chunk(model, 10)
    _, _, whole = run(made(sg.bptt, model), params, split(chunk, (5,)))
    for sizes, filled in (((2,), 2), ((2, 2), 4), ((2, 8), 5), ((4, 2, 4), 5)):
        past = run(est, params, split(chunk, sizes))[2].memory
        np.testing.assert_array_equal(past.inputs[5 - filled :], chunk.inputs[sum(sizes) - filled : sum(sizes)])
        assert past.states.h.shape == (1 if replay else 5, 2) and past.steps == filled
    assert error(jax.tree.map(lambda leaf: leaf[0], past.states), whole.cell) < 1e-12
    for sizes in ((2, 8), (4, 2, 4)):
        past = run(est, params, split(chunk._replace(reset=jnp.arange(10) == 6), sizes))[2].memory
        assert past.steps == 4 and past.begins.tolist() == [True, True, False, False, False]
        np.testing.assert_array_equal(past.inputs, jnp.concatenate([jnp.zeros((1, 1)), chunk.inputs[6:]]))
        np.testing.assert_array_equal(past.states.h[0], model.init_state(params).h)


@BOTH
def test_a_stream_may_begin_with_another_state(replay):
    """Replaying goes back to it, and not to where episodes begin."""
    model = make_model("lstm")
    params, chunk = make_params(model), make_chunk(model, 6)
    est, exact = made(sg.windowed_bptt, model, window=8, every=2, replay=replay), made(sg.bptt, model)
    start = jax.tree.map(lambda leaf: leaf + 0.5, exact.init(params).cell)
    want, reference, _ = exact.update(params, exact.init(params)._replace(cell=start), chunk, None)
    state, total = est.init(params)._replace(cell=start), None
    for part in split(chunk, (2, 2, 2)):
        grads, state, _ = est.update(params, state, part, None)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    assert error((total, state.cell), (want, reference.cell)) < 1e-12


@pytest.mark.slow
def test_a_long_window_is_bptt_of_the_whole_stream():
    model = make_model("stack")
    params, chunk = make_params(model), make_chunk(model, 9, reset=(4,))
    grads, _, _ = run(made(sg.windowed_bptt, model, window=30, every=3), params, split(chunk, (3, 6)))
    assert error(grads, bptt(model, params, chunk)) < 1e-12


@pytest.mark.slow
def test_an_update_can_itself_be_differentiated():
    """Its losses, which gives the gradient of BPTT, and its gradient, which gives the Hessian."""
    model = make_model("lstm")
    params, chunk = make_params(model), make_chunk(model, 6)
    flat, unravel = ravel_pytree(params)
    direction = jnp.asarray(np.random.default_rng(0).normal(size=flat.shape))
    for options in ({"window": 6, "every": 6}, {"window": 6}):
        est = made(sg.windowed_bptt, model, **options)

        def update(flat, est=est):
            grads, _, info = est.update(unravel(flat), est.init(params), chunk, None)
            return ravel_pytree(grads)[0], jnp.sum(info.loss)

        grads, loss = update(flat)
        assert error(jax.grad(lambda flat, update=update: update(flat)[1])(flat), grads) < 1e-12
        hessian = jax.hessian(lambda flat: jnp.sum(oracle.losses(model, unravel(flat), chunk, "state")))(flat)
        assert error(jax.jvp(update, (flat,), (direction,))[1], (hessian @ direction, grads @ direction)) < 1e-10
        assert loss > 0


def test_many_sets_of_parameters_at_once():
    """The whole update can be mapped over parameters, as for an ensemble."""
    model = make_model("vanilla")
    sets, chunk = [make_params(model, seed=seed) for seed in range(2)], make_chunk(model, 6)
    for options in ({"window": 4}, {"window": 3, "every": 3}):
        est = made(sg.windowed_bptt, model, **options)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sets)
        got = jax.vmap(lambda params, est=est: est.update(params, est.init(params), chunk, None)[0])(stacked)
        want = [est.update(params, est.init(params), chunk, None)[0] for params in sets]
        assert error(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *want)) < 1e-13
