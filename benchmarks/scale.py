"""What several devices cost: an update with as many streams on each, and the all-reduce of a gradient.

    python -m benchmarks.scale                     # on the devices there are; CPU cores count as devices of one thread
    python -m benchmarks.scale --processes 2       # the all-reduce also between two processes, on the loopback address

Weak scaling: `rtrl`, `uoro` and `bptt` of an LSTM with the same streams on each of 1, 2, … devices, in turns inside one
run, medians of repeats. All-reduce: vectors of 10^3 to 10^7 float32, from which a latency and a bandwidth are fitted,

    all-reduce(P) = latency log2 D + 2 (1 - 1/D) 4 P / bandwidth

and with them the model of docs/scale.md for more devices than there are. `--latency` (s) and `--bandwidth` (bytes/s)
put in those of another network. Writes `scale.csv`, `scale_allreduce*.csv` and `scale_predicted.csv`.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import streamgrad as sg
from streamgrad_lab.tables import read_rows, write_rows

RESULTS = Path(__file__).parent / "results"
ESTIMATORS = ("bptt", "rtrl", "uoro")
Rows = list[dict[str, Any]]
SIZES = (10**3, 10**4, 10**5, 10**6, 10**7)
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def model_of(hidden: int) -> sg.Model:
    """The network that is timed."""
    return sg.Model(sg.cells.lstm(32, hidden), sg.heads.softmax(10))


def mesh_of(devices: int) -> Mesh:
    """A mesh of the first so many devices."""
    return jax.make_mesh((devices,), ("streams",), (AxisType.Auto,), devices=jax.devices()[:devices])


def in_turns(calls: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """The median time of each, in seconds; all of them once in each repeat, so that a noisy minute hits all."""
    for call in calls.values():
        jax.block_until_ready(call())
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begun = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - begun)
    return {name: float(np.median(found)) for name, found in times.items()}


def update_of(make: Callable, options: argparse.Namespace, mesh: Mesh) -> Callable[[], Any]:
    """One update of so many streams on each device, from a running state."""
    model = model_of(options.hidden)
    count = options.streams * mesh.size
    est = sg.sharded(make(model), count, mesh)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(count, options.steps, 32)).astype(np.float32)
    targets = rng.integers(0, 10, size=(count, options.steps))

    def placed(tree: Any, spec: P) -> Any:
        there = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda leaf: jax.make_array_from_callback(leaf.shape, there, lambda index: np.asarray(leaf)[index]), tree
        )

    params, chunk = placed(model.init(jax.random.key(0)), P()), placed(sg.Chunk(inputs, targets), P("streams"))
    update = jax.jit(lambda params, state, chunk: est.update(params, state, chunk, jax.random.key(1)))
    state = update(params, est.init(params), chunk)[1]
    return lambda: update(params, state, chunk)


def weak_scaling(options: argparse.Namespace, counts: Sequence[int]) -> Rows:
    """Rows of time against devices, with the same streams on each; of several processes, on all of theirs."""
    rows = []
    for name in ESTIMATORS:
        times = in_turns({n: update_of(getattr(sg, name), options, mesh_of(n)) for n in counts}, options.repeats)
        for n, seconds in times.items():
            row = {"estimator": name, "processes": jax.process_count(), "devices": n, "streams": n * options.streams}
            rows.append(row | {"together": 1, "ms": 1e3 * seconds})
    return rows


def all_reduces(repeats: int) -> Rows:
    """Rows of the time of an all-reduce over all devices there are, of this process or of all."""
    mesh = mesh_of(len(jax.devices()))
    reduce = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "streams"), mesh=mesh, in_specs=P("streams"), out_specs=P("streams"))
    )
    over = NamedSharding(mesh, P("streams"))
    calls = {}
    for size in SIZES:
        own = np.ones((mesh.size // jax.process_count(), size), np.float32)
        whole = jax.make_array_from_process_local_data(over, own, (mesh.size, size))
        calls[size] = lambda whole=whole: reduce(whole)
    times = in_turns(calls, repeats)
    where = f"{jax.process_count()} processes" if jax.process_count() > 1 else "one process"
    return [{"where": where, "devices": mesh.size, "numbers": n, "ms": 1e3 * t} for n, t in times.items()]


def fit(rows: Rows) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes per second, by least relative squares."""
    times = np.array([row["ms"] * 1e-3 for row in rows])
    devices = rows[0]["devices"]
    sent = np.array([2 * (1 - 1 / devices) * 4 * row["numbers"] for row in rows])
    factors = np.stack([np.full_like(sent, np.log2(devices)), sent], axis=1) / times[:, None]
    latency, slope = np.linalg.lstsq(factors, np.ones(len(times)), rcond=None)[0]
    return float(latency), float(1 / slope)


def main() -> None:
    """Read the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--streams", type=int, default=8, help="on each device")
    parser.add_argument("--steps", type=int, default=16, help="of a chunk")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--latency", type=float, help="seconds of one hop, in place of what is measured")
    parser.add_argument("--bandwidth", type=float, help="bytes per second, likewise")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--join", help=argparse.SUPPRESS)  # coordinator,number,rank: one of several processes
    options = parser.parse_args()
    if options.join:
        one_of_several(options)
        return
    jax.config.update("jax_num_cpu_devices", os.cpu_count())
    times = weak_scaling(options, [n for n in (1, 2, 4, 8) if n <= len(jax.devices())])
    found = all_reduces(options.repeats) if len(jax.devices()) > 1 else []
    write_rows(options.out / "scale_allreduce.csv", found)
    groups = [found] if found else []
    if options.processes > 1:
        groups.append(between_processes(options))
        apart = read_rows(options.out / "scale_apart.csv")
        times += [row | {"processes": options.processes, "together": 0} for row in apart]
        times += read_rows(options.out / "scale_together.csv")
    write_rows(options.out / "scale.csv", times)
    for row in times:
        what = f"{row['processes']:.0f} processes, {row['devices']:.0f} devices, {row['streams']:.0f} streams"
        kept = alone(times, row["estimator"]) / row["ms"]
        how = "" if row["together"] else " each on its own"
        print(f"{row['estimator']:5s} {what}{how}: {row['ms']:8.2f} ms, kept {kept:.2f}")
    for rows in groups:
        for row in rows:
            what = f"{row['numbers']:8.0f} float32, {row['devices']:.0f} devices, {row['where']}"
            print(f"all-reduce of {what}: {row['ms']:.3f} ms")
        latency, bandwidth = fit(rows)
        print(f"  latency {1e6 * latency:.0f} µs, {bandwidth / 1e9:.2f} GB/s")
    if groups:
        write_rows(options.out / "scale_predicted.csv", predictions(times, groups[-1], options))


def alone(times: Rows, estimator: str) -> float:
    """The time of one device, in ms."""
    return next(row["ms"] for row in times if (row["estimator"], row["devices"]) == (estimator, 1))


def predictions(times: Rows, reduced: Rows, options: argparse.Namespace) -> Rows:
    """What the model says of more devices, with the constants that were measured, or those of the command line."""
    latency, bandwidth = fit(reduced)
    latency, bandwidth = options.latency or latency, options.bandwidth or bandwidth
    params = jax.eval_shape(model_of(options.hidden).init, jax.random.key(0))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(params))
    rows = []
    for name in ESTIMATORS:
        compute = alone(times, name)
        for devices in (1, 8, 64, 1024):
            ms = compute + 1e3 * all_reduce_model(numbers, devices, latency, bandwidth)
            rows.append({"estimator": name, "devices": devices, "ms": ms, "kept": compute / ms})
            print(f"predicted {name:5s} {devices:4d} devices: {ms:8.2f} ms, kept {compute / ms:.2f}")
    return rows


def all_reduce_model(numbers: int, devices: int, latency: float, bandwidth: float) -> float:
    """Seconds of an all-reduce of float32 by halving and doubling: log2 D hops, and twice the vector on each wire."""
    return latency * np.log2(devices) + 2 * (1 - 1 / devices) * 4 * numbers / bandwidth


def one_of_several(options: argparse.Namespace) -> None:
    """What each of the processes does that `between_processes` starts, with one device."""
    address, number, rank = options.join.split(",")
    jax.config.update("jax_num_cpu_devices", 1)
    if not address:  # on its own, while the others are busy too
        times = weak_scaling(options, [1])
    else:
        jax.distributed.initialize(address, int(number), int(rank))
        found, times = all_reduces(options.repeats), weak_scaling(options, [len(jax.devices())])
        if rank == "0":
            write_rows(options.out / "scale_allreduce_processes.csv", found)
        jax.distributed.shutdown()
    if rank == "0":
        write_rows(options.out / f"scale_{'together' if address else 'apart'}.csv", times)


def between_processes(options: argparse.Namespace) -> Rows:
    """Start processes of one device each on this machine: first each on its own, then together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "benchmarks.scale", "--out", str(options.out)]
    command += [f"--{name}={getattr(options, name)}" for name in ("repeats", "hidden", "streams", "steps")]
    for where in ("", address):
        started = [
            subprocess.Popen([*command, f"--join={where},{options.processes},{rank}"], stdout=subprocess.DEVNULL)
            for rank in range(options.processes)
        ]
        if any(process.wait() for process in started):
            raise SystemExit("benchmarks.scale: one of the processes has failed.")
    return read_rows(options.out / "scale_allreduce_processes.csv")


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", ONE_THREAD)  # each core is a device: it must not borrow the other's
    main()
