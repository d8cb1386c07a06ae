"""Tables on a terminal: rich's where it is there, plain columns elsewhere."""

import importlib.util
import sys
from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout.

    Args:
      header: the columns' names.
      rows: cells as text.

    Example:
      >>> print_table(["name", "what"], [["a", "first"], ["bcdef", "second"]])
      name   what
      a      first
      bcdef  second
    """
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
