"""How far each preactivation reaches: the shape that the influence dh/dθ has, from the pattern of the step.

A row of weights makes one preactivation, and all of its weights influence the same units. Of these, some are the row's
own, as the unit of a diagonal recurrence is, and some are reached by every row of a matrix. Only units that the next
step reads count: of the others no later loss can learn anything.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streamgrad._typing import Bool, Int
from streamgrad.step.jacobian_sparsity import Pattern


class Leaf(NamedTuple):
    """Which units the rows of one weight matrix reach, or some of its rows.

    Attributes:
      own: units that differ from row to row, in the order of their colours; S where a row has fewer.
      shared: units of all rows.
      reached: `[w + m, rows]`: whether a row reaches the unit at this place, its own first and then those shared.
    """

    own: Int[np.ndarray, "w rows"]
    shared: Int[np.ndarray, " m"]
    reached: Bool[np.ndarray, "p rows"]


class Reach(NamedTuple):
    """The shape of an influence.

    Attributes:
      leaves: one for each weight matrix (of a `streamgrad.step.row_units.Local`, for each block of rows or size of sets).
      colours: of every unit, -1 of those that the next step does not read. Units of a colour are never reached from
        the same unit or the same row, so that one cotangent may ask for all of them.
      vectors: how many colours there are, and so how many cotangents ask for all units.
      moves: `moves[j, i]`: whether unit j can ever depend on unit i.
    """

    leaves: tuple[Leaf, ...]
    colours: Int[np.ndarray, " S"]
    vectors: int
    moves: Bool[np.ndarray, "S S"]

    @property
    def is_dense(self) -> bool:
        """Whether every row reaches every unit."""
        return all(not leaf.own.size and len(leaf.shared) == len(self.colours) for leaf in self.leaves)


# Units of its own that a row may have. Their Jacobian is kept for each row, and costs as much as the square of them.
WIDEST = 32


def find_reach(pattern: Pattern, rows: Sequence[int]) -> Reach:
    """Follow the pattern of a step through any number of steps.

    Args:
      pattern: of one step.
      rows: how many preactivations each weight matrix has, in order.

    Returns:
      What every row reaches in the end.

    Example:
      >>> diagonal = Pattern(np.eye(3, dtype=bool), np.eye(3, dtype=bool))
      >>> reach = find_reach(diagonal, [3])
      >>> reach.vectors, reach.leaves[0].own.tolist(), reach.leaves[0].shared.tolist()
      (1, [[0, 1, 2]], [])
    """
    live = np.asarray(pattern.state.any(axis=0))
    state, cut = pattern.state & live[:, None], pattern.cut & live[:, None]
    if _all_reach_all(state, live):  # as in most networks, and to find that out step by step would take long
        moves = live[:, None] & live
        reached = live[:, None] & np.asarray(cut.any(axis=0))
    else:
        moves = closure(state, np.diag(live))
        reached = compose(moves, cut)
    colours = colour(np.concatenate([moves, reached], axis=1), live)
    ends = np.cumsum(rows)
    parts = np.split(reached, ends[:-1], axis=1)
    leaves = tuple(_sorted(part, colours) for part in parts)
    return Reach(leaves, colours, int(colours.max(initial=-1)) + 1, moves)


def shape_of(reached: Bool[np.ndarray, "S N"], state: Bool[np.ndarray, "S S"], rows: Sequence[int]) -> Reach:
    """The shape of an influence of given entries, advanced by whole Jacobians: every unit has a colour of its own."""
    colours = np.arange(len(state))
    parts = np.split(reached, np.cumsum(rows)[:-1], axis=1)
    return Reach(tuple(_sorted(part, colours) for part in parts), colours, len(state), state)


def _all_reach_all(state: Bool[np.ndarray, "S S"], live: Bool[np.ndarray, " S"]) -> bool:
    """Whether every live unit reaches every other: one of them reaches all, and all reach it."""
    if not live.any():
        return False
    for pattern in (state, state.T):
        found = np.arange(len(live)) == np.argmax(live)
        while True:
            new = found | (np.asarray(pattern[:, found].any(axis=1)) & live)
            if np.array_equal(new, found):
                break
            found = new
        if not np.array_equal(found, live):
            return False
    return True


def closure(state: Bool[np.ndarray, "S S"], start: Bool[np.ndarray, "S n"]) -> Bool[np.ndarray, "S n"]:
    """What is reached from `start` after any number of steps, none included."""
    found = start
    while True:
        new = found | compose(state, found)
        if np.array_equal(new, found):
            return found
        found = new


def compose(state: Bool[np.ndarray, "m S"], before: Bool[np.ndarray, "S n"]) -> Bool[np.ndarray, "m n"]:
    """What is reached one step after `before`: the product of two patterns."""
    bits = np.packbits(before, axis=1)
    found = np.zeros((len(state), bits.shape[1]), np.uint8)
    known: dict[bytes, np.ndarray] = {}  # rows of a dense pattern are all the same
    for j, row in enumerate(state):
        name = row.tobytes()
        if name not in known:
            known[name] = np.bitwise_or.reduce(bits[row], axis=0)
        found[j] = known[name]
    return np.unpackbits(found, axis=1)[:, : before.shape[1]].astype(bool)


def colour(together: Bool[np.ndarray, "S n"], live: Bool[np.ndarray, " S"]) -> Int[np.ndarray, " S"]:
    """Colours of the live units, as few as come easily: none appears twice in a column of `together`."""
    colours = np.full(len(live), -1)
    if np.any(together[live].all(axis=0)):  # one column has them all
        colours[live] = np.arange(live.sum())
        return colours
    bits = np.packbits(together.T, axis=1)
    different = {row.tobytes(): number for number, row in enumerate(bits)}
    columns = together[:, list(different.values())]
    members = [np.flatnonzero(column) for column in columns.T]
    for unit in np.flatnonzero(live):
        neighbours = [colours[members[number]] for number in np.flatnonzero(columns[unit])]
        taken = set(np.concatenate(neighbours).tolist()) if neighbours else set()
        colours[unit] = next(c for c in range(len(live)) if c not in taken)
    return colours


def _sorted(reached: Bool[np.ndarray, "S rows"], colours: Int[np.ndarray, " S"]) -> Leaf:
    """Sort the units of a matrix into those of single rows and those of all."""
    union, common = np.asarray(reached.any(axis=1)), np.asarray(reached.all(axis=1))
    private = reached & ~common[:, None]
    width = int(private.sum(axis=0).max(initial=0))
    if width > WIDEST or 4 * (width + common.sum()) > 3 * union.sum():
        common, private = union, np.zeros_like(private)
    own, shared = own_units(private, colours), np.flatnonzero(common)
    return Leaf(own, shared, np.concatenate([own < len(colours), reached[shared]]))


def own_units(private: Bool[np.ndarray, "S rows"], colours: Int[np.ndarray, " S"]) -> Int[np.ndarray, "w rows"]:
    """The units of each row, in the order of their colours, as a table: S where a row has fewer than others."""
    own = np.full((int(private.sum(axis=0).max(initial=0)), private.shape[1]), len(colours))
    order = np.argsort(colours, kind="stable")
    places = np.cumsum(private[order], axis=0) - 1
    ranks, rows = np.nonzero(private[order])
    own[places[ranks, rows], rows] = order[ranks]
    return own
