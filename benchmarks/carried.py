"""What carrying Q_0 and α over costs, in multiples of plain `uoro` (identity and GIR) and of BPTT in the same run.

    python -m benchmarks.carried              # LSTM of 50 and 256, 50 streams, minutes on 2 cores
    python -m benchmarks.carried --sizes 50 256 1024

One stream in 50 is watched, and Q_0 and α are solved every 10 windows. A call is ten updates, so each holds
one solution; programs take turns. Writes `benchmarks/results/carried_<device>.csv`.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# LAPACK's own threads and XLA's get in each other's way: an eigendecomposition may take 100 times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp

import streamgrad as sg
from benchmarks.problems import LEAST_SECONDS, make_problem
from streamgrad_lab.tables import write_rows
from streamgrad_lab.timing import prepare, take_turns

UPDATES = 10


def settings(model: sg.Model, length: int) -> dict[str, sg.GradientEstimator]:
    """What is compared."""
    return {
        "bptt": sg.bptt(model),
        "uoro": sg.uoro(model),
        "uoro, no rescaling": sg.uoro(model, rescale="none"),
        "carried, episodes": sg.carried(sg.uoro(model), episode=length),
        "carried, episodes, diagonal": sg.carried(sg.uoro(model), episode=length, q0="diagonal"),
        "carried, streams": sg.carried(sg.uoro(model), window=length),
        "carried, streams, full": sg.carried(sg.uoro(model), window=length, q0="full"),
        "carried, streams, 4 windows": sg.carried(sg.uoro(model), window=4 * length),
    }


def compiled(est: sg.GradientEstimator, params: sg.Params, chunk: sg.Chunk, streams: int) -> Callable[[], Any]:
    """Ten updates of a batch, after as many as the statistics need to be used."""
    many = sg.batched(est, streams)

    def updates(params: Any, state: Any, chunk: sg.Chunk, key: Any) -> tuple[Any, Any, sg.Info]:
        def one(carry: tuple, key: Any) -> tuple[tuple, Any]:
            total, state = carry
            grads, state, info = many.update(params, state, chunk, key)
            return (jax.tree.map(jnp.add, total, grads), state), info.loss

        zero = jax.tree.map(jnp.zeros_like, params)
        (total, state), loss = jax.lax.scan(one, (zero, state), jax.random.split(key, UPDATES))
        return total, state, sg.Info(loss[-1], {})

    call = prepare(updates, params, many.init(params), chunk, jax.random.key(1)).call
    *_, state = call()
    while hasattr(state.shared, "ready") and not bool(state.shared.ready):
        *_, state = call()
    return call


def main() -> None:
    """Parse, run, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 256], help="units of the LSTM")
    parser.add_argument("--lengths", type=int, nargs="+", default=[28, 64], help="T, for each size in turn")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if len(options.sizes) != len(options.lengths):
        parser.error("--lengths must name one length for each size")
    device = jax.devices()[0]
    rows = []
    for hidden, length in zip(options.sizes, options.lengths, strict=True):
        model, params, chunk = make_problem("lstm", hidden, options.streams, length)
        calls = {name: compiled(est, params, chunk, options.streams) for name, est in settings(model, length).items()}
        seconds = take_turns(calls, options.repeats, LEAST_SECONDS)
        for name, took in seconds.items():
            row = {"device": device.device_kind, "hidden": hidden, "streams": options.streams, "length": length}
            row |= {"setting": name, "ms_per_update": round(1e3 * took / UPDATES, 3)}
            row |= {"times_uoro": round(took / seconds["uoro"], 3), "times_bptt": round(took / seconds["bptt"], 3)}
            rows.append(row)
            print(f"H {hidden:4d} T {length:3d} {name:28s} {row['ms_per_update']:9.2f} ms  "
                  f"{row['times_uoro']:6.3f} uoro  {row['times_bptt']:6.2f} bptt", flush=True)  # fmt: skip
    write_rows(options.out / f"carried_{'cpu' if device.platform == 'cpu' else 'gpu'}.csv", rows)


if __name__ == "__main__":
    main()
