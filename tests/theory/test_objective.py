"""V, total variance and covariance against enumeration over sign noise and against the paper's equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad.noise.groups import make_groups
from streamgrad.theory.covariance import dense_jacobian
from streamgrad.theory.predictions import find_prediction
from tests import tools
from tests.reference import theory as textbook

LENGTH = 3
# Cell, inputs and hidden units; all have four preactivations, so that 2^12 patterns are all there are.
SIZES = {"vanilla": (1, 4), "lstm": (1, 1), "gru": (1, 1)}


@functools.cache
def case(cell: str, reset=None, cut="preactivation"):
    n_in, n_hidden = SIZES[cell] if cut == "preactivation" else (1, {"vanilla": 4, "lstm": 2, "gru": 4}[cell])
    model = tools.make_model(cell, n_in, n_hidden)
    params = tools.make_params(model, seed=3)
    chunk = tools.make_chunk(model, LENGTH, seed=4, reset=reset)
    return model, params, chunk, jax.jit(lambda: sg.theory.collect(model, params, chunk, cut))()


def enumerated(est, params, chunk, patterns):
    grads = jnp.concatenate([textbook.flat_cell(g) for g in tools.over_patterns(est, params, chunk, patterns)])
    return textbook.moments(grads)


def blocks_q0(model, groups, seed=1):
    """A matrix that does not mix groups."""
    layout = sg.cuts.layout(model.cell, model.cell.cuts["preactivation"])
    index = np.array(make_groups(layout, "preactivation", groups).index)
    return np.where(index[:, None] == index[None, :], tools.random_q0(layout.size, seed), 0), index


def test_prediction_across_chunks():
    """It is told the α of every chunk, and the last one's has no say: noise that the last chunk adds is never seen."""
    model = tools.make_model("vanilla")
    chunk = tools.make_chunk(model, 6)
    ep = sg.theory.collect_chunks(model, tools.make_params(model), chunk, length=2)
    alpha, options = jnp.asarray(tools.random_alpha(3, 2)), {"blocks": 2}
    found = find_prediction("uoro_across", options).variance(ep, alpha, options)
    want = sg.theory.across_variance(ep, alpha[:2], 2, kurtosis=-2.0)
    np.testing.assert_allclose(found, want, rtol=1e-12)
    assert not np.isclose(want, sg.theory.across_variance(ep, alpha[1:], 2, kurtosis=-2.0))


COLLECTED = [
    ("lstm", "preactivation", (2,), 2),
    ("stack", "state", (2,), None),
    ("vanilla", "preactivation", None, None),
    ("gru", "preactivation", None, 2),
    ("stack", "preactivation", (2,), 3),
    ("lstm", "state", None, 2),
]


@pytest.mark.parametrize(("cell", "cut", "reset", "block"), tools.few(COLLECTED, COLLECTED[0]))
def test_collect_is_the_definition(cell, cut, reset, block):
    model = tools.make_model(cell, 1, 2)
    params = tools.make_params(model)
    chunk = tools.make_chunk(model, 5, reset=reset)
    ep = jax.jit(lambda: sg.theory.collect(model, params, chunk, cut, block=block))()
    b = textbook.gradients(model, params, chunk, cut)
    np.testing.assert_allclose(ep.b, b, atol=1e-12)
    jacobian = dense_jacobian(ep)
    if cell != "stack":  # there an upper layer's z depends on the lower one's θ, but its displacement does not
        np.testing.assert_allclose(jacobian, textbook.jacobians(model, params, chunk, cut), atol=1e-12)
    np.testing.assert_allclose(jnp.einsum("tsi,sip->p", ep.b, jacobian), ravel_pytree(ep.gradient.cell)[0], atol=1e-12)
    assert abs(jnp.sum(ep.loss) - jnp.sum(tools.run(sg.bptt(model), params, [chunk])[1])) < 1e-12
    assert tools.error(ep.gradient, tools.bptt(model, params, chunk)) < 1e-12
    assert np.all(np.asarray(ep.b)[np.triu_indices(5, 1)] == 0)


def both(*kind):
    return sg.theory.covariance(*kind), sg.theory.total_variance(*kind)


def check_against_enumeration(est, params, chunk, patterns, theory):
    """`theory()` gives covariance, total variance and the exact gradient."""
    mean, want = enumerated(est, params, chunk, patterns)
    covariance, total, gradient = jax.jit(theory)()
    np.testing.assert_allclose(covariance, want, atol=1e-10 * np.abs(want).max())
    assert abs(total / np.trace(want) - 1) < 1e-10
    np.testing.assert_allclose(mean, ravel_pytree(gradient.cell)[0], atol=1e-10)
    return np.trace(want)


@pytest.mark.parametrize(("groups", "reset"), tools.few([(1, None), (2, None), (4, None), (2, (2,))], (2, (2,))))
@pytest.mark.parametrize("cell", tools.few(SIZES, "gru"))
def test_enumeration_equals_theory(cell, groups, reset):
    model, params, chunk, ep = case(cell, reset)
    q0, index = blocks_q0(model, groups)
    if cell == "gru" and groups == 1:  # a full matrix would make one group of all three weight matrices
        q0 = np.array([0.5, 2.0, 1.5, 0.7])
    alpha = tools.random_alpha(LENGTH, index.max() + 1)
    est = sg.uoro(model, noise="given", rescale=jnp.asarray(alpha), groups=groups, q0=q0)
    if reset is not None:  # a given α is by position in the episode
        alpha = alpha[np.array([0, 1, 0])]

    def theory():
        return (*both(ep, alpha, q0, groups, -2.0), ep.gradient)

    check_against_enumeration(est, params, chunk, tools.all_signs(LENGTH, ep.size), theory)


@pytest.mark.parametrize("cell", tools.few(SIZES, "vanilla"))
def test_enumeration_equals_theory_for_one_full_matrix(cell):
    model, params, chunk, ep = case(cell)
    q0, alpha = tools.random_q0(ep.size), tools.random_alpha(LENGTH)
    est = sg.uoro(model, noise="given", rescale=jnp.asarray(alpha), q0=q0)

    def theory():
        return (*both(ep, alpha, q0, 1, -2.0), ep.gradient)

    total = check_against_enumeration(est, params, chunk, tools.all_signs(LENGTH, ep.size), theory)
    # the wrong way round it is not the same
    assert abs(sg.theory.total_variance(ep, alpha, q0.T, kurtosis=-2.0) / total - 1) > 1e-3


@pytest.mark.parametrize("cell", tools.few(SIZES, "lstm"))
def test_enumeration_equals_theory_at_the_state_cut(cell):
    model, params, chunk, ep = case(cell, cut="state")
    q0, alpha = tools.random_q0(ep.size), tools.random_alpha(LENGTH)
    est = sg.uoro(model, cut="state", noise="given", rescale=jnp.asarray(alpha), q0=q0)

    def theory():
        return (*both(ep, alpha, q0, 1, -2.0), ep.gradient)

    check_against_enumeration(est, params, chunk, tools.all_signs(LENGTH, ep.size), theory)


PREUORO = [("lstm", (3, 6)), ("vanilla", None), ("gru", None), ("gru", (3, 6)), ("stack", None)]


@pytest.mark.parametrize(("cell", "reset"), tools.few(PREUORO, PREUORO[0]))
def test_enumeration_equals_theory_for_preuoro(cell, reset):
    length = 8
    model = tools.make_model(cell, 1, 2)
    params = tools.make_params(model, seed=3)
    chunk = tools.make_chunk(model, length, seed=4, reset=reset)
    rows = sg.cuts.layout(model.cell, model.cell.cuts["preactivation"]).rows
    alpha = tools.random_alpha(length, len(rows))
    est = sg.preuoro(model, noise="given", rescale=jnp.asarray(alpha))
    if reset is not None:
        alpha = alpha[np.array([0, 1, 2, 0, 1, 2, 0, 1])]

    ep = jax.jit(lambda: sg.theory.collect(model, params, chunk))()
    mean, want = enumerated(est, params, chunk, tools.all_signs(length))
    covariance, total = jax.jit(lambda: both(ep, alpha, None, ep.size, -2.0))()
    np.testing.assert_allclose(mean, ravel_pytree(ep.gradient.cell)[0], atol=1e-10)
    assert abs(total / np.trace(want) - 1) < 1e-10
    # inside each row of the weights; between rows PreUORO's noise is shared, and that of N groups is not
    row = np.argmax(np.abs(np.asarray(dense_jacobian(ep))).max(axis=0), axis=0)
    inside = row[:, None] == row[None, :]
    np.testing.assert_allclose(covariance, np.where(inside, want, 0), atol=1e-10 * np.abs(want).max())


@pytest.mark.parametrize("cut", ["preactivation", "state"])
@pytest.mark.parametrize(("reset", "kurtosis"), tools.few([(None, 0.0), ((2,), 1.3)], ((2,), 1.3)))
def test_textbook_equations(cut, reset, kurtosis):
    model, params, chunk, ep = case("lstm", reset, cut)
    q0, alpha = tools.random_q0(ep.size), tools.random_alpha(LENGTH)
    b = textbook.gradients(model, params, chunk, cut)
    jac = textbook.jacobians(model, params, chunk, cut)
    want = textbook.covariance(b, jac, alpha, q0, ep.episode, kurtosis)
    covariance, total = both(ep, alpha, q0, 1, kurtosis)
    np.testing.assert_allclose(covariance, want, atol=1e-10 * np.abs(want).max())
    assert abs(total / np.trace(want) - 1) < 1e-10
    assert abs(sg.theory.v(ep, alpha, q0) / textbook.v(b, jac, alpha, q0, ep.episode) - 1) < 1e-10


GROUPS = [("lstm", 2), ("vanilla", 1), ("vanilla", 4), ("lstm", 1), ("gru", 1), ("gru", 4)]


@pytest.mark.parametrize(("cell", "groups"), tools.few(GROUPS, GROUPS[0]))
def test_v_by_definition_through_c_and_through_b(cell, groups):
    model, params, chunk, ep = case(cell)
    q0, index = blocks_q0(model, groups)
    if cell == "gru" and groups == 1:
        q0 = np.diag(np.array([0.5, 2.0, 1.5, 0.7]))
    alpha = tools.random_alpha(LENGTH, index.max() + 1)
    b = textbook.gradients(model, params, chunk, "preactivation")
    jac = textbook.jacobians(model, params, chunk, "preactivation")
    matrices = sg.theory.c_matrix(ep, np.diag(q0) if cell == "gru" and groups == 1 else q0, groups, per_group=True)
    big_b = np.asarray(sg.theory.b_matrix(ep, alpha, groups))
    by_definition = through_c = through_b = 0.0
    for g in range(index.max() + 1):
        mine = np.flatnonzero(index == g)
        block = q0[np.ix_(mine, mine)]
        by_definition += textbook.v(b[:, :, mine], jac[:, mine], alpha[:, g], block, ep.episode)
        ratio = (alpha[None, :, g] / alpha[:, None, g]) ** 2
        through_c += float(np.sum(ratio * matrices[g]))
        qq = block @ block.T
        through_b += np.trace(big_b[np.ix_(mine, mine)] @ qq) * np.trace(np.linalg.inv(qq))
    got = sg.theory.v(ep, alpha, np.diag(q0) if cell == "gru" and groups == 1 else q0, groups)
    assert abs(through_c / by_definition - 1) < 1e-10
    assert abs(through_b / by_definition - 1) < 1e-10
    assert abs(got / by_definition - 1) < 1e-10


def test_rademacher_is_never_worse_and_groups_help():
    _, _, _, ep = case("lstm")
    for groups in (1, 2, 4):
        signs = sg.theory.total_variance(ep, kurtosis=-2.0, groups=groups)
        assert signs <= sg.theory.total_variance(ep, kurtosis=0.0, groups=groups)
    assert sg.theory.v(ep, groups=4) * 4 == pytest.approx(float(sg.theory.v(ep)))


def test_batched_under_vmap_and_jit():
    model = tools.make_model("vanilla", 1, 2)
    params = tools.make_params(model)
    chunks = [tools.make_chunk(model, 3, seed) for seed in range(3)]
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chunks)

    def analyse(chunk):
        ep = sg.theory.collect(model, params, chunk)
        return sg.theory.total_variance(ep), sg.theory.b_matrix(ep), ep.b

    got = jax.jit(jax.vmap(analyse))(together)
    assert tools.error(jax.tree.map(lambda leaf: leaf[0], got), analyse(chunks[0])) < 1e-12  # compiled or not
    alone = jax.jit(analyse)
    for i, chunk in enumerate(chunks):
        assert tools.error(jax.tree.map(lambda leaf, i=i: leaf[i], got), alone(chunk)) < 1e-12


def test_errors_are_one_sentence():
    model, params, chunk, ep = case("lstm")
    with pytest.raises(ValueError, match="not 'params'"):
        sg.theory.collect(model, params, chunk, "params")
    with pytest.raises(ValueError, match="block"):
        sg.theory.collect(model, params, chunk, block=0)
    with pytest.raises(ValueError, match="alpha must have the shape"):
        sg.theory.v(ep, jnp.ones(LENGTH + 1))
    with pytest.raises(ValueError, match="alpha must be finite and positive"):
        sg.theory.v(ep, -jnp.ones(LENGTH))
    with pytest.raises(ValueError, match="q0 must have the shape"):
        sg.theory.v(ep, None, jnp.ones(3))
    with pytest.raises(ValueError, match="groups must divide"):
        sg.theory.v(ep, groups=3)
    state = sg.theory.collect(model, params, chunk, "state")
    with pytest.raises(ValueError, match="preactivation"):
        sg.theory.b_matrix(state)
    with pytest.raises(ValueError, match="preactivation"):
        sg.theory.v(state, groups=state.size)
    with pytest.raises(ValueError, match="keep=True"):
        sg.theory.covariance(sg.theory.collect(model, params, chunk, keep=False))
    with pytest.raises(ValueError, match="no features"):
        _ = state.feature_norms
