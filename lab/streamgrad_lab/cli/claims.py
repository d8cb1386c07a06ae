"""The claims of a run on the screen."""

import contextlib
import json
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from streamgrad_lab.experiments.base import Claim
from streamgrad_lab.manifest import load_manifest
from streamgrad_lab.progress import Progress
from streamgrad_lab.report import VERDICTS, Content, sections_of

COLOURS, END = {True: "\x1b[32m", False: "\x1b[31m", None: "\x1b[33m"}, "\x1b[0m"  # green, red, yellow


def print_outcome(content: Content, page: Path, as_json: bool, shown: Collection[str] = ()) -> None:
    """What became of the claims, but for those of experiments that were shown before, and last the page's path."""
    if as_json:
        print(json.dumps(outcome(content, page), indent=2))
        return
    print_claims([(name, claim) for name, _, claim in content.claims if name not in shown])
    print(f"report: {page}")


class EarlyClaims:
    """Shows the claims of each experiment of a run as soon as it is done, while the others go on.

    Args:
      folder: the run's.
      progress: is called as this object is: `progress(setting, updates made, of how many, a few words)`.

    Attributes:
      shown: the experiments whose claims have been printed.
    """

    def __init__(self, folder: Path, progress: Progress):
        self.folder, self.progress = folder, progress
        self.shown: set[str] = set()
        self._now = ""

    def __call__(self, setting: str, made: int, total: int, words: str) -> None:
        """Pass it on, after the claims of what is done by now."""
        name = setting.partition(":")[0]
        if name != self._now:
            self._now = name
            self._show()
        self.progress(setting, made, total, words)

    def _show(self) -> None:
        for name, entry in load_manifest(self.folder).experiments.items():
            if entry["done"] and name not in self.shown:
                # What cannot be read is told at the end, when the page is written: the others must go on.
                with contextlib.suppress(ValueError):
                    claims = [(name, claim) for section in sections_of(name, self.folder) for claim in section.claims]
                    print_claims(claims)
                    self.shown.add(name)


def outcome(content: Content, page: Path) -> dict[str, Any]:
    """What a program may want to know of a run; `holds` is true, false, or null for undecided."""
    claims = [
        {"experiment": name, "section": section.title, "claim": c.text, "holds": c.holds, "detail": c.detail}
        for name, section, c in content.claims
    ]
    return {
        "report": str(page),
        "preset": content.run.describe["preset"],
        "experiments": [part.experiment.name for part in content.parts],
        "unfinished": content.unfinished,
        "claims": claims,
    }


def print_claims(claims: Sequence[tuple[str, Claim]]) -> None:
    """Claims with their experiments' names: on a terminal in its width and in colour, elsewhere one line for each."""
    if not sys.stdout.isatty():
        for name, claim in claims:
            print(f"{VERDICTS[claim.holds]}\t{name}\t{claim.text}\t{claim.detail}", flush=True)
        return
    width = shutil.get_terminal_size((80, 24)).columns
    for name, claim in claims:
        verdict, indent = VERDICTS[claim.holds], " " * 11
        text = textwrap.fill(f"{verdict:9s}  {name}: {claim.text}", width, subsequent_indent=indent)
        print(f"{COLOURS[claim.holds]}{verdict}{END}{text[len(verdict) :]}")
        detail = textwrap.fill(claim.detail, width, initial_indent=indent, subsequent_indent=indent)
        print(detail, end="\n\n", flush=True)
