"""Run experiments into a folder, one after the other, so that a run which was stopped can go on."""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamgrad.lab.experiments import MODULES, find_experiment
from streamgrad.lab.experiments.base import Experiment, Progress
from streamgrad.lab.report.run import FILE, Run, device, load_run, new_run, save_run

PRESETS = ("smoke", "laptop", "paper")


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
    progress: Progress,
    *,
    data: str | None = None,
    resume: bool = False,
    seed: int | None = None,
    command: str = "",
) -> Run:
    """Run experiments, and keep count of them in `folder/run.json`.

    Args:
      names: of the experiments.
      preset: "smoke", "laptop" or "paper".
      folder: where each gets a folder of its own. Must not exist, or be empty, unless the run is resumed.
      progress: called as `progress("experiment: setting", updates made, of how many, a few words)`.
      data: the folder of the MNIST files, or None.
      resume: go on with what the folder holds: experiments that are done are not run again.
      seed: in place of that of the configurations.
      command: for the record.

    Returns:
      The record. ValueError where the folder belongs to another run.
    """
    experiments = [find_experiment(name) for name in names]
    configs = {experiment.name: _config(experiment, preset, seed) for experiment in experiments}
    run = _open(folder, preset, command, seed, data, resume)
    for name, config in configs.items():
        entry = run.experiments.get(name)
        if entry is not None:
            _check_same(folder, name, entry["config"], _plain(config))
        else:
            run.experiments[name] = {"config": _plain(config), "seconds": 0.0, "done": False}
    save_run(folder, run)  # now, so that a folder that cannot be written is known before hours are spent
    for experiment in experiments:
        entry = run.experiments[experiment.name]
        if entry["done"]:
            continue
        inside = folder / experiment.name
        inside.mkdir(exist_ok=True)
        begun = time.monotonic()

        def within(setting: str, made: int, total: int, words: str, name: str = experiment.name) -> None:
            progress(f"{name}: {setting}", made, total, words)

        try:
            experiment.run(
                configs[experiment.name], inside, within, resume=resume, data=None if data is None else Path(data)
            )
            entry["done"] = True
        finally:
            entry["seconds"] += time.monotonic() - begun
            save_run(folder, run)
    return run


def check_run(folder: Path, preset: str) -> None:
    """A folder that has a run already has one of the same preset; ValueError if not."""
    if (folder / FILE).exists():
        _check_preset(folder, load_run(folder), preset)


def record(
    folder: Path,
    experiment: Experiment,
    preset: str,
    config: Any,
    seconds: float,
    command: str,
    data: str | None = None,
) -> None:
    """Write down in `folder/run.json` an experiment that was run by itself, so that `streamgrad report` can read it.

    Args:
      folder: the run's, in which the experiment has a folder of its own.
      experiment: the experiment.
      preset: the preset that its configuration comes from.
      config: the configuration.
      seconds: how long it took.
      command: the command line.
      data: the folder of the data, or None.
    """
    run = load_run(folder) if (folder / FILE).exists() else new_run(preset, command, None, data)
    _check_preset(folder, run, preset)
    run.experiments[experiment.name] = {"config": _plain(config), "seconds": seconds, "done": True}
    save_run(folder, run)


def _config(experiment: Experiment, preset: str, seed: int | None) -> Any:
    if preset not in experiment.presets:
        choices = ", ".join(experiment.presets)
        raise ValueError(f"the experiment {experiment.name} has the presets {choices}, not {preset!r}.")
    config = experiment.presets[preset]
    if seed is None:
        return config
    if "seed" not in {field.name for field in dataclasses.fields(config)}:
        raise ValueError(f"the configuration of {experiment.name} has no seed to replace.")
    return dataclasses.replace(config, seed=seed)


def _open(folder: Path, preset: str, command: str, seed: int | None, data: str | None, resume: bool) -> Run:
    used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if not used:
        folder.mkdir(parents=True, exist_ok=True)
        return new_run(preset, command, seed, data)
    if not resume:
        raise ValueError(f"{folder} is not empty: name another folder with --out, or go on with --resume.")
    run = load_run(folder)
    _check_preset(folder, run, preset)
    # Data may have moved, or have been forgotten the first time; whether it is the right one its own check tells.
    run = dataclasses.replace(run, data=data)
    here = device()
    return run if run.device.endswith(here) else dataclasses.replace(run, device=f"{run.device}; then {here}")


def _check_preset(folder: Path, run: Run, preset: str) -> None:
    if run.preset != preset:
        raise ValueError(
            f"{folder / FILE}: the run was begun with preset {run.preset}, not {preset}: use another --out."
        )


def _check_same(folder: Path, name: str, begun: dict[str, Any], asked: dict[str, Any]) -> None:
    for field in sorted({*begun, *asked}):
        if begun.get(field) != asked.get(field):
            raise ValueError(
                f"{folder / FILE}: {name} was begun with {field} = {begun.get(field)}, not {asked.get(field)}: "
                "use another --out."
            )


def _plain(config: Any) -> dict[str, Any]:
    """A configuration as JSON gives it back: lists for tuples."""
    return json.loads(json.dumps(dataclasses.asdict(config)))
