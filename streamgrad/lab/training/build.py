"""Model, task and optimiser from plain options, as the command line gives them and `run.json` keeps them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optax

from streamgrad import cells
from streamgrad.base import Model
from streamgrad.checks import check_choice, check_size
from streamgrad.lab.tasks import Task, find_task

CELLS = ("lstm", "gru", "vanilla", "elstm", "mingru", "lru", "rtu", "lif")
OPTIMIZERS = ("adam", "rmsprop", "sgd")


def make_task(
    name: str,
    options: Mapping[str, Any],
    batch_size: int | None = None,
    length: int | None = None,
    data: Path | str | None = None,
) -> Task:
    """The task of that name.

    Args:
      name: one of `streamgrad.lab.tasks.TASKS`.
      options: its own, by name.
      batch_size: B, or None for the task's own number.
      length: T, likewise.
      data: the data folder, for a task that needs one.

    Returns:
      The task.
    """
    given = {"batch_size": batch_size, "length": length, "folder": data if name == "mnist" else None}
    return find_task(name, **options, **{option: value for option, value in given.items() if value is not None})


def make_model(cell: str, hidden: int, layers: int, task: Task) -> Model:
    """The cell of that name, stacked if need be, and the task's head."""
    check_choice("cell", cell, CELLS)
    check_size(layers=layers)
    stacked, n_in = [], task.n_in
    for _ in range(layers):
        stacked.append(getattr(cells, cell)(n_in, hidden))
        n_in = Model(stacked[-1], task.head).width  # not always `hidden`: complex units have two outputs
    return Model(stacked[0] if layers == 1 else cells.stack(*stacked), task.head)


def make_optimizer(
    name: str, learning_rate: float, momentum: float, clip: float | None = None
) -> optax.GradientTransformation:
    """The optimiser of that name.

    Args:
      name: "adam", "rmsprop" or "sgd".
      learning_rate: above 0.
      momentum: Adam's first decay, or the momentum of the others.
      clip: gradients with a larger norm are scaled down to it; None for no limit.

    Returns:
      The optimiser.
    """
    check_choice("optimizer", name, OPTIMIZERS)
    for option, value, good, span in (
        ("learning_rate", learning_rate, learning_rate > 0, "above 0"),
        ("momentum", momentum, 0 <= momentum < 1, "of at least 0 and below 1"),
        ("clip", clip, clip is None or clip > 0, "above 0"),
    ):
        if not good:
            raise ValueError(f"{option} must be a number {span}, not {value!r}.")
    if name == "adam":
        made = optax.adam(learning_rate, b1=momentum)
    else:
        made = {"rmsprop": optax.rmsprop, "sgd": optax.sgd}[name](learning_rate, momentum=momentum or None)
    return made if clip is None else optax.chain(optax.clip_by_global_norm(clip), made)
