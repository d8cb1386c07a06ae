"""The grid search behind Appendix G: learning rate, momentum, decay and damping for the four settings of `variance`.

All hyperparameters are numbers in the training state, not constants of the program: a setting is compiled once, and a
whole group of grid points is trained at the same time. A point that is finished is written down and not run again.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from streamgrad._typing import Array, Float
from streamgrad.base import Model
from streamgrad.cells import lstm
from streamgrad.lab.experiments.base import Experiment, Progress, Section, Table
from streamgrad.lab.experiments.episodic import episodic_uoro
from streamgrad.lab.experiments.records import show
from streamgrad.lab.experiments.variance import SETTINGS, Setting, make_task
from streamgrad.lab.experiments.variance_report import LABELS
from streamgrad.lab.files import differences, plain, replace_text
from streamgrad.lab.tasks import Task
from streamgrad.lab.train.loop import TrainState, begin, training_step

POINTS, ABOUT = "points.csv", "tune.json"
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
      checkpoints: has no meaning here, since every finished point is one.
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
    checkpoints: bool = True
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
    shaped = setting.q0 == "ours"
    decays, dampings = (config.decays, config.dampings) if shaped else ((UNUSED,), (UNUSED,))
    return list(itertools.product(config.learning_rates, config.momenta, decays, dampings))


def run(
    config: Config, folder: Path, progress: Progress | None = None, resume: bool = False, data: Path | None = None
) -> None:
    """Train every grid point, and write `folder/points.csv`: one row per point, as soon as it is known.

    Args:
      config: one of `PRESETS`, or a variation.
      folder: of this experiment.
      progress: `progress(setting, points done, of how many, a few words)`.
      resume: leave out the points that are finished.
      data: the folder of the MNIST files.
    """
    folder = Path(folder)
    task = make_task(config.task, config.batch_size, data)
    model = Model(lstm(task.n_in, config.hidden), task.head)
    known = _open(config, folder, resume)
    for setting in config.settings:
        points = grid(config, setting)
        missing = [point for point in points if (setting.name, point) not in known]
        program = make_program(config, setting, model, task) if missing else None
        for group in _groups(missing, config.width):
            assert program is not None
            # Always as many, so that the last group is no program of its own.
            losses = program(jnp.array(group + group[-1:] * (config.width - len(group))), task.data)
            known |= {(setting.name, point): float(loss) for point, loss in zip(group, losses, strict=False)}
            _write(folder, known)
            if progress is not None:
                done = sum((setting.name, point) in known for point in points)
                best = min((known[setting.name, p] for p in points if (setting.name, p) in known), default=np.inf)
                progress(setting.name, done, len(points), f"lowest loss {best:.4g}")


def make_program(
    config: Config, setting: Setting, model: Model, task: Task
) -> Callable[[Float[Array, "W 4"], Any], Float[Array, " W"]]:
    """The compiled training of `width` grid points.

    Args:
      config: how long, how many trials.
      setting: Q_0 and α; its hyperparameters are not used.
      model: the model.
      task: the task.

    Returns:
      `program(points, task.data)`, the loss of each point over the end of training, mean over trials; infinite where a
      trial diverged.
    """
    estimator = episodic_uoro(model, config.batch_size, setting.q0, setting.alpha, root=config.root)
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.0, b1=0.0)
    step = training_step(task, estimator, optimizer)
    tail = max(1, int(config.updates * FINAL))

    def trial(point: Float[Array, " 4"], key: Array, data: Any) -> Float[Array, ""]:
        def one(ts: TrainState, _: None) -> tuple[TrainState, Array]:
            ts, row = step(data, ts)
            return ts, row["loss"]

        start = with_point(begin(model, task, estimator, optimizer, key), point)
        end, losses = jax.lax.scan(one, start, length=config.updates)
        return jnp.where(end.stopped < 0, jnp.mean(losses[-tail:]), jnp.inf)

    @jax.jit
    def program(points: Float[Array, "W 4"], data: Any) -> Float[Array, " W"]:
        keys = jax.vmap(jax.random.key)(jnp.arange(config.seed, config.seed + config.trials))
        by_trial = jax.vmap(trial, in_axes=(None, 0, None))
        return jnp.mean(jax.vmap(by_trial, in_axes=(0, None, None))(points, keys, data), axis=1)

    return program


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
    from streamgrad.lab.experiments import plots

    known = _read(Path(folder) / POINTS)
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
        shaped = setting.q0 == "ours"
        paper = (setting.learning_rate, setting.momentum, setting.decay, setting.damping)
        texts = [", ".join(f"{x:g}" for x in point[: 4 if shaped else 2]) for point in (best, paper)]
        rows.append([LABELS[setting.name], texts[0], show(mine[best]), show(max(mine.values())),
                     str(len(mine)), texts[1]])  # fmt: skip
    ax.set_xlabel("learning rate")
    ax.set_ylabel("loss, best of the other choices")
    plots.legend_below(fig, ax)
    header = ["setting", "best point", "its loss", "the worst's", "points", "the paper's"]
    text = (
        "Grid search over learning rate, momentum, and, where Q₀ is ours, decay and damping, in this order. The loss "
        "is that of the last tenth of the updates."
    )
    return [Section("Hyperparameters (Appendix G)", fig, text, [], Table(header, rows), [POINTS])]


def _groups(points: list[Point], width: int) -> Iterator[list[Point]]:
    for first in range(0, len(points), width):
        yield points[first : first + width]


def _open(config: Config, folder: Path, resume: bool) -> dict[tuple[str, Point], float]:
    """The points that are finished; the same search may go on with more of a grid, but not with another training."""
    about = folder / ABOUT
    free = ("settings", "learning_rates", "momenta", "decays", "dampings", "width", "checkpoints")
    now = plain({name: value for name, value in dataclasses.asdict(config).items() if name not in free})
    folder.mkdir(parents=True, exist_ok=True)
    if about.exists():
        if not resume:
            raise ValueError(f"the folder {folder} has a search already: choose another, or resume it.")
        different = differences(json.loads(about.read_text(encoding="utf-8")), now)
        if different:
            raise ValueError(f"the search in {folder} was begun with another configuration: {'; '.join(different)}.")
    replace_text(about, json.dumps(now, indent=2) + "\n")
    return _read(folder / POINTS)


def _read(path: Path) -> dict[tuple[str, Point], float]:
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    found = {}
    for line in lines:
        name, *numbers = line.split(",")
        rate, momentum, decay, damping, loss = map(float, numbers)
        found[name, (rate, momentum, decay, damping)] = loss
    return found


def _write(folder: Path, known: dict[tuple[str, Point], float]) -> None:
    lines = [",".join([name, *map(repr, point), repr(loss)]) for (name, point), loss in known.items()]
    replace_text(folder / POINTS, "\n".join([",".join(HEADER), *lines]) + "\n")


EXPERIMENT = Experiment(
    name="tune",
    figure="Appendix G: the hyperparameters of Figures 1 to 3, by grid search",
    presets=PRESETS,
    run=run,
    sections=sections,
)
