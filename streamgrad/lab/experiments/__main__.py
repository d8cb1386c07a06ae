"""`python -m streamgrad.lab.experiments NAME --out FOLDER`: run one experiment with jax, numpy and optax alone.

For machines that have no more, such as a borrowed GPU; `streamgrad reproduce` has progress bars and the report.
"""

import argparse
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from streamgrad.lab import interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """Run an experiment; returns the exit code."""
    # LAPACK's own threads and XLA's get in each other's way: an eigendecomposition may take 100 times as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from streamgrad.lab.cli.progress import show_progress
    from streamgrad.lab.experiments import EXTRA, MODULES, find_experiment
    from streamgrad.lab.experiments.reproduce import check_run, record

    parser = argparse.ArgumentParser(prog="python -m streamgrad.lab.experiments", description=__doc__)
    parser.add_argument("name", choices=[*MODULES, *EXTRA])
    parser.add_argument("--preset", default="laptop", help="smoke, laptop (the default) or paper")
    default = os.environ.get("STREAMGRAD_DATA") or None
    about = "folder of the MNIST files and of text/*.txt; STREAMGRAD_DATA by default"
    parser.add_argument("--data", type=Path, default=default, help=about)
    parser.add_argument("--out", type=Path, required=True, help="folder; the experiment writes into OUT/NAME")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was broken off")
    parser.add_argument("--no-checkpoints", action="store_true", help="write none: needs no orbax, cannot resume")
    parser.add_argument("--updates", type=int, help="instead of the preset's")
    parser.add_argument("--settings", nargs="+", help="only these, by the names of their folders")
    options = parser.parse_args(argv)
    experiment = find_experiment(options.name)
    try:
        if options.preset not in experiment.presets:
            raise ValueError(f"preset must be one of {', '.join(experiment.presets)}, not {options.preset!r}.")
        config = experiment.presets[options.preset]
        fields = {field.name for field in dataclasses.fields(config)}
        if options.no_checkpoints and "checkpoints" in fields:  # those without write none
            config = dataclasses.replace(config, checkpoints=False)
        for name in ("updates", "settings"):
            if getattr(options, name) is not None and name not in fields:
                raise ValueError(f"the experiment {options.name} has no {name} to choose.")
        if options.updates is not None:
            config = dataclasses.replace(config, updates=options.updates)
        if options.settings is not None:
            config = dataclasses.replace(config, settings=_chosen(config.settings, options.settings))
        check_run(options.out, options.preset)
        begun = time.monotonic()
        with show_progress() as progress:
            experiment.run(config, options.out / options.name, progress, options.resume, options.data)
        command = shlex.join(["python", "-m", "streamgrad.lab.experiments", *(sys.argv[1:] if argv is None else argv)])
        data = None if options.data is None else str(options.data)
        record(options.out, experiment, options.preset, config, time.monotonic() - begun, command, data)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _chosen(settings: Sequence, names: Sequence[str]) -> tuple:
    known = {getattr(setting, "name", setting): setting for setting in settings}
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ValueError(f"settings must be among {', '.join(known)}, not {', '.join(wrong)}.")
    return tuple(known[name] for name in names)


if __name__ == "__main__":
    interrupts.run_process(main)
