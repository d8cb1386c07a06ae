"""B̂ and Ĉ are unbiased over the step q that the reverse pass starts from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad.adapt import window as carried
from streamgrad.adapt.learner import in_turns
from streamgrad.noise.groups import Groups
from streamgrad.noise.shaping import Shaping
from streamgrad.theory.spatial import Spatial
from tests.tools import few, make_chunk, make_model, make_params, random_alpha, random_q0

LENGTH = 6
CASES = [("lstm", 1, None), ("lstm", 2, (3,)), ("gru", 1, (2,)), ("gru", 4, None)]


@functools.cache
def collected(cell, groups, reset):
    """An episode with its parts, and the reverse pass from every step."""
    model = make_model(cell)
    params, chunk = make_params(model), make_chunk(model, LENGTH, reset=reset)
    ep = sg.theory.collect(model, params, chunk)
    index = sg.theory.partition(ep, groups)
    partition = Groups(int(index.max()) + 1, index, ep.rows)

    states, state = [], model.init_state(params)
    for t in range(LENGTH):
        if reset and t in reset:
            state = model.init_state(params)
        states.append(ravel_pytree(state)[0])
        state = model.cell.step(params.cell, state, jax.tree.map(lambda x, t=t: x[t], chunk.inputs))
    after = [ravel_pytree(model.cell.step(params.cell, ravel_pytree(model.init_state(params))[1](s), x))[0]
             for s, x in zip(states, chunk.inputs, strict=True)]  # fmt: skip
    unravel = ravel_pytree(model.init_state(params))[1]
    dl = [model.read_out(params.head, unravel(h), y)[2] for h, y in zip(after, chunk.targets, strict=True)]
    resets = jnp.zeros(LENGTH, bool) if chunk.reset is None else chunk.reset
    window = carried.Window(jnp.stack(states), chunk.inputs, jnp.stack(dl), resets)
    backs = jax.jit(jax.vmap(lambda q: carried.go_back(model, params, partition, window, q)))(jnp.arange(LENGTH))
    return ep, partition, backs, resets


def mean_over_starts(estimate, backs):
    return jnp.mean(jax.jit(jax.vmap(estimate))(backs), axis=0)


def block_q0(partition):
    same = partition.index[:, None] == partition.index[None, :]
    return np.where(same, random_q0(len(partition.index)), 0)


def spatial_of(partition, q0):
    pair = Shaping(jnp.asarray(q0), jnp.linalg.inv(q0) if q0.ndim == 2 else jnp.asarray(1 / q0))
    return Spatial(partition, pair.q0, pair.inverse)


@pytest.mark.parametrize("cell, groups, reset", few(CASES, ("lstm", 2, (3,))))
def test_b_is_unbiased(cell, groups, reset):
    ep, partition, backs, _ = collected(cell, groups, reset)
    alpha = random_alpha(LENGTH, partition.count)
    want = sg.theory.b_matrix(ep, alpha, groups)

    def estimate(back):
        return carried.estimate_b(partition, back, jnp.log(alpha))

    each = jax.jit(jax.vmap(estimate))(backs)
    np.testing.assert_allclose(jnp.mean(each, axis=0), want, rtol=1e-10, atol=1e-10 * float(jnp.max(want)))
    assert float(jnp.min(jnp.linalg.eigvalsh(each))) > -1e-12 * float(jnp.max(each))
    assert float(jnp.max(jnp.abs(each[0] - want))) > 0.01 * float(jnp.max(want))  # one start alone is not B
    diagonal = mean_over_starts(lambda back: carried.estimate_b(partition, back, jnp.log(alpha), True), backs)
    np.testing.assert_allclose(diagonal, jnp.diagonal(want), rtol=1e-10)


@pytest.mark.parametrize("cell, groups, reset", few(CASES, ("lstm", 2, (3,))))
@pytest.mark.parametrize("diagonal", [False, True])
def test_c_is_unbiased(cell, groups, reset, diagonal):
    """With a Q_0 that is not symmetric: a transposed one would be seen."""
    ep, partition, backs, _ = collected(cell, groups, reset)
    q0 = np.abs(random_q0(len(partition.index))[0]) + 0.5 if diagonal else block_q0(partition)
    spatial = spatial_of(partition, q0)
    want = jnp.moveaxis(sg.theory.c_matrix(ep, q0, groups=groups, per_group=True), 0, -1)
    got = mean_over_starts(lambda back: carried.estimate_c(spatial, back).matrix(back), backs)
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10 * float(jnp.max(want)))
    scaled = spatial._replace(q0=3 * spatial.q0, inverse=spatial.inverse / 3)
    again = mean_over_starts(lambda back: carried.estimate_c(scaled, back).matrix(back), backs)
    np.testing.assert_allclose(again, got, rtol=1e-12)


def test_a_window_that_is_not_full():
    """Steps that are not there yet change nothing."""
    model = make_model("vanilla")
    params, chunk = make_params(model), make_chunk(model, LENGTH)
    groups = Groups(1, np.zeros(2, int), (2,))
    rng = np.random.default_rng(0)
    window = carried.Window(
        jnp.asarray(rng.normal(size=(LENGTH, 2))),
        chunk.inputs,
        jnp.asarray(rng.normal(size=(LENGTH, 2))).at[4:].set(0),
        jnp.zeros(LENGTH, bool),
    )
    long = carried.go_back(model, params, groups, window, jnp.array(2), 4)
    short = carried.go_back(model, params, groups, jax.tree.map(lambda leaf: leaf[:4], window), jnp.array(2))
    log_alpha = jnp.log(random_alpha(LENGTH, 1))
    np.testing.assert_allclose(
        carried.estimate_b(groups, long, log_alpha), carried.estimate_b(groups, short, log_alpha[:4]), rtol=1e-12
    )


def test_every_step_has_its_turn():
    for size in (1, 2, 7, 28):
        assert sorted(int(in_turns(jnp.array(k), size, size)) for k in range(size)) == list(range(size))
    for filled in (10, 9, 1):  # a window that chunks do not fill to its end
        found = sorted(int(in_turns(jnp.array(k), 12, filled)) for k in range(3 * filled))
        assert found == sorted(3 * list(range(filled)))
