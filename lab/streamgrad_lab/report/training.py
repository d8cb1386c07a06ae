"""The page of a training run: what `streamgrad train`, or `streamgrad_lab.training.train`, wrote into a folder."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from streamgrad_lab.experiments import plots
from streamgrad_lab.experiments.base import Section, Table
from streamgrad_lab.experiments.records import Record, median_filter, read_record, show, show_interval
from streamgrad_lab.manifest import Manifest, load_manifest
from streamgrad_lab.report.page import prepare, render
from streamgrad_lab.training.loop import HELD_OUT
from streamgrad_lab.training.metrics import CSV

LAST = 0.1  # of the updates, over which final numbers are averaged
MANY = 7  # seeds that get a colour each; more are drawn alike
PANELS = 12  # other columns that are drawn


class Training(NamedTuple):
    """All that is on the page.

    Attributes:
      folder: the run's.
      headline: the run in one line.
      settings: by title, names with their values.
      sections: figures with their readings.
    """

    folder: Path
    headline: str
    settings: dict[str, dict[str, Any]]
    sections: list[Section]

    @property
    def name(self) -> str:
        """The folder's."""
        return self.folder.resolve().name


def collect_training(folder: Path) -> Training:
    """Read the folder of a training run, finished or not.

    Args:
      folder: the run's.

    Returns:
      The content of its page. ValueError, which names the file, where one is missing or corrupt.
    """
    run = load_manifest(folder)
    path = folder / CSV
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the run has no metrics yet.")
    record = read_record(path)
    if not {"loss", "gradient_norm"} <= set(record.columns):
        raise ValueError(f"{path} has no numbers in its columns loss and gradient_norm.")
    described = {name: value for name, value in run.describe.items() if name != "plan"}
    settings = {"Settings": described, "Plan": run.describe["plan"], "Versions": run.versions}
    settings["Device"] = {"device": run.device}
    return Training(folder, _headline(run, record), {k: v for k, v in settings.items() if v}, _sections(record))


def write_training_report(content: Training) -> Path:
    """Write the page, `report.html`, and its figures alone.

    Args:
      content: from `collect_training`.

    Returns:
      The page's path.
    """
    sections = prepare(content.folder, "training", content.sections, set())
    return render(content.folder, "train.html.j2", sections, content=content)


def _headline(run: Manifest, record: Record) -> str:
    what, plan = run.describe, run.describe["plan"]
    names = [what.get(name) for name in ("cell", "estimator", "task")]
    made = f"{record.update[-1]} of {plan.get('updates', '?')} updates, {_count(len(record.seeds), 'seed')}"
    if None in names:
        return f"{made}."
    cell, estimator, task = names
    return f"{cell} of {what.get('hidden', '?')} units on the task {task}, by {estimator}: {made}."


def _sections(record: Record) -> list[Section]:
    others = [name for name in record.columns if name not in ("loss", "gradient_norm", HELD_OUT)]
    every = f"each point is a mean over {record.update[0]} updates" if record.update[0] > 1 else "one point per update"
    last = [_last(record, "loss", trial) for trial in range(len(record.seeds))]
    text = f"Training loss of each seed; {every}."
    if _width(record) > 1:
        text += f" The thick line is the median of {_width(record)} points."
    if HELD_OUT in record.columns:
        text += " Dots are the loss on what the task holds out from training."
    if len(last) > 1:
        mean = show_interval(np.array(last))
        text += f" Over the last tenth of the updates, mean over seeds and its 95% interval: {mean}."
    found = [
        Section("Loss", _curves(record, "loss"), text, [], _table(record), [CSV]),
        Section(
            "Gradient norm",
            _curves(record, "gradient_norm", log=True),
            "Norm of the gradient that the optimiser saw. Spikes that grow tell of an estimate that is too noisy for "
            "the learning rate.",
            [],
            None,
            [],
        ),
    ]
    if others:
        left = len(others) - PANELS
        text = f"Whatever else was recorded, by column{f'; {left} more are in the file' if left > 0 else ''}."
        found.append(Section("Other columns", _panels(record, others[:PANELS]), text, [], None, []))
    return found


def _table(record: Record) -> Table:
    header = ["seed", "updates", "first loss", "loss, last tenth", "lowest loss", "gradient norm, last tenth"]
    if HELD_OUT in record.columns:
        header.append("held-out loss, last")
    rows = []
    for trial, seed in enumerate(record.seeds):
        loss = record["loss"][trial]
        seen = np.flatnonzero(np.isfinite(loss))
        if not len(seen):
            rows.append([str(seed), "0", *["—"] * (len(header) - 2)])
            continue
        numbers = [loss[seen[0]], _last(record, "loss", trial), loss[seen].min(), _last(record, "gradient_norm", trial)]
        if HELD_OUT in record.columns:
            measured = record[HELD_OUT][trial]
            numbers.append([np.nan, *measured[np.isfinite(measured)]][-1])
        shown = [show(float(x)) if np.isfinite(x) else "—" for x in numbers]
        rows.append([str(seed), str(record.update[seen[-1]]), *shown])
    return Table(header, rows)


def _last(record: Record, name: str, trial: int) -> float:
    """The mean over the last tenth of the updates that a trial made."""
    values = record[name][trial]
    seen = np.flatnonzero(np.isfinite(values))
    if not len(seen):
        return float("nan")
    end = record.update[seen[-1]]
    return float(np.mean(values[seen][record.update[seen] > (1 - LAST) * end]))


def _curves(record: Record, name: str, log: bool = False) -> Any:
    fig, axes = plots.figure()
    ax = axes[0, 0]
    _draw(ax, record, name, log)
    if name == "loss" and HELD_OUT in record.columns:
        _dots(ax, record, HELD_OUT)
    ax.set_xlabel("update")
    ax.set_ylabel(name.replace("_", " "))
    if len(record.seeds) <= MANY:
        plots.legend_below(fig, ax, columns=4)
    return fig


def _panels(record: Record, names: list[str]) -> Any:
    columns = min(2, len(names))
    fig, axes = plots.figure(-(-len(names) // columns), columns, height=2.3, sharex=True)
    for ax, name in zip(axes.flat, names, strict=False):
        _draw(ax, record, name, log=False)
        ax.set_title(name, fontsize=10.5, parse_math=False)  # a name that somebody chose: "$" is no formula
    for ax in list(axes.flat)[len(names) :]:
        ax.set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("update")
    return fig


def _dots(ax: Any, record: Record, name: str) -> None:
    """What is measured now and then, in the colours of the seeds' curves."""
    for trial in range(len(record.seeds)):
        seen = np.isfinite(record[name][trial])
        ax.plot(record.update[seen], record[name][trial][seen], "o", color=_colour(record, trial), markersize=4)


def _colour(record: Record, trial: int) -> str:
    return plots.COLOURS[(trial + 1) % len(plots.COLOURS)] if len(record.seeds) <= MANY else plots.COLOURS[1]


def _draw(ax: Any, record: Record, name: str, log: bool) -> None:
    """A curve for each seed: all points faintly, and their running median where there are many."""
    values = record[name]
    width = _width(record)
    smooth = median_filter(values, width) if width > 1 else None
    for trial, seed in enumerate(record.seeds):
        colour = _colour(record, trial)
        label = f"seed {seed}"
        if smooth is None:
            ax.plot(record.update, values[trial], color=colour, linewidth=1.6, label=label)
        else:
            ax.plot(record.update, values[trial], color=colour, linewidth=0.7, alpha=0.35)
            ax.plot(record.update, smooth[trial], color=colour, linewidth=1.8, label=label)
    if log and np.nanmax(np.where(values > 0, values, np.nan), initial=0.0) > 0:
        ax.set_yscale("log")
        for axis_format in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            axis_format(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else "")


def _width(record: Record) -> int:
    """Points that a running median is taken over; 1 where there are too few to need one."""
    width = plots.filter_width(record, 0.05)
    return width if width >= 5 else 1


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
