"""The paper's claims, asserted over the recorded runs of the `paper` preset (experiments/results/paper)."""

import dataclasses

import numpy as np

from streamgrad_lab.experiments import (
    ablation,
    carried_report,
    reinforce,
    reinforce_report,
    streams,
    tune,
    tune_report,
    variance,
    variance_report,
)
from streamgrad_lab.experiments.records import read_settings
from streamgrad_lab.experiments.streams.cases import read_cases
from streamgrad_lab.manifest import load_manifest, plain
from streamgrad_lab.tables import read_rows
from tests.tools import ROOT

RESULTS = ROOT / "experiments" / "results" / "paper"


def recorded(name):
    folder = RESULTS / name
    assert folder.is_dir(), f"no recorded {name} run of the paper preset"
    return folder


def claims_of(folder):
    """Those of all parts of `streams`, without their figures."""
    parts = [(name, part) for name, part in streams.PARTS.items() if name != "series"]
    in_order = [claim for name, part in parts for claim in part.claims(folder / name)]
    return in_order + streams.series.claims(read_cases(folder / "series"))


def test_variance():
    folder = recorded("variance")
    found = read_settings(folder, variance_report.NAMES)
    config = variance.PRESETS["paper"]
    assert {record["loss"].shape[0] for record in found.values()} == {config.trials}
    claims = [*variance_report.variance_claims(found), *variance_report.training_claims(found)]
    assert len(claims) == 4
    assert [claim.detail for claim in claims if not claim.holds] == []


def test_ablation():
    claims = ablation.all_claims(recorded("ablation"))
    assert [claim.detail for claim in claims[:2] if not claim.holds] == []


def test_carried_over():
    rows = read_rows(recorded("carried") / carried_report.VARIANCE)
    claims = carried_report.claims(rows)
    assert len(claims) == 2
    assert [claim.detail for claim in claims if not claim.holds] == []


def test_reinforce():
    """All five claims hold, over every cell and every σ of the preset."""
    folder, config = recorded("reinforce"), reinforce.PRESETS["paper"]
    claims = [claim for section in reinforce_report.sections(folder) for claim in section.claims]
    assert len(claims) == 5
    assert [claim.detail for claim in claims if not claim.holds] == []
    limit, variances, _ = (read_rows(folder / file) for file in reinforce_report.FILES)
    assert {row["cell"] for row in limit} == set(config.cells)
    for rows in (limit, variances):
        np.testing.assert_allclose(sorted({row["sigma"] for row in rows}, reverse=True), config.sigmas, rtol=1e-9)


def test_tune():
    """Both claims hold, over the whole grid of Appendix G and every fresh seed."""
    folder, config = recorded("tune"), tune.PRESETS["paper"]
    fresh = config.seed + config.trials
    searched = {
        (setting.name, point, seed)
        for setting in config.settings
        for point in tune.grid(config, setting)
        for seed in range(config.seed, fresh)
    }
    assert set(tune_report.read_losses(folder / tune_report.POINTS)) == searched
    pairs = tune_report.read_pairs(folder)
    assert {len(pair.best_losses) for pair in pairs.values()} == {config.again}
    assert {seed for *_, seed in tune_report.read_losses(folder / tune_report.AGAIN)} == set(
        range(fresh, fresh + config.again)
    )
    claims = tune_report.claims(pairs)
    assert len(claims) == 2
    assert [claim.detail for claim in claims if not claim.holds] == []


def test_recorded_runs_are_those_of_the_presets():
    """What the manifest says of them is what `reproduce --resume` would ask for."""
    known = load_manifest(RESULTS).experiments
    for name, experiment in (("reinforce", reinforce.EXPERIMENT), ("tune", tune.EXPERIMENT)):
        assert known[name]["done"]
        assert known[name]["config"] == plain(dataclasses.asdict(experiment.presets["paper"]))


def test_streams_at_laptop_size():
    """What docs/streams.md says of the recorded run: what holds, what is undecided, and that nothing fails."""
    folder = RESULTS.parent / "laptop" / "streams"
    found = claims_of(folder)
    assert [claim.text for claim in found if claim.holds is False] == []
    assert [claim.text.split(" ")[0] for claim in found if claim.holds] == [
        "bptt",
        "immediate",
        "rtrl",
        "rtrl",
        "rtrl",
        "rtrl",
    ]
    assert len(found) == 13


def test_streams():
    """Every claim of the recorded run holds but for four that are undecided, as docs/streams.md says; none fails."""
    found = claims_of(recorded("streams"))
    assert len(found) == 21
    assert [claim.text for claim in found if claim.holds is False] == []
    undecided = [claim.text for claim in found if claim.holds is None]
    assert undecided[0] == "ok(8) is level with windowed_bptt(16) on text by chunks of 1, to 0.02 nats, or better."
    assert [text.split(":")[0] for text in undecided[1:]] == ["Henon", "Mackey-Glass", "Lorenz"]


def test_streams_have_all_cases_of_the_preset():
    """Every method, cell, setting, rate and seed that the preset has, to its last step."""
    for part in streams.PRESETS["paper"].settings:
        rows = [row for path in sorted((recorded("streams") / part.name).glob("*.csv")) for row in read_rows(path)]
        assert {row["method"] for row in rows} == set(part.methods)
        assert {row["rate"] for row in rows} == set(part.rates)
        assert {row["seed"] for row in rows} == set(range(part.seeds))
        assert {row["hidden"] for row in rows} == {part.hidden}
        for path in sorted((recorded("streams") / part.name).glob("*.csv")):
            assert max(row["steps"] for row in read_rows(path)) == part.steps
