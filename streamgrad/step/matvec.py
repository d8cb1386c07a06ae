"""W a for features in several parts, whose derivatives multiply only by the parts that have a tangent."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from streamgrad._typing import Array, Float

_by_parts = contextvars.ContextVar("by_parts", default=False)
_fixed_features = contextvars.ContextVar("fixed_features", default=False)


@contextlib.contextmanager
def _set(flag: contextvars.ContextVar) -> Iterator[None]:
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


def fixed_features() -> contextlib.AbstractContextManager[None]:
    """Derivatives taken inside treat the features of all weights as constants.

    The rest of dh_t/dh_{t-1} is the state's own doing: it leaks, or a gate lets it through.
    """
    return _set(_fixed_features)


def by_parts() -> contextlib.AbstractContextManager[None]:
    """Linear maps made inside multiply by the columns of the parts that have a tangent, for a reverse pass.

    A reverse pass with many cotangents has no use for those of inputs and constants, and the columns of the state begin
    at the first, so that their memory is aligned as a GPU likes it. Forwards it is better to multiply by all of W: the
    product with tangents then is the one with the features, and the weights are read once for both.
    """
    return _set(_by_parts)


def matvec(weights: Float[Array, "N A"], *parts: Float[Array, " _"]) -> Float[Array, " N"]:
    """W a, for the features a = (part, part, ...): the same as `weights @ jnp.concatenate(parts)`.

    Its linear map is Σ_i W_i da_i over the parts with a tangent; inputs and constants have none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> matvec(jnp.ones((2, 3)), jnp.ones(2), 3 * jnp.ones(1)).tolist()
      [5.0, 5.0]
    """
    return _matvec(weights, tuple(map(jax.lax.stop_gradient, parts)) if _fixed_features.get() else parts)


def _whole(weights: Array, parts: Sequence[Array]) -> Array:
    return weights @ (parts[0] if len(parts) == 1 else jnp.concatenate(parts))


_matvec = jax.custom_jvp(_whole)


def _jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    weights, parts = primals
    dweights, dparts = tangents
    out = _matvec(weights, parts)
    tangent = jnp.zeros_like(out) if isinstance(dweights, SymbolicZero) else _whole(dweights, parts)
    moves = [not isinstance(along, SymbolicZero) for along in dparts]
    if any(moves) and not _by_parts.get():
        whole = [along if yes else jnp.zeros_like(part) for part, along, yes in zip(parts, dparts, moves, strict=True)]
        return out, tangent + _whole(weights, whole)
    begin = 0
    for part, along, yes in zip(parts, dparts, moves, strict=True):
        if yes:
            tangent = tangent + weights[:, begin : begin + part.size] @ along
        begin += part.size
    return out, tangent


_matvec.defjvp(_jvp, symbolic_zeros=True)
