"""The experiment on what is carried over: from end to end at toy size, and its claims over rows of known numbers."""

import numpy as np
import pytest

from streamgrad_lab.experiments import find_experiment
from streamgrad_lab.experiments.carried_report import VARIANCE, means, sections
from streamgrad_lab.tables import write_rows


def rows_of(values, updates=(100, 200)):
    return [
        {"task": "digits", "update": u, "loss": 1.0, "setting": name, "v": v, "error": 1, "square": 1, "ready": 1,
         "gamma": "nan" if name == "gir" else 1.1}
        for name, v in values.items() for u in updates
    ]  # fmt: skip


def test_claims(tmp_path):
    write_rows(tmp_path / VARIANCE, rows_of({"gir": 300.0, "exact": 50.0, "all": 57.0, "one": 99.0}))
    (section,) = sections(tmp_path)
    assert [claim.holds for claim in section.claims] == [True, True]
    write_rows(tmp_path / VARIANCE, rows_of({"gir": 300.0, "exact": 50.0, "all": 58.0, "one": 101.0}))
    write_rows(tmp_path / "one" / "metrics.csv", [{"update": 1, "seed": 0, "loss": 0.5}])
    section, training = sections(tmp_path)
    assert [claim.holds for claim in section.claims] == [False, False]
    assert section.table.rows[0][:2] == ["identity, GIR", "300.0"] and training.table.rows[0][1] == "0.500"


def test_recorded_setting_that_is_gone(tmp_path):
    """Rows of a setting that new runs do not have are still read, and shown last."""
    write_rows(tmp_path / VARIANCE, rows_of({"gir": 300.0, "exact": 50.0, "all": 57.0, "one": 99.0, "online": 8e4}))
    (section,) = sections(tmp_path)
    assert section.table.rows[-1][0].startswith("B of Appendix F")
    assert "online" not in find_experiment("carried").presets["paper"].watched


def test_young_statistics_do_not_count():
    rows = rows_of({"one": 1.0}, (10,)) + rows_of({"one": 4.0}, (100,)) + rows_of({"one": 9.0}, (50,))
    assert means(rows)["one"] == pytest.approx(6.0)


@pytest.mark.slow
def test_smoke(tmp_path):
    experiment = find_experiment("carried")
    told = []
    experiment.run(experiment.presets["smoke"], tmp_path, lambda *words: told.append(words))
    found = sections(tmp_path)
    assert [section.title.split(":")[0] for section in found] == ["Digits, row by row", "Training"]
    assert told[-1][1:3] == (20, 20)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.csv")}
    told.clear()
    experiment.run(experiment.presets["smoke"], tmp_path, lambda *words: told.append(words), resume=True)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.csv")} and not told
    assert all(np.isfinite(float(cell)) for section in found[:1] for row in section.table.rows for cell in row[1:3])
