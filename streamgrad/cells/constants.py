"""Parameters that a cell holds as constants: an initial state that is learned, or an output with weights of its own.

`init_state()` and `output(state)` do not take the parameters. One that reads a parameter all the same, from its
closure, reads its value from when the cell was made: training would not move it, and its gradient would lack that part,
or be zero.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import PyTree
from streamgrad.base import Cell, work_dtype
from streamgrad.cells.encoding import natural
from streamgrad.keys import drawn_shapes
from streamgrad.step.jaxpr_reader import Program, read, shaping
from streamgrad.trees import is_traced, paths_of


def check_constants(cell: Cell) -> None:
    """Neither the initial state nor the output of a cell is made of its parameters."""
    state = jax.eval_shape(cell.init_state)
    if found := _held_parameter(cell, state, read(cell.init_state)):
        raise ValueError(
            f"init_state reads the parameter {found}, but an initial state cannot be learned, and its gradient would "
            "lack that: begin at zeros, and let the first step add it."
        )
    if found := _held_parameter(cell, state, read(cell.output, state)):
        raise ValueError(
            f"output reads the parameter {found} as a constant, and its gradient would lack that: let the step return "
            "the output as a part of the state, or leave it to the head."
        )


def _held_parameter(cell: Cell, state: PyTree, program: Program) -> str | None:
    """The name of a parameter that a program has among its constants; None where there is none, as in most."""
    used = set(program.outputs).union(*(op.inputs for op in program.ops))
    arrays = [value for number, value in program.constants.items() if number in used and hasattr(value, "dtype")]
    held = [value for value in arrays if jnp.issubdtype(value.dtype, jnp.inexact)]
    if not held:
        return None
    params = drawn_shapes(cell.init_params)
    drawn = read(cell.init_params, jax.eval_shape(lambda: jax.random.key(0)))
    for name, number in zip(paths_of(params), drawn.outputs, strict=True):
        if any(value is _origin(drawn, number) for value in held):
            return name or "itself"
    # A copy of one is known by its numbers, if nothing else tells what the parameter is for.
    for name, leaf in _unread(cell, params, state):
        if any(_equal(leaf, value) for value in held):
            return name or "itself"
    return None


def _origin(program: Program, value: int) -> Any:
    """The constant that a value is, in whatever shape and dtype; None where it is computed."""
    while value in program.maker and program.maker[value].primitive in shaping():
        value = program.maker[value].inputs[0]
    return program.constants.get(value)


def _unread(cell: Cell, params: PyTree, state: PyTree) -> Iterator[tuple[str, Any]]:
    """Parameters that the step does not look at, with their names; they are drawn only where there are any."""
    if cell.example_input is None:
        return
    work = work_dtype(params)

    def shapes(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, natural(leaf.dtype, work)), tree)

    program = read(cell.step, *map(shapes, (params, state, cell.example_input)))
    used = set(program.outputs).union(*(op.inputs for op in program.ops))
    unread = [index for index, leaf in enumerate(program.inputs[0]) if leaf not in used]
    if unread:
        leaves, names = jax.tree.leaves(cell.init_params(jax.random.key(0))), paths_of(params)
        yield from ((names[index], leaves[index]) for index in unread)


def _equal(leaf: Any, value: Any) -> bool:
    if np.shape(leaf) != np.shape(value) or is_traced(leaf) or is_traced(value):
        return False
    return bool(np.array_equal(np.asarray(leaf), np.asarray(value)))
