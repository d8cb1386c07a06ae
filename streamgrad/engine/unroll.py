"""How many steps are compiled into one turn of a loop over time."""

import jax

# A GPU launches some kernels for each turn of a loop, which a step of a small network does not pay for. On an H200
# `uoro` falls from 0.92, 1.24, 1.35 and 1.10 times BPTT (LSTM 256 to 2,048) to 0.78, 1.12, 1.20 and 0.92 with 8 for 2.
ON_GPU = 8


def unroll(on_cpu: int = 1) -> int:
    """Steps in one turn of a loop over time, on the device that is used by default.

    Args:
      on_cpu: what a CPU gets, where each step more is mostly more to compile.

    Returns:
      The number for `jax.lax.scan`.
    """
    return ON_GPU if jax.default_backend() == "gpu" else on_cpu
