"""Section 9 of the paper: REINFORCE as approximate RTRL. The paper has no figure of it; this is ours.

| file | what it holds |
|---|---|
| `limit.csv` | distance of REINFORCE with the noise-free baseline from UORO at the state, under the same noise |
| `variance.csv` | total variance of REINFORCE over σ, with each baseline; what theory says; the bias of the noise |
| `shaping.csv` | what the best Q_0 at the state does to both |

A network learns for a while, by BPTT, to recall the bit of a few steps ago. Then all estimates are of the gradient of
one stream of it. σ falls over six decades, which takes float64, whatever the default is.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from streamgrad import Chunk, Model, Params, batched, bptt, cells, cuts, heads, reinforce, theory, uoro, with_noise
from streamgrad._typing import Array, Float
from streamgrad.noise import Shaping, shaping
from streamgrad_lab.experiments.base import Experiment
from streamgrad_lab.experiments.reinforce_report import FILES, sections
from streamgrad_lab.progress import Progress, silent
from streamgrad_lab.tables import write_rows
from streamgrad_lab.tasks import Task
from streamgrad_lab.training import begin, run_one, training_step

CELLS: Mapping[str, Callable] = {"vanilla": cells.vanilla, "lstm": cells.lstm, "gru": cells.gru}
BASELINES: Mapping[str, dict[str, Any]] = {
    "none": {},
    "average": {"baseline": "average"},
    "position": {"baseline": "average"},  # and `positions`
    "noise_free": {"baseline": "noise_free"},
}
# Samples of the noise side by side: enough for a GPU not to wait for single kernels.
AT_ONCE = 2000

Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Config:
    """What is run.

    Attributes:
      cells: whose gradients are estimated; the variance over σ is measured for the first.
      hidden: units.
      length: steps of the stream.
      delay: how many steps ago the bit was that is to be recalled.
      updates: of training before, by BPTT on 16 streams.
      draws: of the noise, for the distance to UORO.
      samples: of the noise, for variances.
      episodes: of the past, over which losses are averaged.
      largest: σ.
      decades: over how many σ falls.
      per_decade: values of σ.
      seed: of everything.
    """

    cells: tuple[str, ...] = ("lstm", "gru", "vanilla")
    hidden: int = 8
    length: int = 20
    delay: int = 3
    updates: int = 200
    draws: int = 32
    samples: int = 4000
    episodes: int = 50
    largest: float = 1.0
    decades: int = 6
    per_decade: int = 1
    seed: int = 0

    @property
    def sigmas(self) -> np.ndarray:
        """All σ, falling."""
        return self.largest * 10.0 ** -np.linspace(0, self.decades, self.decades * self.per_decade + 1)


PRESETS = {
    "smoke": Config(cells=("vanilla",), hidden=2, length=5, updates=0, draws=4, samples=4000, episodes=4),
    "laptop": Config(),
    "paper": Config(hidden=20, length=50, delay=4, updates=1000, draws=256, samples=20_000, per_decade=4),
}


class _Moments(NamedTuple):
    total: float
    error: float


Sampler = Callable[[float, Array], _Moments]


class Subject(NamedTuple):
    """A trained network and the stream whose gradient is estimated.

    Attributes:
      model: the model.
      params: its parameters.
      chunk: the stream, beginning with a reset.
      past: other streams, one after the other, for the average of past losses.
      episode: of `chunk`, at the state.
      q0: the best Q_0 at the state.
    """

    model: Model
    params: Params
    chunk: Chunk
    past: Chunk
    episode: theory.Episode
    q0: Float[Array, "S S"]


def run(
    config: Config, folder: Path, progress: Progress = silent, resume: bool = False, data: Path | None = None
) -> None:
    """Compute everything, and write `folder/*.csv` at the end.

    Args:
      config: one of `PRESETS`, or a variation.
      folder: of this experiment.
      progress: `progress(setting, parts done, of how many, a few words)`.
      resume: do nothing where the results are there; there is nothing to go on with.
      data: needs none.
    """
    del data
    paths = [Path(folder) / file for file in FILES]
    if resume and all(path.exists() for path in paths):
        return
    parts, told = 3 * len(config.cells) + len(BASELINES) + 1, 0

    def tell(words: str) -> None:
        nonlocal told
        told += 1
        progress("reinforce", told, parts, words)

    limits, variances, shapings = [], [], []
    # What is called float32 in the results has all its digits on a GPU as well, which would take TF32.
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        for index, cell in enumerate(config.cells):
            subject = _subject(config, cell)
            tell(f"{cell}: trained")
            limits += _limit(config, cell, subject, also_float32=index == 0)
            tell(f"{cell}: distance to UORO")
            with_twin = _sampler(config, subject, "noise_free")
            if index == 0:
                for baseline in BASELINES:
                    sample = with_twin if baseline == "noise_free" else _sampler(config, subject, baseline)
                    variances += _variance(config, cell, subject, baseline, sample)
                    tell(f"{cell}: variance, baseline {baseline}")
                variances += _bias(config, cell, subject)
                tell(f"{cell}: bias")
            shapings += _shaping(config, cell, subject, with_twin)
            tell(f"{cell}: Q_0")
    for path, rows in zip(paths, (limits, variances, shapings), strict=True):
        write_rows(path, rows, digits=10)


def _subject(config: Config, cell: str) -> Subject:
    model = Model(CELLS[cell](1, config.hidden), heads.bernoulli(1))
    init_key, train_key, data_key = jax.random.split(jax.random.key(config.seed), 3)
    task = _recall(config, train_key)
    est, optimizer = batched(bptt(model), task.batch_size), optax.adam(1e-2)
    params = jax.tree.map(lambda leaf: leaf.astype(float), model.init(init_key))
    ts = begin(model, task, est, optimizer, init_key)._replace(params=params, optimizer=optimizer.init(params))
    params = run_one(training_step(task, est, optimizer), task.data, ts, config.updates).params
    drawn = _streams(config, data_key, 1 + config.episodes)
    chunk = jax.tree.map(lambda leaf: leaf[0], drawn)
    past = jax.tree.map(lambda leaf: leaf[1:].reshape(-1, *leaf.shape[2:]), drawn)
    episode = jax.jit(lambda params: theory.collect(model, params, chunk, cut="state"))(params)
    return Subject(model, params, chunk, past, episode, theory.state_q0(episode))


def _streams(config: Config, key: Array, count: int) -> Chunk:
    """Random bits, each to be given back after the delay; every stream is one episode."""
    bits = jax.random.bernoulli(key, 0.5, (count, config.length, 1)).astype(float)
    begins = jnp.zeros((count, config.length), bool).at[:, 0].set(True)
    return Chunk(bits, jnp.roll(bits, config.delay, axis=1), begins)


def _recall(config: Config, key: Array) -> Task:
    """The task of the training: 16 fresh streams for each update, from a key of its own."""

    def sample(keys: Array, at: Array, _: Array) -> tuple[Chunk, Array]:
        return _streams(config, jax.random.wrap_key_data(keys[at]), 16), at + 1

    keys = jax.random.key_data(jax.random.split(key, max(1, config.updates)))
    at = jnp.zeros((), jnp.int32)
    return Task("recall", 1, heads.bernoulli(1), 16, config.length, True, keys, lambda _: at, sample)


def _flat(tree: Any) -> Array:
    return ravel_pytree(tree)[0]


def _draw(seed: int, *shape: int) -> Array:
    """Gaussian noise; by numpy, for which nothing need be compiled."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def _size(model: Model) -> int:
    return cuts.layout(model.cell, model.cell.cuts["state"]).size


def _limit(config: Config, cell: str, subject: Subject, also_float32: bool) -> Rows:
    """Relative distance to UORO under the same noise: root mean square over draws of both."""
    model, params, chunk, _, _, best = subject
    size = _size(model)
    noise = _draw(config.seed + 1, config.draws, config.length, size)
    # Q_0 is in the shared state: one program serves both.
    est = reinforce(model, noise="given", q0=np.eye(size))
    limit = uoro(model, cut="state", rescale="none", noise="given", q0=np.eye(size))

    @jax.jit
    def reference(q0: Array) -> Array:
        state = limit.init(params)
        state = state._replace(shared=state.shared._replace(shaping=shaping(q0)))
        return jax.vmap(lambda u: _flat(limit.update(params, state, chunk, u)[0].cell))(noise)

    @jax.jit
    def estimates(params: Params, chunk: Chunk, q0: Array, sigma: Array) -> Array:
        state = with_noise(est.init(params), sigma=sigma)
        state = state._replace(shared=state.shared._replace(shaping=shaping(q0, sigma.dtype)))
        return jax.vmap(lambda u: _flat(est.update(params, state, chunk, u)[0].cell))(noise.astype(sigma.dtype))

    rows: Rows = []
    cases = [("identity", jnp.eye(size), "float64"), ("best", best, "float64")]
    for name, q0, precision in [*cases, ("identity", jnp.eye(size), "float32")] if also_float32 else cases:
        want = np.asarray(reference(q0))
        dtype = jnp.dtype(precision)
        real = jax.tree.map(lambda leaf, d=dtype: leaf.astype(d), params)
        inputs = chunk._replace(inputs=chunk.inputs.astype(dtype), targets=chunk.targets.astype(dtype))
        for sigma in config.sigmas:
            got = np.asarray(estimates(real, inputs, q0, jnp.asarray(sigma, dtype)))
            distance = np.linalg.norm(got - want) / np.linalg.norm(want)
            rows.append({"cell": cell, "q0": name, "precision": precision, "sigma": sigma, "distance": distance})
    return rows


def _moments(samples: Float[Array, "n P"]) -> tuple[Array, Array]:
    """Total variance and its standard error."""
    d = jnp.sum((samples - jnp.mean(samples, axis=0, keepdims=True)) ** 2, axis=1)
    return jnp.sum(d) / (len(d) - 1), jnp.std(d) / np.sqrt(len(d))


def _sampler(config: Config, subject: Subject, baseline: str) -> Sampler:
    """Moments of the estimate of the cell's gradient, by σ and Q_0; the same noise for all."""
    model, params, chunk, past, _, _ = subject
    options: dict[str, Any] = {"baseline": "none"} | BASELINES[baseline]
    if baseline == "position":
        options["positions"] = config.length
    size = _size(model)
    est = reinforce(model, q0=np.eye(size), noise="given", **options)
    noise = _draw(config.seed + 2, config.samples, config.length, size)
    noise_of_past = _draw(config.seed + 3, config.episodes * config.length, size)

    @jax.jit
    def sample(noise: Array, sigma: Array, pair: Shaping) -> tuple[Array, Array]:
        state = with_noise(est.init(params), sigma=sigma)
        state = state._replace(shared=state.shared._replace(shaping=pair))
        if options["baseline"] == "average":  # outlives the reset with which the chunk begins
            _, state, _ = est.update(params, state, past, noise_of_past)
        return _moments(
            jax.lax.map(lambda u: _flat(est.update(params, state, chunk, u)[0].cell), noise, batch_size=AT_ONCE)
        )

    return lambda sigma, q0: _Moments(*map(float, sample(noise, jnp.asarray(sigma), shaping(q0))))


def _variance(config: Config, cell: str, subject: Subject, baseline: str, sample: Sampler) -> Rows:
    """Over σ: measured, and for σ going to zero predicted, where there is theory."""
    identity = jnp.eye(_size(subject.model))
    limit = float(theory.total_variance(subject.episode))
    square = float(jnp.sum(_flat(subject.episode.gradient.cell) ** 2))
    rows: Rows = []
    for sigma in config.sigmas:
        found = sample(sigma, identity)
        score = float(theory.score_variance(subject.episode, sigma))
        measured = {"quantity": "variance", "value": found.total / square, "error": found.error / square}
        predicted = {"none": score / square, "noise_free": limit / square}.get(baseline, "")
        rows.append({"cell": cell, "baseline": baseline, "sigma": sigma} | measured | {"predicted": predicted})
    return rows


def _bias(config: Config, cell: str, subject: Subject) -> Rows:
    """How far the gradient of the expected loss is from that of the network without noise, squared.

    By a pathwise estimate over pairs of noise and its opposite, whose variance falls with σ as fast as the bias does.
    """
    model, params, chunk, _, episode, _ = subject
    unravel = ravel_pytree(model.init_state(params))[1]
    noise = _draw(config.seed + 4, config.samples, config.length, _size(model))

    def loss(cell_params: Any, kicks: Array) -> Array:
        def step(state: Any, now: tuple) -> tuple[Any, Array]:
            x, target, kick = now
            state = jax.tree.map(jnp.add, model.cell.step(cell_params, state, x), unravel(kick))
            return state, model.loss(params.head, model.cell.output(state), target)

        steps = (chunk.inputs, chunk.targets, kicks)
        return jnp.sum(jax.lax.scan(step, model.init_state(params), steps)[1])

    @jax.jit
    def away(sigma: Array) -> tuple[Array, Array]:
        def pair(u: Array) -> Array:
            both = [_flat(jax.grad(loss)(params.cell, sign * sigma * u)) for sign in (1, -1)]
            return (both[0] + both[1]) / 2 - _flat(episode.gradient.cell)

        found = jax.lax.map(pair, noise, batch_size=AT_ONCE)
        return jnp.mean(found, axis=0), jnp.std(found, axis=0) / np.sqrt(config.samples)

    square = float(jnp.sum(_flat(episode.gradient.cell) ** 2))
    rows: Rows = []
    for sigma in config.sigmas:
        mean, error = away(jnp.asarray(sigma))
        # The square of the mean's own error does not belong to the bias.
        value = float(jnp.sum(mean**2) - jnp.sum(error**2)) / square
        measured = {"quantity": "bias", "value": value, "error": float(jnp.linalg.norm(error)) / np.sqrt(square)}
        rows.append({"cell": cell, "baseline": "", "sigma": sigma} | measured | {"predicted": ""})
    return rows


def _shaping(config: Config, cell: str, subject: Subject, sample: Sampler) -> Rows:
    """Variance at a small σ with and without the best Q_0, and of the term without a baseline."""
    size = _size(subject.model)
    square = float(jnp.sum(_flat(subject.episode.gradient.cell) ** 2))
    sigma = float(config.sigmas[-1]) * 10
    rows: Rows = []
    for name, q0 in (("identity", jnp.eye(size)), ("best", subject.q0)):
        found = sample(sigma, q0)
        predicted = float(theory.total_variance(subject.episode, None, q0)) / square
        score = float(theory.score_variance(subject.episode, 1.0, q0)) / square
        what = {"cell": cell, "q0": name, "sigma": sigma, "value": found.total / square, "error": found.error / square}
        rows.append(what | {"predicted": predicted, "score_at_1": score})
    return rows


EXPERIMENT = Experiment(
    name="reinforce",
    figure="Section 9: REINFORCE becomes UORO as its noise goes to zero; what a baseline and Q_0 are worth",
    presets=PRESETS,
    run=run,
    sections=sections,
)
