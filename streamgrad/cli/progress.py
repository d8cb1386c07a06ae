"""How far a run is: bars on a terminal, a line now and then elsewhere. Always on stderr."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from streamgrad.experiments.base import Progress

SECONDS_BETWEEN_LINES = 10.0


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
    elif sys.stderr.isatty():
        with _bars() as progress:
            yield progress
    else:
        yield _Lines()


class _Lines:
    """A line when a setting begins to move, when it is done, and every few seconds in between."""

    def __init__(self) -> None:
        self.begun: dict[str, tuple[float, int]] = {}
        self.last = -float("inf")
        self.finished: set[str] = set()

    def __call__(self, setting: str, made: int, total: int, words: str) -> None:
        now = time.monotonic()
        first, before = self.begun.setdefault(setting, (now, made))
        done = made >= total
        if setting in self.finished or (not done and now - self.last < SECONDS_BETWEEN_LINES):
            return
        if done:
            self.finished.add(setting)
        self.last = now
        rate = (made - before) / (now - first) if now > first and made > before else None
        parts = [f"{setting}: {made}/{total}"]
        if rate is not None:
            parts.append(f"{rate:.3g}/s")
            if not done:
                parts.append(f"{(total - made) / rate:.0f} s left")
        print(", ".join([*parts, *([words] if words else [])]), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.3g}/s", style="progress.data.speed")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[words]}", markup=False),
    )
    with Bars(*columns, console=Console(stderr=True), speed_estimate_period=60) as bars:
        tasks: dict[str, Any] = {}

        def progress(setting: str, made: int, total: int, words: str) -> None:
            if setting not in tasks:
                # What a resumed run had made before must not count as speed.
                tasks[setting] = bars.add_task(setting, total=total, completed=made, words=words)
            bars.update(tasks[setting], completed=made, total=total, words=words)

        yield progress
