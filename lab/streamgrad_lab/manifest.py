"""`run.json`: what was run, with what, and when. Every folder of a run has one, and a run goes on by it."""

import dataclasses
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from streamgrad_lab.files import replace_text

FILE = "run.json"
# Of all files of a run; to be raised when one of them, or the memory in a checkpoint, gets another structure.
FORMAT = 3
READABLE = (2, 3)
DEEPEST = 100  # levels of a manifest, which a program may walk down
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
      data_hash: of the data that is trained on, see `streamgrad_lab.tasks.base.digest`; empty where it is not known.
      format: that of the files.
    """

    kind: str
    describe: dict[str, Any]
    versions: dict[str, str]
    device: str
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    experiments: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    data_hash: str = ""
    format: int = FORMAT

    @property
    def made_by(self) -> str:
        """The version that has made the run, in words."""
        return f"streamgrad {self.versions.get('streamgrad', 'of an unknown version')}, format {self.format}"


def new_manifest(kind: str, describe: Mapping[str, Any], data_hash: str = "", **notes: Any) -> Manifest:
    """That of a run which begins now, on this machine."""
    return Manifest(kind, plain(describe), versions(), device(), plain(notes), data_hash=data_hash)


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `folder/run.json`."""
    written = {"format": FORMAT, **dataclasses.asdict(dataclasses.replace(manifest, format=FORMAT))}
    replace_text(folder / FILE, json.dumps(written, indent=2) + "\n")


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
    except RecursionError:
        found = None
    if found is None or _depth(found) > DEEPEST:
        raise ValueError(f"{path} is no manifest of a run: it is nested more than {DEEPEST} levels deep.")
    if not isinstance(found, dict) or found.get("format") not in READABLE:
        raise ValueError(_foreign(path, found))
    fields = {field.name: dict for field in dataclasses.fields(Manifest)}
    fields |= {"kind": str, "device": str, "data_hash": str, "format": int}
    if found["format"] == 2:
        found.setdefault("data_hash", "")
    if set(found) != set(fields) or not all(isinstance(found[name], kind) for name, kind in fields.items()):
        raise ValueError(f"{path} must have the fields {', '.join(sorted(fields))}.")
    for where, value, kinds, words in _values(found):
        if type(value) not in kinds:
            raise ValueError(f"{path}: {where} must be {words}, not {value!r}.")
    return Manifest(**found)


def _foreign(path: Path, found: Any) -> str:
    """What to say of a file that is of no format that can be read."""
    formats = " or ".join(map(str, READABLE))
    number = found.get("format") if isinstance(found, dict) else None
    version = found.get("versions") if isinstance(found, dict) else None
    version = version.get("streamgrad") if isinstance(version, dict) else None
    maker = f", made by streamgrad {version}," if isinstance(version, str) else ""
    has = f"of format {number}{maker} and" if type(number) is int else "not"
    return f"{path} is {has} not of format {formats}, which this version of streamgrad reads."


def _values(found: dict[str, Any]) -> Iterator[tuple[str, Any, tuple[type, ...], str]]:
    """The values that programs count on: where they are, what they are, and what they must be, by type and in words."""
    describe, notes = found["describe"], found["notes"]
    for name, version in found["versions"].items():
        yield f"versions.{name}", version, (str,), "text"
    if found["kind"] == "training":
        plan = describe.get("plan")
        yield "plan", plan, (dict,), "an object"
        for name in ("updates", "every", "seeds", "seed"):
            yield f"plan.{name}", plan.get(name), (int,), "a whole number"
        yield "plan.checkpoint_every", plan.get("checkpoint_every"), (int, type(None)), "a whole number or null"
        yield "plan.checkpoints", plan.get("checkpoints", True), (bool,), "true or false"
    if found["kind"] == "experiments":
        yield "describe.preset", describe.get("preset"), (str,), "text"
        for name in ("command", "started"):
            yield f"notes.{name}", notes.get(name), (str,), "text"
        yield "notes.data", notes.get("data"), (str, type(None)), "text or null"
    for name, entry in found["experiments"].items():
        of = f"of the experiment {name!r}"
        yield f"the experiment {name!r}", entry, (dict,), "an object"
        yield f"config {of}", entry.get("config"), (dict,), "an object"
        yield f"config.settings {of}", entry["config"].get("settings", []), (list,), "a list"
        yield f"seconds {of}", entry.get("seconds"), (int, float), "a number"
        finite = math.isfinite(entry["seconds"])
        yield f"seconds {of}", entry["seconds"] if finite else str(entry["seconds"]), (int, float), "a finite number"
        yield f"done {of}", entry.get("done"), (bool,), "true or false"
        yield f"data_hash {of}", entry.get("data_hash", ""), (str,), "text"


def _depth(value: Any) -> int:
    """How many levels of objects and lists lie in each other; without recursion, for which there may be too many."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


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


def check_same_data(folder: Path, begun: str, now: str) -> None:
    """A run goes on with the data that it was begun with, as far as its hash is known; ValueError if not."""
    if begun not in ("", now):
        raise ValueError(
            f"the data has changed since the run in {folder} was begun (its hash was {begun} and is now {now}): put it "
            "back as it was, or begin again in another folder."
        )


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
