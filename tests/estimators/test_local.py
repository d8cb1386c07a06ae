"""Methods that keep a part of dh/dθ: each is its textbook recursion, on every cell that it is made for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from streamgrad.engine.learning_signal import random_weights
from streamgrad.step.row_units import find_row_units
from tests.reference import local as oracle
from tests.tools import bptt, error, few, made, make_chunk, make_params, one_sentence, run, split

CELLS = {
    "vanilla": sg.cells.vanilla(2, 3),
    "leaky": sg.cells.vanilla(2, 3, leak=0.3),
    "lstm": sg.cells.lstm(2, 3),
    "gru": sg.cells.gru(2, 3),
    "lif": sg.cells.lif(2, 3),
    "adaptive lif": sg.cells.lif(2, 3, beta=0.5),
    "lru": sg.cells.lru(2, 3),
    "rtu": sg.cells.rtu(2, 3, activation="tanh"),
    "elstm": sg.cells.elstm(2, 3),
    "mingru": sg.cells.mingru(2, 3),
    "stack": sg.cells.stack(sg.cells.vanilla(2, 3), sg.cells.lstm(3, 2)),
    "lrus": sg.cells.stack(sg.cells.lru(2, 2, 3), sg.cells.lru(3, 2, 2), sg.cells.lru(2, 2)),
}
# As the estimators see them, so that parameters are matrices in the textbooks too.
MODELS = {name: sg.Model(cell, sg.heads.squared_error(2)).inner for name, cell in CELLS.items()}
DIAGONAL = ("lru", "rtu", "elstm", "mingru")


def setup(name, reset=(4,), length=9):
    model = MODELS[name]
    return model, make_params(model), make_chunk(model, length, reset=reset)


def check(make, textbook, name, options, known=None, sizes=(1, 4, 4)):
    model, params, chunk = setup(name)
    got = run(made(make, model, **options), params, split(chunk, sizes))[0]
    want = textbook(model, params, chunk, **(options if known is None else known))
    assert error(got.cell, want) < 1e-10
    assert error(got.head, bptt(model, params, chunk).head) < 1e-10


@pytest.mark.parametrize("name", few(CELLS, "lru"))
def test_immediate(name):
    check(sg.immediate, oracle.immediate, name, {})


FORMS = [(name, "chunks") for name in ("vanilla", "lstm", "gru", "leaky", "adaptive lif", "stack", "elstm", "lru")]
FORMS += [(name, "steps") for name in ("gru", "adaptive lif", "stack")]


@pytest.mark.parametrize("name, form", few(FORMS, ("lstm", "chunks")))
def test_snap(name, form):
    check(sg.snap, oracle.snap, name, {"form": form}, {})


@pytest.mark.parametrize("name", few(["vanilla", "lstm"], "vanilla"))
def test_snap_of_a_full_pattern_is_rtrl(name):
    model, params, chunk = setup(name)
    want = bptt(model, params, chunk)
    assert error(run(made(sg.snap, model), params, [chunk])[0], want) > 1e-3
    for form in ("chunks", "steps"):
        got = run(sg.snap(model, order=2, form=form), params, split(chunk, (3, 3, 3)))[0]
        assert error(got, want) < 1e-10


@pytest.mark.parametrize("name", few(DIAGONAL, "lru"))
def test_snap_of_a_diagonal_cell_is_rtrl(name):
    model, params, chunk = setup(name)
    for form in ("chunks", "steps"):
        got = run(made(sg.snap, model, form=form), params, split(chunk, (3, 3, 3)))[0]
        assert error(got, bptt(model, params, chunk)) < 1e-10


def lattice(size):
    """Units that hear their neighbours alone: far fewer than there are."""

    def step(affine, state, x):
        left, right = jnp.roll(state, 1), jnp.roll(state, -1)
        drive = affine("w", x, 1)
        return jnp.tanh(affine("own") * state + affine("left") * left + affine("right") * right + drive)

    def init(key):
        keys = jax.random.split(key, 4)
        shapes = {"w": (size, 3), "own": (size,), "left": (size,), "right": (size,)}
        return {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}

    return sg.cells.affine(step, init, lambda: jnp.zeros(size), example_input=jnp.zeros(2))


HIGHER = [(1, "chunks", 7), (2, "chunks", 7), (5, "chunks", 11), (2, "steps", 7), (3, "steps", 6)]


@pytest.mark.parametrize("order, form, size", few(HIGHER, (2, "chunks", 7)))
def test_snap_of_higher_orders(order, form, size):
    """On a ring of units SnAp-n keeps those at most n - 1 places away."""
    model = sg.Model(lattice(size), sg.heads.squared_error(2)).inner
    params, chunk = make_params(model), make_chunk(model, 8, reset=(2,))
    est = sg.snap(model, order=order, form=form)
    memory = est.init(params).memory
    kept = map(len, memory) if form == "chunks" else (leaf.shape[0] for leaf in jax.tree.leaves(memory))
    assert set(kept) == {2 * order - 1 if size > 6 else 6}  # of which five count in each row
    got = run(est, params, split(chunk, (3, 4, 1)))[0]
    assert error(got.cell, oracle.snap(model, params, chunk, order)) < 1e-10


def hub(size):
    """One unit hears all preactivations, and all of them hear it: rows have a unit of their own, and one in common."""

    def step(affine, state, x):
        z = affine("w", state[1:], x) + state[0] * jnp.linspace(-1, 1, size)
        a = jnp.tanh(z)
        return jnp.concatenate([0.3 * jnp.sum(a, keepdims=True), a[1:]])

    def init(key):
        return {"w": jax.random.normal(key, (size, size + 1))}

    return sg.cells.affine(step, init, lambda: jnp.zeros(size), example_input=jnp.zeros(2))


@pytest.mark.parametrize("form", few(["chunks", "steps"], "chunks"))
def test_snap_of_own_and_common_units(form):
    """What a row's own unit hears from the common one counts, too."""
    model = sg.Model(hub(6), sg.heads.squared_error(2))
    params, chunk = make_params(model), make_chunk(model, 8, reset=(5,))
    got = run(sg.snap(model, form=form), params, split(chunk, (4, 4)))[0]
    assert error(got.cell, oracle.snap(model, params, chunk)) < 1e-10


def uneven(size):
    """Every other row enters a second unit, which leaks: too many stretches of rows to keep each by itself."""

    def step(affine, state, x):
        h, c = jnp.split(state, [size])
        a = jnp.tanh(affine("w", h, x))
        c = 0.7 * c + 0.5 * a[::2]
        return jnp.concatenate([a + 0.3 * jnp.repeat(c, 2), c])

    def init(key):
        return {"w": jax.random.normal(key, (size, size + 2))}

    return sg.cells.affine(step, init, lambda: jnp.zeros(size + size // 2), example_input=jnp.zeros(2))


@pytest.mark.parametrize("size, blocks", few([(4, 4), (6, 1)], (6, 1)))
def test_rows_with_different_numbers_of_units(size, blocks):
    model = sg.Model(uneven(size), sg.heads.squared_error(2))
    params, chunk = make_params(model), make_chunk(model, 8, reset=(5,))
    est = sg.snap(model)
    assert len(est.init(params).memory) == blocks
    got = run(est, params, split(chunk, (4, 1, 3)))[0]
    assert error(got.cell, oracle.snap(model, params, chunk)) < 1e-10


@pytest.mark.parametrize("name", few(["lstm", "gru", "vanilla"], "lstm"))
def test_as_a_gpu_computes_it(name, monkeypatch):
    """Products and sums are written otherwise there, and loops take several steps in a turn: the same numbers."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    model, params, chunk = setup(name)
    got = run(sg.snap(model), params, split(chunk, (3, 6)))[0]
    assert error(got.cell, oracle.snap(model, params, chunk)) < 1e-10


def test_gates_share_the_recursion_of_their_units():
    """An LSTM's input, forget and cell gates have h_j and c_j; its output gate has h_j alone, and keeps one array."""
    local = find_row_units(MODELS["lstm"], order=1)
    assert [leaf.own.tolist() for leaf in local.by_set.leaves] == [[[0, 1, 2]], [[0, 1, 2], [3, 4, 5]]]
    assert [(b.begin, b.end, b.table) for b in local.ranges] == [(0, 9, 1), (9, 12, 0)]
    assert [b.sets.tolist() for b in local.ranges] == [[0, 1, 2] * 3, [0, 1, 2]]


def echo(affine, state, x):
    """Two units that leak, and what they were before: no step reads that, but the loss does."""
    c = state[:2]
    return jnp.concatenate([0.9 * c + jnp.tanh(affine("w", x)), 0.5 * c])


def linear(affine, state, x):
    """Its derivatives are the same wherever they are taken, so that the forward pass keeps nothing for them."""
    return 0.4 * state + affine("w", state, x)


@pytest.mark.parametrize("form", few(["chunks", "steps"], "chunks"))
@pytest.mark.parametrize("step, shape", [(echo, (2, 2)), (linear, (4, 6))])
def test_snap_of_odd_steps(step, shape, form):
    cell = sg.cells.affine(
        step, lambda key: {"w": jax.random.normal(key, shape)}, lambda: jnp.zeros(4), example_input=jnp.zeros(2)
    )
    model = sg.Model(cell, sg.heads.squared_error(2))
    params, chunk = make_params(model), make_chunk(model, 8, reset=(5,))
    got = run(sg.snap(model, form=form), params, split(chunk, (4, 1, 3)))[0]
    assert error(got.cell, oracle.snap(model, params, chunk)) < 1e-10
    assert error(got, bptt(model, params, chunk)) > 1e-3  # something is left out of both


@pytest.mark.slow
def test_snap_of_a_wide_upper_layer():
    """Units of the upper layer are reached by some rows of the lower one alone, and are moved for all of them."""
    cell = sg.cells.stack(sg.cells.lstm(2, 3), sg.cells.lstm(3, 6))
    model = sg.Model(cell, sg.heads.squared_error(2)).inner
    params, chunk = make_params(model), make_chunk(model, 5)
    got = run(sg.snap(model), params, [chunk])[0]
    assert error(got.cell, oracle.snap(model, params, chunk)) < 1e-10


@pytest.mark.parametrize("make", few([sg.snap, sg.eprop, sg.rflo, sg.rtrl, sg.immediate], sg.snap, sg.rtrl))
def test_weights_that_reach_nothing(make):
    """Such as those of a part that is held fixed: their gradient is zero."""

    def step(affine, state, x):
        return jnp.tanh(affine("w", state, jax.lax.stop_gradient(affine("frozen", x))))

    cell = sg.cells.affine(
        step,
        lambda key: {"w": jax.random.normal(key, (3, 5)), "frozen": jax.random.normal(key, (2, 2))},
        lambda: jnp.zeros(3),
        example_input=jnp.zeros(2),
    )
    model = sg.Model(cell, sg.heads.squared_error(2))
    params, chunk = make_params(model), make_chunk(model, 4)
    got = run(make(model), params, split(chunk, (2, 2)))[0]
    assert not np.any(got.cell["frozen"]) and np.any(got.cell["w"])


@pytest.mark.parametrize("name", few(["vanilla", "lstm", "adaptive lif"], "vanilla"))
def test_snap_across_chunks_is_exact_inside_them(name):
    """The influence is SnAp's, and losses reach it by backpropagation: (dL_chunk/dh_0) M_0 with M_0 of the textbook."""
    model, params, chunk = setup(name, reset=None)
    est = sg.snap(model, inside="backprop")
    assert error(run(est, params, [chunk])[0], bptt(model, params, chunk)) < 1e-10
    by_steps = run(est, params, split(chunk, (1,) * 9))[0]
    mask, M, total = made(oracle.mask_of, model, order=1), 0.0, 0.0
    for s in oracle.jacobians(model, params, chunk, "state"):
        total = total + s["dl_dh"] @ (s["propagate"] @ M + s["pull"]) if not np.isscalar(M) else s["dl_dh"] @ s["pull"]
        M = mask * (s["propagate"] @ M + s["pull"] if not np.isscalar(M) else s["pull"])
    assert error(by_steps.cell, oracle.like(params, total)) < 1e-10


FEEDBACK = [(name, "random") for name in ("vanilla", "leaky", "gru", "lif", "adaptive lif", "lru", "rtu", "mingru")]
FEEDBACK += [(name, "symmetric") for name in ("vanilla", "lstm", "lif")]


@pytest.mark.parametrize("name, feedback", few(FEEDBACK, ("adaptive lif", "random")))
def test_eprop(name, feedback):
    check(sg.eprop, oracle.eprop, name, {"feedback": feedback, "seed": 3})


def test_random_feedback_is_as_large_as_the_head_begins():
    """B has the variance of W, one over the width of the output, however many rows there are."""
    model = sg.Model(sg.cells.vanilla(1, 16), sg.heads.squared_error(900))
    w = np.asarray(model.init(jax.random.key(0)).head["w"])
    b = np.asarray(random_weights(0, w.shape, w.dtype))
    assert b.shape == w.shape == (900, 16)
    np.testing.assert_allclose([w.std(), b.std()], 1 / 4, rtol=0.03)  # 14,400 numbers: five standard errors
    assert abs(b.mean()) < 0.01 and not np.array_equal(b, random_weights(1, w.shape, w.dtype))


def test_eprop_of_an_lstm_keeps_its_forget_gate():
    """It is not the current step alone, and not all of RTRL."""
    model, params, chunk = setup("lstm")
    got = run(made(sg.eprop, model), params, [chunk])[0]
    assert error(got, run(made(sg.immediate, model), params, [chunk])[0]) > 1e-3
    assert error(got, bptt(model, params, chunk)) > 1e-3


@pytest.mark.parametrize("name, leak", few([("vanilla", 1.0), ("leaky", 0.3)], ("leaky", 0.3)))
@pytest.mark.parametrize("feedback", few(["symmetric", "random"], "random"))
def test_rflo(name, leak, feedback):
    check(sg.rflo, oracle.rflo, name, {"feedback": feedback}, {"feedback": feedback, "leak": leak})


@pytest.mark.parametrize("name", few(["vanilla", "stack", "lrus"], "stack"))
def test_local_rtrl(name):
    check(sg.local_rtrl, oracle.local_rtrl, name, {})


@pytest.mark.slow
def test_local_rtrl_is_biased_for_two_layers_alone():
    model, params, chunk = setup("stack")
    got, want = run(made(sg.local_rtrl, model), params, split(chunk, (3, 1, 5)))[0], bptt(model, params, chunk)
    assert error(got.cell[1], want.cell[1]) < 1e-10  # the top layer
    assert error(got.cell[0], want.cell[0]) > 1e-3
    assert error(run(made(sg.rtrl, model), params, split(chunk, (3, 3, 3)))[0], want) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("make", [sg.immediate, sg.snap, sg.local_rtrl, sg.rtrl])
def test_batched(make):
    """Of several layers: the mean of the streams' gradients, over several chunks with resets of their own."""
    model, params, _ = setup("lrus")
    est = make(model)
    many = sg.batched(est, 3)
    chunks = [make_chunk(model, 4, seed=seed, reset=(seed,)) for seed in range(3)]
    state, each = many.init(params), [est.init(params) for _ in chunks]
    for _ in range(2):
        together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chunks)
        grads, state, _ = many.update(params, state, together, jax.random.key(0))
        alone = [est.update(params, s, chunk, None) for s, chunk in zip(each, chunks, strict=True)]
        each = [found[1] for found in alone]
        want = jax.tree.map(lambda *leaves: sum(leaves) / 3, *[found[0] for found in alone])
        assert error(grads, want) < 1e-10


def test_refusals():
    stack, lstm = MODELS["stack"], MODELS["lstm"]
    odd = sg.Model(sg.cells.vanilla(2, 3), sg.heads.from_function(lambda key: jnp.ones(3), lambda p, y, t: p @ y))
    plain = sg.cells.from_function(
        lambda p, h, x: jnp.tanh(p * h + x), lambda key: jnp.ones(2), lambda: jnp.zeros(2), products=False
    )
    for make, named in (
        (lambda: sg.eprop(stack), "eprop"),
        (lambda: sg.rflo(lstm), "eprop"),
        (lambda: sg.rflo(odd), "head"),
        (lambda: sg.eprop(lstm, feedback="wrong"), "feedback"),
        (lambda: sg.eprop(lstm, seed=-1), "seed"),
        (lambda: sg.snap(lstm, order=0), "order"),
        (lambda: sg.snap(stack, inside="backprop"), "inside"),
        (lambda: sg.snap(sg.Model(plain, sg.heads.squared_error(2))), "preactivation"),
        (lambda: sg.cells.vanilla(2, 3, leak=0.0), "leak"),
    ):
        with pytest.raises(ValueError, match=named) as found:
            make()
        assert one_sentence(found)
