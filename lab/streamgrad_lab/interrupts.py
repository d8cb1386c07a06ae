"""Ctrl-C and SIGTERM: a command stops where nothing is lost, says what is kept, and always ends.

SIGTERM is how a scheduler takes a machine back: it asks for what a first Ctrl-C asks for, however often it is sent.

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

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SIGNALLED = 128  # and the number of the signal is what a shell reports for a command that a signal has ended
GRACE = 1.0  # seconds that the main thread has for its clean-up
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it


class _Now:
    """Where this process stands; signals are the process's, so there is one of these."""

    asked = False  # to stop, by Ctrl-C or SIGTERM
    code = SIGNALLED + signal.SIGINT  # the exit code, after the first of them
    pending = False  # it waits for the end of a `hold`
    held = 0
    process = False  # the command is the whole of this process
    said = False
    words: Callable[[], str] = staticmethod(lambda: "stopped.")


_now = _Now()
_talking = threading.Lock()
_last: list[Callable[[], None]] = []  # what is done before the process ends at once


def asked() -> bool:
    """Whether Ctrl-C has been pressed, or SIGTERM has come, since the command began."""
    return _now.asked


def code() -> int:
    """The exit code that a command has been asked to end with, 130 or 143; 0 where it has not."""
    return _now.code if _now.asked else 0


def ask(code: int) -> None:
    """Say that another process of the same run has been asked to stop; the caller then raises KeyboardInterrupt."""
    if not _now.asked:
        _now.asked, _now.code = True, code


def before_the_end(clean_up: Callable[[], None]) -> None:
    """Add a function that is called, in any thread, before the process is ended in the middle of its work."""
    _last.append(clean_up)


def on_stop(words: Callable[[], str]) -> None:
    """Set what the command says when it is stopped: a function, called then, that returns a sentence."""
    _now.words = words


@contextlib.contextmanager
def hold() -> Iterator[None]:
    """Put off a first Ctrl-C, or SIGTERM, to the end of the block, where it raises KeyboardInterrupt.

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
    """Handle Ctrl-C and SIGTERM as this module does for as long as the block lasts, in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _now.__dict__.clear()
    before, unraisable = {number: signal.getsignal(number) for number in SIGNALS}, sys.unraisablehook
    # A handler of our own: asyncio, under checkpoints, replaces Python's, and may lose a Ctrl-C.
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    sys.unraisablehook = lambda lost: None if lost.exc_type is KeyboardInterrupt else unraisable(lost)
    try:
        yield
    finally:
        for number in SIGNALS:
            signal.signal(number, before[number])
        sys.unraisablehook = unraisable


@contextlib.contextmanager
def terminable(words: str) -> Iterator[None]:
    """For a call from Python: SIGTERM stops it as Ctrl-C does, at a place where nothing is lost.

    The process then ends with 143, as it would have at once. Nothing changes where SIGTERM is handled by somebody else,
    such as a command of the command line, or where this is not the main thread.

    Args:
      words: what is said before the end.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    with handling():
        try:
            yield
        except KeyboardInterrupt:
            if code() != SIGNALLED + signal.SIGTERM:
                raise
            print(words, file=sys.stderr, flush=True)
            raise SystemExit(code()) from None


def handle_again() -> None:
    """Take the signals back from a library that has set handlers of its own past Python, as JAX does for SIGTERM."""
    for number in SIGNALS:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, _interrupt)


def run_process(command: Callable[[], int]) -> NoReturn:
    """Run a command as the whole of this process.

    Args:
      command: returns the exit code.

    Returns:
      Never: the process ends with that code, or with 130 after Ctrl-C and 143 after SIGTERM.
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
    except OSError as error:  # of what it prints: a command answers for its files itself
        code = int(_lost(error))
    except BaseException as error:
        if not _now.asked:
            sys.excepthook(type(error), error, error.__traceback__)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if _now.asked:
        code = say_stopped()
    code = code if isinstance(code, int) else 0 if code is None else 1
    lost = [_flush(stream) for stream in (sys.stdout, sys.stderr)]
    os._exit(code or int(any(lost)))


def _flush(stream: Any) -> bool:
    """Hand over what was printed; true, after a sentence, where it is lost."""
    try:
        if stream is not None:  # as it is if it was closed before Python began
            stream.flush()
    except (OSError, ValueError) as error:
        return _lost(error)
    return False


def _lost(error: OSError | ValueError) -> bool:
    """Say why what was printed is lost; false where nobody wants to read more, as after `head`."""
    if isinstance(error, BrokenPipeError):
        return False
    _tell(f"streamgrad: the output could not be written: {getattr(error, 'strerror', None) or error}.")
    return True


def say_stopped() -> int:
    """Say once what is kept of the command, and return the exit code."""
    with _talking:
        if not _now.said:
            _now.said = True
            print(_words(), file=sys.stderr, flush=True)
    return _now.code


def _words() -> str:
    try:
        return _now.words()
    except Exception:  # a folder that has gone, for one; the command ends all the same
        return "stopped."


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    first = not _now.asked
    ask(SIGNALLED + number)
    if number == signal.SIGTERM and not first:  # schedulers may send it to a process, and to all of its group
        return
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
    pressed: list[int] = []
    deadline = float("inf")
    while True:
        wait = max(0.0, deadline - time.monotonic()) if pressed else None
        if select.select([pipe], [], [], wait)[0]:
            pressed += [number for number in pipe.recv(64) if number in SIGNALS]
            if not pressed:
                continue
            if not _now.asked:  # the main thread has not been able to
                _now.code = SIGNALLED + pressed[0]
            if signal.SIGINT in pressed[1:]:
                _end_now()
            if _now.held and len(pressed) == 1:
                again = "Ctrl-C again" if pressed[0] == signal.SIGINT else "Ctrl-C"
                _tell(f"stopping after the running call; {again} ends at once.")
            deadline = time.monotonic() + GRACE
        elif _now.held:
            deadline = time.monotonic() + GRACE
        else:
            _end_now()


def _end_now() -> None:
    """End the process while the main thread is busy: what it has not written is made again when the run goes on."""
    # If the main thread is about to say the same, it may be for ever.
    if _talking.acquire(timeout=GRACE) and not _now.said:
        _tell(_words())
    for clean_up in _last:
        with contextlib.suppress(Exception):
            clean_up()
    os._exit(_now.code)


def _tell(words: str) -> None:
    """Past Python's own buffers, whose locks the main thread may hold."""
    shown = f"{_SHOW_CURSOR}\n{words}\n" if os.isatty(2) else f"{words}\n"
    with contextlib.suppress(OSError):
        os.write(2, shown.encode(errors="backslashreplace"))
