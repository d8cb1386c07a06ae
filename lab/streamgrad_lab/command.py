"""The command `streamgrad`. Ctrl-C and SIGTERM are answered from the first moment on, also while jax is imported."""

import contextlib
import io
import os
import signal
import sys
from typing import Any

# LAPACK's own threads and XLA's get in each other's way: an eigendecomposition may take 100 times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def stop_at_once(number: int, frame: Any) -> None:
    """End the process before anything has begun that could be lost."""
    del frame
    with contextlib.suppress(OSError):
        os.write(2, b"stopped.\n")
    os._exit(128 + number)


def open_streams() -> None:
    """Have a standard output and error that take everything, whatever the shell has given us.

    One that is closed goes nowhere: else the next file that is opened would have its number, and get what is printed. A
    letter that its encoding does not have is written as its number.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115, for good
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a caller may have put another object in its place
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """Run the command line."""
    open_streams()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop_at_once)
    from streamgrad_lab.cli.main import main

    main()


if __name__ == "__main__":
    main()
