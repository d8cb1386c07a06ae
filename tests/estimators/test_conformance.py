"""What every registered estimator must do. A new one passes by being registered; nothing here names any of them."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad.base import CUT_NAMES
from streamgrad.estimators import REGISTRY
from tests.estimators.registered import (
    KINDS,
    ROWS,
    cases,
    make,
    noise_shape,
    of_each_kind,
    refuses,
    run_quietly,
    where,
)
from tests.reference import estimators as reference
from tests.tools import (
    all_signs,
    bptt,
    by_hand,
    error,
    gaussian_nodes,
    made,
    make_chunk,
    make_model,
    make_params,
    mean_over,
    noisy_loss,
    run,
    smoothed_loss,
    split,
    weighed,
)

each = cases(lambda row, cut: True)
# As each is a program to compile: one of each kind of estimator, and the others among the slow tests.
each_kind = cases(lambda row, cut: True, of_each_kind)


LAYERS = sg.Model(sg.cells.stack(sg.cells.vanilla(1, 1), sg.cells.vanilla(1, 2)), sg.heads.squared_error(2))


def setup(cell="vanilla", length=4, dtype=jnp.float64, reset=None, **sizes):
    model = make_model(cell, **sizes)
    return model, make_params(model, dtype=dtype), make_chunk(model, length, dtype=dtype, reset=reset)


@each
def test_names_of_arguments(row, cut):
    """Callers never branch: the same names in the same order for all."""
    est = make(row, cut, make_model("vanilla"))
    assert list(inspect.signature(est.init).parameters) == ["params"]
    assert list(inspect.signature(est.update).parameters) == ["params", "state", "chunk", "key"]
    assert list(inspect.signature(est.advance).parameters) == ["params", "state", "inputs", "key", "reset"]
    assert list(inspect.signature(est.credit).parameters) == ["params", "trace", "dl_doutput"]


def weigh(model, chunk):
    """The chunk with weights, and what it is without the library's help: a model and a chunk that weigh by hand."""
    chunk = chunk._replace(weight=jnp.asarray([0.5, 0.0, -2.0])[-len(chunk.targets) :])
    return chunk, made(weighed, model), by_hand(chunk)


@each
@pytest.mark.parametrize("weights", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "weighed"])
def test_promise(row, cut, weights):
    """Exact means equal to BPTT of the whole sequence in any chunks; unbiased means so in the mean over the noise.

    Where the noise is in the network, in its state or its parameters, the mean over it is the gradient of the expected
    loss. A biased estimator is its textbook, under given noise where it has any. With weights all of it holds for the
    weighted loss.
    """
    model, params, chunk = setup(length=3, n_hidden=1 if cut == "params" else 2)
    chunk, plain, same = weigh(model, chunk) if weights else (chunk, model, chunk)
    want, losses, _ = run(made(sg.bptt, plain), params, [same])
    if row.promise == "exact":
        got, _, _ = run(make(row, cut, model), params, split(chunk, (1, 2)))
        assert error(got, want) < 1e-10
    elif row.promise == "exact in the chunk":
        assert error(run(make(row, cut, model), params, [chunk])[0], want) < 1e-10
    elif row.promise == "biased":
        parts, textbook, told, keys = list(split(chunk, (1, 2))), getattr(reference, row.name), {}, None
        if "sizes" in inspect.signature(textbook).parameters:  # how the stream is cut into chunks
            told["sizes"] = (1, 2)
        if row.noisy:
            rng = np.random.default_rng(0)
            keys = [jnp.asarray(rng.normal(size=noise_shape(row, cut, model, params, part))) for part in parts]
            told |= {"noise": keys, "cut": cut}
        got, _, _ = run(make(row, cut, model, **({"noise": "given"} if row.noisy else {})), params, parts, keys)
        assert error(got.cell, textbook(plain, params, same, **row.options, **told)) < 1e-10
    elif row.promise == "unbiased":
        shape = noise_shape(row, cut, model, params, chunk)
        est = make(row, cut, model, noise="given")
        assert error(mean_over(est, params, chunk, all_signs(*shape)), want) < 1e-10
    elif row.promise == "unbiased for the noisy network":
        small, params_of_small, two_steps = setup(length=2, n_hidden=1)
        two_steps, plain, same = weigh(small, two_steps) if weights else (two_steps, small, two_steps)
        u, shares = gaussian_nodes(48, *noise_shape(row, cut, small, params_of_small, two_steps))

        def expected(params):
            losses = jax.vmap(lambda u: noisy_loss(plain, params, same, u, sigma=0.3))(jnp.asarray(u))
            return shares @ losses

        est = make(row, cut, small, noise="given", sigma=0.3)
        mean = mean_over(est, params_of_small, two_steps, u, shares)
        assert error(mean, jax.grad(expected)(params_of_small)) < 1e-10
    elif row.promise == "unbiased for the smoothed loss":  # here of one chunk; of several, in the file of each
        small, params_of_small, two_steps = setup(length=2, n_hidden=1)
        two_steps, plain, same = weigh(small, two_steps) if weights else (two_steps, small, two_steps)
        est = make(row, cut, small, noise="given", sigma=0.1, particles=2)
        u, shares = gaussian_nodes(12, ravel_pytree(params_of_small.cell)[0].size)

        def smoothed(params):
            losses = jax.vmap(lambda u: smoothed_loss(plain, params, same, u, sigma=0.1))(jnp.asarray(u))
            return shares @ losses

        mean = mean_over(est, params_of_small, two_steps, u[:, None], shares)
        assert error(mean, jax.grad(smoothed)(params_of_small)) < 1e-10
        assert error(mean, bptt(plain, params_of_small, same)) > 1e-3  # there is something to smooth
    _, again, _ = run_quietly(row, cut, model, params, chunk)
    np.testing.assert_allclose(again, losses, rtol=1e-12)


@each_kind
def test_across_chunks(row, cut):
    """Of an unbiased estimator the mean over all signs of all chunks, one step each; an exact one has no signs."""
    for hidden in (2, 1):  # the largest whose patterns can be enumerated
        model, params, chunk = setup(length=3, n_hidden=hidden)
        parts = list(split(chunk, (1, 1, 1)))
        shape = noise_shape(row, cut, model, params, parts[0]) if row.promise == "unbiased" else (0,)
        if 3 * np.prod(shape) <= 12:
            break
    want = run(made(sg.bptt, model), params, [chunk])[0]
    if row.promise == "exact":
        assert error(run(make(row, cut, model), params, parts)[0], want) < 1e-10
    if row.promise != "unbiased":
        return  # test_promise and the textbook have the others
    est = make(row, cut, model, noise="given")

    def total(noise):
        state, grads = est.init(params), []
        for index, part in enumerate(parts):
            found, state, _ = est.update(params, state, part, noise[index])
            grads.append(found)
        return jax.tree.map(lambda *leaves: sum(leaves), *grads)

    found = jax.jit(jax.vmap(total))(jnp.asarray(all_signs(3, *shape)))
    assert error(jax.tree.map(lambda leaf: leaf.mean(axis=0), found), want) < 1e-10


@each
def test_a_new_state_can_be_donated(row, cut):
    """No two leaves of it are one buffer, which XLA refuses to take twice; an LSTM has two units for a weight."""
    model, params, _ = setup("vanilla" if row.name == "rflo" else "lstm")
    leaves = jax.tree.leaves(make(row, cut, model).init(params))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size}) == sum(leaf.size > 0 for leaf in leaves)


@each_kind
def test_gradient_of_the_head_is_exact(row, cut):
    model, params, chunk = setup()
    got, _, _ = run_quietly(row, cut, model, params, chunk)
    assert error(got.head, bptt(model, params, chunk).head) < 1e-10


@each
def test_structures_are_stable(row, cut):
    """Gradients are like the parameters; the state keeps structure, shapes and dtypes, so that it can be scanned."""
    model, params, chunk = setup("vanilla")
    est = make(row, cut, model)

    def specs(tree):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    state = est.init(params)
    chunks = jax.tree.map(lambda leaf: leaf[:, None], chunk)  # four chunks of one step
    keys = jax.random.split(jax.random.key(0), 4)

    def body(state, now):
        grads, state, info = est.update(params, state, *now)
        return state, (grads, info.loss)

    end, (grads, losses) = jax.eval_shape(lambda: jax.lax.scan(body, state, (chunks, keys)))
    assert specs(end) == specs(state)
    assert jax.tree.map(lambda leaf: (leaf.shape[1:], leaf.dtype), grads) == specs(params)
    assert losses.shape == (4, 1)


@each_kind
def test_size_of_the_state_is_constant(row, cut):
    """Whatever has passed and however long the chunks are: the promise of online learning."""
    model, params, chunk = setup(length=40)
    est = make(row, cut, model)

    def size(state):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    begin = jax.eval_shape(est.init, params)
    for sizes in ((40,), (1, 39), (20, 20)):
        state = begin
        for part in split(chunk, sizes):
            _, state, _ = jax.eval_shape(est.update, params, state, part, jax.random.key(0))
        assert size(state) == size(begin)


@each_kind
def test_one_trace_per_shape(row, cut):
    """However often it is called, compiled by the caller or not."""
    plain = sg.cells.vanilla(1, 2)
    traces = []

    def step(affine, state, x):
        traces.append(x.shape)
        return jnp.tanh(affine("w", sg.cells.features(state, x)))

    cell = sg.cells.affine(step, plain.init_params, plain.init_state, example_input=plain.example_input)
    model = sg.Model(cell, sg.heads.squared_error(2))
    params = make_params(model)
    est = row.make(model, **where(row, cut))
    for update in (est.update, jax.jit(est.update)):
        state = est.init(params)
        _, state, _ = update(params, state, make_chunk(model, 4), jax.random.key(0))
        traced = len(traces)
        for seed in range(3):
            _, state, _ = update(params, state, make_chunk(model, 4, seed=seed), jax.random.key(seed))
        assert len(traces) == traced


@each_kind
def test_float32_in_float32_out(row, cut):
    model, params, chunk = setup("vanilla", dtype=jnp.float32)
    est = make(row, cut, model)
    grads, state, info = jax.eval_shape(est.update, params, est.init(params), chunk, jax.random.key(0))
    for leaf in jax.tree.leaves((grads, state.cell, state.memory, info)):
        assert not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype == jnp.float32
    double = chunk._replace(inputs=chunk.inputs.astype(jnp.float64))
    grads, _, _ = jax.eval_shape(est.update, params, state, double, jax.random.key(0))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))


@each_kind
@pytest.mark.parametrize("case", ["zero", "saturated", "tiny", "large"])
def test_finite(row, cut, case):
    """At a zero state with zero parameters, with saturated units, and at the ends of float32's range."""
    model, params, chunk = setup("lstm", dtype=jnp.float32, length=6)
    factor = {"zero": 0.0, "saturated": 1e4, "tiny": 1e-18, "large": 30.0}[case]
    params = jax.tree.map(lambda leaf: leaf * jnp.float32(factor), params)
    if case == "zero":
        chunk = chunk._replace(inputs=jnp.zeros_like(chunk.inputs))
    if refuses(row, cut, model):
        return
    grads, state, info = run(make(row, cut, model), params, split(chunk, (2, 4)), jax.random.key(0))
    for leaf in jax.tree.leaves((grads, state, info)):
        assert np.all(np.isfinite(leaf))


@each_kind
def test_reset_begins_anew(row, cut):
    """An episode after a reset is that episode alone: nothing of the past is left in state, tangent or cotangent."""
    model, params, chunk = setup(length=5, reset=(2,))
    first, second = (part._replace(reset=None) for part in split(chunk, (2, 3)))
    noises: list = [None] * 3
    options, by_step = {}, True
    if row.noisy:
        shapes = [noise_shape(row, cut, model, params, part) for part in (chunk, first, second)]
        by_step = shapes[0][0] == 5  # else the noise is that of the whole chunk
        drawn = [jnp.asarray(np.random.default_rng(0).normal(size=shape)) for shape in shapes]
        noises = [drawn[0], drawn[0][:2], drawn[0][2:]] if by_step else drawn
        options = {"noise": "given"}
    est = make(row, cut, model, **options)
    together = est.update(params, est.init(params), chunk, noises[0])
    one = est.update(params, est.init(params), first, noises[1])
    two = est.update(params, est.init(params), second, noises[2])
    assert error(together[0], jax.tree.map(jnp.add, one[0], two[0])) < 1e-12
    np.testing.assert_allclose(together[2].loss, jnp.concatenate([one[2].loss, two[2].loss]), rtol=1e-12)
    if not by_step:
        return  # what is carried on is right in the mean: tests/engine/test_chunk.py
    # What follows depends on the second episode alone, save for what was learnt of both.
    later = make_chunk(model, 3, seed=5)
    if row.learns:
        two = (two[0], two[1]._replace(shared=together[1].shared), two[2])
    noise = None if noises[0] is None else noises[2]
    continued = est.update(params, together[1], later, noise)[0]
    assert error(continued, est.update(params, two[1], later, noise)[0]) < 1e-12


@each_kind
def test_batched_is_the_mean_of_single_streams(row, cut):
    model, params, _ = setup()
    est = make(row, cut, model)
    many = sg.batched(est, 3)
    weights = np.random.default_rng(0).normal(size=(3, 4))
    chunks = [make_chunk(model, 4, seed=seed, reset=(seed,))._replace(weight=weights[seed]) for seed in range(3)]
    key = jax.random.key(3)
    keys = jax.random.split(key, 3)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chunks)
    for given in (key, keys):
        state, ones = many.init(params), [est.init(params) for _ in chunks]
        for _ in range(2):  # the second update starts from different states
            if row.learns:  # which streams do together
                ones = [one._replace(shared=state.shared) for one in ones]
            grads, state, info = many.update(params, state, stacked, given)
            found = [est.update(params, *each) for each in zip(ones, chunks, keys, strict=True)]
            singles, ones = [single for single, _, _ in found], [one for _, one, _ in found]
        assert info.loss.shape == (3, 4)
        want = jax.tree.map(lambda *leaves: sum(leaves) / 3, *singles)
        assert error(grads, want) < 1e-12


def check_weights(est, model):
    """A chunk's weights, and a head that multiplies by them: the same gradients, losses, and all that is carried on."""
    params, weight = make_params(model), jnp.asarray([0.5, 0.0, -2.0, 3.0, 1.0, -1.0, 0.0, 0.25])
    chunk = make_chunk(model, 8)._replace(weight=weight)
    twice = (model, chunk), (made(weighed, model), by_hand(chunk))
    one, other = (run(est(model), params, split(chunk, (4, 4)), jax.random.key(0)) for model, chunk in twice)
    assert error(one[0], other[0]) < 1e-12
    for a, b in zip(jax.tree.leaves(one[1:]), jax.tree.leaves(other[1:]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@each
def test_weights_are_losses_scaled_by_hand(row, cut):
    """In two chunks; on two layers, where the estimator takes them."""
    model = LAYERS if cut is None or cut in LAYERS.cell.cuts else make_model("vanilla")
    check_weights(lambda model: make(row, cut, model), make_model("vanilla") if refuses(row, cut, model) else model)


VARIANTS = [(row, options) for row in ROWS for options in row.variants if options.get("shrink") != "auto"]


@pytest.mark.slow
@pytest.mark.parametrize("row, options", VARIANTS, ids=lambda case: getattr(case, "name", str(case)))
def test_weights_with_other_options(row, options):
    options = dict(options) | ({"groups": 2} if "groups" in options else {"blocks": 2} if "blocks" in options else {})
    check_weights(lambda model: row.make(model, **options), make_model("vanilla"))


@each_kind
def test_masked_targets_may_be_anything(row, cut):
    """Where the weight is 0: NaN, and numbers that the head would refuse. Loss, gradient and state do not change."""
    model, params, chunk = setup(length=6, reset=(3,))
    est, key = make(row, cut, model), jax.random.key(0)
    counts = np.array([1.0, 0, 1, 0, 0, 1])
    chunk = chunk._replace(weight=jnp.asarray(counts))
    spoilt = chunk._replace(targets=jnp.where(counts[:, None] > 0, chunk.targets, np.nan))
    good, bad = (est.update(params, est.init(params), some, key) for some in (chunk, spoilt))
    for a, b in zip(jax.tree.leaves(good), jax.tree.leaves(bad), strict=True):
        assert np.all(np.isfinite(b)) and np.allclose(a, b, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(np.asarray(bad[2].loss)[counts == 0], 0)


@cases(lambda row, cut: True, lambda row, cut: of_each_kind(row, cut) and row.promise == "unbiased")
def test_any_cell(row, cut):
    """Cells with several weight matrices, and without any."""
    for cell in ("gru", "stack", "nested"):
        model, params, chunk = setup(cell)
        if cut is None or cut in model.cell.cuts:
            if refuses(row, cut, model):
                continue
            grads, _, info = run_quietly(row, cut, model, params, chunk)
            assert error(grads.head, bptt(model, params, chunk).head) < 1e-10
            assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((grads, info)))
        else:
            with pytest.raises(ValueError, match="has no cut"):
                make(row, cut, model)


NOISY = [pytest.param(row, marks=() if row.name in KINDS else pytest.mark.slow) for row in ROWS if row.noisy]


@pytest.mark.parametrize("row", NOISY, ids=lambda row: row.name)
def test_the_key_decides_the_noise(row):
    model, params, chunk = setup()
    est = make(row, None, model)
    # Where the noise is that of what lies before the chunk, it takes two of them, and enough steps to be noisy about.
    parts = list(split(chunk, (3, 1)))
    first, again, *others = (run(est, params, parts, jax.random.key(seed))[0] for seed in (1, 1, 2, 3, 4, 5, 6))
    assert error(first, again) == 0
    assert any(error(first.cell, other.cell) > 0 for other in others)  # a few signs may agree by chance
    with pytest.raises(ValueError, match="PRNG key"):
        est.update(params, est.init(params), chunk, None)


def test_every_row_is_told_in_full():
    assert len(REGISTRY) == len(ROWS)
    for row in ROWS:
        assert getattr(sg, row.name) is row.make
        assert row.summary and row.time and row.memory and row.make.__doc__
        assert set(row.cuts) <= set(CUT_NAMES)
        assert ("cut" in inspect.signature(row.make).parameters) == (len(row.cuts) > 1)
