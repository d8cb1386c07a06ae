"""A whole training run: several seeds at once, with its files, its checkpoints, and its end."""

import dataclasses
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from streamgrad._typing import PyTree
from streamgrad.base import GradientEstimator, Model
from streamgrad.checks import check_size
from streamgrad.files import check_room, differences, plain, replace_text
from streamgrad.tasks.base import Task
from streamgrad.train import metrics
from streamgrad.train.checkpoint import Checkpoints
from streamgrad.train.loop import Summary, TrainState, begin, no_summary, run, training_step

Progress = Callable[[int, int, str], None]  # progress(updates made, of how many, a few words)

RUN, CHECKPOINT = "run.json", "checkpoint"
_log = logging.getLogger("streamgrad")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long to train, and what to write down.

    Attributes:
      updates: of the parameters, in all.
      every: how many updates are averaged in one row of the metrics.
      updates_per_call: how many are made between two checkpoints; a kill loses no more than these. A multiple of
        `every`. If it does not divide `updates`, the shorter last call is compiled anew.
      seeds: how many are trained at once.
      seed: the first of them; the others follow it.
      checkpoints: whether to write any. Without them a run cannot be resumed, and orbax is not needed.
    """

    updates: int
    every: int = 1
    updates_per_call: int = 500
    seeds: int = 1
    seed: int = 0
    checkpoints: bool = True

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("updates", "every", "updates_per_call", "seeds")}
        check_size(**sizes)
        check_size(least=0, seed=self.seed)
        for name in ("updates", "updates_per_call"):
            if sizes[name] % self.every:
                raise ValueError(f"{name} must be a multiple of every, {self.every}, not {sizes[name]}.")


class Outcome(NamedTuple):
    """What a run has come to.

    Attributes:
      state: with a leading axis for seeds; that of a seed that stopped is its last good one.
      stopped: for each seed None, or the number of updates it made before the one that was not finite.
      folder: where its files are.
    """

    state: TrainState
    stopped: list[int | None]
    folder: Path


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
    progress: Progress | None = None,
    resume: bool = False,
    describe: Mapping[str, Any] | None = None,
) -> Outcome:
    """Train several seeds at once, and write `metrics.csv`, `metrics.jsonl`, `run.json` and checkpoints as they come.

    Args:
      folder: of this run alone.
      plan: how long, how many seeds, how often to write.
      model: the model.
      task: where its chunks come from.
      estimator: for all streams of the task, see `streamgrad.batched`.
      optimizer: from optax; it sees the gradient of the mean loss of a step.
      summarise: `summarise(chunk, info, grads)`, what to record beside `loss` and `gradient_norm`: a dictionary of
        arrays. Those with axes are spread over columns `name_0`, `name_1`, ….
      progress: `progress(updates made, of how many, a few words)`, called after every hand-over.
      resume: go on from the folder's checkpoint; the run is then, bit for bit, the one that was never broken off. A
        folder without a run begins one; a run that has ended is returned as it is. `updates` may be more than before.
      describe: what else defines the run, such as the command's options; it is written to `run.json`, and a resumed run
        must be described the same.

    Returns:
      The outcome. A seed whose loss, gradient or parameters are not finite stops at its last good state, with a warning
      on the log "streamgrad"; if all do, `Diverged` is raised.

    Example:
      >>> import tempfile, optax, streamgrad as sg
      >>> from streamgrad.train import Plan, train, read_metrics
      >>> from streamgrad.tasks import find_task
      >>> task = find_task("queue", delay=2, batch_size=4, length=3)
      >>> model = sg.Model(sg.cells.vanilla(task.n_in, 5), task.head)
      >>> est = sg.batched(sg.uoro(model), task.batch_size)
      >>> folder = tempfile.mkdtemp()
      >>> plan = Plan(updates=4, every=2, updates_per_call=4, seeds=2, checkpoints=False)
      >>> outcome = train(folder, plan, model, task, est, optax.sgd(0.1))
      >>> [int(update) for update in read_metrics(folder)["update"]]
      [2, 2, 4, 4]
    """
    folder = Path(folder)
    template = _template(plan, model, task, estimator, optimizer)
    check_room(folder, _size(plan, template))
    found = any((folder / name).exists() for name in (RUN, metrics.CSV, CHECKPOINT))
    if found and not resume:
        raise ValueError(f"the folder {folder} has a run already: choose another, or resume it.")
    if found and not plan.checkpoints:
        raise ValueError(f"the run in {folder} cannot be resumed without checkpoints; remove the folder to begin anew.")
    described = plain({"describe": dict(describe or {}), "plan": dataclasses.asdict(plan)})
    if found:
        _check_same(folder, described)
    checkpoints = Checkpoints(folder / CHECKPOINT) if plan.checkpoints else None
    replace_text(folder / RUN, json.dumps(described | {"versions": _versions(), "device": _device()}, indent=2) + "\n")
    step = checkpoints.latest() if checkpoints else None
    if checkpoints and step is not None:
        ts = checkpoints.restore(step, template)
    else:
        ts = _begin(plan, model, task, estimator, optimizer)
    metrics.cut(folder, step or 0)
    ts = _go_on(folder, plan, ts, task, training_step(task, estimator, optimizer, summarise), checkpoints, progress)
    return _end(plan, ts, folder)


def _go_on(
    folder: Path,
    plan: Plan,
    ts: TrainState,
    task: Task,
    step: Callable,
    checkpoints: Checkpoints | None,
    progress: Progress | None,
) -> TrainState:
    """The loop with what happens between two calls of it. Rows come first: those past a checkpoint can be cut."""
    known = np.asarray(ts.stopped)
    with metrics.Writer(folder, range(plan.seed, plan.seed + plan.seeds)) as writer:
        if np.all(known >= 0):
            return ts
        for now, rows in run(step, task.data, ts, plan.updates, plan.updates_per_call, plan.every):
            writer.write(rows)
            ts, done = now, int(rows["update"][0, -1])
            if checkpoints:
                checkpoints.save(done, ts)
            stopped = rows["stopped"][:, -1]
            for index in np.flatnonzero((stopped >= 0) & (known < 0)):
                _log.warning("%s", _stop_message(plan.seed + int(index), int(stopped[index])))
            known = stopped
            if progress:
                progress(done, plan.updates, _words(rows))
            if np.all(stopped >= 0):
                break
    return ts


def _end(plan: Plan, ts: TrainState, folder: Path) -> Outcome:
    stopped = [int(at) if at >= 0 else None for at in np.asarray(ts.stopped)]
    outcome = Outcome(ts, stopped, folder)
    each = [_stop_message(plan.seed + index, at) for index, at in enumerate(stopped) if at is not None]
    if len(each) == plan.seeds:
        raise Diverged(f"every seed has stopped: {'; '.join(each)}.", outcome)
    return outcome


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


def _begin(plan: Plan, *parts: Any) -> TrainState:
    """By way of the host, as a restored state comes, so that no weak type makes the two trace differently."""
    return jax.tree.map(jnp.asarray, jax.device_get(jax.jit(_begin_all(*parts))(_seeds(plan))))


def _template(plan: Plan, *parts: Any) -> PyTree:
    return jax.eval_shape(_begin_all(*parts), jax.eval_shape(lambda: _seeds(plan)))


def _size(plan: Plan, template: PyTree) -> int:
    """Bytes that the run may write: two checkpoints, since the old one goes after the new one has come, and rows."""
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(template))
    rows = plan.updates // plan.every * plan.seeds * 2048
    return (2 * state if plan.checkpoints else 0) + rows + (1 << 16)


def _check_same(folder: Path, described: Mapping[str, Any]) -> None:
    try:
        before = json.loads((folder / RUN).read_text(encoding="utf-8"))
        before = {name: before[name] for name in described}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / RUN} cannot be read, so that this run cannot be resumed: {error}.") from error
    # A run may be made longer; the interval of checkpoints decides which programs run, and so the last bits.
    old, new = before["plan"].get("updates"), described["plan"]["updates"]
    if isinstance(old, int) and old <= new:
        before["plan"]["updates"] = new
    different = [words for part in described for words in differences(before[part], described[part])]
    if different:
        raise ValueError(f"the run in {folder} was begun with another configuration: {'; '.join(different)}.")


def _versions() -> dict[str, str]:
    import streamgrad

    packages = {module.__name__: module.__version__ for module in (streamgrad, jax, np, optax)}
    return {"python": platform.python_version(), **packages}


def _device() -> dict[str, Any]:
    device = jax.devices()[0]
    kind = device.device_kind if device.platform != "cpu" else platform.processor() or platform.machine()
    x64 = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
    return {"platform": device.platform, "kind": kind, "cores": os.cpu_count(), "float64": x64}
