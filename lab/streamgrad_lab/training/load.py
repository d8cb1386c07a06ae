"""What a run has learnt: parameters and model from its folder."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad import Model, Params, worked
from streamgrad_lab.manifest import FILE, load_manifest
from streamgrad_lab.tasks.base import Task
from streamgrad_lab.training.build import make_model, make_task
from streamgrad_lab.training.checkpoint import Checkpoints
from streamgrad_lab.training.session import CHECKPOINT


class Loaded(NamedTuple):
    """What a run has learnt.

    Attributes:
      params: of one seed.
      model: that they belong to.
      task: that it was trained on; None for a run that was begun in Python, unless it was passed.
      update: after how many updates.
    """

    params: Params
    model: Model
    task: Task | None
    update: int


def load_params(
    folder: Path | str,
    seed: int | None = None,
    data: Path | str | None = None,
    model: Model | None = None,
    task: Task | None = None,
) -> Loaded:
    """Read the newest parameters of one seed from the folder of a run.

    Args:
      folder: the run's.
      seed: as on the command line; the run's first by default.
      data: the data folder, for a task that needs one; that of the environment variable STREAMGRAD_DATA by default.
      model: that was trained, for a run that was begun in Python. One that `streamgrad train` has begun says it itself.
      task: likewise, if it is wanted.

    Returns:
      `params`, `model`, `task` and `update`. ValueError where the folder has no such run.

    Example:
      >>> import tempfile
      >>> from streamgrad_lab.cli.main import main
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
    described = load_manifest(folder).describe
    whose = "the model that was passed" if model is not None else f"its {FILE}"
    if "plan" not in described or (model is None and "cell" not in described):
        raise ValueError(
            f"the run in {folder} was not begun by `streamgrad train`: pass the model that it was trained with, as in "
            "load_params(folder, model=model)."
            if "plan" in described
            else f"the run in {folder} has no parameters: name the folder of a training run."
        )
    first, count = described["plan"]["seed"], described["plan"]["seeds"]
    seed = first if seed is None else seed
    if seed not in range(first, first + count):
        raise ValueError(f"the run in {folder} has the seeds {first} to {first + count - 1}, not {seed!r}.")
    if task is None and "cell" in described:
        sizes = {name: described[name] for name in ("batch_size", "length")}
        task = make_task(described["task"], described["task_options"], data=data, **sizes)
    if model is None:
        assert task is not None
        model = make_model(described["cell"], described["hidden"], described["layers"], task)
    worked(model)  # raises where it is no model
    saved = Checkpoints(folder / CHECKPOINT).newest()
    if saved is None:
        raise ValueError(f"the run in {folder} has no checkpoint to read parameters from.")
    update, leaves = saved
    template = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    with_paths = jax.tree_util.tree_leaves_with_path(template)
    names = {f".params{jax.tree_util.keystr(path)}" for path, leaf in with_paths if leaf.size}  # others are not stored
    for name in sorted(names ^ {name for name in leaves if name.startswith(".params")}):
        raise ValueError(f"the checkpoint in {folder} does not fit {whose}: only one of them has {name[1:]}.")

    def pick(path: tuple, like: jax.ShapeDtypeStruct) -> jax.Array:
        name = f".params{jax.tree_util.keystr(path)}"
        found = leaves.get(name, np.zeros((count, *like.shape), like.dtype))
        if found.shape[1:] != like.shape:
            raise ValueError(
                f"the checkpoint in {folder} does not fit {whose}: {name[1:]} is {list(found.shape[1:])}, not "
                f"{list(like.shape)}."
            )
        return jnp.asarray(found[seed - first])

    return Loaded(jax.tree_util.tree_map_with_path(pick, template), model, task, update)
