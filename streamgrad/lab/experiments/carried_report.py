"""The report of the experiment `carried`: tables, figures and claims from its CSV files."""

import csv
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from streamgrad.lab.experiments.base import Claim, Section, Table
from streamgrad.lab.experiments.evidence import Estimate, judge, mean_of, show_ratio

TITLES = MappingProxyType(
    {
        "gir": "identity, GIR",
        "exact": "the paper's: exact B of past batches, exact alpha of each episode",
        "hindsight": "exact B and alpha of the very episodes (hindsight)",
        "all": "carried over, all streams",
        "one": "carried over, 1 stream",
        "diagonal": "carried over, 1 stream, diagonal Q_0",
        "online": "B of Appendix F from all streams, GIR",
    }
)
# Okabe and Ito's colours, which tell apart also for most who see colours differently.
COLOURS = dict(
    zip(
        TITLES,
        ("#000000", "#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#CC79A7"),
        strict=True,
    )
)
# The statistics are young at the first points of a trajectory.
WARM = 0.25


def sections(folder: Path) -> list[Section]:
    """The report of what `run` wrote into the folder; parts that were not run are left out."""
    path = folder / "variance_episodes.csv"
    found = [variance_section(path.name, read(path))] if path.exists() else []
    trained = sorted(folder.glob("training_*.csv"))
    if trained:
        found.append(training_section(trained))
    return found


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file, numbers as numbers."""
    with path.open(newline="") as file:
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]


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


def variance_section(file: str, rows: list[dict[str, Any]]) -> Section:
    """V(Q) along a trajectory: a figure, a table, and the two claims."""
    mean = means(rows)
    shown = [name for name in TITLES if name in mean]
    gamma = {}
    for name in shown:
        known = [row["gamma"] for row in rows if row["setting"] == name and np.isfinite(row["gamma"])]
        gamma[name] = f"{np.mean(known):.3f}" if known else "of the noise"
    table = Table(
        ["Q_0, alpha", "V/|g|^2", "identity, GIR over it", "mean gamma"],
        [[TITLES[name], f"{mean[name]:.1f}", f"{mean['gir'] / mean[name]:.2f}", gamma[name]] for name in shown],
    )
    figure = _curves(rows, shown, "v")
    text = (
        "At each point all settings are measured on the same episodes with the same Gaussian noise at the same "
        "parameters: the mean of ‖ĝ - g‖² - ‖g‖² over streams and draws, over the mean ‖g‖²."
    )
    return Section("Digits, row by row: V(Q) along one trajectory", figure, text, claims(rows), table, [file])


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


def training_section(paths: list[Path]) -> Section:
    """The loss of each setting that drove its own training."""
    rows = [row for path in paths for row in read(path)]
    shown = [name for name in TITLES if any(row["setting"] == name for row in rows)]
    last = max(row["update"] for row in rows)
    cells = []
    for name in shown:
        late = [row["loss"] for row in rows if row["setting"] == name and row["update"] > 0.9 * last]
        seeds = len({row["seed"] for row in rows if row["setting"] == name})
        cells.append([TITLES[name], f"{np.mean(late):.3f}", str(seeds)])
    table = Table(["Q_0, alpha", f"loss, last tenth of {int(last)} updates", "seeds"], cells)
    text = "Each setting drives its own training, with the learning rate and momentum that Appendix G found for it."
    return Section("Training", _curves(rows, shown, "loss"), text, [], table, [path.name for path in paths])


def _curves(rows: list[dict[str, Any]], names: list[str], column: str) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    ax = figure.subplots()
    for name in names:
        mine = [row for row in rows if row["setting"] == name]
        updates = sorted({row["update"] for row in mine})
        values = [np.mean([row[column] for row in mine if row["update"] == update]) for update in updates]
        marker = "o" if column == "v" else None
        ax.plot(updates, values, color=COLOURS[name], marker=marker, markersize=3, label=TITLES[name])
    ax.set_xlabel("updates")
    ax.set_ylabel("V(Q) / ‖g‖²" if column == "v" else "loss")
    if column == "v":
        ax.set_yscale("log")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)
    figure.legend(loc="outside lower center", frameon=False, fontsize=8)
    return figure


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
