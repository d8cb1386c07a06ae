"""The optimal α: hard matrices, degenerate ones, scale, dtype; and α with Q_0 together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import streamgrad as sg
from tests import tools

# Matrices are padded to one of these, as every size would be compiled; zero rows and columns play no part.
PADDED = (8, 24, 64)
solve = jax.jit(jax.vmap(lambda c: sg.theory.optimal_alpha(c, max_iterations=50)))


@functools.cache
def hard_matrices() -> list[np.ndarray]:
    """1,000 positive matrices of sizes 2 to 64 whose entries span 12 orders of magnitude."""
    rng = np.random.default_rng(0)
    sizes = np.concatenate([np.arange(2, 65), rng.integers(2, 65, size=1000 - 63)])
    return [10.0 ** rng.uniform(-6, 6, size=(n, n)) for n in sizes]


@functools.cache
def solutions() -> list[sg.theory.Solution]:
    matrices = hard_matrices()
    found: dict[int, sg.theory.Solution] = {}
    for low, high in zip((1, *PADDED), PADDED, strict=False):
        mine = [i for i, c in enumerate(matrices) if low < len(c) <= high]
        together = np.stack([np.pad(matrices[i], (0, high - len(matrices[i]))) for i in mine])
        solved = solve(jnp.asarray(together))
        for row, i in enumerate(mine):
            found[i] = jax.tree.map(lambda leaf, row=row: np.asarray(leaf[row]), solved)
    return [found[i] for i in range(len(matrices))]


def imbalance(c: np.ndarray, alpha: np.ndarray) -> float:
    """The largest relative difference between a row sum and a column sum of C̄, diagonal left out."""
    bar = c * alpha[None, :] ** 2 / alpha[:, None] ** 2
    np.fill_diagonal(bar, 0)
    rows, columns = bar.sum(axis=1), bar.sum(axis=0)
    return float(np.max(np.abs(rows - columns) / np.maximum(rows, columns)))


def value(c: np.ndarray, alpha: np.ndarray) -> float:
    return float(np.sum(c * alpha[None, :] ** 2 / alpha[:, None] ** 2))


@pytest.mark.slow
def test_hard_matrices_are_balanced():
    worst = max(
        imbalance(c, np.asarray(sol.alpha)[: len(c)]) for c, sol in zip(hard_matrices(), solutions(), strict=True)
    )
    assert worst < 1e-8
    assert max(int(sol.iterations) for sol in solutions()) <= 50
    assert all(bool(sol.converged) for sol in solutions())


def test_no_worse_than_scipy():
    """SciPy may begin at our solution, from which it finds nothing better; V is convex, so that no other start could.

    To be sure of that, every tenth time it also begins where we did.
    """
    for i, (c, sol) in enumerate(zip(hard_matrices(), solutions(), strict=True)):
        off = c - np.diag(np.diag(c))
        alpha = np.asarray(sol.alpha)[: len(c)]

        def objective(zeta, off=off):
            bar = off * np.exp(zeta[None, :] - zeta[:, None])
            total = bar.sum()
            return np.log(total), (bar.sum(axis=0) - bar.sum(axis=1)) / total

        ours = value(off, alpha)
        for start in [2 * np.log(alpha), np.zeros(len(c))][: 1 if i % 10 else 2]:
            theirs = scipy.optimize.minimize(objective, start, jac=True, method="L-BFGS-B")
            assert ours <= np.exp(theirs.fun) * (1 + 1e-12)
        np.testing.assert_allclose(sol.value, ours + np.trace(c), rtol=1e-10)


def test_alpha_has_a_geometric_mean_of_one():
    for c in hard_matrices()[:12]:
        alpha = np.asarray(sg.theory.optimal_alpha(jnp.asarray(np.pad(c, (0, PADDED[1] - len(c))))).alpha)
        assert np.all(alpha > 0) and abs(np.mean(np.log(alpha))) < 1e-10


def test_gradient_is_as_documented():
    """V's gradient in ζ is (C̄^T - C̄) 1, and zero at the solution."""
    c = jnp.asarray(hard_matrices()[3])
    zeta = jnp.asarray(np.random.default_rng(1).normal(size=len(c)))

    def total(zeta):
        return jnp.sum(c * jnp.exp(zeta[None, :] - zeta[:, None]))

    bar = c * jnp.exp(zeta[None, :] - zeta[:, None])
    np.testing.assert_allclose(jax.grad(total)(zeta), (bar.T - bar).sum(axis=1), rtol=1e-10)
    assert jnp.max(jnp.abs(jax.grad(total)(2 * jnp.log(solutions()[3].alpha[: len(c)])))) < 1e-6 * total(zeta)


def test_blocks_out_of_balance_with_each_other():
    """Where Osborne's steps alone would crawl, and Newton's alone would leap."""
    rng = np.random.default_rng(2)
    c = rng.uniform(0.1, 1, size=(64, 64))
    c[:32, 32:] *= 1e-12
    d = 10.0 ** rng.uniform(-9, 9, size=64)
    for matrix in (c, c * d[:, None] / d[None, :], np.outer(d, 1 / d[::-1])):
        sol = jax.tree.map(lambda leaf: leaf[0], solve(jnp.asarray(matrix)[None]))
        assert bool(sol.converged)
        assert imbalance(matrix, np.asarray(sol.alpha)) < 1e-8


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_scale_and_diagonal_do_not_matter(scale):
    c = jnp.asarray(hard_matrices()[10][None])
    plain, scaled = solve(c), solve(c * scale + jnp.eye(c.shape[-1])[None])
    np.testing.assert_allclose(scaled.alpha, plain.alpha, rtol=1e-9)


def test_zero_rows_and_columns_have_a_finite_answer():
    rng = np.random.default_rng(3)
    c = rng.uniform(0.5, 1, size=(6, 6))
    rest = sg.theory.optimal_alpha(jnp.asarray(np.delete(np.delete(c, 2, 0), 2, 1)))
    for kind in ("row", "column", "both"):
        dead = c.copy()
        if kind != "column":
            dead[2] = 0
        if kind != "row":
            dead[:, 2] = 0
        for dtype in (jnp.float64, jnp.float32):
            sol = sg.theory.optimal_alpha(jnp.asarray(dead, dtype))
            assert bool(sol.converged)
            assert np.all(np.isfinite(sol.alpha)) and np.all(sol.alpha > 0)
            # the infimum is what the other steps have among themselves
            assert float(sol.value) == pytest.approx(float(rest.value), rel=1e-5)
    for nothing in (jnp.zeros((4, 4)), jnp.ones((1, 1))):
        sol = sg.theory.optimal_alpha(nothing)
        np.testing.assert_array_equal(sol.alpha, 1)
        assert bool(sol.converged) and float(sol.value) == float(jnp.trace(nothing))
    # nothing comes back, as where the state is cut: the infimum is 0
    triangular = sg.theory.optimal_alpha(jnp.asarray(np.triu(c, 1)))
    assert np.all(np.isfinite(triangular.alpha)) and triangular.value < 1e-4


def test_says_what_to_try():
    c = jnp.asarray(hard_matrices()[20])
    assert "converged in" in sg.theory.optimal_alpha(c).message()
    stopped = sg.theory.optimal_alpha(c, max_iterations=0)
    assert not bool(stopped.converged) and "max_iterations" in stopped.message()
    broken = sg.theory.optimal_alpha(c.at[0, 1].set(jnp.nan))
    assert not bool(broken.converged) and "NaN" in broken.message()
    with pytest.raises(ValueError, match="square"):
        sg.theory.optimal_alpha(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="negative"):
        sg.theory.optimal_alpha(-jnp.ones((2, 2)))


def rows_of_strokes(length: int = 28) -> np.ndarray:
    """Images of smooth bright strokes, row by row, as digits are."""
    rng = np.random.default_rng(5)
    middle = 14 + np.cumsum(rng.normal(size=(3, length)), axis=1)
    pixels = np.exp(-((np.arange(28)[None, None] - middle[:, :, None]) ** 2) / 4)
    pixels[:, :3] = pixels[:, -3:] = 0
    return pixels


@pytest.mark.slow
def test_float32_is_as_good_on_episodes():
    """T=28, an LSTM that reads images row by row: V within 0.1% of float64."""
    model = sg.Model(sg.cells.lstm(28, 12), sg.heads.softmax(10))
    images = rows_of_strokes()

    @functools.partial(jax.jit, static_argnums=1)
    def alphas(images, dtype):
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), model.init(jax.random.key(0)))

        def one(image):
            chunk = sg.Chunk(image.astype(dtype), jnp.full(28, 3))
            ep = sg.theory.collect(model, params, chunk)
            q0 = sg.theory.optimal_q0(sg.theory.b_matrix(ep))
            both = jnp.stack([sg.theory.c_matrix(ep), sg.theory.c_matrix(ep, q0)])
            return both, jax.vmap(sg.theory.optimal_alpha)(both)

        return jax.vmap(one)(images)

    c, exact = alphas(images, jnp.float64)
    _, rough = alphas(images, jnp.float32)
    assert np.all(exact.converged) and np.all(rough.converged)
    for i in np.ndindex(c.shape[:2]):
        best = value(np.asarray(c[i]), np.asarray(exact.alpha[i]))
        assert value(np.asarray(c[i]), np.asarray(rough.alpha[i], float)) <= best * 1.001
        assert abs(rough.value[i] / best - 1) < 1e-3


@pytest.mark.parametrize(("cell", "groups"), tools.few([("vanilla", 1), ("lstm", 2), ("gru", 4)], ("lstm", 2)))
def test_alternation_never_increases_v(cell, groups, damping=0.3):
    model = tools.make_model(cell, 1, 4)
    params = tools.make_params(model)
    chunk = tools.make_chunk(model, 12)

    @jax.jit
    def everything():
        ep = sg.theory.collect(model, params, chunk)
        best = sg.theory.optimise(ep, groups, rounds=4, damping=damping)
        return best, sg.theory.v(ep, groups=groups), sg.theory.v(ep, best.alpha, best.q0, groups)

    best, start, end = everything()
    history = np.asarray(best.history)
    assert np.all(np.diff(history) <= 1e-12 * history[0])
    np.testing.assert_allclose([history[0], history[-1]], [start, end], rtol=1e-9)
    assert history[-1] < 0.9 * history[0]
    sg.uoro(model, rescale=best.alpha, q0=np.asarray(best.q0), groups=groups)  # it takes them as they are


def test_joint_needs_the_matrices_apart():
    model = tools.make_model("gru", 1, 1)
    ep = sg.theory.collect(model, tools.make_params(model), tools.make_chunk(model, 2))
    with pytest.raises(ValueError, match="at least 2 groups"):
        sg.theory.optimise(ep)
