"""An influence of each row of weights on a few units alone, and the part of dh/dh that it needs.

Methods that keep M = dh/dθ at few entries (`snap`, `eprop`, `rflo`) need few entries of dh_t/dh_{t-1}: those between
units of the same row. Where they go through weights, that is one weight of a row, and not all of them.
"""

from typing import NamedTuple

import numpy as np

from streamgrad._typing import Bool, Int
from streamgrad.base import Model
from streamgrad.step import cuts
from streamgrad.step.reach import WIDEST, Leaf, Reach, closure, colour, compose, own_units
from streamgrad.step.sparsity import Pattern, feature_pattern, find_pattern


class Local(NamedTuple):
    """What a local influence is made of.

    Attributes:
      reach: the units of each row; all are the row's own. Colours are those for a single step.
      columns: for `streamgrad.step.linear.linear`: through which weights dh_t/dh_{t-1} goes.
    """

    reach: Reach
    columns: list[Int[np.ndarray, "k rows"]]


def find_local(model: Model, order: int) -> Local | None:
    """What SnAp keeps: the units that a preactivation reaches within so many steps.

    Args:
      model: the model.
      order: how many steps.

    Returns:
      The tables; None where there are too many units for a row, or a preactivation is made of another one.

    Example:
      >>> import streamgrad as sg
      >>> local = find_local(sg.Model(sg.cells.vanilla(2, 3), sg.heads.softmax(2)), order=1)
      >>> local.reach.leaves[0].own.tolist(), local.columns[0].tolist()
      ([[0, 1, 2]], [[0, 1, 2]])
    """
    pattern, still, features = find_pattern(model), find_pattern(model, still=True), feature_pattern(model)
    if pattern is None or still is None or features is None:
        return None
    reached = reached_within(pattern, still, order)
    if reached.sum(axis=0).max(initial=0) > WIDEST:
        return None
    wanted = compose(reached, reached.T)  # units of the same row
    rows = cuts.preactivation_rows(model.cell)
    starts = np.cumsum([0, *rows])
    columns, through = [], np.zeros_like(still.state)
    for start, size, reads in zip(starts, rows, features, strict=False):
        cut = pattern.cut[:, start : start + size]
        used = compose(compose(cut.T, wanted), reads.T)  # the features of each row that a unit of its kind reads
        table = own_units(used.T, np.arange(len(reads)))
        if len(table) > WIDEST:
            return None
        columns.append(table)
        through |= compose(cut, compose(used, reads))
    return Local(_reach(model, reached, Pattern(still.state | through, pattern.cut)), columns)


def find_still(model: Model) -> Local | None:
    """What e-prop keeps: the units that a preactivation reaches while the features of all weights stand still.

    Args:
      model: the model.

    Returns:
      The tables; None where there are too many units for a row, or a preactivation is made of another one.
    """
    still, features = find_pattern(model, still=True), feature_pattern(model)
    if still is None or features is None:
        return None
    reached = closure(still.state, still.cut)
    if reached.sum(axis=0).max(initial=0) > WIDEST:
        return None
    return Local(
        _reach(model, reached, still), [np.zeros((0, size), int) for size in cuts.preactivation_rows(model.cell)]
    )


def reached_within(pattern: Pattern, still: Pattern, order: int) -> Bool[np.ndarray, "S N"]:
    """The units that a preactivation reaches within so many steps, its own the first.

    Two units that feed each other without weights, and no third with them, count as one: both parts of a complex
    number, the spikes of a neuron and its threshold.
    """
    reached = pattern.cut
    for _ in range(order - 1):
        new = reached | compose(pattern.state, reached)
        if np.array_equal(new, reached):
            break
        reached = new
    after = closure(still.state, np.eye(len(reached), dtype=bool))
    mutual = after & after.T
    pairs = mutual & (mutual.sum(axis=1) == 2)[:, None]
    return reached | compose(pairs, reached)


def _reach(model: Model, reached: Bool[np.ndarray, "S N"], step: Pattern) -> Reach:
    """Tables of what rows reach, with colours for one step; units of a row differ in colour, too."""
    colours = colour(np.concatenate([step.state, reached], axis=1), np.ones(len(reached), bool))
    leaves = []
    for part in np.split(reached, np.cumsum(cuts.preactivation_rows(model.cell))[:-1], axis=1):
        own = own_units(part, colours)
        leaves.append(Leaf(own, np.zeros(0, int), own < len(reached)))
    return Reach(tuple(leaves), colours, int(colours.max()) + 1, step.state)
