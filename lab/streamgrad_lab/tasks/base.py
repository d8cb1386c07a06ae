"""The record of a task: where the chunks of a training run come from."""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad import Chunk, Head, Info
from streamgrad._typing import Array, PyTree


class HeldOut(NamedTuple):
    """What a task keeps back from training, to measure the loss on: so many chunks, one after the other.

    Attributes:
      data: arrays that `sample` reads, as those of a task.
      chunks: how many there are.
      sample: `sample(data, index) -> chunk`, streams leading, then time, of the same shape for every index. The streams
        begin with the first chunk and go on in the next. Each loss counts with its weight, those of weight 0 do not.
    """

    data: PyTree
    chunks: int
    sample: Callable[[PyTree, Array], Chunk]


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
      held_out: what is kept back, and measured now and then while training; None where there is nothing.
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
    held_out: HeldOut | None = None
    symbols: str = ""


def digest(task: Task) -> str:
    """A hash of a task's data, what is held out included: of its numbers, their shapes, and what they stand for.

    Args:
      task: the task.

    Returns:
      32 hexadecimal digits, the same on every machine.

    Example:
      >>> from streamgrad_lab.tasks import find_task
      >>> one, other = (digest(find_task("series", kind="henon", values=n)) for n in (50, 51))
      >>> len(one), one == other
      (32, False)
    """
    found = hashlib.sha256(task.symbols.encode("utf-8", "surrogatepass"))
    held_out = None if task.held_out is None else task.held_out.data
    for path, leaf in jax.tree_util.tree_leaves_with_path((task.data, held_out)):
        is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.ascontiguousarray(jax.random.key_data(leaf) if is_key else leaf)
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()[:32]
