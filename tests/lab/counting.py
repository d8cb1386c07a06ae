"""A small run for tests of training: a task of noise that counts its updates, and what trains on it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import streamgrad as sg
from streamgrad_lab.tasks import Task
from streamgrad_lab.training import Plan

PLAN = Plan(updates=12, every=2, checkpoint_every=4, seeds=2, seed=3)


class Count(NamedTuple):
    made: jax.Array
    end: jax.Array


def counting(end: dict[int, int] | None = None, seeds: int = 3) -> Task:
    """Noise as inputs; those of seed s are infinite at its update number end[s], counted from 0."""
    end = end or {}
    task_keys = [jax.random.key_data(jax.random.split(jax.random.key(seed), 3)[1]) for seed in range(seeds)]
    table = jnp.stack(task_keys), jnp.array([end.get(seed, -1) for seed in range(seeds)])

    def init(key):
        mine = jnp.all(table[0] == jax.random.key_data(key)[None], axis=1)
        return Count(jnp.zeros((), jnp.int32), jnp.max(jnp.where(mine, table[1], -1)))

    def sample(data, state, key):
        inputs = jax.random.normal(key, (2, 3, 1)) + jnp.where(state.made == state.end, jnp.inf, 0.0)
        return sg.Chunk(inputs, jnp.zeros((2, 3, 1))), state._replace(made=state.made + 1)

    def observe(state, chunk, info):
        return state, {"made": state.made}

    return Task("counting", 1, sg.heads.squared_error(1), 2, 3, False, (), init, sample, observe)


def parts(task: Task, hidden: int = 2, optimizer=None, make=sg.uoro):
    model = sg.Model(sg.cells.vanilla(task.n_in, hidden), task.head)
    estimator = sg.batched(make(model), task.batch_size)
    return model, task, estimator, optimizer or optax.adam(0.05)


def summarise(chunk, info, grads):
    return {"gamma": jnp.mean(info.diagnostics["gamma"], axis=(0, 2)), "bias": grads.head["b"][0]}


def same(a, b) -> bool:
    """Bit for bit, in structure, types and dtypes."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )
