"""W a for features in several parts, whose derivatives may touch the parts that move and no others."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from streamgrad._typing import Array, Float

_by_parts = contextvars.ContextVar("by_parts", default=False)
_still = contextvars.ContextVar("still", default=False)


@contextlib.contextmanager
def still() -> Iterator[None]:
    """What is differentiated inside takes the features of all weights as constants.

    What is left of dh_t/dh_{t-1} is what the state does by itself: it leaks, or a gate lets it through.
    """
    token = _still.set(True)
    try:
        yield
    finally:
        _still.reset(token)


@contextlib.contextmanager
def by_parts() -> Iterator[None]:
    """What is linearised inside multiplies by the columns of the parts that move, for a reverse pass.

    A reverse pass with many cotangents has no use for those of inputs and constants, and the columns of the state begin
    at the first, so that their memory is aligned as a GPU likes it. Forwards it is better to multiply by all of W: the
    product with tangents then is the one with the features, and the weights are read once for both.
    """
    token = _by_parts.set(True)
    try:
        yield
    finally:
        _by_parts.reset(token)


def product(weights: Float[Array, "N A"], *parts: Float[Array, " _"]) -> Float[Array, " N"]:
    """W a, for the features a = (part, part, ...).

    The same as `weights @ jnp.concatenate(parts)`, in one product. Its linear map is Σ_i W_i da_i over the parts that
    have a tangent, of which an input and a constant have none.

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
    return _product(weights, tuple(map(jax.lax.stop_gradient, parts)) if _still.get() else parts)


def _whole(weights: Array, parts: Sequence[Array]) -> Array:
    return weights @ (parts[0] if len(parts) == 1 else jnp.concatenate(parts))


_product = jax.custom_jvp(_whole)


def _jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    weights, parts = primals
    moved, moved_parts = tangents
    out = _product(weights, parts)
    tangent = jnp.zeros_like(out)
    if not isinstance(moved, SymbolicZero):
        tangent = _whole(moved, parts)
    moves = [not isinstance(along, SymbolicZero) for along in moved_parts]
    if any(moves) and not _by_parts.get():
        whole = [
            along if yes else jnp.zeros_like(part) for part, along, yes in zip(parts, moved_parts, moves, strict=True)
        ]
        return out, tangent + _whole(weights, whole)
    begin = 0
    for part, along, yes in zip(parts, moved_parts, moves, strict=True):
        if yes:
            tangent = tangent + weights[:, begin : begin + part.size] @ along
        begin += part.size
    return out, tangent


_product.defjvp(_jvp, symbolic_zeros=True)
