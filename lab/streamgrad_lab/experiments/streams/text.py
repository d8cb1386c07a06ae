"""Text: the next character of a stream that is read once, with an update every 1, 4 or 16 characters."""

import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import numpy as np

from streamgrad_lab.experiments import plots
from streamgrad_lab.experiments.base import Claim, Section, Table
from streamgrad_lab.experiments.evidence import judge
from streamgrad_lab.experiments.streams import cases
from streamgrad_lab.experiments.streams.lanes import all_lanes, parts_of, train_lanes
from streamgrad_lab.experiments.streams.methods import in_order, look
from streamgrad_lab.progress import Progress
from streamgrad_lab.tasks.base import digest
from streamgrad_lab.tasks.text import codes_of, read_text, text_task

FILE = "tinyshakespeare.txt"  # where there is a data folder
SHOWN = 0.6  # nats above the lowest that the figure has
LEVEL = 0.02  # nats per character within which two methods are level


@dataclasses.dataclass(frozen=True)
class Text:
    """What is run.

    Attributes:
      chunks: K, characters between two updates.
      methods: by their names.
      cell: of the network.
      hidden: its units.
      streams: at once.
      steps: characters that each stream reads, whatever K is.
      rates: the grid of learning rates.
      seeds: how many.
      points: rows of each curve.
      source: "python", the documentation that comes with Python, or "file", `tinyshakespeare.txt` in the data folder.
      name: of the part.
    """

    chunks: tuple[int, ...]
    methods: tuple[str, ...]
    cell: str
    hidden: int
    streams: int
    steps: int
    rates: tuple[float, ...]
    seeds: int
    points: int = 20
    source: str = "python"
    name: str = "text"


def load(source: str, data: Path | None) -> tuple[str, np.ndarray]:
    """Vocabulary and codes of the text.

    Args:
      source: "python" or "file".
      data: the data folder, in which "file" looks for `tinyshakespeare.txt`.

    Returns:
      The vocabulary, and the characters as numbers.
    """
    if source == "python":
        from pydoc_data.topics import topics

        return codes_of("\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode())
    if data is None:
        raise ValueError(f"the experiment streams reads {FILE} in the data folder: name one with --data FOLDER.")
    return read_text(data / FILE)


def check(part: Text, data: Path | None) -> None:
    """The text is there, which must be known before hours are spent on other parts."""
    load(part.source, data)


def data_hash(part: Text, data: Path | None) -> str:
    """That of the text."""
    return digest(text_task(*load(part.source, data), batch_size=1, length=1))


def train(part: Text, folder: Path, progress: Progress, resume: bool, seed: int, data: Path | None) -> None:
    """Train every method at every K, all rates and seeds at once, and write a file for each."""
    pairs = itertools.product(part.chunks, part.methods)
    todo = [(length, method, folder / cases.file_of(method, length)) for length, method in pairs]
    # By chunks of one step truncated BPTT is the current step alone.
    todo = [case for case in todo if case[:2] != (1, "bptt") and not (resume and case[2].exists())]
    if not todo:
        return
    vocabulary, codes = load(part.source, data)
    lanes = all_lanes(1, part.rates, range(seed, seed + part.seeds))
    for length, method, path in todo:
        task = text_task(vocabulary, codes, part.streams, length)
        show = functools.partial(progress, f"text, {method}, chunks of {length}")
        rows = train_lanes(*parts_of(method, part, task), lanes, part.steps // length, part.points, show=show)
        about = cases.columns_of(part, method, chunk=length)
        about |= {"source": part.source, "characters": len(codes), "device": jax.devices()[0].device_kind}
        cases.write_case(path, rows, about)


def section(folder: Path) -> Section | None:
    """Nats per character against steps and against seconds, the table, and the claims."""
    found = results(folder)
    if not found:
        return None
    chunks = sorted({length for _, length in found})
    fig, axes = plots.figure(len(chunks), 2, height=2.6, sharey="row")
    table = Table(["method", "K", "nats per character", "seconds"], [])
    methods, lowest = in_order(method for method, _ in found), {}
    for length, method in itertools.product(chunks, methods):
        if (method, length) not in found:
            continue
        best = found[method, length]
        if not best.rows:
            table.rows.append([method, str(length), "diverged", ""])
            continue
        seconds = [float(np.mean([curve[i]["seconds"] for curve in best.rows])) for i in range(len(best.rows[0]))]
        loss = [float(np.mean([curve[i]["loss"] for curve in best.rows])) for i in range(len(best.rows[0]))]
        steps = [row["steps"] for row in best.rows[0]]
        for ax, along in zip(axes[chunks.index(length)], (steps, seconds), strict=True):
            ax.plot(along, loss, **look(method))
            lowest[length] = min(lowest.get(length, np.inf), *loss)
        table.rows.append([method, str(length), str(best), f"{seconds[-1]:.1f}"])
    for (left, right), length in zip(axes, chunks, strict=True):
        left.set_ylabel(f"nats, chunks of {length}")
        if length in lowest:  # what is far above is cut off, for the rest to be told apart
            left.set_ylim(lowest[length] - 0.03, lowest[length] + SHOWN)
        right.set_xscale("log")
    axes[-1, 0].set_xlabel("characters of a stream")
    axes[-1, 1].set_xlabel("seconds")
    plots.legend_below(fig, max(axes[:, 0], key=lambda ax: len(ax.lines)), 2)
    rows = cases.read_cases(folder)
    source = "Python's own documentation" if rows[0]["source"] == "python" else FILE
    text = (
        f"The next character of a text ({source}), read as streams that never begin anew but at its end. "
        f"{cases.about_sizes(rows)} Adam, after clipping at norm 1. Loss over the last tenth, mean over seeds and 95% "
        f"interval, most of which is the text itself: claims compare seed by seed. {cases.about_rates(rows)} "
        f"{cases.about_times(rows)}"
    )
    files = cases.files_of(folder, "text")
    return Section("Text, character by character", fig, text, claims(folder), table, files)


def results(folder: Path) -> dict[tuple[str, int], cases.Best]:
    """The best of every method at every K."""
    found = cases.best_by(cases.read_cases(folder), lambda row: (row["method"], int(row["chunk"])))
    return dict(sorted(found.items(), key=lambda item: item[0][1]))


def claims(folder: Path) -> list[Claim]:
    """Exact methods are level with TBPTT at equal steps; what is given away by others is in the table."""
    found, made = results(folder), []
    for length in sorted({length for _, length in found}):
        name = "bptt" if length > 1 else "windowed_bptt(16)"
        for method in ("rtrl", "ok(8)"):
            best, base = found.get((method, length)), found.get((name, length))
            if best is None or base is None:
                continue
            text = f"{method} is level with {name} on text by chunks of {length}, to {LEVEL} nats, or better."
            more = cases.paired(best, base)
            if more is None:
                made.append(judge(text, None, ""))
            else:
                made.append(judge(text, [more.below(LEVEL)], f"{best} against {base}: {more} nats more, seed by seed."))
    return made
