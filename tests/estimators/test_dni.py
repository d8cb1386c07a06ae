"""DNI is its recursion, with the learning of its predictor; a future that is linear in the state it learns."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from tests.reference import truncated as oracle
from tests.tools import error, few, made, make_chunk, make_model, make_params, one_sentence, run, split

slow = pytest.mark.slow


def stream_of(est, params, chunk, sizes):
    """Of every chunk the cell's gradient, ravelled, and what was learnt until its end."""
    state, found = est.init(params), []
    for part in split_streams(chunk, sizes):
        grads, state, info = est.update(params, state, part, None)
        found.append((ravel_pytree(grads.cell)[0], state.shared.weights, info))
    return found


def split_streams(chunk, sizes):
    if chunk.targets.ndim == 2:
        yield from split(chunk, sizes)
        return
    borders = np.cumsum((0, *sizes))
    for a, b in itertools.pairwise(borders):
        yield jax.tree.map(lambda leaf, a=a, b=b: leaf[:, a:b], chunk)


SIZES = (1, 2, 1, 3, 2)
STREAMS = [(cell, SIZES) for cell in ("lstm", "nested", "vanilla", "gru", "stack")]
STREAMS += [("lstm", (4, 5)), ("nested", (1,) * 9)]


@pytest.mark.parametrize("cell, sizes", few(STREAMS, ("lstm", SIZES)))
def test_textbook(cell, sizes):
    """Gradients and what is learnt, chunk by chunk, with resets inside chunks and at their beginnings."""
    model = make_model(cell)
    params = make_params(model)
    est = made(sg.dni, model, learning_rate=0.7, discount=0.9)
    for reset in (None, (2, 4)):
        chunk = make_chunk(model, 9, reset=reset)
        want = oracle.dni_streams(model, params, [chunk], sizes, 0.7, 0.9)
        for (grads, weights, _), textbook, learnt in zip(stream_of(est, params, chunk, sizes), *want, strict=True):
            np.testing.assert_allclose(grads, textbook, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(weights, learnt, rtol=1e-10, atol=1e-12)
        assert np.linalg.norm(learnt) > 0.1


@pytest.mark.parametrize("cell", ["vanilla", pytest.param("nested", marks=slow)])
def test_streams_learn_together(cell):
    model = make_model(cell)
    params, sizes = make_params(model), (2, 1, 3)
    streams = [make_chunk(model, 6, seed=seed, reset=(seed + 1, seed + 2)) for seed in range(3)]
    many = sg.batched(made(sg.dni, model, learning_rate=0.5), 3)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *streams)
    want = oracle.dni_streams(model, params, streams, sizes, 0.5)
    for (grads, weights, _), textbook, learnt in zip(stream_of(many, params, stacked, sizes), *want, strict=True):
        np.testing.assert_allclose(grads, textbook, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(weights, learnt, rtol=1e-10, atol=1e-12)


def test_features():
    def squares(h):
        return jnp.concatenate([h, h**2])

    model = make_model("vanilla")
    params, chunk, sizes = make_params(model), make_chunk(model, 6), (2, 2, 2)
    est = sg.dni(model, learning_rate=0.5, features=squares)
    assert est.init(params).shared.weights.shape == (2, 5)
    want = oracle.dni_streams(model, params, [chunk], sizes, 0.5, features=squares)
    for (grads, weights, _), textbook, learnt in zip(stream_of(est, params, chunk, sizes), *want, strict=True):
        np.testing.assert_allclose(grads, textbook, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(weights, learnt, rtol=1e-10, atol=1e-12)


def test_without_a_future_it_is_bptt():
    """By `discount=0`, whatever it learns; and in a first chunk, before it has learnt anything."""
    model = make_model("lstm")
    params, chunk = make_params(model), make_chunk(model, 6, reset=(3,))
    want = run(made(sg.bptt, model), params, split(chunk, (2, 4)))[0]
    assert error(run(made(sg.dni, model, discount=0), params, split(chunk, (2, 4)))[0], want) < 1e-12
    assert error(run(made(sg.dni, model), params, split(chunk, (2, 4)))[0], want) > 1e-3
    first = run(made(sg.bptt, model), params, [chunk])[0]
    assert error(run(made(sg.dni, model), params, [chunk])[0], first) < 1e-12


def test_with_the_right_prediction_it_is_the_gradient():
    """Given dL_future/dh for a prediction, the gradient of a chunk has all the credit that later losses give it."""
    model = make_model("gru")
    params, chunk = make_params(model), make_chunk(model, 5)
    now, later = split(chunk, (2, 3))
    exact, est = made(sg.bptt, model), made(sg.dni, model)
    state = exact.update(params, exact.init(params), now, None)[1]

    def future(start):
        return jnp.sum(exact.update(params, state._replace(cell=start), later, None)[2].loss)

    s = jax.jit(jax.grad(future))(state.cell)
    begin = est.init(params)
    weights = begin.shared.weights.at[:, -1].set(ravel_pytree(s)[0])
    got = est.update(params, begin._replace(shared=begin.shared._replace(weights=weights)), now, None)[0]
    copies = [params.cell] * 5

    def total(early):
        steps = jax.tree.map(lambda *leaves: jnp.stack(leaves), *([early] * 2 + copies[2:]))
        return jnp.sum(oracle.losses(model, params, chunk, "state", cell_params=steps))

    assert error(got.cell, jax.jit(jax.grad(total))(params.cell)) < 1e-12


def linear_model(loss):
    """h' = A h + x: 3 units, of which the state is what the head reads; no parameter of it changes here."""
    cell = sg.cells.from_function(
        lambda a, h, x: a @ h + x,
        lambda key: jnp.asarray([[0.8, 0.3, 0.0], [-0.3, 0.8, 0.0], [0.1, 0.0, 0.7]]),
        lambda: jnp.zeros(3),
        example_input=jnp.zeros(3),
        products=False,
    )
    return sg.Model(cell, sg.heads.from_function(lambda key, width: (), lambda params, y, target: loss(y, target)))


def brute_force(model, params, h, inputs, targets):
    """dL_future/dh by backpropagation through all of the future that is given."""

    def future(h):
        outputs, _ = model.run(params, h, inputs)
        return jnp.sum(jax.vmap(lambda y, target: model.head.loss((), y, target))(outputs, targets))

    return jax.grad(future)(h)


def learn(est, params, inputs, targets, length):
    """The state of an estimator after a long stream, chunk by chunk."""
    steps = inputs.shape[1] // length

    def part(leaf):
        return jnp.swapaxes(leaf.reshape(leaf.shape[0], steps, length, *leaf.shape[2:]), 0, 1)

    def step(state, chunk):
        _, state, info = est.update(params, state, sg.Chunk(*chunk), None)
        return state, jnp.mean(info.diagnostics["missed"])

    return jax.jit(lambda: jax.lax.scan(step, est.init(params), (part(inputs), part(targets))))()


def test_it_learns_the_future_of_a_linear_loss():
    """dL_future/dh is the same for every state: the prediction becomes it, to rounding nearly."""
    model = linear_model(lambda y, target: target @ y)
    params = sg.Params(model.cell.init_params(jax.random.key(0)), ())
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.normal(size=(4, 3000, 3)))
    targets = jnp.broadcast_to(jnp.asarray([1.0, -2.0, 0.5]), inputs.shape)
    state, missed = learn(sg.batched(sg.dni(model, learning_rate=0.3), 4), params, inputs, targets, 3)
    for h in np.asarray(state.cell):
        want = brute_force(model, params, jnp.asarray(h), inputs[0, :400], targets[0, :400])
        got = state.shared.weights @ np.append(h, 1)
        assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)
    assert missed[0] > 1 and missed[-1] < 1e-3 * missed[0]


def test_it_learns_the_future_of_a_squared_error():
    """dL_future/dh is linear in h, and beyond that noise; its mean over futures, by brute force, is what is learnt."""
    model = linear_model(lambda y, target: 0.5 * jnp.sum((y - target) ** 2))
    params = sg.Params(model.cell.init_params(jax.random.key(0)), ())
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.normal(size=(64, 4000, 3)))
    targets = jnp.broadcast_to(jnp.asarray([1.0, -1.0, 0.0]), inputs.shape)
    est = sg.batched(sg.dni(model, learning_rate=0.05), 64)
    # The loss is quadratic and inputs have no mean, so that the mean over futures is that without inputs.
    future = jax.vmap(lambda h: brute_force(model, params, h, jnp.zeros((400, 3)), targets[0, :400]))
    wrong = []
    for steps in (20, 4000):
        state, _ = learn(est, params, inputs[:, :steps], targets[:, :steps], 2)
        want = future(state.cell)
        got = jnp.concatenate([state.cell, jnp.ones((64, 1))], axis=1) @ state.shared.weights.T
        wrong.append(np.linalg.norm(got - want) / np.linalg.norm(want))
    assert wrong[0] > 0.5 and wrong[1] < 0.05, wrong


@slow
def test_what_it_has_learnt_is_worth_having():
    """The mean gradient over a long stream is nearer to that of the whole than backpropagation by chunks is."""
    model = linear_model(lambda y, target: 0.5 * jnp.sum((y - target) ** 2))
    params = sg.Params(model.cell.init_params(jax.random.key(0)), ())
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.normal(size=(64, 4000, 3)))
    targets = jnp.broadcast_to(jnp.asarray([1.0, -1.0, 0.0]), inputs.shape)
    state, _ = learn(sg.batched(sg.dni(model, learning_rate=0.05), 64), params, inputs, targets, 2)
    totals = {}
    for name, est, shared in (("dni", sg.dni(model, 0.05), state.shared), ("bptt", sg.bptt(model), ())):
        many, total = sg.batched(est, 64), 0.0
        now = many.init(params)._replace(shared=shared)
        for part in split_streams(sg.Chunk(inputs[:, :200], targets[:, :200]), (2,) * 100):
            grads, now, _ = many.update(params, now, part, None)
            total = total + grads.cell
        totals[name] = total
    whole = sg.batched(sg.bptt(model), 64)
    want = whole.update(params, whole.init(params), sg.Chunk(inputs[:, :200], targets[:, :200]), None)[0].cell
    assert error(totals["dni"], want) < 0.1 * error(totals["bptt"], want)


def test_episodes_that_end_are_learnt():
    """Where every chunk is an episode, nothing flows back beyond it, and nothing is predicted."""
    model = make_model("vanilla")
    params, est = make_params(model), made(sg.dni, model)
    state = est.init(params)
    for seed in range(3):
        _, state, info = est.update(params, state, make_chunk(model, 3, seed=seed, reset=(0,)), None)
    assert not np.any(state.shared.weights) and not np.any(info.diagnostics["missed"])


OPTIONS = {
    "learning_rate of 0": ({"learning_rate": 0}, "learning_rate must be above 0 and below 2"),
    "learning_rate of 2": ({"learning_rate": 2.0}, "learning_rate must be above 0 and below 2"),
    "learning_rate not a number": ({"learning_rate": "fast"}, "learning_rate must be a finite number, not 'fast'"),
    "discount above 1": ({"discount": 1.5}, "discount must be a number from 0 to 1, not 1.5"),
    "discount not a number": ({"discount": None}, "discount must be a finite number"),
    "features not a function": ({"features": 3}, "features must be a function, not 3"),
    "features of two arguments": ({"features": lambda h, x: h}, r"called as features\(h\)"),
    "features without an axis": ({"features": jnp.sum}, "features must return one vector of real numbers"),
    "features not an array": ({"features": lambda h: [h, h]}, "features must return one vector of real numbers"),
    "complex features": ({"features": lambda h: 1j * h}, "features must return one vector of real numbers"),
}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("case", OPTIONS)
def test_options(case):
    options, match = OPTIONS[case]
    with pytest.raises(ValueError, match=match) as error:
        sg.dni(make_model("vanilla"), **options)
    assert one_sentence(error)
