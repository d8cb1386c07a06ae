"""Unbiased is proved, not sampled: the mean over sign patterns is the gradient of BPTT.

Where coefficients depend on the noise (GIR) every pattern is enumerated; where they do not, the estimate is a quadratic
form of the noise, whose mean over the rows of a Hadamard matrix is that over all patterns.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from streamgrad.base import CUT_NAMES
from tests.tools import (
    all_signs,
    bptt,
    cut_size,
    error,
    few,
    make_chunk,
    make_model,
    make_params,
    mean_over,
    orthogonal_signs,
    over_patterns,
    random_alpha,
    random_q0,
)

TOLERANCE = 1e-10
CELL_CUTS = [(cell, cut) for cell in ("vanilla", "lstm", "gru") for cut in CUT_NAMES]


def assert_unbiased(est, model, chunk, patterns):
    params = make_params(model)
    assert error(mean_over(est, params, chunk, patterns), bptt(model, params, chunk)) < TOLERANCE


IMMEDIATE = ("estimated", "exact")
GIR = list(itertools.product(("state", "params", "preactivation"), (False, True), IMMEDIATE))


@pytest.mark.parametrize("cut, shaped, immediate", few(GIR, ("state", True, "exact")))
def test_uoro_gir(cut, shaped, immediate):
    """All patterns, GIR, every cut; one unit for the parameters' cut, whose size is theirs."""
    model = make_model("vanilla", n_hidden=1 if cut == "params" else 2)
    n = cut_size(model, cut)
    chunk = make_chunk(model, 4 if n == 3 else 5, reset=(3,))
    q0 = random_q0(n) if shaped else None
    est = sg.uoro(model, cut=cut, noise="given", rescale="gir", q0=q0, immediate=immediate)
    assert_unbiased(est, model, chunk, all_signs(len(chunk.targets), n))


# Every cell and cut, one way or the other; both, and without rescaling, at one of them.
GIVEN = [(*pair, "alpha", IMMEDIATE[i % 2]) for i, pair in enumerate(CELL_CUTS)]
GIVEN += [("lstm", "preactivation", *how) for how in itertools.product(("none", "alpha"), IMMEDIATE)]
GIVEN = list(dict.fromkeys(GIVEN))


@pytest.mark.parametrize("cell, cut, rescale, immediate", few(GIVEN, GIVEN[5]))
def test_uoro_given(cell, cut, rescale, immediate):
    """Rescaling that does not see the noise, with a random Q_0 that is not symmetric."""
    model = make_model(cell)
    n, chunk = cut_size(model, cut), make_chunk(model, 4)
    rescale = jnp.asarray(random_alpha(4)) if rescale == "alpha" else rescale
    est = sg.uoro(model, cut=cut, noise="given", rescale=rescale, q0=random_q0(n), immediate=immediate)
    assert_unbiased(est, model, chunk, orthogonal_signs(4, n))


def test_the_few_patterns_have_the_mean_of_all():
    model = make_model("vanilla")
    params, chunk = make_params(model), make_chunk(model, 4)
    est = sg.uoro(model, noise="given", rescale=random_alpha(4), q0=random_q0(2))
    mean = mean_over(est, params, chunk, orthogonal_signs(4, 2))
    assert error(mean_over(est, params, chunk, all_signs(4, 2)), mean) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_gated_cells_gir(cell, groups):
    """Two units, 65,536 patterns."""
    model = make_model(cell)
    est = sg.uoro(model, noise="given", rescale="gir", groups=groups)
    assert_unbiased(est, model, make_chunk(model, 2), all_signs(2, 8))


@pytest.mark.parametrize("groups", few([1, 2, 4], 2))
@pytest.mark.parametrize("immediate", few(IMMEDIATE, "estimated"))
def test_groups_gir(groups, immediate):
    model = make_model("vanilla", n_hidden=4)
    q0 = np.kron(np.eye(groups), random_q0(4 // groups)) if groups < 4 else np.array([1.0, 2.0, -0.5, 3.0])
    est = sg.uoro(model, noise="given", rescale="gir", groups=groups, q0=q0, immediate=immediate)
    assert_unbiased(est, model, make_chunk(model, 3), all_signs(3, 4))


@pytest.mark.slow
def test_stacked_layers_gir():
    """Each layer is a group of its own, and the lower one acts through the upper one's weights."""
    cell = sg.cells.stack(sg.cells.vanilla(1, 2), sg.cells.vanilla(2, 2))
    model = sg.Model(cell, sg.heads.squared_error(2))
    assert_unbiased(sg.uoro(model, noise="given"), model, make_chunk(model, 3), all_signs(3, 4))


PREUORO = [(cell, "gir", immediate) for cell in ("vanilla", "lstm", "gru", "stack") for immediate in IMMEDIATE]
PREUORO += [("vanilla", "none", "exact"), ("lstm", "alpha", "estimated"), ("gru", "none", "estimated")]
PREUORO += [("stack", "alpha", "exact")]


@pytest.mark.parametrize("cell, rescale, immediate", few(PREUORO, ("lstm", "gir", "estimated")))
def test_preuoro(cell, rescale, immediate):
    model = make_model(cell)
    rescale = jnp.asarray(random_alpha(8)) if rescale == "alpha" else rescale
    est = sg.preuoro(model, noise="given", rescale=rescale, immediate=immediate)
    assert_unbiased(est, model, make_chunk(model, 8, reset=(5,)), all_signs(8))


SPATIAL = [(*pair, False) for pair in CELL_CUTS]
SPATIAL += [("vanilla", "state", True), ("lstm", "params", True), ("gru", "preactivation", True)]


@pytest.mark.parametrize("cell, cut, shaped", few(SPATIAL, ("gru", "preactivation", True)))
def test_spatial_rtrl(cell, cut, shaped):
    model = make_model(cell)
    n = cut_size(model, cut)
    est = sg.spatial_rtrl(model, cut=cut, noise="given", q0=random_q0(n) if shaped else None)
    assert_unbiased(est, model, make_chunk(model, 4, reset=(2,)), orthogonal_signs(4, n))


def test_nested_pytrees():
    model = make_model("nested")
    for cut in ("state", "params"):
        n = cut_size(model, cut)
        est = sg.uoro(model, cut=cut, noise="given", rescale="none")
        assert_unbiased(est, model, make_chunk(model, 4, reset=(2,)), orthogonal_signs(4, n))


def test_unbiased_where_units_are_saturated():
    """A unit that has no derivative drops out of GIR's balance without moving the mean."""
    model = make_model("vanilla")
    params, chunk = make_params(model), make_chunk(model, 4)
    w = params.cell["w"].at[0, -1].set(800.0)  # tanh' is exactly zero there
    params = params._replace(cell={"w": w})
    for cut in ("preactivation", "state"):
        mean = mean_over(sg.uoro(model, cut=cut, noise="given"), params, chunk, all_signs(4, 2))
        assert error(mean, bptt(model, params, chunk)) < TOLERANCE


def test_the_variance_falls_with_the_number_of_groups():
    model = make_model("vanilla", n_hidden=4)
    params, chunk = make_params(model), make_chunk(model, 3)
    want = bptt(model, params, chunk).cell["w"]
    variances = []
    for groups in (1, 2, 4):
        est = sg.uoro(model, noise="given", rescale="none", groups=groups)
        each = jnp.concatenate([g.cell["w"] for g in over_patterns(est, params, chunk, all_signs(3, 4))])
        variances.append(float(jnp.mean(jnp.sum((each - want[None]) ** 2, axis=(1, 2)))))
    assert variances[0] > 1.5 * variances[1] > 1.5 * variances[2] > 0
