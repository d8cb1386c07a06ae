"""Random step functions: `rtrl` and `bptt` of streamgrad against `jax.grad` of a plain `lax.scan`.

    python -m tests.cells.random_steps 2000
    python -m tests.cells.random_steps 500 2000     # 2000 of them from seed 500 on

Weights meet features in every way that people write: either operand first, transposed, by einsum, reshaped, sliced,
concatenated, normalised, tied, in batches, as products of products; between them gates, norms, splits, and scans, conds
and jits around them. Prints every miss and the largest error. In float64.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.flags import FLAGS

os.environ.setdefault("XLA_FLAGS", FLAGS)

import jax
import jax.numpy as jnp
import numpy as np

import streamgrad as sg
from tests.cells import random_weights
from tests.cells.random_weights import Weights
from tests.search import search
from tests.tools import cut_size, error, mean_over, orthogonal_signs, split

TOLERANCE = 1e-10
Value = Callable[[dict, dict], jax.Array]  # of parameters and of what the step was given
Pick = Callable[[Sequence], Any]  # one of several; a seed's choice, or hypothesis's


class Node(NamedTuple):
    """A vector inside the step, and its size."""

    value: Value
    size: int


SMOOTH = (jnp.tanh, jax.nn.sigmoid, jnp.sin, jax.nn.softplus, jax.nn.silu, jax.nn.gelu, jax.nn.relu, jax.nn.softmax)


def grow(pick: Pick, weights: Weights, nodes: list[Node]) -> Node:
    """A new vector, made of those there are by a random operation."""
    a = pick(nodes[-3:]) if pick((True, True, False)) else pick(nodes)
    b, name = pick(nodes), f"node {len(nodes)}"
    made = pick(OPERATIONS)(pick, weights, a, b)

    def once(p: dict, v: dict) -> jax.Array:
        if name not in v:
            v[name] = made.value(p, v)
        return v[name]

    return Node(once, made.size)


def product(pick: Pick, weights: Weights, a: Node, b: Node) -> Node:
    size = pick((2, 3, 4))
    times = weights.product(pick, size, a.size)
    return Node(lambda p, v: times(p, a.value(p, v)), size)


def sum_of_products(pick: Pick, weights: Weights, a: Node, b: Node) -> Node:
    """A layer: W a + U b + c through some function."""
    size, f = pick((2, 3, 4)), pick(SMOOTH)
    first, second = weights.product(pick, size, a.size), weights.product(pick, size, b.size)
    shift = weights.new(size)
    return Node(lambda p, v: f(first(p, a.value(p, v)) + second(p, b.value(p, v)) + p[shift]), size)


def one_product_of_both(pick: Pick, weights: Weights, a: Node, b: Node) -> Node:
    """W (a, b, 1), split into gates, as in an LSTM."""
    size = pick((1, 2))
    times = weights.product(pick, 3 * size, a.size + b.size + 1)

    def value(p, v):
        gates = times(p, jnp.concatenate([a.value(p, v), b.value(p, v), jnp.ones(1)]))
        i, f, g = jnp.split(gates, 3)
        return jax.nn.sigmoid(i) * jnp.tanh(g) + jax.nn.sigmoid(f)

    return Node(value, size)


def product_of_products(pick: Pick, weights: Weights, a: Node, b: Node) -> Node:
    """The second product's features depend on the first, as in a GRU: U (σ(W a) * b)."""
    size = pick((2, 3))
    first, second = weights.product(pick, b.size, a.size), weights.product(pick, size, b.size)
    return Node(lambda p, v: second(p, jax.nn.sigmoid(first(p, a.value(p, v))) * b.value(p, v)), size)


def bilinear(pick: Pick, weights: Weights, a: Node, b: Node) -> Node:
    """Two products multiplied, and one that multiplies an outer product."""
    size = pick((2, 3))
    first, second = weights.product(pick, size, a.size), weights.product(pick, size, b.size)
    third = weights.new(b.size)

    def value(p, v):
        x, y = a.value(p, v), b.value(p, v)
        return first(p, x) * second(p, y) + jnp.tanh(jnp.outer(first(p, x), y) @ p[third])

    return Node(value, size)


def biased(pick: Pick, weights: Weights, a: Node, b: Node) -> Node:
    shift, way = weights.new(a.size), pick(("plus", "minus", "row"))

    def value(p, v):
        x = a.value(p, v)
        if way == "row":
            return (x[None] + jnp.reshape(p[shift], (1, -1)))[0]
        return x + p[shift] if way == "plus" else p[shift] - x

    return Node(value, a.size)


def scaled(pick: Pick, weights: Weights, a: Node, b: Node) -> Node:
    """Elementwise parameters, such as decay rates."""
    rate, way = weights.new(a.size), pick(("times", "decay", "scalar"))

    def value(p, v):
        x = a.value(p, v)
        if way == "scalar":
            return p[rate][0] * x
        return p[rate] * x if way == "times" else jnp.exp(-jax.nn.softplus(p[rate])) * x

    return Node(value, a.size)


def norm(pick: Pick, weights: Weights, a: Node, b: Node) -> Node:
    """Layer norm or root mean square norm, with what is learned of it."""
    scale, shift, centred = weights.new(a.size), weights.new(a.size), pick((True, False))

    def value(p, v):
        x = a.value(p, v)
        x = x - jnp.mean(x) if centred else x
        return x * jax.lax.rsqrt(jnp.mean(x**2) + 0.1) * p[scale] + p[shift]

    return Node(value, a.size)


def smooth(pick: Pick, weights: Weights, a: Node, b: Node) -> Node:
    f = pick(SMOOTH)
    return Node(lambda p, v: f(a.value(p, v)), a.size)


def mixed(pick: Pick, weights: Weights, a: Node, b: Node) -> Node:
    """A convex combination by a learned gate, of as much as both have."""
    size = min(a.size, b.size)
    gate = weights.product(pick, size, a.size)

    def value(p, v):
        x, y = a.value(p, v), b.value(p, v)
        u = jax.nn.sigmoid(gate(p, x))
        return u * x[:size] + (1 - u) * y[-size:]

    return Node(value, size)


def joined(pick: Pick, weights: Weights, a: Node, b: Node) -> Node:
    if a.size + b.size > 6:
        return smooth(pick, weights, a, b)
    return Node(lambda p, v: jnp.concatenate([a.value(p, v), b.value(p, v)]), a.size + b.size)


def moved(pick: Pick, weights: Weights, a: Node, b: Node) -> Node:
    """Slices and other ways to move entries about."""
    way, n = pick(("slice", "flip", "roll", "take", "fold", "pad")), a.size

    def value(p, v):
        x = a.value(p, v)
        if way == "slice":
            return x[: max(1, n - 1)]
        if way == "pad":
            return jnp.pad(x[1:], (1, 0))
        if way == "fold":
            return jnp.stack([x, 2 * x], axis=1).reshape(2, n).T.sum(axis=1)
        return {"flip": jnp.flip, "roll": lambda x: jnp.roll(x, 1), "take": lambda x: x[np.arange(n)[::-1] // 2]}[way](
            x
        )

    return Node(value, max(1, n - 1) if way == "slice" else n)


def looped(pick: Pick, weights: Weights, a: Node, b: Node) -> Node:
    """A scan inside the step: with one matrix for all its turns, or one for each."""
    n, own = a.size, pick((True, False))
    w = weights.new(2, n, n) if own else weights.new(n, n)

    def value(p, v):
        def turn(x, matrix):
            return jnp.tanh((p[w] if matrix is None else matrix) @ x), None

        return jax.lax.scan(turn, a.value(p, v), p[w] if own else None, length=2)[0]

    return Node(value, n)


def branched(pick: Pick, weights: Weights, a: Node, b: Node) -> Node:
    """One of two products, by what the step has seen."""
    size, way = pick((2, 3)), pick(("cond", "where", "switch"))
    first, second = weights.product(pick, size, a.size), weights.product(pick, size, a.size)

    def value(p, v):
        x, yes = a.value(p, v), jnp.sum(b.value(p, v)) > 0
        if way == "where":
            return jnp.where(yes, first(p, x), second(p, x))
        branches = (lambda p, x: first(p, x), lambda p, x: jnp.tanh(second(p, x)))
        if way == "cond":
            return jax.lax.cond(yes, *branches, p, x)
        return jax.lax.switch(yes.astype(int), branches, p, x)

    return Node(value, size)


def wrapped(pick: Pick, weights: Weights, a: Node, b: Node) -> Node:
    """A layer inside jit, remat, a function with a jvp rule of its own, or vmap over rows."""
    size, way = pick((2, 3)), pick(("jit", "remat", "custom", "rows"))
    w, shift = weights.new(size, a.size), weights.new(size)

    def layer(w, shift, x):
        return jnp.tanh(w @ x + shift)

    def value(p, v):
        x = a.value(p, v)
        if way == "rows":
            return jnp.tanh(jax.vmap(lambda row, c: row @ x + c)(p[w], p[shift]))
        wrap = {"jit": jax.jit, "remat": jax.checkpoint, "custom": random_weights.own_jvp}[way]
        return wrap(layer)(p[w], p[shift], x)

    return Node(value, size)


OPERATIONS = (
    product, product, sum_of_products, sum_of_products, one_product_of_both, product_of_products, bilinear, biased,
    scaled, norm, smooth, mixed, joined, moved, looped, branched, wrapped,
)  # fmt: skip


def random_cell(pick: Pick) -> sg.Cell:
    """A cell of a random step over one or two state leaves, one of which may be a matrix."""
    n_in, size, second = pick((1, 2)), pick((2, 3)), pick((None, "vector", "matrix"))
    weights = Weights()
    nodes = [Node(lambda p, v: v["x"], n_in), Node(lambda p, v: v["h"], size)]
    if second:
        nodes.append(Node(lambda p, v: v["c"].reshape(-1), 2))
    for _ in range(pick((1, 2, 3, 4))):
        nodes.append(grow(pick, weights, nodes))
    into_h = weights.product(pick, size, nodes[-1].size)
    around = weights.product(pick, size, size)
    into_c, keep = weights.product(pick, 2, nodes[-1].size), pick((0.0, 0.5))

    def step(p, state, x):
        v = {**state, "x": x}
        last = nodes[-1].value(p, v)
        new = {"h": jnp.tanh(into_h(p, last) + around(p, v["h"])) + keep * v["h"]}
        if second:
            c = jnp.tanh(v["c"].reshape(-1) + into_c(p, last) * new["h"][:2])
            new["c"] = c.reshape(v["c"].shape)
        return new

    def init_state():
        begin = {"h": jnp.zeros(size)}
        return begin if second is None else begin | {"c": jnp.zeros((2, 1) if second == "matrix" else 2)}

    return sg.cells.from_function(step, weights.init, init_state, example_input=jnp.zeros(n_in))


def oracle(cell: sg.Cell, params: sg.Params, chunk: sg.Chunk) -> sg.Params:
    """`jax.grad` through `jax.lax.scan`, with nothing of streamgrad but the step that was given to it."""
    fresh = cell.init_state()

    def total(params):
        def step(state, now):
            state = jax.tree.map(lambda a, b: jnp.where(now.reset, a, b), fresh, state)
            state = cell.step(params.cell, state, now.inputs)
            y = jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(state)])
            return state, jnp.sum((params.head["w"] @ y + params.head["b"] - now.targets) ** 2) / 2

        return jnp.sum(jax.lax.scan(step, fresh, chunk)[1])

    return jax.jit(jax.grad(total))(params)


def check_cell(cell: sg.Cell, seed: int) -> float:
    """Draw numbers and chunks, and compare; returns the largest error."""
    rng = np.random.default_rng(seed)
    model = sg.Model(cell, sg.heads.squared_error(2))
    params = jax.jit(model.init)(jax.random.key(seed))
    size, count = int(rng.choice([1, 2, 3, 6])), int(rng.integers(2, 4))  # chunks of one size compile once
    count = count if size < 6 else 1
    length = size * count
    inputs = jnp.asarray(rng.normal(size=(length, *cell.example_input.shape)))
    reset = jnp.asarray(rng.random(length) < 0.2)
    chunk = sg.Chunk(inputs, jnp.asarray(rng.normal(size=(length, 2))), reset)
    want = oracle(cell, params, chunk)
    found = {}
    methods = [("rtrl", sg.rtrl(model), (size,) * count)]
    if seed % 3 == 0:  # it has less that can go wrong
        methods.append(("bptt", sg.bptt(model), (length,)))
    for name, est, parts in methods:
        state, total = est.init(params), None
        for part in split(chunk, parts):
            grads, state, _ = est.update(params, state, part, None)
            total = grads if total is None else jax.tree.map(np.add, total, grads)
        found[name] = error(total, want)
    if seed % 3 == 1:
        found["cut"] = error_of_cut(model, params, chunk, rng)
    if seed % 5 == 0:  # which takes as long as all the rest
        found |= errors_of_means(model, params, chunk)
    worst = max(found, key=lambda name: found[name])
    assert found[worst] < TOLERANCE, (seed, worst, found[worst], size)
    return found[worst]


def error_of_cut(model: sg.Model, params: sg.Params, chunk: sg.Chunk, rng: np.random.Generator) -> float:
    """dh/dθ = (dh/dz) J: what is pulled back through the cut is what backpropagation finds."""
    cell, params = sg.worked(model).cell, model.enter(params)
    cut = cell.cuts["preactivation"]
    state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), cell.init_state())
    aim = jnp.asarray(rng.normal(size=sum(leaf.size for leaf in jax.tree.leaves(state))))

    def both(params, state, x):
        step = sg.cuts.linearise(cut, params, state, x)
        return step.pull(step.push_back(aim)), step.backprop(aim)

    return error(*jax.jit(both)(params.cell, state, chunk.inputs[0]))


def errors_of_means(model: sg.Model, params: sg.Params, chunk: sg.Chunk) -> dict[str, float]:
    """The mean over patterns of signs, over two steps, where the preactivations are few enough for that."""
    n = cut_size(model, "preactivation")
    if n > 40:
        return {}
    start = jax.tree.map(lambda leaf: leaf[:2], chunk)
    want = oracle(model.cell, params, start)
    est = sg.uoro(model, noise="given", rescale="none")
    signs = np.array([[1.0, 1.0], [1.0, -1.0]])
    return {
        "uoro": error(mean_over(est, params, start, orthogonal_signs(2, n)), want),
        "preuoro": error(mean_over(sg.preuoro(model, noise="given"), params, start, signs), want),
    }


def check_one(seed: int) -> float:
    """A random cell by its seed."""
    rng = np.random.default_rng(seed)
    return check_cell(random_cell(lambda options: options[rng.integers(len(options))]), seed)


if __name__ == "__main__":
    search(check_one, "steps")
