"""What is missing is said in a sentence before anything is run or written."""

import sys

import pytest

from benchmarks import chain, streams


def test_streams_without_their_text(tmp_path):
    with pytest.raises(SystemExit, match=r"^the experiment streams reads tinyshakespeare\.txt .* --data FOLDER\.$"):
        streams.main(["--settings", "recall", "text", "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_chain_without_gymnax(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(SystemExit, match=r"^from_gymnax\('MemoryChain-bsuite'\) needs gymnax: pip install gymnax "):
        chain.main(["--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
