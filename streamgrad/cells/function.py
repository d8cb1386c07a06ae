"""Any differentiable step as a cell."""

from collections.abc import Callable

from streamgrad._typing import Array, PyTree
from streamgrad.base import Cell
from streamgrad.cells.affine import input_shape, whole_state
from streamgrad.checks import check_cell
from streamgrad.step.cuts import params_cut, state_cut


def from_function(
    step: Callable[[PyTree, PyTree, PyTree], PyTree],
    init_params: Callable[[Array], PyTree],
    init_state: Callable[[], PyTree],
    output: Callable[[PyTree], Array] | None = None,
    example_input: PyTree | None = None,
) -> Cell:
    """Make a cell of any differentiable function over any pytrees: h_t = step(params, h_{t-1}, x_t).

    It has the cuts "state" and "params". A cell whose parameters are all weight matrices is better written with
    `streamgrad.cells.affine`, which adds the cut at the preactivations.

    Args:
      step: `step(params, state, x) -> state`; the new state has the structure and shapes of the old.
      init_params: `init_params(key) -> params`.
      init_state: `init_state() -> state`.
      output: `output(state) -> vector`; by default all of the state.
      example_input: one x, or its shape and dtype; only `tbptt` asks for it, which stores inputs across chunks.

    Returns:
      The cell.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> cell = sg.cells.from_function(
      ...     step=lambda params, state, x: jnp.sin(params["gain"] * state + x),
      ...     init_params=lambda key: {"gain": jax.random.normal(key, (3,))},
      ...     init_state=lambda: jnp.zeros(3),
      ... )
      >>> sorted(cell.cuts)
      ['params', 'state']
    """
    output = whole_state if output is None else output
    check_cell(step, init_params, init_state, output)
    cuts = {"state": state_cut(step), "params": params_cut(step)}
    return Cell(init_params, init_state, step, output, cuts, input_shape(example_input))
