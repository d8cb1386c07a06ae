"""Beyond the paper: Q_0 and α carried over from past windows, against GIR and against those that see the future.

Digits row by row, the setting of Section 7.2. Along one training trajectory every setting gathers its statistics from
the same episodes at the same parameters, and at some points of it V(Q)/‖g‖² of each is measured on the same fresh
episodes. Then each setting drives a training of its own. Endless streams are another matter, since what counts there
is a running state: `benchmarks/live.py`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from streamgrad import Chunk, EstimatorState, GradientEstimator, Info, Model, Params, batched, bptt, carried, uoro
from streamgrad._typing import Array
from streamgrad.cells import lstm
from streamgrad.noise import Shaping
from streamgrad.theory import b_matrix, collect, optimal_q0
from streamgrad_lab.experiments.base import Experiment
from streamgrad_lab.experiments.carried_report import VARIANCE, sections
from streamgrad_lab.experiments.episodic import episodic_uoro, estimates, solve_alpha, square_norms
from streamgrad_lab.experiments.roots import damped_q0
from streamgrad_lab.experiments.variance import make_task, train_one
from streamgrad_lab.progress import Progress, silent
from streamgrad_lab.tables import write_rows
from streamgrad_lab.tasks import Task
from streamgrad_lab.training import Plan, begin, run, training_step

DRIVER = "one"  # the setting whose gradient the trajectory follows
DAMPING = 0.005


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
      watched: settings whose statistics are gathered along the trajectory, beside that of one stream, which drives, and
        the exact one.
      trained: settings that drive a training.
      seed: of all randomness.
      checkpoints: whether trainings write any.
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
    seed: int = 0
    checkpoints: bool = True


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
            watched=("all", "diagonal"),
            trained=("gir", "exact", "all", "one"),
        ),
    }
)


def make_estimator(name: str, model: Model, task: Task) -> GradientEstimator:
    """The setting of that name, for all streams of the task."""
    length = task.length
    if name == "exact":  # the paper's: Q_0 from exact B of past batches, α exact for the very episode
        return episodic_uoro(model, task.batch_size, damping=DAMPING, noise="rademacher")
    est = uoro(model)
    choices: dict[str, dict[str, Any]] = {
        "all": {"streams": None, "decay": 0.95, "refresh": 1},
        "one": {},
        "diagonal": {"q0": "diagonal"},
    }
    if name != "gir":
        est = carried(est, episode=length, **choices[name])
    return batched(est, task.batch_size)


def make_optimizer(name: str) -> optax.GradientTransformation:
    """Adam with the learning rate and momentum of Appendix G: for GIR, or for optimal Q_0 and α."""
    return optax.adam(0.005 if name == "gir" else 0.003, b1=0.8)


def alongside(estimators: Mapping[str, GradientEstimator], driver: str) -> GradientEstimator:
    """Several estimators on the same streams: one gives the gradient, and all gather what they carry over.

    Args:
      estimators: by name, for a batch of streams.
      driver: the name of that whose gradient, loss and diagnostics are returned.

    Returns:
      An estimator; its `state.shared` has the states by name.
    """

    def init(params: Params) -> EstimatorState:
        return EstimatorState((), (), {name: est.init(params) for name, est in estimators.items()})

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> tuple[Params, EstimatorState, Info]:
        found = {name: est.update(params, state.shared[name], chunk, key) for name, est in estimators.items()}
        grads, _, info = found[driver]
        return grads, state._replace(shared={name: after for name, (_, after, _) in found.items()}), info

    return GradientEstimator(init, update)


class Measured(NamedTuple):
    """What was measured.

    Attributes:
      v: mean of ‖ĝ - g‖² - ‖g‖² over streams and draws, divided by the mean ‖g‖² over streams.
      error: standard error of it over draws.
      square: mean ‖g‖².
    """

    v: Array
    error: Array
    square: Array


def measure(model: Model, draws: int) -> Callable[..., Measured]:
    """Make `measured(params, chunk, q0, alpha, key)`; a chunk is an episode for each stream.

    `q0` is `[N, N]` or `[N]`, and `alpha` `[B, T]`, or None for GIR's. The noise is Gaussian.
    """
    exact = bptt(model)

    @jax.jit
    def measured(params: Params, chunk: Chunk, q0: Array, alpha: Array | None, key: Array) -> Measured:
        pair = Shaping(q0, 1 / q0 if q0.ndim == 1 else jnp.linalg.inv(q0))
        logs = None if alpha is None else jnp.log(alpha)
        gradients = jax.vmap(lambda one: exact.update(params, exact.init(params), one, None)[0].cell)(chunk)
        squares = square_norms(gradients)

        def draw(_: None, key: Array) -> tuple[None, Array]:
            keys = jax.random.split(key, len(squares))
            found = estimates(model, params, chunk, keys, pair, logs, "gaussian")[0].cell
            return None, jnp.mean(square_norms(jax.tree.map(jnp.subtract, found, gradients)) - squares)

        _, values = jax.lax.scan(draw, None, jax.random.split(key, draws))
        square = jnp.mean(squares)
        return Measured(jnp.mean(values) / square, jnp.std(values) / jnp.sqrt(draws) / square, square)

    return measured


def hindsight(model: Model, rounds: int = 3) -> Callable[[Params, Chunk], tuple[Array, Array]]:
    """Make `choose(params, chunk)`: α of each episode from its own C, Q_0 from B of this very batch, by turns.

    Nothing of it is known before the episodes have ended. As Q_0 is fitted to the few episodes that it is then measured
    on, no other can be expected to reach it.
    """

    @jax.jit
    def choose(params: Params, chunk: Chunk) -> tuple[Array, Array]:
        episodes = jax.vmap(lambda one: collect(model, params, one))(chunk)

        def turn(q0: Array, _: None) -> tuple[Array, Array]:
            alpha = jax.vmap(lambda ep: solve_alpha(ep, q0))(episodes)
            return optimal_q0(jnp.mean(jax.vmap(b_matrix)(episodes, alpha), axis=0), DAMPING), alpha

        q0, alphas = jax.lax.scan(turn, jnp.eye(episodes.b.shape[-1], dtype=episodes.b.dtype), length=rounds)
        return q0, alphas[-1]

    return choose


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
    names = (DRIVER, *config.watched, "exact")
    est, optimizer = (
        alongside({name: make_estimator(name, model, task) for name in names}, DRIVER),
        make_optimizer(DRIVER),
    )
    look_back, measured = hindsight(model), measure(model, config.draws)
    solve = jax.jit(lambda params, chunk, q0: jax.vmap(lambda c: solve_alpha(collect(model, params, c), q0))(chunk))
    root, each = jax.random.key(7 + config.seed), config.updates // config.points
    start = jax.tree.map(lambda leaf: leaf[None], begin(model, task, est, optimizer, root))
    step = training_step(task, est, optimizer)
    for point, (many, rows) in enumerate(run(step, task.data, start, each * config.points, each)):
        now = jax.tree.map(lambda leaf: leaf[0], many)
        key, loss = jax.random.fold_in(root, 2**31 + point), float(rows["loss"].mean())
        chunk, _ = task.sample(task.data, task.init(key), key)
        chunk = chunk._replace(reset=None)
        shared = {name: state.shared for name, state in now.estimator.shared.items()}
        exact = shared.pop("exact")
        q0 = damped_q0(exact.b, exact.damping).q0
        gir = (jnp.eye(len(q0), dtype=q0.dtype), None)
        choices = {"gir": gir, "hindsight": look_back(now.params, chunk), "exact": (q0, solve(now.params, chunk, q0))}
        # One that is not ready yet would use the identity and GIR.
        choices |= {name: carried_over(its, task) if bool(its.ready) else gir for name, its in shared.items()}
        for name, (q0, alpha) in choices.items():
            found = measured(now.params, chunk, q0, alpha, key)
            ready = float(shared[name].ready) if name in shared else 1.0
            row = {"task": task.name, "update": int(now.step), "loss": loss, "setting": name}
            yield row | {k: float(x) for k, x in found._asdict().items()} | {"ready": ready, "gamma": gamma_of(alpha)}
        progress(task.name, int(now.step), config.updates, f"loss {loss:.3f}")


def carried_over(shared: Any, task: Task) -> tuple[Array, Array | None]:
    """Q_0 and α of every stream that a setting would use for the next episode."""
    alpha = shared.alpha
    if alpha is not None:
        alpha = jnp.broadcast_to(alpha[:, 0][None], (task.batch_size, task.length))
    return shared.shaping.q0, alpha


def gamma_of(alpha: Array | None) -> float:
    """The geometric mean of the ratios of consecutive α; NaN where they depend on the noise."""
    if alpha is None:
        return float("nan")
    logs = jnp.mean(jnp.log(alpha), axis=0)
    return float(jnp.exp((logs[0] - logs[-1]) / max(len(logs) - 1, 1)))


def run_all(
    config: Config, folder: Path, progress: Progress = silent, resume: bool = False, data: Path | None = None
) -> None:
    """Write `variance_episodes.csv`, and `<setting>/metrics.csv` of every setting that is trained.

    Args:
      config: one of the presets, or another.
      folder: where to.
      progress: told how far it is.
      resume: keep what is there, and go on with the trainings that were broken off.
      data: folder with MNIST.
    """
    task = make_task(config.episodes, config.streams, data)
    model = Model(lstm(task.n_in, config.hidden), task.head)
    if not (resume and (folder / VARIANCE).exists()):
        write_rows(folder / VARIANCE, list(trajectory(model, task, config, progress)), digits=6)
    every = max(1, config.updates // 20)
    plan = Plan(config.updates, every, None, config.seeds, 100 + config.seed, config.checkpoints)
    described = {name: getattr(config, name) for name in ("episodes", "hidden", "streams")}
    for name in config.trained:
        parts = (model, task, make_estimator(name, model, task), make_optimizer(name))
        about = {"experiment": "carried", "config": described, "setting": name}
        train_one(folder / name, plan, parts, f"training, {name}", progress, resume=resume, describe=about)


EXPERIMENT = Experiment(
    "carried",
    "Beyond the paper: Q_0 and alpha from past windows, against GIR and against those that see the future",
    PRESETS,
    run_all,
    sections,
)
