"""`sketch` is the recursion that was published, between SnAp-1 and RTRL, and its certificate is true."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from tests.reference import estimators as oracle
from tests.reference.unrolled import jacobians
from tests.tools import bptt, error, few, made, make_chunk, make_model, make_params, one_sentence, split

T, RESET = 9, 5
# Cell, hidden units, and the units that a row of weights reaches in one step.
CELLS = {"vanilla": (5, 1), "gru": (4, 1), "lstm": (3, 2)}
slow = pytest.mark.slow


def problem(cell, reset=(RESET,), length=T, seed=0):
    model = make_model(cell, n_in=2, n_hidden=CELLS[cell][0])
    return model, make_params(model, seed), make_chunk(model, length, seed, reset=reset)


def run(est, params, chunks):
    """The summed gradient of the cell, the diagnostics of all steps, and the last state."""
    state, total, diagnostics = est.init(params), None, []
    for chunk in chunks:
        grads, state, info = est.update(params, state, chunk, None)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        diagnostics.append(info.diagnostics)
    return total, {name: np.concatenate([d[name] for d in diagnostics]) for name in diagnostics[0]}, state


def state_size(model):
    return sg.cuts.layout(model.cell, model.cell.cuts["preactivation"]).state_size


def dense(model, memory, reached):
    """S + L R as a matrix; `reached` is the pattern of dh_t/dz_t."""
    blocks, start = [], 0
    for near, right in zip(jax.tree.leaves(memory.near), jax.tree.leaves(memory.right), strict=True):
        block = np.einsum("sr,rna->sna", memory.left, right)
        for row in range(block.shape[1]):
            units = np.flatnonzero(reached[:, start + row])
            block[units, row] += near[: len(units), row]
            np.testing.assert_array_equal(near[len(units) :, row], 0)
        blocks.append(block.reshape(len(block), -1))
        start += block.shape[1]
    return np.concatenate(blocks, axis=1)


@pytest.mark.parametrize(
    "cell, rank, append",
    [
        ("lstm", 3, 2),
        *(pytest.param("vanilla", *how, marks=slow) for how in ((2, None), (0, None), (3, 1))),
        *(pytest.param("gru", *how, marks=slow) for how in ((1, None), (1, 1), (3, None))),
        *(pytest.param("lstm", *how, marks=slow) for how in ((2, None), (0, 1), (1, 1))),
    ],
)
def test_textbook(cell, rank, append):
    """Gradient, M, what is left out, and the certificate; with a reset, in any chunks."""
    model, params, chunk = problem(cell)
    steps = jacobians(model, params, chunk, "preactivation")
    want = oracle.sketch(model, params, chunk, rank, append)
    textbook = oracle.sketched(steps, rank, append)
    reached = sum(np.abs(s["push"]) for s in steps) > 0
    est = made(sg.sketch, model, rank=rank, append=append)
    for sizes in ((T,), (1, T - 1), (4, 5)):
        grads, diagnostics, state = run(est, params, split(chunk, sizes))
        assert error(grads.cell, want) < 1e-10
        near, rest, *_ = textbook[-1]
        np.testing.assert_allclose(dense(model, state.memory, reached), near + rest, rtol=0, atol=1e-10)
        # Singular values near zero are known to the root of rounding.
        np.testing.assert_allclose(diagnostics["certificate"], [e for *_, e, _, _ in textbook], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(diagnostics["discarded"], [lost for *_, lost, _ in textbook], rtol=1e-5, atol=1e-6)
    assert all(len(leaf) == CELLS[cell][1] for leaf in jax.tree.leaves(state.memory.near))


@pytest.mark.parametrize("cell", few(CELLS, "lstm"))
def test_with_a_term_for_each_unit_it_is_exact(cell):
    model, params, chunk = problem(cell)
    est = made(sg.sketch, model, rank=state_size(model), append=1)  # nothing is left out of what is new, either
    grads, diagnostics, _ = run(est, params, split(chunk, (4, 5)))
    assert error(grads, bptt(model, params, chunk)) < 1e-10
    assert np.all(diagnostics["certificate"] < 1e-4)


@pytest.mark.parametrize("rank, append", few([(1, None), (3, None), (3, 1), (0, None)], (3, 1)))
@pytest.mark.parametrize("cell", few(CELLS, "gru"))
def test_the_certificate_bounds_the_error(cell, rank, append):
    """‖M - S - L R‖ of every step, on several streams; close to it when something is first left out."""
    for seed in range(3):
        model, params, chunk = problem(cell, reset=(8,), length=12, seed=seed)
        steps = jacobians(model, params, chunk, "preactivation")
        exact = [M for *_, M in oracle.sketched(steps, 0)]
        reached = sum(np.abs(s["push"]) for s in steps) > 0
        est = made(sg.sketch, model, rank=rank, append=append)
        state, ratios = est.init(params), []
        for part, M in zip(split(chunk, (1,) * 12), exact, strict=True):
            _, state, info = est.update(params, state, part, None)
            off = np.linalg.norm(M - dense(model, state.memory, reached))
            assert off <= info.diagnostics["certificate"][0] + 1e-13  # rounding of the steps themselves
            assert info.diagnostics["certificate"][0] == state.memory.bound
            ratios.append(info.diagnostics["certificate"][0] / off if off > 1e-3 else 1.0)
        assert ratios[1] < 1.5


@pytest.mark.parametrize("cell", few(["lstm", "vanilla"], "vanilla"))
def test_the_certificate_is_true_in_float32(cell):
    """Rounding is allowed for, also where nothing else is left out."""
    model, params, chunk = problem(cell, length=30)
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    steps = jacobians(model, jax.tree.map(lambda leaf: leaf.astype(jnp.float64), single), chunk, "preactivation")
    reached = sum(np.abs(s["push"]) for s in steps) > 0
    M = oracle.sketched(steps, 0)[-1][-1]
    rounded = chunk._replace(inputs=chunk.inputs.astype(jnp.float32), targets=chunk.targets.astype(jnp.float32))
    for rank in (1, state_size(model)):
        est = made(sg.sketch, model, rank=rank)
        _, state, info = est.update(single, est.init(single), rounded, None)
        off = np.linalg.norm(M - dense(model, jax.tree.map(np.float64, state.memory), reached))
        assert 0 < off <= info.diagnostics["certificate"][-1]


def test_a_bound_that_overflows_stays_a_number():
    """A chain of units: what is left out is gone after a few steps, and the bound does not know. A reset ends it."""
    model, params, _ = problem("vanilla")
    chain = np.zeros((5, 8), np.float32)  # at the zero state, with zero inputs and biases: A is the chain itself
    chain[np.arange(1, 5), np.arange(4)] = 100
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)._replace(cell={"w": jnp.asarray(chain)})
    reset = jnp.arange(40) == 30
    chunk = sg.Chunk(jnp.zeros((40, 2), jnp.float32), jnp.zeros((40, 2), jnp.float32), reset)
    grads, diagnostics, state = run(made(sg.sketch, model, rank=1), params, [chunk])
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((grads, diagnostics, state)))
    assert diagnostics["certificate"][29] == np.finfo(np.float32).max and diagnostics["certificate"][30] < 1


@pytest.mark.slow
def test_more_rank_less_error():
    """On the way from SnAp-1 to RTRL; and adding what is new as a whole is better than in part."""
    model, params, chunk = problem("vanilla", reset=None, length=20)
    want = ravel_pytree(bptt(model, params, chunk).cell)[0]

    def off(rank, append=None):
        grads, _, _ = run(made(sg.sketch, model, rank=rank, append=append), params, [chunk])
        return float(np.linalg.norm(ravel_pytree(grads.cell)[0] - want) / np.linalg.norm(want))

    errors = [off(rank) for rank in range(6)]
    assert errors[5] < 1e-10 and errors[4] < errors[2] / 2 < errors[0] / 2 and errors[0] > 0.1
    assert off(4, append=1) > 2 * errors[4]


def unknown_cell():
    """A cell that does not say what its input is."""
    plain = sg.cells.vanilla(1, 2)

    def step(affine, state, x):
        return jnp.tanh(affine("w", sg.cells.features(state, x)))

    return sg.cells.affine(step, plain.init_params, plain.init_state)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: sg.sketch(make_model("vanilla"), rank=3), "rank must be at most 2, the number of state units"),
        (lambda: sg.sketch(make_model("vanilla"), rank=-1), "rank must be a whole number of at least 0"),
        (lambda: sg.sketch(make_model("vanilla"), append=0), "append must be a whole number of at least 1"),
        (lambda: sg.sketch(make_model("nested")), "has no cut 'preactivation'"),
        (lambda: sg.sketch(sg.Model(unknown_cell(), sg.heads.squared_error(2))), "must know which units"),
    ],
)
def test_what_it_refuses(make, words, as_a_user):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert one_sentence(error)
