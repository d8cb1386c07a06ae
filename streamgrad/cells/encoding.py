"""States of any kind as real numbers: estimators carry along a vector that has derivatives everywhere.

A complex number is two real ones. Counters, masks and random keys are written in digits of 16 bits, which every float
from float32 on holds exactly; their derivatives are zero, and they come back as they were.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import work_dtype

DIGIT = 16


def encode(tree: PyTree, dtype: Any) -> PyTree:
    """Every leaf, of numbers, bools or random keys, as an array of real numbers in `dtype`, float32 or wider.

    A real leaf keeps its shape; others have one more axis, at the end.

    Example:
      >>> import jax.numpy as jnp
      >>> encode({"h": jnp.ones(2), "z": jnp.array([1 + 2j]), "t": jnp.int32(70000)}, jnp.float32)["t"].tolist()
      [4464.0, 1.0]
    """
    return jax.tree.map(lambda leaf: _encode(jnp.asarray(leaf), dtype), tree)


def decode(tree: PyTree, like: PyTree) -> PyTree:
    """The inverse of `encode`, for leaves of the shapes and dtypes `like`.

    Numbers of 32 bits or more come back in the precision of `tree`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> state = {"t": jnp.array(70000), "key": jax.random.key(3)}
      >>> back = decode(encode(state, jnp.float32), state)
      >>> int(back["t"]), bool(back["key"] == state["key"])
      (70000, True)
    """
    return jax.tree.map(lambda was, leaf: _decode(leaf, was), like, tree)


def whole_state(state: PyTree) -> Float[Array, " S"]:
    """All of a state that can be differentiated as one vector; of complex numbers both parts."""
    leaves = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return ravel_pytree(encode(leaves, work_dtype(leaves)))[0]


def is_plain(tree: PyTree) -> bool:
    """Whether all leaves are arrays of real floating-point numbers of 32 bits or more."""
    return all(_is_wide(leaf.dtype) for leaf in jax.tree.leaves(tree))


def _is_wide(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 32


def natural(dtype: Any, work: Any) -> Any:
    """The dtype that a number has inside a step, where the estimator works in `work`: narrow ones keep their own."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.result_type(jnp.complex128 if jnp.finfo(work).bits > 32 else jnp.complex64)
    return work if _is_wide(dtype) else dtype


def _encode(leaf: Array, dtype: Any) -> Array:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.astype(dtype)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.stack([leaf.real, leaf.imag], axis=-1).astype(dtype)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        digits = _digits(jax.random.key_data(leaf))
        return digits.reshape(*leaf.shape, -1).astype(dtype)
    return _digits(leaf).astype(dtype)


def _decode(leaf: Array, was: Any) -> Array:
    if jnp.issubdtype(was.dtype, jnp.floating):
        return leaf.astype(natural(was.dtype, leaf.dtype))
    if jnp.issubdtype(was.dtype, jnp.complexfloating):
        return jax.lax.complex(leaf[..., 0], leaf[..., 1]).astype(natural(was.dtype, leaf.dtype))
    if jnp.issubdtype(was.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, was)
        words = _undigits(leaf.reshape(*data.shape, -1), data.dtype)
        return jax.random.wrap_key_data(words, impl=_key_impl(was))
    return _undigits(leaf, was.dtype)


def _key_impl(was: Any) -> Any:
    """The generator of keys; JAX tells that of an array alone."""
    found = []

    def ask(key: Array) -> Array:
        found.append(jax.random.key_impl(key))
        return jnp.zeros(())

    jax.eval_shape(ask, was)
    return found[0]


def _unsigned(dtype: Any) -> tuple[Any, int]:
    bits = 8 if dtype == jnp.bool_ else jnp.iinfo(dtype).bits
    return jnp.dtype(f"uint{max(bits, 8)}"), -(-bits // DIGIT)


def _digits(leaf: Array) -> Array:
    """Integers by their bits, the lowest digit first."""
    unsigned, count = _unsigned(leaf.dtype)
    bits = leaf.astype(unsigned) if leaf.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(leaf, unsigned)
    mask = unsigned.type(min(2**DIGIT, 2 ** (8 * unsigned.itemsize)) - 1)
    return jnp.stack([jnp.right_shift(bits, unsigned.type(DIGIT * i)) & mask for i in range(count)], axis=-1)


def _undigits(digits: Array, dtype: Any) -> Array:
    unsigned, count = _unsigned(dtype)
    whole = jnp.round(digits).astype(unsigned)
    bits = whole[..., 0]
    for i in range(1, count):
        bits = bits | jnp.left_shift(whole[..., i], unsigned.type(DIGIT * i))
    return bits.astype(bool) if dtype == jnp.bool_ else jax.lax.bitcast_convert_type(bits, dtype)
