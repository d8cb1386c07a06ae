"""How many steps are compiled into one turn of a loop over time."""

import jax

# A GPU launches some kernels for each turn of a loop, which a step of a small network does not pay for. On an H200
# `uoro` falls from 0.92, 1.24, 1.35 and 1.10 times BPTT (LSTM 256 to 2,048) to 0.78, 1.12, 1.20 and 0.92 with 8 for 2.
# A CPU gains little beyond 2, and each step is compiled again.
STEPS = {"gpu": 8}


def unroll() -> int:
    """Steps in one turn of a loop over time, on the device that is used by default."""
    return STEPS.get(jax.default_backend(), 2)
