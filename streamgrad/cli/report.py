"""`streamgrad report`: write the report of a run anew."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import tyro

from streamgrad.report import Content, collect, write_report
from streamgrad.report.page import VERDICTS


@dataclasses.dataclass(frozen=True)
class Options:
    """Write the report of a run anew from its CSV files; nothing is computed again."""

    run: tyro.conf.Positional[Path]
    """The run's folder, as `streamgrad reproduce --out` has written it."""
    json: bool = False
    """Print the report's path and the claims as JSON."""


def main(options: Options) -> int:
    """Write the page, and print its path and what became of the claims."""
    content = collect(options.run)
    page = write_report(content)
    if options.json:
        print(json.dumps(as_json(content, page), indent=2))
    else:
        print_claims(content)
        print(f"report: {page}")
    return 0


def as_json(content: Content, page: Path) -> dict[str, Any]:
    """What a program may want to know of a run; `holds` is true, false, or null where the numbers cannot tell."""
    claims = [
        {
            "experiment": name,
            "section": section.title,
            "claim": claim.text,
            "holds": claim.holds,
            "detail": claim.detail,
        }
        for name, section, claim in content.claims
    ]
    return {
        "report": str(page),
        "preset": content.run.preset,
        "experiments": [part.experiment.name for part in content.parts],
        "unfinished": content.unfinished,
        "claims": claims,
    }


def print_claims(content: Content) -> None:
    """A short table of the claims: on a terminal as wide as it, in a pipe one line for each."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    marks = {True: ("✓ holds", "green"), False: ("✗ fails", "red"), None: ("? cannot tell", "yellow")}
    if not console.is_terminal:
        for name, _, claim in content.claims:
            print(f"{VERDICTS[claim.holds]}\t{name}\t{claim.text}\t{claim.detail}")
        return
    table = Table("verdict", "experiment", "claim", "numbers", show_lines=False, box=None, padding=(0, 2, 1, 0))
    for name, _, claim in content.claims:
        mark, colour = marks[claim.holds]
        table.add_row(f"[{colour}]{mark}[/]", name, *map(_escape, (claim.text, claim.detail)))
    console.print(table)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
