"""The frontier of a comparison as a figure: squared error against time and against memory. Needs matplotlib."""

import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from streamgrad_lab.choice import frontier
from streamgrad_lab.comparison import Comparison
from streamgrad_lab.experiments.plots import COLOURS
from streamgrad_lab.files import replace_bytes
from streamgrad_lab.report.figure import standalone_svg
from streamgrad_lab.report.labels import place_labels

SUFFIXES = (".svg", ".png")
WIDEST = 22  # letters of a name in one line
INK, FAINT, LINE = COLOURS[0], "#6b6b6b", COLOURS[1]
PANELS = (
    ("us_per_step", "time for a step of one stream"),
    ("memory_bytes", "memory for one stream, state and scratch"),
)


def write_frontier(path: Path, rows: Sequence[Comparison]) -> None:
    """Draw the frontier into a file, all at once: a file that is there is complete.

    Args:
      path: an SVG or PNG file, by its suffix.
      rows: from `compare`.
    """
    figure = draw_frontier(rows)
    if path.suffix == ".svg":
        data = standalone_svg(figure).encode()
    else:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150, bbox_inches="tight")
        data = buffer.getvalue()
    replace_bytes(path, data)


def draw_frontier(rows: Sequence[Comparison]) -> Any:
    """Squared error against time and against memory, with the rows that no other beats on a line.

    Args:
      rows: from `compare`; those of hindsight are no choice, and left out.

    Returns:
      A matplotlib figure. Rows without error but rounding lie on its lower edge.
    """
    from matplotlib.figure import Figure

    rows = [row for row in rows if not row.hindsight]
    floor = _floor(rows)
    fig = Figure(figsize=(9.2, 5.8), layout="constrained")
    panels = fig.subplots(1, 2, sharey=True)
    best = {cost: frontier(rows, cost) for cost, _ in PANELS}
    _label_errors(panels[0], rows, floor)
    for ax, (cost, words) in zip(panels, PANELS, strict=True):
        _draw_panel(ax, rows, best[cost], cost, floor)
        ax.set_xlabel(words, fontsize=10.5)
    one = rows[0]
    panels[0].set_ylabel("squared error of the gradient, relative", fontsize=10.5)
    mean = "one stream" if one.streams == 1 else f"mean over {one.streams} streams"
    fig.suptitle(f"{one.length} steps in chunks of {one.chunk_length}, {mean}", fontsize=11.5)
    _legend(fig, any(_exact(row) for row in rows))
    fig.draw_without_rendering()  # where everything lies, before labels are put around it
    for ax, (cost, _) in zip(panels, PANELS, strict=True):
        points = [_point(row, cost, floor) for row in rows]
        important = [row in best[cost] for row in rows]
        left, right = map(float, ax.get_xlim())
        lines = [*_staircase(best[cost], cost, floor, right), ((left, floor), (right, floor))]
        names = ["\n".join(textwrap.wrap(row.name, WIDEST, break_on_hyphens=False)) for row in rows]
        place_labels(ax, points, names, important, lines, (INK, FAINT))
    return fig


def _draw_panel(ax: Any, rows: Sequence[Comparison], best: Sequence[Comparison], cost: str, floor: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_xscale("log")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.22, linewidth=0.6)
    for row in rows:
        x, y = _point(row, cost, floor)
        colour = LINE if row in best else FAINT
        if not _exact(row):
            half = 1.96 * row.squared_error_noise
            ax.plot([x, x], [max(y - half, y / 3), y + half], color=colour, linewidth=1, alpha=0.6)
        hollow = row.verdict == "biased"
        ax.plot(x, y, "s" if hollow else "o", color=colour, markerfacecolor="white" if hollow else colour, markersize=6)
    most, least = (pick(float(getattr(row, cost)) for row in rows) for pick in (max, min))
    wide = 1.15 * (most / least) ** 0.06
    ax.set_xlim(least / wide, most * wide)
    for begin, end in _staircase(best, cost, floor, most * wide):
        ax.plot(*zip(begin, end, strict=True), color=LINE, linewidth=1.3, alpha=0.7, zorder=1)
    few = most / least < 30
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    ax.xaxis.set_major_formatter(FuncFormatter(microseconds if cost == "us_per_step" else kilobytes))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(labelsize=9.5)
    if any(_exact(row) for row in rows):
        ax.axhline(floor, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)


def _staircase(
    best: Sequence[Comparison], cost: str, floor: float, right: float
) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """The frontier in level and upright pieces: what may be had for a price is had for any higher one."""
    line = [_point(row, cost, floor) for row in best]
    for (x, y), (after, below) in zip(line, [*line[1:], (right, line[-1][1])], strict=True):
        yield (x, y), (after, y)
        yield (after, y), (after, below)


def _label_errors(ax: Any, rows: Sequence[Comparison], floor: float) -> None:
    """Ticks at powers of ten, and the word "exact" where the axis has no zero."""
    from matplotlib.ticker import NullLocator

    ax.set_yscale("log")
    top = math.ceil(math.log10(1.5 * max(_point(row, PANELS[0][0], floor)[1] for row in rows)))
    exact = any(_exact(row) for row in rows)
    bottom = round(math.log10(floor)) + (1 if exact else 0)
    each = max(1, math.ceil((top - bottom) / 8))
    powers = range(bottom, top + 1, each)
    ticks = [10.0**power for power in powers]
    ax.set_yticks([floor, *ticks] if exact else ticks, ["exact"] * exact + [power_of_ten(power) for power in powers])
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylim(floor / 2.5 if exact else floor, 10.0**top)


def _legend(fig: Any, exact: bool) -> None:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], marker="o", color=FAINT, linestyle="", label="no bias seen"),
        Line2D([], [], marker="s", color=FAINT, markerfacecolor="white", linestyle="", label="biased"),
        Line2D([], [], marker="o", color=LINE, linewidth=1.3, label="least error for its cost"),
    ]
    note = "exact: below rounding, drawn at the lower edge" if exact else ""
    if note:
        marks.append(Line2D([], [], color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)), label=note))
    fig.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False, fontsize=9.5)


def _exact(row: Comparison) -> bool:
    return row.verdict == "exact" or row.squared_error <= 0


def _floor(rows: Sequence[Comparison]) -> float:
    """The lower edge: a power of ten below every error that can be seen."""
    seen = [row.squared_error for row in rows if not _exact(row)]
    return 10.0 ** (math.floor(math.log10(min(seen))) - 1) if seen else 0.1


def _point(row: Comparison, cost: str, floor: float) -> tuple[float, float]:
    """Where a row lies: its cost, and its error or the lower edge."""
    return float(getattr(row, cost)), floor if _exact(row) else row.squared_error


def power_of_ten(power: int) -> str:
    """As text, which an SVG file keeps as text.

    Example:
      >>> [power_of_ten(power) for power in (-12, -1, 0, 1, 3)]
      ['10⁻¹²', '0.1', '1', '10', '10³']
    """
    if power in (-1, 0, 1):
        return f"{10.0**power:g}"
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def microseconds(value: float, position: Any = None) -> str:
    """A tick of the time axis.

    Example:
      >>> microseconds(0.5), microseconds(20.0), microseconds(5000.0)
      ('0.5 µs', '20 µs', '5 ms')
    """
    del position
    return f"{value:g} µs" if value < 1000 else f"{value / 1e3:g} ms"


def kilobytes(value: float, position: Any = None) -> str:
    """A tick of the memory axis.

    Example:
      >>> kilobytes(500.0), kilobytes(20_000.0), kilobytes(5e6)
      ('500 B', '20 kB', '5 MB')
    """
    del position
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:g} B"
