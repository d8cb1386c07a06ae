"""The end of a file, held out: not trained on, but predicted step by step to measure the loss."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from streamgrad import Chunk
from streamgrad._typing import Array
from streamgrad.checks import check_number
from streamgrad_lab.tasks.base import HeldOut

LANE = 64  # steps of a chunk of what is held out


def split_end(values: np.ndarray, held_out: float, what: str) -> tuple[np.ndarray, np.ndarray | None]:
    """What a file has to train on, and its end, which is held out.

    Args:
      values: of the file, in their order.
      held_out: the part of them that is; 0 for none.
      what: they are, such as "characters".

    Returns:
      Both parts; None for the end where it has fewer than two values, of which none could be predicted.

    Example:
      >>> [len(part) for part in split_end(np.arange(30), 0.1, "numbers")]
      [27, 3]
    """
    check_number(held_out=held_out)
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out must be a number of at least 0 and below 1, not {held_out!r}.")
    count = int(held_out * len(values))
    if count < 2:
        return values, None
    if len(values) - count < 2:
        raise ValueError(f"held_out leaves {len(values) - count} of {len(values)} {what} to train on: lower it.")
    return values[:-count], values[-count:]


def next_values(
    data: Array, batch_size: int, inputs: Callable[[Array], Array], targets: Callable[[Array], Array]
) -> HeldOut:
    """Values to be predicted from those before them, each once, in lanes of equal length that are read side by side.

    Args:
      data: at least two values, `[n]`.
      batch_size: how many lanes, if there are values enough.
      inputs: of values `[lanes, steps]`, what the network reads.
      targets: of the values after them, what it is compared with.

    Returns:
      What is held out.
    """
    places = len(data) - 1
    lanes = min(batch_size, places)
    each = places // lanes
    length = min(each, LANE)
    begins = jnp.arange(lanes, dtype=jnp.int32)[:, None] * each

    def sample(data: Array, index: Array) -> Chunk:
        step = index.astype(jnp.int32) * length + jnp.arange(length, dtype=jnp.int32)
        at = begins + jnp.minimum(step, each - 1)[None, :]
        weight = jnp.repeat((step < each)[None, :].astype(float), lanes, axis=0)  # the last chunk may not be full
        return Chunk(inputs(data[at]), targets(data[at + 1]), weight=weight)

    return HeldOut(data, -(-each // length), sample)
