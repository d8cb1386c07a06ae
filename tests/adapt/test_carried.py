"""Q_0 and α carried over: unbiased whatever they are, not of the present noise, and out of the way where senseless."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from streamgrad.adapt.averages import Averages
from streamgrad.noise.shaping import Shaping
from tests.tools import all_signs, bptt, error, few, make_chunk, make_model, make_params, random_alpha, random_q0, split

LENGTH = 4
# Options of `uoro`, and of `carried` around it.
OPTIONS = {
    "episode": ({}, {"episode": LENGTH, "least": 2, "refresh": 2, "decay": 0.9}),
    "stream": ({}, {"window": 6, "least": 2, "refresh": 1}),
    "groups": ({"groups": 2}, {"window": 3, "least": 2}),
    "full": ({}, {"window": 6, "least": 2, "q0": "full"}),
    "gir": ({}, {"episode": LENGTH, "least": 2, "alpha": "gir"}),
}


@functools.cache
def made(name, noise="given"):
    model = make_model("vanilla")
    options, choice = OPTIONS[name]
    return model, make_params(model), sg.carried(sg.uoro(model, noise=noise, **options), **choice)


def frozen(state, groups=1, diagonal=False, ready=True):
    """Arbitrary values in place of what statistics would give: a Q_0 that is not symmetric, α at random."""
    shared = state.shared
    size = shared.shaping.q0.shape[0]
    q0 = np.kron(np.eye(groups), random_q0(size // groups))
    q0 = jnp.asarray(np.diagonal(q0) if diagonal else q0)
    pair = Shaping(q0, 1 / q0 if diagonal else jnp.linalg.inv(q0))
    alpha = None if shared.alpha is None else jnp.asarray(random_alpha(*shared.alpha.shape))
    flag = jnp.array(ready)
    return state._replace(shared=shared._replace(shaping=pair, alpha=alpha, ready=flag, solved=flag))


@pytest.mark.parametrize("name", few(OPTIONS, "groups"))
def test_unbiased_with_frozen_statistics(name):
    """All sign patterns over two chunks; before the second Q_0 and α change, and GIR takes over in between."""
    model, params, est = made(name)
    groups, diagonal = OPTIONS[name][0].get("groups", 1), name in ("stream", "groups")
    chunks = list(split(make_chunk(model, LENGTH), (2, 2)))
    begin = frozen(est.init(params), groups, diagonal)
    other = jax.tree.map(lambda x: 1.7 * x if jnp.issubdtype(x.dtype, jnp.floating) else x, begin.shared)
    other = other._replace(shaping=Shaping(other.shaping.q0, begin.shared.shaping.inverse / 1.7))

    def total(noise, second):
        first, state, _ = est.update(params, begin, chunks[0], noise[:2])
        state = state._replace(shared=second)
        last, _, info = est.update(params, state, chunks[1], noise[2:])
        return jax.tree.map(jnp.add, first, last), info.diagnostics["carried"]

    many = jax.jit(jax.vmap(total, in_axes=(0, None)))
    patterns = jnp.asarray(all_signs(LENGTH, 2))
    want = bptt(model, params, sg.Chunk(*make_chunk(model, LENGTH)[:2]))
    for second in (other, other._replace(ready=jnp.array(False))):
        grads, used = many(patterns, second)
        mean = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), grads)
        assert error(mean, want) < 1e-10
        assert np.all(np.asarray(used) == float(second.ready))


def streams(chunk, count=3):
    """Several streams, not all alike."""
    return jax.tree.map(
        lambda x: jnp.stack([x * (1 + i) if x.dtype == jnp.float64 else x for i in range(count)]), chunk
    )


@pytest.mark.parametrize("name", few(OPTIONS, "groups"))
def test_q_does_not_depend_on_the_noise_of_its_window(name):
    """Two runs that differ in the last chunk's noise alone use the same Q_0 and α there, and go on with the same."""
    model, params, est = made(name, "rademacher")
    est = sg.batched(est, 3)
    update, state = est.update, est.init(params)
    reset = (0,) if name in ("episode", "gir") else None
    chunk = streams(make_chunk(model, LENGTH, reset=reset))
    structure, shapes = jax.tree.structure(state), jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for i in range(8):
        _, state, info = update(params, state, chunk, jax.random.key(i))
    assert np.all(np.asarray(info.diagnostics["carried"]) == 1) and info.diagnostics["carried"].shape == (3, LENGTH)
    assert sorted(info.diagnostics) == ["beta", "carried", "gamma"]
    assert jax.tree.structure(state) == structure and jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes
    begin = est.init(params).shared
    moved = error((state.shared.shaping, state.shared.alpha), (begin.shaping, begin.alpha))
    # A group of one preactivation has nothing to shape: its Q_0 is 1.
    assert moved > 1e-2 or name == "groups"
    (_, one, a), (_, two, b) = (update(params, state, chunk, jax.random.key(i)) for i in (100, 101))
    for x, y in zip(jax.tree.leaves(a.diagnostics["carried"]), jax.tree.leaves(b.diagnostics["carried"]), strict=True):
        np.testing.assert_array_equal(x, y)
    if name == "episode":  # GIR's coefficients depend on the noise, and B of the windows that follow on them
        for x, y in zip(jax.tree.leaves(one.shared), jax.tree.leaves(two.shared), strict=True):
            np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(a.diagnostics["gamma"], b.diagnostics["gamma"])
        np.testing.assert_array_equal(a.diagnostics["beta"], b.diagnostics["beta"])
    assert not np.array_equal(one.memory.tangent, two.memory.tangent)


@pytest.mark.slow
def test_the_state_can_be_donated():
    """No two leaves of a new state are one buffer, which XLA refuses to take twice."""
    model, params, est = made("episode", "rademacher")
    chunk, key = make_chunk(model, LENGTH, reset=(0,)), jax.random.key(0)
    want = est.update(params, est.init(params), chunk, key)
    got = jax.jit(est.update, donate_argnums=1)(params, est.init(params), chunk, key)
    assert error((got[0], got[1].memory), (want[0], want[1].memory)) < 1e-12


def test_what_is_carried_over_lowers_the_variance():
    """From a few windows of the same episode, V comes close to what the exact Q_0 and α reach."""
    model, params, est = made("episode", "rademacher")
    chunk = make_chunk(model, LENGTH, reset=(0,))
    update, state = est.update, est.init(params)
    for i in range(12 * LENGTH):
        _, state, _ = update(params, state, chunk, jax.random.key(i))
    ep = sg.theory.collect(model, params, chunk)
    got = sg.theory.v(ep, state.shared.alpha, state.shared.shaping.q0)
    best = sg.theory.optimise(ep)
    assert 0.99 * float(best.value) <= float(got) <= 1.05 * float(best.value)
    assert float(got) < 0.9 * float(sg.theory.v(ep))
    np.testing.assert_allclose(state.shared.shaping.q0 @ state.shared.shaping.inverse, np.eye(2), atol=1e-10)


def broken(averages: Averages, value: float) -> Averages:
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), averages)._replace(weight=averages.weight)


@pytest.mark.parametrize("name", few(["episode", "stream"], "stream"))
def test_senseless_averages_fall_back(name):
    """The estimate is that of identity and GIR, and nothing is NaN."""
    model, params, est = made(name, "rademacher")
    chunk = make_chunk(model, 6, reset=(0, 4) if name == "episode" else None)
    state = est.init(params)
    for i in range(6):
        _, state, info = est.update(params, state, chunk, jax.random.key(i))
    assert np.all(np.asarray(info.diagnostics["carried"]) == 1)
    silent = chunk._replace(targets=jnp.full_like(chunk.targets, np.nan))  # adds nothing: its statistics are NaN
    want = sg.uoro(model).update(params, sg.uoro(model).init(params), chunk, jax.random.key(9))[0]
    for value in (np.nan, np.inf, 0.0):
        shared = state.shared._replace(averages=broken(state.shared.averages, value))
        for _ in range(2):
            shared = jax.jit(est.update)(params, state._replace(shared=shared), silent, jax.random.key(0))[1].shared
        assert not shared.ready
        grads, new, info = est.update(params, est.init(params)._replace(shared=shared), chunk, jax.random.key(9))
        assert error(grads, want) < 1e-12
        assert np.all(np.asarray(info.diagnostics["carried"]) == 0)
        assert np.all(np.isfinite(new.memory.cotangent["w"]))


def test_a_window_without_sense_is_left_out():
    model, params, est = made("episode", "rademacher")
    chunk = make_chunk(model, LENGTH, reset=(0,))
    update = jax.jit(est.update)  # a target of NaN is an error where it can be seen
    _, state, _ = update(params, est.init(params), chunk, jax.random.key(0))
    bad = chunk._replace(targets=jnp.full_like(chunk.targets, np.nan))
    _, after, _ = update(params, state, bad, jax.random.key(1))
    assert after.shared.windows == 2 and after.shared.passes == 1
    for x, y in zip(jax.tree.leaves(after.shared.averages), jax.tree.leaves(state.shared.averages), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("factor, calm", [(1e2, True), (1e6, False), (1e-6, False)])
def test_factors_out_of_balance_are_left_to_gir(factor, calm):
    """A tangent `factor` times as large as GIR's, at the same product: the guard acts at once, and GIR mends it."""
    model, params, est = made("episode", "rademacher")
    state = frozen(est.init(params))
    state = state._replace(shared=state.shared._replace(alpha=jnp.ones_like(state.shared.alpha)))
    even = jnp.ones((1, 2)), {"w": jnp.full_like(params.cell["w"], 2**0.5 / params.cell["w"].size ** 0.5)}
    memory = state.memory._replace(tangent=factor * even[0], cotangent={"w": even[1]["w"] / factor})
    memory = memory._replace(square_norm=jnp.full(1, 2 / factor**2))
    chunk = make_chunk(model, 1)
    _, state, info = est.update(params, state._replace(memory=memory), chunk, jax.random.key(0))
    assert np.all(np.asarray(info.diagnostics["carried"]) == 1) and bool(state.shared.ready) == calm
    _, state, info = est.update(params, state, chunk, jax.random.key(1))
    assert np.all(np.asarray(info.diagnostics["carried"]) == float(calm)) and state.shared.ready


@pytest.mark.slow
@pytest.mark.parametrize("cell, groups", [("lstm", 8), ("gru", 1), ("vanilla", 4)])
def test_a_live_stream_stays_balanced(cell, groups):
    """Endless recall, an update at every step, from a running state: tangents stay what GIR makes them.

    A constant γ in place of GIR lets the LSTM's tangents grow without bound.
    """
    model = sg.Model(getattr(sg.cells, cell)(1, 8), sg.heads.bernoulli(1))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.init(jax.random.key(0)))
    bits = jax.random.bernoulli(jax.random.key(1), 0.5, (2, 3000, 1))
    stream = sg.Chunk(bits.astype(jnp.float32), jnp.roll(bits, 3, axis=1))

    def run(wrap):
        est = sg.batched(wrap(sg.uoro(model, groups=groups)), 2)

        def update(state, now):
            t, key = now
            chunk = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, t, 1, axis=1), stream)
            grads, state, info = est.update(params, state, chunk, key)
            used = info.diagnostics["carried"][0, 0] if "carried" in info.diagnostics else 0.0
            return state, (jnp.max(jnp.abs(state.memory.tangent)), jnp.linalg.norm(grads.cell[names[0]]), used)

        names = sorted(params.cell)
        steps = (jnp.arange(3000), jax.random.split(jax.random.key(2), 3000))
        return jax.lax.scan(update, est.init(params), steps)[1]

    plain = run(lambda est: est)
    tangent, gradient, used = run(lambda est: sg.carried(est, window=32, least=4))
    late = slice(1000, None)
    assert np.all(np.asarray(used[late]) == 1)
    assert float(tangent[late].max()) < 10 * float(plain[0][late].max())
    assert float(gradient[late].max()) < 10 * float(plain[1][late].max())


def test_short_chunks_are_gathered_into_the_same_window():
    """Half a window at a time, or all at once: the same statistics at the same parameters."""
    model, params, est = made("stream")
    whole = make_chunk(model, 12, reset=(0, 8))
    noise = jnp.asarray(np.random.default_rng(0).choice([-1.0, 1.0], size=(12, 2)))
    results = []
    for sizes in ((6, 6), (3,) * 4):
        update, state = est.update, est.init(params)
        for i, chunk in enumerate(split(whole, sizes)):
            _, state, _ = update(params, state, chunk, noise[i * sizes[0] : (i + 1) * sizes[0]])
        assert state.shared.windows == 2
        results.append(state.shared._replace(gathered=None, ready=None, solved=None))
    for x, y in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-14)


@pytest.mark.slow
def test_preuoro():
    """α alone, one for each weight matrix; unbiased with it, in float32, under scan."""
    model, choice = make_model("gru"), {"episode": LENGTH, "least": 2, "refresh": 1}
    params, chunk = make_params(model), make_chunk(model, LENGTH, reset=(0,))
    est = sg.carried(sg.preuoro(model, noise="given"), **choice)
    begin = est.init(params)
    alpha = jnp.asarray(random_alpha(*begin.shared.alpha.shape))
    state = begin._replace(shared=begin.shared._replace(alpha=alpha, ready=jnp.array(True)))
    many = jax.jit(jax.vmap(lambda noise: est.update(params, state, chunk, noise)[0]))
    mean = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), many(jnp.asarray(all_signs(LENGTH))))
    assert error(mean, bptt(model, params, chunk)) < 1e-10
    assert begin.shared.shaping is None and begin.shared.alpha.shape[-1] == 3

    small = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (params, chunk._replace(reset=None)))
    small_chunk = small[1]._replace(reset=chunk.reset)
    est = sg.carried(sg.preuoro(model), **choice)
    start = est.init(small[0])
    state, used = jax.lax.scan(
        lambda state, key: (lambda out: (out[1], out[2].diagnostics["carried"][0]))(
            est.update(small[0], state, small_chunk, key)
        ),
        start,
        jax.random.split(jax.random.key(0), 8),
    )
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, start)
    assert used.dtype == jnp.float32 and used[0] == 0 and used[-1] == 1


def test_greedy():
    model = make_model("vanilla")
    params, chunk = make_params(model), make_chunk(model, LENGTH, reset=(0,))
    est = sg.carried(sg.uoro(model), episode=LENGTH, least=2, refresh=1, alpha="greedy")
    state = est.init(params)
    for i in range(4):
        grads, state, info = est.update(params, state, chunk, jax.random.key(i))
    assert np.all(np.asarray(info.diagnostics["carried"]) == 1)
    assert np.all(np.isfinite(grads.cell["w"])) and not np.allclose(state.shared.shaping.q0, np.eye(2))


def test_no_other_statistics():
    """Appendix F's estimate of B is part of the theory, and no option here."""
    with pytest.raises(TypeError, match="statistics"):
        sg.carried(sg.uoro(make_model("vanilla")), episode=4, statistics="appendix_f")


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda m: sg.carried(sg.rtrl(m)), "noise at the preactivations"),
        (lambda m: sg.carried(sg.batched(sg.uoro(m), 2)), "for one stream"),
        (lambda m: sg.carried(sg.carried(sg.uoro(m))), "by itself"),
        (lambda m: sg.carried(sg.uoro(m, cut="state")), "at the preactivations"),
        (lambda m: sg.carried(sg.uoro(m, rescale="none")), "by itself"),
        (lambda m: sg.carried(sg.uoro(m, q0=np.eye(2))), "by itself"),
        (lambda m: sg.carried(sg.preuoro(m)), "for episodes"),
        (lambda m: sg.carried(sg.preuoro(m), episode=4, alpha="gir"), "nothing to carry over"),
        (lambda m: sg.carried(sg.preuoro(m), episode=4, q0="full"), "no spatial noise"),
        (lambda m: sg.carried(sg.uoro(m), alpha="optimal"), "each position in an episode"),
        (lambda m: sg.carried(sg.uoro(m), decay=1.0), "decay must be"),
        (lambda m: sg.carried(sg.uoro(m), damping=-1.0), "damping must be"),
        (lambda m: sg.carried(sg.uoro(m), window=1), "window must be"),
        (lambda m: sg.carried(sg.uoro(m), episode=0), "episode must be"),
        (lambda m: sg.carried(sg.uoro(m), q0="half"), "q0 must be one of"),
        (lambda m: sg.carried(sg.uoro(m), q0="none", alpha="gir"), "nothing to carry over"),
    ],
)
def test_bad_choices(make, words):
    with pytest.raises(ValueError, match=words):
        make(make_model("vanilla"))


def test_all_streams_need_long_chunks():
    model = make_model("vanilla")
    est = sg.carried(sg.uoro(model), window=8, streams=None)
    with pytest.raises(ValueError, match="give a number of streams"):
        est.update(make_params(model), est.init(make_params(model)), make_chunk(model, LENGTH), jax.random.key(0))
