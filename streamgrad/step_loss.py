"""The loss of one step, by its target: a plain one, one with a weight, or a gradient in place of it.

Estimators pass targets on unread, so that a weight or a gradient travels with the target to the loss.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, PyTree


class Weighted(NamedTuple):
    """A target with the weight of its loss.

    Attributes:
      target: what the head compares with. Where the weight is 0 it may be anything, also NaN.
      weight: a real number.
    """

    target: PyTree
    weight: Array


class Credit(NamedTuple):
    """In place of a target, the gradient of a loss at the output: dL_t/dy_t, `[width]`."""

    gradient: Array


def step_loss(
    loss: Callable[[PyTree, Array, PyTree], Array], head_params: PyTree, output: Array, target: PyTree
) -> Array:
    """A head's loss at one step, times its weight where it has one; or the loss whose gradient is given, dL/dy · y."""
    if isinstance(target, Credit):
        return jnp.sum(jnp.asarray(target.gradient, output.dtype) * output)
    if isinstance(target, Weighted):
        weight = jnp.asarray(target.weight, output.dtype)
        # Zeros in place of a target that does not count: what NaN or a class of -1 makes of the loss and its gradient,
        # a weight of 0 would not undo.
        value = loss(head_params, output, jax.tree.map(lambda leaf: _shown(leaf, weight), target.target))
        return weight * jnp.asarray(value, output.dtype)
    return loss(head_params, output, target)


def _shown(leaf: Array, weight: Array) -> Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # such as keys, which have no zero
        return leaf
    return jnp.where(weight == 0, jnp.zeros_like(leaf), leaf)
