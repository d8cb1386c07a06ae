"""The training loop: a compiled loop inside, a generator outside.

It knows estimators by `GradientEstimator`, optimisers by optax and tasks by `Task` alone. Writing, saving, showing and
stopping are the caller's, between two calls of the compiled program.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from streamgrad import Chunk, GradientEstimator, Info, Model, Params
from streamgrad._typing import Array, Float, Int, PyTree
from streamgrad.checks import check_size
from streamgrad.trees import all_finite
from streamgrad_lab.tasks.base import Task
from streamgrad_lab.training import processes

HELD_OUT = "held_out_loss"  # measured at the end of some rows, and NaN in the others
RESERVED = ("update", "seed", "stopped", "loss", "gradient_norm", HELD_OUT)

Row = dict[str, Array]
Rows = dict[str, np.ndarray]  # [seeds, rows, ...]
Summary = Callable[[Chunk, Info, Params], Row]
StepFn = Callable[[PyTree, "TrainState"], tuple["TrainState", Row]]


class TrainState(NamedTuple):
    """All that a run needs to go on: what is not in here is not needed. A resumed run is the unbroken one.

    Attributes:
      step: number of updates made.
      key: data of the key from which all randomness of the run is folded.
      params: the model's.
      estimator: the estimator's state.
      optimizer: optax's.
      task: where the streams stand.
      stopped: -1, or the number of updates made before the one whose loss, gradient or new parameters were not finite;
        nothing but `step` changes from there on.
      first_loss: that of the first update, before anything was learnt; NaN until then.
    """

    step: Int[Array, ""]
    key: Array
    params: Params
    estimator: PyTree
    optimizer: PyTree
    task: PyTree
    stopped: Int[Array, ""]
    first_loss: Float[Array, ""]


def begin(
    model: Model, task: Task, estimator: GradientEstimator, optimizer: optax.GradientTransformation, key: Array
) -> TrainState:
    """The state before the first update; `vmap` over keys gives several seeds."""
    _, task_key, run_key = jax.random.split(key, 3)
    params = model.init(init_key(key))
    return TrainState(
        jnp.zeros((), jnp.int32),
        jax.random.key_data(run_key),
        params,
        estimator.init(params),
        optimizer.init(params),
        task.init(task_key),
        jnp.full((), -1, jnp.int32),
        jnp.full((), jnp.nan, jnp.float32),
    )


def init_key(key: Array) -> Array:
    """That of the parameters, from a seed's."""
    return jax.random.split(key, 3)[0]


def data_key(ts: TrainState, update: Array) -> Array:
    """That of the chunk of an update, whichever has been made last."""
    return _keys(ts, update)[0]


def _keys(ts: TrainState, update: Array) -> Array:
    """Those of the chunk and of the noise of an update."""
    return jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(ts.key), update))


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
      `step(data, state) -> (state, row)`, for one seed. Calls of one and the same step share their compiled program.
    """

    @jax.jit
    def step(data: PyTree, ts: TrainState) -> tuple[TrainState, Row]:
        chunk_key, noise_key = _keys(ts, ts.step)
        chunk, task_state = task.sample(data, ts.task, chunk_key)
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
        finite = all_finite((row, params))
        good = finite & (ts.stopped < 0)
        stopped = jnp.where((ts.stopped < 0) & ~finite, ts.step, ts.stopped)
        new = ts._replace(params=params, estimator=estimator_state, optimizer=optimizer_state, task=task_state)
        # A seed that has stopped keeps its last good state, while the others go on.
        kept = jax.tree.map(lambda new, old: jnp.where(good, new, old), new, ts)
        if taken := set(RESERVED) & set(summary):
            raise ValueError(f"a summary must not use the names {', '.join(sorted(taken))}, which every row has.")
        first_loss = jnp.where(ts.step == 0, row["loss"].astype(jnp.float32), ts.first_loss)
        return kept._replace(step=ts.step + 1, stopped=stopped, first_loss=first_loss), row | summary

    return step


def calls(
    step: StepFn,
    data: PyTree,
    ts: TrainState,
    updates: int,
    until: Sequence[int],
    every: int = 1,
    seconds: float | None = None,
) -> Iterator[tuple[TrainState, Rows]]:
    """Train several seeds at once, in calls of one program, which is compiled before the first of them.

    How many updates a call makes is an argument of the program: calls of any length give the same bits.

    Args:
      step: from `training_step`.
      data: the task's.
      ts: with a leading axis for seeds on every leaf; a run goes on from `ts.step`.
      updates: at which update to end.
      until: no call goes past a multiple of any of these.
      every: calls end at a multiple of it, unless that many updates take longer than `seconds`.
      seconds: about how long a call takes; None for calls as long as they may be.

    Returns:
      An iterator over calls: the state after it, and the rows of its updates as arrays `[seeds, updates, ...]`, with
      the number of updates made as `update`, and as `stopped` that of `TrainState`.
    """
    check_size(updates=updates, every=every)
    # What is weakly typed at first and not after the first call would be a second program.
    ts = jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype), ts)
    capacity = _capacity(_recorded(step, data, ts), ts.step.shape[0])
    call = functools.partial(_compiled(ts), step, capacity, data)
    done = int(ts.step.reshape(-1)[0])
    if done < updates:
        jax.block_until_ready(call(ts, np.int32(0)))  # compiles, and makes no update

    def advance(ts: TrainState, done: int) -> Iterator[tuple[TrainState, Rows]]:
        wanted = capacity if seconds is None else 1
        while done < updates:
            end = min(done + wanted, updates, *(done - done % each + each for each in until))
            if end - end % every > done:
                end -= end % every
            end = processes.agreed(end)  # which a clock has a say in
            begun = time.monotonic()
            ts, found = call(ts, np.int32(end - done))
            rows = {name: leaf[:, : end - done] for name, leaf in jax.device_get(found).items()}
            if seconds is not None:
                fitting = (end - done) * seconds / max(time.monotonic() - begun, 1e-6)
                wanted = int(min(max(fitting, 1), 8 * wanted, capacity))  # a first short call says little
            done = end
            yield ts, rows

    return advance(ts, done)


def _compiled(ts: TrainState) -> Callable[..., tuple[TrainState, Row]]:
    """`_call` for a state that lies where this one does, and stays there; rows are everywhere."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, ts)
    if not isinstance(ts.step.sharding, NamedSharding):
        return _call_on_one
    rows = NamedSharding(ts.step.sharding.mesh, PartitionSpec())
    return jax.jit(_call, static_argnums=(0, 1), out_shardings=(shardings, rows))


def _call(step: StepFn, capacity: int, data: PyTree, ts: TrainState, count: Array) -> tuple[TrainState, Row]:
    """Make `count` updates of every seed, and keep their rows in a buffer of `capacity`."""
    recorded = _recorded(step, data, ts)

    def update(index: Array, carry: tuple[TrainState, Row]) -> tuple[TrainState, Row]:
        ts, row = step(data, carry[0])
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        return ts, jax.tree.map(lambda rows, new: put(rows, new), carry[1], _record(ts, row))

    def one_seed(ts: TrainState) -> tuple[TrainState, Row]:
        rows = jax.tree.map(lambda leaf: jnp.zeros((capacity, *leaf.shape), leaf.dtype), recorded)
        return jax.lax.fori_loop(0, count, update, (ts, rows))

    return jax.vmap(one_seed)(ts)


_call_on_one = jax.jit(_call, static_argnums=(0, 1))


def run(
    step: StepFn, data: PyTree, ts: TrainState, updates: int, updates_per_call: int, every: int = 1
) -> Iterator[tuple[TrainState, Rows]]:
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
      `stopped` that of `TrainState`.
    """
    check_size(updates=updates, updates_per_call=updates_per_call, every=every)
    if updates_per_call % every or updates % every:
        raise ValueError(
            f"updates and updates_per_call must be multiples of every, {every}, not {updates} and {updates_per_call}."
        )
    averages, gathered = Averages(every), []
    made = calls(step, data, ts, updates, [updates_per_call], every)
    for ts, found in made:
        gathered.append(averages.add(found))
        done = int(found["update"][0, -1])
        if done % updates_per_call == 0 or done == updates:
            yield ts, {name: np.concatenate([rows[name] for rows in gathered], axis=1) for name in gathered[0]}
            gathered.clear()


def run_one(step: StepFn, data: PyTree, ts: TrainState, updates: int) -> TrainState:
    """The state of a single seed after so many updates, for whoever needs a trained network and no record of it."""
    if updates:
        many = jax.tree.map(lambda leaf: leaf[None], ts)
        *_, (many, _) = run(step, data, many, updates, updates)
        ts = jax.tree.map(lambda leaf: leaf[0], many)
    return ts


class Averages:
    """Rows of the metrics from those of single updates, which may come in pieces of any length.

    Args:
      every: how many updates are averaged in one row.
    """

    def __init__(self, every: int):
        self.every = every
        self._left: Rows = {}

    def add(self, found: Rows) -> Rows:
        """The rows that are whole now, `[seeds, rows, ...]`; what is not averaged is that of a row's last update."""
        rows: Rows = {}
        for name, new in found.items():
            joined = np.concatenate([self._left[name], new], axis=1) if name in self._left else new
            whole = joined.shape[1] - joined.shape[1] % self.every
            self._left[name] = joined[:, whole:]
            parts = joined[:, :whole].reshape(len(joined), -1, self.every, *joined.shape[2:])
            rows[name] = parts[:, :, -1] if name in ("update", "stopped", HELD_OUT) else _mean(parts)
        return rows


def _mean(parts: np.ndarray) -> np.ndarray:
    """Over the third axis, in the order and with the reciprocal that XLA takes."""
    with np.errstate(all="ignore"):  # a seed that has stopped may have had infinite numbers
        return np.add.accumulate(parts, axis=2)[:, :, -1] * parts.dtype.type(1 / parts.shape[2])


def _record(ts: TrainState, row: Row) -> Row:
    """A row as it is kept: real numbers, of at least single precision, whose mean means something."""
    kept = {name: jnp.promote_types(jnp.result_type(leaf.dtype, float), jnp.float32) for name, leaf in row.items()}
    row = {name: leaf.astype(kept[name]) for name, leaf in row.items()}
    return row | {"update": ts.step, "stopped": ts.stopped}


def _recorded(step: StepFn, data: PyTree, ts: TrainState) -> PyTree:
    """Shapes and dtypes of the row of one update of one seed."""
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), ts)
    return jax.eval_shape(lambda data, ts: _record(*step(data, ts)), data, one)


def _capacity(recorded: PyTree, seeds: int) -> int:
    """How many updates the buffer of a call holds; it depends on nothing that a resumed run may change."""
    size = seeds * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(recorded))
    return max(1, min(4096, (1 << 26) // size))
