"""Bad input is answered by one clear sentence, before anything is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from tests.tools import make_chunk, make_model, make_params, nested_cell, one_sentence

MODEL = sg.Model(sg.cells.vanilla(3, 4), sg.heads.softmax(5))
NESTED = sg.Model(nested_cell(), sg.heads.squared_error(2))
KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("as_a_user")


SINGULAR = np.ones((4, 4))
COUPLED = np.eye(4) + np.eye(4, k=2)

OPTIONS = {
    "unknown cut": (lambda: sg.uoro(MODEL, cut="hidden"), "cut must be one of .*not 'hidden'"),
    "cut that the cell lacks": (lambda: sg.uoro(NESTED), "no cut 'preactivation': choose one of 'state', 'params'"),
    "preuoro without preactivations": (lambda: sg.preuoro(NESTED), "has no cut 'preactivation'"),
    "unknown noise": (lambda: sg.uoro(MODEL, noise="pink"), "noise must be one of 'gaussian'"),
    "unknown rescaling": (lambda: sg.uoro(MODEL, rescale="girr"), "rescale .* must be one of 'none', 'gir'"),
    "unknown inside": (lambda: sg.snap(MODEL, inside="steps"), "inside must be one of 'estimated', 'backprop'"),
    "decay of 1": (lambda: sg.noise.greedy(1.0), "decay must be a number of at least 0 and below 1"),
    "decay not a number": (lambda: sg.noise.greedy("0.9"), "decay must be a number"),
    "alpha for nobacktrack": (lambda: sg.nobacktrack(MODEL, rescale=np.ones((3, 2))), "2 columns, but .* 1 groups"),
    "unknown immediate": (lambda: sg.uoro(MODEL, immediate="both"), "immediate must be one of"),
    "unhashable choice": (lambda: sg.uoro(MODEL, noise=["gaussian"]), "noise must be one of"),
    "singular q0": (lambda: sg.uoro(MODEL, q0=SINGULAR), "singular"),
    "singular diagonal": (lambda: sg.uoro(MODEL, q0=np.array([1.0, 0, 2, 3])), "singular"),
    "q0 of another size": (lambda: sg.uoro(MODEL, q0=np.eye(3)), r"shape \(4, 4\)"),
    "q0 not finite": (lambda: sg.spatial_rtrl(MODEL, q0=np.diag([1, 2, 3, np.nan])), "q0 must be finite"),
    "complex q0": (lambda: sg.uoro(MODEL, q0=1j * np.eye(4)), "q0 must be real"),
    "q0 between groups": (lambda: sg.uoro(MODEL, q0=COUPLED, groups=2), "must not mix two groups"),
    "groups do not divide": (lambda: sg.uoro(MODEL, groups=3), "choose one of 1, 2, 4, not 3"),
    "too many groups": (lambda: sg.uoro(MODEL, groups=8), "choose one of 1, 2, 4, not 8"),
    "no group": (lambda: sg.uoro(MODEL, groups=0), "groups must be a whole number of at least 1"),
    "half a group": (lambda: sg.uoro(MODEL, groups=1.5), "groups must be a whole number"),
    "groups elsewhere": (lambda: sg.uoro(MODEL, cut="state", groups=2), "groups need the cut 'preactivation'"),
    "alpha not positive": (lambda: sg.uoro(MODEL, rescale=np.array([1.0, 0.0])), "alpha must be .*positive"),
    "alpha not finite": (lambda: sg.uoro(MODEL, rescale=np.array([1.0, np.inf])), "alpha must be .*finite"),
    "alpha of another shape": (lambda: sg.uoro(MODEL, rescale=np.ones((2, 2, 2))), "alpha must have the shape"),
    "alpha for other groups": (lambda: sg.uoro(MODEL, rescale=np.ones((3, 3)), groups=2), "3 columns, but .* 2 groups"),
    "window below 1": (lambda: sg.windowed_bptt(MODEL, window=0), "window must be a whole number of at least 1"),
    "window not whole": (lambda: sg.windowed_bptt(MODEL, window=2.0), "window must be a whole number"),
    "window below every": (
        lambda: sg.windowed_bptt(MODEL, 3, every=4),
        "window must be at least every, .* but window=3",
    ),
    "every below 1": (
        lambda: sg.windowed_bptt(MODEL, window=3, every=0),
        "every must be a whole number of at least 1, not 0",
    ),
    "every not whole": (lambda: sg.windowed_bptt(MODEL, window=3, every=1.5), "every must be a whole number"),
    "replay no bool": (
        lambda: sg.windowed_bptt(MODEL, window=3, replay="no"),
        "replay must be True or False, not 'no'",
    ),
    "recompute below 1": (lambda: sg.bptt(MODEL, recompute=0), "recompute must be a whole number"),
    "no batch": (lambda: sg.batched(sg.uoro(MODEL), 0), "batch_size must be a whole number"),
    "no units": (lambda: sg.cells.lstm(3, 0), "n_hidden must be a whole number"),
    "one class": (lambda: sg.heads.softmax(1), "n_classes must be a whole number of at least 2"),
    "no layer": (lambda: sg.cells.stack(), "at least one cell"),
    "unknown estimator": (lambda: sg.estimators.find_estimator("rtlr"), "estimator must be one of 'bptt'"),
    "step is no function": (lambda: sg.cells.from_function(3, 3, 3), "step must be a function"),
    "whole-number state": (
        lambda: sg.cells.from_function(lambda p, s, x: s, lambda k: k, lambda: jnp.zeros(2, int)),
        "state must have an array of floating-point numbers in it",
    ),
    "windowed_bptt with unknown input": (
        lambda: sg.windowed_bptt(
            sg.Model(
                sg.cells.from_function(lambda p, s, x: s + p, lambda k: jnp.ones(2), lambda: jnp.ones(2)),
                sg.heads.softmax(2),
            ),
            window=2,
        ),
        "example_input",
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case):
    make, match = OPTIONS[case]
    with pytest.raises(ValueError, match=match) as error:
        make()
    assert one_sentence(error)


T = 6
X, Y = jnp.zeros((T, 3)), jnp.zeros(T, int)
CHUNKS = {
    "not a chunk": ((X, Y), "must be a streamgrad.Chunk, not tuple"),
    "lengths disagree": (sg.Chunk(X, Y[:5]), "same length along time, but they have: inputs 6, targets 5"),
    "no step": (sg.Chunk(X[:0], Y[:0]), "at least one step"),
    "no time": (sg.Chunk(jnp.zeros(()), Y), "inputs has no axis for time"),
    "no inputs": (sg.Chunk({}, Y), "inputs has no arrays"),
    "feature size": (sg.Chunk(jnp.zeros((T, 2)), Y), r"one step of inputs must have the shape .*\(3,\).*\(2,\)"),
    "structure of inputs": (sg.Chunk({"x": X}, Y), "one step of inputs must have the structure"),
    "targets not whole": (sg.Chunk(X, jnp.zeros(T)), "one target of heads.softmax must be a whole number"),
    "shape of targets": (sg.Chunk(X, jnp.zeros((T, 5), int)), r"whole number of shape \[\], not int64\[5\]"),
    "list for array": (sg.Chunk([1.0, 2.0], Y), r"inputs\[0\] must be an array, not float"),
    "length of reset": (sg.Chunk(X, Y, jnp.zeros(T - 1, bool)), "same length along time"),
    "shape of reset": (sg.Chunk(X, Y, jnp.zeros((T, 1), bool)), r"reset must be one bool per step, bool\[6\]"),
    "type of reset": (sg.Chunk(X, Y, jnp.zeros(T)), r"reset must be one bool per step, bool\[6\], not float64"),
    "length of weight": (sg.Chunk(X, Y, weight=jnp.ones(T - 1)), "same length along time, .*, weight 5"),
    "shape of weight": (sg.Chunk(X, Y, weight=jnp.ones((T, 1))), r"one real number per step, .*, not float64\[6, 1\]"),
    "type of weight": (sg.Chunk(X, Y, weight=jnp.ones(T) + 0j), "weight must be one real number per .* not complex128"),
    "list of weights": (sg.Chunk(X, Y, weight=[1.0] * T), r"weight\[0\] must be an array, not float"),
    "a tree of weights": (sg.Chunk(X, Y, weight={"a": jnp.ones(T)}), "one real number per step, .* not dict"),
}
ESTIMATORS = {name: row.make(MODEL, **row.options) for name, row in sg.estimators.REGISTRY.items()}


@pytest.mark.parametrize("case", CHUNKS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_chunks(name, case):
    est, (chunk, match) = ESTIMATORS[name], CHUNKS[case]
    params = make_params(MODEL)
    with pytest.raises(ValueError, match=match) as error:
        est.update(params, est.init(params), chunk, KEY)
    assert one_sentence(error)


PARAMS = {
    "whole numbers": (lambda p: jax.tree.map(lambda x: x.astype(int), p), r"params.cell\['w'\] .* not int64"),
    "complex": (lambda p: jax.tree.map(lambda x: x + 0j, p), r"params.cell\['w'\] .* not complex128"),
    "complex head": (lambda p: p._replace(head=jax.tree.map(lambda x: x + 0j, p.head)), r"params.head\['b'\]"),
    "another record": (lambda p: tuple(p), "params must be what model.init"),
    "another shape": (lambda p: p._replace(cell={"w": p.cell["w"][:, 1:]}), r"params.cell\['w'\] must have the shape"),
    "another structure": (lambda p: p._replace(cell={"v": p.cell["w"]}), "params must have the structure"),
    "Python numbers": (lambda p: p._replace(cell={"w": 1.0}), r"params.cell\['w'\] .* not float"),
}


@pytest.mark.parametrize("case", PARAMS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_params(name, case):
    est, (spoil, match) = ESTIMATORS[name], PARAMS[case]
    params = make_params(MODEL)
    state = est.init(params)
    for call in (est.init, lambda p: est.update(p, state, sg.Chunk(X, Y), KEY)):
        with pytest.raises(ValueError, match=match) as error:
            call(spoil(params))
        assert one_sentence(error)


def test_state_of_a_batch_for_one_stream():
    est, params = sg.uoro(MODEL), make_params(MODEL)
    state = sg.batched(est, 2).init(params)
    with pytest.raises(ValueError, match=r"state.cell must have the shape") as error:
        est.update(params, state, sg.Chunk(X, Y), KEY)
    assert one_sentence(error)
    with pytest.raises(ValueError, match="state must be what init") as error:
        est.update(params, None, sg.Chunk(X, Y), KEY)


def test_batches():
    est, params = sg.batched(sg.uoro(MODEL), 2), make_params(MODEL)
    state = est.init(params)
    good = sg.Chunk(jnp.zeros((2, T, 3)), jnp.zeros((2, T), int))
    cases = {
        "has 3 streams, but .* made for 2": (sg.Chunk(jnp.zeros((3, T, 3)), jnp.zeros((3, T), int)), KEY),
        "along the batch": (sg.Chunk(good.inputs, good.targets[:1]), KEY),
        "one for each of the 2 streams": (good, jax.random.split(KEY, 3)),
        "same length along time": (sg.Chunk(good.inputs, good.targets[:, 1:]), KEY),
        "must be a streamgrad.Chunk": ((good.inputs, good.targets), KEY),
    }
    for match, (chunk, key) in cases.items():
        with pytest.raises(ValueError, match=match) as error:
            est.update(params, state, chunk, key)
        assert one_sentence(error)


@pytest.mark.parametrize("window", [4, 6])
def test_a_chunk_of_broken_blocks(window):
    est, params = sg.windowed_bptt(MODEL, window=window, every=4), make_params(MODEL)
    many = sg.batched(est, 2)
    wanted = "the number of steps in a chunk must be a multiple of every=4, but this chunk has 6"
    with pytest.raises(ValueError, match=wanted) as error:
        est.update(params, est.init(params), sg.Chunk(X, Y), KEY)
    assert one_sentence(error)
    with pytest.raises(ValueError, match=wanted):
        many.update(params, many.init(params), sg.Chunk(jnp.zeros((2, T, 3)), jnp.zeros((2, T), int)), KEY)


def test_alpha_shorter_than_the_chunk():
    est, params = sg.uoro(MODEL, rescale=np.ones(4)), make_params(MODEL)
    for steps in (5, 6):
        with pytest.raises(ValueError, match=f"alpha has 4 entries, but the chunk has {steps} steps and no") as error:
            est.update(params, est.init(params), sg.Chunk(X[:steps], Y[:steps]), KEY)
        assert one_sentence(error)
    # Two episodes of three steps fit.
    est.update(params, est.init(params), sg.Chunk(X, Y, jnp.arange(T) % 3 == 0), KEY)


def test_given_noise_of_another_shape():
    est, params = sg.uoro(MODEL, noise="given"), make_params(MODEL)
    with pytest.raises(ValueError, match=r"given noise must have the shape \(6, 4\), not \(6, 3\)"):
        est.update(params, est.init(params), sg.Chunk(X, Y), jnp.zeros((6, 3)))
    with pytest.raises(ValueError, match="key must be the noise itself"):
        est.update(params, est.init(params), sg.Chunk(X, Y), KEY)


def test_a_step_that_changes_the_state():
    cell = sg.cells.from_function(lambda p, s, x: jnp.append(s, x), lambda k: jnp.ones(1), lambda: jnp.zeros(2))
    model = sg.Model(cell, sg.heads.squared_error(1))
    params = model.init(KEY)
    for est in (sg.bptt(model), sg.rtrl(model), sg.uoro(model, cut="state")):
        with pytest.raises(ValueError, match="the state that the cell's step returns must have the shape"):
            est.update(params, est.init(params), sg.Chunk(jnp.zeros((2, 1)), jnp.zeros((2, 1))), KEY)


def test_weights_used_twice_or_never():
    def init():
        return {"w": jnp.ones((2, 3)), "v": jnp.ones((2, 3))}

    def cell(step):
        return sg.cells.affine(step, lambda key: init(), lambda: jnp.zeros(2))

    x = jnp.ones(3)
    with pytest.raises(ValueError, match="'w' again"):
        cell(lambda affine, s, x: affine("w", x) + affine("w", x)).step(init(), jnp.zeros(2), x)
    with pytest.raises(ValueError, match=r"never used \['v'\]"):
        cell(lambda affine, s, x: affine("w", x)).step(init(), jnp.zeros(2), x)
    with pytest.raises(ValueError, match="only 'w', 'v'"):
        cell(lambda affine, s, x: affine("u", x)).step(init(), jnp.zeros(2), x)


def test_old_style_keys():
    est, params = sg.uoro(MODEL), make_params(MODEL)
    grads, _, _ = est.update(params, est.init(params), sg.Chunk(X, Y), jax.random.PRNGKey(0))
    assert np.all(np.isfinite(grads.cell["w"]))
    many = sg.batched(est, 2)
    chunk = make_chunk(make_model("vanilla"), 3)
    chunk = sg.Chunk(jnp.zeros((2, 3, 3)), jnp.zeros((2, 3), int))
    many.update(params, many.init(params), chunk, jax.random.PRNGKey(0))
