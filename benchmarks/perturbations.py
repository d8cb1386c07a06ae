"""Learning from perturbations: KeRNL and PES in training, beside the usual methods, and PES's variance beside UORO's.

    python -m benchmarks.perturbations recall                  # the bit of 4 and of 8 steps ago, by chunks of 4
    python -m benchmarks.perturbations episodes                # the same, with a reset every 32 steps
    python -m benchmarks.perturbations text --text FILE        # the next character, by chunks of 4
    python -m benchmarks.perturbations variance                # of the gradient of a stream of 16 steps

Training is with Adam after clipping at norm 1, an update per chunk. Streams are never reset but in `episodes`, where a
bit from before the reset does not count. Rates are tuned: each method takes the rate of the grid with the lowest loss
on a seed of its own, which is then left out. The loss is the mean over the last tenth of the updates, in nats.
`perturbations_<task>.csv` has a row for each method and setting.

Variance is that of one stream's gradient, summed over the chunks, with fixed parameters, relative to the square of the
true one. Memory is what a stream keeps from chunk to chunk, time is per step on this machine.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import streamgrad as sg
from streamgrad_lab.experiments.streams.lanes import Lane, all_lanes, train_lanes
from streamgrad_lab.experiments.streams.recall import Bits, recall_task
from streamgrad_lab.tables import write_rows
from streamgrad_lab.tasks.base import Task
from streamgrad_lab.tasks.text import read_text, text_task
from streamgrad_lab.timing import take_turns

CHUNK, STREAMS, DELAYS, EPISODE = 4, 8, (4, 8), 32
RATES, TUNING_SEED = (1e-3, 3e-3, 1e-2), 100
POINTS = 10  # parts of a training: the last tenth is what counts
Make = Callable[[sg.Model], sg.GradientEstimator]

METHODS: dict[str, Make] = {
    "rtrl": sg.rtrl,
    "uoro_across": sg.uoro_across,
    "uoro": sg.uoro,
    "eprop": sg.eprop,
    "bptt": sg.bptt,
    "immediate": sg.immediate,
    "kernl": sg.kernl,
    "kernl, present step exact": lambda model: sg.kernl(model, immediate="exact"),
    "pes, 8 particles": sg.pes,
    "plain ES, 8 particles": lambda model: sg.pes(model, accumulate=False),
}


class Setting(NamedTuple):
    """A task with its settings.

    Attributes:
      task: gives the chunks.
      names: of the settings, such as delays.
      place: as in `train_lanes`.
    """

    task: Task
    names: tuple[Any, ...]
    place: Callable[..., Any] | None


class Episode(NamedTuple):
    """Where the streams stand.

    Attributes:
      bits: as in the task `recall`.
      chunk: the number of the next chunk in its episode.
    """

    bits: Bits
    chunk: jax.Array


def recall_in_episodes() -> Task:
    """Recall with resets, all streams at once; the loss is that of a bit which was shown in the same episode."""
    task = recall_task(max(DELAYS), STREAMS, CHUNK)

    def init(key: jax.Array) -> Episode:
        return Episode(task.init(key), jnp.zeros((), jnp.int32))

    def sample(data: tuple, state: Episode, key: jax.Array) -> tuple[sg.Chunk, Episode]:
        chunk, bits = task.sample(data, state.bits, key)
        at = CHUNK * state.chunk + jnp.arange(CHUNK)
        weight = jnp.where(at < bits.delay, 0, EPISODE / (EPISODE - bits.delay))
        reset, weight = (jnp.broadcast_to(row, (STREAMS, CHUNK)) for row in (at == 0, weight))
        return chunk._replace(reset=reset, weight=weight), Episode(bits, (state.chunk + 1) % (EPISODE // CHUNK))

    return task._replace(name="recall in episodes", init=init, sample=sample)


def setting_of(name: str, text: Path | None) -> Setting:
    """The task of that name."""
    delays = jnp.asarray(DELAYS)

    def place(state: Bits, setting: jax.Array, seed: jax.Array) -> Bits:
        del seed
        return state._replace(delay=delays[setting].astype(jnp.int32))

    def place_inside(state: Episode, setting: jax.Array, seed: jax.Array) -> Episode:
        return state._replace(bits=place(state.bits, setting, seed))

    if name == "recall":
        return Setting(recall_task(max(DELAYS), STREAMS, CHUNK), DELAYS, place)
    if name == "episodes":
        return Setting(recall_in_episodes(), DELAYS, place_inside)
    if text is None:
        raise SystemExit("the task text needs a file: --text FILE")
    return Setting(text_task(*read_text(text), STREAMS, CHUNK), ("",), None)


def finals(rows: list[dict[str, Any]]) -> dict[Lane, float]:
    """The loss of each lane over the last of its parts."""
    last = max(row["update"] for row in rows)
    return {Lane(row["setting"], row["rate"], row["seed"]): row["loss"] for row in rows if row["update"] == last}


def trained(name: str, setting: Setting, hidden: int, updates: int, seeds: int) -> list[dict[str, Any]]:
    """A row for each setting: the rate that was best on the tuning seed, and the losses of the others."""
    task, begun = setting.task, time.perf_counter()
    model = sg.Model(sg.cells.gru(task.n_in, hidden), task.head)
    est = sg.batched(METHODS[name](model), STREAMS)

    def losses(lanes: list[Lane]) -> dict[Lane, float]:
        return finals(train_lanes(model, task, est, lanes, updates, POINTS, setting.place))

    tuning = losses(all_lanes(len(setting.names), RATES, [TUNING_SEED]))
    rates = []
    for index in range(len(setting.names)):
        own = {lane.rate: loss for lane, loss in tuning.items() if lane.setting == index and np.isfinite(loss)}
        rates.append(min(own, key=own.__getitem__, default=RATES[0]))
    found = losses([Lane(index, rate, seed) for index, rate in enumerate(rates) for seed in range(seeds)])
    rows = []
    for index, rate in enumerate(rates):
        each = np.array([loss for lane, loss in found.items() if lane.setting == index])
        row = {"task": task.name, "setting": setting.names[index], "method": name, "chunk": CHUNK, "hidden": hidden}
        row |= {"streams": STREAMS, "updates": updates, "rate": f"{rate:g}", "loss": f"{each.mean():.4f}"}
        row |= {"losses": " ".join(f"{loss:.4f}" for loss in each)}
        rows.append(row | {"seconds": f"{time.perf_counter() - begun:.1f}"})
    return rows


LENGTH, SAMPLES = 16, 2000
NOISY: dict[str, Make] = {
    "uoro": sg.uoro,
    "uoro_across": sg.uoro_across,
    **{f"pes, {r} particles": lambda model, r=r: sg.pes(model, particles=r) for r in (2, 8, 32)},
    "plain ES, 8 particles": METHODS["plain ES, 8 particles"],
}


def in_chunks(est: sg.GradientEstimator, length: int) -> sg.GradientEstimator:
    """The same for a whole stream, which is taken in chunks of that length: gradients are summed."""

    def update(params: sg.Params, state: Any, chunk: sg.Chunk, key: Any) -> tuple:
        parts = jax.tree.map(lambda leaf: leaf.reshape(-1, length, *leaf.shape[1:]), chunk)
        keys = jax.random.split(key, LENGTH // length)

        def step(carry: tuple, now: tuple) -> tuple[tuple, Any]:
            state, total = carry
            grads, state, info = est.update(params, state, *now)
            return (state, jax.tree.map(jnp.add, total, grads)), info

        zero = jax.tree.map(jnp.zeros_like, params)
        (state, total), info = jax.lax.scan(step, (state, zero), (parts, keys))
        return total._replace(head=zero.head), state, info

    return sg.GradientEstimator(est.init, update)


def variances(hidden: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each method and length of chunks: variance, bias beyond noise, time and memory."""
    model = sg.Model(sg.cells.gru(1, hidden), sg.heads.bernoulli(1))
    params, key = model.init(jax.random.key(0)), jax.random.key(1)
    bits = jax.random.bernoulli(key, 0.5, (LENGTH + 4, 1))
    chunk = sg.Chunk(bits[4:].astype(float), bits[:-4])
    exact = sg.bptt(model)
    g = exact.update(params, exact.init(params), chunk)[0].cell

    def square(tree: Any) -> float:
        return sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(tree))

    rows, calls = [], {}
    for length in (1, 4, 16):
        for name, make in NOISY.items():
            est = make(model)
            whole = in_chunks(est, length)
            found = sg.theory.empirical(whole, params, chunk, key, SAMPLES, block=500)
            variance, state = float(found.total_variance), est.init(params)
            away = square(jax.tree.map(jnp.subtract, found.mean.cell, g)) - variance / SAMPLES
            row = {"method": name, "chunk": length, "relative_variance": variance / square(g)}
            row |= {"relative_squared_bias": max(away, 0.0) / square(g)}
            memory = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.cell, state.memory)))
            rows.append(row | {"state_bytes": memory})
            many = sg.batched(est, STREAMS)
            streams = jax.tree.map(lambda leaf, n=length: jnp.stack([leaf[:n]] * STREAMS), chunk)
            begin = many.init(params)
            calls[name, length] = lambda many=many, begin=begin, s=streams: many.update(params, begin, s, key)[0]
    seconds = take_turns(calls, repeats, 0.02)
    for row in rows:
        row["us_per_step"] = 1e6 * seconds[row["method"], row["chunk"]] / row["chunk"] / STREAMS
        row["variance_times_us"] = row["relative_variance"] * row["us_per_step"]
    return rows


def main(words: list[str] | None = None) -> None:
    """Train, or measure variances."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("recall", "episodes", "text", "variance"))
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--hidden", type=int, default=None, help="32 for training, 8 for variances")
    parser.add_argument("--updates", type=int, default=None, help="3,000 for recall, 1,500 for text")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9, help="rounds of timing")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(words)
    path = arguments.out / f"perturbations_{arguments.task}.csv"
    if arguments.task == "variance":
        rows = variances(arguments.hidden or 8, arguments.repeats)
        print("\n".join("  ".join(map(str, row.values())) for row in rows))
        write_rows(path, rows, digits=4)
        return
    setting, rows = setting_of(arguments.task, arguments.text), []
    updates = arguments.updates or 1500 if arguments.task == "text" else 3000
    for name in arguments.only:
        found = trained(name, setting, arguments.hidden or 32, updates, arguments.seeds)
        print("\n".join("  ".join(map(str, row.values())) for row in found), flush=True)
        rows += found
        write_rows(path, rows)


if __name__ == "__main__":
    main()
