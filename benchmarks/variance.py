"""What the variance theory costs, in multiples of one BPTT of the same batch, and what α it finds.

    python -m benchmarks.variance                          # the paper's setting: LSTM of 50, 28 rows, 50 streams
    python -m benchmarks.variance --length 784 --streams 1 # pixel by pixel, without b in memory
    python -m benchmarks.variance --alphas                 # GIR, greedy and exact α on one episode

Each row is timed alone: compiled first, then the median of `--repeats` calls, beside BPTT in the same process. Peak
memory is the device's where it says so; on a CPU each row runs in a process of its own, and its largest resident set
is reported, less that of a process which only runs BPTT under "over bptt". With `--data FOLDER` (or STREAMGRAD_DATA),
four gzipped IDX files of MNIST, the streams are digits; without it they are random. Writes `--csv FILE`.
"""

import argparse
import gzip
import os
import pathlib
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

# LAPACK's own threads and XLA's get in each other's way: an eigendecomposition may take 100 times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import numpy as np

import streamgrad as sg
from streamgrad_lab.tables import write_rows
from streamgrad_lab.timing import take_turns


def load(data: str | None, length: int, streams: int) -> sg.Chunk:
    """Streams of `length` steps, [streams, length, ...]: rows of digits for 28, pixels otherwise, or random numbers."""
    n_in = 28 if length == 28 else 1
    if data:
        folder = pathlib.Path(data)
        with gzip.open(folder / "train-images-idx3-ubyte.gz") as f:
            images = np.frombuffer(f.read(16 + 784 * streams), np.uint8, offset=16)
        with gzip.open(folder / "train-labels-idx1-ubyte.gz") as f:
            labels = np.frombuffer(f.read(8 + streams), np.uint8, offset=8)
        pixels = images.reshape(streams, -1)[:, : length * n_in].astype(np.float32) / 255
    else:
        rng = np.random.default_rng(0)
        pixels, labels = rng.uniform(size=(streams, length * n_in)), rng.integers(0, 10, size=streams)
    inputs = jnp.asarray(pixels.reshape(streams, length, n_in), jnp.float32)
    return sg.Chunk(inputs, jnp.asarray(np.repeat(labels[:, None].astype(int), length, axis=1)))


def tasks(model: sg.Model, length: int, streams: int, block: int | None) -> dict[str, Callable[..., Any]]:
    """What is timed, by name; each takes params and a batch of streams. The first is the unit."""
    bptt = sg.batched(sg.bptt(model), streams)

    def over_streams(one: Callable[[sg.Params, sg.Chunk], Any]) -> Callable[[sg.Params, sg.Chunk], Any]:
        return lambda params, chunk: jax.vmap(lambda c: one(params, c))(chunk)

    def exact(params: sg.Params, chunk: sg.Chunk) -> Any:
        return bptt.update(params, bptt.init(params), chunk, None)[0]

    def from_episode(
        work: Callable[[sg.theory.Episode], Any], keep: bool = True
    ) -> Callable[[sg.Params, sg.Chunk], Any]:
        return over_streams(lambda p, c: work(sg.theory.collect(model, p, c, block=block, keep=keep)))

    def joint(ep: sg.theory.Episode) -> Any:
        """α for Q_0 = I, B for that α, its Q_0, and the total variance with both: three sweeps."""
        alpha = sg.theory.optimal_alpha(sg.theory.c_matrix(ep)).alpha
        q0 = sg.theory.optimal_q0(sg.theory.b_matrix(ep, alpha))
        return alpha, q0, sg.theory.total_variance(ep, alpha, q0)

    blockwise = {
        "blockwise c_matrix": from_episode(sg.theory.c_matrix, keep=False),
        "blockwise b_matrix": from_episode(sg.theory.b_matrix, keep=False),
        "blockwise total_variance": from_episode(sg.theory.total_variance, keep=False),
        "blockwise C, alpha, B, Q_0, total": from_episode(joint, keep=False),
    }
    if length > 100:
        return {"bptt": exact, **blockwise}

    def everything(ep: sg.theory.Episode) -> Any:
        alpha = sg.theory.optimal_alpha(sg.theory.c_matrix(ep)).alpha
        b = sg.theory.b_matrix(ep, alpha)
        q0 = sg.theory.optimal_q0(b)
        return (
            sg.theory.total_variance(ep, alpha, q0),
            sg.theory.predicted_gain(b),
            sg.theory.greedy_alpha(ep, q0).alpha,
            sg.theory.total_variance(ep, alpha, groups=ep.size),
        )

    return {
        "bptt": exact,
        "collect": from_episode(lambda ep: (ep.b, ep.gradient)),
        "c_matrix": from_episode(sg.theory.c_matrix),
        "c_matrix, optimal_alpha": from_episode(lambda ep: sg.theory.optimal_alpha(sg.theory.c_matrix(ep))),
        "b_matrix": from_episode(sg.theory.b_matrix),
        "b_matrix, optimal_q0": from_episode(lambda ep: sg.theory.optimal_q0(sg.theory.b_matrix(ep))),
        "total_variance": from_episode(sg.theory.total_variance),
        "greedy": from_episode(lambda ep: sg.theory.greedy_alpha(ep).alpha),
        "everything": from_episode(everything),
        "optimise, 3 rounds": from_episode(lambda ep: sg.theory.optimise(ep, rounds=3)),
        **blockwise,
    }


def seconds(task: Callable[..., Any], params: sg.Params, chunk: sg.Chunk, repeats: int) -> float:
    """The median of several calls, alone, after two that compile and warm up."""
    compiled = jax.jit(task)
    return take_turns({"": lambda: compiled(params, chunk)}, repeats)[""]


def peak_bytes() -> int:
    """The most memory that was in use at once: the device's own count, or this process's resident set."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    # Linux: getrusage would count what the parent process had before this program was loaded into its child.
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def alone(name: str, arguments: list[str]) -> int:
    """Peak memory of one row, run in a process of its own."""
    command = [sys.executable, __file__, *arguments, "--only", name]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def costs(options: argparse.Namespace, model: sg.Model, params: sg.Params, chunk: sg.Chunk) -> list[dict[str, Any]]:
    """A row for every task."""
    found = tasks(model, options.length, options.streams, options.block)
    rows = []
    arguments = ["--length", str(options.length), "--streams", str(options.streams), "--hidden", str(options.hidden)]
    arguments += ["--block", str(options.block)] if options.block else []
    arguments += ["--data", options.data] if options.data else []
    # All times first: to fork a process upsets the thread pools of the linear algebra of this one.
    times = {name: seconds(task, params, chunk, options.repeats) for name, task in found.items()}
    memory = {name: alone(name, arguments) for name in found}
    for name, took in times.items():
        rows.append(
            {
                "task": name,
                "ms": round(1e3 * took, 2),
                "times bptt": round(took / times["bptt"], 1),
                "peak MB": round(memory[name] / 1e6),
                "over bptt MB": round((memory[name] - memory["bptt"]) / 1e6),
            }
        )
    print(table(rows))
    return rows


def alphas(model: sg.Model, params: sg.Params, chunk: sg.Chunk, samples: int) -> list[dict[str, Any]]:
    """V(Q) and the measured total variance of one episode for α by GIR, Appendix D, and exact; Q_0 = I and shaped."""
    chunk = jax.tree.map(lambda leaf: leaf[0], chunk)
    ep = jax.jit(lambda params, chunk: sg.theory.collect(model, params, chunk))(params, chunk)
    norm = sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(ep.gradient.cell))
    shaped = sg.theory.optimise(ep).q0
    rows = []
    for label, q0 in (("identity", None), ("optimised", shaped)):
        exact = sg.theory.optimal_alpha(sg.theory.c_matrix(ep, q0)).alpha
        by_name = {
            "none": jnp.ones(ep.length),
            "GIR": None,
            "greedy (App. D)": sg.theory.greedy_alpha(ep, q0).alpha,
            "exact": exact,
        }
        for name, alpha in by_name.items():
            est = sg.uoro(model, noise="gaussian", rescale="gir" if alpha is None else alpha, q0=q0)
            got = sg.theory.empirical(est, params, chunk, jax.random.key(0), samples, block=64)
            theory = None if alpha is None else sg.theory.total_variance(ep, alpha, q0)
            rows.append(
                {
                    "Q_0": label,
                    "alpha": name,
                    "V/|g|^2": "" if alpha is None else f"{float(sg.theory.v(ep, alpha, q0)) / norm:.1f}",
                    "total/|g|^2": "" if theory is None else f"{float(theory) / norm:.1f}",
                    "measured/|g|^2": f"{float(got.total_variance) / norm:.1f}",
                    "standard error": f"{float(got.total_variance_error) / norm:.1f}",
                }
            )
    print(table(rows))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown."""
    lines = [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
    return "\n".join(lines + [f"| {' | '.join(str(v) for v in row.values())} |" for row in rows])


def main() -> None:
    """Parse, run, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=28, help="T; 28 reads digits row by row, 784 pixel by pixel")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=50, help="units of the LSTM")
    parser.add_argument("--block", type=int, default=None, help="how many reverse passes go back together")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--data", default=os.environ.get("STREAMGRAD_DATA"), help="a folder with MNIST")
    parser.add_argument("--csv", default=None, help="where to write the table")
    parser.add_argument(
        "--alphas", action="store_true", help="compare GIR, greedy and exact alpha on one episode instead"
    )
    parser.add_argument("--samples", type=int, default=4096, help="with --alphas: how many estimates are measured")
    parser.add_argument("--only", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()

    chunk = load(options.data, options.length, options.streams)
    model = sg.Model(sg.cells.lstm(chunk.inputs.shape[-1], options.hidden), sg.heads.softmax(10))
    params = model.init(jax.random.key(0))
    if options.only:
        seconds(tasks(model, options.length, options.streams, options.block)[options.only], params, chunk, 1)
        print(peak_bytes())
        return
    print(
        f"{jax.devices()[0].device_kind}, LSTM of {options.hidden}, T={options.length}, {options.streams} streams, "
        f"{'MNIST' if options.data else 'random input'}\n"
    )
    rows = alphas(model, params, chunk, options.samples) if options.alphas else costs(options, model, params, chunk)
    if options.csv:
        write_rows(pathlib.Path(options.csv), rows)


if __name__ == "__main__":
    main()
