"""Figure 4 of the paper: RTRL with its spatial and temporal approximations put in one at a time (Section 8).

| setting | estimator | what is noisy |
|---|---|---|
| neither | RTRL | nothing |
| spatial | RTRL, immediate Jacobian projected | space |
| temporal | PreUORO | time |
| both | UORO | space and time |
| groups-G | UORO in G groups | both; space about G times less. Not in the paper |

An LSTM repeats a random bit stream with a delay of 4. The parameters are updated after every single step of the stream,
which never ends. Learning rates are the paper's; the groups have that of UORO.
"""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import optax

from streamgrad import GradientEstimator, Model, batched, preuoro, rtrl, spatial_rtrl, uoro
from streamgrad.cells import lstm
from streamgrad_lab.experiments import plots
from streamgrad_lab.experiments.base import Claim, Experiment, Section, Table
from streamgrad_lab.experiments.evidence import judge, log_ratio, show_ratio
from streamgrad_lab.experiments.records import Record, finite_trials, read_settings, show_interval
from streamgrad_lab.experiments.variance import plan_of, train_one
from streamgrad_lab.progress import Progress, silent
from streamgrad_lab.tasks import find_task


@dataclasses.dataclass(frozen=True)
class Setting:
    """One variation of RTRL.

    Attributes:
      estimator: "rtrl", "spatial_rtrl", "preuoro" or "uoro".
      learning_rate: Adam's.
      groups: of `uoro`.
    """

    estimator: str
    learning_rate: float
    groups: int = 1


SETTINGS = {
    "neither": Setting("rtrl", 0.008),
    "spatial": Setting("spatial_rtrl", 0.008),
    "temporal": Setting("preuoro", 0.0008),
    "both": Setting("uoro", 0.002),
    "groups-4": Setting("uoro", 0.002, groups=4),
    "groups-20": Setting("uoro", 0.002, groups=20),
}

LABELS = {
    "neither": "neither (RTRL)",
    "spatial": "spatial",
    "temporal": "temporal (PreUORO)",
    "both": "both (UORO)",
    "groups-4": "UORO, 4 groups",
    "groups-20": "UORO, 20 groups",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What is run.

    Attributes:
      hidden: units of the LSTM; 4 times as many preactivations, which the numbers of groups must divide.
      delay: of the output.
      batch_size: streams.
      updates: of the parameters, one after every step; the paper does not say how many.
      every: updates averaged in one row.
      updates_per_call: between two checkpoints.
      trials: seeds, all at once.
      seed: of the first trial.
      momentum: Adam's b1.
      checkpoints: whether to write them; a run without cannot be resumed.
      settings: the names of those that are compared.
    """

    hidden: int
    delay: int
    batch_size: int
    updates: int
    every: int
    updates_per_call: int
    trials: int
    seed: int = 0
    momentum: float = 0.5
    checkpoints: bool = True
    settings: tuple[str, ...] = tuple(SETTINGS)


PRESETS = {
    "smoke": Config(hidden=5, delay=2, batch_size=4, updates=8, every=2, updates_per_call=4, trials=2),
    "laptop": Config(hidden=10, delay=4, batch_size=20, updates=8000, every=50, updates_per_call=1000, trials=3),
    "paper": Config(hidden=50, delay=4, batch_size=100, updates=10_000, every=100, updates_per_call=1000, trials=10),
}

# The end of training, over which final losses are averaged.
FINAL = 0.1

_ESTIMATORS: dict[str, Callable[[Model, Setting], GradientEstimator]] = {
    "rtrl": lambda model, setting: rtrl(model),
    "spatial_rtrl": lambda model, setting: spatial_rtrl(model, noise="gaussian"),
    "preuoro": lambda model, setting: preuoro(model, noise="gaussian"),
    "uoro": lambda model, setting: uoro(model, noise="gaussian", groups=setting.groups),
}


def run(
    config: Config, folder: Path, progress: Progress = silent, resume: bool = False, data: Path | None = None
) -> None:
    """Train every setting, and write `folder/<setting>/metrics.csv`.

    Args:
      config: one of `PRESETS`, or a variation.
      folder: of this experiment.
      progress: `progress(setting, updates made, of how many, a few words)`.
      resume: go on with a run that was broken off.
      data: needs none.
    """
    del data
    task = find_task("queue", delay=config.delay, batch_size=config.batch_size, length=1)
    model = Model(lstm(task.n_in, config.hidden), task.head)
    for name in config.settings:
        setting = SETTINGS[name]
        estimator = batched(_ESTIMATORS[setting.estimator](model, setting), config.batch_size)
        described = {key: getattr(config, key) for key in ("hidden", "delay", "batch_size", "momentum")}
        train_one(
            Path(folder) / name,
            plan_of(config),
            (model, task, estimator, optax.adam(setting.learning_rate, b1=config.momentum)),
            name,
            progress,
            resume=resume,
            describe={"experiment": "ablation", "config": described, "setting": vars(setting)},
        )


def sections(folder: Path) -> list[Section]:
    """The training curves, and what of the paper's claims they bear out."""
    records = read_settings(folder, list(SETTINGS))
    fig, axes = plots.figure(height=4.0)
    ax = axes[0, 0]
    for name, record in records.items():
        index = list(SETTINGS).index(name)
        plots.draw_curve(ax, record, "loss", LABELS[name], index, plots.filter_width(record, 0.03))
    ax.set_xlabel("update, one per step of the stream")
    ax.set_ylabel("loss per bit, nats")
    ax.set_ylim(bottom=0)
    plots.legend_below(fig, ax)
    rows = [
        [LABELS[name], f"{SETTINGS[name].learning_rate:g}", show_interval(_final(record)), str(len(_final(record)))]
        for name, record in records.items()
    ]
    text = (
        "An LSTM learns to repeat a random bit stream with a delay, one update per step, from the exact gradient "
        "(neither), with noise in space alone, in time alone, or in both; and with UORO's preactivations split into "
        "groups, which lies between temporal and both. Mean over trials and the 95% interval of the mean. "
        "Guessing costs log 2 = 0.693."
    )
    table = Table(["setting", "learning rate", "loss, last tenth", "trials"], rows)
    files = [f"{name}/metrics.csv" for name in records]
    return [Section("Ablation on the queue task (Figure 4)", fig, text, all_claims(Path(folder)), table, files)]


def all_claims(folder: Path) -> list[Claim]:
    """Every claim of this experiment: the paper's two, then ours on groups."""
    final = {name: _final(record) for name, record in read_settings(folder, list(SETTINGS)).items()}

    def claim(text: str, below: list[tuple[str, str]], reason: str) -> Claim:
        """Of every pair in `below` the first must have the lower loss."""
        names = list(dict.fromkeys(itertools.chain(*below)))
        numbers = "; ".join(f"{LABELS[name]}: {show_interval(final[name])}" for name in names if name in final)
        detail = f"Loss over the last tenth of the updates, mean over trials and its 95% interval: {numbers}."
        if not all(name in final for name in names):
            return judge(text, None, detail)
        logs = {pair: log_ratio(final[pair[1]], final[pair[0]]) for pair in below}
        ratios = "; ".join(f"{LABELS[high]} over {LABELS[low]}: {show_ratio(x)}" for (low, high), x in logs.items())
        return judge(text, logs.values(), f"{detail} Ratios of geometric means: {ratios}.", reason)

    return [
        claim(
            "The exact gradient (RTRL) ends with the lowest loss.",
            [("neither", name) for name in SETTINGS if name != "neither"],
            "Training may not have come far enough to tell the settings apart.",
        ),
        claim(
            "PreUORO (temporal) ends below UORO (both).",
            [("temporal", "both")],
            "Training may not have come far enough: PreUORO's learning rate is the lower one.",
        ),
        claim(
            "Groups help: the more of them, the lower UORO's loss (ours, not in the paper).",
            [("groups-20", "groups-4"), ("groups-4", "both")],
            "Their learning rate is that of UORO, not their own best.",
        ),
    ]


def _final(record: Record) -> np.ndarray:
    complete = Record(record.update, {"loss": finite_trials(record, "loss")})
    return complete.late("loss", FINAL)


EXPERIMENT = Experiment(
    name="ablation",
    figure="Figure 4: RTRL, its spatial and temporal approximations, and both, on the queue task",
    presets=PRESETS,
    run=run,
    sections=sections,
)
