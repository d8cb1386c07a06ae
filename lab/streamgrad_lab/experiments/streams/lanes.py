"""Many trainings at once: a lane is one setting, one learning rate and one seed, and all lanes are one program.

Learning rates are tuned alike: every method is trained with all rates of the grid on all seeds, and stands with the
rate whose final number, averaged over the seeds, is best. The grid is in the files, the winner in the tables.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from streamgrad import GradientEstimator, Model, cells
from streamgrad._typing import Array, PyTree
from streamgrad_lab.experiments.streams.methods import for_streams
from streamgrad_lab.progress import COMPILING, Show
from streamgrad_lab.tasks.base import Task
from streamgrad_lab.training.loop import Averages, TrainState, begin, calls, training_step


class Lane(NamedTuple):
    """One training.

    Attributes:
      setting: which of a part's settings, such as delays or series, by its place among them.
      rate: learning rate.
      seed: of weights, data and noise.
    """

    setting: int
    rate: float
    seed: int


def all_lanes(settings: int, rates: Sequence[float], seeds: Sequence[int]) -> list[Lane]:
    """Every setting with every rate and every seed."""
    return [Lane(*each) for each in itertools.product(range(settings), rates, seeds)]


def make_optimizer(clip: float | None = 1.0) -> optax.GradientTransformationExtraArgs:
    """Adam, after clipping the gradient's norm; the learning rate is a number in its state."""

    def made(learning_rate: Any) -> optax.GradientTransformation:
        adam = optax.adam(learning_rate)
        return adam if clip is None else optax.chain(optax.clip_by_global_norm(clip), adam)

    return optax.inject_hyperparams(made)(learning_rate=0.0)


def parts_of(method: str, part: Any, task: Task) -> tuple[Model, Task, GradientEstimator]:
    """The first arguments of `train_lanes`: the network of a part of the experiment, its task, and the method."""
    model = Model(getattr(cells, part.cell)(task.n_in, part.hidden), task.head)
    return model, task, for_streams(method, model, part.streams)


def train_lanes(
    model: Model,
    task: Task,
    estimator: GradientEstimator,
    lanes: Sequence[Lane],
    updates: int,
    points: int,
    place: Callable[[PyTree, Array, Array], PyTree] | None = None,
    clip: float | None = 1.0,
    show: Show = lambda made, total, words: None,
) -> list[dict[str, Any]]:
    """Train all lanes at once.

    Args:
      model: the model.
      task: gives the chunks.
      estimator: for all streams of the task.
      lanes: what is trained.
      updates: of each.
      points: how many rows each lane gets; each is the mean over its share of the updates.
      place: `place(task state, setting, seed)`, the state of the streams in that setting; None where there is but one.
      clip: the gradient's norm is cut to it; None for no limit.
      show: told how many updates are made, of how many.

    Returns:
      Rows with `setting`, `rate`, `seed`, `update`, `steps` (of the stream), `seconds` (of all lanes together, without
      compilation), `loss` and what the task records. The loss of a lane that has diverged is NaN from there on.
    """
    optimizer = make_optimizer(clip)
    step = training_step(task, estimator, optimizer)
    points = min(points, updates)
    every = updates // points

    @jax.jit
    @jax.vmap
    def start(setting: Array, rate: Array, seed: Array) -> TrainState:
        ts = begin(model, task, estimator, optimizer, jax.random.key(seed))
        known = ts.optimizer.hyperparams
        optimizer_state = ts.optimizer._replace(
            hyperparams=known | {"learning_rate": rate.astype(jnp.result_type(known["learning_rate"]))}
        )
        where = ts.task if place is None else place(ts.task, setting, seed)
        return ts._replace(optimizer=optimizer_state, task=where)

    show(0, every * points, COMPILING)
    ts = start(*(jnp.asarray(column) for column in zip(*lanes, strict=True)))
    made = calls(step, task.data, ts, every * points, [every], every)  # compiles
    averages, rows, begun = Averages(every), [], time.monotonic()
    for _, found in made:
        table, seconds = averages.add(found), time.monotonic() - begun
        for point in range(table["loss"].shape[1]):
            now = {name: column[:, point] for name, column in table.items()}
            rows += list(_rows(lanes, now, task.length, seconds))
        lowest = min((float(x) for x in found["loss"][:, -1] if np.isfinite(x)), default=math.nan)
        show(int(found["update"][0, -1]), every * points, f"lowest loss {lowest:.3g}")
    return rows


def _rows(lanes: Sequence[Lane], now: dict[str, np.ndarray], length: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each lane. One that has stopped stays where it was, which is no result: its numbers are NaN."""
    for i, lane in enumerate(lanes):
        update, stopped = int(now["update"][i]), now["stopped"][i] >= 0
        row = lane._asdict() | {"update": update, "steps": update * length, "seconds": seconds}
        numbers = {name: float(now[name][i]) for name in now if name not in ("update", "stopped", "gradient_norm")}
        yield row | {name: math.nan if stopped else x for name, x in numbers.items()}
