"""Cells of Haiku."""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from streamgrad._typing import Array, PyTree
from streamgrad.base import Cell
from streamgrad.cells.affine import input_shape
from streamgrad.cells.foreign import adapt, attempt, own, require_input
from streamgrad.checks import accepts, check_like
from streamgrad.keys import drawn_shapes
from streamgrad.trees import kind_of


def from_haiku(
    make: Callable[..., Any],
    example_input: PyTree | None = None,
    params: PyTree | None = None,
    init_state: Callable[[], PyTree] | None = None,
    output: Callable[[PyTree], Array] | None = None,
) -> Cell:
    """Make a cell of a recurrent core of Haiku: (y_t, h_t) = make()(x_t, h_{t-1}).

    The parameters are Haiku's dict of dicts, `{"lstm/linear": {"w": ..., "b": ...}}`, drawn by the key unless `params`
    gives them; they go back into any transformed function that makes the same modules.

    Args:
      make: makes the core, such as `lambda: haiku.LSTM(8)`; or a function `make(x, state) -> (y, state)` of modules, as
        one gives it to `haiku.transform`.
      example_input: one x, or its shape and dtype; needed, as Haiku finds its shapes from it.
      params: trained parameters to begin with.
      init_state: `init_state() -> state`; by default the core's `initial_state`, such as `LSTMState(hidden, cell)`.
      output: `output(state) -> vector`; by default y_t as a vector.

    Returns:
      The cell.

    Example:
      >>> import haiku, jax, jax.numpy as jnp, streamgrad as sg
      >>> cell = sg.cells.from_haiku(lambda: haiku.LSTM(3), jnp.zeros(2))
      >>> cell.init_params(jax.random.key(0))["lstm/linear"]["w"].shape
      (5, 12)
    """
    import haiku

    if isinstance(make, haiku.Module) or inspect.isclass(make) or not callable(make):
        got = f"the class {make.__name__}" if inspect.isclass(make) else kind_of(make)
        raise ValueError(f"from_haiku takes a function that makes the core, such as lambda: haiku.LSTM(8), not {got}.")
    core = accepts(make)
    if not core and not accepts(make, "x", "state"):
        raise ValueError("make must be a function that is called as make(), and makes a core, or as make(x, state).")
    require_input(example_input, "from_haiku", "the core")
    x = input_shape(example_input)
    if init_state is None and not core:
        raise ValueError("from_haiku needs init_state for a function make(x, state): only a core has its own.")
    begin = _initial_state(make) if init_state is None else init_state
    step = haiku.transform_with_state(lambda x, state: make()(x, state) if core else make(x, state))

    def draw(key: Array) -> tuple[PyTree, PyTree]:
        zeros = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), x)
        return step.init(key, zeros, begin())

    found, others = attempt("the core cannot take one step", lambda: drawn_shapes(draw))
    if others:
        raise ValueError(
            f"the core keeps a state of Haiku's in {next(iter(others))!r}, as a batch norm does, which from_haiku "
            "cannot carry along: take it out, or write the step with cells.from_function."
        )

    def call(params: PyTree, state: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        result, _ = step.apply(params, {}, None, x, state)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"it must return (y, state), but it returns {kind_of(result)}")
        return result[1], result[0]

    if params is not None:
        check_like("params", found, params, "the core's own")
    return adapt("the core", call, (lambda key: draw(key)[0]) if params is None else own(params), begin, output, x)


def _initial_state(make: Callable[[], Any]) -> Callable[[], PyTree]:
    """The core's own `initial_state` for one stream."""
    import haiku

    def initial() -> PyTree:
        core = make()
        if not hasattr(core, "initial_state"):
            raise ValueError(f"{type(core).__name__} is no recurrent core, it has no initial_state")
        return core.initial_state(None)

    # Without parameters: an initial state that is learned would be no state to go back to.
    applied = haiku.transform(initial).apply
    return lambda: attempt("the core has no initial state without its parameters", lambda: applied({}, None))
