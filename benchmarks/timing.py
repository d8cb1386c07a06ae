"""How everything here is timed: in turns, inside one run, medians of repeats."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import streamgrad as sg


class Program(NamedTuple):
    """A compiled update with what it works on.

    Attributes:
      call: `call(state) -> (something to wait for, state)`.
      state: what the next call takes.
      compile_seconds: tracing and compiling together.
      temp_bytes: what it keeps at its peak beside arguments and results.
      state_bytes: the estimator's state.
    """

    call: Callable[[Any], tuple[Any, Any]]
    state: Any
    compile_seconds: float
    temp_bytes: int
    state_bytes: int


def prepare(update: Callable, params: Any, state: Any, chunk: sg.Chunk, key: Any) -> Program:
    """Compile `update`, with the state's buffers donated, as in a training loop."""
    begin = time.perf_counter()
    compiled = jax.jit(update, donate_argnums=1).lower(params, state, chunk, key).compile()
    seconds = time.perf_counter() - begin
    analysis = compiled.memory_analysis()

    def call(state: Any) -> tuple[Any, Any]:
        grads, state, info = compiled(params, state, chunk, key)
        return (grads, info.loss), state

    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    return Program(call, state, seconds, analysis.temp_size_in_bytes, size)


def take_turns(programs: dict[str, Program], repeats: int, least_seconds: float = 0.05) -> dict[str, float]:
    """Median seconds per call of each program; all take turns in each round, so that noise hits them alike."""
    states, calls = {}, {}
    for name, program in programs.items():
        result, state = program.call(program.state)
        jax.block_until_ready((result, state))
        begin = time.perf_counter()
        result, state = program.call(state)
        jax.block_until_ready((result, state))
        once = time.perf_counter() - begin
        states[name], calls[name] = state, max(1, min(50, int(least_seconds / max(once, 1e-9))))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            state, result = states[name], None
            begin = time.perf_counter()
            for _ in range(calls[name]):
                result, state = program.call(state)
            jax.block_until_ready((result, state))
            seconds[name].append((time.perf_counter() - begin) / calls[name])
            states[name] = state
    return {name: statistics.median(values) for name, values in seconds.items()}


def make_cell(name: str, n_in: int, n_hidden: int) -> sg.Cell:
    """A cell by its name."""
    return {"vanilla": sg.cells.vanilla, "lstm": sg.cells.lstm, "gru": sg.cells.gru}[name](n_in, n_hidden)


def make_problem(cell: str, n_hidden: int, streams: int, length: int, n_in: int = 32, n_classes: int = 10):
    """A model with parameters and a random chunk for a batch of streams."""
    model = sg.Model(make_cell(cell, n_in, n_hidden), sg.heads.softmax(n_classes))
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = jax.random.normal(keys[1], (streams, length, n_in), jnp.float32)
    targets = jax.random.randint(keys[2], (streams, length), 0, n_classes)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.init(keys[0]))
    return model, params, sg.Chunk(inputs, targets)


def handwritten_bptt(cell: str, n_hidden: int) -> Callable:
    """The shortest scan that a JAX user would write: the batch as a matrix, jax.grad around it; vanilla or LSTM."""

    def step(w, state, x):
        h, c = state
        a = jnp.concatenate([h, x, jnp.ones((len(x), 1), x.dtype)], axis=1)
        if cell == "vanilla":
            h = jnp.tanh(a @ w.T)
        else:
            i, f, g, o = jnp.split(a @ w.T, 4, axis=1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def update(params, state, chunk, key):
        del key

        def loss(params):
            x = jnp.swapaxes(chunk.inputs, 0, 1)
            end, outputs = jax.lax.scan(lambda s, x: step(params.cell["w"], s, x), state, x)
            log_p = jax.nn.log_softmax(outputs @ params.head["w"].T + params.head["b"])
            losses = -jnp.take_along_axis(log_p, jnp.swapaxes(chunk.targets, 0, 1)[..., None], axis=2)[..., 0]
            return jnp.sum(losses) / len(chunk.inputs), (end, losses)

        grads, (end, losses) = jax.grad(loss, has_aux=True)(params)
        return grads, end, sg.Info(losses, {})

    return update
