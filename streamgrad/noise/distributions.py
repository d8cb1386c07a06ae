"""The noise u: independent entries of zero mean and unit variance, symmetric around zero (Appendix A).

| noise | entries | excess kurtosis |
|---|---|---|
| rademacher | signs | -2 |
| uniform | between -√3 and √3 | -1.2 |
| gaussian | standard normal | 0 |

Total variance grows with the kurtosis (Corollary 1), so that signs are never worse, and they cost nothing.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array
from streamgrad.checks import check_choice, check_key


class Noise(NamedTuple):
    """A distribution of noise.

    Attributes:
      name: its name.
      draw: `draw(key, shape, dtype)`, with time as the leading axis of `shape`.
      kurtosis: excess kurtosis of the entries, E[u^4] - 3.
      check: `check(key)` raises ValueError if `draw` cannot take it.
    """

    name: str
    draw: Callable[[Any, tuple[int, ...], Any], Array]
    kurtosis: float
    check: Callable[[Any], None] = lambda key: _check_noise_key(key)


def _check_noise_key(key: Any) -> None:
    if key is None:
        raise ValueError("key must be a single JAX PRNG key, such as jax.random.key(0): this estimator draws noise.")
    check_key(key)


def _drawn_once(numbers: Array) -> Array:
    """Without a barrier the compiler may draw a number again wherever it is used, as often as a row has weights."""
    return jax.lax.optimization_barrier(numbers)


def _signs(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """One random bit for each sign: 32 times less to draw than by way of a uniform number."""
    size = math.prod(shape)
    words = _drawn_once(jax.random.bits(key, (-(-size // 32),), jnp.uint32))
    bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None]) & 1
    return 2 * bits.reshape(-1)[:size].reshape(shape).astype(dtype) - 1


def _gaussian(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return _drawn_once(jax.random.normal(key, shape, dtype))


def _uniform(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return _drawn_once(jax.random.uniform(key, shape, dtype, -math.sqrt(3), math.sqrt(3)))


def _given(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    if key.shape != shape:
        raise ValueError(f"given noise must have the shape {shape}, not {key.shape}.")
    return key.astype(dtype)


def _check_given(noise: Any) -> None:
    if not hasattr(noise, "dtype") or not jnp.issubdtype(noise.dtype, jnp.floating):
        raise ValueError("with noise='given', key must be the noise itself: an array of real numbers.")


_NOISES = {
    noise.name: noise
    for noise in (
        Noise("gaussian", _gaussian, 0.0),
        Noise("rademacher", _signs, -2.0),
        Noise("uniform", _uniform, -1.2),
        # The caller passes the noise in place of the key: to enumerate sign patterns, or to compare two estimators
        # under the same noise.
        Noise("given", _given, 0.0, _check_given),
    )
}


def find_noise(noise: str | Noise) -> Noise:
    """A noise by its name; a `Noise` is passed on as it is.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> find_noise("rademacher").draw(jax.random.key(0), (2, 3), jnp.float32).shape
      (2, 3)
    """
    if isinstance(noise, Noise):
        return noise
    check_choice("noise", noise, tuple(_NOISES))
    return _NOISES[noise]
