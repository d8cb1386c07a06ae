"""What is compared between layouts of devices: every estimator of the registry, and those with options of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import streamgrad as sg
from streamgrad.estimators import REGISTRY
from streamgrad.estimators.rtrl import rtrl_by_steps

STREAMS, STEPS, CHUNKS = 4, 3, 4


@functools.cache
def model_of(cell: str = "vanilla") -> sg.Model:
    made = {"vanilla": sg.cells.vanilla, "gru": sg.cells.gru, "lru": sg.cells.lru}[cell]
    return sg.Model(made(2, 6), sg.heads.squared_error(2))


OTHERS = {
    "uoro that shrinks": lambda model: sg.uoro_across(model, shrink="auto"),
    "ok of rank 2": lambda model: sg.ok(model, rank=2),
    "rtrl by steps": rtrl_by_steps,
    "carried, all streams": lambda model: sg.carried(sg.uoro(model), window=2, least=1, refresh=1, streams=None),
    "carried, episodes": lambda model: sg.carried(sg.uoro(model), episode=STEPS, least=1, refresh=1, streams=None),
}
NAMES = [*REGISTRY, *OTHERS]


def make(name: str, cell: str = "vanilla") -> sg.GradientEstimator:
    """The estimator of that name for one stream."""
    if name in OTHERS:
        return OTHERS[name](model_of(cell))
    return REGISTRY[name].make(model_of(cell), **REGISTRY[name].options)


def params_of(cell: str = "vanilla") -> sg.Params:
    params = model_of(cell).init(jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda w: jnp.asarray(np.asarray(w) + 0.1 * rng.normal(size=w.shape), jnp.float64), params)


def chunk_of(number: int, streams: slice = slice(None)) -> sg.Chunk:
    """The same numbers on every machine; some streams begin an episode."""
    rng = np.random.default_rng(number)
    inputs, targets = rng.normal(size=(STREAMS, STEPS, 2)), rng.normal(size=(STREAMS, STEPS, 2))
    reset = np.zeros((STREAMS, STEPS), bool)
    reset[number % STREAMS, 0] = True
    return sg.Chunk(*(leaf[streams] for leaf in (inputs, targets, reset)))


def train(est: sg.GradientEstimator, cell: str = "vanilla", streams: slice = slice(None)) -> list[np.ndarray]:
    """Gradients of a few chunks, from a running state, with parameters that move; as arrays of the host."""
    params, found = params_of(cell), []
    state = est.init(params)
    for number in range(CHUNKS):
        grads, state, _ = est.update(params, state, chunk_of(number, streams), jax.random.key(100 + number))
        grads = jax.device_get(grads)
        params = jax.tree.map(lambda w, g: w - 0.01 * g, params, grads)
        found += [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]
    return found


def difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest, relative to the largest number."""
    scale = max(np.max(np.abs(leaf)) for leaf in expected)
    return max(float(np.max(np.abs(a - b))) for a, b in zip(found, expected, strict=True)) / scale
