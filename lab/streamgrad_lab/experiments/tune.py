"""The grid search behind Appendix G: learning rate, momentum, decay and damping for the four settings of `variance`.

All hyperparameters are numbers in the training state, not constants of the program: a setting is compiled once, and
many points and seeds of the grid are trained at the same time. Then the best point and the paper's are trained again
with fresh seeds: the lowest of many noisy losses is too low. What is finished is written down and not run again.
"""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from streamgrad import Model
from streamgrad._typing import Array, Float
from streamgrad.cells import lstm
from streamgrad_lab.experiments.base import Experiment
from streamgrad_lab.experiments.episodic import episodic_uoro
from streamgrad_lab.experiments.tune_report import (
    AGAIN,
    HEADER,
    POINTS,
    UNUSED,
    Point,
    Training,
    best_point,
    is_shaped,
    paper_point,
    read_losses,
    sections,
)
from streamgrad_lab.experiments.variance import SETTINGS, Setting, make_task
from streamgrad_lab.progress import Progress, silent
from streamgrad_lab.tables import write_rows
from streamgrad_lab.tasks import Task
from streamgrad_lab.training import TrainState, begin, training_step
from streamgrad_lab.training import run as train_loop

Search = Callable[[list[tuple[Point, int]]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Config:
    """What is searched.

    Attributes:
      task: "mnist" or "digits".
      hidden: units of the LSTM.
      batch_size: episodes per update.
      updates: of each training.
      trials: seeds for each grid point.
      again: fresh seeds for the best point and for the paper's.
      width: how many trainings run at the same time.
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
    again: int
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
        "digits", 3, 4, updates=4, trials=2, again=2, width=4, learning_rates=(0.003, 0.005, 0.007), momenta=(0.5,),
        decays=(0.9,), dampings=(5e-3,), settings=(SETTINGS[0], SETTINGS[3]),
    ),
    "laptop": Config("digits", 24, 32, updates=500, trials=1, again=5, width=10),
    "paper": Config("mnist", 50, 50, updates=2000, trials=2, again=30, width=30, root="newton"),
}  # fmt: skip

# The end of training, over which a point's loss is averaged.
FINAL = 0.1


def grid(config: Config, setting: Setting) -> list[Point]:
    """The grid points of a setting, as the paper lists them; the identity has no decay and no damping."""
    decays, dampings = (config.decays, config.dampings) if is_shaped(setting) else ((UNUSED,), (UNUSED,))
    return list(itertools.product(config.learning_rates, config.momenta, decays, dampings))


def run(
    config: Config, folder: Path, progress: Progress = silent, resume: bool = False, data: Path | None = None
) -> None:
    """Train every grid point, and the chosen ones again; write `points.csv` and `again.csv`, a row per training.

    Args:
      config: one of `PRESETS`, or a variation.
      folder: of this experiment.
      progress: `progress(setting, trainings done, of how many, a few words)`.
      resume: leave out the trainings that are finished.
      data: the folder of the MNIST files.
    """
    task = make_task(config.task, config.batch_size, data)
    model = Model(lstm(task.n_in, config.hidden), task.head)
    searched, again = (Path(folder) / file for file in (POINTS, AGAIN))
    if not resume:
        for path in (searched, again):
            path.unlink(missing_ok=True)
    fresh = config.seed + config.trials
    for setting in config.settings:
        search = make_search(config, setting, model, task)
        wanted = list(itertools.product(grid(config, setting), range(config.seed, fresh)))
        known = _train(searched, setting.name, wanted, search, config.width, progress)
        chosen = dict.fromkeys([best_point(known, setting.name), paper_point(setting)])
        wanted = list(itertools.product(chosen, range(fresh, fresh + config.again)))
        _train(again, setting.name, wanted, search, config.width, progress)


def _train(
    path: Path, setting: str, wanted: list[tuple[Point, int]], search: Search, width: int, progress: Progress
) -> dict[Training, float]:
    """Train with these points and seeds, but for those that the file has; returns all that it has then."""
    known = read_losses(path)
    missing = [(point, seed) for point, seed in wanted if (setting, point, seed) not in known]
    for start in range(0, len(missing), width):
        group = missing[start : start + width]
        known |= {(setting, *one): float(loss) for one, loss in zip(group, search(group), strict=True)}
        rows = [(name, *point, seed, loss) for (name, point, seed), loss in known.items()]
        write_rows(path, [dict(zip(HEADER, row, strict=True)) for row in rows])
        mine = [known[setting, *one] for one in wanted if (setting, *one) in known]
        progress(f"{setting}, {path.stem}", len(mine), len(wanted), f"lowest loss {min(mine):.4g}")
    return known


def make_search(config: Config, setting: Setting, model: Model, task: Task) -> Search:
    """Up to `width` trainings at once, compiled when it is first called.

    Args:
      config: how long, how many at once.
      setting: Q_0 and α; its hyperparameters are not used.
      model: the model.
      task: the task.

    Returns:
      `losses([(point, seed), ...])`, the loss of each over the end of training; infinite where it diverged.
    """
    estimator = episodic_uoro(model, config.batch_size, setting.q0, setting.alpha, root=config.root)
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.0, b1=0.0)
    step = training_step(task, estimator, optimizer)
    tail = max(1, int(config.updates * FINAL))

    @jax.jit
    @jax.vmap
    def start(point: Float[Array, " 4"], seed: Array) -> TrainState:
        return with_point(begin(model, task, estimator, optimizer, jax.random.key(seed)), point)

    def losses(trainings: list[tuple[Point, int]]) -> np.ndarray:
        # Always as many: the last group must not be a program of its own.
        points, seeds = zip(*trainings, *[trainings[-1]] * (config.width - len(trainings)), strict=True)
        ts = start(jnp.asarray(points), jnp.asarray(seeds))
        *_, (ts, rows) = train_loop(step, task.data, ts, config.updates, config.updates)
        ends = np.where(np.asarray(ts.stopped) < 0, rows["loss"][:, -tail:].mean(axis=1), np.inf)
        return ends[: len(trainings)]

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


EXPERIMENT = Experiment(
    name="tune",
    figure="Appendix G: the hyperparameters of Figures 1 to 3, by grid search",
    presets=PRESETS,
    run=run,
    sections=sections,
)
