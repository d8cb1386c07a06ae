"""The grid search behind Appendix G: learning rate, momentum, decay and damping for the four settings of `variance`.

All hyperparameters are numbers in the training state, not constants of the program: a setting is compiled once, and a
whole group of grid points is trained at the same time. A point that is finished is written down and not run again.
"""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from streamgrad._typing import Array, Float
from streamgrad.base import Model
from streamgrad.cells import lstm
from streamgrad.lab.experiments import plots
from streamgrad.lab.experiments.base import Experiment, Section, Table
from streamgrad.lab.experiments.episodic import episodic_uoro
from streamgrad.lab.experiments.records import show
from streamgrad.lab.experiments.variance import SETTINGS, Setting, make_task
from streamgrad.lab.experiments.variance_report import LABELS
from streamgrad.lab.progress import Progress, silent
from streamgrad.lab.tables import read_rows, write_rows
from streamgrad.lab.tasks import Task
from streamgrad.lab.training import TrainState, begin, training_step
from streamgrad.lab.training import run as train_loop

POINTS = "points.csv"
HEADER = ("setting", "learning_rate", "momentum", "decay", "damping", "loss")
UNUSED = 0.5  # stands for decay and damping where there is no B̄

Point = tuple[float, float, float, float]  # learning rate, momentum, decay, damping


@dataclasses.dataclass(frozen=True)
class Config:
    """What is searched.

    Attributes:
      task: "mnist" or "digits".
      hidden: units of the LSTM.
      batch_size: episodes per update.
      updates: for each grid point.
      trials: seeds for each.
      width: how many grid points are trained at the same time.
      learning_rates: the paper's grid, like the next three.
      momenta: Adam's b1.
      decays: of B̄.
      dampings: of Q_0.
      seed: of the first trial.
      root: see `damped_q0`.
      settings: whose Q_0 and α are searched for.
    """

    task: str
    hidden: int
    batch_size: int
    updates: int
    trials: int
    width: int
    learning_rates: tuple[float, ...] = (0.001, 0.003, 0.005, 0.007, 0.009)
    momenta: tuple[float, ...] = (0.5, 0.8)
    decays: tuple[float, ...] = (0.8, 0.9, 0.95)
    dampings: tuple[float, ...] = (5e-3, 5e-4, 5e-5)
    seed: int = 0
    root: str = "eigh"
    settings: tuple[Setting, ...] = SETTINGS


PRESETS = {
    "smoke": Config(
        "digits", 3, 4, updates=4, trials=2, width=2, learning_rates=(0.003, 0.005, 0.007), momenta=(0.5,),
        decays=(0.9,), dampings=(5e-3,), settings=(SETTINGS[0], SETTINGS[3]),
    ),
    "laptop": Config("digits", 24, 32, updates=500, trials=1, width=10),
    "paper": Config("mnist", 50, 50, updates=2000, trials=1, width=10, root="newton"),
}  # fmt: skip

# The end of training, over which a point's loss is averaged.
FINAL = 0.1


def grid(config: Config, setting: Setting) -> list[Point]:
    """The grid points of a setting, as the paper lists them; the identity has no decay and no damping."""
    shaped = setting.q0 == "optimal"
    decays, dampings = (config.decays, config.dampings) if shaped else ((UNUSED,), (UNUSED,))
    return list(itertools.product(config.learning_rates, config.momenta, decays, dampings))


def run(
    config: Config, folder: Path, progress: Progress = silent, resume: bool = False, data: Path | None = None
) -> None:
    """Train every grid point, and write `folder/points.csv`: one row per point, as soon as it is known.

    Args:
      config: one of `PRESETS`, or a variation.
      folder: of this experiment.
      progress: `progress(setting, points done, of how many, a few words)`.
      resume: leave out the points that are finished.
      data: the folder of the MNIST files.
    """
    path = Path(folder) / POINTS
    task = make_task(config.task, config.batch_size, data)
    model = Model(lstm(task.n_in, config.hidden), task.head)
    known = read_points(path) if resume else {}
    for setting in config.settings:
        points = grid(config, setting)
        missing = [point for point in points if (setting.name, point) not in known]
        losses_of = make_search(config, setting, model, task)
        for first in range(0, len(missing), config.width):
            group = missing[first : first + config.width]
            known |= {(setting.name, p): float(x) for p, x in zip(group, losses_of(group), strict=True)}
            write_rows(path, [dict(zip(HEADER, (name, *p, loss), strict=True)) for (name, p), loss in known.items()])
            mine = [known[setting.name, p] for p in points if (setting.name, p) in known]
            progress(setting.name, len(mine), len(points), f"lowest loss {min(mine):.4g}")


def make_search(config: Config, setting: Setting, model: Model, task: Task) -> Callable[[list[Point]], np.ndarray]:
    """The training of up to `width` grid points at once, compiled when it is first called.

    Args:
      config: how long, how many trials.
      setting: Q_0 and α; its hyperparameters are not used.
      model: the model.
      task: the task.

    Returns:
      `losses(points)`, the loss of each point over the end of training, mean over trials; infinite where a trial
      diverged.
    """
    estimator = episodic_uoro(model, config.batch_size, setting.q0, setting.alpha, root=config.root)
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.0, b1=0.0)
    step = training_step(task, estimator, optimizer)
    tail = max(1, int(config.updates * FINAL))

    @jax.jit
    @jax.vmap
    def start(point: Float[Array, " 4"], seed: Array) -> TrainState:
        return with_point(begin(model, task, estimator, optimizer, jax.random.key(seed)), point)

    def losses(points: list[Point]) -> np.ndarray:
        # Always as many: the last group must not be a program of its own.
        group = np.array(points + points[-1:] * (config.width - len(points)))
        seeds = np.arange(config.seed, config.seed + config.trials)
        ts = start(jnp.asarray(np.repeat(group, len(seeds), axis=0)), jnp.asarray(np.tile(seeds, len(group))))
        *_, (ts, rows) = train_loop(step, task.data, ts, config.updates, config.updates)
        ends = np.where(np.asarray(ts.stopped) < 0, rows["loss"][:, -tail:].mean(axis=1), np.inf)
        return ends.reshape(len(group), len(seeds)).mean(axis=1)[: len(points)]

    return losses


def with_point(ts: TrainState, point: Float[Array, " 4"]) -> TrainState:
    """A training state with the hyperparameters of a grid point in it."""
    values = dict(zip(("learning_rate", "b1", "decay", "damping"), point, strict=True))
    before = ts.optimizer.hyperparams
    now = {name: values[name].astype(jnp.result_type(before[name])) for name in ("learning_rate", "b1")}
    optimizer = ts.optimizer._replace(hyperparams=before | now)
    shared = ts.estimator.shared
    changed = {name: values[name].astype(getattr(shared, name).dtype) for name in ("decay", "damping")}
    return ts._replace(optimizer=optimizer, estimator=ts.estimator._replace(shared=shared._replace(**changed)))


def sections(folder: Path) -> list[Section]:
    """The best point of every setting beside the paper's, and how the loss depends on the learning rate."""
    known = read_points(Path(folder) / POINTS)
    if not known:
        raise ValueError(f"{folder} has no grid points yet.")
    fig, axes = plots.figure()
    ax = axes[0, 0]
    rows = []
    for index, setting in enumerate(SETTINGS):
        mine = {point: loss for (name, point), loss in known.items() if name == setting.name}
        if not mine:
            continue
        best = min(mine, key=mine.__getitem__)
        rates = sorted({point[0] for point in mine})
        lowest = [min(loss for point, loss in mine.items() if point[0] == rate) for rate in rates]
        ax.plot(rates, lowest, color=plots.COLOURS[index], linestyle=plots.STYLES[index], marker="o",
                label=LABELS[setting.name])  # fmt: skip
        shaped = setting.q0 == "optimal"
        paper = (setting.learning_rate, setting.momentum, setting.decay, setting.damping)
        texts = [", ".join(f"{x:g}" for x in point[: 4 if shaped else 2]) for point in (best, paper)]
        rows.append([LABELS[setting.name], texts[0], show(mine[best]), show(max(mine.values())),
                     str(len(mine)), texts[1]])  # fmt: skip
    ax.set_xlabel("learning rate")
    ax.set_ylabel("loss, best of the other choices")
    plots.legend_below(fig, ax)
    header = ["setting", "best point", "its loss", "the worst's", "points", "the paper's"]
    text = (
        "Grid search over learning rate, momentum, and, where Q₀ is optimal, decay and damping, in this order. The "
        "loss is that of the last tenth of the updates."
    )
    return [Section("Hyperparameters (Appendix G)", fig, text, [], Table(header, rows), [POINTS])]


def read_points(path: Path) -> dict[tuple[str, Point], float]:
    """The loss of every finished point, by its setting and its hyperparameters; none where there is no file."""
    rows = [[row[name] for name in HEADER] for row in read_rows(path)] if path.exists() else []
    return {(name, (rate, momentum, decay, damping)): loss for name, rate, momentum, decay, damping, loss in rows}


EXPERIMENT = Experiment(
    name="tune",
    figure="Appendix G: the hyperparameters of Figures 1 to 3, by grid search",
    presets=PRESETS,
    run=run,
    sections=sections,
)
