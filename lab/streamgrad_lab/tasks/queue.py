"""The queue task (Section 8): random bits, to be given back after a delay."""

import jax
import jax.numpy as jnp

from streamgrad import Chunk, heads
from streamgrad._typing import Array, Bool
from streamgrad.checks import check_size
from streamgrad_lab.tasks.base import Task


def queue(delay: int = 4, batch_size: int = 100, length: int = 1) -> Task:
    """An endless stream of random bits; the target is the bit of `delay` steps ago.

    Args:
      delay: how long ago; 0 is the bit of the same step.
      batch_size: B, streams at once.
      length: T, steps of a chunk. Streams go on across chunks, and are never reset.

    Returns:
      The task. Before the first `delay` steps the bits were 0.

    Example:
      >>> import jax
      >>> task = queue(delay=2, batch_size=1, length=6)
      >>> chunk, state = task.sample(task.data, task.init(jax.random.key(0)), jax.random.key(1))
      >>> [int(x) for x in chunk.inputs[0, :-2, 0]] == [int(y) for y in chunk.targets[0, 2:, 0]]
      True
    """
    check_size(least=0, delay=delay)
    check_size(batch_size=batch_size, length=length)

    def init(key: Array) -> Bool[Array, "B delay"]:
        del key
        return jnp.zeros((batch_size, delay), bool)

    def sample(data: tuple, state: Array, key: Array) -> tuple[Chunk, Array]:
        del data
        bits = jnp.concatenate([state, jax.random.bernoulli(key, 0.5, (batch_size, length))], axis=1)
        inputs, targets = bits[:, delay:, None].astype(float), bits[:, :length, None]
        return Chunk(inputs, targets), bits[:, length:]

    return Task("queue", 1, heads.bernoulli(1), batch_size, length, False, (), init, sample)
