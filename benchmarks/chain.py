"""MemoryChain of gymnax: an agent is shown a bit, waits, and must act on it. Success by method and by length.

    pip install gymnax six                                   # its version 1.0.1 does not ask for six, which it needs
    python -m benchmarks.chain                               # about a quarter of an hour on two cores
    python -m benchmarks.chain --lengths 10 --steps 2000 --seeds 1 --methods rtrl immediate

The agent is that of the T-maze in `streamgrad reproduce streams`: online actor-critic with eligibility traces, an
update at every step. All rates and seeds of a method are one program; the rate whose mean over seeds is best stands.
Success is that of the episodes of the last fifth of the steps; guessing gives 0.5. Prints a row for each, and writes
`chain.csv`.
"""

import argparse
import functools
import itertools
import time
from pathlib import Path

import numpy as np

from streamgrad import cells
from streamgrad_lab.agent import AgentConfig, final_success, train_agent
from streamgrad_lab.environments import from_gymnax
from streamgrad_lab.experiments.streams.methods import METHODS, make_estimator
from streamgrad_lab.tables import write_rows

POINTS = 10  # windows of a run


def main(arguments: list[str] | None = None) -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[10, 30])
    add("--methods", nargs="+", choices=tuple(METHODS), metavar="NAME",
        default=["rtrl", "ok(8)", "uoro", "snap(1)", "windowed_bptt(5)", "immediate"])  # fmt: skip
    add("--cell", default="gru")
    add("--hidden", type=int, default=16)
    add("--streams", type=int, default=8)
    add("--steps", type=int, default=30_000)
    add("--rates", type=float, nargs="+", default=[1e-3, 3e-3])
    add("--seeds", type=int, default=3)
    add("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    config = AgentConfig(options.hidden, options.streams, options.steps, max(1, options.steps // POINTS))
    try:
        worlds = {length: from_gymnax("MemoryChain-bsuite", memory_length=length) for length in options.lengths}
    except ValueError as error:
        raise SystemExit(str(error)) from None
    rows = []
    for length, method in itertools.product(options.lengths, options.methods):
        begun, make = time.monotonic(), functools.partial(make_estimator, method)
        cell, seeds = getattr(cells, options.cell), range(options.seeds)
        curves = train_agent(worlds[length], cell, make, config, options.rates, seeds)
        ends = final_success(curves)
        for rate in options.rates:
            mine = [ends[rate, seed] for seed in seeds]
            size = {"cell": options.cell, "hidden": options.hidden, "streams": options.streams, "steps": options.steps}
            said = {"length": length, "method": method, "rate": rate} | size
            rows.append(said | {"success": float(np.mean(mine)), "lowest": min(mine), "seeds": options.seeds})
        best = max(rows[-len(options.rates) :], key=lambda row: row["success"])
        seconds = time.monotonic() - begun
        print(f"{length:4d}  {method:12s} {best['success']:.3f}, of the lowest seed {best['lowest']:.3f}, "
              f"rate {best['rate']:g}, {seconds:.0f} s", flush=True)  # fmt: skip
        write_rows(options.out / "chain.csv", rows, digits=4)


if __name__ == "__main__":
    main()
