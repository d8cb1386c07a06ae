"""Updates per second of the training loop, against a plain loop of BPTT in JAX and optax for the same model.

    python -m benchmarks.training     # about a minute on 2 cores

The laptop preset's size (8x8 digits, LSTM of 24, 32 streams) with one seed and with its three, and the paper's network
(50 units, 50 streams) on the same digits. All loops take turns in one process, and the medians are compared; "with
files" is a whole run, with rows and a checkpoint at every hand-over, as the preset has them. Prints a table and writes
`benchmarks/results/training_cpu.csv`.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import streamgrad as sg
from benchmarks.problems import handwritten_bptt
from streamgrad_lab.tables import write_rows
from streamgrad_lab.tasks import Task, find_task
from streamgrad_lab.timing import take_turns
from streamgrad_lab.training import Plan, begin, run, train, training_step

SIZES = [(24, 32, 1), (24, 32, 3), (50, 50, 1)]  # units, streams, seeds
FIELDS = ["device", "hidden", "streams", "seeds", "loop", "updates_per_second", "times_plain"]
PER_CALL, EVERY = 500, 20


def plain_loop(task: Task, model: sg.Model, optimizer: optax.GradientTransformation, seeds: int) -> Callable[[], None]:
    """What a JAX user would write: a scan over updates, images drawn inside; nothing checked, losses recorded."""
    hidden = len(model.cell.init_state().h)
    bptt = handwritten_bptt("lstm", hidden)
    zero = (jnp.zeros((task.batch_size, hidden)), jnp.zeros((task.batch_size, hidden)))

    def update(data, carry, _):
        params, state, key = carry
        key, image_key = jax.random.split(key)
        image = jax.random.randint(image_key, (task.batch_size,), 0, len(data.labels))
        inputs = data.steps[image].astype(jnp.float32) / 16
        targets = jnp.repeat(data.labels[image][:, None], task.length, axis=1)
        grads, _, info = bptt(params, zero, sg.Chunk(inputs, targets), None)
        grads = jax.tree.map(lambda leaf: leaf / task.length, grads)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state, key), jnp.mean(info.loss)

    @jax.jit
    def call(data, carry):
        return jax.vmap(lambda carry: jax.lax.scan(lambda c, x: update(data, c, x), carry, length=PER_CALL))(carry)

    keys = jax.random.split(jax.random.key(0), seeds)
    params = jax.vmap(model.init)(keys)
    carry = (params, jax.vmap(optimizer.init)(params), keys)

    def advance() -> None:
        nonlocal carry
        carry, losses = call(task.data, carry)
        jax.block_until_ready((carry, losses))

    return advance


def loop_without_files(
    task: Task, model: sg.Model, estimator: sg.GradientEstimator, optimizer: optax.GradientTransformation, seeds: int
) -> Callable[[], None]:
    """`streamgrad_lab.training.run`, without files."""
    keys = jax.random.split(jax.random.key(0), seeds)
    ts = jax.vmap(lambda key: begin(model, task, estimator, optimizer, key))(keys)
    calls = run(training_step(task, estimator, optimizer), task.data, ts, PER_CALL * 10**6, PER_CALL, EVERY)

    def advance() -> None:
        jax.block_until_ready(next(calls)[0])

    return advance


def whole_run(
    task: Task,
    model: sg.Model,
    estimator: sg.GradientEstimator,
    optimizer: optax.GradientTransformation,
    seeds: int,
    calls: int,
) -> list[float]:
    """Seconds between the checkpoints of `train`, the first with its compilation left out."""
    times = []

    def note(done: int, of: int, words: str) -> None:
        if done and done % PER_CALL == 0:
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(PER_CALL * (calls + 1), EVERY, PER_CALL, seeds)
        train(folder, plan, model, task, estimator, optimizer, progress=note)
    return [after - before for before, after in itertools.pairwise(times)]


def measure(hidden: int, streams: int, seeds: int, repeats: int) -> dict[str, float]:
    """Median seconds per call of each loop."""
    task, optimizer = find_task("digits", batch_size=streams)._replace(held_out=None), optax.adam(1e-3)
    model = sg.Model(sg.cells.lstm(task.n_in, hidden), task.head)
    bptt, uoro = (sg.batched(make(model), streams) for make in (sg.bptt, sg.uoro))
    loops = {
        "plain JAX, BPTT": plain_loop(task, model, optimizer, seeds),
        "streamgrad, bptt": loop_without_files(task, model, bptt, optimizer, seeds),
        "streamgrad, uoro": loop_without_files(task, model, uoro, optimizer, seeds),
    }
    files = statistics.median(whole_run(task, model, bptt, optimizer, seeds, repeats))
    return take_turns(loops, repeats) | {"streamgrad, bptt, with files": files}


def main() -> None:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    path = arguments.out / f"training_{device.platform}.csv"
    rows = []
    for hidden, streams, seeds in SIZES:
        found = measure(hidden, streams, seeds, arguments.repeats)
        for name, value in found.items():
            ratio = found["plain JAX, BPTT"] / value
            numbers = (hidden, streams, seeds, name, round(PER_CALL / value, 1), round(ratio, 3))
            rows.append(dict(zip(FIELDS, (device.device_kind, *numbers), strict=True)))
            print(
                f"LSTM {hidden}, {streams} streams, {seeds} seeds  {name:30s} {PER_CALL / value:8.1f}/s  x {ratio:.2f}"
            )
    write_rows(path, rows)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
