"""How many steps are compiled into one turn of a loop over time."""

import jax

# A GPU launches some kernels for each turn of a loop, which a step of a small network does not pay for. 8 comes from a
# trial with `uoro`, and has yet to be measured for all loops.
ON_GPU = 8


def unroll(on_cpu: int = 1) -> int:
    """Steps in one turn of a loop over time, on the device that is used by default.

    Args:
      on_cpu: what a CPU gets, where each step more is mostly more to compile.

    Returns:
      The number for `jax.lax.scan`.
    """
    return ON_GPU if jax.default_backend() == "gpu" else on_cpu
