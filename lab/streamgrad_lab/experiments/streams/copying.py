"""Copy with a curriculum, as in the papers of SnAp and KF-RTRL: which length is reached after so many characters?"""

import dataclasses
import functools
import math
from pathlib import Path

import numpy as np

from streamgrad_lab.experiments import plots
from streamgrad_lab.experiments.base import Claim, Section, Table
from streamgrad_lab.experiments.evidence import judge
from streamgrad_lab.experiments.streams import cases
from streamgrad_lab.experiments.streams.lanes import all_lanes, parts_of, train_lanes
from streamgrad_lab.experiments.streams.methods import look
from streamgrad_lab.progress import Progress
from streamgrad_lab.tasks.copy import copy

THRESHOLD = 0.15 * math.log(2)  # 0.15 bits per character
SPREAD = 5  # lengths are drawn from L - 5 to L


@dataclasses.dataclass(frozen=True)
class Copying:
    """What is run.

    Attributes:
      methods: by their names.
      cell: of the network.
      hidden: its units.
      streams: at once.
      chunk: K, steps between two updates.
      steps: of every stream.
      rates: the grid of learning rates.
      seeds: how many.
      points: rows of each curve.
      name: of the part.
    """

    methods: tuple[str, ...]
    cell: str
    hidden: int
    streams: int
    chunk: int
    steps: int
    rates: tuple[float, ...]
    seeds: int
    points: int = 25
    name: str = "copy"


def train(part: Copying, folder: Path, progress: Progress, resume: bool, seed: int, data: Path | None) -> None:
    """Train every method, all rates and seeds at once, and write a file for each."""
    del data
    task = copy(threshold=THRESHOLD, spread=SPREAD, batch_size=part.streams, length=part.chunk)
    lanes = all_lanes(1, part.rates, range(seed, seed + part.seeds))
    for method in part.methods:
        path = folder / cases.file_of(method)
        if resume and path.exists():
            continue
        show = functools.partial(progress, f"copy, {method}")
        rows = train_lanes(*parts_of(method, part, task), lanes, part.steps // part.chunk, part.points, show=show)
        cases.write_case(path, rows, cases.columns_of(part, method, chunk=part.chunk))


def section(folder: Path) -> Section | None:
    """The length reached against characters, a table, and the claims."""
    found = results(folder)
    if not found:
        return None
    fig, axes = plots.figure(height=3.8)
    ax = axes[0, 0]
    table = Table(["method", "length reached", "seconds"], [])
    order = sorted(found, key=lambda method: -found[method].mean(missing=-1.0))
    for method in order:
        best = found[method]
        if not best.rows:
            table.rows.append([method, "diverged", ""])
            continue
        length = np.mean([[row["copy_length"] for row in curve] for curve in best.rows], axis=0)
        ax.plot([row["steps"] for row in best.rows[0]], length, **look(method))
        table.rows.append([method, str(best), f"{best.rows[0][-1]['seconds']:.1f}"])
    ax.set_xlabel("characters of a stream")
    ax.set_ylabel("length that is copied")
    plots.legend_below(fig, ax)
    rows = cases.read_cases(folder)
    text = (
        "Read a string of bits, then give it back. Its length L, 40 at most, grows by one when the running average of "
        "the loss of the bits that are given back falls below 0.15 bits; lengths are drawn from L - 5 to L. An update "
        f"after every chunk of {int(rows[0]['chunk'])} steps by Adam, after clipping at norm 1. "
        f"{cases.about_sizes(rows)} Shown is the length at the end, mean over seeds and 95% interval. "
        f"{cases.about_rates(rows)} {cases.about_times(rows)}"
    )
    files = cases.files_of(folder, "copy")
    return Section("Copy with a curriculum", fig, text, claims(folder), table, files)


def results(folder: Path) -> dict[str, cases.Best]:
    """The best of every method."""
    return cases.best_by(cases.read_cases(folder), lambda row: row["method"], "copy_length", last=1, highest=True)


def claims(folder: Path) -> list[Claim]:
    """The exact gradient reaches further than truncated BPTT and than the current step alone."""
    found, made = results(folder), []
    for method in ("bptt", "immediate", "snap(1)"):
        if "rtrl" in found and method in found:
            text = f"rtrl copies longer strings than {method} after as many characters."
            more = cases.paired(found["rtrl"], found[method])
            if more is None:
                made.append(judge(text, None, ""))
            else:
                made.append(judge(text, [more], f"Length {found['rtrl']} against {found[method]}: {more} more."))
    return made
