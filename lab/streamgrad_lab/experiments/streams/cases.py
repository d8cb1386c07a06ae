"""The files of the trained lanes, one for each case, and what stands in the tables: the best rate of each method."""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from streamgrad_lab.experiments.evidence import Estimate, mean_of
from streamgrad_lab.experiments.records import show_interval
from streamgrad_lab.tables import read_rows, write_rows

DIGITS = 5  # of the numbers in the files
Key = TypeVar("Key", bound=Hashable)


def write_case(
    path: Path, rows: list[dict[str, Any]], about: dict[str, Any], settings: dict[str, Sequence[Any]] | None = None
) -> None:
    """Write the rows of one method; a file that is there is complete.

    Args:
      path: the file.
      rows: from `train_lanes`.
      about: what they have in common, as first columns.
      settings: under the name of a column what the settings stand for, such as delays.
    """
    names = settings or {}
    meant = [{name: values[row["setting"]] for name, values in names.items()} for row in rows]
    kept = [{name: x for name, x in row.items() if name != "setting"} for row in rows]
    write_rows(path, [about | its | row for its, row in zip(meant, kept, strict=True)], digits=DIGITS)


def columns_of(part: Any, method: str, **more: Any) -> dict[str, Any]:
    """The first columns of a method's file: the method, more of the case, and the network."""
    return {"method": method} | more | {"cell": part.cell, "hidden": part.hidden, "streams": part.streams}


def read_cases(folder: Path) -> list[dict[str, Any]]:
    """The rows of all methods of a part; none where it was not run."""
    return [row for path in sorted(folder.glob("*.csv")) for row in read_rows(path)]


def file_of(*words: Any) -> str:
    """A file's name made of words: letters and digits, joined by dashes.

    Example:
      >>> file_of("uoro_across", 4), file_of("ok(8)", 16)
      ('uoro_across-4.csv', 'ok-8-16.csv')
    """
    return "-".join(re.findall(r"[a-z0-9_]+", " ".join(map(str, words)).lower())) + ".csv"


def files_of(folder: Path, part: str) -> list[str]:
    """The files of a part as its section lists them."""
    return [f"{part}/{path.name}" for path in sorted(folder.glob("*.csv"))]


class Best(NamedTuple):
    """The rate that a method stands with in one setting.

    Attributes:
      rate: the learning rate; NaN where all diverged.
      finals: the final number of each seed with that rate.
      rows: the curve of each seed, in the order of `finals`.
    """

    rate: float
    finals: np.ndarray
    rows: list[list[dict[str, Any]]]

    def mean(self, missing: float) -> float:
        """Mean of the final numbers; `missing` where all diverged."""
        return float(np.mean(self.finals)) if len(self.finals) else missing

    def __str__(self) -> str:
        """Mean, 95% interval and the rate."""
        return f"{show_interval(self.finals)} ({self.rate:g})" if len(self.finals) else "diverged"


def best_of(rows: Iterable[dict[str, Any]], name: str = "loss", last: float | int = 0.1, highest: bool = False) -> Best:
    """The best learning rate of rows of one method and one setting.

    Args:
      rows: as `train_lanes` returns them.
      name: the column that counts.
      last: the final number of a lane is the mean over so many of its last rows, or this share of them if below 1.
      highest: whether more is better.

    Returns:
      The rate whose mean over seeds is best, among those with which every seed ran to the end.
    """
    by_rate: dict[float, dict[int, list[dict[str, Any]]]] = {}
    for row in rows:
        by_rate.setdefault(row["rate"], {}).setdefault(int(row["seed"]), []).append(row)
    found = Best(math.nan, np.zeros(0), [])
    for rate, seeds in sorted(by_rate.items()):
        curves = [sorted(rows, key=lambda row: row["update"]) for _, rows in sorted(seeds.items())]
        finals = np.array([final_of([row[name] for row in curve], last) for curve in curves])
        if not np.all(np.isfinite(finals)):
            continue
        gain = 0.0 if not len(found.finals) else float(np.mean(finals) - np.mean(found.finals))
        if not len(found.finals) or (gain > 0 if highest else gain < 0):
            found = Best(rate, finals, curves)
    return found


def best_by(
    rows: Iterable[dict[str, Any]],
    key: Callable[[dict[str, Any]], Key],
    name: str = "loss",
    last: float | int = 0.1,
    highest: bool = False,
) -> dict[Key, Best]:
    """The best learning rate of each group of rows.

    Args:
      rows: of several methods and settings.
      key: the group of a row, such as its method and its setting.
      name: as in `best_of`, like the next two.
      last: likewise.
      highest: likewise.

    Returns:
      By group, in the order of the first row of each.
    """
    grouped: dict[Key, list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(key(row), []).append(row)
    return {group: best_of(mine, name, last, highest) for group, mine in grouped.items()}


def final_of(values: Sequence[float], last: float | int = 0.1) -> float:
    """The mean over the last values of a curve: so many of them, or a share if below 1, but at least one.

    Example:
      >>> final_of([4.0, 3.0, 2.0, 1.0], 2), final_of([4.0, 3.0, 2.0, 1.0], 0.1)
      (1.5, 1.0)
    """
    count = int(last) if last >= 1 else max(1, round(len(values) * last))
    return float(np.mean(values[-count:]))


def paired(a: Best, b: Best) -> Estimate | None:
    """How much more a has than b, seed by seed, as the same seed begins alike; None where no seed ended in both."""
    mine, other = ({curve[0]["seed"]: x for curve, x in zip(best.rows, best.finals, strict=True)} for best in (a, b))
    common = [seed for seed in mine if seed in other]
    return mean_of(np.array([mine[seed] - other[seed] for seed in common])) if common else None


def about_rates(rows: Iterable[dict[str, Any]]) -> str:
    """A sentence on how the learning rate was chosen."""
    rates = sorted({row["rate"] for row in rows})
    if len(rates) == 1:
        return f"One learning rate, {rates[0]:g}, for all, not tuned."
    tried = ", ".join(f"{rate:g}" for rate in rates)
    return f"In brackets the best of the learning rates {tried}, chosen by the mean over the same seeds."


def about_sizes(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence on the network and the streams that were used."""
    row, cells = rows[0], " or ".join(dict.fromkeys(row["cell"] for row in rows))
    steps, seeds = int(max(row["steps"] for row in rows)), len({row["seed"] for row in rows})
    return (
        f"{cells} of {int(row['hidden'])} units, {int(row['streams'])} streams, {steps:,} steps of each, {seeds} seeds."
    )


def about_times(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence on what the seconds are; `processes` is in the files where it was said how many shared the device."""
    shared = sorted({int(row["processes"]) for row in rows if "processes" in row})
    if not shared:
        return "Seconds are those of all lanes of a method, trained at once, without compilation."
    if shared == [1]:
        return "Seconds are those of all lanes of a method, trained at once on a device of their own."
    alone = ", and not with those of methods that had it for themselves" if len(shared) > 1 else ""
    return (
        f"Seconds are those of all lanes of a method, while {shared[-1]} processes shared the device: they can be "
        f"compared roughly{alone}."
    )
