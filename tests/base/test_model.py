"""A model run on its own: what it puts out and predicts, without any gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from tests.cells.libraries import library
from tests.tools import make_chunk, make_model, make_params, one_sentence, split


@pytest.mark.parametrize("cell", ["lstm", "stack", "nested"])
def test_run_is_the_cell_step_by_step(cell):
    model = make_model(cell)
    params, chunk = make_params(model), make_chunk(model, 5, reset=(3,))
    state, want = model.init_state(params), []
    for t in range(5):
        state = model.init_state(params) if t == 3 else state
        state = model.cell.step(params.cell, state, jax.tree.map(lambda leaf, t=t: leaf[t], chunk.inputs))
        want.append(model.cell.output(state))
    got, end = model.run(params, model.init_state(params), chunk.inputs, chunk.reset)
    np.testing.assert_allclose(got, np.stack(want), rtol=1e-12)
    # In pieces it is the same, and under vmap, and it ends where the step does.
    now, pieces = model.init_state(params), []
    for part in split(chunk, (2, 3)):
        outputs, now = model.run(params, now, part.inputs, part.reset)
        pieces.append(outputs)
    np.testing.assert_allclose(np.concatenate(pieces), got, rtol=1e-12)
    streams = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (model.init_state(params), chunk.inputs, chunk.reset))
    many, _ = jax.vmap(lambda *stream: model.run(params, *stream))(*streams)
    np.testing.assert_allclose(many[1], got, rtol=1e-12)
    for a, b, c in zip(*map(jax.tree.leaves, (state, end, now)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
        np.testing.assert_allclose(a, c, rtol=1e-12)


def test_run_goes_on_from_the_state_of_an_estimator():
    model = make_model("gru")
    params, chunk = make_params(model), make_chunk(model, 6)
    est, (first, second) = sg.rtrl(model), split(chunk, (4, 2))
    _, state, _ = est.update(params, est.init(params), first, None)
    outputs, _ = model.run(params, state.cell, second.inputs)
    whole, _ = model.run(params, model.init_state(params), chunk.inputs)
    np.testing.assert_allclose(outputs, whole[4:], rtol=1e-12)


def test_run_is_traced_once_and_keeps_the_dtype():
    traces = []

    def step(params, state, x):
        traces.append(x.shape)
        return jnp.tanh(params * state + x)

    cell = sg.cells.from_function(step, lambda key: jnp.ones(2), lambda: jnp.zeros(2))
    model = sg.Model(cell, sg.heads.squared_error(1))
    params = make_params(model, dtype=jnp.float32)
    outputs, state = model.run(params, model.init_state(params), np.ones((3, 2)))
    assert outputs.dtype == state.dtype == jnp.float32
    traced = len(traces)
    for _ in range(3):
        _, state = model.run(params, state, np.ones((3, 2)))
    assert len(traces) == traced


PREDICTIONS = {
    "softmax": (sg.heads.softmax(3), lambda logits: np.exp(logits) / np.exp(logits).sum()),
    "bernoulli": (sg.heads.bernoulli(3), lambda logits: 1 / (1 + np.exp(-logits))),
    "squared_error": (sg.heads.squared_error(3), lambda logits: logits),
}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_predictions(name):
    head, want = PREDICTIONS[name]
    rng = np.random.default_rng(0)
    params, output = {"w": rng.normal(size=(3, 2)), "b": rng.normal(size=3)}, rng.normal(size=2)
    got = head.predict(jax.tree.map(jnp.asarray, params), jnp.asarray(output))
    np.testing.assert_allclose(got, want(params["w"] @ output + params["b"]), rtol=1e-12)


MODEL = make_model("lstm")
X = jnp.zeros((4, 1))
WRONG = {
    "no params": (lambda p, s: (None, s, X), "params must be what model.init"),
    "params of another model": (
        lambda p, s: (make_params(make_model("gru")), s, X),
        "params.cell must have the structure of the model's own",
    ),
    "whole-number params": (lambda p, s: (jax.tree.map(lambda x: x.astype(int), p), s, X), "params.cell.* not int64"),
    "the estimator's state": (
        lambda p, s: (p, sg.bptt(MODEL).init(p), X),
        r"state must have the structure of the cell's own, model.init_state\(params\): it has state.cell.h",
    ),
    "the state of many": (
        lambda p, s: (p, jax.tree.map(lambda x: jnp.stack([x, x]), s), X),
        r"state is that of 2 streams, but inputs, \[B, T, ...\], have 4 along their first axis",
    ),
    "whole-number state": (lambda p, s: (p, jax.tree.map(lambda x: x.astype(int), s), X), "state.h must be .* not int"),
    "no inputs": (lambda p, s: (p, s, ()), "inputs has no arrays"),
    "no step": (lambda p, s: (p, s, X[:0]), "at least one step"),
    "one step": (lambda p, s: (p, s, X[0]), "one step of inputs must have the shape of the cell's input"),
    "NaN": (lambda p, s: (p, s, X.at[2].set(np.nan)), "inputs must be finite"),
    "a list": (lambda p, s: (p, s, [1.0]), r"inputs\[0\] must be an array, not float"),
    "reset of numbers": (lambda p, s: (p, s, X, jnp.zeros(4)), r"reset must be one bool per step, bool\[4\]"),
    "too few resets": (lambda p, s: (p, s, X, jnp.zeros(3, bool)), "same length along time"),
}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("case", WRONG)
def test_errors_of_run(case):
    spoil, match = WRONG[case]
    params = make_params(MODEL)
    with pytest.raises(ValueError, match=match) as error:
        MODEL.run(*spoil(params, MODEL.init_state(params)))
    assert one_sentence(error)


def equinox_cell():
    eqx = library("equinox")
    return sg.cells.from_equinox(eqx.nn.GRUCell(1, 2, key=jax.random.key(5)))


GIVEN = {
    "lstm": lambda: sg.cells.lstm(1, 2),
    "lru": lambda: sg.cells.lru(1, 2),
    "stack": lambda: sg.cells.stack(sg.cells.lru(1, 2, 2), sg.cells.gru(2, 2)),
    "equinox": equinox_cell,
}


@pytest.mark.parametrize("name", GIVEN)
def test_the_cell_of_a_model_is_the_one_that_was_given(name):
    """Estimators work on another form of it, where its parameters are not matrices; of the library's own, on itself."""
    cell = GIVEN[name]()
    model = sg.Model(cell, sg.heads.squared_error(2))
    assert model.cell is cell
    assert (sg.worked(model) is model) == (name == "lstm")
    assert sg.worked(model) is sg.worked(model) and sg.worked(sg.worked(model)).cell is sg.worked(model).cell
    params = model.init(jax.random.key(0))
    assert jax.tree.structure(params.cell) == jax.tree.structure(cell.init_params(jax.random.key(0)))
    matrices = jax.eval_shape(sg.worked(model).init, jax.random.key(0)).cell
    assert [x.shape for x in jax.tree.leaves(model.enter(params).cell)] == [x.shape for x in jax.tree.leaves(matrices)]


@pytest.mark.parametrize("name", GIVEN)
def test_an_estimator_of_the_worked_model_is_over_matrices(name):
    model = sg.Model(GIVEN[name](), sg.heads.squared_error(2))
    params, x = model.init(jax.random.key(0)), jnp.ones((4, 1))
    chunk, own, inner = sg.Chunk(x, jnp.ones((4, 2))), sg.rtrl(model), sg.rtrl(sg.worked(model))
    entered = model.enter(params)
    grads, _, info = own.update(params, own.init(params), chunk)
    matrices, _, same = inner.update(entered, inner.init(entered), chunk)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert jax.tree.structure(matrices) == jax.tree.structure(entered)
    np.testing.assert_allclose(info.loss, same.loss)


@pytest.mark.parametrize("name", GIVEN)
def test_another_head(name):
    """`dataclasses.replace` gives the model that was made with that head, whatever the old one has been used for."""
    cell, head = GIVEN[name](), sg.heads.squared_error(2)
    old = sg.Model(cell, sg.heads.softmax(3))
    old_params = old.init(jax.random.key(0))
    est, x = sg.rtrl(old), jnp.ones((4, 1))
    est.update(old_params, est.init(old_params), sg.Chunk(x, jnp.zeros(4, int)))
    outputs, _ = old.run(old_params, old.init_state(old_params), x)
    new, same = dataclasses.replace(old, head=head), sg.Model(cell, head)
    assert new == same and new.cell is cell and new.head is sg.worked(new).head is head
    params = new.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, params, same.init(jax.random.key(0)))
    chunk, found = sg.Chunk(x, jnp.ones((4, 2))), []
    for model in (new, same):
        est = sg.rtrl(model)
        found.append(est.update(params, est.init(params), chunk))
    jax.tree.map(np.testing.assert_array_equal, *found)
    np.testing.assert_allclose(new.run(params, new.init_state(params), x)[0], outputs, rtol=1e-12)
    assert new.predict(params, outputs).shape == (4, 2) and old.predict(old_params, outputs).shape == (4, 3)
