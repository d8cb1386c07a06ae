"""The report of the grid search: what it found, and how that compares with Appendix G on seeds it has not seen."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamgrad_lab.experiments import plots
from streamgrad_lab.experiments.base import Claim, Section, Table
from streamgrad_lab.experiments.evidence import Estimate, judge, mean_of, show_ratio
from streamgrad_lab.experiments.records import mean_and_half_width, show, show_interval
from streamgrad_lab.experiments.variance import SETTINGS, Setting
from streamgrad_lab.experiments.variance_report import LABELS, lowest
from streamgrad_lab.tables import read_rows

POINTS, AGAIN = "points.csv", "again.csv"  # the whole grid, and the chosen points with fresh seeds
HEADER = ("setting", "learning_rate", "momentum", "decay", "damping", "seed", "loss")
UNUSED = 0.5  # stands for decay and damping where there is no B̄

# How much higher a loss may be for its hyperparameters to be as good.
TOLERANCE = 0.05

HYPERPARAMETERS = ("learning rate", "momentum", "decay", "damping")

Point = tuple[float, float, float, float]  # learning rate, momentum, decay, damping
Training = tuple[str, Point, int]  # setting, hyperparameters, seed


class Pair(NamedTuple):
    """The two points of a setting that are trained again, with their losses.

    Attributes:
      best: of the grid.
      paper: that of Appendix G.
      best_losses: of the first, one for each fresh seed.
      paper_losses: of the second, with the same seeds.
    """

    best: Point
    paper: Point
    best_losses: np.ndarray
    paper_losses: np.ndarray

    @property
    def log_ratio(self) -> Estimate:
        """log of the paper's loss over the best point's. In pairs: equal seeds mean equal weights and digits."""
        return mean_of(np.log(self.paper_losses) - np.log(self.best_losses))


def is_shaped(setting: Setting) -> bool:
    """Whether there is a B̄, and with it decay and damping."""
    return setting.q0 == "optimal"


def paper_point(setting: Setting) -> Point:
    """What Appendix G chose."""
    shaping = (setting.decay, setting.damping) if is_shaped(setting) else (UNUSED, UNUSED)
    return (setting.learning_rate, setting.momentum, *shaping)


def read_losses(path: Path) -> dict[Training, float]:
    """The loss of every finished training; none where there is no file."""
    rows = [[row[name] for name in HEADER] for row in read_rows(path)] if path.exists() else []
    return {(name, tuple(point), int(seed)): loss for name, *point, seed, loss in rows}


def by_point(known: dict[Training, float], setting: str) -> dict[Point, np.ndarray]:
    """The losses of a setting by grid point, in the order of their seeds."""
    mine = sorted((seed, point, loss) for (name, point, seed), loss in known.items() if name == setting)
    points = dict.fromkeys(point for name, point, _ in known if name == setting)
    return {point: np.array([loss for _, other, loss in mine if other == point]) for point in points}


def best_point(known: dict[Training, float], setting: str) -> Point:
    """The point with the lowest mean loss over seeds."""
    losses = by_point(known, setting)
    return min(losses, key=lambda point: float(np.mean(losses[point])))


def by_value(losses: dict[Point, np.ndarray], which: int) -> dict[float, float]:
    """For every value of one hyperparameter the mean loss over all choices of the others; NaN where one diverged.

    Example:
      >>> losses = {(0.1, 0.5, 0.5, 0.5): np.array([1.0, 2.0]), (0.1, 0.8, 0.5, 0.5): np.array([3.0])}
      >>> by_value(losses, 0), by_value(losses, 1)
      ({0.1: 2.25}, {0.5: 1.5, 0.8: 3.0})
    """
    means = {point: float(np.mean(found)) for point, found in losses.items()}
    values = sorted({point[which] for point in means})
    found = {
        value: float(np.mean([mean for point, mean in means.items() if point[which] == value])) for value in values
    }
    return {value: mean if math.isfinite(mean) else math.nan for value, mean in found.items()}


def sections(folder: Path) -> list[Section]:
    """The search, and what became of its best points and the paper's on fresh seeds."""
    known = read_losses(Path(folder) / POINTS)
    if not known:
        raise ValueError(f"{folder} has no grid points yet.")
    return [_search(known), _again(read_pairs(folder))]


def read_pairs(folder: Path) -> dict[str, Pair]:
    """The best point of every setting beside the paper's, where both were trained again without diverging."""
    known, again = (read_losses(Path(folder) / file) for file in (POINTS, AGAIN))
    pairs = {}
    for setting in SETTINGS:
        losses = by_point(again, setting.name)
        if not losses:
            continue
        best, paper = best_point(known, setting.name), paper_point(setting)
        both = [losses.get(point, np.array([])) for point in (best, paper)]
        if len(both[0]) == len(both[1]) > 0 and np.all(np.isfinite(both)):
            pairs[setting.name] = Pair(best, paper, *both)
    return pairs


def claims(pairs: dict[str, Pair]) -> list[Claim]:
    """What the search is held against: Appendix G's choice, and the order of Figure 1 with every setting tuned."""
    whole = set(pairs) == {setting.name for setting in SETTINGS}
    ratios = {name: pair.log_ratio for name, pair in pairs.items()}
    listed = "; ".join(f"{LABELS[name]}: {_ratio(pair)}" for name, pair in pairs.items())
    return [
        judge(
            f"Appendix G's hyperparameters are as good as the best of its grid, to {100 * TOLERANCE:.0f}% of the loss, "
            "in all four settings.",
            [log.below(math.log1p(TOLERANCE)) for log in ratios.values()] if whole else None,
            f"Loss with the paper's choice over that with the best of the grid, by pairs of equal seeds: {listed}.",
            "The paper says neither how long its search trained nor how its weights began.",
        ),
        lowest(
            "With every setting at the best point of its own grid, the loss is lowest when both Q₀ and α are optimal.",
            {name: pair.best_losses for name, pair in pairs.items()},
            "Loss over the last tenth of the updates, mean over fresh seeds and its 95% interval",
            "The order of Figure 1 depends on its hyperparameters.",
        ),
    ]


def _search(known: dict[Training, float]) -> Section:
    fig, axes = plots.figure(2, 2, height=2.7, sharey=True)
    rows = []
    for index, setting in enumerate(SETTINGS):
        losses = by_point(known, setting.name)
        if not losses:
            continue
        for which, ax in enumerate(axes.flat[: 4 if is_shaped(setting) else 2]):
            found, chosen = by_value(losses, which), paper_point(setting)[which]
            names = [f"{value:g}" for value in found]
            ax.plot(names, list(found.values()), color=plots.COLOURS[index], linestyle=plots.STYLES[index], marker="o",
                    label=LABELS[setting.name])  # fmt: skip
            if chosen in found:
                ax.plot(f"{chosen:g}", found[chosen], "o", ms=12, mfc="none", color=plots.COLOURS[index])
        spread = [show(float(of([np.mean(x) for x in losses.values()]))) for of in (np.min, np.median, np.max)]
        points = [_text(setting, point) for point in (best_point(known, setting.name), paper_point(setting))]
        rows.append([LABELS[setting.name], points[0], *spread, str(len(losses)), points[1]])
    for ax, name in zip(axes.flat, HYPERPARAMETERS, strict=True):
        ax.set_xlabel(name)
    for ax in axes[:, 0]:
        ax.set_ylabel("loss")
    plots.legend_below(fig, axes[0, 0])
    header = ["setting", "best point", "its loss", "the median", "the worst", "points", "the paper's point"]
    text = (
        "Grid search over learning rate, momentum, and, where Q₀ is optimal, decay and damping, in this order. The "
        "loss is that of the last tenth of the updates; the figure has its mean over all choices of the other "
        "hyperparameters. Rings are at the values that Appendix G chose; its damping of 0.008 is not on the grid."
    )
    return Section("Hyperparameters (Appendix G)", fig, text, [], Table(header, rows), [POINTS])


def _again(pairs: dict[str, Pair]) -> Section:
    fig, axes = plots.figure()
    ax = axes[0, 0]
    rows = []
    for place, (name, pair) in enumerate(pairs.items()):
        setting = next(setting for setting in SETTINGS if setting.name == name)
        drawn = [(pair.best_losses, "o", "best of the grid"), (pair.paper_losses, "s", "Appendix G's choice")]
        for side, (values, marker, label) in enumerate(drawn):
            x, colour = place + 0.3 * side - 0.15, plots.COLOURS[1 + 2 * side]
            mean, half = mean_and_half_width(values)
            ax.plot([x] * len(values), values, marker, ms=4, color=colour, alpha=0.35, linewidth=0)
            ax.errorbar(x, mean, half, fmt=marker, color=colour, capsize=4, label="" if place else label)
        found = [_text(setting, pair.best), show_interval(pair.best_losses)]
        theirs = [_text(setting, pair.paper), show_interval(pair.paper_losses)]
        rows.append([LABELS[name], *found, *theirs, _ratio(pair)])
    ax.set_xticks(range(len(pairs)), [LABELS[name].replace(", ", "\n").replace("and α ", "and α\n") for name in pairs])
    ax.set_ylabel("loss")
    plots.legend_below(fig, ax)
    header = ["setting", "best point", "its loss", "the paper's point", "the paper's loss", "their ratio"]
    text = (
        "The lowest of many noisy losses is low by luck as well. So the best point of each grid and the paper's choice "
        "were trained again with seeds that the search had not seen: small marks are trials, large ones their mean "
        "with its 95% interval."
    )
    table = Table(header, rows)
    return Section("Best points on fresh seeds (Appendix G)", fig, text, claims(pairs), table, [AGAIN])


def _text(setting: Setting, point: Point) -> str:
    return ", ".join(f"{x:g}" for x in point[: 4 if is_shaped(setting) else 2])


def _ratio(pair: Pair) -> str:
    return "the same point" if pair.best == pair.paper else show_ratio(pair.log_ratio)
