"""Losses without learning: on what a task holds out, and of the network before its first update."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from streamgrad import Chunk, Model, Params
from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import fold_weight
from streamgrad_lab.tasks.base import Task
from streamgrad_lab.training.loop import HELD_OUT, Rows, TrainState, data_key, init_key

STEPS = 256  # of every stream, on which an untrained network is measured
OFTEN = 100  # updates, at least, between two measurements of what is held out
SHARE = 0.3  # steps held out for each step trained on, at most: forward alone they take about a tenth of the time


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


def measured_every(task: Task, every: int) -> int | None:
    """After how many updates the held-out loss is measured, or None where there is none.

    It depends on nothing that may change while a run goes on, such as its length or the time that it takes.

    Args:
      task: the task.
      every: how many updates make a row.

    Returns:
      A multiple of `every`.
    """
    if task.held_out is None:
        return None
    streams, length = _shape(task)
    steps = task.held_out.chunks * streams * length
    least = max(OFTEN, -(-steps // int(max(1, SHARE * task.batch_size * task.length))))
    return -(-least // every) * every


def held_out_loss(model: Model, task: Task, ts: TrainState) -> Callable[[TrainState], np.ndarray]:
    """A function for the mean loss of a step on what the task holds out, of every seed.

        L = Σ w_t L_t / Σ w_t    over all steps, from the cell's initial state

    Args:
      model: the model.
      task: the task.
      ts: a state that lies where those to be measured do.

    Returns:
      The function of a state with a leading axis for seeds.
    """
    held = task.held_out
    assert held is not None
    streams, _ = _shape(task)

    def one(data: PyTree, params: Params) -> Array:
        def step(carry: tuple, index: Array) -> tuple[tuple, None]:
            state, total, weight = carry
            chunk = held.sample(data, index)
            found, state = losses(model, params, state, chunk)
            counted = jnp.ones_like(found) if chunk.weight is None else chunk.weight.astype(found.dtype)
            return (state, total + jnp.sum(found), weight + jnp.sum(counted)), None

        zero = jnp.zeros((), jax.eval_shape(first, data, params).dtype)
        begun = (fresh(model, params, streams), zero, zero)
        (_, total, weight), _ = jax.lax.scan(step, begun, jnp.arange(held.chunks, dtype=jnp.int32))
        return (total / weight).astype(jnp.float32)

    def first(data: PyTree, params: Params) -> Array:
        return losses(model, params, fresh(model, params, streams), held.sample(data, jnp.zeros((), jnp.int32)))[0]

    over_seeds = jax.jit(jax.vmap(one, in_axes=(None, 0)), out_shardings=everywhere(ts))
    return lambda ts: np.asarray(over_seeds(held.data, ts.params))


def with_held_out(
    made: Iterator[tuple[TrainState, Rows]], measure: Callable[[TrainState], np.ndarray], every: int, updates: int
) -> Iterator[tuple[TrainState, Rows]]:
    """Calls of the loop with the held-out loss in their rows: at multiples of `every`, and at the end of the run."""
    for ts, found in made:
        done = int(found["update"][0, -1])
        column = np.full(found["update"].shape, np.nan, np.float32)
        if done % every == 0 or done == updates:
            column[:, -1] = measure(ts)
        yield ts, found | {HELD_OUT: column}


def _shape(task: Task) -> tuple[int, int]:
    """Streams and steps of a chunk that is held out."""
    held = task.held_out
    assert held is not None
    chunk = jax.eval_shape(held.sample, held.data, jax.ShapeDtypeStruct((), jnp.int32))
    streams, length = jax.tree.leaves(chunk.targets)[0].shape[:2]
    return streams, length


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
