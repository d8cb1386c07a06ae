"""A reset clears everything, also what is not finite: 0 times NaN is NaN, so that what is cut must be selected.

Held to it is every estimator of the registry at each of its cuts, with the options that take another way through a
chunk, alone and in a batch; over devices in `tests/devices/test_resets.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from streamgrad.base import Model, users_model
from streamgrad.estimators.rtrl import rtrl_by_steps
from streamgrad.estimators.snap import snap_by_steps
from streamgrad.estimators.uoro import uoro_plain
from tests.estimators.registered import CASES, where
from tests.tools import error, few, make_chunk, make_model, make_params

BAD = {"nan": np.nan, "inf": np.inf}
OTHERS = {
    "rtrl by steps": rtrl_by_steps,
    "rtrl of a cell without products": lambda model: sg.rtrl(make_model("nested")),
    "rtrl, diagonal": lambda model: sg.rtrl(diagonal()),
    "local_rtrl of a stack": lambda model: sg.local_rtrl(make_model("stack")),
    "ok of rank 1": lambda model: sg.ok(model, rank=1),
    "snap by backpropagation": lambda model: sg.snap(lstm(), inside="backprop"),
    "snap by steps": lambda model: snap_by_steps(lstm()),
    "eprop with random feedback": lambda model: sg.eprop(lstm(), feedback="random"),
    "uoro in its plain form": uoro_plain,
    "uoro, current step exact": lambda model: sg.uoro(model, immediate="exact"),
    "uoro without rescaling": lambda model: sg.uoro(model, rescale="none"),
    "uoro across chunks": sg.uoro_across,
    "uoro across chunks in blocks": lambda model: sg.uoro_across(model, blocks=2),
    "windowed_bptt in blocks": lambda model: sg.windowed_bptt(model, window=6, every=2),
    "windowed_bptt replayed": lambda model: sg.windowed_bptt(model, window=6, every=2, replay=True),
    "reinforce, average": lambda model: sg.reinforce(model, baseline="average"),
    "reinforce, average by position": lambda model: sg.reinforce(model, baseline="average", positions=8),
    "carried": lambda model: sg.carried(sg.uoro(model), window=2, least=1, refresh=1),
    "carried, episodes": lambda model: sg.carried(sg.uoro(model), episode=4, least=1, refresh=1),
}
# Those that go through a chunk in ways of their own; the rest are among the slow tests.
QUICK = (
    *("rtrl", "ok-preactivation", "uoro-preactivation", "snap-preactivation", "dni", "reinforce-state"),
    *("windowed_bptt", "kernl-state", "pes"),
)
# They go on through resets: only what is not finite is begun anew.
ONGOING = ("reinforce, average", "reinforce, average by position")


def lstm() -> Model:
    return make_model("lstm")


@functools.cache
def diagonal() -> Model:
    return Model(sg.cells.lru(1, 2), sg.heads.squared_error(2))


NAMES = [f"{row.name}-{cut}" if cut else row.name for row, cut in CASES] + list(OTHERS)


@functools.cache
def make(name: str) -> sg.GradientEstimator:
    if name in OTHERS:
        return sg.monitored(OTHERS[name](make_model("vanilla")))
    row, cut = CASES[NAMES.index(name)]
    return sg.monitored(row.make(make_model("vanilla"), **where(row, cut)))


@functools.cache
def batch_of(name: str) -> sg.GradientEstimator:
    # Whose streams meet in what they share as well.
    if name == SHRUNK:
        return sg.monitored(sg.batched(sg.uoro_across(make_model("vanilla"), shrink="auto"), 3))
    return sg.batched(make(name), 3)


SHRUNK = "uoro that shrinks"  # which a stream alone cannot
each = pytest.mark.parametrize("name", few(NAMES, *QUICK))
each_batch = pytest.mark.parametrize("name", few([*NAMES, SHRUNK], *QUICK))
bad_numbers = pytest.mark.parametrize("bad", BAD)


def spoilt(tree, bad: float):
    """All real numbers of a tree replaced; counters, keys and flags stay."""

    def one(leaf):
        return jnp.full_like(leaf, bad) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(one, tree)


def model_of(name: str) -> Model:
    return make_model("vanilla") if name == SHRUNK else users_model(make(name).method.model)


def running(est, model, streams: tuple[int, ...] = ()):
    """A state that has gone over two chunks, and the parameters."""
    params = make_params(model)
    state = est.init(params)
    for seed in (1, 2):
        chunk = make_chunk(model, 4, seed=seed)
        for count in streams:
            chunk = jax.tree.map(lambda leaf, n=count: jnp.stack([leaf * (1 + 0.1 * i) for i in range(n)]), chunk)
        _, state, _ = est.update(params, state, chunk, jax.random.key(seed))
    return params, state


def finite(tree) -> bool:
    return all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(tree) if leaf.dtype != jax.dtypes.float0)


def same(got, want) -> bool:
    if not jax.tree.leaves(want):
        return True
    return finite(got) and all(
        np.allclose(a, b, rtol=1e-10, atol=1e-12)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


def begun_again(est, state, params):
    """The state of a fresh stream that knows what all streams have learnt."""
    return est.init(params)._replace(shared=state.shared)


@each
@bad_numbers
def test_a_reset_at_the_beginning(name, bad):
    """Gradient, outputs, credit and what is carried on are those of a fresh state."""
    est, model = make(name), model_of(name)
    params, state = running(est, model)
    chunk, key = make_chunk(model, 4, seed=3, reset=(0,)), jax.random.key(3)
    gone = state._replace(cell=spoilt(state.cell, BAD[bad]), memory=spoilt(state.memory, BAD[bad]))
    fresh = begun_again(est, state, params)
    got, want = (est.update(params, start, chunk, key) for start in (gone, fresh))
    assert finite(got[0]) and error(got[0], want[0]) < 1e-10
    assert same(got[2].loss, want[2].loss)
    assert same(got[1].cell, want[1].cell)
    assert same(got[1].memory, want[1].memory)
    assert finite(got[1].shared)
    assert bool(got[2].diagnostics["finite"])
    if name == "dni" or "average" in name:
        return  # they cannot advance
    got, want = (est.advance(params, start, chunk.inputs, key, chunk.reset) for start in (gone, fresh))
    assert same((got[0], got[1].cell, got[1].memory), (want[0], want[1].cell, want[1].memory))
    signal = jnp.ones_like(got[0])
    assert same(*(est.credit(params, trace, signal) for _, _, trace in (got, want)))


@each
@bad_numbers
@pytest.mark.parametrize("what", ["state", "input"])
def test_a_reset_later(name, bad, what):
    """What went wrong before it is gone; the losses of the steps before it are lost, and say so."""
    est, model = make(name), model_of(name)
    params, state = running(est, model)
    chunk, key = make_chunk(model, 4, seed=3, reset=(2,)), jax.random.key(3)
    got_chunk, start = chunk, begun_again(est, state, params)
    if what == "state":
        gone = state._replace(cell=spoilt(state.cell, BAD[bad]), memory=spoilt(state.memory, BAD[bad]))
    else:
        gone = start
        got_chunk = chunk._replace(inputs=jax.tree.map(lambda leaf: leaf.at[1].set(BAD[bad]), chunk.inputs))
    update = jax.jit(est.update)  # in which nobody can read the input and refuse it
    _, got, info = update(params, gone, got_chunk, key)
    _, want, _ = update(params, start, chunk, key)
    assert same(got.cell, want.cell)
    assert finite(got.memory) if name in ONGOING else same(got.memory, want.memory)
    assert finite(got.shared)
    assert bool(info.diagnostics["finite"])
    later = make_chunk(model, 4, seed=4)
    if name not in ONGOING and name != "dni":
        want = want._replace(shared=got.shared)
        assert error(*(update(params, end, later, key)[0] for end in (got, want))) < 1e-10


@each_batch
@bad_numbers
def test_one_stream_of_many(name, bad):
    """The others never notice; the mean is itself again with the reset of the one, whatever streams share."""
    est, model = batch_of(name), model_of(name)
    params, state = running(est, model, (3,))
    key = jax.random.key(3)

    def chunk_of(seed, reset):
        one = make_chunk(model, 4, seed=seed)
        many = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf, -leaf]), one)
        return many._replace(reset=jnp.zeros((3, 4), bool).at[1, 0].set(reset))

    def second(tree, by):
        return jax.tree.map(lambda leaf, new: leaf.at[1].set(new[1]), tree, by)

    begin = est.init(params)
    own = state.cell, state.memory
    gone = state._replace(**dict(zip(("cell", "memory"), second(own, spoilt(own, BAD[bad])), strict=True)))
    anew = state._replace(**dict(zip(("cell", "memory"), second(own, (begin.cell, begin.memory)), strict=True)))

    # While it is gone: the streams beside it go on as if it were not there, and it is named.
    _, beside, info = est.update(params, gone, chunk_of(3, False), key)
    _, want, _ = est.update(params, state, chunk_of(3, False), key)
    for index in (0, 2):
        assert same(*(jax.tree.map(lambda leaf, i=index: leaf[i], (s.cell, s.memory)) for s in (beside, want)))
    if name not in ("bptt", "immediate"):  # whose cell saturates, and is finite again by itself
        assert info.diagnostics["finite"].tolist() == [True, bool(info.diagnostics["finite"][1]), True]
    assert finite(beside.shared)

    # Then it is begun again: nobody sees a difference, neither now nor later.
    got, want = (est.update(params, start, chunk_of(4, True), key) for start in (gone, anew))
    assert finite(got[0]) and error(got[0], want[0]) < 1e-10
    assert same((got[1].cell, got[1].memory), (want[1].cell, want[1].memory))
    assert finite(got[1].shared) and got[2].diagnostics["finite"].all()


def test_a_gone_step_of_reinforce_gives_no_finite_gradient():
    """An LSTM whose c is infinite has a finite loss, but no score: a wrong gradient would pass for a right one."""
    model = lstm()
    params, est = make_params(model), sg.monitored(sg.reinforce(model))
    state = est.init(params)
    gone = state._replace(cell=state.cell._replace(c=jnp.full_like(state.cell.c, np.inf)))
    grads, after, info = est.update(params, gone, make_chunk(model, 4, reset=(2,)), jax.random.key(0))
    assert np.all(np.isfinite(info.loss)) and bool(info.diagnostics["finite"]) and finite(after.memory)
    assert not finite(grads.cell)


def test_a_stream_that_overflows_by_itself():
    """A network whose influence grows beyond float32 while its state stays bounded: a loop begins such streams again.

    With spectral radius 3 that takes some thousand steps. Without the reset the mean is NaN from then on.
    """
    model = sg.Model(sg.cells.vanilla(1, 32), sg.heads.squared_error(1))
    params = make_params(model, dtype=jnp.float32)
    rng = np.random.default_rng(0)
    recurrent = rng.normal(size=(32, 32))
    recurrent *= 3 / np.max(np.abs(np.linalg.eigvals(recurrent)))
    w = params.cell["w"].at[:, :32].set(jnp.asarray(recurrent, jnp.float32)).at[:, 32:].multiply(0.1)
    params = params._replace(cell={"w": w})
    est = sg.monitored(sg.batched(sg.rtrl(model), 4))
    inputs = jnp.asarray(rng.normal(size=(500, 4, 20, 1)), jnp.float32)

    @functools.partial(jax.jit, static_argnames="begin_again")
    def live(inputs, begin_again):
        def step(carry, x):
            state, finite = carry
            reset = jnp.zeros((4, 20), bool).at[:, 0].set(~finite & begin_again)
            grads, state, info = est.update(params, state, sg.Chunk(x, x, reset), None)
            finite = info.diagnostics["finite"]
            return (state, finite), (finite, jnp.all(jnp.isfinite(grads.cell["w"])))

        return jax.lax.scan(step, (est.init(params), jnp.ones(4, bool)), inputs)[1]

    streams, means = (np.asarray(found) for found in live(inputs, False))
    assert streams[0].all() and not streams[-1].any() and not means[-1]
    streams, means = (np.asarray(found) for found in live(inputs, True))
    gone = np.flatnonzero(~streams.all(axis=1))
    assert len(gone) > 4 and streams[gone[gone < 499] + 1].mean() > 0.9  # one update later it is back
    # The mean is spoilt while one is gone, or so near to it that its credit overflows first; and not for ever.
    near = streams.all(axis=1)[:-2] & streams.all(axis=1)[1:-1] & streams.all(axis=1)[2:]
    assert means[:-2][near].all()
