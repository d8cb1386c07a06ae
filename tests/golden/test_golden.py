"""Gradients are those that were recorded: a redesign changes no number. `python -m tests.golden record` records."""

import json
import os
import subprocess
import sys

import pytest

from tests.cells.libraries import library
from tests.golden.cases import CELLS, ESTIMATORS, MAIN, all_cases
from tests.golden.compare import RECORDED, record_of
from tests.tools import ROOT

QUICK = ("rtrl", "uoro")
QUICK_CELLS = ("gru",)
# On the machine of the record 1e-12 holds (`python -m tests.golden compare`); another processor rounds otherwise, and
# where `ok` decomposes a matrix that is all but singular, that grows.
TOLERANCE = 1e-6


def far(cell: str, names: list[str]) -> dict[str, float]:
    """What is further from the record than rounding, by case and part.

    In an interpreter of its own, since XLA is set up otherwise in the tests, and programs round otherwise then.
    """
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.golden", "differences", str(RECORDED), cell, *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == names
    return {f"{name} | {part}": off for name in names for part, off in found[name].items() if not off <= TOLERANCE}


@pytest.mark.parametrize("cell", QUICK_CELLS)
def test_is_as_recorded(cell):
    assert not far(cell, list(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_every_other_case_is_as_recorded(cell):
    """The main estimators on every cell; the command above compares all options."""
    if cell in ("flax", "equinox", "haiku"):
        library(cell)
    assert not far(cell, [name for name in MAIN if not (cell in QUICK_CELLS and name in QUICK)])


@pytest.mark.parametrize("cell", CELLS)
def test_every_case_was_recorded(cell):
    """None is compared with nothing, and nothing was recorded of a case that is no more."""
    known = {key.partition(" | ")[0] for key in record_of(RECORDED, cell)}
    assert known <= set(ESTIMATORS)
    assert {name for other, name in all_cases() if other == cell} <= known
