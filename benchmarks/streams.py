"""The preset `paper` of `streamgrad reproduce streams` on one GPU, in several processes that share it.

    python -m benchmarks.streams --data FOLDER --out RUN                     # eight cases at a time
    python -m benchmarks.streams --data FOLDER --out RUN --settings text --time
    streamgrad reproduce streams --preset paper --data FOLDER --out RUN --resume     # all is there: writes the page

A case is one method with one cell and one chunk length, with all its settings, rates and seeds in one program. Its
kernels are small and many, and the GPU waits for most of them to be launched: several programs beside each other fill
it (under NVIDIA's MPS; without, they take turns). Numbers and files are those of `streamgrad reproduce`. The seconds
are not: how many processes shared the device stands in each file, as `processes`, and in the report's text.

A file that is there is complete, and its case is not run again. With `--time` the cases that are there are run once
more, one after the other on a device of their own, for 1,000 updates; their seconds are then those of these updates
times how many more there were, and `processes` is 1. `--cache FOLDER` keeps compiled programs from one to the other.
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax

from streamgrad_lab.experiments import streams
from streamgrad_lab.experiments.streams.cases import DIGITS
from streamgrad_lab.manifest import FILE, new_manifest, now, save_manifest
from streamgrad_lab.progress import silent
from streamgrad_lab.tables import read_rows, write_rows

SEED = streams.Config(()).seed  # of the first trial, as `streamgrad reproduce` has it
TIMED = 1000  # updates
SPLIT = ("chunks", "cells", "methods")  # what makes another program of a part


def cases_of(part: Any) -> Iterator[Any]:
    """A part cut into parts of one program each."""
    fields = [name for name in SPLIT if isinstance(getattr(part, name, None), tuple)]
    for chosen in itertools.product(*(getattr(part, name) for name in fields)):
        yield dataclasses.replace(part, **{name: (value,) for name, value in zip(fields, chosen, strict=True)})


def run_case(part: Any, options: argparse.Namespace) -> str:
    """Run one case, and write its file; returns a line on it."""
    if options.cache:
        jax.config.update("jax_compilation_cache_dir", str(options.cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        small = dataclasses.replace(part, steps=TIMED * getattr(part, "chunks", (getattr(part, "chunk", 1),))[0])
        train = streams.PARTS[part.name].train
        train(small if options.time else part, Path(scratch), silent, False, SEED, options.data)
        for path in sorted(Path(scratch).glob("*.csv")):
            rows, kept = read_rows(path), options.out / "streams" / part.name / path.name
            if options.time:
                rows = [row | {"seconds": pace(rows) * row["update"]} for row in read_rows(kept)]
            said = {"processes": 1 if options.time else options.processes}
            write_rows(kept, [row | said for row in rows], digits=DIGITS)
    return f"{name_of(part)}: {time.monotonic() - begun:.0f} s"


def pace(rows: list[dict[str, Any]]) -> float:
    """Seconds of an update, without those of the first rows."""
    first, last = (pick(rows, key=lambda row: row["update"]) for pick in (min, max))
    return (last["seconds"] - first["seconds"]) / (last["update"] - first["update"])


def name_of(part: Any) -> str:
    """What tells a case from others."""
    cell = getattr(part, "cells", (getattr(part, "cell", ""),))[0]
    return called(part, cell, part.methods[0], getattr(part, "chunks", (0,))[0])


def known(out: Path, part: Any) -> set[str]:
    """The names of the cases of a part whose files are there."""
    firsts = [read_rows(path)[0] for path in sorted((out / "streams" / part.name).glob("*.csv"))]
    return {called(part, row["cell"], row["method"], row.get("chunk", 0)) for row in firsts}


def called(part: Any, cell: str, method: str, chunk: float) -> str:
    """The name of a case; of a part that has several chunk lengths with its own."""
    return f"{part.name}, {cell}, {method}" + (f", chunks of {int(chunk)}" if hasattr(part, "chunks") else "")


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tuple(streams.PRESETS), default="paper")
    parser.add_argument("--data", type=Path, help="the folder of tinyshakespeare.txt")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the run")
    parser.add_argument(
        "--settings", nargs="+", choices=tuple(streams.PARTS), default=list(streams.PARTS), metavar="NAME"
    )
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--cache", type=Path, help="the folder of compiled programs")
    parser.add_argument("--time", action="store_true", help="time the cases that are there, each on its own")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run all cases that are not there yet."""
    options = read_options(arguments)
    preset = streams.PRESETS[options.preset]
    by_name = {part.name: part for part in preset.settings}
    parts = tuple(by_name[name] for name in options.settings)
    try:
        streams.check(dataclasses.replace(preset, settings=parts), options.data)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    cases = [case for part in parts for case in cases_of(part)]
    there = set().union(*(known(options.out, part) for part in parts))
    cases = [case for case in cases if (name_of(case) in there) == options.time]
    if not (options.out / FILE).exists():  # so that `streamgrad reproduce --resume` knows the folder
        about = new_manifest(
            "experiments", {"preset": options.preset}, command=shlex.join(sys.argv), data=options.data, started=now()
        )
        options.out.mkdir(parents=True, exist_ok=True)
        save_manifest(options.out, about)
    begun, context = time.monotonic(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1 if options.time else options.processes, mp_context=context) as pool:
        for number, done in enumerate(as_completed([pool.submit(run_case, case, options) for case in cases]), 1):
            print(f"{time.monotonic() - begun:5.0f} s  {number} of {len(cases)}  {done.result()}", flush=True)


if __name__ == "__main__":
    main()
