"""W a for features in several parts, whose derivatives touch the parts that move and no others."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from streamgrad._typing import Array, Float


def product(weights: Float[Array, "N A"], *parts: Float[Array, " _"]) -> Float[Array, " N"]:
    """W a, for the features a = (part, part, ...).

    The same as `weights @ jnp.concatenate(parts)`, in one product. Its linear map is Σ_i W_i da_i over the parts that
    have a tangent: an input and a constant have none, and a reverse pass with many cotangents then multiplies by the
    columns of the state alone. They begin at the first column, so that their memory is aligned as a GPU likes it.

    Args:
      weights: W.
      parts: vectors, A entries in all.

    Returns:
      The preactivations.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> product(jnp.ones((2, 3)), jnp.ones(2), 3 * jnp.ones(1)).tolist()
      [5.0, 5.0]
    """
    return _product(weights, parts)


@jax.custom_jvp
def _product(weights: Array, parts: Sequence[Array]) -> Array:
    return weights @ (parts[0] if len(parts) == 1 else jnp.concatenate(parts))


def _jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    weights, parts = primals
    moved, moved_parts = tangents
    out = _product(weights, parts)
    tangent = jnp.zeros_like(out)
    if not isinstance(moved, SymbolicZero):
        tangent = _product(moved, parts)
    begin = 0
    for part, along in zip(parts, moved_parts, strict=True):
        if not isinstance(along, SymbolicZero):
            tangent = tangent + weights[:, begin : begin + part.size] @ along
        begin += part.size
    return out, tangent


_product.defjvp(_jvp, symbolic_zeros=True)
