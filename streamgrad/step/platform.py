"""The one place that asks which kind of device a program is for."""

from collections.abc import Callable
from typing import Any

import jax

# A GPU launches some kernels for each turn of a loop, which a step of a small network does not pay for. 8 comes from a
# trial with `uoro`, and has yet to be measured for all loops.
STEPS_PER_TURN_ON_GPU = 8


def by_platform(default: Callable[..., Any], gpu: Callable[..., Any], *arguments: Any) -> Any:
    """Two ways to compute the same numbers; a GPU gets the second.

    The choice falls when the program is lowered, for the platform that it is lowered for: `jax.default_backend()` would
    name the default device while the program is traced, whatever device it runs on later. Both ways are traced, and
    only the chosen one is compiled. A derivative of it would store what either of them needs.

    Args:
      default: `default(*arguments)`.
      gpu: `gpu(*arguments)`, with results of the same shapes and dtypes.
      *arguments: arrays, or trees of them.

    Returns:
      The result.

    Example:
      >>> import jax.numpy as jnp
      >>> by_platform(jnp.sum, lambda x: jnp.ones_like(x) @ x, jnp.ones(3)).item()
      3.0
    """
    return jax.lax.platform_dependent(*arguments, default=default, cuda=gpu, rocm=gpu)


def unroll(on_cpu: int = 1) -> int:
    """Steps in one turn of `jax.lax.scan`: a Python number, which must be known while the scan is traced.

    That is before the platform is chosen, so that the default device has to tell. A program for another one gets its
    number of steps and the same results.

    Args:
      on_cpu: the number for a CPU, where each step more is mostly more to compile.
    """
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue], which JAX does not declare
    platform = jax.default_backend() if device is None else getattr(device, "platform", device)
    return STEPS_PER_TURN_ON_GPU if platform in ("gpu", "cuda", "rocm") else on_cpu
