"""The copy task: read a few symbols, then give them back; it grows with what the network can do."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from streamgrad import Chunk, Info, heads
from streamgrad._typing import Array, Bool, Float, Int, PyTree
from streamgrad.checks import check_decay, check_number, check_size
from streamgrad_lab.tasks.base import Task


class CopyState(NamedTuple):
    """Where the streams stand, and how far the curriculum has come.

    Attributes:
      symbols: those of each stream's episode, as far as it has been read.
      step: the next step of that episode, from 0 to twice its length.
      size: how many symbols that episode has.
      level: how many symbols an episode that begins now gets.
      average: running average of the loss per symbol at this level, in nats.
    """

    symbols: Int[Array, "B longest"]
    step: Int[Array, " B"]
    size: Int[Array, " B"]
    level: Int[Array, ""]
    average: Float[Array, ""]


def copy(
    symbols: int = 2,
    first: int = 1,
    longest: int = 40,
    threshold: float = 0.1,
    decay: float = 0.99,
    spread: int = 0,
    batch_size: int = 50,
    length: int = 1,
) -> Task:
    """Read n random symbols, then give them back in n steps; n grows by one whenever the network has learned it.

    At each of the first n steps of an episode one symbol is read, and the target is the blank. At each of the next n
    the input is the mark for recall, and the targets are the symbols in their order. Then, with a reset, the next
    episode begins.

    The curriculum: the average of the loss at recalled symbols, avg ← decay · avg + (1 - decay) · loss at each update
    in which any is recalled, begins at log(symbols), which is chance. When it falls below `threshold`, n grows by one
    for the episodes that begin from then on, and the average starts over.

    Args:
      symbols: how many different ones there are.
      first: n at the beginning.
      longest: where n stops to grow.
      threshold: in nats per symbol.
      decay: of the average, at least 0 and below 1.
      spread: the lengths of episodes are drawn from n - `spread`, or 1, to n; the papers of SnAp and KF-RTRL have 5.
      batch_size: B, streams at once; they share the curriculum.
      length: T, steps of a chunk. Streams go on across chunks.

    Returns:
      The task. Rows of the metrics get n as `copy_length`.

    Example:
      >>> import jax
      >>> task = copy(first=3, batch_size=1, length=6)
      >>> chunk, state = task.sample(task.data, task.init(jax.random.key(0)), jax.random.key(1))
      >>> shown, asked = chunk.inputs[0, :3, :2].argmax(axis=1), chunk.targets[0, 3:]
      >>> [int(x) for x in shown] == [int(y) for y in asked]
      True
    """
    check_size(least=2, symbols=symbols)
    check_size(first=first, longest=longest, batch_size=batch_size, length=length)
    if first > longest:
        raise ValueError(f"first must not be more than longest, {longest}, but it is {first}.")
    check_size(least=0, spread=spread)
    check_decay(decay)
    check_number(threshold=threshold)
    if threshold <= 0:
        raise ValueError(f"threshold must be a positive number, not {threshold!r}.")
    chance = math.log(symbols)

    def init(key: Array) -> CopyState:
        del key
        return CopyState(
            jnp.zeros((batch_size, longest), jnp.int32),
            jnp.zeros(batch_size, jnp.int32),
            jnp.full(batch_size, first, jnp.int32),
            jnp.full((), first, jnp.int32),
            jnp.full((), chance, float),
        )

    def one_step(carry: tuple, now: tuple[Array, Array]) -> tuple[tuple, tuple[Array, Array, Bool[Array, ""]]]:
        """One step of one stream: `now` has the symbol that is read, and the length of an episode, if one begins."""
        seen, step, size = carry
        symbol, drawn = now
        begins = step == 0
        size = jnp.where(begins, drawn, size)
        reads = step < size
        seen = jnp.where(reads, seen.at[jnp.minimum(step, longest - 1)].set(symbol), seen)
        inputs = jax.nn.one_hot(jnp.where(reads, symbol, symbols), symbols + 1, dtype=float)
        target = jnp.where(reads, symbols, seen[jnp.maximum(step - size, 0)])
        return (seen, (step + 1) % (2 * size), size), (inputs, target, begins)

    def sample(data: PyTree, state: CopyState, key: Array) -> tuple[Chunk, CopyState]:
        del data
        drawn = jax.random.randint(key, (batch_size, length), 0, symbols, jnp.int32)
        shortest = jnp.maximum(state.level - spread, 1)
        sizes = jax.random.randint(jax.random.fold_in(key, 1), drawn.shape, shortest, state.level + 1, jnp.int32)

        def stream(seen: Array, step: Array, size: Array, drawn: Array, sizes: Array) -> tuple[tuple, tuple]:
            return jax.lax.scan(one_step, (seen, step, size), (drawn, sizes))

        (seen, step, size), chunk = jax.vmap(stream)(state.symbols, state.step, state.size, drawn, sizes)
        return Chunk(*chunk), state._replace(symbols=seen, step=step, size=size)

    def observe(state: CopyState, chunk: Chunk, info: Info) -> tuple[CopyState, dict[str, Array]]:
        recalled = chunk.targets < symbols
        count = jnp.sum(recalled)
        loss = jnp.sum(jnp.where(recalled, info.loss, 0)) / jnp.maximum(count, 1)
        average = decay * state.average + (1 - decay) * loss.astype(state.average.dtype)
        average = jnp.where(count > 0, average, state.average)
        learned = average < threshold
        level = jnp.minimum(state.level + learned.astype(jnp.int32), longest)
        state = state._replace(level=level, average=jnp.where(learned, chance, average))
        return state, {"copy_length": level}

    head = heads.softmax(symbols + 1)
    return Task("copy", symbols + 1, head, batch_size, length, False, (), init, sample, observe)
