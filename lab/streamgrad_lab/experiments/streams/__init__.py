"""Streams that learn: tasks where credit must reach further back than the chunk, and tasks where it need not.

| part | question |
|---|---|
| recall | the bit of D steps ago, by chunks of K: which methods learn it where D >= K? |
| series | chaotic series, an update at every step: our numbers beside published ones |
| text | the next character, updates every 1, 4, 16 steps: loss against steps and seconds |
| copy | a curriculum: which length is copied after so many characters? |
| agent | a T-maze, online actor-critic: does the agent remember the cue? |

Each part has its configuration and its page in a file of its own. `--settings recall series` runs some of them.
"""

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

from streamgrad_lab.experiments.base import Experiment, Section
from streamgrad_lab.experiments.streams import agent, copying, recall, series, text
from streamgrad_lab.progress import Progress, silent

PARTS: dict[str, ModuleType] = {"recall": recall, "series": series, "text": text, "copy": copying, "agent": agent}

# What people would choose from, where every method on every task would be too much to read.
FEW = ("rtrl", "ok(8)", "uoro", "uoro_across", "snap(1)", "bptt", "immediate")
LAPTOP = tuple(name for name in FEW if name != "uoro")
TEXT = (
    "rtrl",
    "ok(8)",
    "uoro_across",
    "uoro_across, shrunk",
    "snap(1) inside chunks",
    "bptt",
    "immediate",
)
AGENT = ("rtrl", "ok(8)", "uoro", "snap(1)", "windowed_bptt(5)", "windowed_bptt(25)", "immediate")
# Every estimator of the registry; `series.SAME` says which two are left out, as they are another one there.
ALL = (
    "rtrl", "ok(8)", "preuoro", "uoro", "uoro, 64 groups", "spatial_rtrl", "nobacktrack", "reinforce", "artbp(16)",
    "snap(1)", "sketch(4)", "eprop", "rflo", "dni", "windowed_bptt(25)", "immediate",
)  # fmt: skip


SOME = ("rtrl", "ok(8)", "preuoro", "uoro", "snap(1)", "rflo", "windowed_bptt(25)", "immediate")


@dataclasses.dataclass(frozen=True)
class Config:
    """What is run.

    Attributes:
      settings: the parts.
      seed: of the first trial of each.
    """

    settings: tuple[Any, ...]
    seed: int = 0


PRESETS = {
    "smoke": Config(
        (
            recall.Recall((1, 3), (1, 2), ("rtrl", "bptt"), "gru", 3, 2, steps=16, rates=(1e-2,), seeds=2, points=4),
            series.Series(("henon", "lorenz"), ("rtrl", "immediate"), "vanilla", 3, 2, 500, 50, (1e-3, 1e-2), 2),
            text.Text((2,), ("rtrl", "bptt"), "gru", 3, 2, steps=16, rates=(1e-2,), seeds=2, points=4),
            copying.Copying(("rtrl", "bptt"), "gru", 3, 2, 2, steps=16, rates=(1e-2,), seeds=2, points=4),
            agent.Agent((2,), ("vanilla",), ("rtrl", "immediate"), 3, 2, steps=40, rates=(1e-2,), seeds=2, points=4),
        )
    ),
    "laptop": Config(
        (
            recall.Recall((2, 4, 8), (2, 4), LAPTOP, "gru", 16, 8, steps=12_000, rates=(4e-3,), seeds=3),
            series.Series(tuple(series.KINDS), SOME, "vanilla", 16, 4, 5000, 200, (1e-3, 3e-3), 3),
            text.Text((8,), TEXT, "gru", 24, 8, steps=12_000, rates=(3e-3,), seeds=3),
            copying.Copying(LAPTOP, "gru", 16, 8, 4, steps=20_000, rates=(3e-3,), seeds=3),
            agent.Agent((10,), ("vanilla",), AGENT, 16, 8, steps=30_000, rates=(1e-3,), seeds=3),
        )
    ),
    "paper": Config(
        (
            recall.Recall((2, 4, 8, 12, 16), (2, 4, 8), FEW, "gru", 32, 16, 120_000, (1e-3, 2e-3, 4e-3), 4),
            series.Series(tuple(series.KINDS), ALL, "vanilla", 64, 8, 15_000, 200, (3e-4, 1e-3, 3e-3), 10),
            text.Text(
                (1, 4, 16), (*TEXT, "windowed_bptt(16)"), "gru", 64, 16, 24_000, (1e-3, 3e-3, 1e-2), 4, source="file"
            ),
            copying.Copying(FEW, "gru", 64, 16, 4, 60_000, (3e-4, 1e-3, 3e-3), 4),
            agent.Agent((10, 20, 40), ("vanilla", "gru", "rtu"), AGENT, 32, 16, 60_000, (5e-4, 1e-3, 2e-3), 5),
        )
    ),
}


def check(config: Config, data: Path | None) -> None:
    """What the parts need is there, which must be known before hours are spent on the first."""
    for part in config.settings:
        if hasattr(PARTS[part.name], "check"):
            PARTS[part.name].check(part, data)


def data_hash(config: Config, data: Path | None) -> str:
    """That of the text, if it is among the parts; the others make their own data."""
    parts = [part for part in config.settings if part.name == text.Text.name]
    return text.data_hash(parts[0], data) if parts else ""


def run(
    config: Config, folder: Path, progress: Progress = silent, resume: bool = False, data: Path | None = None
) -> None:
    """Train all of every part, and write a file for each case of it.

    Args:
      config: one of `PRESETS`, or a variation.
      folder: of this experiment.
      progress: `progress(case, updates made, of how many, a few words)`.
      resume: a case whose file is there is done.
      data: the folder with `tinyshakespeare.txt`, for the preset "paper".
    """
    check(config, data)
    for part in config.settings:
        PARTS[part.name].train(part, Path(folder) / part.name, progress, resume, config.seed, data)


def sections(folder: Path) -> list[Section]:
    """The page of each part that was run."""
    found = [PARTS[name].section(Path(folder) / name) for name in PARTS]
    made = [section for section in found if section is not None]
    if not made:
        raise ValueError(f"{folder} has no results of any of {', '.join(PARTS)}.")
    return made


EXPERIMENT = Experiment(
    name="streams",
    figure="Beyond the paper: streams that learn, and published numbers beside ours",
    presets=PRESETS,
    run=run,
    sections=sections,
    check=check,
    data_hash=data_hash,
)
