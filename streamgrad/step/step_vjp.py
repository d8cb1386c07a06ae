"""The steps of a chunk, linearised once each: the forward pass keeps what a reverse pass with any cotangents needs.

`jax.vjp` of a whole scan would do for one kind of cotangents. Here some streams take one and others many, in one pass,
so that the two passes are written out. What a step's linear map needs besides the weights goes from one to the other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Cell
from streamgrad.checks import check_same_state
from streamgrad.step.matvec import by_parts, still
from streamgrad.step.static_gather import take as take_entries
from streamgrad.step.weights import like_params, rows_of


class Linear(NamedTuple):
    """A cell's transition over ravelled states, and how its linear map travels from one pass to the other.

    Attributes:
      take: `take(state[S], x) -> (new[S], kept, features)`: a step, what its linear map needs and depends on where it
        is taken, and the features a of every weight matrix (None where the cell has no preactivations).
      pull: `pull(kept, cotangent[S]) -> (cotangent of the old state [S], of the step's parameters)`. The second is over
        preactivations, in the structure of the parameters, where the cell has them; else like the parameters.
      push: `push(state[S], x, tangent[S]) -> [S]`, (dh_t/dh_{t-1}) tangent.
    """

    take: Callable[[Float[Array, " S"], PyTree], tuple[Float[Array, " S"], list[Any], PyTree]]
    pull: Callable[[list[Any], Float[Array, " S"]], tuple[Float[Array, " S"], PyTree]]
    push: Callable[[Float[Array, " S"], PyTree, Float[Array, " S"]], Float[Array, " S"]]


def linear(cell: Cell, params: PyTree, start: PyTree, x: PyTree, columns: list[Any] | None = None) -> Linear:
    """Prepare a cell's transition for both passes.

    Args:
      cell: the cell.
      params: its parameters.
      start: a state, for its structure.
      x: an input, likewise.
      columns: through which weights dh_t/dh_{t-1} goes: for each weight matrix the features, `[k, rows]`, whose weights
        count in each row, and as many as it has where there are fewer. All other features are constants. None for all.

    Returns:
      The maps, for one stream.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> cell = sg.cells.vanilla(2, 3)
      >>> params = cell.init_params(jax.random.key(0))
      >>> maps = linear(cell, params, cell.init_state(), jnp.ones(2))
      >>> new, kept, features = maps.take(jnp.zeros(3), jnp.ones(2))
      >>> cotangent, dz = maps.pull(kept, jnp.ones(3))
      >>> cotangent.shape, dz["w"].shape, features["w"].shape
      ((3,), (3,), (6,))
    """
    vector, unravel = ravel_pytree(start)
    cut = cell.cuts.get("preactivation")
    here = like_params(params, jnp.zeros(sum(rows_of(params)), vector.dtype)) if cut is not None else params

    def transition(vector: Array, here: PyTree, x: PyTree) -> Float[Array, " S"]:
        """h_t, as a function of h_{t-1} and of a displacement of this step's preactivations, or of its parameters."""
        state = unravel(vector)
        if columns is not None:
            new = _through_some(cell, params, columns, state, x, here)
        else:
            new = cell.step(here, state, x) if cut is None else cut.inject(params, state, x, here)
        check_same_state(state, new)
        return ravel_pytree(new)[0].astype(vector.dtype)

    def linearised(vector: Array, x: PyTree) -> tuple[Array, list[Any], Any]:
        with by_parts():
            new, pull = jax.vjp(lambda vector, here: transition(vector, here, x), vector, here)
        leaves, structure = jax.tree.flatten(pull)
        return new, leaves, structure

    moves = depends(lambda vector, x: linearised(vector, x)[1], vector, x)
    _, anywhere, structure = linearised(vector, x)  # of which only what does not move is used

    def take(vector: Array, x: PyTree) -> tuple[Array, list[Any], PyTree]:
        new, leaves, _ = linearised(vector, x)
        features = None
        if cut is not None and cut.features is not None:
            features = cut.features(params, unravel(vector), x)
        return new, [leaf for leaf, moving in zip(leaves, moves, strict=True) if moving], features

    def pull(kept: list[Any], cotangent: Array) -> tuple[Array, PyTree]:
        rest = iter(kept)
        leaves = [next(rest) if moving else leaf for leaf, moving in zip(anywhere, moves, strict=True)]
        return jax.tree.unflatten(structure, leaves)(cotangent)

    def push(vector: Array, x: PyTree, tangent: Array) -> Float[Array, " S"]:
        return jax.jvp(lambda vector: transition(vector, here, x), (vector,), (tangent,))[1]

    return Linear(take, pull, push)


def _through_some(cell: Cell, params: PyTree, columns: list[Any], state: PyTree, x: PyTree, here: PyTree) -> PyTree:
    """The transition with the derivative of a few weights alone: all features stand still, and theirs are put back."""
    cut = cell.cuts["preactivation"]
    assert cut.features is not None
    leaves, structure = jax.tree.flatten(params)
    features = jax.tree.leaves(cut.features(params, state, x))
    moved = [few_columns(w, a, index) for w, a, index in zip(leaves, features, columns, strict=True)]
    moved = jax.tree.unflatten(structure, [z - jax.lax.stop_gradient(z) for z in moved])
    with still():
        return cut.inject(params, state, x, jax.tree.map(jnp.add, here, moved))


def few_columns(weights: Float[Array, "N A"], features: Float[Array, " A"], columns: np.ndarray) -> Float[Array, " N"]:
    """Σ_k W[n, f] a[f] over the features f = columns[k, n] of each row, of which A stands for none."""
    total = jnp.zeros(weights.shape[0], features.dtype)
    for index in columns:
        total += _entries(weights, index) * take_entries(features, index, axis=0)
    return total


def _entries(weights: Float[Array, "N A"], index: np.ndarray) -> Float[Array, " N"]:
    """W[n, index[n]] of every row; zero where there is none."""
    some = jnp.take_along_axis(weights, np.minimum(index, weights.shape[1] - 1)[:, None], axis=1)[:, 0]
    return jnp.where(index < weights.shape[1], some, 0)


def depends(function: Callable[..., list[Array]], *arguments: PyTree) -> list[bool]:
    """Which results of a function depend on its arguments, and not alone on what it closes over, such as weights.

    Example:
      >>> import jax.numpy as jnp
      >>> w = jnp.ones(2)
      >>> depends(lambda x: [x * w, 2 * w], jnp.ones(2))
      [True, False]
    """
    closed = jax.make_jaxpr(function)(*arguments)
    jaxpr = getattr(closed, "jaxpr", closed)
    moving = set(jaxpr.invars)

    def moves(variable: Any) -> bool:
        return not hasattr(variable, "val") and variable in moving

    for equation in jaxpr.eqns:
        if any(map(moves, equation.invars)):
            moving.update(equation.outvars)
    return [moves(variable) for variable in jaxpr.outvars]
