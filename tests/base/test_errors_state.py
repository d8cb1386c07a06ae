"""A state of another kind, and numbers that a model cannot take, are answered by one sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from tests.tools import few, made, make_params, one_sentence

pytestmark = pytest.mark.usefixtures("as_a_user")
KEY = jax.random.key(0)
MODEL = sg.Model(sg.cells.vanilla(3, 4), sg.heads.softmax(5))
LSTM, HEAD = sg.cells.lstm(3, 4), sg.heads.softmax(5)
SQUARE, BIT = sg.heads.squared_error(1), sg.heads.bernoulli(1)
T = 6
X, Y = jnp.zeros((T, 3)), jnp.zeros(T, int)
ESTIMATORS = {name: row.make(MODEL, **row.options) for name, row in sg.estimators.REGISTRY.items()}


@pytest.mark.parametrize("name", few(ESTIMATORS, "bptt", "rtrl", "snap", "uoro"))
def test_the_state_of_another_estimator(name):
    """For one stream and for many: every estimator's state is refused by every other, save by its own kind."""
    est, params, chunk = ESTIMATORS[name], make_params(MODEL), sg.Chunk(X, Y)
    many, batch = sg.batched(est, 2), jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), chunk)
    # A stream may go on with either: UORO with another noise, no memory, layers of which there is one, own units.
    alike = [{"uoro", "nobacktrack"}, {"bptt", "immediate"}, {"rtrl", "local_rtrl"}, {"snap", "eprop", "rflo"}]
    for key, other in ESTIMATORS.items():
        if any({key, name} <= kind for kind in alike) or key == name:
            continue
        with pytest.raises(ValueError, match="this estimator's own init") as error:
            est.update(params, other.init(params), chunk, KEY)
        assert one_sentence(error)
        with pytest.raises(ValueError, match="this estimator's own init"):
            many.update(params, sg.batched(other, 2).init(params), batch, KEY)


STATES = {
    "other groups": (sg.uoro(MODEL, groups=4), r"state.memory.tangent must have the shape .* \(1, 4\).*\(4, 4\)"),
    "carried": (sg.carried(sg.uoro(MODEL)), "its shared is of type CarriedShared, and .* of type NoiseSettings"),
    "another model": (sg.uoro(sg.Model(LSTM, HEAD)), "state.cell must have the structure .* it has state.cell.h"),
    "many streams": (sg.batched(sg.uoro(MODEL), 2), r"state.cell must have the shape of .*\(4,\).*\(2, 4\)"),
}


@pytest.mark.parametrize("case", STATES)
def test_states_that_do_not_fit(case):
    other, match = STATES[case]
    est, params = sg.uoro(MODEL), make_params(MODEL)
    theirs = make_params(sg.Model(LSTM, HEAD)) if case == "another model" else params
    with pytest.raises(ValueError, match=match) as error:
        est.update(params, other.init(theirs), sg.Chunk(X, Y), KEY)
    assert one_sentence(error)


def test_the_state_of_other_streams():
    est, params = sg.uoro(MODEL), make_params(MODEL)
    batch = sg.Chunk(jnp.zeros((2, T, 3)), jnp.zeros((2, T), int))
    for state, shape in ((sg.batched(est, 3).init(params), r"\(3, 4\)"), (est.init(params), r"\(4,\)")):
        with pytest.raises(ValueError, match=f"that of 2 streams, but state.cell has the shape {shape}") as error:
            sg.batched(est, 2).update(params, state, batch, KEY)
        assert one_sentence(error)
    with pytest.raises(ValueError, match=r"state must be what init\(params\) returns, not None"):
        sg.batched(est, 2).update(params, None, batch, KEY)


@pytest.mark.parametrize("name", few(ESTIMATORS, "bptt", "rtrl", "snap", "uoro"))
def test_params_and_state_of_different_dtypes(name):
    est, params = ESTIMATORS[name], make_params(MODEL)
    small = make_params(MODEL, dtype=jnp.float16)
    many, batch = sg.batched(est, 2), sg.Chunk(jnp.zeros((2, T, 3)), jnp.zeros((2, T), int))
    for theta, other in ((small, params), (params, small)):
        with pytest.raises(ValueError, match=r"state.cell is float\d\d, but for these params it must be") as error:
            est.update(theta, est.init(other), sg.Chunk(X, Y), KEY)
        assert one_sentence(error)
        with pytest.raises(ValueError, match=r"state\.cell is float"):
            many.update(theta, many.init(other), batch, KEY)


def test_params_of_different_dtypes_are_no_error():
    """They are worked on in the widest of them: tests/estimators/test_kinds_of_numbers.py."""
    mixed = sg.Model(sg.cells.gru(3, 4), HEAD)
    cell = mixed.init(KEY).cell
    params = mixed.init(KEY)._replace(cell=cell | {"gates": cell["gates"].astype(jnp.float16)})
    assert sg.uoro(mixed).init(params).cell.dtype == jnp.float64
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    assert sg.uoro(mixed).init(params).cell.dtype == jnp.float32


VALUES = {
    "complex inputs": (HEAD, sg.Chunk(X + 0j, Y), "inputs must be real numbers, .* not complex128"),
    "keys for inputs": (HEAD, sg.Chunk(jax.random.split(KEY, (T, 3)), Y), "inputs must be real numbers, .* not key"),
    "words for inputs": (HEAD, sg.Chunk(np.full((T, 3), "a"), Y), "inputs must be an array of numbers, not of <U1"),
    "objects for inputs": (
        HEAD,
        sg.Chunk(np.full((T, 3), None), Y),
        "inputs must be an array of numbers, not of object",
    ),
    "NaN in inputs": (HEAD, sg.Chunk(X.at[1, 2].set(np.nan), Y), "inputs must be finite, but one of them is nan"),
    "infinite inputs": (HEAD, sg.Chunk(np.asarray(X) - np.inf, Y), "inputs must be finite, but one of them is -inf"),
    "bools for classes": (HEAD, sg.Chunk(X, Y == 1), r"must be a whole number of shape \[\], not bool"),
    "no targets": (HEAD, sg.Chunk(X, None), "one target of heads.softmax must be .* not none at all"),
    "complex targets": (
        SQUARE,
        sg.Chunk(X, X[:, :1] + 0j),
        "squared_error must be .* not complex128",
    ),
    "NaN in targets": (
        SQUARE,
        sg.Chunk(X, X[:, :1] + np.nan),
        "finite numbers, but one of them is nan",
    ),
    "NaN in weights": (
        HEAD,
        sg.Chunk(X, Y, weight=jnp.ones(T).at[2].set(np.nan)),
        "weight must be finite, but one of them is nan",
    ),
    "infinite weights": (HEAD, sg.Chunk(X, Y, None, np.full(T, -np.inf)), "be finite, but one of them is -inf"),
    "a class of -1 that counts": (
        HEAD,
        sg.Chunk(X, Y.at[jnp.array([1, 4])].set(-1), weight=jnp.ones(T).at[4].set(0)),
        "classes, .* but one of them is -1",
    ),
    "a bit of 2": (BIT, sg.Chunk(X, X[:, :1] + 2), "numbers between 0 and 1, but one of them is 2.0"),
    "a bit of NaN": (BIT, sg.Chunk(X, X[:, :1] + np.nan), "between 0 and 1, but one of them is nan"),
}


STACKS = {id(head): sg.Model(sg.cells.stack(LSTM, sg.cells.gru(4, 2)), head) for head in (HEAD, SQUARE, BIT)}


@pytest.mark.parametrize("case", VALUES)
def test_values(case):
    head, chunk, match = VALUES[case]
    model = STACKS[id(head)]
    est, params = made(sg.bptt, model), make_params(model)
    with pytest.raises(ValueError, match=match) as error:
        est.update(params, est.init(params), chunk, None)
    assert one_sentence(error)


def test_a_cell_of_ones_own_may_read_what_it_likes():
    """NaN for what is missing, complex numbers, keys: a step that is not ours may know what to do with them."""

    def step(params, state, x):
        return params * state + jnp.where(jnp.isnan(x["a"]), 0, x["a"]) + x["b"].real

    cell = sg.cells.from_function(step, lambda key: jnp.ones(2), lambda: jnp.zeros(2))
    model = sg.Model(cell, sg.heads.squared_error(1))
    est, params = sg.uoro(model, cut="state"), model.init(KEY)
    inputs = {"a": jnp.full((T, 2), np.nan), "b": jnp.zeros((T, 2)) + 1j}
    loss = est.update(params, est.init(params), sg.Chunk(inputs, jnp.ones((T, 1))), KEY)[2].loss
    assert np.all(np.isfinite(loss))


def test_arrays_on_an_accelerator_are_not_read(monkeypatch):
    """Their numbers are left alone, because reading them would wait for all that was sent there before."""
    from streamgrad import checks

    class Elsewhere:
        platform = "gpu"

    wrong = Y.at[2].set(5)
    with pytest.raises(ValueError, match="but one of them is 5"):
        checks.check_values(MODEL, sg.Chunk(X, wrong))
    monkeypatch.setattr(type(wrong), "devices", lambda self: {Elsewhere()})
    checks.check_values(MODEL, sg.Chunk(X, wrong))


@pytest.mark.parametrize("numbers", [jnp, np])
def test_targets_of_steps_that_do_not_count_are_not_looked_at(numbers):
    """A class of -1 where the weight is 0, or false; for one stream, for many, and where it cannot be seen."""
    est, params = sg.bptt(MODEL), make_params(MODEL)
    targets = numbers.asarray([0, -1, 2, 99, 4, -1])
    for weight in (targets * 0.0 + numbers.asarray([1.0, 0, 0.5, 0, -1, 0]), numbers.isin(targets, Y[:1])):
        chunk = sg.Chunk(X, targets, weight=weight)
        many = jax.tree.map(lambda leaf: numbers.stack([leaf, leaf]), chunk)
        for update in (est.update, jax.jit(est.update)):
            loss = update(params, est.init(params), chunk, None)[2].loss
            np.testing.assert_array_equal(loss == 0, weight == 0)
        batch = sg.batched(est, 2)
        np.testing.assert_allclose(batch.update(params, batch.init(params), many, None)[2].loss[1], loss, rtol=1e-12)
    none = chunk._replace(weight=numbers.zeros(T))
    assert not np.any(est.update(params, est.init(params), none, None)[2].loss)


@pytest.mark.parametrize("wrong", [-1, 5])
def test_a_class_that_does_not_exist_is_no_other_class(wrong):
    """An error where it can be seen, of JAX on the CPU or of numpy, for one stream or many; NaN where it is traced."""
    est, params = sg.bptt(MODEL), make_params(MODEL)
    chunk = sg.Chunk(X, Y.at[2].set(wrong))
    many, batch = sg.batched(est, 2), jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), chunk)
    for est_, chunk_ in ((est, chunk), (est, jax.tree.map(np.asarray, chunk)), (many, batch)):
        state = est_.init(params)
        good = chunk_._replace(targets=np.clip(chunk_.targets, 0, 4))
        est_.update(
            params, state, good, None
        )  # a chunk of these shapes was right before: the numbers are looked at again
        with pytest.raises(
            ValueError, match=f"softmax must be classes, .* from 0 to 4, but one of them is {wrong}"
        ) as error:
            est_.update(params, state, chunk_, None)
        assert one_sentence(error)
    loss = jax.jit(est.update)(params, est.init(params), chunk, None)[2].loss
    assert np.isnan(loss[2]) and np.all(np.isfinite(np.delete(loss, 2)))
