"""Files of a run: nothing is written in place, and a folder that cannot be written to is known of before training."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def replace_text(path: Path, text: str) -> None:
    """Write a file beside its place, then put it there: a reader sees the old one or the new one, never half of it."""
    beside = path.with_name(path.name + ".part")
    with open(beside, "w", encoding="utf-8", newline="") as file:
        file.write(text)
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


def plain(value: Any) -> Any:
    """A value as JSON would give it back, so that what was written and what is given can be compared."""
    return json.loads(json.dumps(value, default=str))


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """In words, where two nested mappings differ."""
    found = []
    for name in [*old, *(name for name in new if name not in old)]:
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name} was {before!r} and is now {after!r}")
    return found
