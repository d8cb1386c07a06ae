"""An influence of each row of weights on a few units alone, and the part of dh/dh that it needs.

Methods that keep M = dh/dθ at few entries (`snap`, `eprop`, `rflo`) need few entries of dh_t/dh_{t-1}: those between
units of the same row. Where they go through weights, that is one weight of a row, and not all of them.
"""

from typing import NamedTuple

import numpy as np

from streamgrad._typing import Bool, Int, PyTree
from streamgrad.base import Model
from streamgrad.step import cuts
from streamgrad.step.influence_sparsity import WIDEST, Leaf, Reach, closure, colour, compose, own_units
from streamgrad.step.jacobian_sparsity import Pattern, feature_pattern, find_pattern, shapes_of


class Block(NamedTuple):
    """Rows of a weight matrix that follow each other and have as many units each.

    Attributes:
      matrix: which weight matrix.
      begin: its first row.
      end: the one after the last.
      table: which leaf of `Local.sets` has their units.
      sets: which of its columns, for each row.
    """

    matrix: int
    begin: int
    end: int
    table: int
    sets: Int[np.ndarray, " rows"]


class Local(NamedTuple):
    """What a local influence is made of.

    An LSTM's gates have the same two units, h_j and c_j, but for the output gate, which has h_j alone. What happens
    between units is the same for all rows that have them, and is found once, for each set of units.

    Attributes:
      reach: the units of each row, with a leaf for each block; all are the rows' own. Colours are those for a single
        step.
      sets: the different sets of units, with a leaf for each size.
      weights: the shapes of the weight matrices.
      blocks: their rows, one block after the other.
      columns: for `streamgrad.step.step_vjp.linear`: through which weights dh_t/dh_{t-1} goes.
    """

    reach: Reach
    sets: Reach
    weights: PyTree
    blocks: tuple[Block, ...]
    columns: list[Int[np.ndarray, "k rows"]]


# A matrix whose rows change their number of units more often is one block, of rows that have as many as the widest.
MOST_BLOCKS = 4


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
      >>> local = find_local(sg.Model(sg.cells.lstm(2, 1), sg.heads.softmax(2)), order=1)
      >>> [leaf.own.tolist() for leaf in local.reach.leaves]
      [[[0, 0, 0], [1, 1, 1]], [[0]]]
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
    return _tables(model, reached, Pattern(still.state | through, pattern.cut), columns)


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
    return _tables(model, reached, still, [np.zeros((0, size), int) for size in cuts.preactivation_rows(model.cell)])


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


def _tables(model: Model, reached: Bool[np.ndarray, "S N"], step: Pattern, columns: list[np.ndarray]) -> Local:
    """Tables of what rows reach, with colours for one step; units of a row differ in colour, too."""
    colours = colour(np.concatenate([step.state, reached], axis=1), np.ones(len(reached), bool))
    parts = np.split(reached, np.cumsum(cuts.preactivation_rows(model.cell))[:-1], axis=1)
    cut = [(m, begin, end) for m, part in enumerate(parts) for begin, end in _even(part.sum(axis=0))]
    units = [own_units(parts[m][:, begin:end], colours) for m, begin, end in cut]
    sizes = sorted({len(own) for own in units})
    alike = [np.concatenate([own for own in units if len(own) == size], axis=1) for size in sizes]
    # Rows that reach nothing all have the same set, the empty one, which `unique` does not know.
    tables = [np.unique(own, axis=1) if len(own) else own[:, :1] for own in alike]

    def block(m: int, begin: int, end: int, own: np.ndarray) -> Block:
        table = sizes.index(len(own))
        return Block(m, begin, end, table, _found(tables[table], own))

    def shape(tables: list[np.ndarray]) -> Reach:
        leaves = tuple(Leaf(own, np.zeros(0, int), own < len(reached)) for own in tables)
        return Reach(leaves, colours, int(colours.max()) + 1, step.state)

    blocks = tuple(block(*where, own) for where, own in zip(cut, units, strict=True))
    return Local(shape(units), shape(tables), shapes_of(model)[0], blocks, columns)


def _even(sizes: Int[np.ndarray, " rows"]) -> list[tuple[int, int]]:
    """Stretches of rows that have as many units each; or all rows, where that would be too many stretches."""
    ends = [*(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
    return list(zip([0, *ends[:-1]], ends, strict=True)) if len(ends) <= MOST_BLOCKS else [(0, len(sizes))]


def _found(table: Int[np.ndarray, "p U"], own: Int[np.ndarray, "p rows"]) -> Int[np.ndarray, " rows"]:
    """Which column of a table each column is."""
    where = {column.tobytes(): number for number, column in enumerate(np.ascontiguousarray(table.T))}
    return np.array([where[column.tobytes()] for column in np.ascontiguousarray(own.T)], int)
