"""`run.json`: what was run, with what, and when. Every folder of a run has one, and a run goes on by it."""

import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from streamgrad.lab.files import replace_text

FILE = "run.json"
FORMAT = 2
PACKAGES = ("streamgrad", "jax", "jaxlib", "numpy", "optax", "matplotlib")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a folder holds.

    Attributes:
      kind: "training" (of `streamgrad train`) or "experiments" (of `streamgrad reproduce`).
      describe: what defines the run, plain values by name; a run goes on only with the same.
      versions: by package.
      device: what computed, in words.
      notes: what else may be of interest, such as the command and when it began.
      experiments: by name, `config` (plain values), `seconds` (so far) and `done`; empty for training.
    """

    kind: str
    describe: dict[str, Any]
    versions: dict[str, str]
    device: str
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    experiments: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


def new_manifest(kind: str, describe: Mapping[str, Any], **notes: Any) -> Manifest:
    """That of a run which begins now, on this machine."""
    return Manifest(kind, plain(describe), versions(), device(), plain(notes))


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `folder/run.json`."""
    replace_text(folder / FILE, json.dumps({"format": FORMAT, **dataclasses.asdict(manifest)}, indent=2) + "\n")


def load_manifest(folder: Path) -> Manifest:
    """Read `folder/run.json`; ValueError, with the file's name, where there is none or it is not what it should be.

    Args:
      folder: the run's.

    Returns:
      The manifest.
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
    fields = {field.name: dict for field in dataclasses.fields(Manifest)} | {"kind": str, "device": str}
    if set(found) != set(fields) or not all(isinstance(found[name], kind) for name, kind in fields.items()):
        raise ValueError(f"{path} must have the fields {', '.join(sorted(fields))}.")
    for name, entry in found["experiments"].items():
        if not isinstance(entry, dict) or set(entry) != {"config", "seconds", "done"}:
            raise ValueError(f"{path}: the experiment {name!r} must have the fields config, seconds and done.")
    return Manifest(**found)


def resumed(folder: Path, manifest: Manifest, resume: bool, also: Sequence[str] = ()) -> Manifest | None:
    """The one way in which a run goes on: what the folder holds, if it may be added to.

    Args:
      folder: the run's.
      manifest: of the run that is asked for.
      resume: whether to go on.
      also: other files that tell of a run, in case its manifest is gone.

    Returns:
      The folder's manifest, or None where a run begins. ValueError where there is a run and `resume` is false, or one
      of another kind.
    """
    if not any((folder / name).exists() for name in (FILE, *also)):
        return None
    if not resume:
        raise ValueError(f"the folder {folder} has a run already: choose another, or resume it.")
    found = load_manifest(folder)
    check_same(folder, {"kind": found.kind}, {"kind": manifest.kind})
    return found


def check_same(folder: Path, begun: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """A run goes on as it was begun; ValueError, in which every difference is named, if not."""
    if found := differences(begun, plain(asked)):
        raise ValueError(f"the run in {folder} was begun with another configuration: {'; '.join(found)}.")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """In words, where two nested mappings differ.

    Example:
      >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
      ['a.b was 1 and is now 3']
    """
    found = []
    for name in [*old, *(name for name in new if name not in old)]:
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name} was {before!r} and is now {after!r}")
    return found


def plain(value: Any) -> Any:
    """A value as JSON would give it back, for what was written and what is given to be compared."""
    return json.loads(json.dumps(value, default=str))


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
    """What JAX computes on, in words, and in which precision."""
    import jax

    found = jax.devices()
    count = f"{len(found)} of " if len(found) > 1 else ""
    kind = f"CPU, {_processor()}, {os.cpu_count()} cores" if found[0].platform == "cpu" else found[0].device_kind
    return f"{count}{kind}{', float64' if jax.numpy.result_type(float) == 'float64' else ''}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
