"""The experiment on REINFORCE: from end to end at toy size."""

import pytest

from streamgrad_lab.experiments import find_experiment


@pytest.mark.slow
def test_experiment(tmp_path):
    """The smallest preset, from the computation to the report; every claim holds."""
    experiment = find_experiment("reinforce")
    told = []
    experiment.run(experiment.presets["smoke"], tmp_path, lambda *now: told.append(now))
    assert [now[1] for now in told] == list(range(1, told[0][2] + 1))
    found = experiment.sections(tmp_path)
    for section in found:
        assert all(claim.holds for claim in section.claims), section.claims
        assert all((tmp_path / name).exists() for name in section.files)
    assert [section.figure is not None for section in found] == [True, True, False]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    # Nothing half-written is left.
    assert {path.name for path in before} == {
        "limit.csv",
        "variance.csv",
        "shaping.csv",
    }
    experiment.run(experiment.presets["smoke"], tmp_path, resume=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    with pytest.raises(ValueError, match=r"limit.csv is missing\."):
        experiment.sections(tmp_path / "elsewhere")
