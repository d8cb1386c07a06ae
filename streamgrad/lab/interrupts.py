"""Ctrl-C: a command stops where nothing is lost, says what is kept, and always ends.

Python runs a signal handler between two bytecodes of the main thread. A compiled call may keep it waiting, and an
exception raised there may be lost in a callback. So a thread listens too: it answers at once, ends the process on a
second Ctrl-C, and ends it if the main thread has not done so in time. The process ends without Python's shutdown, in
which a compiled call or a thread that still runs is a fault.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

CODE = 130  # what a shell reports for a command that Ctrl-C has ended
GRACE = 1.0  # seconds that the main thread has for its clean-up
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it


class _Now:
    """Where this process stands; signals are the process's, so there is one of these."""

    asked = False  # Ctrl-C has been pressed
    pending = False  # and waits for the end of a `hold`
    held = 0
    process = False  # the command is the whole of this process
    said = False
    words: Callable[[], str] = staticmethod(lambda: "stopped.")


_now = _Now()
_talking = threading.Lock()


def asked() -> bool:
    """Whether Ctrl-C has been pressed since the command began."""
    return _now.asked


def on_stop(words: Callable[[], str]) -> None:
    """Set what the command says when it is stopped: a function, called then, that returns a sentence."""
    _now.words = words


@contextlib.contextmanager
def hold() -> Iterator[None]:
    """Put off a first Ctrl-C to the end of the block, where it raises KeyboardInterrupt.

    For a compiled call and the writing of what came of it. Outside a command of the command line it does nothing.

    Example:
      >>> with hold():
      ...     print("whole")
      whole
    """
    _now.held += 1
    try:
        yield
    finally:
        _now.held -= 1
    if _now.pending and not _now.held:
        _now.pending = False
        raise KeyboardInterrupt


@contextlib.contextmanager
def handling() -> Iterator[None]:
    """Handle Ctrl-C as this module does for as long as the block lasts, in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _now.__dict__.clear()
    before, unraisable = signal.getsignal(signal.SIGINT), sys.unraisablehook
    # A handler of our own: asyncio, under checkpoints, replaces Python's, and may lose a Ctrl-C.
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = lambda lost: None if lost.exc_type is KeyboardInterrupt else unraisable(lost)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = unraisable


def run_process(command: Callable[[], int]) -> NoReturn:
    """Run a command as the whole of this process.

    Args:
      command: returns the exit code.

    Returns:
      Never: the process ends with that code, or with 130 after Ctrl-C.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    code: Any = 1
    try:
        with handling():
            _now.process = True
            signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=_listen, args=(ours,), daemon=True).start()
            code = command()
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        if not _now.asked:
            sys.excepthook(type(error), error, error.__traceback__)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _now.asked:
        code = say_stopped()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or a pipe that nobody reads
            stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def say_stopped() -> int:
    """Say once what is kept of the command, and return the exit code."""
    with _talking:
        if not _now.said:
            _now.said = True
            print(_words(), file=sys.stderr, flush=True)
    return CODE


def _words() -> str:
    try:
        return _now.words()
    except Exception:  # a folder that has gone, for one; the command ends all the same
        return "stopped."


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    first, _now.asked = not _now.asked, True
    if _now.held and first:
        _now.pending = True
    elif _now.process and _importing(frame):  # where an exception would become a traceback of a module half made
        _end_now()
    else:
        raise KeyboardInterrupt


def _importing(frame: types.FrameType | None) -> bool:
    """Whether a module is being imported in the main thread."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _listen(pipe: socket.socket) -> None:
    """In a thread of its own: one byte arrives for each signal, even while the main thread is in a compiled call."""
    pressed, deadline = 0, float("inf")
    while True:
        wait = None if pressed == 0 else max(0.0, deadline - time.monotonic())
        if select.select([pipe], [], [], wait)[0]:
            pressed += pipe.recv(64).count(signal.SIGINT)
            if pressed > 1:
                _end_now()
            if pressed and _now.held:
                _tell("stopping after the running call; Ctrl-C again ends at once.")
            deadline = time.monotonic() + GRACE
        elif _now.held:
            deadline = time.monotonic() + GRACE
        else:
            _end_now()


def _end_now() -> None:
    """End the process while the main thread is busy: what it has not written is made again when the run goes on."""
    if _talking.acquire(timeout=GRACE):  # or the main thread hangs while it says the same
        if not _now.said:
            _tell(_words())
        os._exit(CODE)
    os._exit(CODE)


def _tell(words: str) -> None:
    """Past Python's own buffers, whose locks the main thread may hold."""
    shown = f"{_SHOW_CURSOR}\n{words}\n" if os.isatty(2) else f"{words}\n"
    with contextlib.suppress(OSError):
        os.write(2, shown.encode())
