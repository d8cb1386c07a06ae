"""Which derivatives can be non-zero: never too few entries, and for known operations no more than there are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad.step.influence_sparsity import JacobianPattern, find_influence_pattern
from streamgrad.step.jacobian_sparsity import feature_pattern, find_jacobian_pattern
from tests.tools import bptt, error, few, make_chunk, make_params, run, split

MASK = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]], float)


def masked(*masks):
    """Weights of which some are always zero."""

    def step(p, h, x):
        w = p["w"]
        for mask in masks:
            w = mask * w
        return jnp.tanh(w @ h + p["v"] @ x)

    return sg.cells.from_function(
        step,
        lambda key: {"w": jax.random.normal(key, (4, 4)), "v": jax.random.normal(key, (4, 2))},
        lambda: jnp.zeros(4),
        example_input=jnp.zeros(2),
    )


def columns():
    """Three networks beside each other that never meet, of four units each."""

    def step(p, h, x):
        return jnp.tanh(jnp.stack([p[f"w{i}"] @ h[i] for i in range(3)]) + (p["v"] @ x).reshape(3, 4))

    def init(key):
        return {f"w{i}": jax.random.normal(key, (4, 4)) for i in range(3)} | {"v": jax.random.normal(key, (12, 2))}

    return sg.cells.from_function(step, init, lambda: jnp.zeros((3, 4)), example_input=jnp.zeros(2))


def odd():
    """Operations that nothing is known of: a sort, a running sum, a scan, a branch on the state."""

    def step(p, h, x):
        a, b, c = jnp.split(h, 3)
        b = jnp.cumsum(jnp.sort(b)) * p["s"]
        c = jax.lax.scan(lambda carry, v: (carry + v, carry * v), x[0], c)[1]
        a = jnp.where(h[0] > 0, a * p["s"], jnp.flip(a))
        return jnp.tanh(jnp.concatenate([a, b, c]) + p["w"] @ x)

    return sg.cells.from_function(
        step,
        lambda key: {"s": jnp.ones(2), "w": jax.random.normal(key, (6, 2))},
        lambda: jnp.zeros(6),
        example_input=jnp.zeros(2),
    )


def padded():
    """What is padded with moves as well."""

    def step(p, h, x):
        return jnp.tanh(p["s"] * jax.lax.pad(h[2:], h[0], [(2, 0, 0)]) + p["w"] @ x)

    return sg.cells.from_function(
        step,
        lambda key: {"s": jnp.ones(5), "w": jax.random.normal(key, (5, 2))},
        lambda: jnp.zeros(5),
        example_input=jnp.zeros(2),
    )


CELLS = {
    "padded": padded(),
    "vanilla": sg.cells.vanilla(2, 3),
    "lstm": sg.cells.lstm(2, 3),
    "gru": sg.cells.gru(2, 3),
    "lru": sg.cells.lru(2, 3, n_out=2),
    "rtu": sg.cells.rtu(2, 3, activation="tanh"),
    "elstm": sg.cells.elstm(2, 3),
    "mingru": sg.cells.mingru(2, 3),
    "adaptive lif": sg.cells.lif(2, 3, beta=0.5),
    "stack": sg.cells.stack(sg.cells.lru(2, 2, n_out=2), sg.cells.gru(2, 2)),
    "masked": masked(MASK),
    "masked twice": masked(MASK, MASK * MASK[::-1], jnp.asarray(np.tri(4))),
    "columns": columns(),
    "odd": odd(),
}
MODELS = {name: sg.Model(cell, sg.heads.squared_error(2)) for name, cell in CELLS.items()}


def somewhere(model):
    """Where dh/dh and dh/dz are non-zero at some of many points."""
    cell, cut = model.cell, model.cell.cuts["preactivation"]
    _, unravel = ravel_pytree(cell.init_state())

    @jax.jit
    def at(params, h, x):
        dz, unravel_z = ravel_pytree(jax.tree.map(jnp.zeros_like, cut.into(params, unravel(h), x)))

        def step(h, dz):
            return ravel_pytree(cut.inject(params, unravel(h), x, unravel_z(dz)))[0]

        return jax.jacobian(step, (0, 1))(h, dz)

    found = [False, False]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        params = model.enter(make_params(model, seed)).cell
        h = jnp.asarray(rng.normal(size=ravel_pytree(cell.init_state())[0].size))
        here = at(params, h, jnp.asarray(rng.normal(size=2)))
        found = [old | (np.abs(new) > 1e-12) for old, new in zip(found, here, strict=True)]
    return found


@pytest.mark.parametrize("name", few(CELLS, "gru", "masked", "masked twice", "columns"))
def test_pattern_is_where_derivatives_are(name):
    pattern = find_jacobian_pattern(MODELS[name])
    state, cut = somewhere(MODELS[name])
    assert not np.any(state & ~pattern.state) and not np.any(cut & ~pattern.cut)
    if name != "odd":
        np.testing.assert_array_equal(pattern.state, state)
        np.testing.assert_array_equal(pattern.cut, cut)


@pytest.mark.parametrize("name", few(["masked", "columns", "odd", "stack", "padded"], "columns"))
def test_rtrl_in_that_shape_is_exact(name):
    model = MODELS[name]
    params, chunk = make_params(model), make_chunk(model, 9, reset=(4,))
    est = sg.rtrl(model)
    got = run(est, params, split(chunk, (3, 3, 3)))[0]
    assert error(got, bptt(model, params, chunk)) < 1e-10
    if name == "columns":
        assert {leaf.shape[0] for leaf in jax.tree.leaves(est.init(params).memory)} == {4}


def test_what_is_not_read_has_no_influence():
    """The read-out of an LRU is in its state, but no later step depends on it."""
    model = MODELS["lru"]
    shapes = [leaf.shape for leaf in jax.tree.leaves(sg.rtrl(model).init(make_params(model)).memory)]
    weights = [leaf.shape for leaf in jax.tree.leaves(model.enter(make_params(model)).cell)]
    assert sorted(shape[0] for shape in shapes) == [0, 2, 2]
    assert sorted(shape[1:] for shape in shapes) == sorted(weights)


def test_features_of_another_preactivation_are_no_features_of_the_state():
    assert feature_pattern(MODELS["stack"]) is None
    (found,) = feature_pattern(MODELS["lstm"])
    np.testing.assert_array_equal(found, np.eye(6, dtype=bool)[:, :6] & (np.arange(6) < 3)[:, None])


def test_what_cannot_be_known():
    unknown = sg.cells.affine(
        lambda affine, h, x: jnp.tanh(affine("w", h, x, 1)),
        lambda key: {"w": sg.cells.init_weights(key, 3, 3, 2)},
        lambda: jnp.zeros(3),
    )
    model = sg.Model(unknown, sg.heads.squared_error(2))
    assert find_jacobian_pattern(model) is None
    with pytest.raises(ValueError, match="example_input"):
        sg.snap(model)


def test_reach_of_a_chain():
    """Each unit hears the one before it: a row reaches all that come after, and no two have the same."""
    chain = JacobianPattern(np.eye(5, k=-1, dtype=bool), np.eye(5, dtype=bool))
    reach = find_influence_pattern(chain, [5])
    reached = np.zeros((5, 5), bool)
    leaf = reach.leaves[0]
    for place, units in enumerate([*leaf.own, *(np.full(5, unit) for unit in leaf.shared)]):
        for row, unit in enumerate(units):
            if leaf.reached[place, row]:
                reached[unit, row] = True
    # The last unit is read by none.
    np.testing.assert_array_equal(reached, np.tril(np.ones((5, 5), bool)) & (np.arange(5) < 4)[:, None])
