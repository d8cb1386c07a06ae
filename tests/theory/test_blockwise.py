"""C, B, V and the total variance are the same whether b is kept or not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from streamgrad.noise.groups import make_groups
from tests import tools
from tests.reference import unrolled

LENGTH = 7


CASES = [
    ("lstm", 2, (3,), 2),
    ("vanilla", 1, None, 3),
    ("gru", 4, None, 7),
    ("gru", 2, (2, 5), 3),
    ("lstm", 1, None, 32),
]


@pytest.mark.parametrize(("cell", "groups", "reset", "block"), tools.few(CASES, CASES[0]))
def test_equals_the_episode(cell, groups, reset, block):
    model = tools.make_model(cell, 1, 2)
    params = tools.make_params(model)
    chunk = tools.make_chunk(model, LENGTH, reset=reset)
    index = make_groups(sg.cuts.layout(model.cell, model.cell.cuts["preactivation"]), "preactivation", groups).index
    q0 = np.where(index[:, None] == index[None, :], tools.random_q0(len(index)), 0)
    alpha = tools.random_alpha(LENGTH, index.max() + 1)

    @functools.partial(jax.jit, static_argnums=0)
    def everything(keep):
        ep = sg.theory.collect(model, params, chunk, block=block, keep=keep)
        return (
            sg.theory.c_matrix(ep, q0, groups),
            sg.theory.c_matrix(ep, q0, groups, per_group=True),
            sg.theory.b_matrix(ep, alpha, groups),
            sg.theory.v(ep, alpha, q0, groups),
            sg.theory.total_variance(ep, alpha, q0, groups, -2.0),
        )

    for want, got in zip(everything(True), everything(False), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12 * np.abs(want).max())


def test_one_reverse_pass_on_the_truncated_loss_is_g():
    """g_{q,r} = d(Σ_{t>=q} L_t)/dz_r: what `future` says, from automatic differentiation alone."""
    model = tools.make_model("lstm", 1, 1)
    params = tools.make_params(model)
    chunk = tools.make_chunk(model, 4)
    ep = jax.jit(lambda: sg.theory.collect(model, params, chunk))()

    def truncated(dz, q):
        return jnp.sum(jnp.where(jnp.arange(4) >= q, unrolled.losses(model, params, chunk, "preactivation", dz), 0))

    grad = jax.jit(jax.grad(truncated))
    for q in range(4):
        np.testing.assert_allclose(ep.future[q], grad(jnp.zeros((4, ep.size)), q), atol=1e-13)


def test_memory_does_not_grow_with_the_square_of_time():
    """What the compiler sets aside for B at 4 times the length is nowhere near 16 times as much."""
    model = sg.Model(sg.cells.vanilla(1, 8), sg.heads.squared_error(2))
    params = tools.make_params(model)

    def b_matrix(chunk):
        return sg.theory.b_matrix(sg.theory.collect(model, params, chunk, block=8, keep=False))

    def bytes_for(length):
        chunk = sg.Chunk(jnp.zeros((length, 1)), jnp.zeros((length, 2)))
        compiled = jax.jit(b_matrix).lower(chunk).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    # one mask of T² bytes is allowed, T² N numbers are not
    assert bytes_for(256) < 256 * 256 * 8 * 4


def test_an_episode_without_b_is_a_pytree():
    """It may be passed to a compiled function and mapped over; and noise at the state needs no b either."""
    model = tools.make_model("lstm", 1, 2)
    params = tools.make_params(model)
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[tools.make_chunk(model, 5, seed) for seed in range(2)])

    def collect(keep):
        return jax.jit(jax.vmap(lambda chunk: sg.theory.collect(model, params, chunk, "state", 2, keep)))(together)

    total = jax.jit(jax.vmap(lambda ep: sg.theory.total_variance(ep, kurtosis=-2.0)))
    np.testing.assert_allclose(total(collect(False)), total(collect(True)), rtol=1e-10)
