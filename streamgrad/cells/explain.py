"""The use of a cell's parameters, as a table."""

import jax

from streamgrad.base import Cell, Model, worked
from streamgrad.checks import check_is_cell
from streamgrad.heads import squared_error
from streamgrad.keys import drawn_shapes
from streamgrad.step.influence_sparsity import find_influence_pattern
from streamgrad.step.jacobian_sparsity import find_jacobian_pattern
from streamgrad.step.weight_report import Place, places
from streamgrad.step.weights import rows_of
from streamgrad.trees import paths_of

WORDS = {
    "product": "weights: a product with features",
    "own": "a cut of its own: displaced at every step",
    "both": "weights, and displaced where it stands otherwise",
    "unused": "nothing depends on it: its gradient is zero",
    "whole": "the cut 'params' alone: products were not looked for",
}


def explain(cell: Cell) -> None:
    """Print which parameter of a cell went where, and what that costs.

    Each preactivation z = W a is displaced as a whole. Its weights cost an estimator one number for each row and one
    for each feature; parameters with a cut of their own cost one number each. The last line says where dh/dθ can be
    non-zero, which is what `rtrl` keeps.

    Args:
      cell: any cell.

    Example:
      >>> import jax.numpy as jnp, streamgrad as sg
      >>> cell = sg.cells.from_function(
      ...     step=lambda params, h, x: params["leak"] * h + jnp.tanh(h @ params["w"] + x),
      ...     init_params=lambda key: {"leak": jnp.full(3, 0.5), "w": jnp.ones((3, 3))},
      ...     init_state=lambda: jnp.zeros(3),
      ...     example_input=jnp.zeros(3),
      ... )
      >>> sg.cells.explain(cell)
      parameter  shape   where it went                              displaced per step
      ['leak']   (3,)    a cut of its own: displaced at every step  3
      ['w']      (3, 3)  weights: a product with features           3 preactivations of 3 features
      <BLANKLINE>
      the state has 3 numbers; there are 6 preactivations and 12 parameters
      exact RTRL keeps 36 numbers for each stream, of 3 x 12: every weight reaches all units
    """
    check_is_cell(cell)
    table = [("parameter", "shape", "where it went", "displaced per step")]
    for place in places_of(cell):
        products = [f"{rows} preactivations of {features} features" for rows, features in place.matrices]
        costs = [*products, *([str(place.displaced)] if place.displaced else [])]
        table.append((place.name, str(place.shape), WORDS[place.where], " and ".join(costs) or "nothing"))
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    for row in table:
        print("  ".join([*(f"{word:{width}}" for word, width in zip(row, widths, strict=False)), row[3]]).rstrip())
    print()
    print(_sizes(cell))
    if influence := _influence(cell):
        print(influence)


def places_of(cell: Cell) -> list[Place]:
    """The use of each parameter."""
    if cell.worked is not None:
        return cell.worked.explained()
    params = drawn_shapes(cell.init_params)
    if "preactivation" not in cell.cuts:
        return places(params, None)
    leaves = zip(paths_of(params), jax.tree.leaves(params), strict=True)
    return [Place(name, leaf.shape, "product", (tuple(leaf.shape),), 0) for name, leaf in leaves]


def _sizes(cell: Cell) -> str:
    worked = cell if cell.worked is None else cell.worked.cell
    state = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(worked.init_state)))
    count = sum(leaf.size for leaf in jax.tree.leaves(drawn_shapes(cell.init_params)))
    if "preactivation" not in worked.cuts:
        return f"the state has {state} numbers; there are {count} parameters"
    rows = sum(rows_of(drawn_shapes(worked.init_params)))
    return f"the state has {state} numbers; there are {rows} preactivations and {count} parameters"


def _influence(cell: Cell) -> str | None:
    """The size of exact RTRL's influence; None where the pattern of the step cannot be known."""
    model = worked(Model(cell, squared_error(1)))
    pattern = find_jacobian_pattern(model)
    if pattern is None:
        return None
    weights = jax.tree.leaves(drawn_shapes(model.cell.init_params))
    found = find_influence_pattern(pattern, rows_of(weights))
    stored = sum(len(leaf.reached) * w.size for leaf, w in zip(found.leaves, weights, strict=True))
    most = max(len(leaf.reached) for leaf in found.leaves)
    units, count = len(pattern.state), sum(w.size for w in weights)
    few = "every weight reaches all units" if found.is_dense else f"at most {most} units for each weight"
    return f"exact RTRL keeps {stored} numbers for each stream, of {units} x {count}: {few}"
