"""A cut factors the transition: what a step's linearisation pushes and pulls is its Jacobian."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from tests.tools import CELL_CUTS, few, make_chunk, make_model, make_params

QUICK = [("lstm", "state"), ("nested", "params"), ("gru", "preactivation")]


@pytest.mark.parametrize("cell, cut", few(CELL_CUTS, *QUICK))
def test_cut_factors_the_immediate_jacobian(cell, cut):
    """dh_t/dθ_t = (dh_t/dz_t) J_t, with the outer products of `pull` at preactivations."""
    model = make_model(cell, n_in=2, n_hidden=3)
    params, x = make_params(model).cell, jax.tree.map(lambda leaf: leaf[0], make_chunk(model, 1).inputs)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), model.cell.init_state())
    size = sg.cuts.layout(model.cell, model.cell.cuts[cut]).size

    @jax.jit
    def factors(params, state):
        step = sg.cuts.linearise(model.cell.cuts[cut], params, state, x)
        J = jax.vmap(lambda v: ravel_pytree(step.pull(v))[0])(jnp.eye(size))
        return J, jax.vmap(step.push)(jnp.eye(size)), ravel_pytree(step.state)[0]

    @jax.jit
    def by_jax(params, state):
        theta, unravel = ravel_pytree(params)

        def step(theta):
            return ravel_pytree(model.cell.step(unravel(theta), state, x))[0]

        return jax.jacobian(step)(theta), step(theta)

    (J, push, new), (want, again) = factors(params, state), by_jax(params, state)
    np.testing.assert_allclose(push.T @ J, want, atol=1e-12)
    np.testing.assert_allclose(new, again, rtol=1e-14)
