"""Spiking cells: the published equations, the surrogate's derivatives, and exact gradients with respect to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from tests.cells import published
from tests.tools import RTRL, bptt, error, few, made, make_chunk, make_params, one_sentence, run, split

ALPHA, RHO, KAPPA = np.exp(-1 / 5), np.exp(-1 / 30), np.exp(-1 / 10)
OPTIONS = {
    "lif": ({}, {}),
    "alif": ({"beta": 0.4, "tau_a": 30.0}, {"beta": 0.4, "rho": RHO}),
    "lif, filtered": ({"tau_out": 10.0}, {"kappa": KAPPA}),
    "alif, filtered": ({"beta": 0.4, "tau_a": 30.0, "tau_out": 10.0}, {"beta": 0.4, "rho": RHO, "kappa": KAPPA}),
    "lif, through the reset": ({"reset_gradient": True}, {}),
}
V_TH = 0.6


def make(name: str) -> sg.Model:
    return sg.Model(sg.cells.lif(2, 4, tau=5.0, v_th=V_TH, **OPTIONS[name][0]), sg.heads.squared_error(2))


MODELS = {name: make(name) for name in OPTIONS}


@pytest.mark.parametrize("name", OPTIONS)
def test_is_the_published_cell(name):
    model = MODELS[name]
    params, inputs = make_params(model).cell, make_chunk(model, 20).inputs
    got, state, step = [], model.cell.init_state(), jax.jit(model.cell.step)
    for x in inputs:
        state = step(params, state, x)
        got.append((model.cell.output(state), state.s))
    want = published.lif({"w": np.asarray(params["w"])}, np.asarray(inputs), ALPHA, V_TH, **OPTIONS[name][1])
    np.testing.assert_allclose(np.stack([output for output, _ in got]), want, atol=1e-13)
    spikes = np.stack([s for _, s in got])
    assert set(np.unique(spikes)) == {0.0, 1.0} and 0.1 < spikes.mean() < 0.9  # neither silent nor always firing


def test_threshold_adapts():
    """Under a constant input the neurons that adapt fire less and less, the others as often as before."""
    counts = {}
    for name, beta in (("lif", None), ("alif", 0.3)):
        cell = sg.cells.lif(1, 1, tau=5.0, beta=beta, tau_a=100.0)
        params, state, spikes = {"w": jnp.array([[0.0, 0.5]])}, cell.init_state(), []
        for _ in range(100):
            state = cell.step(params, state, jnp.ones(1))
            spikes.append(float(state.s[0]))
        counts[name] = sum(spikes[:20]), sum(spikes[-20:])
    assert counts["lif"][0] <= counts["lif"][1]
    assert counts["alif"][1] < counts["alif"][0] <= counts["lif"][0] and counts["alif"][1] > 0


@pytest.mark.parametrize("name", few(OPTIONS, "alif", "lif, through the reset"))
def test_derivatives_of_a_step(name):
    """dh_t/dh_{t-1} and dh_t/dW by hand: surrogate spikes, the reset left out unless asked for."""
    model = MODELS[name]
    cell, w, x = model.cell, np.asarray(make_params(model).cell["w"]), np.array([0.3, -0.2])
    s, a, beta = np.array([0.0, 1.0, 0.0, 1.0]), np.array([0.2, 1.0, 0.0, 0.7]), OPTIONS[name][0].get("beta", 0.0)
    # Voltages after which one neuron is far from its threshold, and the others are above and below.
    over = np.array([-0.5, 0.3, 0.8, -1.4])
    v = (V_TH * (1 + over + s) + beta * (RHO * a + s) - w @ np.concatenate([s, x])) / ALPHA
    state = cell.init_state()._replace(v=jnp.asarray(v), s=jnp.asarray(s))
    state = state if state.a is None else state._replace(a=jnp.asarray(a))
    psi = 0.3 / V_TH * np.array([0.5, 0.7, 0.2, 0.0])

    eye, none = np.eye(4), np.zeros((4, 4))
    through_reset = V_TH * eye if OPTIONS[name][0].get("reset_gradient") else none
    dv = {"v": ALPHA * eye, "s": w[:, :4] - through_reset, "a": none, "filtered": none}
    da = {"v": none, "s": eye, "a": RHO * eye, "filtered": none}
    ds = {field: psi[:, None] * (dv[field] - beta * da[field]) for field in dv}
    filtered = {field: ds[field] + (KAPPA * eye if field == "filtered" else none) for field in ds}
    want = {"v": dv, "s": ds, "a": da, "filtered": filtered}

    got = jax.jacfwd(lambda state: cell.step({"w": jnp.asarray(w)}, state, jnp.asarray(x)))(state)
    for after, row in got._asdict().items():
        for before, block in ({} if row is None else row._asdict()).items():
            if block is not None:
                np.testing.assert_allclose(block, want[after][before], atol=1e-14, err_msg=f"{after}, {before}")

    by_w = jax.jacrev(lambda w: cell.step({"w": w}, state, jnp.asarray(x)))(jnp.asarray(w))
    dv_dw = np.einsum("ij,a->ija", eye, np.concatenate([s, x]))
    np.testing.assert_allclose(by_w.v, dv_dw, atol=1e-14)
    np.testing.assert_allclose(by_w.s, psi[:, None, None] * dv_dw, atol=1e-14)


@pytest.mark.parametrize("name", few(OPTIONS, "alif"))
def test_bptt_is_the_gradient_through_a_scan(name):
    model = MODELS[name]
    params, chunk = make_params(model), make_chunk(model, 12, reset=(4, 9))

    def loss(params):
        def step(state, now):
            x, target, begins = now
            state = jax.tree.map(lambda a, b: jnp.where(begins, a, b), model.cell.init_state(), state)
            state = model.cell.step(params.cell, state, x)
            return state, model.head.loss(params.head, model.cell.output(state), target)

        return jnp.sum(jax.lax.scan(step, model.cell.init_state(), (chunk.inputs, chunk.targets, chunk.reset))[1])

    want = jax.jit(jax.grad(loss))(params)
    assert error(bptt(model, params, chunk), want) < 1e-12
    assert np.max(np.abs(want.cell["w"])) > 1e-3


FORMS = [(name, "chunks") for name in OPTIONS] + [(name, "steps") for name in ("alif", "lif, through the reset")]


@pytest.mark.parametrize("name, form", few(FORMS, ("alif, filtered", "chunks")))
def test_rtrl_is_exact(name, form):
    model = MODELS[name]
    params, chunk = make_params(model), make_chunk(model, 12, reset=(4, 9))
    want = bptt(model, params, chunk)
    for sizes in ((12,), (5, 4, 3), (1,) * 12) if form == "chunks" else ((4, 8),):
        got = run(made(RTRL[form], model), params, split(chunk, sizes))[0]
        assert error(got, want) < 1e-10, sizes


def test_reset_gradient_matters():
    params, chunk = make_params(MODELS["lif"]), make_chunk(MODELS["lif"], 12)
    without, through = (bptt(MODELS[name], params, chunk) for name in ("lif", "lif, through the reset"))
    assert error(without.cell, through.cell) > 1e-3


def test_begins_without_connections_to_itself():
    w = sg.cells.lif(2, 5).init_params(jax.random.key(0))["w"]
    assert w.shape == (5, 7) and not np.diag(w[:, :5]).any() and np.count_nonzero(w) == 30


def test_keeps_float32():
    model = MODELS["alif, filtered"]
    params, chunk = make_params(model, dtype=jnp.float32), make_chunk(model, 3, dtype=jnp.float32)
    grads, _, state = run(sg.rtrl(model), params, [chunk])
    assert {leaf.dtype for leaf in jax.tree.leaves((grads, state.cell))} == {jnp.dtype(jnp.float32)}
    assert ravel_pytree(state.cell)[0].size == 16


@pytest.mark.parametrize(
    "options, says",
    [
        ({"n_hidden": 0}, "n_hidden must be a whole number"),
        ({"tau": 0.0}, "tau must be a number above 0"),
        ({"v_th": -1.0}, "v_th must be a number above 0"),
        ({"tau_a": "long"}, "tau_a must be a finite number"),
        ({"tau_out": 0}, "tau_out must be a number above 0"),
        ({"dampening": float("inf")}, "dampening must be a finite number"),
        ({"beta": -0.1}, "beta must be None or a number of at least 0"),
        ({"reset_gradient": 1}, "reset_gradient must be True or False"),
    ],
)
def test_says_what_is_wrong(options, says, as_a_user):
    with pytest.raises(ValueError, match=says) as error:
        sg.cells.lif(**{"n_in": 2, "n_hidden": 3, **options})
    assert one_sentence(error)
