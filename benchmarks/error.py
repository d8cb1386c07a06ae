"""How far from the exact gradient: E‖ĝ - g‖² / ‖g‖² of the estimators on one stream, before and after some training.

    python -m benchmarks.error                 # minutes on 2 cores

Recall over 10 steps, one stream of T = 64 steps from a fresh state, seen in chunks of K; g is BPTT's gradient of all of
it. Means over `--streams` streams and `--samples` draws of the noise each, at the initial parameters and after 300
updates by BPTT (Adam, 3e-3, 16 streams). Prints a table and writes `error.csv`.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from benchmarks.problems import make_cell
from streamgrad_lab.tables import write_rows
from streamgrad_lab.tasks import find_task

LENGTH, DELAY = 64, 10


class Method(NamedTuple):
    """An estimator with the chunks it sees."""

    name: str
    chunk: int
    make: Callable[[sg.Model], sg.GradientEstimator]
    noisy: bool = True


def methods() -> Iterator[Method]:
    """The rows of the table."""
    yield Method("uoro", LENGTH, sg.uoro)
    yield Method("uoro, 8 groups", LENGTH, lambda model: sg.uoro(model, groups=8))
    yield Method("preuoro", LENGTH, sg.preuoro)
    for chunk in (4, 8, 16):
        yield Method("bptt by chunks", chunk, sg.bptt, noisy=False)
        yield Method("uoro_across", chunk, sg.uoro_across)
        yield Method("uoro_across, 8 blocks", chunk, lambda model: sg.uoro_across(model, blocks=8))
        for rank in (1, 4, 8):
            yield Method(f"ok, {rank} terms", chunk, lambda model, rank=rank: sg.ok(model, rank=rank))
        yield Method("rtrl", chunk, sg.rtrl, noisy=False)


def trained(model: sg.Model, updates: int) -> sg.Params:
    """Parameters after so many updates by BPTT."""
    task = find_task("queue", delay=DELAY, batch_size=16, length=LENGTH)
    est, optimizer = sg.batched(sg.bptt(model), 16), optax.adam(3e-3)
    params = model.init(jax.random.key(0))

    def step(carry: tuple, key: jax.Array) -> tuple[tuple, None]:
        params, optimizer_state, at = carry
        chunk, at = task.sample(task.data, at, key)
        grads, _, _ = est.update(params, est.init(params), chunk, None)
        change, optimizer_state = optimizer.update(jax.tree.map(lambda g: g / LENGTH, grads), optimizer_state, params)
        return (optax.apply_updates(params, change), optimizer_state, at), None

    if updates == 0:
        return params
    begin = (params, optimizer.init(params), task.init(jax.random.key(1)))
    return jax.jit(lambda: jax.lax.scan(step, begin, jax.random.split(jax.random.key(2), updates))[0][0])()


def squared_error(method: Method, model: sg.Model, params: sg.Params, streams: int, samples: int) -> float:
    """E‖ĝ - g‖² / ‖g‖²."""
    chunk, _ = (task := find_task("queue", delay=DELAY, batch_size=streams, length=LENGTH)).sample(
        task.data, task.init(jax.random.key(3)), jax.random.key(4)
    )
    est, exact = method.make(model), sg.bptt(model)
    size = method.chunk

    def one(chunk: sg.Chunk, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        want = ravel_pytree(exact.update(params, exact.init(params), chunk, None)[0].cell)[0]
        parts = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), chunk)

        def sample(key: jax.Array) -> jax.Array:
            def step(state: Any, now: tuple) -> tuple[Any, jax.Array]:
                grads, state, _ = est.update(params, state, *now)
                return state, ravel_pytree(grads.cell)[0]

            _, found = jax.lax.scan(step, est.init(params), (parts, jax.random.split(key, LENGTH // size)))
            return jnp.sum((jnp.sum(found, axis=0) - want) ** 2)

        errors = jax.lax.map(sample, jax.random.split(key, samples if method.noisy else 1), batch_size=16)
        return jnp.mean(errors), jnp.sum(want**2)

    keys = jax.random.split(jax.random.key(5), streams)
    errors, squares = jax.jit(lambda: jax.lax.map(lambda pair: one(*pair), (chunk, keys)))()
    return float(np.sum(errors) / np.sum(squares))


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=("vanilla", "gru", "lstm"), default=["vanilla", "gru", "lstm"])
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--updates", nargs="+", type=int, default=[0, 300])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for cell in arguments.cells:
        model = sg.Model(make_cell(cell, 1, arguments.hidden), sg.heads.bernoulli(1))
        for updates in arguments.updates:
            params = trained(model, updates)
            for method in methods():
                error = squared_error(method, model, params, arguments.streams, arguments.samples)
                row = {"cell": cell, "hidden": arguments.hidden, "updates": updates, "estimator": method.name}
                rows.append(row | {"chunk": method.chunk, "squared_error": f"{error:.3g}"})
                print("  ".join(map(str, rows[-1].values())), flush=True)
                write_rows(arguments.out / "error.csv", rows)


if __name__ == "__main__":
    main()
