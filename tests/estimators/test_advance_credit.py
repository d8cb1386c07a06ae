"""`advance` and `credit`, the two halves of `update`, for every registered estimator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from tests.estimators.registered import ROWS, cases, make, noise_shape, of_each_kind, refuses, usual, where
from tests.tools import error, made, make_chunk, make_model, make_params, one_sentence, split

KEY = jax.random.key(3)
each = cases(
    lambda row, cut: row.advances, lambda row, cut: of_each_kind(row, cut) and row.promise in ("exact", "unbiased")
)
# That the halves are the whole is tested for every estimator and cut; what else they do for one of each kind.
each_kind = cases(lambda row, cut: row.advances and of_each_kind(row, cut))


def linear(model):
    """The same cell with a loss that is linear in its output: with noise in the network, credit knows of no other."""

    def loss(params, output, target):
        return target @ (params @ output)

    return sg.Model(model.cell, sg.heads.from_function(lambda key, width: jax.random.normal(key, (2, width)), loss))


def subject(row, cell="vanilla", length=6, reset=(2, 4)):
    model = make_model(cell)
    if row.promise.startswith("unbiased for"):
        model = made(linear, model)
    return model, make_params(model), make_chunk(model, length, reset=reset)


def reader(model):
    """dL/d(head) and dL/dy, as a user would compute them."""

    def loss(head, output, targets):
        return jnp.sum(jax.vmap(model.head.loss, in_axes=(None, 0, 0))(head, output, targets))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


def read_out(model, params, output, targets):
    return made(reader, model)(params.head, output, targets)


def close(got, want, tolerance=1e-12):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@each
def test_advance_and_credit_are_update(row, cut):
    """Chunk by chunk, across resets; and as late as one likes: here all credit is given after the last chunk."""
    model, params, chunk = subject(row, length=5)
    est = make(row, cut, model)
    now, passed, updates = est.init(params), [], []
    state = est.init(params)
    for index, part in enumerate(split(chunk, (1, 2, 2))):
        key = jax.random.fold_in(KEY, index)
        output, now, trace = est.advance(params, now, part.inputs, key, part.reset)
        grads, state, _ = est.update(params, state, part, key)
        assert isinstance(trace, sg.Trace) and jax.tree.structure(now) == jax.tree.structure(state)
        close(now, state)
        passed.append((part, output, trace))
        updates.append(grads)
    for (part, output, trace), want in reversed(list(zip(passed, updates, strict=True))):
        head, dl_doutput = read_out(model, params, output, part.targets)
        assert error(est.credit(params, trace, dl_doutput), want.cell) < 1e-12
        if row.promise != "unbiased for the smoothed loss":  # whose outputs are those of the network without noise
            assert error(head, want.head) < 1e-12
    # An update goes on from where advance has come to.
    more = make_chunk(model, 2, seed=5)
    close(est.update(params, now, more, KEY), est.update(params, state, more, KEY))


@each_kind
def test_credit_is_linear_and_changes_nothing(row, cut):
    model, params, chunk = subject(row)
    est = make(row, cut, model)
    output, _, trace = est.advance(params, est.init(params), chunk.inputs, KEY, chunk.reset)
    a, b = (jnp.asarray(np.random.default_rng(seed).normal(size=output.shape)) for seed in range(2))
    first, second, both = (est.credit(params, trace, g) for g in (a, b, 2 * a - 3 * b))
    assert error(both, jax.tree.map(lambda x, y: 2 * x - 3 * y, first, second)) < 1e-12
    assert error(est.credit(params, trace, a), first) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(est.credit(params, trace, 0 * a)))


@pytest.mark.slow
@each_kind
def test_inside_a_scan(row, cut):
    """An update at every step of a compiled loop, in halves and as a whole."""
    model, params, chunk = subject(row)
    est = make(row, cut, model)
    steps = jax.tree.map(lambda leaf: leaf[:, None], chunk)
    keys = jax.random.split(KEY, len(chunk.targets))

    def halves(carry, now):
        state, total = carry
        chunk, key = now
        output, state, trace = est.advance(params, state, chunk.inputs, key, chunk.reset)
        _, dl_doutput = read_out(model, params, output, chunk.targets)
        total = jax.tree.map(jnp.add, total, est.credit(params, trace, dl_doutput))
        return (state, total), output[0]

    def whole(carry, now):
        state, total = carry
        grads, state, _ = est.update(params, state, *now)
        return (state, jax.tree.map(jnp.add, total, grads.cell)), None

    start = (est.init(params), jax.tree.map(jnp.zeros_like, params.cell))
    (state, got), outputs = jax.jit(lambda: jax.lax.scan(halves, start, (steps, keys)))()
    (same, want), _ = jax.jit(lambda: jax.lax.scan(whole, start, (steps, keys)))()
    assert error(got, want) < 1e-12
    close(state, same)
    assert outputs.shape == (len(chunk.targets), model.width)


@pytest.mark.slow
@each_kind
def test_many_streams(row, cut):
    """The gradient of each stream is that of a single estimator; of all of them, their mean. One key, or one each."""
    model, params, _ = subject(row)
    est = make(row, cut, model)
    many = sg.batched(est, 3)
    chunks = [make_chunk(model, 4, seed=seed, reset=(seed,)) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chunks)
    dl_doutput = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, model.width)))
    for key in (KEY, jax.random.split(KEY, 3)):
        state, shared = many.init(params), []
        for _ in range(2):
            shared.append(state.shared)
            output, state, trace = many.advance(params, state, stacked.inputs, key, stacked.reset)
        own, mean = many.credit(params, trace, dl_doutput, per_stream=True), many.credit(params, trace, dl_doutput)
        singles, outputs = [], []
        for chunk, one_key, g in zip(chunks, jax.random.split(KEY, 3), dl_doutput, strict=True):
            one = est.init(params)
            for learnt in shared:
                one = one._replace(shared=learnt) if row.learns else one  # which streams do together
                single, one, trace = est.advance(params, one, chunk.inputs, one_key, chunk.reset)
            outputs.append(single)
            singles.append(est.credit(params, trace, g))
        np.testing.assert_allclose(output, np.stack(outputs), rtol=1e-12)
        assert error(own, jax.tree.map(lambda *leaves: np.stack(leaves), *singles)) < 1e-12
        assert error(mean, jax.tree.map(lambda *leaves: sum(leaves) / 3, *singles)) < 1e-12
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, many.init(params))


@pytest.mark.slow
@each_kind
def test_one_trace_per_shape_in_float32(row, cut):
    """However often they are called; and nothing becomes float64."""
    plain, traces = sg.cells.vanilla(1, 2), []

    def step(affine, state, x):
        traces.append(x.shape)
        return jnp.tanh(affine("w", sg.cells.features(state, x)))

    cell = sg.cells.affine(step, plain.init_params, plain.init_state, example_input=plain.example_input)
    model = sg.Model(cell, sg.heads.squared_error(2))
    params = make_params(model, dtype=jnp.float32)
    est, state, counts = row.make(model, **where(row, cut)), None, []
    for turn in range(4):
        inputs = make_chunk(model, 4, seed=turn, dtype=jnp.float32).inputs
        output, state, trace = est.advance(params, state or est.init(params), inputs, jax.random.key(turn))
        grads = est.credit(params, trace, jnp.ones((4, 2)))
        counts.append(len(traces))
    assert counts[0] == counts[-1]
    for leaf in jax.tree.leaves((output, grads, state.cell, state.memory)):
        assert not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype == jnp.float32


@pytest.mark.slow
@each_kind
def test_other_cells(row, cut):
    """With several weight matrices, and without any."""
    model, params, chunk = subject(row, "stack" if cut == "preactivation" else "nested")
    if refuses(row, cut, model):  # one layer, then, whose weights still are several matrices
        model, params, chunk = subject(row, "gru")
    est = make(row, cut, model)
    output, _, trace = est.advance(params, est.init(params), chunk.inputs, KEY, chunk.reset)
    _, dl_doutput = read_out(model, params, output, chunk.targets)
    want, _, _ = est.update(params, est.init(params), chunk, KEY)
    assert error(est.credit(params, trace, dl_doutput), want.cell) < 1e-12


@pytest.mark.slow
@cases(lambda row, cut: row.noisy and usual(row, cut))
def test_noise_that_is_given(row, cut):
    """In place of the key, as in `update`; it is part of the trace. And old-style keys."""
    model, params, chunk = subject(row)
    noise = jnp.asarray(np.random.default_rng(0).normal(size=noise_shape(row, cut, model, params, chunk)))
    for est, key in (
        (make(row, cut, model, noise="given"), noise),
        (make(row, cut, model), jax.random.PRNGKey(1)),
    ):
        output, _, trace = est.advance(params, est.init(params), chunk.inputs, key, chunk.reset)
        _, dl_doutput = read_out(model, params, output, chunk.targets)
        want = est.update(params, est.init(params), chunk, key)[0].cell
        assert error(est.credit(params, trace, dl_doutput), want) < 1e-12
    with pytest.raises(ValueError, match="PRNG key"):
        est.advance(params, est.init(params), chunk.inputs, None)


@pytest.mark.slow
def test_bptt_that_recomputes():
    model = make_model("lstm")
    params, chunk = make_params(model), make_chunk(model, 7, reset=(3,))
    est = sg.bptt(model, recompute=3)
    output, _, trace = est.advance(params, est.init(params), chunk.inputs, reset=chunk.reset)
    head, dl_doutput = read_out(model, params, output, chunk.targets)
    want, _, _ = est.update(params, est.init(params), chunk, None)
    assert error(est.credit(params, trace, dl_doutput), want.cell) < 1e-12 and error(head, want.head) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"window": 4}, {"episode": 3}])
def test_carried_uses_what_it_has_learnt_and_learns_nothing(options):
    model = make_model("vanilla")
    params = make_params(model)
    est = sg.batched(sg.carried(sg.uoro(model), least=1, refresh=1, **options), 2)
    chunk = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(make_chunk(model, 6, s, reset=(0, 3)) for s in range(2)))
    state = est.init(params)
    for seed in range(2):
        _, state, _ = est.update(params, state, chunk, jax.random.key(seed))
    assert bool(state.shared.ready)
    output, after, trace = est.advance(params, state, chunk.inputs, KEY, chunk.reset)
    close(after.shared, state.shared, 0)
    _, dl_doutput = jax.vmap(lambda y, t: read_out(model, params, y, t))(output, chunk.targets)
    want, updated, info = est.update(params, state, chunk, KEY)
    assert np.all(info.diagnostics["carried"] == 1)
    assert error(est.credit(params, trace, dl_doutput), want.cell) < 1e-12
    close((after.cell, after.memory), (updated.cell, updated.memory))


GREEDY = {
    "uoro": lambda model: sg.uoro(model, rescale="greedy"),
    "preuoro": lambda model: sg.preuoro(model, rescale=sg.noise.greedy(0.5)),
    "nobacktrack": lambda model: sg.nobacktrack(model, rescale="greedy"),
    "carried": lambda model: sg.carried(sg.uoro(model), alpha="greedy"),
    "reinforce": lambda model: sg.reinforce(model, baseline="average"),
    "many": lambda model: sg.batched(sg.uoro(model, rescale="greedy"), 1),
    **{row.name: functools.partial(row.make, **row.options) for row in ROWS if not row.advances},
}


@pytest.mark.parametrize("name", GREEDY)
def test_what_looks_at_losses_cannot_advance_without_them(name):
    model = make_model("vanilla")
    est, params, inputs = GREEDY[name](model), make_params(model), make_chunk(model, 3).inputs
    with pytest.raises(ValueError, match=r"looks at the losses .* cannot advance before they are known") as error:
        est.advance(params, est.init(params), inputs[None] if name == "many" else inputs, KEY)
    assert one_sentence(error)


@pytest.mark.slow
def test_an_estimator_from_elsewhere():
    """Made of init and update alone it says so; with advance and credit of its own it can be batched."""
    model = make_model("vanilla")
    params, inner = make_params(model), sg.uoro(model)
    inputs = jnp.stack([make_chunk(model, 3, seed).inputs for seed in range(2)])
    alone = sg.GradientEstimator(inner.init, inner.update)
    for est, x in ((alone, inputs[0]), (sg.batched(alone, 2), inputs)):
        with pytest.raises(ValueError, match="has no advance: it was made of init and update alone"):
            est.advance(params, est.init(params), x, KEY)
        with pytest.raises(ValueError, match="has no credit: it was made of init and update alone"):
            est.credit(params, sg.Trace(est.init(params), x, None, KEY), x)
    whole = sg.batched(sg.GradientEstimator(inner.init, inner.update, inner.advance, inner.credit), 2)
    ours = sg.batched(inner, 2)
    g = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 2)))
    found = []
    for est in (whole, ours):
        state = est.init(params)
        for _ in range(2):
            output, state, trace = est.advance(params, state, inputs, KEY)
        found.append((output, est.credit(params, trace, g), est.credit(params, trace, g, per_stream=True)))
    close(found[0], found[1])


def test_a_method_without_outputs():
    model = make_model("vanilla")
    params = make_params(model)

    def init(params):
        return sg.EstimatorState(model.init_state(params), (), ())

    inner = sg.by_steps(model, model.cell.cuts["state"], init, lambda *_: ((), {}), lambda b, a, s, g: s.backprop(g))

    def run(*arguments):
        outcome = inner(*arguments)
        return outcome._replace(info=outcome.info._replace(outputs=None))

    est = sg.estimator(sg.Method(name="silent", model=model, init=init, run=run))
    with pytest.raises(ValueError, match="cannot advance: the Info of its method has no outputs"):
        est.advance(params, est.init(params), make_chunk(model, 2).inputs)


MODEL = make_model("vanilla")
X = jnp.zeros((4, 1))
ADVANCE = {
    "params": (lambda p, s: (None, s, X, KEY), "params must be what model.init"),
    "state": (lambda p, s: (p, None, X, KEY), "state must be what init"),
    "the cell's state": (lambda p, s: (p, s.cell, X, KEY), "state must be what init"),
    "another's state": (lambda p, s: (p, sg.rtrl(MODEL).init(p), X, KEY), "this estimator's own init"),
    "width of the inputs": (lambda p, s: (p, s, jnp.zeros((4, 2)), KEY), "one step of inputs must have the shape"),
    "one step": (lambda p, s: (p, s, X[0], KEY), "one step of inputs must have the shape"),
    "no step": (lambda p, s: (p, s, X[:0], KEY), "at least one step"),
    "NaN": (lambda p, s: (p, s, X + np.nan, KEY), "inputs must be finite"),
    "reset": (lambda p, s: (p, s, X, KEY, jnp.zeros(4)), r"reset must be one bool per step, bool\[4\]"),
    "key": (lambda p, s: (p, s, X, 3), "key must be a single JAX PRNG key"),
}
CREDIT = {
    "params": (lambda p, t, g: (None, t, g), "params must be what model.init"),
    "a state": (lambda p, t, g: (p, sg.uoro(MODEL).init(p), g), "trace must be the third value that advance returned"),
    "the state before": (lambda p, t, g: (p, t.before, g), "trace must be the third value .* not EstimatorState"),
    "no trace": (lambda p, t, g: (p, None, g), "trace must be the third value that advance returned, not None"),
    "one step": (lambda p, t, g: (p, t, g[0]), r"dl_doutput must be .* of the shape .*4, 2\), not float64"),
    "more steps": (lambda p, t, g: (p, t, np.ones((9, 9, 9))), r"advance returned, .*4, 2\), not float64\[9, 9, 9\]"),
    "complex": (lambda p, t, g: (p, t, g + 0j), "dl_doutput must be real numbers .* not complex128"),
    "none": (lambda p, t, g: (p, t, None), "dl_doutput must be .*, not None"),
    "a list": (lambda p, t, g: (p, t, [1.0]), "dl_doutput must be .*, not list"),
}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("case", ADVANCE)
def test_errors_of_advance(case):
    spoil, match = ADVANCE[case]
    est, params = sg.uoro(MODEL), make_params(MODEL)
    with pytest.raises(ValueError, match=match) as error:
        est.advance(*spoil(params, est.init(params)))
    assert one_sentence(error)


def uoro_of_streams(model, streams):
    return sg.batched(made(sg.uoro, model), streams)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("streams", [None, 3])
@pytest.mark.parametrize("case", CREDIT)
def test_errors_of_credit(case, streams):
    spoil, match = CREDIT[case]
    est, params, inputs = made(sg.uoro, MODEL), make_params(MODEL), X
    if streams:
        est, inputs = made(uoro_of_streams, MODEL, streams=streams), jnp.stack([X] * streams)
    output, _, trace = est.advance(params, est.init(params), inputs, KEY)
    est.credit(params, trace, output)
    with pytest.raises(ValueError, match=match) as error:
        est.credit(*spoil(params, trace, output))
    assert one_sentence(error)


@pytest.mark.usefixtures("as_a_user")
def test_states_of_one_and_of_many():
    est, params = sg.uoro(MODEL), make_params(MODEL)
    many, inputs = sg.batched(est, 2), jnp.stack([X, X])
    _, one, alone = est.advance(params, est.init(params), X, KEY)
    _, two, together = many.advance(params, many.init(params), inputs, KEY)
    for call in (
        lambda: est.credit(params, together, jnp.ones((4, 2))),
        lambda: many.credit(params, alone, jnp.ones((2, 4, 2))),
        lambda: est.advance(params, two, X, KEY),
        lambda: many.advance(params, one, inputs, KEY),
        lambda: many.advance(params, two, X, KEY),
        lambda: many.advance(params, two, inputs, jax.random.split(KEY, 3)),
        lambda: sg.rtrl(MODEL).credit(params, alone, jnp.ones((4, 2))),
    ):
        with pytest.raises(ValueError, match=r"state|streams") as error:
            call()
        assert one_sentence(error)
