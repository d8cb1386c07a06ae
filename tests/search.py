"""Many random cases by their seeds, from the command line: `python -m tests.engine.random_models 1000`."""

import sys
from collections.abc import Callable

import jax


def search(check_one: Callable[[int], float], what: str) -> None:
    """Check as many as are asked for, `[FIRST] COUNT`, and print the misses and the largest error."""
    jax.config.update("jax_enable_x64", True)
    first, count = (int(word) for word in ["0", *sys.argv[1:]][-2:])
    misses, largest = 0, 0.0
    for seed in range(first, first + count):
        try:
            largest = max(largest, check_one(seed))
        except Exception as caught:  # what cannot be done is a miss, too
            misses += 1
            print("miss:", seed, type(caught).__name__, str(caught)[:200], flush=True)
        if seed % 20 == 19:
            jax.clear_caches()  # no two are alike, and nothing of one is used again
            print(f"{seed + 1 - first} of {count}, {misses} misses, largest error {largest:.1e}", flush=True)
    print(f"{count} random {what}, {misses} misses, largest error {largest:.1e}")
