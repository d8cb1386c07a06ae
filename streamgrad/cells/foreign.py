"""The common part of the adapters for other libraries: a call of a library's cell becomes a `Cell`.

None of these libraries is imported here, nor anywhere at import time: only a user who passes such a cell needs it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, PyTree
from streamgrad.base import Cell
from streamgrad.cells.affine import input_shape, whole_state
from streamgrad.cells.function import from_function
from streamgrad.checks import check_arguments, check_like
from streamgrad.keys import drawn_shapes


class Carried(NamedTuple):
    """The state of a foreign cell whose output is no part of what it carries, such as a projection of it.

    Attributes:
      carry: what the library's cell carries from step to step.
      output: y_t, which the next step does not read; zeros where an episode begins.
    """

    carry: PyTree
    output: PyTree


def adapt(
    name: str,
    call: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
    init_params: Callable[[Array], PyTree],
    init_state: Callable[[], PyTree],
    output: Callable[[PyTree], Array] | None,
    example_input: PyTree,
) -> Cell:
    """A cell of `(h_t, y_t) = call(params, h_{t-1}, x_t)`.

    Args:
      name: of the caller's cell, for errors.
      call: the library's own call; y_t is None where it returns its state alone.
      init_params: `init_params(key) -> params`.
      init_state: `init_state() -> state`.
      output: `output(state) -> vector`. None for y_t as a vector: read from the state where y_t is a part of it, as it
        is in every common cell, and else kept beside it, as `Carried`. All of the state where y_t is None.
      example_input: one x, or its shape and dtype.

    Returns:
      The cell; its cuts are those of `from_function`.
    """
    check_arguments("init_state", init_state)
    x = input_shape(example_input)
    params = drawn_shapes(init_params)
    state = jax.eval_shape(init_state)
    places: list[list[int | None]] = []

    def traced(params: PyTree, state: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        new, y = call(params, state, x)
        leaves = jax.tree.leaves(new)
        places.append([_place(leaves, part) for part in jax.tree.leaves(y)])
        return new, y

    new, y = attempt(f"{name} cannot take one step", lambda: jax.eval_shape(traced, params, state, x))
    check_like(f"the state that {name} returns", state, new, "the state that it begins with")

    def step(params: PyTree, state: PyTree, x: PyTree) -> PyTree:
        return call(params, state, x)[0]

    if output is not None or y is None:
        return from_function(step, init_params, init_state, output or whole_state, x)
    if None not in places[0]:
        return from_function(step, init_params, init_state, _reader(places[0]), x)

    def step_with_output(params: PyTree, state: Carried, x: PyTree) -> Carried:
        return Carried(*call(params, state.carry, x))

    def begin() -> Carried:
        return Carried(init_state(), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), y))

    return from_function(step_with_output, init_params, begin, lambda state: as_vector(state.output), x)


def _place(leaves: Sequence[Any], part: Any) -> int | None:
    """The number of the leaf that is that very array."""
    return next((index for index, leaf in enumerate(leaves) if leaf is part), None)


def _reader(places: Sequence[int | None]) -> Callable[[PyTree], Array]:
    """The output that stands at these places among the leaves of the state."""

    def read(state: PyTree) -> Array:
        leaves = jax.tree.leaves(state)
        return as_vector([leaves[place] for place in places if place is not None])

    return read


def as_vector(tree: PyTree) -> Array:
    """All arrays of a tree as one vector, which is the array itself where it is one already."""
    leaves = jax.tree.leaves(tree)
    if len(leaves) == 1:
        return leaves[0] if leaves[0].ndim == 1 else leaves[0].ravel()
    return ravel_pytree(tree)[0]


def attempt(what: str, function: Callable[[], Any]) -> Any:
    """`function()`. Raises ValueError if it fails, in one sentence that gives the library's reason."""
    try:
        return function()
    except Exception as error:  # another library may raise anything
        text = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0].rstrip(".: ")
        raise ValueError(f"{what}: {text}.") from error


def own(params: PyTree) -> Callable[[Array], PyTree]:
    """`init_params` of a network that has its parameters already: copies, as a training loop may donate them."""

    def init_params(key: Array) -> PyTree:
        del key
        return jax.tree.map(jnp.array, params)

    return init_params


def require_input(example_input: PyTree | None, function: str, name: str) -> None:
    """An example of x is there."""
    if example_input is None:
        raise ValueError(
            f"{function} needs one x to know the shapes of {name}: give example_input, such as jax.numpy.zeros(3)."
        )
