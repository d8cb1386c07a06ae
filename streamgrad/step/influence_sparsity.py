"""The sparsity of the influence dh/dθ: the units that each row of weights can reach, from the pattern of one step.

A row of weights makes one preactivation, and all of its weights influence the same units. Some of these are the row's
own, as the unit of a diagonal recurrence is, and some are shared by every row of a matrix. Only units that the next
step reads count: no later loss learns anything of the others.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streamgrad._typing import Bool, Int
from streamgrad.step.jacobian_sparsity import JacobianPattern


class LeafPattern(NamedTuple):
    """The units that the rows of one weight matrix, or some of its rows, reach.

    Attributes:
      own: units that differ from row to row, in the order of their colours; S fills up rows with fewer.
      shared: units of all rows.
      reached: `[w + m, rows]`, whether a row reaches the unit at each place: its own units first, then the shared ones.
    """

    own: Int[np.ndarray, "w rows"]
    shared: Int[np.ndarray, " m"]
    reached: Bool[np.ndarray, "p rows"]


class InfluencePattern(NamedTuple):
    """The entries of an influence that can be non-zero.

    Attributes:
      leaves: one for each weight matrix; in a `RowUnits`, one for each range of rows or size of sets.
      colours: of every unit; -1 for units that the next step does not read. Two units of one colour are never reached
        from the same unit or the same row, so that one cotangent serves all units of a colour.
      vectors: the number of colours, and so of cotangents that serve all units.
      moves: `moves[j, i]`, whether unit j can ever depend on unit i.
    """

    leaves: tuple[LeafPattern, ...]
    colours: Int[np.ndarray, " S"]
    vectors: int
    moves: Bool[np.ndarray, "S S"]

    @property
    def is_dense(self) -> bool:
        """Whether every row reaches every unit."""
        return all(not leaf.own.size and len(leaf.shared) == len(self.colours) for leaf in self.leaves)


# The most units of its own that a row may have: their Jacobian is stored for each row, and grows with their square.
MOST_OWN_UNITS = 32


def find_influence_pattern(pattern: JacobianPattern, rows: Sequence[int]) -> InfluencePattern:
    """Follow the pattern of one step through any number of steps.

    Args:
      pattern: of one step.
      rows: the number of preactivations of each weight matrix, in order.

    Example:
      >>> diagonal = JacobianPattern(np.eye(3, dtype=bool), np.eye(3, dtype=bool))
      >>> found = find_influence_pattern(diagonal, [3])
      >>> found.vectors, found.leaves[0].own.tolist(), found.leaves[0].shared.tolist()
      (1, [[0, 1, 2]], [])
    """
    live = np.asarray(pattern.state.any(axis=0))
    state, cut = pattern.state & live[:, None], pattern.cut & live[:, None]
    if _all_reach_all(state, live):  # as in most networks, and step by step it would take long to find out
        moves = live[:, None] & live
        reached = live[:, None] & np.asarray(cut.any(axis=0))
    else:
        moves = closure(state, np.diag(live))
        reached = compose(moves, cut)
    colours = colour(np.concatenate([moves, reached], axis=1), live)
    return InfluencePattern(_leaves(reached, rows, colours), colours, int(colours.max(initial=-1)) + 1, moves)


def influence_pattern_of(
    reached: Bool[np.ndarray, "S N"], state: Bool[np.ndarray, "S S"], rows: Sequence[int]
) -> InfluencePattern:
    """The pattern with the entries `reached`, for whole Jacobians: every unit has a colour of its own."""
    colours = np.arange(len(state))
    return InfluencePattern(_leaves(reached, rows, colours), colours, len(state), state)


def _all_reach_all(state: Bool[np.ndarray, "S S"], live: Bool[np.ndarray, " S"]) -> bool:
    """Whether every live unit reaches every other: one of them reaches all, and all reach it."""
    if not live.any():
        return False
    first = (np.arange(len(live)) == np.argmax(live))[:, None]
    return all(np.array_equal(closure(pattern, first)[:, 0], live) for pattern in (state, state.T))


def closure(state: Bool[np.ndarray, "S S"], start: Bool[np.ndarray, "S n"]) -> Bool[np.ndarray, "S n"]:
    """The units reached from `start` after any number of steps, none included."""
    found = start
    while True:
        new = found | compose(state, found)
        if np.array_equal(new, found):
            return found
        found = new


def compose(state: Bool[np.ndarray, "m S"], before: Bool[np.ndarray, "S n"]) -> Bool[np.ndarray, "m n"]:
    """The product of two patterns: the units reached one step after `before`."""
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
    """Greedy colours of the live units: no colour appears twice in a column of `together`."""
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


def _leaves(
    reached: Bool[np.ndarray, "S N"], rows: Sequence[int], colours: Int[np.ndarray, " S"]
) -> tuple[LeafPattern, ...]:
    """Sort the units of each weight matrix into those of single rows and those of all."""

    def one(reached: Bool[np.ndarray, "S rows"]) -> LeafPattern:
        union, common = np.asarray(reached.any(axis=1)), np.asarray(reached.all(axis=1))
        private = reached & ~common[:, None]
        width = int(private.sum(axis=0).max(initial=0))
        if width > MOST_OWN_UNITS or 4 * (width + common.sum()) > 3 * union.sum():
            common, private = union, np.zeros_like(private)
        own, shared = own_units(private, colours), np.flatnonzero(common)
        return LeafPattern(own, shared, np.concatenate([own < len(colours), reached[shared]]))

    return tuple(map(one, np.split(reached, np.cumsum(rows)[:-1], axis=1)))


def own_units(private: Bool[np.ndarray, "S rows"], colours: Int[np.ndarray, " S"]) -> Int[np.ndarray, "w rows"]:
    """The units of each row in the order of their colours, one column per row; S fills up rows with fewer units."""
    own = np.full((int(private.sum(axis=0).max(initial=0)), private.shape[1]), len(colours))
    order = np.argsort(colours, kind="stable")
    places = np.cumsum(private[order], axis=0) - 1
    ranks, rows = np.nonzero(private[order])
    own[places[ranks, rows], rows] = order[ranks]
    return own
