"""Beyond the paper: Q_0 and α carried over from past windows, against GIR and against those that see the future.

Digits row by row, the setting of Section 7.2. Along one training trajectory every setting gathers its statistics from
the same episodes at the same parameters, and at some points of it V(Q)/‖g‖² of each is measured on the same fresh
episodes. Then each setting drives a training of its own. Endless streams are another matter, since what counts there
is a running state: `benchmarks/live.py`.
"""

import csv
import dataclasses
import functools
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import streamgrad as sg
from streamgrad._typing import Array, PyTree
from streamgrad.adapt.averages import CarriedShared
from streamgrad.base import Chunk, GradientEstimator, Model, Params
from streamgrad.estimators import Carry, carried
from streamgrad.lab.experiments.base import Experiment, Progress
from streamgrad.lab.experiments.carried_measure import Exact, exact_setting, hindsight, measure, watch, watcher
from streamgrad.lab.experiments.carried_report import sections
from streamgrad.lab.files import differences, plain, replace_text
from streamgrad.lab.tasks import find_task
from streamgrad.lab.tasks.base import Task

# Learning rate and momentum of Adam, from Appendix G: for GIR, and for optimal Q_0 and α.
ADAM = MappingProxyType({"gir": (0.005, 0.8)})
ADAM_OURS = (0.003, 0.8)


@dataclasses.dataclass(frozen=True)
class Config:
    """How much of it is run.

    Attributes:
      episodes: "mnist" where its files are at hand, else "digits".
      hidden: units of the LSTM.
      streams: B.
      updates: along the trajectory, and of each training.
      points: at how many points of a trajectory V(Q) is measured.
      draws: gradient estimates of each stream, for each measurement.
      seeds: trainings of each setting.
      watched: settings whose statistics are gathered along the trajectory, beside that of one stream, which drives.
      trained: settings that drive a training.
      exact_every: the exact setting looks at one batch in so many along the trajectory; it is slow.
      seed: of all randomness.
    """

    episodes: str = "digits"
    hidden: int = 50
    streams: int = 50
    updates: int = 300
    points: int = 3
    draws: int = 8
    seeds: int = 1
    watched: tuple[str, ...] = ("all",)
    trained: tuple[str, ...] = ("gir", "one")
    exact_every: int = 1
    seed: int = 0


PRESETS = MappingProxyType(
    {
        "smoke": Config(hidden=4, streams=3, updates=20, points=2, draws=2, trained=("gir",)),
        "laptop": Config(),
        "paper": Config(
            episodes="mnist",
            updates=1000,
            points=10,
            draws=16,
            seeds=3,
            watched=("all", "diagonal", "online"),
            trained=("gir", "exact", "all", "one"),
            exact_every=4,
        ),
    }
)


class Followed(NamedTuple):
    """Where a trajectory stands.

    Attributes:
      params: the model's.
      optimizer: optax's state.
      task: where the streams stand.
      state: of the estimator that drives it; None for the exact setting.
      shared: the statistics of those that only watch, by name.
      exact: the exact setting's average of B, or None.
      update: updates made.
    """

    params: Params
    optimizer: PyTree
    task: PyTree
    state: Any
    shared: dict[str, CarriedShared]
    exact: Exact | None
    update: Array


def episode_settings(length: int) -> dict[str, Carry]:
    """What is carried over along episodes, by name."""
    return {
        "all": carried(episode=length, streams=None, decay=0.95, refresh=1),
        "one": carried(episode=length),
        "diagonal": carried(episode=length, q0="diagonal"),
        "online": carried(episode=length, streams=None, alpha="gir", statistics="appendix_f"),
    }


def follow(
    model: Model,
    task: Task,
    driver: str,
    est: GradientEstimator | None,
    watchers: dict[str, Carry],
    exact_every: int | None,
    damping: float = 0.005,
) -> tuple[Callable[[Array], Followed], Callable[[PyTree, Followed, Array, int], tuple[Followed, Array]]]:
    """One trajectory, driven by one estimator, along which others gather their statistics.

    Args:
      model: the model.
      task: where chunks come from.
      driver: the name of the setting whose gradient the optimiser sees.
      est: its estimator, for all streams; None for the exact setting.
      watchers: what others would carry over, by name. They gather what they would as drivers, without their gradients.
      exact_every: how often the exact setting looks at a batch; None for never.
      damping: of the exact setting.

    Returns:
      `begin(key)`, and `go(data, followed, key, updates) -> (followed, loss of each update)`.
    """
    optimizer = optax.adam(*ADAM.get(driver, ADAM_OURS))
    exact = None if exact_every is None else exact_setting(model, task.length, task.batch_size, damping)
    learners = {name: watcher(model, carry) for name, carry in watchers.items()}

    def begin(key: Array) -> Followed:
        params_key, task_key = jax.random.split(key)
        params = model.init(params_key)
        return Followed(
            params,
            optimizer.init(params),
            task.init(task_key),
            None if est is None else est.init(params),
            {name: init(params) for name, (init, _) in learners.items()},
            None if exact is None else exact.init(params),
            jnp.zeros((), jnp.int32),
        )

    def update(data: PyTree, now: Followed, key: Array) -> tuple[Followed, Array]:
        data_key, noise_key = jax.random.split(jax.random.fold_in(key, now.update))
        chunk, at = task.sample(data, now.task, data_key)
        state, average = now.state, now.exact
        if est is None:
            assert exact is not None and average is not None
            grads, loss, average = exact.update(now.params, average, chunk, noise_key)
        else:
            grads, state, info = est.update(now.params, now.state, chunk, noise_key)
            loss = jnp.mean(info.loss)
            if exact is not None and exact_every is not None:
                look = functools.partial(exact.look, now.params, chunk=chunk)
                average = jax.lax.cond(now.update % exact_every == 0, look, lambda average: average, average)
        shared = now.shared
        if learners:
            seen = watch(model, now.params, now.state.cell, chunk)
            shared = {name: look(now.params, shared[name], seen, chunk) for name, (_, look) in learners.items()}
        grads = jax.tree.map(lambda leaf: leaf / task.length, grads)
        changes, optimizer_state = optimizer.update(grads, now.optimizer, now.params)
        params = jax.tree.map(jnp.add, now.params, changes)
        return Followed(params, optimizer_state, at, state, shared, average, now.update + 1), loss

    def go(data: PyTree, now: Followed, key: Array, updates: int) -> tuple[Followed, Array]:
        return jax.lax.scan(lambda now, _: update(data, now, key), now, length=updates)

    return begin, jax.jit(go, static_argnums=3)


def trajectory(model: Model, task: Task, config: Config, progress: Progress) -> Iterator[dict[str, Any]]:
    """Rows of V(Q)/‖g‖² along one trajectory, driven by what is carried over from one stream.

    Args:
      model: the model.
      task: gives the episodes.
      config: how much.
      progress: told of it.

    Yields:
      The rows.
    """
    carries, updates = episode_settings(task.length), config.updates
    watchers = {name: carry for name, carry in carries.items() if name in config.watched}
    est = sg.batched(sg.uoro(model, carry=carries["one"]), task.batch_size)
    begin, go = follow(model, task, "one", est, watchers, config.exact_every)
    look_back = hindsight(model, damping=0.005)
    measured = measure(model, task.length, config.draws)
    solve = exact_setting(model, task.length, task.batch_size, 0.005)
    root = jax.random.key(7 + config.seed)
    now, each = begin(root), updates // config.points
    size = sg.cuts.layout(model.cell, model.cell.cuts["preactivation"]).size
    for point in range(config.points):
        now, loss = go(task.data, now, root, each)
        key = jax.random.fold_in(root, 2**31 + point)
        chunk, _ = task.sample(task.data, task.init(key), key)
        chunk = Chunk(chunk.inputs, chunk.targets)
        shared = {"one": now.state.shared, **now.shared}
        choices: dict[str, tuple] = {"gir": (jnp.eye(size), None), "hindsight": look_back(now.params, chunk)}
        assert now.exact is not None
        choices["exact"] = solve.choose(now.params, now.exact, chunk)
        # One that is not ready yet would use the identity and GIR.
        choices |= {
            name: chosen(state, task) if bool(state.ready) else choices["gir"] for name, state in shared.items()
        }
        for name, (q0, alpha) in choices.items():
            found = measured(now.params, chunk, q0, alpha, key)
            yield {
                "task": task.name,
                "update": int(now.update),
                "loss": float(jnp.mean(loss)),
                "setting": name,
                "v": float(found.v),
                "error": float(found.error),
                "square": float(found.square),
                "ready": float(shared[name].ready) if name in shared else 1.0,
                "gamma": gamma_of(alpha),
            }
        progress(task.name, int(now.update), updates, f"loss {float(jnp.mean(loss)):.3f}")


def chosen(shared: Any, task: Task) -> tuple[Array, Array | None]:
    """Q_0 and α of every stream that a setting would use for the next episode."""
    q0, alpha = shared.shaping.q0, shared.alpha
    if alpha is None:
        return q0, None
    return q0, jnp.broadcast_to(alpha[:, 0][None], (task.batch_size, task.length))


def gamma_of(alpha: Array | None) -> float:
    """The geometric mean of the ratios of consecutive α; NaN where they depend on the noise."""
    if alpha is None:
        return float("nan")
    logs = jnp.mean(jnp.log(alpha), axis=0)
    return float(jnp.exp((logs[0] - logs[-1]) / max(len(logs) - 1, 1)))


def training(model: Model, task: Task, name: str, config: Config, progress: Progress) -> Iterator[dict[str, Any]]:
    """Rows of the loss of one setting that drives its own training."""
    carry = episode_settings(task.length).get(name)
    est = None if name == "exact" else sg.batched(sg.uoro(model, carry=carry), task.batch_size)
    begin, go = follow(model, task, name, est, {}, 1 if name == "exact" else None)
    each = max(1, config.updates // 20)
    for seed in range(config.seeds):
        root = jax.random.key(100 + config.seed + seed)
        now = begin(root)
        while int(now.update) < config.updates:
            now, loss = go(task.data, now, root, min(each, config.updates - int(now.update)))
            yield {"setting": name, "seed": seed, "update": int(now.update), "loss": float(jnp.mean(loss))}
            done = seed * config.updates + int(now.update)
            progress(f"training, {name}", done, config.seeds * config.updates, f"loss {float(jnp.mean(loss)):.3f}")


def run(config: Config, folder: Path, progress: Progress, resume: bool = False, data: Path | None = None) -> None:
    """Run it, and write `variance_*.csv` and `training_*.csv` into the folder.

    Args:
      config: one of the presets, or another.
      folder: where to.
      progress: told how far it is.
      resume: whether parts that are complete are kept; those of another configuration are refused.
      data: folder with MNIST.
    """
    begin_folder(folder, config, resume)
    where = {"folder": data} if config.episodes == "mnist" else {}
    task = find_task(config.episodes, batch_size=config.streams, **where)
    model = sg.Model(sg.cells.lstm(task.n_in, config.hidden), task.head)
    write(folder / "variance_episodes.csv", resume, lambda: trajectory(model, task, config, progress))
    for name in config.trained:
        write(folder / f"training_{name}.csv", resume, lambda name=name: training(model, task, name, config, progress))


def begin_folder(folder: Path, config: Config, resume: bool) -> None:
    """Make the folder, and write down what it is for; ValueError where it holds something else."""
    made, noted = plain(dataclasses.asdict(config)), folder / "config.json"
    if noted.exists() and not resume:
        raise ValueError(f"the folder {folder} has a run already: choose another, or resume it.")
    if noted.exists() and (found := differences(json.loads(noted.read_text()), made)):
        raise ValueError(f"the run in {folder} is another one: {'; '.join(found)}.")
    if not noted.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(noted, json.dumps(made, indent=2) + "\n")


def write(path: Path, resume: bool, rows: Callable[[], Iterator[dict[str, Any]]]) -> None:
    """Write rows as CSV once all are there, so that a file that is there is complete."""
    if resume and path.exists():
        return
    found = list(rows())
    text = io.StringIO()
    writer = csv.DictWriter(text, found[0], lineterminator="\n")
    writer.writeheader()
    for row in found:
        writer.writerow({key: f"{x:.6g}" if isinstance(x, float) else x for key, x in row.items()})
    replace_text(path, text.getvalue())


EXPERIMENT = Experiment(
    "carried",
    "Beyond the paper: Q_0 and alpha from past windows, against GIR and against those that see the future",
    PRESETS,
    run,
    sections,
)
