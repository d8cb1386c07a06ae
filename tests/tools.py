"""What the tests share: small models, data for them, and exact means over sign patterns."""

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad.estimators.rtrl import rtrl_by_steps
from streamgrad.estimators.snap import snap_by_steps

ROOT = Path(__file__).parent.parent


def few(cases, *quick) -> list:
    """Cases as parameters of a test, of which these are quick; the others are among the slow tests."""

    def values(case):
        return case if isinstance(case, tuple) else (case,)

    assert all(case in cases for case in quick)
    return [pytest.param(*values(case), marks=() if case in quick else pytest.mark.slow) for case in cases]


def code_blocks(path: Path) -> list[str]:
    """The Python examples of a page."""
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [re.sub(r"^   ", "", block, flags=re.MULTILINE) if block.startswith("   ") else block for block in blocks]


def nested_cell() -> sg.Cell:
    """A `from_function` cell over nested pytrees: two kinds of state, shared parameters, a dictionary as input."""

    def step(params, state, x):
        fast, (slow,) = state["fast"], state["slow"]
        drive = params["in"]["w"] @ x["a"] + x["b"]
        fast = jnp.tanh(params["rec"][0] @ fast + drive + slow[0])
        slow = slow + jax.nn.sigmoid(params["rec"][1]) * (jnp.outer(fast, fast) - slow)
        return {"fast": fast, "slow": (slow,)}

    def init_params(key):
        k1, k2, k3 = jax.random.split(key, 3)
        return {
            "in": {"w": jax.random.normal(k1, (2, 1))},
            "rec": [jax.random.normal(k2, (2, 2)), jax.random.normal(k3, ())],
        }

    return sg.cells.from_function(
        step,
        init_params,
        init_state=lambda: {"fast": jnp.zeros(2), "slow": (jnp.zeros((2, 2)),)},
        output=lambda state: jnp.append(state["fast"], state["slow"][0][0, 1]),
        example_input={"a": jnp.zeros(1), "b": jnp.zeros(())},
        products=False,
    )


CELLS = {
    "vanilla": lambda n_in=1, n_hidden=2: sg.cells.vanilla(n_in, n_hidden),
    "lstm": lambda n_in=1, n_hidden=2: sg.cells.lstm(n_in, n_hidden),
    "gru": lambda n_in=1, n_hidden=2: sg.cells.gru(n_in, n_hidden),
    "stack": lambda n_in=1, n_hidden=2: sg.cells.stack(sg.cells.vanilla(n_in, 1), sg.cells.gru(1, n_hidden)),
}


@functools.cache
def make_model(cell: str, n_in: int = 1, n_hidden: int = 2) -> sg.Model:
    """One model for all tests, so that what is compiled for it can be shared."""
    if cell == "nested":
        return sg.Model(nested_cell(), sg.heads.squared_error(2))
    return sg.Model(CELLS[cell](n_in, n_hidden), sg.heads.squared_error(2))


# By chunks, and by steps as they were published: the same estimates.
RTRL = {"chunks": sg.rtrl, "steps": rtrl_by_steps}
SNAP = {"chunks": sg.snap, "steps": snap_by_steps}

# Every cut of every kind of cell.
CELL_CUTS = [
    (cell, cut)
    for cell in ("vanilla", "lstm", "gru", "stack", "nested")
    for cut in ("state", "params", "preactivation")
    if cut in make_model(cell).cell.cuts
]


def make_params(model: sg.Model, seed: int = 0, dtype=jnp.float64) -> sg.Params:
    """Parameters away from any symmetry: biases, too, are not zero."""
    params = made(initialised, model)(seed)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf) + 0.3 * rng.normal(size=leaf.shape), dtype), params)


def initialised(model: sg.Model):
    """The model's parameters by seed, as one program instead of an operation at a time."""
    return jax.jit(lambda seed: model.init(jax.random.key(seed)))


def make_chunk(model: sg.Model, length: int, seed: int = 0, reset=None, dtype=jnp.float64) -> sg.Chunk:
    rng = np.random.default_rng(seed + 100)
    inputs = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=(length, *x.shape)), dtype), model.cell.example_input)
    targets = jnp.asarray(rng.normal(size=(length, 2)), dtype)
    reset = None if reset is None else jnp.asarray(np.isin(np.arange(length), reset))
    return sg.Chunk(inputs, targets, reset)


def split(chunk: sg.Chunk, sizes: tuple[int, ...]) -> Iterator[sg.Chunk]:
    """A chunk in pieces of these lengths."""
    start = 0
    for size in sizes:
        yield jax.tree.map(lambda leaf, a=start, b=start + size: jnp.asarray(np.asarray(leaf)[a:b]), chunk)
        start += size


_MADE: dict = {}


def made(make, model: sg.Model, **options):
    """`make(model, **options)`, an estimator for one, once: what it compiles is shared by all tests of a process."""

    def frozen(value):
        return (value.shape, np.asarray(value).tobytes()) if hasattr(value, "shape") else value

    key = (make, id(model), *((name, frozen(options[name])) for name in sorted(options)))
    if key not in _MADE:
        _MADE[key] = (model, make(model, **options))  # with the model, so that its id stays its own
    return _MADE[key][1]


def run(est: sg.GradientEstimator, params, chunks, key=None):
    """Gradients of consecutive chunks, summed; parameters stay as they are. A list has a key for each chunk."""
    state, total, losses = est.init(params), None, []
    for index, chunk in enumerate(chunks):
        grads, state, info = est.update(params, state, chunk, key[index] if isinstance(key, list) else key)
        total = grads if total is None else jax.tree.map(np.add, total, grads)
        losses.append(info.loss)
    return jax.tree.map(jnp.asarray, total), jnp.asarray(np.concatenate(losses)), state


def bptt(model: sg.Model, params, chunk: sg.Chunk):
    """The reference."""
    return run(made(sg.bptt, model), params, [chunk])[0]


def error(got, want) -> float:
    """The largest difference, relative to the largest entry of the wanted tree, unless all of it is zero."""
    got, want = (list(map(np.asarray, jax.tree.leaves(tree))) for tree in (got, want))
    scale = max(np.max(np.abs(leaf)) for leaf in want)
    return float(max(np.max(np.abs(a - b)) for a, b in zip(got, want, strict=True)) / (scale or 1.0))


def weighed(model: sg.Model) -> sg.Model:
    """The same model with a head that multiplies its loss itself: the last entry of its targets is the weight."""

    def loss(params, output, target):
        return target[-1] * model.head.loss(params, output, target[:-1])

    return sg.Model(model.cell, sg.heads.from_function(model.head.init_params, loss))


def by_hand(chunk: sg.Chunk) -> sg.Chunk:
    """The chunk for `weighed`, without weights of its own."""
    return chunk._replace(targets=jnp.concatenate([chunk.targets, chunk.weight[:, None]], axis=1), weight=None)


def cut_size(model: sg.Model, cut: str) -> int:
    cell = sg.worked(model).cell
    return sg.cuts.layout(cell, cell.cuts[cut]).size


def all_signs(*shape: int) -> np.ndarray:
    """Every pattern of signs of this shape, `[2^n, *shape]`."""
    n = int(np.prod(shape))
    assert n <= 16, f"2^{n} patterns are too many"
    return np.array(list(itertools.product([-1.0, 1.0], repeat=n))).reshape(-1, *shape)


def orthogonal_signs(*shape: int) -> np.ndarray:
    """Few patterns of signs with exactly the second moments of all of them: rows of a Hadamard matrix.

    An estimate that is a quadratic form of the noise (any whose coefficients do not depend on it, so not GIR) has the
    same mean over these as over all patterns.
    """
    n = int(np.prod(shape))
    order = 1 << n.bit_length()
    signs = scipy.linalg.hadamard(order)[:, 1 : n + 1].astype(float)
    np.testing.assert_array_equal(signs.T @ signs, order * np.eye(n))
    return signs.reshape(-1, *shape)


def over_patterns(est: sg.GradientEstimator, params, chunk, patterns, block: int = 4096):
    """Gradients under each pattern of noise; `est` was made with noise="given". Yields blocks, pattern leading."""
    state = est.init(params)
    update = jax.jit(jax.vmap(lambda noise: est.update(params, state, chunk, noise)[0]))
    for start in range(0, len(patterns), block):
        yield update(jnp.asarray(patterns[start : start + block]))


def mean_over(est: sg.GradientEstimator, params, chunk, patterns, weights=None):
    """The exact mean gradient over patterns of noise, all of the same weight unless weights are given."""
    weights = np.full(len(patterns), 1 / len(patterns)) if weights is None else weights
    total, done = None, 0
    for grads in over_patterns(est, params, chunk, patterns):
        size = len(jax.tree.leaves(grads)[0])
        mine = weights[done : done + size]
        here = jax.tree.map(lambda leaf, w=mine: np.tensordot(w, leaf, axes=1), grads)
        done += size
        total = here if total is None else jax.tree.map(np.add, total, here)
    return total


def noisy_loss(model: sg.Model, params, chunk, u, sigma, q0=None):
    """The summed loss of the network whose state is perturbed: h̄_t = F(h̄_{t-1}, x_t) + σ Q_0 u_t."""
    cell, params = sg.worked(model).cell, model.enter(params)
    fresh, unravel = model.init_state(params), ravel_pytree(model.init_state(params))[1]
    kicks = sigma * u @ (jnp.eye(u.shape[1]) if q0 is None else jnp.asarray(q0)).T
    reset = jnp.zeros(len(u), bool) if chunk.reset is None else chunk.reset

    def step(state, now):
        x, target, begins, kick = now
        state = jax.tree.map(lambda a, b: jnp.where(begins, a, b), fresh, state)
        state = jax.tree.map(jnp.add, cell.step(params.cell, state, x), unravel(kick))
        return state, model.head.loss(params.head, cell.output(state), target)

    return jnp.sum(jax.lax.scan(step, fresh, (chunk.inputs, chunk.targets, reset, kicks))[1])


def smoothed_loss(model: sg.Model, params, chunk, u, sigma):
    """The summed loss of the network whose parameters are perturbed: θ + σ u, the same at all steps of the chunk."""
    theta, unravel = ravel_pytree(params.cell)
    return noisy_loss(model, params._replace(cell=unravel(theta + sigma * u)), chunk, still(model, params, chunk), 0.0)


def still(model: sg.Model, params, chunk):
    """No noise in the state."""
    return jnp.zeros((len(chunk.targets), ravel_pytree(model.init_state(params))[0].size))


def gaussian_nodes(nodes: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Hermite nodes `[nodes^n, *shape]` and their weights: Gaussian noise that can be enumerated.

    Means over it are exact to rounding where the integrand is smooth enough for so many nodes.
    """
    n = int(np.prod(shape))
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.array(list(itertools.product(points, repeat=n))).reshape(-1, *shape)
    return grid, np.array([np.prod(w) for w in itertools.product(weights / weights.sum(), repeat=n)])


def random_q0(size: int, seed: int = 0) -> np.ndarray:
    """An invertible matrix, neither symmetric nor close to singular."""
    return np.random.default_rng(seed).normal(size=(size, size)) + 2 * np.eye(size)


def random_alpha(*shape: int, seed: int = 0) -> np.ndarray:
    return np.exp(np.random.default_rng(seed + 7).normal(size=shape))


def one_sentence(error: pytest.ExceptionInfo) -> bool:
    """Whether an error says what is wrong in one sentence."""
    text = str(error.value)
    return "\n" not in text and text.endswith(".") and text.count(". ") == 0
