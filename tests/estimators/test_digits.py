"""Counters, masks and random keys in a cell's state are carried along as digits, and are numbers to no estimator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from tests.estimators.registered import cases, make, usual
from tests.tools import error, one_sentence

INPUTS = np.random.default_rng(0).normal(size=(3, 4, 2))


@functools.cache
def model_with(digits):
    """A cell with a counter, a mask and a key beside its numbers, or without; they do nothing to these."""

    def step(params, state, x):
        new = {"h": jnp.tanh(params["w"] @ state["h"] + x)}
        if digits:
            new |= {"a": state["a"] + 1, "key": jax.random.fold_in(state["key"], 1), "mask": ~state["mask"]}
        return new

    def init_state():
        rest = {"a": jnp.array(60_000), "key": jax.random.key(5), "mask": jnp.ones(2, bool)} if digits else {}
        return {"h": jnp.zeros(2)} | rest

    init_params = lambda key: {"w": jax.random.normal(key, (2, 2))}  # noqa: E731
    cell = sg.cells.from_function(step, init_params, init_state, lambda state: state["h"], jnp.zeros(2))
    return sg.Model(cell, sg.heads.squared_error(2))


def train(est, model, keys):
    """Gradients of three chunks, the state at the end, and the cell's own."""
    params = model.init(jax.random.key(0))
    state, found = est.init(params), []
    for x, key in zip(INPUTS, keys, strict=True):
        grads, state, _ = est.update(params, state, sg.Chunk(jnp.asarray(x), jnp.ones((4, 2))), key)
        found.append(grads)
    worked = model.cell.worked
    return found, state, worked.state(state.cell)


def test_which_are_numbers():
    numbers = model_with(True).numbers
    assert numbers.sum() == 2 and len(numbers) > 8 and model_with(False).numbers.all()
    stacked = sg.Model(sg.cells.stack(sg.cells.gru(2, 2), model_with(True).cell), sg.heads.squared_error(2))
    assert stacked.numbers.sum() == 4 and sg.Model(sg.cells.lstm(1, 2), sg.heads.softmax(2)).numbers.all()


def test_the_prediction_of_dni_reads_numbers_alone():
    """With digits of 60,000 and of a key as features it would not learn at all: the step is normalised by them."""
    plain, full = ((sg.dni(model_with(digits)), model_with(digits)) for digits in (False, True))
    want, (got, state, _) = train(*plain, [None] * 3)[0], train(*full, [None] * 3)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < 1e-12
    assert state.shared.weights.shape == (len(full[1].numbers), 2 + 1)
    assert np.all(np.asarray(state.shared.weights)[~full[1].numbers] == 0) and np.any(state.shared.weights != 0)


def test_features_of_ones_own_see_numbers_alone():
    seen = []
    train(sg.dni(model_with(True), features=lambda h: (seen.append(h.shape), h[:1])[1]), model_with(True), [None] * 3)
    assert set(seen) == {(2,)}


def test_the_noise_of_reinforce_leaves_digits_alone():
    """With a noise of this size a counter would be another, and a key a key of nothing."""
    model = model_with(True)
    est = sg.reinforce(model, sigma=3.0)
    grads, _, end = train(est, model, jax.random.split(jax.random.key(1), 3))
    assert int(end["a"]) == 60_000 + INPUTS[..., 0].size and bool(jnp.all(end["mask"]))
    key = functools.reduce(jax.random.fold_in, [1] * INPUTS[..., 0].size, jax.random.key(5))
    assert bool(end["key"] == key)
    assert np.all(np.isfinite(grads[-1].cell["w"])) and np.any(grads[-1].cell["w"] != 0)
    size = len(model.numbers)
    sg.reinforce(model, q0=jnp.ones(size))
    with pytest.raises(
        ValueError, match="q0 must be a diagonal where counters, masks or keys are in the state"
    ) as refusal:
        sg.reinforce(model, q0=jnp.eye(size))
    assert one_sentence(refusal)


@cases(lambda row, cut: True, lambda row, cut: usual(row, cut) and row.name in ("rtrl", "uoro"))
def test_digits_come_through_every_estimator(row, cut):
    """The counter has counted; where there is no noise, gradients are those of the cell without digits."""
    model, keys = model_with(True), [jax.random.key(0)] * 3
    grads, _, end = train(make(row, cut, model), model, keys)
    assert int(end["a"]) == 60_000 + INPUTS[..., 0].size
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))
    if not row.noisy:
        want, _, _ = train(make(row, cut, model_with(False)), model_with(False), keys)
        assert all(error(a, b) < 1e-10 for a, b in zip(grads, want, strict=True))
