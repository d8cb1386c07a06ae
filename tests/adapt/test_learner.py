"""How what is carried over is learnt: the averages over windows, when they are solved, and what Q_0 they give."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from streamgrad.adapt.averages import solve_q0
from streamgrad.noise.groups import Groups
from tests.tools import make_chunk, make_model, make_params

KEY = jax.random.key(0)


@functools.cache
def stream(**choice):
    """A vanilla network of two units, whose windows of six steps are looked back from."""
    model = make_model("vanilla")
    return model, make_params(model), sg.carried(sg.uoro(model), window=6, **choice)


def without_averages(state):
    """The same state, as if all windows so far had been empty."""
    shared = state.shared
    return state._replace(shared=shared._replace(averages=jax.tree.map(jnp.zeros_like, shared.averages)))


def test_averages_decay_once_for_each_window():
    """Each is decay times what it was, and 1 - decay times what the window adds, which linearity tells."""
    model, params, est = stream(decay=0.8, least=2, refresh=1)
    state = est.init(params)
    for made in range(1, 4):
        chunk = make_chunk(model, 6, seed=made)
        _, alone, _ = est.update(params, without_averages(state), chunk, KEY)
        _, new, _ = est.update(params, state, chunk, KEY)
        before, added, after = (np.asarray(s.shared.averages.b) for s in (state, alone, new))
        np.testing.assert_allclose(after, 0.8 * before + added, rtol=1e-12)
        assert float(new.shared.averages.weight) == pytest.approx(1 - 0.8**made, rel=1e-12)
        assert float(alone.shared.averages.weight) == pytest.approx(0.2, rel=1e-12)
        state = new


def test_solved_when_there_are_enough_passes_and_after_every_refresh():
    model, params, est = stream(least=2, refresh=3)
    state, moved = est.init(params), []
    for window in range(1, 10):
        before = state.shared.shaping.q0
        _, state, info = est.update(params, state, make_chunk(model, 6, seed=window), KEY)
        if not np.array_equal(before, state.shared.shaping.q0):
            moved.append(window)
        assert bool(state.shared.ready) == (window >= 2)
        assert np.all(np.asarray(info.diagnostics["carried"]) == float(window > 2))  # from the next chunk on
    assert moved == [2, 3, 6, 9]


def test_a_window_that_begins_again_forgets_the_losses_of_the_old_one():
    """Three steps twice fill it; four steps begin it again, and what lies behind them belongs to the window before."""
    model, params, est = stream(least=2, refresh=1)
    state = est.init(params)
    empty = state.shared.gathered
    for size, seed in ((3, 0), (3, 1)):
        _, state, _ = est.update(params, state, make_chunk(model, size, seed=seed), KEY)
    assert int(state.shared.windows) == 1 and int(state.shared.gathered.filled) == 0
    clean = state._replace(shared=state.shared._replace(gathered=empty))
    chunk = make_chunk(model, 4, seed=2)
    got, want = (est.update(params, begun, chunk, KEY)[1].shared for begun in (state, clean))
    assert int(got.windows) == 2
    np.testing.assert_allclose(got.averages.b, want.averages.b, rtol=1e-12)


@pytest.mark.parametrize("damping", [0.005, 0.5])
def test_a_diagonal_q0(damping):
    """q_i^-4 is b_i over the mean of its group, and the damping; the traces of Q_0 Q_0^T and its inverse are equal."""
    groups = Groups(2, np.array([0, 0, 0, 1, 1]), (5,))
    b = np.array([4.0, 0.1, 1.0, 30.0, 2.0])
    found, sound = solve_q0(groups, damping, jnp.asarray(b))
    for own in (slice(0, 3), slice(3, 5)):
        q = (b[own] / b[own].mean() + damping) ** -0.25
        q = q * (np.sum(q**-2.0) / np.sum(q**2)) ** 0.25
        np.testing.assert_allclose(found.q0[own], q, rtol=1e-12)
    np.testing.assert_allclose(found.inverse, 1 / found.q0, rtol=1e-12)
    full, _ = solve_q0(groups, damping, jnp.asarray(np.diag(b)))
    np.testing.assert_allclose(full.q0, np.diag(found.q0), atol=1e-10)
    assert sound and not solve_q0(groups, damping, jnp.asarray(b).at[3:].set(0))[1]
