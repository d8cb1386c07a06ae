"""Gradients are those that were recorded: a redesign changes no number. `python -m tests.golden record` records anew."""

import pytest

from tests.cells.libraries import library
from tests.golden.cases import CELLS, ESTIMATORS, all_cases
from tests.golden.compare import RECORDED, TOLERANCE, differences, record_of

QUICK = ("rtrl", "uoro", "ok 2", "across blocks", "snap 1", "dni")
QUICK_CELLS = ("gru", "lstm")


def far(cell: str, names: list[str]) -> dict[str, float]:
    """What is further from the record than rounding, by case."""
    found = {f"{name} | {part}": off for name in names for part, off in differences(cell, name).items()}
    return {case: off for case, off in found.items() if not off <= TOLERANCE}


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("cell", QUICK_CELLS)
def test_is_as_recorded(cell, name):
    assert not far(cell, [name])


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_every_other_case_is_as_recorded(cell):
    if cell in ("flax", "equinox", "haiku"):
        library(cell)
    names = [name for other, name in all_cases() if other == cell]
    assert names
    assert not far(cell, [name for name in names if not (cell in QUICK_CELLS and name in QUICK)])


@pytest.mark.parametrize("cell", CELLS)
def test_every_case_was_recorded(cell):
    """None is compared with nothing, and nothing was recorded of a case that is no more."""
    known = {key.partition(" | ")[0] for key in record_of(RECORDED, cell)}
    assert known <= set(ESTIMATORS)
    assert {name for other, name in all_cases() if other == cell} <= known
