"""Model, task and optimiser from plain options, as the command line gives them and `run.json` keeps them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optax

from streamgrad import Cell, Model, cells
from streamgrad.checks import accepts, check_choice, check_size
from streamgrad.trees import kind_of
from streamgrad_lab import own
from streamgrad_lab.tasks import Task, find_task

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
      name: one of `streamgrad_lab.tasks.TASKS`, or MODULE:FUNCTION.
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
    """The model of a cell, stacked if need be, and the task's head.

    Args:
      cell: one of `CELLS`; or MODULE:FUNCTION, such as "mine:leaky" for the function `leaky` of `mine.py` in the
        current folder, or of an installed module, which is called as `leaky(n_in, n_hidden)` and returns a `Cell`.
      hidden: units of each layer.
      layers: how many.
      task: what it is for.

    Returns:
      The model.
    """
    if not own.is_own(cell):
        check_choice("cell", cell, (*CELLS, own.FORM))
    check_size(layers=layers)
    stacked, n_in = [], task.n_in
    for _ in range(layers):
        stacked.append(_own_cell(cell, n_in, hidden) if own.is_own(cell) else getattr(cells, cell)(n_in, hidden))
        n_in = Model(stacked[-1], task.head).width  # not always `hidden`: complex units have two outputs
    return Model(stacked[0] if layers == 1 else cells.stack(*stacked), task.head)


def _own_cell(name: str, n_in: int, n_hidden: int) -> Cell:
    function = own.find_function(name)
    if not accepts(function, "n_in", "n_hidden"):
        called = name.rpartition(":")[2]
        raise ValueError(f"{name} must be a function that is called as {called}(n_in, n_hidden).")
    check_size(n_hidden=n_hidden)
    cell = own.call(name, function, n_in, n_hidden)
    if not isinstance(cell, Cell):
        raise ValueError(
            f"{name} must return a Cell, such as streamgrad.cells.from_function, from_flax or from_equinox makes, not "
            f"{kind_of(cell)}."
        )
    return cell


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
