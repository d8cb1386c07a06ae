"""The paper's claims, asserted over the recorded runs of the `paper` preset (experiments/results/paper)."""

from streamgrad.lab.experiments import ablation, carried_report, streams, variance, variance_report
from streamgrad.lab.experiments.records import read_settings
from streamgrad.lab.tables import read_rows
from tests.tools import ROOT

RESULTS = ROOT / "experiments" / "results" / "paper"


def recorded(name):
    folder = RESULTS / name
    assert folder.is_dir(), f"no recorded {name} run of the paper preset"
    return folder


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


def test_streams_at_laptop_size():
    """What docs/streams.md says of the recorded run: what holds, what is undecided, and that nothing fails."""
    folder = RESULTS.parent / "laptop" / "streams"
    found = [claim for section in streams.sections(folder) for claim in section.claims]
    assert [claim.text for claim in found if claim.holds is False] == []
    assert [claim.text.split(" ")[0] for claim in found if claim.holds] == [
        "tbptt",
        "immediate",
        "rtrl",
        "rtrl",
        "rtrl",
        "rtrl",
    ]
    assert len(found) == 13
