"""The comparison of methods that learn from perturbations: rates are tuned on a seed that is then left out."""

import jax
import numpy as np
import pytest

import streamgrad as sg
from benchmarks import perturbations
from streamgrad_lab.experiments.streams.lanes import Lane
from streamgrad_lab.tables import read_rows
from tests.tools import error


def test_the_last_part_counts():
    rows = [{"setting": 0, "rate": 0.1, "seed": 3, "update": at, "loss": 1 / at} for at in (10, 20)]
    assert perturbations.finals(rows) == {Lane(0, 0.1, 3): 0.05}


def test_text_without_its_file():
    with pytest.raises(SystemExit, match="--text FILE"):
        perturbations.main(["text"])


def test_a_stream_in_chunks_is_the_sum_of_its_chunks():
    model = sg.Model(sg.cells.gru(1, 2), sg.heads.squared_error(1))
    params = model.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (perturbations.LENGTH, 1))
    chunk, est, whole = sg.Chunk(x, x), sg.rtrl(model), sg.bptt(model)
    got = perturbations.in_chunks(est, 4)
    found = got.update(params, got.init(params), chunk, jax.random.key(2))[0]
    assert error(found.cell, whole.update(params, whole.init(params), chunk)[0].cell) < 1e-5


def test_rates_are_chosen_on_a_seed_of_their_own(tmp_path, monkeypatch):
    seen = []

    def train_lanes(model, task, est, lanes, updates, points, place):
        seen.append(lanes)
        return [lane._asdict() | {"update": updates, "loss": lane.rate + lane.seed} for lane in lanes]

    monkeypatch.setattr(perturbations, "train_lanes", train_lanes)
    perturbations.main(["recall", "--only", "bptt", "--hidden", "2", "--out", str(tmp_path)])
    tuning, judged = seen
    assert {lane.seed for lane in tuning} == {perturbations.TUNING_SEED}
    assert {(lane.rate, lane.seed) for lane in judged} == {(1e-3, 0), (1e-3, 1)}
    rows = read_rows(tmp_path / "perturbations_recall.csv")
    assert [row["setting"] for row in rows] == list(perturbations.DELAYS)
    np.testing.assert_allclose([row["loss"] for row in rows], 0.501)
