"""What a run has learnt: parameters and model from the folder of `streamgrad train`."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad.base import Model, Params
from streamgrad.lab.tasks.base import Task
from streamgrad.lab.train.checkpoint import Checkpoints
from streamgrad.lab.train.session import CHECKPOINT, RUN


class Loaded(NamedTuple):
    """What a run has learnt.

    Attributes:
      params: of one seed.
      model: that they belong to.
      task: that it was trained on.
      update: after how many updates.
    """

    params: Params
    model: Model
    task: Task
    update: int


def load_params(folder: Path | str, seed: int | None = None, data: Path | str | None = None) -> Loaded:
    """Read the newest parameters of one seed, with their model, from a folder that `streamgrad train` has written.

    Args:
      folder: the run's.
      seed: as on the command line; the run's first by default.
      data: the data folder, for a task that needs one; that of the environment variable STREAMGRAD_DATA by default.

    Returns:
      `params`, `model`, `task` and `update`. ValueError where the folder has no such run.

    Example:
      >>> import tempfile
      >>> from streamgrad.lab.cli.main import main
      >>> folder = tempfile.mkdtemp()
      >>> options = "--task queue --cell vanilla --hidden 3 --updates 4 --every 2 --seed 7 --json"
      >>> main(["train", folder, *options.split()])  # doctest: +ELLIPSIS
      {...}
      0
      >>> params, model, task, update = load_params(folder)
      >>> update, params.cell["w"].shape
      (4, (3, 5))
    """
    folder = Path(folder)
    try:
        run = json.loads((folder / RUN).read_text(encoding="utf-8"))
        described, first, count = run["describe"], run["plan"]["seed"], run["plan"]["seeds"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} has no run of `streamgrad train`: {folder / RUN} cannot be read.") from error
    seed = first if seed is None else seed
    if seed not in range(first, first + count):
        raise ValueError(f"the run in {folder} has the seeds {first} to {first + count - 1}, not {seed!r}.")
    model, task = _rebuild(folder, described, data)
    saved = Checkpoints(folder / CHECKPOINT).newest()
    if saved is None:
        raise ValueError(f"the run in {folder} has no checkpoint to read parameters from.")
    update, leaves = saved

    def pick(path: tuple, like: jax.ShapeDtypeStruct) -> jax.Array:
        name = f".params{jax.tree_util.keystr(path)}"
        if name not in leaves or leaves[name].shape[1:] != like.shape:
            raise ValueError(f"the checkpoint in {folder} does not fit its {RUN}, at {name[1:]}.")
        return jnp.asarray(leaves[name][seed - first])

    template = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    return Loaded(jax.tree_util.tree_map_with_path(pick, template), model, task, update)


def _rebuild(folder: Path, described: dict[str, Any], data: Path | str | None) -> tuple[Model, Task]:
    """The model and task that the options of a run describe."""
    try:
        from streamgrad.lab.cli.train import Options, make_model, make_task
    except ImportError as error:
        raise ValueError('this needs the command line\'s extra: pip install "streamgrad[cli]".') from error
    try:
        lists: dict[str, Any] = {name: tuple(value) for name, value in described.items() if isinstance(value, list)}
        options = Options(folder, data=None if data is None else Path(data), **(described | lists))
    except TypeError as error:
        raise ValueError(f"the run in {folder} was not begun by `streamgrad train`.") from error
    task = make_task(options)
    return make_model(options, task), task
