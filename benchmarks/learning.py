"""Does it learn? Credit beyond the chunk, and text where it need not reach so far: the loss that training ends at.

    python -m benchmarks.learning recall                    # the bit of 12 steps ago by chunks of 4; hours on a CPU
    python -m benchmarks.learning text --text FILE          # the next character, by chunks of 4 and of 16
    python -m benchmarks.learning recall --only rtrl bptt --rates 4e-3 --seeds 2

LSTM or another `--cell`, 16 streams, Adam after clipping at norm 1, an update per chunk, streams that are never reset.
The loss is the mean over the last tenth of the updates, in nats. Prints a row for each method and rate, and writes
`learning_<task>.csv`, or with the cell's name where that is not the LSTM.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import streamgrad as sg
from benchmarks.problems import make_cell
from streamgrad_lab.tables import write_rows
from streamgrad_lab.tasks import find_task
from streamgrad_lab.tasks.base import Task

STREAMS = 16
Make = Callable[[sg.Model], sg.GradientEstimator]


def on_streams(streams: int = STREAMS, watched: int | None = None) -> Callable[[Make], Make]:
    """An estimator for all streams."""
    return lambda make: lambda model: sg.batched(make(model), streams, watched)


METHODS: dict[str, Make] = {
    "bptt": on_streams()(sg.bptt),
    "uoro": on_streams()(sg.uoro),
    "uoro_across": on_streams()(sg.uoro_across),
    "uoro_across, 8 blocks": on_streams()(lambda model: sg.uoro_across(model, blocks=8)),
    "uoro_across, shrunk": on_streams()(lambda model: sg.uoro_across(model, shrink="auto")),
    "uoro_across, 8 blocks, shrunk": on_streams()(lambda model: sg.uoro_across(model, blocks=8, shrink="auto")),
    "ok 1": on_streams()(lambda model: sg.ok(model, rank=1)),
    "ok 4": on_streams()(lambda model: sg.ok(model, rank=4)),
    "ok 8": on_streams()(lambda model: sg.ok(model, rank=8)),
    "rtrl": on_streams()(sg.rtrl),
    "rtrl, 4 streams watched": on_streams(watched=4)(sg.rtrl),
    "rtrl, 2 streams watched": on_streams(watched=2)(sg.rtrl),
    "ok 8, 4 streams watched": on_streams(watched=4)(lambda model: sg.ok(model, rank=8)),
}


class Setting(NamedTuple):
    """A task with the sizes that go with it."""

    task: Task
    hidden: int
    updates: int


def settings(name: str, text: Path | None) -> list[Setting]:
    """One for each chunk length."""
    if name == "recall":
        return [Setting(find_task("queue", delay=12, batch_size=STREAMS, length=4), 32, 20_000)]
    if text is None:
        raise SystemExit("the task text needs a file: --text FILE")
    lengths = {4: 12_000, 16: 6_000}
    return [
        Setting(find_task("text", path=text, batch_size=STREAMS, length=length, held_out=0), 64, updates)
        for length, updates in lengths.items()
    ]


def train(
    setting: Setting, cell: str, make: Make, rates: list[float], updates: int, seeds: int, together: int
) -> np.ndarray:
    """The loss over the last tenth, of each rate and seed; so many of these runs are trained `together`."""
    task = setting.task
    model = sg.Model(make_cell(cell, task.n_in, setting.hidden), task.head)
    est = make(model)

    def one(data: Any, rate: jax.Array, seed: jax.Array) -> jax.Array:
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
        key = jax.random.key(seed)
        params = model.init(key)

        def step(carry: tuple, i: jax.Array) -> tuple[tuple, jax.Array]:
            params, state, optimizer_state, at = carry
            data_key, key_now = jax.random.split(jax.random.fold_in(key, i))
            chunk, at = task.sample(data, at, data_key)
            grads, state, info = est.update(params, state, chunk, key_now)
            mean = jax.tree.map(lambda leaf: leaf / task.length, grads)
            change, optimizer_state = optimizer.update(mean, optimizer_state, params)
            return (optax.apply_updates(params, change), state, optimizer_state, at), jnp.mean(info.loss)

        begin = (params, est.init(params), optimizer.init(params), task.init(key))
        return jax.lax.scan(step, begin, jnp.arange(updates))[1]

    runs = jnp.repeat(jnp.asarray(rates), seeds), jnp.tile(jnp.arange(seeds), len(rates))
    run = jax.jit(lambda data, runs: jax.lax.map(lambda pair: one(data, *pair), runs, batch_size=together))
    losses = np.asarray(run(task.data, runs))
    return losses[:, -max(1, updates // 10) :].mean(axis=1).reshape(len(rates), seeds)


def main() -> None:
    """Train by each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("recall", "text"))
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rates", nargs="+", type=float, default=None, help="1e-3 and 4e-3 for recall, 3e-3 for text")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--updates", type=int, default=None, help="20,000 for recall; 12,000 and 6,000 for text")
    parser.add_argument("--together", type=int, default=1, help="runs at once: all of them on a GPU")
    parser.add_argument("--cell", choices=("lstm", "gru", "vanilla"), default="lstm")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    rates = arguments.rates or ([1e-3, 4e-3] if arguments.task == "recall" else [3e-3])
    parts = [arguments.task] if arguments.cell == "lstm" else [arguments.task, arguments.cell]
    rows = []
    for setting in settings(arguments.task, arguments.text):
        updates = arguments.updates or setting.updates
        for name in arguments.only:
            begun = time.perf_counter()
            options = (arguments.cell, METHODS[name], rates, updates, arguments.seeds, arguments.together)
            found = train(setting, *options)
            seconds = (time.perf_counter() - begun) / len(rates)
            for rate, losses in zip(rates, found, strict=True):
                row = {"task": arguments.task, "chunk": setting.task.length, "method": name, "rate": f"{rate:g}"}
                row |= {"updates": updates, "mean_loss": f"{losses.mean():.4f}"}
                row |= {"losses": " ".join(f"{loss:.4f}" for loss in losses)}
                row |= {"seconds": f"{seconds:.1f}", "device": jax.devices()[0].device_kind}
                rows.append(row)
                print("  ".join(map(str, row.values())), flush=True)
            write_rows(arguments.out / f"learning_{'_'.join(parts)}.csv", rows)


if __name__ == "__main__":
    main()
