"""The cells and heads are what their docstrings say, by formulas written out here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from tests.tools import few


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def weights(cell, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda w: rng.normal(size=w.shape), cell.init_params(jax.random.key(0)))


H, X = np.array([0.3, -0.7]), np.array([0.5, -1.0, 2.0])


def test_vanilla():
    cell = sg.cells.vanilla(3, 2)
    w = weights(cell)["w"]
    want = np.tanh(w[:, :2] @ H + w[:, 2:5] @ X + w[:, 5])
    np.testing.assert_allclose(cell.step({"w": jnp.asarray(w)}, jnp.asarray(H), jnp.asarray(X)), want)


def test_lstm():
    cell = sg.cells.lstm(3, 2)
    w, c = weights(cell)["w"], np.array([0.2, 1.5])
    i, f, g, o = (w[:, :2] @ H + w[:, 2:5] @ X + w[:, 5]).reshape(4, 2)
    new = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    state = cell.step({"w": jnp.asarray(w)}, sg.cells.LSTMState(jnp.asarray(H), jnp.asarray(c)), jnp.asarray(X))
    np.testing.assert_allclose(state.c, new)
    np.testing.assert_allclose(state.h, sigmoid(o) * np.tanh(new))
    np.testing.assert_array_equal(cell.output(state), state.h)
    assert cell.init_params(jax.random.key(0))["w"][2:4, -1].tolist() == [1.0, 1.0]  # the forget gate's bias


def test_gru():
    """The reset gate acts after the product with the weights, bias included."""
    cell = sg.cells.gru(3, 2)
    w = weights(cell)
    r, u = sigmoid(w["gates"] @ np.concatenate([H, X, [1]])).reshape(2, 2)
    candidate = w["candidate_input"] @ np.append(X, 1) + r * (w["candidate_state"] @ np.append(H, 1))
    want = (1 - u) * np.tanh(candidate) + u * H
    params = jax.tree.map(jnp.asarray, w)
    np.testing.assert_allclose(cell.step(params, jnp.asarray(H), jnp.asarray(X)), want)


def test_stack():
    """Each layer reads the new output of the one below."""
    lower, upper = sg.cells.lstm(3, 2), sg.cells.vanilla(2, 4)
    cell = sg.cells.stack(lower, upper)
    params, state = cell.init_params(jax.random.key(0)), cell.init_state()
    new = cell.step(params, state, jnp.asarray(X))
    below = lower.step(params[0], state[0], jnp.asarray(X))
    np.testing.assert_array_equal(new[1], upper.step(params[1], state[1], below.h))
    np.testing.assert_array_equal(cell.output(new), new[1])


def test_heads():
    w, b, y = np.random.default_rng(1).normal(size=(3, 2)), np.array([0.1, -0.2, 0.3]), np.array([1.0, -2.0])
    params, logits = {"w": jnp.asarray(w), "b": jnp.asarray(b)}, w @ y + b
    p = np.exp(logits) / np.sum(np.exp(logits))
    np.testing.assert_allclose(sg.heads.softmax(3).loss(params, jnp.asarray(y), jnp.array(2)), -np.log(p[2]))
    target = np.array([1.0, 0.0, 1.0])
    q = sigmoid(logits)
    want = -np.sum(target * np.log(q) + (1 - target) * np.log(1 - q))
    np.testing.assert_allclose(sg.heads.bernoulli(3).loss(params, jnp.asarray(y), jnp.asarray(target)), want)
    want = 0.5 * np.sum((logits - target) ** 2)
    np.testing.assert_allclose(sg.heads.squared_error(3).loss(params, jnp.asarray(y), jnp.asarray(target)), want)


def test_a_head_of_any_loss():
    head = sg.heads.from_function(lambda key, width: jnp.ones(width), lambda w, y, target: (w @ y - target) ** 2)
    model = sg.Model(sg.cells.lstm(3, 2), head)
    assert model.init(jax.random.key(0)).head.shape == (2,)  # it learns the width from the cell
    alone = sg.Model(sg.cells.lstm(3, 2), sg.heads.from_function(lambda key: (), lambda w, y, target: y @ y))
    params = alone.init(jax.random.key(0))
    est = sg.uoro(alone)
    grads, _, info = est.update(params, est.init(params), sg.Chunk(jnp.ones((4, 3)), jnp.ones(4)), jax.random.key(0))
    assert grads.head == () and info.loss.shape == (4,)


@pytest.mark.parametrize("dtype", few([bool, int, np.float32], int))
def test_inputs_of_any_dtype(dtype):
    """Bits and counts are cast to the dtype of the parameters."""
    model = sg.Model(sg.cells.gru(3, 2), sg.heads.softmax(2))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.init(jax.random.key(0)))
    chunk = sg.Chunk(np.ones((5, 3), dtype), np.zeros(5, int))
    for est in (sg.uoro(model), sg.windowed_bptt(model, window=3), sg.bptt(model)):
        grads, _, _ = est.update(params, est.init(params), chunk, jax.random.key(0))
        assert grads.cell["gates"].dtype == jnp.float32
