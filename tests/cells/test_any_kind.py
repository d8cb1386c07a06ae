"""Cells of any parameters and states: what they are worked on as, and what is said where that cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from streamgrad.cells.encoding import decode, encode
from tests.tools import few, one_sentence

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)))
CHUNK = sg.Chunk(X, jnp.arange(6) % 2)


def gradients(model, est, params, *cuts):
    """The sum of the gradients of chunks that end there."""
    state, total = est.init(params), jax.tree.map(jnp.zeros_like, params)
    for begin, end in zip((0, *cuts), (*cuts, 6), strict=True):
        part = jax.tree.map(lambda leaf, b=begin, e=end: leaf[b:e], CHUNK)
        grads, state, _ = est.update(params, state, part, jax.random.key(0))
        total = jax.tree.map(jnp.add, total, grads)
    return total


def same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-12), a, b)


def test_whatever_is_encoded_comes_back():
    state = {
        "int": jnp.array([-5, 2**31 - 1, -(2**31)], jnp.int32),
        "long": jnp.array([-1, 2**62], jnp.int64),
        "small": jnp.array(-3, jnp.int8),
        "mask": jnp.array([True, False]),
        "keys": jax.random.split(jax.random.key(1), 3),
        "complex": jnp.array([1 + 2j]),
        "narrow": jnp.ones(2, jnp.bfloat16),
    }
    back = jax.jit(lambda state: decode(encode(state, jnp.float64), state))(state)
    for name, leaf in state.items():
        assert back[name].dtype == leaf.dtype, name
        assert bool(jnp.all(back[name] == leaf)), name
    words = {name: leaf for name, leaf in state.items() if name not in ("complex", "narrow")}
    back = decode(encode(words, jnp.float32), words)  # every digit fits into float32
    assert all(bool(jnp.all(back[name] == leaf)) for name, leaf in words.items())


def leaky():
    """A cell of weights in a tree, and the same without the help of `affine`."""

    def step(affine, state, x):
        return affine("leak") * state + jnp.tanh(affine("layers.0.w", state, x, 1) + affine("layers.0.b"))

    def init_params(key):
        return {"leak": jnp.full(3, 0.5), "layers": [{"w": jax.random.normal(key, (3, 6)), "b": jnp.ones(3)}]}

    def by_hand(params, state, x):
        layer = params["layers"][0]
        features = jnp.concatenate([state, x, jnp.ones(1)])
        return params["leak"] * state + jnp.tanh(layer["w"] @ features + layer["b"])

    cell = sg.cells.affine(step, init_params, lambda: jnp.zeros(3))
    return cell, sg.cells.from_function(by_hand, init_params, lambda: jnp.zeros(3), products=False)


def test_affine_of_any_tree():
    models = [sg.Model(cell, sg.heads.softmax(2)) for cell in leaky()]
    params = models[0].init(jax.random.key(0))
    want = gradients(models[1], sg.bptt(models[1]), params)
    same(gradients(models[0], sg.rtrl(models[0]), params, 1, 4), want)


@pytest.mark.slow
def test_affine_of_any_tree_in_a_stack():
    stacked = sg.Model(sg.cells.stack(leaky()[0], sg.cells.gru(3, 2)), sg.heads.softmax(2))
    params = stacked.init(jax.random.key(0))
    same(
        gradients(stacked, sg.rtrl(stacked), params, 1, 4),
        gradients(stacked, sg.bptt(stacked), params),
    )
    outputs, _ = stacked.run(params, stacked.init_state(params), X)
    assert outputs.shape == (6, 2)


@jax.custom_vjp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.defvjp(lambda v: (spike(v), v), lambda v, g: (g / (1 + jnp.abs(v)) ** 2,))


def spiking():
    return sg.Model(
        sg.cells.from_function(
            lambda p, s, x: 0.9 * s + p["w"] @ jnp.append(spike(s - 0.1), x),
            lambda key: {"w": jax.random.normal(key, (3, 5))},
            lambda: jnp.zeros(3),
            example_input=jnp.zeros(2),
        ),
        sg.heads.softmax(2),
    )


def test_reverse_mode_suffices_for_some():
    model = spiking()
    params = model.init(jax.random.key(0))
    same(gradients(model, sg.rtrl(model), params, 1, 4), gradients(model, sg.bptt(model), params))


@pytest.mark.parametrize("make", [sg.uoro, sg.preuoro, lambda model: sg.uoro_across(model)])
@pytest.mark.parametrize("many", few([False, True], False))
def test_a_function_without_forward_mode_is_named(make, many):
    model = spiking()
    params, est, chunk = model.init(jax.random.key(0)), make(model), CHUNK
    if many:
        est, chunk = sg.batched(est, 2), jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), chunk)
    with pytest.raises(ValueError, match=r"no rule for spike: use jax\.custom_jvp") as error:
        est.update(params, est.init(params), chunk, jax.random.key(1))
    assert one_sentence(error)


def test_theory_names_its_parameters():
    model = spiking()
    params = model.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"pass streamgrad\.worked\(model\) for the model, and model\.enter\(params\)"):
        sg.theory.collect(model, params, CHUNK)


def test_wrong_parameters_of_a_foreign_cell():
    model = spiking()
    est, params = sg.rtrl(model), model.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"params.cell\['w'\] must have the shape"):
        est.init(params._replace(cell={"w": jnp.ones((2, 5))}))
    with pytest.raises(ValueError, match=r"params.cell\['w'\] must be an array of floating-point numbers, not int64"):
        est.init(params._replace(cell={"w": jnp.ones((3, 5), int)}))


@pytest.mark.usefixtures("as_a_user")
def test_explained(capsys):
    sg.cells.explain(sg.cells.lstm(2, 3))
    assert "12 preactivations of 6 features" in capsys.readouterr().out
    sg.cells.explain(spiking().cell)
    assert "3 preactivations of 5 features" in capsys.readouterr().out
    with pytest.raises(ValueError, match="cell must be a Cell"):
        sg.cells.explain(3)
