"""A whole training run: several seeds at once, with its files, its checkpoints, and its end."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from streamgrad import GradientEstimator, Model
from streamgrad._typing import PyTree
from streamgrad.checks import check_size
from streamgrad_lab import interrupts
from streamgrad_lab.files import Unwritten, check_room, sweep
from streamgrad_lab.manifest import (
    FORMAT,
    Manifest,
    check_same,
    check_same_data,
    new_manifest,
    resumed,
    save_manifest,
)
from streamgrad_lab.progress import COMPILING, Show
from streamgrad_lab.tasks.base import Task, digest
from streamgrad_lab.tasks.checking import check_task
from streamgrad_lab.training import metrics, processes
from streamgrad_lab.training.checkpoint import KEPT, REMEDY, Checkpoints, Misfit, steps
from streamgrad_lab.training.loop import Averages, Rows, Summary, TrainState, begin, calls, no_summary, training_step
from streamgrad_lab.training.measure import held_out_loss, measured_every, untrained_loss, with_held_out

CHECKPOINT = "checkpoint"
CALL_SECONDS = 1.0  # how often rows are written and progress is shown, and how long a Ctrl-C may have to wait
CHECKPOINT_SECONDS = 20.0
RISE = 2.0  # a loss that ends above so many times that of the untrained network has exploded
_log = logging.getLogger("streamgrad")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long to train, and what to write down.

    Attributes:
      updates: of the parameters, in all.
      every: how many updates are averaged in one row of the metrics.
      checkpoint_every: how many are made between two checkpoints, a multiple of `every`; a kill loses no more. None for
        one about every 20 seconds. It changes no number.
      seeds: how many are trained at once.
      seed: the first of them; the others follow it.
      checkpoints: whether to write any. Without them a run cannot be resumed, and orbax is not needed.
    """

    updates: int
    every: int = 1
    checkpoint_every: int | None = None
    seeds: int = 1
    seed: int = 0
    checkpoints: bool = True

    def __post_init__(self) -> None:
        named = {name: getattr(self, name) for name in ("updates", "every", "checkpoint_every", "seeds")}
        sizes = {name: size for name, size in named.items() if size is not None}
        check_size(**sizes)
        check_size(least=0, seed=self.seed)
        for name in ("updates", "checkpoint_every"):
            if sizes.get(name, 0) % self.every:
                raise ValueError(f"{name} must be a multiple of every, {self.every}, not {sizes[name]}.")


class Outcome(NamedTuple):
    """What a run has come to.

    Attributes:
      state: with a leading axis for seeds; that of a seed that stopped is its last good one.
      stopped: for each seed None, or the number of updates it made before the one that was not finite.
      folder: where its files are.
      risen: for each seed None, or a sentence that says how far its loss rose, see `RISE`.
    """

    state: TrainState
    stopped: list[int | None]
    folder: Path
    risen: list[str | None]


class Diverged(ArithmeticError):
    """Every seed has stopped; `outcome` has the last good states."""

    def __init__(self, message: str, outcome: Outcome):
        super().__init__(message)
        self.outcome = outcome


def train(
    folder: Path | str,
    plan: Plan,
    model: Model,
    task: Task,
    estimator: GradientEstimator,
    optimizer: optax.GradientTransformation,
    *,
    summarise: Summary = no_summary,
    progress: Show | None = None,
    resume: bool = False,
    describe: Mapping[str, Any] | None = None,
) -> Outcome:
    """Train several seeds at once, and write `metrics.csv`, `run.json` and checkpoints as they come.

    Args:
      folder: of this run alone.
      plan: how long, how many seeds, how often to write.
      model: the model.
      task: where its chunks come from.
      estimator: for all streams of the task, see `streamgrad.batched`.
      optimizer: from optax; it sees the gradient of the mean loss of a step.
      summarise: `summarise(chunk, info, grads)`, what to record beside `loss` and `gradient_norm`: a dictionary of
        arrays. Those with axes are spread over columns `name_0`, `name_1`, ….
      progress: `progress(updates made, of how many, a few words)`, called before the program is compiled, then every
        second or so. If it raises KeyboardInterrupt, what has been made is saved first.
      resume: go on from the newest checkpoint; the run is then, bit for bit, the one that was never broken off. A
        folder without a run begins one; a run that has ended is returned as it is. `updates` may be more than before.
      describe: what else defines the run, such as the command's options; it is written to `run.json`, and a resumed run
        must be described the same.

    Returns:
      The outcome. A seed whose loss, gradient or parameters are not finite stops at its last good state, with a warning
      on the log "streamgrad"; if all do, `Diverged` is raised. A loss that ends far above its beginning is a warning.
      `streamgrad_lab.locks.Busy`, a ValueError, where another process writes this run.

    Example:
      >>> import tempfile, optax, streamgrad as sg
      >>> from streamgrad_lab.training import Plan, train, read_metrics
      >>> from streamgrad_lab.tasks import find_task
      >>> task = find_task("queue", delay=2, batch_size=4, length=3)
      >>> model = sg.Model(sg.cells.vanilla(task.n_in, 5), task.head)
      >>> est = sg.batched(sg.rtrl(model), task.batch_size)
      >>> folder = tempfile.mkdtemp()
      >>> plan = Plan(updates=4, every=2, seeds=2, checkpoints=False)
      >>> outcome = train(folder, plan, model, task, est, optax.sgd(0.1))
      >>> [int(update) for update in read_metrics(folder)["update"]]
      [2, 2, 4, 4]
    """
    folder = Path(folder)
    try:
        words = f"stopped by SIGTERM; with resume=True the same call goes on with what is in {folder}."
        with interrupts.terminable(words), processes.locked_together(folder):
            return _train(folder, plan, (model, task, estimator, optimizer), summarise, progress, resume, describe)
    except Unwritten as error:
        raise error.then(_after_an_error(plan, folder)) from error


def _train(
    folder: Path,
    plan: Plan,
    parts: tuple[Model, Task, GradientEstimator, optax.GradientTransformation],
    summarise: Summary,
    progress: Show | None,
    resume: bool,
    describe: Mapping[str, Any] | None,
) -> Outcome:
    """As `train`, in a folder that is ours alone."""
    model, task, estimator, optimizer = parts
    template = _template(plan, *parts)
    shardings = processes.shardings_of(estimator, template)
    check_room(folder, _size(plan, template))
    check_task(task)
    held_out_every = measured_every(task, plan.every)
    described = {**(describe or {}), "plan": dataclasses.asdict(plan)}
    manifest = new_manifest("training", described, data_hash=digest(task))
    begun = resumed(folder, manifest, resume, also=(metrics.CSV, CHECKPOINT))
    if begun is not None:
        _check_resumed(folder, plan, begun, manifest, task)
    checkpoints = Checkpoints(folder / CHECKPOINT) if plan.checkpoints else None
    saved = checkpoints.newest() if checkpoints else None
    if checkpoints and saved is not None:
        done, ts = saved[0], processes.place(_fitted(checkpoints, saved, template, begun), shardings)
    elif begun is not None and metrics.has_rows(folder):
        raise ValueError(f"{folder} has rows of a run, but its checkpoint {folder / CHECKPOINT} is gone: {REMEDY}.")
    else:
        done, ts = 0, _begin(plan, shardings, *parts)
    processes.together("begin")  # all have looked into the folder
    if processes.first():
        sweep(folder)
        if checkpoints:
            checkpoints.sweep()
        unmeasured = held_out_every is not None and done < plan.updates and done % held_out_every > 0
        metrics.cut(folder, _rows_until(plan, done, np.asarray(ts.stopped)), unmeasured)
        save_manifest(folder, manifest)
    processes.together("written")
    if checkpoints and saved is None:  # before the first row: rows without a checkpoint mean that it was lost
        checkpoints.save(0, ts)
    if done < plan.updates and np.any(np.asarray(ts.stopped) < 0):
        if progress:
            progress(done, plan.updates, COMPILING)
        until = [each for each in (plan.checkpoint_every, held_out_every) if each is not None]
        step = training_step(task, estimator, optimizer, summarise)
        made = calls(step, task.data, ts, plan.updates, until, plan.every, CALL_SECONDS)
        if held_out_every is not None:
            made = with_held_out(made, held_out_loss(model, task, ts), held_out_every, plan.updates)
        # Of several processes none may leave the loop by itself: where one is asked to stop, all do, see `_go_on`.
        with interrupts.hold() if processes.several() else contextlib.nullcontext():
            seeds = range(plan.seed, plan.seed + plan.seeds)
            with metrics.Writer(folder, seeds) if processes.first() else contextlib.nullcontext() as writer:
                ts = _go_on(plan, done, ts, made, writer, checkpoints, progress)
            processes.together("end")
    return _end(plan, ts, folder, model, task)


def _check_resumed(folder: Path, plan: Plan, begun: Manifest, now: Manifest, task: Task) -> None:
    """A run goes on as it was begun, on the same data; ValueError, in which the difference is named, if not."""
    if not plan.checkpoints:
        raise ValueError(f"the run in {folder} cannot go on without checkpoints: begin one in another folder.")
    check_same(folder, _as_free(begun, now), now.describe)
    precisions = ["float64" if run.device.endswith("float64") else "float32" for run in (begun, now)]
    check_same(folder, {"precision": precisions[0]}, {"precision": precisions[1]})
    check_same_data(folder, begun.data_hash, now.data_hash)
    if begun.format < 3 and task.held_out is not None:  # from before anything was held out
        raise ValueError(
            f"the run in {folder} was made by {begun.made_by}, which trained on what the task {task.name} holds out by "
            "now: go on with that version, or begin again in another folder."
        )


def _fitted(checkpoints: Checkpoints, saved: tuple[int, dict], template: PyTree, begun: Manifest | None) -> PyTree:
    """The state of a checkpoint. One of an older format may have been another's memory, and says whose."""
    try:
        return checkpoints.fit(*saved, template)
    except Misfit as error:
        if begun is None or begun.format >= FORMAT:
            raise
        difference = str(error).rpartition(": ")[2].rstrip(".")
        raise ValueError(
            f"the run in {checkpoints.folder.parent} was made by {begun.made_by}, and the memory of this one, format "
            f"{FORMAT}, is another ({difference}): go on with that version, or begin again in another folder."
        ) from error


def _after_an_error(plan: Plan, folder: Path) -> str:
    """How a run goes on whose files could not be written."""
    if not plan.checkpoints:
        return "without checkpoints the run cannot go on: once {once}, begin again in another folder."
    saved = steps(folder / CHECKPOINT)
    where = f"goes on from update {saved[-1]}" if saved else "begins anew"
    return f"nothing is lost: once {{once}}, resume the run, which {where}."


def _go_on(
    plan: Plan,
    done: int,
    ts: TrainState,
    made: Iterator[tuple[TrainState, Rows]],
    writer: metrics.Writer | None,
    checkpoints: Checkpoints | None,
    progress: Show | None,
) -> TrainState:
    """What happens between two calls of the loop. Rows come first: those past a checkpoint can be cut."""
    known, averages, words = np.asarray(ts.stopped), Averages(plan.every), ""
    written = saved = (done, ts)  # at the end of a row, where alone a run can go on
    due = time.monotonic() + CHECKPOINT_SECONDS

    def save() -> None:
        nonlocal saved, due
        if checkpoints and saved[0] != written[0]:
            checkpoints.save(*written)
        saved, due = written, time.monotonic() + CHECKPOINT_SECONDS

    try:
        while done < plan.updates and (np.any(known < 0) or done % plan.every):
            with interrupts.hold():
                ts, found = next(made)
                rows, done = averages.add(found), int(found["update"][0, -1])
                whole = rows["update"].shape[1] > 0
                if whole and writer is not None:
                    writer.write(rows)
                if done % plan.every == 0:
                    written = (done, ts)
                late = time.monotonic() >= due
                if processes.agreed(late) if plan.checkpoint_every is None else done % plan.checkpoint_every == 0:
                    save()
                stopped = found["stopped"][:, -1]
                for index in np.flatnonzero((stopped >= 0) & (known < 0)):
                    _log.warning("%s", _stop_message(plan.seed + int(index), int(stopped[index])))
                known = stopped
                words = _words(rows if whole else found) if whole or not words else words
                if processes.several() and (code := processes.largest(interrupts.code())):
                    save()
                    interrupts.ask(code)
                    raise KeyboardInterrupt
            if progress:
                progress(done, plan.updates, words)
    except KeyboardInterrupt:
        if not processes.several():  # which save together, or not at all
            with interrupts.hold():
                save()
        raise
    save()
    return written[1]


def _rows_until(plan: Plan, done: int, stopped: np.ndarray) -> list[tuple[int, int]]:
    """The update and seed of each row that a run has written when it has made so many updates."""
    ends = [(plan.seed + index, done if at < 0 else at) for index, at in enumerate(stopped)]
    return [(update, seed) for update in range(plan.every, done + 1, plan.every) for seed, end in ends if update <= end]


def _end(plan: Plan, ts: TrainState, folder: Path, model: Model, task: Task) -> Outcome:
    stopped = [int(at) if at >= 0 else None for at in np.asarray(ts.stopped)]
    columns = metrics.read(folder) if None in stopped else {}  # where all have stopped there may be no row
    last = [_last_loss(columns, plan.seed + index) if at is None else None for index, at in enumerate(stopped)]
    risen = _risen(plan, ts, model, task, last)
    for sentence in filter(None, risen):
        _log.warning("%s", sentence)
    outcome = Outcome(ts, stopped, folder, risen)
    each = [_stop_message(plan.seed + index, at) for index, at in enumerate(stopped) if at is not None]
    if len(each) == plan.seeds:
        raise Diverged(f"every seed has stopped: {'; '.join(each)}.", outcome)
    return outcome


def _risen(plan: Plan, ts: TrainState, model: Model, task: Task, last: list[float | None]) -> list[str | None]:
    """For each seed how far its loss rose, in words, if it ended at more than `RISE` times the untrained network's.

    The loss of the first update, which costs nothing, clears most. It convicts none: the first targets may be easier
    than those to come, as where they are zero until there is something to recall.
    """
    suspects = {
        index: loss
        for index, (loss, first) in enumerate(zip(last, np.asarray(ts.first_loss), strict=True))
        if loss is not None and loss > RISE * abs(float(first))
    }
    if not suspects:
        return [None] * plan.seeds
    untrained = untrained_loss(model, task, ts, _seeds(plan))
    return [
        f"seed {plan.seed + index} has learnt nothing: its loss rose from {before:.4g}, that of the untrained network, "
        f"to {suspects[index]:.4g}; try a lower learning rate"
        if index in suspects and suspects[index] > RISE * abs(before)
        else None
        for index, before in enumerate(untrained.tolist())
    ]


def _last_loss(columns: Mapping[str, np.ndarray], seed: int) -> float:
    """Over the last tenth of its rows, as single ones are noisy."""
    loss = columns["loss"][columns["seed"] == seed]
    return float(np.mean(loss[-max(1, len(loss) // 10) :]))


def _stop_message(seed: int, made: int) -> str:
    return f"seed {seed} stopped at update {made + 1}, where its loss, gradient or parameters were not finite"


def _words(rows: Mapping[str, np.ndarray]) -> str:
    going = rows["stopped"][:, -1] < 0
    if not going.any():
        return "all seeds have stopped"
    loss = f"loss {np.mean(rows['loss'][going, -1]):.4g}"
    return loss if going.all() else f"{loss}, {np.sum(~going)} of {len(going)} seeds stopped"


def _seeds(plan: Plan) -> jax.Array:
    return jnp.arange(plan.seed, plan.seed + plan.seeds, dtype=jnp.uint32)


def _begin_all(model: Model, task: Task, estimator: Any, optimizer: Any) -> Callable[[jax.Array], TrainState]:
    return jax.vmap(lambda seed: begin(model, task, estimator, optimizer, jax.random.key(seed)))


def _begin(plan: Plan, shardings: PyTree | None, *parts: Any) -> TrainState:
    """By way of the host, as a restored state comes: no weak type may make the two trace differently."""
    if shardings is not None:  # each device makes its own part
        return jax.jit(_begin_all(*parts), out_shardings=shardings)(_seeds(plan))
    return jax.tree.map(jnp.asarray, jax.device_get(jax.jit(_begin_all(*parts))(_seeds(plan))))


def _template(plan: Plan, *parts: Any) -> PyTree:
    return jax.eval_shape(_begin_all(*parts), jax.eval_shape(lambda: _seeds(plan)))


def _size(plan: Plan, template: PyTree) -> int:
    """Bytes that the run may write: checkpoints, of which the oldest goes after the new one has come, and rows."""
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(template))
    rows = plan.updates // plan.every * plan.seeds * 2048
    return ((KEPT + 1) * state if plan.checkpoints else 0) + rows + (1 << 16)


def _as_free(begun: Manifest, asked: Manifest) -> dict[str, Any]:
    """How the run was begun, but for what may change: it may be made longer, and saved more or less often."""
    before, now = dict(begun.describe.get("plan", {})), asked.describe["plan"]
    before["checkpoint_every"] = now["checkpoint_every"]
    if before.get("updates", 0) <= now["updates"]:
        before["updates"] = now["updates"]
    return {**begun.describe, "plan": before}
