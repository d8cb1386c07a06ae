"""The laboratory from Python: its public names, which import jax only when they are used, and its README."""

import re
import subprocess
import sys

import numpy as np
import pytest

import streamgrad_lab
from tests.tools import ROOT, code_blocks


def test_every_name_is_there():
    """And in the table of the README; `dir` lists it before it is first used."""
    readme = (ROOT / "lab" / "README.md").read_text()
    for name in streamgrad_lab.__all__:
        assert getattr(streamgrad_lab, name) is not None and name in dir(streamgrad_lab)
        assert f"`{name}`" in readme
    assert sorted(streamgrad_lab._MODULES) == sorted(streamgrad_lab.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        streamgrad_lab.trian  # noqa: B018


def test_the_command_is_there_before_jax():
    """Ctrl-C is answered while jax is imported, so the command's own module must not import it."""
    code = "import sys, streamgrad_lab.command; assert not {'jax', 'numpy', 'streamgrad'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_example_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    """As printed: it learns, and `compare` tells the exact estimator from the truncated one."""
    monkeypatch.chdir(tmp_path)
    (block,) = code_blocks(ROOT / "lab" / "README.md")
    assert len([line for line in block.splitlines() if line]) <= 15
    scope: dict = {}
    exec(block, scope)
    assert re.match(r"loss 0\.\d+", capsys.readouterr().out)
    assert streamgrad_lab.read_metrics("runs/queue")["loss"][-1] < 0.5 * np.log(2)
    found = {row.name: row.verdict for row in scope["rows"]}
    assert found["rtrl"] == "exact" and found["bptt"] == "biased"
