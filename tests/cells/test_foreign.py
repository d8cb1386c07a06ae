"""What goes in comes out: parameters, states and outputs as their library has them; and what cannot go in is named."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from tests.cells.libraries import library
from tests.tools import ROOT, one_sentence


def trained(cell: sg.Cell) -> sg.Params:
    """Parameters after a step of gradient descent."""
    model = sg.Model(cell, sg.heads.squared_error(1))
    params, est = model.init(jax.random.key(0)), sg.bptt(model)
    grads, _, _ = est.update(params, est.init(params), sg.Chunk(jnp.ones((3, 2)), jnp.ones((3, 1))), None)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_an_equinox_module_goes_in_and_comes_out():
    eqx = library("equinox")
    lstm = eqx.nn.LSTMCell(2, 3, key=jax.random.key(5))
    cell = sg.cells.from_equinox(lstm)
    same(cell.init_params(jax.random.key(0)).weight_hh, lstm.weight_hh)
    params = trained(cell)
    out = eqx.combine(params.cell, lstm)
    assert isinstance(out, eqx.nn.LSTMCell) and out.hidden_size == 3
    state = tuple(jnp.full(3, value) for value in (0.1, 0.2))
    same(out(jnp.ones(2), state), cell.step(params.cell, state, jnp.ones(2)))
    same(cell.output(state), state[0])
    assert jax.tree.structure(cell.init_state()) == jax.tree.structure(state)


def test_an_nnx_module_goes_in_and_comes_out():
    nnx = library("flax.nnx")
    gru = nnx.GRUCell(2, 3, rngs=nnx.Rngs(1), param_dtype=jnp.float64)
    cell = sg.cells.from_flax(gru)
    before = jax.tree.map(jnp.array, nnx.state(gru, nnx.Param))
    same(cell.init_params(jax.random.key(0)), before)
    params = trained(cell)
    same(nnx.state(gru, nnx.Param), before)  # nothing happens to the module until it is told
    nnx.update(gru, params.cell)
    same(gru(jnp.ones(3), jnp.ones(2))[0], cell.step(params.cell, jnp.ones(3), jnp.ones(2)))


def test_linen_parameters_go_in_and_come_out():
    linen = library("flax.linen")
    lstm = linen.LSTMCell(3, param_dtype=jnp.float64)
    carry = lstm.initialize_carry(jax.random.key(0), (2,))
    variables = lstm.init(jax.random.key(7), carry, jnp.ones(2))
    for given in (variables, variables["params"]):
        cell = sg.cells.from_flax(lstm, jnp.zeros(2), params=given)
        same(cell.init_params(jax.random.key(0)), variables["params"])
    params = trained(cell)
    same(lstm.apply({"params": params.cell}, carry, jnp.ones(2))[0], cell.step(params.cell, carry, jnp.ones(2)))
    c, h = jnp.zeros(3), jnp.ones(3)
    same(cell.output((c, h)), h)


def test_haiku_parameters_go_in_and_come_out():
    hk = library("haiku")
    step = hk.without_apply_rng(hk.transform(lambda x, state: hk.LSTM(3)(x, state)))
    state = hk.LSTMState(jnp.zeros(3), jnp.ones(3))
    mine = step.init(jax.random.key(7), jnp.ones(2), state)
    cell = sg.cells.from_haiku(functools.partial(hk.LSTM, 3), jnp.zeros(2), params=mine)
    same(cell.init_params(jax.random.key(0)), mine)
    params = trained(cell)
    same(step.apply(params.cell, jnp.ones(2), state)[1], cell.step(params.cell, state, jnp.ones(2)))
    assert isinstance(cell.init_state(), hk.LSTMState)
    same(cell.output(state), state.hidden)


def test_a_function_of_haiku_modules():
    hk = library("haiku")

    def step(x, h):
        h = jnp.tanh(hk.Linear(3)(jnp.concatenate([x, h])))
        return hk.Linear(2)(h), h

    cell = sg.cells.from_haiku(step, jnp.zeros(2), init_state=lambda: jnp.zeros(3))
    assert cell.output(cell.init_state()).shape == (2,)
    assert sorted(trained(cell).cell) == ["linear", "linear_1"]


def test_variables_that_the_call_leaves_alone_are_constants():
    """A batch norm and a dropout of nnx in their evaluation mode."""
    nnx = library("flax.nnx")

    class Normed(nnx.Module):
        def __init__(self, rngs, evaluate):
            self.cell = nnx.GRUCell(2, 3, rngs=rngs, param_dtype=jnp.float64)
            self.norm = nnx.BatchNorm(3, use_running_average=evaluate, rngs=rngs)
            self.drop = nnx.Dropout(0.5, deterministic=evaluate, rngs=rngs)

        def __call__(self, carry, x):
            carry, y = self.cell(carry, x)
            y = self.norm(y[None].astype(jnp.float32))[0]  # whose statistics are float32
            return carry, self.drop(y.astype(jnp.float64))

    def make(evaluate):
        return sg.cells.from_flax(Normed(nnx.Rngs(0), evaluate), jnp.zeros(2), init_state=lambda: jnp.zeros(3))

    assert isinstance(make(True).init_state(), sg.cells.Carried)
    with pytest.raises(ValueError, match=r"changes .* when it is called") as caught:
        make(False)
    assert one_sentence(caught)


def eqx_norm():
    eqx = library("equinox")
    return sg.cells.from_equinox(
        eqx.nn.BatchNorm(2, "batch", mode="ema"), jnp.zeros(2), init_state=lambda: jnp.zeros(2)
    )


def eqx_dropout():
    eqx = library("equinox")

    class Dropped(eqx.Module):
        cell: eqx.nn.GRUCell
        drop: eqx.nn.Dropout

        def __call__(self, x, h):
            return self.drop(self.cell(x, h))

    module = Dropped(eqx.nn.GRUCell(2, 3, key=jax.random.key(0)), eqx.nn.Dropout(0.5))
    return sg.cells.from_equinox(module, jnp.zeros(2), init_state=lambda: jnp.zeros(3))


def linen_module(body, size=3):
    linen = library("flax.linen")

    class Cell(linen.Module):
        @linen.compact
        def __call__(self, carry, x):
            carry, y = linen.GRUCell(size, param_dtype=jnp.float64)(carry, x)
            return carry, body(linen, y)

    return sg.cells.from_flax(Cell(), jnp.zeros(2), init_state=lambda: jnp.zeros(3))


WRONG = {
    "an equinox layer": (
        lambda: sg.cells.from_equinox(library("equinox").nn.Linear(2, 3, key=jax.random.key(0))),
        "Linear has no initial state that from_equinox knows",
    ),
    "no equinox module": (
        lambda: sg.cells.from_equinox(library("equinox") and jnp.tanh),
        "from_equinox takes a module of Equinox",
    ),
    "no example": (
        lambda: sg.cells.from_equinox(
            library("equinox").nn.Linear(2, 3, key=jax.random.key(0)), init_state=lambda: jnp.zeros(3)
        ),
        "from_equinox needs one x to know the shapes of Linear",
    ),
    "an equinox layer with a state": (
        lambda: sg.cells.from_equinox(
            library("equinox").nn.Linear(2, 2, key=jax.random.key(0)), jnp.zeros(2), lambda: jnp.zeros(2)
        ),
        "Linear cannot take one step",
    ),
    "a call of another shape": (
        lambda: sg.cells.from_equinox(
            library("equinox").nn.Linear(2, 3, key=jax.random.key(0)),
            jnp.zeros(2),
            lambda: jnp.zeros(2),
            call=lambda cell, state, x: cell(x + state),
        ),
        "the state that Linear returns must have the shape of the state that it begins with",
    ),
    "an equinox batch norm": (eqx_norm, "BatchNorm.* keeps a state of its own"),
    "an equinox dropout": (eqx_dropout, "Dropped cannot take one step: .*key"),
    "an nnx layer": (
        lambda: sg.cells.from_flax(library("flax.nnx").Linear(2, 3, rngs=library("flax.nnx").Rngs(0))),
        "Linear is no recurrent cell of Flax",
    ),
    "parameters for nnx": (
        lambda: sg.cells.from_flax(library("flax.nnx").GRUCell(2, 3, rngs=library("flax.nnx").Rngs(0)), params={}),
        "GRUCell has its parameters already",
    ),
    "no flax module": (lambda: sg.cells.from_flax(library("flax") and 3), "from_flax takes a module"),
    "a linen layer": (lambda: sg.cells.from_flax(library("flax.linen").Dense(3)), "Dense is no recurrent cell of Flax"),
    "a linen cell without shapes": (
        lambda: sg.cells.from_flax(library("flax.linen").GRUCell(3)),
        "from_flax needs one x to know the shapes of GRUCell",
    ),
    "linen parameters of another size": (
        lambda: sg.cells.from_flax(library("flax.linen").GRUCell(3), jnp.zeros(2), params={"hn": {}}),
        "params must have the structure of GRUCell's own",
    ),
    "a linen batch norm": (
        lambda: linen_module(lambda linen, y: linen.BatchNorm(use_running_average=False)(y[None])[0]),
        "Cell has variables in 'batch_stats'",
    ),
    "a linen dropout": (
        lambda: linen_module(lambda linen, y: linen.Dropout(0.5, deterministic=False)(y)),
        "Cell cannot take one step: .*dropout",
    ),
    "a haiku class": (
        lambda: sg.cells.from_haiku(library("haiku").LSTM, jnp.zeros(2)),
        "such as lambda: haiku.LSTM.8., not the class LSTM",
    ),
    "a haiku layer": (
        lambda: sg.cells.from_haiku(lambda: library("haiku").Linear(3), jnp.zeros(2)),
        "Linear is no recurrent core",
    ),
    "a haiku core without shapes": (
        lambda: sg.cells.from_haiku(lambda: library("haiku").LSTM(3)),
        "from_haiku needs one x to know the shapes",
    ),
    "a haiku function without a state": (
        lambda: sg.cells.from_haiku(lambda x, state: (x, state), jnp.zeros(2)),
        "from_haiku needs init_state",
    ),
    "a haiku function of three": (
        lambda: sg.cells.from_haiku(lambda x, state, more: (x, state), jnp.zeros(2)),
        "make must be a function",
    ),
    "a haiku batch norm": (
        lambda: sg.cells.from_haiku(
            lambda x, h: (library("haiku").BatchNorm(True, True, 0.9)(h[None], True)[0], h),
            jnp.zeros(2),
            init_state=lambda: jnp.zeros(3),
        ),
        "the core keeps a state of Haiku's",
    ),
    "a haiku dropout": (
        lambda: sg.cells.from_haiku(
            lambda x, h: (library("haiku").dropout(library("haiku").next_rng_key(), 0.5, h), h),
            jnp.zeros(2),
            init_state=lambda: jnp.zeros(3),
        ),
        "the core cannot take one step",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_go_in(what, as_a_user):
    if "haiku" in what:
        library("haiku")  # from_haiku imports it before any of these makes a module
    make, says = WRONG[what]
    with pytest.raises(ValueError, match=says) as caught:
        make()
    assert one_sentence(caught), str(caught.value)


def test_no_foreign_library_is_imported_for_others():
    code = "import streamgrad, sys; found = {'flax', 'equinox', 'haiku'} & set(sys.modules); assert not found, found"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
