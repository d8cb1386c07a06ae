"""An influence of each row of weights on a few units alone, and the part of dh/dh that it needs.

Methods that store M = dh/dθ at few entries need few entries of dh_t/dh_{t-1}: those between units of the same row.
An entry that goes through weights goes through one weight of a row, and not through all of them.
"""

from typing import NamedTuple

import numpy as np

from streamgrad._typing import Bool, Int, PyTree
from streamgrad.base import Model
from streamgrad.step import cuts
from streamgrad.step.influence_sparsity import (
    MOST_OWN_UNITS,
    InfluencePattern,
    LeafPattern,
    closure,
    colour,
    compose,
    own_units,
)
from streamgrad.step.jacobian_sparsity import JacobianPattern, feature_pattern, find_jacobian_pattern, shapes_of


class RowRange(NamedTuple):
    """Consecutive rows of a weight matrix with the same number of units.

    Attributes:
      matrix: the number of the weight matrix.
      begin: the first row.
      end: the row after the last.
      table: the number of the leaf of `RowUnits.by_set` that lists their units.
      sets: for each row its column in that table.
    """

    matrix: int
    begin: int
    end: int
    table: int
    sets: Int[np.ndarray, " rows"]


class RowUnits(NamedTuple):
    """The units of each row of weights, and the sets of units that occur.

    An LSTM's gates have the same two units, h_j and c_j, but for the output gate, which has h_j alone. The Jacobian
    between units is the same for all rows that have them, and is computed once for each set.

    Attributes:
      by_row: the units of each row, a leaf for each range of rows; none are shared. Colours are those of a single step.
      by_set: the different sets of units, a leaf for each size.
      weights: the shapes of the weight matrices.
      ranges: their rows, one range after the other.
      recurrent_features: for `step_vjp`: the weights that dh_t/dh_{t-1} goes through.
    """

    by_row: InfluencePattern
    by_set: InfluencePattern
    weights: PyTree
    ranges: tuple[RowRange, ...]
    recurrent_features: list[Int[np.ndarray, "k rows"]]


# A matrix whose rows change their number of units more often is one range, and every row is as wide as the widest.
MOST_RANGES = 4


def find_row_units(model: Model, order: int) -> RowUnits | None:
    """SnAp's units: those that a preactivation reaches within `order` steps.

    Returns:
      The tables; None for a row with too many units, or a preactivation that is made of another one.

    Example:
      >>> import streamgrad as sg
      >>> found = find_row_units(sg.Model(sg.cells.vanilla(2, 3), sg.heads.softmax(2)), order=1)
      >>> found.by_row.leaves[0].own.tolist(), found.recurrent_features[0].tolist()
      ([[0, 1, 2]], [[0, 1, 2]])
      >>> found = find_row_units(sg.Model(sg.cells.lstm(2, 1), sg.heads.softmax(2)), order=1)
      >>> [leaf.own.tolist() for leaf in found.by_row.leaves]
      [[[0, 0, 0], [1, 1, 1]], [[0]]]
    """
    pattern, features = find_jacobian_pattern(model), feature_pattern(model)
    without_weights = find_jacobian_pattern(model, fixed_features=True)
    if pattern is None or without_weights is None or features is None:
        return None
    reached = reached_within(pattern, without_weights, order)
    if reached.sum(axis=0).max(initial=0) > MOST_OWN_UNITS:
        return None
    same_row = compose(reached, reached.T)
    recurrent, through, begin = [], np.zeros_like(pattern.state), 0
    for size, reads in zip(cuts.preactivation_rows(model.cell), features, strict=True):
        cut = pattern.cut[:, begin : begin + size]
        used = compose(compose(cut.T, same_row), reads.T)  # the features of each row that read units of the same row
        table = own_units(used.T, np.arange(len(reads)))
        if len(table) > MOST_OWN_UNITS:
            return None
        recurrent.append(table)
        through |= compose(cut, compose(used, reads))
        begin += size
    step = JacobianPattern(without_weights.state | through, pattern.cut)
    return _tables(model, reached, step, recurrent)


def find_trace_units(model: Model) -> RowUnits | None:
    """The units of e-prop's traces: those that a preactivation reaches while the features of all weights are fixed.

    Returns:
      The tables; None for a row with too many units, or a preactivation that is made of another one.
    """
    pattern = find_jacobian_pattern(model, fixed_features=True)
    if pattern is None or feature_pattern(model) is None:
        return None
    reached = closure(pattern.state, pattern.cut)
    if reached.sum(axis=0).max(initial=0) > MOST_OWN_UNITS:
        return None
    return _tables(model, reached, pattern, [np.zeros((0, size), int) for size in cuts.preactivation_rows(model.cell)])


def reached_within(pattern: JacobianPattern, without_weights: JacobianPattern, order: int) -> Bool[np.ndarray, "S N"]:
    """The units that a preactivation reaches within `order` steps, the current one included.

    Two units that feed each other without weights, and no third with them, count as one: both parts of a complex
    number, the spikes of a neuron and its threshold.
    """
    reached = pattern.cut
    for _ in range(order - 1):
        new = reached | compose(pattern.state, reached)
        if np.array_equal(new, reached):
            break
        reached = new
    after = closure(without_weights.state, np.eye(len(reached), dtype=bool))
    mutual = after & after.T
    pairs = mutual & (mutual.sum(axis=1) == 2)[:, None]
    return reached | compose(pairs, reached)


def _tables(
    model: Model, reached: Bool[np.ndarray, "S N"], step: JacobianPattern, recurrent: list[np.ndarray]
) -> RowUnits:
    """The units of all rows and the sets of them, with colours for one step; units of a row differ in colour, too."""
    colours = colour(np.concatenate([step.state, reached], axis=1), np.ones(len(reached), bool))
    parts = np.split(reached, np.cumsum(cuts.preactivation_rows(model.cell))[:-1], axis=1)
    spans = [(m, begin, end) for m, part in enumerate(parts) for begin, end in _even_spans(part.sum(axis=0))]
    units = [own_units(parts[m][:, begin:end], colours) for m, begin, end in spans]
    sizes = sorted({len(own) for own in units})
    alike = [np.concatenate([own for own in units if len(own) == size], axis=1) for size in sizes]
    # Rows that reach nothing all have the same set, the empty one, which `unique` does not know.
    tables = [np.unique(own, axis=1) if len(own) else own[:, :1] for own in alike]

    def as_range(matrix: int, begin: int, end: int, own: np.ndarray) -> RowRange:
        number = sizes.index(len(own))
        column = {units.tobytes(): i for i, units in enumerate(np.ascontiguousarray(tables[number].T))}
        sets = np.array([column[units.tobytes()] for units in np.ascontiguousarray(own.T)], int)
        return RowRange(matrix, begin, end, number, sets)

    def as_pattern(tables: list[np.ndarray]) -> InfluencePattern:
        leaves = tuple(LeafPattern(own, np.zeros(0, int), own < len(reached)) for own in tables)
        return InfluencePattern(leaves, colours, int(colours.max()) + 1, step.state)

    ranges = tuple(as_range(*span, own) for span, own in zip(spans, units, strict=True))
    return RowUnits(as_pattern(units), as_pattern(tables), shapes_of(model)[0], ranges, recurrent)


def _even_spans(sizes: Int[np.ndarray, " rows"]) -> list[tuple[int, int]]:
    """Begin and end of the longest spans of rows with the same number of units; all rows, if there were too many."""
    ends = [*(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
    return list(zip([0, *ends[:-1]], ends, strict=True)) if len(ends) <= MOST_RANGES else [(0, len(sizes))]
