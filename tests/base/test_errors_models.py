"""Cells, heads and models that do not fit together are named in one sentence, most of them when they are made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from tests.tools import nested_cell, one_sentence

pytestmark = pytest.mark.usefixtures("as_a_user")
KEY = jax.random.key(0)
MODEL = sg.Model(sg.cells.vanilla(3, 4), sg.heads.softmax(5))
LSTM, HEAD = sg.cells.lstm(3, 4), sg.heads.softmax(5)
T = 6
X, Y = jnp.zeros((T, 3)), jnp.zeros(T, int)


def a_cell(step, init_params=None, init_state=None, **options):
    """A cell of `affine`, with one matrix [4, 8] unless it is told otherwise."""
    init_params = init_params or (lambda key: {"w": jnp.ones((4, 8))})
    return sg.cells.affine(step, init_params, init_state or (lambda: jnp.zeros(4)), **options)


def plain(affine, state, x):
    return jnp.tanh(affine("w", sg.cells.features(state, x)))


def stepped(cell):
    return cell.step(cell.init_params(KEY), cell.init_state(), X[0])


def of_function(step=lambda p, s, x: s * p, params=lambda k: jnp.ones(2), state=lambda: jnp.zeros(2), **options):
    return sg.cells.from_function(step, params, state, **options)


CELLS = {
    "features for a vector": (
        lambda: stepped(a_cell(plain, lambda k: {"w": jnp.ones(3)})),
        r"affine\('w'\) takes no features: its shape is \(3,\)",
    ),
    "no features for a matrix": (
        lambda: stepped(a_cell(lambda affine, s, x: affine("w"))),
        r"needs a vector of 8 features.* the shape of these is nothing",
    ),
    "a name that is not in the tree": (
        lambda: stepped(a_cell(plain, lambda k: {"w": {"v": jnp.ones((4, 8))}})),
        r"asked for 'w' and there are only 'w.v'",
    ),
    "no weights": (lambda: a_cell(plain, lambda k: {}), "params has no arrays"),
    "whole-number weights": (
        lambda: a_cell(plain, lambda k: {"w": jnp.ones((4, 8), int)}),
        r"params\['w'\] .* not int",
    ),
    "whole-number affine state": (
        lambda: a_cell(plain, None, lambda: jnp.zeros(4, int)),
        "state must have an array of floating-point",
    ),
    "affine of numbers": (lambda: sg.cells.affine(3, 4, 5), "step must be a function, not 3"),
    "init_params without a key": (lambda: of_function(params=lambda: jnp.ones(2)), r"called as init_params\(key\)"),
    "init_state with a key": (lambda: of_function(state=lambda k: jnp.zeros(2)), r"called as init_state\(\)"),
    "step of two arguments": (lambda: of_function(lambda p, s: s), r"called as step\(params, state, x\)"),
    "output of a number": (lambda: a_cell(plain, output=jnp.sum), r"output must return one vector .* not shape \(\)"),
    "output of a matrix": (lambda: of_function(output=lambda s: jnp.outer(s, s)), r"one vector .* not shape \(2, 2\)"),
    "output of a pair": (lambda: of_function(output=lambda s: (s, s)), "one vector .* not tuple"),
    "output no function": (lambda: a_cell(plain, output=3), "output must be a function"),
    "whole-number params": (lambda: of_function(params=lambda k: jnp.ones(2, int)), "params must be .* not int64"),
    "output of complex numbers": (lambda: of_function(output=lambda s: s + 0j), "real numbers .* not complex128"),
    "example_input a word": (lambda: of_function(example_input="x"), "example_input must be one x.* not 'x'"),
    "features of a matrix": (lambda: sg.cells.features(jnp.zeros((2, 2)), jnp.zeros(2)), "state and x must be vectors"),
    "init_weights without a key": (lambda: sg.cells.init_weights(0, 4, 2), "key must be a single JAX PRNG key"),
    "init_weights of nothing": (lambda: sg.cells.init_weights(KEY, 4, 0), "fan_in must be a whole number"),
    "forget_bias a word": (
        lambda: sg.cells.lstm(3, 4, forget_bias="1"),
        "forget_bias must be a finite number, not '1'",
    ),
    "forget_bias NaN": (lambda: sg.cells.lstm(3, 4, forget_bias=np.nan), "forget_bias must be a finite number"),
    "stack of other widths": (
        lambda: sg.cells.stack(LSTM, sg.cells.gru(5, 2)),
        r"output of layer 0 must have the shape of the input of layer 1, \(5,\), but its shape is \(4,\)",
    ),
    "stack of another structure": (
        lambda: sg.cells.stack(LSTM, nested_cell()),
        "output of layer 0 must have the structure of the input of layer 1",
    ),
    "stack of a list": (lambda: sg.cells.stack([LSTM]), "cells one by one.* layer 0 is of type list"),
    "stack with a head": (lambda: sg.cells.stack(LSTM, HEAD), "cells one by one.* layer 1 is of type Head"),
    "model the wrong way round": (lambda: sg.Model(HEAD, LSTM), "cell must be a Cell.* not of type Head"),
    "model of a function": (lambda: sg.Model(sg.cells.lstm, HEAD), "cell must be a Cell.* not of type function"),
    "model without a head": (lambda: sg.Model(LSTM, None), "head must be a Head.* not of type NoneType"),
    "model.init of a seed": (lambda: MODEL.init(0), "key must be a single JAX PRNG key"),
    "model.init of many keys": (lambda: MODEL.init(jax.random.split(KEY, 2)), "key must be a single JAX PRNG key"),
    "head of a loss of two": (lambda: sg.heads.from_function(lambda k: (), lambda p, y: y), r"called as loss\(params"),
    "predict of one": (
        lambda: sg.heads.from_function(lambda k: (), lambda p, y, t: 0.0, lambda p: p),
        r"called as predict\(params, output\)",
    ),
    "predict that is not there": (
        lambda: sg.heads.from_function(lambda k: (), lambda p, y, t: 0.0).predict((), X[0]),
        "this head has no predict: give one to heads.from_function",
    ),
    "head of three": (lambda: sg.heads.from_function(lambda k, w, z: (), lambda p, y, t: y), r"as init_params\(key\)"),
    "batched of a model": (lambda: sg.batched(MODEL, 2), "est must be an estimator, .* not Model"),
    "batched of a function": (lambda: sg.batched(sg.uoro, 2), "est must be an estimator, .* not the function uoro"),
    "variance of nothing": (
        lambda: sg.theory.empirical(None, (), (), KEY, 2),
        "est must be an estimator, .* not None",
    ),
    "estimator without a method": (lambda: sg.estimator(None), "method must be a streamgrad.Method, not None"),
    "q0 with ragged rows": (lambda: sg.uoro(MODEL, q0=[[1, 2], [3]]), "q0 .* rows have different lengths"),
}


@pytest.mark.parametrize("case", CELLS)
def test_cells_heads_and_models(case):
    make, match = CELLS[case]
    with pytest.raises(ValueError, match=match) as error:
        make()
    assert one_sentence(error)


@pytest.mark.parametrize("name", sg.estimators.REGISTRY)
@pytest.mark.parametrize(
    "wrong, match", [(LSTM, "not a Cell: make it one"), (None, "not None"), (KEY, "streamgrad.Model")]
)
def test_no_model(name, wrong, match):
    row = sg.estimators.REGISTRY[name]
    with pytest.raises(ValueError, match=f"model must be a .*{match}") as error:
        row.make(wrong, **row.options)
    assert one_sentence(error)


@pytest.mark.parametrize(
    "a",
    [lambda s, x: jnp.ones((8, 2)), lambda s, x: x, lambda s, x: 1.0],
    ids=["a matrix", "too few", "a number"],
)
def test_features_that_a_matrix_cannot_multiply(a):
    model = sg.Model(a_cell(lambda affine, s, x: affine("w", a(s, x))), HEAD)
    params = model.init(KEY)
    for est in (sg.uoro(model), sg.rtrl(model), sg.bptt(model)):
        with pytest.raises(ValueError, match=r"affine\('w', features\) needs a vector of 8 features") as error:
            est.update(params, est.init(params), sg.Chunk(X, Y), KEY)
        assert one_sentence(error)


def test_a_loss_that_is_no_number():
    model = sg.Model(LSTM, sg.heads.from_function(lambda key, width: jnp.ones(width), lambda p, y, target: p * y))
    params = model.init(KEY)
    for est in (sg.uoro(model), sg.rtrl(model), sg.bptt(model)):
        with pytest.raises(ValueError, match=r"loss must return one number, not an array of shape \(4,\)"):
            est.update(params, est.init(params), sg.Chunk(X, Y), KEY)
