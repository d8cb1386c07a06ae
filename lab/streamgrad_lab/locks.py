"""One process at a time: the lock of a run's folder, or of a file that a command will write.

A lock is a file that names its holder, with the kernel's `flock` on it for as long as the holder lives: that ends with
the process, however the process ends, and no two can have it, also where both have found the lock of a dead one. Where
a file system knows no `flock`, the name decides alone: whether a process of this host runs is known by its number and
by when it was started, since numbers are used again. Of a process on another host it is not known.
"""

import contextlib
import dataclasses
import errno
import json
import os
import platform
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from streamgrad_lab import interrupts

try:
    import fcntl
except ImportError:  # on Windows, where nothing is locked
    fcntl = None

LOCK = ".lock"
TRIES = 100  # in which the file, or its folder, may go while it is being opened
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_held: dict[int, Path] = {}  # of this process, by file descriptor


class Busy(ValueError):
    """Another process writes here."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who has a lock.

    Attributes:
      pid: the number of the process.
      host: the name of its machine.
      boot: what that machine's kernel was called when it was started; empty where it does not say.
      start: when the process was started, in the kernel's own count; likewise.
      since: when it took the lock.
    """

    pid: int
    host: str
    boot: str
    start: str
    since: str


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Be the only process that writes the run in a folder, which is made where there is none.

    Args:
      folder: the run's. One that was made for the lock goes with it, if nothing else has come into it.

    Yields:
      Nothing. `Busy`, a sentence that names the other process, where there is one.

    Example:
      >>> import pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> with locked_folder(folder):
      ...     with locked_folder(folder):  # doctest: +ELLIPSIS
      ...         pass
      Traceback (most recent call last):
      ...
      streamgrad_lab.locks.Busy: the run in ... is being written by process ... since ...
    """
    with locked(folder / LOCK, f"the run in {folder}"):
        yield


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Be the only process that will write this file; the lock lies beside it."""
    with locked(path.with_name(f".{path.name}{LOCK}"), str(path)):
        yield


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock in this file for as long as the block lasts.

    Args:
      path: of the lock.
      what: is locked by it, in words.
    """
    if fcntl is None:
        yield
        return
    new = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    process, fd = os.getpid(), None
    try:
        fd = _take(path, what)
        yield
    finally:
        if os.getpid() == process:  # a fork that leaves the block has no lock to give back
            if fd is not None:
                with contextlib.suppress(OSError):
                    path.unlink()  # before it is free: whoever waits for this file sees that it is gone
                del _held[fd]
                os.close(fd)
            for folder in new:
                with contextlib.suppress(OSError):  # it has something in it by now
                    folder.rmdir()


def _take(path: Path, what: str) -> int:
    """The descriptor of the lock's file, once this process holds it."""
    for _ in range(TRIES):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | NOFOLLOW, 0o666)
        except FileNotFoundError:  # another process has just removed the folder, which it had made
            continue
        except OSError as error:
            raise _unwritable(path.parent, error) from error
        try:
            if _taken(fd, path, what):
                _held[fd] = path
                return fd
        except OSError as error:
            os.close(fd)
            raise _unwritable(path.parent, error) from error
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise _unwritable(path.parent, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))


def _taken(fd: int, path: Path, what: str) -> bool:
    """Take the lock in an open file; false where the file has been removed since it was opened."""
    sure = _flock(fd)
    if sure is False:
        raise Busy(_busy(_wait_for_name(fd), what))
    with contextlib.nullcontext() if sure else _turn(path, what):
        if not _is_at(fd, path):  # whoever held it has ended since, and taken the file along
            return False
        holder = _read(fd)
        if holder is not None and (runs := _alive(holder, sure=bool(sure))) is not False:
            raise Busy(_busy(holder, what) if runs else _unknown(holder, what, path))
        os.ftruncate(fd, 0)
        try:
            os.pwrite(fd, json.dumps(dataclasses.asdict(_me())).encode(), 0)
        except OSError:  # a full disk
            path.unlink(missing_ok=True)
            raise
    return True


def _unwritable(folder: Path, error: OSError) -> OSError:
    return OSError(f"cannot write into the folder {folder}: {error.strerror or error}.")


def _flock(fd: int) -> bool | None:
    """Whether the kernel gave us the lock; None where it knows no locks of such files."""
    assert fcntl is not None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def _turn(path: Path, what: str) -> Iterator[None]:
    """Where the kernel does not see to it: one process at a time reads who has the lock, and puts its name there."""
    turn = path.with_name(f"{path.name}.turn")
    try:
        os.close(os.open(turn, os.O_CREAT | os.O_EXCL | os.O_WRONLY | NOFOLLOW, 0o666))
    except FileExistsError:
        raise Busy(f"another process is about to write {what}: try again, or remove {turn} if it is old.") from None
    try:
        yield
    finally:
        turn.unlink(missing_ok=True)


def _is_at(fd: int, path: Path) -> bool:
    """Whether that file still is what lies there."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _read(fd: int) -> Holder | None:
    """Who is named in the file; None where nobody is."""
    try:
        found = Holder(**json.loads(os.pread(fd, 1 << 12, 0)))
    except (ValueError, TypeError, RecursionError):
        return None
    return found if isinstance(found.pid, int) else None


def _wait_for_name(fd: int) -> Holder | None:
    """Who is named; a process that has just taken the lock has its name there in a moment."""
    for _ in range(20):
        if (holder := _read(fd)) is not None:
            return holder
        time.sleep(0.05)
    return None


def _me() -> Holder:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Holder(os.getpid(), platform.node(), _boot(), _start(os.getpid()), now)


def _alive(holder: Holder, sure: bool) -> bool | None:
    """Whether a process that is named in a lock still runs; None where that cannot be known from here.

    Args:
      holder: the process.
      sure: whether this process has the kernel's lock, which on one machine is proof that no other has it.
    """
    here, same_kernel = holder.host == platform.node(), holder.boot == _boot()
    if sure and (here or (same_kernel and holder.boot)):  # of two containers on one machine each has a name of its own
        return False
    if not here:
        return None
    if not same_kernel:  # the machine has been started again
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it is another user's
        pass
    return _start(holder.pid) == holder.start


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start(pid: int) -> str:
    """When a process was started, in clock ticks of the kernel; empty where it does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _busy(holder: Holder | None, what: str) -> str:
    who = "another process"
    if holder is not None:
        who = f"process {holder.pid} on {holder.host} since {holder.since}"
    return f"{what} is being written by {who}: wait for its end, or choose another place."


def _unknown(holder: Holder, what: str, path: Path) -> str:
    return (
        f"{what} has been written by process {holder.pid} on the host {holder.host} since {holder.since}, and whether "
        f"that still runs cannot be known from here: if it does not, remove {path} and start again."
    )


def _forget() -> None:
    """In a fork: the lock is the parent's, and must end with it."""
    for fd in _held:
        os.close(fd)
    _held.clear()


def _abandon() -> None:
    """Before the process ends at once: take its name out, for other hosts, who could not know that it has ended."""
    for fd in list(_held):
        os.ftruncate(fd, 0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
interrupts.before_the_end(_abandon)
