"""What is timed: a model with a random chunk, and BPTT as a JAX user would write it by hand."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

import streamgrad as sg

LEAST_SECONDS = 0.05  # of calls in a row, for programs that take less


def make_cell(name: str, n_in: int, n_hidden: int) -> sg.Cell:
    """A cell by its name."""
    return getattr(sg.cells, name)(n_in, n_hidden)


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
