"""`streamgrad report`: write the report of a run."""

import dataclasses
import json
from pathlib import Path

import tyro

from streamgrad_lab.cli.claims import print_outcome
from streamgrad_lab.manifest import load_manifest
from streamgrad_lab.report import collect, collect_training, write_report, write_training_report


@dataclasses.dataclass(frozen=True)
class Options:
    """Write the report of a run, one HTML page, from its CSV files; nothing is computed again."""

    run: tyro.conf.Positional[Path]
    """The run's folder, as `streamgrad reproduce` or `streamgrad train` has written it."""
    json: bool = False
    """Print the report's path and the claims as JSON."""


def main(options: Options) -> int:
    """Write the page, and print its path and what became of the claims, if the run makes any."""
    if load_manifest(options.run).kind == "training":
        page = write_training_report(collect_training(options.run))
        print(json.dumps({"report": str(page)}) if options.json else f"report: {page}")
        return 0
    content = collect(options.run)
    print_outcome(content, write_report(content), options.json)
    return 0
