"""Many trainings at once: a lane is one setting, one learning rate and one seed, and all lanes are one program.

Learning rates are tuned alike: every method is trained with all rates of the grid on all seeds, and stands with the
rate whose final number, averaged over the seeds, is best. The grid is in the files, the winner in the tables.
"""

import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from streamgrad import GradientEstimator, Model
from streamgrad._typing import Array, PyTree
from streamgrad_lab.experiments.evidence import Estimate, mean_of
from streamgrad_lab.experiments.records import show_interval
from streamgrad_lab.progress import COMPILING, Show
from streamgrad_lab.tables import read_rows, write_rows
from streamgrad_lab.tasks.base import Task
from streamgrad_lab.training.loop import Averages, TrainState, begin, calls, training_step

DIGITS = 5  # of the numbers in the files


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


class Best(NamedTuple):
    """The rate that a method stands with in one setting.

    Attributes:
      rate: the learning rate; NaN where all diverged.
      finals: the final number of each seed with that rate.
      rows: the curve of each seed, in the order of `finals`.
    """

    rate: float
    finals: np.ndarray
    rows: list[list[dict[str, Any]]]

    def __str__(self) -> str:
        """Mean, 95% interval and the rate."""
        return f"{show_interval(self.finals)} ({self.rate:g})" if len(self.finals) else "diverged"


def best_of(rows: Iterable[dict[str, Any]], name: str = "loss", last: float | int = 0.1, highest: bool = False) -> Best:
    """The best learning rate of rows of one method and one setting.

    Args:
      rows: as `train_lanes` returns them.
      name: the column that counts.
      last: the final number of a lane is the mean over so many of its last rows, or this share of them if below 1.
      highest: whether more is better.

    Returns:
      The rate whose mean over seeds is best, among those with which every seed ran to the end.
    """
    by_rate: dict[float, dict[int, list[dict[str, Any]]]] = {}
    for row in rows:
        by_rate.setdefault(row["rate"], {}).setdefault(int(row["seed"]), []).append(row)
    found = Best(math.nan, np.zeros(0), [])
    for rate, seeds in sorted(by_rate.items()):
        curves = [sorted(rows, key=lambda row: row["update"]) for _, rows in sorted(seeds.items())]
        finals = np.array([final_of([row[name] for row in curve], last) for curve in curves])
        if not np.all(np.isfinite(finals)):
            continue
        gain = 0.0 if not len(found.finals) else float(np.mean(finals) - np.mean(found.finals))
        if not len(found.finals) or (gain > 0 if highest else gain < 0):
            found = Best(rate, finals, curves)
    return found


def paired(a: Best, b: Best) -> Estimate | None:
    """How much more a has than b, seed by seed, as the same seed begins alike; None where no seed ended in both."""
    mine, other = ({curve[0]["seed"]: x for curve, x in zip(best.rows, best.finals, strict=True)} for best in (a, b))
    common = [seed for seed in mine if seed in other]
    return mean_of(np.array([mine[seed] - other[seed] for seed in common])) if common else None


def about_rates(rows: Iterable[dict[str, Any]]) -> str:
    """A sentence on how the learning rate was chosen."""
    rates = sorted({row["rate"] for row in rows})
    if len(rates) == 1:
        return f"One learning rate, {rates[0]:g}, for all, not tuned."
    tried = ", ".join(f"{rate:g}" for rate in rates)
    return f"In brackets the best of the learning rates {tried}, chosen by the mean over the same seeds."


def about_sizes(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence on the network and the streams that were used."""
    row, cells = rows[0], " or ".join(dict.fromkeys(row["cell"] for row in rows))
    steps, seeds = int(max(row["steps"] for row in rows)), len({row["seed"] for row in rows})
    return (
        f"{cells} of {int(row['hidden'])} units, {int(row['streams'])} streams, {steps:,} steps of each, {seeds} seeds."
    )


def about_times(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence on what the seconds are; `processes` is in the files where it was said how many shared the device."""
    shared = sorted({int(row["processes"]) for row in rows if "processes" in row})
    if not shared:
        return "Seconds are those of all lanes of a method, trained at once, without compilation."
    if shared == [1]:
        return "Seconds are those of all lanes of a method, trained at once on a device of their own."
    alone = ", and not with those of methods that had it for themselves" if len(shared) > 1 else ""
    return (
        f"Seconds are those of all lanes of a method, while {shared[-1]} processes shared the device: they can be "
        f"compared roughly{alone}."
    )


def final_of(values: Sequence[float], last: float | int = 0.1) -> float:
    """The mean over the last values of a curve: so many of them, or a share if below 1, but at least one.

    Example:
      >>> final_of([4.0, 3.0, 2.0, 1.0], 2), final_of([4.0, 3.0, 2.0, 1.0], 0.1)
      (1.5, 1.0)
    """
    count = int(last) if last >= 1 else max(1, round(len(values) * last))
    return float(np.mean(values[-count:]))


def write_case(
    path: Path, rows: list[dict[str, Any]], about: dict[str, Any], settings: dict[str, Sequence[Any]] | None = None
) -> None:
    """Write the rows of one method; a file that is there is complete.

    Args:
      path: the file.
      rows: from `train_lanes`.
      about: what they have in common, as first columns.
      settings: under the name of a column what the settings stand for, such as delays.
    """
    names = settings or {}
    meant = [{name: values[row["setting"]] for name, values in names.items()} for row in rows]
    kept = [{name: x for name, x in row.items() if name != "setting"} for row in rows]
    write_rows(path, [about | its | row for its, row in zip(meant, kept, strict=True)], digits=DIGITS)


def read_cases(folder: Path) -> list[dict[str, Any]]:
    """The rows of all methods of a part; none where it was not run."""
    return [row for path in sorted(folder.glob("*.csv")) for row in read_rows(path)]


def file_of(*words: Any) -> str:
    """A file's name made of words: letters and digits, joined by dashes.

    Example:
      >>> file_of("uoro inside chunks", 4), file_of("ok(8)", 16)
      ('uoro-inside-chunks-4.csv', 'ok-8-16.csv')
    """
    return "-".join(re.findall(r"[a-z0-9_]+", " ".join(map(str, words)).lower())) + ".csv"
