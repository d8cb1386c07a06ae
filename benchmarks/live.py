"""What carrying Q_0 over does on live streams: the loss that training reaches, and the variance along the way.

    python -m benchmarks.live --text FILE --out benchmarks/results

Streams run on and on; nothing is measured from a fresh state. Two tables, one row for each task, cell and number of
groups:

- `live_training.csv`: each setting trains its own network, 5,000 updates: the loss over the last tenth, the largest
  entry of a tangent and the largest gradient. `worse_than_uoro_z` tells whether the losses are higher than those of
  plain `uoro`, by ranks over seeds. `--frozen` repeats it at learning rate 0.
- `live_variance.csv`: exact RTRL trains, and every setting watches the same streams from a state of its own.
  E‖ĝ - g‖² / E‖g‖² over the second half of the run, for one stream: g is RTRL's gradient of the same chunk, with the
  influence of the whole past.

Tasks: "recall", the bit of 3 steps ago, an update at every step; "text", the next character, an update every 16 steps.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import streamgrad as sg
from streamgrad_lab.tables import write_rows
from streamgrad_lab.tasks import find_task
from streamgrad_lab.tasks.base import Task

CELLS = {"lstm": sg.cells.lstm, "gru": sg.cells.gru, "vanilla": sg.cells.vanilla}
STREAMS = 16
SETTINGS: dict[str, Callable[[sg.Model, int], sg.GradientEstimator]] = {
    "uoro": lambda model, groups: sg.uoro(model, groups=groups),
    "carry": lambda model, groups: sg.carried(sg.uoro(model, groups=groups)),
    "carry, full": lambda model, groups: sg.carried(sg.uoro(model, groups=groups), q0="full"),
}


# What people would use instead: with chunks of one step, the current step alone.
TRAINED = {"backprop in the chunk": lambda model, groups: sg.bptt(model), **SETTINGS}


class Problem(NamedTuple):
    """A task with the sizes and the learning rate that go with it."""

    task: Task
    hidden: int
    rate: float


def find_problem(name: str, groups: int, text: Path | None, hidden: int | None = None) -> Problem:
    """The stream, the width of the network, and Adam's learning rate: lower where plain UORO itself would diverge."""
    if name == "recall":
        rate = 4e-3 if groups > 1 else 1e-3
        return Problem(find_task("queue", delay=3, batch_size=STREAMS, length=1), hidden or 32, rate)
    if text is None:
        raise SystemExit("the task text needs a file: --text FILE")
    return Problem(find_task("text", path=text, batch_size=STREAMS, length=16, held_out=0), hidden or 64, 1e-3)


def largest_tangent(state: sg.EstimatorState) -> jax.Array:
    """The largest entry of UORO's tangents, over all streams; NaN for an estimator without."""
    return jnp.max(jnp.abs(state.memory.tangent)) if hasattr(state.memory, "tangent") else jnp.asarray(jnp.nan)


def square(tree: Any) -> jax.Array:
    """‖tree‖²."""
    return sum((jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)), start=jnp.zeros(()))


def trained(
    problem: Problem,
    model: sg.Model,
    driver: sg.GradientEstimator,
    watchers: dict[str, sg.GradientEstimator],
    updates: int,
    rate: float,
    seeds: int,
    together: int,
) -> dict[str, np.ndarray]:
    """Train by `driver`, so many seeds `together`; `watchers` follow the same streams.

    Returns what each update showed, `[seeds, updates]`.
    """
    task, optimizer = problem.task, optax.adam(rate)

    def begin(key: jax.Array) -> tuple:
        params = model.init(key)
        states = {name: est.init(params) for name, est in watchers.items()}
        return params, optimizer.init(params), driver.init(params), states, task.init(key)

    def update(data: Any, carry: tuple, key: jax.Array) -> tuple[tuple, dict]:
        params, optimizer_state, state, states, at = carry
        data_key, key = jax.random.split(key)
        chunk, at = task.sample(data, at, data_key)
        grads, state, info = driver.update(params, state, chunk, key)
        row = {"loss": jnp.mean(info.loss), "square": square(grads.cell)}
        row["tangent"] = largest_tangent(state)
        for name, est in watchers.items():
            found, states[name], _ = est.update(params, states[name], chunk, key)
            row[name] = square(jax.tree.map(jnp.subtract, found.cell, grads.cell))
        step, optimizer_state = optimizer.update(
            jax.tree.map(lambda leaf: leaf / task.length, grads), optimizer_state, params
        )
        return (optax.apply_updates(params, step), optimizer_state, state, states, at), row

    @jax.jit
    def many(data: Any, carry: tuple, keys: jax.Array) -> tuple[tuple, dict]:
        def one_seed(one: tuple) -> tuple[tuple, dict]:
            return jax.lax.scan(lambda carry, key: update(data, carry, key), *one)

        return jax.lax.map(one_seed, (carry, keys), batch_size=together)

    keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed), updates + 1))(jnp.arange(seeds))
    carry, rows = jax.vmap(begin)(keys[:, 0]), []
    for first in range(1, updates + 1, 500):
        carry, row = many(task.data, carry, keys[:, first : first + 500])
        rows.append(jax.device_get(row))
    return {name: np.concatenate([row[name] for row in rows], axis=1) for name in rows[0]}


def rank_sum(these: np.ndarray, those: np.ndarray) -> float:
    """z of Wilcoxon's rank sum: above 2.6 `these` are larger than `those` beyond noise, 1 in 200 by chance.

    Example:
      >>> round(rank_sum(np.array([5.0, 6.0, 7.0]), np.array([1.0, 2.0, 3.0])), 2)
      1.96
    """
    larger = np.sum(these[:, None] > those[None]) + 0.5 * np.sum(these[:, None] == those[None])
    n, m = len(these), len(those)
    return float((larger - n * m / 2) / np.sqrt(n * m * (n + m + 1) / 12))


def train(
    problem: Problem, cell: str, groups: int, updates: int, frozen: bool, seeds: int, settings: dict
) -> Iterator[dict]:
    """Rows of `live_training.csv`."""
    plain: np.ndarray | None = None
    model = sg.Model(CELLS[cell](problem.task.n_in, problem.hidden), problem.task.head)
    for name, make in settings.items():
        est = sg.batched(make(model, groups), STREAMS)
        begun = time.perf_counter()
        # Together: under vmap both branches of a `cond` run, which for a diagonal Q_0 is still the faster way.
        found = trained(problem, model, est, {}, updates, 0.0 if frozen else problem.rate, seeds, seeds)
        late = np.nan_to_num(found["loss"][:, -updates // 10 :].mean(axis=1), nan=np.inf)
        plain = late if name == "uoro" else plain
        yield {
            "task": problem.task.name,
            "cell": cell,
            "groups": groups,
            "setting": name,
            "rate": 0.0 if frozen else problem.rate,
            "median_loss": f"{np.median(late):.4f}",
            "losses": " ".join(f"{loss:.4f}" for loss in sorted(late)),
            "worse_than_uoro_z": "" if plain is None else f"{rank_sum(late, plain):.2f}",
            "largest_tangent": f"{found['tangent'].max():.4g}",
            "largest_gradient": f"{np.sqrt(found['square'].max()):.4g}",
            "seconds": f"{time.perf_counter() - begun:.1f}",
        }


def measure(
    problem: Problem, cell: str, groups: int, updates: int, frozen: bool, seeds: int, settings: dict
) -> Iterator[dict]:
    """Rows of `live_variance.csv`."""
    rate = 0.0 if frozen else problem.rate
    model = sg.Model(CELLS[cell](problem.task.n_in, problem.hidden), problem.task.head)
    watchers = {name: sg.batched(make(model, groups), STREAMS) for name, make in settings.items()}
    found = trained(problem, model, sg.batched(sg.rtrl(model), STREAMS), watchers, updates, rate, seeds, 1)
    half = updates // 2
    loss = found["loss"][:, -updates // 10 :].mean()
    signal = found["square"][:, half:].mean(axis=1)
    for name in watchers:
        errors = STREAMS * found[name][:, half:]
        each = errors.mean(axis=1) / signal
        yield {
            "task": problem.task.name,
            "cell": cell,
            "groups": groups,
            "setting": name,
            "loss": f"{loss:.4f}",
            **{f"error_{seed}": f"{value:.4g}" for seed, value in enumerate(each)},
            "median_error": f"{np.median(errors) / signal.mean():.4g}",
        }


def main() -> None:
    """Run, print rows as they come, and write the two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text in UTF-8")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--updates", type=int, default=5000)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--tasks", nargs="+", default=["recall", "text"])
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--only", choices=["training", "variance"], help="one of the two tables")
    parser.add_argument("--frozen", action="store_true", help="at learning rate 0")
    parser.add_argument("--settings", nargs="+", default=list(TRAINED))
    options = parser.parse_args()
    parts: dict[str, Callable] = {"training": train, "variance": measure}
    for part in [options.only] if options.only else list(parts):
        rows: list[dict] = []
        for task, cell, groups in itertools.product(options.tasks, options.cells, options.groups):
            # RTRL beside it: a network that is small enough.
            problem = find_problem(task, groups, options.text, 32 if part == "variance" else None)
            known = TRAINED if part == "training" else SETTINGS
            settings = {name: known[name] for name in options.settings if name in known}
            for row in parts[part](problem, cell, groups, options.updates, options.frozen, options.seeds, settings):
                print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
                rows.append(row)
        write_rows(options.out / f"live_{part}.csv", rows)


if __name__ == "__main__":
    main()
