"""The comparison sees bias where there is one, and agrees with the theory where there is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad.theory.predictions import find_prediction
from streamgrad_lab import Candidate, candidates_for, compare, ranks
from tests import tools
from tests.lab.measured import measured, network

SHAPES = [("vanilla", "preactivation", True), ("gru", "preactivation", False), ("vanilla", "state", False)]


@pytest.mark.parametrize("cell, cut, shaped", tools.few(SHAPES, SHAPES[0]))
def test_variance_of_spatial_rtrl_by_enumeration(cell, cut, shaped):
    model = tools.make_model(cell, n_hidden=1 if cell == "gru" else 2)
    params, length = tools.make_params(model), 3
    chunk, n = tools.make_chunk(model, length, reset=(2,)), tools.cut_size(model, cut)
    q0 = tools.random_q0(n) if shaped else None
    est = sg.spatial_rtrl(model, cut=cut, noise="given", q0=q0)
    patterns = tools.all_signs(length, n)
    (grads,) = tools.over_patterns(est, params, chunk, patterns)
    flat = np.concatenate([np.asarray(leaf).reshape(len(patterns), -1) for leaf in jax.tree.leaves(grads.cell)], axis=1)
    ep = sg.theory.collect(model, params, chunk, cut)
    got = sg.theory.spatial_total_variance(ep, q0, kurtosis=-2.0)
    np.testing.assert_allclose(got, flat.var(axis=0).sum(), rtol=1e-10)


@pytest.fixture(scope="module")
def rows():
    return measured("rtrl", "bptt", "spatial_rtrl", "preuoro")


@pytest.fixture(scope="module")
def all_rows():
    return measured()


def test_verdicts_and_predictions(rows):
    verdicts = {"rtrl": "exact", "bptt": "biased", "wrong": "biased"}
    assert {name: row.verdict for name, row in rows.items()} == verdicts | dict.fromkeys(
        ("spatial_rtrl", "preuoro"), "none seen"
    )
    exact, bound = rows["spatial_rtrl"], rows["preuoro"]
    assert abs(exact.variance - exact.predicted) < 4 * exact.variance_error and not exact.predicted_is_bound
    assert bound.predicted > bound.variance - 4 * bound.variance_error and bound.predicted_is_bound


@pytest.mark.slow
def test_all_verdicts(all_rows):
    assert all_rows["rtrl"].verdict == "exact"
    assert all_rows["ok"].verdict == "exact"  # its 4 terms hold the 4 steps before the last chunk
    for name in ("bptt", "windowed_bptt window=3", "uoro_across shrink=auto", "wrong"):
        assert all_rows[name].verdict == "biased", name
    for name, row in all_rows.items():
        if row.promise == "unbiased" and name not in ("ok", "wrong"):
            assert row.verdict == "none seen" and row.bias > 0, name


@pytest.mark.slow
def test_measured_is_what_the_theory_predicts(all_rows):
    """A sample of fixed seed; four standard errors are left by one correct row in 16,000, if the error were normal."""
    exact = [row for row in all_rows.values() if row.predicted and not row.predicted_is_bound]
    assert {row.name for row in exact} == {"spatial_rtrl", "uoro optimal alpha", "uoro optimal alpha, Q_0"}
    for row in exact:
        assert abs(row.variance - row.predicted) < 4 * row.variance_error, row
        assert row.variance_error < 0.1 * row.variance
    assert all_rows["uoro optimal alpha, Q_0"].variance < all_rows["uoro optimal alpha"].variance
    bounds = [row for row in all_rows.values() if row.predicted_is_bound]
    assert {row.name for row in bounds} == {
        "uoro",
        "uoro groups=4",
        "uoro cut=state",
        "uoro_across",
        "preuoro",
    }
    for row in bounds:
        assert row.predicted > row.variance - 4 * row.variance_error, row
        assert row.predicted < 2 * row.variance


@pytest.mark.slow
def test_blocks_are_compared_where_they_fill_the_chunk():
    model = tools.make_model("vanilla", 1, 4)
    params = tools.make_params(model)
    for chunk_length, blocks in ((4, ["windowed_bptt window=8 every=4"]), (3, [])):
        chunk = tools.make_chunk(model, 8)
        found = list(candidates_for(model, params, chunk, only=["windowed_bptt"]))
        assert [one.name for one in found] == [
            "windowed_bptt window=3",
            "windowed_bptt window=10",
            "windowed_bptt window=8 every=4",
        ]
        rows = compare(
            model, params, chunk, jax.random.key(0), candidates=found[2:], repeats=1, chunk_length=chunk_length
        )
        assert [row.name for row in rows] == blocks


@pytest.mark.slow
def test_batches_of_streams_measure_what_single_ones_do(all_rows):
    model, params, chunk = network()
    got = sg.theory.empirical(sg.uoro(model), params, chunk, jax.random.key(8), 4000, block=1000)
    norm = jnp.sum(ravel_pytree(tools.bptt(model, params, chunk).cell)[0] ** 2)
    error = all_rows["uoro"].variance_error + float(got.total_variance_error / norm)
    assert abs(all_rows["uoro"].variance - float(got.total_variance / norm)) < 4 * error


def test_costs(rows):
    model, params, _ = network()
    assert all(row.us_per_step > 0 for row in rows.values())
    state = sg.rtrl(model).init(params)
    assert rows["rtrl"].state_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_the_squared_error_is_that_of_the_mean_over_streams(rows):
    """Against the distance itself, of means over 8 streams from other keys, 4 standard errors of both."""
    model, params, chunk = network()
    gradient = ravel_pytree(tools.bptt(model, params, chunk).cell)[0]
    pre = sg.preuoro(model)

    @jax.jit
    def distance(key):
        keys = jax.random.split(key, 8)
        grads = jax.vmap(lambda key: ravel_pytree(pre.update(params, pre.init(params), chunk, key)[0].cell)[0])(keys)
        return jnp.array([jnp.sum((scale * grads.mean(axis=0) - gradient) ** 2) for scale in (1.0, 1.5)])

    apart = jax.lax.map(distance, jax.random.split(jax.random.key(5), 1000)) / jnp.sum(gradient**2)
    for name, values in zip(("preuoro", "wrong"), np.asarray(apart).T, strict=True):
        error = np.hypot(rows[name].squared_error_noise, values.std() / np.sqrt(len(values)))
        assert abs(rows[name].squared_error - values.mean()) < 4 * error, name
    # A mean that is off by a half of g has the squared bias 1/4, of which the variance is not a part.
    assert abs(rows["wrong"].squared_bias - 0.25) < 4 * rows["wrong"].squared_bias_noise < 0.1
    for row in rows.values():
        if row.promise == "unbiased" and row.name != "wrong":
            assert row.squared_bias < 4 * row.squared_bias_noise + 1e-12, row.name


@pytest.mark.slow
def test_a_bias_hides_no_noise(rows):
    """The standard error of the variance of an estimator that is noisy and far off, and of one with few samples."""
    model, params, chunk = network()
    pre = sg.preuoro(model)

    def far_off(params, state, chunk, key):
        grads, state, info = pre.update(params, state, chunk, key)
        return jax.tree.map(lambda leaf: leaf + 100.0, grads), state, info

    some = [Candidate("far off", "biased", sg.GradientEstimator(pre.init, far_off))]
    (row,) = compare(model, params, chunk, jax.random.key(3), 2048, 8, repeats=1, candidates=some, chunk_length=4)
    np.testing.assert_allclose(row.variance_error, rows["preuoro"].variance_error, rtol=0.1)
    (row,) = compare(model, params, chunk, jax.random.key(3), 32, 8, repeats=1, candidates=some, chunk_length=4)
    assert row.variance_error > 0.05 * row.variance


@pytest.mark.slow
def test_ranks_of_all(all_rows):
    places = dict(zip(all_rows, ranks(list(all_rows.values())), strict=True))
    assert places["rtrl"] == 1 < places["bptt"] and places["uoro optimal alpha"] is None
    assert max(places["preuoro"], places["uoro groups=4"]) < places["uoro"]


@pytest.mark.slow
def test_carry_is_measured_with_what_it_has_learnt(all_rows, monkeypatch):
    model, params, chunk = network()
    assert all_rows["uoro carried"].verdict == "none seen"
    # Without a past it is GIR with the identity, and says so.
    monkeypatch.setattr("streamgrad_lab.programs.WARM_UP", 6)
    some = [Candidate("carry", "unbiased", sg.carried(sg.uoro(model)))]
    (row,) = compare(model, params, chunk, jax.random.key(3), 2048, 8, repeats=1, candidates=some, chunk_length=4)
    assert row.name == "carry (nothing learnt yet)"
    np.testing.assert_allclose(row.variance, all_rows["uoro"].variance, rtol=1e-6)
    assert abs(row.variance / all_rows["uoro carried"].variance - 1) > 0.01


def test_time_limits_the_samples():
    model, params, chunk = network()
    some = candidates_for(model, params, chunk, only=["preuoro"])
    (row,) = compare(model, params, chunk, jax.random.key(3), 4096, 8, 1, some, seconds=1e-9)
    assert row.samples == 4 * 8 and row.squared_error_noise > 0


@pytest.mark.slow
def test_the_chunk_length_matters(all_rows):
    """Truncated BPTT is biased where chunks are shorter than the stream, and exact where they are not."""
    model, params, chunk = network()
    exact = ravel_pytree(tools.bptt(model, params, chunk).cell)[0]
    parts = tools.run(sg.bptt(model), params, list(tools.split(chunk, (4, 2))))[0]
    want = jnp.sum((ravel_pytree(parts.cell)[0] - exact) ** 2) / jnp.sum(exact**2)
    np.testing.assert_allclose(all_rows["bptt"].squared_error, want, rtol=1e-9)
    assert all_rows["ok rank=1"].verdict == all_rows["uoro_across"].verdict == "none seen"
    for name in ("ok rank=1", "uoro_across"):
        assert 0 < all_rows[name].variance < 0.1 * all_rows["uoro"].variance, name

    across = [sg.bptt(model), sg.ok(model, rank=1), sg.uoro_across(model)]
    some = [Candidate(str(index), "unbiased", est) for index, est in enumerate(across)]
    whole = compare(model, params, chunk, jax.random.key(3), 32, 8, repeats=1, candidates=some)
    assert [(row.verdict, row.chunk_length) for row in whole] == 3 * [("exact", 6)]


@pytest.mark.slow
def test_variance_across_chunks_is_what_the_theory_predicts():
    """Without rescaling the theory is exact: four standard errors, for a sample of fixed seed."""
    model, params, chunk = network()
    options = {"blocks": 2}
    theory = find_prediction("uoro_across", options)
    assert theory is not None and find_prediction("uoro_across", {**options, "shrink": "auto"}) is None

    def predict(alpha, chunk_length):
        assert alpha.shape[1:] == (3, 2) and bool(jnp.all(alpha == 1))  # one for each chunk and block
        ep = sg.theory.collect_chunks(model, params, chunk, chunk_length)
        return theory.variance(ep, alpha[0], options)

    est = sg.uoro_across(model, rescale="none", **options)
    some = [Candidate("uoro_across", "unbiased", est, predict)]
    (row,) = compare(model, params, chunk, jax.random.key(5), 4096, 8, 1, some, chunk_length=2)
    assert abs(row.variance - row.predicted) < 4 * row.variance_error < 0.5 * row.variance


def test_chunk_lengths_that_make_no_sense():
    model, params, chunk = network()
    for length, says in ((0, "a whole number of at least 1"), (7, "at most 6, the steps of the stream")):
        with pytest.raises(ValueError, match=f"^chunk_length must be {says}, not {length}.$"):
            compare(model, params, chunk, jax.random.key(3), chunk_length=length)


@pytest.mark.slow
def test_one_stream_has_no_spread_to_look_at():
    model, params, chunk = network()
    some = [one for one in candidates_for(model, params, chunk, only=["uoro", "uoro_across"]) if "shrink" in one.name]
    assert compare(model, params, chunk, jax.random.key(3), 4, 1, 1, some, chunk_length=4) == []


def test_noise_across_chunks_is_on_the_state_of_any_cell():
    model = tools.make_model("nested")
    params, chunk = tools.make_params(model), tools.make_chunk(model, 4)
    names = {one.name for one in candidates_for(model, params, chunk, only=["uoro", "uoro_across"])}
    assert {"uoro", "uoro_across"} <= names


def test_progress_has_one_total_for_each_part():
    """Known from the beginning, also with what is fitted by hindsight, whether or not it runs on so many streams."""
    model, params, chunk = network()
    seen: dict[str, list[tuple[int, int]]] = {}

    def progress(part, made, total, words):
        seen.setdefault(part, []).append((made, total))

    some = candidates_for(model, params, chunk, only=["preuoro", "uoro", "uoro_across"])
    made = list(some)
    assert len(some) == len(made) and made[-1].name == "preuoro" and sum(one.hindsight for one in made) == 2
    few = [one for one in made if one.name in ("preuoro", "uoro_across shrink=auto")]
    compare(model, params, chunk, jax.random.key(3), 4, 1, 2, iter(few), progress)
    assert seen["preparing"] == [(0, 2), (1, 2), (2, 2)]  # one of the two needs two streams, and is passed over
    assert seen["measuring"] == [(0, 1), (1, 1)] and seen["timing"] == [(0, 2), (1, 2), (2, 2)]
    seen.clear()
    compare(model, params, chunk, jax.random.key(3), 4, 1, 2, candidates_for(model, params, chunk, ["bptt"]), progress)
    assert seen["preparing"] == [(0, 1), (1, 1)]
