"""`streamgrad reproduce`: run the paper's experiments and write a report."""

import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from streamgrad.lab import interrupts
from streamgrad.lab.cli.options import choose
from streamgrad.lab.experiments import EXTRA, MODULES

FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
NAMES = [*MODULES, "all", *EXTRA]


@dataclasses.dataclass(frozen=True)
class Options:
    """Run the paper's experiments and write a report: one HTML page with the figures and what they show."""

    experiment: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="|".join(NAMES))] = "all"
    """Which; by default all but tune, which searches for the settings that the others are given."""
    preset: Literal["smoke", "laptop", "paper"] = "laptop"
    """How large: smoke (about a minute, nearly all of it compilation), laptop (3 to 6 minutes on two cores), paper
    (the paper's sizes, for a GPU)."""
    out: Path | None = None
    """Folder of the run; runs/PRESET by default."""
    data: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = os.environ.get("STREAMGRAD_DATA") or None
    """Folder of the MNIST files; STREAMGRAD_DATA by default."""
    resume: bool = False
    """Go on with a run that was stopped."""
    seed: int | None = None
    """In place of the preset's."""
    json: bool = False
    """Print the report's path and the claims as JSON; no progress."""


def main(options: Options) -> int:
    """Run, write the page, and print what became of the claims; a claim that fails is a finding, not an error."""
    from streamgrad.lab.cli.progress import show_progress
    from streamgrad.lab.cli.report import EarlyClaims, print_outcome
    from streamgrad.lab.experiments.reproduce import expand, reproduce
    from streamgrad.lab.report import collect, write_report
    from streamgrad.lab.report.run import FILE

    choose("experiment", options.experiment, [*MODULES, *EXTRA, "all"])
    folder = options.out or Path("runs") / options.preset
    names = expand(options.experiment)
    command = shlex.join(["streamgrad", *sys.argv[1:]])
    if options.preset == "smoke":  # its programs run for milliseconds: compiling fast is worth more
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = flags if FAST_COMPILATION in flags else f"{flags} {FAST_COMPILATION}".strip()
    go_on = f"stopped; the same command with --resume goes on with what is in {folder}."
    interrupts.on_stop(lambda: go_on if (folder / FILE).exists() else "stopped before the run began.")
    with show_progress(quiet=options.json) as progress:
        early = EarlyClaims(folder, progress)
        reproduce(
            names,
            options.preset,
            folder,
            progress if options.json else early,
            data=options.data,
            resume=options.resume,
            seed=options.seed,
            command=command,
        )
    content = collect(folder)
    print_outcome(content, write_report(content), options.json, early.shown)
    return 0
