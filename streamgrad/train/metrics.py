"""Rows of numbers to CSV and JSONL, as they come."""

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

CSV, JSONL = "metrics.csv", "metrics.jsonl"


class Writer:
    """Appends to `folder/metrics.csv` and `folder/metrics.jsonl`; use it in a `with`.

    Args:
      folder: exists already.
      seeds: the number that stands for each seed.
    """

    def __init__(self, folder: Path, seeds: Sequence[int]):
        self.seeds = seeds
        self._header = next(iter(_lines(folder / CSV)), None)
        self._csv = open(folder / CSV, "a", encoding="utf-8", newline="")  # noqa: SIM115, closed by __exit__
        self._jsonl = open(folder / JSONL, "a", encoding="utf-8")  # noqa: SIM115

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._csv.close()
        self._jsonl.close()

    def write(self, rows: Mapping[str, np.ndarray]) -> None:
        """Append rows and hand them to the disk.

        Args:
          rows: arrays `[seeds, rows, ...]` with `update` and `stopped` among them, as the loop yields them. Entries
            beyond one number per row are spread over columns `name_0`, `name_1`, …; rows of a seed that has stopped
            are left out.
        """
        columns = dict(_spread(rows))
        header = ",".join(["update", "seed", *columns]) + "\n"
        if self._header is None:
            self._csv.write(header)
        elif self._header != header:
            raise ValueError(f"{CSV} has other columns than this run: {self._header.strip()}, not {header.strip()}.")
        self._header = header
        for at in range(rows["update"].shape[1]):
            for index, seed in enumerate(self.seeds):
                if rows["stopped"][index, at] >= 0:
                    continue
                values = [str(rows["update"][index, at]), str(seed)]
                values += [_number(column[index, at]) for column in columns.values()]
                self._csv.write(",".join(values) + "\n")
                entries = zip(["update", "seed", *columns], values, strict=True)
                inside = ", ".join(f"{json.dumps(name)}: {_as_json(value)}" for name, value in entries)
                self._jsonl.write("{" + inside + "}\n")
        for file in (self._csv, self._jsonl):
            file.flush()
            os.fsync(file.fileno())


def cut(folder: Path, update: int) -> None:
    """Drop the rows after an update, and a last line that is not whole: what a killed run wrote past its checkpoint."""
    for name in (CSV, JSONL):
        path, beside = folder / name, folder / (name + ".part")
        if update == 0:  # the header too
            path.unlink(missing_ok=True)
        if not path.exists():
            continue
        with open(beside, "w", encoding="utf-8", newline="") as file:
            for number, line in enumerate(_lines(path)):
                is_header = name == CSV and number == 0
                if is_header or _update_of(line, name) <= update:
                    file.write(line)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)


def read(path: Path | str) -> dict[str, np.ndarray]:
    """The columns of a CSV file of metrics, by name.

    Args:
      path: such a file, or the folder that has it.

    Returns:
      One array per column; `update` and `seed` are whole numbers.
    """
    path = Path(path)
    path = path / CSV if path.is_dir() else path
    with open(path, encoding="utf-8", newline="") as file:
        header, *lines = csv.reader(file)
    whole = {"update": int, "seed": int}
    table = list(zip(*lines, strict=True)) or [()] * len(header)
    return {
        name: np.array(values, dtype=str).astype(whole.get(name, float))
        for name, values in zip(header, table, strict=True)
    }


def _spread(rows: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Columns of one number per row: loss and gradient norm, then the summary's by name, as jax sorts dictionaries."""
    first = ["loss", "gradient_norm"]
    for name in first + [name for name in rows if name not in (*first, "update", "stopped")]:
        values = np.asarray(rows[name])
        for index in np.ndindex(values.shape[2:]):
            yield "_".join([name, *map(str, index)]), values[(slice(None), slice(None), *index)]


def _number(value: np.generic) -> str:
    """The shortest decimals that give back the same number in its own precision."""
    return str(value)


def _as_json(value: str) -> str:
    """JSON knows no NaN and no infinity."""
    return value if value.strip("-") not in ("nan", "inf") else "null"


def _lines(path: Path) -> Iterator[str]:
    """The whole lines of a file; none where there is no file."""
    if path.exists():
        with open(path, encoding="utf-8", newline="") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line


def _update_of(line: str, name: str) -> int:
    return int(line.split(",", 1)[0]) if name == CSV else json.loads(line)["update"]
