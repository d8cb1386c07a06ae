"""`RUN/run.json`: what was run, with what, and when."""

import dataclasses
import json
import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from streamgrad.lab.files import replace_text

FILE = "run.json"
FORMAT = 1
PACKAGES = ("streamgrad", "jax", "jaxlib", "numpy", "optax", "matplotlib")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of `streamgrad reproduce`.

    Attributes:
      preset: "smoke", "laptop" or "paper".
      command: the command line, as typed.
      seed: the seed that was asked for, or None for that of the configurations.
      data: the folder of the data, or None for what is embedded.
      device: what computed.
      versions: by package.
      started: when, as ISO 8601.
      experiments: by name, `config` (a dict of plain values), `seconds` (so far) and `done`.
    """

    preset: str
    command: str
    seed: int | None
    data: str | None
    device: str
    versions: dict[str, str]
    started: str
    experiments: dict[str, dict[str, Any]]


def new_run(preset: str, command: str, seed: int | None, data: str | None) -> Run:
    """A run that begins now, on this machine."""
    return Run(preset, command, seed, data, device(), versions(), now(), {})


def now() -> str:
    """The time in UTC, to the second.

    Example:
      >>> now().endswith("+00:00")
      True
    """
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from the source tree
            continue
    return found


def device() -> str:
    """What JAX computes on, in words."""
    import jax

    found = jax.devices()
    if found[0].platform == "cpu":
        return f"CPU, {_processor()}, {os.cpu_count()} cores"
    return f"{len(found)} of {found[0].device_kind}" if len(found) > 1 else found[0].device_kind


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def save_run(folder: Path, run: Run) -> None:
    """Write `folder/run.json`."""
    replace_text(folder / FILE, json.dumps({"format": FORMAT, **dataclasses.asdict(run)}, indent=2) + "\n")


def load_run(folder: Path) -> Run:
    """Read `folder/run.json`; ValueError, with the file's name, where there is none or it is not what it should be.

    Args:
      folder: the run's.

    Returns:
      The run.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {folder} has no run of `streamgrad reproduce` or `streamgrad train`.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON or of UTF-8
        raise ValueError(f"{path} is not a whole JSON file ({error}).") from None
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}, the one that this version of streamgrad reads.")
    names = {field.name for field in dataclasses.fields(Run)}
    if set(found) != names or not isinstance(found["experiments"], dict):
        raise ValueError(f"{path} must have the fields {', '.join(sorted(names))}.")
    for name, entry in found["experiments"].items():
        if not isinstance(entry, dict) or set(entry) != {"config", "seconds", "done"}:
            raise ValueError(f"{path}: the experiment {name!r} must have the fields config, seconds and done.")
    return Run(**found)
