"""Cells of Equinox."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, PyTree
from streamgrad.base import Cell
from streamgrad.cells.foreign import adapt, own, require_input
from streamgrad.checks import check_arguments
from streamgrad.trees import kind_of


def from_equinox(
    cell: Any,
    example_input: PyTree | None = None,
    init_state: Callable[[], PyTree] | None = None,
    output: Callable[[PyTree], Array] | None = None,
    call: Callable[[Any, PyTree, PyTree], PyTree] | None = None,
) -> Cell:
    """Make a cell of an Equinox module: h_t = cell(x_t, h_{t-1}).

    The parameters are the module itself with its inexact arrays and None for the rest. They begin as the module's own,
    whatever the key, and `equinox.combine(params.cell, cell)` is the module again, trained.

    Args:
      cell: `equinox.nn.GRUCell`, `equinox.nn.LSTMCell`, or any module.
      example_input: one x, or its shape and dtype; the two cells of Equinox know it.
      init_state: `init_state() -> state`; zeros for the two cells of Equinox, (h, c) for the LSTM.
      output: `output(state) -> vector`; by default h of the LSTM, y_t where the call returns one, else all
        of the state.
      call: `call(cell, state, x) -> state` or `-> (state, y)`; by default `cell(x, state)`, the order of Equinox.

    Returns:
      The cell.

    Example:
      >>> import equinox, jax, streamgrad as sg
      >>> lstm = equinox.nn.LSTMCell(2, 3, key=jax.random.key(0))
      >>> model = sg.Model(sg.cells.from_equinox(lstm), sg.heads.softmax(2))
      >>> params = model.init(jax.random.key(1))
      >>> params.cell.weight_ih.shape, model.width
      ((12, 2), 3)
      >>> type(equinox.combine(params.cell, lstm)).__name__
      'LSTMCell'
    """
    import equinox

    if not isinstance(cell, equinox.Module):
        raise ValueError(f"from_equinox takes a module of Equinox, such as equinox.nn.LSTMCell, not {kind_of(cell)}.")
    name = type(cell).__name__
    _check_stateless(cell, name, equinox.nn.StateIndex)
    known = isinstance(cell, equinox.nn.LSTMCell | equinox.nn.GRUCell)
    if init_state is None and not known:
        raise ValueError(f"{name} has no initial state that from_equinox knows: give init_state, if it is a cell.")
    if init_state is None:
        init_state = _zeros(cell, pair=isinstance(cell, equinox.nn.LSTMCell))
    if example_input is None and known:
        example_input = jax.ShapeDtypeStruct((cell.input_size,), cell.weight_ih.dtype)
    require_input(example_input, "from_equinox", name)
    if output is None and call is None and isinstance(cell, equinox.nn.LSTMCell):
        output = _first
    if call is not None:
        check_arguments("call", call, "cell", "state", "x")
    params, static = equinox.partition(cell, equinox.is_inexact_array)
    if not jax.tree.leaves(params):
        raise ValueError(f"{name} has no parameters: there is no inexact array in it.")
    structure = jax.tree.structure(jax.eval_shape(init_state))

    def run(params: PyTree, state: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        module = equinox.combine(params, static)
        new = module(x, state) if call is None else call(module, state, x)
        pair = isinstance(new, tuple) and len(new) == 2 and jax.tree.structure(new) != structure
        if pair and jax.tree.structure(new[0]) == structure:
            return new[0], new[1]  # (state, y), as in jax.lax.scan
        return new, None

    return adapt(name, run, own(params), init_state, output, example_input)


def _first(state: tuple[Array, Array]) -> Array:
    """The h of (h, c)."""
    return state[0]


def _zeros(cell: Any, pair: bool) -> Callable[[], PyTree]:
    """Where an episode begins for the two cells of Equinox, in the dtype of their weights."""

    def init_state() -> PyTree:
        zeros = jnp.zeros(cell.hidden_size, cell.weight_hh.dtype)
        return (zeros, jnp.zeros_like(zeros)) if pair else zeros

    return init_state


def _check_stateless(cell: Any, name: str, index: type) -> None:
    """Nothing in the module keeps a state of its own, as a batch norm does."""
    leaves = jax.tree_util.tree_leaves_with_path(cell, is_leaf=lambda leaf: isinstance(leaf, index))
    for path, leaf in leaves:
        if isinstance(leaf, index):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} keeps a state of its own beside the parameters, as a batch norm "
                "does, which from_equinox cannot carry along: take it out, or write the step with cells.from_function."
            )
