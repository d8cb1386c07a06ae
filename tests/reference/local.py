"""The textbook versions of the methods that keep a part of dh/dθ alone: dense Jacobians, masks and Python loops.

Nothing here asks the library where a derivative is zero: patterns are read off numbers, at parameters and states that
are drawn at random.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad.engine.learning_signal import random_weights
from tests.reference.unrolled import jacobians, resets
from tests.tools import made

HEAD = sg.heads.squared_error(2)  # one for all, so that Jacobians of a cell are compiled once


def immediate(model, params, chunk):
    """Σ_t (dL_t/dh_t) (dh_t/dθ_t)."""
    return like(params, sum(s["dl_dh"] @ s["pull"] for s in jacobians(model, params, chunk, "state")))


def like(params, vector):
    return ravel_pytree(params.cell)[1](jnp.asarray(vector))


def anywhere(model, seed):
    """Parameters and a chunk at which no derivative is zero by chance."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), shapes)
    inputs = jnp.asarray(rng.normal(size=(8, *model.cell.example_input.shape)))
    return params, sg.Chunk(inputs, jnp.zeros((8, 2)))


def mask_of(model, order):
    """Where M can be non-zero `order` steps after it was zero: where it is so somewhere."""
    mask = 0.0
    for seed in range(4):
        params, chunk = anywhere(model, seed)
        steps = jacobians(sg.Model(model.cell, HEAD), params, chunk, "state")
        for first in range(len(steps) - order + 1):
            M = 0 * steps[0]["pull"]
            for s in steps[first : first + order]:
                M = s["propagate"] @ M + s["pull"]
            mask = np.maximum(mask, np.abs(M) > 1e-12)
    together = mutual(model)
    return np.minimum(mask + together @ mask, 1)


def mutual(model):
    """Which pairs of units feed each other, and no third, while the features of all weights stand still."""
    once, model = 0.0, sg.Model(model.cell, HEAD)
    for seed in range(4):
        params, chunk = anywhere(model, seed)
        once = np.maximum(once, np.max([np.abs(d) > 1e-12 for d in still_jacobians(model, params, chunk)], axis=0))
    ever = np.linalg.matrix_power(once + np.eye(len(once)), len(once)) > 0
    each_other = (ever & ever.T).astype(float)
    return each_other * (each_other.sum(axis=1, keepdims=True) == 2)


@functools.cache
def jacobian_of(function, place):
    """The Jacobian of a function with respect to its argument at that place, as a matrix; compiled once."""

    @jax.jit
    def at(*arguments):
        before, (own, *after) = arguments[:place], arguments[place:]
        flat, unravel = ravel_pytree(own)
        return jax.jacobian(lambda flat: ravel_pytree(function(*before, unravel(flat), *after))[0])(flat)

    return at


def still_jacobians(model, params, chunk):
    """dh_t/dh_{t-1} with z_t = W a(h_{t-1}) held fixed: dh_t/dh_{t-1} - (dh_t/dz_t) (dz_t/dh_{t-1}).

    Where a preactivation is made of another one, that would not be so; there they are all zero, as far as it matters.
    """
    pushes = jacobians(model, params, chunk, "preactivation")
    if model.cell.layers or (isinstance(params.cell, dict) and "o" in params.cell):  # a stack, or an element-wise LSTM
        return [0 * s["propagate"] for s in pushes]
    before, _ = states_before(model, params, chunk)
    into, found = model.cell.cuts["preactivation"].into, []
    for t, s in enumerate(pushes):
        x = jax.tree.map(lambda leaf, t=t: leaf[t], chunk.inputs)
        dz_dh = jacobian_of(into, 1)(params.cell, before[t], x)
        found.append(s["propagate"] - s["push"] @ np.asarray(dz_dh))
    return found


def snap(model, params, chunk, order=1):
    """M_t = mask ⊙ ((dh_t/dh_{t-1}) M_{t-1} + dh_t/dθ_t); dL/dθ = Σ_t (dL_t/dh_t) M_t (Menick et al., Section 3)."""
    mask = made(mask_of, model, order=order)
    total = M = 0.0
    for s in jacobians(model, params, chunk, "state"):
        past = 0.0 if s["reset"] or np.isscalar(M) else s["propagate"] @ M
        M = mask * (past + s["pull"])
        total = total + s["dl_dh"] @ M
    return like(params, total)


def states_before(model, params, chunk):
    state, found, step = model.init_state(params), [], jax.jit(model.cell.step)
    for t, reset in enumerate(resets(chunk)):
        found.append(model.init_state(params) if reset else state)
        state = step(params.cell, found[-1], jax.tree.map(lambda leaf, t=t: leaf[t], chunk.inputs))
    return found, state


def feedback_signals(model, params, chunk, steps, feedback, seed):
    """dL_t/dh_t, or errors at the head's preactivation through random weights."""
    if feedback == "symmetric":
        return [s["dl_dh"] for s in steps]
    b = np.asarray(random_weights(seed, params.head["w"].shape, params.head["w"].dtype))
    before, _ = states_before(model, params, chunk)
    found, step = [], jax.jit(model.cell.step)
    for t, s in enumerate(steps):
        x = jax.tree.map(lambda leaf, t=t: leaf[t], chunk.inputs)
        dy_dh = jacobian_of(model.cell.output, 0)(step(params.cell, before[t], x))
        found.append(np.asarray(s["dl_dhead"]["b"]) @ b @ np.asarray(dy_dh))
    return found


def eprop(model, params, chunk, feedback="symmetric", seed=0):
    """ε_t = (∂h_t/∂h_{t-1}) ε_{t-1} + dh_t/dθ_t at fixed z_t; dL/dθ = Σ_t l_t ε_t (Bellec et al.)."""
    steps = jacobians(model, params, chunk, "state")
    signals = feedback_signals(model, params, chunk, steps, feedback, seed)
    total = trace = 0.0
    for s, own, signal in zip(steps, still_jacobians(model, params, chunk), signals, strict=True):
        past = 0.0 if s["reset"] or np.isscalar(trace) else own @ trace
        trace = past + s["pull"]
        total = total + signal @ trace
    return like(params, total)


def rflo(model, params, chunk, feedback="random", seed=0, leak=1.0):
    """p_t = (1 - α) p_{t-1} + α φ'(z_t) a_t^T; dL/dW = Σ_t (B^T e_t) p_t (Murray, Equations 5 and 6), φ = tanh."""
    steps = jacobians(model, params, chunk, "state")
    signals = feedback_signals(model, params, chunk, steps, feedback, seed)
    before, _ = states_before(model, params, chunk)
    w = np.asarray(params.cell["w"])
    total = trace = np.zeros_like(w)
    for t, s in enumerate(steps):
        a = np.concatenate([before[t], chunk.inputs[t], [1.0]])
        slope = 1 - np.tanh(w @ a) ** 2
        past = 0 * trace if s["reset"] else (1 - leak) * trace
        trace = past + leak * slope[:, None] * a
        total = total + signals[t][:, None] * trace
    return {"w": total}


def local_rtrl(model, params, chunk):
    """δ_t^l M_t^l of each layer, with δ from the loss down through the layers of step t (Zucchet et al., Section 2)."""
    layers, theta = model.cell.layers, params.cell
    if not layers:
        layers, theta = (model.cell,), (theta,)
    before, _ = states_before(model, params, chunk)
    at = jax.jit(lambda *now: layers_at(model, layers, *now))
    influence = totals = [0.0] * len(layers)
    for t, reset in enumerate(resets(chunk)):
        x, target = jax.tree.map(lambda leaf, t=t: leaf[t], (chunk.inputs, chunk.targets))
        old = before[t] if model.cell.layers else (before[t],)
        found = jax.tree.map(np.asarray, at(params.head, theta, old, x, target))
        past = [0.0 if reset or np.isscalar(M) else d @ M for (d, _, _), M in zip(found, influence, strict=True)]
        influence = [p + j for (_, j, _), p in zip(found, past, strict=True)]
        totals = [g + delta @ M for (_, _, delta), M, g in zip(found, influence, totals, strict=True)]
    grads = [ravel_pytree(w)[1](jnp.asarray(g)) for w, g in zip(theta, totals, strict=True)]
    return tuple(grads) if model.cell.layers else grads[0]


def layers_at(model, layers, head, theta, old, x, target):
    """Of each layer dh^l/dh^l, dh^l/dθ_l and δ^l, at one step."""
    new, given = [], []
    for layer, w, h in zip(layers, theta, old, strict=True):
        given.append(x)
        new.append(layer.step(w, h, x))
        x = layer.output(new[-1])
    signal = jax.grad(lambda top: model.loss(head, layers[-1].output(top), target))(new[-1])
    found = []
    for i in reversed(range(len(layers))):
        (h, unravel), (w, unravel_w) = ravel_pytree(old[i]), ravel_pytree(theta[i])

        def step(h, w, i=i, unravel=unravel, unravel_w=unravel_w):
            return ravel_pytree(layers[i].step(unravel_w(w), unravel(h), given[i]))[0]

        def above(below, i=i):
            return ravel_pytree(layers[i].step(theta[i], old[i], layers[i - 1].output(below)))[0]

        delta = ravel_pytree(signal)[0]
        found.append((*jax.jacobian(step, (0, 1))(h, w), delta))
        signal = jax.vjp(above, new[i - 1])[1](delta)[0] if i else None
    return found[::-1]
