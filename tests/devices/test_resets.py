"""A reset clears everything on several devices as it does on one: `tests/estimators/test_resets.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from tests.devices.cases import NAMES, STREAMS, chunk_of, make, params_of
from tests.devices.test_sharded import FAST, mesh_of
from tests.estimators.test_resets import BAD, finite, same, spoilt
from tests.tools import few

GONE = 2  # which stream, of the second device
OTHERS = np.arange(STREAMS) != GONE

each = pytest.mark.parametrize("name", few(NAMES, *FAST))


def layouts(name):
    """The estimator on two devices, and by columns where that can be."""
    yield sg.sharded(sg.monitored(make(name)), STREAMS, mesh_of(2))
    if name in ("rtrl", "ok of rank 2"):
        est = sg.sharded(sg.monitored(make(name)), STREAMS, mesh_of(2, 2), columns="columns")
        yield est


@each
@pytest.mark.parametrize("bad", BAD)
def test_one_stream_of_many(name, bad):
    """Nobody else notices; after its reset the mean is that of a stream begun anew, and the flag is its own."""
    params = params_of()
    for est in layouts(name):
        state = est.init(params)
        for number in (1, 2):
            _, state, _ = est.update(params, state, chunk_of(number), jax.random.key(number))
        begin = est.init(params)
        chunk = chunk_of(3)
        reset = np.zeros_like(chunk.reset)
        reset[GONE, 0] = True

        def put(tree, by):
            return jax.tree.map(lambda leaf, new: jax.device_put(leaf.at[GONE].set(new[GONE]), leaf.sharding), tree, by)

        own = state.cell, state.memory
        cell, memory = put(own, spoilt(own, BAD[bad]))
        gone = state._replace(cell=cell, memory=memory)
        cell, memory = put(own, (begin.cell, begin.memory))
        anew = state._replace(cell=cell, memory=memory)

        key = jax.random.key(3)
        _, beside, info = est.update(params, gone, chunk._replace(reset=np.zeros_like(reset)), key)
        _, want, _ = est.update(params, state, chunk._replace(reset=np.zeros_like(reset)), key)
        took = [jax.tree.map(lambda leaf: np.asarray(leaf)[OTHERS], (s.cell, s.memory)) for s in (beside, want)]
        assert same(*took) and finite(beside.shared)
        assert np.asarray(info.diagnostics["finite"])[OTHERS].all()
        if jax.tree.leaves(state.memory):
            still = finite(jax.tree.map(lambda leaf: leaf[GONE], (beside.cell, beside.memory)))
            assert bool(info.diagnostics["finite"][GONE]) == still

        got, want = (est.update(params, start, chunk._replace(reset=reset), key) for start in (gone, anew))
        assert same(got[0], want[0])
        assert same((got[1].cell, got[1].memory), (want[1].cell, want[1].memory))
        assert finite(got[1].shared) and np.asarray(got[2].diagnostics["finite"]).all()


def test_a_part_of_the_influence_is_enough():
    """By columns each device has a part of M: one number in one of them, and the stream is said to have gone."""
    params, chunk = params_of(), chunk_of(1)
    est = sg.sharded(sg.monitored(make("rtrl")), STREAMS, mesh_of(2, 2), columns="columns")
    state = est.init(params)
    memory = jax.tree.map(
        lambda leaf: jax.device_put(leaf.at[(GONE, *(-2 for _ in leaf.shape[1:]))].set(jnp.nan), leaf.sharding),
        state.memory,
    )
    _, _, info = est.update(params, state._replace(memory=memory), chunk, None)
    assert np.asarray(info.diagnostics["finite"]).tolist() == [i != GONE for i in range(STREAMS)]
