"""`rtrl` against `bptt` on random models: cells, stacks, sizes, chunks, resets, weights.

    python -m tests.engine.random_models 1000

Prints every miss and the largest error. In float64.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

import streamgrad as sg
from tests.search import search
from tests.tools import error, nested_cell, split


def random_cell(rng: np.random.Generator, n_in: int, layers: int) -> sg.Cell:
    """One cell, or a stack of several."""
    kinds = [sg.cells.vanilla, sg.cells.lstm, sg.cells.gru]
    sizes = [n_in, *rng.integers(1, 5, size=layers)]
    cells = [kinds[rng.integers(3)](int(a), int(b)) for a, b in itertools.pairwise(sizes)]
    return cells[0] if layers == 1 else sg.cells.stack(*cells)


def check_one(seed: int) -> float:
    """Draw a model, a stream and how it is cut, and compare; returns the error."""
    rng = np.random.default_rng(seed)
    n_in, layers = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 3]))
    nested = rng.random() < 0.1
    cell = nested_cell() if nested else random_cell(rng, n_in, layers)
    model = sg.Model(cell, sg.heads.squared_error(2))
    params = model.init(jax.random.key(seed))
    params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf) + 0.3 * rng.normal(size=leaf.shape)), params)
    length = int(rng.integers(2, 13))
    inputs = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=(length, *x.shape))), cell.example_input)
    reset = jnp.asarray(rng.random(length) < rng.choice([0.0, 0.2, 0.5])) if rng.random() < 0.7 else None
    weight = jnp.asarray(rng.normal(size=length)) if rng.random() < 0.3 else None
    chunk = sg.Chunk(inputs, jnp.asarray(rng.normal(size=(length, 2))), reset, weight)
    size = int(rng.choice([1, 3, 7, length]))
    sizes = (size,) * (length // size) + ((length % size,) if length % size else ())
    rtrl, bptt = sg.rtrl(model), sg.bptt(model)
    want = bptt.update(params, bptt.init(params), chunk, None)[0]
    state, grads = rtrl.init(params), []
    for part in split(chunk, sizes):
        found, state, _ = rtrl.update(params, state, part, None)
        grads.append(found)
    miss = error(jax.tree.map(lambda *leaves: sum(leaves), *grads), want)
    assert miss < 1e-10, (seed, miss, sizes)
    return miss


if __name__ == "__main__":
    search(check_one, "models")
