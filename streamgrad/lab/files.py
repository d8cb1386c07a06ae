"""Files of a run: nothing is written in place, and a folder that cannot be written to is known of before training."""

import contextlib
import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file beside its place, then put it there: a reader sees the old one or the new one, never half of it."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """As `replace_text`, for what is no text."""
    beside = path.with_name(path.name + ".part")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def check_room(folder: Path, size: int) -> None:
    """`folder` exists or can be made, and takes `size` bytes; OSError in one sentence if not."""
    probe = folder / ".probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(probe, "wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, max(size, 1))  # takes the room without the time to fill it
            else:
                for _ in range(0, max(size, 1), 1 << 20):
                    file.write(bytes(1 << 20))
                file.flush()
    except OSError as error:
        need = f"about {max(size / 1e6, 0.1):.1f} MB"
        raise OSError(f"cannot write {need} into the folder {folder}: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
