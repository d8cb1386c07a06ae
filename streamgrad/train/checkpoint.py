"""Checkpoints: a thin module around orbax, which is imported only where a checkpoint is written or read.

Leaves are stored by their path in the tree, and the tree itself comes from the program: so tuple types survive, and
a checkpoint of another model is answered by the name of the leaf that does not fit.
"""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import PyTree


class Checkpoints:
    """The newest state of a run, in a folder of its own.

    Args:
      folder: one subfolder for each checkpoint, named by its step; all but the newest are removed.
    """

    def __init__(self, folder: Path):
        try:
            import orbax.checkpoint as orbax
        except ImportError as error:
            raise ValueError(
                'checkpoints need orbax: pip install "streamgrad[cli]", or train without checkpoints.'
            ) from error
        self.folder = folder.absolute()  # orbax takes no other
        self._orbax = orbax.PyTreeCheckpointer()

    def latest(self) -> int | None:
        """The step of the newest checkpoint, if there is one."""
        steps = _steps(self.folder)
        return max(steps) if steps else None

    def save(self, step: int, state: PyTree) -> None:
        """Store a state; it appears at once and whole, and the older ones go after that."""
        leaves = {name: np.asarray(leaf) for name, leaf in _by_name(state).items() if leaf.size}
        old = _steps(self.folder)
        self._orbax.save(self.folder / str(step), leaves, force=True)
        for other in old:
            if other != step:
                shutil.rmtree(self.folder / str(other))

    def restore(self, step: int, template: PyTree) -> PyTree:
        """The state of that step.

        Args:
          step: from `latest`.
          template: a tree with the structure, shapes and dtypes of the state, such as `jax.eval_shape` gives.

        Returns:
          The state, bit for bit, in the types of the template.
        """
        where = self.folder / str(step)
        try:
            found = self._orbax.restore(where)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"the checkpoint {where} cannot be read: {str(error).splitlines()[0]}.") from error
        expected = _by_name(template)
        stored = {name for name, leaf in expected.items() if leaf.size}
        for name in sorted(stored ^ set(found)):
            whose = "the run" if name in stored else "the checkpoint"
            raise ValueError(f"the checkpoint {where} is of another run: only {whose} has state{name}.")
        leaves = [_fit(where, name, like, found.get(name)) for name, like in expected.items()]
        return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _fit(where: Path, name: str, like: Any, leaf: Any) -> jax.Array:
    """A stored leaf, if it has the shape and dtype of `like`; orbax stores none that is empty."""
    leaf = np.zeros(like.shape, like.dtype) if leaf is None else np.asarray(leaf)
    if leaf.shape != like.shape or leaf.dtype != like.dtype:
        have, want = f"{leaf.dtype}{list(leaf.shape)}", f"{like.dtype}{list(like.shape)}"
        raise ValueError(f"the checkpoint {where} is of another run: its state{name} is {have}, not {want}.")
    return jnp.asarray(leaf)


def _steps(folder: Path) -> list[int]:
    """Of finished checkpoints alone: one that is being written has a name that is no number."""
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []


def _by_name(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
