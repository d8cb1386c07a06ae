"""How far a run is, on stderr: a bar for each of its parts on a terminal, a line now and then elsewhere."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

COMPILING = "compiling"  # the words before the first update
Show = Callable[[int, int, str], None]  # show(updates made, of how many, a few words)
Progress = Callable[[str, int, int, str], None]  # progress(part, updates made, of how many, a few words)


def silent(part: str, made: int, total: int, words: str) -> None:
    """Show nothing."""
    del part, made, total, words


@contextlib.contextmanager
def showing(quiet: bool = False, every_seconds: float = 5.0) -> Iterator[Progress]:
    """A function that shows progress, for as long as the context lasts: with rich if it is there.

    Args:
      quiet: show nothing.
      every_seconds: a plain line of a part comes no more often than that, except for the last.

    Yields:
      `progress(part, updates made, of how many, a few words)`.
    """
    if quiet:
        yield silent
    elif sys.stderr.isatty() and importlib.util.find_spec("rich"):
        with _bars() as progress:
            yield progress
    else:
        lines: dict[str, Show] = {}

        def by_lines(part: str, made: int, total: int, words: str) -> None:
            lines.setdefault(part, plain_lines(part, every_seconds))(made, total, words)

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

        def progress(part: str, made: int, total: int, words: str) -> None:
            if part not in tasks:
                tasks[part] = bars.add_task(part, total=total, rate="", words=""), Clock()
            task, clock = tasks[part]
            rate = ", ".join(filter(None, clock.see(made, total, words)))
            bars.update(task, completed=made, total=total, rate=rate, words=words)

        yield progress


def plain_lines(part: str, every_seconds: float) -> Show:
    """A function that prints a line on stderr before the first update, after it, now and then, and at the end."""
    clock, last = Clock(), -float("inf")

    def show(made: int, total: int, words: str) -> None:
        nonlocal last
        rate, left = clock.see(made, total, words)
        if time.monotonic() - last >= every_seconds or made >= total:
            last = time.monotonic() if words != COMPILING else -float("inf")
            line = ", ".join(filter(None, [f"{part}: {made} of {total}", rate, left, words]))
            with contextlib.suppress(OSError):  # a log on a full disk must not end a run
                print(line, file=sys.stderr, flush=True)

    return show


class Clock:
    """Rate and time left since the first updates were made; how long it took to compile is left out."""

    def __init__(self) -> None:
        self.first: tuple[float, int] | None = None

    def see(self, made: int, total: int, words: str) -> tuple[str, str]:
        """Rate and time left, in words; empty as long as nothing is known of them."""
        now = time.monotonic()
        if words == COMPILING:
            return "", ""
        if self.first is None:
            self.first = (now, made)
        seconds, since = now - self.first[0], made - self.first[1]
        if not since or seconds <= 0:
            return "", ""
        rate = since / seconds
        left = round((total - made) / rate)
        return f"{rate:.3g}/s", f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left" if left else ""
