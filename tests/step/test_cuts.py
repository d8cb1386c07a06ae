"""A cut factors the transition: what a step's linearisation pushes and pulls is its Jacobian."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from tests.tools import CELL_CUTS, make_chunk, make_model, make_params


@pytest.mark.parametrize("cell, cut", CELL_CUTS)
def test_cut_factors_the_immediate_jacobian(cell, cut):
    """dh_t/dθ_t = (dh_t/dz_t) J_t, with the outer products of `pull` at preactivations."""
    model = make_model(cell, n_in=2, n_hidden=3)
    params, x = make_params(model).cell, jax.tree.map(lambda leaf: leaf[0], make_chunk(model, 1).inputs)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), model.cell.init_state())
    step = sg.cuts.linearise(model.cell.cuts[cut], params, state, x)
    size = sg.cuts.layout(model.cell, model.cell.cuts[cut]).size
    J = jax.vmap(lambda v: ravel_pytree(step.pull(v))[0])(jnp.eye(size))
    push = jax.vmap(step.push)(jnp.eye(size))
    theta, unravel = ravel_pytree(params)
    want = jax.jacobian(lambda theta: ravel_pytree(model.cell.step(unravel(theta), state, x))[0])(theta)
    np.testing.assert_allclose(push.T @ J, want, atol=1e-12)
    again = model.cell.step(params, state, x)
    np.testing.assert_allclose(ravel_pytree(step.state)[0], ravel_pytree(again)[0], rtol=1e-14)
