"""An estimator as a stranger writes it: a `Method`, to which all else comes by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from tests.tools import error, few, made, make_chunk, make_model, make_params, one_sentence, run, split


def by_steps(model):
    """The docstring's example: the gradient through the current step alone."""
    model = sg.worked(model)

    def init(params):
        return sg.EstimatorState(model.init_state(params), (), ())

    def advance(shared, memory, step, noise, dl_dstate):
        return memory, {}

    def contract(before, after, step, dl_dstate):
        return step.backprop(dl_dstate)

    run = sg.by_steps(model, model.cell.cuts["state"], init, advance, contract)
    return sg.estimator(sg.Method(name="myopic", model=model, init=init, run=run))


def of_one_stream(model, params, state, chunk):
    """Losses, outputs and the last state, with the state before each step held fixed; nothing of the engine."""

    def step(state, now):
        x, target, reset = now
        if reset is not None:
            state = jax.tree.map(lambda a, b: jnp.where(reset, a, b), model.init_state(params), state)
        state = model.cell.step(params.cell, jax.lax.stop_gradient(state), x)
        output = model.cell.output(state)
        return state, (model.loss(params.head, output, target), output)

    end, (losses, outputs) = jax.lax.scan(step, state.cell, (chunk.inputs, chunk.targets, chunk.reset))
    return jnp.sum(losses), sg.EstimatorState(end, (), ()), sg.Info(losses, {}, outputs)


def per_stream(model):
    """The same from a function of one stream."""
    model = sg.worked(model)

    def init(params):
        return sg.EstimatorState(model.init_state(params), (), ())

    def one(params, state, chunk, noise):
        def loss(params):
            total, state_after, info = of_one_stream(model, params, state, chunk)
            return total, (state_after, info)

        grads, (state, info) = jax.grad(loss, has_aux=True)(params)
        return sg.Outcome(grads, state, info)

    return sg.estimator(sg.Method(name="myopic", model=model, init=init, run=sg.per_stream(one)))


def at_once(model):
    """The same as `run` itself, for all streams: the gradient of the sum of their losses."""
    model = sg.worked(model)

    def init(params):
        return sg.EstimatorState(model.init_state(params), (), ())

    def run(params, state, chunk, noise, devices):
        def loss(params):
            def one(cell, chunk):
                return of_one_stream(model, params, sg.EstimatorState(cell, (), ()), chunk)

            totals, states, infos = jax.vmap(one)(state.cell, chunk)
            return jnp.sum(totals), (states, infos)

        grads, (after, info) = jax.grad(loss, has_aux=True)(params)
        return sg.Outcome(grads, after, info)

    return sg.estimator(sg.Method(name="myopic", model=model, init=init, run=run))


WAYS = {"by steps": by_steps, "per stream": per_stream, "at once": at_once}
CELLS = {"lru": lambda: sg.cells.lru(1, 2)}  # whose parameters are worked on as matrices
each = pytest.mark.parametrize("way", WAYS)


def setup(cell="lstm", length=6, reset=(2,), weigh=True):
    model = made(foreign, make_model("lstm")) if cell == "lru" else make_model(cell)
    chunk = make_chunk(model, length, reset=reset)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=length)) if weigh else None
    return model, make_params(model), chunk._replace(weight=weight)


def foreign(model):
    return sg.Model(CELLS["lru"](), model.head)


def streams(model, length=4):
    chunks = [make_chunk(model, length, seed=seed, reset=(seed,)) for seed in range(3)]
    weights = np.random.default_rng(2).normal(size=(3, length))
    return [chunk._replace(weight=jnp.asarray(weight)) for chunk, weight in zip(chunks, weights, strict=True)]


def stacked(chunks):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *chunks)


@pytest.mark.parametrize("cell", few(["lstm", "lru", "nested"], "lstm", "lru"))
@each
def test_is_immediate(way, cell):
    """However the stream is cut, with resets and weights, and for a cell whose parameters are of another kind."""
    model, params, chunk = setup(cell)
    got, losses, end = run(made(WAYS[way], model), params, split(chunk, (2, 4)))
    want, same, state = run(made(sg.immediate, model), params, split(chunk, (2, 4)))
    assert error(got, want) < 1e-12
    np.testing.assert_allclose(losses, same, rtol=1e-12)
    assert error(end.cell, state.cell) < 1e-12
    assert jax.tree.structure(got) == jax.tree.structure(params)
    assert repr(made(WAYS[way], model)) == "myopic()"


@each
def test_resets_and_weights_matter(way):
    """So that they were compared with something."""
    model, params, chunk = setup()
    est = made(WAYS[way], model)
    got, plain, unweighed = (
        run(est, params, [some])[0] for some in (chunk, chunk._replace(reset=None), chunk._replace(weight=None))
    )
    assert error(got, plain) > 1e-3 and error(got, unweighed) > 1e-3


@each
def test_many_streams_are_the_mean_of_each(way):
    model, params, _ = setup()
    est, chunks = made(WAYS[way], model), streams(make_model("lstm"))
    many = sg.batched(est, 3)
    state, ones = many.init(params), [est.init(params)] * 3
    for _ in range(2):  # the second update begins with different states
        grads, state, info = many.update(params, state, stacked(chunks))
        found = [est.update(params, *each) for each in zip(ones, chunks, strict=True)]
        ones = [after for _, after, _ in found]
    assert error(grads, jax.tree.map(lambda *leaves: sum(leaves) / 3, *(grads for grads, _, _ in found))) < 1e-12
    np.testing.assert_allclose(info.loss, np.stack([info.loss for _, _, info in found]), rtol=1e-12)
    assert error(state.cell, stacked([after.cell for after in ones])) < 1e-12


@each
def test_one_stream_is_a_batch_of_one(way):
    model, params, chunk = setup()
    est = made(WAYS[way], model)
    many = sg.batched(est, 1)
    one = est.update(params, est.init(params), chunk)
    grads, state, info = many.update(params, many.init(params), stacked([chunk]))
    assert error(grads, one[0]) < 1e-14
    assert error((state.cell, info), stacked([(one[1].cell, one[2])])) < 1e-14


@each
def test_advance_and_credit(way):
    """The halves of an update, for one stream and for many, whose credit may be each stream's own."""
    model, params, _ = setup()
    est, chunks = made(WAYS[way], model), [chunk._replace(weight=None) for chunk in streams(make_model("lstm"))]
    read_out = jax.grad(lambda y, t: jnp.sum(jax.vmap(lambda y, t: model.loss(params.head, y, t))(y, t)))
    alone = []
    for chunk in chunks:
        output, state, trace = est.advance(params, est.init(params), chunk.inputs, reset=chunk.reset)
        want, after, info = est.update(params, est.init(params), chunk)
        alone.append(est.credit(params, trace, read_out(output, chunk.targets)))
        assert error(alone[-1], want.cell) < 1e-12
        assert error((output, state.cell), (info.outputs, after.cell)) < 1e-12
    many, together = sg.batched(est, 3), stacked(chunks)
    output, _, trace = many.advance(params, many.init(params), together.inputs, reset=together.reset)
    dl_doutput = jax.vmap(read_out)(output, together.targets)
    assert error(many.credit(params, trace, dl_doutput, per_stream=True), stacked(alone)) < 1e-12
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 3, *alone)
    assert error(many.credit(params, trace, dl_doutput), mean) < 1e-12


@each
def test_devices_and_flags(way):
    """`sharded` and `monitored` know nothing of who wrote it."""
    model, params, _ = setup()
    est, chunk = made(WAYS[way], model), jax.tree.map(lambda leaf: leaf[:2], stacked(streams(make_model("lstm"))))
    many = sg.batched(est, 2)
    spread = sg.sharded(sg.monitored(est), 2, jax.make_mesh((2,), ("streams",)))
    want, _, _ = many.update(params, many.init(params), chunk)
    got, _, info = spread.update(params, spread.init(params), chunk)
    assert error(jax.device_get(got), want) < 1e-12
    assert info.diagnostics["finite"].tolist() == [True, True]


def counting(model, size=2):
    """A method with a memory of its own; `run` returns one of another size."""
    model = sg.worked(model)

    def init(params):
        return sg.EstimatorState(model.init_state(params), jnp.zeros(2), ())

    inner = sg.by_steps(
        model, model.cell.cuts["state"], init, lambda s, m, *_: (m + 1, {}), lambda b, a, s, g: s.backprop(g)
    )

    def run(*arguments):
        outcome = inner(*arguments)
        return outcome._replace(state=outcome.state._replace(memory=jnp.zeros((len(outcome.info.loss), size))))

    return sg.estimator(sg.Method(name="counting", model=model, init=init, run=run))


@pytest.mark.usefixtures("as_a_user")
def test_a_state_of_another_shape_is_refused():
    """Whoever made it: the caller, for one stream or for many, or the method, when it is passed on."""
    model, params, chunk = setup(reset=None, weigh=False)
    est, batch = made(counting, model), stacked([chunk] * 2)
    many, wrong = sg.batched(est, 2), made(counting, model, size=3)
    memory = (
        r"state.memory must have the shape of what this estimator's own init\(params\) returns, \(2,\), but .* \(3,\)"
    )
    cases = (
        (lambda: est.update(params, est.init(params)._replace(memory=jnp.zeros(3)), chunk), memory),
        (lambda: est.advance(params, est.init(params)._replace(memory=jnp.zeros(3)), chunk.inputs), memory),
        (lambda: many.update(params, many.init(params)._replace(memory=jnp.zeros((2, 3))), batch), memory),
        (lambda: wrong.update(params, wrong.update(params, wrong.init(params), chunk)[1], chunk), memory),
        (lambda: many.update(params, many.init(params)._replace(memory=jnp.zeros((3, 2))), batch), "that of 2 streams"),
    )
    for call, match in cases:
        with pytest.raises(ValueError, match=match) as refusal:
            call()
        assert one_sentence(refusal)


@pytest.mark.usefixtures("as_a_user")
def test_what_is_no_method_is_refused():
    """A model that is not as estimators work on it would be taken for matrices, which it is not made of."""
    model, _, _ = setup("lru")

    def init(params):
        return sg.EstimatorState(model.init_state(params), (), ())

    method = sg.Method(name="mine", model=model, init=init, run=lambda *_: None)
    for wrong, match in ((None, "method must be a streamgrad.Method, not None"), (method, r"model=streamgrad.worked")):
        with pytest.raises(ValueError, match=match) as refusal:
            sg.estimator(wrong)
        assert one_sentence(refusal)
