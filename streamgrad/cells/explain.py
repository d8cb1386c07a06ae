"""What the estimators make of a cell's parameters, as a table."""

import jax

from streamgrad._typing import PyTree
from streamgrad.base import Cell, Model
from streamgrad.checks import check_is_cell
from streamgrad.heads import squared_error
from streamgrad.step.influence_sparsity import find_influence_pattern
from streamgrad.step.jacobian_sparsity import find_jacobian_pattern
from streamgrad.step.weight_report import Place
from streamgrad.step.weights import rows_of

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
    """What became of each parameter."""
    if cell.worked is not None:
        return cell.worked.explained()
    params = jax.tree_util.tree_leaves_with_path(_shapes(cell))
    whole = "preactivation" not in cell.cuts
    return [
        Place(jax.tree_util.keystr(path), leaf.shape, "whole", (), leaf.size)
        if whole
        else Place(jax.tree_util.keystr(path), leaf.shape, "product", (tuple(leaf.shape),), 0)
        for path, leaf in params
    ]


def _shapes(cell: Cell) -> PyTree:
    """Shapes and dtypes of a cell's parameters."""
    return jax.eval_shape(cell.init_params, jax.eval_shape(lambda: jax.random.key(0)))


def _sizes(cell: Cell) -> str:
    worked = cell if cell.worked is None else cell.worked.cell
    state = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(worked.init_state)))
    count = sum(leaf.size for leaf in jax.tree.leaves(_shapes(cell)))
    if "preactivation" not in worked.cuts:
        return f"the state has {state} numbers; there are {count} parameters"
    rows = sum(rows_of(_shapes(worked)))
    return f"the state has {state} numbers; there are {rows} preactivations and {count} parameters"


def _influence(cell: Cell) -> str | None:
    """What exact RTRL keeps, where the pattern of the step can be known."""
    model = Model(cell, squared_error(1))
    pattern = find_jacobian_pattern(model)
    if pattern is None:
        return None
    weights = jax.tree.leaves(_shapes(model.cell))
    reach = find_influence_pattern(pattern, rows_of(weights))
    kept = sum(len(leaf.reached) * w.size for leaf, w in zip(reach.leaves, weights, strict=True))
    most = max(len(leaf.reached) for leaf in reach.leaves)
    units, count = len(pattern.state), sum(w.size for w in weights)
    few = "every weight reaches all units" if reach.is_dense else f"at most {most} units for each weight"
    return f"exact RTRL keeps {kept} numbers for each stream, of {units} x {count}: {few}"
