"""Checkpoints: a thin module around orbax, which is imported only where a checkpoint is written or read.

Leaves are stored by their path in the tree, and the tree itself comes from the program: so tuple types survive, and
a checkpoint of another model is answered by the name of the leaf that does not fit.
"""

import contextlib
import logging
import os
import re
import shutil
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import PyTree
from streamgrad_lab import interrupts
from streamgrad_lab.files import Unwritten
from streamgrad_lab.manifest import FORMAT
from streamgrad_lab.training import processes

KEPT = 2
REMEDY = "put it back as it was, or begin again in another folder"
_SUM, _FORMAT = "checksum", "format"  # no leaf has such a name: theirs begin with a dot or a bracket
_STEP = re.compile("0|[1-9][0-9]{0,17}", re.ASCII)
_log = logging.getLogger("streamgrad")


class Unreadable(ValueError):
    """A checkpoint is damaged."""


class Misfit(ValueError):
    """A checkpoint is whole, and of another run."""


class Checkpoints:
    """The newest states of a run, in a folder of its own.

    Args:
      folder: one subfolder for each checkpoint, named by its step; the newest and the one before it are kept.
    """

    def __init__(self, folder: Path):
        try:
            with _apart():
                import orbax.checkpoint as orbax
        except ImportError as error:
            raise ValueError(
                'checkpoints need orbax: pip install "streamgrad[lab]", or train without checkpoints.'
            ) from error
        self.folder = folder.absolute()  # orbax takes no other
        if not _has_a_name(self.folder):
            raise ValueError(
                f"checkpoints cannot be written to {self.folder}, whose name has letters that are not of this locale's "
                f"encoding, {sys.getfilesystemencoding()}: set PYTHONUTF8=1, or choose another name."
            )
        self._orbax = orbax.PyTreeCheckpointer()
        self._whole = orbax.RestoreArgs

    def save(self, step: int, state: PyTree) -> None:
        """Store a state; it appears at once and whole, and older ones go after that."""
        leaves = {name: leaf for name, leaf in _by_name(state).items() if leaf.size}
        leaves[_FORMAT] = np.asarray(FORMAT, np.uint32)
        old = steps(self.folder)
        found = _checksum(leaves)
        if not processes.several():
            leaves = {name: np.asarray(leaf) for name, leaf in leaves.items()}
        with _written(self.folder / str(step)), _apart():
            self._orbax.save(self.folder / str(step), leaves | {_SUM: found}, force=True)
        if not processes.first():
            return
        # Those past this step are damaged: the run went on from one before them.
        earlier = [other for other in old if other < step][-(KEPT - 1) :]
        for other in {*old} - {*earlier, step}:
            with _written(self.folder / str(other)):
                shutil.rmtree(self.folder / str(other))

    def sweep(self) -> None:
        """Remove what a killed run has left of checkpoints that it was writing; for whoever holds the run's lock."""
        for path in self.folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> tuple[int, dict[str, np.ndarray]] | None:
        """The step and leaves of the newest checkpoint that can be read; None where there is no checkpoint.

        A damaged one is passed over, with a warning on the log "streamgrad"; if all are, ValueError.
        """
        found = steps(self.folder)
        for step in reversed(found):
            try:
                return step, self.read(step)
            except Unreadable as error:
                if step == found[0]:
                    raise ValueError(f"{error}, and there is no good one before it: {REMEDY}.") from error
                _log.warning("%s; going on from the one before it.", error)
        return None

    def fit(self, step: int, found: dict[str, np.ndarray], template: PyTree) -> PyTree:
        """The state of that step from its leaves.

        Args:
          step: of the checkpoint.
          found: its leaves, from `newest` or `read`.
          template: a tree with the structure, shapes and dtypes of the state, such as `jax.eval_shape` gives.

        Returns:
          The state, bit for bit, in the types of the template.
        """
        where, expected = self.folder / str(step), _by_name(template)
        stored = {name for name, leaf in expected.items() if leaf.size}
        for name in sorted(stored ^ set(found)):
            whose = "the run" if name in stored else "the checkpoint"
            raise Misfit(f"the checkpoint {where} is of another run: only {whose} has state{name}.")
        leaves = [_fit(where, name, like, found.get(name)) for name, like in expected.items()]
        return jax.tree.unflatten(jax.tree.structure(template), leaves)

    def read(self, step: int) -> dict[str, np.ndarray]:
        """The leaves of that step by their path in the state, all but empty ones; `Unreadable` where it is damaged."""
        where = self.folder / str(step)
        try:
            with _apart():
                found = {name: np.asarray(leaf) for name, leaf in self._restored(where).items()}
            stored = int(found.pop(_SUM))
        except Exception as error:  # orbax and its storage have many
            raise Unreadable(f"the checkpoint {where} cannot be read ({type(error).__name__})") from error
        if stored != _checksum(found):
            raise Unreadable(f"the checkpoint {where} cannot be read (its checksum is wrong)")
        if (made := int(found.pop(_FORMAT, 2))) > FORMAT:  # the first that says it is 3
            raise ValueError(
                f"the checkpoint {where} is of format {made}, and this version of streamgrad reads {FORMAT} and those "
                "before it: go on with the version that made it."
            )
        return found

    def _restored(self, where: Path) -> dict[str, Any]:
        """All of a checkpoint on the host, whoever has written it and on however many devices."""
        found = self._orbax.metadata(where).item_metadata
        whole = {name: self._whole(restore_type=np.ndarray) for name in (found.tree if found else ())}
        return self._orbax.restore(where, restore_args=whole)


def steps(folder: Path) -> list[int]:
    """Those of finished checkpoints, in order: one that is being written has a name that is no number."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if _STEP.fullmatch(path.name) and path.is_dir())


def _checksum(leaves: dict[str, Any]) -> np.ndarray:
    """Of names and bits: the storage does not notice every damage. It is the same however arrays are cut."""
    found = 0
    for name in sorted(leaves):
        found = zlib.crc32(f"{name} {int(_sum_bits(leaves[name]))}".encode(), found)
    return np.asarray(found, np.uint32)


def _sum_bits(leaf: Any) -> Any:
    """Σ of an array's words, each times an odd number of its own, modulo 2^32.

    Of an array that no process has whole it is made on the devices, without moving it.
    """
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.jit(_sum_on_devices)(leaf)
    leaf = np.ascontiguousarray(leaf).reshape(-1)
    words = leaf.view(f"u{min(leaf.dtype.itemsize, 4)}").astype(np.uint32)
    return np.sum(words * (2 * np.arange(len(words), dtype=np.uint32) + 1), dtype=np.uint32)


def _sum_on_devices(leaf: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    kind = jnp.dtype(f"u{min(leaf.dtype.itemsize, 4)}")
    words = leaf.astype(kind) if leaf.dtype == bool else jax.lax.bitcast_convert_type(leaf, kind)
    at = jnp.zeros(words.shape, jnp.uint32)  # counted without a change of shape, for which it would be gathered
    for axis, size in enumerate(words.shape):
        at = at * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(words.astype(jnp.uint32) * (2 * at + 1), dtype=jnp.uint32)


@contextlib.contextmanager
def _written(where: Path) -> Iterator[None]:
    """Around what writes a checkpoint: orbax and its storage have many errors, and few name what they were writing."""
    try:
        yield
    except Exception as error:
        if processes.several() and not isinstance(error, OSError):  # another process may have gone
            raise
        raise Unwritten(where, error) from error


def _has_a_name(path: Path) -> bool:
    """Whether a path is the same for Python, which has this locale's encoding, and for orbax's storage, in UTF-8."""
    try:
        return os.fsencode(path) == str(path).encode()
    except UnicodeEncodeError:
        return False


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Around orbax: without its warnings, of which a user can mend nothing, and without a Ctrl-C in its event loop."""
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.CRITICAL)
    try:
        with interrupts.hold(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        absl.setLevel(level)


def _fit(where: Path, name: str, like: Any, leaf: Any) -> jax.Array:
    """A stored leaf, if it has the shape and dtype of `like`; orbax stores none that is empty."""
    leaf = np.zeros(like.shape, like.dtype) if leaf is None else np.asarray(leaf)
    if leaf.shape != like.shape or leaf.dtype != like.dtype:
        have, want = f"{leaf.dtype}{list(leaf.shape)}", f"{like.dtype}{list(like.shape)}"
        if ".shared" in name and leaf.shape[:1] + leaf.shape[2:] == like.shape[:1] + like.shape[2:]:
            learnt = f"holds what {leaf.shape[1]} devices have learnt, each of its own streams"
            raise ValueError(f"the checkpoint {where} {learnt}: it goes on on as many alone, not on {like.shape[1]}.")
        raise Misfit(f"the checkpoint {where} is of another run: its state{name} is {have}, not {want}.")
    return jnp.asarray(leaf)


def _by_name(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
