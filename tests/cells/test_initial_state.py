"""A learned initial state, or an output with weights of its own, would have no gradient: both are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from tests.cells.libraries import library
from tests.tools import one_sentence

X = jnp.zeros(2)
PARAMS = {"w": jnp.eye(3), "h0": jnp.zeros(3)}


def step(params, h, x):
    return jnp.tanh(params["w"] @ h + x[0])


def refused(make, match):
    with pytest.raises(ValueError, match=match) as refusal:
        make()
    assert one_sentence(refusal)


def function(init_state, params=PARAMS, **options):
    return sg.cells.from_function(step, lambda key: params, init_state, **options)


CONSTANTS = {
    "as it is": lambda: PARAMS["h0"],
    "made of it": lambda: jnp.tanh(PARAMS["h0"]),
    "compiled": jax.jit(lambda: 2 * PARAMS["h0"]),
    "one the step reads too": lambda: PARAMS["w"][0],
}


@pytest.mark.parametrize("case", CONSTANTS)
def test_functions(case):
    name = "w" if case.startswith("one") else "h0"
    match = rf"init_state reads the parameter \['{name}'\], but an initial state cannot be learned"
    refused(lambda: function(CONSTANTS[case], example_input=X), match)
    refused(lambda: function(CONSTANTS[case]), match)
    refused(lambda: sg.cells.stack(sg.cells.gru(2, 2), function(CONSTANTS[case], example_input=X)), match)


def test_a_copy_is_known_by_its_numbers():
    """If the step does not look at the parameter; one that it does look at may be equal to anything."""
    copy = np.array([1.0, 2.0, 3.0])
    params = {"w": jnp.eye(3), "h0": jnp.asarray(copy)}
    refused(lambda: function(lambda: jnp.asarray(copy), params, example_input=X), "reads the parameter .'h0'.")
    function(lambda: jnp.asarray(copy) + 0 * jnp.ones(3), {"w": jnp.eye(3), "h0": jnp.ones(3)}, example_input=X)
    read = lambda params, h, x: jnp.tanh(params["w"] @ h + params["b"])  # noqa: E731
    sg.cells.from_function(
        read, lambda key: {"w": jnp.eye(3), "b": jnp.zeros(3)}, lambda: jnp.asarray(np.zeros(3)), example_input=X
    )


def test_affine():
    def leaky(affine, state, x):
        return 0.9 * state + jnp.tanh(affine("w", state, x, 1))

    weights = {"w": jnp.ones((3, 6))}
    refused(
        lambda: sg.cells.affine(leaky, lambda key: weights, lambda: weights["w"][:, 0]),
        r"init_state reads the parameter \['w'\]",
    )
    sg.cells.affine(leaky, lambda key: weights, lambda: jnp.zeros_like(weights["w"][:, 0]))


def test_an_output_with_weights():
    refused(
        lambda: function(lambda: jnp.zeros(3), output=lambda h: PARAMS["w"] @ h, example_input=X),
        r"output reads the parameter \['w'\] as a constant, .* leave it to the head",
    )


def test_what_is_no_parameter_may_be_held():
    """A fixed initial state, a scale that both are made with, a shape or a dtype, an index."""
    fixed, scale = jnp.arange(3.0), jnp.asarray(0.1)
    function(lambda: fixed, example_input=X)
    sg.cells.from_function(step, lambda key: {"w": scale * jnp.eye(3)}, lambda: scale * jnp.ones(3), example_input=X)
    function(lambda: jnp.zeros_like(PARAMS["h0"]), example_input=X)
    function(lambda: jnp.zeros(3), output=lambda h: h[np.array([0, 2])], example_input=X)


def test_a_first_step_that_adds_it_learns_it():
    """The way out: the gradient is that of a network whose initial state is the parameter."""

    def first_adds(params, state, x):
        h = jnp.where(state["t"] == 0, params["h0"], state["h"])
        return {"h": step(params, h, x), "t": state["t"] + 1}

    cell = sg.cells.from_function(
        first_adds,
        lambda key: PARAMS,
        lambda: {"h": jnp.zeros(3), "t": jnp.array(0)},
        output=lambda state: state["h"],
        example_input=X,
    )
    model = sg.Model(cell, sg.heads.squared_error(1))
    params, inputs = model.init(jax.random.key(0)), jnp.ones((4, 2))

    def loss(params):
        _, outputs = jax.lax.scan(lambda h, x: (step(params.cell, h, x),) * 2, params.cell["h0"], inputs)
        return sum(model.head.loss(params.head, y, jnp.ones(1)) for y in outputs)

    est = sg.rtrl(model)
    state, total = est.init(params), jnp.zeros(3)
    for part in (inputs[:1], inputs[1:]):
        grads, state, _ = est.update(params, state, sg.Chunk(part, jnp.ones((len(part), 1))), None)
        total += grads.cell["h0"]
    want = jax.grad(loss)(params).cell["h0"]
    assert np.abs(want).max() > 1e-3
    np.testing.assert_allclose(total, want, rtol=1e-10)


def test_equinox():
    eqx = library("equinox")

    class Module(eqx.Module):
        gru: eqx.nn.GRUCell
        h0: jax.Array

        def __call__(self, x, h):
            return self.gru(x, h)

    module = Module(eqx.nn.GRUCell(2, 3, key=jax.random.key(0)), jnp.zeros(3))
    refused(
        lambda: sg.cells.from_equinox(module, X, init_state=lambda: module.h0), r"init_state reads the parameter \.h0"
    )
    sg.cells.from_equinox(module, X, init_state=lambda: jnp.zeros(3))


def test_nnx():
    nnx = library("flax.nnx")

    class Module(nnx.Module):
        def __init__(self, learned):
            self.gru, self.h0, self.learned = nnx.GRUCell(2, 3, rngs=nnx.Rngs(0)), nnx.Param(jnp.zeros(3)), learned

        def __call__(self, carry, x):
            return self.gru(carry, x)

        def initialize_carry(self, input_shape, rngs):
            return jnp.tanh(self.h0[...]) if self.learned else self.gru.initialize_carry(input_shape, rngs)

    refused(lambda: sg.cells.from_flax(Module(True), X), r"init_state reads the parameter \['h0'\]")
    sg.cells.from_flax(Module(False), X)


def test_linen():
    linen = library("flax.linen")

    class Module(linen.Module):
        def setup(self):
            self.gru, self.h0 = linen.GRUCell(3), self.param("h0", linen.initializers.zeros, (3,))

        def __call__(self, carry, x):
            return self.gru(carry, x)

        def initialize_carry(self, rng, input_shape):
            return self.h0

    module = Module()
    variables = module.init(jax.random.key(0), jnp.zeros(3), X)
    refused(lambda: sg.cells.from_flax(module, X), "Module has no initial state for x .* without its parameters")
    for given in ({}, {"params": variables["params"]}):  # drawn by the key, or these
        refused(
            lambda given=given: sg.cells.from_flax(module, X, init_state=lambda: variables["params"]["h0"], **given),
            r"init_state reads the parameter \['h0'\]",
        )
    sg.cells.from_flax(module, X, init_state=lambda: jnp.zeros(3))
    sg.cells.from_flax(linen.GRUCell(3, carry_init=linen.initializers.normal()), X)  # at random, but not learned


def test_haiku():
    hk = library("haiku")

    class Core(hk.RNNCore):
        def __call__(self, x, state):
            return hk.GRU(3)(x, state)

        def initial_state(self, batch_size):
            return hk.get_parameter("h0", (3,), init=jnp.zeros)

    refused(lambda: sg.cells.from_haiku(lambda: Core(), X), "the core has no initial state without its parameters")
