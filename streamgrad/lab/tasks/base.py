"""The record of a task: where the chunks of a training run come from."""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, PyTree
from streamgrad.base import Chunk, Head, Info


class Task(NamedTuple):
    """An endless source of chunks for a batch of streams.

    Attributes:
      name: what it is called.
      n_in: width of one input.
      head: the head that its targets fit, from `streamgrad.heads`.
      batch_size: B, the number of streams.
      length: T, the steps of a chunk.
      episodic: whether each chunk is one whole episode, beginning with a reset.
      data: arrays that `sample` reads; an argument, for they must not become part of the compiled program.
      init: `init(key) -> state`, where the streams stand.
      sample: `sample(data, state, key) -> (chunk, state)`; the chunk has the streams as leading axis, then time.
      observe: `observe(state, chunk, info) -> (state, row)`, for a task that follows the learner, such as a curriculum:
        called after each update with what came of the chunk; `row` is recorded beside the loss. None for the others.
      symbols: what the numbers in `data` stand for, such as the characters of a text in their order; else empty.
    """

    name: str
    n_in: int
    head: Head
    batch_size: int
    length: int
    episodic: bool
    data: PyTree
    init: Callable[[Array], PyTree]
    sample: Callable[[PyTree, PyTree, Array], tuple[Chunk, PyTree]]
    observe: Callable[[PyTree, Chunk, Info], tuple[PyTree, dict[str, Array]]] | None = None
    symbols: str = ""


def digest(task: Task) -> str:
    """A hash of a task's data: of its numbers, their shapes, and what they stand for.

    Args:
      task: the task.

    Returns:
      32 hexadecimal digits, the same on every machine.

    Example:
      >>> from streamgrad.lab.tasks import find_task
      >>> one, other = (digest(find_task("series", kind="henon", values=n)) for n in (50, 51))
      >>> len(one), one == other
      (32, False)
    """
    found = hashlib.sha256(task.symbols.encode("utf-8", "surrogatepass"))
    for path, leaf in jax.tree_util.tree_leaves_with_path(task.data):
        is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.ascontiguousarray(jax.random.key_data(leaf) if is_key else leaf)
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()[:32]
