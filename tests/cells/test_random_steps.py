"""A few of the random steps of `tests.cells.random_steps`, which has thousands."""

import pytest

from tests.cells.random_steps import check_cell, check_one, random_cell
from tests.tools import few

hypothesis = pytest.importorskip("hypothesis")


@pytest.mark.parametrize("seed", few(range(16), 6))
def test_by_seed(seed):
    check_one(seed)


@pytest.mark.slow
@hypothesis.settings(derandomize=True, max_examples=12, deadline=None, database=None)
@hypothesis.given(hypothesis.strategies.data())
def test_what_hypothesis_makes_up(data):
    """It shrinks a step that fails to the least one that still does; the same ones every time."""
    check_cell(random_cell(lambda options: data.draw(hypothesis.strategies.sampled_from(list(options)))), seed=0)
