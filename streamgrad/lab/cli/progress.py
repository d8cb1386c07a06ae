"""How far a run of many settings is: a bar for each on a terminal, a line now and then elsewhere. Always on stderr."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from streamgrad.lab.experiments.base import Progress
from streamgrad.lab.train.progress import Clock, Show, plain_lines


@contextlib.contextmanager
def show_progress(quiet: bool = False) -> Iterator[Progress]:
    """A function that shows progress, for as long as the context lasts.

    Args:
      quiet: show nothing.

    Yields:
      `progress(setting, updates made, of how many, a few words)`.
    """
    if quiet:
        yield lambda setting, made, total, words: None
    elif sys.stderr.isatty() and importlib.util.find_spec("rich"):
        with _bars() as progress:
            yield progress
    else:
        lines: dict[str, Show] = {}

        def by_lines(setting: str, made: int, total: int, words: str) -> None:
            lines.setdefault(setting, plain_lines(setting, 10.0))(made, total, words)

        yield by_lines


@contextlib.contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TextColumn("{task.fields[words]}", markup=False),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, tuple[Any, Clock]] = {}

        def progress(setting: str, made: int, total: int, words: str) -> None:
            if setting not in tasks:
                tasks[setting] = bars.add_task(setting, total=total, rate="", words=""), Clock()
            task, clock = tasks[setting]
            rate = ", ".join(filter(None, clock.see(made, total, words)))
            bars.update(task, completed=made, total=total, rate=rate, words=words)

        yield progress
