"""The comparison sees bias where there is one, and agrees with the theory where there is none."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad.cli.main import main
from streamgrad.compare import Candidate, candidates_for, compare
from tests import tools


@pytest.mark.parametrize("cell, cut, shaped", [("vanilla", "preactivation", True), ("gru", "preactivation", False),
                                               ("vanilla", "state", False)])  # fmt: skip
def test_variance_of_spatial_rtrl_by_enumeration(cell, cut, shaped):
    model = tools.make_model(cell, n_hidden=1 if cell == "gru" else 2)
    params, length = tools.make_params(model), 3
    chunk, n = tools.make_chunk(model, length, reset=(2,)), tools.cut_size(model, cut)
    q0 = tools.random_q0(n) if shaped else None
    est = sg.spatial_rtrl(model, cut=cut, noise="given", q0=q0)
    patterns = tools.all_signs(length, n)
    (grads,) = tools.over_patterns(est, params, chunk, patterns)
    flat = np.concatenate([np.asarray(leaf).reshape(len(patterns), -1) for leaf in jax.tree.leaves(grads.cell)], axis=1)
    ep = sg.variance.collect(model, params, chunk, cut)
    got = sg.variance.spatial_total_variance(ep, q0, kurtosis=-2.0)
    np.testing.assert_allclose(got, flat.var(axis=0).sum(), rtol=1e-10)


@pytest.fixture(scope="module")
def rows():
    """A network, and every estimator of it once; besides, one that is wrong by a half."""
    model = tools.make_model("vanilla", 1, 4)
    params, chunk = tools.make_params(model, seed=2), tools.make_chunk(model, 6, seed=2)
    pre = sg.preuoro(model)

    def wrong(params, state, chunk, key):
        grads, state, info = pre.update(params, state, chunk, key)
        return jax.tree.map(lambda leaf: 1.5 * leaf, grads), state, info

    off = Candidate("wrong", "unbiased", sg.GradientEstimator(pre.init, wrong))
    everything = [*candidates_for(model, params, chunk), off]
    found = compare(model, params, chunk, jax.random.key(3), 2048, 8, repeats=2, candidates=everything)
    return {row.name: row for row in found}, (model, params, chunk)


def test_verdicts(rows):
    found, _ = rows
    assert found["bptt"].verdict == found["rtrl"].verdict == "exact"
    assert found["tbptt"].verdict == found["wrong"].verdict == "biased"
    for name, row in found.items():
        if row.promise == "unbiased" and name != "wrong":
            assert row.verdict == "none seen" and row.bias > 0, name


def test_measured_is_what_the_theory_predicts(rows):
    """A sample of fixed seed; four standard errors are left by one correct row in 16,000, if the error were normal."""
    found, _ = rows
    exact = [row for row in found.values() if row.predicted and not row.predicted_is_bound]
    assert {row.name for row in exact} == {"spatial_rtrl", "uoro optimal alpha", "uoro optimal alpha, Q_0"}
    for row in exact:
        assert abs(row.variance - row.predicted) < 4 * row.variance_error, row
        assert row.variance_error < 0.1 * row.variance
    assert found["uoro optimal alpha, Q_0"].variance < found["uoro optimal alpha"].variance
    bounds = [row for row in found.values() if row.predicted_is_bound]
    assert {row.name for row in bounds} == {"uoro", "uoro cut=state", "preuoro"}
    for row in bounds:
        assert row.predicted > row.variance - 4 * row.variance_error, row
        assert row.predicted < 2 * row.variance


def test_batches_of_streams_measure_what_single_ones_do(rows):
    found, (model, params, chunk) = rows
    got = sg.variance.empirical(sg.uoro(model), params, chunk, jax.random.key(8), 4000, block=1000)
    norm = jnp.sum(ravel_pytree(tools.bptt(model, params, chunk).cell)[0] ** 2)
    error = found["uoro"].variance_error + float(got.total_variance_error / norm)
    assert abs(found["uoro"].variance - float(got.total_variance / norm)) < 4 * error


def test_costs(rows):
    found, (model, params, _) = rows
    assert all(row.us_per_step > 0 for row in found.values())
    state = sg.rtrl(model).init(params)
    assert found["rtrl"].state_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_command(tmp_path, capsys):
    table = tmp_path / "table.csv"
    command = ["compare", "--cell", "vanilla", "--hidden", "2", "--length", "3", "--updates", "2", "--samples", "16"]
    assert main([*command, "--estimators", "rtrl", "tbptt", "--csv", str(table)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[:1] == ["tbptt"] and "How to read it" in out and "measuring rtrl" in err
    with table.open(newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == ["tbptt", "rtrl"]
    assert main([*command, "--estimators", "tbptt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "tbptt"
    assert main(["compare", "--estimators", "rtlr"]) == 2
    assert "'rtlr'" in capsys.readouterr().err
    assert main([*command, "--hidden", "0"]) == 2
    assert "hidden must be a whole number" in capsys.readouterr().err
