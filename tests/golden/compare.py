"""Golden gradients: what a case gives now, and how far that is from what it gave when it was recorded.

Of every case three updates are made from a running state, with resets, weights and fixed keys: of one stream, and of
three. What is recorded are gradients and losses, or that the estimator refuses the cell.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import streamgrad as sg
from tests.golden.cases import ESTIMATORS, models

RECORDED = Path(__file__).parent / "recorded"
STREAMS, LENGTHS = 3, (5, 5, 5)
TOLERANCE = 1e-12  # of the largest entry; in float64 on a CPU


def chunk(model: sg.Model, length: int, seed: int) -> sg.Chunk:
    """A chunk of three streams, with weights, and a reset in one of them in the first and third update."""
    rng = np.random.default_rng(seed)
    inputs = jax.tree.map(lambda x: rng.normal(size=(STREAMS, length, *x.shape)), model.cell.example_input)
    targets = rng.normal(size=(STREAMS, length, 2))
    reset = np.zeros((STREAMS, length), bool)
    reset[1, seed % length] = seed != 1
    weight = rng.uniform(size=(STREAMS, length))
    return jax.tree.map(jnp.asarray, sg.Chunk(inputs, targets, reset, weight))


def gradients(name: str, model: sg.Model) -> dict[str, np.ndarray]:
    """The gradients and losses of three updates, of one stream and of three."""
    found = {}
    one = ESTIMATORS[name](model)
    params = jax.jit(model.init)(jax.random.key(1))
    rng = np.random.default_rng(5)
    params = jax.tree.map(lambda leaf: leaf + 0.2 * rng.normal(size=leaf.shape), params)
    for kind, est in (("one", one), ("many", sg.batched(one, STREAMS))):
        if kind == "one" and name == "across auto":
            continue
        state, total, losses = est.init(params), None, []
        for i, length in enumerate(LENGTHS):
            now = chunk(model, length, i)
            now = jax.tree.map(lambda leaf: leaf[1], now) if kind == "one" else now
            grads, state, info = est.update(params, state, now, jax.random.key(i))
            grads = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(grads)])
            total = [grads] if total is None else [*total, grads]
            losses.append(np.ravel(info.loss))
        found[f"{kind} gradients"] = np.stack(total)
        found[f"{kind} losses"] = np.concatenate(losses)
    return found


def outcome(cell: str, name: str) -> dict[str, np.ndarray]:
    """What a case gives, or the sentence in which it is refused."""
    try:
        return gradients(name, models()[cell])
    except (ValueError, KeyError) as refusal:
        return {"refused": np.asarray(str(refusal))}


@functools.cache
def record_of(folder: Path, cell: str) -> dict[str, np.ndarray]:
    """All that was recorded of a cell."""
    with np.load(folder / f"{cell.replace(' ', '_')}.npz", allow_pickle=False) as golden:
        return {key: golden[key] for key in golden.files}


def recorded(folder: Path, cell: str, name: str) -> dict[str, np.ndarray]:
    """What was recorded of a case."""
    begin = f"{name} | "
    return {key.removeprefix(begin): value for key, value in record_of(folder, cell).items() if key.startswith(begin)}


def differences(cell: str, name: str, folder: Path = RECORDED) -> dict[str, float]:
    """How far each part of a case is from its record, of its largest entry; infinitely where the parts are others."""
    known, found = recorded(folder, cell, name), outcome(cell, name)
    if set(found) != set(known):
        return {f"{found.get('refused', sorted(found))} where there was {sorted(known)}": np.inf}
    parts = sorted(set(found) - {"refused"})
    return {part: float(np.max(np.abs(found[part] - known[part])) / np.max(np.abs(known[part]))) for part in parts}
