"""`streamgrad report`: write the report of a run; and the claims of a run on the screen."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

if TYPE_CHECKING:
    from streamgrad.report import Content


@dataclasses.dataclass(frozen=True)
class Options:
    """Write the report of a run, one HTML page, from its CSV files; nothing is computed again."""

    run: tyro.conf.Positional[Path]
    """The run's folder, as `streamgrad reproduce` or `streamgrad train` has written it."""
    json: bool = False
    """Print the report's path and the claims as JSON."""


def main(options: Options) -> int:
    """Write the page, and print its path and what became of the claims, if the run makes any."""
    from streamgrad.report import collect, collect_training, is_training, write_report, write_training_report

    if is_training(options.run):
        page = write_training_report(collect_training(options.run))
        print(json.dumps({"report": str(page)}) if options.json else f"report: {page}")
        return 0
    content = collect(options.run)
    print_outcome(content, write_report(content), options.json)
    return 0


def print_outcome(content: "Content", page: Path, as_json: bool) -> None:
    """What became of the claims, and last of all the page's path."""
    if as_json:
        print(json.dumps(outcome(content, page), indent=2))
        return
    print_claims(content)
    print(f"report: {page}")


def outcome(content: "Content", page: Path) -> dict[str, Any]:
    """What a program may want to know of a run; `holds` is true, false, or null for undecided."""
    claims = [
        {"experiment": name, "section": section.title, "claim": c.text, "holds": c.holds, "detail": c.detail}
        for name, section, c in content.claims
    ]
    return {
        "report": str(page),
        "preset": content.run.preset,
        "experiments": [part.experiment.name for part in content.parts],
        "unfinished": content.unfinished,
        "claims": claims,
    }


def print_claims(content: "Content") -> None:
    """A short table of the claims: on a terminal as wide as it, elsewhere one line for each."""
    from streamgrad.report.page import VERDICTS

    if not (sys.stdout.isatty() and importlib.util.find_spec("rich")):
        for name, _, claim in content.claims:
            print(f"{VERDICTS[claim.holds]}\t{name}\t{claim.text}\t{claim.detail}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {True: "green", False: "red", None: "yellow"}
    table = Table("verdict", "experiment", "claim", "numbers", box=None, padding=(0, 2, 1, 0))
    for name, _, claim in content.claims:
        verdict = Text(VERDICTS[claim.holds], style=colours[claim.holds])
        table.add_row(verdict, name, Text(claim.text), Text(claim.detail))
    Console().print(table)
