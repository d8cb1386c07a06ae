"""Cells of Flax, of both of its interfaces: nnx and linen."""

from collections.abc import Callable
from typing import Any

import jax

from streamgrad._typing import Array, PyTree
from streamgrad.base import Cell
from streamgrad.cells.affine import input_shape
from streamgrad.cells.foreign import adapt, attempt, own, require_input
from streamgrad.checks import check_arguments, check_like
from streamgrad.keys import drawn_shapes
from streamgrad.trees import kind_of

Call = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


def from_flax(
    cell: Any,
    example_input: PyTree | None = None,
    params: PyTree | None = None,
    init_state: Callable[[], PyTree] | None = None,
    output: Callable[[PyTree], Array] | None = None,
) -> Cell:
    """Make a cell of a module of Flax, nnx or linen: (h_t, y_t) = cell(h_{t-1}, x_t), where h is Flax's carry.

    Of an nnx module the parameters are its `nnx.State` of `nnx.Param`; they begin as the module's own, whatever the
    key, and `nnx.update(cell, params.cell)` puts trained ones back. Of a linen module they are its dict
    `variables["params"]`, drawn by the key unless `params` gives them.

    Args:
      cell: any module that is called as `cell(carry, x)` and returns `(carry, y)`.
      example_input: one x, or its shape and dtype. Modules of nnx with `in_features` know it; those of linen need it.
      params: for linen, trained parameters to begin with.
      init_state: `init_state() -> carry`; by default what the module's `initialize_carry` returns.
      output: `output(carry) -> vector`; by default y_t as a vector.

    Returns:
      The cell.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> from flax import linen, nnx
      >>> cell = sg.cells.from_flax(nnx.OptimizedLSTMCell(2, 3, rngs=nnx.Rngs(0)))
      >>> cell.init_params(jax.random.key(0))["dense_i"]["kernel"].shape
      (2, 12)
      >>> cell = sg.cells.from_flax(linen.GRUCell(3), jnp.zeros(2))
      >>> sorted(cell.init_params(jax.random.key(0)))
      ['hn', 'hr', 'hz', 'in', 'ir', 'iz']
    """
    from flax import linen, nnx

    name = type(cell).__name__
    lazy = isinstance(cell, linen.Module)
    if not lazy and not isinstance(cell, nnx.Module):
        raise ValueError(
            f"from_flax takes a module of flax.nnx or flax.linen, such as nnx.LSTMCell, not {kind_of(cell)}."
        )
    if init_state is None and not hasattr(cell, "initialize_carry"):
        raise ValueError(
            f"{name} is no recurrent cell of Flax: it has no initialize_carry, and no init_state is given."
        )
    size = getattr(cell, "in_features", None)
    if example_input is None and isinstance(size, int):
        example_input = jax.ShapeDtypeStruct((size,), getattr(cell, "param_dtype", float))
    require_input(example_input, "from_flax", name)
    x = input_shape(example_input)
    begin = _carry(cell, lazy, x, name) if init_state is None else init_state
    check_arguments("init_state", begin)
    draw, call = _linen(cell, name, x, params, begin) if lazy else _nnx(cell, name, x, params, begin)
    return adapt(name, call, draw, begin, output, x)


def _carry(cell: Any, lazy: bool, x: PyTree, name: str) -> Callable[[], PyTree]:
    """`initialize_carry` with a fixed key: Flax asks for one, and its default, zeros, does not look at it."""
    shapes = jax.tree.leaves(x)
    if len(shapes) != 1:
        raise ValueError(f"{name}'s initialize_carry takes the shape of one array, but x is a tree: give init_state.")

    def init_state() -> PyTree:
        if lazy:
            return cell.initialize_carry(jax.random.key(0), shapes[0].shape)
        from flax import nnx

        return cell.initialize_carry(shapes[0].shape, nnx.Rngs(0))

    # Linen's are not there: an initial state that is learned would be no state to go back to.
    alone = " without its parameters" if lazy else ""
    return lambda: attempt(f"{name} has no initial state for x of shape {shapes[0].shape}{alone}", init_state)


def _nnx(
    cell: Any, name: str, x: PyTree, params: PyTree | None, begin: Callable[[], PyTree]
) -> tuple[Callable[[Array], PyTree], Call]:
    """Parameters and call of an nnx module, whose other variables must stay as they are."""
    from flax import nnx

    if params is not None:
        raise ValueError(f"{name} has its parameters already: put others into it with nnx.update(cell, params).")
    graph, found, rest = nnx.split(cell, nnx.Param, ...)
    if not jax.tree.leaves(found):
        raise ValueError(f"{name} has no parameters: there is no nnx.Param in it.")
    changed: list[str] = []

    def after(rest: PyTree, params: PyTree, carry: PyTree, x: PyTree) -> PyTree:
        """Notes which variables the call has changed: those that are no longer the very same arrays."""
        module = nnx.merge(graph, params, rest)
        before = _variables(nnx.state(module, nnx.Not(nnx.Param)))
        result = module(carry, x)
        now = _variables(nnx.state(module, nnx.Not(nnx.Param)))
        changed.extend(path for path, value in before.items() if now.get(path) is not value)
        return result

    attempt(f"{name} cannot take one step", lambda: jax.eval_shape(after, rest, found, jax.eval_shape(begin), x))
    if changed:
        raise ValueError(
            f"{name} changes {changed[0]} when it is called, but only its carry may change from step to step: "
            "set a dropout or a batch norm to its evaluation mode, or write the step with cells.from_function."
        )

    def call(params: PyTree, carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        return _pair(name, nnx.merge(graph, params, rest)(carry, x))

    return own(found), call


def _variables(state: PyTree) -> dict[str, Any]:
    """The arrays of an nnx state by their place."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _linen(
    cell: Any, name: str, x: PyTree, params: PyTree | None, begin: Callable[[], PyTree]
) -> tuple[Callable[[Array], PyTree], Call]:
    """Parameters and call of a linen module, which must have no other variables."""

    def draw(key: Array) -> PyTree:
        zeros = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), x)
        return cell.init(key, begin(), zeros)

    variables = attempt(f"{name} cannot take one step", lambda: drawn_shapes(draw))
    if others := sorted(set(variables) - {"params"}):
        raise ValueError(
            f"{name} has variables in {others[0]!r} beside its parameters, as a batch norm has, which from_flax cannot "
            "carry along: take them out, or write the step with cells.from_function."
        )
    if "params" not in variables:
        raise ValueError(f"{name} has no parameters.")

    def call(params: PyTree, carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        return _pair(name, cell.apply({"params": params}, carry, x))

    if params is None:
        return lambda key: draw(key)["params"], call
    params = params["params"] if set(params) == {"params"} else params  # all variables, as linen's init returns them
    check_like("params", variables["params"], params, f"{name}'s own")
    return own(params), call


def _pair(name: str, result: Any) -> tuple[PyTree, PyTree]:
    """The carry and the output that a cell of Flax returns."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"{name} must return (carry, y), but it returns {kind_of(result)}")
    return result
