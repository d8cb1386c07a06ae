"""Time and memory of every estimator, in multiples of BPTT in the same run.

    python -m benchmarks.cost --preset cpu     # minutes on 2 cores
    python -m benchmarks.cost --preset gpu     # minutes on one GPU

Prints a table and writes `benchmarks/results/cost_<preset>.csv`; `python -m benchmarks.plot` draws it. It imports jax,
numpy, optax and streamgrad alone: a GPU without a network needs nothing but a copy of this repository.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import streamgrad as sg
from benchmarks.problems import LEAST_SECONDS, handwritten_bptt, make_problem
from streamgrad.estimators.rtrl import rtrl_by_steps
from streamgrad.estimators.uoro import uoro_plain
from streamgrad_lab.tables import write_rows
from streamgrad_lab.timing import Program, prepare, state_bytes, take_turns, temp_bytes

FIELDS = ["section", "device", "cell", "hidden", "streams", "length", "estimator"]
FIELDS += ["us_per_step", "times_bptt", "temp_mib", "state_mib", "compile_s"]
PRESETS: dict[str, dict[str, Any]] = {
    # Which (hidden, streams) are measured, at which chunk length; T of the memory table; sizes of exact RTRL.
    "smoke": {"sizes": [(8, 2)], "lengths": [4], "memory": [8, 16], "rtrl": [8], "growth": [8, 16], "repeats": 1},
    "cpu": {
        "sizes": [(h, b) for h in (64, 256) for b in (1, 32)],
        "lengths": [1, 64],
        "memory": [256, 1024, 4096, 16384],
        "rtrl": [32, 64],
        "growth": [64, 128, 256, 512],
        "repeats": 15,
    },
    "gpu": {
        "sizes": [(256, 32), (512, 64), (1024, 64), (2048, 16)],
        "lengths": [1, 64],
        "memory": [256, 1024, 4096, 16384],
        "rtrl": [64, 128],
        "growth": [256, 512, 1024, 2048],
        "repeats": 9,
    },
}
MAIN = ("bptt", "uoro", "uoro, no rescaling", "uoro, plain form")
# What is measured with no other program beside it, which would share the caches.
ALONE = {
    "pair": ["bptt", "uoro"],
    "windows": [
        "bptt",
        "windowed_bptt, window 16",
        "windowed_bptt, window 16, every 4",
        "windowed_bptt, one block",
        "windowed_bptt, two blocks",
    ],
}
# The largest influence that is tried, in bytes over all streams.
LARGEST = {"smoke": 2**24, "cpu": 2**29, "gpu": 2**34}


def estimators(model: sg.Model, streams: int, length: int, limit: int) -> dict[str, sg.GradientEstimator]:
    """What fits: each estimator of the registry, and `uoro` in its forms."""
    layout = sg.cuts.layout(model.cell, model.cell.cuts["preactivation"])
    params = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.cell.init_params, jax.random.key(0))))
    found = {
        "bptt": sg.bptt(model),
        "uoro": sg.uoro(model),
        "uoro, no rescaling": sg.uoro(model, rescale="none"),
        "uoro, 8 groups": sg.uoro(model, groups=8),
        "windowed_bptt, window 16": sg.windowed_bptt(model, window=16),
    }
    if length > 1:
        found["uoro, plain form"] = uoro_plain(model)
        found["bptt, recompute 8"] = sg.bptt(model, recompute=8)
        found["windowed_bptt, window 16, every 4"] = sg.windowed_bptt(model, window=16, every=4)
        found["windowed_bptt, one block"] = sg.windowed_bptt(model, window=length, every=length)
        found["windowed_bptt, two blocks"] = sg.windowed_bptt(model, window=2 * length, every=length)
    if 4 * streams * layout.size * layout.state_size * 64 < limit:
        found["preuoro"] = sg.preuoro(model)
    if 4 * streams * layout.state_size * params * 16 < limit:
        found["rtrl"] = sg.rtrl(model)
        found["spatial_rtrl"] = sg.spatial_rtrl(model)
    return found


def compiled(est: sg.GradientEstimator, params: Any, chunk: sg.Chunk, streams: int) -> Program:
    """A batched update, ready to run."""
    many = sg.batched(est, streams)
    return prepare(many.update, params, many.init(params), chunk, jax.random.key(1))


def turns(programs: dict[str, Program], repeats: int) -> dict[str, float]:
    """Median seconds of a call of each."""
    return take_turns({name: program.call for name, program in programs.items()}, repeats, LEAST_SECONDS)


class Table:
    """Rows that are printed as they come and written at the end."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.device = jax.devices()[0].device_kind

    def add(self, section: str, cell: str, hidden: int, streams: int, length: int, name: str, **values: Any) -> None:
        """Print and keep one row."""
        row = {"section": section, "device": self.device, "cell": cell, "hidden": hidden, "streams": streams}
        row |= {"length": length, "estimator": name} | values
        self.rows.append(row)
        shown = "  ".join(f"{k} {v}" for k, v in values.items())
        print(
            f"{section:7s} {cell:8s} H {hidden:5d}  streams {streams:3d}  T {length:6d}  {name:20s} {shown}", flush=True
        )

    def write(self, path: Path) -> None:
        """All rows so far."""
        write_rows(path, [dict.fromkeys(FIELDS, "") | row for row in self.rows])


def measure_sizes(table: Table, cell: str, preset: str, only: list[str] | None = None) -> None:
    """Per-step time at each size and chunk length; of all that fits, or of those named."""
    options = PRESETS[preset]
    for length in options["lengths"]:
        for hidden, streams in options["sizes"]:
            if length == 1 and hidden > 512:
                continue
            model, params, chunk = make_problem(cell, hidden, streams, length)
            chosen = estimators(model, streams, length, LARGEST[preset])
            # The rest is measured at the smaller sizes.
            names = only or (MAIN if hidden > 256 or cell != "lstm" else chosen)
            chosen = {name: est for name, est in chosen.items() if name in names}
            programs = {name: compiled(est, params, chunk, streams) for name, est in chosen.items()}
            if cell != "gru" and only is None:
                state = (jnp.zeros((streams, hidden)), jnp.zeros((streams, hidden)))
                programs["hand-written scan"] = prepare(handwritten_bptt(cell, hidden), params, state, chunk, None)
            seconds = turns(programs, options["repeats"])
            for name, program in programs.items():
                table.add(
                    "size", cell, hidden, streams, length, name,
                    us_per_step=round(seconds[name] / length * 1e6, 2),
                    times_bptt=round(seconds[name] / seconds["bptt"], 3),
                    temp_mib=round(program.temp_bytes / 2**20, 2),
                    state_mib=round(program.state_bytes / 2**20, 2),
                    compile_s=round(program.compile_seconds, 2),
                )  # fmt: skip


def measure_memory(table: Table, cell: str, preset: str, hidden: int = 256, streams: int = 32) -> None:
    """What BPTT of a whole sequence keeps, and what UORO keeps that sees it in chunks of 64 steps."""
    hidden, streams = (8, 2) if preset == "smoke" else (hidden, streams)
    for length in PRESETS[preset]["memory"]:
        model, params, _ = make_problem(cell, hidden, streams, 1)
        for name, est, seen in (("bptt", sg.bptt(model), length), ("uoro", sg.uoro(model), min(64, length))):
            chunk = jax.eval_shape(lambda seen=seen: make_problem(cell, hidden, streams, seen)[2])
            many = sg.batched(est, streams)
            state = jax.eval_shape(many.init, params)
            lowered = jax.jit(many.update, donate_argnums=1).lower(params, state, chunk, jax.random.key(1))
            temp, size = temp_bytes(lowered.compile()), state_bytes(state)
            table.add(
                "memory", cell, hidden, streams, length, name,
                temp_mib=round(temp / 2**20, 2), state_mib=round(size / 2**20, 2),
            )  # fmt: skip


def measure_rtrl(table: Table, preset: str) -> None:
    """RTRL beside the bare product D M of the same size, in the same kind of loop."""
    for hidden in PRESETS[preset]["rtrl"]:
        length = 16
        model, params, chunk = make_problem("vanilla", hidden, 1, length)
        columns = params.cell["w"].size

        def product(params: Any, state: Any, chunk: sg.Chunk, key: Any) -> tuple[Any, Any, sg.Info]:
            del params, key

            def step(m: Any, x: Any) -> tuple[Any, Any]:
                d = jnp.zeros((m.shape[0], m.shape[0])) + 0.01 * x[0]
                return d @ m, None

            end, _ = jax.lax.scan(step, state, chunk.inputs[0])
            return end[0, 0], end, sg.Info(end[0, :1], {})

        programs = {
            "rtrl": compiled(rtrl_by_steps(model), params, chunk, 1),
            "bare product": prepare(product, params, jnp.ones((hidden, columns)), chunk, None),
            "bptt": compiled(sg.bptt(model), params, chunk, 1),
        }
        seconds = turns(programs, PRESETS[preset]["repeats"])
        for name, value in seconds.items():
            table.add(
                "rtrl", "vanilla", hidden, 1, length, name,
                us_per_step=round(value / length * 1e6, 2), times_bptt=round(value / seconds["bptt"], 3),
            )  # fmt: skip
        print(f"        rtrl is {seconds['rtrl'] / seconds['bare product']:.2f} times the bare product")


def measure_growth(table: Table, cell: str, preset: str) -> None:
    """How time grows with H and with T: exponents of a power law, fitted to the times."""
    hidden_sizes, lengths = PRESETS[preset]["growth"], (32, 64, 128, 256)
    grid = [(h, 64) for h in hidden_sizes] + [(hidden_sizes[1], length) for length in lengths]
    times: dict[tuple[int, int], dict[str, float]] = {}
    for hidden, length in dict.fromkeys(grid):
        model, params, chunk = make_problem(cell, hidden, 8, length)
        programs = {
            name: compiled(est, params, chunk, 8) for name, est in (("bptt", sg.bptt(model)), ("uoro", sg.uoro(model)))
        }
        times[hidden, length] = turns(programs, PRESETS[preset]["repeats"])
        for name, value in times[hidden, length].items():
            table.add("growth", cell, hidden, 8, length, name, us_per_step=round(value / length * 1e6, 2))
    for name in ("bptt", "uoro"):
        by_h = np.polyfit(np.log(hidden_sizes), [np.log(times[h, 64][name]) for h in hidden_sizes], 1)[0]
        by_t = np.polyfit(np.log(lengths), [np.log(times[hidden_sizes[1], n][name]) for n in lengths], 1)[0]
        print(f"        {name}: time ~ H^{by_h:.2f}, T^{by_t:.2f}")


def main() -> None:
    """Run a preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--cells", nargs="+", choices=("vanilla", "lstm", "gru"), default=["lstm", "vanilla"])
    parser.add_argument("--all", action=argparse.BooleanOptionalAction, default=True, help="memory, growth, RTRL")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--alone", choices=ALONE, help="these alone: bptt and uoro, or bptt and windowed_bptt")
    arguments = parser.parse_args()
    table = Table()
    path = arguments.out / f"cost_{arguments.preset}{f'_{arguments.alone}' if arguments.alone else ''}.csv"
    print(f"{table.device}, jax {jax.__version__}, float32 with the default matrix precision")
    for cell in arguments.cells:
        measure_sizes(table, cell, arguments.preset, ALONE.get(arguments.alone))
        table.write(path)
    if arguments.all and not arguments.alone:
        measure_memory(table, arguments.cells[0], arguments.preset)
        measure_growth(table, arguments.cells[0], arguments.preset)
        measure_rtrl(table, arguments.preset)
    table.write(path)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
