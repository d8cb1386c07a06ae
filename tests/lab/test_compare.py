"""The comparison sees bias where there is one, and agrees with the theory where there is none."""

import csv
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad.lab import Candidate, candidates_for, compare, ranks
from streamgrad.lab.cli.main import main
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
    assert found["tbptt window=3"].verdict == found["wrong"].verdict == "biased"
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
    assert {row.name for row in bounds} == {"uoro", "uoro groups=4", "uoro cut=state", "preuoro"}
    for row in bounds:
        assert row.predicted > row.variance - 4 * row.variance_error, row
        assert row.predicted < 2 * row.variance


def test_blocks_are_compared_where_they_fill_the_chunk():
    model = tools.make_model("vanilla", 1, 4)
    params = tools.make_params(model)
    for length, blocks in ((10, ["tbptt window=10 every=5"]), (12, [])):
        found = candidates_for(model, params, tools.make_chunk(model, length), only=["tbptt"])
        assert [candidate.name for candidate in found] == ["tbptt window=3", "tbptt window=10", *blocks]


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
    command = ["compare", "--cell", "vanilla", "--hidden", "2", "--length", "12", "--updates", "2", "--samples", "32"]
    assert main([*command, "--estimators", "rtrl", "tbptt", "--csv", str(table)]) == 0
    out, err = capsys.readouterr()
    assert (
        out.splitlines()[1].split()[:2] == ["1", "rtrl"]
        and "How to read it" in out
        and "measuring: 0 of 3, tbptt window=3" in err
    )
    assert max(map(len, out.splitlines())) <= 80
    with table.open(newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == ["rtrl", "tbptt window=10", "tbptt window=3"]
    assert main([*command, "--estimators", "tbptt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "tbptt window=10"
    assert main(["compare", "--estimators", "rtlr"]) == 2
    assert "'rtlr'" in capsys.readouterr().err
    assert main([*command, "--hidden", "0"]) == 2
    assert "hidden must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, code, says",
    [
        (["--samples", "1"], 2, "--samples must be a whole number of at least 32, not 1"),
        (["--csv", "/nowhere/table.csv"], 2, "--csv /nowhere/table.csv must be a file in a folder that exists"),
        (["--csv", "."], 2, "must be a file"),
        (["--seconds", "0"], 2, "--seconds must be above 0"),
        (["--csv", "/proc/table.csv"], 1, "cannot write"),
    ],
)
def test_what_is_wrong_is_said_before_training(options, code, says, capsys, monkeypatch):
    monkeypatch.setattr("streamgrad.lab.cli.compare.prepare", lambda *args: pytest.fail("it has begun to train"))
    if options[-1].startswith("/proc") and not Path("/proc").is_dir():
        pytest.skip("no folder that nobody may write to")
    assert main(["compare", *options]) == code
    assert says in capsys.readouterr().err


def test_the_squared_error_is_that_of_the_mean_over_streams(rows):
    """Against the distance itself, of means over 8 streams from other keys, 4 standard errors of both."""
    found, (model, params, chunk) = rows
    gradient = ravel_pytree(tools.bptt(model, params, chunk).cell)[0]
    pre = sg.preuoro(model)

    @jax.jit
    def distance(key):
        keys = jax.random.split(key, 8)
        grads = jax.vmap(lambda key: ravel_pytree(pre.update(params, pre.init(params), chunk, key)[0].cell)[0])(keys)
        return jnp.array([jnp.sum((scale * grads.mean(axis=0) - gradient) ** 2) for scale in (1.0, 1.5)])

    apart = jax.lax.map(distance, jax.random.split(jax.random.key(5), 1000)) / jnp.sum(gradient**2)
    for name, values in zip(("preuoro", "wrong"), np.asarray(apart).T, strict=True):
        error = np.hypot(found[name].squared_error_noise, values.std() / np.sqrt(len(values)))
        assert abs(found[name].squared_error - values.mean()) < 4 * error, name
    # A mean that is off by a half of g has the squared bias 1/4, of which the variance is not a part.
    assert abs(found["wrong"].squared_bias - 0.25) < 4 * found["wrong"].squared_bias_noise < 0.1
    for row in found.values():
        if row.promise == "unbiased" and row.name != "wrong":
            assert row.squared_bias < 4 * row.squared_bias_noise + 1e-12, row.name


def test_ranks_tell_noise_from_difference(rows):
    found, _ = rows
    base = found["uoro"]._replace(squared_error_noise=0.1)
    errors = {"a": 1.0, "b": 1.2, "c": 2.0, "d": 0.5}
    table = [base._replace(name=name, squared_error=error) for name, error in errors.items()]
    assert ranks(table) == [2, 2, 4, 1]
    assert ranks([table[0]._replace(hindsight=True), table[2]]) == [None, 1]
    places = dict(zip(found, ranks(list(found.values())), strict=True))
    assert places["bptt"] == places["rtrl"] == 1 and places["uoro optimal alpha"] is None
    assert max(places["preuoro"], places["uoro groups=4"]) < places["uoro"]


def test_carry_is_measured_with_what_it_has_learnt(rows, monkeypatch):
    found, (model, params, chunk) = rows
    assert found["uoro carried"].verdict == "none seen"
    # Without a past it is GIR with the identity, and says so.
    monkeypatch.setattr("streamgrad.lab.comparison.WARM_UP", 6)
    some = [Candidate("carry", "unbiased", sg.carried(sg.uoro(model)))]
    (row,) = compare(model, params, chunk, jax.random.key(3), 2048, 8, repeats=1, candidates=some)
    assert row.name == "carry (nothing learnt yet)"
    np.testing.assert_allclose(row.variance, found["uoro"].variance, rtol=1e-6)
    assert abs(row.variance / found["uoro carried"].variance - 1) > 0.01


def test_time_limits_the_samples(rows):
    _, (model, params, chunk) = rows
    some = candidates_for(model, params, chunk, only=["preuoro"])
    (row,) = compare(model, params, chunk, jax.random.key(3), 4096, 8, 1, some, seconds=1e-9)
    assert row.samples == 4 * 8 and row.squared_error_noise > 0
