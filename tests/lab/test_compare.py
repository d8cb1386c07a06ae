"""The comparison sees bias where there is one, and agrees with the theory where there is none."""

import csv
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from matplotlib.text import Text

import streamgrad as sg
from streamgrad.lab import Candidate, candidates_for, compare, frontier, ranks
from streamgrad.lab.cli.compare import advice, heading
from streamgrad.lab.cli.main import main
from streamgrad.lab.report.frontier import draw_frontier, write_frontier
from streamgrad.lab.report.labels import shared_area
from streamgrad.theory.predictions import find_prediction
from tests import tools

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
    ep = sg.variance.collect(model, params, chunk, cut)
    got = sg.variance.spatial_total_variance(ep, q0, kurtosis=-2.0)
    np.testing.assert_allclose(got, flat.var(axis=0).sum(), rtol=1e-10)


def measured(*names):
    """A network, and estimators of it, or all, on chunks of 4 and 2 steps; besides, one that is wrong by a half."""
    model = tools.make_model("vanilla", 1, 4)
    params, chunk = tools.make_params(model, seed=2), tools.make_chunk(model, 6, seed=2)
    pre = sg.preuoro(model)

    def wrong(params, state, chunk, key):
        grads, state, info = pre.update(params, state, chunk, key)
        return jax.tree.map(lambda leaf: 1.5 * leaf, grads), state, info

    off = Candidate("wrong", "unbiased", sg.GradientEstimator(pre.init, wrong))
    all_of_them = candidates_for(model, params, chunk, only=names or None)
    them = [*(one for one in all_of_them if not names or one.name in names), off]
    found = compare(model, params, chunk, jax.random.key(3), 2048, 8, repeats=2, candidates=them, chunk_length=4)
    return {row.name: row for row in found}, (model, params, chunk)


@pytest.fixture(scope="module")
def rows():
    return measured("rtrl", "bptt", "spatial_rtrl", "uoro", "preuoro")


@pytest.fixture(scope="module")
def all_rows():
    return measured()


def test_verdicts_and_predictions(rows):
    found, _ = rows
    verdicts = {"rtrl": "exact", "bptt": "biased", "wrong": "biased"}
    assert {name: row.verdict for name, row in found.items()} == verdicts | dict.fromkeys(
        ("spatial_rtrl", "uoro", "preuoro"), "none seen"
    )
    exact, bound = found["spatial_rtrl"], found["preuoro"]
    assert abs(exact.variance - exact.predicted) < 4 * exact.variance_error and not exact.predicted_is_bound
    assert bound.predicted > bound.variance - 4 * bound.variance_error and bound.predicted_is_bound


@pytest.mark.slow
def test_all_verdicts(all_rows):
    found, _ = all_rows
    assert found["rtrl"].verdict == "exact"
    assert found["ok"].verdict == "exact"  # its 4 terms hold the 4 steps before the last chunk
    for name in ("bptt", "tbptt window=3", "uoro inside=backprop shrink=auto", "wrong"):
        assert found[name].verdict == "biased", name
    for name, row in found.items():
        if row.promise == "unbiased" and name not in ("ok", "wrong"):
            assert row.verdict == "none seen" and row.bias > 0, name


@pytest.mark.slow
def test_measured_is_what_the_theory_predicts(all_rows):
    """A sample of fixed seed; four standard errors are left by one correct row in 16,000, if the error were normal."""
    found, _ = all_rows
    exact = [row for row in found.values() if row.predicted and not row.predicted_is_bound]
    assert {row.name for row in exact} == {"spatial_rtrl", "uoro optimal alpha", "uoro optimal alpha, Q_0"}
    for row in exact:
        assert abs(row.variance - row.predicted) < 4 * row.variance_error, row
        assert row.variance_error < 0.1 * row.variance
    assert found["uoro optimal alpha, Q_0"].variance < found["uoro optimal alpha"].variance
    bounds = [row for row in found.values() if row.predicted_is_bound]
    assert {row.name for row in bounds} == {
        "uoro",
        "uoro groups=4",
        "uoro cut=state",
        "uoro inside=backprop",
        "preuoro",
    }
    for row in bounds:
        assert row.predicted > row.variance - 4 * row.variance_error, row
        assert row.predicted < 2 * row.variance


def test_blocks_are_compared_where_they_fill_the_chunk():
    model = tools.make_model("vanilla", 1, 4)
    params = tools.make_params(model)
    for chunk_length, blocks in ((4, ["tbptt window=8 every=4"]), (3, [])):
        chunk = tools.make_chunk(model, 8)
        found = list(candidates_for(model, params, chunk, only=["tbptt"]))
        assert [one.name for one in found] == ["tbptt window=3", "tbptt window=10", "tbptt window=8 every=4"]
        rows = compare(
            model, params, chunk, jax.random.key(0), candidates=found[2:], repeats=1, chunk_length=chunk_length
        )
        assert [row.name for row in rows] == blocks


@pytest.mark.slow
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


TBPTT = ["tbptt window=10", "tbptt window=8 every=4", "tbptt window=3"]  # the further back, the less error


COMMAND = ["compare", "--cell", "vanilla", "--hidden", "2", "--length", "12", "--updates", "2", "--samples", "32"]


@pytest.mark.slow
def test_command(tmp_path, capsys):
    table = tmp_path / "table.csv"
    assert main([*COMMAND, "--estimators", "rtrl", "tbptt", "--csv", str(table)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "A stream of 12 steps in one chunk; B = 8 streams."
    assert lines[3].split()[:2] == ["1", "rtrl"] and "How to read it" in out
    assert "measuring: 0 of 4, tbptt window=3" in err
    assert max(map(len, out.splitlines())) <= 80
    with table.open(newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == ["rtrl", *TBPTT]
    assert main([*COMMAND, "--estimators", "rtrl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "rtrl"


def test_wrong_choices_are_answered(capsys):
    assert main(["compare", "--estimators", "rtlr"]) == 2
    assert "'rtlr'" in capsys.readouterr().err
    assert main([*COMMAND, "--hidden", "0"]) == 2
    assert "hidden must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, code, says",
    [
        (["--samples", "1"], 2, "--samples must be a whole number of at least 32, not 1"),
        (["--csv", "/nowhere/table.csv"], 2, "--csv /nowhere/table.csv must be a file in a folder that exists"),
        (["--csv", "."], 2, "must be a file"),
        (["--seconds", "0"], 2, "--seconds must be above 0"),
        (["--csv", "/proc/table.csv"], 1, "cannot write"),
        (["--figure", "/nowhere/frontier.svg"], 2, "--figure /nowhere/frontier.svg must be a file in a folder"),
        (["--figure", "frontier.pdf"], 2, "--figure frontier.pdf must end in .svg or .png"),
        (["--chunk-length", "0"], 2, "--chunk-length must be a whole number of at least 1, not 0"),
        (["--chunk-length", "33"], 2, "--chunk-length must be at most 32, the steps of the stream, not 33"),
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


@pytest.mark.slow
def test_a_bias_hides_no_noise(rows):
    """The standard error of the variance of an estimator that is noisy and far off, and of one with few samples."""
    found, (model, params, chunk) = rows
    pre = sg.preuoro(model)

    def far_off(params, state, chunk, key):
        grads, state, info = pre.update(params, state, chunk, key)
        return jax.tree.map(lambda leaf: leaf + 100.0, grads), state, info

    some = [Candidate("far off", "biased", sg.GradientEstimator(pre.init, far_off))]
    (row,) = compare(model, params, chunk, jax.random.key(3), 2048, 8, repeats=1, candidates=some, chunk_length=4)
    np.testing.assert_allclose(row.variance_error, found["preuoro"].variance_error, rtol=0.1)
    (row,) = compare(model, params, chunk, jax.random.key(3), 32, 8, repeats=1, candidates=some, chunk_length=4)
    assert row.variance_error > 0.05 * row.variance


def test_ranks_tell_noise_from_difference(rows):
    found, _ = rows
    base = found["uoro"]._replace(squared_error_noise=0.1)
    errors = {"a": 1.0, "b": 1.2, "c": 2.0, "d": 0.5}
    table = [base._replace(name=name, squared_error=error) for name, error in errors.items()]
    assert ranks(table) == [2, 2, 4, 1]
    assert ranks([table[0]._replace(hindsight=True), table[2]]) == [None, 1]


@pytest.mark.slow
def test_ranks_of_all(all_rows):
    found, _ = all_rows
    places = dict(zip(found, ranks(list(found.values())), strict=True))
    assert places["rtrl"] == 1 < places["bptt"] and places["uoro optimal alpha"] is None
    assert max(places["preuoro"], places["uoro groups=4"]) < places["uoro"]


@pytest.mark.slow
def test_carry_is_measured_with_what_it_has_learnt(all_rows, monkeypatch):
    found, (model, params, chunk) = all_rows
    assert found["uoro carried"].verdict == "none seen"
    # Without a past it is GIR with the identity, and says so.
    monkeypatch.setattr("streamgrad.lab.programs.WARM_UP", 6)
    some = [Candidate("carry", "unbiased", sg.carried(sg.uoro(model)))]
    (row,) = compare(model, params, chunk, jax.random.key(3), 2048, 8, repeats=1, candidates=some, chunk_length=4)
    assert row.name == "carry (nothing learnt yet)"
    np.testing.assert_allclose(row.variance, found["uoro"].variance, rtol=1e-6)
    assert abs(row.variance / found["uoro carried"].variance - 1) > 0.01


def test_time_limits_the_samples(rows):
    _, (model, params, chunk) = rows
    some = candidates_for(model, params, chunk, only=["preuoro"])
    (row,) = compare(model, params, chunk, jax.random.key(3), 4096, 8, 1, some, seconds=1e-9)
    assert row.samples == 4 * 8 and row.squared_error_noise > 0


@pytest.mark.slow
def test_the_chunk_length_matters(all_rows):
    """Truncated BPTT is biased where chunks are shorter than the stream, and exact where they are not."""
    found, (model, params, chunk) = all_rows
    exact = ravel_pytree(tools.bptt(model, params, chunk).cell)[0]
    parts = tools.run(sg.bptt(model), params, list(tools.split(chunk, (4, 2))))[0]
    want = jnp.sum((ravel_pytree(parts.cell)[0] - exact) ** 2) / jnp.sum(exact**2)
    np.testing.assert_allclose(found["bptt"].squared_error, want, rtol=1e-9)
    assert found["ok rank=1"].verdict == found["uoro inside=backprop"].verdict == "none seen"
    for name in ("ok rank=1", "uoro inside=backprop"):
        assert 0 < found[name].variance < 0.1 * found["uoro"].variance, name

    across = [sg.bptt(model), sg.ok(model, rank=1), sg.uoro(model, inside="backprop")]
    some = [Candidate(str(index), "unbiased", est) for index, est in enumerate(across)]
    whole = compare(model, params, chunk, jax.random.key(3), 32, 8, repeats=1, candidates=some)
    assert [(row.verdict, row.chunk_length) for row in whole] == 3 * [("exact", 6)]


@pytest.mark.slow
def test_variance_across_chunks_is_what_the_theory_predicts(rows):
    """Without rescaling the theory is exact: four standard errors, for a sample of fixed seed."""
    _, (model, params, chunk) = rows
    options = {"inside": "backprop", "blocks": 2}
    theory = find_prediction("uoro", options)
    assert theory is not None and find_prediction("uoro", {**options, "shrink": "auto"}) is None

    def predict(alpha, chunk_length):
        assert alpha.shape[1:] == (3, 2) and bool(jnp.all(alpha == 1))  # one for each chunk and block
        ep = sg.variance.collect_chunks(model, params, chunk, chunk_length)
        return theory.variance(ep, alpha[0], options)

    est = sg.uoro(model, rescale="none", **options)
    some = [Candidate("uoro", "unbiased", est, predict)]
    (row,) = compare(model, params, chunk, jax.random.key(5), 4096, 8, 1, some, chunk_length=2)
    assert abs(row.variance - row.predicted) < 4 * row.variance_error < 0.5 * row.variance


def test_chunk_lengths_that_make_no_sense(rows):
    _, (model, params, chunk) = rows
    for length, says in ((0, "a whole number of at least 1"), (7, "at most 6, the steps of the stream")):
        with pytest.raises(ValueError, match=f"^chunk_length must be {says}, not {length}.$"):
            compare(model, params, chunk, jax.random.key(3), chunk_length=length)


def test_one_stream_has_no_spread_to_look_at(rows):
    _, (model, params, chunk) = rows
    some = [one for one in candidates_for(model, params, chunk, only=["uoro"]) if "shrink" in one.name]
    assert compare(model, params, chunk, jax.random.key(3), 4, 1, 1, some, chunk_length=4) == []


def test_noise_across_chunks_is_on_the_state_of_any_cell():
    model = tools.make_model("nested")
    params, chunk = tools.make_params(model), tools.make_chunk(model, 4)
    names = {one.name for one in candidates_for(model, params, chunk, only=["uoro"])}
    assert {"uoro", "uoro inside=backprop"} <= names


def hand_made(base, **rows):
    """Rows of a name, an error, its noise, a time and a memory each."""
    return [
        base._replace(
            name=name,
            verdict="exact" if error == 0 else "none seen",
            squared_error=error,
            squared_error_noise=noise,
            us_per_step=time,
            state_bytes=memory,
            scratch_bytes=0,
        )
        for name, (error, noise, time, memory) in rows.items()
    ]


def test_the_frontier_is_what_no_other_row_beats(rows):
    base = rows[0]["uoro"]
    table = hand_made(
        base,
        slow_exact=(0.0, 0.0, 100.0, 50),
        exact=(0.0, 0.0, 50.0, 500),
        cheap=(1.0, 0.01, 1.0, 10),
        same_but_slower=(0.99, 0.01, 2.0, 5),
        better=(0.1, 0.01, 10.0, 20),
        worse=(0.5, 0.01, 20.0, 30),
        hardly_measured=(0.6, 5.0, 5.0, 1),
    )
    names = [row.name for row in frontier(table)]
    assert names == ["cheap", "hardly_measured", "better", "exact"]
    names = [row.name for row in frontier(table, "memory_bytes")]
    assert names == ["hardly_measured", "better", "slow_exact"]
    # Of hindsight is no choice.
    assert [row.name for row in frontier([table[2]._replace(hindsight=True), table[4]])] == ["better"]
    text = " ".join(advice(table).split())
    assert "Least error for its time: cheap; hardly_measured; better; exact." in text
    assert "Least error for its memory: hardly_measured; better; slow_exact." in text


def test_the_heading_says_how_the_stream_was_cut(rows):
    base = rows[0]["uoro"]
    for length, chunk_length, says in (
        (6, 6, "one chunk"),
        (6, 4, "1 chunk of 4 and one of 2"),
        (6, 2, "3 chunks of 2"),
    ):
        text = heading(base._replace(length=length, chunk_length=chunk_length))
        assert text == f"A stream of 6 steps in {says}; B = 8 streams."


def test_command_draws_the_frontier(tmp_path, capsys):
    table, figure = tmp_path / "table.csv", tmp_path / "frontier.svg"
    command = ["compare", "--cell", "vanilla", "--hidden", "2", "--length", "9", "--updates", "2", "--samples", "32"]
    command += ["--chunk-length", "4", "--estimators", "bptt", "rtrl"]
    assert main([*command, "--csv", str(table), "--figure", str(figure)]) == 0
    out, _ = capsys.readouterr()
    assert "A stream of 9 steps in 2 chunks of 4 and one of 1; B = 8 streams." in out
    assert "Least error for its time: " in out
    with table.open(newline="") as file:
        found = {row["name"]: row for row in csv.DictReader(file)}
    assert found["rtrl"]["best_for_memory"] == "True" and found["bptt"]["chunk_length"] == "4"
    text = figure.read_text()
    assert all(word in text for word in ("bptt", "rtrl", "exact", "9 steps in chunks of 4, mean over 8 streams"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frontier.svg", "table.csv"]


def check_figure(rows):
    """No name covers another or leaves the axes."""
    figure = draw_frontier(rows)
    figure.draw_without_rendering()
    for ax in figure.axes:
        boxes = np.array([Text.get_window_extent(text).extents for text in ax.texts])  # without the lines to them
        assert len(boxes) == sum(not row.hindsight for row in rows)
        shared = shared_area(boxes, boxes)
        assert np.all(shared[~np.eye(len(boxes), dtype=bool)] == 0)
        np.testing.assert_allclose(shared_area(boxes, ax.bbox.extents[None])[:, 0], shared.diagonal())


def test_the_figure_of_any_rows_can_be_drawn(rows, tmp_path):
    """Several; only exact ones; only one. The PNG is one."""
    write_frontier(tmp_path / "frontier.png", [rows[0]["uoro"]])
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    for some in (list(rows[0].values()), [rows[0]["rtrl"]], [rows[0]["uoro"]]):
        check_figure(some)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_figure_of_all_rows_can_be_drawn(all_rows, seed):
    """With times of any kind: those measured differ from run to run."""
    times = np.random.default_rng(seed).lognormal(2, 1, len(all_rows[0]))
    rows = zip(all_rows[0].values(), times.tolist(), strict=True)
    check_figure([row._replace(us_per_step=time) for row, time in rows])
