"""The report of the experiment `carried`: tables, figures and claims from its CSV files."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from streamgrad_lab.experiments import plots
from streamgrad_lab.experiments.base import Claim, Section, Table
from streamgrad_lab.experiments.evidence import Estimate, judge, mean_of, show_ratio
from streamgrad_lab.experiments.records import Record, read_settings
from streamgrad_lab.tables import read_rows

VARIANCE = "variance_episodes.csv"
TITLES = MappingProxyType(
    {
        "gir": "identity, GIR",
        "exact": "the paper's: exact B of past batches, exact alpha of each episode",
        "hindsight": "exact B and alpha of the very episodes (hindsight)",
        "all": "carried over, all streams",
        "one": "carried over, 1 stream",
        "diagonal": "carried over, 1 stream, diagonal Q_0",
        # In recorded runs alone: an option that is gone.
        "online": "B of Appendix F from all streams, GIR",
    }
)
COLOURS = dict(zip(TITLES, plots.COLOURS, strict=True))
# The statistics are young at the first points of a trajectory.
WARM = 0.25


def sections(folder: Path) -> list[Section]:
    """The report of what was written into the folder; parts that were not run are left out."""
    found = []
    if (folder / VARIANCE).exists():
        found.append(variance_section(read_rows(folder / VARIANCE)))
    if any(folder.glob("*/metrics.csv")):
        found.append(training_section(read_settings(folder, list(TITLES))))
    return found


def warm(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """V(Q)/‖g‖² of each setting at the points after the first quarter of the trajectory."""
    last = max(row["update"] for row in rows)
    values: dict[str, list[float]] = {}
    for row in rows:
        if row["update"] > WARM * last:
            values.setdefault(row["setting"], []).append(max(row["v"], 1e-12))
    return {name: np.array(v) for name, v in values.items()}


def means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The geometric mean of `warm` for each setting."""
    return {name: float(np.exp(np.mean(np.log(v)))) for name, v in warm(rows).items()}


def variance_section(rows: list[dict[str, Any]]) -> Section:
    """V(Q) along a trajectory: a figure, a table, and the two claims."""
    mean = means(rows)
    shown = [name for name in TITLES if name in mean]
    fig, ax = _axes("V(Q) / ‖g‖²")
    ax.set_yscale("log")
    table = Table(["Q_0, alpha", "V/|g|^2", "identity, GIR over it", "mean gamma"], [])
    for name in shown:
        mine = [row for row in rows if row["setting"] == name]
        known = [row["gamma"] for row in mine if np.isfinite(row["gamma"])]
        gamma = f"{np.mean(known):.3f}" if known else "of the noise"
        table.rows.append([TITLES[name], f"{mean[name]:.1f}", f"{mean['gir'] / mean[name]:.2f}", gamma])
        points = sorted((row["update"], row["v"]) for row in mine)
        ax.plot(*zip(*points, strict=True), color=COLOURS[name], marker="o", markersize=3, label=TITLES[name])
    plots.legend_below(fig, ax, 1)
    text = (
        "At each point all settings are measured on the same episodes with the same Gaussian noise at the same "
        "parameters: the mean of ‖ĝ - g‖² - ‖g‖² over streams and draws, over the mean ‖g‖²."
    )
    return Section("Digits, row by row: V(Q) along one trajectory", fig, text, claims(rows), table, [VARIANCE])


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """What the points of a trajectory are held against.

    All settings are measured at the same points with the same noise, so their ratios are taken point by point.
    """
    points, mean, found = warm(rows), means(rows), []

    def ratio(a: str, b: str) -> tuple[Estimate, str]:
        log = mean_of(np.log(points[a] / points[b]))
        numbers = f"{mean[a]:.1f} against {mean[b]:.1f}, {show_ratio(log)} times"
        return log, f"{numbers}, over {len(points[a])} points of one training."

    if "all" in mean and "exact" in mean:
        log, detail = ratio("all", "exact")
        text = "Carried over from all streams, V(Q) is within 15% of the paper's setting, which sees the future."
        found.append(judge(text, [log.below(float(np.log(1.15)))], detail))
    log, detail = ratio("gir", "one")
    text = "Carried over from one stream, V(Q) is at least 3 times below identity and GIR."
    return [*found, judge(text, [log.above(float(np.log(3)))], detail)]


def training_section(records: dict[str, Record]) -> Section:
    """The loss of each setting that drove its own training."""
    fig, ax = _axes("loss")
    table = Table(["Q_0, alpha", "", "seeds"], [])
    for name, record in records.items():
        plots.draw_curve(ax, record, "loss", TITLES[name], 0, style="-", band=False, color=COLOURS[name])
        late = record.late("loss", 0.1)
        table.rows.append([TITLES[name], f"{np.nanmean(late):.3f}", str(len(late))])
        table.header[1] = f"loss, last tenth of {record.update[-1]} updates"
    plots.legend_below(fig, ax, 1)
    text = "Each setting drives its own training, with the learning rate and momentum that Appendix G found for it."
    return Section("Training", fig, text, [], table, [f"{name}/metrics.csv" for name in records])


def _axes(label: str) -> tuple[Any, Any]:
    fig, axes = plots.figure(height=4.8)
    axes[0, 0].set_xlabel("updates")
    axes[0, 0].set_ylabel(label)
    return fig, axes[0, 0]
