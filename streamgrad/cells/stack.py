"""Cells on top of each other."""

from collections.abc import Callable
from typing import Any

import jax

from streamgrad._typing import Array, PyTree
from streamgrad.base import Cell, Cut, Worked
from streamgrad.cells.explain import places_of
from streamgrad.checks import check_like
from streamgrad.step.cuts import params_cut, state_cut
from streamgrad.step.weight_report import Place


def stack(*cells: Cell) -> Cell:
    """Make one cell of several: each reads the output of the one below at the same step.

    Params, state, preactivations and features are tuples, one entry for each layer. Cuts are those that every layer
    has. At the preactivations the displacement of a lower layer reaches the state of the upper ones through their
    weights, so that every matrix's term is still one outer product, and the gradient of every layer is right.

    Args:
      *cells: from the bottom to the top, at least one.

    Returns:
      The cell; its output is the top's.

    Example:
      >>> import jax, streamgrad as sg
      >>> cell = sg.cells.stack(sg.cells.lstm(2, 4), sg.cells.vanilla(4, 3))
      >>> [layer["w"].shape for layer in cell.init_params(jax.random.key(0))]
      [(16, 7), (3, 8)]
    """
    if not cells:
        raise ValueError("stack needs at least one cell.")
    _check_layers(cells)
    if any(cell.worked is not None for cell in cells):
        return _of_worked(cells)

    def climb(visit: Callable[[int, Cell, Any], tuple[PyTree, Any]], x: PyTree) -> tuple[tuple, tuple]:
        """Go up the layers; `visit` gives a layer's new state and another result, which are returned for all layers."""
        states, results = [], []
        for i, cell in enumerate(cells):
            state, result = visit(i, cell, x)
            states.append(state)
            results.append(result)
            x = cell.output(state)
        return tuple(states), tuple(results)

    def step(params: PyTree, state: PyTree, x: PyTree) -> PyTree:
        return climb(lambda i, cell, x: (cell.step(params[i], state[i], x), None), x)[0]

    def inject(params: PyTree, state: PyTree, x: PyTree, dz: PyTree) -> PyTree:
        def visit(i: int, cell: Cell, x: PyTree) -> tuple[PyTree, None]:
            return cell.cuts["preactivation"].inject(params[i], state[i], x, dz[i]), None

        return climb(visit, x)[0]

    def gather(field: str) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
        def of_all(params: PyTree, state: PyTree, x: PyTree) -> PyTree:
            def visit(i: int, cell: Cell, x: PyTree) -> tuple[PyTree, PyTree]:
                part = getattr(cell.cuts["preactivation"], field)
                return cell.step(params[i], state[i], x), part(params[i], state[i], x)

            return climb(visit, x)[1]

        return of_all

    def init_params(key: Array) -> PyTree:
        keys = jax.random.split(key, len(cells))
        return tuple(cell.init_params(k) for cell, k in zip(cells, keys, strict=True))

    cuts = {"state": state_cut(step), "params": params_cut(step)}
    if all("preactivation" in cell.cuts for cell in cells):
        cuts["preactivation"] = Cut("preactivation", gather("into"), inject, gather("features"))
    return Cell(
        init_params,
        init_state=lambda: tuple(cell.init_state() for cell in cells),
        step=step,
        output=lambda state: cells[-1].output(state[-1]),
        cuts=cuts,
        example_input=cells[0].example_input,
        check_values=cells[0].check_values,
        layers=cells,
    )


def _of_worked(cells: tuple[Cell, ...]) -> Cell:
    """A stack with layers whose form for the estimators differs from the user's."""
    worked = [cell.worked for cell in cells]
    inner = stack(*(cell if form is None else form.cell for cell, form in zip(cells, worked, strict=True)))
    # The user's form; only its step and its initial values are used.
    plain = stack(*(cell._replace(worked=None, cuts={}) for cell in cells))

    def weights(params: PyTree) -> PyTree:
        return tuple(w if form is None else form.weights(w) for w, form in zip(params, worked, strict=True))

    def state(encoded: PyTree) -> PyTree:
        return tuple(s if form is None else form.state(s) for s, form in zip(encoded, worked, strict=True))

    def explained() -> list[Place]:
        return [
            place._replace(name=f"[{layer}]{place.name}")
            for layer, cell in enumerate(cells)
            for place in places_of(cell)
        ]

    return plain._replace(cuts=inner.cuts, worked=Worked(inner, weights, state, explained))


def _check_layers(cells: tuple[Any, ...]) -> None:
    """All of them are cells, and each can read the output of the one below."""
    for i, cell in enumerate(cells):
        if not isinstance(cell, Cell):
            got = type(cell).__name__
            raise ValueError(
                f"stack takes cells one by one, as in stack(lower, upper), but layer {i} is of type {got}."
            )
        if i > 0 and cell.example_input is not None:
            below = jax.eval_shape(lambda lower=cells[i - 1]: lower.output(lower.init_state()))
            check_like(f"the output of layer {i - 1}", cell.example_input, below, f"the input of layer {i}")
