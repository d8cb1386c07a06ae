"""How the figures of the experiments look: one place for sizes, colours and curves. Needs matplotlib."""

from typing import Any

import numpy as np

from streamgrad_lab.experiments.records import Record, finite_trials, mean_and_half_width, median_filter

# Okabe and Ito's colours, which tell apart also for most who see colours differently.
COLOURS = ("#000000", "#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
STYLES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1)), "-")


def figure(rows: int = 1, columns: int = 1, height: float = 3.6, **options: Any) -> tuple[Any, np.ndarray]:
    """A figure of a width that stays readable on a phone, and its axes as an array `[rows, columns]`."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(5.2, height * rows), layout="constrained")
    axes = fig.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.tick_params(labelsize=10)
        ax.xaxis.label.set_size(11)
        ax.yaxis.label.set_size(11)
        ax.locator_params(axis="x", nbins=5)
    return fig, axes


def legend_below(fig: Any, ax: Any, columns: int = 2) -> None:
    """The legend of one of the axes under the whole figure, where it hides no curve."""
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=10.5)


def draw_curve(
    ax: Any,
    record: Record,
    name: str,
    label: str,
    index: int,
    width: int = 1,
    style: Any = None,
    band: bool = True,
    **options: Any,
) -> None:
    """Mean over trials of a column, with the 95% interval of the mean, after a median filter of `width` rows."""
    trials = finite_trials(record, name)
    if not len(trials):
        return
    mean, half = mean_and_half_width(median_filter(trials, width))
    colour = options.pop("color", COLOURS[index % len(COLOURS)])
    style = STYLES[index % len(STYLES)] if style is None else style
    ax.plot(record.update, mean, color=colour, linestyle=style, label=label, linewidth=1.8, **options)
    if band:
        ax.fill_between(record.update, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)


def filter_width(record: Record, share: float = 0.1) -> int:
    """An odd number of rows, about that share of all: wide enough for the trend, as in the paper's figure."""
    return 2 * int(len(record.update) * share / 2) + 1


def shade(place: float) -> Any:
    """A colour for a place between 0 and 1 in an order, dark to light."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.95 * place)
