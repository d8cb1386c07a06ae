"""Cells of other libraries and of none, each with the call it has where it comes from.

A case's `call` is what its library documents, and nothing of streamgrad: through `jax.lax.scan` it is the oracle.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import streamgrad as sg
from tests.cells.libraries import library

N_IN, H = 2, 2
F64 = jnp.float64


class Case(NamedTuple):
    """A cell twice.

    Attributes:
      cell: for streamgrad.
      call: `call(params, state, x) -> (state, y)`, by the library alone; params as `cell.init_params` has them.
      begin: the state that the library begins an episode with.
      inputs: `inputs(rng, length)`.
    """

    cell: sg.Cell
    call: Callable[[Any, Any, Any], tuple[Any, Any]]
    begin: Any
    inputs: Callable[[np.random.Generator, int], Any]


class Entry(NamedTuple):
    """How a case is made, and to what its numbers hold."""

    make: Callable[[], Case]
    tolerance: float = 1e-10


def vectors(*shape: int) -> Callable[[np.random.Generator, int], Any]:
    return lambda rng, length: jnp.asarray(rng.normal(size=(length, *shape)))


def nnx_case(kind: str) -> Callable[[], Case]:
    def make() -> Case:
        nnx = library("flax.nnx")
        cell = getattr(nnx, kind)(N_IN, H, rngs=nnx.Rngs(0), param_dtype=F64, dtype=F64)
        graph = nnx.graphdef(cell)
        begin = cell.initialize_carry((N_IN,), nnx.Rngs(0))
        return Case(sg.cells.from_flax(cell), lambda p, h, x: nnx.merge(graph, p)(h, x), begin, vectors(N_IN))

    return make


def linen_case(kind: str, *sizes: Any, shape: tuple[int, ...] = (N_IN,)) -> Callable[[], Case]:
    def make() -> Case:
        linen = library("flax.linen")
        cell = getattr(linen, kind)(*(sizes or (H,)), param_dtype=F64)
        begin = cell.initialize_carry(jax.random.key(0), shape)

        def call(params, carry, x):
            carry, y = cell.apply({"params": params}, carry, x)
            return carry, y.reshape(-1)

        return Case(sg.cells.from_flax(cell, jnp.zeros(shape)), call, begin, vectors(*shape))

    return make


def linen_projected() -> Case:
    """A module whose output is no part of its carry, but a function of it with parameters of its own."""
    linen = library("flax.linen")

    class Projected(linen.Module):
        @linen.compact
        def __call__(self, carry, x):
            carry, h = linen.GRUCell(H, param_dtype=F64)(carry, x)
            return carry, linen.Dense(3, param_dtype=F64)(h)

    cell, begin = Projected(), jnp.zeros(H)
    return Case(
        sg.cells.from_flax(cell, jnp.zeros(N_IN), init_state=lambda: begin),
        lambda p, carry, x: cell.apply({"params": p}, carry, x),
        begin,
        vectors(N_IN),
    )


def eqx_case(kind: str, use_bias: bool) -> Callable[[], Case]:
    def make() -> Case:
        eqx = library("equinox")
        cell = getattr(eqx.nn, kind)(N_IN, H, use_bias=use_bias, key=jax.random.key(0))

        def call(params, state, x):
            state = eqx.combine(params, cell)(x, state)
            return state, state[0] if kind == "LSTMCell" else state

        begin = (jnp.zeros(H), jnp.zeros(H)) if kind == "LSTMCell" else jnp.zeros(H)
        return Case(sg.cells.from_equinox(cell), call, begin, vectors(N_IN))

    return make


def eqx_layers() -> Case:
    """Two layers with layer norms and a residual path, called as (state, x), the other order than Equinox's own."""
    eqx = library("equinox")

    class Layers(eqx.Module):
        lower: Any
        upper: Any
        norms: list
        read: Any
        squash: Callable

        def __init__(self, key):
            keys = jax.random.split(key, 3)
            self.lower = eqx.nn.GRUCell(N_IN, H, key=keys[0])
            self.upper = eqx.nn.LSTMCell(H, H, key=keys[1])
            self.norms = [eqx.nn.LayerNorm(H, eps=0.1), eqx.nn.LayerNorm(H, eps=0.1)]
            self.read = eqx.nn.Linear(H, 3, key=keys[2])
            self.squash = jax.nn.softplus

        def __call__(self, state, x):
            h, upper = state
            h = self.lower(x, h)
            upper = self.upper(self.norms[0](h), upper)
            return (h, upper), self.squash(self.read(self.norms[1](upper[0]) + h))

    model = Layers(jax.random.key(0))

    def begin():
        return jnp.zeros(H), (jnp.zeros(H), jnp.zeros(H))

    cell = sg.cells.from_equinox(model, jnp.zeros(N_IN), begin, call=lambda model, state, x: model(state, x))
    return Case(cell, lambda p, state, x: eqx.combine(p, model)(state, x), begin(), vectors(N_IN))


def haiku_case(kind: str) -> Callable[[], Case]:
    def make() -> Case:
        hk = library("haiku")
        apply = hk.without_apply_rng(hk.transform(lambda x, state: getattr(hk, kind)(H)(x, state))).apply
        begin = hk.transform(lambda: getattr(hk, kind)(H).initial_state(None)).apply({}, None)
        cell = sg.cells.from_haiku(lambda: getattr(hk, kind)(H), jnp.zeros(N_IN))
        return Case(cell, lambda p, state, x: apply(p, x, state)[::-1], begin, vectors(N_IN))

    return make


def function_case(step, init_params, begin, read, inputs, example) -> Case:
    """A function of no library: the oracle calls it as it is."""
    cell = sg.cells.from_function(step, init_params, lambda: begin, read, example)

    def call(params, state, x):
        state = step(params, state, x)
        return state, read(state)

    return Case(cell, call, begin, inputs)


def draw(key, **shapes) -> dict[str, jax.Array]:
    """Normal parameters by name; a shape that begins with "c" is complex."""
    found = {}
    for k, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True):
        kind = jnp.complex128 if shape[:1] == ("c",) else F64
        found[name] = 0.5 * jax.random.normal(k, shape[1:] if kind == jnp.complex128 else shape, kind)
    return found


def lru() -> Case:
    """A linear recurrent unit: h_t = λ h_{t-1} + γ B x_t with complex λ = exp(-exp(ν) + iθ), B and h."""

    def step(p, h, x):
        decay = jnp.exp(-jnp.exp(p["nu"]) + 1j * p["theta"])
        return decay * h + jnp.exp(p["gamma"]) * (p["b"] @ x)

    return function_case(
        step,
        lambda key: draw(key, nu=(H,), theta=(H,), gamma=(H,), b=("c", H, N_IN)),
        jnp.zeros(H, jnp.complex128),
        lambda h: jnp.concatenate([h.real, h.imag]),
        vectors(N_IN),
        jnp.zeros(N_IN),
    )


def s5() -> Case:
    """As S5 has it: complex Λ by zero-order hold with learned steps, and y = gelu(Re(C h) + D x) read with them."""

    def step(p, state, x):
        rates = -jnp.exp(p["rate"].real) + 1j * p["rate"].imag
        decay = jnp.exp(rates * jnp.exp(p["log_dt"]))
        h = decay * state["h"] + (decay - 1) / rates * (p["b"] @ x)
        return {"h": h, "y": jax.nn.gelu((p["c"] @ h).real * 2 + p["d"] * x)}

    return function_case(
        step,
        lambda key: draw(key, rate=("c", H), log_dt=(H,), b=("c", H, N_IN), c=("c", N_IN, H), d=(N_IN,)),
        {"h": jnp.zeros(H, jnp.complex128), "y": jnp.zeros(N_IN)},
        lambda state: state["y"],
        vectors(N_IN),
        jnp.zeros(N_IN),
    )


def tied() -> Case:
    """One matrix four times: twice as it is, transposed, and as the weights of a norm of its columns."""

    def step(p, h, x):
        w = p["w"]
        h = jnp.tanh(w @ h + x @ w.T + p["b"])
        return jnp.tanh(w.T @ h / jnp.linalg.norm(w) + w @ (w @ h))

    return function_case(
        step, lambda key: draw(key, w=(H, H), b=(H,)), jnp.zeros(H), lambda h: h, vectors(H), jnp.zeros(H)
    )


def convolution() -> Case:
    """A map of three places and two channels, by `lax.conv_general_dilated`."""

    def step(p, h, x):
        both = jnp.concatenate([h, x], axis=1)[None]
        moved = jax.lax.conv_general_dilated(both, p["k"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return jnp.tanh(moved[0] + p["b"][None])

    return function_case(
        step, lambda key: draw(key, k=(3, 2, 1), b=(1,)), jnp.zeros((3, 1)), jnp.ravel, vectors(3, 1), jnp.zeros((3, 1))
    )


def embedding() -> Case:
    """Words by number: a row of a table is looked up."""

    def step(p, h, x):
        return jnp.tanh(p["w"] @ h + p["table"][x])

    return function_case(
        step,
        lambda key: draw(key, w=(H, H), table=(4, H)),
        jnp.zeros(H),
        lambda h: h,
        lambda rng, length: jnp.asarray(rng.integers(4, size=length)),
        jnp.zeros((), int),
    )


def counter() -> Case:
    """A leaky unit whose rate depends on how many steps the episode has had."""

    def step(p, state, x):
        rate = 1 / (1 + state["steps"].astype(F64))
        h = (1 - rate) * state["h"] + rate * jnp.tanh(p["w"] @ jnp.concatenate([state["h"], x]) + p["b"])
        return {"h": h, "steps": state["steps"] + 1}

    return function_case(
        step,
        lambda key: draw(key, w=(H, H + N_IN), b=(H,)),
        {"h": jnp.zeros(H), "steps": jnp.zeros((), jnp.int32)},
        lambda state: state["h"],
        vectors(N_IN),
        jnp.zeros(N_IN),
    )


def dropout() -> Case:
    """A key comes with each input and decides what is dropped."""

    def step(p, h, x):
        kept = jax.random.bernoulli(x["key"], 0.7, (H,)) / 0.7
        return jnp.tanh(p["w"] @ (kept * h) + p["v"] @ x["x"])

    def inputs(rng, length):
        return {"x": vectors(N_IN)(rng, length), "key": jax.random.split(jax.random.key(rng.integers(99)), length)}

    return function_case(
        step,
        lambda key: draw(key, w=(H, H), v=(H, N_IN)),
        jnp.zeros(H),
        lambda h: h,
        inputs,
        {"x": jnp.zeros(N_IN), "key": jax.random.key(0)},
    )


def bfloat16() -> Case:
    """Weights in bfloat16, the state and all sums in float32."""

    def step(p, h, x):
        w, v = (p[name].astype(jnp.float32) for name in ("w", "v"))
        return jnp.tanh(w @ h + v @ x.astype(jnp.float32) + p["b"])

    def init_params(key):
        params = draw(key, w=(H, H), v=(H, N_IN), b=(H,))
        kinds = {"w": jnp.bfloat16, "v": jnp.bfloat16, "b": jnp.float32}
        return {name: leaf.astype(kinds[name]) for name, leaf in params.items()}

    begin = jnp.zeros(H, jnp.float32)
    return function_case(step, init_params, begin, lambda h: h, vectors(N_IN), jnp.zeros(N_IN, jnp.float32))


CASES = {
    **{f"nnx.{k}": Entry(nnx_case(k)) for k in ("SimpleCell", "LSTMCell", "OptimizedLSTMCell", "GRUCell")},
    **{
        f"linen.{k}": Entry(linen_case(k))
        for k in ("SimpleCell", "LSTMCell", "OptimizedLSTMCell", "GRUCell", "MGUCell")
    },
    "linen.ConvLSTMCell": Entry(linen_case("ConvLSTMCell", 1, (2,), shape=(3, 1))),
    "linen, projected": Entry(linen_projected),
    "eqx.GRUCell": Entry(eqx_case("GRUCell", True)),
    "eqx.GRUCell, no bias": Entry(eqx_case("GRUCell", False)),
    "eqx.LSTMCell": Entry(eqx_case("LSTMCell", True)),
    "eqx.LSTMCell, no bias": Entry(eqx_case("LSTMCell", False)),
    "eqx, two layers": Entry(eqx_layers),
    "haiku.LSTM": Entry(haiku_case("LSTM")),
    "haiku.GRU": Entry(haiku_case("GRU")),
    "lru": Entry(lru),
    "s5": Entry(s5),
    "tied": Entry(tied),
    "convolution": Entry(convolution),
    "embedding": Entry(embedding),
    "counter": Entry(counter),
    "dropout": Entry(dropout),
    # Gradients of bfloat16 weights are bfloat16, of eight bits, and a scan adds them up in it.
    "bfloat16": Entry(bfloat16, tolerance=2**-6),
}
