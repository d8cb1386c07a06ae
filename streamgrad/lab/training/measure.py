"""Losses without learning: of the network before its first update."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, Model, Params, fold_weight
from streamgrad.lab.tasks.base import Task
from streamgrad.lab.training.loop import TrainState, data_key, init_key

STEPS = 256  # of every stream, on which an untrained network is measured


def losses(model: Model, params: Params, state: PyTree, chunk: Chunk) -> tuple[Float[Array, "B T"], PyTree]:
    """The losses of a batch of streams, and their states after the chunk; each times the step's weight, if it has one.

    Args:
      model: the model.
      params: its parameters.
      state: of every stream, such as `fresh` makes them.
      chunk: `[B, T, ...]`.

    Returns:
      L_t and h_T.
    """
    over_streams = jax.vmap(model.run, in_axes=(None, 0, 0, None if chunk.reset is None else 0))
    outputs, state = over_streams(params, state, chunk.inputs, chunk.reset)
    each = jax.vmap(jax.vmap(model.loss, in_axes=(None, 0, 0)), in_axes=(None, 0, 0))
    return each(params.head, outputs, fold_weight(chunk).targets), state


def fresh(model: Model, params: Params, streams: int) -> PyTree:
    """The states of so many streams at the beginning of an episode."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], streams, axis=0), model.init_state(params))


def untrained_loss(model: Model, task: Task, ts: TrainState, seeds: Array) -> np.ndarray:
    """The mean loss of each seed's network before its first update, on what its streams bring next.

    Args:
      model: the model.
      task: that it was trained on.
      ts: where training has come to, with a leading axis for seeds.
      seeds: their numbers.

    Returns:
      One number for each.
    """
    count = -(-STEPS // task.length)

    def one(data: PyTree, ts: TrainState, seed: Array) -> Array:
        params = model.init(init_key(jax.random.key(seed)))

        def step(carry: tuple[PyTree, PyTree], index: Array) -> tuple[tuple[PyTree, PyTree], Array]:
            where, state = carry
            chunk, where = task.sample(data, where, data_key(ts, ts.step + index))
            found, state = losses(model, params, state, chunk)
            return (where, state), jnp.mean(found)

        begun = (ts.task, fresh(model, params, task.batch_size))
        return jnp.mean(jax.lax.scan(step, begun, jnp.arange(count, dtype=jnp.int32))[1])

    over_seeds = jax.jit(jax.vmap(one, in_axes=(None, 0, 0)), out_shardings=everywhere(ts))
    return np.asarray(over_seeds(task.data, ts, seeds))


def everywhere(ts: TrainState) -> NamedSharding | None:
    """Where numbers that every process reads must lie; None on one device."""
    sharding = ts.step.sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
