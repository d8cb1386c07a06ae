"""The last steps of a stream, kept from one chunk to the next."""

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Bool, PyTree
from streamgrad.base import Model, Params, real_dtype
from streamgrad.engine.chunk import episode_over


def no_inputs(model: Model, params: Params, count: int) -> PyTree:
    """Room for so many inputs, `[count, ...]`, as they are stored. The cell must have an `example_input`."""
    zeros = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), model.cell.example_input)
    return as_stored(params, zeros, zeros)


def as_stored(params: Params, like: PyTree, inputs: PyTree) -> PyTree:
    """Inputs in the dtype in which they are stored: that of the parameters, if they are real."""
    dtype = real_dtype(params.cell)

    def cast(like: Array, x: Array) -> Array:
        return jnp.asarray(x, dtype if jnp.issubdtype(like.dtype, jnp.floating) else like.dtype)

    return jax.tree.map(cast, like, inputs)


def latest(old: Array, new: Array) -> Array:
    """The last entries of the old followed by the new ones, as many as there are old ones.

    Example:
      >>> import jax.numpy as jnp
      >>> latest(jnp.array([1, 2, 3]), jnp.array([4, 5])).tolist()
      [3, 4, 5]
    """
    return jnp.concatenate([old[len(new) :], new[max(0, len(new) - len(old)) :]])


def forgotten(reset: Bool[Array, " T"] | None, count: int) -> Bool[Array, " count"] | None:
    """Of the last `count` steps after a chunk, those that lie before an episode that has begun in it.

    Example:
      >>> import jax.numpy as jnp
      >>> forgotten(jnp.array([False, True]), 4).tolist()
      [True, True, True, False]
    """
    over = episode_over(reset)
    return None if reset is None or over is None else latest(jnp.broadcast_to(jnp.any(reset), count), over)
