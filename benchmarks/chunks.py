"""What an influence across chunks costs: time and memory in multiples of BPTT, in the same run.

    python -m benchmarks.chunks --preset cpu     # minutes on 2 cores
    python -m benchmarks.chunks --preset gpu     # minutes on one GPU: rtrl and ok
    python -m benchmarks.chunks --preset large   # likewise: uoro, for networks too large for either
    python -m benchmarks.chunks --preset local   # likewise: snap, eprop and the current step alone
    python -m benchmarks.chunks --preset diagonal      # likewise: exact rtrl of diagonal recurrences
    python -m benchmarks.chunks --preset diagonal-cpu  # the same, minutes on 2 cores

Chunks of 64 steps; all programs of a size take turns, and the median of their repeats counts. `times_old_bptt` is in
multiples of BPTT with one step in each turn of its loop, as it was when the aims were set; they are the same on a CPU.
`temp_over_m` is what an update keeps beside arguments and results, in multiples of the influence. Writes
`chunks_<preset>.csv`. It imports jax, numpy, optax and streamgrad alone.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

import streamgrad as sg
from benchmarks.problems import LEAST_SECONDS, make_problem
from streamgrad.estimators.rtrl import rtrl_by_steps
from streamgrad.estimators.snap import snap_by_steps
from streamgrad.step import platform
from streamgrad_lab.tables import write_rows
from streamgrad_lab.timing import prepare, take_turns

STEPS_PER_TURN = platform.STEPS_PER_TURN_ON_GPU


class Method(NamedTuple):
    """An estimator, and how many of the streams it watches; None for all."""

    make: Callable[[sg.Model], sg.GradientEstimator]
    watched: int | None = None


BPTT = {"bptt": Method(sg.bptt)}
# As it was when the aims were set, with one step in each turn of its loop: on a GPU half as fast as today's.
OLD = "bptt, a step per turn"
RTRL = {"rtrl": Method(sg.rtrl)}
STEPS = {"rtrl, step by step": Method(rtrl_by_steps)}
OK = {"ok, 8 terms": Method(lambda model: sg.ok(model, rank=8))}
PREUORO = {"preuoro": Method(sg.preuoro)}
UORO = {
    "uoro": Method(sg.uoro),
    "uoro_across": Method(sg.uoro_across),
    "uoro_across, 8 blocks": Method(lambda model: sg.uoro_across(model, blocks=8)),
}
SNAP = {
    "snap": Method(sg.snap),
    "snap, inside backprop": Method(lambda model: sg.snap(model, inside="backprop")),
    "eprop": Method(sg.eprop),
    "immediate": Method(sg.immediate),
}
SNAP_STEPS = {"snap, step by step": Method(snap_by_steps)}
DIAGONAL = ("lru", "rtu", "elstm", "mingru")
RTRL_WATCHED = {"rtrl, 2 streams watched": Method(sg.rtrl, 2)}
OK_WATCHED = {"ok, 8 terms, 2 streams watched": Method(lambda model: sg.ok(model, rank=8), 2)}

# (cell, hidden, streams), what is measured beside BPTT, and the most that it should take, in multiples of BPTT.
Case = tuple[str, int, int, dict[str, Method], dict[str, float]]
PRESETS: dict[str, list[Case]] = {
    "smoke": [("lstm", 4, 2, RTRL | OK | UORO | RTRL_WATCHED, {})],
    "cpu": [
        ("lstm", 64, 1, RTRL | STEPS | OK | UORO, {}),
        ("vanilla", 128, 1, RTRL | STEPS | OK | UORO, {}),
        ("lstm", 64, 8, RTRL | OK | UORO | RTRL_WATCHED | OK_WATCHED, {}),
    ],
    "gpu": [
        ("lstm", 64, 1, RTRL | STEPS, {"rtrl": 1.3}),
        ("lstm", 128, 1, RTRL | STEPS, {"rtrl": 1.7}),
        ("vanilla", 256, 1, RTRL, {"rtrl": 2.5}),
        ("lstm", 64, 8, RTRL, {"rtrl": 1.6}),
        ("lstm", 64, 32, RTRL | OK | PREUORO, {"rtrl": 2.5, "ok, 8 terms": 2.5}),
        (
            "lstm", 128, 32, RTRL | OK | PREUORO | RTRL_WATCHED,
            {"rtrl": 7, "ok, 8 terms": 4, "rtrl, 2 streams watched": 1.6},
        ),
        (
            "lstm", 256, 32, OK | PREUORO | OK_WATCHED,
            {"ok, 8 terms": 8, "ok, 8 terms, 2 streams watched": 2.5},
        ),
    ],
    "large": [
        ("lstm", 256, 32, UORO, {"uoro_across": 1.2}),
        ("lstm", 512, 64, UORO, {"uoro_across": 1.2}),
        ("lstm", 1024, 64, UORO, {"uoro_across": 1.5}),
        ("lstm", 2048, 16, UORO, {"uoro_across": 1.2}),
        ("vanilla", 256, 32, UORO, {"uoro_across": 1.2}),
        ("vanilla", 512, 64, UORO, {"uoro_across": 1.2}),
        ("vanilla", 1024, 64, UORO, {"uoro_across": 1.2}),
        ("vanilla", 2048, 16, UORO, {"uoro_across": 1.2}),
    ],
    "local": [
        ("lstm", 256, 32, SNAP | SNAP_STEPS, {"snap": 2}),
        ("lstm", 512, 64, SNAP, {"snap": 2}),
        ("lstm", 1024, 64, SNAP, {"snap": 2}),
        ("lstm", 2048, 16, SNAP, {"snap": 2}),
        ("vanilla", 256, 32, SNAP | SNAP_STEPS, {"snap": 2}),
        ("vanilla", 512, 64, SNAP, {"snap": 2}),
        ("vanilla", 1024, 64, SNAP, {"snap": 2}),
        ("vanilla", 2048, 16, SNAP, {"snap": 2}),
    ],
    "diagonal": [(cell, hidden, 32, RTRL, {"rtrl": 2}) for cell in DIAGONAL for hidden in (64, 256, 1024)],
    "diagonal-cpu": [
        (cell, hidden, streams, RTRL, {"rtrl": 2})
        for cell in DIAGONAL
        for hidden, streams in ((64, 1), (256, 8), (1024, 32))
    ],
}  # fmt: skip


def measure(case: Case, length: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of one size."""
    cell, hidden, streams, methods, limits = case
    model, params, chunk = make_problem(cell, hidden, streams, length)
    programs, memories = {}, {}
    for name, method in (BPTT | {OLD: Method(sg.bptt)} | methods).items():
        platform.STEPS_PER_TURN_ON_GPU = 1 if name == OLD else STEPS_PER_TURN
        est = sg.batched(method.make(model), streams, method.watched)
        state = est.init(params)
        memories[name] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.memory))
        programs[name] = prepare(est.update, params, state, chunk, jax.random.key(1))
    seconds = take_turns({name: program.call for name, program in programs.items()}, repeats, LEAST_SECONDS)
    rows = []
    for name, program in programs.items():
        ratio, old = seconds[name] / seconds["bptt"], seconds[name] / seconds[OLD]
        rows.append(
            {
                "device": jax.devices()[0].device_kind,
                "cell": cell,
                "hidden": hidden,
                "streams": streams,
                "length": length,
                "estimator": name,
                "us_per_step": round(seconds[name] / length * 1e6, 2),
                "times_bptt": round(ratio, 3),
                "times_old_bptt": round(old, 3),
                "aim": limits.get(name, ""),
                "state_mib": round(program.state_bytes / 2**20, 2),
                "temp_mib": round(program.temp_bytes / 2**20, 2),
                "temp_over_m": round(program.temp_bytes / memories[name], 2) if memories[name] else "",
            }
        )
    return rows


def main() -> None:
    """Run a preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in PRESETS[arguments.preset]:
        found = measure(case, arguments.length, arguments.repeats)
        rows += found
        for row in found:
            shown = f"{row['cell']:8s} {row['hidden']:5d} {row['streams']:3d}  {row['estimator']:32s}"
            ratios = f"{row['times_bptt']:7.2f} {row['times_old_bptt']:7.2f}"
            print(f"{shown} {ratios}  aim {row['aim'] or '-'}  temp/M {row['temp_over_m']}", flush=True)
        write_rows(arguments.out / f"chunks_{arguments.preset}.csv", rows)


if __name__ == "__main__":
    main()
