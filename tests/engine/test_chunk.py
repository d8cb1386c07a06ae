"""Backpropagation inside the chunk, an influence across: exact where it promises so, and in the mean where it does not.

`rtrl` is held to BPTT in tests/estimators/test_exact.py, and for random models in tests/engine/random_models.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad.noise.kronecker_reduction import signs_needed
from streamgrad.step.step_vjp import depends
from streamgrad.step.weights import steps_at_once
from tests.engine.random_models import check_one
from tests.tools import RTRL, all_signs, bptt, error, few, made, make_chunk, make_model, make_params, run, split


def state_size(model, params):
    return ravel_pytree(model.init_state(params))[0].size


def over_signs(est, params, parts, shapes):
    """The gradient of all chunks under every pattern of the signs of all but the last, whose act on nothing."""
    sizes = [int(np.prod(shape)) for shape in shapes]

    def total(signs):
        noises = [*jnp.split(signs, np.cumsum(sizes[:-2])), jnp.ones(sizes[-1])]
        state, grads = est.init(params), []
        for part, noise, shape in zip(parts, noises, shapes, strict=True):
            found, state, _ = est.update(params, state, part, noise.reshape(shape))
            grads.append(found)
        return jax.tree.map(lambda *leaves: sum(leaves), *grads)

    return jax.jit(jax.vmap(total))(jnp.asarray(all_signs(sum(sizes[:-1]))))


def mean_of(found):
    return jax.tree.map(lambda leaf: leaf.mean(axis=0), found)


@pytest.mark.parametrize("cell, reset", few([("vanilla", None), ("lstm", (3,)), ("nested", (1,))], ("lstm", (3,))))
@pytest.mark.parametrize("options", few([{"blocks": 2}, {}], {"blocks": 2}))
def test_uoro_across_is_unbiased(cell, reset, options):
    """With GIR, whose coefficients depend on the noise."""
    model = make_model(cell)
    params, chunk = make_params(model), make_chunk(model, 7, reset=reset)
    est = sg.uoro_across(model, noise="given", **options)
    found = over_signs(est, params, split(chunk, (2, 3, 2)), [(state_size(model, params),)] * 3)
    assert error(mean_of(found), bptt(model, params, chunk)) < 1e-10


ALPHA = (2.0, 0.5, 3.0)
SPREAD = [("vanilla", (3,), 2, ALPHA), ("vanilla", None, 2, ALPHA), ("gru", None, 1, None), ("nested", (1,), 2, ALPHA)]


@pytest.mark.parametrize("cell, reset, blocks, alpha", few(SPREAD, SPREAD[0]))
def test_spread_of_uoro_across_is_the_theory(cell, reset, blocks, alpha):
    model = make_model(cell)
    params, chunk = make_params(model), make_chunk(model, 7, reset=reset)
    est = sg.uoro_across(model, noise="given", blocks=blocks, rescale="none" if alpha is None else alpha)
    found = over_signs(est, params, split(chunk, (3, 3, 1)), [(state_size(model, params),)] * 3)
    ep = sg.theory.collect_chunks(model, params, chunk, length=3)
    # α counts the chunks of an episode, and the one with the reset in it is the first of the next.
    used = None if alpha is None else np.array(alpha)[[0, 0] if reset == (3,) else [0, 1]]
    want = float(sg.theory.across_variance(ep, used, blocks, kurtosis=-2.0))
    assert sum(float(leaf.var(axis=0).sum()) for leaf in jax.tree.leaves(found.cell)) == pytest.approx(want, rel=1e-10)
    assert error(mean_of(found), bptt(model, params, chunk)) < 1e-10
    assert error(ep.gradient, bptt(model, params, chunk)) < 1e-10


@pytest.mark.parametrize("cell, form", [("vanilla", "chunks"), ("nested", "chunks"), ("vanilla", "steps")])
def test_the_influence_of_rtrl_is_the_jacobian(cell, form):
    """M = dh/dθ of all that has passed, of which a transposed part would be seen: units hear each other unevenly."""
    model = make_model(cell, n_hidden=3)
    params, chunk = make_params(model), make_chunk(model, 6)
    _, _, state = run(made(RTRL[form], model), params, split(chunk, (2, 3, 1)))

    def end(cell_params):
        begin = model.init_state(params)
        after = jax.lax.scan(lambda h, x: (model.cell.step(cell_params, h, x), None), begin, chunk.inputs)[0]
        return ravel_pytree(after)[0]

    assert error(state.memory, jax.jit(jax.jacobian(end))(params.cell)) < 1e-10


@pytest.mark.parametrize("cell", few(["rtu", "lru"], "rtu"))
def test_rtrl_of_units_that_keep_to_themselves(cell):
    """Pairs of units that turn: between the two of a pair the Jacobian is not symmetric."""
    model = sg.Model(getattr(sg.cells, cell)(2, 3), sg.heads.squared_error(2))
    params, chunk = make_params(model), make_chunk(model, 6, reset=(1,))
    got, _, _ = run(sg.rtrl(model), params, split(chunk, (2, 3, 1)))
    assert error(got, bptt(model, params, chunk)) < 1e-10


REDUCED = [("gru", 1, None), ("vanilla", 2, (1,)), ("vanilla", 1, None), ("lstm", 1, (1,))]


@pytest.mark.parametrize("cell, rank, reset", few(REDUCED, REDUCED[0]))
def test_ok_is_unbiased(cell, rank, reset):
    """Also with several weight matrices, whose sums have independent signs."""
    model = make_model(cell)
    params, chunk = make_params(model), make_chunk(model, 3, reset=reset)
    est = sg.ok(model, rank=rank, noise="given")
    matrices = len(jax.tree.leaves(params.cell))
    found = over_signs(est, params, split(chunk, (1, 1, 1)), [(matrices, signs_needed(1, rank))] * 3)
    assert error(mean_of(found), bptt(model, params, chunk)) < 1e-10


def test_spread_of_ok_is_the_theory():
    """One reduction, of two terms to one: (σ_1 + σ_2)² - σ_1² - σ_2² = 2 σ_1 σ_2."""
    model = make_model("vanilla")
    params, first = make_params(model), make_chunk(model, 2)
    est, rtrl = sg.ok(model, rank=1, noise="given"), made(sg.rtrl, model)
    signs = jnp.asarray(all_signs(signs_needed(2, 1)))
    memory = jax.vmap(lambda s: est.update(params, est.init(params), first, s[None])[1].memory)(signs)
    found = np.einsum("prsn,pra->psna", memory.left["w"], memory.right["w"])
    exact = rtrl.update(params, rtrl.init(params), first, None)[1].memory["w"]
    exact = np.asarray(exact)
    np.testing.assert_allclose(found.mean(axis=0), exact, atol=1e-12)
    sigma = np.linalg.svd(exact.reshape(-1, exact.shape[-1]))[1]
    spread = np.mean(np.sum((found - exact) ** 2, axis=(1, 2, 3)))
    assert spread == pytest.approx(2 * sigma[0] * sigma[1], rel=1e-6)


@pytest.mark.parametrize("cell", few(["vanilla", "nested"], "vanilla"))
def test_few_streams_watched(cell):
    """Inside the chunk the mean over all streams, before it that over those that are watched."""
    model = make_model(cell)
    params = make_params(model)
    chunks = [make_chunk(model, 6, seed=seed, reset=(4,) if seed == 1 else ()) for seed in range(4)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chunks)
    est = sg.batched(made(sg.rtrl, model), 4, watched=2)
    state, got = est.init(params), []
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state.memory)} == {2}
    for at, to in ((0, 2), (2, 5), (5, 6)):
        part = jax.tree.map(lambda leaf, at=at, to=to: leaf[:, at:to], stacked)
        grads, state, _ = est.update(params, state, part, None)
        got.append(grads)
    got = jax.tree.map(lambda *leaves: sum(leaves), *got)
    inside = [run(made(sg.bptt, model), params, split(chunk, (2, 3, 1)))[0] for chunk in chunks]
    older = [jax.tree.map(jnp.subtract, bptt(model, params, chunks[i]), inside[i]) for i in range(2)]
    want = jax.tree.map(lambda *x: sum(x[:4]) / 4 + sum(x[4:]) / 2, *inside, *older)
    assert error(got, want) < 1e-10


@pytest.mark.slow
def test_shrinkage():
    """0 is truncated BPTT, a number is a weight between, "auto" finds out that noise is all there is."""
    model = make_model("vanilla", n_hidden=3)
    params = make_params(model)
    chunks = [make_chunk(model, 6, seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chunks)
    parts = [jax.tree.map(lambda leaf, at=at: leaf[:, at : at + 2], stacked) for at in (0, 2, 4)]

    def last(shrink):
        est = sg.batched(made(sg.uoro_across, model, shrink=shrink), 3)
        state, grads = est.init(params), None
        for part in parts:
            grads, state, _ = est.update(params, state, part, jax.random.key(0))
        return grads.cell["w"], state

    zero, half, one = last(0)[0], last(0.5)[0], last(1)[0]
    np.testing.assert_allclose(half, (zero + one) / 2, rtol=1e-10)
    truncated = [run(made(sg.bptt, model), params, split(chunk, (2, 2, 2)))[0] for chunk in chunks]
    first_two = [run(made(sg.bptt, model), params, split(chunk, (2, 2)))[0] for chunk in chunks]
    want = sum(a.cell["w"] - b.cell["w"] for a, b in zip(truncated, first_two, strict=True)) / 3
    assert error(zero, want) < 1e-10
    auto, state = last("auto")
    known = state.shared.shrinkage
    weight = float(jnp.clip(known.signal / known.square, 0, 1))
    np.testing.assert_allclose(auto, zero + weight * (one - zero), atol=1e-12)


def test_auto_estimates_the_signal_without_bias():
    """‖E x‖² of the streams' corrections x is ‖x̄‖² less the variance of x̄; both are averaged over updates."""
    model, streams = make_model("vanilla"), 3
    params, keys = make_params(model), jax.random.split(jax.random.key(0), streams)
    chunks = [make_chunk(model, 6, seed=seed) for seed in range(streams)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chunks)
    auto = sg.batched(sg.uoro_across(model, shrink="auto"), streams)
    # Each stream by itself, with all of its older credit, and without.
    alone = [jax.jit(jax.vmap(made(sg.uoro_across, model, shrink=shrink).update, (None, 0, 0, 0)))
             for shrink in (1, 0)]  # fmt: skip
    state, signal, square = auto.init(params), 0.0, 0.0
    each = jax.tree.map(lambda leaf: jnp.stack([leaf] * streams), made(sg.uoro_across, model).init(params))
    for at in (0, 2, 4):
        part = jax.tree.map(lambda leaf, at=at: leaf[:, at : at + 2], stacked)
        _, state, _ = auto.update(params, state, part, keys)
        (full, after, _), (truncated, _, _) = (update(params, each, part, keys) for update in alone)
        each, x = after, np.asarray(full.cell["w"] - truncated.cell["w"]).reshape(streams, -1)
        mean, variance = x.mean(axis=0), np.sum(x.var(axis=0, ddof=1)) / streams
        signal = 0.99 * signal + 0.01 * (mean @ mean - variance)
        square = 0.99 * square + 0.01 * mean @ mean
    assert square > 0
    np.testing.assert_allclose(state.shared.shrinkage, (signal, square), rtol=1e-8)


@pytest.mark.parametrize("cell", few(["lstm", "stack"], "stack"))
def test_blocks_inside_a_chunk_change_nothing(cell, monkeypatch):
    """A chunk that would keep more than M is walked through in parts; parameters may be tuples, as those of a stack."""
    model = make_model("lstm", n_in=2, n_hidden=3)
    if cell == "stack":
        model = sg.Model(sg.cells.stack(sg.cells.vanilla(2, 3), sg.cells.vanilla(3, 3)), model.head)
    params, chunk = make_params(model), make_chunk(model, 23, reset=(9,))
    monkeypatch.setattr("streamgrad.step.weights.LARGE", 1)
    est = sg.rtrl(model)
    assert steps_at_once(params.cell, 6, 18) < 18
    got, losses, _ = run(est, params, split(chunk, (5, 18)))
    want, all_losses, _ = run(made(sg.bptt, model), params, [chunk])
    assert error(got, want) < 1e-10
    np.testing.assert_allclose(losses, all_losses, rtol=1e-12)


@pytest.mark.parametrize("cell, hidden, length", few([("lstm", 24, 24), ("vanilla", 64, 100)], ("lstm", 24, 24)))
def test_memory_of_rtrl(cell, hidden, length):
    """What an update keeps for itself is at most 1.5 times M, however long the chunk."""
    model = make_model(cell, n_in=1, n_hidden=hidden)
    params = make_params(model, dtype=jnp.float32)
    for streams in (1, 3):
        est = sg.batched(sg.rtrl(model), streams)
        chunk = jax.tree.map(lambda leaf, n=streams: jnp.repeat(leaf[None], n, axis=0), make_chunk(model, length))
        state = est.init(params)
        compiled = jax.jit(est.update).lower(params, state, chunk, None).compile()
        influence = sum(leaf.nbytes for leaf in jax.tree.leaves(state.memory))
        assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * influence


@pytest.mark.slow
def test_ok_in_float32_over_a_long_stream():
    """Finite through thousands of reductions, with saturated units and inputs that repeat, and right in the mean."""
    model = make_model("lstm", n_in=1, n_hidden=6)
    params = jax.tree.map(lambda leaf: 3 * leaf, make_params(model, dtype=jnp.float32))
    est = sg.batched(sg.ok(model, rank=12), 8)
    chunk = sg.Chunk(jnp.ones((8, 3, 1), jnp.float32), jnp.zeros((8, 3, 2), jnp.float32))

    def step(state, key):
        grads, state, _ = est.update(params, state, chunk, key)
        return state, ravel_pytree(grads.cell)[0]

    _, grads = jax.lax.scan(step, est.init(params), jax.random.split(jax.random.key(0), 2000))
    exact = sg.batched(sg.rtrl(model), 8)
    state = exact.init(params)
    for _ in range(60):  # the stream has come to rest
        want, state, _ = exact.update(params, state, chunk, None)
    assert np.all(np.isfinite(grads))
    want = ravel_pytree(want.cell)[0]
    assert np.linalg.norm(grads[1000:].mean(axis=0) - want) < 1e-2 * np.linalg.norm(want)


@pytest.mark.parametrize("seed", few(range(16), 1))
def test_random_models(seed):
    check_one(seed)


def test_what_depends_on_the_step():
    w = jnp.arange(3.0)
    assert depends(lambda x: [w, 2 * w, jnp.sum(w) * x, x, jnp.ones(2)], jnp.ones(2)) == [
        False,
        False,
        True,
        True,
        False,
    ]


BAD = [
    (lambda m: sg.ok(m, rank=0), "rank must be a whole number of at least 1"),
    (lambda m: sg.ok(m, rank=5), "rank must be at most 4, the number of state units, not 5"),
    (lambda m: sg.ok(m, noise="gaussian"), "ok mixes with random signs"),
    (lambda m: sg.snap(m, inside="steps"), "inside must be one of 'estimated', 'backprop'"),
    (lambda m: sg.uoro_across(m, blocks=0), "blocks must be a whole number"),
    (lambda m: sg.uoro_across(m, blocks=9), "blocks must be at most 4"),
    (lambda m: sg.uoro_across(m, shrink=1.5), "shrink must be 'auto' or a number from 0 to 1"),
    (lambda m: sg.uoro_across(m, shrink="always"), "shrink must be 'auto' or a number from 0 to 1, not 'always'"),
    (lambda m: sg.uoro_across(m, rescale=np.ones((3, 2))), "2 columns, but .* 1 groups"),
    (lambda m: sg.uoro_across(m, rescale="greedy"), "no losses that rescale='greedy' could look at"),
    (lambda m: sg.uoro_across(m, noise="pink"), "noise must be one of"),
    (lambda m: sg.uoro_across(m, shrink=True), "shrink must be 'auto' or a number from 0 to 1, not True"),
    (lambda m: sg.batched(sg.rtrl(m), 4, watched=5), "watched must be at most 4, the number of streams"),
    (lambda m: sg.batched(sg.rtrl(m), 4, watched=0), "watched must be a whole number"),
    (lambda m: sg.batched(sg.uoro(m), 4, watched=2), "watched is for estimators that go through a chunk at once"),
]


@pytest.mark.parametrize("make, message", BAD)
def test_bad_input(as_a_user, make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make(make_model("lstm"))
    assert str(caught.value).count("\n") == 0


def test_an_influence_that_cannot_fit_is_refused_before_it_is_made():
    model = sg.Model(sg.cells.vanilla(8, 2**17), sg.heads.softmax(2))  # 16 PiB, which no device has
    params, one = jax.eval_shape(model.init, jax.random.key(0)), sg.rtrl(model)
    for est in (one, sg.batched(one, 2)):
        with pytest.raises(ValueError, match=r"would take [\d,]+\.\d GiB, but the device has"):
            est.init(params)


def test_auto_needs_streams():
    model = make_model("vanilla")
    params, chunk = make_params(model), make_chunk(model, 2)
    est = sg.uoro_across(model, shrink="auto")
    with pytest.raises(ValueError, match="use it under batched"):
        est.update(params, est.init(params), chunk, jax.random.key(0))


ACROSS = {"rtrl": sg.rtrl, "ok": sg.ok, "uoro": lambda model: sg.uoro_across(model, blocks=2)}


@pytest.mark.parametrize("name, watched", few([("rtrl", 1), ("uoro", None), ("rtrl", None), ("ok", 1)], ("rtrl", 1)))
def test_advance_and_credit_are_update(name, watched):
    """Of a batch, with an influence from the chunk before."""
    model = make_model("gru")
    params = make_params(model)
    chunks = [make_chunk(model, 5, seed=seed, reset=(1,) if seed else ()) for seed in range(2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chunks)
    first, second = (jax.tree.map(lambda leaf, at=at: leaf[:, at], stacked) for at in (slice(0, 3), slice(3, 5)))
    est, keys = sg.batched(ACROSS[name](model), 2, watched), jax.random.split(jax.random.key(0), 2)
    _, state, _ = est.update(params, est.init(params), first, keys[0])
    want, after, _ = est.update(params, state, second, keys[1])
    outputs, moved, trace = est.advance(params, state, second.inputs, keys[1], second.reset)
    loss = jax.vmap(jax.vmap(model.head.loss, in_axes=(None, 0, 0)), in_axes=(None, 0, 0))
    credit = jax.grad(lambda outputs: jnp.sum(loss(params.head, outputs, second.targets)))(outputs)
    assert error(est.credit(params, trace, credit), want.cell) < 1e-12
    assert error(moved, after) < 1e-12
    if watched is None:
        each = est.credit(params, trace, credit, per_stream=True)
        assert error(jax.tree.map(lambda leaf: leaf.mean(axis=0), each), want.cell) < 1e-12
    else:
        with pytest.raises(ValueError, match="only streams that are watched"):
            est.credit(params, trace, credit, per_stream=True)
