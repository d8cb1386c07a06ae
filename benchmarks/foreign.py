"""Cells of other libraries beside the native LSTM: time in multiples of it, in the same run.

    python -m benchmarks.foreign --preset cpu     # minutes on 2 cores
    python -m benchmarks.foreign --preset gpu     # minutes on one GPU; likewise large

`nnx.OptimizedLSTMCell` and `eqx.nn.LSTMCell` through `from_flax` and `from_equinox`, `sg.cells.lstm` of the same size;
all programs of a size take turns, and the median of their repeats counts. A library that is not there is left out, and
so is an estimator for a cell that lacks its cut. Writes `foreign_<preset>.csv`. It imports jax, numpy, optax and
streamgrad, and flax and equinox where they are on the path.
"""

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import streamgrad as sg
from benchmarks.problems import LEAST_SECONDS
from streamgrad_lab.tables import write_rows
from streamgrad_lab.timing import prepare, take_turns

N_IN, CLASSES = 32, 10
NATIVE = "native"
LIMIT = 1.15  # the most that a foreign cell should take, in multiples of the native one


def nnx_lstm(hidden: int) -> sg.Cell:
    """Flax's faster LSTM: one product for the input, one for the state."""
    from flax import nnx

    return sg.cells.from_flax(nnx.OptimizedLSTMCell(N_IN, hidden, rngs=nnx.Rngs(0)))


def eqx_lstm(hidden: int) -> sg.Cell:
    """Equinox's LSTM: likewise, with the weights on the left."""
    import equinox

    return sg.cells.from_equinox(equinox.nn.LSTMCell(N_IN, hidden, key=jax.random.key(0)))


CELLS: dict[str, tuple[str, Callable[[int], sg.Cell]]] = {
    NATIVE: ("jax", lambda hidden: sg.cells.lstm(N_IN, hidden)),
    "nnx.OptimizedLSTMCell": ("flax", nnx_lstm),
    "eqx.nn.LSTMCell": ("equinox", eqx_lstm),
}
METHODS: dict[str, Callable[[sg.Model], sg.GradientEstimator]] = {
    "bptt": sg.bptt,
    "rtrl": sg.rtrl,
    "ok": lambda model: sg.ok(model, rank=4),
    "uoro": sg.uoro,
    "uoro_across": sg.uoro_across,
}
# (hidden, streams), and what is measured.
PRESETS: dict[str, list[tuple[int, int, tuple[str, ...]]]] = {
    "smoke": [(4, 2, tuple(METHODS))],
    "cpu": [(64, 1, tuple(METHODS)), (64, 8, tuple(METHODS))],
    "gpu": [
        (64, 1, tuple(METHODS)),
        (64, 32, tuple(METHODS)),
    ],
    "large": [(256, 32, ("bptt", "ok", "uoro")), (1024, 64, ("bptt", "uoro", "uoro_across"))],
}


def can(model: sg.Model, method: str) -> bool:
    """Whether the cell has the cut that the method needs."""
    return "preactivation" in model.cell.cuts or method not in ("ok", "uoro")


def measure(hidden: int, streams: int, methods: tuple[str, ...], length: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of one size."""
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = jax.random.normal(keys[1], (streams, length, N_IN), jnp.float32)
    chunk = sg.Chunk(inputs, jax.random.randint(keys[2], (streams, length), 0, CLASSES))
    programs = {}
    for name, (library, make) in CELLS.items():
        if importlib.util.find_spec(library) is None:
            continue
        model = sg.Model(make(hidden), sg.heads.softmax(CLASSES))
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.init(keys[0]))
        for method in methods:
            if can(model, method):
                est = sg.batched(METHODS[method](model), streams)
                programs[name, method] = prepare(est.update, params, est.init(params), chunk, jax.random.key(1))
    seconds = take_turns({key: program.call for key, program in programs.items()}, repeats, LEAST_SECONDS)
    return [
        {
            "device": jax.devices()[0].device_kind,
            "cell": name,
            "hidden": hidden,
            "streams": streams,
            "length": length,
            "estimator": method,
            "us_per_step": round(seconds[name, method] / length * 1e6, 2),
            "times_native": round(seconds[name, method] / seconds[NATIVE, method], 3),
            "aim": LIMIT if name != NATIVE else "",
            "compile_s": round(program.compile_seconds, 2),
            "temp_mib": round(program.temp_bytes / 2**20, 2),
        }
        for (name, method), program in programs.items()
    ]


def main() -> None:
    """Run a preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for hidden, streams, methods in PRESETS[arguments.preset]:
        found = measure(hidden, streams, methods, arguments.length, arguments.repeats)
        rows += found
        for row in found:
            shown = f"{row['hidden']:5d} {row['streams']:3d}  {row['cell']:22s} {row['estimator']:12s}"
            print(f"{shown} {row['us_per_step']:9.1f} us  {row['times_native']:6.2f} of native", flush=True)
        write_rows(arguments.out / f"foreign_{arguments.preset}.csv", rows)


if __name__ == "__main__":
    main()
