"""Reading what a run has recorded: trials as rows of arrays, their means over windows, and how sure those are."""

import csv
import dataclasses
from pathlib import Path

import numpy as np

from streamgrad.lab.experiments.evidence import quantile


@dataclasses.dataclass(frozen=True)
class Record:
    """The metrics of one setting.

    Attributes:
      update: the number of updates made at each row, `[rows]`.
      columns: by name, `[trials, rows]`; NaN where a trial has no such row, because it stopped before.
      seeds: of the trials.
    """

    update: np.ndarray
    columns: dict[str, np.ndarray]
    seeds: tuple[int, ...] = ()

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def late(self, name: str, fraction: float = 0.5) -> np.ndarray:
        """The mean over the last `fraction` of the updates, for each trial."""
        last = self.update > self.update[-1] * (1 - fraction)
        return np.mean(self.columns[name][:, last], axis=1)


def read_record(path: Path) -> Record:
    """Read a `metrics.csv`, with the columns `update`, `seed` and any others.

    Args:
      path: the file.

    Returns:
      The record.
    """
    with path.open(newline="") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        if not {"update", "seed"} <= set(header):
            raise ValueError(f"{path} has no columns update and seed: it is not a file of metrics.")
        # A run that was killed may leave half a row.
        rows = [row for row in reader if len(row) == len(header)]
    if not rows:
        raise ValueError(f"{path} has no rows yet.")
    table = {name: [row[i] for row in rows] for i, name in enumerate(header)}
    updates, row_of = np.unique(np.array(table["update"], float).astype(int), return_inverse=True)
    seeds, trial_of = np.unique(np.array(table["seed"], float).astype(int), return_inverse=True)
    columns = {}
    for name in header:
        if name in ("update", "seed"):
            continue
        values = np.full((trial_of.max() + 1, len(updates)), np.nan)
        try:
            values[trial_of, row_of] = [float(cell) if cell else np.nan for cell in table[name]]
        except ValueError:
            continue  # words, not a measurement
        columns[name] = values
    return Record(updates, columns, tuple(int(seed) for seed in seeds))


def read_settings(folder: Path, names: list[str]) -> dict[str, Record]:
    """The records of those settings that have been run, each in the folder of its name.

    Not of those that have a header alone, because every trial diverged in its first row.
    """
    found = {name: folder / name / "metrics.csv" for name in names}
    return {name: read_record(path) for name, path in found.items() if path.exists() and _has_rows(path)}


def _has_rows(path: Path) -> bool:
    with path.open() as file:
        return len(file.readlines(2**16)) > 1


def mean_and_half_width(trials: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean over trials, the leading axis, and half of its 95% interval (zero for a single trial).

    Example:
      >>> mean, half = mean_and_half_width(np.array([1.0, 3.0]))
      >>> float(mean), round(float(half), 2)  # 12.7 standard errors, of which each is 1
      (2.0, 12.71)
    """
    count = len(trials)
    mean = np.asarray(np.mean(trials, axis=0))
    if count < 2:
        return mean, np.zeros_like(mean)
    return mean, np.asarray(quantile(count - 1) * np.std(trials, axis=0, ddof=1) / np.sqrt(count))


def median_filter(trials: np.ndarray, width: int) -> np.ndarray:
    """Replace each row by the median of the `width` rows around it, fewer at the ends.

    Example:
      >>> median_filter(np.array([[1.0, 9.0, 2.0, 3.0]]), 3).tolist()
      [[5.0, 2.0, 3.0, 2.5]]
    """
    reach, rows = width // 2, trials.shape[1]
    windows = [trials[:, max(0, i - reach) : i + reach + 1] for i in range(rows)]
    return np.stack([np.median(window, axis=1) for window in windows], axis=1)


def finite_trials(record: Record, name: str) -> np.ndarray:
    """The trials of a column that ran to the end with finite numbers, `[trials, rows]`."""
    values = record[name]
    return values[np.all(np.isfinite(values), axis=1)]


def show(value: float) -> str:
    """A number in three digits.

    Example:
      >>> show(1234.5), show(0.012345), show(5.371e7), show(float("nan"))
      ('1230', '0.0123', '5.37e+07', 'nan')
    """
    if not np.isfinite(value) or value == 0:
        return f"{value:g}"
    digits = 2 - int(np.floor(np.log10(abs(value))))
    rounded = round(value, digits)
    return f"{rounded:.{max(0, digits)}f}" if -4 < digits < 6 else f"{value:.2e}"


def show_interval(trials: np.ndarray) -> str:
    """Mean and half of the 95% interval, as text.

    Example:
      >>> show_interval(np.array([1.0, 1.1, 0.9]))
      '1.00 ± 0.248'
    """
    mean, half = mean_and_half_width(trials)
    return f"{show(float(mean))} ± {show(float(half))}" if len(trials) > 1 else show(float(mean))
