"""Reading what a run has recorded: trials as rows of arrays, their means over windows, and how sure those are."""

import dataclasses
from pathlib import Path

import numpy as np

from streamgrad_lab.experiments.evidence import quantile
from streamgrad_lab.training import read_metrics
from streamgrad_lab.training.metrics import CSV, has_rows


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
      path: the file; half a row at its end, as a run that goes on may have, is left out.

    Returns:
      The record.
    """
    table = read_metrics(path, cut_off=True)
    if not len(table["update"]):
        raise ValueError(f"{path} has no rows yet.")
    updates, row_of = np.unique(table.pop("update"), return_inverse=True)
    seeds, trial_of = np.unique(table.pop("seed"), return_inverse=True)
    columns = {name: np.full((len(seeds), len(updates)), np.nan) for name in table}
    for name, values in table.items():
        columns[name][trial_of, row_of] = values
    return Record(updates, columns, tuple(int(seed) for seed in seeds))


def read_settings(folder: Path, names: list[str]) -> dict[str, Record]:
    """The records of those settings of which at least one trial has run to the end with finite losses.

    Args:
      folder: each setting has a folder of its name in it, with its metrics.
      names: the settings.

    Returns:
      The records by name. ValueError where there is none.
    """
    paths = {name: path for name in names if (path := Path(folder) / name / CSV).exists() and has_rows(path.parent)}
    found = {name: read_record(path) for name, path in paths.items()}
    finished = {name: record for name, record in found.items() if len(finite_trials(record, "loss"))}
    if not finished:
        raise ValueError(f"{folder} has no metrics of any of {', '.join(names)}.")
    return finished


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
