"""What a run has learnt: parameters and model from the folder of `streamgrad train`."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from streamgrad.base import Model, Params
from streamgrad.lab.manifest import FILE, load_manifest
from streamgrad.lab.tasks.base import Task
from streamgrad.lab.training.build import make_model, make_task
from streamgrad.lab.training.checkpoint import Checkpoints
from streamgrad.lab.training.session import CHECKPOINT


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
    described = load_manifest(folder).describe
    if not {"plan", "cell"} <= set(described):
        raise ValueError(f"the run in {folder} was not begun by `streamgrad train`.")
    first, count = described["plan"]["seed"], described["plan"]["seeds"]
    seed = first if seed is None else seed
    if seed not in range(first, first + count):
        raise ValueError(f"the run in {folder} has the seeds {first} to {first + count - 1}, not {seed!r}.")
    sizes = {name: described[name] for name in ("batch_size", "length")}
    task = make_task(described["task"], described["task_options"], data=data, **sizes)
    model = make_model(described["cell"], described["hidden"], described["layers"], task)
    saved = Checkpoints(folder / CHECKPOINT).newest()
    if saved is None:
        raise ValueError(f"the run in {folder} has no checkpoint to read parameters from.")
    update, leaves = saved

    def pick(path: tuple, like: jax.ShapeDtypeStruct) -> jax.Array:
        name = f".params{jax.tree_util.keystr(path)}"
        if name not in leaves or leaves[name].shape[1:] != like.shape:
            raise ValueError(f"the checkpoint in {folder} does not fit its {FILE}, at {name[1:]}.")
        return jnp.asarray(leaves[name][seed - first])

    template = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    return Loaded(jax.tree_util.tree_map_with_path(pick, template), model, task, update)
