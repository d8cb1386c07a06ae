"""Rows of numbers to CSV and JSONL, as they come."""

import csv
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from streamgrad.lab.files import replace_text
from streamgrad.lab.train.checkpoint import REMEDY

CSV, JSONL = "metrics.csv", "metrics.jsonl"
_log = logging.getLogger("streamgrad")


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


def cut(folder: Path, rows: Sequence[tuple[int, int]]) -> None:
    """Keep the rows up to a checkpoint, and drop what a killed run wrote past it.

    Args:
      folder: of the run.
      rows: the update and seed of each row up to the checkpoint, in order. ValueError where a file lacks one of them:
        they cannot be made again.
    """
    for name in (CSV, JSONL):
        path = folder / name
        if not rows:  # the header goes too
            path.unlink(missing_ok=True)
            continue
        if not path.exists():
            raise ValueError(f"{path} is missing, and its rows cannot be made again: {REMEDY}.")
        lines = list(_lines(path))
        first = 1 if name == CSV else 0  # after the header
        header = lines[0].split(",") if first and lines else []
        for number, (update, seed) in enumerate(rows, start=first):
            found = _key(lines[number], header) if number < len(lines) else "the end of the file"
            if found != (update, seed):
                found = "no row of metrics" if found is None else found
                found = f"update {found[0]}, seed {found[1]}" if isinstance(found, tuple) else found
                raise ValueError(
                    f"{path} is damaged: line {number + 1} is {found}, not the row of update {update}, seed {seed}: "
                    f"{REMEDY}."
                )
        rest = lines[first + len(rows) :]
        if any(_key(line, header) is None for line in rest):
            _log.warning("%s: what followed the checkpoint's rows was no row of metrics and is dropped.", path)
        replace_text(path, "".join(lines[: first + len(rows)]))


def has_rows(folder: Path) -> bool:
    """Whether any rows were written."""
    return len(list(_lines(folder / CSV))) > 1 or bool(list(_lines(folder / JSONL)))


def read(path: Path | str) -> dict[str, np.ndarray]:
    """The columns of a CSV file of metrics, by name.

    Args:
      path: such a file, or the folder that has it.

    Returns:
      One array per column; `update` and `seed` are whole numbers.
    """
    path = Path(path)
    path = path / CSV if path.is_dir() else path
    try:
        with open(path, encoding="utf-8", newline="") as file:
            header, *lines = csv.reader(file)
        table = list(zip(*lines, strict=True)) or [()] * len(header)
        whole = {"update": int, "seed": int}
        return {
            name: np.array(values, dtype=str).astype(whole.get(name, float))
            for name, values in zip(header, table, strict=True)
        }
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} is not a whole file of metrics: {error}.") from error


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
    """The whole lines of a file; none where there is no file. What is no text comes as replacement characters."""
    if path.exists():
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line


def _key(line: str, header: Sequence[str]) -> tuple[int, int] | None:
    """The update and seed of a row, of CSV if there is a header; None where it is no row."""
    try:
        if not header:
            row = json.loads(line)
            return row["update"], row["seed"]
        update, seed, *values = line.split(",")
        numbers = [float(value) for value in values]
        return (int(update), int(seed)) if len(numbers) + 2 == len(header) else None
    except (ValueError, KeyError, TypeError):
        return None
