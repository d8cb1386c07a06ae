"""Cases in several processes are those of the preset; what is missing is said before anything is run or written."""

import sys

import pytest

from benchmarks import chain, streams
from tests.tools import ROOT


def test_streams_without_their_text(tmp_path):
    with pytest.raises(SystemExit, match=r"^the experiment streams reads tinyshakespeare\.txt .* --data FOLDER\.$"):
        streams.main(["--settings", "recall", "text", "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_chain_without_gymnax(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(SystemExit, match=r"^from_gymnax\('MemoryChain-bsuite'\) needs gymnax: pip install gymnax "):
        chain.main(["--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_cases_are_those_of_the_recorded_run():
    """Each once, and known by its file; but for truncated BPTT by chunks of one step, which is no case of its own."""
    for part in streams.streams.PRESETS["paper"].settings:
        names = [streams.name_of(case) for case in streams.cases_of(part)]
        assert len(names) == len(set(names))
        missing = {"text, gru, bptt, chunks of 1"} if part.name == "text" else set()
        assert set(names) - streams.known(ROOT / "experiments" / "results" / "paper", part) == missing


def test_pace_is_without_the_first_row():
    rows = [{"update": 50, "seconds": 9.0}, {"update": 100, "seconds": 9.5}, {"update": 150, "seconds": 10.0}]
    assert streams.pace(rows) == 0.01
