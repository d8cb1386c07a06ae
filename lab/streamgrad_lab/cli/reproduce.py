"""`streamgrad reproduce`: run the paper's experiments and write a report.

Its options are parsed by argparse, and nothing here needs more than jax, numpy and optax: it also runs on a machine
that has no more, such as a borrowed GPU. The page is then written elsewhere, by `streamgrad report`.
"""

import argparse
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from streamgrad_lab import interrupts
from streamgrad_lab.cli.claims import EarlyClaims, print_outcome
from streamgrad_lab.cli.options import choose
from streamgrad_lab.experiments import EXTRA, MODULES
from streamgrad_lab.experiments.reproduce import expand, reproduce
from streamgrad_lab.manifest import FILE
from streamgrad_lab.progress import showing
from streamgrad_lab.report import collect, write_report

FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
PRESETS = ("smoke", "laptop", "paper")
ABOUT = "Run the paper's experiments and write a report: one HTML page with the figures and what they show."


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
    names = "|".join([*MODULES, "all", *EXTRA])
    parser = argparse.ArgumentParser("streamgrad reproduce", description=ABOUT, allow_abbrev=False)
    add = parser.add_argument
    about = "which; by default all but streams, which takes as long as the others together, and tune, which searches "
    about += "for the settings that they are given"
    add("experiment", nargs="?", default="all", metavar=names, help=about)
    about = "how large: smoke (about a minute, nearly all of it compilation), laptop (3 to 6 minutes on two cores, the "
    about += "default), paper (the paper's sizes, for a GPU)"
    add("--preset", choices=PRESETS, default="laptop", help=about)
    add("--out", type=Path, help="folder of the run; runs/PRESET by default")
    about = "folder of the MNIST files, and for streams of tinyshakespeare.txt; STREAMGRAD_DATA by default"
    add("--data", metavar="FOLDER", default=os.environ.get("STREAMGRAD_DATA") or None, help=about)
    about = "go on with a run that was stopped, or add experiments or settings to one"
    add("--resume", action="store_true", help=about)
    add("--seed", type=int, help="in place of the preset's")
    add("--settings", nargs="+", metavar="NAME", help="only these of an experiment, by the names of their folders")
    about = "write none: needs no orbax, and a setting that was broken off cannot go on"
    add("--no-checkpoints", dest="checkpoints", action="store_false", help=about)
    add("--json", action="store_true", help="print the report's path and the claims as JSON; no progress")
    return parser.parse_args(argv)


def main(options: argparse.Namespace) -> int:
    """Run, write the page, and print what became of the claims; a claim that fails is a finding, not an error."""
    choose("experiment", options.experiment, [*MODULES, *EXTRA, "all"])
    folder = options.out or Path("runs") / options.preset
    if options.preset == "smoke":  # its programs run for milliseconds: compiling fast is worth more
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = flags if FAST_COMPILATION in flags else f"{flags} {FAST_COMPILATION}".strip()
    go_on = f"stopped; the same command with --resume goes on with what is in {folder}."
    interrupts.on_stop(lambda: go_on if (folder / FILE).exists() else "stopped before the run began.")
    draws = all(importlib.util.find_spec(package) for package in ("matplotlib", "jinja2"))
    with showing(options.json, 10.0) as progress:
        early = EarlyClaims(folder, progress)
        reproduce(
            expand(options.experiment),
            options.preset,
            folder,
            early if draws and not options.json else progress,
            data=options.data,
            resume=options.resume,
            checkpoints=options.checkpoints,
            command=shlex.join(["streamgrad", *sys.argv[1:]]),
            seed=options.seed,
            settings=options.settings,
        )
    if not draws:
        print(f"written to {folder}; where matplotlib and jinja2 are, `streamgrad report {folder}` makes the page.")
        return 0
    content = collect(folder)
    print_outcome(content, write_report(content), options.json, early.shown)
    return 0
