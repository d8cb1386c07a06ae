"""Cells whose units read themselves alone: they are the published ones, and their gradients are right.

The published equations stand here in numpy, those of the linear recurrent unit in complex numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from tests.cells import published
from tests.tools import RTRL, bptt, error, few, made, make_chunk, make_params, one_sentence, run, split

CELLS = {
    "lru": (lambda: sg.cells.lru(2, 3, n_out=2), published.lru),
    "lru without read-out": (lambda: sg.cells.lru(2, 3), published.lru),
    "linear rtu": (lambda: sg.cells.rtu(2, 3), published.linear_rtu),
    "linear rtu, tanh": (lambda: sg.cells.rtu(2, 3, activation="tanh"), published.linear_tanh_rtu),
    "non-linear rtu": (lambda: sg.cells.rtu(2, 3, linear=False, activation="tanh"), published.non_linear_rtu),
    "elstm": (lambda: sg.cells.elstm(2, 3), published.elstm),
    "mingru": (lambda: sg.cells.mingru(2, 3), published.mingru),
    "positive mingru": (lambda: sg.cells.mingru(2, 3, positive=True), published.positive_mingru),
}
# The fields of the state that the next step reads; None where the state is one vector.
READ = {"lru": ("h",), "rtu": None, "elstm": ("c",), "mingru": None}
MODELS = {name: sg.Model(make(), sg.heads.squared_error(2)) for name, (make, _) in CELLS.items()}
RESET = (0, 5, 6, 11)


def kind(name: str) -> str:
    return next(kind for kind in READ if kind in name)


def read_next(name: str, state) -> jax.Array:
    fields = READ[kind(name)]
    return state if fields is None else jnp.concatenate([getattr(state, field) for field in fields])


@pytest.mark.parametrize("name", CELLS)
def test_is_the_published_cell(name):
    model = MODELS[name]
    params, inputs = make_params(model).cell, make_chunk(model, 20).inputs
    got, state, step = [], model.cell.init_state(), jax.jit(model.cell.step)
    for x in inputs:
        state = step(params, state, x)
        got.append(model.cell.output(state))
    want = CELLS[name][1](jax.tree.map(np.asarray, params), np.asarray(inputs))
    np.testing.assert_allclose(np.stack(got), want, rtol=1e-12, atol=1e-14)
    assert np.max(np.abs(want)) > 0.1  # there is something to compare


def test_biases_and_own_weights_begin_as_they_should():
    """A bias is that of its gate alone; an eLSTM's units hardly listen to themselves at first, as published."""
    w = sg.cells.mingru(2, 3, update_bias=-2.0).init_params(jax.random.key(0))["w"]
    assert w[:, -1].tolist() == [-2.0] * 3 + [0.0] * 3
    params = sg.cells.elstm(2, 500, forget_bias=0.5).init_params(jax.random.key(0))
    assert params["w"][:, -1].tolist() == [0.5] * 500 + [0.0] * 500
    for name in ("w_f", "w_z"):
        np.testing.assert_allclose(np.std(params[name]), 0.1, rtol=0.15)  # of 500 numbers: five standard errors


def test_credit_of_each_stream():
    """Each stream's own gradient goes back to the parameters as they were given, and not only the mean of all."""
    model = MODELS["lru"]
    params, est = make_params(model), made(sg.rtrl, model)
    many, inputs = sg.batched(est, 2), jnp.stack([make_chunk(model, 3, seed=seed).inputs for seed in range(2)])
    g = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, model.width)))
    _, _, trace = many.advance(params, many.init(params), inputs)
    each = many.credit(params, trace, g, per_stream=True)
    for stream in range(2):
        _, _, alone = est.advance(params, est.init(params), inputs[stream])
        own = jax.tree.map(lambda leaf, stream=stream: leaf[stream], each)
        assert error(own, est.credit(params, alone, g[stream])) < 1e-12


@pytest.mark.parametrize("name", few(CELLS, "lru", "elstm"))
def test_bptt_is_the_gradient_through_a_scan(name):
    model = MODELS[name]
    params, chunk = make_params(model), make_chunk(model, 12, reset=RESET)

    def loss(params):
        def step(state, now):
            x, target, begins = now
            state = jax.tree.map(lambda a, b: jnp.where(begins, a, b), model.cell.init_state(), state)
            state = model.cell.step(params.cell, state, x)
            return state, model.head.loss(params.head, model.cell.output(state), target)

        return jnp.sum(jax.lax.scan(step, model.cell.init_state(), (chunk.inputs, chunk.targets, chunk.reset))[1])

    want = jax.jit(jax.grad(loss))(params)
    assert error(bptt(model, params, chunk), want) < 1e-12
    # Every parameter matters, so that none of them was compared with nothing.
    assert all(np.max(np.abs(leaf)) > 1e-6 for leaf in jax.tree.leaves(want))


FORMS = [(name, "chunks") for name in CELLS] + [(name, "steps") for name in ("lru", "non-linear rtu", "elstm")]


@pytest.mark.parametrize("name, form", few(FORMS, ("lru", "chunks")))
def test_rtrl_is_exact(name, form):
    model = MODELS[name]
    params, chunk = make_params(model), make_chunk(model, 12, reset=RESET)
    want = bptt(model, params, chunk)
    for sizes in ((5, 5, 2), (1,) * 12) if form == "chunks" else ((4, 8),):
        got = run(made(RTRL[form], model), params, split(chunk, sizes))[0]
        assert error(got, want) < 1e-10, sizes


@pytest.mark.parametrize("name", few(CELLS, "mingru"))
def test_has_every_cut(name):
    """No displacement moves nothing, and dh_t/dW = dh_t/dz ⊗ a at the preactivations, also where the features moved."""
    model = MODELS[name]
    cell, weights, x = sg.worked(model).cell, model.enter(make_params(model)).cell, jnp.array([0.5, -1.0])
    state = jax.tree.map(lambda leaf: leaf + 0.3, cell.init_state())
    assert set(cell.cuts) == {"state", "params", "preactivation"}
    want = ravel_pytree(cell.step(weights, state, x))[0]
    still = {cut: jax.tree.map(jnp.zeros_like, cell.cuts[cut].into(weights, state, x)) for cut in cell.cuts}
    for cut, dz in still.items():
        np.testing.assert_array_equal(ravel_pytree(cell.cuts[cut].inject(weights, state, x, dz))[0], want)
    cut = cell.cuts["preactivation"]
    by_z = jax.jacrev(lambda dz: ravel_pytree(cut.inject(weights, state, x, dz))[0])(still["preactivation"])
    by_weights = jax.jacrev(lambda weights: ravel_pytree(cell.step(weights, state, x))[0])(weights)
    features = cut.features(weights, state, x)
    for got, z, a in zip(*map(jax.tree.leaves, (by_weights, by_z, features)), strict=True):
        np.testing.assert_allclose(got, jnp.einsum("sn,a->sna", z, a), atol=1e-14)


def test_batched():
    model = MODELS["lru"]
    params, chunks = make_params(model), [make_chunk(model, 6, seed, reset=(seed,)) for seed in range(3)]
    want = jax.tree.map(lambda *leaves: sum(leaves) / 3, *(bptt(model, params, chunk) for chunk in chunks))
    streams = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chunks)
    halves = [jax.tree.map(lambda leaf, part=part: leaf[:, part], streams) for part in (slice(0, 3), slice(3, 6))]
    assert error(run(sg.batched(sg.rtrl(model), 3), params, halves)[0], want) < 1e-10


@pytest.mark.parametrize("name", CELLS)
def test_units_read_themselves_alone(name):
    """dh_t/dh_{t-1}, among what the next step reads, is diagonal, or of blocks of two; nothing reads the rest."""
    model = MODELS[name]
    params, (x, _) = make_params(model).cell, make_chunk(model, 2).inputs
    state = jax.tree.map(lambda leaf: leaf + 0.3, model.cell.init_state())
    flat, unravel = ravel_pytree(state)
    jacobian = jax.jacobian(lambda flat: read_next(name, model.cell.step(params, unravel(flat), x)))(flat)
    index = np.asarray(read_next(name, unravel(jnp.arange(len(flat), dtype=flat.dtype))), int)
    unread = np.delete(np.asarray(jacobian), index, axis=1)
    assert not unread.any()
    among = np.asarray(jacobian)[:, index]
    blocks = 2 if kind(name) in ("lru", "rtu") else 1
    pattern = np.kron(np.ones((blocks, blocks)), np.eye(3))
    assert not among[pattern == 0].any()
    assert (among[pattern == 1] != 0).mean() > (0.4 if "rtu" in name else 0.99)


@pytest.mark.parametrize("make", [sg.cells.lru, sg.cells.rtu])
@pytest.mark.parametrize("ring", [(0.0, 1.0, 2 * np.pi), (0.9, 0.99, 0.3), (0.999, 1.0, 0.01)])
def test_begins_inside_the_ring(make, ring):
    r_min, r_max, max_phase = ring
    params = make(1, 4000, r_min=r_min, r_max=r_max, max_phase=max_phase).init_params(jax.random.key(1))
    radius, angle = np.exp(-np.exp(params["nu"])), np.exp(params["theta"])
    assert np.all((radius >= r_min - 1e-12) & (radius <= r_max) & (radius < 1) & (angle > 0) & (angle <= max_phase))
    # Evenly over the area: the mean of r² and of the angle, within five standard deviations.
    even = (radius**2 - r_min**2) / (r_max**2 - r_min**2)
    for part in (even, angle / max_phase):
        assert abs(np.mean(part) - 0.5) < 5 / np.sqrt(12 * 4000)
    if make is sg.cells.lru:
        np.testing.assert_allclose(np.exp(params["log_gamma"]), np.sqrt(1 - radius**2), rtol=1e-6)


def test_ring_is_finite_in_float32():
    """Where |λ| rounds to 1 and angles to 0 nothing is infinite, and gradients are finite."""
    with jax.enable_x64(False):
        cell = sg.cells.rtu(1, 100_000, r_min=1 - 1e-6)
        params = cell.init_params(jax.random.key(0))
        assert all(leaf.dtype == jnp.float32 and np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(params))
        grads = jax.grad(lambda p: jnp.sum(cell.output(cell.step(p, cell.init_state(), jnp.ones(1)))))(params)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))


DELAY = 300


LONG = {
    "lru": lambda: sg.cells.lru(1, 4, r_min=0.99, r_max=0.999),
    "mingru": lambda: sg.cells.mingru(1, 4, update_bias=-7.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_remembers(name):
    """The gradient of a loss 300 steps after the only input goes through all of them."""
    model = sg.Model(LONG[name](), sg.heads.squared_error(1))
    params = model.init(jax.random.key(0))
    inputs = jnp.zeros((DELAY + 1, 1)).at[0].set(1)
    weight = jnp.zeros(DELAY + 1).at[-1].set(1)
    whole = sg.Chunk(inputs, jnp.ones((DELAY + 1, 1)), weight=weight)
    want = run(sg.bptt(model), params, [whole])[0]
    first = want.cell["b"] if "b" in want.cell else want.cell["w"][:, 0]
    assert np.max(np.abs(first)) > 1e-4
    last = run(sg.bptt(model), params, [jax.tree.map(lambda leaf: leaf[1:], whole)])[0]
    assert not np.any(last.cell["b"] if "b" in last.cell else last.cell["w"][:, 0])
    got = run(sg.rtrl(model), params, split(whole, (100, 100, 100, 1)))[0]
    assert error(got, want) < 1e-10


@pytest.mark.parametrize("name", few(["lru", "linear rtu", "elstm", "positive mingru"], "lru"))
def test_keeps_float32(name):
    model = MODELS[name]
    params, chunk = make_params(model, dtype=jnp.float32), make_chunk(model, 3, dtype=jnp.float32)
    grads, _, state = run(sg.rtrl(model), params, [chunk])
    assert {leaf.dtype for leaf in jax.tree.leaves((grads, state.cell))} == {jnp.dtype(jnp.float32)}


@pytest.mark.slow
def test_stacks():
    """Layers of them on top of each other, one of which is worked on as matrices."""
    cell = sg.cells.stack(sg.cells.lru(1, 2, n_out=3), sg.cells.mingru(3, 2), sg.cells.elstm(2, 2))
    model = sg.Model(cell, sg.heads.squared_error(2))
    params, chunk = make_params(model), make_chunk(model, 6, reset=(3,))
    assert error(run(sg.rtrl(model), params, split(chunk, (2, 2, 2)))[0], bptt(model, params, chunk)) < 1e-10


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: sg.cells.lru(0, 3), "n_in must be a whole number"),
        (lambda: sg.cells.lru(2, 3, n_out=0), "n_out must be a whole number"),
        (lambda: sg.cells.lru(2, 3, r_min=0.9, r_max=0.5), "r_min < r_max"),
        (lambda: sg.cells.lru(2, 3, r_max=1.5), "r_max <= 1"),
        (lambda: sg.cells.rtu(2, 3, max_phase=0.0), "max_phase must be"),
        (lambda: sg.cells.rtu(2, 3, max_phase=float("nan")), "max_phase must be a finite number"),
        (lambda: sg.cells.rtu(2, 3, activation="gelu"), "activation must be one of 'relu', 'tanh'"),
        (lambda: sg.cells.rtu(2, 3, linear="no"), "linear must be True or False"),
        (lambda: sg.cells.elstm(2, 3, forget_bias=None), "forget_bias must be a finite number"),
        (lambda: sg.cells.mingru(2, 3, positive=1), "positive must be True or False"),
        (lambda: sg.cells.mingru(2, 2.5), "n_hidden must be a whole number"),
    ],
)
def test_says_what_is_wrong_with_options(make, says, as_a_user):
    with pytest.raises(ValueError, match=says) as error:
        make()
    assert one_sentence(error)


@pytest.mark.parametrize("inputs, says", [(jnp.ones((4, 3)), "inputs"), (np.full((4, 2), np.nan), "must be finite")])
@pytest.mark.parametrize("name", ["lru", "mingru"])
def test_says_what_is_wrong_with_inputs(name, inputs, says, as_a_user):
    est, params = sg.rtrl(MODELS[name]), make_params(MODELS[name])
    with pytest.raises(ValueError, match=says) as error:
        est.update(params, est.init(params), sg.Chunk(inputs, jnp.ones((4, 2))), None)
    assert one_sentence(error)
