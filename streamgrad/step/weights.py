"""Gradients of weight matrices as sums of outer products, kept as factors until they can be summed at once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import PyTree


class Outer(NamedTuple):
    """Outer products left right^T, one for each weight matrix; in the structure of the parameters.

    Attributes:
      left: a vector over the rows of each matrix.
      right: a vector over its columns, the features.
    """

    left: PyTree
    right: PyTree


def sum_outer(outer: Outer) -> PyTree:
    """Σ left right^T over streams and time, the two leading axes, as one matrix product for each matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> sum_outer(Outer({"w": jnp.ones((2, 5, 3))}, {"w": jnp.ones((2, 5, 4))}))["w"].tolist()[0]
      [10.0, 10.0, 10.0, 10.0]
    """
    return jax.tree.map(lambda left, right: jnp.einsum("btn,bta->na", left, right), outer.left, outer.right)
