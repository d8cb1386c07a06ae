"""The steps of a chunk, linearised once each: a forward pass stores residuals for a reverse pass with any cotangents.

`jax.vjp` of a whole scan would do for one kind of cotangent. Here some streams send back one and others many, in one
pass, so that both passes are written out, and the residuals of a step travel from one to the other.
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
from streamgrad.step.matvec import by_parts, fixed_features
from streamgrad.step.static_gather import static_gather
from streamgrad.step.weights import like_params, rows_of


class StepVjp(NamedTuple):
    """A cell's transition over ravelled states, and its linear map in both directions.

    Attributes:
      forward: `forward(state[S], x) -> (new[S], residuals, features)`: the residuals are the arrays of the linear map
        that depend on state or input; features are a of every weight matrix, None for a cell without preactivations.
      pull: `pull(residuals, cotangent[S]) -> (cotangent of the old state [S], cotangent at this step)`. The second is
        over preactivations, in the structure of the parameters, where the cell has them; else like the parameters.
      push: `push(state[S], x, tangent[S]) -> [S]`, (dh_t/dh_{t-1}) tangent.
    """

    forward: Callable[[Float[Array, " S"], PyTree], tuple[Float[Array, " S"], list[Any], PyTree]]
    pull: Callable[[list[Any], Float[Array, " S"]], tuple[Float[Array, " S"], PyTree]]
    push: Callable[[Float[Array, " S"], PyTree, Float[Array, " S"]], Float[Array, " S"]]


def step_vjp(
    cell: Cell, params: PyTree, start: PyTree, x: PyTree, recurrent_features: list[Any] | None = None
) -> StepVjp:
    """Prepare a cell's transition for both passes, for one stream.

    Args:
      cell: the cell.
      params: its parameters.
      start: a state, for its structure.
      x: an input, likewise.
      recurrent_features: for each weight matrix the features of each row, `[k, rows]`, whose weights are part of
        dh_t/dh_{t-1}; A, the number of features, fills up shorter rows. All other features are constants. None for all.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> cell = sg.cells.vanilla(2, 3)
      >>> params = cell.init_params(jax.random.key(0))
      >>> maps = step_vjp(cell, params, cell.init_state(), jnp.ones(2))
      >>> new, residuals, features = maps.forward(jnp.zeros(3), jnp.ones(2))
      >>> cotangent, dz = maps.pull(residuals, jnp.ones(3))
      >>> cotangent.shape, dz["w"].shape, features["w"].shape
      ((3,), (3,), (6,))
    """
    vector, unravel = ravel_pytree(start)
    cut = cell.cuts.get("preactivation")
    here = like_params(params, jnp.zeros(sum(rows_of(params)), vector.dtype)) if cut is not None else params

    def transition(vector: Array, here: PyTree, x: PyTree) -> Float[Array, " S"]:
        """h_t, as a function of h_{t-1} and of a displacement of this step's preactivations, or of its parameters."""
        state = unravel(vector)
        if recurrent_features is not None:
            new = _through_some_features(cell, params, recurrent_features, state, x, here)
        else:
            new = cell.step(here, state, x) if cut is None else cut.inject(params, state, x, here)
        check_same_state(state, new)
        return ravel_pytree(new)[0].astype(vector.dtype)

    def linearised(vector: Array, x: PyTree) -> tuple[Array, list[Any], Any]:
        with by_parts():
            new, pull = jax.vjp(lambda vector, here: transition(vector, here, x), vector, here)
        leaves, structure = jax.tree.flatten(pull)
        return new, leaves, structure

    varies = depends(lambda vector, x: linearised(vector, x)[1], vector, x)
    _, constants, structure = linearised(vector, x)  # only the leaves that do not vary are used

    def forward(vector: Array, x: PyTree) -> tuple[Array, list[Any], PyTree]:
        new, leaves, _ = linearised(vector, x)
        features = None
        if cut is not None and cut.features is not None:
            features = cut.features(params, unravel(vector), x)
        return new, [leaf for leaf, does in zip(leaves, varies, strict=True) if does], features

    def pull(residuals: list[Any], cotangent: Array) -> tuple[Array, PyTree]:
        rest = iter(residuals)
        leaves = [next(rest) if does else leaf for leaf, does in zip(constants, varies, strict=True)]
        return jax.tree.unflatten(structure, leaves)(cotangent)

    def push(vector: Array, x: PyTree, tangent: Array) -> Float[Array, " S"]:
        return jax.jvp(lambda vector: transition(vector, here, x), (vector,), (tangent,))[1]

    return StepVjp(forward, pull, push)


def _through_some_features(
    cell: Cell, params: PyTree, chosen: list[np.ndarray], state: PyTree, x: PyTree, here: PyTree
) -> PyTree:
    """The transition with all features fixed; the products of the chosen ones are put back, as tangents alone."""
    cut = cell.cuts["preactivation"]
    assert cut.features is not None
    leaves, structure = jax.tree.flatten(params)
    features = jax.tree.leaves(cut.features(params, state, x))
    z = [_chosen_products(w, a, index) for w, a, index in zip(leaves, features, chosen, strict=True)]
    moved = jax.tree.unflatten(structure, [part - jax.lax.stop_gradient(part) for part in z])
    with fixed_features():
        return cut.inject(params, state, x, jax.tree.map(jnp.add, here, moved))


def _chosen_products(
    weights: Float[Array, "N A"], features: Float[Array, " A"], chosen: np.ndarray
) -> Float[Array, " N"]:
    """Σ_k W[n, f] a[f] over the features f = chosen[k, n] of each row; f = A counts for nothing."""
    total, width = jnp.zeros(weights.shape[0], features.dtype), weights.shape[1]
    for index in chosen:
        entries = jnp.take_along_axis(weights, np.minimum(index, width - 1)[:, None], axis=1)[:, 0]
        total += jnp.where(index < width, entries, 0) * static_gather(features, index, axis=0)
    return total


def depends(function: Callable[..., list[Array]], *arguments: PyTree) -> list[bool]:
    """Whether each result of a function depends on its arguments, or on values that it closes over alone.

    Example:
      >>> import jax.numpy as jnp
      >>> w = jnp.ones(2)
      >>> depends(lambda x: [x * w, 2 * w], jnp.ones(2))
      [True, False]
    """
    closed = jax.make_jaxpr(function)(*arguments)
    jaxpr = getattr(closed, "jaxpr", closed)
    varying = set(jaxpr.invars)

    def varies(variable: Any) -> bool:
        return not hasattr(variable, "val") and variable in varying

    for equation in jaxpr.eqns:
        if any(map(varies, equation.invars)):
            varying.update(equation.outvars)
    return [varies(variable) for variable in jaxpr.outvars]
