"""How many steps are compiled into one turn of a loop over time."""

import jax

# Measured: launching a kernel costs a GPU more than a step of a small network, and a turn of the loop launches some of
# its own. A CPU gains nothing beyond 2, and each step is compiled again.
STEPS = {"gpu": 8}


def unroll() -> int:
    """Steps in one turn of a loop over time, on the device that is used by default."""
    return STEPS.get(jax.default_backend(), 2)
