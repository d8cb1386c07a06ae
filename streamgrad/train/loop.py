"""The training loop: a scan inside, a generator outside.

It knows estimators by `GradientEstimator`, optimisers by optax and tasks by `Task` alone. Writing, saving, showing and
stopping are the caller's, between two calls of the compiled scan.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from streamgrad._typing import Array, Float, Int, PyTree
from streamgrad.base import Chunk, GradientEstimator, Info, Model, Params
from streamgrad.checks import check_size
from streamgrad.tasks.base import Task

RESERVED = ("update", "seed", "stopped", "loss", "gradient_norm")

Row = dict[str, Array]
Summary = Callable[[Chunk, Info, Params], Row]
StepFn = Callable[[PyTree, "TrainState"], tuple["TrainState", Row]]


class TrainState(NamedTuple):
    """All that a run needs to go on: what is not in here is not needed, so that a resumed run is the unbroken one.

    Attributes:
      step: number of updates made.
      key: data of the key from which all randomness of the run is folded.
      params: the model's.
      estimator: the estimator's state.
      optimizer: optax's.
      task: where the streams stand.
      stopped: -1, or the number of updates made before the one whose loss, gradient or new parameters were not finite;
        nothing but `step` changes from there on.
    """

    step: Int[Array, ""]
    key: Array
    params: Params
    estimator: PyTree
    optimizer: PyTree
    task: PyTree
    stopped: Int[Array, ""]


def begin(
    model: Model, task: Task, estimator: GradientEstimator, optimizer: optax.GradientTransformation, key: Array
) -> TrainState:
    """The state before the first update; `vmap` over keys gives several seeds."""
    init_key, task_key, run_key = jax.random.split(key, 3)
    params = model.init(init_key)
    return TrainState(
        jnp.zeros((), jnp.int32),
        jax.random.key_data(run_key),
        params,
        estimator.init(params),
        optimizer.init(params),
        task.init(task_key),
        jnp.full((), -1, jnp.int32),
    )


def no_summary(chunk: Chunk, info: Info, grads: Params) -> Row:
    """Nothing beside the loss and the norm of the gradient."""
    del chunk, info, grads
    return {}


def norm(tree: PyTree) -> Float[Array, ""]:
    """The Euclidean norm of all numbers in a tree."""
    return jnp.sqrt(sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)), start=jnp.zeros(())))


def training_step(
    task: Task, estimator: GradientEstimator, optimizer: optax.GradientTransformation, summarise: Summary = no_summary
) -> StepFn:
    """One update of the parameters.

    Args:
      task: gives a chunk for each update.
      estimator: for all streams of the task at once, see `streamgrad.batched`.
      optimizer: from optax. It sees the gradient of the *mean* loss of a step, over streams and time.
      summarise: `summarise(chunk, info, grads)`, what to record beside `loss` and `gradient_norm`.

    Returns:
      `step(data, state) -> (state, row)`, for one seed.
    """

    def step(data: PyTree, ts: TrainState) -> tuple[TrainState, Row]:
        data_key, noise_key = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(ts.key), ts.step))
        chunk, task_state = task.sample(data, ts.task, data_key)
        grads, estimator_state, info = estimator.update(ts.params, ts.estimator, chunk, noise_key)
        grads = jax.tree.map(lambda leaf: leaf / task.length, grads)
        updates, optimizer_state = optimizer.update(grads, ts.optimizer, ts.params)
        summary = summarise(chunk, info, grads)
        if task.observe is not None:
            task_state, seen = task.observe(task_state, chunk, info)
            summary = seen | summary
        params = optax.apply_updates(ts.params, updates)

        row = {"loss": jnp.mean(info.loss), "gradient_norm": norm(grads)}
        # The parameters too: a finite gradient with too high a rate would leave infinite ones as the last good state.
        checked = [*row.values(), *jax.tree.leaves(params)]
        finite = functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(leaf)) for leaf in checked])
        good = finite & (ts.stopped < 0)
        stopped = jnp.where((ts.stopped < 0) & ~finite, ts.step, ts.stopped)
        new = ts._replace(params=params, estimator=estimator_state, optimizer=optimizer_state, task=task_state)
        # A seed that has stopped keeps its last good state, while the others go on.
        kept = jax.tree.map(lambda new, old: jnp.where(good, new, old), new, ts)
        if taken := set(RESERVED) & set(summary):
            raise ValueError(f"a summary must not use the names {', '.join(sorted(taken))}, which every row has.")
        return kept._replace(step=ts.step + 1, stopped=stopped), row | summary

    return step


def run(
    step: StepFn, data: PyTree, ts: TrainState, updates: int, updates_per_call: int, every: int = 1
) -> Iterator[tuple[TrainState, dict[str, np.ndarray]]]:
    """Train several seeds at once, and hand over what came of every `updates_per_call` updates.

    Args:
      step: from `training_step`.
      data: the task's.
      ts: with a leading axis for seeds on every leaf; a run goes on from `ts.step`.
      updates: at which update to end.
      updates_per_call: how many are made between two hand-overs; a multiple of `every`.
      every: over how many updates a row is averaged.

    Yields:
      The state, and the rows as arrays `[seeds, rows, ...]`, with the number of updates made as `update`, and as
      `stopped` that of `TrainState`. A call of another length, such as a shorter last one, is compiled anew.
    """
    check_size(updates=updates, updates_per_call=updates_per_call, every=every)
    if updates_per_call % every or updates % every:
        raise ValueError(
            f"updates and updates_per_call must be multiples of every, {every}, not {updates} and {updates_per_call}."
        )

    @functools.partial(jax.jit, static_argnums=2)
    def call(data: PyTree, ts: TrainState, rows: int) -> tuple[TrainState, Row]:
        def one_seed(ts: TrainState) -> tuple[TrainState, Row]:
            def one_row(ts: TrainState, _: None) -> tuple[TrainState, Row]:
                ts, found = jax.lax.scan(lambda ts, _: step(data, ts), ts, length=every)
                mean = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), found)
                return ts, mean | {"update": ts.step, "stopped": ts.stopped}

            return jax.lax.scan(one_row, ts, length=rows)

        return jax.vmap(one_seed)(ts)

    done = int(ts.step.reshape(-1)[0])
    while done < updates:
        rows = min(updates_per_call, updates - done) // every
        ts, found = call(data, ts, rows)
        yield ts, jax.device_get(found)
        done += rows * every
