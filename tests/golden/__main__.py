"""Golden gradients: `python -m tests.golden record FOLDER` before a redesign, `… compare FOLDER` after it.

Of every case three updates are made from a running state, with resets, weights and fixed keys: of one stream, and of
three. What is recorded are gradients and losses, or that the estimator refuses the cell.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)

import streamgrad as sg  # noqa: E402, after the settings
from tests.golden.cases import ESTIMATORS, all_cases, models  # noqa: E402

STREAMS, LENGTHS = 3, (5, 5, 5)
TOLERANCE = 1e-12


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
    """The gradients and losses of three updates, of one stream and of three, and credit for given ones."""
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


def record(folder: str) -> None:
    """Write all of it, a file for each cell."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for cell in models():
        cases = [(name, outcome(cell, name)) for other, name in all_cases() if other == cell]
        found = {f"{name} | {part}": value for name, parts in cases for part, value in parts.items()}
        np.savez_compressed(Path(folder) / f"{cell}.npz", **found)
        print(f"{cell}: {len(cases)} estimators, {sum('refused' in parts for _, parts in cases)} refused", flush=True)


def compare(folder: str, only: str = "") -> int:
    """Compare with a record; prints what differs, and returns how many cases do."""
    wrong, seen, worst = 0, 0, 0.0
    for cell, name in all_cases():
        case = f"{name} | {cell}"
        if only and only not in case:
            continue
        seen += 1
        with np.load(Path(folder) / f"{cell}.npz", allow_pickle=False) as golden:
            known = {
                key.removeprefix(f"{name} | "): golden[key] for key in golden.files if key.startswith(f"{name} | ")
            }
        found = outcome(cell, name)
        if set(found) != set(known):
            print(f"{case}: {found.get('refused', sorted(found))} where there was {sorted(known)}", flush=True)
            wrong += 1
            continue
        for part in set(found) - {"refused"}:
            off = float(np.max(np.abs(found[part] - known[part])) / np.max(np.abs(known[part])))
            worst = max(worst, off)
            if not off <= TOLERANCE:
                print(f"{case} | {part}: off by {off:.1e}", flush=True)
                wrong += 1
    print(f"{seen} cases, {wrong} differ; largest difference {worst:.1e} of the largest entry")
    return wrong


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    sys.exit({"record": record, "compare": compare}[command](*arguments))
