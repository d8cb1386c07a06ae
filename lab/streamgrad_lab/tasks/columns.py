"""The numbers of a text file: a single series, or one column of a table."""

import collections
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

SEPARATORS = (";", "\t", ",")  # of cells: the first of these that the file has; else white space


class Table(NamedTuple):
    """A file whose lines have the same number of cells.

    Attributes:
      names: of the columns, from a first line without a number; else empty.
      rows: the number of its line in the file, and its cells.
      width: how many columns.
    """

    names: list[str]
    rows: list[tuple[int, list[str]]]
    width: int


def read_series(path: Path, column: int | str | None = None) -> np.ndarray:
    """The numbers of a file, in their order.

    Args:
      path: a text file. A single series may break its lines anywhere; if all lines have several numbers, and as many of
        them, they are a table, of which one column must be chosen.
      column: its name in the first line, or its number, from 1.

    Returns:
      The numbers. ValueError where there is no such file or column, or where a number is missing or not finite.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "table.csv"
      >>> _ = path.write_text("day,price\\n2024-01-01,2.5\\n2024-01-02,3.0\\n")
      >>> read_series(path, "price").tolist()
      [2.5, 3.0]
    """
    text = _read(path)
    table = _table(path, text)
    if table is None and column is not None:
        raise ValueError(f"the series {path} has no columns, as its lines differ in length: leave column out.")
    if table is None:
        words = text.replace(",", " ").split()
        return np.array([_number(path, word, f"at place {place}") for place, word in enumerate(words, 1)])
    at = _choose(path, table, column)
    return np.array([_number(path, cells[at], f"in line {line}") for line, cells in table.rows])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # spreadsheets write a mark before the first character
    except OSError as error:
        raise ValueError(f"the series {path} cannot be read, {error.strerror}: name a file of numbers.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8, at byte {error.start}: convert it first.") from error


def _table(path: Path, text: str) -> Table | None:
    """The text as a table, of one column or of several; None where it has just one line, or they differ in length."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if len(lines) < 2:
        return None
    separator = next((found for found in SEPARATORS if found in text), None)
    rows = [(number, _cells(line, separator)) for number, line in lines]
    if all(len(cells) > 1 and not cells[-1] for _, cells in rows):  # a separator at the end of every line
        rows = [(number, cells[:-1]) for number, cells in rows]
    (width, count), *_ = collections.Counter(len(cells) for _, cells in rows).most_common()
    others = [(number, cells) for number, cells in rows if len(cells) != width]
    if others and (width == 1 or 2 * count <= len(rows)):
        return None
    if others:
        line, cells = others[0]
        raise ValueError(
            f"the series {path} has {width} columns, and {len(cells)} in line {line}: mend the line, or write one "
            "number on each line if all are one series."
        )
    names = [] if any(map(_is_number, rows[0][1])) else rows[0][1]
    return Table(names, rows[1:] if names else rows, width)


def _cells(line: str, separator: str | None) -> list[str]:
    if separator is None:
        return line.split()
    return [cell.strip() for cell in next(csv.reader([line], delimiter=separator, skipinitialspace=True))]


def _choose(path: Path, table: Table, column: int | str | None) -> int:
    """The place of the column that is asked for."""
    if column is None and table.width == 1:
        return 0
    listed = f", {_listed(table.names)}" if table.names else ""
    if column is None:
        example = table.names[-1] if table.names else table.width
        raise ValueError(
            f"the series {path} has {table.width} columns{listed}: choose one with the option column, such as "
            f"column={example}, or write one number on each line if all are one series."
        )
    if str(column) in table.names:
        return table.names.index(str(column))
    if isinstance(column, int) and 1 <= column <= table.width:
        return column - 1
    named = ", or by one of those names" if table.names else ""
    raise ValueError(
        f"the series {path} has {table.width} {'column' if table.width == 1 else 'columns'}{listed}: choose one by its "
        f"number, from 1{named}, not {column!r}."
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _number(path: Path, word: str, where: str) -> float:
    if not word:
        raise ValueError(f"the series {path} has an empty cell {where}: leave out or fill in what is missing.")
    if not _is_number(word):
        raise ValueError(f"the series {path} has {word!r} where a number should be, {where}.")
    if not np.isfinite(float(word)):
        raise ValueError(f"the series {path} has {word!r} {where}: leave out or fill in what is missing.")
    return float(word)
