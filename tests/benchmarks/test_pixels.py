"""The stack of `benchmarks.pixels`: its recurrence is the complex one, gradients are exact, and a toy run trains."""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from benchmarks import pixels
from benchmarks.pixels_model import layer, make_model
from tests.tools import error

LENGTH, STREAMS = 14, 3


def batch(seed: int = 1) -> sg.Chunk:
    digits = pixels.make_digits(STREAMS, seed, 784 // LENGTH)
    targets = jnp.broadcast_to(digits.labels[:, None], (STREAMS, LENGTH))
    reset = jnp.broadcast_to((jnp.arange(LENGTH) == 0)[None], (STREAMS, LENGTH))
    return sg.Chunk(digits.inputs.astype(float), targets, reset, jnp.full((STREAMS, LENGTH), 1 / LENGTH))


def moved(params: sg.Params, seed: int = 0) -> sg.Params:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape), params)


def test_recurrence_is_complex():
    """h_t = λ h_{t-1} + γ (B x_t) in complex numbers."""
    cell = layer(2, 5, 3, r_min=0.9)
    params = cell.init_params(jax.random.key(0))
    xs = jax.random.normal(jax.random.key(1), (6, 2))
    state, h = cell.init_state(), np.zeros(5, complex)
    lam = np.exp(-np.exp(params["nu"]) + 1j * np.exp(params["theta"]))
    b = np.asarray(params["b"])
    for x in xs:
        state = cell.step(params, state, x)
        drive = b[:, :2] @ np.asarray(x) + b[:, 2]
        h = lam * h + np.exp(params["gamma"]) * (drive[:5] + 1j * drive[5:])
    assert np.abs(state.real + 1j * state.imag - h).max() < 1e-12
    assert np.all((np.abs(lam) >= 0.9) & (np.abs(lam) < 1))
    assert np.allclose(np.exp(params["gamma"]) ** 2, 1 - np.abs(lam) ** 2)


@pytest.mark.slow
def test_prediction_is_the_mean_of_logits():
    """Its value is the mean over the sequence so far, and its derivative that of the last logits."""
    model, chunk = make_model(2, 4, 0.9), batch()
    params = moved(jax.jit(model.init)(jax.random.key(0)))

    def outputs(params):
        return model.run(params, model.init_state(params), chunk.inputs[0])[0]

    def logits(params):
        """Without the mean, by stacking the same layers anew."""
        cell = sg.cells.stack(layer(1, 4, 4, 0.9), layer(4, 4, 10, 0.9))
        plain = sg.Model(cell, model.head)
        return plain.run(params, plain.init_state(params), chunk.inputs[0])[0]

    def with_derivatives(function):
        return jax.jit(lambda params: (function(params), jax.jacrev(function)(params).cell[0]["b"]))(params)

    (means, got), (last, want) = with_derivatives(outputs), with_derivatives(logits)
    assert np.abs(means - np.cumsum(last, axis=0) / np.arange(1, LENGTH + 1)[:, None]).max() < 1e-10
    assert np.abs(got - want).max() < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("block", "chunk_length"), [("mlp", 1), ("glu", 7)])
def test_rtrl_is_bptt(block, chunk_length):
    """In chunks, over two sequences in a row, the second of which begins afresh."""
    model = make_model(2, 4, 0.9, block)
    params, key = moved(jax.jit(model.init)(jax.random.key(0))), jax.random.key(1)
    whole_gradient = jax.jit(pixels.whole_gradient, static_argnums=(0, 4))  # one trace for both sequences
    rtrl, bptt = sg.batched(sg.rtrl(model), STREAMS), sg.batched(sg.bptt(model), STREAMS)
    online = offline = None
    states = [rtrl.init(params), bptt.init(params)]
    for seed in (1, 2):
        online, states[0] = whole_gradient(rtrl, params, states[0], batch(seed), chunk_length, key)
        offline, states[1] = whole_gradient(bptt, params, states[1], batch(seed), LENGTH, key)
    assert error(online, offline) < 1e-10
    cut, _ = whole_gradient(bptt, params, bptt.init(params), batch(2), 1, key)
    assert error(cut, offline) > 1e-2  # what lies before the step counts


@pytest.mark.slow
@pytest.mark.parametrize("update", ["sequence", "chunk"])
def test_a_toy_run_learns(update, tmp_path, monkeypatch):
    """All rates and seeds, each its own; rows are added to those that are there, which may have other columns."""
    pixels.write(tmp_path / "pixels.csv", [{"rate": "0.5", "older": "x"}])
    words = ["--preset", "smoke", "--rates", "0", "0.02", "--seeds", "1", "--epochs", "4", "--update", update]
    monkeypatch.setattr(sys, "argv", ["pixels", *words, "--chunk", "7", "--out", str(tmp_path)])
    pixels.main()
    rows = pixels.read_columns(tmp_path / "pixels.csv")
    assert (rows["rate"], rows["older"], rows["done"]) == (["0.5", "0.0", "0.02"], ["x", "", ""], ["", "4", "4"])
    untrained, trained = map(float, rows["test_loss"][1:])
    assert trained < untrained - 0.2


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["rtrl", "dni"])  # nothing that outlives a sequence, and something that does
def test_a_run_that_was_stopped_goes_on(estimator, tmp_path, monkeypatch):
    """To the rows of the unbroken one: parameters, optimiser, rate and order are those that it would have had."""
    words = [
        "pixels",
        "--preset",
        "smoke",
        "--estimator",
        estimator,
        "--chunk",
        "7",
        "--state",
        str(tmp_path / "s.npz"),
    ]
    monkeypatch.setattr(sys, "argv", words)
    digits, held_out = pixels.make_digits(64, 0, 56), pixels.make_digits(32, 1, 56)

    def measured(rows):
        return [(row["done"], row["test_loss"], row["test_accuracy"]) for row in rows]

    first, whole = pixels.train(pixels.read_options(), digits, held_out)
    (tmp_path / "s.npz").unlink()
    broken = pixels.train(pixels.read_options(), digits, held_out)
    assert measured(next(broken)) == measured(first)
    broken.close()
    (rest,) = pixels.train(pixels.read_options(), digits, held_out)
    assert measured(rest) == measured(whole)


@pytest.mark.slow
def test_what_stays_stays():
    """`--freeze` and `--recurrent-rate` are of single parameters by name."""
    options = argparse.Namespace(
        batch=STREAMS, chunk=LENGTH, decay=0.01, freeze=["theta"], recurrent_rate=0.5, loss="every", update="sequence"
    )
    model = make_model(2, 4, 0.9)
    trainer = pixels.make_trainer(model, sg.batched(sg.bptt(model), STREAMS), options, updates=10)
    digits = pixels.make_digits(STREAMS, 0, 784 // LENGTH)
    digits = digits._replace(inputs=digits.inputs.astype(float))
    begin = trainer.begin(jax.random.key(0))
    end = jax.jit(trainer.epoch)(begin, jnp.array(0.1), jax.random.key(1), digits)
    before, after = begin[0].cell[0], end[0].cell[0]
    assert np.array_equal(before["theta"], after["theta"])
    # Adam's first step is the rate, for the recurrence half of it.
    assert np.abs(np.abs(after["nu"] - before["nu"]).max() - 0.05) < 1e-3
    assert np.abs(after["c"] - before["c"]).max() > 0.09
