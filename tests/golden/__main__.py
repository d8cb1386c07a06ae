"""Golden gradients: `python -m tests.golden record FILE` before a redesign, `python -m tests.golden compare FILE` after.

Of every case three updates are made from a running state, with resets, weights and fixed keys: of one stream, and of
three. What is recorded are gradients and losses, or that the estimator refuses the cell.
"""

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)

import streamgrad as sg
from tests.golden.cases import ESTIMATORS, all_cases, models

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
    except ValueError as refusal:
        return {"refused": np.asarray(str(refusal))}


def record(path: str) -> None:
    """Write all of it to a file."""
    cases = [(f"{name} | {cell}", outcome(cell, name)) for cell, name in all_cases()]
    found = {f"{case} | {part}": value for case, parts in cases for part, value in parts.items()}
    np.savez_compressed(path, **found)
    refused = sum(case.endswith("refused") for case in found)
    print(f"{len(found)} arrays of {len(models())} cells and {len(ESTIMATORS)} estimators; {refused} refusals")


def compare(path: str, only: str = "") -> int:
    """Compare with a file; prints what differs, and returns how many cases do."""
    wrong, seen, worst = 0, 0, 0.0
    with np.load(path, allow_pickle=False) as golden:
        known = {}
        for key in golden.files:
            case, _, part = key.rpartition(" | ")
            known.setdefault(case, {})[part] = golden[key]
    for cell, name in all_cases():
        case = f"{name} | {cell}"
        if only and only not in case:
            continue
        seen += 1
        found = outcome(cell, name)
        if set(found) != set(known[case]):
            print(f"{case}: {found.get('refused', sorted(found))} where there was {sorted(known[case])}", flush=True)
            wrong += 1
            continue
        for part in set(found) - {"refused"}:
            want = known[case][part]
            off = float(np.max(np.abs(found[part] - want)) / np.max(np.abs(want)))
            worst = max(worst, off)
            if not off <= TOLERANCE:
                print(f"{case} | {part}: off by {off:.1e}", flush=True)
                wrong += 1
    print(f"{seen} cases, {wrong} differ; largest difference {worst:.1e} of the largest entry")
    return wrong


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    sys.exit({"record": record, "compare": compare}[command](*arguments))
