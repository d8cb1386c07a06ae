"""How a run is shown: a bar with rate and time left on a terminal, plain lines elsewhere."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator

COMPILING = "compiling"  # the words before the first update
Show = Callable[[int, int, str], None]  # show(updates made, of how many, a few words)


@contextlib.contextmanager
def showing(title: str = "updates", every_seconds: float = 5.0) -> Iterator[Show]:
    """A function that shows progress on stderr: with rich if it is there and stderr is a terminal, else plain lines.

    Args:
      title: stands before the bar.
      every_seconds: a plain line comes no more often than that, except for the last.

    Yields:
      `show(updates made, of how many, a few words)`, as `train` takes it.
    """
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        with _bar(title) as show:
            yield show
    else:
        yield plain_lines(title, every_seconds)


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
    ]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task(title, total=None, rate="", words="")
        clock = Clock()

        def show(done: int, of: int, words: str) -> None:
            rate, _ = clock.see(done, of, words)
            bar.update(shown, completed=done, total=of, rate=rate, words=words)

        yield show


def plain_lines(title: str, every_seconds: float) -> Show:
    """A function that prints a line on stderr before the first update, after it, now and then, and at the end."""
    clock, last = Clock(), -float("inf")

    def show(done: int, of: int, words: str) -> None:
        nonlocal last
        rate, left = clock.see(done, of, words)
        if time.monotonic() - last >= every_seconds or done >= of:
            last = time.monotonic() if words != COMPILING else -float("inf")
            print(", ".join(filter(None, [f"{title}: {done} of {of}", rate, left, words])), file=sys.stderr, flush=True)

    return show


class Clock:
    """Rate and time left since the first updates were made; how long it took to compile is left out."""

    def __init__(self) -> None:
        self.first: tuple[float, int] | None = None

    def see(self, done: int, of: int, words: str) -> tuple[str, str]:
        """Rate and time left, in words; empty as long as nothing is known of them."""
        now = time.monotonic()
        if words == COMPILING:
            return "", ""
        if self.first is None:
            self.first = (now, done)
        seconds, made = now - self.first[0], done - self.first[1]
        if not made or seconds <= 0:
            return "", ""
        rate = made / seconds
        left = round((of - done) / rate)
        return f"{rate:.3g}/s", f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left" if left else ""
