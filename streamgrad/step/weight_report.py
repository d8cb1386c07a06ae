"""The use of each parameter of a step, for a reader."""

from typing import Any, NamedTuple

import jax

from streamgrad._typing import PyTree
from streamgrad.step.find_weights import Plan, real_size


class Place(NamedTuple):
    """The use of one array of parameters.

    Attributes:
      name: its path among the parameters.
      shape: of the array.
      where: "product", "own" for a cut of its own, "both", "unused"; "whole" where products were not searched for.
      matrices: the matrices that it is part of, as (rows, features).
      displaced: the number of its own entries that are displaced at every step.
    """

    name: str
    shape: tuple[int, ...]
    where: str
    matrices: tuple[tuple[int, int], ...]
    displaced: int


def places(params: PyTree, plan: Plan | None) -> list[Place]:
    """The use of every array of parameters; without a plan, products were not searched for."""
    found = []
    for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
        name = jax.tree_util.keystr(path)
        if plan is None:
            found.append(Place(name, leaf.shape, "whole", (), leaf.size))
            continue
        matrices = tuple(_shape(plan, group) for group in plan.groups if index in _leaves(plan, group))
        own = sum(real_size(plan.program.avals[value]) for value in plan.rest if index in plan.made_of[value])
        where = ("both" if own else "product") if matrices else ("own" if own else "unused")
        found.append(Place(name, leaf.shape, where, matrices, own))
    return found


def _leaves(plan: Plan, group: Any) -> frozenset[int]:
    sources = frozenset().union(*(plan.affine[value].sources for value in group.values))
    return frozenset().union(*(plan.made_of[value] for value in sources))


def _shape(plan: Plan, group: Any) -> tuple[int, int]:
    rows = sum(real_size(plan.program.avals[value]) for value in group.values)
    return rows, sum(feature.size(plan.program) for feature in group.features)
