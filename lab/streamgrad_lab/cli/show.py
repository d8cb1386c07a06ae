"""Tables that fit a terminal: a cell that is too long goes on in the next line, and no word is cut."""

import shutil
import textwrap
from collections.abc import Sequence

GAP = "  "


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> None:
    """Print a table to stdout.

    Args:
      header: the columns' names.
      rows: cells as text.
      width: of the lines; by default that of the terminal, or 80. Only words longer than that allows go beyond it.

    Example:
      >>> print_table(["name", "what"], [["a", "first"], ["bcdef", "second and third"]], width=16)
      name   what
      a      first
      bcdef  second
             and third
    """
    width = shutil.get_terminal_size((80, 24)).columns if width is None else width
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    while sum(widths) + len(GAP) * (len(widths) - 1) > width:
        room = [now if now > low else 0 for now, low in zip(widths, least, strict=True)]
        if not any(room):
            break
        widths[room.index(max(room))] -= 1
    for row in [header, *rows]:
        cells = [
            textwrap.wrap(cell, at, break_long_words=False, break_on_hyphens=False) or [""]
            for cell, at in zip(row, widths, strict=True)
        ]
        for line in range(max(map(len, cells))):
            parts = [cell[line] if line < len(cell) else "" for cell in cells]
            print(GAP.join(part.ljust(at) for part, at in zip(parts, widths, strict=True)).rstrip())
