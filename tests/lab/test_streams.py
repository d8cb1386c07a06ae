"""The experiment `streams`: its lanes against trainings one by one, its claims on known numbers, a whole small run."""

import contextlib
import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import streamgrad as sg
from streamgrad.estimators import REGISTRY
from streamgrad_lab.experiments import find_experiment, streams
from streamgrad_lab.experiments.reproduce import reproduce
from streamgrad_lab.experiments.streams import agent, copying, recall, series, text
from streamgrad_lab.experiments.streams.cases import best_of, paired, read_cases, write_case
from streamgrad_lab.experiments.streams.lanes import Lane, all_lanes, make_optimizer, train_lanes
from streamgrad_lab.experiments.streams.methods import METHODS, for_streams, make_estimator
from streamgrad_lab.tasks import find_task
from tests.tools import one_sentence

NAMES = list(streams.PARTS)


@contextlib.contextmanager
def refused(words):
    with pytest.raises(ValueError, match=words) as caught:
        yield
    assert one_sentence(caught)


def test_lanes_are_trainings_of_their_own():
    """All at once or one by one, by hand: rate and setting of a lane are its own."""
    task = recall.recall_task(3, 2, 4)
    model = sg.Model(sg.cells.vanilla(1, 3), task.head)
    delays, est = jnp.array([1, 3]), sg.batched(sg.rtrl(model), 2)

    def place(state, setting, seed):
        return state._replace(delay=delays[setting])

    lanes = [Lane(0, 1e-2, 3), Lane(1, 3e-2, 4)]
    rows = train_lanes(model, task, est, lanes, 6, 3, place)
    assert [row["update"] for row in rows] == [2, 2, 4, 4, 6, 6] and rows[-1]["steps"] == 24
    for i, lane in enumerate(lanes):
        queue = find_task("queue", delay=int(delays[lane.setting]), batch_size=2, length=4)
        init_key, task_key, run_key = jax.random.split(jax.random.key(lane.seed), 3)
        params, at, losses = model.init(init_key), queue.init(task_key), []
        state, optimizer = est.init(params), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(lane.rate))
        optimizer_state = optimizer.init(params)
        for step in range(6):
            data_key, key = jax.random.split(jax.random.fold_in(run_key, step))
            chunk, at = queue.sample((), at, data_key)
            grads, state, info = est.update(params, state, chunk, key)
            mean = jax.tree.map(lambda leaf: leaf / 4, grads)
            change, optimizer_state = optimizer.update(mean, optimizer_state)
            params = optax.apply_updates(params, change)
            losses.append(float(info.loss.mean()))
        got = [row["loss"] for row in rows[i::2]]
        np.testing.assert_allclose(got, np.reshape(losses, (3, 2)).mean(axis=1), rtol=1e-5)


def test_a_lane_that_diverges_has_no_result():
    task = find_task("series", kind="henon", values=50, batch_size=2)
    model = sg.Model(sg.cells.vanilla(1, 2), task.head)
    rows = train_lanes(
        model, task, for_streams("immediate", model, 2), [Lane(0, 1e300, 0), Lane(0, 1e-3, 0)], 6, 2, clip=None
    )
    assert math.isnan(rows[-2]["loss"]) and math.isfinite(rows[-1]["loss"])
    best = best_of(rows)
    assert best.rate == 1e-3 and len(best.rows) == 1
    assert str(best_of(rows[0::2])) == "diverged"


def test_the_best_rate_is_that_of_the_mean_over_seeds():
    values = {0.1: (1.0, 3.0), 0.2: (1.5, 1.7), 0.3: (0.1, math.nan)}
    rows = [
        {"rate": rate, "seed": seed, "update": u, "loss": end if u == 2 else 9.0}
        for rate, ends in values.items() for seed, end in enumerate(ends) for u in (2, 1)
    ]  # fmt: skip
    best = best_of(rows)
    assert (best.rate, best.finals.tolist()) == (0.2, [1.5, 1.7])
    assert best_of(rows, highest=True).rate == 0.1
    assert best_of(rows, last=2).finals.tolist() == [5.25, 5.35]


def test_the_optimizer_is_adam_after_clipping():
    grads = jnp.array([30.0, 40.0])
    for clip, scale in ((1.0, 1 / 50), (None, 1.0)):
        _, state = make_optimizer(clip).update(grads, make_optimizer(clip).init(grads))
        moments = [leaf for leaf in jax.tree.leaves(state) if getattr(leaf, "shape", None) == (2,)]
        np.testing.assert_allclose(moments[0], 0.1 * scale * grads, rtol=1e-6)


def test_recall_is_the_queue_with_a_delay_in_its_state():
    task = recall.recall_task(5, 2, 3)
    for delay in (0, 2, 5):
        queue = find_task("queue", delay=delay, batch_size=2, length=3)
        mine, theirs = task.init(jax.random.key(0))._replace(delay=jnp.asarray(delay)), queue.init(jax.random.key(0))
        for turn in range(4):
            a, mine = task.sample((), mine, jax.random.key(turn))
            b, theirs = queue.sample((), theirs, jax.random.key(turn))
            np.testing.assert_array_equal(a.inputs, b.inputs)
            np.testing.assert_array_equal(a.targets, b.targets)


def test_series_are_compared_by_every_estimator():
    part = next(part for part in streams.PRESETS["paper"].settings if part.name == "series")
    assert {METHODS[name].estimator for name in part.methods} | {*series.SAME, *series.YOUNGER} == set(REGISTRY)
    model = sg.Model(sg.cells.vanilla(1, 64), sg.heads.squared_error(1))
    for name in part.methods:
        make_estimator(name, model)
    assert set(series.THEIRS) <= set(part.methods) and set(series.THEIRS.values()) == set(series.PUBLISHED)


def test_records_of_a_series_are_those_of_the_protocol():
    """Rows of 50 steps: a record is the mean over the last 200, every 250 steps, counted from the end."""
    rows = [{"setting": 0, "rate": 1.0, "seed": 0, "update": 50 * (i + 1), "loss": float(i)} for i in range(60)]
    found = series.records(rows)
    assert [row["update"] for row in found[-6:]] == [1000, 2000, 2250, 2500, 2750, 3000]
    assert found[-1]["nmse"] == 2 * np.mean([56, 57, 58, 59]) and found[-2]["nmse"] == 2 * np.mean([51, 52, 53, 54])


def write(folder, method, values, column="loss", first=0, **about):
    """A file with one row for each seed's final value."""
    rows = [
        Lane(0, 1e-3, first + seed)._asdict() | {"update": 10, "steps": 10, "seconds": 1.0, column: value}
        for seed, value in enumerate(values)
    ]
    about = {"method": method} | about | {"cell": about.get("cell", "gru"), "hidden": 64, "streams": 8, "episode": 200}
    write_case(folder / f"{method}-{'-'.join(map(str, about.values()))}.csv", rows, about)


def test_claims_of_recall(tmp_path):
    for method, values in {
        "rtrl": (0.01, 0.011),
        "ok(8)": (0.2, 0.21),
        "bptt": (0.68, 0.69),
        "immediate": (0.3, 0.9),
    }.items():
        write(tmp_path, method, values, chunk=4, delay=12)
    assert [claim.holds for claim in recall.claims(tmp_path)] == [True, False, True, None]
    assert "0.0105 ± 0.00635 (0.001)" in recall.claims(tmp_path)[0].detail


def test_claims_of_series(tmp_path, monkeypatch):
    """Published numbers are compared with at the protocol's size alone; methods with one another seed by seed."""
    for kind, low in zip(series.KINDS, (0.004, 0.01, 0.003), strict=True):
        write(tmp_path, "rtrl", (low, low * 2, low * 0.5), "nmse", series=kind)
        write(tmp_path, "preuoro", (low * 1.5, low * 3.02, low * 0.74), "nmse", series=kind)
        write(tmp_path, "immediate", (low * 1.5, low * 1.5, low * 0.6), "nmse", series=kind)
    rows = read_cases(tmp_path)
    best = series.claims(rows)
    assert [claim.text for claim in best][:1] == ["Henon: rtrl is the best of 3 methods."] and len(best) == 3
    assert best[0].holds is None and "Not told apart from it: immediate." in best[0].detail
    monkeypatch.setattr(series, "PROTOCOL_SIZE", (64, 8, 200, 10))
    found = series.claims(rows)
    assert [claim.holds for claim in found[:3]] == [None, None, None] and len(found) == 6
    assert found[0].detail.startswith("Henon 0.00467 ± 0.00759 against 0.0052;")
    alone = [row for row in rows if row["method"] == "rtrl"]
    assert series.claims(alone)[3:] == []
    lost = [row | {"nmse": math.nan} for row in rows]
    assert [claim.holds for claim in series.claims(lost)] == [None] * 3


def test_claims_of_text_and_copy(tmp_path):
    for method, values in {"rtrl": (1.70, 1.71), "ok(8)": (1.8, 1.81), "bptt": (1.69, 1.705)}.items():
        write(tmp_path / "text", method, values, chunk=4)
    assert [claim.holds for claim in text.claims(tmp_path / "text")] == [None, False]
    for method, values in {"rtrl": (9, 9, 10), "bptt": (3, 3, 4), "immediate": (9, 10, 9)}.items():
        write(tmp_path / "copy", method, values, "copy_length", chunk=1)
    assert [claim.holds for claim in copying.claims(tmp_path / "copy")] == [True, None]


def test_pairs_are_of_the_same_seed(tmp_path):
    write(tmp_path, "rtrl", (1.0, 2.0, 3.0), chunk=4)
    write(tmp_path, "bptt", (2.5, 3.5), first=1, chunk=4)
    found = text.results(tmp_path)
    assert paired(found["rtrl", 4], found["bptt", 4]) == (-0.5, 0.0)
    write(tmp_path, "snap(1)", (1.0,), first=7, chunk=4)
    assert paired(found["rtrl", 4], text.results(tmp_path)["snap(1)", 4]) is None


def test_text_comes_with_python_or_from_the_data_folder(tmp_path):
    vocabulary, codes = text.load("python", None)
    assert len(codes) > 100_000 and all(ord(letter) < 128 for letter in vocabulary)
    with refused("reads tinyshakespeare.txt in the data folder: name one with --data"):
        text.load("file", None)
    with refused("tinyshakespeare.txt cannot be read"):
        text.load("file", tmp_path)
    (tmp_path / text.FILE).write_text("")
    with refused("needs at least two different characters, and has 0"):
        text.load("file", tmp_path)


def test_wrong_methods_are_named():
    with refused("method must be one of rtrl, .*, not 'adam'"):
        make_estimator("adam", sg.Model(sg.cells.vanilla(1, 2), sg.heads.squared_error(1)))


@pytest.mark.slow
def test_a_small_run_and_what_a_broken_one_leaves(tmp_path):
    """Every part at toy size; a run that was stopped goes on with what is missing, and ends with the same numbers."""
    experiment = find_experiment("streams")
    told = []
    reproduce(["streams"], "smoke", tmp_path / "a", lambda *words: told.append(words[0]))
    found = experiment.sections(tmp_path / "a" / "streams")
    assert len(found) == len(NAMES) and all(section.figure is not None for section in found)
    assert all((tmp_path / "a" / "streams" / file).exists() for section in found for file in section.files)

    class Stopped(Exception):
        pass

    def stop(part, made, total, words):
        if part.startswith("streams: series, immediate"):
            raise Stopped

    with pytest.raises(Stopped):
        reproduce(["streams"], "smoke", tmp_path / "b", stop)
    told.clear()
    reproduce(["streams"], "smoke", tmp_path / "b", lambda *words: told.append(words[0]), resume=True)
    assert not any("recall" in part for part in told) and any("text" in part for part in told)
    for path in (tmp_path / "a").glob("streams/*/*.csv"):
        again = tmp_path / "b" / path.relative_to(tmp_path / "a")
        for a, b in zip(read_cases(path.parent), read_cases(again.parent), strict=True):
            assert a | {"seconds": 0} == b | {"seconds": 0}


@pytest.mark.slow
def test_some_parts_alone(tmp_path):
    config = streams.PRESETS["smoke"]
    reproduce(["streams"], "smoke", tmp_path, settings=["copy"])
    assert [path.name for path in (tmp_path / "streams").iterdir()] == ["copy"]
    assert dataclasses.asdict(config)["settings"][0]["name"] == "recall"
    with refused("settings must be among recall, .*, not gym"):
        reproduce(["streams"], "smoke", tmp_path / "x", settings=["gym"])
    with pytest.raises(ValueError, match="has no results of any of recall"):
        streams.sections(tmp_path / "x")


def test_lanes_of_a_grid():
    assert all_lanes(2, (0.1,), range(5, 7)) == [Lane(0, 0.1, 5), Lane(0, 0.1, 6), Lane(1, 0.1, 5), Lane(1, 0.1, 6)]


def test_claims_of_agents(tmp_path):
    for cell, values in {"vanilla": (0.7, 0.72, 0.71), "gru": (0.99, 0.991, 0.992)}.items():
        write(tmp_path, "rtrl", values, "success", world="T-maze 10", cell=cell)
    write(tmp_path, "rtrl", (0.5, 0.5, 0.51), "success", world="T-maze 20", cell="gru")
    found = agent.claims(tmp_path)
    assert [claim.holds for claim in found] == [True, False]
    assert "gru: 0.991 ± 0.00248 (0.001)" in found[0].detail and "RTRL 0.998" in found[0].detail


def test_what_is_missing_is_known_before_anything_is_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    small = streams.PRESETS["smoke"]
    told = []
    for name, changed, words in (
        ("agent", {"gymnax": ("MemoryChain-bsuite",)}, "gymnax"),
        ("text", {"source": "file"}, "reads tinyshakespeare.txt"),
    ):
        parts = tuple(dataclasses.replace(p, **changed) if p.name == name else p for p in small.settings)
        with refused(words):
            streams.run(dataclasses.replace(small, settings=parts), tmp_path, lambda *words: told.append(words))
    assert not told and not list(tmp_path.iterdir())


def test_a_refused_run_leaves_nothing_behind(tmp_path):
    with refused("reads tinyshakespeare.txt"):
        reproduce(["streams"], "paper", tmp_path / "run")
    assert not (tmp_path / "run").exists()
