"""PRNG keys: new-style (`jax.random.key`) and old-style (`jax.random.PRNGKey`), one of them or one for each stream."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

OLD_STYLE_SIZES = (2, 4)  # numbers in an old-style key: 2 for the default generator, 4 for "rbg"


def is_key(key: Any) -> bool:
    """Whether `key` is one PRNG key or an array of them, new-style or old-style (uint32[..., 2])."""
    if not hasattr(key, "dtype"):
        return False
    old = key.dtype == jnp.uint32 and jnp.ndim(key) >= 1 and key.shape[-1] in OLD_STYLE_SIZES
    return _typed(key) or old


def is_single_key(key: Any) -> bool:
    """Whether `key` is exactly one PRNG key."""
    return is_key(key) and jnp.ndim(key) == (0 if _typed(key) else 1)


def check_key(key: Any) -> None:
    """`key` is a single PRNG key, new-style or old-style."""
    if not is_single_key(key):
        raise ValueError("key must be a single JAX PRNG key, such as jax.random.key(0).")


def check_keys(key: Any, batch_size: int) -> None:
    """`key` is None, a single key, or has a leading axis for that many streams."""
    many = hasattr(key, "shape") and key.shape[:1] == (batch_size,)
    if key is not None and not is_single_key(key) and not many:
        raise ValueError(f"key must be one JAX PRNG key, or one for each of the {batch_size} streams.")


def one_key_per_stream(key: Any, batch_size: int) -> Any:
    """Split a single key; one for each stream is passed on, and so is None.

    Inside of a compiled program: to split it outside takes longer than a small update itself.
    """
    check_keys(key, batch_size)
    return jax.random.split(key, batch_size) if is_single_key(key) else key


def drawn_shapes(init: Callable[[Any], Any]) -> Any:
    """Shapes and dtypes of `init(key)`, found without computing anything."""
    return jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))


def _typed(key: Any) -> bool:
    return bool(jnp.issubdtype(key.dtype, jax.dtypes.prng_key))
