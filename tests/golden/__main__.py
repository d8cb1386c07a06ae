"""Golden gradients: `python -m tests.golden record FOLDER` before a redesign, `… compare FOLDER [ONLY]` after it.

`… differences FOLDER CELL ESTIMATOR ...` is for the tests: it prints how far these are from the record, as JSON.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

jax.config.update("jax_enable_x64", True)

from tests.golden.cases import all_cases, models  # noqa: E402, after the settings
from tests.golden.compare import TOLERANCE, differences, outcome  # noqa: E402, likewise


def record(folder: str) -> None:
    """Write all of it, a file for each cell."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for cell in models():
        cases = [(name, outcome(cell, name)) for other, name in all_cases() if other == cell]
        found = {f"{name} | {part}": value for name, parts in cases for part, value in parts.items()}
        np.savez_compressed(Path(folder) / f"{cell.replace(' ', '_')}.npz", **found)
        print(f"{cell}: {len(cases)} estimators, {sum('refused' in parts for _, parts in cases)} refused", flush=True)


def compare(folder: str, only: str = "") -> int:
    """Compare with a record; prints what differs, and returns how many parts do."""
    wrong, seen, worst = 0, 0, 0.0
    for cell, name in all_cases():
        case = f"{name} | {cell}"
        if only and only not in case:
            continue
        seen += 1
        for part, off in differences(cell, name, Path(folder)).items():
            worst = max(worst, off)
            if not off <= TOLERANCE:
                print(f"{case} | {part}: off by {off:.1e}", flush=True)
                wrong += 1
    print(f"{seen} cases, {wrong} differ; largest difference {worst:.1e} of the largest entry")
    return wrong


def measure(folder: str, cell: str, *names: str) -> None:
    """Print the differences of some estimators on a cell."""
    print(json.dumps({name: differences(cell, name, Path(folder)) for name in names}))


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    sys.exit({"record": record, "compare": compare, "differences": measure}[command](*arguments))
