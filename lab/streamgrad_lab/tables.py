"""CSV: how every table of the laboratory is written and read."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamgrad_lab.files import replace_text

Row = Mapping[str, Any]


def write_rows(path: Path, rows: Sequence[Row], digits: int | None = None) -> None:
    """Write rows as CSV, all at once: a file that is there is complete.

    Args:
      path: the file.
      rows: at least one, all with the same names, or with fewer than the first.
      digits: significant ones of floating-point numbers; None for all.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        rounded = digits is not None and {k: f"{x:.{digits}g}" for k, x in row.items() if isinstance(x, float)}
        writer.writerow({**row, **(rounded or {})})
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text.getvalue())


def read_columns(path: Path, cut_off: bool = False) -> dict[str, list[str]]:
    """Read a CSV file.

    Args:
      path: the file.
      cut_off: whether a row with too few or too many fields, as a killed run may leave, is passed over.

    Returns:
      Its columns by name, as text. ValueError, which names the file and the line, where it is not whole.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "table.csv"
      >>> write_rows(path, [{"update": 1, "loss": 1 / 3}, {"update": 2, "loss": 0.25}], digits=3)
      >>> read_columns(path)
      {'update': ['1', '2'], 'loss': ['0.333', '0.25']}
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file, strict=True)) or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file ({error}).") from None
    if not header:
        raise ValueError(f"{path} is empty.")
    whole = [row for row in rows if len(row) == len(header)]
    if len(whole) < len(rows) and not cut_off:
        line, row = next((line, row) for line, row in enumerate(rows, 2) if len(row) != len(header))
        raise ValueError(
            f"{path}, line {line}, has {len(row)} fields where the header has {len(header)}: it may be cut off."
        )
    return {name: [row[i] for row in whole] for i, name in enumerate(header)}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file; a column in which every cell is a number comes as numbers.

    Args:
      path: the file.

    Returns:
      A dictionary for each row. ValueError, which names the file, where it is not whole.
    """
    columns = {name: _plain(cells) for name, cells in read_columns(path).items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _plain(cells: list[str]) -> list[Any]:
    found = numbers(cells)
    return cells if found is None else found.tolist()


def numbers(cells: Sequence[str]) -> np.ndarray | None:
    """Cells as numbers, NaN where one is empty; None where one is a word."""
    try:
        return np.array([float(cell) if cell else np.nan for cell in cells])
    except ValueError:
        return None
