"""Files of a run: nothing is written in place, what cannot be written is named, and room is looked for before training.

A file that is written beside its place has a name that nobody can foresee, and is made anew: it follows no link that
somebody has put there.
"""

import contextlib
import errno
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

PART = re.compile(r"\..+\.[0-9a-f]{16}\.part")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Unwritten(OSError):
    """A file could not be written.

    Attributes:
      path: of the file.
      why: in words.
      full: whether the disk is, or what this user may have of it.
    """

    def __init__(self, path: Path | str, error: BaseException):
        words = str(getattr(error, "strerror", None) or error or type(error).__name__)
        self.path, self.why = path, words.splitlines()[0].rstrip(".")
        self.full = getattr(error, "errno", None) in FULL or os.strerror(errno.ENOSPC) in words
        if self.full and getattr(error, "errno", None) is None:  # the long words of another library
            self.why = os.strerror(errno.ENOSPC)
        super().__init__(f"cannot write {path}: {self.why}.")

    def then(self, go_on: str) -> OSError:
        """The same error with what to do in the end."""
        once = "there is room" if self.full else "it can be written"
        return OSError(f"cannot write {self.path}: {self.why}; {go_on.format(once=once)}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around whatever writes a file: an error names it, which that of a full disk does not."""
    try:
        yield
    except Unwritten:
        raise
    except OSError as error:
        raise Unwritten(path, error) from error


def replace_text(path: Path, text: str) -> None:
    """Write a file beside its place, then put it there: a reader sees the old one or the new one, never half of it."""
    replace_bytes(path, text.encode(errors="backslashreplace"))  # the name of a folder need not be letters


def replace_bytes(path: Path, data: bytes) -> None:
    """As `replace_text`, for what is no text."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    with writing(path):
        try:
            with open(beside, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise


def sweep(folder: Path, names: Sequence[str] = ("*.csv", "*.json"), inside: bool = True) -> None:
    """Remove what a killed process has left of files that it was writing; for whoever holds the lock.

    Args:
      folder: where to look.
      names: the files that were to be written, as patterns.
      inside: whether to look into the folders inside, too.
    """
    find = folder.rglob if inside else folder.glob
    for path in [path for name in names for path in find(f".{name}.*.part") if PART.fullmatch(path.name)]:
        with contextlib.suppress(OSError):
            path.unlink()


def check_room(folder: Path, size: int) -> None:
    """`folder` exists or can be made, and takes `size` bytes; OSError in one sentence if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, max(size, 1))  # takes the room without the time to fill it
            else:
                for _ in range(0, max(size, 1), 1 << 20):
                    file.write(bytes(1 << 20))
                file.flush()
    except OSError as error:
        need = f"about {max(size / 1e6, 0.1):.1f} MB"
        raise OSError(f"cannot write {need} into the folder {folder}: {error.strerror or error}.") from error
