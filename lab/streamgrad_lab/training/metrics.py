"""`metrics.csv` of a run: rows of numbers, written as they come."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from streamgrad_lab.files import replace_text, writing
from streamgrad_lab.tables import numbers, read_columns
from streamgrad_lab.training.checkpoint import REMEDY
from streamgrad_lab.training.loop import HELD_OUT

CSV = "metrics.csv"
_WHOLE = re.compile("[0-9]{1,18}", re.ASCII)
_log = logging.getLogger("streamgrad")


class Writer:
    """Appends to `folder/metrics.csv`; use it in a `with`.

    Args:
      folder: exists already.
      seeds: the number that stands for each seed.
    """

    def __init__(self, folder: Path, seeds: Sequence[int]):
        self.seeds = seeds
        self.path = folder / CSV
        self._header = next(iter(_lines(self.path)), None)
        with writing(self.path):
            self._csv = open(self.path, "a", encoding="utf-8", newline="")  # noqa: SIM115, closed by __exit__

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type | None, *exception: object) -> None:
        # A row that the disk had no room for is tried once more, and its error has been told.
        with contextlib.suppress(OSError) if kind else writing(self.path):
            self._csv.close()

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
        with writing(self.path):
            for at in range(rows["update"].shape[1]):
                for index, seed in enumerate(self.seeds):
                    if rows["stopped"][index, at] < 0:
                        cells = [_cell(name, column[index, at]) for name, column in columns.items()]
                        self._csv.write(",".join([str(rows["update"][index, at]), str(seed), *cells]) + "\n")
            self._csv.flush()
            os.fsync(self._csv.fileno())


def _cell(name: str, value: np.generic) -> str:
    """numpy writes the shortest decimals that give back the same number in its own precision."""
    return "" if name == HELD_OUT and np.isnan(value) else str(value)


def cut(folder: Path, rows: Sequence[tuple[int, int]], unmeasured: bool = False) -> None:
    """Keep the rows up to a checkpoint, and drop what a killed run wrote past it.

    Args:
      folder: of the run.
      unmeasured: whether the last of them lose their held-out loss: it was measured as the run had ended there, and now
        it goes on.
      rows: the update and seed of each row up to the checkpoint, in order. ValueError where the file lacks one of them:
        they cannot be made again.
    """
    path = folder / CSV
    if not rows:  # the header goes too
        with writing(path):
            path.unlink(missing_ok=True)
        return
    if not path.exists():
        raise ValueError(f"{path} is missing, and its rows cannot be made again: {REMEDY}.")
    lines = list(_lines(path))
    fields = lines[0].count(",") + 1 if lines else 0
    for number, (update, seed) in enumerate(rows, start=1):
        found = _key(lines[number], fields) if number < len(lines) else "the end of the file"
        if found != (update, seed):
            found = "no row of metrics" if found is None else found
            found = f"update {found[0]}, seed {found[1]}" if isinstance(found, tuple) else found
            raise ValueError(
                f"{path} is damaged: line {number + 1} is {found}, not the row of update {update}, seed {seed}: "
                f"{REMEDY}."
            )
    if any(_key(line, fields) is None for line in lines[1 + len(rows) :]):
        _log.warning("%s: what followed the checkpoint's rows was no row of metrics and is dropped.", path)
    kept = lines[: 1 + len(rows)]
    if unmeasured:
        last = f"{rows[-1][0]},"
        kept = [_without(lines[0], line) if line.startswith(last) else line for line in kept]
    replace_text(path, "".join(kept))


def _without(header: str, line: str) -> str:
    """A row with nothing in the column of the held-out loss."""
    names, cells = header.rstrip("\n").split(","), line.rstrip("\n").split(",")
    return ",".join("" if name == HELD_OUT else cell for name, cell in zip(names, cells, strict=True)) + "\n"


def has_rows(folder: Path) -> bool:
    """Whether any rows were written."""
    return len(list(_lines(folder / CSV))) > 1


def read(path: Path | str, cut_off: bool = False) -> dict[str, np.ndarray]:
    """The columns of a CSV file of metrics, by name.

    Args:
      path: such a file, or the folder that has it.
      cut_off: whether half a row, as a killed run may leave, is passed over.

    Returns:
      One array per column; `update` and `seed` are whole numbers. Columns of words are left out. ValueError, which
      names the file, where it is not one of metrics.
    """
    path = Path(path)
    path = path / CSV if path.is_dir() else path
    found = {name: numbers(cells) for name, cells in read_columns(path, cut_off).items()}
    columns = {name: values for name, values in found.items() if values is not None}
    if not {"update", "seed"} <= set(columns):
        raise ValueError(f"{path} has no numbers in columns update and seed: it is not a file of metrics.")
    return columns | {name: columns[name].astype(int) for name in ("update", "seed")}


def _spread(rows: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Columns of one number per row: ours first, then the summary's by name, as jax sorts dictionaries."""
    first = ["loss", "gradient_norm", *([HELD_OUT] if HELD_OUT in rows else [])]
    for name in first + [name for name in rows if name not in (*first, "update", "stopped")]:
        values = np.asarray(rows[name])
        for index in np.ndindex(values.shape[2:]):
            yield "_".join([name, *map(str, index)]), values[(slice(None), slice(None), *index)]


def _lines(path: Path) -> Iterator[str]:
    """The whole lines of a file; none where there is no file. What is no text comes as replacement characters."""
    if path.exists():
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line


def _key(line: str, fields: int) -> tuple[int, int] | None:
    """The update and seed of a row with that many fields; None where it is no such row."""
    update, *rest = line.rstrip("\n").split(",")
    found = numbers(rest)
    if found is None or len(found) + 1 != fields or not all(map(_WHOLE.fullmatch, (update, rest[0]))):
        return None
    return int(update), int(rest[0])
