"""Run experiments into a folder, one after the other; a run that was stopped can go on."""

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamgrad_lab.experiments import MODULES, find_experiment
from streamgrad_lab.experiments.base import Experiment
from streamgrad_lab.files import FULL, Unwritten, check_room, sweep
from streamgrad_lab.locks import LOCK, locked_folder
from streamgrad_lab.manifest import (
    Manifest,
    check_same,
    check_same_data,
    device,
    new_manifest,
    now,
    plain,
    resumed,
    save_manifest,
)
from streamgrad_lab.progress import Progress, silent


def expand(name: str) -> list[str]:
    """The experiments that a name on the command line stands for, in the report's order.

    Example:
      >>> expand("variance")
      ['variance']
    """
    return list(MODULES) if name == "all" else [find_experiment(name).name]


def reproduce(
    names: Sequence[str],
    preset: str,
    folder: Path,
    progress: Progress = silent,
    *,
    data: str | Path | None = None,
    resume: bool = False,
    checkpoints: bool = True,
    command: str = "",
    **changes: Any,
) -> Manifest:
    """Run experiments, and keep count of them in `folder/run.json`.

    Args:
      names: of the experiments.
      preset: "smoke", "laptop" or "paper".
      folder: where each gets a folder of its own. Must not exist, or be empty, unless the run is resumed.
      progress: called as `progress("experiment: setting", updates made, of how many, a few words)`.
      data: the folder of the MNIST files, or None.
      resume: go on with what the folder holds: experiments that are done are not run again. Experiments, and settings
        of one, may be added.
      checkpoints: whether experiments that train write any. Without, orbax is not needed, and a setting that was
        broken off cannot go on.
      command: for the record.
      **changes: fields of the configurations in place of the preset's; `settings` by their names. None for no change.

    Returns:
      The manifest. ValueError where the folder belongs to another run, or another process writes it.
    """
    try:
        with locked_folder(folder):
            sweep(folder)
            return _reproduce(names, preset, folder, progress, data, resume, checkpoints, command, changes)
    except OSError as error:
        if not isinstance(error, Unwritten) and error.errno not in FULL:
            raise
        found = error if isinstance(error, Unwritten) else Unwritten(error.filename or f"into {folder}", error)
        raise found.then("nothing is lost: once {once}, resume the run.") from error


def _reproduce(
    names: Sequence[str],
    preset: str,
    folder: Path,
    progress: Progress,
    data: str | Path | None,
    resume: bool,
    checkpoints: bool,
    command: str,
    changes: dict[str, Any],
) -> Manifest:
    """As `reproduce`, in a folder that is ours alone."""
    changes |= {} if checkpoints else {"checkpoints": False}
    configs = {name: _config(find_experiment(name), preset, changes) for name in names}
    manifest = new_manifest("experiments", {"preset": preset}, command=command, data=data, started=now())
    begun = resumed(folder, manifest, resume)
    if begun is not None:
        check_same(folder, begun.describe, manifest.describe)
        where = begun.device if begun.device.endswith(device()) else f"{begun.device}; then {device()}"
        # Data may have moved, or have been forgotten the first time; whether it is the right one its own check tells.
        manifest = dataclasses.replace(begun, device=where, notes=begun.notes | {"data": manifest.notes["data"]})
    elif any(path.name != LOCK for path in folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose another folder.")
    missing = {name: _add(folder, manifest, name, config) for name, config in configs.items()}
    for name, config in missing.items():
        if config is not None:
            _check_data(folder, manifest, find_experiment(name), config, None if data is None else Path(data))
    check_room(folder, 1 << 16)  # known before hours are spent
    save_manifest(folder, manifest)
    for name, config in missing.items():
        if config is not None:
            _run(manifest, folder, name, config, progress, resume, data)
    return manifest


def _check_data(folder: Path, manifest: Manifest, experiment: Experiment, config: Any, data: Path | None) -> None:
    """All that an experiment reads is there, and what it was before; ValueError if not."""
    if experiment.check is not None:
        experiment.check(config, data)
    now = experiment.data_hash(config, data) if experiment.data_hash is not None else ""
    if now:
        entry = manifest.experiments[experiment.name]
        check_same_data(folder, entry.setdefault("data_hash", now), now)


def _run(manifest: Manifest, folder: Path, name: str, config: Any, progress: Progress, resume: bool, data: Any) -> None:
    """Run one experiment, and write down how long it took, whatever becomes of it."""
    entry, inside, begun = manifest.experiments[name], folder / name, time.monotonic()
    inside.mkdir(exist_ok=True)

    def within(setting: str, made: int, total: int, words: str) -> None:
        progress(f"{name}: {setting}", made, total, words)

    def note() -> None:
        entry["seconds"] += time.monotonic() - begun
        save_manifest(folder, manifest)

    try:
        find_experiment(name).run(config, inside, within, resume=resume, data=None if data is None else Path(data))
    except BaseException:
        with contextlib.suppress(OSError):  # where the disk is full, the first error says more
            note()
        raise
    entry["done"] = True
    note()


def _config(experiment: Experiment, preset: str, changes: dict[str, Any]) -> Any:
    """The configuration of a preset with some fields changed."""
    if preset not in experiment.presets:
        choices = ", ".join(experiment.presets)
        raise ValueError(f"the experiment {experiment.name} has the presets {choices}, not {preset!r}.")
    config = experiment.presets[preset]
    fields = {field.name for field in dataclasses.fields(config)}
    # An experiment without checkpoints to choose writes none.
    changes = {k: v for k, v in changes.items() if v is not None and (k in fields or k != "checkpoints")}
    if unknown := set(changes) - fields:
        raise ValueError(f"the experiment {experiment.name} has no {', '.join(sorted(unknown))} to choose.")
    if "settings" in changes:
        known = {getattr(setting, "name", setting): setting for setting in config.settings}
        if wrong := [name for name in changes["settings"] if name not in known]:
            raise ValueError(f"settings must be among {', '.join(known)}, not {', '.join(wrong)}.")
        changes["settings"] = tuple(known[name] for name in known if name in changes["settings"])
    return dataclasses.replace(config, **changes)


def _add(folder: Path, manifest: Manifest, name: str, config: Any) -> Any:
    """Put an experiment into the manifest; returns the configuration of what is still to be run, or None."""
    asked = plain(dataclasses.asdict(config))
    entry = manifest.experiments.setdefault(name, {"config": asked, "seconds": 0.0, "done": False})
    before = entry["config"]
    known, wanted = before.get("settings", []), asked.get("settings", [])
    new = [setting for setting in wanted if setting not in known]
    if entry["done"] or all(setting in wanted for setting in known):  # settings may come one by one
        before = before | ({"settings": wanted} if wanted else {})
    check_same(folder, {name: before}, {name: asked})
    if entry["done"] and not new:
        return None
    if entry["done"]:
        chosen = zip(config.settings, wanted, strict=True)
        config = dataclasses.replace(config, settings=tuple(setting for setting, its in chosen if its in new))
    if new:
        entry["config"]["settings"] = known + new
    entry["done"] = False
    return config
